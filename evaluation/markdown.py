"""An evaluation report as Markdown, and writing it."""

import json
import os
from pathlib import Path
from typing import Any

from ..text import printable
from .report import EvaluationReport, MethodSummary

_MAX_DIVERGENCES = 10


def markdown_report(report: EvaluationReport) -> str:
    """Settings, one line per method, what a round costs, then one line per category where there are several."""
    config, environment, prompts = report.config, report.environment, report.prompts
    answers = f"{prompts['n_answers']} answers of at most {config['max_new_tokens']} tokens"
    lines = [
        "# Speculative decoding against plain decoding",
        "",
        f"{answers} to prompts of {prompts['file']} ({prompts['kind']}); {_settings(report)}; {environment['dtype']} "
        f"on {environment['device']}, {environment['n_threads']} threads; methods alternate.",
        "",
        "| method | acceptance length | target calls | calls saved | tokens | tokens/s | ratio | ratio per answer, "
        "median (quartiles) | exact |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_method_line(report, summary) for summary in report.methods),
        "",
        "Acceptance length: tokens committed per target call, bonus token included, prefill not counted. Tokens/s: "
        "generated token ids over the whole generation, prefill included. Exact: answers with the very tokens of the "
        "baseline. Intervals: 95 %, bootstrap over prompts.",
        *_drafter_lines(report),
        *_pair_lines(report),
        *(f"\n{name} chose {text.removeprefix('auto: ')}." for name, text in report.choices.items()),
        *_calibration_line(report),
        "",
        *_cost_lines(report),
    ]
    if len(report.categories) > 1:
        lines += ["", *_category_lines(report)]
    lines += _divergence_lines(report)
    skipped = report.measurement.skipped
    if n_turns := sum(turn.n_prompt_tokens > 0 for turn in skipped):
        lines += ["", f"{n_turns} turns were skipped: longer than the target's positions, or behind one that is."]
    if n_turns := sum(turn.n_prompt_tokens == 0 for turn in skipped):
        lines += ["", f"{n_turns} turns were skipped: behind an answer that spells a control token of the target."]
    return "\n".join(lines) + "\n"


def write_report(values: dict[str, Any], markdown: str, path: Path) -> None:
    """Write a JSON file and a Markdown file beside it; each replaces its predecessor in one step.

    Args:
        values: of the JSON file.
        markdown: text of the Markdown file.
        path: of the JSON file.
    """
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


def _calibration_line(report: EvaluationReport) -> list[str]:
    if not report.choices:
        return []
    n_prompts = max(1, report.config["warmup"])
    return [f"\nAcceptance was counted on the first {n_prompts} of the prompts, which are measured too."]


def _method_line(report: EvaluationReport, summary: MethodSummary) -> str:
    lower, median, upper = summary.ratio_quartiles
    exact = "-" if report.config["temperature"] else f"{summary.n_exact}/{summary.n_answers}"
    return (
        f"| {summary.method} | {length_text(summary)} | {summary.n_target_calls:,} | {summary.calls_saved:.1%} "
        f"| {summary.n_tokens:,} | {summary.tokens_per_s:.1f} | {ratio_text(summary)} "
        f"| {median:.2f} ({lower:.2f}-{upper:.2f}) | {exact} |"
    )


def length_text(summary: MethodSummary) -> str:
    """The acceptance length with its interval."""
    if summary.acceptance_length is None:
        return "-"
    return f"{summary.acceptance_length:.2f}" + interval_text(summary.acceptance_length_interval)


def ratio_text(summary: MethodSummary) -> str:
    """The speed ratio with its interval."""
    return f"{summary.ratio:.2f}" + interval_text(summary.ratio_interval)


def interval_text(bounds: tuple[float, float] | None, form: str = "{:.2f}") -> str:
    """An interval in brackets, behind a figure; nothing where there is none."""
    if bounds is None:
        return ""
    to = " to " if bounds[0] < 0 else "-"
    return f" ({form.format(bounds[0])}{to}{form.format(bounds[1])})"


def _drafter_lines(report: EvaluationReport) -> list[str]:
    lines = []
    for name, facts in report.drafters.items():
        trained = f", {facts['n_steps']:,} steps" if facts["n_steps"] else ""
        trained += f", {facts['n_tokens']:,} tokens" if facts["n_tokens"] else ""
        lines.append(f"\nDrafter {name}: {facts['kind']}, {facts['n_parameters']:,} weights{trained}.")
    return lines


def _pair_lines(report: EvaluationReport) -> list[str]:
    if not report.pairs:
        return []
    lines = ["", f"| over {report.pairs[0].over} | acceptance length | tokens/s |", "|---|---|---|"]
    for pair in report.pairs:
        length = "-"
        if pair.acceptance_length is not None:
            length = f"{pair.acceptance_length:.2f}" + interval_text(pair.acceptance_length_interval)
        speed = f"{pair.speed:.2f}" + interval_text(pair.speed_interval)
        lines.append(f"| {pair.method} {pair.drafter} | {length} | {speed} |")
    return lines


def _cost_lines(report: EvaluationReport) -> list[str]:
    lines = [
        "| per target call, ms | draft | verify | rest | drafted tokens | draft accepted at position 1, 2, ... |",
        "|---|---|---|---|---|---|",
    ]
    for summary in report.methods:
        parts = " | ".join(f"{summary.call_ms(part):.1f}" for part in ("draft", "verify", "rest"))
        positions = ", ".join(f"{share:.0%}" for share in summary.accepted_by_position) or "-"
        drafted = summary.n_drafted / max(1, summary.n_target_calls)
        lines.append(f"| {summary.method} | {parts} | {drafted:.1f} | {positions} |")
    return lines


def _category_lines(report: EvaluationReport) -> list[str]:
    others = report.methods[1:] or report.methods
    titles = [f"{s.method} {column}" for s in others for column in ("acceptance length", "ratio")]
    lines = ["| category | answers | " + " | ".join(titles) + " |", "|" + "---|" * (len(titles) + 2)]
    for name, summaries in [*report.categories.items(), ("**all**", report.methods)]:
        cells = [
            cell for summary in (summaries[1:] or summaries) for cell in (length_text(summary), ratio_text(summary))
        ]
        lines.append(f"| {name} | {summaries[0].n_answers} | " + " | ".join(cells) + " |")
    return lines


def _divergence_lines(report: EvaluationReport) -> list[str]:
    """Where greedy answers part from the baseline's; sampled ones draw other random numbers and part anyway."""
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
