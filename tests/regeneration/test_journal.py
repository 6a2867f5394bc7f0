"""The journal keeps whole units, and refuses what is not its own."""

from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import DatasetError
from moa_data.regeneration.chats import Outcome
from moa_data.regeneration.journal import Journal, differences

SETTINGS = {"seed": 0, "model": "tiny"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of five of six rows, in units of two."""
    path = tmp_path / "chats.journal"
    with Journal(path, SETTINGS, 2, 6) as journal:
        journal.append([outcome(0), outcome(1)])
        journal.append([outcome(2), outcome(3)])
    return path


def outcome(row: int) -> Outcome:
    return Outcome(row, [{"role": "assistant", "content": f"caf\u00e9 {row}"}], 1, 2)


def opened(path: Path, settings: dict[str, Any] = SETTINGS, n_all: int = 6) -> list[Outcome]:
    with Journal(path, settings, 2, n_all) as journal:
        found = list(journal.outcomes())
        assert journal.n_rows == len(found)
        return found


def test_it_gives_back_what_was_written(path: Path) -> None:
    before = path.read_bytes()
    assert opened(path) == [outcome(row) for row in range(4)]
    assert path.read_bytes() == before


def test_every_cut_leaves_whole_units(path: Path) -> None:
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for n_bytes in range(len(whole)):
        path.write_bytes(whole[:n_bytes])
        n_units = max(0, sum(end <= n_bytes for end in ends) - 1) // 2
        assert len(opened(path)) == 2 * n_units
        assert path.read_bytes() == whole[: ends[2 * n_units]]


def test_a_last_unit_may_be_shorter(path: Path) -> None:
    with Journal(path, SETTINGS, 2, 5) as journal:
        journal.append([outcome(4)])
    assert len(opened(path, n_all=5)) == 5
    assert len(opened(path, n_all=6)) == 4


def test_other_settings_are_refused(path: Path) -> None:
    with pytest.raises(DatasetError, match=r"begun with seed 0 \(now 1\), model tiny \(now null\)\. Give"):
        opened(path, {"seed": 1})
    assert differences(SETTINGS, SETTINGS) == ""


@pytest.mark.parametrize("line", [b"{]\n", b"[]\n", b'{"row": 9}\n'])
def test_damage_is_named(path: Path, line: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(DatasetError, match="line 3 is"):
        opened(path)
