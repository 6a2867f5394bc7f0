"""Reading a store's documents when they may be damaged or hostile: regular files, bounded sizes, no surprises."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import StoreDamaged
from .paths import RemotePath, StorePath

MAX_DOCUMENT_BYTES = 16 << 20
"""Longest JSON document that is parsed; a commit of a part has about 100 bytes per file."""

MAX_WHOLE_NUMBER = 1 << 48
"""Largest count that a document may hold; sums and products of a few of them still fit 64 bits or are Python's."""


def open_regular(path: Path) -> int:
    """Open a local file for reading and return its descriptor.

    A FIFO would be waited for, and a device has no end: what is no regular file is refused before it is read.

    Raises:
        FileNotFoundError: no such file.
        StoreDamaged: it is no regular file.
        OSError: it cannot be opened, which says nothing about its bytes.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.EOPNOTSUPP):  # what a socket gives
            raise
        raise StoreDamaged(f"{path} is a socket or device, expected a regular file") from error
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        os.close(fd)
        raise StoreDamaged(f"{path} is {_KINDS.get(kind, 'a device')}, expected a regular file")
    return fd


def read_bounded(path: StorePath, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the bytes of a file of a store, local or remote; its kind and size are looked at before it is read.

    Raises:
        ValueError: it is longer, or no regular file; nothing was read.
        FileNotFoundError: no such file.
    """
    if isinstance(path, RemotePath):
        return path.read_bytes(max_bytes)
    with open(open_regular(path), "rb") as file:
        if (n_bytes := os.fstat(file.fileno()).st_size) <= max_bytes:
            content = file.read(n_bytes)
    if n_bytes > max_bytes:
        raise ValueError(f"it has {n_bytes} bytes, at most {max_bytes} are read")
    return content


def parse_object(text: bytes | str) -> dict[str, Any]:
    """Parse a JSON object, neither too long nor nested too deeply, without NaN and Infinity; else ValueError."""
    if len(text) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{len(text)} bytes, at most {MAX_DOCUMENT_BYTES} are read")
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError(f"a JSON {type(document).__name__}, expected an object")
    return document


def whole_number(value: object, name: str, low: int = 0, high: int = MAX_WHOLE_NUMBER) -> int:
    """Return a whole number of a document."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {_shown(value)}, expected a whole number from {low} to {high}")
    return value


def whole_numbers(value: object, name: str, low: int = 1, high: int = MAX_WHOLE_NUMBER) -> tuple[int, ...]:
    """Return a list of whole numbers of a document, at most 16 of them."""
    if not isinstance(value, list) or len(value) > 16:
        raise ValueError(f"{name} is {_shown(value)}, expected a list of at most 16 numbers")
    return tuple(whole_number(item, name, low, high) for item in value)


def relative_name(name: object) -> str:
    """Return the name of a file below a folder; ValueError if absolute, or with empty, ``.`` or ``..`` steps."""
    if not isinstance(name, str) or "\0" in name or len(name) > 1024:
        raise ValueError(f"{_shown(name)} is no relative path")
    if any(step in ("", ".", "..") or len(step.encode()) > 255 for step in name.split("/")):
        raise ValueError(f"{_shown(name)} is no relative path")
    return name


def mapping(value: object, name: str) -> Mapping[str, Any]:
    """Return an object inside a document."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {_shown(value)}, expected an object")
    return value


_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder"}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the number {name}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
