"""Sums up a measurement of drafters without their target, by the number of tokens since the cut."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import OptionInvalid
from .disconnection import TARGET, Continuation, CutRow
from .markdown import figure_text, table
from .statistics import Interval, ratio_with_interval

KIND = "moa-data disconnection report"
SCHEMA_VERSION = 1
CONVENTIONS = {
    "cut": "after n_written tokens of the target's greedy answer; the last of them has no target activations yet, as "
    "after any target call",
    "continuation": "a chain of the drafter's likeliest tokens without verification, up to its first end of sequence; "
    "nothing behind the cut has target activations",
    "agreement": "share of the tokens of the target's own greedy continuation that the writer has at the same place; a "
    "place where the target has ended is not counted, one where only the writer has ended or can write no more counts "
    "as different",
    "common_prefix": "tokens up to the first that differs from the target's own, mean over cuts",
    "log_prob": "mean over tokens of the target's log-probability of what was written, given the text before it, that "
    "of the writer included; nats",
    "offsets": "by_offset[i] is the (i + 1)-th token behind the cut",
    "n_skipped": "prompts without a cut: they leave no position to generate into, or their answer is one token long; "
    "n_cut_prompts are the others",
    "intervals": "95 %, bootstrap over prompts (the cuts of one prompt stay together), the same draws in every report",
    "score": "of the user's function, mean over answers: what the target wrote up to the cut and what followed",
}
_SHOWN_OFFSETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Figure:
    """A mean with its interval; None where nothing was counted.

    Attributes:
        interval: 95 %; None for fewer than two prompts.
    """

    mean: float | None
    interval: Interval
    n: int

    def text(self, form: str = "{:.2f}") -> str:
        """Write the mean and, in brackets, the interval."""
        return figure_text(self.mean, self.interval, form)


@dataclass(frozen=True)
class WriterSummary:
    """The figures of one writer, the target or a drafter, over all cuts.

    Attributes:
        writer: ``target`` or a drafter's name.
        common_prefix: tokens in common with the target's continuation.
        log_prob: per token, over all tokens written.
        agreement_by_offset: the same by tokens since the cut.
        log_prob_by_offset: the same by tokens since the cut.
    """

    writer: str
    n_cuts: int
    common_prefix: Figure
    agreement: Figure
    log_prob: Figure
    score: Figure
    agreement_by_offset: tuple[Figure, ...]
    log_prob_by_offset: tuple[Figure, ...]


@dataclass(frozen=True)
class DisconnectionReport:
    """The report of a measurement.

    Attributes:
        prompts: kind, file, and how many were there, used, cut and skipped.
        drafters: name -> facts of a drafter.
        writers: a summary of each, the target first.
    """

    config: dict[str, Any]
    environment: dict[str, Any]
    provenance: dict[str, Any]
    prompts: dict[str, Any]
    drafters: dict[str, dict[str, Any]]
    writers: list[WriterSummary]
    rows: list[CutRow]

    def writer(self, name: str) -> WriterSummary:
        """The summary of a writer by its name."""
        return {summary.writer: summary for summary in self.writers}[name]

    def to_json(self) -> dict[str, Any]:
        """Return plain values; NaN does not occur."""
        return {"kind": KIND, "schema_version": SCHEMA_VERSION, "conventions": CONVENTIONS} | dataclasses.asdict(self)


def build_disconnection_report(
    rows: Sequence[CutRow],
    *,
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    provenance: Mapping[str, Any],
    prompts: Mapping[str, Any],
    drafters: Mapping[str, dict[str, Any]],
) -> DisconnectionReport:
    """Sum up a measurement.

    Args:
        prompts: where the prompts come from, and ``n_used`` of them.
    """
    if not rows:
        raise OptionInvalid(
            "no answer is long enough to be cut: prompts leave no position to generate into, or every answer ends with "
            "its first token; give other prompts."
        )
    n_cut_prompts = len({row.prompt_id for row in rows})
    counts = {"n_cuts": len(rows), "n_cut_prompts": n_cut_prompts, "n_skipped": prompts["n_used"] - n_cut_prompts}
    return DisconnectionReport(
        dict(config),
        dict(environment),
        dict(provenance),
        dict(prompts) | counts,
        dict(drafters),
        [summarize_writer(name, rows) for name in rows[0].by_writer],
        list(rows),
    )


def summarize_writer(name: str, rows: Sequence[CutRow]) -> WriterSummary:
    """Sum up what one writer wrote."""
    prompt_ids = [row.prompt_id for row in rows]
    written = [row.by_writer[name] for row in rows]
    longest = max(max(len(one.tokens), len(one.agrees)) for one in written)

    def figure(values: list[Sequence[float]]) -> Figure:
        """Return the mean of values per cut, and its interval."""
        mean, interval = ratio_with_interval(prompt_ids, [(sum(part), len(part)) for part in values])
        return Figure(mean, interval, sum(map(len, values)))

    def at(offset: int) -> slice:
        return slice(offset, offset + 1)

    return WriterSummary(
        writer=name,
        n_cuts=len(rows),
        common_prefix=figure([(one.n_common,) for one in written]),
        agreement=figure([one.agrees for one in written]),
        log_prob=figure([one.log_probs for one in written]),
        score=figure([_score(one) for one in written]),
        agreement_by_offset=tuple(figure([one.agrees[at(i)] for one in written]) for i in range(longest)),
        log_prob_by_offset=tuple(figure([one.log_probs[at(i)] for one in written]) for i in range(longest)),
    )


def _score(one: Continuation) -> tuple[float, ...]:
    return () if one.score is None else (one.score,)


def disconnection_markdown(report: DisconnectionReport) -> str:
    """Write one line per writer, then agreement and log-probability by the number of tokens since the cut."""
    config, environment, prompts = report.config, report.environment, report.prompts
    has_scores = report.writers[0].score.n > 0
    lines = [
        "# After a disconnection: the drafter goes on alone",
        "",
        f"{prompts['n_cuts']} cuts of answers to {prompts['n_cut_prompts']} prompts of {prompts['file']} "
        f"({prompts['kind']}), {config['n_tokens']} tokens behind each; greedy, {environment['dtype']} on "
        f"{environment['device']}.",
    ]
    titles = ["writer", "tokens like the target's, from the cut on", "agreement", "log-probability per token, nats"]
    rows = []
    for summary in report.writers:
        cells = [summary.writer, summary.common_prefix.text(), summary.agreement.text("{:.1%}")]
        rows.append([*cells, summary.log_prob.text(), *([summary.score.text("{:.3f}")] * has_scores)])
    lines += table([*titles, *(["score"] * has_scores)], rows)
    lines += [
        "",
        "Agreement: share of the target's own greedy continuation that the writer has at the same place. "
        "Log-probability: the target's, of what was written, given all before it, the writer's own text included. "
        "Intervals: 95 %, bootstrap over prompts.",
        *_drafter_lines(report),
    ]
    if prompts["n_skipped"]:
        lines += ["", f"{prompts['n_skipped']} prompts were skipped: no room for an answer, or one of a single token."]
    drafters = [summary for summary in report.writers if summary.writer != TARGET]
    for title, name, form, shown in (
        ("Agreement", "agreement_by_offset", "{:.0%}", drafters),
        ("Log-probability, nats", "log_prob_by_offset", "{:.2f}", report.writers),
    ):
        lines += _offset_table(title, name, form, shown)
    return "\n".join(lines) + "\n"


def _offset_table(title: str, name: str, form: str, summaries: Sequence[WriterSummary]) -> list[str]:
    longest = max(len(getattr(summary, name)) for summary in summaries)
    offsets = [offset for offset in _SHOWN_OFFSETS if offset <= longest]
    rows = []
    for summary in summaries:
        figures: tuple[Figure, ...] = getattr(summary, name)
        cells = [figures[offset - 1].text(form) if offset <= len(figures) else "-" for offset in offsets]
        rows.append([summary.writer, *cells])
    return table([f"{title} at token", *map(str, offsets)], rows)


def _drafter_lines(report: DisconnectionReport) -> list[str]:
    return [
        f"\nDrafter {name}: {facts['kind']}, {facts['n_parameters']:,} weights, {facts['folder']}."
        for name, facts in report.drafters.items()
    ]
