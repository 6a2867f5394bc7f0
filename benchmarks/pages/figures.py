"""Draws pictures of the documentation from the figures in benchmarks/results.

python -m benchmarks.pages.figures
"""

import json
from collections import defaultdict
from statistics import fmean
from typing import Any

import matplotlib

from benchmarks.pages.tables import RESULTS, ROOT

matplotlib.use("agg")
from matplotlib import pyplot

IMAGES = ROOT / "docs" / "images"
CUTS = {
    "moa": ("Mixture of Attentions, N = 0", "#c2410c", "-"),
    "moa-n1": ("N = 1", "#c2410c", "--"),
    "moa-n3": ("N = 3", "#c2410c", ":"),
    "eagle": ("EAGLE-2", "#475569", "-"),
    "independent": ("independent", "#94a3b8", "-"),
}
SHOWN_TOKENS = 24
ACCENT = "#c2410c"
COMPARED = {
    "Mixture of Attentions": (ACCENT, 7),
    "Mixture of Attentions of every second layer, one pass": ("#ea580c", 5),
    "EAGLE-3": ("#0f766e", -6),
    "EAGLE-2": ("#475569", -2),
    "EAGLE-2 as published": ("#94a3b8", -4),
    "DSpark": ("#1d4ed8", 2),
    "DSpark on keys and values": ("#7c3aed", -7),
    "DFlash": ("#64748b", -3),
}
"""Maps each drafter of the picture to its color, and to the offset of its name from its last
point."""


COMPARED_TITLE = (
    "At equal weights and data: Mixture of Attentions, up to 2 M tokens EAGLE-2 as well"
)


def main() -> None:
    """Draw all pictures."""
    IMAGES.mkdir(exist_ok=True)
    save(tokens_after_a_cut(), "after-a-cut.png")
    save(drafters_by_tokens(), "drafters.png")


def save(figure: Any, name: str) -> None:
    """Write a figure. The metadata is fixed, so that equal figures give equal bytes."""
    figure.savefig(IMAGES / name, dpi=200, metadata={"Software": None})


def tokens_after_a_cut() -> Any:
    """Draw how long clients continue correctly without a network.

    The curve at n is the share of cuts after which at least n tokens equal the target's.
    """
    right = json.loads((RESULTS / "network-cuts.json").read_text())["right_each"]
    figure, axes = pyplot.subplots(figsize=(8.5, 3.4), layout="constrained")
    for drafter, (label, color, style) in CUTS.items():
        found = right[drafter]
        shares = [
            100 * sum(n >= length for n in found) / len(found) for length in range(SHOWN_TOKENS + 1)
        ]
        axes.step(
            range(SHOWN_TOKENS + 1),
            shares,
            style,
            where="mid",
            color=color,
            linewidth=2,
            label=label,
        )
    axes.set(xlim=(0, SHOWN_TOKENS), ylim=(0, 102), xlabel="tokens written without a network")
    axes.set_ylabel("cuts with all of them right, %")
    axes.set_title(
        "With some of the target's layers, what a client writes alone is right for longer",
        loc="left",
    )
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e8f0")
    return figure


def drafters_by_tokens() -> Any:
    """Draw acceptance length by training tokens.

    There is a dot for each seed, and a line through the means of the seeds.
    """
    rows = json.loads((RESULTS / "drafters-code-and-math-2.json").read_text())["rows"]
    figure, axes = pyplot.subplots(figsize=(8.5, 4.4), layout="constrained")
    for name, (color, above) in COMPARED.items():
        by_tokens: dict[float, list[float]] = defaultdict(list)
        for row in rows:
            if row["drafter"] == name:
                by_tokens[float(row["tokens"].split()[0])].append(row["chain7"][0])
        means = [fmean(by_tokens[tokens]) for tokens in sorted(by_tokens)]
        axes.plot(sorted(by_tokens), means, "-", color=color, linewidth=2)
        for tokens, lengths in by_tokens.items():
            axes.plot([tokens] * len(lengths), lengths, "o", color=color, markersize=4)
        axes.annotate(
            name.replace("Mixture of Attentions of", "of"), (max(by_tokens), means[-1]),
            (8, above - 3), textcoords="offset points", color=color,
            weight="bold" if color == ACCENT else "normal",
        )  # fmt: skip
    axes.set(xscale="log", xlim=(0.5, 32), ylim=(1.8, 5.5))
    axes.set_xticks([0.57, 2, 8], ["0.57 M", "2.0 M", "8.0 M"])
    axes.minorticks_off()
    axes.set_xlabel("tokens of training from a store; equal weights; dots are seeds")
    axes.set_ylabel("tokens per target call (plain: 1)")
    axes.set_title(COMPARED_TITLE, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e8f0")
    return figure


if __name__ == "__main__":
    main()
