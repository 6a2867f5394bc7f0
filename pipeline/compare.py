"""Compare two stores of the same sequences: bytes, errors by layer, and what the errors do to the target.

A store that a codec has made is compared with the lossless one. Next-token distributions are compared in two ways. The
teacher's are those that the LM head gives of the stored last hidden state; drafters are trained on them. With the
target at hand, it also continues the second half of sequences from the stored keys and values of the first half, which
is how codecs of KV caches are judged.

Shapes: T tokens, L layers, H KV heads, d head dim, V vocabulary.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import OptionInvalid
from ..moa.nn.kv import new_cache
from ..moa.targets.bundle import FrozenTarget
from ..moa.targets.families import kv_groups
from ..moa.targets.live import Target
from ..storage.backend import exists
from ..storage.paths import StorePath
from ..storage.read.store import ActivationStore
from ..storage.read.verify import summarize_store
from ..storage.schema import HIDDEN_LAST, TARGET_NAME, TOKENS, FieldSpec, to_float32
from ..text import Progress, counted
from . import plan
from .config import TEXT_FIELDS

KEYS, VALUES, LOGITS = "keys", "values", "logits"
_TEACHER_POSITIONS = 2_048  # whose logits are computed for the teacher's figures, over all sequences
_POSITIONS_AT_ONCE = 64  # the logits of a long sequence are gigabytes

LayerCaches = dict[int, tuple[Tensor, Tensor]]  # layer -> keys and values, [H, T, d] each


@dataclass(frozen=True)
class RelativeErrors:
    """Relative L2 errors of keys, of values, of a hidden state, or of logits, over all sequences."""

    name: str
    total: float
    by_layer: Mapping[int, float]  # of keys and values; empty for others

    @property
    def worst_layer(self) -> int:
        """The layer with the largest error."""
        return max(self.by_layer, key=self.by_layer.__getitem__)

    @property
    def median(self) -> float:
        """The median of the layers' errors."""
        return median(self.by_layer.values())

    def describe(self) -> str:
        """Return the errors of layers as text, in percent."""
        numbers = " ".join(f"{100 * error:.1f}" for error in self.by_layer.values())
        most = f"at most {self.by_layer[self.worst_layer]:.1%} (layer {self.worst_layer})"
        return f"{self.name:12} median {self.median:.1%}, {most}; by layer {numbers}"


@dataclass
class Divergence:
    """How much next-token distributions differ, summed over positions."""

    n_positions: int = 0
    n_agreeing: int = 0
    kl_sum: float = 0.0
    squared_error: float = 0.0  # of the logits
    squared_norm: float = 0.0

    def add(self, head: Callable[[Tensor], Tensor], exact: Tensor, coded: Tensor) -> None:
        """Count the positions of last hidden states [n, E], given what makes logits of them."""
        for one, other in zip(exact.split(_POSITIONS_AT_ONCE), coded.split(_POSITIONS_AT_ONCE), strict=True):
            self._add_logits(head(one).double(), head(other).double())

    def _add_logits(self, exact: Tensor, coded: Tensor) -> None:
        log_p, log_q = exact.log_softmax(-1), coded.log_softmax(-1)
        # 0 * inf, where a logit is -inf, counts as 0.
        self.kl_sum += float((log_p.exp() * (log_p - log_q)).nan_to_num(0.0, 0.0, 0.0).sum())
        self.n_agreeing += int((exact.argmax(-1) == coded.argmax(-1)).sum())
        self.squared_error += float((exact - coded).square().sum())
        self.squared_norm += float(exact.square().sum())
        self.n_positions += len(exact)

    @property
    def kl(self) -> float:
        """Mean KL from the exact distribution to the other, in nats."""
        return self.kl_sum / self.n_positions

    @property
    def top1_agreement(self) -> float:
        """Share of the positions at which both have the same most likely token."""
        return self.n_agreeing / self.n_positions

    @property
    def logits(self) -> RelativeErrors:
        """The error of the logits."""
        return RelativeErrors(LOGITS, _ratio(self.squared_error, self.squared_norm), {})

    def describe(self) -> str:
        """Return the figures as text."""
        return f"KL {self.kl:.4f} nats, same most likely token at {self.top1_agreement:.1%} of {self.n_positions:,}"


@dataclass(frozen=True)
class Comparison:
    """The figures of a store beside another one of the same sequences."""

    reference: StorePath
    store: StorePath
    n_samples: int
    n_tokens: int  # of the sampled sequences
    bytes_per_token: float
    times_smaller: float  # than the raw values of all fields
    errors: Mapping[str, RelativeErrors]  # keys, values, logits, or the name of a hidden state's field
    teacher: Divergence | None  # None without a last hidden state or LM head
    continued: Divergence | None  # None where no target was given

    def lines(self) -> list[str]:
        """Return the figures as lines of text."""
        totals = ", ".join(f"{name} {own.total:.1%}" for name, own in self.errors.items())
        lines = [
            f"compared     {counted(self.n_samples, 'sequence')}, {self.n_tokens:,} tokens, with {self.reference}",
            f"bytes        {self.bytes_per_token:,.0f} a token, {self.times_smaller:.1f} times smaller than raw",
            f"errors       {totals}",
        ]
        lines += [errors.describe() for errors in self.errors.values() if errors.by_layer]
        if self.teacher is not None:
            lines.append(f"teacher      {self.teacher.describe()} positions")
        if self.continued is not None:
            lines.append(f"continued    {self.continued.describe()} positions after stored keys and values")
        return lines

    def describe(self) -> str:
        """Return the figures as text."""
        return "\n".join([f"store        {self.store}", *self.lines()])


def compare(
    reference: str | os.PathLike[str] | StorePath,
    store: str | os.PathLike[str] | StorePath,
    model: str | None = None,
    samples: int = 16,
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
) -> Comparison:
    """Compare random sequences of a store with the same sequences of another one, usually lossless.

    Args:
        model: the target of both stores, which continues sequences from their keys and values; None to leave that out.
        samples: number of sequences.

    Raises:
        OptionInvalid: the stores have other targets, or no sequence or no activations in common.
        StoreMismatch: the model is not the stores' target.
    """
    with ActivationStore(reference) as exact, ActivationStore(store) as coded:
        fields = _common_fields(exact, coded)
        pairs = _common_sequences(exact, coded, samples, seed)
        has_head = HIDDEN_LAST in fields and exists(exact.path / TARGET_NAME)
        frozen = FrozenTarget.load(exact.target_path, sizes=exact.manifest.target) if has_head else None
        target = None if model is None else _load_target(model, exact, fields, device)
        sums = ErrorSums()
        teacher, continued = Divergence(), Divergence()
        for done, (i, j) in enumerate(pairs):
            values = {name: (_read(exact, i, name), _read(coded, j, name)) for name in fields}
            for name, (one, other) in values.items():
                sums.add(exact.fields[name], one, other)
            if frozen is not None:
                compare_teachers(frozen, *values[HIDDEN_LAST], -(-_TEACHER_POSITIONS // len(pairs)), teacher)
            if target is not None:
                compare_continued(target, exact.read(i, TOKENS), exact.fields, values, continued)
            if progress:
                progress(done + 1, len(pairs), "compare")
        n_tokens = int(sum(exact.lengths[i] for i, _ in pairs))
    errors = sums.errors()
    if teacher.n_positions:
        errors[LOGITS] = teacher.logits
    summary = summarize_store(store)
    return Comparison(
        exact.path,
        coded.path,
        len(pairs),
        n_tokens,
        summary.bytes_per_token,
        summary.raw_bytes / summary.stored_bytes,
        errors,
        teacher if teacher.n_positions else None,
        continued if continued.n_positions else None,
    )


def _common_fields(exact: ActivationStore, coded: ActivationStore) -> list[str]:
    """List the activations of both stores, which must be of one target."""
    first, second = (opened.manifest.identities.get("target.weights_sha256") for opened in (exact, coded))
    if first != second:
        raise OptionInvalid(
            f"{exact.path} and {coded.path} hold activations of different targets ({first} and {second}). Compare "
            "stores of one target."
        )
    names = [name for name in exact.fields if name not in TEXT_FIELDS]
    common = [name for name in names if name in coded.fields and coded.fields[name] == exact.fields[name]]
    if not common:
        raise OptionInvalid(
            f"{exact.path} has the activations {', '.join(names)}, and {coded.path} has none of them in the same "
            "shape. Compare stores that hold the same activations."
        )
    return common


def _common_sequences(exact: ActivationStore, coded: ActivationStore, samples: int, seed: int) -> list[tuple[int, int]]:
    """Draw sequences that are committed in both stores: their indices in each."""
    there = {key: i for i, key in enumerate(coded.sequences["sequence_id"].to_pylist())}
    ids = exact.sequences["sequence_id"].to_pylist()
    common = [(i, there[key]) for i, key in enumerate(ids) if key in there]
    if not common:
        raise OptionInvalid(
            f"{exact.path} with {counted(len(exact), 'sequence')} and {coded.path} with {len(coded)} have none in "
            "common. Compare stores of the same chats."
        )
    chosen = np.random.default_rng(seed).permutation(len(common))[:samples]
    return [common[k] for k in sorted(chosen.tolist())]


def _read(store: ActivationStore, index: int, name: str) -> np.ndarray:
    return to_float32(store.read(index, name), store.fields[name].dtype)


class ErrorSums:
    """Squared errors and squared norms of what has been compared so far."""

    def __init__(self) -> None:
        # Name -> layer, None for a hidden state -> squared error and squared norm.
        self._sums: dict[str, dict[int | None, np.ndarray]] = {}

    def add(self, spec: FieldSpec, exact: np.ndarray, coded: np.ndarray) -> None:
        """Add the values of one sequence, [T, *token_shape]."""
        if spec.layer_axis is None:
            self._add(spec.name, None, exact, coded)
            return
        others = keys_and_values(spec, coded)
        for name, values in keys_and_values(spec, exact).items():
            for index, layer in enumerate(spec.layer_numbers):
                self._add(name, layer, values[:, index], others[name][:, index])

    def _add(self, name: str, layer: int | None, exact: np.ndarray, coded: np.ndarray) -> None:
        squares = [np.square(values, dtype=np.float64).sum() for values in (coded - exact, exact)]
        layers = self._sums.setdefault(name, {})
        layers[layer] = layers.get(layer, np.zeros(2)) + squares

    def errors(self) -> dict[str, RelativeErrors]:
        """Return the relative errors by name."""
        found = {}
        for name, layers in self._sums.items():
            by_layer = {layer: _ratio(*squares) for layer, squares in layers.items() if layer is not None}
            found[name] = RelativeErrors(name, _ratio(*np.sum(list(layers.values()), axis=0)), by_layer)
        return found


def _ratio(squared_error: float, squared_norm: float) -> float:
    return float(np.sqrt(squared_error / (squared_norm or 1.0)))


def keys_and_values(spec: FieldSpec, values: np.ndarray) -> dict[str, np.ndarray]:
    """Split a field of some layers, [T, *token_shape]: keys and values, [T, L, H, d] each."""
    if spec.key_width is None:
        return {KEYS: values[..., 0, :], VALUES: values[..., 1, :]}
    return {KEYS: values[..., : spec.key_width], VALUES: values[..., spec.key_width :]}


@torch.inference_mode()
def compare_teachers(
    frozen: FrozenTarget, exact: np.ndarray, coded: np.ndarray, max_positions: int, divergence: Divergence
) -> None:
    """Compare the distributions that last hidden states give, at positions spread over the sequence."""
    n_positions = min(len(exact), max_positions)
    positions = np.linspace(0, len(exact) - 1, n_positions).round().astype(int)
    states = (torch.from_numpy(hidden[positions]) for hidden in (exact, coded))
    divergence.add(frozen.logits, *states)


def _load_target(model: str, exact: ActivationStore, fields: Sequence[str], device: str) -> Target:
    """Load the target of a store, if it can continue from what the store holds."""
    folder = plan.find_target(model, plan.recorded_sources(exact.manifest.extraction))
    plan.check_identities(exact.path, exact.manifest.identities, plan.weight_identities(folder))
    target = Target.load(str(folder), device=device)
    cached = {layer for group in kv_groups(target.config) for layer in group.layers}
    specs = (exact.fields[name] for name in fields)
    stored = {layer for spec in specs if spec.layer_axis is not None for layer in spec.layer_numbers}
    if target.has_states or cached - stored:
        raise OptionInvalid(
            f"{exact.path} does not hold all that the layers of {model} cache, so the target cannot continue from it. "
            "Leave --model out."
        )
    return target


def layer_caches(fields: Mapping[str, FieldSpec], values: Mapping[str, np.ndarray]) -> LayerCaches:
    """Cut the fields of a sequence into the cache of each layer."""
    caches = {}
    for name, own in values.items():
        spec = fields[name]
        if spec.layer_axis is not None:
            keys, others = (torch.from_numpy(part) for part in keys_and_values(spec, own).values())
            for index, layer in enumerate(spec.layer_numbers):
                caches[layer] = (keys[:, index].transpose(0, 1), others[:, index].transpose(0, 1))
    return caches


def compare_continued(
    target: Target,
    tokens: np.ndarray,
    fields: Mapping[str, FieldSpec],
    values: Mapping[str, tuple[np.ndarray, np.ndarray]],
    divergence: Divergence,
) -> None:
    """Let the target continue the second half of a sequence from what each store holds of the first half."""
    states = []
    for side in (0, 1):
        caches = layer_caches(fields, {name: both[side] for name, both in values.items()})
        states.append(continued_states(target, tokens, caches, len(tokens) // 2))
    divergence.add(target.logits, *states)


@torch.inference_mode()
def continued_states(target: Target, tokens: np.ndarray, caches: LayerCaches, n_cached: int) -> Tensor:
    """Run a sequence after the first positions of a cache: last hidden states of the others, [T - n_cached, E]."""
    rest = torch.from_numpy(tokens[n_cached:].astype(np.int64))[None].to(target.device)
    cache: Any = new_cache()
    for layer, (keys, values) in sorted(caches.items()):
        first = (part[None, :, :n_cached].to(target.device, target.model.dtype) for part in (keys, values))
        cache.update(*first, layer)
    hidden: Tensor = target.body(input_ids=rest, past_key_values=cache, use_cache=True).last_hidden_state[0]
    return hidden
