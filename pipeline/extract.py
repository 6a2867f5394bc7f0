"""Run the target over every pending part of the plan and write the store.

What becomes of one chat::

    row of the dataset      {"messages": [...]}                        chats/
      -> tokens, mask       int32 [T], uint8 [T], named by their hash  chats/sequences.py
      -> part 3, token 128  planned before the first forward           plan.py
      -> batch              longest first, padded on the right         forwards/parts.py
      -> forward            kv [B, T, L, H_kv, 2, d], hidden [B, T, E] forwards/capture.py
      -> codes              on the device, if the codec is lossy       Capture.encode
      -> host memory        a copy beside the next forward             forwards/host_copy.py
    on the writer's thread
      -> chunks             handed to the encoders, written in order   storage: PartWriter.write
      -> commit             the part exists                            storage: PartWriter.commit

Which parts are still to be done, in this process or in several, is decided in workers.py.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import Interrupted, OptionInvalid, StoreMismatch, WorkerError
from ..files import PARTIAL_SUFFIX, check_room
from ..machine import fix_sums
from ..moa.targets.live import Target
from ..storage.backend import open_path
from ..storage.commit import read_part_commit
from ..storage.paths import StorePath
from ..storage.schema import CODEC_NAME, TEXTS_NAME, commit_path
from ..storage.write.lock import CARD_BYTE, TEXTS_BYTE
from ..storage.write.repair import RepairPlan, retract_damage
from ..storage.write.store import StoreWriter
from ..text import Progress, counted, format_bytes, format_hours
from .add import refuse_addition
from .card import CardOrigin, write_card
from .config import ExtractConfig, core_share, resolve_encode_threads
from .forwards.calibrate import learn_from_target, learned_before, learning_on
from .forwards.parts import Forwards, Timings, load_target
from .forwards.vllm_source import VllmSource
from .plan import ExtractPlan, build_plan, interruptible
from .ray_workers import run_on_ray
from .sources import recorded_config
from .texts import keep_texts, write_texts
from .workers import PartProgress, WorkOrder, device_orders, forwards_of, is_done, run_processes, work_until_done


@dataclass(frozen=True)
class ExtractReport:
    """What an extraction did.

    Attributes:
        lost_workers: how each worker that was lost has ended.
        stored_bytes: bytes of all parts on disk.
        timings: what this run spent, and the parts that it wrote.
    """

    plan: ExtractPlan = field(repr=False)
    store: StorePath
    n_workers: int
    lost_workers: list[str]
    stored_bytes: int
    timings: Timings = field(repr=False)

    @property
    def n_sequences(self) -> int:
        """Sequences of the store."""
        return self.plan.n_sequences

    @property
    def n_tokens(self) -> int:
        """Tokens of the store."""
        return self.plan.n_tokens

    @property
    def n_parts(self) -> int:
        """Parts of the store."""
        return self.plan.n_parts

    @property
    def n_parts_done(self) -> int:
        """Parts written by this run."""
        return self.timings.n_parts

    @property
    def n_parts_late(self) -> int:
        """Parts that this run wrote when another run had committed them already."""
        return self.timings.n_late

    def describe(self) -> str:
        """Return the report as text."""
        t, counts, raw_bytes = self.timings, self.plan.sequences, self.plan.n_raw_bytes
        lines = [
            f"store        {self.store}: {counted(self.n_sequences, 'sequence')}, {self.n_tokens:,} tokens, "
            f"{counted(self.n_parts, 'part')}",
            f"size         {format_bytes(self.stored_bytes)}, {self.stored_bytes / raw_bytes:.3f} of "
            f"{format_bytes(raw_bytes)} raw, {self.stored_bytes / self.n_tokens:,.0f} bytes per token",
            f"dataset      {self.plan.dataset}: {counted(counts.n_rows, 'row')} read",
            f"rejected     {counts.n_rejected:,} of {counted(counts.n_rows, 'row')}, "
            f"{counted(counts.n_duplicates, 'duplicate')} left out"
            + "".join("\n" + line for line in counts.rejection_lines()),
        ]
        if self.lost_workers:
            ends = "; ".join(dict.fromkeys(self.lost_workers))
            lines.append(
                f"lost         {len(self.lost_workers)} of {self.n_workers} workers ({ends}); others did their parts"
            )
        if not t.n_parts and not t.n_late:
            return "\n".join([*lines, "this run     nothing to do, every part was there"])
        of_workers = f"{self.n_workers} workers, " * (self.n_workers > 1)
        twice = f", {counted(t.n_late, 'part')} that another run committed first" if t.n_late else ""
        lines.append(
            f"this run     {counted(t.n_parts, 'part')}, {t.n_tokens:,} tokens in {format_hours(t.extract_s)} "
            f"({of_workers}{t.tokens_per_s:,.0f} tokens/s); forwards {format_hours(t.forward_s)}, waiting for the "
            f"writer {format_hours(t.wait_s)}, padding {t.padding_fraction:.1%}{twice}"
        )
        return "\n".join(lines)

    def record(self, provenance: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record for runs/: everything that may differ between runs that give equal data."""
        counts = self.plan.sequences
        return {
            "config": self.plan.config.named(),
            "provenance": dict(provenance),
            "n_parts_done": self.n_parts_done,
            "n_parts_late": self.n_parts_late,
            "lost_workers": self.lost_workers,
            "rejections": dict(counts.rejections),
            "rejection_examples": counts.examples,
            "n_rows": counts.n_rows,
            "n_duplicates": counts.n_duplicates,
            "n_truncated": counts.n_truncated,
            "timings": self.timings.record(),
            "plan": {"expected_bytes": self.plan.stored_bytes},
        }


def extract(
    config: ExtractConfig,
    progress: Progress | None = None,
    provenance: Mapping[str, Any] | None = None,
    redo: RepairPlan | None = None,
) -> ExtractReport:
    """Extract activations to a store, or continue where an earlier run stopped.

    Args:
        progress: called with (done, total, message). The message begins with the phase: tokenise (chats), hash and
            load (bytes of weights), learn and extract (tokens).
        redo: parts to extract again although they are committed, if they are damaged when the store is opened.

    Raises:
        MoaDataError: the input cannot be used, or Interrupted after Ctrl-C.
        OptionInvalid: the store lacks fields or decoder layers, which `add` adds.
        StoreError: the output folder cannot be used, or the store was made from other inputs.
        TargetError: the target cannot be loaded.
    """
    fix_sums()
    start = time.perf_counter()
    check_room(open_path(config.out))
    with interruptible("while planning; nothing was written"):
        plan = build_plan(config, progress, with_weights=True)
    plan.check_disk()
    refuse_addition(plan)
    with interruptible("while the codec learned; nothing was written"):
        plan, target = _learn_codec(plan, progress)
    with _open_store(plan, shares=redo is None) as store:
        plan = _with_texts(dataclasses.replace(plan, codec=store.codec), store)  # what another run learned first
        if redo is not None:
            store.replace_parts(retract_damage(store, redo).parts)
        counter = PartProgress(store, plan.table, progress)
        timings, lost = Timings(), list[str]()
        try:
            if not is_done(store) and config.scale.is_alone:
                _work_alone(plan, store, target or _load_target(plan, progress), timings, counter)
            elif not is_done(store):
                target = None  # its memory is the workers'
                timings, lost = _run_workers(plan, store, counter)
        except KeyboardInterrupt as error:
            n_done = len(store.committed_parts())
            store.sweep()
            raise Interrupted(
                f"Interrupted; the part in flight was discarded, {n_done} of {store.n_parts} parts are committed in "
                f"{store.path}. Run the same command again to continue."
            ) from error
        if timings.n_padded_tokens:
            counter.tell(timings.n_tokens, timings.n_parts, looks=True)
        timings.n_before_tokens, timings.wall_s = counter.n_before_tokens, time.perf_counter() - start
        stored = sum(read_part_commit(commit_path(store.path, part)).stored_bytes for part in range(store.n_parts))
        report = ExtractReport(plan, store.path, config.scale.n_workers, lost, stored, timings)
        with store.publishing(CARD_BYTE):
            write_card(store.path, CardOrigin.of(config))
        store.record_run(report.record(provenance or {}))
        store.sweep()
    return report


def repair(
    plan: RepairPlan,
    model: str,
    dataset: str | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> ExtractReport:
    """Make the damaged parts and files of a store again.

    Nothing is deleted before target and dataset are known to be the ones that the store was made from, and what is
    deleted is checked once more right before.

    Args:
        model: the target that the store was made with: a folder or a hub id.
        dataset: the chats; None for those of the store's last extraction.
        device: device of the forward; None for that of the store's last extraction.

    Raises:
        WorkerError: no extraction is recorded, there is damage that this cannot repair, or the codec learns something
            else than the parts were written with.
        StoreMismatch: the store was made from another target or dataset.
    """
    if plan.others:
        raise WorkerError(f"{plan.others[0].path}: {plan.others[0].message} This cannot be repaired; extract again.")
    try:
        recorded = recorded_config(plan.store)
    except WorkerError as error:
        if not plan.codec:
            raise
        raise WorkerError(
            f"{plan.store}: {CODEC_NAME}/ is damaged and no extraction is recorded. If `recode` made the store, run "
            "the same command again: it learns the codec from the lossless store anew."
        ) from error
    config = recorded.replaced(
        model=model,
        dataset=dataset or recorded.dataset,
        out=str(plan.store),
        device=device or recorded.forward.device,
        workers="1",
        engine="processes",
        address=None,
        gpus_per_worker=None,
    )
    try:
        return extract(config, progress, provenance, redo=plan)
    except StoreMismatch as error:
        if set(error.changes) != {"codec.basis_sha256"}:
            advice = "Give the --model and the --dataset that it was made from."
            raise StoreMismatch(str(plan.store), error.changes, advice) from error
        raise WorkerError(
            f"{plan.store}: what the codec learns here is not what the parts were written with, which another device "
            f"or number of threads is enough for ({error.changes['codec.basis_sha256'][0]} is recorded). Repair it "
            f"where it was extracted, restore {CODEC_NAME}/ from a copy, or extract to another folder."
        ) from error


def _open_store(plan: ExtractPlan, shares: bool) -> StoreWriter:
    """Begin or join the store; where another run was first to learn the codec, with what that one learned."""
    try:
        return StoreWriter.create_or_resume(plan.store, plan.manifest, plan.table, plan.codec.files(), shares)
    except StoreMismatch as error:
        is_basis = set(error.changes) == {"codec.basis_sha256"} and shares
        learned = learned_before(plan.codec, plan.store) if is_basis else None
        if learned is None:
            raise
        manifest = dataclasses.replace(plan.manifest, codec=learned.describe())
        return StoreWriter.create_or_resume(plan.store, manifest, plan.table, learned.files(), shares)


def _learn_codec(plan: ExtractPlan, progress: Progress | None) -> tuple[ExtractPlan, Target | None]:
    """Let the codec learn from forwards over a sample of the plan, unless an earlier run did; return the target."""
    if not plan.codec.learned:
        return plan, None
    target = None
    codec = learned_before(plan.codec, plan.store)
    if codec is None:
        codec, target = plan.codec, _load_target(plan, progress)
        ids = plan.table["sequence_id"].to_pylist()
        learn_from_target(
            codec,
            plan.table["n_tokens"].to_numpy(),
            lambda row: plan.sequences.tokens(ids[row]),
            target,
            plan.spec,
            plan.dtype,
            learning_on(plan.device, plan.disk, progress),
        )
    manifest = dataclasses.replace(plan.manifest, codec=codec.describe())
    return dataclasses.replace(plan, codec=codec, manifest=manifest), target


def _load_target(plan: ExtractPlan, progress: Progress | None) -> Target:
    return load_target(plan.folder, plan.compute_dtype, plan.device, plan.memory.weight_bytes, progress)


def _with_texts(plan: ExtractPlan, store: StoreWriter) -> ExtractPlan:
    """Return the plan with its sequences mapped from the store's own file, which frees this process's memory."""
    if plan.keeps_texts:
        return plan
    with store.publishing(TEXTS_BYTE):
        sequences = keep_texts(store.path, plan.sequences, plan.texts_origin)
    return dataclasses.replace(plan, sequences=sequences)


def _work_alone(plan: ExtractPlan, store: StoreWriter, target: Target, timings: Timings, counter: PartProgress) -> None:
    forwards = forwards_of(store.manifest, target, store.codec, plan.sequences, plan.n_encode_threads)
    with _with_engine(plan, forwards) as forwards:
        work_until_done(store, forwards, plan.folder, timings, lambda: counter.tell(timings.n_tokens, timings.n_parts))


@contextmanager
def _with_engine(plan: ExtractPlan, forwards: Forwards) -> Iterator[Forwards]:
    if plan.config.forward.source != "vllm":
        yield forwards
        return
    longest = int(plan.table["n_tokens"].to_numpy().max())
    with VllmSource(plan.folder, forwards.target, forwards.spec, forwards.dtype, longest) as engine:
        yield dataclasses.replace(forwards, engine=engine.capture)


def _run_workers(plan: ExtractPlan, store: StoreWriter, counter: PartProgress) -> tuple[Timings, list[str]]:
    """Run worker processes until all is done; raises OptionInvalid where they cannot share the store."""
    config, scale = plan.config, plan.config.scale
    if not store.is_shared:
        raise OptionInvalid(
            f"The file system of {store.path} has no locks of byte ranges, so only one process can write to it. Leave "
            "out --workers and --engine."
        )
    is_ray = scale.engine == "ray"
    is_local = Path(config.model).expanduser().is_dir()  # else each machine finds the commit in its own cache
    order = WorkOrder(
        store=str(store.path.absolute() if isinstance(store.path, Path) else store.path),
        texts=_texts_for_workers(plan, store),
        model=str(plan.folder.absolute()) if is_local or not is_ray else config.model,
        revision=None if is_local or not is_ray else plan.folder.name,
        device=plan.device,
        n_threads=core_share(scale.n_local_workers),
        n_encode_threads=resolve_encode_threads(config.forward.encode_threads, scale.n_local_workers),
    )
    if is_ray:
        return run_on_ray(order, store, scale, config.forward.encode_threads, counter)
    return run_processes(device_orders(order, plan.device, scale.n_workers), store, counter)


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
