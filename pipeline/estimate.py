"""Time three batches of a plan on this machine, and say how long all of it takes.

The batches run through a target with the real one's widths and random weights, so that only its config.json has to be
there. What they give is encoded and written to a temporary store on the disk of the output.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..machine import keep_freed_memory
from ..moa.targets.bundle import target_sizes
from ..moa.targets.live import DeviceClock
from ..storage.chunk import EncodePool
from ..storage.codecs.registry import StoreCodec
from ..storage.plan import plan_parts
from ..storage.schema import ALIGNMENT_TOKENS, StoreManifest
from ..storage.write.store import StoreWriter
from ..text import format_hours
from .forwards.capture import Capture, capture
from .forwards.parts import batches
from .plan import ForwardPlan, field_specs

_N_BATCHES = 3
_MAX_WEIGHTS = 250_000_000
"""Weights of the timed target on a CPU: one layer of Llama-3-8B has 218 million, which take a second to draw."""
_MAX_PRODUCTS = 1e11
"""Multiplications of one timed forward on a CPU: about two seconds of slow cores."""
_MIN_WRITTEN_BYTES = 32 << 20
"""Bytes that are written at least, so that the time does not go to opening and syncing files alone."""


@dataclass(frozen=True)
class Estimate:
    """How long the forwards take, and encoding and writing, each alone.

    Attributes:
        write_s: None for a codec that learns, which encodes nothing before it has learned.
        shares_cores: whether the forwards run on the CPU, whose cores encode too.
    """

    forward_s: float
    write_s: float | None
    shares_cores: bool

    @property
    def total_s(self) -> float:
        """Seconds of the whole: its stages run at the same time, on a CPU on the same cores."""
        write_s = self.write_s or 0.0
        return self.forward_s + write_s if self.shares_cores else max(self.forward_s, write_s)

    def describe(self, n_workers: int = 1) -> str:
        """Return the estimate as text.

        Args:
            n_workers: workers that share the parts, each with a device or machine of its own.
        """
        write = "encoding not timed, as this codec learns first"
        if self.write_s is not None:
            write = f"encoding and writing {format_hours(self.write_s)}"
        line = f"time         about {format_hours(self.total_s)}: forwards {format_hours(self.forward_s)}, {write}"
        if n_workers > 1:
            line += (
                f"\nworkers      {n_workers} take about {format_hours(self.total_s / n_workers)} if the disk keeps up"
            )
        return line


def estimate(plan: ForwardPlan) -> Estimate:
    """Run three batches of a plan, which takes some seconds, and say how long all of them take."""
    keep_freed_memory()  # as the extraction does
    lengths = batch_lengths(plan.table, plan.batch_tokens)
    model = _random_target(plan, max(int(batch.sum()) for batch in lengths))
    n_layers = int(model.config.num_hidden_layers)
    spec = replace(plan.spec, layers=tuple(sorted({min(layer, n_layers - 1) for layer in plan.spec.layers})))
    clock, spans = DeviceClock(torch.device(plan.device)), list[float]()
    chosen = np.linspace(0, len(lengths) - 1, min(_N_BATCHES, len(lengths))).round().astype(int).tolist()
    for index in (chosen[0], *chosen):  # the first one warms up
        tokens = _tokens(lengths[index], model, plan.device)
        began = clock.mark()
        captured = capture(model, tokens, spec, getattr(torch, plan.dtype), plan.uses_cache)
        spans.append(clock.seconds(began, clock.mark()) / (len(tokens) * max(captured.n_tokens)))
    scale = plan.model_config.num_hidden_layers / n_layers
    n_padded = sum(len(batch) * int(batch.max()) for batch in lengths)
    write_s = None
    if not plan.codec.learned:
        fields = field_specs(spec, target_sizes(model.config), plan.dtype)
        write_s = plan.n_raw_bytes * _write_s_per_byte(captured, StoreCodec(plan.codec.name, fields), plan)
    return Estimate(scale * statistics.median(spans[1:]) * n_padded, write_s, torch.device(plan.device).type == "cpu")


def batch_lengths(table: pa.Table, batch_tokens: int) -> list[np.ndarray]:
    """Return the lengths of the sequences of every batch of a plan, in the order in which they are computed."""
    parts = table["part"].to_numpy()
    bounds = np.flatnonzero(np.diff(parts, prepend=-1, append=-1))
    found = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = table.select(["n_tokens"]).slice(start, stop - start)
        found += [batch["n_tokens"].to_numpy() for batch in batches(rows, batch_tokens)]
    return found


def _layer_weights(config: Any) -> int:
    sizes = target_sizes(config)
    heads = 2 * (sizes["n_heads"] + sizes["n_kv_heads"])
    return int(sizes["hidden_size"] * (heads * sizes["head_dim"] + 3 * config.intermediate_size))


def _random_target(plan: ForwardPlan, n_tokens: int) -> Any:
    """Make a model of the target's widths with random weights, on a CPU of fewer layers.

    Args:
        n_tokens: entries of its vocabulary, one for each token of a batch: equal tokens would give equal values, which
            encode differently.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(plan.model_config)
    config.vocab_size, config.pad_token_id = n_tokens, None
    if torch.device(plan.device).type == "cpu":
        config.num_hidden_layers = max(1, min(config.num_hidden_layers, _MAX_WEIGHTS // _layer_weights(config)))
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", trust_remote_code=False, dtype=getattr(torch, plan.compute_dtype)
        )
    model = model.to_empty(device=plan.device).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, weight.shape[1] ** -0.5)
        else:
            weight.fill_(1.0)
    # Buffers must not be random: those of the rotation are computed from the config, as on loading.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(plan.device)
    return model


def _tokens(lengths: np.ndarray, model: Any, device: str) -> list[np.ndarray]:
    """Return token ids of a batch, on a CPU cut to what it computes in a moment."""
    if torch.device(device).type == "cpu":
        most = max(64, int(_MAX_PRODUCTS / (_layer_weights(model.config) * model.config.num_hidden_layers)))
        lengths = np.minimum(lengths[: max(1, most // int(lengths.max()))], most)
    ends = np.cumsum(lengths)
    return [np.arange(end - n, end, dtype=np.int32) for n, end in zip(lengths.tolist(), ends.tolist(), strict=True)]


def _write_s_per_byte(captured: Capture, codec: StoreCodec, plan: ForwardPlan) -> float:
    """Encode and write captured sequences to a temporary store; returns the seconds of a raw byte of activations."""
    names = [str(index) for index in range(len(captured.n_tokens))]
    host = captured.encode(codec.only(captured.fields), names).to_host()
    of_token = sum(codec.fields[name].spec.token_bytes for name in captured.fields)
    repeats = -(-_MIN_WRITTEN_BYTES // (of_token * sum(host.n_tokens)))
    n_tokens = list(host.n_tokens) * repeats
    rows = range(len(n_tokens))
    sequences = pa.table(
        {
            "sequence_id": [f"{row:064x}" for row in rows],
            "source_row": pa.array(rows, pa.int64()),
            "n_tokens": pa.array(n_tokens, pa.int32()),
            "n_response_tokens": pa.array([0] * len(n_tokens), pa.int32()),
        }
    )
    table = plan_parts(sequences, sum(n_tokens), ALIGNMENT_TOKENS)
    n_parts = int(table["part"].to_numpy().max()) + 1
    fields = tuple(field.spec for field in codec.fields.values())
    manifest = StoreManifest(fields, {}, {}, {}, len(rows), n_parts, sum(n_tokens), codec.describe())
    with tempfile.TemporaryDirectory(prefix=".moa-data-speed-", dir=plan.disk) as folder:
        began_s = time.perf_counter()
        pool = EncodePool(plan.n_encode_threads)
        with pool, StoreWriter.create_or_resume(Path(folder) / "store", manifest, table) as store:
            for part in store.pending_parts():
                with store.part(part, pool) as out:
                    for row in out.sequences.to_pylist():
                        index = row["source_row"] % len(host.n_tokens)
                        text = {"tokens": np.int32, "response_mask": np.uint8}
                        for name in out.fields:
                            zeros = np.zeros(row["n_tokens"], text[name]) if name in text else None
                            out.write(name, row["first_token"], host.rows(name, index) if zeros is None else zeros)
                    out.commit()
        return (time.perf_counter() - began_s) / (of_token * sum(n_tokens))
