"""Stores on file systems that fsspec knows, such as the Hub's (``hf://``): to read from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import StorageUnavailable, StoreNotFound
from ..paths import Bucket, Entry
from .requests import bounded

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class FsspecBucket:
    """A folder of a file system that fsspec knows, listed once; connected anew in each process, pickled as its URL."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._per_process: tuple[int, AbstractFileSystem, str] | None = None
        self._found: dict[str, Entry] | None = None

    def __reduce__(self) -> tuple[type[Bucket], tuple[str]]:
        return (FsspecBucket, (self.url,))

    def connect(self) -> tuple[AbstractFileSystem, str]:
        """Return this process's file system and the store's path on it; StoreNotFound if fsspec lacks the protocol."""
        from fsspec.core import url_to_fs

        if self._per_process is None or self._per_process[0] != os.getpid():
            try:
                filesystem, root = url_to_fs(self.url)
            except (ImportError, ValueError) as error:
                raise StoreNotFound(f"{self.url} cannot be opened as a store: {error}") from error
            self._per_process = (os.getpid(), filesystem, str(root).rstrip("/"))
        return self._per_process[1:]

    def find(self, folder: str = "") -> dict[str, Entry]:  # noqa: D102
        if self._found is None:
            filesystem, root = self.connect()
            found = filesystem.find(root, detail=True)
            if any(item["size"] is None for item in found.values()):  # of HTTP: each file would have to be asked for
                raise StoreNotFound(
                    f"{self.url} lists its files without their sizes, so it cannot be read as a store. Copy it to a "
                    "disk, or give its s3://, gs:// or hf:// URL."
                )
            self._found = {name[len(root) :].strip("/"): Entry(int(it["size"]), None) for name, it in found.items()}
        start = f"{folder}/" if folder else ""
        return {name: entry for name, entry in self._found.items() if name == folder or name.startswith(start)}

    def size(self, name: str) -> int:  # noqa: D102
        found = self.find(name)
        if name not in found:
            raise FileNotFoundError(f"{self.url}/{name}")
        return found[name].n_bytes

    def read(self, name: str, max_bytes: int | None = None) -> bytes:  # noqa: D102
        bounded(b"", self.size(name), max_bytes)
        filesystem, root = self.connect()
        return bounded(content := bytes(filesystem.cat_file(f"{root}/{name}")), len(content), max_bytes)

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[memoryview]:  # noqa: D102
        filesystem, root = self.connect()
        names, starts, stops = ([item[column] for item in ranges] for column in range(3))
        found: list[Any] = filesystem.cat_ranges([f"{root}/{name}" for name in names], starts, stops, on_error="return")
        for (name, start, _), data in zip(ranges, found, strict=True):
            if isinstance(data, FileNotFoundError):
                raise FileNotFoundError(f"{self.url}/{name}") from data
            if isinstance(data, Exception):
                raise StorageUnavailable(f"{self.url}/{name} cannot be read at byte {start}: {data}") from data
        return [memoryview(bytes(data)) for data in found]

    def create(self, name: str, data: bytes) -> bool:  # noqa: D102
        raise self._read_only()

    def replace(self, name: str, old: bytes, new: bytes) -> bool:  # noqa: D102
        raise self._read_only()

    def put(self, name: str, data: bytes | Path | Iterable[bytes]) -> None:  # noqa: D102
        raise self._read_only()

    def copy(self, source: str, target: str, n_bytes: int) -> None:  # noqa: D102
        raise self._read_only()

    def delete(self, names: Iterable[str]) -> None:  # noqa: D102
        raise self._read_only()

    def _read_only(self) -> StorageUnavailable:
        return StorageUnavailable(
            f"{self.url} can be read but not written: stores are written to folders, s3://, gs:// and az://."
        )
