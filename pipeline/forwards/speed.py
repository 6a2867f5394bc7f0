"""Measures how fast this machine extracts: each stage is run for a moment, on its own.

The forward is that of a target with the real one's widths, random weights and as many layers as are made quickly; its
activations are encoded and written for real. So only the target's config.json is loaded or downloaded.
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...machine import keep_freed_memory
from ...moa.targets.bundle import target_sizes
from ...moa.targets.live import DeviceClock, Mark
from ...storage.codecs.registry import StoreCodec
from ...storage.disk.durable import write_all
from ...storage.parts.encoding import EncodePool
from ...storage.parts.grid import array_grid
from ...storage.schema import hidden_field, kv_field, tokens_field
from ..config import ActivationSpec
from .capture import Capture, capture
from .host_copy import HostSlots

_MOST_WEIGHTS = 250_000_000
"""Most weights of that target: one layer of Llama-3-8B has 218 million, which take a second to draw."""
_MOST_PRODUCTS = 1e11
"""Multiplications of one timed forward on a CPU: about two seconds of slow cores."""
_MOMENT_S = 0.5
_PROBE_BYTES = 64 << 20
_N_SHAPES = 3
_NOT_ENCODED = {"encode_s_per_byte": 0.0, "encode_core_s_per_byte": 0.0}
"""Speeds of a codec that learns: before it has learned it encodes nothing."""


@dataclass(frozen=True)
class Speeds:
    """Measured speeds.

    Attributes:
        forward_s_per_token: seconds of forward, gathering and lossy codec for each padded token.
        forward_cores: cores that this keeps busy; 0 where the forward does not run on the CPU.
        copy_s_per_token: seconds of copying to the host for each padded token; 0 where nothing is copied.
        encode_s_per_byte: seconds that all encoders together take for a raw byte; 0 where that can't be measured.
        encode_core_s_per_byte: CPU seconds for a raw byte.
        write_s_per_byte: seconds of the writer's thread for each stored byte.
        disk_s_per_byte: seconds until a stored byte is on the disk.
        sync_s: seconds until a small new file is on the disk.
    """

    forward_s_per_token: float
    forward_cores: float
    copy_s_per_token: float
    encode_s_per_byte: float
    encode_core_s_per_byte: float
    write_s_per_byte: float
    disk_s_per_byte: float
    sync_s: float


@dataclass(frozen=True)
class SpeedProbe:
    """What is measured, and on what.

    Attributes:
        model_config: the target's transformers config.
        dtype, compute_dtype: dtypes in which activations are kept, and in which the forward runs.
        codec: name of the codec.
        batches: lengths of the sequences of each batch of the plan.
        folder: a folder on the disk that the store will be on.
    """

    model_config: Any
    spec: ActivationSpec
    dtype: torch.dtype
    compute_dtype: torch.dtype
    device: str
    codec: str
    batches: Sequence[np.ndarray]
    uses_cache: bool
    n_encode_threads: int
    folder: Path

    def run(self) -> Speeds:
        """Measure all stages, which takes some seconds."""
        keep_freed_memory()  # as extraction does
        model, n_layers = self._stand_in()
        codec = self._stand_in_codec(n_layers)
        is_whole = not codec.learned
        if not is_whole:
            codec = StoreCodec("lossless", (field.spec for field in codec.fields.values()))
        layers = self.model_config.num_hidden_layers / n_layers
        device = torch.device(self.device)
        clock, slots = DeviceClock(device), HostSlots.of(device, 1)
        forward_s, cores = [], []
        captured = self._runner(model, n_layers, codec, self._shapes()[0])()  # warms up
        for lengths in self._shapes():
            seconds, used = _timed(self._runner(model, n_layers, codec, lengths), clock)
            n_padded = len(lengths) * int(lengths.max())
            forward_s.append(layers * seconds / n_padded)
            cores.append(used)
        n_padded = len(captured.n_tokens) * max(captured.n_tokens)
        return Speeds(
            forward_s_per_token=statistics.mean(forward_s),
            forward_cores=statistics.mean(cores) if device.type == "cpu" else 0.0,
            copy_s_per_token=layers * _copy_seconds(captured, slots) / n_padded,
            **(_encode_speeds(captured.to_host(), codec, self.n_encode_threads) if is_whole else _NOT_ENCODED),
            **_disk_speeds(self.folder),
        )

    @property
    def _layer_weights(self) -> int:
        sizes = target_sizes(self.model_config)
        heads = 2 * (sizes["n_heads"] + sizes["n_kv_heads"])
        return int(sizes["hidden_size"] * (heads * sizes["head_dim"] + 3 * self.model_config.intermediate_size))

    @property
    def _n_layers(self) -> int:
        return max(1, min(int(self.model_config.num_hidden_layers), _MOST_WEIGHTS // self._layer_weights))

    def _stand_in(self) -> tuple[Any, int]:
        """Return a model of the target's widths with random weights, and its number of layers."""
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(self.model_config)
        # As many entries as a batch has tokens: equal tokens would give equal values, which encode differently.
        config.vocab_size, config.pad_token_id = max(int(lengths.sum()) for lengths in self._shapes()), None
        n_layers = config.num_hidden_layers = self._n_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:n_layers]
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config, attn_implementation="sdpa", trust_remote_code=False, dtype=self.compute_dtype
            )
        model = model.to_empty(device=self.device).eval().requires_grad_(False)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight.shape[1] ** -0.5)
            else:
                weight.fill_(1.0)
        # Buffers must not be random: those of the rotation are computed from the config, as on loading.
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(self.device)
        return model, n_layers

    def _stand_in_codec(self, n_layers: int) -> StoreCodec:
        sizes = target_sizes(self.model_config)
        kept = str(self.dtype).removeprefix("torch.")
        fields = [kv_field(n_layers, sizes["n_kv_heads"], sizes["head_dim"], kept)] if self.spec.kv else []
        layers = self._layers_within(n_layers)
        names = ActivationSpec(False, self.spec.last, layers).hidden_fields
        fields += [hidden_field(name.removeprefix("hidden/"), sizes["hidden_size"], kept) for name in names]
        codec = StoreCodec(self.codec, (tokens_field(), *fields), sources={})  # some codecs need tokens
        return codec.only(field.name for field in fields)

    def _layers_within(self, n_layers: int) -> tuple[int, ...]:
        return tuple(sorted({min(layer, n_layers - 1) for layer in self.spec.layers}))

    def _shapes(self) -> list[np.ndarray]:
        """Return lengths of sequences in some batches of the plan, on a CPU cut to what it computes in a moment."""
        at = np.linspace(0, len(self.batches) - 1, min(_N_SHAPES, len(self.batches))).round().astype(int)
        shapes = [self.batches[index] for index in at.tolist()]
        if torch.device(self.device).type != "cpu":
            return shapes
        most = max(64, int(_MOST_PRODUCTS / (self._layer_weights * self._n_layers)))
        return [np.minimum(lengths[: max(1, most // int(lengths.max()))], most) for lengths in shapes]

    def _runner(self, model: Any, n_layers: int, codec: StoreCodec, lengths: np.ndarray) -> Callable[[], Capture]:
        ends = np.cumsum(lengths).tolist()
        tokens = [np.arange(end - n, end, dtype=np.int32) for n, end in zip(lengths.tolist(), ends, strict=True)]
        spec = ActivationSpec(self.spec.kv, self.spec.last, self._layers_within(n_layers))
        names = [str(index) for index in range(len(tokens))]

        def run() -> Capture:
            return capture(model, tokens, spec, self.dtype, self.uses_cache).encode(codec, names)

        return run


def _timed(run: Callable[[], object], clock: DeviceClock) -> tuple[float, float]:
    """Return the median seconds of a piece of work, repeated for a moment, and the cores that it kept busy."""
    began_s, began_core_s = time.perf_counter(), time.process_time()
    spans: list[tuple[Mark, Mark]] = []
    while not spans or time.perf_counter() - began_s < _MOMENT_S:
        began = clock.mark()
        run()
        spans.append((began, clock.mark()))
    seconds = [clock.seconds(*span) for span in spans]
    return statistics.median(seconds), (time.process_time() - began_core_s) / max(sum(seconds), 1e-9)


def _copy_seconds(captured: Capture, slots: HostSlots) -> float:
    """Return the seconds of copying to pinned memory; 0 for activations in host memory."""
    seconds = 0.0
    for _ in range(2):  # the first one allocates
        if captured.tokens.device.type == "cuda":
            torch.cuda.synchronize(captured.tokens.device)
        began = time.perf_counter()
        copied = captured.to_host(slots)
        copied.wait()
        seconds = time.perf_counter() - began if copied.slot is not None else 0.0
        copied.release()
    return seconds


def _encode_speeds(host: Capture, codec: StoreCodec, n_threads: int) -> dict[str, float]:
    """Encode the activations of a batch again and again for a moment."""
    chunks = [chunk for index in range(len(host.n_tokens)) for chunk in _chunks(host, codec, index)]
    token_bytes = sum(field.spec.token_bytes for name, field in codec.fields.items() if _is_kept(host, name))
    raw = token_bytes * sum(host.n_tokens)
    n_rounds = 0
    with EncodePool(n_threads) as pool:
        pool.encode(chunks[:1]).result()
        pool.busy_s, began_s = 0.0, time.perf_counter()
        while time.perf_counter() - began_s < _MOMENT_S:
            tasks = [pool.encode(chunks[first : first + 4]) for first in range(0, len(chunks), 4)]
            for task in tasks:
                task.result()
            n_rounds += 1
        elapsed_s, busy_s = time.perf_counter() - began_s, pool.busy_s
    return {
        "encode_s_per_byte": elapsed_s / (n_rounds * raw),
        "encode_core_s_per_byte": busy_s / (n_rounds * raw),
    }


def _is_kept(host: Capture, name: str) -> bool:
    return name in host.fields or name in host.codes


def _chunks(host: Capture, codec: StoreCodec, index: int) -> list[np.ndarray]:
    """Cut the activations of a sequence into chunks as a part would."""
    chunks = []
    for name, field in codec.fields.items():
        if not _is_kept(host, name):
            continue
        rows = host.rows(name, index)
        for array in field.arrays:
            values = rows[array.name] if isinstance(rows, dict) else rows
            grid = array_grid(array, 1, sum(host.n_tokens))
            size, step = grid.chunk_tokens, grid.chunk_layers
            for at in range(0, len(values), size):
                row = values[at : at + size]
                columns = range(grid.chunks_per_row) if row.ndim > 1 else range(0)
                chunks += [row[:, column * step : (column + 1) * step] for column in columns] or [row]
    return chunks


def _disk_speeds(folder: Path) -> dict[str, float]:
    """Write a file as the writer does, and some small ones, and delete them."""
    data = np.random.default_rng(0).bytes(1 << 20)
    crc, syncs = 0, []
    with tempfile.TemporaryDirectory(prefix=".moa-data-speed-", dir=folder) as place:
        with open(os.path.join(place, "large"), "wb", buffering=0) as file:
            began_s = time.perf_counter()
            for _ in range(_PROBE_BYTES // len(data)):
                write_all(file.fileno(), data)
                crc = zlib.crc32(data, crc)
            written_s = time.perf_counter()
            os.fsync(file.fileno())
            synced_s = time.perf_counter()
        for index in range(3):
            with open(os.path.join(place, str(index)), "wb", buffering=0) as file:
                file.write(data[:4096])
                small_s = time.perf_counter()
                os.fsync(file.fileno())
            syncs.append(time.perf_counter() - small_s)
    return {
        "write_s_per_byte": (written_s - began_s) / _PROBE_BYTES,
        "disk_s_per_byte": (synced_s - began_s) / _PROBE_BYTES,
        "sync_s": statistics.median(syncs),
    }
