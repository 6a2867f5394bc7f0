"""Simulates a failing disk: from some call on, every call that changes a file in a folder fails."""

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_BY_NAME = ("mkdir", "rename", "replace", "link")
_BY_DESCRIPTOR = ("write", "pwrite", "fsync", "ftruncate")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Refusals:
    """Counts the calls that change files, and makes all calls fail from a certain one on."""

    def __init__(self, folder: Path, first: int | None, code: int) -> None:
        self.n_calls = 0
        self.refused: list[str] = []
        self._folder, self._first, self._code = str(folder.resolve()), first, code

    def meet(self, call: str, path: Any) -> None:
        """Count a call, and raise OSError if it must fail."""
        name = (
            os.readlink(f"/proc/self/fd/{path}")
            if isinstance(path, int)
            else os.path.abspath(os.fspath(path))
        )
        if not str(name).startswith(self._folder):
            return
        self.n_calls += 1
        if self._first is not None and self.n_calls >= self._first:
            self.refused.append(f"{call} {name}")
            # A call that takes a descriptor does not know the file's name.
            raise OSError(
                self._code, os.strerror(self._code), *([] if isinstance(path, int) else [str(path)])
            )


@contextmanager
def refusing(folder: Path, first: int | None, code: int = 0) -> Iterator[Refusals]:
    """Make calls that change files below a folder fail, from the first-th call on.

    If ``first`` is None, no call fails and calls are only counted.
    """
    refusals = Refusals(folder, first, code)

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            refusals.meet(name, path)
            return real(path, *arguments, **options)

        return call

    def open_descriptor(path: Any, flags: int, *arguments: Any, **options: Any) -> Any:
        if flags & _WRITING:
            refusals.meet("open", path)
        return real_open(path, flags, *arguments, **options)

    def open_file(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if set(mode) & set("wax+") and not isinstance(path, int):
            refusals.meet("open", path)
        return real_file(path, mode, *arguments, **options)

    real_open, real_file = os.open, builtins.open
    with pytest.MonkeyPatch.context() as patch:
        for name in (*_BY_NAME, *_BY_DESCRIPTOR):
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        patch.setattr(os, "open", open_descriptor)
        patch.setattr(builtins, "open", open_file)
        patch.setattr(io, "open", open_file)
        yield refusals
