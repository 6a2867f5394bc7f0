"""Add activations to an existing store: the target runs again, and only what is new is written."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import Interrupted, OptionInvalid, WorkerError
from ..machine import fix_sums
from ..moa.targets.bundle import held_layers
from ..moa.targets.live import Target
from ..storage.codecs.registry import StoreCodec
from ..storage.dtypes import to_float32
from ..storage.names import PLAN_NAME, commit_path
from ..storage.parts.commit import read_part_commit
from ..storage.parts.plan import read_plan
from ..storage.paths import StorePath
from ..storage.read.store import ActivationStore
from ..storage.schema import TOKENS
from ..storage.write.addition import StoreAddition, load_next_basis, save_next_basis
from ..storage.write.store import StoreWriter
from ..text import Progress, activation_name, counted, format_bytes, format_hours
from .add_plan import AddPlan, plan_addition
from .audit import stored_tolerance
from .card import CardOrigin, public_name, write_card
from .chats.sequences import content_id
from .config import AddConfig, ExtractConfig, parse_fields, resolve_encode_threads
from .forwards.calibrate import learn_from_target, learning_on
from .forwards.capture import capture
from .forwards.parts import Forwards, Timings, batches, load_target, run_parts, save_bundle
from .plan import existing_parent
from .sources import recorded_config

LAST = "hidden/last"


@dataclass(frozen=True)
class AddReport:
    """What an addition did.

    Attributes:
        fields: the fields that were added, by this run or by earlier runs of the same addition.
        target_layers: decoder layers that the store keeps after the addition.
        n_parts: parts that have the new fields.
        n_parts_done: parts that this run wrote to.
        n_pending_parts: planned parts that are still to be extracted.
        stored_bytes: bytes of the added fields on disk.
        agreement: how hidden/last of the first batch compares with the stored one.
    """

    store: StorePath
    fields: tuple[str, ...]
    target_layers: int
    n_parts: int
    n_parts_done: int
    n_pending_parts: int
    n_tokens: int
    stored_bytes: int
    agreement: str
    timings: Timings = field(repr=False)

    def describe(self) -> str:
        """Return the report as text."""
        kept = f"target/ keeps the last {self.target_layers} decoder layers" if self.target_layers else ""
        if not self.fields:
            return f"added        nothing, {self.store} has it all{f'; {kept}' if kept else ''}"
        t = self.timings
        lines = [
            f"added        {', '.join(self.fields)} to {self.store}: {self.n_tokens:,} tokens in "
            f"{counted(self.n_parts, 'part')}, {format_bytes(self.stored_bytes)}; the other fields are as they were"
        ]
        lines += [f"target       {kept}"] if kept else []
        lines += [f"rounding     {self.agreement}"] if self.agreement else []
        lines.append(
            f"this run     {counted(self.n_parts_done, 'part')}, {t.n_tokens:,} tokens in {format_hours(t.extract_s)} "
            f"({t.tokens_per_s:,.0f} tokens/s); forwards {format_hours(t.forward_s)}, padding {t.padding_fraction:.1%}"
        )
        if self.n_pending_parts:
            lines.append(f"pending      {self.n_pending_parts:,} parts are still to be extracted, with all fields")
        return "\n".join(lines)


def add(config: AddConfig, progress: Progress | None = None, provenance: Mapping[str, Any] | None = None) -> AddReport:
    """Add activations to every committed part of a store, or go on where an earlier run stopped.

    The forwards are those of the extraction: the same sequences in the same batches, so that the same device, libraries
    and number of threads give the bits that one extraction of all fields would have given. Elsewhere the last bits
    differ. Readers see the new fields once every part has them.

    Raises:
        OptionInvalid: nothing can be added to this store, or the target gives other values than the store holds.
        Interrupted: after Ctrl-C.
        WorkerError: the configuration or the target's values cannot be used, or the disk is too small.
        StoreError: the store cannot be used, or was made with another target.
        TargetError: the target cannot be loaded.
    """
    fix_sums()
    start = time.perf_counter()
    try:
        plan = plan_addition(config, progress)
    except KeyboardInterrupt as error:
        raise Interrupted(
            "Interrupted while planning; nothing was written. Run the same command again to start."
        ) from error
    plan.check_disk()
    timings = Timings()
    with StoreWriter.create_or_resume(plan.store, plan.stored, read_plan(plan.store / PLAN_NAME)) as writer:
        try:
            with ActivationStore(plan.store) as reader:
                report = _Addition(plan, writer, reader, timings, progress).run()
        except KeyboardInterrupt as error:
            added = ", ".join(plan.fields) or "the target's layers"
            raise Interrupted(
                f"Interrupted; the part in flight was discarded. Until all of {added} is there, {plan.store} is as it "
                "was. Run the same command again to go on."
            ) from error
        recorded = _recorded(plan)
        if recorded is not None:
            names = public_name(recorded.model), public_name(recorded.dataset)
            licences = recorded.storage.target_license, recorded.storage.dataset_license
            write_card(plan.store, CardOrigin(*names, "moa-data extract", *licences))
        timings.wall_s = time.perf_counter() - start
        if report.fields or report.target_layers != plan.n_layers_before:
            writer.record_run(_run_record(plan, report, recorded, provenance))
    return report


class _Addition:
    """One run of an addition, while the store is locked."""

    def __init__(
        self,
        plan: AddPlan,
        writer: StoreWriter,
        reader: ActivationStore,
        timings: Timings,
        progress: Progress | None,
    ) -> None:
        self.plan, self.writer, self.reader, self.timings, self.progress = plan, writer, reader, timings, progress
        self.dtype = getattr(torch, plan.dtype)
        self.rows = {key: i for i, key in enumerate(self.reader.sequences["sequence_id"].to_pylist())}

    def run(self) -> AddReport:
        """Save the bundle, let the codec learn, compare one batch, write all parts and replace the manifest."""
        plan, writer = self.plan, self.writer
        needs_bundle = not writer.has_target or held_layers(writer.target_path) < plan.n_layers_kept
        n_parts_done, agreement = 0, ""
        target = None
        if plan.fields or needs_bundle:
            target = load_target(plan.folder, plan.compute_dtype, plan.device, plan.memory.weight_bytes, self.progress)
        if needs_bundle and target is not None:
            save_bundle(writer, target, plan.folder, plan.n_layers_kept)
        codec = plan.codec
        if (
            target is not None
            and codec.only(plan.fields).learned
            and not load_next_basis(plan.store, codec, writer.codec)
        ):
            self._learn(codec, target)
        manifest = dataclasses.replace(plan.manifest, codec=codec.describe()) if plan.fields else plan.manifest
        addition = StoreAddition(writer, manifest, codec)
        pending = addition.pending_parts()
        if target is not None and pending:
            agreement = self._compare(target, pending[0])
            self._write(addition, target, codec, pending)
            n_parts_done = len(pending)
        addition.finish()
        return self._report(n_parts_done, agreement)

    def _text(self, sequence_id: str) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and mask of a stored sequence after checking that its id is their hash."""
        index = self.rows[sequence_id]
        tokens, mask = self.reader.read(index, TOKENS), self.reader.read(index, "response_mask")
        if content_id(tokens, mask) != sequence_id:
            raise OptionInvalid(
                f"{self.plan.store}: the tokens of sequence {sequence_id[:12]} are not those that it was named after. "
                "Run `moa-data verify`, then `moa-data repair`."
            )
        return tokens, mask

    def _write(self, addition: StoreAddition, target: Target, codec: StoreCodec, pending: list[int]) -> None:
        plan, timings = self.plan, self.timings
        forwards = Forwards(
            target=target,
            spec=plan.spec,
            codec=codec,
            dtype=self.dtype,
            batch_tokens=plan.batch_tokens,
            uses_cache=plan.uses_cache,
            text=self._text,
            n_encode_threads=resolve_encode_threads(plan.config.encode_threads),
        )
        n_left = sum(read_part_commit(commit_path(plan.store, part)).n_tokens for part in pending)
        timings.n_before_tokens = plan.n_tokens - n_left

        def tell() -> None:
            if self.progress:
                n_done = addition.n_parts - len(addition.pending_parts())
                n_tokens = timings.n_before_tokens + timings.n_tokens
                self.progress(n_tokens, plan.n_tokens, f"add {n_done}/{addition.n_parts} parts")

        run_parts(forwards, addition, pending, timings, tell)

    def _learn(self, codec: StoreCodec, target: Target) -> None:
        """Let the new fields learn from the sequences that the old ones learned from."""
        plan = self.plan
        if self.writer.pending_parts():
            raise OptionInvalid(
                f"{plan.store}: {', '.join(plan.fields)} must learn from all sequences, but "
                f"{len(self.writer.pending_parts())} parts are still to be extracted. Run the extract command that "
                "began the store, then add."
            )
        ids = self.reader.sequences["sequence_id"].to_pylist()
        new, lengths = codec.only(plan.fields), self.reader.lengths
        learning = learning_on(target.device, existing_parent(plan.store), self.progress)
        learn_from_target(
            new, lengths, lambda row: self._text(ids[row])[0], target, plan.spec, plan.dtype, learning, plan.uses_cache
        )
        save_next_basis(self.writer, codec)

    def _compare(self, target: Target, part: int) -> str:
        """Run a part's first batch and compare hidden/last with the stored one; refuse more than rounding explains."""
        plan, reader = self.plan, self.reader
        if LAST not in reader.fields:
            return ""
        codec = reader.codec.only(reader.codec.with_sources(LAST))
        batch = next(batches(self.writer.part_sequences(part), plan.batch_tokens))
        ids = batch["sequence_id"].to_pylist()
        spec = parse_fields(codec.fields)
        live = capture(target.model, [self._text(key)[0] for key in ids], spec, self.dtype, plan.uses_cache)
        copied = live.encode(codec, ids).to_host()
        copied.wait()
        n_values = n_other = 0
        error = norm = 0.0
        for b, key in enumerate(ids):
            own_rows = copied.rows(LAST, b)
            rows = own_rows if isinstance(own_rows, dict) else {LAST: own_rows}
            stored = reader.read(self.rows[key], LAST, decoded=False)
            n_values += sum(values.size for values in rows.values())
            n_other += sum(int((stored[name] != values).sum()) for name, values in rows.items())
            own = live.fields[LAST][b, : live.n_tokens[b]].float().cpu().numpy()
            was = to_float32(reader.read(self.rows[key], LAST), plan.dtype)
            error, norm = error + float(np.square(was - own).sum()), norm + float(np.square(own).sum())
        relative = (error / max(norm, 1e-30)) ** 0.5
        if not relative <= stored_tolerance(reader, plan.dtype):
            raise OptionInvalid(
                f"{plan.store}: {plan.config.model} gives a {LAST} that differs by {relative:.1%} from the stored one, "
                "more than rounding explains, so new fields would not belong to the old ones. Nothing was written; "
                "check the release of transformers, and run `moa-data audit`."
            )
        if not n_other:
            return f"the first batch gave the stored {LAST} bit for bit"
        return (
            f"the first batch gave a {LAST} of which {n_other / n_values:.2%} of the stored numbers differ in last "
            "bits: device, threads or libraries are not those of the extraction"
        )

    def _report(self, n_parts_done: int, agreement: str) -> AddReport:
        plan = self.plan
        commits = [read_part_commit(commit_path(plan.store, part)) for part in self.writer.committed_parts()]
        starts = tuple(f"{name}/" for name in plan.fields)
        files = [(name, record) for commit in commits for name, record in commit.files.items()]
        return AddReport(
            store=plan.store,
            fields=plan.fields,
            target_layers=plan.n_layers_kept,
            n_parts=len(commits),
            n_parts_done=n_parts_done,
            n_pending_parts=len(self.writer.pending_parts()),
            n_tokens=plan.n_tokens,
            stored_bytes=sum(record.bytes for name, record in files if name.startswith(starts)),
            agreement=agreement,
            timings=self.timings,
        )


def _recorded(plan: AddPlan) -> ExtractConfig | None:
    """Return the settings of the store's last extraction, with what is added; None where none is recorded."""
    try:
        recorded = recorded_config(plan.store)
    except WorkerError:
        return None
    names = tuple(map(activation_name, plan.all_activations))
    return recorded.replaced(model=plan.config.model, activations=names, target_layers=plan.n_layers_kept)


def _run_record(
    plan: AddPlan, report: AddReport, recorded: ExtractConfig | None, provenance: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Make the record for runs/; its settings would make the whole store, for a repair."""
    record: dict[str, Any] = {
        "added": plan.config.named() | {"fields": report.fields, "agreement": report.agreement},
        "provenance": dict(provenance or {}),
        "n_parts_done": report.n_parts_done,
        "timings": report.timings.record(),
    }
    return record if recorded is None else record | {"config": recorded.named()}
