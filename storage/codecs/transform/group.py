"""Encodes and decodes one group of layers of a transform codec, on the device of the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_namespace

from ...chunks.field import Array, StoredArray
from .calibration import EARLY_POSITIONS, mean_rows
from .fit import GroupFit
from .packing import CODES_PER_BYTE, LOW_LEVELS, pack, split_wide, unpack_table


@dataclass(frozen=True)
class _Run:
    """The columns ``first`` to ``last`` of a group: one stored array."""

    array: StoredArray
    levels: int
    first: int
    last: int


class GroupTransform:
    """One group's transform with its constants on each device; ``arrays`` are uint8 [token, byte] each."""

    def __init__(self, name: str, fit: GroupFit) -> None:
        self.fit = fit
        self._runs = _runs(name, fit)
        self.arrays = tuple(run.array for run in self._runs)
        self._constants: dict[str, dict[str, Any]] = {}

    def encode(self, parts: Sequence[Array], features: Array | None = None) -> dict[str, Array]:
        """Encode whole sequences' parts.

        Args:
            parts: float32 [n_tokens, width] each, from position 0 on.
            features: float32 [n_tokens, n_features] of the tokens; needed where the fit has regressions.

        Returns:
            Array name -> uint8 [n_tokens, n_bytes].
        """
        xp = array_namespace(*parts)
        constants = self._on(parts[0])
        n_tokens = parts[0].shape[0]
        rows = xp.asarray(mean_rows(0, n_tokens), device=device(parts[0]))
        if constants["regression"]:
            parts = [values - features @ matrix for values, matrix in zip(parts, constants["regression"], strict=True)]
        scaled = [
            (values - xp.take(mean, rows, axis=0)) @ analysis
            for values, mean, analysis in zip(parts, constants["mean"], constants["analysis"], strict=True)
        ]
        columns = xp.take(xp.concat(scaled, axis=1), constants["to_stored"], axis=1)
        codes = xp.sign(columns) * xp.floor(xp.abs(columns) + constants["rounding"])
        codes = xp.minimum(xp.maximum(codes, -constants["limit"]), constants["limit"])
        low, high = split_wide(xp.astype(codes, xp.int16))
        digits = xp.where(constants["is_high"], high, low)
        return {run.array.name: pack(digits[:, run.first : run.last], run.levels) for run in self._runs}

    def decode(
        self,
        codes: Mapping[str, Array],
        first_position: int,
        n_tokens: int,
        n_layers: int,
        layers: list[int] | None,
        features: Array | None = None,
    ) -> list[Array]:
        """Decode consecutive tokens.

        Args:
            codes: array name -> uint8 [at least n_tokens, n_bytes].
            first_position: position of the first token in its sequence.
            n_layers: layers of the group; the width of each part is divided by it.
            layers: the group's layers wanted, counted from its first; None for all.
            features: as given to :meth:`encode`, for these tokens.

        Returns:
            Each part's values, float32 [n_tokens, width, or its share for the chosen layers].
        """
        columns = self._columns(codes, n_tokens)
        xp, constants = array_namespace(columns), self._on(columns)
        early = xp.asarray(mean_rows(first_position, n_tokens), device=device(columns))
        decoded = []
        names = ("mean", "synthesis", "regression") if constants["regression"] else ("mean", "synthesis")
        for part, own in enumerate(constants["own"]):
            matrices = [constants[name][part] for name in names]
            if layers is not None:
                matrices = [_of_layers(xp, matrix, n_layers, layers) for matrix in matrices]
            mean = matrices[0]
            product = xp.take(columns, own, axis=1) @ matrices[1]
            if constants["regression"]:
                product = product + features @ matrices[2]
            late = mean[EARLY_POSITIONS, :] if first_position >= EARLY_POSITIONS else xp.take(mean, early, axis=0)
            decoded.append(product + late)
        return decoded

    def leading(self, codes: Mapping[str, Array], n_tokens: int, most: int) -> Array:
        """Decode the first components of each part, at most ``most``: float32 [n_tokens, :meth:`n_leading`]."""
        columns = self._columns(codes, n_tokens)
        xp, constants = array_namespace(columns), self._on(columns)
        columns = xp.concat([columns, xp.zeros_like(columns[:, :1])], axis=1)  # of components without a high digit
        found = [
            xp.take(columns, low[:most], axis=1) + xp.take(columns, high[:most], axis=1)
            for low, high in zip(constants["low"], constants["high"], strict=True)
        ]
        return xp.concat(found, axis=1)

    def n_leading(self, most: int) -> int:
        """Count the components that :meth:`leading` decodes."""
        return sum(min(most, len(basis.synthesis)) for basis in self.fit.bases)

    def _columns(self, codes: Mapping[str, Array], n_tokens: int) -> Array:
        """Look up what each code of each token adds to its component: float32 [n_tokens, n_columns]."""
        packed = [codes[run.array.name][:n_tokens] for run in self._runs]
        xp = array_namespace(packed[0])
        constants = self._on(packed[0])
        looked_up = []
        for rows, run, table, offsets in zip(
            packed, self._runs, constants["tables"], constants["offsets"], strict=True
        ):
            at = xp.reshape(xp.astype(rows, xp.int32) + offsets, (-1,))
            values = xp.reshape(xp.take(table, at, axis=0), (n_tokens, rows.shape[1] * table.shape[1]))
            looked_up.append(values[:, : run.last - run.first])
        return xp.concat(looked_up, axis=1)

    def _on(self, like: Array) -> dict[str, Any]:
        """Return the constants as arrays of the namespace and device of ``like``."""
        xp = array_namespace(like)
        key = "numpy" if is_numpy_namespace(xp) else f"{xp.__name__} {device(like)}"
        if key not in self._constants:
            made = self._make_constants()
            self._constants[key] = {
                name: [xp.asarray(item, device=device(like)) for item in value]
                if isinstance(value, list)
                else xp.asarray(value, device=device(like))
                for name, value in made.items()
            }
        return self._constants[key]

    def _make_constants(self) -> dict[str, Any]:
        columns, bases = self.fit.columns, self.fit.bases
        own = [np.flatnonzero(columns.part == part).astype(np.int32) for part in range(len(bases))]
        component = [columns.component[ids] for ids in own]
        to_stored = np.empty(len(columns.part), np.int32)
        to_stored[np.concatenate(own)] = np.arange(len(columns.part), dtype=np.int32)
        return {
            "mean": [basis.mean for basis in bases],
            "analysis": [
                np.ascontiguousarray(basis.analysis[:, c] / columns.step[ids])
                for basis, c, ids in zip(bases, component, own, strict=True)
            ],
            "synthesis": [np.ascontiguousarray(b.synthesis[c]) for b, c in zip(bases, component, strict=True)],
            "regression": list(self.fit.regressions),
            "own": own,
            "low": [self._digits(part, is_high=False) for part in range(len(bases))],
            "high": [self._digits(part, is_high=True) for part in range(len(bases))],
            "to_stored": to_stored,
            "rounding": columns.rounding,
            "limit": columns.limit.astype(np.float32),
            "is_high": columns.is_high > 0,
            "tables": [self._table(run) for run in self._runs],
            "offsets": [256 * np.arange(run.array.row_shape[0], dtype=np.int32) for run in self._runs],
        }

    def _digits(self, part: int, is_high: bool) -> np.ndarray:
        """Find the column of one digit of each component of a part: the number of columns where it has none."""
        columns = self.fit.columns
        at = np.flatnonzero((columns.part == part) & ((columns.is_high > 0) == is_high))
        found = np.full(len(self.fit.bases[part].synthesis), len(columns.part), np.int32)
        found[columns.component[at]] = at
        return found

    def _table(self, run: _Run) -> np.ndarray:
        """Compute the components that each value of each byte decodes to: float32 [n_bytes * 256, codes of a byte]."""
        per_byte = CODES_PER_BYTE[run.levels]
        n_bytes = run.array.row_shape[0]
        padding = n_bytes * per_byte - (run.last - run.first)

        def by_byte(values: np.ndarray) -> np.ndarray:
            return np.pad(values[run.first : run.last], (0, padding)).reshape(n_bytes, 1, per_byte)

        columns = self.fit.columns
        code = unpack_table(run.levels)[None].astype(np.float32)
        shift = np.where(np.abs(code) == 1, by_byte(columns.shift_one), by_byte(columns.shift_more))
        step = by_byte(columns.step * np.where(columns.is_high > 0, LOW_LEVELS, 1))
        table = (code - np.sign(code) * shift) * step
        return np.ascontiguousarray(table.reshape(-1, per_byte), np.float32)


def _runs(name: str, fit: GroupFit) -> tuple[_Run, ...]:
    columns = fit.columns
    runs = []
    bounds = np.flatnonzero(np.diff(columns.array, prepend=-1, append=-1))
    for number, (first, last) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        levels = int(columns.levels[first])
        n_bytes = -(-(last - first) // CODES_PER_BYTE[levels])
        array = StoredArray(f"{name}{number:02d}", "uint8", (n_bytes,), ("token", "byte"))
        runs.append(_Run(array, levels, first, last))
    return tuple(runs)


def _of_layers(xp: Any, matrix: Array, n_layers: int, layers: list[int]) -> Array:
    """Take the columns of some layers: [rows, width] -> [rows, width * len(layers) / n_layers]."""
    by_layer = xp.reshape(matrix, (matrix.shape[0], n_layers, -1))
    ids = xp.asarray(np.asarray(layers, np.int32), device=device(matrix))
    return xp.reshape(xp.take(by_layer, ids, axis=1), (matrix.shape[0], -1))
