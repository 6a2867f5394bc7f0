"""Drafters beside each other: an evaluation of all of them, and what their training runs say about themselves."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .markdown import length_text, markdown_report, ratio_text
from .report import EvaluationReport, MethodSummary

KIND = "moa-data comparison report"
SCHEMA_VERSION = 1
CONVENTIONS = {
    "comparable": "runs are trained alike: one store with one codec, equal steps, tokens and settings, but for those "
    "that a drafter has of its own",
    "n_bytes_read": "bytes of the store that a run read for its training tokens: stored chunks, as compressed as they "
    "are; None for runs that did not record it",
    "n_tokens": "training tokens of all invocations of a run, prompts included, padding not",
    "draft_ms_per_call": "seconds of drafting over target calls",
    "draft_ms_per_draft": "seconds of drafting over drafted tokens that were verified",
}
_MAY_DIFFER = frozenset(
    {
        "store", "out", "drafter", "preset", "resume", "stop_after_steps", "max_steps", "epochs", "micro_batch_size",
        "devices", "accelerator", "reader_threads", "prefetch_batches", "prefetch_mb", "log_every", "checkpoint_every",
    }
)  # fmt: skip
"""Settings that change no result, or that are told in another way: stores by what they hold, steps as taken."""


@dataclass(frozen=True)
class ComparedRun:
    """One drafter of a comparison.

    Attributes:
        name: in the names of the methods.
        kind: of the drafter.
        n_parameters: trained weights.
        n_steps: optimizer steps; None where its folder does not say, as all below.
        n_tokens: tokens that it was trained on.
        n_bytes_read: bytes of the store that its training read.
        expected_acceptance_length: the best of its validations.
        methods: ``chain`` and ``tree`` -> what it did.
    """

    name: str
    kind: str
    n_parameters: int
    n_steps: int | None
    n_tokens: int | None
    n_bytes_read: int | None
    expected_acceptance_length: float | None
    methods: dict[str, MethodSummary]

    def to_json(self) -> dict[str, Any]:
        """Plain values; of the methods what a comparison is about, the rest is in the evaluation."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "methods"}
        return values | {
            method: {
                "acceptance_length": summary.acceptance_length,
                "acceptance_length_interval": summary.acceptance_length_interval,
                "ratio": summary.ratio,
                "ratio_interval": summary.ratio_interval,
                "draft_ms_per_call": summary.call_ms("draft"),
                "draft_ms_per_draft": draft_ms(summary),
            }
            for method, summary in self.methods.items()
        }


@dataclass(frozen=True)
class ComparisonReport:
    """A whole comparison.

    Attributes:
        runs: the drafters.
        warnings: why they are not comparable, one line each; empty where they are.
        evaluation: the measurement.
    """

    runs: list[ComparedRun]
    warnings: list[str]
    evaluation: EvaluationReport

    def to_json(self) -> dict[str, Any]:
        """Plain values; NaN does not occur."""
        return {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "conventions": CONVENTIONS,
            "warnings": self.warnings,
            "runs": [run.to_json() for run in self.runs],
            "evaluation": self.evaluation.to_json(),
        }


def build_comparison(evaluation: EvaluationReport) -> ComparisonReport:
    """Join an evaluation of chains and trees of some drafters with the facts of their runs."""
    several = len(evaluation.drafters) > 1
    names = ("kind", "n_parameters", "n_steps", "n_tokens", "n_bytes_read", "expected_acceptance_length")
    runs = [
        ComparedRun(
            name,
            **{key: facts[key] for key in names},
            methods={
                method: evaluation.method(f"{method} {name}" if several else method) for method in ("chain", "tree")
            },
        )
        for name, facts in evaluation.drafters.items()
    ]
    return ComparisonReport(runs, differences(evaluation.drafters), evaluation)


def draft_ms(summary: MethodSummary) -> float:
    """Milliseconds of drafting per drafted token."""
    return 1e3 * summary.draft_s / max(1, summary.n_drafted)


def differences(drafters: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why drafters cannot be compared as drafters: what their training had that others' had not.

    Args:
        drafters: name -> facts, see ``DrafterFacts``.

    Returns:
        One line each; empty where all were trained alike.
    """
    found = [
        f"{name}: its folder holds no training run, so nothing says how it was trained"
        for name, facts in drafters.items()
        if not facts["settings"]
    ]
    told = {name: facts for name, facts in drafters.items() if facts["settings"]}
    parts = (
        ("steps", {name: {"steps": facts["n_steps"]} for name, facts in told.items()}),
        ("training tokens", {name: {"training tokens": facts["n_tokens"]} for name, facts in told.items()}),
        ("stores", {name: facts["store"] for name, facts in told.items()}),
        ("settings", {name: _shared_settings(facts["settings"]) for name, facts in told.items()}),
    )
    for part, values in parts:
        keys = list(dict.fromkeys(key for own in values.values() for key in own))
        for key in keys:
            # What a run of an earlier release did not record is no difference; a setting that is None was recorded.
            by_run = {
                name: own[key]
                for name, own in values.items()
                if key in own and (part == "settings" or own[key] is not None)
            }
            if len(set(map(str, by_run.values()))) > 1:
                shown = ", ".join(f"{name} {_short(value)}" for name, value in by_run.items())
                found.append(f"{part} differ: {shown}" if key == part else f"{part} differ in {key}: {shown}")
    return found


def _shared_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """All that drafters of any kind are trained with; what one kind has of its own is what is compared."""
    groups = {name: value if isinstance(value, dict) else {name: value} for name, value in settings.items()}
    official = {
        key: value
        for key, value in groups.pop("drafter", {}).items()
        if key in ("official_quirks", "forward_kl_weight")
    }
    flat = official | {
        name if key == "kind" else key: value for name, own in groups.items() for key, value in own.items()
    }
    return {name: value for name, value in flat.items() if name not in _MAY_DIFFER}


def _short(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return value[:12] if isinstance(value, str) else str(value)


def comparison_markdown(report: ComparisonReport) -> str:
    """One line per run, what keeps them from being comparable, then the evaluation."""
    lines = [
        "# Drafters compared",
        "",
        "| run | drafter | weights | steps | training tokens | read from the store | expected acceptance length "
        "| chain: acceptance length | tokens/s over plain | draft ms per call, per draft "
        "| tree: acceptance length | tokens/s over plain | draft ms per call, per draft |",
        "|" + "---|" * 13,
    ]
    for run in report.runs:
        cells = [
            run.name,
            run.kind,
            f"{run.n_parameters:,}",
            _number(run.n_steps),
            _number(run.n_tokens),
            "-" if run.n_bytes_read is None else f"{run.n_bytes_read / 1e6:,.0f} MB",
            "-" if run.expected_acceptance_length is None else f"{run.expected_acceptance_length:.2f}",
        ]
        for summary in run.methods.values():
            cost = f"{summary.call_ms('draft'):.1f}, {draft_ms(summary):.2f}"
            cells += [length_text(summary), ratio_text(summary), cost]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    if report.warnings:
        lines += ["Not trained alike, so differences are not the drafters' alone:", ""]
        lines += [f"- {warning}" for warning in report.warnings]
    else:
        lines.append("All were trained alike: one store, equal steps, tokens and settings.")
    return "\n".join(lines) + "\n\n" + markdown_report(report.evaluation)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
