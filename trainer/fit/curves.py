"""Plots of a training run, from its metrics files."""

import contextlib
import csv
import io
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ...storage.disk.durable import write_atomic
from ..files import METRICS_FILE


def keep_earlier_metrics(run: Path) -> None:
    """Move metrics.csv of an earlier invocation aside; Lightning's logger would delete it."""
    if (run / METRICS_FILE).is_file():
        earlier = sorted(run.glob("metrics-[0-9][0-9][0-9].csv"))
        index = int(earlier[-1].stem[-3:]) + 1 if earlier else 0  # not their number: one of them may be gone
        (run / METRICS_FILE).rename(run / f"metrics-{index:03d}.csv")


def read_metrics(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Read all metrics files of a run: column -> (step, value) pairs; a later invocation replaces what it repeats."""
    series: dict[str, dict[int, float]] = {}
    for file in [*sorted(run.glob("metrics-*.csv")), run / METRICS_FILE]:
        if not file.is_file():
            continue
        with file.open(newline="", encoding="utf-8", errors="replace") as stream:
            whole = [line for line in stream if line.endswith("\n")]  # a kill can tear the last one
        for row in csv.DictReader(whole):
            for name, cell in row.items():
                if name in ("step", "epoch") or not cell:
                    continue
                # A plot must not end a training: what is no number is left out.
                with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
                    step, value = int(float(row["step"])), float(cell)
                    series.setdefault(name, {})[step] = value
    return {name: sorted(points.items()) for name, points in series.items()}


def plot_curves(run: Path, out: Path) -> None:
    """Plot loss terms, validation metrics, and throughput of a run against the step."""
    series = read_metrics(run)
    panels = [
        ("Training loss", {"train/loss": "total, weighted", "train/feature_loss": "features"}),
        # As in the paper, the target's entropy is not subtracted: its value is not comparable with the KL below.
        ("Training: KL + the target's entropy, or LK loss", {"train/forward_kl": "nats"}),
        ("Validation: KL from the target, entropy subtracted", {"val/kl": "nats"}),
        ("Validation: top-1 agreement", {"val/top1_agreement": "share of positions"}),
        ("Expected acceptance length", {"val/expected_acceptance_length": "tokens per target call, bonus included"}),
        ("Throughput", {"train/tokens_per_s": "tokens/s"}),
    ]
    figure, axes = plt.subplots(3, 2, figsize=(11, 10), constrained_layout=True)
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
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    plt.close(figure)
    write_atomic(out, picture.getvalue())
