"""The loop that runs the target over the parts of a store and hands each batch to a writer thread.

``extract`` and ``add`` share it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..moa.targets.bundle import load_target_config, save_target_bundle
from ..moa.targets.clock import DeviceClock, Mark
from ..moa.targets.live import Target, load_target_model
from ..storage.codecs.registry import StoreCodec
from ..storage.write.addition import StoreAddition
from ..storage.write.part import PartWriter
from ..storage.write.store import StoreWriter
from ..text import Progress
from .background import BackgroundWriter
from .capture import Capture, capture
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

    def record(self) -> dict[str, float]:
        """Return what runs/ keeps of them."""
        return asdict(self) | {"padding_fraction": self.padding_fraction, "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True)
class Forwards:
    """How the target is run over sequences, and what is kept of it.

    Attributes:
        spec: the activations that are kept.
        codec: of their fields.
        dtype: in which they are kept.
        batch_tokens: tokens per forward, padding included.
        uses_cache: whether the forward fills a key/value cache, whatever is kept; a forward of equal batches with an
            equal cache gives equal bits.
        text: sequence id -> tokens (int32) and response mask (uint8), [n_tokens] each.
        n_tokens: tokens of all parts, for progress.
    """

    target: Target
    spec: ActivationSpec
    codec: StoreCodec
    dtype: torch.dtype
    batch_tokens: int
    uses_cache: bool
    text: Callable[[str], tuple[np.ndarray, np.ndarray]]
    n_tokens: int


def run_parts(
    forwards: Forwards,
    store: StoreWriter | StoreAddition,
    timings: Timings,
    verb: str,
    progress: Progress | None = None,
) -> None:
    """Run the target over the pending parts of a store, and write and commit each.

    Args:
        store: takes the parts, or more fields of them; when this fails, the parts in flight are discarded.
        timings: counts up; ``n_before_tokens`` is set.
        verb: for the progress message, e.g. ``"extract"``.
    """
    start = time.perf_counter()
    clock = DeviceClock(forwards.target.device)
    writer = BackgroundWriter()
    open_parts: list[PartWriter] = []
    try:
        for part in store.pending_parts():
            out = store.part(part)
            open_parts = [*open_parts[-1:], out]  # the part before may still be on its way to the disk
            for batch in batches(out.sequences, forwards.batch_tokens):
                ids, rows = batch["sequence_id"].to_pylist(), batch["source_row"].to_pylist()
                names = [f"{key[:12]} (row {row} of the dataset)" for key, row in zip(ids, rows, strict=True)]
                texts = [forwards.text(key) for key in ids]
                began = clock.mark()
                captured = capture(
                    forwards.target.model,
                    [tokens for tokens, _ in texts],
                    forwards.spec,
                    forwards.dtype,
                    forwards.uses_cache,
                )
                span = began, clock.mark()
                captured = captured.encode(forwards.codec, names).to_host()
                waiting = time.perf_counter()
                writer.submit(partial(_write_batch, out, batch, texts, names, captured, timings, span))
                timings.wait_s += time.perf_counter() - waiting
                timings.n_tokens += sum(captured.n_tokens)
                timings.n_padded_tokens += len(ids) * max(captured.n_tokens)
                if progress:
                    n_done = store.n_parts - len(store.pending_parts())
                    rate = timings.n_tokens / (time.perf_counter() - start)
                    message = f"{verb} {n_done}/{store.n_parts} parts, {rate:,.0f} tok/s"
                    progress(timings.n_before_tokens + timings.n_tokens, forwards.n_tokens, message)
            writer.submit(out.commit)
        writer.finish()
    except BaseException:
        writer.abort()
        for out in open_parts:
            out.discard()
        raise
    finally:
        timings.writer_s = writer.busy_s
        timings.extract_s = time.perf_counter() - start


def _write_batch(
    out: PartWriter,
    batch: pa.Table,
    texts: Sequence[tuple[np.ndarray, np.ndarray]],
    names: Sequence[str],
    captured: Capture,
    timings: Timings,
    span: tuple[Mark, Mark],
) -> None:
    """Check one batch, and write those of its fields that the part takes; runs on the writer's thread."""
    captured.wait()
    captured.check_finite(names)
    for index, (first_token, (tokens, mask)) in enumerate(zip(batch["first_token"].to_pylist(), texts, strict=True)):
        text = {"tokens": tokens, "response_mask": mask}
        for field in out.fields:
            out.write(field, first_token, text[field] if field in text else captured.rows(field, index))
    timings.forward_s += DeviceClock.seconds(*span)  # waits for nothing: the copies come after the forward


def batches(sequences: pa.Table, batch_tokens: int) -> Iterator[pa.Table]:
    """Cut the sequences of a part, longest first, into batches.

    Args:
        sequences: rows of the plan in its order.
        batch_tokens: most tokens per batch, padding included; a longer sequence makes a batch of its own.
    """
    lengths = sequences["n_tokens"].to_numpy()
    start = 0
    while start < len(lengths):
        count = max(1, batch_tokens // int(lengths[start]))
        yield sequences.slice(start, count)
        start += count


def save_bundle(store: StoreWriter, target: Target, folder: Path, n_layers_kept: int) -> None:
    """Write target/ in the dtype of the target's own weights, whatever the forward computes in."""
    own_dtype = getattr(load_target_config(folder), "dtype", None) or torch.float32
    model: Any = target.model
    if model.dtype != own_dtype:
        model = load_target_model(folder, own_dtype, "cpu")
    with store.target() as bundle:
        save_target_bundle(model, target.tokenizer, bundle, n_layers_kept)
