"""``int8`` and ``int6``: each value is a small whole number times a scale that several values share.

===========  =======================================================  ==============================================
values       one scale for                                            why
===========  =======================================================  ==============================================
keys         a channel over 64 tokens                                 some channels are much larger than others
values       a token and head                                         no channel stands out
hidden       a channel over 64 tokens                                 some channels are larger by orders of magnitude
===========  =======================================================  ==============================================

Measured on a small Llama (8 layers, 2 heads of 64), at equal error a scale per token and head costs 0.1 bit per value
more for keys at 4 bits and 0.03 bit less for values; for hidden states the two cost the same. Since the byte chain
entropy-codes the codes, neither groups of 32 nor clipping the largest values pays: both move along the same curve of
bits against error.

A scale is a bfloat16 with two bits of mantissa, rounded up: it takes 4 to 5 bits after entropy coding, where a full
mantissa would take 10 and gain nothing, because a coarser step also needs fewer bits for the codes.

NumPy and torch share one definition, with operations that round alike everywhere, so that codes are bit-equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace, device

from ...errors import CodecUnknown, StoreError
from ..chunks.field import BLOCK_AXIS, Array, LearnedCodec, StoredArray
from ..schema import ALIGNMENT_TOKENS, LAYER_AXIS, TOKEN_AXIS, FieldSpec

BLOCK_TOKENS = ALIGNMENT_TOKENS
"""Tokens that share a scale per channel; as many as sequences are aligned to, so that no block has two of them."""

_SCALE_STEP = 1 << 21  # of float32 bits: two bits of mantissa stay
_SMALLEST_NORMAL = 2.0**-126
_KV_AXES = (LAYER_AXIS, "kv_head", "key_value", "head_dim")


@dataclass(frozen=True)
class Scheme:
    """One way of quantising.

    Attributes:
        largest: the largest code, which the largest value of a group is scaled to.
        bits: measured bits per value after the byte chain, scales included, rounded up.
    """

    name: str
    largest: float
    bits: float


SCHEMES = {scheme.name: scheme for scheme in (Scheme("int8", 127.0, 7.9), Scheme("int6", 31.0, 5.9))}


@dataclass(frozen=True)
class _Part:
    """Values of a field that are quantised in one way: the keys, the values, or a hidden state."""

    codes: StoredArray
    scale: StoredArray

    @property
    def is_per_channel(self) -> bool:
        return self.scale.block_tokens > 1


class QuantisedCodec:
    """Quantises one field.

    Args:
        spec: ``kv`` [token, layer, kv_head, key_value, head_dim], or a field [token, width].

    Raises:
        CodecUnknown: another kind of field.
    """

    is_identity = False
    needs_tokens = False
    sources: tuple[LearnedCodec, ...] = ()

    def __init__(self, spec: FieldSpec, scheme: Scheme) -> None:
        self.spec = spec
        self.scheme = scheme
        self._is_kv = spec.axes[1:] == _KV_AXES
        if not self._is_kv and len(spec.token_shape) != 1:
            raise CodecUnknown(f"Codec {scheme.name!r} knows kv and [token, width], not {spec.name!r} {spec.axes}.")
        if self._is_kv:
            shape, axes = (*spec.token_shape[:2], spec.token_shape[3]), (*_KV_AXES[:2], _KV_AXES[3])
            self._parts: tuple[_Part, ...] = (
                self._part("key_", shape, axes, True),
                self._part("value_", shape, axes, False),
            )
        else:
            self._parts = (self._part("", spec.token_shape, spec.axes[1:], True),)
        self.arrays = tuple(array for part in self._parts for array in (part.codes, part.scale))

    def _part(self, prefix: str, shape: tuple[int, ...], axes: tuple[str, ...], is_per_channel: bool) -> _Part:
        name = f"{self.spec.name}/{prefix}"
        layer_axis = 1 if axes[0] == LAYER_AXIS else None
        codes = StoredArray(f"{name}codes", "int8", shape, (TOKEN_AXIS, *axes), 1, layer_axis)
        if is_per_channel:
            scale_axes = (BLOCK_AXIS, *axes)
            scale = StoredArray(f"{name}scale", "uint16", shape, scale_axes, BLOCK_TOKENS, layer_axis, "bfloat16")
        else:
            scale = StoredArray(f"{name}scale", "uint16", shape[:-1], codes.axes[:-1], 1, layer_axis, "bfloat16")
        return _Part(codes, scale)

    def describe(self) -> dict[str, Any]:
        """Return the settings for ``store.json``."""
        return {
            "transform": f"{self.scheme.name} code times scale",
            "codes_per_byte": 1,
            "scales": {part.scale.name: "/".join(part.scale.axes) for part in self._parts},
            "block_tokens": BLOCK_TOKENS,
        }

    def expected_bits(self) -> float:
        """Return the bits per value that a store takes, roughly and rather too many."""
        return self.scheme.bits

    def encode(self, values: Array, tokens: Array | None = None, features: Array | None = None) -> dict[str, Array]:
        """Encode one whole sequence; see ``FieldCodec.encode``."""
        xp = array_namespace(values)
        if not bool(xp.all(xp.isfinite(values))):
            raise StoreError(
                f"Field {self.spec.name!r} has NaN or infinite values, which codec {self.scheme.name!r} cannot hold. "
                "Extract with codec lossless, or drop the sequence."
            )
        values = xp.astype(values, xp.float32)
        parts = [values[:, :, :, 0, :], values[:, :, :, 1, :]] if self._is_kv else [values]
        encoded: dict[str, Array] = {}
        for part, own in zip(self._parts, parts, strict=True):
            encoded |= self._encode_part(xp, part, own)
        return encoded

    def _encode_part(self, xp: Any, part: _Part, values: Array) -> dict[str, Array]:
        n_tokens = values.shape[0]
        grouped = _to_blocks(xp, values) if part.is_per_channel else values
        axis = 1 if part.is_per_channel else -1
        scale = _round_up(xp, xp.max(xp.abs(grouped), axis=axis, keepdims=True), 1.0 / self.scheme.largest)
        scaled = grouped / xp.where(scale == 0, xp.ones_like(scale), scale)
        # Where the scale is zero, so is every code: the values are too small for any scale.
        scaled = xp.where(scale == 0, xp.zeros_like(scaled), scaled)
        codes = xp.astype(xp.round(scaled), xp.int8)
        if part.is_per_channel:
            codes = xp.reshape(codes, (-1, *values.shape[1:]))[:n_tokens, ...]
        bits = xp.astype(scale.view(xp.int32) >> 16, xp.uint16)
        return {part.codes.name: codes, part.scale.name: xp.squeeze(bits, axis=axis)}

    def decode(
        self,
        codes: Mapping[str, Array],
        first_position: int,
        n_tokens: int,
        layers: list[int] | None = None,
        features: Array | None = None,
    ) -> Array:
        """Decode consecutive tokens of one sequence; see ``FieldCodec.decode``."""
        decoded = [self._decode_part(part, codes, n_tokens) for part in self._parts]
        if not self._is_kv:
            return decoded[0]
        return array_namespace(*decoded).stack(decoded, axis=3)

    def _decode_part(self, part: _Part, codes: Mapping[str, Array], n_tokens: int) -> Array:
        stored, bits = codes[part.codes.name][:n_tokens, ...], codes[part.scale.name]
        xp = array_namespace(stored)
        scale = (xp.astype(bits, xp.int32) << 16).view(xp.float32)
        values = xp.astype(stored, xp.float32)
        if not part.is_per_channel:
            return values * scale[:n_tokens, ..., None]
        blocks = _to_blocks(xp, values)
        blocks = blocks * scale[: blocks.shape[0], None, ...]
        return xp.reshape(blocks, (-1, *values.shape[1:]))[:n_tokens, ...]


def _to_blocks(xp: Any, values: Array) -> Array:
    """Cut tokens into blocks, the last one filled up with zeros: [n, ...] -> [n_blocks, BLOCK_TOKENS, ...]."""
    n_missing = -values.shape[0] % BLOCK_TOKENS
    if n_missing:
        zeros = xp.zeros((n_missing, *values.shape[1:]), dtype=values.dtype, device=device(values))
        values = xp.concat([values, zeros], axis=0)
    return xp.reshape(values, (-1, BLOCK_TOKENS, *values.shape[1:]))


def _round_up(xp: Any, largest: Array, factor: float) -> Array:
    """Return the scale for groups with this largest magnitude: two bits of mantissa, 0 below the normal numbers."""
    # By a product: dividing by a constant is a product on some devices and a division on others.
    bits = (largest * factor).view(xp.int32)
    scale = ((bits + (_SCALE_STEP - 1)) & -_SCALE_STEP).view(xp.float32)
    return xp.where(scale < _SMALLEST_NORMAL, xp.zeros_like(scale), scale)
