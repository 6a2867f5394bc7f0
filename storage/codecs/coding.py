"""Converts the values of tokens to bytes in stored arrays, and back, for transform codecs.

A *group* is a run of consecutive layers that share one basis. A *part* of a group is its keys, its
values, or a hidden state. A *code* is the quantised value of one component of a part::

    parts -> subtract the mean -> multiply by the basis -> quantise to codes -> split into digits
          -> runs of bytes with similar statistics -> arrays, or pieces of one array

*Packing.* A Huffman code takes at least one bit per symbol, so several codes with few levels are
packed into one symbol: five codes of three levels are one byte with 243 values, and take as little
as 0.2 bit each. For each number of codes per byte, only the largest odd number of levels that fits
is used, because levels that never occur cost nothing. A code ``q`` is between
``-(levels - 1) / 2`` and ``(levels - 1) / 2``. It is stored as the digit ``q mod levels``. So the
most frequent code, zero, is stored as zero, like the padding between sequences. A *wide* code has
``WIDE_LEVELS`` levels and does not fit into a byte. It is stored as two digits:
``q = low + 255 * high``.

*Runs and pieces.* A run is a range of columns of codes that have similar statistics and the same
number of levels. If the groups are narrow, each run is a stored array. If they are wide, all runs
are side by side in one array, which is cut into pieces of equal width. Each piece is an inner chunk
with its own Huffman code. Each group starts with a new piece, so that a reader of some layers reads
only the pieces of the groups that contain them::

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
"""Number of positions at the start of a sequence that have a mean of their own.

Their values differ from those of later positions, because these positions are attention sinks or
hold the constant start of a chat template.
"""

# Number of different values (levels) of a digit -> number of such digits that fit into a byte.
CODES_PER_BYTE: dict[int, int] = {3: 5, 5: 3, 15: 2, 255: 1}

LOW_LEVELS = 255
HIGH_LEVELS = 15
# Number of different values (levels) of a code that is stored as two digits.
WIDE_LEVELS = LOW_LEVELS * HIGH_LEVELS

# If the codes of a layer group take at least this many bytes per token on average, all of them are
# stored in a single array, which is cut into pieces. Otherwise each run of columns has its own
# array.
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
    # float32 [width], the scale by which the errors of each column are divided before they are
    # added up. The axes are orthonormal for values divided by this scale. None if errors were
    # weighed with a full matrix instead (the ``metric`` of ``calibration.learn_basis``), so that
    # there is no scale. The axes are then orthonormal with respect to this matrix.
    scale: np.ndarray | None = None

    @classmethod
    def scaled(cls, mean: np.ndarray, synthesis: np.ndarray, scale: np.ndarray) -> "Basis":
        """Make a basis whose axes ``synthesis / scale`` are orthonormal."""
        return cls(mean, synthesis, np.ascontiguousarray((synthesis / np.square(scale)).T), scale)


def mean_rows(first_position: int, n_tokens: int) -> np.ndarray:
    """Return the index of the row of ``Basis.mean`` for each of ``n_tokens`` consecutive positions.

    The result is int32 [n_tokens].
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
    # int32, index of the run that contains the column. A run is a range of columns with similar
    # statistics, so the index never decreases from one column to the next.
    array: np.ndarray
    levels: np.ndarray  # int32, number of different values that the digit can have.
    step: np.ndarray  # float32, distance between two quantised values of the component.
    is_high: np.ndarray  # float32, 1 for the high digit of a wide code, otherwise 0.
    # float32. The code of ``x >= 0`` is ``x / step + rounding``, rounded down.
    rounding: np.ndarray
    # float32, number of steps by which code 1 or -1 is decoded closer to zero.
    shift_one: np.ndarray
    # float32, number of steps by which codes of magnitude 2 or more are decoded closer to zero.
    shift_more: np.ndarray

    def table(self) -> np.ndarray:
        """Return all columns as one float32 array [n_columns, 9]."""
        return np.stack(self, axis=1).astype(np.float32)

    @classmethod
    def from_table(cls, table: np.ndarray) -> "CodeColumns":
        """Create the columns from an array that :meth:`table` returned."""
        columns = np.ascontiguousarray(table.T, np.float32)
        # The first four columns contain integers.
        return cls(*columns[:4].astype(np.int32), *columns[4:])

    @property
    def limit(self) -> np.ndarray:
        """For each column, the largest magnitude of its component's code: int32 [n_columns]."""
        component = (self.part.astype(np.int64) << 20) + self.component
        is_wide = np.isin(component, component[self.is_high > 0])
        return np.where(is_wide, (WIDE_LEVELS - 1) // 2, (self.levels - 1) // 2).astype(np.int32)


@dataclass(frozen=True)
class GroupFit:
    """The learned state of one group of layers.

    A group has two parts, keys and values, or one part, a hidden state. Each part has one basis.
    """

    bases: tuple[Basis, ...]
    columns: CodeColumns
    # One matrix for each part (keys and values, or a hidden state), float32 [n_features, width].
    # The prediction ``features @ matrix`` is subtracted from the values before the basis is
    # applied. The tuple is empty if the values are not predicted.
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
    # Do not use xp.sign, because it also handles NaN, in an extra step that indexes with a mask.
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
    """Return the codes to unpack from each value of a byte: int16 [256, CODES_PER_BYTE[levels]].

    A value that :func:`pack` never writes is mapped to valid codes too, so that reading it does
    not fail.
    """
    digits = np.arange(256)[:, None] // levels ** np.arange(CODES_PER_BYTE[levels]) % levels
    return np.where(digits > levels // 2, digits - levels, digits).astype(np.int16)


class _Run(NamedTuple):
    """Adjacent code columns of a layer group, and the stored array of their packed bytes.

    The columns are those from ``first`` to ``last`` (exclusive). Their codes are digits, each with
    ``levels`` different values. ``array`` is uint8 [token, byte].
    """

    array: StoredArray
    levels: int
    first: int
    last: int


class GroupTransform:
    """Encodes and decodes one group of layers. Keeps a copy of the constants on each device.

    ``arrays`` are the stored arrays, one for each run of code columns.
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
            Name of a run's array -> its rows, uint8 [n_tokens, n_bytes].
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
        # The components are sorted by part. Reorder them to the stored order, in which codes with
        # similar statistics are neighbours.
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
            codes: Name of a run's array -> its rows, uint8 [at least n_tokens, n_bytes].
            first_position: Position of the first token in its sequence.
            n_tokens: Number of tokens to decode.
            n_layers: Number of layers of the group.
            layers: Layers to decode, counted from the first layer of the group. None for all.
            features: Features of these tokens, float32 [n_tokens, n_features]. Required if the fit
                has regressions.

        Returns:
            The values of each part, float32 [n_tokens, width]. If ``layers`` are given, the width
            is that of these layers only.
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
            # Most reads start after the early positions. In that case all tokens have the same
            # mean, and no gather is needed.
            late = mean[EARLY_POSITIONS, :]
            is_late = first_position >= EARLY_POSITIONS
            decoded.append(product + (late if is_late else xp.take(mean, rows, axis=0)))
        return decoded

    def leading(self, codes: Codes, n_tokens: int, max_components: int) -> Array:
        """Decode the first ``max_components`` components of each part: keys and values, or a state.

        If a part has fewer components, all of them are decoded.

        Returns:
            The components of the keys, then those of the values, or the components of a hidden
            state: float32 [n_tokens, n_components].
        """
        columns = self._columns(codes, n_tokens)
        xp = array_namespace(columns)
        constants = self._on(columns)
        # Append a column of zeros, which stands for a digit that a component does not have.
        columns = xp.concat([columns, xp.zeros_like(columns[:, :1])], axis=1)
        components: list[Array] = []
        for low, high in zip(constants["low"], constants["high"], strict=True):
            low_digits = xp.take(columns, low[:max_components], axis=1)
            high_digits = xp.take(columns, high[:max_components], axis=1)
            components.append(low_digits + high_digits)
        return xp.concat(components, axis=1)

    def _columns(self, codes: Codes, n_tokens: int) -> Array:
        """Look up the decoded value of each column of each token: float32 [n_tokens, n_columns].

        The value of a component is the sum of the values of its one or two columns.
        """
        like = codes[self._runs[0].array.name]
        xp = array_namespace(like)
        constants = self._on(like)
        looked_up = []
        # One table lookup maps a byte to the decoded values of all its codes. The table has one row
        # for each value of each byte of a token.
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
        """Return the constants as NumPy arrays or torch tensors, on the device of ``like``."""
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
        # Encoding computes the columns part by part. This is their order in the store.
        constants["to_stored"] = np.argsort(np.concatenate(constants["own"])).astype(np.int32)
        return constants

    def _digits(self, part: int, is_high: bool) -> np.ndarray:
        """For each component of a part, return the column of its low or high digit.

        For a component without that digit, the entry is the number of columns. It is the index of
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
    # A part may have no components, so `reshape` cannot infer a length from the number of values.
    by_layer = xp.reshape(matrix, (n_rows, n_layers, width // n_layers))
    ids = to_device_of(np.asarray(layers, np.int32), matrix)
    selected_width = width // n_layers * len(layers)
    return xp.reshape(xp.take(by_layer, ids, axis=1), (n_rows, selected_width))


def row_bytes(runs: Sequence[StoredArray]) -> int:
    """Return the number of bytes that runs take together for each token."""
    return sum(run.row_bytes for run in runs)


def piece_bytes(widths: Sequence[int]) -> int:
    """Choose the width in bytes of the pieces into which the codes of all groups are cut.

    Args:
        widths: Number of bytes of codes per token, for each group of layers.

    Returns:
        The width of a piece, or 0 if each run should be a separate stored array.
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
        # The runs of each layer group, as arrays uint8 [token, byte]. These arrays are not stored,
        # only the array of all pieces.
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
        """Join the rows of all runs into pieces.

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
