"""Reads byte ranges of remote shards, with an optional cache on a local disk.

If the cache is large enough, only the first epoch of a training run makes requests to the server.
The cache divides each shard into blocks of 1 MiB. Each cached block is a file, which ends with a
checksum of the block::

    DIR/blocks/3f/3f9c...e1-000017      1 MiB of a shard, then the CRC-32C of these bytes

*Names.* The name of a block's file is a hash, followed by the number of the block in the shard. The
hash is computed from the path of the shard, and from the shard's size and checksum in the commit.
So a block is never used for a different shard. After the store is written again with other content,
the old blocks are not used.

*Sharing.* Any number of processes may share a folder. A block is written to a temporary file that
is then renamed, so readers see only complete blocks. Files are not synced. If a crash damages a
block, its checksum is wrong, and the block is fetched again.

*Eviction.* Whenever a process has written 1/20 of the size limit, it deletes the least recently
used blocks until the cache takes at most 19/20 of the limit. Between two evictions, a process does
not notice the blocks that other processes write. So with n processes, the cache may exceed the
limit by (n - 1)/20 of the limit.
"""

import hashlib
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import OptionInvalid
from .backend import crc32c
from .commit import FileRecord
from .paths import RemotePath
from .requests import REQUEST_BYTES, requests

FOLDER_VARIABLE = "MOA_DATA_CACHE_DIR"
SIZE_VARIABLE = "MOA_DATA_CACHE_GB"
DEFAULT_GB = 100.0
# Size of a block in bytes. A sequence consists of many blocks of this size. So smaller blocks would
# hardly reduce the number of bytes that are read, but increase the number of files.
BLOCK_BYTES = 1 << 20
_CRC = struct.Struct("<I")
_FREED_SHARE = 20


class RemoteFile:
    """Reads byte ranges of a remote file.

    Args:
        path: path of the file.
        record: size and checksum that the commit lists for the file.
        cache: cache on a local disk, which all files of a store share. If the argument is None, the
            file is read without a cache.
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
        """Fill ``buffer`` (uint8) with the bytes of this file from ``offset`` on.

        Returns:
            The number of bytes read. It is less than ``len(buffer)`` at the end of the file.
        """
        (data,) = fetch_ranges([(self, offset, offset + len(buffer))])
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)


# Ranges of bytes to read: (file, start, stop) for each range, in remote files of one store.
Ranges = Sequence[tuple[RemoteFile, int, int]]


def fetch_ranges(ranges: Ranges) -> list[memoryview]:
    """Fetch byte ranges with concurrent requests.

    If a file ends before the end of a range, the result for this range is shorter.
    """
    cache = ranges[0][0].cache
    return _request(ranges) if cache is None else cache.read(ranges)


def _request(ranges: Ranges) -> list[memoryview]:
    bucket = ranges[0][0].path.bucket
    return bucket.read_ranges([(file.path.key, start, stop) for file, start, stop in ranges])


class ReadCache:
    """A cache of blocks of remote files in a local folder. Several processes may share the folder.

    A pickled cache contains only the path of the folder and the size limit.

    Args:
        folder: folder of the cache. It is created when the first block is written.
        max_bytes: upper bound on the total size of all blocks.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.max_bytes = max_bytes
        self._counting = threading.Lock()
        # Number of bytes written since the last eviction. The initial value is so large that the
        # first new block causes an eviction.
        self._n_written = max_bytes

    def __reduce__(self) -> "tuple[type[ReadCache], tuple[Path, int]]":
        return (ReadCache, (self.folder, self.max_bytes))

    def read(self, ranges: Ranges) -> list[memoryview]:
        """Return the bytes of several ranges. Fetch missing blocks and add them to the cache."""
        # Several ranges may need the same block. Load each block once.
        wanted: dict[_Block, None] = {}
        for file, start, stop in ranges:
            wanted |= dict.fromkeys(_blocks(file, start, stop))
        blocks = dict(zip(wanted, requests().map(self._load, wanted), strict=True))
        missing = [block for block, data in blocks.items() if not data]
        if missing:
            fetched = _request([(block.file, *block.span) for block in missing])
            for block, content in zip(missing, fetched, strict=True):
                blocks[block] = bytes(content)
        for _ in requests().map(lambda block: self._keep(block, blocks[block]), missing):
            pass
        contents: list[memoryview] = []
        for file, start, stop in ranges:
            range_blocks = [blocks[block] for block in _blocks(file, start, stop)]
            contents.append(_cut(range_blocks, start, stop))
        return contents

    def _path(self, block: "_Block") -> Path:
        digest = block.file.digest
        return self.folder / "blocks" / digest[:2] / f"{digest}-{block.number:06d}"

    def _load(self, block: "_Block") -> bytes:
        """Read a block from the cache. The result is empty if the block is missing or damaged."""
        path = self._path(block)
        start, stop = block.span
        with suppress(OSError):
            content = path.read_bytes()
            data = content[: -_CRC.size]
            crc = content[-_CRC.size :]
            if len(data) == stop - start and _CRC.pack(crc32c(data)) == crc:
                # Mark the cached block as recently used, so that other blocks are evicted first.
                os.utime(path)
                return data
        return b""

    def _keep(self, block: "_Block", data: bytes) -> None:
        """Write a block to the cache. After an error (such as a full disk), the block is skipped."""
        start, stop = block.span
        n_bytes = len(data) + _CRC.size
        if len(data) != stop - start or n_bytes > self.max_bytes:
            # Do not cache this block. Either the cache is smaller than one block, or the file is
            # shorter than its commit says. In the second case, the reader of the file will raise an
            # error.
            return
        path = self._path(block)
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
        """Count a new block of ``n_bytes``, and evict old blocks from time to time.

        Blocks are evicted each time this process has written 1/20 of the size limit of the cache.
        """
        share = self.max_bytes // _FREED_SHARE
        self._n_written += n_bytes
        if self._n_written <= share:
            return
        self._n_written = n_bytes
        blocks = sorted(self._found())
        n_used = sum(size for _, size, _ in blocks)
        for _, size, path in blocks:
            if n_used <= self.max_bytes - max(share, n_bytes):
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            n_used -= size

    def _found(self) -> Iterator[tuple[float, int, str]]:
        """Yield the time of last use, the size in bytes and the path of every cached block."""
        with suppress(FileNotFoundError):
            for folder in os.scandir(self.folder / "blocks"):
                for entry in os.scandir(folder):
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        yield status.st_mtime, status.st_size, entry.path


def cache_at(folder: str | None = None, n_gb: float | None = None) -> ReadCache | None:
    """Return a read cache. Environment variables replace arguments that are None.

    Args:
        folder: folder of the cache. If the argument is None, the variable ``MOA_DATA_CACHE_DIR``
            is used.
        n_gb: size limit of the cache in GB. If the argument is None, the variable
            ``MOA_DATA_CACHE_GB`` is used, or 100 if it is not set.

    Returns:
        The cache, or None if neither the argument nor the variable gives a folder.

    Raises:
        OptionInvalid: the size is not a positive number.
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
            f"{SIZE_VARIABLE} is {text!r}, expected the size of the cache as a number of gigabytes "
            "above 0."
        ) from error
    return ReadCache(folder, int(n_gb * 1e9))


class _Block(NamedTuple):
    """A block: a range of a remote file that is cached as a whole.

    A block has BLOCK_BYTES bytes. The last block of a file may be shorter.
    """

    file: RemoteFile
    number: int

    @property
    def span(self) -> tuple[int, int]:
        """Offsets in the file: the first byte of the block, and its end (exclusive)."""
        start = self.number * BLOCK_BYTES
        return start, min(start + BLOCK_BYTES, self.file.n_bytes)


def _blocks(file: RemoteFile, start: int, stop: int) -> list[_Block]:
    """List the blocks that contain the bytes [start, stop) of a file."""
    if start == stop:
        return []
    end = -(-min(stop, file.n_bytes) // BLOCK_BYTES)
    return [_Block(file, number) for number in range(start // BLOCK_BYTES, end)]


def _cut(blocks: Sequence[bytes], start: int, stop: int) -> memoryview:
    """Return the bytes [start, stop) of a file, given the consecutive blocks that contain them.

    If the file ends before ``stop``, the result is shorter.
    """
    skipped = start % BLOCK_BYTES
    n_bytes = max(0, stop - start)
    data = blocks[0] if len(blocks) == 1 else b"".join(blocks)
    return memoryview(data)[skipped : skipped + n_bytes]
