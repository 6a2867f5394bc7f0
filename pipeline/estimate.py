"""Estimates how long an extraction takes on this machine: its slowest stage, measured, and what would shorten it.

The stages work in parallel on different batches, so the whole takes as long as the slowest. On a CPU they share the
cores: their work on all cores together may then be the slowest stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from ..machine import usable_cores
from ..storage.codecs.registry import StoreCodec
from ..storage.parts.grid import array_grid
from ..storage.parts.plan import part_lengths
from ..text import format_hours
from .add_plan import AddPlan
from .config import MAX_DEFAULT_ENCODE_THREADS, resolve_encode_threads
from .forwards.parts import batches
from .forwards.speed import SpeedProbe, Speeds
from .plan import ExtractPlan, existing_parent, expected_bytes
from .scaling import COPY, CORES, DISK, ENCODE, FORWARD, WRITE, Scaling
from .workers.devices import devices_here


@dataclass(frozen=True)
class Work:
    """The work of an extraction.

    Attributes:
        n_padded_tokens: tokens of all batches, padding included.
        raw_bytes: bytes of the kept activations before compression.
        stored_bytes: expected bytes on disk.
        n_files: files that are synced.
    """

    n_padded_tokens: int
    raw_bytes: int
    stored_bytes: int
    n_files: int


@dataclass(frozen=True)
class Estimate:
    """The time of each stage, and what it depends on.

    Attributes:
        seconds: stage -> seconds that it takes alone.
        is_whole: whether all stages could be measured; a codec that learns encodes nothing before it has learned.
        sync_share: share of the disk's time that goes to syncing files rather than writing bytes.
    """

    seconds: dict[str, float]
    n_encode_threads: int
    n_cores: int
    codec: str
    is_whole: bool
    sync_share: float
    is_on_cpu: bool
    compute_dtype: str

    @property
    def total_s(self) -> float:
        """Seconds of the whole extraction."""
        return max(self.seconds.values())

    @property
    def slowest(self) -> str:
        """The stage that all others wait for."""
        return max(self.seconds, key=lambda stage: self.seconds[stage])

    def describe(self) -> str:
        """Return the estimate as text."""
        stages = {
            FORWARD: "forward", COPY: "copy to host", ENCODE: f"encode on {self.n_encode_threads} threads",
            WRITE: "write (one thread)", DISK: "disk", CORES: f"all work on {self.n_cores} cores",
        }  # fmt: skip
        each = ", ".join(f"{stages[stage]} {format_hours(s)}" for stage, s in self.seconds.items() if s)
        return (
            f"time         about {format_hours(self.total_s)}, as long as the slowest of: {each}\n"
            f"slowest      {stages[self.slowest]}; {self._advice()}"
            + ("" if self.is_whole else "\nnot measured what encoding with this codec takes: it learns first")
        )

    def _advice(self) -> str:
        fewer_bytes = "a codec that stores less (--codec int8)" if self.codec == "lossless" else "another codec"
        if self.slowest == ENCODE:
            more = f"--encode-threads {self.n_cores}" if self.n_encode_threads < self.n_cores else "more cores"
            return f"{more} or {fewer_bytes} would make it shorter"
        if self.slowest == DISK:
            larger = "fewer, larger parts (--part-tokens), " if self.sync_share > 0.3 else ""
            return f"{larger}a faster disk for --out or {fewer_bytes} would make it shorter"
        if self.slowest == WRITE:
            return f"{fewer_bytes} would make it shorter"
        if self.slowest == COPY:
            return "fewer --activations would make it shorter; the link to the device binds"
        if self.is_on_cpu:
            narrow = "--compute-dtype bfloat16 where this CPU computes it fast, or " * (self.compute_dtype == "float32")
            return f"{narrow}a GPU (--device cuda) would make it shorter"
        return "a faster device would make it shorter, more --encode-threads or another codec would not"


def estimate_extraction(plan: ExtractPlan) -> Estimate:
    """Measure this machine for some seconds and say how long the planned extraction takes on it."""
    config = plan.config
    probe = SpeedProbe(
        model_config=plan.model_config,
        spec=plan.spec,
        dtype=getattr(torch, config.storage.dtype),
        compute_dtype=getattr(torch, plan.compute_dtype),
        device=plan.device,
        codec=plan.codec.name,
        batches=batch_lengths(plan.table, plan.batch_tokens),
        uses_cache=plan.spec.kv,
        n_encode_threads=resolve_encode_threads(config.forward.encode_threads),
        folder=plan.disk,
    )
    raw_bytes = sum(spec.token_bytes for spec in plan.manifest.fields) * plan.n_tokens
    lengths = part_lengths(plan.table, plan.manifest.alignment_tokens).tolist()
    return _estimate(probe, plan.codec, raw_bytes, expected_bytes(plan.codec, plan.n_tokens), lengths)


def scaling_of(plan: ExtractPlan, estimate: Estimate) -> Scaling:
    """Return what the time of the planned extraction by several workers, like the one measured, is computed from."""
    scale, stored_bytes = plan.config.scale, expected_bytes(plan.codec, plan.n_tokens)
    is_local = scale.engine == "processes"
    return Scaling(
        seconds=estimate.seconds,
        n_parts=plan.n_parts,
        n_cores=estimate.n_cores,
        most_here=plan.n_parts if is_local else devices_here(plan.device, scale),
        encode_threads=plan.config.forward.encode_threads,
        most_encode_threads=MAX_DEFAULT_ENCODE_THREADS,
        out_s=stored_bytes / scale.out_bytes_per_s if scale.out_bytes_per_s else None,
    )


def estimate_addition(plan: AddPlan) -> Estimate:
    """Measure this machine for some seconds and say how long the planned addition takes on it."""
    probe = SpeedProbe(
        model_config=plan.model_config,
        spec=plan.spec,
        dtype=getattr(torch, plan.dtype),
        compute_dtype=getattr(torch, plan.compute_dtype),
        device=plan.device,
        codec=plan.codec.name,
        batches=batch_lengths(plan.left, plan.batch_tokens),
        uses_cache=plan.uses_cache,
        n_encode_threads=resolve_encode_threads(plan.config.encode_threads),
        folder=existing_parent(plan.store),
    )
    codec = plan.codec.only(plan.fields)
    n_parts = max(plan.n_left_parts, 1)
    lengths = [plan.n_left_tokens // n_parts] * n_parts
    return _estimate(probe, codec, plan.raw_bytes, expected_bytes(codec, plan.n_left_tokens), lengths)


def _estimate(
    probe: SpeedProbe, codec: StoreCodec, raw_bytes: int, stored_bytes: int, part_tokens: list[int]
) -> Estimate:
    speeds, n_cores = probe.run(), usable_cores()
    work = Work(count_padded(probe.batches), raw_bytes, stored_bytes, count_files(codec, part_tokens))
    seconds = stage_seconds(speeds, work, n_cores)
    return Estimate(
        seconds=seconds,
        n_encode_threads=probe.n_encode_threads,
        n_cores=n_cores,
        codec=codec.name,
        is_whole=not codec.learned,
        sync_share=speeds.sync_s * work.n_files / max(seconds[DISK], 1e-9),
        is_on_cpu=CORES in seconds,
        compute_dtype=str(probe.compute_dtype).removeprefix("torch."),
    )


def stage_seconds(speeds: Speeds, work: Work, n_cores: int) -> dict[str, float]:
    """Compute the seconds of each stage on its own; on a CPU also of all their work on its cores."""
    forward_s = speeds.forward_s_per_token * work.n_padded_tokens
    write_s = speeds.write_s_per_byte * work.stored_bytes
    seconds = {
        FORWARD: forward_s,
        COPY: speeds.copy_s_per_token * work.n_padded_tokens,
        ENCODE: speeds.encode_s_per_byte * work.raw_bytes,
        WRITE: write_s,
        DISK: speeds.disk_s_per_byte * work.stored_bytes + speeds.sync_s * work.n_files,
    }
    if speeds.forward_cores:
        core_s = forward_s * speeds.forward_cores + speeds.encode_core_s_per_byte * work.raw_bytes + write_s
        seconds[CORES] = core_s / n_cores
    return seconds


def batch_lengths(table: pa.Table, batch_tokens: int) -> list[np.ndarray]:
    """Return the lengths of the sequences of every batch of a plan, in the order in which they are computed."""
    parts = table["part"].to_numpy()
    bounds = np.flatnonzero(np.diff(parts, prepend=-1, append=-1))
    found = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = table.select(["n_tokens"]).slice(start, stop - start)
        found += [batch["n_tokens"].to_numpy() for batch in batches(rows, batch_tokens)]
    return found


def count_padded(lengths: Iterable[np.ndarray]) -> int:
    """Count the tokens of batches, padding included."""
    return sum(len(batch) * int(batch.max()) for batch in lengths)


def count_files(codec: StoreCodec, part_tokens: Iterable[int]) -> int:
    """Count the files of parts: the metadata of each array, and the shards and the commit of each part."""
    lengths = list(part_tokens)
    total = len(lengths)
    for array in codec.arrays:
        grid = array_grid(array, len(lengths), max(lengths))
        total += 1 + sum(math.ceil(array.n_rows(n_tokens) / grid.shard_shape[0]) for n_tokens in lengths)
    return total
