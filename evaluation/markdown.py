"""Writes an evaluation report as Markdown and JSON."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..text import printable
from .config import DRAFTING
from .report import EvaluationReport, MethodSummary
from .statistics import Interval

_MAX_DIVERGENCES = 10


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, behind an empty one."""
    return ["", *("| " + " | ".join(cells) + " |" for cells in (titles, ["---"] * len(titles), *rows))]


def markdown_report(report: EvaluationReport) -> str:
    """Return the report: settings, methods, costs of drafters and rounds, and categories if there are several."""
    config, environment, prompts = report.config, report.environment, report.prompts
    lines = [
        "# Speculative decoding against plain decoding",
        "",
        f"{prompts['n_answers']} answers of at most {config['max_new_tokens']} tokens to prompts of {prompts['file']} "
        f"({prompts['kind']}); {_settings(report)}; {environment['dtype']} on {environment['device']}, "
        f"{environment['n_threads']} threads; methods alternate.",
        *_method_table(report),
        "",
        "Acceptance length: tokens committed per target call, bonus token included, prefill not counted. Tokens/s: "
        "generated token ids over the whole generation, prefill included. Exact: answers with the very tokens of the "
        "baseline. Intervals: 95 %, bootstrap over prompts.",
        *_drafter_table(report),
        *_pair_table(report),
        *(f"\n{name} drafted {text.removeprefix('auto: ')}." for name, text in report.policies.items()),
        *_cost_table(report),
        *_category_table(report),
        *_divergence_lines(report),
    ]
    skipped = report.measurement.skipped
    if n_turns := sum(turn.n_prompt_tokens > 0 for turn in skipped):
        lines += ["", f"{n_turns} turns were skipped: longer than the target's positions, or behind one that is."]
    if n_turns := sum(turn.n_prompt_tokens == 0 for turn in skipped):
        lines += ["", f"{n_turns} turns were skipped: behind an answer that spells a control token of the target."]
    return "\n".join(lines) + "\n"


def write_report(values: dict[str, Any], markdown: str, path: Path) -> None:
    """Write a JSON file and a Markdown file beside it; each replaces its predecessor in one step."""
    text = json.dumps(values, indent=1, allow_nan=False) + "\n"  # may fail, and then nothing is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path.with_suffix(".md"), printable(markdown))
    _replace(path, text)


def _settings(report: EvaluationReport) -> str:
    config = report.config
    methods = config["method"]
    parts = []
    if {"chain", "prompt-lookup"} & set(methods):
        parts.append(f"drafts of {config['draft_length']} tokens")
    if "tree" in methods:
        parts.append(f"trees {config['tree']}")
    parts.append(f"temperature {config['temperature']}" if config["temperature"] else "greedy")
    usual = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    parts += [f"{name.replace('_', '-')} {config[name]}" for name, value in usual.items() if config[name] != value]
    if config["compile"]:
        parts.append(f"target calls compiled for {config['compile']} tokens")
    if config["batch_size"] > 1:
        parts.append(f"{config['batch_size']} prompts at once")
    if config["repeats"] > 1:
        parts.append(f"median of {config['repeats']} repeats")
    return ", ".join(parts)


def length_text(summary: MethodSummary) -> str:
    """The acceptance length with its interval."""
    return figure_text(summary.acceptance_length, summary.acceptance_length_interval)


def ratio_text(summary: MethodSummary) -> str:
    """The speed ratio with its interval."""
    return figure_text(summary.ratio, summary.ratio_interval)


def figure_text(value: float | None, bounds: Interval, form: str = "{:.2f}") -> str:
    """A figure and its interval in brackets; a dash where there is none."""
    if value is None:
        return "-"
    if bounds is None:
        return form.format(value)
    to = " to " if bounds[0] < 0 else "-"
    return f"{form.format(value)} ({form.format(bounds[0])}{to}{form.format(bounds[1])})"


def _method_table(report: EvaluationReport) -> list[str]:
    titles = ["method", "acceptance length", "target calls", "calls saved", "tokens", "tokens/s", "ratio"]
    titles += ["ratio per answer, median (quartiles)", "exact"]
    rows = []
    for summary in report.methods:
        lower, median, upper = summary.ratio_quartiles
        cells = [summary.method, length_text(summary), f"{summary.n_target_calls:,}", f"{summary.calls_saved:.1%}"]
        cells += [f"{summary.n_tokens:,}", f"{summary.tokens_per_s:.1f}", ratio_text(summary)]
        cells.append(f"{median:.2f} ({lower:.2f}-{upper:.2f})")
        rows.append([*cells, "-" if report.config["temperature"] else f"{summary.n_exact}/{summary.n_answers}"])
    return table(titles, rows)


def _drafter_table(report: EvaluationReport) -> list[str]:
    """Return the table of what each drafter cost to train and what it gives."""
    if not report.drafters:
        return []
    by_name, several = {summary.method: summary for summary in report.methods}, len(report.drafters) > 1
    methods = [method for method in DRAFTING if method in report.config["method"]]
    titles = ["drafter", "kind", "weights", "steps", "training tokens", "read from the store"]
    titles += [f"{method}: {column}" for method in methods for column in ("acceptance length", "ratio")]
    rows = []
    for name, facts in report.drafters.items():
        read = facts["n_bytes_read"]
        cells = [name, facts["kind"], f"{facts['n_parameters']:,}", _number(facts["n_steps"])]
        cells += [_number(facts["n_tokens"]), "-" if read is None else f"{read / 1e6:,.0f} MB"]
        for method in methods:
            summary = by_name[f"{method} {name}" if several else method]
            cells += [length_text(summary), ratio_text(summary)]
        rows.append(cells)
    lines = table(titles, rows)
    if report.warnings:
        lines += ["", "Not trained alike, so differences are not the drafters' alone:", ""]
        lines += [f"- {warning}" for warning in report.warnings]
    elif several:
        lines += ["", "All were trained alike: one store, equal steps, tokens and settings."]
    return lines


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _pair_table(report: EvaluationReport) -> list[str]:
    if not report.pairs:
        return []
    rows = [
        (
            f"{pair.method} {pair.drafter}",
            figure_text(pair.acceptance_length, pair.acceptance_length_interval),
            figure_text(pair.speed, pair.speed_interval),
        )
        for pair in report.pairs
    ]
    return table([f"over {report.pairs[0].over}", "acceptance length", "tokens/s"], rows)


def _cost_table(report: EvaluationReport) -> list[str]:
    titles = ["per target call, ms", "draft", "verify", "rest", "drafted tokens"]
    rows = []
    for summary in report.methods:
        parts = [f"{summary.call_ms(part):.1f}" for part in ("draft", "verify", "rest")]
        positions = ", ".join(f"{share:.0%}" for share in summary.accepted_by_position) or "-"
        drafted = summary.n_drafted / max(1, summary.n_target_calls)
        rows.append([summary.method, *parts, f"{drafted:.1f}", positions])
    return table([*titles, "draft accepted at position 1, 2, ..."], rows)


def _category_table(report: EvaluationReport) -> list[str]:
    if len(report.categories) < 2:
        return []
    others = report.methods[1:] or report.methods
    titles = [f"{s.method} {column}" for s in others for column in ("acceptance length", "ratio")]
    rows = []
    for name, summaries in [*report.categories.items(), ("**all**", report.methods)]:
        own = summaries[1:] or summaries
        cells = [text(summary) for summary in own for text in (length_text, ratio_text)]
        rows.append([name, str(summaries[0].n_answers), *cells])
    return table(["category", "answers", *titles], rows)


def _divergence_lines(report: EvaluationReport) -> list[str]:
    """List where greedy answers differ from the baseline's; sampled ones differ anyway, by their random draws."""
    if report.config["temperature"]:
        return []
    found = [
        f"- {name}, prompt {row.prompt_id} turn {row.turn}: token {run.first_divergence}, top-2 gap {run.top2_gap:.2e}"
        for row in report.measurement.rows
        for name, run in row.runs.items()
        if run.first_divergence is not None
    ]
    more = [f"- and {len(found) - _MAX_DIVERGENCES} more, see the JSON"] if len(found) > _MAX_DIVERGENCES else []
    return ["", "First token that differs from the baseline's:", "", *found[:_MAX_DIVERGENCES], *more] if found else []


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
