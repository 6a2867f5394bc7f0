"""Run the target over every pending part of the plan and write the store.

What becomes of one chat::

    row of the dataset      {"messages": [...]}                        dataset.py
      -> tokens, mask       int32 [T], uint8 [T], named by their hash  sequences.py
      -> part 3, token 128  planned before the first forward           plan.py
      -> batch              longest first, padded on the right         forwards/parts.py
      -> forward            kv [B, T, L, H_kv, 2, d], hidden [B, T, E] forwards/capture.py
      -> codes              on the device, if the codec is lossy       Capture.encode
      -> host memory        a copy beside the next forward             Capture.to_host
    on the writer's thread
      -> chunks             handed to the encoders, written in order   storage: PartWriter.write
      -> commit             the part exists                            storage: PartWriter.commit

Which parts are still to be done, in this process or in several, is decided in workers.py.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import Interrupted, OptionInvalid, StoreMismatch
from ..files import PARTIAL_SUFFIX, check_room
from ..machine import fix_sums
from ..moa.targets.live import Target
from ..moa.targets.loading import check_weights
from ..storage.backend import open_path
from ..storage.codecs.registry import StoreCodec
from ..storage.commit import has_parts
from ..storage.paths import StorePath
from ..storage.plan import numbers
from ..storage.schema import CODEC_NAME, TARGET_NAME, TEXTS_NAME
from ..storage.write.lock import CARD_BYTE, TEXTS_BYTE
from ..storage.write.store import StoreWriter
from ..text import Progress, format_bytes
from .add import refuse_addition
from .card import write_card
from .config import ExtractConfig, ScaleSettings, core_share
from .forwards.calibrate import learned_before
from .forwards.parts import Forwards, sequence_name
from .forwards.vllm_source import VllmSource
from .plan import ExtractPlan, build_plan, interruptible, recorded_config
from .report import PartProgress, Timings, WriteReport
from .sequences import keep_texts, write_texts
from .workers import WorkOrder, device_orders, is_done, run_on_ray, run_processes, work_until_done

_N_PROVEN_TOKENS = 16  # tokens of the first sequence that the target runs before anything is created


def extract(
    config: ExtractConfig,
    progress: Progress | None = None,
    provenance: Mapping[str, Any] | None = None,
    repairs: bool = False,
) -> WriteReport:
    """Extract activations to a store, or continue where an earlier run stopped.

    Args:
        progress: called with (done, total, message). The message begins with the phase: tokenise (chats), hash and
            load (bytes of weights), learn, verify (bytes of a store that is repaired) and extract (tokens).
        repairs: check every byte of the store when it is opened, so that what is damaged is written again.

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
        codec, target = _learn_codec(plan, progress)
    with ExitStack() as opened:
        forwards = None
        if not has_parts(plan.store):  # nothing is created for a target that cannot be used
            with interruptible("while the target was loaded; nothing was written"):
                forwards = _prove_target(plan, codec, target, progress, opened)
            target = None
        store = opened.enter_context(_open_store(plan, codec, progress, repairs))
        if not plan.keeps_texts:  # mapped from the store's own file they take no memory of this process
            with store.publishing(TEXTS_BYTE):
                plan = replace(plan, sequences=keep_texts(store.path, plan.sequences, plan.texts_origin))
        had_target, counter = store.has_target, PartProgress(store, progress)
        if forwards is None and config.scale.is_alone and not is_done(store):
            forwards = _load_forwards(plan, codec, target, progress, opened)
        target = None  # of workers, whose memory it would take
        timings, lost = _work(plan, store, forwards, counter)
        if timings.n_padded_tokens:
            counter.tell(timings, looks=True)
        timings.n_before_tokens, timings.wall_s = counter.n_before_tokens, time.perf_counter() - start
        report = _report(plan, store, timings, lost)
        report.restored = "" if had_target else f"{TARGET_NAME}/"
        with store.publishing(CARD_BYTE):
            write_card(store.path, config.model, config.dataset, config.storage.licences)
        counts = plan.sequences
        # Everything that may differ between runs that give equal data.
        record = {
            "config": plan.config.named(),
            "lost_workers": lost,
            "rejection_examples": counts.examples,
            "plan": {"expected_bytes": plan.stored_bytes},
            **{name: getattr(counts, name) for name in ("rejections", "n_rows", "n_duplicates", "n_truncated")},
        }
        store.record_run(report.record(provenance) | record)
        store.sweep()
    return report


def _learn_codec(plan: ExtractPlan, progress: Progress | None) -> tuple[StoreCodec, Target | None]:
    """Let the codec learn from forwards over a sample of the plan, unless an earlier run did; return the target too."""
    codec, forward = plan.forward.codec, plan.forward
    if not codec.learned:
        return codec, None
    if (before := learned_before(codec, plan.store, plan.manifest)) is not None:
        return before, None
    target = forward.load_target(progress)
    ids, lengths = plan.table["sequence_id"].to_pylist(), numbers(plan.table, "n_tokens")
    plan.learn(target, lengths, lambda row: plan.sequences.text(ids[row])[0], progress)
    return codec, target


def _prove_target(
    plan: ExtractPlan, codec: StoreCodec, target: Target | None, progress: Progress | None, opened: ExitStack
) -> Forwards | None:
    """Refuse a target that cannot be loaded or run; returns its forwards, None if workers will load it."""
    is_alone = plan.config.scale.is_alone
    if plan.config.scale.engine == "ray":  # other machines load it, and this one may have no room for it
        check_weights(plan.forward.folder)
        return None
    if is_alone:
        forwards = _load_forwards(plan, codec, target, progress, opened)
    else:
        target = target or plan.forward.load_target(progress)
        forwards = plan.forward.forwards(target, codec, plan.sequences.text)
    if forwards.engine is None:
        first = plan.table.slice(0, 1).to_pylist()[0]
        tokens, _ = plan.sequences.text(first["sequence_id"])
        captured = forwards.capture([tokens[:_N_PROVEN_TOKENS]])
        captured.check_finite([sequence_name(first)])
    return forwards if is_alone else None


def _load_forwards(
    plan: ExtractPlan, codec: StoreCodec, target: Target | None, progress: Progress | None, opened: ExitStack
) -> Forwards:
    """Load the target, and start the engine that runs it if that is another one."""
    target = target or plan.forward.load_target(progress)
    forwards = plan.forward.forwards(target, codec, plan.sequences.text)
    if plan.config.forward.source == "vllm":
        longest = int(numbers(plan.table, "n_tokens").max())
        source = VllmSource(plan.forward.folder, target, forwards.spec, forwards.dtype, longest)
        forwards = replace(forwards, engine=opened.enter_context(source).capture)
    return forwards


def _open_store(plan: ExtractPlan, codec: StoreCodec, progress: Progress | None, repairs: bool) -> StoreWriter:
    """Begin or join the store; if another run was first to learn the codec, with what that one learned."""
    manifest = replace(plan.manifest, codec=codec.describe())
    create = partial(
        StoreWriter.create_or_resume,
        plan.store,
        shares=not repairs,  # the store is checked by the process that has it alone
        begins_anew=not repairs,
        depth="values" if repairs else "sizes",
        progress=progress,
    )
    try:
        return create(manifest, plan.table, codec.files())
    except StoreMismatch as error:
        is_basis = set(error.changes) == {"codec.basis_sha256"}
        learned = learned_before(codec, plan.store, plan.manifest) if is_basis else None
        if learned is None:
            raise
        manifest = replace(manifest, codec=learned.describe())
        return create(manifest, plan.table, learned.files())


def _work(
    plan: ExtractPlan, store: StoreWriter, forwards: Forwards | None, counter: PartProgress
) -> tuple[Timings, list[str]]:
    """Write what is pending, in this process or in workers; returns what was spent, and how workers were lost."""
    timings = Timings()
    try:
        if forwards is not None:
            forwards = replace(forwards, codec=store.codec, text=plan.sequences.text)
            work_until_done(store, forwards, plan.forward.folder, timings, counter.tell)
        elif not is_done(store):
            return _run_workers(plan, store, counter)
        return timings, []
    except KeyboardInterrupt as error:
        n_done = len(store.committed_parts())
        store.sweep()
        raise Interrupted(
            f"Interrupted; the part in flight was discarded, {n_done} of {store.n_parts} parts are committed in "
            f"{store.path}. Run the same command again to continue."
        ) from error


def _run_workers(plan: ExtractPlan, store: StoreWriter, counter: PartProgress) -> tuple[Timings, list[str]]:
    """Run worker processes until all is done; raises OptionInvalid where they cannot share the store."""
    config, scale, folder = plan.config, plan.config.scale, plan.forward.folder
    if not store.is_shared:
        raise OptionInvalid(
            f"The file system of {store.path} has no locks of byte ranges, so only one process can write to it. Leave "
            "out --workers and --engine."
        )
    is_ray = scale.engine == "ray"
    is_local = not is_ray or Path(config.model).expanduser().is_dir()  # else each machine finds it in its own cache
    order = WorkOrder(
        store=str(store.path.absolute() if isinstance(store.path, Path) else store.path),
        texts=_texts_for_workers(plan, store),
        model=str(folder.absolute()) if is_local else config.model,
        revision=None if is_local else folder.name,
        device=plan.forward.device,
        n_threads=core_share(scale.n_local_workers),
        n_encode_threads=plan.forward.n_encode_threads,
        attempt=store.attempt,
    )
    if is_ray:
        return run_on_ray(order, store, scale, config.forward.encode_threads, counter)
    return run_processes(device_orders(order, plan.forward.device, scale.workers), store, counter)


def _texts_for_workers(plan: ExtractPlan, store: StoreWriter) -> str | None:
    """Return the Arrow file of the sequences, None for the store's; raises OptionInvalid where workers find none."""
    is_ray = plan.config.scale.engine == "ray"
    if plan.texts_origin is not None and (is_ray or isinstance(store.path, Path)):
        return None
    if is_ray and not isinstance(store.path, Path):
        raise OptionInvalid(
            f"{plan.config.dataset} has no commit that would name its rows, so {store.path} keeps no texts for workers "
            "of other machines. Give a file, a folder, or a dataset of the Hub with a revision."
        )
    # Of a bucket they map a copy; and without an origin no later start could tell whose texts they are.
    texts = store.scratch_path / f"{TEXTS_NAME}.{store.attempt}{PARTIAL_SUFFIX}"
    write_texts(texts, plan.sequences, plan.texts_origin)
    return str(texts.absolute())


def _report(plan: ExtractPlan, store: StoreWriter, timings: Timings, lost: Sequence[str]) -> WriteReport:
    report = WriteReport.of(store, timings)
    report.compared = f", {report.stored_bytes / plan.raw_bytes:.3f} of {format_bytes(plan.raw_bytes)} raw"
    report.lines = plan.rows_read()
    report.lines += [f"damaged      {damage.path}: {damage.message}" for damage in store.damages]
    n_workers = plan.config.scale.workers
    if n_workers > 1:
        report.lines.append(f"workers      {n_workers}")
    if lost:
        ends = "; ".join(dict.fromkeys(lost))
        report.lines.append(f"lost         {len(lost)} of {n_workers} workers ({ends}); others did their parts")
    return report


def repair(
    store: str | os.PathLike[str] | StorePath,
    model: str,  # the target that the store was made with: a folder or a hub id
    dataset: str | None = None,  # the chats; None for those of the store's last extraction
    device: str | None = None,  # device of the forward; None for that of the store's last extraction
    progress: Progress | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> WriteReport:
    """Extract what is damaged or missing in a store, with the settings of its last extraction.

    Nothing is deleted before target and dataset are known to be the ones that the store was made from.

    Raises:
        WorkerError: no extraction is recorded.
        StoreMismatch: the store was made from another target or dataset, or the codec learns something else.
    """
    path = open_path(store)
    recorded = recorded_config(path)
    config = recorded.replaced(
        model=model,
        dataset=dataset or recorded.dataset,
        out=str(path),
        device=device or recorded.forward.device,
        **ScaleSettings().named(),
    )
    try:
        return extract(config, progress, provenance, repairs=True)
    except StoreMismatch as error:
        advice = (
            "Give the --model and the --dataset that it was made from. If only codec.basis_sha256 differs, repair it "
            f"on the machine that extracted it, restore {CODEC_NAME}/ from a copy, or extract to another folder."
        )
        raise StoreMismatch(str(path), error.changes, advice) from error
