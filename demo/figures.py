"""Draws the pictures of the demo's report; those of the evaluation come from `evaluation.views`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from ..storage.care.summary import StoreSummary
from .target import TargetReport
from .timeline import Timeline

DPI = 130


def target_curves(report: TargetReport, path: Path) -> None:
    """Draw the target's training and held-out loss against the step."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*report.train_loss, strict=True), label="training (answers, prompts at a tenth)")
    axes.plot(*zip(*report.validation_loss, strict=True), marker=".", label="held-out answers")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Target")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=DPI)


def bytes_per_token(summary: StoreSummary, path: Path) -> None:
    """Draw the raw and the stored bytes per token of each field, on a logarithmic axis."""
    fields = sorted(summary.fields, key=lambda item: -item.raw_bytes)
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for shift, label, sizes in (
        (-0.2, "raw", [item.raw_bytes for item in fields]),
        (0.2, "stored", [item.stored_bytes for item in fields]),
    ):
        per_token = [size / summary.n_tokens for size in sizes]
        bars = axes.bar([k + shift for k in range(len(fields))], per_token, 0.4, label=label)
        axes.bar_label(bars, [f"{size:,.1f}" for size in per_token], fontsize=8)
    axes.set_yscale("log")
    axes.set_xticks(range(len(fields)), [item.name for item in fields])
    axes.set_ylabel("bytes per token")
    axes.set_title(f"Store: {summary.bytes_per_token:,.0f} bytes per token, {summary.ratio:.3f} of raw")
    axes.legend()
    figure.savefig(path, dpi=DPI)


def answer_over_time(timeline: Timeline, path: Path) -> None:
    """Draw the tokens of an answer against time: shown, verified, and the cuts of the network."""
    seconds = [point.seconds for point in timeline.points]
    shown = [point.n_shown for point in timeline.points]
    verified = [point.n_verified for point in timeline.points]
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    for number, (went, came) in enumerate(timeline.cuts):
        label = "no network" if number == 0 else None
        axes.axvspan(went, seconds[-1] if came is None else came, color="tab:red", alpha=0.12, lw=0, label=label)
    axes.step(seconds, verified, where="post", color="tab:blue", label="verified")
    axes.step(seconds, shown, where="post", color="tab:orange", ls="--", lw=1, label="shown")
    axes.fill_between(seconds, verified, shown, step="post", color="tab:orange", alpha=0.35, label="not verified yet")
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens of the answer")
    axes.set_ylim(bottom=0)
    axes.set_title("An answer over 4G that loses the network")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=DPI)
