"""The interface of field codecs, and the lossless codec.

A field of a store contains values of one kind for every token, such as keys and values. A field
codec encodes these values to rows of stored arrays, and decodes the rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from ...errors import StoreError
from ...text import SILENT, Progress
from ..schema import Array, FieldSpec, StoredArray

# Encoded values of a field: name of a stored array -> rows of this array.
Codes = Mapping[str, Array]

# Layers to decode, as indices along the field's layer axis. The decoded values have the layers in
# the order of this list. If the value is None, all layers are decoded.
Layers = list[int] | None

# The stored arrays to read. Each array is mapped to the indices along axis 1 that are read, or to
# None if all indices are read.
Selection = dict[StoredArray, list[int] | None]


def to_device_of(array: np.ndarray, like: Array) -> Array:
    """Copy a NumPy array to an array of the library (NumPy or torch) and device of ``like``.

    The copy does not synchronize with a CUDA device.
    """
    xp = array_namespace(like)
    if getattr(like, "is_cuda", False):
        # Pin the memory first. A copy from memory that is not pinned would make the CPU wait until
        # the device has finished all queued work.
        return xp.asarray(array).pin_memory().to(device(like), non_blocking=True)
    return xp.asarray(array, device=device(like))


class FieldCodec:
    """The codec of one field of a store, such as the keys and values.

    ``encode`` and ``decode`` run on the device of their inputs. NumPy and torch share one
    implementation.
    """

    # Whether the field is stored bit for bit, in one stored array. Such a field is read and written
    # in its storage dtype, without ``encode`` and ``decode``. Reading can start at any token.
    is_identity = False
    # If this field is predicted from other fields, these are the codecs of the other fields, called
    # the sources. Each source computes features of a token (``as_features``). The prediction uses
    # the features of all sources, concatenated in this order.
    sources: "Sequence[FieldCodec]" = ()

    def __init__(
        self, spec: FieldSpec, expected_bits: float, arrays: Sequence[StoredArray] = ()
    ) -> None:
        # The stored arrays, in the order in which they are written.
        self.spec, self.arrays = spec, tuple(arrays)
        # Upper estimate of the stored bits per value, after the compression of chunks
        # (``storage.chunk``).
        self.expected_bits = expected_bits

    @property
    def needs_tokens(self) -> bool:
        """Whether ``encode`` and ``decode`` need the token ids of the values."""
        return False

    def describe(self) -> dict[str, Any]:
        """Return the settings that ``store.json`` records for this field.

        Codecs with different settings store different bytes.
        """
        raise NotImplementedError

    def encode(
        self, values: Array, tokens: Array | None = None, features: Array | None = None
    ) -> dict[str, Array]:
        """Encode the values of this field for one whole sequence, from position 0 on.

        To encode all fields of a sequence, use ``StoreCodec.encode``.

        Args:
            values: [n_tokens, *token_shape], NumPy float32 or a torch tensor of any float dtype.
                All values must be finite.
            tokens: int [n_tokens], the token ids; required if the codec ``needs_tokens``.
            features: The values may be predicted from these features, float32 [n_tokens,
                n_features]. They are the results of ``as_features`` of all ``sources``,
                concatenated along axis 1.

        Returns:
            Name of a stored array -> its rows. The rows have the shape [array.n_rows(n_tokens),
            *row_shape] and the array's dtype, and are on the device of ``values``.
        """
        raise NotImplementedError

    def decode(
        self, codes: Codes, first_position: int, n_tokens: int, layers: Layers = None
    ) -> Array:
        """Decode consecutive tokens of one sequence.

        Args:
            codes: Name of a stored array -> its rows for the tokens from ``first_position`` on. All
                arrays that ``arrays_read(layers)`` selects are required. If it selects only some
                layers of an array, the rows contain only these layers. If this codec or a source
                ``needs_tokens``, the key ``"tokens"`` is required, too. Its value is the token ids,
                int [at least n_tokens].
            first_position: Position of the first token in its sequence, a multiple of 64.
            n_tokens: Number of tokens to decode.
            layers: The layers to decode. If the argument is None, all layers are decoded.

        Returns:
            The values, float32 [n_tokens, *token_shape]. If ``layers`` are given, the length of the
            layer axis is ``len(layers)``.
        """
        raise NotImplementedError

    def arrays_of(self, layers: Layers) -> Selection:
        """Select the stored arrays of this field that are needed to decode these layers.

        Even if this field is predicted from other fields, the arrays of the other fields are not
        included.
        """
        selection: Selection = {}
        for array in self.arrays:
            selection[array] = None if array.layer_axis is None else layers
        return selection

    def arrays_read(self, layers: Layers = None) -> Selection:
        """Select all stored arrays, also of other fields, that are needed to decode these layers.

        If this field is predicted from other fields, the arrays of the other fields are included.
        """
        selection = self.arrays_of(layers)
        for source in self.sources:
            selection |= source.arrays_read()
        return selection

    def with_sources(self) -> "list[FieldCodec]":
        """List the codecs that are needed to decode this field.

        If the field is predicted from other fields, directly or indirectly, the codecs of these
        fields come first. This codec is the last one.
        """
        codecs: list[FieldCodec] = []
        for source in self.sources:
            codecs += source.with_sources()
        return list(dict.fromkeys([*codecs, self]))

    def check_finite(self, values: Array) -> None:
        """Raise StoreError if a value is NaN or infinite.

        The check synchronizes with the device of the values.
        """
        xp = array_namespace(values)
        if not bool(xp.all(xp.isfinite(values))):
            raise StoreError(
                f"Field {self.spec.name!r} has NaN or infinite values, which only the codec "
                "lossless can store. Use the codec lossless, or extract a store without the "
                "sequences that have such values. `moa-data verify` lists them."
            )


# Maps a logical dtype to the size of its values after lossless compression, as a fraction of the
# raw size. The fractions are upper estimates. For bfloat16, the measured fractions are 0.66 to 0.70
# for KV, and up to 0.70 for hidden states.
_STORED_FRACTION = {
    "bfloat16": 0.70,
    "float16": 0.90,
    "float32": 0.90,
    "int32": 0.55,
    "uint8": 0.10,
}


class LosslessCodec(FieldCodec):
    """Stores the values of a field unchanged, in one array of the field's storage dtype."""

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
    """Settings for learning a codec. The store does not record them."""

    # Folder for the temporary files that contain the sample. The files have no names. If the value
    # is None, the system's temporary folder is used.
    folder: Path | None = None
    # Function that copies a NumPy array to another device. Large matrix products and decompositions
    # run on this device. If it is a GPU, the function returns a torch tensor.
    to_device: Callable[[np.ndarray], Array] = lambda array: array
    progress: Progress = SILENT  # Receives reports about the steps of learning.
