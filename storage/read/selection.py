"""What a caller asks of a store, checked: layers, shapes, buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ...errors import SelectionInvalid
from ..chunks.field import PIECE_AXIS, FieldCodec, StoredArray
from ..codecs.lossless import LosslessCodec
from ..codecs.transform.codec import TransformCodec
from ..dtypes import from_float32
from ..schema import FieldSpec, tokens_field

_TOKENS_ARRAY = LosslessCodec(tokens_field()).arrays[0]


def layer_indices(spec: FieldSpec, layers: slice | Sequence[int] | None) -> list[int] | None:
    """Return non-negative layer indices, or None for all layers in order.

    Raises:
        SelectionInvalid: the field has no layers.
        SelectionInvalid: no such layer.
    """
    if layers is None:
        return None
    if spec.layer_axis != 1:
        raise SelectionInvalid(f"Field {spec.name!r} has no layers; leave `layers` out.")
    n_layers = spec.token_shape[0]
    if isinstance(layers, slice):
        chosen = list(range(n_layers))[layers]
    else:
        chosen = [int(layer) for layer in layers]
        for layer in chosen:
            if not -n_layers <= layer < n_layers:
                raise SelectionInvalid(f"Field {spec.name!r} has {n_layers} layers, there is no layer {layer}.")
        chosen = [layer % n_layers for layer in chosen]
    return None if chosen == list(range(n_layers)) else chosen


def token_shape(spec: FieldSpec, layers: list[int] | None) -> tuple[int, ...]:
    """Return the shape of one token's values with these layers."""
    return spec.token_shape if layers is None else (len(layers), *spec.token_shape[1:])


def row_indices(codec: FieldCodec, array: StoredArray, layers: list[int] | None) -> list[int] | None:
    """Return the indices along axis 1 of a stored array that hold what these layers need; None for whole rows."""
    if layers is None:
        return None
    if isinstance(codec, TransformCodec) and array.axes[1:2] == (PIECE_AXIS,):
        return codec.pieces_of(layers)
    return None if array.layer_axis is None else layers


def row_shape(array: StoredArray, indices: list[int] | None) -> tuple[int, ...]:
    """Return the shape of one row of a stored array with some indices along axis 1; None for whole rows."""
    return array.row_shape if indices is None else (len(indices), *array.row_shape[1:])


def own_arrays(codec: FieldCodec, layers: list[int] | None) -> tuple[StoredArray, ...]:
    """Return the stored arrays that these layers of a field are decoded from, its sources' too; None for all."""
    own = codec.arrays_of(layers) if isinstance(codec, TransformCodec) else codec.arrays
    return tuple(dict.fromkeys([*own, *(array for source in codec.sources for array in own_arrays(source, None))]))


def shared_arrays(
    fields: Iterable[tuple[FieldCodec, list[int] | None]],
) -> dict[StoredArray, list[int] | None]:
    """Return the stored arrays that some layers of several fields are decoded from, each once.

    Returns:
        Array -> the indices along its axis 1 that are needed; None for whole rows.
    """
    found: dict[StoredArray, list[int] | None] = {}
    for codec, layers in fields:
        for array in own_arrays(codec, layers):
            indices = row_indices(codec, array, layers)
            found[array] = indices if found.get(array, indices) == indices else None
    return found


def decoding_arrays(codec: FieldCodec, layers: list[int] | None = None) -> tuple[StoredArray, ...]:
    """Return the arrays that decoding these layers of a field reads, the tokens included where it needs them."""
    arrays = own_arrays(codec, layers)
    needs_tokens = codec.needs_tokens or any(_TOKENS_ARRAY in decoding_arrays(source) for source in codec.sources)
    return (*arrays, _TOKENS_ARRAY) if needs_tokens else arrays


def empty_codes(codec: FieldCodec, start: int, stop: int, layers: list[int] | None) -> dict[str, np.ndarray]:
    """Return buffers for the rows of ``decoding_arrays`` that cover the tokens [start, stop) of a sequence."""
    return {
        array.name: np.empty(
            (array.n_rows(stop) - start // array.block_tokens, *row_shape(array, row_indices(codec, array, layers))),
            array.storage_dtype,
        )
        for array in decoding_arrays(codec, layers)
    }


def decode_tokens(
    codec: FieldCodec,
    codes: Mapping[str, np.ndarray],
    base: int,
    start: int,
    stop: int,
    layers: list[int] | None,
    out: np.ndarray,
) -> None:
    """Decode the tokens [start, stop) of a sequence from rows that begin at token ``base``, a multiple of 64.

    Args:
        codec: of the field; not the identity.
        base: position of the rows' first token.
        layers: the layers that ``codes`` hold; None for all.
        out: [stop - start, *token_shape], the field's storage dtype; filled.
    """
    if layers == []:
        return
    values = codec.decode(codes, base, stop - base, layers)[start - base :]
    out[...] = from_float32(values, codec.spec.dtype)


def batch_buffer(
    out: Mapping[str, np.ndarray] | None, name: str, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """Return the caller's buffer of that name, or a new one.

    Args:
        out: the caller's buffers; None for new ones.
        name: of the field or stored array.
        shape: [n_sequences, n_rows, ...]; a buffer of the caller may have more rows.

    Raises:
        SelectionInvalid: the caller's buffer is missing, or has another dtype or shape.
    """
    if out is None:
        return np.empty(shape, dtype)
    if name not in out:
        raise SelectionInvalid(f"`out` has no buffer for {name!r}; it has {', '.join(out) or 'none'}.")
    buffer = out[name]
    fits = buffer.ndim == len(shape) and buffer.shape[0] == shape[0] and buffer.shape[2:] == shape[2:]
    if not fits or buffer.shape[1] < shape[1] or buffer.dtype != dtype:
        raise SelectionInvalid(
            f"The batch of {name!r} needs a buffer of {dtype.name} with shape "
            f"{[shape[0], f'>={shape[1]}', *shape[2:]]}, got {buffer.dtype} {list(buffer.shape)}."
        )
    return buffer
