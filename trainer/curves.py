"""The picture of a training run, from its metrics file."""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read_metrics(file: Path) -> dict[str, list[tuple[int, float]]]:
    """Columns of a Lightning metrics.csv as (step, value) pairs, empty cells left out."""
    series: dict[str, list[tuple[int, float]]] = {}
    with file.open(newline="") as stream:
        for row in csv.DictReader(stream):
            for name, cell in row.items():
                if name not in ("step", "epoch") and cell:
                    series.setdefault(name, []).append((int(float(row["step"])), float(cell)))
    return series


def plot_curves(metrics_file: Path, out: Path) -> None:
    """Draw loss terms, validation figures, and throughput against the step."""
    series = read_metrics(metrics_file)
    panels = [
        ("Training loss", {"train/loss": "total", "train/forward_kl": "forward KL", "train/feature_loss": "features"}),
        ("Validation", {"val/kl": "KL (nats)", "val/top1_agreement": "top-1 agreement"}),
        ("Expected acceptance length", {"val/expected_acceptance_length": "tokens per target call, bonus included"}),
        ("Throughput", {"train/tokens_per_s": "tokens/s"}),
    ]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    for axis, (title, names) in zip(axes.flat, panels, strict=True):
        for name, label in names.items():
            points = series.get(name, [])
            axis.plot(
                [p[0] for p in points], [p[1] for p in points], label=label, marker="." if len(points) < 40 else None
            )
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0, 0].set_yscale("log")
    figure.savefig(out, dpi=110)
    plt.close(figure)
