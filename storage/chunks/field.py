"""What a codec of one field is: which arrays it stores, and how values become their rows and come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ...text import Progress
from ..schema import FieldSpec

Array = Any
"""A NumPy array or a torch tensor; a codec has one definition for both."""

BLOCK_AXIS = "block"
"""Name of axis 0 of a stored array that has one row for several tokens."""

PIECE_AXIS = "piece"
"""Name of axis 1 of a stored array of which each index is read apart, in inner chunks of its own."""

TOKENS = "tokens"
"""The field of the token ids, of which some codecs need rows to decode another field."""


@dataclass(frozen=True)
class StoredArray:
    """One Zarr array of every part. Its rows count tokens, or blocks of tokens.

    Attributes:
        name: path inside the part's group, e.g. ``"kv"`` or ``"kv/key_codes"``.
        dtype: NumPy dtype name on disk, e.g. ``"uint16"``.
        axes: names of all axes, ``"token"`` or ``"block"`` first.
        block_tokens: tokens that one row stands for; divides the alignment of sequences.
        layer_axis: index of the layer axis in the whole array (1), or None.
        logical_dtype: what the numbers mean where it is not ``dtype`` (``"bfloat16"`` in uint16), for the attributes.
    """

    name: str
    dtype: str
    row_shape: tuple[int, ...]
    axes: tuple[str, ...]
    block_tokens: int = 1
    layer_axis: int | None = None
    logical_dtype: str = ""

    def __post_init__(self) -> None:
        """Fill in the logical dtype and check the array against itself."""
        object.__setattr__(self, "logical_dtype", self.logical_dtype or self.dtype)
        if len(self.axes) != 1 + len(self.row_shape) or self.layer_axis not in (None, 1) or self.block_tokens < 1:
            raise ValueError(f"Stored array {self.name!r}: axes {self.axes} do not fit row_shape {self.row_shape}.")

    @property
    def storage_dtype(self) -> np.dtype:
        """NumPy dtype on disk, little endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def row_bytes(self) -> int:
        """Raw bytes of one row."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.storage_dtype.itemsize

    def n_rows(self, n_tokens: int) -> int:
        """Count the rows that cover ``n_tokens`` tokens from the start of a block on."""
        return -(-n_tokens // self.block_tokens)


@runtime_checkable
class FieldCodec(Protocol):
    """The codec of one field.

    ``encode`` and ``decode`` follow the device of what they are given and have one definition for NumPy and torch.

    Attributes:
        arrays: what is stored for it, in the order in which it is written.
        is_identity: whether the one stored array is the field itself, bit for bit; such a field is read and written in
            its storage dtype without ``encode`` and ``decode``, in any pieces.
        needs_tokens: whether ``encode`` and ``decode`` need the token ids of the values.
        sources: the codecs of the fields that this one is predicted from, in the order of their features.
    """

    spec: FieldSpec
    arrays: tuple[StoredArray, ...]
    is_identity: bool

    @property
    def needs_tokens(self) -> bool: ...  # noqa: D102  (above)

    @property
    def sources(self) -> Sequence[LearnedCodec]: ...  # noqa: D102  (above)

    def describe(self) -> dict[str, Any]:
        """Return the settings that ``store.json`` records for this field; a change of any changes the bytes."""

    def expected_bits(self) -> float:
        """Return the bits per value that the stored arrays take after the byte chain, roughly and rather too many."""

    def encode(self, values: Array, tokens: Array | None = None, features: Array | None = None) -> dict[str, Array]:
        """Encode one whole sequence, position 0 first; ``StoreCodec.encode`` encodes all fields of one.

        Args:
            values: [n_tokens, *token_shape], NumPy float32 or a torch tensor of any float dtype.
            tokens: int [n_tokens], its token ids; needed where the codec ``needs_tokens``.
            features: float32 [n_tokens, n_features], ``LearnedCodec.as_features`` of the ``sources`` side by side;
                needed where there are any.

        Returns:
            Array name -> [array.n_rows(n_tokens), *row_shape] in the array's dtype, on the device of ``values``.

        Raises:
            StoreError: a value is NaN or infinite.
        """

    def decode(
        self,
        codes: Mapping[str, Array],
        first_position: int,
        n_tokens: int,
        layers: list[int] | None = None,
        features: Array | None = None,
    ) -> Array:
        """Decode consecutive tokens of one sequence.

        Args:
            codes: array name -> the rows that cover the tokens, from ``first_position`` on. Arrays with a layer axis
                hold the chosen layers only, in the order of ``layers``, arrays with pieces the pieces that these
                layers need; the others hold whole rows. Where the codec
                ``needs_tokens``, ``"tokens"`` holds the tokens' ids, int [at least n_tokens]. The rows of its
                ``sources`` are there too, unless ``features`` are given.
            first_position: position of the first token in its sequence, a multiple of 64.
            n_tokens: tokens wanted; the last block's row may cover more.
            layers: the chosen layers, None for all in order.
            features: those of these tokens, as for :meth:`encode`; None to decode the ``sources`` too.

        Returns:
            float32 [n_tokens, *token_shape], with ``len(layers)`` layers where some are chosen.
        """


@dataclass(frozen=True)
class Learning:
    """How codecs learn; none of it is recorded.

    Attributes:
        folder: where the sample waits on disk, in files without names; None for the system's temporary folder.
        place: moves a NumPy array to where large products and decompositions run, e.g. to a GPU as a torch tensor.
        progress: called with (steps done, steps in all, message).
    """

    folder: Path | None = None
    place: Callable[[np.ndarray], Array] = lambda array: array
    progress: Progress = lambda n_done, n_all, message: None


class Observing(Protocol):
    """A sample that grows sequence by sequence, outside memory."""

    def observe(self, values: np.ndarray, tokens: np.ndarray | None = None) -> None:
        """Take a sequence.

        Args:
            values: float32 [n_tokens, *token_shape], from position 0 on.
            tokens: int [n_tokens], needed where the codec ``needs_tokens``.
        """

    def values(self) -> np.ndarray:
        """Return what was observed, one sequence after the other: float32 [n_tokens, width]."""
        ...

    def learn(self, features: Sequence[np.ndarray] | None = None, bits: float | None = None) -> None:
        """Let the codec learn from what was observed; the same sample gives the same state.

        Args:
            features: :meth:`as_features` of the field's ``sources``, which have learned, side by side; needed where
                there are any.
            bits: that a token of the field may take; None for what the codec's name says.
        """

    def as_features(self) -> list[np.ndarray]:
        """Return ``LearnedCodec.as_features`` of each sequence, after :meth:`learn`."""
        ...

    def close(self) -> None:
        """Drop what was observed."""


@runtime_checkable
class LearnedCodec(FieldCodec, Protocol):
    """A field codec that learns from a sample of the field before the first sequence is encoded."""

    def observing(self, learning: Learning) -> Observing:
        """Return an empty sample to learn from."""

    def state(self) -> dict[str, np.ndarray]:
        """Return what was learned, name -> float16 or float32 array; it is stored in the store's ``codec/``."""

    @property
    def max_state_bytes(self) -> int:
        """Most bytes that the arrays of :meth:`state` take, from the field's shape alone."""
        ...

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what :meth:`state` returned; those of the ``sources`` are loaded before."""

    def as_features(
        self, codes: Mapping[str, Array], first_position: int, n_tokens: int, features: Array | None = None
    ) -> Array:
        """Decode what fields see that are predicted from this one; the arguments are those of :meth:`decode`.

        Returns:
            float32 [n_tokens, n_features].
        """
