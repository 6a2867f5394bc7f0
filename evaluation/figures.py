"""Draws the figures of evaluation reports as PNG files: one message each, legible at 850 pixels."""

from pathlib import Path

from matplotlib.figure import Figure

from .disconnection import TARGET
from .disconnection_report import DisconnectionReport
from .report import EvaluationReport, MethodSummary

_WIDTH, _DPI = 6.8, 125  # inches, 850 pixels


def speed_figure(report: EvaluationReport, path: Path) -> None:
    """Draw each method's tokens/s over the baseline's as a bar, its acceptance length written beside it."""
    summaries = report.methods[1:] or report.methods
    figure = Figure(figsize=(_WIDTH, 1.1 + 0.38 * len(summaries)), layout="constrained")
    axes = figure.subplots()
    for place, summary in enumerate(reversed(summaries)):
        axes.barh(place, summary.ratio, 0.65, xerr=_arms(summary), color=f"C{_color(report, summary)}", alpha=0.8,
                  error_kw={"ecolor": "0.3", "capsize": 3})  # fmt: skip
        length = "-" if summary.acceptance_length is None else f"{summary.acceptance_length:.2f} tokens per call"
        axes.text(0.02, place, length, va="center", fontsize=9)
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    axes.set_yticks(range(len(summaries)), [summary.method for summary in reversed(summaries)])
    axes.set_xlim(left=0)
    axes.set_xlabel(f"tokens/s over {report.methods[0].method} decoding, on {report.environment['device']}")
    _save(figure, path)


def category_figure(report: EvaluationReport, path: Path) -> None:
    """Draw each method's speed ratio by category with its interval; needs several categories and methods."""
    names, methods = list(report.categories), report.methods[1:]
    figure = Figure(figsize=(_WIDTH, 1.3 + 0.32 * len(names)), layout="constrained")
    axes = figure.subplots()
    for index, method in enumerate(methods, start=1):
        of_method = [report.categories[name][index] for name in names]
        places = [place + (index - (len(methods) + 1) / 2) * 0.6 / len(methods) for place in range(len(names))]
        arms = [_arms(summary) or [[0.0], [0.0]] for summary in of_method]
        axes.errorbar(
            [summary.ratio for summary in of_method], places, fmt="o", capsize=2, markersize=4, label=method.method,
            xerr=[[low[0] for low, _ in arms], [high[0] for _, high in arms]],
        )  # fmt: skip
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens/s over {report.methods[0].method} decoding")
    figure.legend(loc="outside upper center", ncols=min(4, len(methods)))
    _save(figure, path)


def disconnection_figure(report: DisconnectionReport, path: Path) -> None:
    """Draw each drafter's agreement with the target against the tokens since the cut, with its interval."""
    figure = Figure(figsize=(_WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    for index, summary in enumerate(one for one in report.writers if one.writer != TARGET):
        # A few tokens behind the longest answers say nothing.
        means = {
            place: one.mean
            for place, one in enumerate(summary.agreement_by_offset, start=1)
            if one.mean is not None and one.n > 1
        }
        axes.plot(list(means), list(means.values()), "o-", color=f"C{index}", markersize=3, label=summary.writer)
        intervals = {place: summary.agreement_by_offset[place - 1].interval for place in means}
        bounded = {place: interval for place, interval in intervals.items() if interval is not None}
        low, high = [pair[0] for pair in bounded.values()], [pair[1] for pair in bounded.values()]
        axes.fill_between(list(bounded), low, high, color=f"C{index}", alpha=0.15, linewidth=0)
    axes.set_ylim(0, 1)
    axes.set_xlabel("tokens since the target was last reached")
    axes.set_ylabel("agreement with the target")
    axes.legend()
    _save(figure, path)


def write_figures(report: EvaluationReport, path: Path) -> None:
    """Write the figures beside a report: ``report.json`` gives ``report.png`` and perhaps ``report_categories.png``."""
    speed_figure(report, path.with_suffix(".png"))
    if len(report.categories) > 1 and len(report.methods) > 1:
        category_figure(report, path.with_name(f"{path.stem}_categories.png"))


def _arms(summary: MethodSummary) -> list[list[float]] | None:
    """Return how far the interval reaches to either side of the ratio, as matplotlib takes it."""
    if summary.ratio_interval is None:
        return None
    low, high = summary.ratio_interval
    return [[max(0.0, summary.ratio - low)], [max(0.0, high - summary.ratio)]]


def _color(report: EvaluationReport, summary: MethodSummary) -> int:
    """Return the number of a colour, one for all methods of a drafter."""
    names = list(report.drafters) if len(report.drafters) > 1 else []
    return next((place for place, name in enumerate(names, start=1) if summary.method.endswith(f" {name}")), 0)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The library's version and the like would make equal figures differ.
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
