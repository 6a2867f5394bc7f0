"""Measures which errors of stored keys and values a drafter feels: keys or values, layers, positions, directions.

Takes drafters that were trained from a lossless store, and held-out chats of it. Codes replace the exact keys and
values where an arm says so, with nothing trained again: what that costs is the KL of the drafter to the target, and the
expected acceptance length. The metric in which codecs learn is measured on training chats, with the first run's
drafter; the other runs tell whether it holds for drafters with other initial weights. ``WEIGHTS`` tells how much of it
pays: codecs learn with none of it, with the mean of keys and of values, of each layer, with each head's own block, or
with all::

    python -m benchmarks.codecs.sensitivity STORE RUN ... [--codecs transform:0.43,tokens@all transform:0.2,tokens@all]
        [--weights even parts layers heads full] [--sequences 150] [--metric-sequences 300]
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.codecs.hidden_rate import read
from benchmarks.codecs.transform_rate import stored_bits
from benchmarks.kit.harness import run
from moa_data.moa.drafters.base import Drafter
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.pipeline.forwards.calibrate import calibrate, target_rope
from moa_data.storage.codecs.field import Learning
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.codecs.transform import TransformCodec
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import TOKENS
from moa_data.trainer.batches import Batch, BatchReader
from moa_data.trainer.config import RUN_FILE, TrainConfig
from moa_data.trainer.data import StoreDataModule, ValidationBatches
from moa_data.trainer.sensitivity import DrafterMetrics, check_measurable
from moa_data.trainer.validation import sum_in_order, validate_batch

POSITIONS = (0, 8, 32, 64, 128, 1 << 20)
"""Bounds of the runs of positions."""
WEIGHTS = ("even", "parts", "layers", "heads", "full")
"""How much of a metric a codec learns in."""

Replacing = Callable[[np.ndarray, np.ndarray], None]
"""Copies from the second array into the first what codes replace, [T, L, H, 2, d] each."""


def coarse(metrics: Sequence[np.ndarray], weights: str, n_layers: int, head_dim: int) -> list[np.ndarray] | None:
    """Keep so much of the metrics of all layers' keys and values as :data:`WEIGHTS` says."""
    if weights == "even":
        return None
    found = []
    for metric in metrics:
        n = len(metric)
        if weights == "heads":
            metric = metric * np.kron(np.eye(n // head_dim), np.ones((head_dim, head_dim)))
        elif weights != "full":
            n_blocks = n_layers if weights == "layers" else 1
            means = np.diag(metric).reshape(n_blocks, -1).mean(axis=1)
            metric = np.diag(np.repeat(means, n // n_blocks))
        found.append(metric)
    return found


@dataclasses.dataclass(frozen=True)
class Held:
    """Held-out sequences: the batches, and the exact keys and values and tokens of each sequence in their order."""

    batches: list[Batch]
    exact: list[np.ndarray]
    tokens: list[np.ndarray]

    @classmethod
    def of(cls, store: ActivationStore, config: TrainConfig, chosen: np.ndarray) -> "Held":
        """Read sequences, shortest first, in batches as validation reads them, in float32."""
        chosen = chosen[np.argsort(store.lengths[chosen], kind="stable")]
        reader = BatchReader(store, config, torch.device("cpu"))
        batches = [in_float32(batch) for batch in ValidationBatches(reader, chosen, store.lengths[chosen], 8)]
        sequences = [read(store, ["kv"], i) for i in chosen.tolist()]
        return cls(batches, [one["kv"] for one in sequences], [one[TOKENS] for one in sequences])

    def coded(self, coded: Sequence[np.ndarray], replace: Replacing) -> Iterator[Batch]:
        """Yield the batches with codes in place of exact keys and values."""
        done = 0
        for batch in self.batches:
            assert batch.inputs.kv is not None
            kv = batch.inputs.kv.clone()
            for b in range(len(kv)):
                values = self.exact[done].copy()
                replace(values, coded[done])
                kv[b, : len(values)] = torch.from_numpy(values).flatten(2)
                done += 1
            yield dataclasses.replace(batch, inputs=dataclasses.replace(batch.inputs, kv=kv))


def in_float32(batch: Batch) -> Batch:
    """Return a batch with its keys, values and hidden states in float32."""
    inputs = batch.decode().inputs
    assert inputs.kv is not None
    return dataclasses.replace(
        batch, inputs=dataclasses.replace(inputs, kv=inputs.kv.float(), hidden=inputs.hidden.float()), encoded={}
    )


def opened(options: argparse.Namespace, store: ActivationStore, run: Path) -> tuple[TrainConfig, Drafter, FrozenTarget]:
    """Open a run: its settings, its drafter, and the target's frozen weights."""
    config = TrainConfig(**yaml.safe_load((run / RUN_FILE).read_text())).replaced(
        store=options.store, prefetch_mb=256, validation_sequences=options.sequences
    )
    return config, load_drafter(run), FrozenTarget.load(store.target_path, config.target_layer_inference)


def kv_codec(store: ActivationStore, name: str) -> tuple[StoreCodec, TransformCodec]:
    """Make a codec of tokens, keys and values alone, of one basis for all layers; also returns its field."""
    codec = StoreCodec(name, [store.fields[field] for field in (TOKENS, "kv")])
    field = codec.fields["kv"]
    assert isinstance(field, TransformCodec)
    if len(field.groups) != 1:
        raise SystemExit(f"{name} cuts layers into groups; name a codec of all layers, e.g. {name.split('@')[0]}@all.")
    return codec, field


def learned(store: ActivationStore, name: str, metrics: Sequence[np.ndarray] | None) -> TransformCodec:
    """Let a codec of keys and values learn in these metrics."""
    frozen = FrozenTarget.load(store.target_path, 0, sizes=store.manifest.target)
    codec, field = kv_codec(store, name)
    field.metrics = None if metrics is None else [metrics]
    weights = frozen.lm_head_weight, frozen.embed_tokens.weight
    calibrate(codec, store.lengths, lambda i: read(store, ["kv"], i), frozen.config, *weights, Learning())
    return field


def decoded_with(codec: TransformCodec, held: Held, alignment_tokens: int) -> tuple[list[np.ndarray], float]:
    """Code the held-out sequences: their keys and values as they come back, and the bytes that a token takes."""
    codes = [codec.encode(values, tokens) for values, tokens in zip(held.exact, held.tokens, strict=True)]
    n_bytes = stored_bits(codec, codes, alignment_tokens) * math.prod(codec.spec.token_shape) / 8
    pairs = zip(codes, held.tokens, strict=True)
    return [codec.decode(rows | {TOKENS: tokens}, 0, len(tokens)) for rows, tokens in pairs], n_bytes


def replacing(layers: slice = slice(None), part: int | None = None, positions: slice = slice(None)) -> Replacing:
    """Return what copies some layers, keys (0) or values (1), and positions."""
    parts = slice(None) if part is None else slice(part, part + 1)

    def copy(values: np.ndarray, coded: np.ndarray) -> None:
        values[positions, layers, :, parts] = coded[positions, layers, :, parts]

    return copy


def arms(n_layers: int) -> dict[str, Replacing]:
    """Return what the codes replace, by name."""
    found = {"nothing": replacing(positions=slice(0, 0)), "all": replacing()}
    found |= {"keys": replacing(part=0), "values": replacing(part=1)}
    found |= {f"layer {layer}": replacing(slice(layer, layer + 1)) for layer in range(n_layers)}
    named = [f"{a} to {b - 1}" if b < POSITIONS[-1] else f"{a} and later" for a, b in itertools.pairwise(POSITIONS)]
    bounds = itertools.pairwise(POSITIONS)
    return found | {f"positions {name}": replacing(positions=slice(*b)) for name, b in zip(named, bounds, strict=True)}


def relative_error(held: Held, coded: Sequence[np.ndarray], replace: Replacing) -> float:
    """The L2 norm of the errors that an arm makes, over that of all keys and values."""
    wrong = total = 0.0
    for values, other in zip(held.exact, coded, strict=True):
        changed = values.copy()
        replace(changed, other)
        wrong += float(np.square(changed - values, dtype=np.float64).sum())
        total += float(np.square(values, dtype=np.float64).sum())
    return math.sqrt(wrong / total)


def rows_of(options: argparse.Namespace, store: ActivationStore) -> Iterator[dict[str, Any]]:
    """Measure all arms of the first codec without metric, and the whole of every other codec, for every run."""
    config, drafter, frozen = opened(options, store, options.runs[0])
    data = StoreDataModule(store, config)
    held = Held.of(store, config, data.validation_sequences)
    _, field = kv_codec(store, options.codecs[0])
    field.rope = target_rope(frozen.config)
    if check_measurable(drafter, store).kv_layers is not None:
        raise SystemExit(f"{options.runs[0]} reads the keys and values of some layers; give drafters that read all.")
    answered = data.train_sequences[store.sequences["n_response_tokens"].to_numpy()[data.train_sequences] >= 8]
    drawn = np.random.default_rng(0).choice(answered, options.metric_sequences, replace=False)
    (metrics,) = DrafterMetrics(drafter)(store, field, np.sort(drawn).tolist())
    n_layers, _, _, head_dim = field.spec.token_shape
    for name, weights in itertools.product(options.codecs, options.weights):
        chosen = coarse(metrics, weights, n_layers, head_dim)
        coded, n_bytes = decoded_with(learned(store, name, chosen), held, store.manifest.alignment_tokens)
        is_first = (name, weights) == (options.codecs[0], options.weights[0])
        for folder, (arm, replace) in itertools.product(
            options.runs, (arms(n_layers) if is_first else {"all": replacing()}).items()
        ):
            config, drafter, frozen = opened(options, store, folder)
            draft_length = config.validation.draft_length
            found = [
                [batch.index, *dataclasses.astuple(validate_batch(drafter, frozen, batch, draft_length))]
                for batch in held.coded(coded, replace)
            ]
            row = {"codec": name, "weights": weights, "run": folder.name, "arm": arm, "bytes_per_token": n_bytes}
            yield row | {"error": relative_error(held, coded, replace)} | sum_in_order(found).metrics()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the metric, the codecs that learn in it, and what each part of the errors costs."""
    options.runs = list(map(Path, options.runs))
    return {"rows": list(rows_of(options, ActivationStore(options.store)))}


if __name__ == "__main__":
    run(
        "sensitivity", measure, "store", "runs+", codecs=["transform:0.43,tokens@all"], sequences=150,
        weights={"nargs": "+", "choices": WEIGHTS, "default": list(WEIGHTS)}, metric_sequences=300, threads=1,
    )  # fmt: skip
