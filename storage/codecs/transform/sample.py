"""The sample that a transform codec learns from: on disk, and in memory one part of one group of layers at a time.

::

    one sequence             parts: keys and values of each group      the disk                    memory, part by part
    [n_tokens, *token_shape] -> float32 [n_tokens, width] each      -> a file without a name   ->  rows of all sequences

A group of 16 layers of an 8B target takes 2 GB of the 8 GB that 30,000 tokens are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Kept:
    """Where an array lies in a :class:`Scratch`."""

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype


class Scratch:
    """Arrays on disk, in a file without a name, which is gone when it is closed or the process ends.

    Args:
        folder: any folder of the file system that has the room; None for the system's temporary folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by close)
        self._n_bytes = 0

    def keep(self, array: np.ndarray) -> Kept:
        """Write an array and return where it is."""
        kept = Kept(self._n_bytes, array.shape, array.dtype)
        self._file.seek(kept.offset_bytes)
        self._file.write(np.ascontiguousarray(array).data.cast("B"))
        self._n_bytes += array.nbytes
        return kept

    def read(self, kept: Kept, out: np.ndarray | None = None) -> np.ndarray:
        """Read an array, into ``out`` if given (C-contiguous, of its shape and dtype)."""
        found = np.empty(kept.shape, kept.dtype) if out is None else out
        self._file.seek(kept.offset_bytes)
        n_read = self._file.readinto(found.data.cast("B"))
        if n_read != found.nbytes:
            raise OSError(f"A temporary file ended after {n_read} of {found.nbytes} bytes; is its disk full?")
        return found

    def close(self) -> None:
        """Free the disk space."""
        self._file.close()


@dataclass(frozen=True)
class Rows:
    """Sequences of one part, one after the other in one array.

    Attributes:
        values: float32 [n_tokens, width].
        lengths: tokens of each sequence.
    """

    values: np.ndarray
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray]) -> Rows:
        """Copy sequences [n_tokens, width] into one array."""
        return cls(np.concatenate(sequences), tuple(map(len, sequences)))

    @property
    def sequences(self) -> list[np.ndarray]:
        """The views of ``values``, one for each sequence."""
        return np.split(self.values, np.cumsum(self.lengths)[:-1])


class Sample:
    """Sequences of a field, cut into groups and parts (``TransformCodec.parts``).

    Args:
        folder: see :class:`Scratch`.

    Attributes:
        scratch: also holds intermediate arrays of learning.
        lengths: tokens of each sequence.
        tokens: int [n_tokens] of each sequence; empty where they are not used.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.scratch = Scratch(folder)
        self.lengths: list[int] = []
        self.tokens: list[np.ndarray] = []
        self._kept: list[list[list[Kept]]] = []

    def add(self, groups: Sequence[Sequence[np.ndarray]], tokens: np.ndarray | None) -> None:
        """Add a sequence: for each group, for each part, float32 [n_tokens, width]."""
        self.lengths.append(len(groups[0][0]))
        self._kept.append([[self.scratch.keep(part) for part in parts] for parts in groups])
        if tokens is not None:
            self.tokens.append(np.asarray(tokens))

    def rows(self, group: int, part: int, chosen: Sequence[int]) -> Rows:
        """Read some sequences of one part of one group."""
        kept = [self._kept[i][group][part] for i in chosen]
        lengths = tuple(self.lengths[i] for i in chosen)
        rows = Rows(np.empty((sum(lengths), kept[0].shape[1]), np.float32), lengths)
        for at, out in zip(kept, rows.sequences, strict=True):
            self.scratch.read(at, out)
        return rows
