"""Draws pictures of the documentation from the figures in benchmarks/results.

python -m benchmarks.pages.figures
"""

import json
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
COMPARED_ON = "code-and-math"
COMPARED = {
    "Mixture of Attentions": (ACCENT, (8, -3)),
    "Mixture of Attentions of every second layer, one pass": ("#ea580c", (8, -3)),
    "EAGLE-3": ("#0f766e", (-84, -3)),
    "EAGLE-2": ("#475569", (8, -3)),
    "DSpark": ("#1d4ed8", (8, -6)),
    "DSpark on keys and values of later layers": ("#7c3aed", (8, 2)),
    "DSpark on a memory": ("#9333ea", (8, -3)),
    "DFlash": ("#64748b", (8, -3)),
}
"""Drafters of the picture: colour, and where the name stands from its last point."""
COMPARED_TITLE = "At equal data and at equal seconds, Mixture of Attentions commits most tokens a target call"


def main() -> None:
    """Draw all pictures."""
    IMAGES.mkdir(exist_ok=True)
    save(tokens_after_a_cut(), "after-a-cut.png")
    save(drafters_by_seconds(), "drafters.png")


def save(figure: Any, name: str) -> None:
    """Write a figure; fixed metadata: equal figures give equal bytes."""
    figure.savefig(IMAGES / name, dpi=200, metadata={"Software": None})


def tokens_after_a_cut() -> Any:
    """Draw how far clients wrote what the target would have: the share of cuts by the tokens right since the cut."""
    right = json.loads((RESULTS / "network-cuts.json").read_text())["right_each"]
    figure, axes = pyplot.subplots(figsize=(8.5, 3.4), layout="constrained")
    for drafter, (label, color, style) in CUTS.items():
        found = right[drafter]
        shares = [100 * sum(n >= length for n in found) / len(found) for length in range(SHOWN_TOKENS + 1)]
        axes.step(range(SHOWN_TOKENS + 1), shares, style, where="mid", color=color, linewidth=2, label=label)
    axes.set(xlim=(0, SHOWN_TOKENS), ylim=(0, 102), xlabel="tokens written without a network")
    axes.set_ylabel("cuts with all of them right, %")
    axes.set_title("With some of the target's layers, what a client writes alone is right for longer", loc="left")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e8f0")
    return figure


def drafters_by_seconds() -> Any:
    """Draw what each drafter's training buys: acceptance length by processor seconds, a line from less to more data."""
    rows = json.loads((RESULTS / "leaderboard.json").read_text())["rows"]
    rows = [row for row in rows if row["target"] == COMPARED_ON and row["seed"] == 0]
    figure, axes = pyplot.subplots(figsize=(8.5, 4.2), layout="constrained")
    for name, (color, offset) in COMPARED.items():
        own = sorted((row for row in rows if row["drafter"] == name), key=lambda row: int(row["tokens"]))
        seconds, lengths = [row["seconds"] for row in own], [row["chain7"][0] for row in own]
        axes.plot(seconds, lengths, "o-", color=color, linewidth=2, markersize=5)
        axes.annotate(
            f"{name}, {own[-1]['speed']:.2f} x", (seconds[-1], lengths[-1]), offset,
            textcoords="offset points", color=color, weight="bold" if color == ACCENT else "normal",
        )  # fmt: skip
    axes.set(xscale="log", xlim=(100, 7000), ylim=(1.8, 4.6))
    axes.set_xlabel("processor seconds of training; dots: 0.57 M and 2.0 M tokens of a store; x: tokens/s over plain")
    axes.set_xticks([100, 200, 400, 800, 1600], ["100", "200", "400", "800", "1,600"])
    axes.minorticks_off()
    axes.set_ylabel("tokens per target call (plain: 1)")
    axes.set_title(COMPARED_TITLE, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e8f0")
    return figure


if __name__ == "__main__":
    main()
