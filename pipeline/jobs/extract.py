"""Run the target over every pending part of the plan and write the store.

What becomes of one chat::

    row of the dataset      {"messages": [...]}                        dataset, chats
      -> tokens, mask       int32 [T], uint8 [T], named by their hash  rendering, prompts, sequences
      -> part 3, token 128  planned before the first forward           plan
      -> batch              longest first, padded on the right         forwards.run_parts
      -> forward            kv [B, T, L, H_kv, 2, d], hidden [B, T, E] capture.capture
      -> codes              on the device, if the codec is lossy       Capture.encode
      -> host memory        a copy beside the next forward             Capture.to_host
    on the writer's thread
      -> chunks             handed to the encoders, written in order   PartWriter.write
      -> commit             the part exists                            PartWriter.commit
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import Interrupted
from ...moa.targets.live import Target
from ...storage.care.repair import RepairPlan, drop_from
from ...storage.names import commit_path
from ...storage.parts.commit import read_part_commit
from ...storage.write.store import StoreWriter
from ...text import Progress, format_bytes, format_hours
from ..config import ExtractConfig, resolve_encode_threads
from ..forwards.calibrate import learn_from_target, learned_before, learning_on
from ..forwards.parts import Forwards, Timings, load_target, run_parts, save_bundle
from .add_plan import refuse_addition
from .card import CardOrigin, public_name, write_card
from .kept_texts import keep_texts
from .plan import ExtractPlan, build_plan, existing_parent


@dataclass(frozen=True)
class ExtractReport:
    """What an extraction did.

    Attributes:
        n_parts_done: parts written by this run.
        raw_bytes: bytes of all activations before compression.
        stored_bytes: bytes of all parts on disk.
        rejections: reason -> rows that gave no sequence.
        rejection_lines: the rejections as text, with examples.
        n_rows: rows of the dataset that were read.
        n_duplicates: rows whose sequence was there already.
        dataset: the dataset, and which split and files of it were read, as text.
    """

    store: Path
    n_sequences: int
    n_tokens: int
    n_parts: int
    n_parts_done: int
    raw_bytes: int
    stored_bytes: int
    rejections: Mapping[str, int]
    rejection_lines: list[str]
    n_rows: int
    n_duplicates: int
    timings: Timings = field(repr=False)
    dataset: str = ""

    def describe(self) -> str:
        """Return the report as text."""
        t = self.timings
        lines = [
            f"store        {self.store}: {self.n_sequences:,} sequences, {self.n_tokens:,} tokens, "
            f"{self.n_parts:,} parts",
            f"size         {format_bytes(self.stored_bytes)}, {self.stored_bytes / self.raw_bytes:.3f} of "
            f"{format_bytes(self.raw_bytes)} raw, {self.stored_bytes / self.n_tokens:,.0f} bytes per token",
            f"dataset      {self.dataset}: {self.n_rows:,} rows read",
            f"rejected     {sum(self.rejections.values()):,} of {self.n_rows:,} rows, {self.n_duplicates:,} duplicates "
            "left out" + "".join("\n" + line for line in self.rejection_lines),
        ]
        if not self.n_parts_done:
            return "\n".join([*lines, "this run     nothing to do, every part was there"])
        lines.append(
            f"this run     {self.n_parts_done:,} parts, {t.n_tokens:,} tokens in {format_hours(t.extract_s)} "
            f"({t.tokens_per_s:,.0f} tokens/s); forwards {format_hours(t.forward_s)}, waiting for the writer "
            f"{format_hours(t.wait_s)}, padding {t.padding_fraction:.1%}"
        )
        return "\n".join(lines)


def extract(
    config: ExtractConfig,
    progress: Progress | None = None,
    provenance: Mapping[str, Any] | None = None,
    redo: RepairPlan | None = None,
) -> ExtractReport:
    """Extract activations to a store, or go on where an earlier run stopped.

    Args:
        progress: called with (done, total, message). The message begins with the phase: tokenise (chats), hash and
            load (bytes of weights), learn and extract (tokens).
        redo: parts to extract again although they are committed, if they are damaged when the store is opened.

    Raises:
        PipelineError: the input cannot be used, or Interrupted after Ctrl-C.
        AdditionWanted: the store lacks fields or decoder layers, which `add` adds.
        StoreError: the output folder cannot be used, or the store was made from other inputs.
        TargetError: the target cannot be loaded.
    """
    start = time.perf_counter()
    timings = Timings()
    try:
        plan = build_plan(config, progress, with_weights=True)
    except KeyboardInterrupt as error:
        raise Interrupted(
            "Interrupted while planning; nothing was written. Run the same command again to start."
        ) from error
    plan.check_disk()
    refuse_addition(plan)
    try:
        plan, target = _learn_codec(plan, progress)
    except KeyboardInterrupt as error:
        raise Interrupted(
            "Interrupted while the codec learned; nothing was written. Run the same command again to start."
        ) from error
    out = Path(config.out).expanduser()
    with StoreWriter.create_or_resume(out, plan.manifest, plan.table, plan.codec.files()) as store:
        plan = dataclasses.replace(plan, codec=store.codec)  # of the schema version that the store has
        if not plan.keeps_texts:
            plan = dataclasses.replace(plan, sequences=keep_texts(out, plan.sequences, plan.texts_origin))
        if redo is not None:
            drop_from(store, redo)
        pending = store.pending_parts()
        try:
            if pending or not store.has_target:
                target = target or _load_target(plan, progress)
            if target is not None and not store.has_target:
                save_bundle(store, target, plan.folder, plan.config.target_layers)
            if target is not None and pending:
                is_done = np.isin(plan.table["part"].to_numpy(), pending, invert=True)
                timings.n_before_tokens = int(plan.table["n_tokens"].to_numpy()[is_done].sum(dtype=np.int64))
                run_parts(_forwards(plan, target), store, timings, "extract", progress)
        except KeyboardInterrupt as error:
            n_done = store.n_parts - len(store.pending_parts())
            raise Interrupted(
                f"Interrupted; the part in flight was discarded, {n_done} of {store.n_parts} parts are committed in "
                f"{store.path}. Run the same command again to go on."
            ) from error
        names = public_name(config.model), public_name(config.dataset)
        licences = config.storage.target_license, config.storage.dataset_license
        write_card(store.path, CardOrigin(*names, "moa-data extract", *licences))
        timings.wall_s = time.perf_counter() - start
        report = _report(plan, store, len(pending), timings)
        store.record_run(_run_record(plan, report, provenance))
    return report


def _learn_codec(plan: ExtractPlan, progress: Progress | None) -> tuple[ExtractPlan, Target | None]:
    """Let the codec learn from forwards over a sample of the plan, unless an earlier run did; return the target."""
    if not plan.codec.learned:
        return plan, None
    target = None
    codec = learned_before(plan.codec, Path(plan.config.out).expanduser())
    if codec is None:
        codec, target = plan.codec, _load_target(plan, progress)
        ids = plan.table["sequence_id"].to_pylist()
        lengths = plan.table["n_tokens"].to_numpy()
        learn_from_target(
            codec,
            lengths,
            lambda row: plan.sequences.tokens(ids[row]),
            target,
            plan.spec,
            plan.config.storage.dtype,
            learning_on(plan.device, existing_parent(Path(plan.config.out)), progress),
        )
    manifest = dataclasses.replace(plan.manifest, codec=codec.describe())
    return dataclasses.replace(plan, codec=codec, manifest=manifest), target


def _load_target(plan: ExtractPlan, progress: Progress | None) -> Target:
    return load_target(plan.folder, plan.compute_dtype, plan.device, plan.memory.weight_bytes, progress)


def _forwards(plan: ExtractPlan, target: Target) -> Forwards:
    return Forwards(
        target=target,
        spec=plan.spec,
        codec=plan.codec,
        dtype=getattr(torch, plan.config.storage.dtype),
        batch_tokens=plan.batch_tokens,
        uses_cache=plan.spec.kv,
        text=lambda key: (plan.sequences.tokens(key), plan.sequences.response_mask(key)),
        n_tokens=plan.n_tokens,
        n_encode_threads=resolve_encode_threads(plan.config.forward.encode_threads),
    )


def _report(plan: ExtractPlan, store: StoreWriter, n_parts_done: int, timings: Timings) -> ExtractReport:
    stored = sum(read_part_commit(commit_path(store.path, part)).stored_bytes for part in range(store.n_parts))
    return ExtractReport(
        store=store.path,
        n_sequences=plan.n_sequences,
        n_tokens=plan.n_tokens,
        n_parts=store.n_parts,
        n_parts_done=n_parts_done,
        raw_bytes=sum(plan.raw_bytes.values()),
        stored_bytes=stored,
        rejections=dict(plan.sequences.rejections),
        rejection_lines=plan.sequences.rejection_lines(),
        n_rows=plan.sequences.n_rows,
        n_duplicates=plan.sequences.n_duplicates,
        timings=timings,
        dataset=plan.dataset,
    )


def _run_record(plan: ExtractPlan, report: ExtractReport, provenance: Mapping[str, Any] | None) -> dict[str, Any]:
    """Make the record for runs/: everything that may differ between runs that give equal data."""
    return {
        "config": plan.config.named(),
        "provenance": dict(provenance or {}),
        "n_parts_done": report.n_parts_done,
        "rejections": dict(report.rejections),
        "rejection_examples": plan.sequences.examples,
        "n_rows": report.n_rows,
        "n_duplicates": report.n_duplicates,
        "n_truncated": plan.sequences.n_truncated,
        "timings": report.timings.record(),
        "plan": {"expected_bytes": plan.stored_bytes},
    }
