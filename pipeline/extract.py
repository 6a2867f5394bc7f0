"""Run the target over every pending part of the plan and write the store.

A part of a store is a range of sequences that is written and committed as a whole. A part is
pending until it has a commit. A chat passes through these steps::

    dataset row             {"messages": [...]}                        dataset.py
      -> tokens, mask       int32 [T], uint8 [T], named by their hash  sequences.py
      -> part 3, token 128  planned before the first forward           plan.py
      -> batch              longest first, padded on the right         forwards/parts.py
      -> forward            kv [B, T, L, H_kv, 2, d], hidden [B, T, E] forwards/capture.py
      -> codes              on the device, if the codec is lossy       Capture.encode
      -> host memory        copied during the next forward             Capture.to_host
    on the writer thread
      -> chunks             encoded by threads, written in order       storage: PartWriter.write
      -> commit             makes the part visible                     storage: PartWriter.commit

workers.py schedules the pending parts, in this process or in several worker processes.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import OptionInvalid, StoreMismatch
from ..files import check_room
from ..machine import fix_sums
from ..moa.targets.live import Target
from ..moa.targets.loading import check_weights
from ..storage.backend import open_path
from ..storage.codecs.registry import StoreCodec
from ..storage.commit import has_parts
from ..storage.paths import StoreLike
from ..storage.plan import numbers
from ..storage.schema import ANSWERS_BY, CODEC_NAME, TARGET_NAME
from ..storage.write.store import StoreWriter
from ..text import SILENT, Progress, format_bytes
from .add import refuse_addition
from .card import write_card
from .config import ExtractConfig, ScaleSettings
from .dataset import writer_of_answers
from .forwards.calibrate import learned_before
from .forwards.parts import Forwards, run_parts, save_bundle, sequence_name
from .forwards.vllm_source import VllmSource
from .plan import ExtractPlan, build_plan, recorded_config
from .report import Provenance, Timings, WriteReport
from .sequences import keep_texts
from .workers import Total, Worker, is_done, pending_in_turn, run_on_ray, run_processes

# Number of tokens in the test forward that runs before the store is created.
_N_PROVEN_TOKENS = 16


def extract(
    config: ExtractConfig,
    progress: Progress = SILENT,
    provenance: Provenance | None = None,
    repairs: bool = False,
    share: tuple[int, int] | None = None,
) -> WriteReport:
    """Extract activations to a store, or resume an earlier extraction.

    Args:
        progress: reports the phases ``tokenise``, ``hash weights``, ``learn``, ``load the target``,
            ``verify`` and ``extract``. A phase that is not necessary is skipped.
        provenance: entries for the JSON file of the run, such as the command line.
        repairs: whether to check every byte of the store when it is opened, so that damaged parts
            are written again.
        share: (k, n) if this process is worker k of n workers. The argument is None if this process
            is the command itself. A worker writes parts, and the command writes the record of the
            run.

    Raises:
        MoaDataError: the input cannot be used.
        OptionInvalid: the store lacks fields or decoder layers; `add` adds them.
        StoreError: the output folder cannot be used, or the store was made from other inputs.
        TargetError: the target cannot be loaded.
    """
    fix_sums()
    start = time.perf_counter()
    check_room(open_path(config.out))
    plan = build_plan(config, progress, with_weights=True)
    plan.check_disk()
    refuse_addition(plan)
    codec, target = _learn_codec(plan, progress)
    with ExitStack() as opened:
        forwards = None
        # Test the target first, so that nothing is created or deleted if the target is unusable.
        if repairs or not has_parts(plan.store):
            forwards = _prove_target(plan, codec, target, progress, opened)
            target = None
        store = opened.enter_context(_open_store(plan, codec, progress, repairs))
        # Move the token ids and masks from memory to a file of the store. From now on, they are
        # read through a memory map of this file.
        with store.publishing("texts"):
            sequences = keep_texts(store.path, plan.sequences, plan.texts_origin)
            plan = replace(plan, sequences=sequences)
        had_target = store.has_target
        if forwards is None and config.scale.is_alone and not is_done(store):
            forwards = _load_forwards(plan, codec, target, progress, opened)
        target = None  # Free the target's memory for the workers.
        extracting = progress.of("extract", "token")
        timings, lost = _work(plan, store, forwards, extracting, share or (0, 1))
        timings.wall_s = time.perf_counter() - start
        report = _report(plan, store, timings, lost)
        if not had_target:
            report.lines.append(f"bundle       wrote {TARGET_NAME}/")
        if share is None:
            _finish(plan, store, report.record(provenance) | {"lost_workers": lost})
    return report


def _finish(plan: ExtractPlan, store: StoreWriter, record: Mapping[str, Any]) -> None:
    """Write the dataset card and the JSON file of the run. Delete leftover files of lost workers.

    Args:
        plan: the plan of the extraction.
        store: the finished store.
        record: content of the JSON file.
    """
    with store.publishing("card"):
        write_card(store.path, plan.config.model, plan.config.dataset, plan.config.storage.licences)
    counts = plan.sequences
    # Two runs with the same activations may differ in settings, counts and examples of rejected
    # rows. These details must not change store.json, so record them in the run's JSON file.
    details: dict[str, Any] = {
        "config": plan.config.named(),
        ANSWERS_BY: writer_of_answers(plan.config.dataset),
        "rejection_examples": counts.examples,
        "plan": {"expected_bytes": plan.stored_bytes},
        "rejections": counts.rejections,
        "n_rows": counts.n_rows,
        "n_duplicates": counts.n_duplicates,
        "n_truncated": counts.n_truncated,
    }
    store.record_run({**record, **details})
    store.sweep()


def _learn_codec(plan: ExtractPlan, progress: Progress) -> tuple[StoreCodec, Target | None]:
    """Fit the codec to activations of a sample of sequences, unless an earlier run has fitted it.

    Returns:
        The fitted codec, and the loaded target. If fitting did not need the target, the second
        value is None.
    """
    codec = plan.forward.codec
    forward = plan.forward
    if not codec.learned:
        return codec, None
    if (before := learned_before(codec, plan.store, plan.manifest)) is not None:
        return before, None
    target = forward.load_target(progress)
    ids = plan.table["sequence_id"].to_pylist()
    lengths = numbers(plan.table, "n_tokens")
    plan.learn(target, lengths, lambda row: plan.sequences.text(ids[row])[0], progress)
    return codec, target


def _prove_target(
    plan: ExtractPlan,
    codec: StoreCodec,
    target: Target | None,
    progress: Progress,
    opened: ExitStack,
) -> Forwards | None:
    """Load the target and run it on a few tokens, so that an unusable target is refused early.

    Returns:
        The object that runs the target, or None if workers will load the target.
    """
    # With Ray, workers on other machines load the target. The target may be too large for this
    # machine, so check its weight files without loading them.
    if plan.config.scale.engine == "ray":
        check_weights(plan.forward.folder, getattr(torch, plan.forward.compute_dtype))
        return None
    forwards = _load_forwards(plan, codec, target, progress, opened)
    if plan.config.forward.source != "vllm":
        first = plan.table.slice(0, 1).to_pylist()[0]
        tokens, _ = plan.sequences.text(first["sequence_id"])
        captured = forwards.capture([tokens[:_N_PROVEN_TOKENS]])
        captured.check_finite([sequence_name(first)])
    return forwards if plan.config.scale.is_alone else None


def _load_forwards(
    plan: ExtractPlan,
    codec: StoreCodec,
    target: Target | None,
    progress: Progress,
    opened: ExitStack,
) -> Forwards:
    """Return the object that runs the target over batches.

    The target is loaded unless ``target`` is given. With ``source=vllm``, vLLM is started, too.
    """
    target = target or plan.forward.load_target(progress)
    forwards = Forwards(replace(plan.forward, codec=codec), target, plan.sequences.text)
    if plan.config.forward.source == "vllm":
        longest = int(numbers(plan.table, "n_tokens").max())
        dtype = getattr(torch, plan.forward.dtype)
        source = VllmSource(plan.forward.folder, target, plan.forward.spec, dtype, longest)
        forwards = replace(forwards, engine=opened.enter_context(source).capture)
    return forwards


def _open_store(
    plan: ExtractPlan, codec: StoreCodec, progress: Progress, repairs: bool
) -> StoreWriter:
    """Create the store, or resume an existing one. Returns the writer of the store.

    Another run may have fitted the codec in the meantime. In that case, the codec of the other run
    is used instead of ``codec``.
    """
    codec = learned_before(codec, plan.store, plan.manifest) or codec
    return StoreWriter.create_or_resume(
        plan.store,
        replace(plan.manifest, codec=codec.describe()),
        plan.table,
        codec.files(),
        shares=not repairs,  # While a store is checked, no other process may write to it.
        begins_anew=not repairs,
        depth="values" if repairs else "sizes",
        progress=progress,
    )


def _work(
    plan: ExtractPlan,
    store: StoreWriter,
    forwards: Forwards | None,
    progress: Progress,
    share: tuple[int, int],
) -> Total:
    """Write the store's folder ``target/`` and all pending parts, in this process or in workers.

    Args:
        plan: the plan of the extraction.
        store: writes the parts of the store.
        forwards: runs the target over batches in this process. If worker processes run the target,
            the argument is None.
        progress: reports the number of processed tokens.
        share: (k, n) if this process is worker k of n workers.

    Returns:
        The timings, and one text for each worker that was lost.
    """
    timings = Timings()
    if forwards is None:
        return (timings, []) if is_done(store) else _run_workers(plan, store, progress)
    settings = replace(plan.forward, codec=store.codec)
    forwards = replace(forwards, settings=settings, text=plan.sequences.text)
    write_bundle = partial(
        save_bundle, store, forwards.target, plan.forward.folder, plan.config.target_layers
    )
    # The first worker writes the store's folder target/ before its parts. If the first worker was
    # killed, another worker writes the folder after its own parts.
    if share[0] == 0 and not store.has_target:
        write_bundle()
    run_parts(forwards, store, pending_in_turn(store, *share), timings, progress)
    if not store.has_target:
        write_bundle()
    return timings, []


def _run_workers(plan: ExtractPlan, store: StoreWriter, progress: Progress) -> Total:
    """Run this extraction in worker processes until all parts are committed."""
    config = plan.config
    scale = config.scale
    # After the test forward, PyTorch's cache still holds GPU memory. Free it for a worker.
    torch.cuda.empty_cache()
    # Make all paths absolute, because Ray starts workers in other working directories.
    single = config.replaced(
        **ScaleSettings().named(),
        model=_absolute(config.model),
        dataset=_absolute(config.dataset),
        out=_absolute(str(store.path)),
    )
    device = plan.forward.device
    devices = (
        [device] * scale.workers if scale.engine == "ray" else worker_devices(device, scale.workers)
    )
    workers: list[Worker] = []
    for index, worker_device in enumerate(devices):
        workers.append(Worker(single.replaced(device=worker_device), index, scale.workers))
    if scale.engine == "ray":
        return run_on_ray(workers, store, scale, progress)
    return run_processes(workers, store, progress)


def _absolute(name: str) -> str:
    """Return the absolute path of a local file or folder. Other names are returned unchanged."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def worker_devices(device: str, n_workers: int) -> list[str]:
    """Return the device of each worker on this machine.

    Several workers may share the CPU. An accelerator (cuda, mps) serves only one worker.

    Raises:
        OptionInvalid: there are fewer devices than workers.
    """
    kind = torch.device(device)
    if kind.type == "cpu":
        return [device] * n_workers
    n_devices = torch.cuda.device_count() if kind.type == "cuda" and kind.index is None else 1
    if n_workers > n_devices:
        raise OptionInvalid(
            f"Each of the {n_workers} workers needs its own device, but this machine has only "
            f"{n_devices} of the kind {device}. Lower `workers`, or leave out `device`."
        )
    if kind.index is not None:
        return [device]
    return [f"{kind.type}:{index}" for index in range(n_workers)]


def _report(
    plan: ExtractPlan, store: StoreWriter, timings: Timings, lost: Sequence[str]
) -> WriteReport:
    report = WriteReport.of(store, timings)
    share = report.stored_bytes / plan.raw_bytes
    report.lines = [
        f"compressed   to {share:.3f} of the raw {format_bytes(plan.raw_bytes)}",
        *plan.rows_read(),
    ]
    report.lines += [f"damaged      {damage.path}: {damage.message}" for damage in store.damages]
    n_workers = plan.config.scale.workers
    if n_workers > 1:
        report.lines.append(f"workers      {n_workers}")
    if lost:
        report.lines.append(
            f"lost         {len(lost)} of {n_workers} workers ended early; their parts were "
            "extracted again"
        )
        report.lines += [f"             {end}" for end in lost]
    return report


def repair(
    store: StoreLike,
    model: str,
    dataset: str | None = None,
    device: str | None = None,
    progress: Progress = SILENT,
    provenance: Provenance | None = None,
) -> WriteReport:
    """Extract the damaged and missing parts of a store, with the settings of its last extraction.

    Before anything is deleted, the target and the dataset are compared with the store's record.

    Args:
        model: the target that the store was made with: a folder, a GGUF file or a hub id.
        dataset: the chats. If the argument is None, the dataset of the last extraction is used.
        device: device of the target. If the argument is None, the device of the last extraction is
            used.

    Raises:
        WorkerError: the store has no record of an extraction.
        StoreMismatch: the store was made from another target or dataset, or fitting the codec again
            gives different parameters.
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
            "Give the `model` and the `dataset` that the store was made from. If only "
            "codec.basis_sha256 differs, run repair on the machine that extracted the store, "
            f"restore {CODEC_NAME}/ from a copy, or extract to another folder."
        )
        raise StoreMismatch(str(path), error.changes, advice) from error
