"""Times the products of a target's layers with one to 64 rows: weights as PyTorch keeps them, and laid out for the CPU.

Both take turns on the same rows; figures are the CPU milliseconds of all products of a call, medians, and the quartiles
of the ratio. ::

    python -m benchmarks.decoding.products [--shape llama-3-8b] [--layers 1] [--dtype float32] [--threads 1]
"""

import argparse
import statistics
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kit.harness import in_turn, quartiles, run
from benchmarks.kit.shapes import SHAPES, shape_config
from moa_data.moa.nn.packed import linear, pack_weight

ROWS = (1, 2, 4, 6, 8, 16, 25, 63)


def weights_of(shape: str, n_layers: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The matrices of some layers, and the LM head, of random numbers."""
    config: Any = shape_config(shape, None)
    wide, mlp = config.hidden_size, config.intermediate_size
    keys = config.num_key_value_heads * config.head_dim
    sizes = [(wide, wide), (keys, wide), (keys, wide), (wide, wide), (mlp, wide), (mlp, wide), (wide, mlp)] * n_layers
    return [torch.randn(size, dtype=dtype) for size in (*sizes, (config.vocab_size, wide))]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time both sides for each number of rows."""
    weights = weights_of(options.shape, options.layers, getattr(torch, options.dtype))
    for weight in weights:
        pack_weight(weight)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for n_rows in options.rows:
            given = [torch.randn(n_rows, weight.shape[1], dtype=weight.dtype) for weight in weights]
            works = {
                name: lambda product=product, given=given: [
                    product(x, weight) for x, weight in zip(given, weights, strict=True)
                ]
                for name, product in (("plain", F.linear), ("packed", linear))
            }
            sides = in_turn(works, options.repeats, "cpu")
            found = {f"{name}_ms": 1e3 * statistics.median(taken) for name, taken in sides.items()}
            ratios = [one / other for one, other in zip(*sides.values(), strict=True)]
            rows.append({"n_rows": n_rows} | found | {"plain_over_packed": quartiles(ratios)})
    return {"rows": rows}


if __name__ == "__main__":
    run(
        "products", measure, shape={"choices": SHAPES, "default": "llama-3-8b"}, layers=1, threads=1, repeats=15,
        dtype={"choices": ["float32", "bfloat16"], "default": "float32"}, rows=ROWS,
    )  # fmt: skip
