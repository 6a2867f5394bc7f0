"""Every benchmark can be imported, and the drafters in comparisons have equal weights."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import LlamaConfig

from moa_data.moa.drafters.registry import drafter_class
from moa_data.moa.targets.facts import TargetFacts

ROOT = Path(__file__).parents[2]
N_WEIGHTS = 1_890_000


def test_every_file_can_be_imported_and_says_what_it_measures(
    benchmark: Callable[[str], ModuleType],
) -> None:
    names = sorted(
        f"{path.parent.name}.{path.stem}" for path in (ROOT / "benchmarks").glob("*/*.py")
    )
    assert len(names) > 20
    assert all(benchmark(name).__doc__ for name in names)


def test_drafters_have_equal_weights(benchmark: Callable[[str], ModuleType]) -> None:
    target = LlamaConfig(
        vocab_size=4096, hidden_size=384, intermediate_size=1152, num_hidden_layers=8,
        num_attention_heads=6, num_key_value_heads=2,
    )  # fmt: skip
    drafters = benchmark("training.drafters")
    for name, (_, settings) in (drafters.DRAFTERS | drafters.ABLATIONS).items():
        kind = drafter_class(settings["drafter"])
        sizes: Any = kind.config_class
        given = {key: value for key, value in settings.items() if key in sizes.__dataclass_fields__}
        drafter = kind(sizes.from_target(TargetFacts.of(target), **given))
        n_weights = sum(weight.numel() for weight in drafter.parameters())
        assert abs(n_weights / N_WEIGHTS - 1) < 0.015, f"{name}: {n_weights:,}"
