"""Byte ranges of remote shards, which a local disk may keep, so that a second epoch asks the server for nothing.

Bytes are kept in blocks of 1 MiB, each in a file of its own, named after the shard's place, size and checksum as its
commit has them: so a block is never taken for one of another shard, and a store that is written anew has new blocks.
Each block ends in its own CRC-32C, and one that does not fit is fetched again::

    DIR/blocks/3f/3f9c...e1-000017      1 MiB of a shard, then its CRC-32C

Any number of processes may share a folder. A block appears by a rename, whole; nothing is synced, as a block that a
crash has torn is not used. When the folder is full the blocks that were used longest ago go, a twentieth at a time. A
process counts the others' blocks each time it has written a twentieth of the folder, which may exceed its size by that.
"""

import hashlib
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..errors import OptionInvalid
from .backend import crc32c
from .commit import FileRecord
from .paths import REQUEST_BYTES, RemotePath, requests

FOLDER_VARIABLE = "MOA_DATA_CACHE_DIR"
SIZE_VARIABLE = "MOA_DATA_CACHE_GB"
DEFAULT_GB = 100.0
# a reader of a whole sequence asks for many times as much; smaller blocks only make more files
BLOCK_BYTES = 1 << 20
_CRC = struct.Struct("<I")
_FREED_SHARE = 20


class RemoteFile:
    """A remote file of which byte ranges are read, one request each.

    Args:
        record: size and checksum of the file, as its commit has them.
        cache: keeps on a disk what is read; a store has one for all of its files.
    """

    max_read_bytes = REQUEST_BYTES

    def __init__(
        self, path: RemotePath, record: FileRecord, cache: "ReadCache | None" = None
    ) -> None:
        self.path = path
        self.n_bytes = record.bytes
        self.cache = cache
        identity = f"{path} {record.bytes} {record.crc32:08x} {record.bytes}"
        self.digest = hashlib.sha256(identity.encode()).hexdigest()[:32]

    def read_into(self, offset: int, buffer: np.ndarray) -> int:
        """Fill ``buffer`` (uint8) with the bytes from ``offset`` on; return how many there were."""
        (data,) = fetch_ranges([(self, offset, offset + len(buffer))])
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)


# byte ranges [start, stop) of remote files of one store
Ranges = Sequence[tuple[RemoteFile, int, int]]


def fetch_ranges(ranges: Ranges) -> list[memoryview]:
    """Fetch byte ranges, all requests under way at the same time; fewer bytes where a file is shorter."""
    cache = ranges[0][0].cache
    return _request(ranges) if cache is None else cache.read(ranges)


def _request(ranges: Ranges) -> list[memoryview]:
    bucket = ranges[0][0].path.backend
    return bucket.read_ranges([(file.path.key, start, stop) for file, start, stop in ranges])


class ReadCache:
    """A folder of blocks, which several processes may share; pickled as its place and size.

    Args:
        folder: made when the first block is kept.
        max_bytes: bytes of all blocks at most.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.max_bytes = max_bytes
        self._counting = threading.Lock()
        self._n_used, self._n_written = 0, max_bytes  # as if a count were due

    def __reduce__(self) -> "tuple[type[ReadCache], tuple[Path, int]]":
        return (ReadCache, (self.folder, self.max_bytes))

    def read(self, ranges: Ranges) -> list[memoryview]:
        """Return the bytes of ranges, from blocks that are kept and by fetching the others, which are kept then."""
        keys = [
            [(file, block) for block in _blocks(file, start, stop)] for file, start, stop in ranges
        ]
        # several ranges may lie in one block
        wanted = list(dict.fromkeys(key for own in keys for key in own))
        loads = requests().map(lambda key: self._load(*key), wanted)
        found = {key: data for key, data in zip(wanted, loads, strict=True) if data is not None}
        missing = [key for key in wanted if key not in found]
        fetched = (
            _request([(file, *_span(file, block)) for file, block in missing]) if missing else []
        )
        found |= {key: bytes(data) for key, data in zip(missing, fetched, strict=True)}
        for _ in requests().map(lambda key: self._keep(key[0], key[1], found[key]), missing):
            pass
        return [
            _cut([found[key] for key in own], *each[1:])
            for own, each in zip(keys, ranges, strict=True)
        ]

    def _path(self, file: RemoteFile, block: int) -> Path:
        return self.folder / "blocks" / file.digest[:2] / f"{file.digest}-{block:06d}"

    def _load(self, file: RemoteFile, block: int) -> bytes | None:
        path = self._path(file, block)
        start, stop = _span(file, block)
        try:
            content = path.read_bytes()
            data = content[: -_CRC.size]
            crc = content[-_CRC.size :]
            if len(data) != stop - start or _CRC.pack(crc32c(data)) != crc:
                return None
            os.utime(path)  # what was used last goes last
        except OSError:
            return None
        return data

    def _keep(self, file: RemoteFile, block: int, data: bytes) -> None:
        """Keep a block if there is room for it on the disk; a full disk is ignored."""
        start, stop = _span(file, block)
        n_bytes = len(data) + _CRC.size
        if len(data) != stop - start or n_bytes > self.max_bytes:
            # a file shorter than its commit says, which its reader will notice; or a cache of less
            # than a block
            return
        path = self._path(file, block)
        partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
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
            self._n_used = sum(size for _, size, _ in found)
            self._n_written = 0
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
    that is not a positive number.
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
        raise OptionInvalid(
            f"{SIZE_VARIABLE} is {text!r}, expected a number of gigabytes above 0."
        ) from error
    return ReadCache(folder, int(n_gb * 1e9))


def _blocks(file: RemoteFile, start: int, stop: int) -> range:
    return range(
        start // BLOCK_BYTES, -(-min(stop, file.n_bytes) // BLOCK_BYTES) if stop > start else 0
    )


def _span(file: RemoteFile, block: int) -> tuple[int, int]:
    return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, file.n_bytes)


def _cut(blocks: Sequence[bytes], start: int, stop: int) -> memoryview:
    """Cut what was asked for from its blocks, of which the last may be shorter than it should be."""
    skipped = start % BLOCK_BYTES
    n_bytes = max(0, stop - start)
    whole = blocks[0] if len(blocks) == 1 else b"".join(blocks)
    return memoryview(whole)[skipped : skipped + n_bytes]
