"""Sums up an evaluation: counts and ratios over the measured rows.

Acceptance length = tokens committed per target call, bonus token included, prefill not counted.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import OptionInvalid
from .drafters import training_differences
from .measure import Measurement, MethodRun, PromptRow
from .pairs import DrafterPair, drafter_pairs
from .statistics import Interval, accepted_by_position, ratio_with_interval

KIND = "moa-data evaluation report"
_PROBE_BYTES = 256 << 10
"""About what a report and its figures take; that there is room is checked before everything is measured."""
SCHEMA_VERSION = 3
CONVENTIONS = {
    "acceptance_length": "tokens committed per target call, bonus token included, prefill not counted: the sum over "
    "all calls of all prompts divided by the number of calls; plain decoding has 1. Systems that leave the bonus token "
    "out report one less.",
    "intervals": "95 %, bootstrap over prompts (turns of one prompt stay together), the same draws in every report",
    "target_calls": "calls of the target after the prefill; each answer has one prefill besides",
    "tokens": "generated token ids, end-of-sequence included, never re-tokenised text; the prefill gives the first",
    "seconds": "the whole generation: prefill, drafting, verification and what lies between; the median of "
    "repeats; of a batch, the prompt's equal share",
    "ratio": "total tokens / total seconds of the method over the same of the baseline",
    "pairs": "with several drafters, each over the first one by the same method, prompts paired: acceptance length by "
    "acceptance length, tokens per second by tokens per second",
    "drafters": "what their training runs recorded: n_tokens of all invocations, prompts included, padding not; "
    "n_bytes_read of the store, as compressed as its chunks are",
    "warnings": "why drafters are not comparable: not one store and codec, equal steps, tokens and settings, but for "
    "those that a kind of drafter has of its own",
    "accepted_by_position": "share of target calls that accepted the draft at each position, the first draft first; an "
    "answer's last call may be cut",
    "accepted_drafts": "accepted_drafts[k] = target calls that committed k + 1 tokens; the last call of an answer may "
    "be cut by the end-of-sequence token or the token limit",
    "exact_match": "the same token ids as the baseline's; first_divergence counts generated tokens from 0, top2_gap "
    "is the difference of the two highest target logits there, after the repetition penalty",
}


@dataclass(frozen=True)
class MethodSummary:
    """The figures of one method over some rows.

    Attributes:
        n_answers: answered turns.
        n_tokens: generated tokens.
        n_target_calls: target calls after the prefills.
        seconds: of all generations.
        verify_s: seconds of target calls after the prefill.
        acceptance_length: tokens committed per target call, bonus included; None without a call.
        acceptance_length_interval: 95 %; None for fewer than two prompts with a call.
        accepted_drafts: number of target calls that committed k + 1 tokens, by k.
        accepted_by_position: share of target calls that accepted the draft at each position.
        n_exact: answers with the baseline's tokens.
        calls_saved: share of the baseline's target calls that was not needed.
        ratio: tokens_per_s over the baseline's.
        ratio_interval: 95 %; None for fewer than two prompts.
        ratio_quartiles: lower quartile, median and upper quartile of the answers' ratios.
    """

    method: str
    n_answers: int
    n_tokens: int
    n_target_calls: int
    n_drafted: int
    seconds: float
    prefill_s: float
    draft_s: float
    verify_s: float
    tokens_per_s: float
    acceptance_length: float | None
    acceptance_length_interval: Interval
    accepted_drafts: tuple[int, ...]
    accepted_by_position: tuple[float, ...]
    n_exact: int
    calls_saved: float
    ratio: float
    ratio_interval: Interval
    ratio_quartiles: tuple[float, float, float]

    def call_ms(self, part: str) -> float:
        """Return the milliseconds of a part of a round, per target call.

        Args:
            part: ``draft``, ``verify``, or ``rest`` for what is neither of them nor the prefill.
        """
        rest = self.seconds - self.prefill_s - self.draft_s - self.verify_s
        seconds = {"draft": self.draft_s, "verify": self.verify_s, "rest": rest}[part]
        return 1e3 * seconds / max(1, self.n_target_calls)


@dataclass(frozen=True)
class EvaluationReport:
    """The report of an evaluation.

    Attributes:
        prompts: kind, file, and how many were there, used and skipped.
        methods: one summary per method, the baseline first.
        categories: category -> the same over its rows.
        policies: method -> how often ``auto`` drafted.
        drafters: name -> what a drafter is and how it was trained, see ``DrafterFacts``.
        warnings: why the drafters are not comparable, one line each; empty where they were trained alike.
        pairs: each drafter over the first one, method by method.
    """

    config: dict[str, Any]
    environment: dict[str, Any]
    provenance: dict[str, Any]
    prompts: dict[str, Any]
    methods: list[MethodSummary]
    categories: dict[str, list[MethodSummary]]
    measurement: Measurement
    policies: dict[str, str]
    drafters: dict[str, dict[str, Any]]
    warnings: list[str]
    pairs: list[DrafterPair]

    def method(self, name: str) -> MethodSummary:
        """The summary of a method by its name."""
        return {summary.method: summary for summary in self.methods}[name]

    def to_json(self) -> dict[str, Any]:
        """Return plain values; NaN does not occur."""
        return {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "conventions": CONVENTIONS,
            "config": self.config,
            "environment": self.environment,
            "provenance": self.provenance,
            "prompts": self.prompts,
            "auto": self.policies,
            "drafters": self.drafters,
            "warnings": self.warnings,
            "methods": [dataclasses.asdict(summary) for summary in self.methods],
            "pairs": [dataclasses.asdict(pair) for pair in self.pairs],
            "categories": {
                name: [dataclasses.asdict(summary) for summary in summaries]
                for name, summaries in self.categories.items()
            },
            "rows": [_row_json(row) for row in self.measurement.rows],
            "skipped": [dataclasses.asdict(turn) for turn in self.measurement.skipped],
        }


def build_report(
    measurement: Measurement,
    *,
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    provenance: Mapping[str, Any],
    prompts: Mapping[str, Any],
    policies: Mapping[str, str] | None = None,
    drafters: Mapping[str, dict[str, Any]] | None = None,
) -> EvaluationReport:
    """Sum up a measurement.

    Args:
        policies: what those named auto did.
    """
    rows = measurement.rows
    if not rows:
        n_prompts = sum(skipped.turn == 0 for skipped in measurement.skipped)
        raise OptionInvalid(
            f"all {n_prompts} prompts are as long as the target's positions or longer; give shorter prompts."
        )
    categories = list(dict.fromkeys(row.category for row in rows))
    return EvaluationReport(
        config=dict(config),
        environment=dict(environment),
        provenance=dict(provenance),
        prompts=dict(prompts) | {"n_answers": len(rows), "n_skipped_turns": len(measurement.skipped)},
        methods=summarize(rows),
        categories={name: summarize([row for row in rows if row.category == name]) for name in categories},
        measurement=measurement,
        policies=dict(policies or {}),
        drafters=dict(drafters or {}),
        warnings=training_differences(drafters or {}),
        pairs=drafter_pairs(rows, list(drafters or {})),
    )


def summarize(rows: Sequence[PromptRow]) -> list[MethodSummary]:
    """Sum up the rows by method, in the methods' order; the first is the baseline."""
    names = list(rows[0].runs)
    base = [row.runs[names[0]] for row in rows]
    return [_summarize_method(name, rows, base) for name in names]


def _summarize_method(name: str, rows: Sequence[PromptRow], base: Sequence[MethodRun]) -> MethodSummary:
    runs = [row.runs[name] for row in rows]
    committed = [count for run in runs for count in run.committed_per_call]
    n_tokens, seconds = sum(run.n_tokens for run in runs), sum(run.seconds for run in runs)
    base_calls = sum(run.n_target_calls for run in base)
    base_rate = sum(run.n_tokens for run in base) / sum(run.seconds for run in base)
    ratios = [run.tokens_per_s / other.tokens_per_s for run, other in zip(runs, base, strict=True)]
    lower, median, upper = (float(value) for value in np.quantile(ratios, (0.25, 0.5, 0.75)))
    prompt_ids = [row.prompt_id for row in rows]
    calls = [(sum(run.committed_per_call), run.n_target_calls) for run in runs]
    length, length_interval = ratio_with_interval(prompt_ids, calls)
    paired = [(run.n_tokens, run.seconds, other.n_tokens, other.seconds) for run, other in zip(runs, base, strict=True)]
    return MethodSummary(
        method=name,
        n_answers=len(runs),
        n_tokens=n_tokens,
        n_target_calls=len(committed),
        n_drafted=sum(run.n_drafted for run in runs),
        seconds=seconds,
        prefill_s=sum(run.prefill_s for run in runs),
        draft_s=sum(run.draft_s for run in runs),
        verify_s=sum(run.verify_s for run in runs),
        tokens_per_s=n_tokens / seconds,
        acceptance_length=length,
        acceptance_length_interval=length_interval,
        accepted_drafts=tuple(np.bincount([count - 1 for count in committed]).tolist()) if committed else (),
        accepted_by_position=accepted_by_position(committed),
        n_exact=sum(run.first_divergence is None for run in runs),
        calls_saved=1.0 - len(committed) / base_calls if base_calls else 0.0,
        ratio=n_tokens / seconds / base_rate,
        ratio_interval=ratio_with_interval(prompt_ids, paired)[1],
        ratio_quartiles=(lower, median, upper),
    )


def _row_json(row: PromptRow) -> dict[str, Any]:
    values = dataclasses.asdict(row)
    for name, run in row.runs.items():
        values["runs"][name] |= {
            "n_target_calls": run.n_target_calls,
            "tokens_per_s": run.tokens_per_s,
            "exact_match": run.first_divergence is None,
        }
    return values


def check_output(path: str | Path, kind: str = KIND) -> Path:
    """Check the file that a report goes to, and return it.

    Args:
        kind: of the report; an earlier one of this kind may be there.

    Raises:
        OptionInvalid: something other than a report is there, or nothing can be written there.
    """
    path = Path(path).expanduser()
    if path.suffix != ".json":
        raise OptionInvalid(f"--out {path} does not end in .json; the report is JSON, with a .md file beside it.")
    try:
        _check_predecessor(path, kind)
        _check_writable(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionInvalid(f"--out {path} cannot be written ({reason}); choose another --out.") from error
    return path


def _check_predecessor(path: Path, kind: str) -> None:
    """Refuse to replace what is not a report, or the Markdown file of none."""
    if not path.exists():
        occupied = [folder for folder in path.parents if folder.exists() and not folder.is_dir()]
        if occupied:
            raise OptionInvalid(f"--out {path}: {occupied[0]} is a file, not a folder; choose another --out.")
        if (notes := path.with_suffix(".md")).exists():
            raise OptionInvalid(
                f"--out {path} would replace {notes}, which belongs to no report; move it, or choose another --out."
            )
        return
    try:
        is_report = json.loads(path.read_text(encoding="utf-8")).get("kind") == kind
    except (OSError, ValueError, AttributeError):
        is_report = False
    if not is_report:
        raise OptionInvalid(f"--out {path} holds something that is not a {kind}; choose another --out.")


def _check_writable(path: Path) -> None:
    """Write a file there for a moment, and its folder where it is missing; nothing is left."""
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(path.name + ".partial")  # the name that it is written under
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
    finally:
        for folder in missing:  # the innermost first
            with contextlib.suppress(OSError):
                folder.rmdir()
