"""Figures of an evaluation report, as PNG files."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from .comparison import ComparisonReport
from .disconnection import TARGET
from .disconnection_report import DisconnectionReport
from .report import EvaluationReport

_DPI = 150


def acceptance_figure(report: EvaluationReport, path: Path) -> None:
    """Draw how many tokens the target calls of each drafting method committed, and which drafts were accepted.

    Args:
        report: a report; the baseline is left out where there is another method.
        path: of the PNG file.
    """
    summaries = report.methods[1:] or report.methods
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    width = 0.8 / len(summaries)
    n_bars = max((len(summary.accepted_drafts) for summary in summaries), default=0)
    for index, summary in enumerate(summaries):
        shares = [count / max(1, summary.n_target_calls) for count in summary.accepted_drafts]
        places = [k + 1 + (index - (len(summaries) - 1) / 2) * width for k in range(len(shares))]
        length = "-" if summary.acceptance_length is None else f"{summary.acceptance_length:.2f}"
        bars = left.bar(places, shares, width, label=f"{summary.method}, mean {length}")
        if len(summaries) <= 2:
            left.bar_label(bars, [f"{share:.0%}" for share in shares], fontsize=8)
        right.plot(range(1, 1 + len(summary.accepted_by_position)), summary.accepted_by_position, "o-")
    left.set_xticks(range(1, n_bars + 1))
    left.set_xlabel("tokens committed by a target call, bonus token included")
    left.set_ylabel("share of target calls")
    left.legend()
    right.set_xticks(range(1, n_bars))
    right.set_ylim(0, 1)
    right.set_xlabel("position of the draft")
    right.set_ylabel("share of target calls that accepted it")
    figure.suptitle("Acceptance")
    _save(figure, path)


def category_figure(report: EvaluationReport, path: Path) -> None:
    """Draw acceptance length and speed ratio of each category with their intervals.

    Args:
        report: a report with several categories.
        path: of the PNG file.
    """
    names = list(report.categories)
    figure = Figure(figsize=(max(6.4, 1.1 * len(names) + 2), 6.4), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    n_methods = len(report.methods) - 1
    for index in range(1, n_methods + 1):
        of_method = [report.categories[name][index] for name in names]
        places = [place + (index - (n_methods + 1) / 2) * 0.7 / n_methods for place in range(len(names))]
        lengths = [summary.acceptance_length or float("nan") for summary in of_method]
        ratios = [summary.ratio for summary in of_method]
        for ax, values, bounds in (
            (axes[0], lengths, [summary.acceptance_length_interval for summary in of_method]),
            (axes[1], ratios, [summary.ratio_interval for summary in of_method]),
        ):
            arms = [
                (0.0, 0.0) if bound is None else (max(0.0, value - bound[0]), max(0.0, bound[1] - value))
                for value, bound in zip(values, bounds, strict=True)
            ]
            ax.errorbar(places, values, list(zip(*arms, strict=True)), fmt="o", capsize=2,
                        label=report.methods[index].method)  # fmt: skip
    axes[0].set_ylabel("acceptance length")
    axes[0].legend()
    axes[1].axhline(1.0, color="gray", linewidth=0.8)
    axes[1].set_ylabel(f"tokens/s over {report.methods[0].method}")
    axes[1].set_xticks(range(len(names)), names, rotation=30, ha="right")
    _save(figure, path)


def speed_figure(report: EvaluationReport, path: Path) -> None:
    """Draw each method's tokens per second, the total as a bar and every answer as a dot.

    Args:
        report: a report.
        path: of the PNG file.
    """
    figure = Figure(figsize=(max(5.6, 1.4 * len(report.methods)), 3.8), layout="constrained")
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


def comparison_figure(report: ComparisonReport, path: Path) -> None:
    """Draw acceptance length against weights, training tokens and the cost of drafting.

    Runs of one kind and size are joined by a line over their training tokens.

    Args:
        report: a report.
        path: of the PNG file.
    """
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    titles = ("weights", "training tokens", "ms of drafting per target call")
    for index, run in enumerate(report.runs):
        for method, marker in (("chain", "o"), ("tree", "^")):
            summary = run.methods[method]
            length, bounds = summary.acceptance_length, summary.acceptance_length_interval
            if length is None:
                continue
            arms = None if bounds is None else [[max(0.0, length - bounds[0])], [max(0.0, bounds[1] - length)]]
            places = (run.n_parameters, run.n_tokens, summary.call_ms("draft"))
            for ax, place in zip(axes, places, strict=True):
                if place is not None:
                    label = f"{run.name}, {method}"
                    ax.errorbar([place], [length], arms, fmt=marker, color=f"C{index}", capsize=2, label=label)
    for points in _trained_longer(report):
        axes[1].plot(*zip(*points, strict=True), color="gray", linewidth=0.8, zorder=0)
    for ax, title in zip(axes, titles, strict=True):
        ax.set_xlabel(title)
        ax.margins(x=0.2)
    for ax in axes[:2]:
        ax.set_xlim(0, 1.05 * ax.get_xlim()[1])  # drafters of nearly equal weights shall look so
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes[0].set_ylabel("acceptance length")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    _save(figure, path)


def _trained_longer(report: ComparisonReport) -> list[list[tuple[int, float]]]:
    """(training tokens, acceptance length) of runs that differ in nothing but how long they were trained, by method."""
    found: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for run in report.runs:
        for method, summary in run.methods.items():
            if run.n_tokens is not None and summary.acceptance_length is not None:
                points = found.setdefault((method, run.kind, run.n_parameters), [])
                points.append((run.n_tokens, summary.acceptance_length))
    return [sorted(points) for points in found.values() if len(points) > 1]


def disconnection_figure(report: DisconnectionReport, path: Path) -> None:
    """Draw agreement and log-probability against the tokens since the cut, with their intervals.

    Args:
        report: a report.
        path: of the PNG file.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, summary in enumerate(report.writers):
        color = "gray" if summary.writer == TARGET else f"C{index - 1}"
        for ax, figures in ((left, summary.agreement_by_offset), (right, summary.log_prob_by_offset)):
            if ax is left and summary.writer == TARGET:
                continue
            # A few tokens behind the longest answers say nothing.
            shown = [(place, one) for place, one in enumerate(figures, start=1) if one.mean is not None and one.n > 1]
            places, means = [place for place, _ in shown], [one.mean for _, one in shown]
            ax.plot(places, means, "o-", color=color, markersize=3, label=summary.writer)
            bounded = [(place, *one.interval) for place, one in shown if one.interval is not None]
            if bounded:
                ax.fill_between(*zip(*bounded, strict=True), color=color, alpha=0.15, linewidth=0)
    left.set_ylim(0, 1)
    left.set_ylabel("agreement with the target's own continuation")
    right.set_ylabel("target's log-probability per token, nats")
    for ax in (left, right):
        ax.set_xlabel("tokens since the cut")
    figure.legend(*right.get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle("After a disconnection: the drafter writes alone")
    _save(figure, path)


def write_figures(report: EvaluationReport, path: Path) -> list[Path]:
    """Write the figures beside a report.

    Args:
        report: a report.
        path: of its JSON file: ``report.json`` gives ``report_acceptance.png``, ``report_speed.png`` and, where there
            are several categories and methods, ``report_categories.png``.

    Returns:
        The files.
    """
    drawings = {"acceptance": acceptance_figure, "speed": speed_figure}
    if len(report.categories) > 1 and len(report.methods) > 1:
        drawings["categories"] = category_figure
    files = []
    for name, draw in drawings.items():
        files.append(path.with_name(f"{path.stem}_{name}.png"))
        draw(report, files[-1])
    return files


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The library's version and the like would make equal figures differ.
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
