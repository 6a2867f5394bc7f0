"""Times sampling at a large vocabulary: the draw of a token beside ``torch.multinomial``, and a whole verification.

Both draws take turns on the same distributions; figures are medians and the quartiles of the ratio.

    python -m benchmarks.decoding.sampling [--vocabulary 128256] [--device cpu] [--repeats 60]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kit.records import add_out_option, settings_of, write_record
from moa_data.moa.decoding.sampling import SamplingConfig, accept_sampled, distribution, draw
from moa_data.moa.decoding.tree import DraftTree, StaticTree

CONFIGS = {
    "temperature 1": SamplingConfig(1.0),
    "temperature 0.8, top-p 0.9": SamplingConfig(0.8, top_p=0.9),
    "temperature 1, top-k 50": SamplingConfig(1.0, top_k=50),
}


def host_ms(work: Callable[[], object]) -> float:
    """Milliseconds until the result of one call is on the host."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time draws in turns, then verifications of a chain and a tree whose drafts are all rejected or all likely."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(61, options.vocabulary, generator=generator) * 3).to(options.device)
    probability = distribution(logits[0], [], CONFIGS["temperature 1"])
    on_host = probability.cpu()
    sides: tuple[list[float], list[float]] = ([], [])
    for _ in range(options.repeats):
        sides[0].append(host_ms(lambda: int(torch.multinomial(on_host, 1, generator=generator))))
        sides[1].append(host_ms(lambda: draw(probability, generator)))
    ratios = statistics.quantiles([one / other for one, other in zip(*sides, strict=True)], n=4)
    figures: dict[str, Any] = {
        "multinomial_ms": statistics.median(sides[0]),
        "draw_ms": statistics.median(sides[1]),
        "ratio_quartiles": ratios,
    }
    chain = DraftTree.chain(logits[:5].argmax(dim=-1)[None])
    shape = StaticTree.likeliest(60)
    tokens = torch.randint(options.vocabulary, (1, 60), generator=generator).to(options.device)
    tree = DraftTree(tokens, torch.tensor([shape.parents], device=options.device))
    for name, config in CONFIGS.items():
        for kind, drafts in (("chain_of_5", chain), ("tree_of_60", tree)):
            taken = [
                host_ms(lambda: accept_sampled(drafts, 0, logits, [1], config, generator))  # noqa: B023  # called here
                for _ in range(options.repeats)
            ]
            figures[f"verify {kind}, {name}, ms"] = statistics.median(taken)
    return figures


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description="Time sampling at a large vocabulary.")
    parser.add_argument("--vocabulary", type=int, default=128_256, help="tokens (default 128256, as Llama-3)")
    parser.add_argument("--device", default="cpu", help="device of the logits (default cpu)")
    parser.add_argument("--repeats", type=int, default=60, help="calls of each side (default 60)")
    add_out_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(options)
    for name, value in figures.items():
        print(f"{name:48} {value}")
    print(write_record(options.out, "sampling", {"figures": figures, "settings": settings_of(options)}))


if __name__ == "__main__":
    main()
