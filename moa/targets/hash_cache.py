"""The sha256 of large files, kept between runs: reading 16 GB of weights takes longer than most answers.

A digest is kept under the file's path, size, times and inode, in ``$XDG_CACHE_HOME/moa-data/sha256`` (by default in
``~/.cache``). Whatever changes a file changes one of them; the time of the last status change cannot be set by hand.
"""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOCK_BYTES = 8 << 20
_SETTLED_S = 2.0
"""A file that changed less than this before it was hashed could change again within one tick of its clock."""


def file_sha256(path: Path, on_read: Callable[[int], object] | None = None) -> str:
    """Return the sha256 of a file's bytes in hex.

    A file of the Hub's cache is a link to a blob that is named by its sha256, so that nothing is read.

    Args:
        on_read: called with the bytes that have been read so far.
    """
    real = path.resolve()
    if path.is_symlink() and real.parent.name == "blobs" and _SHA256.fullmatch(real.name):
        return real.name
    before = real.stat()
    state = (str(real), before.st_size, before.st_mtime_ns, before.st_ctime_ns, before.st_dev, before.st_ino)
    kept = cache_folder() / hashlib.sha256("\0".join(map(str, state)).encode()).hexdigest()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if _SHA256.fullmatch(known := kept.read_text()):
            return known
    with real.open("rb") as stream:
        digest = _sha256_of(stream, on_read)
        after = os.fstat(stream.fileno())
    is_unchanged = (after.st_size, after.st_mtime_ns, after.st_ctime_ns) == state[1:4]
    if is_unchanged and time.time() - max(after.st_mtime, after.st_ctime) > _SETTLED_S:
        _keep(kept, digest)
    return digest


def _sha256_of(stream: BinaryIO, on_read: Callable[[int], object] | None) -> str:
    digest = hashlib.sha256()
    while block := stream.read(_BLOCK_BYTES):
        digest.update(block)
        if on_read:
            on_read(stream.tell())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Return the folder that holds the digests; it need not be there."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "moa-data" / "sha256"


def _keep(path: Path, digest: str) -> None:
    """Write a digest in one step; without room or rights it is computed again next time."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(digest)
        partial.replace(path)
