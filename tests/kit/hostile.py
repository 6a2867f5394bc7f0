"""Generates changed files, and checks that reading them raises no errors but the package's own.

A test draws a changed version of a file, replaces the file with it, and calls every function that
reads it. Meanwhile the process may grow by at most 1.5 GiB. Code that allocates absurd sizes gets a
MemoryError, which is not an error of the package, so the test fails.
"""

import copy
import json
import os
import resource
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moa_data.errors import MoaDataError, StorageUnavailable
from moa_data.storage.commit import FileRecord, files_json

HEADROOM_BYTES = 3 << 29
_UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
QUICK = settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=_UNCHECKED)
LONG = settings(max_examples=1000, deadline=None, suppress_health_check=_UNCHECKED)
QUICK_AND_LONG = pytest.mark.parametrize(
    "how", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)], ids=["", "many"]
)
"""Runs a test with a few examples, and as a slow test with many.

The test passes its parameter ``how`` to ``try_examples``.
"""
HOSTILE = st.sampled_from(
    [None, True, -1, 0, 1, 2, 3, 7, 64, 2**31, 2**40, 2**63, 2**64, 10**30, 0.5, -1.5, 1e308, "",
     "x", "load", "/etc", "../..", "a\0b", "\ud800", "n" * 5000, [], {}, [0], [-1], [2**40], [[1]],
     [None], {"a": 1}, ["x"], ["token", "token"], "{{ 1 / 0 }}", "{% for %}"]
)  # fmt: skip
PIECES = [b"[" * 100_000, b"\xff" * 8, b"1" * 5000, b"NaN", b"{{ 1 / 0 }}"]


def try_examples(how: settings, check: Callable[[Any], None]) -> None:
    """Call a check once per example, with hypothesis' data object."""
    how(given(data=st.data())(lambda data: check(data)))()


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Limit the growth of the process's memory to ``HEADROOM_BYTES``."""
    n_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes + HEADROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def only_own_errors(*doors: Callable[[], object]) -> None:
    """Call each function. It must succeed, or raise an error of the package about the file."""
    with bounded_memory():
        for door in doors:
            try:
                door()
            except StorageUnavailable:
                raise  # raised by a check that ran out of memory
            except MoaDataError:
                continue


def change_json(file: Path, **values: Any) -> None:
    """Change values of a JSON object in a file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def commit_target(store: Path) -> None:
    """Update commits/target.json to match the files, like an attacker with write access."""
    folder = store / "target"
    contents = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    records = {
        path.relative_to(folder).as_posix(): FileRecord(len(c), zlib.crc32(c))
        for path, c in contents.items()
    }
    (store / "commits/target.json").write_bytes(files_json(records))


@contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    """Replace the content of a file temporarily."""
    good = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(good)


@contextmanager
def endless(path: Path, kind: str) -> Iterator[None]:
    """Temporarily replace a file with something that cannot be read to its end.

    Args:
        kind: "fifo", "device" or "folder". Anything else is a sparse file of 1 TiB.
    """
    good = path.with_name(f".{path.name}.good")
    path.rename(good)
    try:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "folder":
            path.mkdir()
        else:
            with open(path, "wb") as file:
                file.truncate(1 << 40)
        yield
    finally:
        path.rmdir() if kind == "folder" else path.unlink()
        good.rename(path)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON document, with at most 24 items per container.

    The limit avoids visiting a whole vocabulary.
    """
    if path:
        yield path
    items = list(
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items[:24]:
        yield from _paths(item, (*path, key))


@dataclass(frozen=True)
class _Change:
    """One change of a JSON document, drawn without knowledge of the document."""

    index: int
    kind: str
    key: str
    value: Any

    def apply(self, document: Any) -> None:
        ways = list(_paths(document))
        if not ways:
            return
        *way, last = ways[self.index % len(ways)]
        owner = document
        for key in way:
            owner = owner[key]
        if self.kind == "remove":
            del owner[last]
        elif self.kind == "add" and isinstance(owner, dict):
            owner[self.key] = copy.deepcopy(self.value)  # the next change may modify it
        else:
            owner[last] = copy.deepcopy(self.value)


_KINDS = st.sampled_from(["replace", "replace", "replace", "remove", "add"])
_CHANGES = st.lists(
    st.builds(_Change, st.integers(0, 2**16), _KINDS, st.text(max_size=3), HOSTILE),
    min_size=1,
    max_size=2,
)


@st.composite
def changed_bytes(draw: Callable[..., Any], content: bytes) -> bytes:
    """Draw a version of a file with bytes overwritten, inserted or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        piece = draw(st.binary(max_size=8) | st.sampled_from(PIECES))
        kind = draw(st.sampled_from(["overwrite", "insert", "cut"]))
        if kind == "cut":
            del data[at:]
        else:
            data[at : at + len(piece) * (kind == "overwrite")] = piece
    return bytes(data)


def changed(content: bytes) -> st.SearchStrategy[bytes]:
    """Draw a version of a file with JSON values replaced, removed or added, or with other bytes."""
    document = None
    with suppress(ValueError):
        document = json.loads(content)

    def rewritten(changes: list[_Change]) -> bytes:
        changing = copy.deepcopy(document)
        for change in changes:
            change.apply(changing)
        return (json.dumps(changing, indent=1, sort_keys=True) + "\n").encode()

    if document is None:
        return changed_bytes(content)
    return st.one_of(_CHANGES.map(rewritten), _CHANGES.map(rewritten), changed_bytes(content))
