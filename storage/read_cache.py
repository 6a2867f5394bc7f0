"""Keeps what was read of remote shards on a local disk, so that a second epoch asks the server for nothing.

Bytes are kept in blocks of 1 MiB, each in a file of its own, named after the shard's place, size and checksum as its
commit has them: so a block is never taken for one of another shard, and a store that is written anew has new blocks.
Each block ends in its own CRC-32C, and one that does not fit is fetched again::

    DIR/blocks/3f/3f9c...e1-000017      1 MiB of a shard, then its CRC-32C

Any number of processes may share a folder. A block appears by a rename, whole; nothing is synced, as a block that a
crash has torn is not used. When the folder is full the blocks that were used longest ago go, a twentieth at a time. A
process counts the others' blocks each time it has written a twentieth of the folder, which may exceed its size by that.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import OptionInvalid
from .backend import ByteRange, Fetch, crc32c
from .paths import requests

FOLDER_VARIABLE, SIZE_VARIABLE = "MOA_DATA_CACHE_DIR", "MOA_DATA_CACHE_GB"
DEFAULT_GB = 100.0
BLOCK_BYTES = 1 << 20
"""A reader of a whole sequence asks for many times as much; smaller blocks only make more files."""
_CRC = struct.Struct("<I")
_FREED_SHARE = 20


class ReadCache:
    """A folder of blocks, which several processes may share; pickled as its place and size.

    Args:
        folder: made when the first block is kept.
        max_bytes: bytes of all blocks at most.

    Attributes:
        n_hit_bytes: bytes that readers of this process were given from the folder.
        n_fetched_bytes: bytes that were fetched for them, the rest of blocks included.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        self.folder, self.max_bytes = Path(folder).expanduser().absolute(), max_bytes
        self.n_hit_bytes = self.n_fetched_bytes = 0
        self._counting = threading.Lock()
        self._n_used, self._n_written = 0, max_bytes  # as if a count were due

    def __reduce__(self) -> tuple[type[ReadCache], tuple[Path, int]]:
        return (ReadCache, (self.folder, self.max_bytes))

    def read(self, ranges: Sequence[ByteRange], fetch: Fetch) -> list[memoryview]:
        """Return the bytes of ranges, from blocks that are kept and by fetching the others, which are kept then."""
        keys = [[(item.identity, block) for block in _blocks_of(item)] for item in ranges]
        at = {key: i for i, own in enumerate(keys) for key in own}  # several ranges may lie in one block
        loads = requests().map(lambda key: self._load(ranges[at[key]], key[1]), at)
        found = {key: data for key, data in zip(at, loads, strict=True) if data is not None}
        self.n_hit_bytes += sum(map(len, found.values()))
        missing = [key for key in at if key not in found]
        spans = [(at[key], *_span(ranges[at[key]], key[1])) for key in missing]
        for key, data in zip(missing, fetch(spans) if spans else (), strict=True):
            found[key] = bytes(data)
            self.n_fetched_bytes += len(data)
        for _ in requests().map(lambda key: self._keep(ranges[at[key]], key[1], found[key]), missing):
            pass
        return [_cut(item, [found[key] for key in own]) for item, own in zip(ranges, keys, strict=True)]

    def _path(self, item: ByteRange, block: int) -> Path:
        name = hashlib.sha256(f"{item.identity} {item.n_bytes}".encode()).hexdigest()[:32]
        return self.folder / "blocks" / name[:2] / f"{name}-{block:06d}"

    def _load(self, item: ByteRange, block: int) -> bytes | None:
        """Return a block that is kept whole; None for none."""
        path = self._path(item, block)
        start, stop = _span(item, block)
        try:
            content = path.read_bytes()
            data, crc = content[: -_CRC.size], content[-_CRC.size :]
            if len(data) != stop - start or _CRC.pack(crc32c(data)) != crc:
                return None
            os.utime(path)  # what was used last goes last
        except OSError:
            return None
        return data

    def _keep(self, item: ByteRange, block: int, data: bytes) -> None:
        """Keep a block if there is room for it on the disk; that there is none is no reader's loss."""
        start, stop = _span(item, block)
        if len(data) != stop - start:
            return  # the file is shorter than its commit says, which its reader will notice
        path = self._path(item, block)
        partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
        n_bytes = len(data) + _CRC.size
        if n_bytes > self.max_bytes:
            return
        with suppress(OSError):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with self._counting:
                    self._make_room(n_bytes)
                partial.write_bytes(data + _CRC.pack(crc32c(data)))
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)

    def _make_room(self, n_bytes: int) -> None:
        """Count a new block, and delete old ones where it does not fit."""
        share = self.max_bytes // _FREED_SHARE
        if self._n_written > share or self._n_used + n_bytes > self.max_bytes:
            found = sorted(self._found())
            self._n_used, self._n_written = sum(size for _, size, _ in found), 0
            allowed = self.max_bytes - n_bytes
            if self._n_used > allowed:
                allowed -= share
            for _, size, path in found:
                if self._n_used <= allowed:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)
                self._n_used -= size
        self._n_used += n_bytes
        self._n_written += n_bytes

    def _found(self) -> Iterator[tuple[float, int, str]]:
        """Yield (time of the last use, bytes, path) of all blocks."""
        with suppress(FileNotFoundError):
            for folder in os.scandir(self.folder / "blocks"):
                for entry in os.scandir(folder):
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        yield status.st_mtime, status.st_size, entry.path


def cache_at(folder: str | None = None, n_gb: float | None = None) -> ReadCache | None:
    """Return a cache, or None where nothing names a folder.

    What is not given, ``MOA_DATA_CACHE_DIR`` and ``MOA_DATA_CACHE_GB`` (default 100) tell; OptionInvalid for a size
    that is no positive number.
    """
    folder = folder or os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return None
    text = os.environ.get(SIZE_VARIABLE, str(DEFAULT_GB))
    try:
        n_gb = float(text) if n_gb is None else n_gb
        if not 0 < n_gb < 1e9:
            raise ValueError
    except ValueError as error:
        raise OptionInvalid(f"{SIZE_VARIABLE} is {text!r}, expected a number of gigabytes above 0.") from error
    return ReadCache(folder, int(n_gb * 1e9))


def _blocks_of(item: ByteRange) -> range:
    stop = min(item.stop, item.n_bytes)
    return range(item.start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) if stop > item.start else range(0)


def _span(item: ByteRange, block: int) -> tuple[int, int]:
    return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, item.n_bytes)


def _cut(item: ByteRange, blocks: Sequence[bytes]) -> memoryview:
    """Cut what was asked for from its blocks, of which the last may be shorter than it should be."""
    skipped, n_bytes = item.start % BLOCK_BYTES, max(0, item.stop - item.start)
    whole = blocks[0] if len(blocks) == 1 else b"".join(blocks)
    return memoryview(whole)[skipped : skipped + n_bytes]
