"""Converts the components of tokens to bytes: quantised codes, packed, and sorted into arrays.

::

    parts -> subtract the mean -> multiply by the basis -> quantise -> digits
          -> runs of bytes with similar statistics -> arrays, or pieces of one array

*Packing.* A Huffman code spends at least one bit on a symbol, so codes with few levels are packed:
five codes of three levels are one symbol with 243 values, and cost as little as 0.2 bit each.
Several numbers of levels allow the same number of codes per byte. Only the largest odd one of them
is used, because levels that never occur cost nothing. A code ``q`` is between
``-(levels - 1) / 2`` and ``(levels - 1) / 2``. It is stored as the digit ``q mod levels``, so that
the most frequent code, zero, is a zero in the byte, as the padding between sequences is. Codes with
``WIDE_LEVELS`` levels do not fit into a byte. They are stored as two digits:
``q = low + 255 * high``.

*Runs and pieces.* A run is a range of codes with similar statistics and the same number of levels.
In a narrow group of layers each run is a stored array. The runs of a wide group are side by side in
one array, and cut into pieces of equal width. Each piece is an inner chunk with its own Huffman
code. Each group starts with a new piece, so that a reader of some layers reads only the pieces of
their groups::

    group 0: | run 0      | run 1 | run 2        |0|     group 1: | run 0   | run 1     |0000|
             | piece 0 | piece 1 | piece 2 | piece 3 |            | piece 4 | piece 5 | piece 6 |

A piece that holds the end of one run and the start of the next costs more than two separate pieces.
This costs little if a group has many pieces, and up to 10 % of the bytes if it has few.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, device

from ..schema import PIECE_AXIS, TOKEN_AXIS, Array, StoredArray
from .field import Codes, Layers, placed

EARLY_POSITIONS = 8
"""Number of positions that have a mean of their own.

These positions are attention sinks, or hold the constant start of a chat template.
"""

# Number of levels of a digit -> number of digits per byte.
CODES_PER_BYTE: dict[int, int] = {3: 5, 5: 3, 15: 2, 255: 1}

LOW_LEVELS = 255
HIGH_LEVELS = 15
WIDE_LEVELS = LOW_LEVELS * HIGH_LEVELS  # Levels of a code that is stored as two digits.

# Smallest average size of a group, in bytes of codes per token, for which runs are joined in one
# array.
MIN_GROUP_BYTES = 1024
_WIDE_GROUP_BYTES = 2048
_NARROW_PIECE = 96
_WIDE_PIECE = 192


@dataclass(frozen=True)
class Basis:
    """The means and axes of one part of one group.

    ``components = (values - mean) @ analysis``, and ``values = components @ synthesis + mean``.
    """

    # float32 [EARLY_POSITIONS + 1, width]. Row p belongs to position p, the last row to all later
    # positions.
    mean: np.ndarray
    synthesis: np.ndarray  # float32 [n_components, width]
    analysis: np.ndarray  # float32 [width, n_components]
    # float32 [width]. The axes are orthonormal for values divided by this scale. None if the axes
    # were learned in a metric.
    scale: np.ndarray | None = None

    @classmethod
    def scaled(cls, mean: np.ndarray, synthesis: np.ndarray, scale: np.ndarray) -> "Basis":
        """Make a basis with the axes ``synthesis / scale``, orthonormal for ``values / scale``."""
        return cls(mean, synthesis, np.ascontiguousarray((synthesis / np.square(scale)).T), scale)


def mean_rows(first_position: int, n_tokens: int) -> np.ndarray:
    """Return the row of ``Basis.mean`` for each of consecutive positions: int32 [n_tokens]."""
    return np.minimum(np.arange(first_position, first_position + n_tokens), EARLY_POSITIONS).astype(
        np.int32
    )


@dataclass(frozen=True)
class CodeColumns:
    """Describes the codes of one token in one group of layers, in their stored order.

    All arrays have the shape [n_columns].
    """

    part: np.ndarray  # int32, part of the field: 0 for keys, 1 for values; 0 for hidden states.
    # int32, row of the component in the part's basis. If two columns have the same component, they
    # are its two digits.
    component: np.ndarray
    array: np.ndarray  # int32, number of the run. It never decreases from one column to the next.
    levels: np.ndarray  # int32, number of levels of the digit.
    step: np.ndarray  # float32, step of the component's quantiser.
    is_high: np.ndarray  # float32, 1 for the high digit of a wide code, otherwise 0.
    rounding: np.ndarray  # float32, see ``fit``.
    shift_one: np.ndarray  # float32, see ``fit``.
    shift_more: np.ndarray  # float32, see ``fit``.

    def table(self) -> np.ndarray:
        """Return all columns as one float32 array [n_columns, 9]."""
        return np.stack(list(vars(self).values()), axis=1).astype(np.float32)

    @classmethod
    def from_table(cls, table: np.ndarray) -> "CodeColumns":
        """Undo :meth:`table`."""
        integers = ("part", "component", "array", "levels")
        names = (column.name for column in fields(cls))
        dtypes = (np.int32 if name in integers else np.float32 for name in names)
        return cls(*(column.astype(dtype) for column, dtype in zip(table.T, dtypes, strict=True)))

    @property
    def limit(self) -> np.ndarray:
        """Largest magnitude of the code of each column's component: int32 [n_columns]."""
        component = (self.part.astype(np.int64) << 20) + self.component
        is_wide = np.isin(component, component[self.is_high > 0])
        return np.where(is_wide, (WIDE_LEVELS - 1) // 2, (self.levels - 1) // 2).astype(np.int32)


@dataclass(frozen=True)
class GroupFit:
    """The learned state of one group of layers: a basis per part, and the codes of all parts."""

    bases: tuple[Basis, ...]
    columns: CodeColumns
    # A matrix per part, float32 [n_features, width]. The prediction, features times this matrix, is
    # subtracted from the values before the basis is applied. Empty if nothing is predicted.
    regressions: tuple[np.ndarray, ...] = ()


def quantise(scaled: Array, rounding: Array, limit: Array) -> Array:
    """Quantise components, which the caller has divided by their steps.

    Args:
        scaled: [n, n_components].
        rounding: [n_components], see ``fit``.
        limit: [n_components], the largest magnitude of a code.

    Returns:
        The codes as floats, [n, n_components].
    """
    xp = array_namespace(scaled)
    codes = xp.floor(xp.abs(scaled) + rounding)
    # Not by xp.sign, because it treats NaN separately, with a mask as an index.
    codes = xp.where(scaled < 0, -codes, codes)
    return xp.minimum(xp.maximum(codes, -limit), limit)


def split_wide(codes: Array) -> tuple[Array, Array]:
    """Split codes of ``WIDE_LEVELS`` levels (-1912 to 1912) into two digits.

    Returns:
        The low digits (-127 to 127) and the high digits (-7 to 7).
    """
    high = (codes + LOW_LEVELS // 2) // LOW_LEVELS
    return codes - high * LOW_LEVELS, high


def pack(codes: Array, levels: int) -> Array:
    """Pack integer codes [n, n_codes] into bytes: uint8 [n, n_bytes].

    The last byte of a row is padded with codes of zero.
    """
    xp = array_namespace(codes)
    per_byte = CODES_PER_BYTE[levels]
    digits = xp.astype(codes % levels, xp.uint8)
    packed = digits[:, 0::per_byte]
    for digit in range(1, per_byte):
        more = digits[:, digit::per_byte] * levels**digit
        width = more.shape[1]
        packed = xp.concat([packed[:, :width] + more, packed[:, width:]], axis=1)
    return packed


def unpack_table(levels: int) -> np.ndarray:
    """Return the codes of each value of a byte: int16 [256, CODES_PER_BYTE[levels]].

    Values that :func:`pack` never writes are mapped to valid codes too, so that a reader cannot
    fail.
    """
    digits = np.arange(256)[:, None] // levels ** np.arange(CODES_PER_BYTE[levels]) % levels
    return np.where(digits > levels // 2, digits - levels, digits).astype(np.int16)


class _Run(NamedTuple):
    """The columns ``first`` to ``last`` of a group, and the stored array of their bytes.

    The array is uint8 [token, byte].
    """

    array: StoredArray
    levels: int
    first: int
    last: int


class GroupTransform:
    """The transform of one group of layers, with copies of its constants on each device.

    ``arrays`` are the stored arrays of its runs.
    """

    def __init__(self, name: str, fit: GroupFit) -> None:
        self.fit = fit
        levels = fit.columns.levels
        bounds = np.flatnonzero(np.diff(fit.columns.array, prepend=-1, append=-1)).tolist()
        self._runs = []
        for number, (first, last) in enumerate(pairwise(bounds)):
            n_bytes = -(-(last - first) // CODES_PER_BYTE[int(levels[first])])
            array = StoredArray(f"{name}{number:02d}", "uint8", (n_bytes,), (TOKEN_AXIS, "byte"))
            self._runs.append(_Run(array, int(levels[first]), first, last))
        self.arrays = tuple(run.array for run in self._runs)
        self._constants: dict[str, dict[str, Any]] = {}

    def encode(self, parts: Sequence[Array], features: Array | None = None) -> dict[str, Array]:
        """Encode a whole sequence.

        Args:
            parts: float32 [n_tokens, width] per part, from position 0 on.
            features: float32 [n_tokens, n_features] of the tokens; required if the fit has
                regressions.

        Returns:
            Array name -> uint8 [n_tokens, n_bytes].
        """
        xp = array_namespace(*parts)
        constants = self._on(parts[0])
        rows = placed(mean_rows(0, parts[0].shape[0]), parts[0])
        if constants["regression"]:
            parts = [
                values - features @ matrix
                for values, matrix in zip(parts, constants["regression"], strict=True)
            ]
        scaled = [
            (values - xp.take(mean, rows, axis=0)) @ analysis
            for values, mean, analysis in zip(
                parts, constants["mean"], constants["analysis"], strict=True
            )
        ]
        # The columns are sorted by part. Sort them by the stored order, in which codes with similar
        # statistics are neighbours.
        columns = xp.take(xp.concat(scaled, axis=1), constants["to_stored"], axis=1)
        codes = quantise(columns, constants["rounding"], constants["limit"])
        low, high = split_wide(xp.astype(codes, xp.int16))
        digits = xp.where(constants["is_high"], high, low)
        return {
            run.array.name: pack(digits[:, run.first : run.last], run.levels) for run in self._runs
        }

    def decode(
        self,
        codes: Codes,
        first_position: int,
        n_tokens: int,
        n_layers: int,
        layers: Layers,
        features: Array | None = None,
    ) -> list[Array]:
        """Decode consecutive tokens.

        Args:
            codes: Array name -> uint8 [at least n_tokens, n_bytes].
            first_position: Position of the first token.
            n_tokens: Number of tokens.
            n_layers: Number of layers of the group.
            layers: Layers to decode, counted from the first layer of the group; None for all.
            features: The features that :meth:`encode` takes, for these tokens.

        Returns:
            The values of each part, float32 [n_tokens, width]. If ``layers`` are given, the width
            is that of these layers only.
        """
        columns = self._columns(codes, n_tokens)
        xp = array_namespace(columns)
        constants = self._on(columns)
        early = placed(mean_rows(first_position, n_tokens), columns)
        decoded = []
        names = (
            ("mean", "synthesis", "regression")
            if constants["regression"]
            else ("mean", "synthesis")
        )
        for part, column_ids in enumerate(constants["own"]):
            matrices = [constants[name][part] for name in names]
            if layers is not None:
                matrices = [_of_layers(xp, matrix, n_layers, layers) for matrix in matrices]
            mean = matrices[0]
            product = xp.take(columns, column_ids, axis=1) @ matrices[1]
            if constants["regression"]:
                product = product + features @ matrices[2]
            # Most reads start after the early positions. Then all tokens have the same mean, and no
            # gather is needed.
            late = (
                mean[EARLY_POSITIONS, :]
                if first_position >= EARLY_POSITIONS
                else xp.take(mean, early, axis=0)
            )
            decoded.append(product + late)
        return decoded

    def leading(self, codes: Codes, n_tokens: int, max_components: int) -> Array:
        """Decode the first components of each part, at most ``max_components``.

        Returns:
            The components of all parts side by side, float32 [n_tokens, n_components].
        """
        columns = self._columns(codes, n_tokens)
        xp = array_namespace(columns)
        constants = self._on(columns)
        # Append a column of zeros, for components that have no high digit.
        columns = xp.concat([columns, xp.zeros_like(columns[:, :1])], axis=1)
        components = [
            xp.take(columns, low[:max_components], axis=1)
            + xp.take(columns, high[:max_components], axis=1)
            for low, high in zip(constants["low"], constants["high"], strict=True)
        ]
        return xp.concat(components, axis=1)

    def _columns(self, codes: Codes, n_tokens: int) -> Array:
        """Look up the decoded value of each code of each token: float32 [n_tokens, n_columns].

        The value of a component is the sum of the values of its columns.
        """
        like = codes[self._runs[0].array.name]
        xp = array_namespace(like)
        constants = self._on(like)
        looked_up = []
        # One table lookup undoes packing, shift and step together. The table has one row per value
        # of each byte.
        for run, table, offsets in zip(
            self._runs, constants["tables"], constants["offsets"], strict=True
        ):
            rows = codes[run.array.name][:n_tokens]
            table_rows = xp.reshape(xp.astype(rows, xp.int32) + offsets, (-1,))
            values = xp.reshape(
                xp.take(table, table_rows, axis=0), (n_tokens, rows.shape[1] * table.shape[1])
            )
            looked_up.append(values[:, : run.last - run.first])
        return xp.concat(looked_up, axis=1)

    def _on(self, like: Array) -> dict[str, Any]:
        """Return the constants in the namespace and on the device of ``like``."""
        xp = array_namespace(like)
        key = f"{xp.__name__} {device(like)}"
        if key not in self._constants:
            self._constants[key] = {
                name: [placed(item, like) for item in value]
                if isinstance(value, list)
                else placed(value, like)
                for name, value in self._make_constants().items()
            }
        return self._constants[key]

    def _make_constants(self) -> dict[str, Any]:
        columns = self.fit.columns
        bases = self.fit.bases
        column_ids = [
            np.flatnonzero(columns.part == part).astype(np.int32) for part in range(len(bases))
        ]
        component = [columns.component[ids] for ids in column_ids]
        to_stored = np.empty(len(columns.part), np.int32)
        to_stored[np.concatenate(column_ids)] = np.arange(len(columns.part), dtype=np.int32)
        return {
            "mean": [basis.mean for basis in bases],
            # The analysis is divided by the steps, so that its product gives codes before rounding.
            # The tables of decoding multiply by the steps.
            "analysis": [
                np.ascontiguousarray(basis.analysis[:, c] / columns.step[ids])
                for basis, c, ids in zip(bases, component, column_ids, strict=True)
            ],
            "synthesis": [
                np.ascontiguousarray(b.synthesis[c]) for b, c in zip(bases, component, strict=True)
            ],
            "regression": list(self.fit.regressions),
            "own": column_ids,
            "low": [self._digits(part, is_high=False) for part in range(len(bases))],
            "high": [self._digits(part, is_high=True) for part in range(len(bases))],
            "to_stored": to_stored,
            "rounding": columns.rounding,
            "limit": columns.limit.astype(np.float32),
            "is_high": columns.is_high > 0,
            "tables": [self._table(run) for run in self._runs],
            "offsets": [
                256 * np.arange(run.array.row_shape[0], dtype=np.int32) for run in self._runs
            ],
        }

    def _digits(self, part: int, is_high: bool) -> np.ndarray:
        """Find the column of the low or high digit of each component of a part.

        The result is the number of columns for a component that has no such digit.
        """
        columns = self.fit.columns
        column_ids = np.flatnonzero((columns.part == part) & ((columns.is_high > 0) == is_high))
        digit_columns = np.full(len(self.fit.bases[part].synthesis), len(columns.part), np.int32)
        digit_columns[columns.component[column_ids]] = column_ids
        return digit_columns

    def _table(self, run: _Run) -> np.ndarray:
        """Compute the decoded values of each value of each byte of a run.

        Returns:
            float32 [n_bytes * 256, codes per byte].
        """
        columns = self.fit.columns
        n_bytes = run.array.row_shape[0]
        per_byte = CODES_PER_BYTE[run.levels]
        padding = n_bytes * per_byte - (run.last - run.first)

        def by_byte(values: np.ndarray) -> np.ndarray:
            return np.pad(values[run.first : run.last], (0, padding)).reshape(n_bytes, 1, per_byte)

        code = unpack_table(run.levels)[None].astype(np.float32)
        shift = np.where(np.abs(code) == 1, by_byte(columns.shift_one), by_byte(columns.shift_more))
        step = by_byte(columns.step * np.where(columns.is_high > 0, LOW_LEVELS, 1))
        return np.ascontiguousarray(
            ((code - np.sign(code) * shift) * step).reshape(-1, per_byte), np.float32
        )


def _of_layers(xp: Any, matrix: Array, n_layers: int, layers: list[int]) -> Array:
    """Take the columns of some layers from a matrix whose columns are sorted by layer.

    The shape changes from [rows, width] to [rows, width * len(layers) / n_layers].
    """
    by_layer = xp.reshape(matrix, (matrix.shape[0], n_layers, -1))
    ids = placed(np.asarray(layers, np.int32), matrix)
    return xp.reshape(xp.take(by_layer, ids, axis=1), (matrix.shape[0], -1))


def piece_bytes(widths: Sequence[int]) -> int:
    """Choose the width of pieces in bytes.

    Args:
        widths: Bytes per token of each group.

    Returns:
        0 if each run shall be a stored array of its own.
    """
    mean_bytes = sum(widths) / len(widths)
    if mean_bytes < MIN_GROUP_BYTES:
        return 0
    return _NARROW_PIECE if mean_bytes < _WIDE_GROUP_BYTES else _WIDE_PIECE


class Pieces:
    """Joins the rows of runs into pieces of one stored array, and splits them again.

    The stored array is uint8 [token, piece, byte].
    """

    def __init__(self, name: str, runs: Sequence[Sequence[StoredArray]], n_bytes: int) -> None:
        # The runs of each group, as arrays uint8 [token, byte]. They are not stored as such.
        self._runs = runs
        self._n_bytes = n_bytes
        self._n_pieces = [-(-sum(run.row_bytes for run in group) // n_bytes) for group in runs]
        self.array = StoredArray(
            name, "uint8", (sum(self._n_pieces), n_bytes), (TOKEN_AXIS, PIECE_AXIS, "byte")
        )

    def of_groups(self, groups: Sequence[int]) -> list[int]:
        """Return the pieces of some groups, in the order of the groups."""
        firsts = np.cumsum([0, *self._n_pieces]).tolist()
        return [piece for group in groups for piece in range(firsts[group], firsts[group + 1])]

    def join(self, codes: Codes) -> Array:
        """Join the rows of all runs into pieces.

        Args:
            codes: Array name -> uint8 [n_tokens, bytes of the run].

        Returns:
            uint8 [n_tokens, n_pieces, n_bytes].
        """
        columns: list[Array] = []
        for group, n_pieces in zip(self._runs, self._n_pieces, strict=True):
            columns += [codes[run.name] for run in group]
            xp = array_namespace(columns[0])
            n_left = n_pieces * self._n_bytes - sum(run.row_bytes for run in group)
            columns.append(
                xp.zeros((len(columns[0]), n_left), dtype=xp.uint8, device=device(columns[0]))
            )
        return xp.reshape(xp.concat(columns, axis=1), (len(columns[0]), *self.array.row_shape))

    def split(self, rows: Array, groups: Sequence[int]) -> dict[str, Array]:
        """Split the pieces of some groups into the rows of their runs.

        Args:
            rows: uint8 [n_tokens, n_pieces, n_bytes], the pieces of these groups only.
            groups: The groups.

        Returns:
            Array name -> uint8 [n_tokens, bytes of the run].
        """
        flat = array_namespace(rows).reshape(rows, (rows.shape[0], rows.shape[1] * self._n_bytes))
        codes = {}
        first = 0
        for group in groups:
            offset = first * self._n_bytes
            for run in self._runs[group]:
                codes[run.name] = flat[:, offset : offset + run.row_bytes]
                offset += run.row_bytes
            first += self._n_pieces[group]
        return codes
