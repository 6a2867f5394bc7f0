r"""The journal of a regeneration: one JSON line for each row that was asked, behind a line that says by whom and how.

Lines are appended and synced a unit at a time; a unit is as many rows as are decoded together, because rounding in a
batch depends on its rows. Whoever goes on drops a last line that was torn and the units that are not whole::

    {"settings": {...}}                        compared when the run goes on
    {"row": 0, "messages": [...], ...}     \   a unit of two rows
    {"row": 1, "reason": "..."}            /
    {"row": 2, "messages": [...], ...}         half a unit: dropped, and asked again
    {"row": 3, "mess                           torn: dropped
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ..errors import DatasetError
from ..storage.disk.durable import disk_full_guard, fsync_directory, write_all
from .chats import Outcome

_GO_ON = "The answers so far are safe. Free some space and run the same command again."


class Journal:
    """The journal of one output file; use it as a context.

    Args:
        path: the file; made if missing.
        settings: what shapes the answers; a journal that was begun with others is refused.
        unit: rows that are answered together.
        n_all: rows that there are to answer; the last unit may be shorter.

    Attributes:
        n_rows: rows that are answered.

    Raises:
        DatasetError: other settings began it, or it is damaged.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], unit: int, n_all: int) -> None:
        self.path, self.n_rows, self._settings = path, 0, json.loads(json.dumps(settings))
        self._unit, self._n_all = unit, n_all

    def __enter__(self) -> Self:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, 0o644)
        try:
            n_kept_bytes = self._read_back()
            os.ftruncate(self._fd, n_kept_bytes)
            if not n_kept_bytes:
                self._write([{"settings": self._settings}])
                fsync_directory(self.path.parent)
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)

    def _read_back(self) -> int:
        """Check the settings and count rows; returns the bytes of what is whole."""
        n_bytes = n_kept_bytes = n_rows = 0
        with self.path.open("rb") as stream:
            for number, line in enumerate(stream):
                n_bytes += len(line)
                if not line.endswith(b"\n"):
                    break
                values = self._parse(line, number)
                if number == 0:
                    self._check(values.get("settings"))
                elif values.get("row") != n_rows:
                    raise DatasetError(self._damaged(f"line {number + 1} is not that of row {n_rows}"))
                else:
                    n_rows += 1
                if n_rows % self._unit == 0 or n_rows == self._n_all:
                    n_kept_bytes, self.n_rows = n_bytes, n_rows
        return n_kept_bytes

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise DatasetError(self._damaged(f"line {number + 1} is no JSON object"))
        return values

    def _damaged(self, what: str) -> str:
        return f"{self.path} is damaged ({what}). Cut it off before that line, or delete it to ask all rows again."

    def _check(self, begun: Any) -> None:
        if not isinstance(begun, dict):
            raise DatasetError(self._damaged("line 1 has no settings"))
        if changed := differences(begun, self._settings):
            raise DatasetError(
                f"{self.path} was begun with {changed}. Give the settings that it was begun with, or another --out."
            )

    def append(self, outcomes: Sequence[Outcome]) -> None:
        """Add a unit, and wait until it is on the disk."""
        self._write([outcome.to_json() for outcome in outcomes])
        self.n_rows += len(outcomes)

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        with disk_full_guard(self.path, _GO_ON):
            write_all(self._fd, data)
            os.fsync(self._fd)

    def outcomes(self) -> Iterator[Outcome]:
        """Yield every row that is there, from the disk."""
        with self.path.open("rb") as stream:
            next(stream)
            for line in stream:
                yield Outcome.from_json(json.loads(line))


def differences(begun: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Name what differs between two settings, such as ``seed 0 (now 1)``; empty where nothing does."""
    names = [name for name in {**begun, **now} if begun.get(name) != now.get(name)]
    return ", ".join(f"{name} {_short(begun.get(name))} (now {_short(now.get(name))})" for name in names)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
