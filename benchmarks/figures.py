"""Draws the picture of the README and of docs/results.md from the figures in benchmarks/results.

python benchmarks/figures.py
"""

import json

import matplotlib
from tables import RESULTS, ROOT

matplotlib.use("agg")
from matplotlib import pyplot

PICTURE = ROOT / "docs" / "images" / "moa-and-eagle.png"
DRAFTS = "chain of 10"
SERIES = {"moa": ("Mixture of Attentions", "#c2410c"), "eagle": ("EAGLE-2", "#475569")}


def main() -> None:
    """Draw acceptance length by training tokens: a line through the means of the seeds, a dot for each seed."""
    rows = json.loads((RESULTS / "drafters-eagle.json").read_text())["rows"]
    rows = [row for row in rows if row["drafts"] == DRAFTS]
    lengths = sorted({float(row["tokens"].split()[0]) for row in rows})
    figure, axes = pyplot.subplots(figsize=(8.5, 3.6), layout="constrained")
    for key, (label, color) in SERIES.items():
        by_length = [[row[key] for row in rows if float(row["tokens"].split()[0]) == n] for n in lengths]
        means = [sum(values) / len(values) for values in by_length]
        axes.plot(lengths, means, color=color, linewidth=2.5)
        for n, values in zip(lengths, by_length, strict=True):
            axes.plot([n] * len(values), values, "o", color=color, markersize=6)
        for n, mean in zip(lengths, means, strict=True):
            above = 9 if key == "moa" else -18
            axes.annotate(f"{mean:.1f}", (n, mean), (0, above), textcoords="offset points", color=color, ha="center")
        axes.annotate(label, (lengths[-1], means[-1]), (14, -4), textcoords="offset points", color=color, weight="bold")
    axes.set(xscale="log", xlim=(0.45, 19), ylim=(1, 7.6), xlabel="training tokens, all from one store")
    axes.set_xticks(lengths, [f"{n:g} M" for n in lengths])
    axes.minorticks_off()
    axes.set_ylabel("tokens per target call (plain: 1)")
    axes.set_title(
        "Mixture of Attentions learns faster than EAGLE-2; with more training the distance shrinks", loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e8f0")
    PICTURE.parent.mkdir(exist_ok=True)
    # Fixed metadata: equal figures give equal bytes.
    figure.savefig(PICTURE, dpi=200, metadata={"Software": None})


if __name__ == "__main__":
    main()
