"""``int8``: each value is an 8-bit integer times a scale that several values share.

===========  ==============================  ==================================================
tensor       one scale per                   reason
===========  ==============================  ==================================================
keys         channel and block of 64 tokens  Some channels are much larger than others.
values       token and head                  No channel is much larger than others.
hidden       channel and block of 64 tokens  Some channels are larger by orders of magnitude.
===========  ==============================  ==================================================

The integers are later entropy-coded (``storage.chunk``), so small integers take fewer bits than
large integers. With a larger scale, the integers are smaller and take fewer bits, but the rounding
error is larger. Other methods, such as one scale per 32 values or clipping of the largest values,
are not better: with the same number of bits, these methods have the same error.

A scale is stored as a bfloat16. Only two bits of its mantissa are used, so that a scale takes 4 to
5 bits after entropy coding. With the whole mantissa, a scale would take 10 bits, and the codec
would not be better. Scales are rounded up, and not to nearest. The error is then larger, but the
integers are smaller and take fewer bits.

NumPy and torch share one implementation. It uses only operations that round in the same way in both
libraries and on all devices, so that the same values always give the same codes.
"""

import math
from itertools import chain
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device
from typing_extensions import override

from ...errors import CodecUnknown
from ..schema import (
    ALIGNMENT_TOKENS,
    BLOCK_AXIS,
    KV_AXES,
    TOKEN_AXIS,
    UNEQUAL_KV_AXES,
    Array,
    FieldSpec,
    StoredArray,
)
from .field import Codes, FieldCodec, Layers

INT8 = "int8"
# Upper bound on the magnitude of a code, the 8-bit integer that is stored for a value.
LARGEST_CODE = 127.0
# Number of tokens of a block. The consecutive tokens of a block share one scale per channel.
# Sequences start at multiples of this number, so no block contains tokens of two sequences.
BLOCK_TOKENS = ALIGNMENT_TOKENS

# Stored bits per value, after the lossless compression of chunks (``storage.chunk``). The number
# was measured, includes the bits of the scales, and is rounded up.
_BITS = 7.9
# To round a scale up to two bits of mantissa, the bits of its float32 are read as an integer. This
# integer is rounded up to a multiple of _SCALE_STEP.
_SCALE_STEP = 1 << 21
_SMALLEST_NORMAL = 2.0**-126


class _Part(NamedTuple):
    """The two stored arrays (codes and scales) of the keys, of the values, or of a hidden state."""

    codes: StoredArray
    scale: StoredArray

    @property
    def is_per_channel(self) -> bool:
        return self.scale.block_tokens > 1


class Int8Codec(FieldCodec):
    """Quantises a field of keys and values, or a hidden state, to 8-bit integers with scales.

    A key and a value may have different widths.
    """

    def __init__(self, spec: FieldSpec) -> None:
        self._is_kv = spec.axes[1:] in (KV_AXES, UNEQUAL_KV_AXES)
        if not self._is_kv and len(spec.token_shape) != 1:
            raise CodecUnknown(
                f"Codec {INT8!r} supports only keys and values, and hidden states with the axes "
                f"[token, width], but field {spec.name!r} has the axes {spec.axes}. Use the codec "
                "lossless."
            )
        shape = spec.token_shape
        axes = spec.axes[1:]
        if self._is_kv:
            # In a KV field, each layer and head has a key, followed by a value. Compute the width
            # of both together, and the width of the key, which may differ from the width of the
            # value.
            self._kv_width = math.prod(shape[2:])
            self._key_width = shape[-1] if spec.key_width is None else spec.key_width
            axes = (*axes[:2], axes[-1])
            value_width = self._kv_width - self._key_width
            self._parts = [
                _part(f"{spec.name}/key_", (*shape[:2], self._key_width), axes, True),
                _part(f"{spec.name}/value_", (*shape[:2], value_width), axes, False),
            ]
        else:
            self._parts = [_part(f"{spec.name}/", shape, axes, True)]
        super().__init__(spec, _BITS, list(chain.from_iterable(self._parts)))

    @override
    def describe(self) -> dict[str, Any]:
        return {
            "transform": f"{INT8} code times scale",
            "codes_per_byte": 1,
            "scales": {part.scale.name: "/".join(part.scale.axes) for part in self._parts},
            "block_tokens": BLOCK_TOKENS,
        }

    @override
    def encode(
        self, values: Array, tokens: Array | None = None, features: Array | None = None
    ) -> dict[str, Array]:
        xp = array_namespace(values)
        values = xp.astype(values, xp.float32, copy=False)
        parts = [values]
        if self._is_kv:
            flat = xp.reshape(values, (*values.shape[:3], self._kv_width))
            parts = [flat[..., : self._key_width], flat[..., self._key_width :]]
        encoded: dict[str, Array] = {}
        for part, part_values in zip(self._parts, parts, strict=True):
            encoded |= _encode(xp, part, part_values)
        return encoded

    @override
    def decode(
        self, codes: Codes, first_position: int, n_tokens: int, layers: Layers = None
    ) -> Array:
        decoded = [_decode(part, codes, n_tokens) for part in self._parts]
        if not self._is_kv:
            return decoded[0]
        xp = array_namespace(*decoded)
        flat = xp.concat(decoded, axis=3)
        return xp.reshape(flat, (*flat.shape[:2], *self.spec.token_shape[1:]))


def _part(name: str, shape: tuple[int, ...], axes: tuple[str, ...], is_per_channel: bool) -> _Part:
    layer_axis = 1 if axes[0] == KV_AXES[0] else None
    codes = StoredArray(f"{name}codes", "int8", shape, (TOKEN_AXIS, *axes), 1, layer_axis)
    rows = (
        (shape, (BLOCK_AXIS, *axes), BLOCK_TOKENS)
        if is_per_channel
        else (shape[:-1], codes.axes[:-1], 1)
    )
    return _Part(codes, StoredArray(f"{name}scale", "uint16", *rows, layer_axis, "bfloat16"))


def _encode(xp: Any, part: _Part, values: Array) -> dict[str, Array]:
    n_tokens = values.shape[0]
    grouped = _to_blocks(xp, values) if part.is_per_channel else values
    axis = 1 if part.is_per_channel else -1
    scale = _scale(xp, xp.max(xp.abs(grouped), axis=axis, keepdims=True))
    scaled = grouped / xp.where(scale == 0, xp.ones_like(scale), scale)
    # A scale is zero if its values are too small for any normal float32 scale. The codes of these
    # values are then zero, too.
    scaled = xp.where(scale == 0, xp.zeros_like(scaled), scaled)
    # Both NumPy and torch round to nearest, ties to even.
    codes = xp.astype(xp.round(scaled), xp.int8)
    if part.is_per_channel:
        codes = xp.reshape(codes, (-1, *values.shape[1:]))[:n_tokens, ...]
    # The upper half of a float32 is a bfloat16.
    bits = xp.astype(scale.view(xp.int32) >> 16, xp.uint16)
    return {part.codes.name: codes, part.scale.name: xp.squeeze(bits, axis=axis)}


def _decode(part: _Part, codes: Codes, n_tokens: int) -> Array:
    stored = codes[part.codes.name][:n_tokens, ...]
    xp = array_namespace(stored)
    scale = (xp.astype(codes[part.scale.name], xp.int32) << 16).view(xp.float32)
    values = xp.astype(stored, xp.float32)
    if not part.is_per_channel:
        return values * scale[:n_tokens, ..., None]
    blocks = _to_blocks(xp, values)
    blocks = blocks * scale[: blocks.shape[0], None, ...]
    return xp.reshape(blocks, (-1, *values.shape[1:]))[:n_tokens, ...]


def _to_blocks(xp: Any, values: Array) -> Array:
    """Split the token axis into blocks of 64 tokens, and pad the last block with zeros.

    The shape changes from [n_tokens, ...] to [n_blocks, BLOCK_TOKENS, ...].
    """
    n_missing = -values.shape[0] % BLOCK_TOKENS
    if n_missing:
        zeros = xp.zeros((n_missing, *values.shape[1:]), dtype=values.dtype, device=device(values))
        values = xp.concat([values, zeros], axis=0)
    return xp.reshape(values, (-1, BLOCK_TOKENS, *values.shape[1:]))


def _scale(xp: Any, largest: Array) -> Array:
    """Compute each scale from the largest magnitude of the values that share this scale.

    A scale has two bits of mantissa. A scale below the smallest normal float32 number becomes 0.
    """
    # Do not divide by LARGEST_CODE. Only some devices compute a division by a constant as a
    # multiplication by the reciprocal. So the bits of the result would depend on the device.
    bits = (largest * (1.0 / LARGEST_CODE)).view(xp.int32)
    scale = ((bits + (_SCALE_STEP - 1)) & -_SCALE_STEP).view(xp.float32)
    return xp.where(scale < _SMALLEST_NORMAL, xp.zeros_like(scale), scale)
