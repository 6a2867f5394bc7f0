"""``transform:<bits>``: transform coding of keys and values, and of hidden states.

::

    keys    -> undo RoPE -------------+
    values  --------------------------+-> minus the mean -> times the basis -> quantise -> several codes to a byte
    hidden  --------------------------+                                                  -> arrays of similar statistics

Decoding is one table look-up per byte and one matrix product per part and group of layers, then the mean, then the
rotation of the keys at the positions that are read. Where values are predicted, from tokens or from other fields as
they decode, the prediction is subtracted before the mean and added after it: one more matrix product.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from ....errors import StoreError
from ...chunks.field import TOKENS, Array, Learning, StoredArray
from ...schema import FieldSpec
from .calibration import EARLY_POSITIONS, MAX_COMPONENTS, MAX_FEATURES, Basis, Embeddings, on_host, token_features
from .fit import Columns, GroupFit, fit_groups
from .group import GroupTransform
from .packing import CODES_PER_BYTE
from .pieces import Pieces, piece_bytes
from .rope import Rope
from .sample import Sample
from .settings import TransformSettings, check_width

KV_PARTS = ("key", "value")
KV_FEATURES = 1_024
"""Components of keys and values that hidden states are predicted from, at most: equal shares of all parts of all
groups, each from its leading component on. Where parts have fewer these are all; at the width of an 8B model as many
more would double the regression, for components that hold little of the variance. Part of the format of stores."""
_MAX_VOCABULARY = 1 << 20


class TransformCodec:
    """Transform coding of one field (a ``LearnedCodec``).

    Args:
        spec: ``kv`` [token, layer, kv_head, key_value, head_dim] or a hidden state [token, width].
        rope: the target's rotation; without it keys are coded as they are, in twice the bits. Not for hidden states.
        metrics: metrics of errors of each group's parts as :meth:`parts` cuts them, [width, width] each: of a hidden
            state one, e.g. ``calibration.logit_metric`` for ``hidden/last``, of ``kv`` one of the keys before RoPE and
            one of the values. None for relative error.
        embeddings: the target's input embeddings [vocab_size, width]; :meth:`calibrate` needs them where the settings
            say ``from_tokens``.
        joins_runs: whether codes lie in one array where they are wide enough; else each run has its own (``pieces``).
        sources: the codecs of the fields that a hidden state is predicted from.

    Attributes:
        arrays: the stored arrays; empty until :meth:`calibrate` or :meth:`load_state`.

    Raises:
        ValueError: another kind of field, or a basis would be too wide.
    """

    is_identity = False

    def __init__(
        self,
        spec: FieldSpec,
        settings: TransformSettings,
        rope: Rope | None = None,
        metrics: Sequence[Sequence[np.ndarray]] | None = None,
        embeddings: Embeddings | None = None,
        joins_runs: bool = True,
        sources: Sequence[TransformCodec] = (),
    ) -> None:
        self.spec = spec
        self.sources = tuple(sources)
        self.settings = settings
        self.is_kv = spec.axes[1:] == ("layer", "kv_head", "key_value", "head_dim")
        if not self.is_kv and len(spec.token_shape) != 1:
            raise ValueError(f"Transform codecs know kv and hidden states, not {spec.name!r} with axes {spec.axes}.")
        self.rope = rope if self.is_kv else None
        self.metrics = metrics
        self.embeddings = embeddings
        self._joins_runs = joins_runs
        self._pieces: Pieces | None = None
        self._features: np.ndarray | None = None
        self._feature_tables: dict[str, Array] = {}
        self.arrays: tuple[StoredArray, ...] = ()
        self._groups: list[GroupTransform] = []
        n_layers, size = 1, 1
        if self.is_kv:
            n_layers = spec.token_shape[0]
            size = settings.group_size(n_layers, spec.token_shape[1] * spec.token_shape[3])
        else:
            check_width(spec.token_shape[0], f"field {spec.name!r}")
        self.groups = [list(range(first, min(first + size, n_layers))) for first in range(0, n_layers, size)]

    @property
    def bits(self) -> float:
        """Stored bits per value."""
        return self.settings.kv_bits if self.is_kv else self.settings.hidden_bits

    @property
    def needs_tokens(self) -> bool:
        """Whether the field is predicted from the tokens: keys and values, and the first of joint hidden states."""
        is_first = self.settings.is_joint and not self.sources
        return self.settings.from_tokens and (self.is_kv or is_first)

    @property
    def n_features(self) -> int:
        """Columns of :meth:`as_features`; before the codec has learned, how many they are at most."""
        if not self.is_kv:
            return self.spec.token_shape[0]
        if not self._groups:
            return KV_FEATURES + (MAX_FEATURES if self.needs_tokens else 0)
        of_tokens = 0 if self._features is None else self._features.shape[1]
        return sum(transform.n_leading(self._n_leading) for transform in self._groups) + of_tokens

    @property
    def _n_leading(self) -> int:
        """Components of each part of each group that other fields are predicted from, at most."""
        return max(1, KV_FEATURES // (len(KV_PARTS) * len(self.groups)))

    def describe(self) -> dict[str, Any]:
        """Return the settings for ``store.json``."""
        in_metric = any(not _is_transposed(basis) for group in self._groups for basis in group.fit.bases)
        names = [source.spec.name for source in self.sources]
        predicted = {"predicted_from": names[0] if len(names) == 1 else names} if names else {}
        return predicted | {
            "transform": "principal components",
            "bits_per_value": self.bits,
            "group_layers": len(self.groups[0]),
            "unrotated_keys": self.rope is not None,
            "error_metric": "given" if in_metric else "plain",
            "early_positions": EARLY_POSITIONS,
            "token_features": 0 if self._features is None else self._features.shape[1],
        }

    def expected_bits(self) -> float:
        """Return the bits per value of the stored arrays."""
        return self.bits

    def observing(self, learning: Learning) -> Observation:
        """Return an empty sample; see ``LearnedCodec``."""
        return Observation(self, learning)

    def calibrate(
        self, sample: Iterable[np.ndarray], tokens: Sequence[np.ndarray] | None = None, learning: Learning | None = None
    ) -> None:
        """Learn means, bases and quantisers from sequences at hand.

        Args:
            sample: float32 [n_tokens, *token_shape], whole sequences; 20,000 tokens and more make a good basis, and at
                least as many as a group's keys are wide are needed for one.
            tokens: int [n_tokens] of each sequence; needed where the codec ``needs_tokens``.
            learning: where the sample waits and products run.

        Raises:
            StoreError: no sequences, or a value that is NaN or infinite.
            ValueError: tokens or embeddings are missing.
        """
        with contextlib.closing(self.observing(learning or Learning())) as observation:
            for i, values in enumerate(sample):
                observation.observe(values, None if tokens is None else tokens[i])
            observation.learn()

    def state(self) -> dict[str, np.ndarray]:
        """Return what was learned.

        ``rope/*``, ``tokens/features``, and for group g and part p ``g/columns`` (the fields of ``Columns``) and
        ``g/p/mean``, ``synthesis``, ``analysis`` (where it is not synthesis transposed), ``regression``.
        """
        state: dict[str, np.ndarray] = {}
        if self.rope is not None:
            state |= {"rope/inv_freq": self.rope.inv_freq, "rope/scaling": np.atleast_1d(self.rope.scaling)}
        if self._features is not None:
            state["tokens/features"] = self._features
        for group, transform in enumerate(self._groups):
            fit = transform.fit
            for part, regression in enumerate(fit.regressions):
                state[f"{group}/{part}/regression"] = regression.astype(np.float16)
            state[f"{group}/columns"] = fit.columns.table()
            for part, basis in enumerate(fit.bases):
                state[f"{group}/{part}/mean"] = basis.mean
                state[f"{group}/{part}/synthesis"] = basis.synthesis.astype(np.float16)
                if not _is_transposed(basis):
                    state[f"{group}/{part}/analysis"] = basis.analysis.astype(np.float16)
        return state

    @property
    def max_state_bytes(self) -> int:
        """Most bytes that the arrays of :meth:`state` take; see ``LearnedCodec``."""
        n_parts = len(KV_PARTS) if self.is_kv else 1
        layer_width = math.prod(self.spec.token_shape) // n_parts // self._n_layers
        n_bytes = 8 * (self._n_layers + 1) * (self.spec.token_shape[-1] + 1)  # the rotation
        n_bytes += 2 * MAX_FEATURES * _MAX_VOCABULARY if self.needs_tokens else 0
        n_bytes += 2 * sum(source.n_features for source in self.sources) * layer_width
        for layers in self.groups:
            width = len(layers) * layer_width
            n_components = min(width, MAX_COMPONENTS)
            columns = 2 * n_components * 4 * len(fields(Columns))
            n_bytes += n_parts * (4 * (EARLY_POSITIONS + 1) * width + 4 * n_components * width + columns)
            n_bytes += n_parts * 2 * MAX_FEATURES * width if self.needs_tokens else 0
        return n_bytes

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load what :meth:`state` returned; raises ValueError where it does not fit the field."""
        try:
            if self.is_kv and "rope/inv_freq" in state:
                scaling = np.asarray(state["rope/scaling"]).reshape(-1)
                self.rope = Rope(state["rope/inv_freq"], scaling[0] if len(scaling) == 1 else scaling)
                self._check_rope(self.rope)
            features = np.asarray(state["tokens/features"], np.float16) if self.needs_tokens else None
            if features is not None and (features.ndim != 2 or not len(features)):
                raise ValueError(f"tokens/features has shape {features.shape}")
            n_features = 0 if features is None else features.shape[1]
            n_features += sum(source.n_features for source in self.sources)
            fits = [self._load_group(state, group, layers, n_features) for group, layers in enumerate(self.groups)]
            if not any(len(fit.columns.part) for fit in fits):
                raise ValueError("it has no columns")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"The learned state of field {self.spec.name!r} does not fit it ({error}). Restore the store's codec/ "
                "folder from a copy."
            ) from error
        self.take_over(fits, features)

    def encode(self, values: Array, tokens: Array | None = None, features: Array | None = None) -> dict[str, Array]:
        """Encode one whole sequence; see ``FieldCodec.encode``."""
        xp = array_namespace(values)
        if not bool(xp.all(xp.isfinite(values))):
            raise StoreError(
                f"Field {self.spec.name!r} has NaN or infinite values, which a transform codec would spread over the "
                "whole token. Extract with codec lossless, or drop the sequence."
            )
        return self.encode_parts(self.parts(xp.astype(values, xp.float32)), tokens, features)

    def encode_parts(
        self, groups: Sequence[Sequence[Array]], tokens: Array | None = None, features: Array | None = None
    ) -> dict[str, Array]:
        """Encode one whole sequence as :meth:`parts` gives it."""
        first = groups[0][0]
        features = self._given(features) if self.sources else self._features_of(tokens, len(first), first)
        codes: dict[str, Array] = {}
        for transform, parts in zip(self._learned(), groups, strict=True):
            codes |= transform.encode(parts, features)
        return codes if self._pieces is None else {self._pieces.array.name: self._pieces.join(codes)}

    def decode(
        self,
        codes: Mapping[str, Array],
        first_position: int,
        n_tokens: int,
        layers: list[int] | None = None,
        features: Array | None = None,
    ) -> Array:
        """Decode consecutive tokens of one sequence; only the arrays of :meth:`arrays_of` need be in ``codes``.

        Of an array with pieces, the rows may also hold all pieces where fewer would do.
        """
        groups = self._learned()
        if not self.sources:
            features = self._features_of(codes.get(TOKENS), n_tokens, next(iter(codes.values())))
        elif features is None:
            features = side_by_side([one.as_features(codes, first_position, n_tokens) for one in self.sources])
        codes = self._split(codes, layers)
        if not self.is_kv:
            return groups[0].decode(codes, first_position, n_tokens, 1, None, features)[0]
        chosen = list(range(self._n_layers)) if layers is None else layers
        decoded, order = [], []
        for transform, members in zip(groups, self.groups, strict=True):
            at = [i for i, layer in enumerate(chosen) if layer in members]
            if not at:
                continue
            local = [chosen[i] - members[0] for i in at]
            selection = None if local == list(range(len(members))) else local
            parts = transform.decode(codes, first_position, n_tokens, len(members), selection, features)
            decoded.append(self._assemble(parts, first_position, [chosen[i] for i in at]))
            order += at
        xp = array_namespace(decoded[0])
        joined = xp.concat(decoded, axis=1) if len(decoded) > 1 else decoded[0]
        if order == sorted(order):
            return joined
        return xp.take(joined, xp.asarray(np.argsort(order).astype(np.int32), device=device(joined)), axis=1)

    def as_features(
        self, codes: Mapping[str, Array], first_position: int, n_tokens: int, features: Array | None = None
    ) -> Array:
        """Decode what fields see that are predicted from this one; see ``LearnedCodec``.

        A hidden state as it decodes. Of keys and values the leading components (:data:`KV_FEATURES`), and the features
        of the tokens that they are themselves predicted from: keys and values before RoPE are linear in these.
        """
        if not self.is_kv:
            return self.decode(codes, first_position, n_tokens, features=features)
        of_tokens = self._features_of(codes.get(TOKENS), n_tokens, next(iter(codes.values())))
        codes = self._split(codes, None)
        found = [transform.leading(codes, n_tokens, self._n_leading) for transform in self._learned()]
        return side_by_side(found if of_tokens is None else [*found, of_tokens])

    def arrays_of(self, layers: list[int] | None) -> tuple[StoredArray, ...]:
        """Return the stored arrays that :meth:`decode` needs for these layers; None for all."""
        groups = self._learned()
        if self._pieces is not None:
            return self.arrays
        return tuple(array for group in self._groups_of(layers) for array in groups[group].arrays)

    def pieces_of(self, layers: list[int]) -> list[int] | None:
        """Return the pieces that :meth:`decode` needs for these layers; None where the runs are arrays of their own."""
        return None if self._pieces is None else self._pieces.of_groups(self._groups_of(layers))

    def _split(self, codes: Mapping[str, Array], layers: list[int] | None) -> Mapping[str, Array]:
        """Return the rows of each run of the groups that hold these layers."""
        if self._pieces is None:
            return codes
        rows = codes[self._pieces.array.name]
        has_all = rows.shape[1] == self._pieces.array.row_shape[0]
        return self._pieces.split(rows, self._groups_of(None if has_all else layers))

    def _groups_of(self, layers: list[int] | None) -> list[int]:
        """Return the groups that hold these layers; None for all."""
        wanted = range(self._n_layers) if layers is None or not self.is_kv else layers
        return [group for group, members in enumerate(self.groups) if any(layer in members for layer in wanted)]

    def _learned(self) -> list[GroupTransform]:
        if not self._groups:
            raise ValueError(f"The codec of field {self.spec.name!r} has learned nothing yet; calibrate it first.")
        return self._groups

    def _given(self, features: Array | None) -> Array:
        """Return what the field is predicted from: float32 [n_tokens, n_features]."""
        if features is None:
            names = " and ".join(repr(source.spec.name) for source in self.sources)
            raise ValueError(
                f"Field {self.spec.name!r} is predicted from {names}: encode them together by StoreCodec.encode."
            )
        return features

    def _features_of(self, tokens: Array | None, n_tokens: int, like: Array) -> Array | None:
        """Look up the features of tokens, on the device of ``like``: float32 [n_tokens, n_features]."""
        if self._features is None:
            return None
        if tokens is None or len(tokens) < n_tokens:
            raise ValueError(
                f"The codec of field {self.spec.name!r} predicts from tokens: it needs those of the {n_tokens} tokens "
                f"of the values, got {'none' if tokens is None else len(tokens)}."
            )
        xp = array_namespace(like)
        key = f"{xp.__name__} {device(like)}"
        if key not in self._feature_tables:
            self._feature_tables[key] = xp.asarray(self._features, device=device(like))
        ids = xp.asarray(tokens[:n_tokens], device=device(like))
        # An id outside the vocabulary would stop a whole CUDA device.
        ids = xp.minimum(xp.maximum(ids, xp.zeros_like(ids)), xp.zeros_like(ids) + (len(self._features) - 1))
        return xp.astype(xp.take(self._feature_tables[key], ids, axis=0), xp.float32)

    def take_over(self, fits: Sequence[GroupFit], features: np.ndarray | None) -> None:
        """Use what was learned from here on: a fit of each group, and features float16 [vocab_size, n_features]."""
        self._features, self._feature_tables = features, {}
        prefix = f"{self.spec.name}/codes_"
        names = [f"{prefix}{group:02d}_" if len(fits) > 1 else prefix for group in range(len(fits))]
        self._groups = [GroupTransform(name, fit) for name, fit in zip(names, fits, strict=True)]
        runs = [transform.arrays for transform in self._groups]
        self.arrays = tuple(array for group in runs for array in group)
        n_bytes = piece_bytes([sum(array.row_bytes for array in group) for group in runs]) if self._joins_runs else 0
        self._pieces = Pieces(f"{self.spec.name}/codes", runs, n_bytes) if n_bytes else None
        if self._pieces is not None:
            self.arrays = (self._pieces.array,)

    def parts(self, values: Array) -> list[list[Array]]:
        """Cut a sequence into groups and parts, with keys before RoPE: [n_tokens, width] each."""
        if not self.is_kv:
            return [[values]]
        xp = array_namespace(values)
        keys, others = values[:, :, :, 0, :], values[:, :, :, 1, :]
        keys = keys if self.rope is None else self.rope.unrotate(keys)
        layer_width = self.spec.token_shape[1] * self.spec.token_shape[3]
        return [
            [
                xp.reshape(part[:, layers[0] : layers[-1] + 1, ...], (part.shape[0], len(layers) * layer_width))
                for part in (keys, others)
            ]
            for layers in self.groups
        ]

    def whole(self, groups: Sequence[list[Array]]) -> Array:
        """Put groups and parts of a sequence together: the inverse of :meth:`parts`."""
        if not self.is_kv:
            return groups[0][0]
        joined = [self._assemble(parts, 0, layers) for parts, layers in zip(groups, self.groups, strict=True)]
        return array_namespace(*joined).concat(joined, axis=1)

    def _assemble(self, parts: list[Array], first_position: int, layers: list[int]) -> Array:
        """Put the decoded keys and values of some layers together: [n_tokens, len(layers), n_kv_heads, 2, head_dim]."""
        _, n_heads, _, head_dim = self.spec.token_shape
        xp = array_namespace(*parts)
        keys, others = (xp.reshape(part, (part.shape[0], len(layers), n_heads, head_dim)) for part in parts)
        keys = keys if self.rope is None else self.rope.rotate(keys, first_position, layers)
        return xp.stack([keys, others], axis=3)

    def _load_group(self, state: Mapping[str, np.ndarray], group: int, layers: list[int], n_features: int) -> GroupFit:
        n_parts = len(KV_PARTS) if self.is_kv else 1
        width = math.prod(self.spec.token_shape) // n_parts // self._n_layers * len(layers)
        bases = tuple(_load_basis(state, f"{group}/{part}", width) for part in range(n_parts))
        table = np.asarray(state[f"{group}/columns"], np.float32)
        if table.ndim != 2 or table.shape[1] != len(fields(Columns)) or not np.isfinite(table).all():
            raise ValueError(f"{group}/columns is no table of {len(fields(Columns))} finite numbers each")
        columns = Columns.from_table(table)
        if not np.isin(columns.part, range(n_parts)).all():
            raise ValueError(f"{group}/columns names parts that are not there")
        if not np.isin(columns.levels, list(CODES_PER_BYTE)).all() or (np.diff(columns.array) < 0).any():
            raise ValueError(f"{group}/columns has levels or arrays that this release does not write")
        for part, basis in enumerate(bases):
            components = columns.component[columns.part == part]
            if len(components) and not 0 <= components.min() <= components.max() < len(basis.synthesis):
                raise ValueError(f"{group}/columns names a component that {group}/{part}/synthesis does not have")
        regressions: tuple[np.ndarray, ...] = ()
        if n_features:
            regressions = tuple(np.asarray(state[f"{group}/{p}/regression"], np.float32) for p in range(n_parts))
            if any(matrix.shape != (n_features, width) for matrix in regressions):
                raise ValueError(f"{group}/regression is not [{n_features}, {width}]")
        return GroupFit(bases, columns, regressions)

    def _check_rope(self, rope: Rope) -> None:
        n_layers, head_dim = self._n_layers, self.spec.token_shape[-1]
        shapes = ((rope.inv_freq.shape[-1],), (n_layers, rope.inv_freq.shape[-1]))
        if 2 * rope.inv_freq.shape[-1] > head_dim or rope.inv_freq.shape not in shapes:
            raise ValueError(f"rope/inv_freq has shape {rope.inv_freq.shape}, keys of {head_dim} in {n_layers} layers")
        if rope.scaling.shape not in ((), (n_layers,)):
            raise ValueError(f"rope/scaling has shape {rope.scaling.shape}, there are {n_layers} layers")

    @property
    def _n_layers(self) -> int:
        return self.spec.token_shape[0] if self.is_kv else 1


class Observation:
    """The sample that a transform codec learns from; see ``chunks.field.Observing``."""

    def __init__(self, codec: TransformCodec, learning: Learning) -> None:
        self._codec, self._learning = codec, learning
        self._sample = Sample(learning.folder)
        self._features: Sequence[np.ndarray] | None = None

    def observe(self, values: np.ndarray, tokens: np.ndarray | None = None) -> None:
        """Add a sequence to the sample; see ``Observing``.

        Raises:
            StoreError: a value is NaN or infinite.
            ValueError: tokens or embeddings are missing.
        """
        codec = self._codec
        if codec.needs_tokens and (tokens is None or codec.embeddings is None):
            raise ValueError(
                f"Codec {codec.spec.name!r} predicts from tokens: calibrate it with embeddings and tokens."
            )
        values = np.asarray(values, np.float32)
        if not np.isfinite(values).all():
            raise StoreError(
                f"Field {codec.spec.name!r}: a transform codec learns from finite values only. Choose another codec, "
                "or drop the sequences with NaN or infinity."
            )
        if len(values):
            self._sample.add(codec.parts(values), tokens if codec.needs_tokens else None)

    def values(self) -> np.ndarray:
        """Read all tokens of a hidden state's sample: float32 [n_tokens, width]."""
        return self._sample.rows(0, 0, range(len(self._sample.lengths))).values

    def learn(self, features: Sequence[np.ndarray] | None = None, bits: float | None = None) -> None:
        """Let the codec learn; see ``Observing``.

        Raises:
            StoreError: nothing was observed.
            ValueError: the field is predicted from others, which were not given.
        """
        codec, sample = self._codec, self._sample
        if not sample.lengths:
            raise StoreError(f"Field {codec.spec.name!r}: a transform codec needs sequences to learn from, got none.")
        table = given = None
        if codec.sources:
            given = [codec._given(values) for values in ([None] if features is None else features)]
        if codec.needs_tokens and codec.embeddings is not None:
            table = token_features(codec.embeddings, np.concatenate(sample.tokens), self._learning.place)
            given = [table[ids].astype(np.float32) for ids in sample.tokens]
        n_parts = [len(KV_PARTS) if codec.is_kv else 1] * len(codec.groups)
        bits = codec.bits * math.prod(codec.spec.token_shape) if bits is None else bits
        fits = fit_groups(sample, n_parts, bits, codec.metrics, given, self._learning)
        codec.take_over(fits, table)
        self._features = features

    def as_features(self) -> list[np.ndarray]:
        """Return what fields see of the sequences that are predicted from this one; see ``Observing``."""
        codec, sample, place, found = self._codec, self._sample, self._learning.place, []
        for i, n_tokens in enumerate(sample.lengths):
            groups = [
                [place(sample.rows(group, part, [i]).values) for part in range(len(KV_PARTS) if codec.is_kv else 1)]
                for group in range(len(codec.groups))
            ]
            tokens = sample.tokens[i] if sample.tokens else None
            features = None if self._features is None else place(self._features[i])
            codes = codec.encode_parts(groups, tokens, features)
            codes |= {} if tokens is None else {TOKENS: tokens}
            found.append(on_host(codec.as_features(codes, 0, n_tokens, features)))
        return found

    def close(self) -> None:
        """Drop the sample."""
        self._sample.scratch.close()


def side_by_side(arrays: Sequence[Array]) -> Array:
    """Join the columns of arrays [n_tokens, n] of one namespace and device."""
    return array_namespace(*arrays).concat(list(arrays), axis=1) if len(arrays) > 1 else arrays[0]


def _is_transposed(basis: Basis) -> bool:
    return np.array_equal(basis.analysis, basis.synthesis.T)


def _load_basis(state: Mapping[str, np.ndarray], prefix: str, width: int) -> Basis:
    synthesis = np.asarray(state[f"{prefix}/synthesis"], np.float32)
    mean = np.asarray(state[f"{prefix}/mean"], np.float32)
    analysis = np.asarray(state.get(f"{prefix}/analysis", synthesis.T), np.float32)
    if mean.shape != (EARLY_POSITIONS + 1, width) or synthesis.shape[1:] != (width,):
        raise ValueError(f"{prefix} has shapes {mean.shape} and {synthesis.shape}, expected a width of {width}")
    if analysis.shape != synthesis.shape[::-1]:
        raise ValueError(f"{prefix}/analysis has shape {analysis.shape}, expected {synthesis.shape[::-1]}")
    return Basis(mean, synthesis, analysis)
