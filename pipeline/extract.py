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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import Interrupted, OptionInvalid, StoreMismatch
from ..machine import fix_sums
from ..moa.targets.live import Target
from ..storage.care.repair import RepairPlan, retract_damage
from ..storage.disk.durable import PARTIAL_SUFFIX, check_room
from ..storage.disk.files import open_path
from ..storage.names import TEXTS_NAME, commit_path
from ..storage.parts.commit import read_part_commit
from ..storage.paths import StorePath
from ..storage.write.lock import CARD_SLOT, TEXTS_SLOT
from ..storage.write.store import StoreWriter
from ..text import Progress, counted, format_bytes, format_hours
from .add_plan import refuse_addition
from .card import CardOrigin, public_name, write_card
from .config import ExtractConfig, core_share, resolve_encode_threads
from .forwards.calibrate import learn_from_target, learned_before, learning_on
from .forwards.parts import Timings, load_target, run_parts
from .forwards.vllm_source import VllmSource
from .plan import ExtractPlan, build_plan
from .texts import keep_texts, write_texts
from .workers.devices import worker_devices
from .workers.local import LocalWorkers
from .workers.ray_data import RayWorkers
from .workers.tally import Tally
from .workers.work import Worker, WorkOrder, forwards_of, pieces_of, unclaimed_first


@dataclass(frozen=True)
class ExtractReport:
    """What an extraction did.

    Attributes:
        n_parts_done: parts written by this run.
        n_parts_late: parts that this run had written when another run's were committed already.
        n_workers: processes that worked at once.
        lost_workers: how each of them that was lost has ended.
        raw_bytes: bytes of all activations before compression.
        stored_bytes: bytes of all parts on disk.
        rejections: reason -> rows that gave no sequence.
        rejection_lines: the rejections as text, with examples.
        n_rows: rows of the dataset that were read.
        n_duplicates: rows whose sequence was there already.
        dataset: the dataset, and which split and files of it were read, as text.
    """

    store: StorePath
    n_sequences: int
    n_tokens: int
    n_parts: int
    n_parts_done: int
    n_parts_late: int
    n_workers: int
    lost_workers: list[str]
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
            f"store        {self.store}: {counted(self.n_sequences, 'sequence')}, {self.n_tokens:,} tokens, "
            f"{counted(self.n_parts, 'part')}",
            f"size         {format_bytes(self.stored_bytes)}, {self.stored_bytes / self.raw_bytes:.3f} of "
            f"{format_bytes(self.raw_bytes)} raw, {self.stored_bytes / self.n_tokens:,.0f} bytes per token",
            f"dataset      {self.dataset}: {counted(self.n_rows, 'row')} read",
            f"rejected     {sum(self.rejections.values()):,} of {counted(self.n_rows, 'row')}, "
            f"{counted(self.n_duplicates, 'duplicate')} left out"
            + "".join("\n" + line for line in self.rejection_lines),
        ]
        if self.lost_workers:
            ends = "; ".join(dict.fromkeys(self.lost_workers))
            lines.append(
                f"lost         {len(self.lost_workers)} of {self.n_workers} workers ({ends}); others did their parts"
            )
        if not self.n_parts_done and not self.n_parts_late:
            return "\n".join([*lines, "this run     nothing to do, every part was there"])
        of_workers = f"{self.n_workers} workers, " * (self.n_workers > 1)
        twice = f", {counted(self.n_parts_late, 'part')} that another run was faster with" if self.n_parts_late else ""
        lines.append(
            f"this run     {counted(self.n_parts_done, 'part')}, {t.n_tokens:,} tokens in {format_hours(t.extract_s)} "
            f"({of_workers}{t.tokens_per_s:,.0f} tokens/s); forwards {format_hours(t.forward_s)}, waiting for the "
            f"writer {format_hours(t.wait_s)}, padding {t.padding_fraction:.1%}{twice}"
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
        WorkerError: the input cannot be used, or Interrupted after Ctrl-C.
        OptionInvalid: the store lacks fields or decoder layers, which `add` adds.
        StoreError: the output folder cannot be used, or the store was made from other inputs.
        TargetError: the target cannot be loaded.
    """
    fix_sums()
    start = time.perf_counter()
    timings = Timings()
    check_room(open_path(config.out))
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
    with _open_store(plan, shares=redo is None) as store:
        plan = _with_texts(dataclasses.replace(plan, codec=store.codec), store)  # of the schema version that it has
        if redo is not None:
            store.replace_parts(retract_damage(store, redo).parts)
        tally, lost, n_workers = Tally(store, plan.table, progress), list[str](), config.scale.n_local_workers
        try:
            if (pieces := pieces_of(store)) and config.scale.is_alone:
                with _own_worker(plan, store, target or _load_target(plan, progress), timings) as worker:
                    parts = worker.parts(unclaimed_first(store, pieces), tally.note)
                    run_parts(worker.forwards, store, parts, timings, lambda: tally.tell(timings.n_tokens), tally.note)
            elif pieces:
                target = None  # its memory is the workers'
                workers = _directed(plan, store, tally)
                workers.run()
                timings, lost, n_workers = workers.timings, workers.lost, workers.n_workers
        except KeyboardInterrupt as error:
            n_done = len(store.committed_parts())
            store.sweep()
            raise Interrupted(
                f"Interrupted; the part in flight was discarded, {n_done} of {store.n_parts} parts are committed in "
                f"{store.path}. Run the same command again to go on."
            ) from error
        tally.finish()
        timings.n_before_tokens, timings.wall_s = tally.n_before_tokens, time.perf_counter() - start
        report = _report(plan, store, tally, timings, n_workers, lost)
        with store.publishing(CARD_SLOT):
            names = public_name(config.model), public_name(config.dataset)
            licences = config.storage.target_license, config.storage.dataset_license
            write_card(store.path, CardOrigin(*names, "moa-data extract", *licences))
        store.record_run(_run_record(plan, report, provenance))
        store.sweep()
    return report


def _open_store(plan: ExtractPlan, shares: bool) -> StoreWriter:
    """Begin or join the store; where another run was first to learn the codec, with what that one learned."""
    out = open_path(plan.config.out)
    try:
        return StoreWriter.create_or_resume(out, plan.manifest, plan.table, plan.codec.files(), shares)
    except StoreMismatch as error:
        learned = learned_before(plan.codec, out) if set(error.changes) == {"codec.basis_sha256"} and shares else None
        if learned is None:
            raise
        manifest = dataclasses.replace(plan.manifest, codec=learned.describe())
        return StoreWriter.create_or_resume(out, manifest, plan.table, learned.files(), shares)


def _learn_codec(plan: ExtractPlan, progress: Progress | None) -> tuple[ExtractPlan, Target | None]:
    """Let the codec learn from forwards over a sample of the plan, unless an earlier run did; return the target."""
    if not plan.codec.learned:
        return plan, None
    target = None
    codec = learned_before(plan.codec, open_path(plan.config.out))
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
            learning_on(plan.device, plan.disk, progress),
        )
    manifest = dataclasses.replace(plan.manifest, codec=codec.describe())
    return dataclasses.replace(plan, codec=codec, manifest=manifest), target


def _load_target(plan: ExtractPlan, progress: Progress | None) -> Target:
    return load_target(plan.folder, plan.compute_dtype, plan.device, plan.memory.weight_bytes, progress)


def _with_texts(plan: ExtractPlan, store: StoreWriter) -> ExtractPlan:
    """Return the plan with its sequences in the store's own file, or for workers in one of this run."""
    if plan.keeps_texts:
        return plan
    with store.publishing(TEXTS_SLOT):
        sequences = keep_texts(store.path, plan.sequences, plan.texts_origin)
    return dataclasses.replace(plan, sequences=sequences)


@contextmanager
def _own_worker(plan: ExtractPlan, store: StoreWriter, target: Target, timings: Timings) -> Iterator[Worker]:
    n_threads = resolve_encode_threads(plan.config.forward.encode_threads)
    forwards = forwards_of(store.manifest, target, store.codec, plan.sequences, n_threads)
    if plan.config.forward.source != "vllm":
        yield Worker(store, target, plan.folder, forwards, timings)
        return
    longest = int(plan.table["n_tokens"].to_numpy().max())
    with VllmSource(plan.folder, target, forwards.spec, forwards.dtype, longest) as engine:
        yield Worker(store, target, plan.folder, dataclasses.replace(forwards, engine=engine.capture), timings)


def _directed(plan: ExtractPlan, store: StoreWriter, tally: Tally) -> LocalWorkers | RayWorkers:
    """Return what directs the workers; raises OptionInvalid where they can't share the store, or lack devices."""
    config, n_workers = plan.config, plan.config.scale.n_workers
    if not store.is_shared:
        raise OptionInvalid(
            f"{store.path} has schema version {store.manifest.schema_version}, or its file system no locks of single "
            "bytes, so only one process can write to it. Leave out --workers and --engine."
        )
    order = _work_order(plan, store)
    if config.scale.engine == "ray":
        return RayWorkers(order, store, tally, config.scale, config.forward.encode_threads)
    devices = worker_devices(plan.device, n_workers)
    return LocalWorkers([dataclasses.replace(order, device=device) for device in devices], store, tally)


def _work_order(plan: ExtractPlan, store: StoreWriter) -> WorkOrder:
    """Return what each worker is told, with its share of this machine."""
    config, n_workers = plan.config, plan.config.scale.n_local_workers
    is_local = Path(config.model).expanduser().is_dir()  # else each machine finds the commit in its own cache
    return WorkOrder(
        store=_shown_to_all(store.path),
        texts=_texts_for_workers(plan, store),
        model=str(plan.folder.absolute()) if is_local or config.scale.engine != "ray" else config.model,
        revision=None if is_local or config.scale.engine != "ray" else plan.folder.name,
        n_weight_bytes=plan.memory.weight_bytes,
        device=plan.device,
        n_threads=core_share(n_workers),
        n_encode_threads=resolve_encode_threads(config.forward.encode_threads, n_workers),
    )


def _texts_for_workers(plan: ExtractPlan, store: StoreWriter) -> str | None:
    """Return the Arrow file of the sequences, None for the store's; raises OptionInvalid where workers find none."""
    has_origin, is_folder = plan.texts_origin is not None, isinstance(store.path, Path)
    if has_origin and (is_folder or plan.config.scale.engine == "ray"):
        return None
    if not is_folder and plan.config.scale.engine == "ray":
        raise OptionInvalid(
            f"{plan.config.dataset} has no commit that would name its rows, so {store.path} keeps no texts for workers "
            "of other machines. Give a file, a folder, or a dataset of the Hub with a revision."
        )
    # Of a bucket they map a copy; and without an origin no later start could tell whose texts they are.
    texts = store.scratch_path / f"{TEXTS_NAME}.{store.attempt}{PARTIAL_SUFFIX}"
    write_texts(texts, plan.sequences, plan.texts_origin)
    return str(texts.absolute())


def _shown_to_all(path: StorePath) -> str:
    return str(path.absolute() if isinstance(path, Path) else path)


def _report(
    plan: ExtractPlan, store: StoreWriter, tally: Tally, timings: Timings, n_workers: int, lost: list[str]
) -> ExtractReport:
    stored = sum(read_part_commit(commit_path(store.path, part)).stored_bytes for part in range(store.n_parts))
    return ExtractReport(
        store=store.path,
        n_sequences=plan.n_sequences,
        n_tokens=plan.n_tokens,
        n_parts=store.n_parts,
        n_parts_done=tally.n_parts,
        n_parts_late=tally.n_late,
        n_workers=n_workers,
        lost_workers=lost,
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
        "n_parts_late": report.n_parts_late,
        "lost_workers": report.lost_workers,
        "rejections": dict(report.rejections),
        "rejection_examples": plan.sequences.examples,
        "n_rows": report.n_rows,
        "n_duplicates": report.n_duplicates,
        "n_truncated": plan.sequences.n_truncated,
        "timings": report.timings.record(),
        "plan": {"expected_bytes": plan.stored_bytes},
    }
