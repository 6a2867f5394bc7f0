"""Time three batches of a plan on this machine, and say how long all of it takes.

The batches run through a target with the real one's widths and random weights, so that only its config.json has to be
there, and through the loop of the extraction into a temporary store on the disk of the output.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..moa.targets.bundle import target_sizes
from ..moa.targets.live import Target
from ..storage.codecs.registry import LOSSLESS, StoreCodec
from ..storage.plan import plan_parts
from ..storage.schema import ALIGNMENT_TOKENS, StoreManifest
from ..storage.write.store import StoreWriter
from ..text import format_hours
from .forwards.parts import Forwards, batches, run_parts
from .plan import ForwardPlan, field_specs
from .report import Timings

_N_BATCHES = 3
_MAX_WEIGHTS = 250_000_000
"""Weights of the timed target on a CPU: one layer of Llama-3-8B has 218 million, which take a second to draw."""
_MAX_PRODUCTS = 1e11
"""Multiplications of one timed forward on a CPU: about two seconds of slow cores."""


def estimate(plan: ForwardPlan) -> Timings:
    """Run three batches of a plan, which takes some seconds, and return what all of them are estimated to take."""
    lengths = batch_lengths(plan.table, plan.batch_tokens)
    chosen = np.linspace(0, len(lengths) - 1, min(_N_BATCHES, len(lengths))).round().astype(int).tolist()
    model = _random_target(plan, max(int(batch.sum()) for batch in lengths) + 1)
    n_layers = int(model.config.num_hidden_layers)
    layers = tuple(sorted({min(layer, n_layers - 1) for layer in plan.spec.layers}))
    fields = field_specs(replace(plan.spec, layers=layers), target_sizes(model.config), plan.dtype)
    timed = np.concatenate([_cut(lengths[index], model.config, plan.device) for index in chosen])
    ends = np.cumsum(timed) % (int(model.config.vocab_size) - int(timed.max()) + 1) + timed
    texts = {
        f"{row:064x}": (np.arange(end - n, end, dtype=np.int32), np.zeros(n, np.uint8))
        for row, (n, end) in enumerate(zip(timed.tolist(), ends.tolist(), strict=True))
    }
    forwards = Forwards(
        target=Target(model),
        spec=replace(plan.spec, layers=layers),
        # A codec that learns cannot encode before it has learned; lossless takes about as long.
        codec=StoreCodec(LOSSLESS if plan.codec.learned else plan.codec.name, fields),
        dtype=getattr(torch, plan.dtype),
        batch_tokens=plan.batch_tokens,
        uses_cache=plan.uses_cache,
        text=texts.__getitem__,
        n_encode_threads=plan.n_encode_threads,
    )
    forwards.capture([texts[f"{0:064x}"][0]])  # the first forward warms up
    found = _run(forwards, timed, plan.disk)
    n_padded = sum(len(batch) * int(batch.max()) for batch in lengths)
    scale = n_padded / found.n_padded_tokens * plan.model_config.num_hidden_layers / n_layers
    return Timings(forward_s=scale * found.forward_s, wait_s=scale * found.wait_s, extract_s=scale * found.extract_s)


def describe_estimate(found: Timings, n_workers: int = 1) -> str:
    """Return an estimate as text.

    Args:
        n_workers: workers that share the parts, each with a device or machine of its own.
    """
    waiting = format_hours(found.extract_s - found.forward_s)
    line = f"time         about {format_hours(found.extract_s)}: forwards {format_hours(found.forward_s)}, waiting for "
    line += f"encoding and writing {waiting}"
    if n_workers > 1:
        line += (
            f"\nworkers      {n_workers} take about {format_hours(found.extract_s / n_workers)} if the disk keeps up"
        )
    return line


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


def _cut(lengths: np.ndarray, config: Any, device: str) -> np.ndarray:
    """Return the lengths of a batch, on a CPU cut to what it computes in a moment."""
    if torch.device(device).type != "cpu":
        return lengths
    most = max(64, int(_MAX_PRODUCTS / (_layer_weights(config) * config.num_hidden_layers)))
    cut: np.ndarray = np.minimum(lengths[: max(1, most // int(lengths.max()))], most)
    return cut


def _run(forwards: Forwards, lengths: np.ndarray, disk: Path) -> Timings:
    """Extract sequences of these lengths, named by their numbers, to a temporary store."""
    n_tokens, rows = int(lengths.sum()), range(len(lengths))
    sequences = pa.table(
        {
            "sequence_id": [f"{row:064x}" for row in rows],
            "source_row": pa.array(rows, pa.int64()),
            "n_tokens": pa.array(lengths, pa.int32()),
            "n_response_tokens": pa.array([0] * len(rows), pa.int32()),
        }
    )
    table = plan_parts(sequences, 2 * ALIGNMENT_TOKENS * n_tokens, ALIGNMENT_TOKENS)
    fields = tuple(field.spec for field in forwards.codec.fields.values())
    manifest = StoreManifest(fields, {}, {}, {}, len(rows), 1, n_tokens, forwards.codec.describe())
    timings = Timings()
    with (
        tempfile.TemporaryDirectory(prefix=".moa-data-speed-", dir=disk) as folder,
        StoreWriter.create_or_resume(Path(folder) / "store", manifest, table) as store,
    ):
        run_parts(forwards, store, [0], timings)
    return timings
