"""Decoding on a simulated CUDA device gives the CPU's tokens within its budgets.

A budget is an upper bound of a round's kernel launches, or of the times that the host waits for the
device.
"""

import itertools
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch

from moa_data.moa.decoding.loop import generate_batch
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.sampling import SamplingConfig
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.device import Counts
from moa_data.tests.kit.drafters import build
from moa_data.tests.kit.models import build_model
from moa_data.tests.kit.variants import quick, quick_rows

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}
SAMPLED = SamplingConfig(temperature=0.8, top_p=0.9, top_k=20)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12]]
CONTEXT: dict[str, Any] = {"block_layers": 2, "fused_layers": (0, 1)}
DRAFTERS: dict[str, dict[str, Any]] = {
    "moa": {},
    "moa, a target layer": {"target_layer_inference": 1},
    "eagle": {},
    "eagle3": {},
    "glide": {},
    "medusa": {},
    "independent": {},
    "dflash": {},
    "dspark": {},
    "dspark on kv": {"context": "kv", **CONTEXT},
    "dspark on memory": {"context": "memory", "fused_layers": None},
}

LAUNCHES = {
    "moa": 400, "moa, a target layer": 515, "eagle": 265, "eagle3": 278, "glide": 300,
    "medusa": 150, "independent": 334, "dflash": 327, "dspark": 344, "dspark on kv": 214,
    "dspark on memory": 381,
}  # fmt: skip
"""Upper bounds of a whole greedy round: a chain of 4 drafts, and the call of a 2-layer target."""
BY_DEFAULT = ("moa, a target layer: 4", "dspark on memory: 4", "eagle: 3x3x8")


def generate(
    device: str,
    drafter: str | None,
    shape: str | None,
    prompts: list[list[int]],
    dtype: torch.dtype = torch.float32,
    max_new_tokens: int = 6,
    **settings: Any,
) -> list[list[int]]:
    target, proposer = Target(build_model(**SIZES).to(device, dtype)), None
    if drafter is not None:
        built = build(
            drafter.split(" ")[0].strip(","), build_model(**SIZES), **DRAFTERS[drafter]
        ).to(device, dtype)
        proposer = DrafterProposer(
            target, built, sampling=settings.get("sampling", SamplingConfig())
        )
    tree = None if shape is None else TreeShape.parse(shape)
    return [
        found.tokens
        for found in generate_batch(
            target,
            prompts,
            max_new_tokens=max_new_tokens,
            proposer=proposer,
            tree=tree,
            seed=3,
            **settings,
        )
    ]


class Run(NamedTuple):
    """What a generation on the simulated device gives and costs."""

    tokens: list[list[int]]
    launches: list[int]
    """Launches of each round, except for the first two, in which caches grow."""
    waits: list[int]


def measure(counts: Counts, *args: Any, **settings: Any) -> Run:
    marks: list[tuple[int, int]] = []

    def note(*_: Any) -> None:
        marks.append((counts.launches, counts.waits))
        # The lines that `worst` shows if a test fails are those of later rounds only.
        if len(marks) == 3:
            counts.launch_lines.clear()
            counts.wait_lines.clear()

    tokens = generate("cuda", *args, on_round=note, **settings)
    rounds = list(itertools.pairwise(marks[2:]))
    launches = [after[0] - before[0] for before, after in rounds]
    waits = [after[1] - before[1] for before, after in rounds]
    assert waits
    return Run(tokens, launches, waits)


@pytest.mark.parametrize(
    "case", quick([f"{d}: {s}" for d in DRAFTERS for s in ("4", "3x3x8")], BY_DEFAULT)
)
def test_a_greedy_round_gives_the_tokens_of_the_cpu_and_waits_once(
    device: Counts, case: str
) -> None:
    drafter, shape = case.split(": ")
    # The bounds of chains are those of one row.
    prompts = PROMPTS[:1] if shape == "4" else PROMPTS
    # Many drafts on keys and values are accepted, so that six tokens take two rounds.
    n_new = 12 if drafter == "dspark on kv" else 6
    found = measure(device, drafter, shape, prompts, max_new_tokens=n_new)
    assert max(found.waits) <= 1, device.worst()
    assert max(found.launches) <= (LAUNCHES[drafter] if shape == "4" else 760), device.worst()
    assert found.tokens == generate("cpu", drafter, shape, prompts, max_new_tokens=n_new)


@pytest.mark.parametrize(
    ("drafter", "shape", "most"),
    [
        (None, None, 145),
        ("moa", "3x2x4", 530),
        pytest.param("dspark", "4", 541, marks=pytest.mark.slow),
        pytest.param("eagle", "4", 461, marks=pytest.mark.slow),
    ],
)
def test_sampled_rounds_give_the_tokens_of_the_cpu(
    device: Counts, drafter: str | None, shape: str | None, most: int
) -> None:
    found = measure(device, drafter, shape, PROMPTS[:1], sampling=SAMPLED)
    assert max(found.waits) <= 3, device.worst()
    assert max(found.launches) <= most, device.worst()
    on_device, expected = (
        generate(kind, drafter, shape, PROMPTS, sampling=SAMPLED) for kind in ("cuda", "cpu")
    )
    assert on_device == expected


@pytest.mark.parametrize(
    ("drafter", "most"),
    quick_rows(
        [("moa", 50), ("eagle", 36), ("eagle3", 38), ("independent", 55)],
        [("eagle", 36), ("independent", 55)],
    ),
)
def test_launches_of_a_drafted_token(device: Counts, drafter: str, most: int) -> None:
    few, many = (
        median(measure(device, drafter, shape, PROMPTS[:1], torch.bfloat16).launches)
        for shape in ("5", "7")
    )
    assert (many - few) / 2 <= most, device.worst()


def test_a_plain_step_launches_as_much_as_the_model_alone(device: Counts) -> None:
    """Scaled up to 32 layers the bound is 1,309 kernels.

    transformers launches 1,303 with its own cache.
    """
    found = measure(device, None, None, PROMPTS[:1], torch.bfloat16)
    assert max(found.waits) <= 1, device.worst()
    assert max(found.launches) <= 2 * 40 + 29, device.worst()


@pytest.mark.parametrize(("drafter", "shape"), [("eagle", "10@0.000001"), ("dspark", "7c0.01")])
def test_chains_that_may_stop_ask_seldom(device: Counts, drafter: str, shape: str) -> None:
    found = measure(device, drafter, shape, PROMPTS)
    assert max(found.waits) <= 3, device.worst()
    assert found.tokens == generate("cpu", drafter, shape, PROMPTS)
