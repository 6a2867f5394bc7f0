"""The loop that runs the target over parts of a store, a writer thread behind it; extracting and adding share it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..moa.target.bundle import save_target_bundle
from ..moa.target.live import Target, load_target_config, load_target_model
from ..storage.codecs.registry import StoreCodec
from ..storage.write.store import StoreWriter
from .background import BackgroundWriter, PartSink, PartTasks
from .capture import capture
from .config import ActivationSpec


@dataclass
class Timings:
    """Where a run's time went.

    Attributes:
        forward_s: seconds of forwards, gathering of activations included (device time on a GPU).
        wait_s: seconds in which the next forward waited for the writer.
        writer_s: seconds of CPU that the writer thread spent on copying, encoding and writing.
        extract_s: seconds from the first forward to the last commit.
        wall_s: seconds of the whole run.
        n_tokens: tokens of this run.
        n_padded_tokens: tokens of its batches, padding included.
        n_before_tokens: tokens that earlier runs had committed.
    """

    forward_s: float = 0.0
    wait_s: float = 0.0
    writer_s: float = 0.0
    extract_s: float = 0.0
    wall_s: float = 0.0
    n_tokens: int = 0
    n_padded_tokens: int = 0
    n_before_tokens: int = 0

    @property
    def padding_fraction(self) -> float:
        """Share of padding in what the target computed."""
        return 1.0 - self.n_tokens / self.n_padded_tokens if self.n_padded_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens stored per second, from the first forward to the last commit."""
        return self.n_tokens / self.extract_s if self.extract_s else 0.0


@dataclass(frozen=True)
class Forwards:
    """How the target is run over sequences, and what is kept of it.

    Attributes:
        target: the target.
        spec: the activations that are kept.
        codec: of their fields.
        dtype: in which they are kept.
        batch_tokens: tokens per forward, padding included.
        uses_cache: whether the forward fills a key/value cache, whatever is kept; a forward of equal batches with an
            equal cache gives equal bits.
        text: sequence id -> tokens (int32) and response mask (uint8), [n_tokens] each.
    """

    target: Target
    spec: ActivationSpec
    codec: StoreCodec
    dtype: torch.dtype
    batch_tokens: int
    uses_cache: bool
    text: Callable[[str], tuple[np.ndarray, np.ndarray]]


def run_parts(
    forwards: Forwards, store: PartSink, parts: Sequence[int], timings: Timings, on_batch: Callable[[], None]
) -> None:
    """Run the target over whole parts, and write and commit each.

    Args:
        forwards: what is run and kept.
        store: takes the parts; when this fails, the parts in flight are discarded.
        parts: their numbers.
        timings: counts up.
        on_batch: called after each forward.

    Raises:
        PipelineError: a value is NaN or infinite.
        StoreError: the store cannot take a part.
    """
    start = time.perf_counter()
    writer = BackgroundWriter()
    open_parts: list[PartTasks] = []
    try:
        for part in parts:
            tasks = PartTasks(store, part)
            open_parts = [*open_parts[-1:], tasks]  # the part before may still be on its way to the disk
            writer.submit(tasks.open)
            for batch in batches(store.part_sequences(part), forwards.batch_tokens):
                _run_batch(forwards, batch, tasks, writer, timings)
                on_batch()
            writer.submit(tasks.commit)
        writer.finish()
    except BaseException:
        writer.abort()
        for tasks in open_parts:
            tasks.discard()
        raise
    finally:
        timings.writer_s = writer.busy_s
        timings.extract_s = time.perf_counter() - start


def batches(sequences: pa.Table, batch_tokens: int) -> Iterator[pa.Table]:
    """Cut the sequences of a part, longest first, into batches.

    Args:
        sequences: rows of the plan in its order.
        batch_tokens: most tokens per batch, padding included; a longer sequence makes a batch of its own.

    Yields:
        Consecutive rows.
    """
    lengths = sequences["n_tokens"].to_numpy()
    start = 0
    while start < len(lengths):
        count = max(1, batch_tokens // int(lengths[start]))
        yield sequences.slice(start, count)
        start += count


def _run_batch(
    forwards: Forwards,
    batch: pa.Table,
    tasks: PartTasks,
    writer: BackgroundWriter,
    timings: Timings,
) -> None:
    ids = batch["sequence_id"].to_pylist()
    first_tokens = batch["first_token"].to_pylist()
    names = [
        f"{sequence_id[:12]} (row {row} of the dataset)"
        for sequence_id, row in zip(ids, batch["source_row"].to_pylist(), strict=True)
    ]
    texts = [forwards.text(key) for key in ids]
    tokens = [tokens for tokens, _ in texts]
    watch = _Stopwatch(forwards.target.device)
    captured = capture(forwards.target.model, tokens, forwards.spec, forwards.dtype, forwards.uses_cache)
    watch.stop()
    copied = captured.encode(forwards.codec, names).to_host()

    def write() -> None:
        tasks.write(copied, first_tokens, texts, names)
        timings.forward_s += watch.seconds()

    waiting = time.perf_counter()
    writer.submit(write)
    timings.wait_s += time.perf_counter() - waiting
    timings.n_tokens += sum(captured.n_tokens)
    timings.n_padded_tokens += len(ids) * max(captured.n_tokens)


class _Stopwatch:
    """Seconds of work on a device; a GPU is asked only after the work is known to be done."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start = self._mark()
        self._stop = self._start

    def stop(self) -> None:
        self._stop = self._mark()

    def seconds(self) -> float:
        if not self._on_gpu:
            return float(self._stop - self._start)
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / 1000

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def save_bundle(store: StoreWriter, target: Target, folder: Path, n_layers_kept: int) -> None:
    """Write target/ in the dtype of the target's own weights, whatever the forward computes in.

    Args:
        store: the store.
        target: the target.
        folder: its folder.
        n_layers_kept: last decoder layers to keep.
    """
    own_dtype = getattr(load_target_config(folder), "dtype", None) or torch.float32
    model: Any = target.model
    if model.dtype != own_dtype:
        model = load_target_model(folder, own_dtype, "cpu")
    with store.target() as bundle:
        save_target_bundle(model, target.tokenizer, bundle, n_layers_kept)
