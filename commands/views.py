"""Turn the reports of commands into rich renderables, which the commands print."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..text import counted, format_bytes, format_hours, format_range, printable
from ..trainer.config import DRAFTER
from .console import as_options

if TYPE_CHECKING:
    from ..moa.decoding.loop import Generation
    from ..storage.read.verify import StoreSummary, VerifyReport
    from ..trainer.fit import RunPlan, TrainReport

BAR_CELLS = 40
COMPLETE_IT = "Run the command that created the store again; it writes what is missing."


def pairs_view(title: str, pairs: Mapping[str, Any]) -> Group:
    """Show names and values under a title, one pair per line.

    A value is never broken into several lines, so that a search in the output finds long ids.
    """
    width = max(map(len, pairs), default=0)
    lines: list[Text] = []
    for name, value in pairs.items():
        text = printable(" ".join(str(value).split("\n")))
        lines.append(Text.assemble((f"{name:<{width}}", "dim"), "  ", text))
    return Group(Text(title, style="bold cyan"), *lines)


def bars(labels: Sequence[str], counts: Sequence[int]) -> Table:
    """Draw a horizontal bar for each label. The length of the bar is proportional to the count.

    The longest bar has BAR_CELLS character cells.
    """
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    max_count = max(counts, default=0) or 1
    for label, count in zip(labels, counts, strict=True):
        cells = max(round(BAR_CELLS * count / max_count), 1 if count else 0)
        table.add_row(label, Text("█" * cells, style="cyan"), f"{count:,}")
    return table


def summary_view(summary: "StoreSummary") -> RenderableType:
    """Show a store: size, progress, fields, lengths, target, identities and conventions."""
    facts: dict[str, Any] = {
        "sequences": f"{summary.n_sequences:,} of {summary.manifest.n_sequences:,} planned",
        "tokens": f"{summary.n_tokens:,} of {summary.manifest.n_tokens:,} planned"
        f", {summary.n_response_tokens / max(summary.n_tokens, 1):.0%} in responses",
        "parts": f"{summary.manifest.n_parts - summary.n_pending_parts} of "
        f"{summary.manifest.n_parts} finished",
        "size": f"{format_bytes(summary.stored_bytes)}, {summary.ratio:.3f} of the uncompressed "
        f"{format_bytes(summary.raw_bytes)}, {summary.bytes_per_token:,.0f} bytes per token",
        "codec": summary.codec,
        "frozen weights": "in target/" if summary.has_target else "missing",
    }
    meanings = {item.spec.name: item.spec.description for item in summary.fields}
    blocks: list[RenderableType] = [
        pairs_view(str(summary.path), facts),
        fields_table(summary),
        pairs_view("Meaning of the fields", meanings),
        _lengths_view(*summary.lengths),
        pairs_view("Target", summary.manifest.target),
        pairs_view("Extraction", summary.manifest.extraction),
        pairs_view("Identities", summary.manifest.identities),
        pairs_view("Conventions", summary.manifest.conventions),
    ]
    if summary.missing:
        blocks.insert(1, _incomplete(summary.missing))
    if summary.unfinished:
        unfinished: list[str] = []
        for name, n in summary.unfinished.items():
            unfinished.append(f"{name} (in {n} of {summary.manifest.n_parts} parts)")
        fields = ", ".join(unfinished)
        advice = (
            f"{fields} cannot be read yet, because `moa-data add` has not finished. Run the same add "
            "command again."
        )
        blocks.insert(1, Text(advice, style="yellow"))
    spaced_blocks: list[RenderableType] = []
    for block in blocks:
        spaced_blocks += [block, Text()]
    return Group(*spaced_blocks[:-1])


def _lengths_view(edges: Sequence[int], counts: Sequence[int]) -> Group:
    """Show a histogram of the lengths of sequences. Empty bins at the start are left out."""
    first_bin = 0
    for index, count in enumerate(counts):
        if count:
            first_bin = index
            break
    labels = [f"{low}-{high - 1}" for low, high in itertools.pairwise(edges)]
    return Group(
        Text("Tokens per sequence", style="bold cyan"),
        bars(labels[first_bin:], counts[first_bin:]),
    )


def _incomplete(missing: str) -> Text:
    return Text.assemble(("INCOMPLETE", "bold yellow"), f": {missing}. {COMPLETE_IT}")


def fields_table(summary: "StoreSummary") -> Table:
    """Show the activations of a store and their sizes, in a table that fits into 80 columns."""
    table = Table(
        title="Activations",
        title_justify="left",
        title_style="bold cyan",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    for name in ("field", "dtype", "per token"):
        table.add_column(name, no_wrap=True)
    for name in ("raw", "stored", "ratio", "bits/\nvalue", "bytes/\ntoken"):
        table.add_column(name, justify="right")
    for item in summary.fields:
        spec = item.spec
        ratio = item.stored_bytes / item.raw_bytes if item.raw_bytes else math.nan
        cells = (spec.name, spec.dtype, "x".join(map(str, spec.token_shape)) or "1")
        rows = [(cells, format_bytes(item.raw_bytes), item.stored_bytes, f"{ratio:.3f}", "")]
        for array, n_bytes in item.arrays.items() if len(item.arrays) > 1 else ():
            name = f"  {array.name.removeprefix(spec.name + '/')}"
            rows.append(((name, array.logical_dtype, ""), "", n_bytes, "", "dim"))
        for names, raw, n_bytes, share, style in rows:
            bits = f"{8 * n_bytes * spec.storage_dtype.itemsize / max(item.raw_bytes, 1):.2f}"
            per_token = f"{n_bytes / max(summary.n_tokens, 1):,.1f}"
            table.add_row(*names, raw, format_bytes(n_bytes), share, bits, per_token, style=style)
    return table


def verify_view(report: "VerifyReport") -> RenderableType:
    """Show the result of checking a store.

    The view lists missing parts, the damage of each part, and files that could not be checked. The
    last line says whether the store is damaged.
    """
    blocks: list[RenderableType] = [_incomplete(report.missing)] if report.missing else []
    for title, findings in (("damage", report.damages), ("not checked", report.unchecked)):
        table = Table("part", box=SIMPLE_HEAD)
        for name in ("file", title):
            table.add_column(name, overflow="fold")
        for finding in findings:
            part = "-" if finding.part is None else str(finding.part)
            table.add_row(part, Text(printable(finding.path)), Text(printable(finding.message)))
        blocks += [table] if findings else []
    checked = (
        f"{counted(report.n_parts, 'part')}, {counted(report.n_sequences, 'sequence')}, "
        f"{report.n_tokens:,} tokens, {format_bytes(report.n_bytes)}"
    )
    if report.damages:
        verdict = ("DAMAGED", "bold red")
    elif not report.ok:
        verdict = ("NOT CHECKED", "bold yellow")
    else:
        verdict = ("no damage" if report.missing else "complete, no damage", "bold green")
    blocks.append(Text.assemble(verdict, f": {checked} checked"))
    return Group(*blocks)


def sample_view(
    row: Mapping[str, Any],
    tokens: Sequence[int],
    mask: Sequence[int],
    decode: Callable[[list[int]], str],
) -> RenderableType:
    """Show one sequence. Responses (mask 1) are coloured and enclosed in ⟦ ⟧."""
    text = Text()
    for is_response, run in itertools.groupby(
        zip(mask, tokens, strict=True), key=lambda pair: bool(pair[0])
    ):
        span = printable(decode([token for _, token in run]))
        if is_response:
            text.append("⟦", style="dim").append(span, style="bold green").append("⟧", style="dim")
        else:
            text.append(span, style="dim")
    share = sum(map(bool, mask)) / max(len(tokens), 1)
    legend = Text.assemble(
        "\n",
        ("other text", "dim"),
        "  ",
        ("⟦response, on which drafters are trained⟧", "bold green"),
        f"  {share:.0%} of the tokens\n",
    )
    return Group(pairs_view("Sequence", row), legend, text)


def run_plan_view(plan: "RunPlan") -> RenderableType:
    """Show the size, the estimated cost and the chosen settings of a training run."""
    exports = [name for name, problems in plan.export_problems.items() if not problems]
    facts = {
        "steps": f"{plan.n_steps:,}, {plan.steps_per_epoch:,} per epoch",
        "sequences": f"{plan.n_sequences:,}",
        "tokens": f"{plan.n_tokens_per_epoch:,} per epoch",
        "activations": f"{format_bytes(plan.read_bytes_per_epoch)} are read per epoch",
        "parameters": f"{plan.n_parameters:,}",
        "time": _range_text(plan.cost.seconds, format_hours),
        "memory": _range_text(plan.cost.memory_bytes, format_bytes),
        "disk": f"{_range_text(plan.cost.disk_bytes, format_bytes)}; "
        f"{format_bytes(plan.free_disk_bytes)} are free",
        "validation": _validation_text(plan),
        "exports to": ", ".join(exports) or "-",
    }
    for name, problems in plan.export_problems.items():
        if problems:
            facts[f"no export to {name}"] = as_options("; ".join(problems))
    if plan.other_drafter is not None:
        facts["better drafter"] = f"{plan.other_drafter.choice}: {plan.other_drafter.reason}"
    title = (
        f"Settings chosen for a target of width {plan.hidden_size:,} and "
        f"{plan.n_tokens_per_epoch:,} training tokens per epoch"
    )
    chosen: dict[str, str] = {}
    for setting in plan.chosen:
        chosen[setting.name] = f"{setting.value!s:<7} {setting.why}"
    return Group(pairs_view("Training", facts), pairs_view(title, chosen))


def _range_text(pair: tuple[float, float] | None, form: Callable[[float], str]) -> str:
    return "not measured" if pair is None else format_range(*pair, form)


def _validation_text(plan: "RunPlan") -> str:
    if not plan.n_validation_sequences:
        return "-"
    answers = (
        "the target wrote the answers"
        if plan.has_own_answers
        else "it is not known whether the target wrote the answers"
    )
    return (
        f"{plan.n_validation_sequences:,} sequences, {plan.n_validation_positions:,} response "
        f"tokens; {answers}"
    )


def train_view(report: "TrainReport") -> RenderableType:
    """Show the results of a training run, and the path of its drafter."""
    speed = "" if report.tokens_per_s is None else f" ({report.tokens_per_s:,.0f}/s)"
    share = report.data_wait_share
    best = report.best_expected_acceptance_length
    width = ""
    if report.best_half_width is not None:
        width = f" ± {report.best_half_width:.2f} (95 %, {report.n_validation_sequences} sequences)"
    facts = {
        "run": report.out,
        "drafter": str(Path(report.out) / DRAFTER),
        "steps": f"{report.n_steps:,}",
        "parameters": f"{report.n_parameters:,}",
        "tokens": f"{report.n_tokens:,}{speed}",
        "waiting for data": "-" if share is None else f"{share:.1%}",
    }
    # Do not show these two metrics, which are only about the last steps. The speed and the waiting
    # time of the entire run are already shown above.
    speeds = ("train/tokens_per_s", "train/data_wait_share")
    for name, value in sorted(report.metrics.items()):
        if name not in speeds:
            facts[name] = f"{value:.4g}"
    facts["best expected acceptance length"] = "-" if best is None else f"{best:.3f}{width}"
    return pairs_view("Trained", facts)


def decoding_view(
    drafted: "Sequence[Generation]",
    plain: "Sequence[Generation] | None",
    shape: str,
    sampled: bool = False,
) -> RenderableType:
    """Compare speculative decoding with plain decoding of the same prompts.

    Args:
        drafted: answers of speculative decoding.
        plain: answers of plain decoding. If there are none, the argument is None.
        shape: shape of the draft tree.
        sampled: whether the answers were sampled. Answers of both methods may then differ by
            chance.
    """
    from ..moa.decoding.loop import sum_stats

    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for name in ("", "tokens", "target calls", "tokens/call", "tokens/s", "draft ms", "verify ms"):
        table.add_column(name, justify="left" if not name else "right")
    speeds: list[float] = []
    for name, generations in [(shape, drafted)] + ([("plain", plain)] if plain else []):
        total = sum_stats(generation.stats for generation in generations)
        # The speed is computed from the time of prefill, drafting and verification. The time to
        # print the answer is not included.
        seconds = total.prefill_s + total.draft_s + total.verify_s
        speeds.append(total.n_tokens / max(seconds, 1e-9))
        n_calls = max(1, total.n_target_calls)
        table.add_row(
            name,
            f"{total.n_tokens:,}",
            f"{total.n_target_calls:,}",
            f"{sum(total.committed_per_call) / n_calls:.2f}",
            f"{speeds[-1]:.1f}",
            f"{1e3 * total.draft_s / n_calls:.1f}",
            f"{1e3 * total.verify_s / n_calls:.1f}",
        )
    lines: list[RenderableType] = [table]
    if plain:
        ratio = speeds[0] / speeds[1]
        plain_tokens = [answer.tokens for answer in plain]
        is_equal = plain_tokens == [answer.tokens for answer in drafted]
        same = "the same tokens" if is_equal else "OTHER tokens than plain decoding"
        if sampled and not is_equal:
            same = "other random draws of the same distribution"
        lines.append(Text(f"{ratio:.2f} times the speed of plain decoding, {same}."))
    lines.append(
        Text(
            "Target calls are counted without the prefill. Tokens/call is the acceptance length, "
            "bonus token included. Times in ms are per target call.\nThe times of a single answer are "
            "imprecise; `moa-data eval` measures many answers.",
            style="dim",
        )
    )
    return Group(*lines)
