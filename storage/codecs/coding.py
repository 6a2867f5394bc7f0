"""Converts the values of tokens to bytes in stored arrays, and back, for transform codecs.

These words are used below:

- A *group* consists of consecutive layers.
- A *part* is the keys of a group or the values of a group. A hidden state is one group with one
  part. Each part has a *basis* of principal axes.
- For each token, a part is a vector. A *component* is the coordinate of this vector along one axis
  of the basis.
- A *code* is the integer to which a component is quantised. The number of different integers that
  are possible is called the number of *levels*.
- A *digit* is a stored number. A code is stored as one digit, or as two digits if it has too many
  levels for a byte.

One token is encoded in these steps::

    parts -> subtract the mean -> multiply by the basis -> quantise to codes -> split into digits
          -> pack several digits into each byte -> stored arrays

The stored arrays are later compressed with Huffman codes (``storage.chunk``).

*Packing.* A Huffman code takes at least one bit per byte, which is too much for a code with few
levels. So several codes are packed into one byte. For example, five codes of three levels are one
byte with 243 possible values, and then take as little as 0.2 bits each. The possible numbers of
levels are 3, 5, 15 and 255. They are the largest odd numbers for which five, three, two codes or
one code fit into a byte. Smaller numbers would save no bits, because a level that never occurs
costs nothing.

A code ``q`` is between ``-(levels - 1) / 2`` and ``(levels - 1) / 2``. It is stored as the digit
``q mod levels``. So zero, the most frequent code, is stored as zero, like the padding between
sequences. A *wide* code has ``WIDE_LEVELS`` levels and does not fit into a byte. It is stored as a
low digit and a high digit: ``q = low + 255 * high``.

*Runs and pieces.* The digits of a group form a table with one row per token and one column per
digit. A *run* consists of neighbouring columns with similar statistics and the same number of
levels. If the groups have few bytes per token, each run is a stored array. If the groups have many
bytes per token, all runs are side by side in one stored array. This array is cut into *pieces* of
equal width. Each piece has separate inner chunks, and thus Huffman codes of its own. Each group
starts with a new piece, and its last piece is filled with zeros. So a reader of some layers reads
only the pieces of the groups that contain these layers::

    group 0: | run 0      | run 1 | run 2        |0|     group 1: | run 0   | run 1     |0000|
             | piece 0 | piece 1 | piece 2 | piece 3 |            | piece 4 | piece 5 | piece 6 |

A piece may hold the end of one run and the start of the next run. Both runs then share one Huffman
code, which fits neither of them exactly. A group with many pieces becomes only a little larger by
this, a group with few pieces up to 10 %.
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
"""Number of positions at the start of a sequence that each have a separate mean.

At these positions, the mean of the values differs from the mean at later positions. The first
tokens are attention sinks, and in many datasets they are the constant start of a chat template.
"""

# Maps the number of levels of a digit to the number of such digits that are packed into one byte.
# The levels of a digit are the different values that it can have.
CODES_PER_BYTE: dict[int, int] = {3: 5, 5: 3, 15: 2, 255: 1}

LOW_LEVELS = 255
HIGH_LEVELS = 15
# Number of levels (different values) of a wide code. Such a code does not fit into a byte, so it is
# stored as a low digit and a high digit.
WIDE_LEVELS = LOW_LEVELS * HIGH_LEVELS

# This limit decides how the codes of a field are stored. It is compared with the bytes of codes per
# token and layer group, averaged over the layer groups of the field. Below the limit, each run (a
# range of codes with similar statistics) is stored as a separate array. From the limit on, all
# codes are stored in one array. This array is cut into ranges of equal width, the pieces, so that a
# reader of some layers reads only some pieces.
MIN_GROUP_BYTES = 1024
_WIDE_GROUP_BYTES = 2048
_NARROW_PIECE = 96
_WIDE_PIECE = 192


@dataclass(frozen=True)
class Basis:
    """Means and principal axes of the keys or the values of a layer group, or of a hidden state.

    Let x be the keys, the values or the hidden state of one token. The components of the token are
    the coordinates of x along the axes: ``components = (x - mean) @ analysis``. They are decoded by
    ``x = components @ synthesis + mean``.
    """

    # float32 [EARLY_POSITIONS + 1, width]. Row p is the mean of the values at position p. The last
    # row is the mean at all positions from EARLY_POSITIONS on.
    mean: np.ndarray
    # float32 [n_components, width]. Row i is the axis of component i.
    synthesis: np.ndarray
    # float32 [width, n_components]. Converts keys, values or hidden states to components.
    analysis: np.ndarray
    # float32 [width]. A quantisation error ``e`` costs the sum of squares of ``e / scale``. The
    # axes minimise this cost, and the rows of ``synthesis / scale`` are orthonormal. The value is
    # None if errors were weighed with a full matrix instead of a scale (the ``metric`` of
    # ``calibration.learn_basis``).
    scale: np.ndarray | None = None

    @classmethod
    def scaled(cls, mean: np.ndarray, synthesis: np.ndarray, scale: np.ndarray) -> "Basis":
        """Make a basis from its means, its axes (``synthesis``) and the scale of each column.

        ``synthesis / scale`` must have orthonormal rows. The analysis matrix is then
        ``(synthesis / scale**2).T``.
        """
        return cls(mean, synthesis, np.ascontiguousarray((synthesis / np.square(scale)).T), scale)


def mean_rows(first_position: int, n_tokens: int) -> np.ndarray:
    """Return the index of the row of ``Basis.mean`` for each of ``n_tokens`` consecutive positions.

    Each of the first ``EARLY_POSITIONS`` positions has a separate row. All later positions share
    the last row. The result is int32 [n_tokens].
    """
    return np.minimum(np.arange(first_position, first_position + n_tokens), EARLY_POSITIONS).astype(
        np.int32
    )


class CodeColumns(NamedTuple):
    """Describes the columns of the table of digits that a layer group stores.

    The table has one row per token and one column per digit. A digit is the code (quantised value)
    of one component, or one of the two digits of a code that does not fit into a byte. Each array
    below has the shape [n_columns], with one entry for each column of the table.
    """

    # int32. 0 if the digit encodes keys or a hidden state, 1 if it encodes values.
    part: np.ndarray
    # int32. Index of the principal component that the digit encodes. If two columns have the same
    # part and component, they hold the low and the high digit of the component's code.
    component: np.ndarray
    # int32. Index of the run that contains the column. A run consists of neighbouring columns that
    # are stored together. Runs are numbered from left to right.
    array: np.ndarray
    # int32. Number of different values that the digit can have.
    levels: np.ndarray
    # float32. Distance between two neighbouring quantised values of the component.
    step: np.ndarray
    # float32. 1 if the digit is the high digit of a code with two digits, otherwise 0.
    is_high: np.ndarray
    # float32. A component x is quantised to the code with the sign of x and the magnitude
    # ``floor(|x| / step + rounding)``.
    rounding: np.ndarray
    # float32. Codes 1 and -1 are decoded to the magnitude ``(1 - shift_one) * step``.
    shift_one: np.ndarray
    # float32. A code q of magnitude 2 or more is decoded to the magnitude ``(|q| - shift_more) *
    # step``.
    shift_more: np.ndarray

    def table(self) -> np.ndarray:
        """Return all nine attributes in one array, float32 [n_columns, 9]."""
        return np.stack(self, axis=1).astype(np.float32)

    @classmethod
    def from_table(cls, table: np.ndarray) -> "CodeColumns":
        """Create the object from an array that :meth:`table` returned."""
        columns = np.ascontiguousarray(table.T, np.float32)
        # The first four attributes (part, component, array and levels) contain integers.
        return cls(*columns[:4].astype(np.int32), *columns[4:])

    @property
    def limit(self) -> np.ndarray:
        """For each column, the largest magnitude of the code that contains the column's digit.

        The result is int32 [n_columns]. If a code has two digits, the entry of each digit is the
        largest magnitude of the whole code.
        """
        component = (self.part.astype(np.int64) << 20) + self.component
        is_wide = np.isin(component, component[self.is_high > 0])
        return np.where(is_wide, (WIDE_LEVELS - 1) // 2, (self.levels - 1) // 2).astype(np.int32)


@dataclass(frozen=True)
class GroupFit:
    """The learned state of one group of layers, or of a hidden state."""

    # One basis for the keys and one for the values, or one basis for the hidden state.
    bases: tuple[Basis, ...]
    columns: CodeColumns
    # One matrix float32 [n_features, width] for each basis. ``features @ matrix`` predicts the
    # keys, the values or the hidden state from features of the token. They are multiplied by the
    # basis after the prediction is subtracted. If nothing is predicted, the tuple is empty.
    regressions: tuple[np.ndarray, ...] = ()


def quantise(scaled: Array, rounding: Array, limit: Array) -> Array:
    """Quantise components to codes.

    Args:
        scaled: Components divided by their quantisation steps, [n_tokens, n_components].
        rounding: Numbers that are added to the magnitudes before the magnitudes are rounded down,
            [n_components].
        limit: Largest magnitude of each component's code, [n_components].

    Returns:
        The codes as floats, [n_tokens, n_components].
    """
    xp = array_namespace(scaled)
    codes = xp.floor(xp.abs(scaled) + rounding)
    # xp.sign would be slower: it handles NaN in an extra step, which indexes with a mask.
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

    If the codes of a row do not fill the last byte of the row, codes of zero are added.
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

    The table is int16 [256, CODES_PER_BYTE[levels]]. Even for a value that :func:`pack` never
    writes, the table has valid codes, so that decoding does not fail for any byte.
    """
    digits = np.arange(256)[:, None] // levels ** np.arange(CODES_PER_BYTE[levels]) % levels
    return np.where(digits > levels // 2, digits - levels, digits).astype(np.int16)


class _Run(NamedTuple):
    """A run: neighbouring columns in a layer group's table of digits. They are packed together.

    The run consists of the columns from ``first`` to ``last`` (exclusive). Each column holds one
    digit per token. Each digit can have ``levels`` different values. The digits are packed into the
    bytes of ``array``, which is uint8 [token, byte].
    """

    array: StoredArray
    levels: int
    first: int
    last: int


class GroupTransform:
    """Encodes and decodes the keys and values of one group of layers, or a hidden state.

    When this object first runs on a device, its matrices and tables are copied to this device. The
    copies stay on the device. The codes of a token are divided into runs, which are ranges of codes
    with similar statistics. ``arrays`` holds one array for each run.
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
            parts: The keys and the values from position 0 on, or a hidden state. Each is float32
                [n_tokens, width].
            features: Features of the tokens, float32 [n_tokens, n_features]. Required if the values
                are predicted from features.

        Returns:
            Name of an array in ``arrays`` -> its rows, uint8 [n_tokens, n_bytes].
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
        # So far, the columns of the keys come before the columns of the values. Put the columns
        # into the order in which they are stored, so that columns with similar statistics are
        # neighbours.
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
            codes: Name of an array -> its rows, uint8 [at least n_tokens, n_bytes]. All ``arrays``
                are required.
            first_position: Position of the first token in its sequence.
            n_tokens: Number of tokens to decode.
            n_layers: Number of layers of the group.
            layers: Layers to decode, counted from the first layer of the group. If the argument is
                None, all layers are decoded.
            features: Features of these tokens, float32 [n_tokens, n_features]. Required if the
                values are predicted from features.

        Returns:
            The keys and the values, or a hidden state. Each is float32 [n_tokens, width]. If
            ``layers`` are given, the rows contain only these layers.
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
            # Only the early positions (the first EARLY_POSITIONS) have separate means. Most reads
            # start after the early positions. In such a read, all tokens have the same mean, and no
            # gather is needed.
            late = mean[EARLY_POSITIONS, :]
            is_late = first_position >= EARLY_POSITIONS
            decoded.append(product + (late if is_late else xp.take(mean, rows, axis=0)))
        return decoded

    def leading(self, codes: Codes, n_tokens: int, max_components: int) -> Array:
        """Decode the first ``max_components`` components of the keys and of the values.

        If the keys or the values have fewer components, all their components are decoded. For a
        hidden state, its first ``max_components`` components are decoded.

        Returns:
            float32 [n_tokens, n_components]. The components of the keys come first, then the
            components of the values.
        """
        columns = self._columns(codes, n_tokens)
        xp = array_namespace(columns)
        constants = self._on(columns)
        # Each column contains the decoded values of one digit. A component is the sum of two
        # columns, for its low and its high digit. But most components have no high digit. So append
        # a column of zeros. If a component lacks a digit, `low` or `high` contains the index of
        # this column.
        columns = xp.concat([columns, xp.zeros_like(columns[:, :1])], axis=1)
        components: list[Array] = []
        for low, high in zip(constants["low"], constants["high"], strict=True):
            low_digits = xp.take(columns, low[:max_components], axis=1)
            high_digits = xp.take(columns, high[:max_components], axis=1)
            components.append(low_digits + high_digits)
        return xp.concat(components, axis=1)

    def _columns(self, codes: Codes, n_tokens: int) -> Array:
        """Look up the decoded values of all digits: float32 [n_tokens, n_columns].

        Each column contains the values of one digit. A component has one or two digits. Its decoded
        value is the sum of the decoded values of its digits.
        """
        like = codes[self._runs[0].array.name]
        xp = array_namespace(like)
        constants = self._on(like)
        looked_up = []
        # One table lookup maps a byte to the decoded values of all digits in the byte. Each digit
        # has its own step and shifts, so the table has 256 separate rows for each byte of a token.
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
        """Return the matrices and tables of this object as arrays like ``like``.

        They have the library (NumPy or torch) and the device of ``like``.
        """
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
            # Divide the analysis matrix by the steps, so that ``values @ analysis`` gives codes
            # before rounding. The tables for decoding contain values that are already multiplied by
            # the steps.
            analysis = basis.analysis[:, component] / columns.step[ids]
            constants["analysis"].append(np.ascontiguousarray(analysis))
            constants["synthesis"].append(np.ascontiguousarray(basis.synthesis[component]))
            constants["own"].append(ids)
            constants["low"].append(self._digits(part, is_high=False))
            constants["high"].append(self._digits(part, is_high=True))
        # Encoding first computes the columns of the keys, then the columns of the values. Taking
        # the columns at these indices puts them into their stored order.
        constants["to_stored"] = np.argsort(np.concatenate(constants["own"])).astype(np.int32)
        return constants

    def _digits(self, part: int, is_high: bool) -> np.ndarray:
        """Find the stored column of each component's low digit, or of its high digit.

        The code of a component is stored as one digit, or as a low and a high digit if the code
        does not fit into a byte. The result is int32 [n_components]. Entry i is the index of the
        column for component i.

        Some components lack the digit. Their entry is the number of columns, which is one more than
        the last index. :meth:`leading` appends a column of zeros at this index, so that a missing
        digit is read as 0.

        Args:
            part: 0 for the components of the keys or of a hidden state, 1 for the components of the
                values.
            is_high: whether to find the high digits.
        """
        columns = self.fit.columns
        column_ids = np.flatnonzero((columns.part == part) & ((columns.is_high > 0) == is_high))
        digit_columns = np.full(len(self.fit.bases[part].synthesis), len(columns.part), np.int32)
        digit_columns[columns.component[column_ids]] = column_ids
        return digit_columns

    def _table(self, run: _Run) -> np.ndarray:
        """Compute the table that maps each byte of a run to the decoded values of its digits.

        Returns:
            float32 [n_bytes * 256, digits per byte]. Row ``256 * i + v`` is for value v of byte i.
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
    """Select the columns of some layers from a matrix.

    All layers have the same number of columns, and the columns of layer 0 come first. The shape
    changes from [n_rows, width] to [n_rows, width * len(layers) / n_layers].
    """
    n_rows, width = matrix.shape
    # Pass all lengths to `reshape`. If the keys or the values have no components, the matrix is
    # empty, and `reshape` could not infer a length of -1.
    by_layer = xp.reshape(matrix, (n_rows, n_layers, width // n_layers))
    ids = to_device_of(np.asarray(layers, np.int32), matrix)
    selected_width = width // n_layers * len(layers)
    return xp.reshape(xp.take(by_layer, ids, axis=1), (n_rows, selected_width))


def row_bytes(runs: Sequence[StoredArray]) -> int:
    """Return the number of bytes per token of several stored arrays together."""
    return sum(run.row_bytes for run in runs)


def piece_bytes(widths: Sequence[int]) -> int:
    """Choose whether to store the codes of a field in pieces, and choose the width of a piece.

    If the groups have many bytes, all codes of a field are stored in one array. This array is cut
    into pieces of equal width, so that a reader of some layers reads only some pieces.

    Args:
        widths: Number of bytes of codes per token, for each group of layers.

    Returns:
        The number of bytes per token in a piece. If the groups have few bytes, the result is 0. In
        that case, each run (a range of codes with similar statistics) is stored as a separate
        array.
    """
    mean_bytes = sum(widths) / len(widths)
    if mean_bytes < MIN_GROUP_BYTES:
        return 0
    return _NARROW_PIECE if mean_bytes < _WIDE_GROUP_BYTES else _WIDE_PIECE


class Pieces:
    """Converts the bytes of all runs of a field to pieces of equal width, and back.

    A run is a range of a token's codes with similar statistics, packed into bytes. The bytes of all
    runs of a layer group are concatenated and cut into pieces. The pieces of all groups are stored
    in one array, uint8 [token, piece, byte]. Each inner chunk of the array contains the same piece
    of consecutive tokens.
    """

    def __init__(self, name: str, runs: Sequence[Sequence[StoredArray]], n_bytes: int) -> None:
        # The runs of each layer group. Each run is described as an array uint8 [token, byte]. The
        # store does not contain these arrays. Instead, the store contains `self.array` with all
        # pieces.
        self._runs = runs
        self._n_bytes = n_bytes
        self._n_pieces = [-(-row_bytes(group) // n_bytes) for group in runs]
        self.array = StoredArray(
            name, "uint8", (sum(self._n_pieces), n_bytes), (TOKEN_AXIS, PIECE_AXIS, "byte")
        )

    def of_groups(self, groups: Sequence[int]) -> list[int]:
        """Return the indices of the pieces (ranges of bytes) with the codes of some groups."""
        firsts = np.cumsum([0, *self._n_pieces]).tolist()
        pieces: list[int] = []
        for group in groups:
            pieces += range(firsts[group], firsts[group + 1])
        return pieces

    def join(self, codes: Codes) -> Array:
        """Concatenate the bytes of all runs, and cut them into pieces.

        Args:
            codes: Name of a run's array -> the rows of this array, uint8 [n_tokens, bytes of the
                run].

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
        """Undo :meth:`join` for some layer groups: convert their pieces to the bytes of each run.

        Args:
            rows: Only the pieces of these layer groups, uint8 [n_tokens, n_pieces, n_bytes].
            groups: Indices of these groups, in the order of their pieces in ``rows``.

        Returns:
            Name of a run's array -> the rows of this array, uint8 [n_tokens, bytes of the run].
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
