"""The bytes in docs/protocol.md are those of the code."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from moa_data.moa.drafters.registry import drafter_class
from moa_data.serving.wire import CODECS, STATUSES, bytes_per_position

PAGE = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text(encoding="utf-8")
LLAMA_3_8B = LlamaConfig(
    hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32, intermediate_size=14336,
    vocab_size=128256, max_position_embeddings=8192,
)  # fmt: skip
DRAFTERS: list[tuple[str, str, dict[str, Any]]] = [
    ("`moa`", "moa", {}),
    ("`moa`, one group of layers (the paper)", "moa", {"layer_groups": 1}),
    ("`moa`, 1 target layer", "moa", {"target_layer_inference": 1}),
    ("`moa`, 3 target layers", "moa", {"target_layer_inference": 3}),
    ("`eagle`", "eagle", {}),
    ("`independent`", "independent", {}),
]


def test_bytes_of_contexts() -> None:
    rows = []
    for name, kind, sizes in DRAFTERS:
        drafter_type = drafter_class(kind)
        with torch.device("meta"):
            width = drafter_type(drafter_type.config_class.from_target(LLAMA_3_8B, **sizes)).context_width
        assert width is not None
        n_bytes = [bytes_per_position(codec, width) for codec in CODECS]
        cells = [f"{number:,}" for number in (width, *n_bytes)]
        rows.append(f"| {name} | {' | '.join(cells)} | {n_bytes[1] * 8 / 20e6 * 1000:.1f} |")
    assert rows == [line for line in PAGE.splitlines() if re.match(r"\| `(moa|eagle|independent)`", line)]


def test_codes_are_those_of_the_server() -> None:
    found = dict(re.findall(r"^\| `(\w+)` \| `([A-Z_]+)` \|", PAGE, re.MULTILINE))
    assert found == {code: status.name for code, status in STATUSES.items()}
