"""Writes evaluation reports as Markdown, and draws their figures as PNGs, 850 pixels wide."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..text import counted
from .measure import TARGET, SkippedTurn
from .report import TITLE, Disconnection, EvaluationReport, Interval, MethodSummary, WriterSummary
from .report import Figure as Mean

_MAX_DIVERGENCES = 10
_SHOWN_OFFSETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_WIDTH, _DPI = 6.8, 125  # width of figures in inches, and dots per inch; the product is 850 pixels


def markdown_report(report: EvaluationReport) -> str:
    """Write the report as Markdown.

    The Markdown has the settings, and tables of methods, drafters, costs of rounds and categories.
    If answers were cut, a section shows how the drafters continued these answers without the
    target.
    """
    config = report.config
    environment = report.environment
    prompts = report.prompts
    lines = [
        TITLE,
        "",
        f"{counted(prompts['n_answers'], 'answer')} of at most {config['max_new_tokens']} tokens "
        f"to prompts of {prompts['file']} ({prompts['kind']}); {_settings(report)}; "
        f"{environment['dtype']} on {environment['device']}, "
        f"{counted(environment['n_threads'], 'thread')}; methods alternate.",
        *_method_table(report),
        "",
        "The acceptance length is the number of tokens committed per target call, including the "
        "bonus token, without the prefill. Tokens/s are generated tokens divided by the time of the "
        "whole generation, prefill included. Exact is the number of answers with exactly the same "
        "tokens as the baseline's. The intervals are 95 % bootstrap intervals over prompts.",
        *_drafter_table(report),
        *_pair_table(report),
        *(f"\n{name}: {text}." for name, text in report.auto.items()),
        *_cost_table(report),
        *_break_even_part(report),
        *_category_table(report),
        *_divergence_lines(report),
        *_skipped_lines(report.measurement.skipped),
    ]
    if report.disconnection is not None:
        lines += _disconnection_lines(report.disconnection, config["disconnect"])
    return "\n".join(lines) + "\n"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format a Markdown table, with an empty line before it."""
    lines = [""]
    for cells in (titles, ["---"] * len(titles), *rows):
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _skipped_lines(skipped: Sequence[SkippedTurn]) -> list[str]:
    if not skipped:
        return []
    return [
        "",
        f"{len(skipped)} turns were skipped. Either the chat up to this turn or an earlier one is "
        "longer than the target's maximum number of positions, or an earlier answer contains a "
        "control token of the target.",
    ]


def _settings(report: EvaluationReport) -> str:
    config = report.config
    methods = set(report.config["method"])
    parts: list[str] = []
    if {"chain", "prompt-lookup"} & methods:
        parts.append(f"drafts of {config['draft_length']} tokens")
    if "tree" in methods:
        parts.append(f"trees {config['tree']}")
    parts.append(f"temperature {config['temperature']}" if config["temperature"] else "greedy")
    usual = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    for name, value in usual.items():
        if config[name] != value:
            parts.append(f"{name.replace('_', '-')} {config[name]}")
    if not config["cuda_graphs"]:
        parts.append("without CUDA graphs")
    if config["batch_size"] > 1:
        parts.append(f"{config['batch_size']} prompts at once")
    if config["repeats"] > 1:
        parts.append(f"median of {config['repeats']} repeats")
    return ", ".join(parts)


def figure_text(value: float | None, bounds: Interval, form: str = "{:.2f}") -> str:
    """Format a number with its confidence interval in brackets. None is shown as a dash."""
    if value is None:
        return "-"
    if bounds is None:
        return form.format(value)
    to = " to " if bounds[0] < 0 else "-"
    return f"{form.format(value)} ({form.format(bounds[0])}{to}{form.format(bounds[1])})"


def _length_and_ratio(summary: MethodSummary) -> tuple[str, str]:
    length = figure_text(summary.acceptance_length, summary.acceptance_length_interval)
    return length, figure_text(summary.ratio, summary.ratio_interval)


def _method_table(report: EvaluationReport) -> list[str]:
    titles = [
        "method",
        "acceptance length",
        "target calls",
        "calls saved",
        "tokens",
        "tokens/s",
        "ratio",
        "exact",
    ]
    rows = []
    for summary in report.methods:
        length, ratio = _length_and_ratio(summary)
        exact = "-" if report.config["temperature"] else f"{summary.n_exact}/{summary.n_answers}"
        cells = [summary.method, length, f"{summary.n_target_calls:,}"]
        cells += [f"{summary.calls_saved:.1%}", f"{summary.n_tokens:,}"]
        cells += [f"{summary.tokens_per_s:.1f}", ratio, exact]
        rows.append(cells)
    return _table(titles, rows)


def _drafter_table(report: EvaluationReport) -> list[str]:
    if not report.drafters:
        return []
    titles = ["drafter", "kind", "weights", "steps", "training tokens", "read from the store"]
    rows = []
    for name, facts in report.drafters.items():
        steps = _count_text(facts["n_steps"])
        tokens = _count_text(facts["n_tokens"])
        read = "-" if facts["n_bytes_read"] is None else f"{facts['n_bytes_read'] / 1e6:,.0f} MB"
        rows.append([name, facts["kind"], f"{facts['n_parameters']:,}", steps, tokens, read])
    lines = _table(titles, rows)
    if report.warnings:
        lines += [
            "",
            "The drafters were not trained in the same way. This may also explain the differences "
            "between them:",
            "",
        ]
        for warning in report.warnings:
            lines.append(f"- {warning}")
    elif len(report.drafters) > 1:
        lines += [
            "",
            "All drafters were trained in the same way: from the same store, with the same number of "
            "steps and tokens, and with the same settings.",
        ]
    return lines


def _count_text(count: int | None) -> str:
    """Format a count. None is shown as a dash."""
    return "-" if count is None else f"{count:,}"


def _pair_table(report: EvaluationReport) -> list[str]:
    if not report.pairs:
        return []
    rows: list[list[str]] = []
    for pair in report.pairs:
        length = figure_text(pair["acceptance_length"], pair["acceptance_length_interval"])
        speed = figure_text(pair["speed"], pair["speed_interval"])
        rows.append([f"{pair['method']} {pair['drafter']}", length, speed])
    titles = [f"over {report.pairs[0]['over']}", "acceptance length", "tokens/s"]
    return _table(titles, rows)


def _cost_table(report: EvaluationReport) -> list[str]:
    titles = ["per target call, ms", "draft", "verify", "rest", "drafted tokens"]
    rows = []
    for summary in report.methods:
        rest = summary.seconds - summary.prefill_s - summary.draft_s - summary.verify_s
        sums = (1e3 * summary.draft_s, 1e3 * summary.verify_s, 1e3 * rest, summary.n_drafted)
        cells = [summary.method]
        for total in sums:
            cells.append(f"{total / max(1, summary.n_target_calls):.1f}")
        cells.append(", ".join(f"{share:.0%}" for share in summary.accepted_by_position) or "-")
        rows.append(cells)
    return _table([*titles, "draft accepted at position 1, 2, ..."], rows)


def _break_even_part(report: EvaluationReport) -> list[str]:
    lines = break_even_lines(report)
    return ["", "Which methods are faster than the baseline:", "", *lines] if lines else []


def break_even_lines(report: EvaluationReport) -> list[str]:
    """Write for each method how many tokens a round must commit to be as fast as the baseline."""
    baseline_ms = report.methods[0].call_ms
    if not baseline_ms:
        return []
    lines = []
    for summary in report.methods[1:]:
        if summary.acceptance_length is None:
            continue
        needed = summary.call_ms / baseline_ms
        lines.append(
            f"- {summary.method}: a round takes {summary.call_ms:.1f} ms and a "
            f"{report.methods[0].method} step {baseline_ms:.1f} ms, so a round has to commit "
            f"{needed:.2f} tokens to break even. It commits {summary.acceptance_length:.2f}."
        )
        if summary.acceptance_length < needed and not summary.method.startswith("prompt-lookup"):
            lines.append(f"  {_what_helps(report, summary)}")
    return lines


def _what_helps(report: EvaluationReport, summary: MethodSummary) -> str:
    advice = ["train the drafter longer or on more of the target's own answers"]
    drafts_all = all(facts["drafts_all_tokens"] for facts in report.drafters.values())
    if drafts_all and summary.draft_s > 0.25 * summary.verify_s:
        advice.append(
            "make each draft cheaper with a reduced vocabulary (drafter.draft_vocabulary)"
        )
    if not summary.method.startswith("auto"):
        advice.append("decode with the method auto, which drafts only while this is faster")
    return f"To make it faster, {'; or '.join(advice)}."


def _category_table(report: EvaluationReport) -> list[str]:
    if len(report.categories) < 2:
        return []
    first = 1 if len(report.methods) > 1 else 0
    titles = ["category", "answers"]
    for summary in report.methods[first:]:
        titles += [f"{summary.method} acceptance length", f"{summary.method} ratio"]
    rows = []
    for name, summaries in [*report.categories.items(), ("**all**", report.methods)]:
        cells = [name, str(summaries[0].n_answers)]
        for summary in summaries[first:]:
            cells += _length_and_ratio(summary)
        rows.append(cells)
    return _table(titles, rows)


def _divergence_lines(report: EvaluationReport) -> list[str]:
    """List where answers differ from the baseline's. The list is empty if tokens are sampled."""
    if report.config["temperature"]:
        return []
    divergences: list[str] = []
    for row in report.measurement.rows:
        for name, run in row.runs.items():
            if run.first_divergence is not None:
                divergences.append(
                    f"- {name}, prompt {row.prompt_id} turn {row.turn}: token "
                    f"{run.first_divergence}, top-2 gap {run.top2_gap:.2e}"
                )
    if not divergences:
        return []
    lines = [
        "",
        "These answers differ from the baseline's. The token is the index of the first generated "
        "token that differs, and the top-2 gap is the difference between the target's two highest "
        "logits there:",
        "",
    ]
    lines += divergences[:_MAX_DIVERGENCES]
    if len(divergences) > _MAX_DIVERGENCES:
        lines.append(f"- and {len(divergences) - _MAX_DIVERGENCES} more, which the JSON file lists")
    return lines


def _disconnection_lines(found: Disconnection, n_tokens: int) -> list[str]:
    """Write three tables about the continuations of cut answers.

    A writer is the target or a drafter. The first table has one line per writer. The second table
    shows how often each writer agrees with the target, as a function of the number of tokens since
    the cut. The third table shows the target's log-probability of the tokens of each writer, as a
    function of the same number.
    """
    lines = [
        "",
        "## After a disconnection: the drafter without the target",
        "",
        f"Greedy answers to {counted(found.n_cut_prompts, 'prompt')} were cut off at "
        f"{counted(found.n_cuts, 'position')}. From each position, every drafter wrote at most "
        f"{counted(n_tokens, 'token')} without the target.",
    ]
    if found.n_skipped:
        lines.append(
            f"{found.n_skipped} prompts were skipped, because they leave no room for an answer, or "
            "because their answer is a single token."
        )
    if not found.writers:
        return lines
    titles = [
        "writer",
        "tokens like the target's, from the cut on",
        "agreement",
        "log-probability per token, nats",
    ]
    has_scores = found.writers[0].score.n > 0
    rows = []
    for summary in found.writers:
        cells = [summary.writer, _mean(summary.common_prefix), _mean(summary.agreement, "{:.1%}")]
        rows.append(
            [*cells, _mean(summary.log_prob), *([_mean(summary.score, "{:.3f}")] * has_scores)]
        )
    lines += _table([*titles, *(["score"] * has_scores)], rows)
    lines += [
        "",
        "The writer is the target or a drafter. Agreement is the share of the tokens of the target's "
        "own greedy continuation that the writer wrote at the same position. The log-probability is "
        "the target's log-probability of a written token, given all text before it, including the "
        "writer's own.",
    ]
    lines += _offset_table("Agreement", "agreement_by_offset", "{:.0%}", found.writers[1:])
    return lines + _offset_table(
        "Log-probability, nats", "log_prob_by_offset", "{:.2f}", found.writers
    )


def _mean(figure: Mean, form: str = "{:.2f}") -> str:
    return figure_text(figure.mean, figure.interval, form)


def _offset_table(
    title: str, name: str, form: str, summaries: Sequence[WriterSummary]
) -> list[str]:
    longest = max(len(getattr(summary, name)) for summary in summaries)
    offsets = [offset for offset in _SHOWN_OFFSETS if offset <= longest]
    rows = []
    for summary in summaries:
        figures: tuple[Mean, ...] = getattr(summary, name)
        cells = [summary.writer]
        for offset in offsets:
            cells.append(_mean(figures[offset - 1], form) if offset <= len(figures) else "-")
        rows.append(cells)
    return _table([f"{title} at token", *map(str, offsets)], rows)


def write_figures(report: EvaluationReport, path: Path) -> None:
    """Write the figures of a report next to its JSON file.

    The figures of ``report.json`` are ``report.png`` and, if answers were cut,
    ``report_disconnection.png``.
    """
    speed_figure(report, path.with_suffix(".png"))
    if report.disconnection is not None and report.disconnection.writers:
        disconnection_figure(report.disconnection, path.with_name(f"{path.stem}_disconnection.png"))


def speed_figure(report: EvaluationReport, path: Path) -> None:
    """Draw one bar per method. Its length is tokens/s divided by the baseline's tokens/s.

    Each bar is labelled with the method's acceptance length.
    """
    summaries = report.methods[1:] or report.methods
    drafters = list(report.drafters) if len(report.drafters) > 1 else []
    figure = Figure(figsize=(_WIDTH, 1.1 + 0.38 * len(summaries)), layout="constrained")
    axes = figure.subplots()
    for y, summary in enumerate(reversed(summaries)):
        color = _color_number(summary.method, drafters)
        # For error bars, matplotlib expects two distances: from the value to its lower bound, and
        # from the value to its upper bound.
        bounds = summary.ratio_interval
        arms = bounds and [
            [max(0.0, summary.ratio - bounds[0])],
            [max(0.0, bounds[1] - summary.ratio)],
        ]
        axes.barh(y, summary.ratio, 0.65, xerr=arms, color=f"C{color}", alpha=0.8,
                  error_kw={"ecolor": "0.3", "capsize": 3})  # fmt: skip
        length = (
            "-"
            if summary.acceptance_length is None
            else f"{summary.acceptance_length:.2f} tokens per call"
        )
        axes.text(0.02, y, length, va="center", fontsize=9)
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    axes.set_yticks(range(len(summaries)), [summary.method for summary in reversed(summaries)])
    axes.set_xlim(left=0)
    axes.set_xlabel(
        f"tokens/s relative to {report.methods[0].method} decoding, on {report.environment['device']}"
    )
    _save(figure, path)


def _color_number(method: str, drafters: Sequence[str]) -> int:
    """Choose the colour of a method's bar. Methods with the same drafter have the same colour."""
    for number, name in enumerate(drafters, start=1):
        if method.endswith(f" {name}"):
            return number
    return 0


def disconnection_figure(found: Disconnection, path: Path) -> None:
    """Draw how well each drafter agrees with the target in its continuations of cut answers.

    The x axis is the number of tokens since the cut. The 95 % intervals are drawn as bands.
    """
    figure = Figure(figsize=(_WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    drafters = [summary for summary in found.writers if summary.writer != TARGET]
    for index, summary in enumerate(drafters):
        means: list[float] = []
        lows: list[float] = []
        highs: list[float] = []
        for agreement in summary.agreement_by_offset:
            # An offset is a number of tokens since the cut. Leave out offsets that only one
            # continuation reaches, and draw no band at offsets without a confidence interval. Fewer
            # continuations reach larger offsets, so these offsets come last. Item i of each list
            # still belongs to offset i + 1.
            if agreement.n > 1:
                means.append(agreement.mean or 0.0)
                if agreement.interval is not None:
                    lows.append(agreement.interval[0])
                    highs.append(agreement.interval[1])
        offsets = range(1, len(means) + 1)
        axes.plot(offsets, means, "o-",
                  color=f"C{index}", markersize=3, label=summary.writer)  # fmt: skip
        bounded = offsets[: len(lows)]
        axes.fill_between(bounded, lows, highs, color=f"C{index}", alpha=0.15, linewidth=0)
    axes.set_ylim(0, 1)
    axes.set_xlabel("tokens since the connection to the target was cut")
    axes.set_ylabel("agreement with the target")
    axes.legend()
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    # Leave out the metadata with matplotlib's version, so that the same figure always gives the
    # same file.
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
