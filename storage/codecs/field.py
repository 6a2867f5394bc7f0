"""The contract of field codecs, which turn a field's values into rows of stored arrays and back; and lossless."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from ...errors import StoreError
from ...text import Progress
from ..schema import Array, FieldSpec, StoredArray

Codes = Mapping[str, Array]  # name of a stored array -> rows of it
Layers = list[int] | None  # the chosen layers in the order wanted; None for all


def placed(array: np.ndarray, like: Array) -> Array:
    """Copy an array of the host to the namespace and device of ``like``, without waiting for a CUDA device."""
    xp = array_namespace(like)
    if getattr(like, "is_cuda", False):
        # A copy from memory that is not pinned would wait until the device has done all that it was
        # asked for before.
        return xp.asarray(array).pin_memory().to(device(like), non_blocking=True)
    return xp.asarray(array, device=device(like))


class FieldCodec:
    """The codec of one field.

    ``encode`` and ``decode`` follow the device of what they are given and have one definition for NumPy and torch.
    """

    # Whether the one stored array is the field itself, bit for bit; such a field is read and
    # written in its storage
    # dtype without ``encode`` and ``decode``, at any positions.
    is_identity = False
    # the codecs that it is predicted from, in the order of their features
    sources: "Sequence[FieldCodec]" = ()

    def __init__(
        self, spec: FieldSpec, expected_bits: float, arrays: Sequence[StoredArray] = ()
    ) -> None:
        # what is stored, in the order in which it is written
        self.spec, self.arrays = spec, tuple(arrays)
        # per value that the stored arrays take after the byte chain, at most
        self.expected_bits = expected_bits

    @property
    def needs_tokens(self) -> bool:
        """Whether ``encode`` and ``decode`` need the token ids of the values."""
        return False

    def describe(self) -> dict[str, Any]:
        """Return the settings that ``store.json`` records for this field; a change of any changes the bytes."""
        raise NotImplementedError

    def encode(
        self, values: Array, tokens: Array | None = None, features: Array | None = None
    ) -> dict[str, Array]:
        """Encode one whole sequence, position 0 first, of finite values; ``StoreCodec.encode`` encodes all its fields.

        Args:
            values: [n_tokens, *token_shape], NumPy float32 or a torch tensor of any float dtype.
            tokens: int [n_tokens], its token ids; needed where the codec ``needs_tokens``.
            features: float32 [n_tokens, n_features], ``as_features`` of the ``sources`` side by side.

        Returns:
            Array name -> [array.n_rows(n_tokens), *row_shape] in the array's dtype, on the device of ``values``.
        """
        raise NotImplementedError

    def decode(
        self, codes: Codes, first_position: int, n_tokens: int, layers: Layers = None
    ) -> Array:
        """Decode consecutive tokens of one sequence.

        Args:
            codes: the rows of ``arrays_of(layers)`` and of all arrays of its ``sources`` that cover the tokens, from
                ``first_position`` on, with the indices of ``indices_of`` along axis 1; where a codec ``needs_tokens``,
                also ``"tokens"``, int [at least n_tokens].
            first_position: position of the first token in its sequence, a multiple of 64.

        Returns:
            float32 [n_tokens, *token_shape], with ``len(layers)`` layers where some are chosen.
        """
        raise NotImplementedError

    def arrays_of(self, layers: Layers) -> tuple[StoredArray, ...]:
        """Return those of ``arrays`` that decoding these layers needs."""
        return self.arrays

    def indices_of(self, array: StoredArray, layers: Layers) -> list[int] | None:
        """Return the indices along axis 1 of an array that decoding these layers needs; None for whole rows."""
        return None if array.layer_axis is None else layers

    def arrays_read(self, layers: Layers = None) -> tuple[StoredArray, ...]:
        """Return the arrays that decoding these layers reads: its own, and those of its sources."""
        of_sources = (array for source in self.sources for array in source.arrays_read())
        return tuple(dict.fromkeys([*self.arrays_of(layers), *of_sources]))

    def with_sources(self) -> "list[FieldCodec]":
        """List the codecs that decoding the field takes: those of all that it is predicted from, then itself."""
        return list(
            dict.fromkeys(
                [*(one for source in self.sources for one in source.with_sources()), self]
            )
        )

    def check_finite(self, values: Array) -> None:
        """Raise StoreError where a value is NaN or infinite; this waits for the device of the values."""
        xp = array_namespace(values)
        if not bool(xp.all(xp.isfinite(values))):
            raise StoreError(
                f"Field {self.spec.name!r} has NaN or infinite values, which only codec lossless holds. Extract with "
                "it, or drop the sequence."
            )


# Upper estimates of stored bits per raw bit: in bfloat16 KV measures 0.66 to 0.70 and hidden states
# up to 0.70.
_STORED_FRACTION = {
    "bfloat16": 0.70,
    "float16": 0.90,
    "float32": 0.90,
    "int32": 0.55,
    "uint8": 0.10,
}


class LosslessCodec(FieldCodec):
    """Stores a field in its storage dtype: the stored array is the field itself, which nothing encodes or decodes."""

    is_identity = True

    def __init__(self, spec: FieldSpec) -> None:
        dtype = spec.storage_dtype
        layer_axis = 1 if spec.layer_axis == 1 else None
        array = StoredArray(
            spec.name,
            dtype.name,
            spec.token_shape,
            spec.axes,
            1,
            layer_axis,
            logical_dtype=spec.dtype,
        )
        super().__init__(spec, 8.0 * dtype.itemsize * _STORED_FRACTION[spec.dtype], [array])


@dataclass(frozen=True)
class Learning:
    """How codecs learn; none of it is recorded."""

    # Where the sample waits on disk, in files without names; None for the system's temporary
    # folder.
    folder: Path | None = None
    # Moves an array to where large products and decompositions run, e.g. to a GPU as a torch
    # tensor.
    place: Callable[[np.ndarray], Array] = lambda array: array
    # called with (steps done, steps in all, message)
    progress: Progress = lambda n_done, n_all, message: None
