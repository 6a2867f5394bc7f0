"""Compare two stores of the same sequences: sizes, errors by layer, and effects on the target.

Usually, a store with a lossy codec is compared with a lossless reference store. Besides the stored
values, next-token distributions are compared:

- ``teacher``: The LM head is applied to the last hidden states of both stores. This gives the
  distributions that a drafter learns from if it is trained on one store or the other.
- ``continued``: The target computes the second half of each sequence. Its KV cache of the first
  half is read from one store, and then from the other. Codecs of KV caches are usually judged in
  this way.

Shapes: T tokens, L layers, H KV heads, d head dim, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import OptionInvalid
from ..moa.nn.kv import new_cache
from ..moa.targets.bundle import FrozenTarget
from ..moa.targets.live import Target
from ..storage.backend import backend_of
from ..storage.paths import StoreLike, StorePath
from ..storage.plan import row_numbers
from ..storage.read.store import ActivationStore
from ..storage.read.verify import summarize_store
from ..storage.schema import HIDDEN_LAST, TARGET_NAME, TOKENS, FieldSpec, to_float32
from ..text import SILENT, Progress, counted
from . import plan
from .config import TEXT_FIELDS
from .differences import Divergence, LayerDifferences

KEYS = "keys"
VALUES = "values"
# Number of positions, over all sequences, at which the comparison ``teacher`` compares
# distributions.
_TEACHER_POSITIONS = 2_048

# Maps a layer to its keys and its values. Both have the shape [H, T, d].
LayerCaches = dict[int, tuple[Tensor, Tensor]]
# Maps a name to differences between the two stores. The names are "keys", "values", and the names
# of the fields of hidden states.
Errors = defaultdict[str, LayerDifferences]


@dataclass(frozen=True)
class Comparison:
    """The results of comparing a store with a reference store of the same sequences."""

    reference: StorePath
    store: StorePath
    n_samples: int
    n_tokens: int  # number of tokens in the sampled sequences
    bytes_per_token: float
    times_smaller: float  # compression ratio: bytes of the raw values per stored byte
    errors: Errors
    # Divergence between the next-token distributions that the LM head computes from the last hidden
    # states of both stores. The value is None if a store lacks last hidden states, or if the
    # reference store lacks the LM head.
    teacher: Divergence | None
    # Divergence between two next-token distributions that the target computes for the second half
    # of each sequence. For the first distribution, the KV cache of the first half is read from the
    # reference store. For the second, it is read from the other store. The value is None if no
    # target was given.
    continued: Divergence | None

    def lines(self) -> list[str]:
        """Return the results as lines of text."""
        totals: list[str] = []
        for name, differences in self.errors.items():
            totals.append(f"{name} {differences.total.relative:.1%}")
        if self.teacher is not None:
            totals.append(f"logits {self.teacher.relative:.1%}")
        lines = [
            f"compared     {counted(self.n_samples, 'sequence')}, {self.n_tokens:,} tokens, with "
            f"{self.reference}",
            f"bytes        {self.bytes_per_token:,.0f} per token, {self.times_smaller:.1f} times "
            "smaller than the raw values",
            f"errors       {', '.join(totals)}",
        ]
        for name, differences in self.errors.items():
            if differences.by_layer:
                lines.append(f"{name:12} {differences.describe()}")
        if self.teacher is not None:
            lines.append(
                f"teacher      {self.teacher.describe()} positions, computed from hidden/last of "
                "both stores"
            )
        if self.continued is not None:
            lines.append(
                f"continued    {self.continued.describe()} positions, where the target continues "
                "from keys and values of both stores"
            )
        return lines

    def describe(self) -> str:
        """Return the results as text."""
        return "\n".join([f"store        {self.store}", *self.lines()])


def compare(
    reference: StoreLike,
    store: StoreLike,
    model: str | None = None,
    samples: int = 16,
    seed: int = 0,
    device: str = "auto",
    progress: Progress = SILENT,
) -> Comparison:
    """Compare random sequences of a store with the same sequences of a reference store.

    The reference store is usually lossless.

    Args:
        model: the target of both stores. It computes the second half of each sequence from the
            stored keys and values of the first half. If the argument is None, this comparison is
            skipped.
        samples: number of sequences.
        seed: seed of the random choice of sequences.
        device: device of the target.

    Raises:
        OptionInvalid: the stores were made with different targets, or have no sequence or no
            activations in common.
        StoreMismatch: the stores were not made with this model.
    """
    with ActivationStore(reference) as exact, ActivationStore(store) as coded:
        fields = _common_fields(exact, coded)
        pairs = _common_sequences(exact, coded, samples, seed)
        has_head = HIDDEN_LAST in fields and backend_of(exact.path / TARGET_NAME).exists()
        frozen = (
            FrozenTarget.load(exact.target_path, sizes=exact.manifest.target) if has_head else None
        )
        target = None if model is None else _load_target(model, exact, fields, device)
        errors: Errors = defaultdict(LayerDifferences)
        teacher = Divergence()
        continued = Divergence()
        comparing = progress.of("compare", "sequence")
        for done, (i, j) in enumerate(pairs):
            values: dict[str, tuple[np.ndarray, np.ndarray]] = {}
            for name in fields:
                values[name] = _read(exact, i, name), _read(coded, j, name)
                add_errors(errors, exact.fields[name], *values[name])
            if frozen is not None:
                compare_teachers(
                    frozen, *values[HIDDEN_LAST], -(-_TEACHER_POSITIONS // len(pairs)), teacher
                )
            if target is not None:
                compare_continued(target, exact.read(i, TOKENS), exact.fields, values, continued)
            comparing(done + 1, len(pairs))
        n_tokens = int(sum(exact.lengths[i] for i, _ in pairs))
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
    """Return the names of the activations that both stores have.

    Raises:
        OptionInvalid: the stores belong to different targets, or have no activations in common.
    """
    first = exact.manifest.identities.get("target.weights_sha256")
    second = coded.manifest.identities.get("target.weights_sha256")
    if first != second:
        raise OptionInvalid(
            f"{exact.path} and {coded.path} hold activations of different targets "
            f"(target.weights_sha256 is {first} and {second}). Compare stores of the same target."
        )
    names = [name for name in exact.fields if name not in TEXT_FIELDS]
    common = [name for name in names if coded.fields.get(name) == exact.fields[name]]
    if not common:
        raise OptionInvalid(
            f"{exact.path} has the activations {', '.join(names)}, but {coded.path} does not have "
            "any of them with the same shape and data type. Compare stores with the same "
            "activations."
        )
    return common


def _common_sequences(
    exact: ActivationStore, coded: ActivationStore, samples: int, seed: int
) -> list[tuple[int, int]]:
    """Draw sequences that both stores have.

    Returns:
        For each sequence, its index in the reference store (``exact``), and its index in the other
        store (``coded``).
    """
    coded_index = row_numbers(coded.sequences)
    ids = exact.sequences["sequence_id"].to_pylist()
    common: list[tuple[int, int]] = []
    for i, key in enumerate(ids):
        if key in coded_index:
            common.append((i, coded_index[key]))
    if not common:
        raise OptionInvalid(
            f"{exact.path} with {counted(len(exact), 'sequence')} and {coded.path} with "
            f"{len(coded)} have no sequence in common. Compare stores of the same chats."
        )
    chosen = np.random.default_rng(seed).permutation(len(common))[:samples]
    return [common[k] for k in sorted(chosen.tolist())]


def _read(store: ActivationStore, index: int, name: str) -> np.ndarray:
    return to_float32(store.read(index, name), store.fields[name].dtype)


def add_errors(errors: Errors, spec: FieldSpec, exact: np.ndarray, coded: np.ndarray) -> None:
    """Add the errors of one field of one sequence to ``errors``.

    Args:
        spec: description of the field.
        exact: the field's values in the reference store, [T, *token_shape].
        coded: the field's values in the other store, [T, *token_shape].
    """
    if spec.layer_axis is None:
        errors[spec.name].total.add(torch.from_numpy(exact), torch.from_numpy(coded))
        return
    coded_parts = keys_and_values(spec, coded)
    for name, values in keys_and_values(spec, exact).items():
        for index, layer in enumerate(spec.layer_numbers):
            errors[name].add(layer, values[:, index], coded_parts[name][:, index])


def keys_and_values(spec: FieldSpec, values: np.ndarray) -> dict[str, Tensor]:
    """Split the array of a KV field into keys and values.

    The array has the shape [T, *token_shape]. Keys and values have the shape [T, L, H, d].
    """
    tensor = torch.from_numpy(values)
    if spec.key_width is None:
        return {KEYS: tensor[..., 0, :], VALUES: tensor[..., 1, :]}
    return {KEYS: tensor[..., : spec.key_width], VALUES: tensor[..., spec.key_width :]}


@torch.inference_mode()
def compare_teachers(
    frozen: FrozenTarget,
    exact: np.ndarray,
    coded: np.ndarray,
    max_positions: int,
    divergence: Divergence,
) -> None:
    """Compare next-token distributions that the LM head computes from two stores' hidden states.

    The compared positions are spread evenly over the sequence.

    Args:
        frozen: the target's LM head.
        exact: last hidden states of the reference, [T, E].
        coded: last hidden states of the other store, [T, E].
        max_positions: maximum number of positions.
        divergence: receives the differences.
    """
    n_positions = min(len(exact), max_positions)
    positions = np.linspace(0, len(exact) - 1, n_positions).round().astype(int)
    exact_states = torch.from_numpy(exact[positions])
    coded_states = torch.from_numpy(coded[positions])
    divergence.add_states(exact_states, coded_states, frozen.logits, frozen.logits)


def _load_target(model: str, exact: ActivationStore, fields: Sequence[str], device: str) -> Target:
    """Load the target of a store, to continue sequences from their stored keys and values.

    Raises:
        OptionInvalid: the target's cache cannot be filled from the store, because the store lacks
            the keys and values of a layer, or because the target also caches recurrent states.
    """
    folder = plan.find_same_target(model, exact.path, exact.manifest)
    target = Target.load(str(folder), device=device)
    lacking_layers = set[int]()
    for group in target.facts.kv_groups:
        lacking_layers.update(group.layers)
    for name in fields:
        spec = exact.fields[name]
        if spec.layer_axis is not None:
            lacking_layers.difference_update(spec.layer_numbers)
    if target.facts.has_states or lacking_layers:
        raise OptionInvalid(
            f"{exact.path} does not hold the entire cache (keys, values and recurrent states) of "
            f"{model}, so the target cannot continue from it. Leave out `model`."
        )
    return target


def layer_caches(fields: Mapping[str, FieldSpec], values: Mapping[str, np.ndarray]) -> LayerCaches:
    """Return the keys and values of each layer, taken from the stored fields of a sequence.

    Fields without a layer axis, such as hidden states, are skipped.

    Args:
        fields: maps the name of a field to the description of the field.
        values: maps the name of a field to the field's values, [T, *token_shape].
    """
    caches = {}
    for name, field_values in values.items():
        spec = fields[name]
        if spec.layer_axis is not None:
            parts = keys_and_values(spec, field_values)
            for index, layer in enumerate(spec.layer_numbers):
                caches[layer] = (
                    parts[KEYS][:, index].transpose(0, 1),
                    parts[VALUES][:, index].transpose(0, 1),
                )
    return caches


def compare_continued(
    target: Target,
    tokens: np.ndarray,
    fields: Mapping[str, FieldSpec],
    values: Mapping[str, tuple[np.ndarray, np.ndarray]],
    divergence: Divergence,
) -> None:
    """Compare the target's outputs for the second half of a sequence.

    The target runs twice. Its KV cache of the first half is read from the reference store in the
    first run, and from the other store in the second run.

    Args:
        tokens: token ids of the sequence, [T].
        values: for each field, its values in the reference store and in the other store.
        divergence: receives the differences.
    """
    states: list[Tensor] = []
    for side in (0, 1):
        caches = layer_caches(fields, {name: pair[side] for name, pair in values.items()})
        states.append(continued_states(target, tokens, caches, len(tokens) // 2))
    divergence.add_states(states[0], states[1], target.logits, target.logits)


@torch.inference_mode()
def continued_states(
    target: Target, tokens: np.ndarray, caches: LayerCaches, n_cached: int
) -> Tensor:
    """Run the target on the positions of a sequence from ``n_cached`` on.

    The KV cache of the earlier positions is not computed. It is filled from a store.

    Args:
        caches: keys and values of the sequence by layer, as read from the store.

    Returns:
        The last hidden states of the positions from ``n_cached`` on, [T - n_cached, E].
    """
    later_tokens = torch.from_numpy(tokens[n_cached:].astype(np.int64))[None].to(target.device)
    cache: Any = new_cache()
    for layer, (keys, values) in sorted(caches.items()):
        cache.update(
            keys[None, :, :n_cached].to(target.device, target.model.dtype),
            values[None, :, :n_cached].to(target.device, target.model.dtype),
            layer,
        )
    hidden: Tensor = target.body(
        input_ids=later_tokens, past_key_values=cache, use_cache=True
    ).last_hidden_state[0]
    return hidden
