"""``transform:<bits>``: transform coding of keys and values, and of hidden states.

::

    keys    -> undo RoPE ---+
    values  ----------------+-> subtract the mean -> multiply by the basis -> quantise
    hidden  ----------------+-> pack several codes per byte -> stored arrays

*Groups.* The layers are divided into groups of consecutive layers. The keys of all layers of a
group have one basis of principal axes, and the values of these layers have another. A hidden state
is one group with one basis. Decoding takes one table lookup per byte of codes, and one matrix
product per basis. Then the mean is added, and RoPE is applied to the keys.

*Size of the groups.* The end of the codec's name, such as ``@all`` or ``@layer``, selects the
number of layers in a group. With large groups, a store takes fewer bytes. Different layers contain
similar information about a token. So with one basis for all layers (``@all``), a store takes less
than half the bits that it takes with one basis per layer (``@layer``). With small groups, a reader
of one layer reads fewer bytes, because a reader must always read the codes of a whole group. By
default, a group has so many layers that their keys have at most 4,096 numbers per token. No basis
is wider than 16,384 numbers. If ``@all`` would exceed this width, the layers are divided into
several groups of about the same size.

*Predictions.* Values may be predicted from the token ids, or from the decoded values of other
fields. Encoding first subtracts the prediction, and decoding adds the prediction at the end, which
takes one more matrix product. Three options in the codec's name turn on predictions, for example
``transform:1.0,tokens,joint``:

- ``tokens`` predicts keys and values from the token ids. For each token of the vocabulary, the
  basis file becomes up to 1,024 bytes larger (131 MB in total for Llama 3).
- ``from-kv`` predicts hidden states from the decoded keys and values of the same token. This is
  possible because the keys and values of a layer are a linear function of the layer's normalised
  input, which is a hidden state.
- ``joint`` predicts each hidden state from the next lower hidden state of the store, because a
  decoder layer changes its input little. The last hidden state is predicted from the highest stored
  layer. With ``tokens`` but without ``from-kv``, the lowest hidden state is predicted from the
  token ids.

If a field is predicted from other fields, these fields are its *sources*. A reader of the field
must also read the codes of the sources.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from typing_extensions import override

from ...errors import CodecUnknown, StoreError
from ..schema import HIDDEN_LAST, KV_AXES, TOKENS, Array, FieldSpec
from .calibration import Sample, on_host, token_features
from .coding import (
    CODES_PER_BYTE,
    EARLY_POSITIONS,
    Basis,
    CodeColumns,
    GroupFit,
    GroupTransform,
    Pieces,
    piece_bytes,
    row_bytes,
)
from .field import Codes, FieldCodec, Layers, Learning, Selection, to_device_of
from .fit import fit_groups

# Largest width of the keys of a layer group, if the codec's name does not set the size of the
# groups.
AUTO_GROUP_WIDTH = 4_096
# Largest width of a basis. One basis is for the keys (or the values) of all layers of a group. With
# a larger width, only a small share of the components could be stored, and the basis would be
# learned from fewer tokens than the basis has dimensions. For 32 layers of width 1,024 at 1 bit per
# value, two groups of 16 layers have a 30 % lower error than one group of 32 layers.
MAX_BASIS_WIDTH = 16_384
# Default ratio of the bits per value of hidden states to the bits per value of keys and values.
HIDDEN_BITS_RATIO = 1.7
# Minimum number of additional bits per value of the last hidden state, compared with keys and
# values, if the codec's name does not set the bits. The last hidden state needs more bits, because
# training computes the target's next-token distributions from it. With HIDDEN_BITS_RATIO alone, the
# distributions of a real model had a KL divergence of 0.04 nats from the exact distributions. The
# additional bits are a small share of a store that also contains keys and values.
LAST_EXTRA_BITS = 2.0
MAX_BITS = 10.0
# Hidden states may be predicted from components of keys and values. This is the largest number of
# these components. Each layer group contributes the same number of components of its keys and of
# its values: the components with the largest variance. With twice this number of components, the
# regression matrix of an 8B model would be twice as large, and the prediction only a little better.
# Changing this number would change the format of stores.
KV_FEATURES = 1_024

TRANSFORM_GRAMMAR = (
    "transform:<bits>[,hidden=<bits>][,tokens][,from-kv][,joint][@all|@layer|@group<layers>]"
)
_NAME = re.compile(
    r"transform:(?P<kv>\d+(?:\.\d+)?)(?:,hidden=(?P<hidden>\d+(?:\.\d+)?))?"
    r"(?P<tokens>,tokens)?(?P<from_kv>,from-kv)?(?P<joint>,joint)?"
    r"(?:@(?P<scope>all|layer|group(?P<layers>[1-9]\d*)))?"
)


@dataclass(frozen=True)
class TransformSettings:
    """The settings in the name of a transform codec."""

    # Stored bits for each number in keys and values.
    kv_bits: float
    # Stored bits for each number in hidden states. If the value is None, the number of bits depends
    # on ``kv_bits`` (see :meth:`bits`).
    hidden_bits: float | None = None
    # Number of layers in a group. The layers of a group share a basis. If the value is 0, all
    # layers are in one group. If the value is None, the number of layers depends on the width of a
    # layer.
    group_layers: int | None = None
    # Whether keys and values are predicted from the target's embeddings of the tokens. If
    # ``is_joint`` is also set, the lowest hidden state may also be predicted from these embeddings.
    from_tokens: bool = False
    # Whether hidden states are predicted from keys and values.
    from_kv: bool = False
    # Whether each hidden state is predicted from the next lower hidden state of the store.
    is_joint: bool = False

    @classmethod
    def parse(cls, name: str) -> "TransformSettings":
        """Parse a name of the form :data:`TRANSFORM_GRAMMAR`.

        Raises:
            CodecUnknown: The name does not have this form, or a number of bits is outside 0.05 to
                10.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise CodecUnknown(
                f"The codec {name!r} does not exist. Expected lossless, int8, or a name of the "
                f"form {TRANSFORM_GRAMMAR}, for example transform:1.0, "
                "transform:0.5,hidden=0.9@group4 or transform:0.88,tokens@all."
            )
        kv_bits = float(match["kv"])
        hidden_bits = float(match["hidden"]) if match["hidden"] else None
        for bits in (kv_bits, kv_bits if hidden_bits is None else hidden_bits):
            if not 0.05 <= bits <= MAX_BITS:
                raise CodecUnknown(
                    f"Codec {name!r} has {bits:g} bits per value, expected a number from 0.05 to "
                    "10. For more bits, use the codec lossless."
                )
        group_layers = {None: None, "all": 0, "layer": 1}.get(
            match["scope"], int(match["layers"] or 0)
        )
        return cls(
            kv_bits,
            hidden_bits,
            group_layers,
            from_tokens=match["tokens"] is not None,
            from_kv=match["from_kv"] is not None,
            is_joint=match["joint"] is not None,
        )

    def bits(self, spec: FieldSpec) -> float:
        """Return the stored bits per value of a field."""
        if spec.axes[1:] == KV_AXES:
            return self.kv_bits
        if self.hidden_bits is not None:
            return self.hidden_bits
        bits = self.kv_bits * HIDDEN_BITS_RATIO
        return min(
            MAX_BITS,
            max(bits, self.kv_bits + LAST_EXTRA_BITS) if spec.name == HIDDEN_LAST else bits,
        )

    def group_size(self, n_layers: int, layer_width: int) -> int:
        """Return the number of layers in a group. The layers of a group share a basis.

        Args:
            n_layers: Number of layers of the field.
            layer_width: Width of the keys of one layer.
        """
        max_layers = MAX_BASIS_WIDTH // layer_width
        if self.group_layers is None:
            return max(1, min(n_layers, AUTO_GROUP_WIDTH // layer_width))
        if self.group_layers == 0:
            n_groups = -(-n_layers // max_layers)
            return -(-n_layers // n_groups)
        size = min(self.group_layers, n_layers)
        if size > max_layers:
            raise CodecUnknown(
                f"The codec cannot encode {size} layers in one group. Their keys have "
                f"{layer_width:,} numbers per token in each layer, {size * layer_width:,} in all "
                f"layers, but the limit of a group is {MAX_BASIS_WIDTH:,}. Use at most "
                f"@group{max_layers} in the name of the codec."
            )
        return size


class Rope:
    """Rotates keys by a target's rotary position embedding (RoPE), or undoes the rotation.

    Keys take fewer bits before RoPE than after RoPE: the same content has the same key at all
    positions, so keys vary in far fewer directions. The rotation is the same as for Llama and
    related models in ``transformers``. Dimensions ``i`` and ``i + rotary_dim / 2`` are rotated
    together by the angle ``position * inv_freq[i]``. The result is multiplied by an attention
    scaling, which is 1 except for YaRN and LongRoPE. Dimensions from ``rotary_dim`` on are not
    rotated (partial rotary embedding).

    Args:
        inv_freq: Radians per position, [rotary_dim / 2], or [n_layers, rotary_dim / 2] if the
            layers have different rotations.
        scaling: The attention scaling. It is one number, or [n_layers] if the layers differ.
    """

    def __init__(self, inv_freq: np.ndarray, scaling: np.ndarray) -> None:
        self.inv_freq = np.asarray(inv_freq, np.float32)
        self.scaling = np.atleast_1d(np.asarray(scaling, np.float32))
        # Cached tables of cosine and sine for the positions from 0 on. The keys of this dict
        # consist of the name of the array library, the device, and whether the rotation is undone.
        self._kept: dict[str, list[Array]] = {}
        if (
            not np.isfinite(self.inv_freq).all()
            or not (np.isfinite(self.scaling) & (self.scaling > 0)).all()
        ):
            raise ValueError(
                "inv_freq must be finite, and scaling finite and positive. Read both from the "
                "target."
            )

    def check_fits(self, n_layers: int, head_dim: int) -> None:
        """Raise ValueError if the rotation does not fit keys with these sizes."""
        half = self.inv_freq.shape[-1:]
        if (
            self.inv_freq.shape not in (half, (n_layers, *half))
            or 2 * sum(half) > head_dim
            or self.scaling.shape not in ((1,), (n_layers,))
        ):
            raise ValueError(
                f"inv_freq of shape {self.inv_freq.shape} and scaling of shape "
                f"{self.scaling.shape} do not fit keys of width {head_dim} in {n_layers} layers"
            )

    def rotate(
        self, keys: Array, first_position: int = 0, layers: Layers = None, undo: bool = False
    ) -> Array:
        """Rotate keys at consecutive positions, or undo their rotation.

        Args:
            keys: [n_tokens, n_layers, n_kv_heads, head_dim].
            first_position: Position of the first token.
            layers: For each index of axis 1, the index of the target's layer. If the argument is
                None, axis 1 contains all layers in order.
            undo: Whether to undo the rotation instead of applying it.
        """
        xp = array_namespace(keys)
        half = self.inv_freq.shape[-1]
        stop = first_position + keys.shape[0]
        cosine, sine = self._tables(first_position, stop, layers, undo, keys)
        cosine = xp.astype(cosine, keys.dtype, copy=False)
        sine = xp.astype(sine, keys.dtype, copy=False)
        low = keys[..., :half]
        high = keys[..., half : 2 * half]
        turned = [low * cosine - high * sine, high * cosine + low * sine]
        return xp.concat([*turned, keys[..., 2 * half :]], axis=-1)

    def _tables(
        self, first: int, stop: int, layers: Layers, undo: bool, like: Array
    ) -> list[Array]:
        """Return the tables of cosine and sine for the positions [first, stop).

        The entries are multiplied by the attention scaling, or divided by it if the rotation is
        undone. Each table is float32 [n_tokens, n_layers or 1, 1, rotary_dim / 2].
        """
        if self.inv_freq.ndim == 2 or len(self.scaling) > 1:
            return self._compute(np.arange(first, stop), layers, undo, like)
        # All layers share the tables. Cache the tables, because computing them and copying them to
        # the device for each sequence takes time.
        key = f"{array_namespace(like).__name__} {device(like)} {undo}"
        if (tables := self._kept.get(key)) is None or len(tables[0]) < stop:
            tables = self._kept[key] = self._compute(
                np.arange(1 << stop.bit_length()), None, undo, like
            )
        # Use the local variable. Do not read `_kept` again, because another thread may have
        # replaced the cached tables by shorter tables in the meantime.
        return [table[first:stop] for table in tables]

    def _compute(
        self, positions: np.ndarray, layers: Layers, undo: bool, like: Array
    ) -> list[Array]:
        sign = -1.0 if undo else 1.0
        frequencies = self.inv_freq
        scaling = self.scaling
        if layers is not None:
            frequencies = frequencies[layers] if frequencies.ndim == 2 else frequencies
            scaling = scaling[layers] if len(scaling) > 1 else scaling
        # Compute in float64: float32 is not precise enough for the large angles of late positions.
        angles = positions[:, None, None].astype(np.float64) * np.atleast_2d(frequencies).astype(
            np.float64
        )
        factor = scaling.astype(np.float64).reshape(-1, 1) ** sign
        cosine = (np.cos(angles) * factor)[:, :, None].astype(np.float32)
        sine = (sign * np.sin(angles) * factor)[:, :, None].astype(np.float32)
        return [to_device_of(cosine, like), to_device_of(sine, like)]


class TransformCodec(FieldCodec):
    """Transform coding of one field.

    Before the codec can encode or decode, it must learn from an :class:`Observation`, or load its
    state with :meth:`load_state`.

    Args:
        spec: The field: ``kv`` [token, layer, kv_head, key_value, head_dim], or a hidden state
            [token, width].
        settings: The settings in the codec's name.
        rope: The target's rotation of keys. The rotation of the keys is undone before they are
            encoded. If the argument is None, keys are encoded after RoPE, which takes twice the
            bits. For hidden states, the argument is ignored.
    """

    sources: "Sequence[TransformCodec]"

    def __init__(
        self, spec: FieldSpec, settings: TransformSettings, rope: Rope | None = None
    ) -> None:
        self.is_kv = spec.axes[1:] == KV_AXES
        super().__init__(spec, settings.bits(spec))
        if spec.layers is not None:
            raise CodecUnknown(
                "Transform codecs do not support fields with the keys and values of only some "
                f"layers, such as {spec.name!r}. Use the codec lossless or int8."
            )
        if not self.is_kv and len(spec.token_shape) != 1:
            raise CodecUnknown(
                "Transform codecs support only keys and values, and hidden states, but field "
                f"{spec.name!r} has the axes {spec.axes}. Use the codec lossless."
            )
        self.settings = settings
        self.rope = rope if self.is_kv else None
        # ``metrics[g][p]`` is a matrix [width, width] that weighs quantisation errors of the keys
        # (p = 0) or the values (p = 1) of layer group g: an error ``e`` costs ``e @ matrix @ e``.
        # A hidden state has only the matrix ``metrics[0][0]``. For ``hidden/last``, it may be the
        # result of ``calibration.logit_metric``. If ``metrics`` is None, errors are measured
        # relative to the size of the values of their layer.
        self.metrics: Sequence[Sequence[np.ndarray]] | None = None
        # The target's input embeddings, [vocab_size, width]. Learning requires them if the codec
        # ``needs_tokens``.
        self.embeddings: Array | None = None
        self._pieces: Pieces | None = None
        self._features: np.ndarray | None = None
        self._feature_tables: dict[str, Array] = {}
        self._groups: list[GroupTransform] = []
        # ``n_parts`` is the number of parts of each group: 2 for keys and values, 1 for a hidden
        # state.
        self._n_layers, self.n_parts = (spec.token_shape[0], 2) if self.is_kv else (1, 1)
        # Number of floats per token in the keys of one layer, or in a hidden state. The values of a
        # layer have the same number of floats as the keys.
        self.layer_width = math.prod(spec.token_shape) // self.n_parts // self._n_layers
        if self.layer_width > MAX_BASIS_WIDTH:
            raise CodecUnknown(
                f"Field {spec.name!r} has {self.layer_width:,} numbers per token in a layer, but "
                f"transform codecs support at most {MAX_BASIS_WIDTH:,}. Use the codec lossless or "
                "int8."
            )
        size = settings.group_size(self._n_layers, self.layer_width) if self.is_kv else 1
        layers = range(self._n_layers)
        # Indices of the layers of each group. A hidden state has one group of one layer.
        self.groups: list[list[int]] = []
        for first in range(0, self._n_layers, size):
            self.groups.append(list(layers[first : first + size]))

    @property
    def needs_tokens(self) -> bool:
        """Whether this field is predicted from the token ids.

        The codec's name may contain options, for example ``transform:1.0,tokens,joint``. The option
        ``tokens`` predicts keys and values from the token ids. Together with the option ``joint``,
        it also predicts the lowest hidden state from the token ids, unless this hidden state is
        predicted from keys and values.
        """
        is_first = self.settings.is_joint and not self.sources
        return self.settings.from_tokens and (self.is_kv or is_first)

    @property
    def n_features(self) -> int:
        """Number of features per token that this field gives for the prediction of other fields."""
        if not self.is_kv:
            return self.spec.token_shape[0]
        n_leading = 0
        for group in self._groups:
            for basis in group.fit.bases:
                n_leading += min(self._max_leading, len(basis.synthesis))
        return n_leading + self._n_token_features

    @property
    def _n_token_features(self) -> int:
        return 0 if self._features is None else self._features.shape[1]

    @property
    def _max_leading(self) -> int:
        """Maximum number of features that one part provides for the prediction of other fields.

        A part is the keys or the values of one layer group.
        """
        return max(1, KV_FEATURES // (self.n_parts * len(self.groups)))

    @property
    def _error_metric(self) -> str:
        """The word in ``store.json`` for how errors were weighed when the bases were learned.

        The word is "given" if errors were weighed with matrices (``metrics``). It is "relative to
        layers" if the error of each layer was divided by the scale of the layer, and the scales
        differ. It is "plain" if all scales are 1.
        """
        metric = "plain"
        for group in self._groups:
            for basis in group.fit.bases:
                if basis.scale is None:
                    return "given"
                if not np.all(basis.scale == 1):
                    metric = "relative to layers"
        return metric

    @override
    def describe(self) -> dict[str, Any]:
        names = [source.spec.name for source in self.sources]
        predicted = {"predicted_from": names[0] if len(names) == 1 else names} if names else {}
        return predicted | {
            "transform": "principal components",
            "bits_per_value": self.expected_bits,
            "group_layers": len(self.groups[0]),
            "unrotated_keys": self.rope is not None,
            "error_metric": self._error_metric,
            "early_positions": EARLY_POSITIONS,
            "token_features": self._n_token_features,
        }

    def state(self) -> dict[str, np.ndarray]:
        """Return the learned state, which is stored in the store's ``codec/`` folder.

        The result maps these names to float16 and float32 arrays. In a name, g is the number of a
        layer group, and p is 0 for keys or a hidden state, and 1 for values:

        - ``rope/inv_freq`` and ``rope/scaling``,
        - ``tokens/features``,
        - ``g/columns``, the table of ``CodeColumns``,
        - ``g/p/mean``, ``g/p/synthesis`` and ``g/p/regression``,
        - ``g/p/analysis`` if errors were weighed with a matrix (``metrics``), otherwise
          ``g/p/scale``. ``Basis.scaled`` computes the analysis matrix from the scale.
        """
        state: dict[str, np.ndarray] = {}
        if self.rope is not None:
            state |= {
                "rope/inv_freq": self.rope.inv_freq,
                "rope/scaling": self.rope.scaling,
            }
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
                if basis.scale is None:
                    state[f"{group}/{part}/analysis"] = basis.analysis.astype(np.float16)
                else:
                    state[f"{group}/{part}/scale"] = basis.scale
        return state

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a state that :meth:`state` returned. The ``sources`` must have been loaded first.

        Raises:
            ValueError: The arrays do not have the shapes or values that the field needs.
        """
        try:
            if self.is_kv and "rope/inv_freq" in state:
                self.rope = Rope(state["rope/inv_freq"], state["rope/scaling"])
                self.rope.check_fits(self._n_layers, self.spec.token_shape[-1])
            features = None
            n_features = sum(source.n_features for source in self.sources)
            if self.needs_tokens:
                features = np.asarray(state["tokens/features"], np.float16)
                if features.ndim != 2 or not len(features):
                    raise ValueError(
                        f"array tokens/features has shape {features.shape}, expected [vocab_size, "
                        "n_features]"
                    )
                n_features += features.shape[1]
            fits: list[GroupFit] = []
            for group, layers in enumerate(self.groups):
                fits.append(self._load_group(state, group, layers, n_features))
            if not any(len(fit.columns.part) for fit in fits):
                raise ValueError("it gives all components of the field 0 bits")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"it does not fit field {self.spec.name!r} ({error}). Restore the store's codec/ "
                "folder from a copy."
            ) from error
        self.take_over(fits, features)

    def _load_group(
        self, state: Mapping[str, np.ndarray], group: int, layers: list[int], n_features: int
    ) -> GroupFit:
        def load(name: str, *shape: int | None) -> np.ndarray:
            array = np.asarray(state[f"{group}/{name}"], np.float32)
            fits = [length in (None, n) for length, n in zip(shape, array.shape, strict=False)]
            if array.ndim != len(shape) or not all(fits):
                raise ValueError(f"array {group}/{name} has shape {array.shape}, expected {shape}")
            return array

        width = len(layers) * self.layer_width
        bases = []
        regressions: list[np.ndarray] = []
        for part in range(self.n_parts):
            mean = load(f"{part}/mean", EARLY_POSITIONS + 1, width)
            synthesis = load(f"{part}/synthesis", None, width)
            if f"{group}/{part}/analysis" in state:
                analysis = load(f"{part}/analysis", width, len(synthesis))
                bases.append(Basis(mean, synthesis, analysis))
            else:
                # If all scales of a basis are 1, earlier releases did not store them.
                has_scale = f"{group}/{part}/scale" in state
                scale = load(f"{part}/scale", width) if has_scale else np.ones(width, np.float32)
                bases.append(Basis.scaled(mean, synthesis, scale))
            if n_features:
                regressions.append(load(f"{part}/regression", n_features, width))
        table = load("columns", None, len(CodeColumns._fields))
        columns = CodeColumns.from_table(table)
        n_components = np.array([len(basis.synthesis) for basis in bases])
        known_part = np.clip(columns.part, 0, self.n_parts - 1)
        is_valid = (
            (columns.part == known_part)
            & (columns.component >= 0)
            & (columns.component < n_components[known_part])
            & np.isin(columns.levels, list(CODES_PER_BYTE))
            & np.isfinite(table).all(axis=1)
        )
        if not is_valid.all() or (np.diff(columns.array) < 0).any():
            raise ValueError(
                f"array {group}/columns has an entry that is NaN, infinite or out of range"
            )
        return GroupFit(tuple(bases), columns, tuple(regressions))

    def take_over(self, fits: Sequence[GroupFit], features: np.ndarray | None) -> None:
        """Replace the learned state of this codec.

        Args:
            fits: The learned state of each layer group.
            features: The features of each token id, float16 [vocab_size, n_features]. The argument
                is None if the field is not predicted from token ids.
        """
        self._features = features
        self._feature_tables = {}
        prefix = f"{self.spec.name}/codes_"
        transforms: list[GroupTransform] = []
        for group, fit in enumerate(fits):
            name = f"{prefix}{group:02d}_" if len(fits) > 1 else prefix
            transforms.append(GroupTransform(name, fit))
        self._groups = transforms
        runs = [transform.arrays for transform in transforms]
        n_bytes = piece_bytes([row_bytes(group_runs) for group_runs in runs])
        self.arrays = tuple(chain.from_iterable(runs))
        self._pieces = None
        if n_bytes:
            self._pieces = Pieces(f"{self.spec.name}/codes", runs, n_bytes)
            self.arrays = (self._pieces.array,)

    @override
    def encode(
        self, values: Array, tokens: Array | None = None, features: Array | None = None
    ) -> dict[str, Array]:
        xp = array_namespace(values)
        return self.encode_parts(
            self.parts(xp.astype(values, xp.float32, copy=False)), tokens, features
        )

    def encode_parts(
        self,
        groups: Sequence[Sequence[Array]],
        tokens: Array | None = None,
        features: Array | None = None,
    ) -> dict[str, Array]:
        """Encode one whole sequence that :meth:`parts` has split.

        Args:
            groups: ``groups[g][p]`` holds the keys (p = 0) or values (p = 1) of layer group g,
                [n_tokens, width]. A hidden state is ``groups[0][0]``.
            tokens: The token ids. Required if the codec ``needs_tokens``.
            features: This field may be predicted from these features, float32 [n_tokens,
                n_features]. Required if the field is predicted from other fields (``sources``).
        """
        first = groups[0][0]
        if not self.sources:
            features = self._features_of(tokens, len(first), first)
        elif features is None:
            names = " and ".join(repr(source.spec.name) for source in self.sources)
            raise ValueError(
                f"Field {self.spec.name!r} is predicted from {names}. Encode these fields in one "
                "call of StoreCodec.encode."
            )
        # Collect the codes of all groups in one dictionary, by array name. The name of an array
        # contains the number of the group, so no two groups have an array with the same name.
        codes: dict[str, Array] = {}
        for transform, parts in zip(self._learned(), groups, strict=True):
            codes |= transform.encode(parts, features)
        return (
            codes if self._pieces is None else {self._pieces.array.name: self._pieces.join(codes)}
        )

    @override
    def decode(
        self,
        codes: Codes,
        first_position: int,
        n_tokens: int,
        layers: Layers = None,
        features: Array | None = None,
    ) -> Array:
        # This field may be predicted from other fields, the ``sources``. If the caller passes no
        # features, decode the features of the sources.
        groups = self._learned()
        if not self.sources:
            features = self._features_of(codes.get(TOKENS), n_tokens, next(iter(codes.values())))
        elif features is None:
            features = side_by_side(
                [source.as_features(codes, first_position, n_tokens) for source in self.sources]
            )
        codes = self._split(codes, layers)
        # Decode group by group, because each group has its own basis. At the end, put the layers
        # into the requested order.
        decoded: list[Array] = []
        available: list[int] = []
        for group in self._groups_of(layers):
            members = self.groups[group]
            wanted = [layer for layer in members if layers is None or layer in layers]
            local = None if wanted == members else [layer - members[0] for layer in wanted]
            parts = groups[group].decode(
                codes, first_position, n_tokens, len(members), local, features
            )
            decoded.append(self._assemble(parts, first_position, wanted))
            available += wanted
        xp = array_namespace(decoded[0])
        values = xp.concat(decoded, axis=1) if len(decoded) > 1 else decoded[0]
        if layers is None or layers == available:
            return values
        order = np.array([available.index(layer) for layer in layers], np.int32)
        return xp.take(values, to_device_of(order, values), axis=1)

    def as_features(
        self, codes: Codes, first_position: int, n_tokens: int, features: Array | None = None
    ) -> Array:
        """Decode the features that are used to predict other fields.

        For a hidden state, the features are its decoded values. For keys and values, the features
        are the decoded components with the largest variance, at most :data:`KV_FEATURES`. If keys
        and values are themselves predicted from token ids, the features of the token ids are
        appended.

        Args:
            codes: Name of a stored array -> its rows for these tokens, as in :meth:`decode`.
            first_position: Position of the first token in its sequence, a multiple of 64.
            n_tokens: Number of tokens to decode.
            features: The features that are used to predict this field. If the argument is None,
                they are decoded from ``codes``.

        Returns:
            float32 [n_tokens, n_features].
        """
        if not self.is_kv:
            return self.decode(codes, first_position, n_tokens, None, features)
        of_tokens = self._features_of(codes.get(TOKENS), n_tokens, next(iter(codes.values())))
        codes = self._split(codes, None)
        all_features: list[Array] = []
        for transform in self._learned():
            all_features.append(transform.leading(codes, n_tokens, self._max_leading))
        if of_tokens is not None:
            all_features.append(of_tokens)
        return side_by_side(all_features)

    @override
    def arrays_of(self, layers: Layers) -> Selection:
        groups = self._learned()
        group_ids = self._groups_of(layers)
        if self._pieces is not None:
            indices = None if layers is None else self._pieces.of_groups(group_ids)
            return {self._pieces.array: indices}
        arrays = chain.from_iterable(groups[group].arrays for group in group_ids)
        return dict.fromkeys(arrays)

    def parts(self, values: Array) -> list[list[Array]]:
        """Split a sequence into groups of layers, and each group into its keys and its values.

        The rotation of the keys (RoPE) is undone.

        Returns:
            ``groups[g][p]`` holds the keys (p = 0) or the values (p = 1) of group g, [n_tokens,
            width]. A hidden state is ``groups[0][0]``.
        """
        if not self.is_kv:
            return [[values]]
        xp = array_namespace(values)
        keys = values[:, :, :, 0, :]
        others = values[:, :, :, 1, :]
        keys = keys if self.rope is None else self.rope.rotate(keys, undo=True)
        groups: list[list[Array]] = []
        for layers in self.groups:
            members = slice(layers[0], layers[-1] + 1)
            shape = (values.shape[0], len(layers) * self.layer_width)
            group_keys = xp.reshape(keys[:, members, ...], shape)
            group_values = xp.reshape(others[:, members, ...], shape)
            groups.append([group_keys, group_values])
        return groups

    def whole(self, groups: Sequence[list[Array]]) -> Array:
        """Undo :meth:`parts`: rotate the keys again, and concatenate the layers of all groups."""
        assembled: list[Array] = []
        for parts, layers in zip(groups, self.groups, strict=True):
            assembled.append(self._assemble(parts, 0, layers))
        return array_namespace(*assembled).concat(assembled, axis=1)

    def _assemble(self, parts: list[Array], first_position: int, layers: list[int]) -> Array:
        """Rotate the decoded keys of some layers, and stack the keys and the values.

        Returns:
            [n_tokens, len(layers), n_kv_heads, 2, head_dim]. A hidden state is returned unchanged.
        """
        if not self.is_kv:
            return parts[0]
        _, n_heads, _, head_dim = self.spec.token_shape
        xp = array_namespace(*parts)
        shape = (parts[0].shape[0], len(layers), n_heads, head_dim)
        keys, others = parts
        keys = xp.reshape(keys, shape)
        others = xp.reshape(others, shape)
        keys = keys if self.rope is None else self.rope.rotate(keys, first_position, layers)
        return xp.stack([keys, others], axis=3)

    def _features_of(self, tokens: Array | None, n_tokens: int, like: Array) -> Array | None:
        """Look up the features of token ids. The result is on the device of ``like``.

        Returns:
            The features, float32 [n_tokens, n_features]. If the field is not predicted from token
            ids, the result is None.
        """
        if self._features is None:
            return None
        if tokens is None or len(tokens) < n_tokens:
            raise ValueError(
                f"The codec of field {self.spec.name!r} predicts values from token ids. Pass the "
                f"ids of all {n_tokens} tokens, got {'none' if tokens is None else len(tokens)}."
            )
        xp = array_namespace(like)
        key = f"{xp.__name__} {device(like)}"
        if key not in self._feature_tables:
            self._feature_tables[key] = to_device_of(self._features, like)
        # The table of features is large, so it stays on the device. Each call copies only the token
        # ids.
        ids = xp.asarray(tokens[:n_tokens], device=device(like))
        # Clip ids outside the vocabulary. On CUDA, such ids would fail a device-side assertion,
        # after which this process can no longer use the device.
        ids = xp.clip(ids, 0, len(self._features) - 1)
        return xp.astype(xp.take(self._feature_tables[key], ids, axis=0), xp.float32)

    def _split(self, codes: Codes, layers: Layers) -> Codes:
        """Return the codes of the layer groups that contain these layers, as arrays to decode.

        A decoder needs one array for each run, which is a range of a token's codes with similar
        statistics. A store with many bytes per token has one array for all runs instead. In this
        case, the result is made from the bytes of this array.
        """
        if self._pieces is None:
            return codes
        rows = codes[self._pieces.array.name]
        # Usually, `rows` contains only the bytes of the groups with these layers. But if another
        # field of the batch is predicted from this field, `rows` contains the bytes of all groups,
        # and all groups are converted.
        has_all = rows.shape[1] == self._pieces.array.row_shape[0]
        return self._pieces.split(rows, self._groups_of(None if has_all else layers))

    def _groups_of(self, layers: Layers) -> list[int]:
        wanted = range(self._n_layers) if layers is None else layers
        groups: list[int] = []
        for group, members in enumerate(self.groups):
            if not set(members).isdisjoint(wanted):
                groups.append(group)
        return groups

    def _learned(self) -> list[GroupTransform]:
        if not self._groups:
            raise ValueError(
                f"The codec of field {self.spec.name!r} is not fitted to activations yet. Fit it "
                "with `calibrate` before you encode or decode."
            )
        return self._groups


class Observation(Sample):
    """A sample of sequences. The transform codec of one field learns from the sample.

    The sample is on disk. Sequences are added one at a time.

    Args:
        codec: The codec that learns.
        learning: Settings of learning.
        sources: The samples of other fields, if the codec's field is predicted from them. The
            codecs of the other fields must learn first.
    """

    def __init__(
        self, codec: TransformCodec, learning: Learning, sources: "Sequence[Observation]" = ()
    ) -> None:
        super().__init__(learning.folder)
        self._codec = codec
        self._learning = learning
        self._sources = sources

    def observe(self, values: np.ndarray, tokens: np.ndarray | None = None) -> None:
        """Add a sequence to the sample.

        Args:
            values: Values of the whole sequence, float32 [n_tokens, *token_shape].
            tokens: The token ids. Required if the codec ``needs_tokens``.
        """
        codec = self._codec
        if codec.needs_tokens and (tokens is None or codec.embeddings is None):
            raise ValueError(
                f"The codec of field {codec.spec.name!r} predicts values from token ids. Calibrate "
                "it with embeddings and tokens."
            )
        values = np.asarray(values, np.float32)
        codec.check_finite(values)
        if len(values):
            self.add(codec.parts(values), tokens if codec.needs_tokens else None)

    def values(self) -> np.ndarray:
        """Read the sample of a hidden state, float32 [n_tokens, width]."""
        return self.rows(0, 0, range(len(self.lengths))).values

    def learn(self, bits: float | None = None) -> None:
        """Let the codec learn from the sample. The same sample gives the same state.

        Args:
            bits: Budget of stored bits per token of the field. If the argument is None, the bits
                per value in the codec's name determine the budget.
        """
        codec = self._codec
        if not self.lengths:
            raise StoreError(
                f"The codec of field {codec.spec.name!r} has no sequence to learn from. Pass at "
                "least one to observe() before you call learn()."
            )
        table = None
        features = self._source_features
        if codec.needs_tokens and codec.embeddings is not None:
            table = token_features(
                codec.embeddings, np.concatenate(self.tokens), self._learning.to_device
            )
            features = [table[ids].astype(np.float32) for ids in self.tokens]
        bits = codec.expected_bits * math.prod(codec.spec.token_shape) if bits is None else bits
        n_layers = [len(group) for group in codec.groups]
        fits = fit_groups(
            self, n_layers, codec.n_parts, bits, codec.metrics, features, self._learning
        )
        codec.take_over(fits, table)

    @cached_property
    def _source_features(self) -> list[np.ndarray] | None:
        """For each sequence, the features that are used to predict this field.

        These features are the ``features`` of all sources, concatenated along axis 1. The value is
        None if the field is not predicted from other fields.
        """
        if not self._sources:
            return None
        by_source = [source.features for source in self._sources]
        return [np.concatenate(arrays, axis=1) for arrays in zip(*by_source, strict=True)]

    @cached_property
    def features(self) -> list[np.ndarray]:
        """For each sequence, the features that are used to predict other fields.

        Each array is float32 [n_tokens, n_features]. The features are computed from values that
        were encoded and decoded again, so the codec must have learned first.
        """
        codec = self._codec
        move = self._learning.to_device
        source_features = self._source_features
        all_features = []
        for i, n_tokens in enumerate(self.lengths):
            tokens = self.tokens[i] if self.tokens else None
            features = None if source_features is None else move(source_features[i])
            # Encode and decode the values. A reader has only decoded values, so a prediction must
            # use decoded values.
            groups = [list(map(move, parts)) for parts in self.sequence(i)]
            codes = codec.encode_parts(groups, tokens, features)
            codes |= {} if tokens is None else {TOKENS: tokens}
            all_features.append(on_host(codec.as_features(codes, 0, n_tokens, features)))
        return all_features


def side_by_side(arrays: list[Array]) -> Array:
    """Concatenate arrays [n_tokens, n] along axis 1. All arrays must be on the same device."""
    return array_namespace(*arrays).concat(arrays, axis=1)
