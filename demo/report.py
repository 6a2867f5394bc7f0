"""Writes the demo's Markdown report and its pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ..storage.care.summary import StoreSummary, summarize_store
from ..storage.disk.durable import write_atomic
from ..text import printable
from ..trainer.config import CURVES_FILE
from . import figures
from .config import DemoConfig
from .corpus import HELD_OUT_FILE, read_jsonl
from .serving import CUT_S, TARGET_MS
from .state import FIGURES, PHASES, REPORT_FILE, DemoState
from .target import TargetReport, greedy_answers

N_SAMPLES = 6


def write_report(folder: Path, config: DemoConfig, state: DemoState, provenance: dict[str, Any]) -> StoreSummary:
    """Write `report.md` and `figures/` from what the finished phases left.

    Args:
        state: Finished phases; all but the report itself must be among them.
        provenance: Command, versions and the like, shown at the end.

    Returns:
        The store's summary, from which the sizes come.
    """
    summary = summarize_store(folder / "store")
    target = TargetReport.load(folder / "target")
    pictures = folder / FIGURES
    pictures.mkdir(exist_ok=True)
    figures.target_curves(target, pictures / "target.png")
    figures.bytes_per_token(summary, pictures / "bytes_per_token.png")
    for source, name in (
        (folder / "drafter" / CURVES_FILE, "drafter.png"),
        (folder / "eval" / "report.png", "speed.png"),
    ):
        shutil.copyfile(source, pictures / name)
    rows = _one_of_each_category(read_jsonl(folder / "corpus" / HELD_OUT_FILE))[:N_SAMPLES]
    prompts = [row["messages"][:-1] for row in rows]  # without the reference answer
    answers = greedy_answers(folder / "target", prompts, config.evaluation.max_new_tokens)
    lines = [
        *_headline(state, summary),
        *_corpus_section(state),
        *_target_section(target, rows, answers),
        *_store_section(state, summary),
        *_drafter_section(state, config),
        *_evaluation_section(folder),
        *_serving_section(state),
        *_time_section(state, config),
        *_provenance_section(provenance),
    ]
    write_atomic(folder / REPORT_FILE, printable("\n".join(lines) + "\n").encode())
    return summary


def _one_of_each_category(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first row of each category, in order."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(row["category"], row)
    return list(first.values())


def _headline(state: DemoState, summary: StoreSummary) -> list[str]:
    measured = state.facts("eval")
    return [
        "# Demo: from chats to a drafter",
        "",
        f"**{measured['acceptance_length']:.2f} tokens per target call** (bonus token included; plain decoding has 1), "
        f"{measured['calls_saved']:.0%} of the target calls saved, {measured['ratio']:.2f} x the tokens per second of "
        f"plain decoding, {measured['n_exact']} of {measured['n_answers']} answers identical to it. "
        f"The drafter learned from {summary.n_tokens:,} stored tokens; the target was not loaded for its training.",
        "",
        "![Speed and acceptance length](figures/speed.png)",
        "",
    ]


def _corpus_section(state: DemoState) -> list[str]:
    lines = [
        "## Corpus",
        "",
        "| | chats | characters | zlib ratio | bits per word | families |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in (("train", "training"), ("held_out", "held out")):
        stats = state.facts("corpus")[name]
        lines.append(
            f"| {title} | {stats['n_chats']:,} | {stats['n_chars']:,} | {stats['zlib_ratio']:.1f} "
            f"| {stats['word_entropy_bits']:.1f} | {len(stats['by_category'])} |"
        )
    return [*lines, "", "No held-out prompt occurs among the training chats.", ""]


def _target_section(report: TargetReport, rows: list[dict[str, Any]], answers: list[str]) -> list[str]:
    lines = [
        "## Target",
        "",
        f"A Llama of {report.n_parameters:,} parameters, trained on {report.n_tokens:,} tokens in "
        f"{report.seconds:.0f} s: held-out loss {report.validation_loss[-1][1]:.3f} nats per answer token, "
        f"{report.validation_accuracy:.1%} of the answer tokens ranked first.",
        "",
        "![Target](figures/target.png)",
        "",
        "What it answers to held-out prompts, greedily:",
        "",
    ]
    for row, answer in zip(rows, answers, strict=True):
        question = row["messages"][-2]["content"]
        lines += [f"*{row['category']}*: {question}", "", "````text", answer, "````", ""]
    return lines


def _store_section(state: DemoState, summary: StoreSummary) -> list[str]:
    facts = state.facts("extract")
    lines = [
        "## Store",
        "",
        f"{summary.n_sequences:,} sequences, {summary.n_tokens:,} tokens "
        f"({summary.n_response_tokens:,} of them answers), "
        f"{facts['tokens_per_s']:,.0f} tokens/s; codec {summary.codec}.",
        "",
        "| field | dtype | raw bytes per token | stored bytes per token | stored / raw |",
        "|---|---|---|---|---|",
    ]
    for item in summary.fields:
        raw, stored = item.raw_bytes / summary.n_tokens, item.stored_bytes / summary.n_tokens
        lines.append(f"| {item.name} | {item.dtype} | {raw:,.1f} | {stored:,.1f} | {item.ratio:.3f} |")
    raw = summary.raw_bytes / summary.n_tokens
    lines.append(f"| **all** | | {raw:,.1f} | {summary.bytes_per_token:,.1f} | {summary.ratio:.3f} |")
    return [*lines, "", "![Bytes per token](figures/bytes_per_token.png)", ""]


def _drafter_section(state: DemoState, config: DemoConfig) -> list[str]:
    facts = state.facts("train")
    # None where the demo went on after the last step of training: this invocation trained nothing.
    speed = ""
    if facts["tokens_per_s"] is not None:
        speed = (
            f" at {facts['tokens_per_s']:,.0f} tokens/s, {facts['data_wait_share']:.1%} of the time waiting for data"
        )
    expected = ""
    if facts["expected_acceptance_length"] is not None:
        expected = (
            f" Acceptance length expected from held-out stored activations: {facts['expected_acceptance_length']:.2f}."
        )
    return [
        "## Drafter",
        "",
        f"Mixture of Attentions, {facts['n_parameters']:,} trained parameters, {config.drafter.drafter_steps} steps of "
        f"{config.drafter.drafter_batch_size} sequences{speed}.{expected}",
        "",
        "![Drafter](figures/drafter.png)",
        "",
    ]


def _evaluation_section(folder: Path) -> list[str]:
    """Return the evaluation's own Markdown with headings one level lower."""
    lines = (folder / "eval" / "report.md").read_text(encoding="utf-8").splitlines()
    body = ["#" + line if line.startswith("#") else line for line in lines]
    return [*body, ""]


def _serving_section(state: DemoState) -> list[str]:
    facts = state.facts("serve")
    same = "the tokens of plain greedy decoding" if facts["is_equal"] else "NOT the tokens of plain greedy decoding"
    return [
        "## Served, with a cut",
        "",
        f"The target ran in a server of its own, with at least {TARGET_MS:.0f} ms a call; a client that holds the "
        f"drafter and the store's frozen pieces talked to it through an emulated 4G network, which was cut for "
        f"{CUT_S:g} s. The answer of {facts['n_tokens']} tokens took {facts['answer_s']:.1f} s and "
        f"{facts['n_target_calls']} target calls; {facts['n_alone']} tokens were written without the network, "
        f"{facts['n_rolled_back']} of them taken back when it returned. The answer has {same}.",
        "",
        "![An answer over 4G with a cut](figures/serving.png)",
        "",
    ]


def _time_section(state: DemoState, config: DemoConfig) -> list[str]:
    done = [(phase, state.facts(phase)["seconds"]) for phase in PHASES if state.is_done(phase)]
    return [
        "## Time",
        "",
        "| phase | seconds |",
        "|---|---|",
        *(f"| {phase} | {seconds:.1f} |" for phase, seconds in done),
        f"| **all** | {sum(seconds for _, seconds in done):.1f} |",
        "",
        f"Seed {config.seed}. Decode with it:",
        "",
        "```",
        f'moa-data generate --model {config.out}/target --drafter {config.out}/drafter --prompt "Sort these words '
        'alphabetically: river, amber, king."',
        "```",
        "",
    ]


def _provenance_section(provenance: dict[str, Any]) -> list[str]:
    return ["## Provenance", "", "```json", json.dumps(provenance, indent=1, default=str), "```"]
