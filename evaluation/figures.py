"""Figures of an evaluation report, as PNG files."""

from pathlib import Path

from matplotlib.figure import Figure

from .report import EvaluationReport

_DPI = 150


def acceptance_histogram(report: EvaluationReport, path: Path) -> None:
    """Draw how many tokens the target calls of each drafting method committed.

    Args:
        report: a report; the baseline is left out where there is another method.
        path: of the PNG file.
    """
    summaries = report.methods[1:] or report.methods
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(summaries)
    n_bars = max((len(summary.accepted_drafts) for summary in summaries), default=0)
    for index, summary in enumerate(summaries):
        shares = [count / max(1, summary.n_target_calls) for count in summary.accepted_drafts]
        places = [k + 1 + (index - (len(summaries) - 1) / 2) * width for k in range(len(shares))]
        length = "-" if summary.acceptance_length is None else f"{summary.acceptance_length:.2f}"
        bars = axes.bar(places, shares, width, label=f"{summary.method}, mean {length}")
        axes.bar_label(bars, [f"{share:.0%}" for share in shares], fontsize=8)
    axes.set_xticks(range(1, n_bars + 1))
    axes.set_xlabel("tokens committed by a target call, bonus token included")
    axes.set_ylabel("share of target calls")
    axes.set_title("Acceptance")
    axes.legend()
    _save(figure, path)


def speed_figure(report: EvaluationReport, path: Path) -> None:
    """Draw each method's tokens per second, the total as a bar and every answer as a dot.

    Args:
        report: a report.
        path: of the PNG file.
    """
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.subplots()
    names = [summary.method for summary in report.methods]
    bars = axes.bar(names, [summary.tokens_per_s for summary in report.methods], 0.6, color="C0", alpha=0.6)
    axes.bar_label(
        bars,
        [f"{summary.tokens_per_s:.0f} ({summary.ratio:.2f}x)" for summary in report.methods],
        label_type="center",
    )
    rows = report.measurement.rows
    for place, name in enumerate(names):
        # Spread by the row's number, so that dots of equal speed stay apart and the figure does not change by chance.
        spread = [place - 0.2 + 0.4 * index / max(1, len(rows) - 1) for index in range(len(rows))]
        axes.plot(spread, [row.runs[name].tokens_per_s for row in rows], ".", color="black", markersize=3)
    axes.set_ylabel("tokens per second")
    axes.set_title(f"Speed on {report.environment['device']}")
    _save(figure, path)


def write_figures(report: EvaluationReport, path: Path) -> list[Path]:
    """Write both figures beside a report.

    Args:
        report: a report.
        path: of its JSON file: ``report.json`` gives ``report_acceptance.png`` and ``report_speed.png``.

    Returns:
        The files.
    """
    acceptance, speed = (path.with_name(f"{path.stem}_{name}.png") for name in ("acceptance", "speed"))
    acceptance_histogram(report, acceptance)
    speed_figure(report, speed)
    return [acceptance, speed]


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The library's version and the like would make equal figures differ.
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
