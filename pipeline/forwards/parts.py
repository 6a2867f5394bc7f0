"""The loop that runs the target over the parts of a store and passes each batch to a writer thread.

A part of a store is a range of sequences that is written and committed as a whole. The commands
``extract`` and ``add`` use this loop. The loop is a pipeline with these stages, which work on
different batches at the same time::

    main thread    runs the forward, gathers the activations, runs lossy codecs on the device
    copy streams   copy from the device to pinned host memory (``capture``)
    writer thread  cuts values into chunks, has them encoded, writes them (``storage.write.part``)
    encoders       encode chunks to bytes, on ``n_encode_threads`` threads (``storage.chunk``)

At most ``_BATCHES_AHEAD`` batches are queued for the writer thread. If the queue is full, the main
thread waits.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ...machine import keep_freed_memory
from ...moa.targets.bundle import held_layers, save_target_bundle
from ...moa.targets.facts import load_facts
from ...moa.targets.live import Mark, Target, mark_moment, seconds_between
from ...moa.targets.loading import load_target_model
from ...storage.chunk import EncodePool
from ...storage.codecs.registry import StoreCodec
from ...storage.plan import numbers
from ...storage.read.store import ActivationStore
from ...storage.write.addition import StoreAddition
from ...storage.write.part import PartWriter
from ...storage.write.store import StoreWriter
from ...text import SILENT, Progress
from ..config import ActivationSpec
from ..report import PartProgress, Timings
from .capture import Capture, capture

_BATCHES_AHEAD = 2
"""Maximum number of tasks in the writer thread's queue.

Thanks to the queue, forwards continue during a slow write, such as the end of a part.
"""
# Maximum number of batches in host memory: those queued for the writer thread, one that is being
# written, one whose last chunks are being encoded, and one that is being copied from the device.
N_HOST_BATCHES = _BATCHES_AHEAD + 3


@dataclass(frozen=True)
class CaptureSettings:
    """Settings that say which activations of the target are stored, and how the target runs."""

    spec: ActivationSpec  # The activations that are captured.
    codec: StoreCodec  # The codec of the captured activations.
    dtype: str  # The dtype of the captured activations.

    # Maximum number of tokens in a forward, padding included. A longer sequence forms a batch of
    # its own.
    batch_tokens: int
    # Whether the forward fills a KV cache even if keys and values are not captured. With a KV
    # cache, the last bits of the activations may differ.
    uses_cache: bool
    n_encode_threads: int

    def capture(self, target: Target, sequences: Sequence[np.ndarray]) -> Capture:
        """Run the target over a batch of sequences and return the activations.

        Args:
            target: the loaded target.
            sequences: one array of token ids per sequence, int32 [n_tokens].
        """
        dtype = getattr(torch, self.dtype)
        return capture(target.model, sequences, self.spec, dtype, self.uses_cache)


@dataclass(frozen=True)
class Forwards:
    """Runs the target over batches and captures the requested activations."""

    settings: CaptureSettings
    target: Target
    # Maps a sequence id to the sequence's token ids, int32 [n_tokens], and its response mask, uint8
    # [n_tokens].
    text: Callable[[str], tuple[np.ndarray, np.ndarray]]
    # Computes the activations of a batch with another inference engine, such as vLLM. The argument
    # of this function contains one array of token ids per sequence, int32 [n_tokens]. If the value
    # is None, ``target`` computes the activations.
    engine: Callable[[Sequence[np.ndarray]], Capture] | None = None

    def capture(self, tokens: Sequence[np.ndarray]) -> Capture:
        """Compute the activations of a batch with the engine. Without an engine, use the target."""
        if self.engine is not None:
            return self.engine(tokens)
        return self.settings.capture(self.target, tokens)


def run_parts(
    forwards: Forwards,
    store: StoreWriter | StoreAddition,
    parts: Iterable[int | None],
    timings: Timings,
    progress: Progress = SILENT,
) -> None:
    """Run the target over parts of a store, then write and commit each part.

    Args:
        forwards: runs the target over batches.
        store: writes parts of the store, or (for `add`) new fields of its parts.
        parts: yields the numbers of pending parts. The loop asks for the next number when the
            forwards of the previous part are done. None means that no part is available yet. The
            loop then checks the writer thread for errors and asks again.
        timings: receives the times and counts of this run.
        progress: reports the number of tokens in the phase of the caller.
    """
    keep_freed_memory()
    start = time.perf_counter()
    pool = EncodePool(forwards.settings.n_encode_threads)
    writer = BackgroundWriter()
    open_parts: list[PartWriter] = []
    counter = PartProgress(progress, store)

    try:
        counter.report(timings)
        for part in parts:
            if part is None:
                writer.check()
                continue
            # Another process may have committed this part since it was chosen. `counter.look` reads
            # new commits, and `store.part` refuses a part if its commit has been read. So call
            # `store.part` first. The part is then written a second time, and the other commit is
            # noticed when this process publishes its own part.
            out = store.part(part, pool)
            # Keep a list of open parts, to discard them after an error. If parts are as small as a
            # single batch, several earlier parts may still wait in the writer thread's queue.
            open_parts = [earlier for earlier in open_parts if earlier.is_open]
            open_parts.append(out)
            counter.look()
            for batch in batches(out.sequences, forwards.settings.batch_tokens):
                done = _run_batch(forwards, batch)
                waiting = time.perf_counter()
                writer.submit(partial(_write_batch, out, done, timings))
                timings.wait_s += time.perf_counter() - waiting
                timings.n_computed_tokens += sum(done.captured.n_tokens)
                timings.n_padded_tokens += len(done.texts) * max(done.captured.n_tokens)
                counter.report(timings)
            writer.submit(partial(_commit, out, timings))
        writer.finish()
        counter.look()
        counter.report(timings)
    except BaseException:
        # Close the pool first. This cancels the encoding of the batch that is being written, so that
        # the writer thread ends soon.
        pool.close()
        writer.abort()
        for out in open_parts:
            out.discard()
        raise
    finally:
        pool.close()
        timings.writer_s = writer.busy_s
        timings.encode_s = pool.busy_s
        timings.extract_s = time.perf_counter() - start


@dataclass(frozen=True)
class _Batch:
    """A batch that is passed to the writer thread.

    ``span`` marks the times at which the batch's forward started and ended on the device.
    """

    first_tokens: list[int]
    texts: list[tuple[np.ndarray, np.ndarray]]
    names: list[str]
    captured: Capture
    span: tuple[Mark, Mark]


def sequence_name(row: Mapping[str, Any]) -> str:
    """Return the name of a planned sequence for error messages."""
    return f"{row['sequence_id'][:12]} (row {row['source_row']} of the dataset)"


def _run_batch(forwards: Forwards, batch: pa.Table) -> _Batch:
    """Run the target over a batch, encode the activations, and start to copy them to the host."""
    names: list[str] = []
    texts: list[tuple[np.ndarray, np.ndarray]] = []
    for row in batch.to_pylist():
        names.append(sequence_name(row))
        texts.append(forwards.text(row["sequence_id"]))
    tokens = [tokens for tokens, _ in texts]
    began = mark_moment(forwards.target.device)
    captured = forwards.capture(tokens)
    span = began, mark_moment(forwards.target.device)
    copied = captured.encode(forwards.settings.codec, names).to_host()
    return _Batch(batch["first_token"].to_pylist(), texts, names, copied, span)


def _write_batch(out: PartWriter, batch: _Batch, timings: Timings) -> None:
    """On the writer thread: refuse NaN and infinity in a batch, then write the batch to its part."""
    captured = batch.captured
    timings.copy_s += captured.wait()
    captured.check_finite(batch.names)
    for index, (first_token, (tokens, mask)) in enumerate(
        zip(batch.first_tokens, batch.texts, strict=True)
    ):
        text = {"tokens": tokens, "response_mask": mask}
        for field in out.codec.fields:
            out.write(
                field, first_token, text[field] if field in text else captured.rows(field, index)
            )
    # This call does not wait for the device. The forward ended before the copies started, and the
    # copies are done.
    timings.forward_s += seconds_between(*batch.span)


def _commit(out: PartWriter, timings: Timings) -> None:
    commit = out.commit()
    timings.add_part(commit.n_tokens, out.was_first)


class BackgroundWriter:
    """Runs tasks in order on a background thread.

    If a task fails, the remaining tasks are skipped, and the next method call raises the task's
    error. ``busy_s`` is the CPU time of the thread in seconds.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "activation-writer")
        self._tasks: deque[Future[None]] = deque()
        self._stopped = False
        self.busy_s = 0.0

    def submit(self, task: Callable[[], object]) -> None:
        """Queue a task. If the queue is full, wait until a queued task is done."""
        self.check()
        if len(self._tasks) > _BATCHES_AHEAD:
            self._tasks.popleft().result()
        self._tasks.append(self._pool.submit(self._run, task))

    def check(self) -> None:
        """Raise the error of a task that has failed, if there is one."""
        while self._tasks and self._tasks[0].done():
            self._tasks.popleft().result()

    def finish(self) -> None:
        """Wait for all tasks and end the thread."""
        self._pool.shutdown()
        self.check()

    def abort(self) -> None:
        """Let the running task finish, skip the queued tasks and end the thread."""
        self._stopped = True
        self._pool.shutdown(cancel_futures=True)

    def _run(self, task: Callable[[], object]) -> None:
        if self._stopped:
            return
        try:
            task()
        except BaseException:
            # If this task failed to write a batch, the batch's part is incomplete. A queued task
            # would commit the part, so skip all queued tasks.
            self._stopped = True
            raise
        finally:
            self.busy_s = time.thread_time()


def batches(sequences: pa.Table, batch_tokens: int) -> Iterator[pa.Table]:
    """Divide the sequences of a part into batches of consecutive sequences.

    A batch has at most ``batch_tokens`` tokens, including padding. A sequence with more tokens
    forms a batch of its own.

    Args:
        sequences: rows of the plan, sorted by length, longest first.
        batch_tokens: maximum number of tokens in a batch.
    """
    lengths = numbers(sequences, "n_tokens")
    start = 0
    while start < len(lengths):
        count = max(1, batch_tokens // int(lengths[start]))
        yield sequences.slice(start, count)
        start += count


def save_bundle(store: StoreWriter, target: Target, folder: Path, n_layers_kept: int) -> None:
    """Write ``target/`` of a store in the dtype of the target's weight files.

    The forward may compute in another dtype.

    Args:
        store: writes the folder ``target/`` of the store.
        target: the loaded target.
        folder: the target's folder.
        n_layers_kept: number of last decoder layers to write.
    """
    with store.publishing("target"):
        if store.has_target:
            with ActivationStore(store.path, parts=()) as reader:
                if n_layers_kept <= held_layers(reader.target_path):
                    return  # Another process has already written target/ with enough layers.
        own_dtype = getattr(load_facts(folder).config, "dtype", None) or torch.float32
        model: Any = target.model
        if torch.promote_types(model.dtype, own_dtype) != model.dtype:
            # The dtype of the loaded model cannot represent all values of the weight files, so
            # loading has rounded the weights. Load them again, in the dtype of the files. With a
            # dtype that can represent all values, this is not necessary: the weights can then be
            # converted back to the dtype of the files without loss.
            model = load_target_model(folder, own_dtype, "cpu")
        with store.target() as bundle:
            save_target_bundle(model, target.tokenizer, bundle, n_layers_kept, own_dtype)
