"""Times the matrix products of a target's layers with 1 to 64 rows, with plain and packed weights.

Plain weights have PyTorch's own layout, and packed weights are laid out for the CPU. There are two
kinds of packed weights. "packed" uses float16 only if float16 can represent the weights exactly,
and float32 otherwise. "halves" rounds weights to float16, as for drafters. All sides take turns on
the same rows. Figures are medians of the CPU milliseconds of all products of a call, and the
quartiles of the ratios of plain to packed. ::

    python -m benchmarks.decoding.products [--shape llama-3-8b] [--layers 1] [--dtype float32]
        [--threads 1]
"""

import argparse
import copy
import statistics
from typing import Any

import torch
from torch import nn

from benchmarks.kit.harness import in_turn, quartiles, run
from benchmarks.kit.shapes import SHAPES, shape_config
from moa_data.moa.nn.packed import pack

ROWS = (1, 2, 4, 6, 8, 16, 25, 63)


def matrices(shape: str, n_layers: int, dtype: torch.dtype) -> nn.ModuleList:
    """Make the linear layers of some decoder layers, and the LM head, with random weights."""
    config: Any = shape_config(shape, None)
    wide, mlp = config.hidden_size, config.intermediate_size
    keys = config.num_key_value_heads * config.head_dim
    sizes = [
        (wide, wide),
        (keys, wide),
        (keys, wide),
        (wide, wide),
        (mlp, wide),
        (mlp, wide),
        (wide, mlp),
    ] * n_layers
    sizes.append((config.vocab_size, wide))
    return nn.ModuleList(nn.Linear(given, made, bias=False, dtype=dtype) for made, given in sizes)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time all sides for each number of rows."""
    dtype = getattr(torch, options.dtype)
    plain = matrices(options.shape, options.layers, dtype).requires_grad_(False)
    sides: dict[str, nn.ModuleList] = {"plain": plain}
    for name, is_exact in (("packed", True), ("halves", False)):
        sides[name] = copy.deepcopy(plain, {id(weight): weight for weight in plain.parameters()})
        pack(sides[name], is_exact)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for n_rows in options.rows:
            given = [
                torch.randn(n_rows, weight.shape[1], dtype=dtype) for weight in plain.parameters()
            ]
            works = {
                name: lambda layers=layers, given=given: [
                    layer(x) for x, layer in zip(given, layers, strict=True)
                ]
                for name, layers in sides.items()
            }
            taken = in_turn(works, options.repeats, "cpu")
            found = {f"{name}_ms": 1e3 * statistics.median(times) for name, times in taken.items()}
            ratios = {
                f"plain_over_{name}": quartiles(
                    [a / b for a, b in zip(taken["plain"], taken[name], strict=True)]
                )
                for name in ("packed", "halves")
            }
            rows.append({"n_rows": n_rows} | found | ratios)
    return {"rows": rows}


if __name__ == "__main__":
    run(
        "products", measure, shape={"choices": SHAPES, "default": "llama-3-8b"}, layers=1,
        threads=1, repeats=15, dtype={"choices": ["float32", "bfloat16"], "default": "float32"},
        rows=ROWS,
    )  # fmt: skip
