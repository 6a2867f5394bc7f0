"""The lossless byte chain of every stored array: an inner chunk's values to the bytes in the shard, and back.

A chain of codecs from the Zarr v3 specification, so that any Zarr library undoes it: ``bytes`` (little endian),
``blosc`` (zstd level 1, byte shuffle, one block of up to 1 MiB), ``crc32c``.

Most blosc frames are made by hand, smaller and faster than blosc's own, which spends its bits on short matches::

    | version 2 | zstd format 1 | flags | typesize | n_bytes u32 | block_bytes u32 | frame_bytes u32 |     header
    | offset of the one block: u32 |
    | n_bytes u32, plane 0 | n_bytes u32, plane 1 | ...                                                  one block

The block is cut into one plane for each byte of the values (that is what shuffling does). The low byte of a bfloat16 or
float16 activation is noise, so it is stored as it is; the high byte (sign and exponent, or a quantised code) has no
repeats worth a match but few values, so zstd is told to do nothing but entropy-code it.

Where blosc makes a frame, it is one block too: its default of many small ones costs 0.78 of raw instead of 0.69, and
three times the time to decode.
"""

import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numcodecs.blosc
import numpy as np
import zstandard
from zarr.codecs import BloscCodec, Crc32cCodec

from ..errors import StoreDamaged
from .backend import crc32c, scratch_bytes

# Blosc's own threads would make the order of blocks depend on timing and do not survive a fork;
# callers run threads.
numcodecs.blosc.use_threads = False

BLOSC_BLOCK_BYTES = 1 << 20
CRC_BYTES = 4
BYTE_CHAIN = ("bytes:little", f"blosc:zstd:level=1:shuffle:blocksize={BLOSC_BLOCK_BYTES}", "crc32c")
"""The chain in words, as ``store.json`` records it."""

# raw bytes and frame bytes; what lies between them is blosc's own business
_BLOSC_HEADER = struct.Struct("<4xI4xI")
_CRC = struct.Struct("<I")
_CRC_OF_CHECKED = 0x48674BC7
"""CRC-32C of any bytes that end with their own CRC-32C, little endian: what makes a chunk whole."""


def zarr_codecs(dtype: np.dtype) -> tuple[BloscCodec, Crc32cCodec]:
    """Return the byte chain after ``bytes`` as zarr-python codecs, for an array's metadata."""
    blosc = BloscCodec(
        typesize=dtype.itemsize,
        cname="zstd",
        clevel=1,
        shuffle="shuffle",
        blocksize=BLOSC_BLOCK_BYTES,
    )
    return blosc, Crc32cCodec()


def encode_chunk(values: np.ndarray) -> bytes:
    """Encode one inner chunk, of any layout in memory, to its bytes in the shard, checksum included."""
    contiguous = np.ascontiguousarray(values)
    little = contiguous.astype(contiguous.dtype.newbyteorder("<"), copy=False)
    pieces = encode_frame(little)
    if pieces is None:
        pieces = [
            numcodecs.blosc.compress(
                little,
                b"zstd",
                1,
                shuffle=1,
                blocksize=BLOSC_BLOCK_BYTES,
                typesize=little.dtype.itemsize,
            )
        ]
    crc = 0
    for piece in pieces:
        crc = crc32c(piece, crc)
    ending: list[Any] = [crc.to_bytes(CRC_BYTES, "little")]
    return b"".join(pieces + ending)


def decode_chunk(buffer: np.ndarray, out: np.ndarray) -> None:
    """Check one inner chunk, uint8 [n_bytes] with its checksum, and decode it into a C-contiguous array."""
    if len(buffer) < CRC_BYTES + _BLOSC_HEADER.size:
        raise StoreDamaged(
            f"chunk of {len(buffer)} bytes is shorter than its own header and checksum"
        )
    n_bytes = len(buffer) - CRC_BYTES
    # After a big decompression Python is out of the caches, so few steps: no slice, one checksum of
    # the whole.
    if crc32c(buffer) != _CRC_OF_CHECKED:
        got = crc32c(buffer[:n_bytes])
        (expected,) = _CRC.unpack_from(buffer.data, n_bytes)
        raise StoreDamaged(f"chunk checksum is {got:#010x}, expected {expected:#010x}")
    n_raw_bytes, n_frame_bytes = _BLOSC_HEADER.unpack_from(buffer.data)
    if n_raw_bytes != out.nbytes or n_frame_bytes != n_bytes:  # blosc believes its header
        raise StoreDamaged(
            f"chunk decodes {n_frame_bytes} bytes to {n_raw_bytes}, expected {n_bytes} bytes and {out.nbytes}"
        )
    try:
        numcodecs.blosc.decompress(buffer, out)
    except (RuntimeError, ValueError) as error:
        raise StoreDamaged(f"chunk cannot be decompressed: {error}") from error


_HEADER = struct.Struct("<BBBBIII")
_U32 = struct.Struct("<I")
_SHUFFLED_ZSTD = 0x81
_UNSPLIT_ZSTD = 0x90
_MIN_PLANE_BYTES = 128  # blosc splits a block only where each plane has at least 128 bytes
_WORD_BYTES = 8
_N_SAMPLE_COLUMNS = 4
_N_SAMPLE_ROWS = 64
# Matches cost speed, and cost size where they are few: a chunk of eight layers in which layer 0
# repeats is below this.
_REPEATED_SHARE = 1 / 12

_local = threading.local()


def encode_frame(values: np.ndarray) -> list[bytes | np.ndarray] | None:
    """Encode C-contiguous, little endian values, whose axis 0 counts tokens or blocks of them, as one frame.

    Returns the frame in pieces, which are valid until the next call on this thread; or None where blosc's own encoder
    serves better: items of more than two bytes, tiny or narrow arrays, and values that repeat from row to row, as those
    of layer 0 do, which depend on the token alone.
    """
    planes = _planes(values)
    if planes is None:
        return None
    low, high = planes
    repeated, is_noise = _sample(low, len(values))
    if repeated:
        return None
    if values.itemsize == 1:
        return _frame(values, _UNSPLIT_ZSTD, [_literals(low)])
    return _frame(values, _SHUFFLED_ZSTD, [low if is_noise else _literals(low), _literals(high)])


def _planes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return low and high bytes (the same array for one-byte values), or None for what is not encoded here."""
    if values.itemsize > 2 or values.ndim < 2 or not len(values):
        return None
    if values.size < _MIN_PLANE_BYTES or values.size // len(values) < _WORD_BYTES:
        return None
    if values.itemsize == 1:
        low = values.view(np.uint8).reshape(-1)
        return low, low
    words = values.view(np.uint16).reshape(-1)
    n = len(words)
    # Fresh arrays of this size would come from the kernel page by page, at more than the cost of
    # coding them.
    scratch = scratch_bytes("planes", 2 * n)
    low = scratch[:n]
    high = scratch[n:]
    np.copyto(low, words, casting="unsafe")
    # Words read from the second byte on have the high bytes below: half the time of shifting all of
    # them.
    shifted = words.view(np.uint8)[1:-1].view("<u2")
    np.copyto(high[:-1], shifted, casting="unsafe")
    high[-1] = words[-1] >> 8
    return low, high


def _sample(plane: np.ndarray, n_rows: int) -> tuple[bool, bool]:
    """Say of some words of a plane, uint8 [n_rows * width >= 8], whether they repeat, and whether they are noise."""
    width = len(plane) // n_rows
    n_words = width // _WORD_BYTES
    rows = plane.reshape(n_rows, width)[:: -(-n_rows // _N_SAMPLE_ROWS)]
    if width % _WORD_BYTES:
        rows = np.ascontiguousarray(rows[:, : n_words * _WORD_BYTES])
    step = -(-n_words // _N_SAMPLE_COLUMNS)
    sample = rows.view(np.uint64)[:, step // 2 :: step].tobytes()
    # Plain Python here: what a NumPy call costs where its code has left the caches, this costs in
    # all.
    words = memoryview(sample).cast("Q").tolist()
    n_zeros = words.count(0)  # padding
    n_same = len(words) - n_zeros - len(set(words) - {0})
    # 256 bytes of noise have about 162 different values.
    n_values = len(set(sample[:: max(1, len(words) // 32)][:256]))
    is_noise = (
        not n_zeros and n_values > 128 and plane[-_WORD_BYTES:].tobytes() != bytes(_WORD_BYTES)
    )
    return n_same > _REPEATED_SHARE * len(words), is_noise


def _literals(plane: np.ndarray) -> bytes | np.ndarray:
    """Entropy-code a plane, or return it where that does not make it smaller."""
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if compressor is None:
        parameters = zstandard.ZstdCompressionParameters(
            window_log=20, hash_log=6, chain_log=6, min_match=7, strategy=zstandard.STRATEGY_FAST
        )
        compressor = _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    packed = compressor.compress(plane.data)
    return packed if len(packed) < len(plane) else plane


def _frame(
    values: np.ndarray, flags: int, planes: list[bytes | np.ndarray]
) -> list[bytes | np.ndarray]:
    first_block = _HEADER.size + _U32.size
    n_bytes = first_block + sum(_U32.size + len(plane) for plane in planes)
    pieces: list[bytes | np.ndarray] = [
        _HEADER.pack(2, 1, flags, values.itemsize, values.nbytes, values.nbytes, n_bytes),
        _U32.pack(first_block),
    ]
    for plane in planes:
        pieces += [_U32.pack(len(plane)), plane]
    return pieces


_Result = TypeVar("_Result")

_AHEAD_PER_THREAD = 4
"""Tasks that wait for each thread: with fewer, threads wait where tasks take unequal time; more only hold memory."""


class EncodePool(AbstractContextManager["EncodePool"]):
    """Encodes chunks on threads.

    ``n_threads``: threads that encode; with 0 the caller's own thread encodes at once.
    """

    def __init__(self, n_threads: int = 0) -> None:
        # Tasks that may be under way in one shard before its writer waits for the oldest; this
        # bounds memory.
        self.n_ahead = _AHEAD_PER_THREAD * n_threads
        self.busy_s = 0.0  # seconds of CPU that encoding has taken, over all threads
        self._counting = threading.Lock()
        self._encoders = ThreadPoolExecutor(n_threads, "encode") if n_threads else None
        # Waiting for the disk takes a thread of its own: an encoder that waits encodes nothing.
        self._syncer = ThreadPoolExecutor(1, "sync") if n_threads else None

    def encode(self, chunks: Sequence[np.ndarray]) -> Future[list[bytes]]:
        """Start encoding chunks; their values must not change until the future is done."""
        return _start(self._encoders, lambda: self._encode(chunks))

    def sync(self, task: Callable[[], None]) -> Future[None]:
        """Start a task that waits for the disk; such tasks run one after the other."""
        return _start(self._syncer, task)

    def close(self) -> None:
        """Drop the tasks that wait, whose futures raise CancelledError, and end the threads."""
        for executor in (self._encoders, self._syncer):
            if executor is not None:
                # A sync closes its file, so it is never dropped.
                executor.shutdown(wait=True, cancel_futures=executor is self._encoders)

    def _encode(self, chunks: Sequence[np.ndarray]) -> list[bytes]:
        began_s = time.thread_time()
        encoded = [encode_chunk(chunk) for chunk in chunks]
        with self._counting:
            self.busy_s += time.thread_time() - began_s
        return encoded

    def __exit__(self, *_: object) -> None:
        self.close()


def _start(executor: ThreadPoolExecutor | None, task: Callable[[], _Result]) -> Future[_Result]:
    if executor is not None:
        return executor.submit(task)
    done: Future[_Result] = Future()
    done.set_result(task())
    return done
