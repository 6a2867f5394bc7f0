"""The codes of a field in one stored array: one file a part, however many groups and runs there are.

Runs of codes are as wide as their statistics ask, but the inner chunks of a Zarr array are all alike. So the runs of a
group stand side by side and are cut into pieces of equal width wherever that falls; each piece is an inner chunk with a
Huffman code of its own, and a group begins with a new piece, so that a reader of some layers reads theirs only::

    group 0: | run 0      | run 1 | run 2        |0|     group 1: | run 0   | run 1     |0000|
             | piece 0 | piece 1 | piece 2 | piece 3 |            | piece 4 | piece 5 | piece 6 |

A piece that holds the end of one run and the start of the next costs more than two apart would. That is little where a
group has many pieces, and up to 10 % of the bytes where it has few: there each run is an array of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from array_api_compat import array_namespace, device

from ...chunks.field import PIECE_AXIS, Array, StoredArray

MIN_GROUP_BYTES = 1024
"""Bytes of codes per token that groups must have on average for their runs to be joined."""
_WIDE_GROUP_BYTES = 2048
_NARROW_PIECE, _WIDE_PIECE = 96, 192


def piece_bytes(widths: Sequence[int]) -> int:
    """Choose the width of pieces for groups of so many bytes per token; 0 to leave the runs apart."""
    mean_bytes = sum(widths) / len(widths)
    if mean_bytes < MIN_GROUP_BYTES:
        return 0
    return _NARROW_PIECE if mean_bytes < _WIDE_GROUP_BYTES else _WIDE_PIECE


class Pieces:
    """Joins the rows of runs into pieces, and splits them again.

    Args:
        name: of the stored array.
        runs: of each group, the arrays uint8 [token, byte] that its runs would be.
        n_bytes: width of a piece.

    Attributes:
        array: the stored array, uint8 [token, piece, byte].
    """

    def __init__(self, name: str, runs: Sequence[Sequence[StoredArray]], n_bytes: int) -> None:
        self._runs, self._n_bytes = runs, n_bytes
        self._n_pieces = [-(-sum(run.row_bytes for run in group) // n_bytes) for group in runs]
        self.array = StoredArray(name, "uint8", (sum(self._n_pieces), n_bytes), ("token", PIECE_AXIS, "byte"))

    def of_groups(self, groups: Sequence[int]) -> list[int]:
        """Return the pieces of some groups, in the order of the groups."""
        firsts = np.cumsum([0, *self._n_pieces]).tolist()
        return [piece for group in groups for piece in range(firsts[group], firsts[group + 1])]

    def join(self, codes: Mapping[str, Array]) -> Array:
        """Join the rows of all runs, uint8 [n_tokens, n_bytes] each, into uint8 [n_tokens, n_pieces, n_bytes]."""
        columns: list[Array] = []
        for group, n_pieces in zip(self._runs, self._n_pieces, strict=True):
            columns += [codes[run.name] for run in group]
            n_left = n_pieces * self._n_bytes - sum(run.row_bytes for run in group)
            columns.append(_zeros(columns[0], n_left))
        xp = array_namespace(columns[0])
        return xp.reshape(xp.concat(columns, axis=1), (columns[0].shape[0], *self.array.row_shape))

    def split(self, rows: Array, groups: Sequence[int]) -> dict[str, Array]:
        """Return the rows of each run of some groups, given their pieces: uint8 [n_tokens, n_bytes] by run."""
        xp = array_namespace(rows)
        flat = xp.reshape(rows, (rows.shape[0], rows.shape[1] * self._n_bytes))
        codes, first = {}, 0
        for group in groups:
            at = first * self._n_bytes
            for run in self._runs[group]:
                codes[run.name] = flat[:, at : at + run.row_bytes]
                at += run.row_bytes
            first += self._n_pieces[group]
        return codes


def _zeros(like: Array, n_bytes: int) -> Array:
    xp = array_namespace(like)
    return xp.zeros((like.shape[0], n_bytes), dtype=xp.uint8, device=device(like))
