"""Summarizes an evaluation: counts and ratios over the measured answers.

The acceptance length is the number of tokens committed per target call, including the bonus token,
without the prefill. A *row* is the answers of all methods to one turn of a prompt. Confidence
intervals are bootstrapped. The answers to the turns of one prompt are not independent, so the
bootstrap resamples whole prompts, not single rows.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import OptionInvalid
from ..files import PARTIAL_SUFFIX, write_atomic
from ..moa.decoding.loop import sum_stats
from ..text import printable
from .config import DRAFTING
from .drafters import training_differences
from .measure import CutRow, Measurement, PromptRow

KIND = "moa-data evaluation report"
# The Markdown file of a report begins with this line.
TITLE = "# Speculative decoding against plain decoding"
SCHEMA_VERSION = 3
# Before the measurement, a test file of this size in bytes is written, to find out early whether a
# report can be written. A report with its figures has about this size.
_PROBE_BYTES = 256 << 10
_N_RESAMPLES = 2000
_CONFIDENCE = 0.95

Interval = tuple[float, float] | None
CONVENTIONS = {
    "acceptance_length": "tokens committed per target call, including the bonus token, without the "
    "prefill: the sum over all calls of all prompts divided by the number of calls; plain decoding "
    "has 1. Systems that leave out the bonus token report one less.",
    "intervals": "95 % bootstrap intervals; prompts are resampled with all their turns and cuts",
    "target_calls": "calls of the target after the prefill; each answer also has one prefill",
    "tokens": "generated token ids, including the end-of-sequence token; the first token comes from "
    "the prefill, and text is never tokenized again",
    "seconds": "time of the whole generation, including the prefill: the median of the repeats; "
    "the time of a batch is divided equally among its prompts",
    "ratio": "tokens per second of the method divided by tokens per second of the baseline, each "
    "over all prompts",
    "pairs": "figures of each drafter divided by those of the first drafter, for the same method "
    "and the same prompts",
    "accepted_by_position": "share of target calls that accepted the first draft of the round, the "
    "second draft, and so on; the last call of an answer may accept fewer, because the answer ends",
    "accepted_drafts": "accepted_drafts[k] is the number of target calls that committed k + 1 tokens",
    "exact_match": "whether all token ids are the same as the baseline's; first_divergence is the "
    "index of the first token that differs, counted from 0",
    "cut": "a position after n_written tokens of the target's greedy answer, from which drafters "
    "continue; the target's activations are known for all tokens before it except the last one",
    "agreement": "share of the tokens of the target's own greedy continuation that the writer (the "
    "target or a drafter) wrote at the same position; if only the writer has ended, the position "
    "counts as different",
    "log_prob": "the target's log-probability of a written token, given all text before it, in "
    "nats; the mean over the tokens",
    "offsets": "by_offset[i] is about the (i + 1)-th token after the cut",
}


@dataclass(frozen=True)
class MethodSummary:
    """Counts, times and ratios of one method over several answers.

    :data:`CONVENTIONS` defines these figures.
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
    acceptance_length: float | None  # None if the method made no target call after the prefill.
    # None if fewer than two prompts have target calls after the prefill.
    acceptance_length_interval: Interval
    accepted_drafts: tuple[int, ...]
    accepted_by_position: tuple[float, ...]
    n_exact: int
    calls_saved: float
    ratio: float
    ratio_interval: Interval

    @property
    def call_ms(self) -> float:
        """Milliseconds per target call. The time includes drafting, but not the prefill.

        The result is 0 if the method made no target call after the prefill.
        """
        return (
            1e3 * (self.seconds - self.prefill_s) / self.n_target_calls
            if self.n_target_calls
            else 0.0
        )


@dataclass(frozen=True)
class Figure:
    """The mean of ``n`` values, and the 95 % confidence interval of this mean.

    The mean is None if there are no values. The interval is None if the values come from fewer than
    two prompts.
    """

    mean: float | None
    interval: Interval
    n: int


@dataclass(frozen=True)
class WriterSummary:
    """The results of one writer. A writer is the target or a drafter that continues cut answers.

    A cut answer consists of the first tokens of an answer of the target. ``common_prefix`` is the
    mean number of tokens before the first difference from the target's own continuation.
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
class Disconnection:
    """The results of all writers that continued cut answers: the target and each drafter."""

    n_cuts: int
    n_cut_prompts: int
    # Number of prompts without a cut answer. Either the prompt is too long for an answer, or the
    # answer has a single token.
    n_skipped: int
    # The first summary is the target's. The list is empty if no answer was cut.
    writers: list[WriterSummary]
    rows: list[CutRow]

    @classmethod
    def of(cls, rows: Sequence[CutRow], n_prompts: int) -> "Disconnection":
        """Summarize the continuations of cut answers. ``n_prompts`` prompts were answered."""
        n_cut_prompts = len({row.prompt_id for row in rows})
        writers: list[WriterSummary] = []
        if rows:
            for name in rows[0].by_writer:
                writers.append(summarize_writer(name, rows))
        return cls(len(rows), n_cut_prompts, n_prompts - n_cut_prompts, writers, list(rows))


@dataclass(frozen=True)
class EvaluationReport:
    """The report of an evaluation."""

    measurement: Measurement
    config: dict[str, Any]
    environment: dict[str, Any]
    provenance: dict[str, Any]
    # The path and the format of the file of prompts, and the numbers of prompts and answers.
    prompts: dict[str, Any]
    # Name of each ``auto`` method -> a description of how often it drafted.
    auto: dict[str, str] = field(default_factory=dict)
    # Name of each drafter -> facts about this drafter, from ``drafter_facts``.
    drafters: dict[str, dict[str, Any]] = field(default_factory=dict)
    disconnection: Disconnection | None = None

    @cached_property
    def methods(self) -> list[MethodSummary]:
        """One summary per method. The first one is the baseline's."""
        return summarize(self.measurement.rows)

    @cached_property
    def categories(self) -> dict[str, list[MethodSummary]]:
        """Category of prompts -> one summary per method, computed from the rows of the category."""
        rows_by_category = defaultdict[str, list[PromptRow]](list)
        for row in self.measurement.rows:
            rows_by_category[row.category].append(row)
        return {category: summarize(rows) for category, rows in rows_by_category.items()}

    @cached_property
    def warnings(self) -> list[str]:
        """Lines about differences in training that make drafters hard to compare."""
        return training_differences(self.drafters)

    @cached_property
    def pairs(self) -> list[dict[str, Any]]:
        """Comparisons of each drafter with the first drafter, from :func:`drafter_pairs`."""
        return drafter_pairs(self.measurement.rows, list(self.drafters))

    def method(self, name: str) -> MethodSummary:
        """Return the summary of a method by its name."""
        return next(summary for summary in self.methods if summary.method == name)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, without NaN."""
        values: dict[str, Any] = dataclasses.asdict(self)
        measurement: dict[str, Any] = values.pop("measurement")
        for row in measurement["rows"]:
            for run in row["runs"].values():
                seconds = run.pop("total_s")
                run["n_target_calls"] = len(run["committed_per_call"])
                run["tokens_per_s"] = run["n_tokens"] / seconds
                run["seconds"] = seconds
                run["exact_match"] = run["first_divergence"] is None
        categories: dict[str, list[dict[str, Any]]] = {}
        for category, summaries in self.categories.items():
            categories[category] = list(map(dataclasses.asdict, summaries))
        head = {"kind": KIND, "schema_version": SCHEMA_VERSION, "conventions": CONVENTIONS}
        sums = {
            "methods": list(map(dataclasses.asdict, self.methods)),
            "categories": categories,
            "warnings": self.warnings,
            "pairs": self.pairs,
        }
        return head | values | sums | measurement


def summarize(rows: Sequence[PromptRow]) -> list[MethodSummary]:
    """Make one summary per method, in the order of the methods. The first one is the baseline's."""
    names = list(rows[0].runs)
    return [_summarize_method(name, names[0], rows) for name in names]


def _summarize_method(name: str, baseline: str, rows: Sequence[PromptRow]) -> MethodSummary:
    runs = [row.runs[name] for row in rows]
    total = sum_stats(runs)
    base = sum_stats(row.runs[baseline] for row in rows)
    committed = total.committed_per_call
    accepted_drafts: tuple[int, ...] = ()
    if committed:
        accepted_drafts = tuple(np.bincount(np.asarray(committed) - 1).tolist())
    rate = total.n_tokens / total.total_s
    prompt_ids = [row.prompt_id for row in rows]
    length, length_interval = ratio_with_interval(prompt_ids, [run.calls for run in runs])
    speeds = _paired_figures(rows, name, baseline, "speed")
    return MethodSummary(
        method=name,
        n_answers=len(runs),
        n_tokens=total.n_tokens,
        n_target_calls=len(committed),
        n_drafted=total.n_drafted,
        seconds=total.total_s,
        prefill_s=total.prefill_s,
        draft_s=total.draft_s,
        verify_s=total.verify_s,
        tokens_per_s=rate,
        acceptance_length=length,
        acceptance_length_interval=length_interval,
        accepted_drafts=accepted_drafts,
        accepted_by_position=accepted_by_position(committed),
        n_exact=sum(run.first_divergence is None for run in runs),
        calls_saved=1.0 - len(committed) / base.n_target_calls if base.n_target_calls else 0.0,
        ratio=rate / (base.n_tokens / base.total_s),
        ratio_interval=ratio_with_interval(prompt_ids, speeds)[1],
    )


def _paired_figures(
    rows: Sequence[PromptRow], method: str, other: str, figure: str
) -> list[tuple[float, ...]]:
    """Return the four numbers of each row that :func:`ratio_with_interval` needs.

    ``figure`` names a ratio: ``calls`` for tokens per target call, or ``speed`` for tokens per
    second. The first two numbers are the numerator and denominator of this ratio for ``method``.
    The last two numbers belong to ``other``.
    """
    paired: list[tuple[float, ...]] = []
    for row in rows:
        paired.append((*getattr(row.runs[method], figure), *getattr(row.runs[other], figure)))
    return paired


def drafter_pairs(rows: Sequence[PromptRow], drafters: Sequence[str]) -> list[dict[str, Any]]:
    """Divide the acceptance length and the speed of each drafter by those of the first drafter.

    There is one comparison per drafter and drafting method, such as ``chain``. A method is left out
    if one of the two drafters was not measured with it. The ratio of acceptance lengths covers only
    turns for which there were target calls with both drafters. Without such turns, it is None.
    """
    prompt_ids = [row.prompt_id for row in rows]
    pairs = []
    for method in DRAFTING:
        for drafter in drafters[1:]:
            method_name = f"{method} {drafter}"
            first_name = f"{method} {drafters[0]}"
            if method_name not in rows[0].runs or first_name not in rows[0].runs:
                continue
            pair: dict[str, Any] = {"method": method, "drafter": drafter, "over": drafters[0]}
            for name, figure in (("acceptance_length", "calls"), ("speed", "speed")):
                values = _paired_figures(rows, method_name, first_name, figure)
                pair[name], pair[f"{name}_interval"] = ratio_with_interval(prompt_ids, values)
            pairs.append(pair)
    return pairs


def summarize_writer(name: str, rows: Sequence[CutRow]) -> WriterSummary:
    """Summarize the continuations of one writer, the target or a drafter."""
    prompt_ids = [row.prompt_id for row in rows]
    lengths: list[int] = []
    prefixes: list[tuple[int]] = []
    agrees: list[tuple[bool, ...]] = []
    log_probs: list[tuple[float, ...]] = []
    scores: list[tuple[float, ...]] = []
    for row in rows:
        continuation = row.by_writer[name]
        lengths.append(max(len(continuation.tokens), len(continuation.agrees)))
        prefixes.append((continuation.n_common,))
        agrees.append(continuation.agrees)
        log_probs.append(continuation.log_probs)
        scores.append(() if continuation.score is None else (continuation.score,))
    longest = max(lengths)
    return WriterSummary(
        writer=name,
        n_cuts=len(rows),
        common_prefix=_figure(prompt_ids, prefixes),
        agreement=_figure(prompt_ids, agrees),
        log_prob=_figure(prompt_ids, log_probs),
        score=_figure(prompt_ids, scores),
        agreement_by_offset=_figures_by_offset(prompt_ids, agrees, longest),
        log_prob_by_offset=_figures_by_offset(prompt_ids, log_probs, longest),
    )


def _figure(prompt_ids: Sequence[str], values: Sequence[Sequence[float]]) -> Figure:
    """Compute the mean of all values in all rows. A row is a sequence of values."""
    sums: list[tuple[float, int]] = []
    for row_values in values:
        sums.append((sum(row_values), len(row_values)))
    mean, interval = ratio_with_interval(prompt_ids, sums)
    return Figure(mean, interval, sum(map(len, values)))


def _figures_by_offset(
    prompt_ids: Sequence[str], values: Sequence[Sequence[float]], longest: int
) -> tuple[Figure, ...]:
    """For each index below ``longest``, compute the mean of the rows' values at this index.

    A row without a value at an index, because the row is too short, does not count at this index.
    """
    figures: list[Figure] = []
    for index in range(longest):
        column = [row_values[index : index + 1] for row_values in values]
        figures.append(_figure(prompt_ids, column))
    return tuple(figures)


def ratio_with_interval(
    prompt_ids: Sequence[str], values: Sequence[Sequence[float]]
) -> tuple[float | None, Interval]:
    """Divide the sum of the numerators of all rows by the sum of their denominators.

    If the rows also have numerators and denominators of a baseline, the result is divided by the
    same ratio of the baseline.

    Args:
        prompt_ids: for each row, the id of its prompt.
        values: two or four numbers for each row. The first two are a numerator and a denominator.
            The optional last two are the baseline's numerator and denominator for the same turn. A
            row is left out if one of its denominators is 0, as in an answer without target calls.

    Returns:
        The ratio and its confidence interval. Both are None if all rows are left out. The interval
        is None if the rows come from fewer than two prompts.
    """
    if not values:
        return None, None
    table = np.array([*values], dtype=float)
    used = (table[:, 1::2] > 0).all(axis=1)
    if not used.any():
        return None, None
    _, prompt_index = np.unique(np.array(prompt_ids)[used], return_inverse=True)
    # Add up the rows of each prompt. The bootstrap resamples whole prompts, because the rows of one
    # prompt (its turns or cuts) are not independent.
    # The shape of ``sums`` is [n_prompts, 2] or [n_prompts, 4].
    sums = np.zeros((prompt_index.max() + 1, table.shape[1]))
    np.add.at(sums, prompt_index, table[used])

    def ratio(drawn: np.ndarray) -> np.ndarray:
        ratios: np.ndarray = drawn[:, 0] / drawn[:, 1]
        return ratios if drawn.shape[1] == 2 else ratios / (drawn[:, 2] / drawn[:, 3])

    value = float(ratio(sums.sum(axis=0, keepdims=True))[0])
    if len(sums) < 2:
        return value, None
    # Draw how often each prompt occurs in each bootstrap resample. The seed is fixed, so that equal
    # measurements have equal intervals.
    counts = np.random.default_rng(0).multinomial(
        len(sums), np.full(len(sums), 1 / len(sums)), _N_RESAMPLES
    )
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(ratio(counts @ sums), (tail, 1 - tail))
    return value, (float(low), float(high))


def accepted_by_position(committed_per_call: Sequence[int]) -> tuple[float, ...]:
    """For each index of a draft in its round, compute the share of target calls that accepted it.

    The first share is for the first draft of each round. ``committed_per_call`` has one number per
    target call: how many tokens the call committed, including the bonus token.
    """
    if not committed_per_call:
        return ()
    accepted = np.asarray(committed_per_call) - 1
    positions = np.arange(accepted.max())
    return tuple((accepted > positions[:, None]).mean(axis=1).tolist())


def check_output(path: str | Path) -> Path:
    """Check that a report can be written to a file, create its folder, and return its path.

    An existing file is accepted only if it is a report.

    Raises:
        OptionInvalid: the file cannot be written, or it would replace a file that is not a report.
    """
    path = Path(path).expanduser()
    if path.suffix != ".json":
        raise OptionInvalid(
            f"`out` is {path}, expected a name that ends in .json, because the report is written "
            "as JSON (with a .md file next to it)."
        )
    notes = path.with_suffix(".md")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # If a run is stopped before it writes the JSON, only the Markdown file exists. So a
        # Markdown file without a JSON file may be replaced if it begins with the title of reports.
        if path.exists():
            is_ours = _is_report(path)
        else:
            is_ours = not notes.exists() or notes.read_bytes().startswith(TITLE.encode())
        if not is_ours:
            raise OptionInvalid(
                f"`out` is {path}, but this file or {notes.name} next to it exists and is not an "
                "evaluation report, so it is not replaced. Choose another `out`."
            )
        probe = path.with_name(path.name + PARTIAL_SUFFIX)
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise OptionInvalid(
            f"`out` is {path}, which cannot be written ({error.strerror or error}). Choose another "
            "`out`."
        ) from error
    return path


def _is_report(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")).get("kind") == KIND)
    except (ValueError, AttributeError):
        return False


def write_report(report: EvaluationReport, markdown: str, path: Path) -> None:
    """Write the report as JSON, and as Markdown next to it. Each file is written atomically."""
    # Write the Markdown first, so that the report is complete once the JSON exists. But serialize
    # the JSON before both files are written. If serializing fails, the files of an earlier report
    # are unchanged.
    text = json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n"
    write_atomic(path.with_suffix(".md"), printable(markdown).encode())
    write_atomic(path, text.encode())
