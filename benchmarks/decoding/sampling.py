"""Times sampling at a large vocabulary: draws, choices by keyed noise, and whole verifications.

A draw takes turns with ``torch.multinomial``. A choice by keyed noise, which serving uses, takes
turns with a function that computes the noise of every token. Figures are medians, and quartiles of
the ratio. On the CPU, the time of a choice is the CPU time of the process.

    python -m benchmarks.decoding.sampling [--vocabulary 128256] [--device cpu] [--repeats 60]
"""

import argparse
import statistics
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.kit.harness import in_turn, quartiles, run
from moa_data.moa.decoding.sampling import (
    SamplingConfig,
    accept_sampled,
    choose,
    distribution,
    draw_rows,
    noise,
)
from moa_data.moa.decoding.tree import DraftTree

CONFIGS = {
    "temperature 1": SamplingConfig(1.0),
    "temperature 0.8, top-p 0.9": SamplingConfig(0.8, top_p=0.9),
    "temperature 1, top-k 50": SamplingConfig(1.0, top_k=50),
}
CHOICES = CONFIGS | {"temperature 0.8, top-k 50, top-p 0.9": SamplingConfig(0.8, 0.9, 50)}


def choose_by_all_noise(logits: Tensor, config: SamplingConfig, position: int) -> int:
    """Choose the same token as :func:`choose`, but compute the noise of every token."""
    probability = distribution(logits, [], config)
    every = noise(0, position, np.arange(len(probability))).to(probability.device)
    return int((probability.log() + every).argmax())


def measure_choices(logits: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Time choices of one token after logits [V]."""
    figures: dict[str, Any] = {}
    for name, config in CHOICES.items():
        positions = {"all noise": count(), "choose": count()}
        works = {
            "all noise": lambda config=config, at=positions["all noise"]: choose_by_all_noise(
                logits, config, next(at)
            ),
            "choose": lambda config=config, at=positions["choose"]: choose(
                logits, [], config, 0, next(at)
            ),
        }
        sides = in_turn(works, options.repeats, options.device)
        for side, taken in sides.items():
            figures[f"{side}, {name}, ms"] = 1e3 * statistics.median(taken)
        ratios = [one / other for one, other in zip(*sides.values(), strict=True)]
        figures[f"choose, {name}, ratio_quartiles"] = quartiles(ratios)
    return figures


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time draws in turns, then verifications of a chain and of a tree.

    The drafts of the chain are the most likely tokens. The drafts of the tree are random tokens, so
    nearly all of them are rejected.
    """
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(61, options.vocabulary, generator=generator) * 3).to(options.device)
    probability = distribution(logits[0], [], CONFIGS["temperature 1"])
    on_host = probability.cpu()
    works = {
        "multinomial": lambda: int(torch.multinomial(on_host, 1, generator=generator)),
        "draw": lambda: draw_rows(probability[None], [generator]),
    }
    sides = in_turn(works, options.repeats, options.device, on_the_wall=True)
    ratios = [one / other for one, other in zip(*sides.values(), strict=True)]
    figures: dict[str, Any] = {
        f"{name}_ms": 1e3 * statistics.median(taken) for name, taken in sides.items()
    }
    figures["ratio_quartiles"] = quartiles(ratios)
    chain = DraftTree.chain(logits[:5].argmax(dim=-1)[None])
    tokens = torch.randint(options.vocabulary, (1, 60), generator=generator).to(options.device)
    # Six levels of ten nodes: each node has two children.
    parents = [[-1] * 10 + [node // 2 + 10 * level for level in range(5) for node in range(10)]]
    tree = DraftTree(tokens, torch.tensor(parents, device=options.device))
    for name, config in CONFIGS.items():
        for kind, drafts in (("chain_of_5", chain), ("tree_of_60", tree)):
            verify = partial(accept_sampled, drafts, 0, logits, [1], config, generator)
            (taken,) = in_turn(
                {"": verify}, options.repeats, options.device, on_the_wall=True
            ).values()
            figures[f"verify {kind}, {name}, ms"] = 1e3 * statistics.median(taken)
    return {"figures": figures | measure_choices(logits[0], options)}


def main() -> None:
    """Measure, print and write the record."""
    run("sampling", measure, vocabulary=128_256, device="cpu", repeats=60, threads=1)


if __name__ == "__main__":
    main()
