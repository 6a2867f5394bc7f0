"""Converts the values of tokens to bytes in stored arrays, and back, for transform codecs.

A *group* is a run of consecutive layers that share one basis. A *part* of a group is its keys, its
values, or a hidden state. A *code* is the quantised value of one component of a part::

    parts -> subtract the mean -> multiply by the basis -> quantise to codes -> split into digits
          -> runs of bytes with similar statistics -> arrays, or pieces of one array

The arrays are later compressed with Huffman codes (``storage.chunk``).

*Packing.* A Huffman code takes at least one bit per symbol, so several codes with few levels are
packed into one symbol: five codes of three levels are one byte with 243 values, and take as little
as 0.2 bit each. For each number of codes per byte, only the largest odd number of levels that fits
is used, because levels that never occur cost nothing. A code ``q`` is between
``-(levels - 1) / 2`` and ``(levels - 1) / 2``. It is stored as the digit ``q mod levels``. So the
most frequent code, zero, is stored as zero, like the padding between sequences. A *wide* code has
``WIDE_LEVELS`` levels and does not fit into a byte. It is stored as two digits:
``q = low + 255 * high``.

*Runs and pieces.* The codes of all tokens are a table with one row per token. A run is a range of
columns of this table whose codes have similar statistics and the same number of levels. If the
groups have few bytes per token, each run is a stored array. If they have many, all runs are side by
side in one array, which is cut into pieces of equal width. Each piece is an inner chunk with its
own Huffman code. Each group starts with a new piece, so that a reader of some layers reads only the
pieces of the groups that contain them::

    group 0: | run 0      | run 1 | run 2        |0|     group 1: | run 0   | run 1     |0000|
             | piece 0 | piece 1 | piece 2 | piece 3 |            | piece 4 | piece 5 | piece 6 |

A piece that holds the end of one run and the start of the next takes more bytes than two pieces
with one run each. This costs little if a group has many pieces, and up to 10 % of the bytes if it
has few.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, device

from ..schema import PIECE_AXIS, TOKEN_AXIS, Array, StoredArray
from .field import Codes, Layers, to_device_of

EARLY_POSITIONS = 8
"""Number of positions at the start of a sequence. Each of them has a mean of its own.

The values at these positions differ from the values at later positions, because they are attention
sinks or hold the constant start of a chat template.
"""

# Maps the number of different values (levels) of a digit to the number of such digits that are
# packed into one byte.
CODES_PER_BYTE: dict[int, int] = {3: 5, 5: 3, 15: 2, 255: 1}

LOW_LEVELS = 255
HIGH_LEVELS = 15
# Number of different values (levels) of a wide code, which does not fit into a byte. It is stored
# as a low digit and a high digit.
WIDE_LEVELS = LOW_LEVELS * HIGH_LEVELS

# If the codes of a layer group take at least this many bytes per token (the average over the groups
# counts), all codes of the field are stored in a single array, which is cut into pieces. Otherwise
# each run (a range of code columns with similar statistics) has its own array.
MIN_GROUP_BYTES = 1024
_WIDE_GROUP_BYTES = 2048
_NARROW_PIECE = 96
_WIDE_PIECE = 192


@dataclass(frozen=True)
class Basis:
    """Means and principal axes of one part (keys, values or a hidden state) of a layer group.

    The components of a token are the coordinates of its values along the axes:
    ``components = (values - mean) @ analysis``, and ``values = components @ synthesis + mean``.
    """

    # float32 [EARLY_POSITIONS + 1, width]. Row p is the mean at position p. The last row is the
    # mean at all later positions.
    mean: np.ndarray
    synthesis: np.ndarray  # float32 [n_components, width]
    analysis: np.ndarray  # float32 [width, n_components]
    # float32 [width]. The errors of each column are divided by its scale before their squares are
    # added up. The axes are orthonormal for values divided by this scale. If errors were weighed
    # with a full matrix instead (the ``metric`` of ``calibration.learn_basis``), there is no scale,
    # and the value is None. The axes are then orthonormal with respect to this matrix.
    scale: np.ndarray | None = None

    @classmethod
    def scaled(cls, mean: np.ndarray, synthesis: np.ndarray, scale: np.ndarray) -> "Basis":
        """Make a basis from axes that are orthonormal after division by the scale of each column.

        ``synthesis / scale`` must have orthonormal rows. The analysis matrix follows from it.
        """
        return cls(mean, synthesis, np.ascontiguousarray((synthesis / np.square(scale)).T), scale)


def mean_rows(first_position: int, n_tokens: int) -> np.ndarray:
    """Return which row of ``Basis.mean`` applies to each of ``n_tokens`` consecutive positions.

    Each early position has a row of its own, and all later positions share the last row. The result
    is int32 [n_tokens].
    """
    return np.minimum(np.arange(first_position, first_position + n_tokens), EARLY_POSITIONS).astype(
        np.int32
    )


class CodeColumns(NamedTuple):
    """Describes the digits that a group of layers stores for each token, in their stored order.

    A digit is the code (quantised value) of one component, or one of the two digits of a code that
    does not fit into a byte. Each column is one digit. All arrays have the shape [n_columns].
    """

    # int32, the part of the layer group from which the digit was computed: 0 for keys or a hidden
    # state, 1 for values.
    part: np.ndarray
    # int32, index of the principal component that the digit encodes. Two columns with the same
    # component are the low and the high digit of its code.
    component: np.ndarray
    # int32, index of the run that contains the column. A run is a range of neighbouring columns
    # with similar statistics that are stored together. The runs are numbered from left to right, so
    # the index never decreases from one column to the next.
    array: np.ndarray
    levels: np.ndarray  # int32, number of different values that the digit can have.
    step: np.ndarray  # float32, distance between two quantised values of the component.
    is_high: np.ndarray  # float32, 1 for the high digit of a wide code, otherwise 0.
    # float32. A component x is quantised to the code with the sign of x and the magnitude
    # ``floor(|x| / step + rounding)``.
    rounding: np.ndarray
    # float32. Codes 1 and -1 are decoded to the magnitude ``(1 - shift_one) * step``.
    shift_one: np.ndarray
    # float32. A code q of magnitude 2 or more is decoded to the magnitude ``(|q| - shift_more) *
    # step``.
    shift_more: np.ndarray

    def table(self) -> np.ndarray:
        """Return all attributes as one float32 array [n_columns, 9], with one column for each."""
        return np.stack(self, axis=1).astype(np.float32)

    @classmethod
    def from_table(cls, table: np.ndarray) -> "CodeColumns":
        """Create the columns from an array that :meth:`table` returned."""
        columns = np.ascontiguousarray(table.T, np.float32)
        # The first four attributes (part, component, array and levels) contain integers.
        return cls(*columns[:4].astype(np.int32), *columns[4:])

    @property
    def limit(self) -> np.ndarray:
        """The largest magnitude that the code of each column's component can have.

        The result is int32 [n_columns]. Both digits of a wide code have the limit of the whole
        code.
        """
        component = (self.part.astype(np.int64) << 20) + self.component
        is_wide = np.isin(component, component[self.is_high > 0])
        return np.where(is_wide, (WIDE_LEVELS - 1) // 2, (self.levels - 1) // 2).astype(np.int32)


@dataclass(frozen=True)
class GroupFit:
    """The learned state of one group of layers.

    A group has two parts, keys and values, or a hidden state as its only part. Each part has one
    basis.
    """

    bases: tuple[Basis, ...]
    columns: CodeColumns
    # One matrix float32 [n_features, width] for each part (the keys and the values, or a hidden
    # state). It predicts the part from features of the token: ``features @ matrix`` is subtracted
    # from the values before the basis is applied. The tuple is empty if the values are not
    # predicted.
    regressions: tuple[np.ndarray, ...] = ()


def quantise(scaled: Array, rounding: Array, limit: Array) -> Array:
    """Quantise components to codes.

    Args:
        scaled: Components divided by their quantisation steps, [n_tokens, n_components].
        rounding: Number that is added to each magnitude before it is rounded down, [n_components].
        limit: Largest magnitude of each component's code, [n_components].

    Returns:
        The codes as floats, [n_tokens, n_components].
    """
    xp = array_namespace(scaled)
    codes = xp.floor(xp.abs(scaled) + rounding)
    # Do not use xp.sign: it also handles NaN, which takes an extra step that indexes with a mask.
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
    """Pack integer codes [n_tokens, n_codes] into bytes, uint8 [n_tokens, n_bytes].

    If the last byte of a row has room for more codes, these are zero.
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
    """Return a table that maps each value of a packed byte to the codes that it contains.

    The table is int16 [256, CODES_PER_BYTE[levels]]. A value that :func:`pack` never writes is
    mapped to valid codes too, so that reading it does not fail.
    """
    digits = np.arange(256)[:, None] // levels ** np.arange(CODES_PER_BYTE[levels]) % levels
    return np.where(digits > levels // 2, digits - levels, digits).astype(np.int16)


class _Run(NamedTuple):
    """A run: neighbouring columns of a layer group's table of codes, which are packed together.

    The run consists of the columns from ``first`` to ``last`` (exclusive). Each column holds one
    digit per token, and all digits of the run have ``levels`` different values. The digits are
    packed into the bytes of ``array``, uint8 [token, byte].
    """

    array: StoredArray
    levels: int
    first: int
    last: int


class GroupTransform:
    """Encodes and decodes the keys and values of one group of layers, or a hidden state.

    Matrices and tables are copied to each device once and kept there. ``arrays`` holds one array
    for each run, a range of code columns that are packed together.
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
            parts: Values of each part from position 0 on, float32 [n_tokens, width].
            features: Features of the tokens, float32 [n_tokens, n_features]. Required if the fit
                has regressions.

        Returns:
            For each run (a range of code columns), the name of its array -> its rows, uint8
            [n_tokens, n_bytes].
        """
        xp = array_namespace(*parts)
        constants = self._on(parts[0])
        rows = to_device_of(mean_rows(0, parts[0].shape[0]), parts[0])
        scaled: list[Array] = []
        for part, values in enumerate(parts):
            residual = values
            if constants["regression"]:
                residual = values - features @ constants["regression"][part]
            mean = xp.take(constants["mean"][part], rows, axis=0)
            scaled.append((residual - mean) @ constants["analysis"][part])
        # The components of the keys come first, then those of the values. Reorder them to the
        # stored order, in which codes with similar statistics are neighbours.
        columns = xp.take(xp.concat(scaled, axis=1), constants["to_stored"], axis=1)
        codes = quantise(columns, constants["rounding"], constants["limit"])
        low, high = split_wide(xp.astype(codes, xp.int16))
        digits = xp.where(constants["is_high"], high, low)
        packed: dict[str, Array] = {}
        for run in self._runs:
            packed[run.array.name] = pack(digits[:, run.first : run.last], run.levels)
        return packed

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
            codes: For each run (a range of code columns), the name of its array -> its rows, uint8
                [at least n_tokens, n_bytes].
            first_position: Position of the first token in its sequence.
            n_tokens: Number of tokens to decode.
            n_layers: Number of layers of the group.
            layers: Layers to decode, counted from the first layer of the group. If the argument is
                None, all layers are decoded.
            features: Features of these tokens, float32 [n_tokens, n_features]. Required if the fit
                has regressions.

        Returns:
            The values of each part, float32 [n_tokens, width]. If ``layers`` are given, the rows
            contain only the values of these layers.
        """
        columns = self._columns(codes, n_tokens)
        xp = array_namespace(columns)
        constants = self._on(columns)
        rows = to_device_of(mean_rows(first_position, n_tokens), columns)

        def matrix_of(name: str, part: int) -> Array:
            matrix = constants[name][part]
            return matrix if layers is None else _of_layers(xp, matrix, n_layers, layers)

        decoded = []
        for part, column_ids in enumerate(constants["own"]):
            mean = matrix_of("mean", part)
            product = xp.take(columns, column_ids, axis=1) @ matrix_of("synthesis", part)
            if constants["regression"]:
                product = product + features @ matrix_of("regression", part)
            # Most reads start after the early positions, which have means of their own. In that
            # case all tokens have the same mean, and no gather is needed.
            late = mean[EARLY_POSITIONS, :]
            is_late = first_position >= EARLY_POSITIONS
            decoded.append(product + (late if is_late else xp.take(mean, rows, axis=0)))
        return decoded

    def leading(self, codes: Codes, n_tokens: int, max_components: int) -> Array:
        """Decode the first ``max_components`` components of the keys and of the values.

        For a hidden state, its first components are decoded. If there are fewer components, all of
        them are decoded.

        Returns:
            The components of the keys, then those of the values, or the components of a hidden
            state: float32 [n_tokens, n_components].
        """
        columns = self._columns(codes, n_tokens)
        xp = array_namespace(columns)
        constants = self._on(columns)
        # A component may lack a low or a high digit. For a missing digit, the index arrays `low`
        # and `high` hold the index of an additional column of zeros, which is appended here.
        columns = xp.concat([columns, xp.zeros_like(columns[:, :1])], axis=1)
        components: list[Array] = []
        for low, high in zip(constants["low"], constants["high"], strict=True):
            low_digits = xp.take(columns, low[:max_components], axis=1)
            high_digits = xp.take(columns, high[:max_components], axis=1)
            components.append(low_digits + high_digits)
        return xp.concat(components, axis=1)

    def _columns(self, codes: Codes, n_tokens: int) -> Array:
        """Look up the decoded value of each digit of each token: float32 [n_tokens, n_columns].

        A column holds one digit. The value of a component is the sum over its one or two digits.
        """
        like = codes[self._runs[0].array.name]
        xp = array_namespace(like)
        constants = self._on(like)
        looked_up = []
        # One table lookup maps a byte to the decoded values of all codes in it. Steps and shifts
        # differ between columns, so the table has 256 rows of its own for each byte of a token.
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
        """Return the group's matrices and tables as arrays like ``like``, on the same device."""
        xp = array_namespace(like)
        key = f"{xp.__name__} {device(like)}"
        if key not in self._constants:
            on_device: dict[str, Any] = {}
            for name, value in self._make_constants().items():
                if isinstance(value, list):
                    on_device[name] = [to_device_of(item, like) for item in value]
                else:
                    on_device[name] = to_device_of(value, like)
            self._constants[key] = on_device
        return self._constants[key]

    def _make_constants(self) -> dict[str, Any]:
        columns = self.fit.columns
        constants: dict[str, Any] = {
            "mean": [basis.mean for basis in self.fit.bases],
            "analysis": [],
            "synthesis": [],
            "regression": list(self.fit.regressions),
            "own": [],
            "low": [],
            "high": [],
            "rounding": columns.rounding,
            "limit": columns.limit.astype(np.float32),
            "is_high": columns.is_high > 0,
            "tables": [self._table(run) for run in self._runs],
            "offsets": [
                256 * np.arange(run.array.row_shape[0], dtype=np.int32) for run in self._runs
            ],
        }
        for part, basis in enumerate(self.fit.bases):
            ids = np.flatnonzero(columns.part == part).astype(np.int32)
            component = columns.component[ids]
            # The analysis matrix is divided by the steps, so that ``values @ analysis`` gives codes
            # before rounding. The values in the tables for decoding are multiplied by the steps.
            analysis = basis.analysis[:, component] / columns.step[ids]
            constants["analysis"].append(np.ascontiguousarray(analysis))
            constants["synthesis"].append(np.ascontiguousarray(basis.synthesis[component]))
            constants["own"].append(ids)
            constants["low"].append(self._digits(part, is_high=False))
            constants["high"].append(self._digits(part, is_high=True))
        # Encoding computes all columns of the keys before those of the values. These indices put
        # them into the stored order.
        constants["to_stored"] = np.argsort(np.concatenate(constants["own"])).astype(np.int32)
        return constants

    def _digits(self, part: int, is_high: bool) -> np.ndarray:
        """Return the index of the column that holds the low (or high) digit of each component.

        Only the components of this part (keys, values or a hidden state) are returned. If a
        component does not have the digit, its entry is the number of columns. This is the index of
        the column of zeros that :meth:`leading` appends.
        """
        columns = self.fit.columns
        column_ids = np.flatnonzero((columns.part == part) & ((columns.is_high > 0) == is_high))
        digit_columns = np.full(len(self.fit.bases[part].synthesis), len(columns.part), np.int32)
        digit_columns[columns.component[column_ids]] = column_ids
        return digit_columns

    def _table(self, run: _Run) -> np.ndarray:
        """Compute the table that maps each byte of a run to the decoded values of its codes.

        Returns:
            float32 [n_bytes * 256, codes per byte]. Row ``256 * i + v`` is for value v of byte i.
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
    """Select the columns of some layers from a matrix whose columns are sorted by layer.

    The shape changes from [n_rows, width] to [n_rows, width * len(layers) / n_layers].
    """
    n_rows, width = matrix.shape
    # Give `reshape` all lengths: if the keys or the values have no components, the matrix is empty,
    # and a length of -1 could not be inferred.
    by_layer = xp.reshape(matrix, (n_rows, n_layers, width // n_layers))
    ids = to_device_of(np.asarray(layers, np.int32), matrix)
    selected_width = width // n_layers * len(layers)
    return xp.reshape(xp.take(by_layer, ids, axis=1), (n_rows, selected_width))


def row_bytes(runs: Sequence[StoredArray]) -> int:
    """Return the total number of bytes per token of the arrays of several runs."""
    return sum(run.row_bytes for run in runs)


def piece_bytes(widths: Sequence[int]) -> int:
    """Choose the number of bytes per token in a piece of the array that holds all codes.

    Args:
        widths: Number of bytes of codes per token, for each group of layers.

    Returns:
        The number of bytes per token in a piece. It is 0 if each run (a range of code columns with
        similar statistics) should be a separate stored array instead.
    """
    mean_bytes = sum(widths) / len(widths)
    if mean_bytes < MIN_GROUP_BYTES:
        return 0
    return _NARROW_PIECE if mean_bytes < _WIDE_GROUP_BYTES else _WIDE_PIECE


class Pieces:
    """Concatenates the bytes of all runs, cuts them into pieces of equal width, and undoes both.

    A run is a range of code columns with similar statistics. Each piece is an inner chunk of the
    stored array, uint8 [token, piece, byte].
    """

    def __init__(self, name: str, runs: Sequence[Sequence[StoredArray]], n_bytes: int) -> None:
        # For each layer group, its runs, as arrays uint8 [token, byte]. These arrays only describe
        # the runs. The store contains the array of all pieces instead.
        self._runs = runs
        self._n_bytes = n_bytes
        self._n_pieces = [-(-row_bytes(group) // n_bytes) for group in runs]
        self.array = StoredArray(
            name, "uint8", (sum(self._n_pieces), n_bytes), (TOKEN_AXIS, PIECE_AXIS, "byte")
        )

    def of_groups(self, groups: Sequence[int]) -> list[int]:
        """Return the indices of the pieces of some groups, in the order of the groups."""
        firsts = np.cumsum([0, *self._n_pieces]).tolist()
        pieces: list[int] = []
        for group in groups:
            pieces += range(firsts[group], firsts[group + 1])
        return pieces

    def join(self, codes: Codes) -> Array:
        """Concatenate the rows of all runs, and cut them into pieces.

        Args:
            codes: Name of a run's array -> its rows, uint8 [n_tokens, bytes of the run].

        Returns:
            uint8 [n_tokens, n_pieces, n_bytes].
        """
        columns: list[Array] = []
        for group, n_pieces in zip(self._runs, self._n_pieces, strict=True):
            columns += [codes[run.name] for run in group]
            xp = array_namespace(columns[0])
            n_left = n_pieces * self._n_bytes - row_bytes(group)
            columns.append(
                xp.zeros((len(columns[0]), n_left), dtype=xp.uint8, device=device(columns[0]))
            )
        return xp.reshape(xp.concat(columns, axis=1), (len(columns[0]), *self.array.row_shape))

    def split(self, rows: Array, groups: Sequence[int]) -> dict[str, Array]:
        """Split the pieces of some groups into the rows of their runs.

        Args:
            rows: uint8 [n_tokens, n_pieces, n_bytes], the pieces of these groups only.
            groups: Indices of these groups, in the order of their pieces in ``rows``.

        Returns:
            Name of a run's array -> its rows, uint8 [n_tokens, bytes of the run].
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
