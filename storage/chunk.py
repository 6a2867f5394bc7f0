"""The byte chain: the lossless codecs that encode the inner chunks of every stored array to bytes.

The chain consists of three codecs of the Zarr v3 specification, so that any Zarr library can decode
the chunks: ``bytes`` (little endian), ``blosc`` (zstd level 1, byte shuffle, one block of up to
1 MiB) and ``crc32c``.

This module builds the blosc frames of most chunks itself. The blosc library would search for
repeated bytes and encode many short repetitions. For activations, the frames of this module are
smaller than the frames of the library, and take less time to encode and decode. They have the
standard format::

    | version 2 | zstd format 1 | flags | typesize | n_bytes u32 | block_bytes u32 |    header
    | frame_bytes u32 |
    | offset of the one block: u32 |
    | n_bytes u32, plane 0 | n_bytes u32, plane 1 | ...                                 one block

The byte shuffle splits the values into planes: plane i consists of byte i of every value. The low
byte of a bfloat16 or float16 activation is noise, so its plane is stored uncompressed. The high
byte contains the sign and most of the exponent. It has few distinct values, but its plane has no
long repetitions. The same holds for one-byte values, such as quantised codes. So for these planes,
zstd is configured to do only entropy coding.

If the blosc library encodes a chunk, the library is also configured to write one block. By default,
it would write many small blocks. The chunk would then take 0.78 of its raw size instead of 0.69,
and decoding would take three times as long.
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

# Turn off the threads of the blosc library. With its threads, the order of blocks in a frame would
# depend on timing, and the library would not work after a fork. Callers encode on several threads
# instead.
numcodecs.blosc.use_threads = False

BLOSC_BLOCK_BYTES = 1 << 20
CRC_BYTES = 4
BYTE_CHAIN = ("bytes:little", f"blosc:zstd:level=1:shuffle:blocksize={BLOSC_BLOCK_BYTES}", "crc32c")
"""The names of the codecs that encode every inner chunk, as ``store.json`` records them."""

# Reads two numbers of a blosc header: the number of raw bytes and the number of bytes of the frame.
# All other bytes of the header are skipped.
_BLOSC_HEADER = struct.Struct("<4xI4xI")
_CRC = struct.Struct("<I")
_CRC_OF_CHECKED = 0x48674BC7
"""The CRC-32C of a whole chunk that is not damaged.

A chunk ends with the CRC-32C (little endian) of the bytes before it. If data ends with its own
CRC-32C, the CRC-32C of all its bytes is always this number.
"""


def zarr_codecs(dtype: np.dtype) -> tuple[BloscCodec, Crc32cCodec]:
    """Return the ``blosc`` and ``crc32c`` codecs of zarr-python, for an array's metadata."""
    blosc = BloscCodec(
        typesize=dtype.itemsize,
        cname="zstd",
        clevel=1,
        shuffle="shuffle",
        blocksize=BLOSC_BLOCK_BYTES,
    )
    return blosc, Crc32cCodec()


def encode_chunk(values: np.ndarray) -> bytes:
    """Encode one inner chunk to the bytes that a shard contains, including the checksum.

    ``values`` may have any memory layout.
    """
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
    """Verify the checksum of one inner chunk, and decode the chunk.

    Args:
        buffer: the stored bytes including the checksum, uint8 [n_bytes].
        out: C-contiguous array that receives the values.

    Raises:
        StoreDamaged: the checksum or the size is wrong.
    """
    if len(buffer) < CRC_BYTES + _BLOSC_HEADER.size:
        raise StoreDamaged(
            f"a chunk has {len(buffer)} bytes, too few for its own header and checksum"
        )
    n_bytes = len(buffer) - CRC_BYTES
    # Compute the checksum of the whole buffer, including the stored checksum. Computing it without
    # the stored checksum would take more Python operations. Each Python operation is slow here,
    # because the decompression of the previous chunk has evicted the interpreter from the CPU
    # caches.
    if crc32c(buffer) != _CRC_OF_CHECKED:
        got = crc32c(buffer[:n_bytes])
        (expected,) = _CRC.unpack_from(buffer.data, n_bytes)
        raise StoreDamaged(f"the checksum of a chunk is {got:#010x}, expected {expected:#010x}")
    n_raw_bytes, n_frame_bytes = _BLOSC_HEADER.unpack_from(buffer.data)
    # Check the sizes in the header of the blosc frame, because the blosc library does not check
    # them.
    if n_raw_bytes != out.nbytes or n_frame_bytes != n_bytes:
        raise StoreDamaged(
            f"the header of a chunk gives its size as {n_frame_bytes} bytes encoded and "
            f"{n_raw_bytes} bytes decoded, expected {n_bytes} and {out.nbytes} bytes"
        )
    try:
        numcodecs.blosc.decompress(buffer, out)
    except (RuntimeError, ValueError) as error:
        raise StoreDamaged(f"a chunk cannot be decompressed: {error}") from error


_HEADER = struct.Struct("<BBBBIII")
_U32 = struct.Struct("<I")
_SHUFFLED_ZSTD = 0x81
_UNSPLIT_ZSTD = 0x90
# Blosc splits a block into planes only if each plane has at least 128 bytes.
_MIN_PLANE_BYTES = 128
_WORD_BYTES = 8
_N_SAMPLE_COLUMNS = 4
_N_SAMPLE_ROWS = 64
# A sample of the 8-byte words of each chunk is examined. If more than this share of the sampled
# words are repeated, the blosc library encodes the chunk, because the library searches for
# repetitions. For any other chunk, the search would take time and make the result larger. The limit
# is so high that this module also encodes a chunk of eight layers in which only the attention
# values of layer 0 repeat (equal tokens have equal values there).
_REPEATED_SHARE = 1 / 12

_local = threading.local()


def encode_frame(values: np.ndarray) -> list[bytes | np.ndarray] | None:
    """Encode values as one blosc frame.

    Args:
        values: C-contiguous, little endian. Each index along axis 0 is a token or a block of
            tokens.

    Returns:
        A list of buffers. Written one after another, they are the frame. The buffers are valid
        until the next call on this thread. If the caller should use the blosc library instead, the
        result is None. The library is better for items of more than two bytes, for tiny or narrow
        arrays, and for arrays in which many rows are equal. For example, equal tokens have equal
        attention values in the target's first layer.
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
    """Split values into a plane of their low bytes and a plane of their high bytes.

    For one-byte values, both planes are the same array. The result is None if the blosc library
    should encode the values.
    """
    if values.itemsize > 2 or values.ndim < 2 or not len(values):
        return None
    if values.size < _MIN_PLANE_BYTES or values.size // len(values) < _WORD_BYTES:
        return None
    if values.itemsize == 1:
        low = values.view(np.uint8).reshape(-1)
        return low, low
    words = values.view(np.uint16).reshape(-1)
    n = len(words)
    # Reuse a buffer. The operating system would map a new array of this size page by page, which
    # takes longer than the encoding.
    scratch = scratch_bytes("planes", 2 * n)
    low = scratch[:n]
    high = scratch[n:]
    np.copyto(low, words, casting="unsafe")
    # A cast from uint16 to uint8 keeps the low byte of a word. To get the high bytes with such a
    # cast, too, view the memory as little-endian 16-bit words that start one byte later. The low
    # byte of such a word is the high byte of a value. Shifting all values would take twice as long.
    shifted = words.view(np.uint8)[1:-1].view("<u2")
    np.copyto(high[:-1], shifted, casting="unsafe")
    high[-1] = words[-1] >> 8
    return low, high


def _sample(plane: np.ndarray, n_rows: int) -> tuple[bool, bool]:
    """Examine a sample of a plane. The plane contains one byte of every value.

    Args:
        plane: uint8 [n_rows * width], at least 8 bytes.
        n_rows: number of rows in the plane.

    Returns:
        Whether many 8-byte words of the sample are repeated, and whether the bytes of the sample
        are noise.
    """
    width = len(plane) // n_rows
    n_words = width // _WORD_BYTES
    rows = plane.reshape(n_rows, width)[:: -(-n_rows // _N_SAMPLE_ROWS)]
    if width % _WORD_BYTES:
        rows = np.ascontiguousarray(rows[:, : n_words * _WORD_BYTES])
    step = -(-n_words // _N_SAMPLE_COLUMNS)
    sample = rows.view(np.uint64)[:, step // 2 :: step].tobytes()
    # Count in plain Python. This takes no longer than a single NumPy call, because the code of
    # NumPy is not in the CPU caches at this time.
    words = memoryview(sample).cast("Q").tolist()
    n_zeros = words.count(0)  # Words that are zero are padding, and do not count as repeated.
    n_same = len(words) - n_zeros - len(set(words) - {0})
    # 256 random bytes have about 162 distinct values. So more than 128 distinct values are taken as
    # a sign of noise.
    n_values = len(set(sample[:: max(1, len(words) // 32)][:256]))
    is_noise = (
        not n_zeros and n_values > 128 and plane[-_WORD_BYTES:].tobytes() != bytes(_WORD_BYTES)
    )
    return n_same > _REPEATED_SHARE * len(words), is_noise


def _literals(plane: np.ndarray) -> bytes | np.ndarray:
    """Entropy-code a plane. The plane contains one byte of every value.

    If the encoded plane would not be smaller, the plane is returned unchanged.
    """
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
"""Number of queued tasks per thread.

Tasks take unequal time. With fewer queued tasks, some threads would wait for work. More queued
tasks would only take memory.
"""


class EncodePool(AbstractContextManager["EncodePool"]):
    """Encodes chunks on threads.

    Args:
        n_threads: number of encoding threads. If it is 0, the calling thread encodes immediately.
    """

    def __init__(self, n_threads: int = 0) -> None:
        # Upper bound on the number of unfinished encoding tasks of one shard. The bound limits the
        # memory. When a shard has this number of tasks, the writer of the shard waits for the
        # oldest task.
        self.n_ahead = _AHEAD_PER_THREAD * n_threads
        self.busy_s = 0.0  # CPU time of encoding in seconds, summed over all threads.
        self._counting = threading.Lock()
        self._encoders = ThreadPoolExecutor(n_threads, "encode") if n_threads else None
        # A separate thread syncs files to the disk, so that no encoding thread waits for the disk.
        self._syncer = ThreadPoolExecutor(1, "sync") if n_threads else None

    def encode(self, chunks: Sequence[np.ndarray]) -> Future[list[bytes]]:
        """Start encoding chunks. Return a future: its result is the encoded bytes of each chunk.

        The arrays must not change until the future is done.
        """
        return _start(self._encoders, lambda: self._encode(chunks))

    def sync(self, task: Callable[[], _Result]) -> Future[_Result]:
        """Start a task that syncs a file to the disk, and return a future of its result.

        Tasks run one after another.
        """
        return _start(self._syncer, task)

    def close(self) -> None:
        """Cancel the queued encoding tasks and end the threads.

        The futures of cancelled tasks raise CancelledError.
        """
        for executor in (self._encoders, self._syncer):
            if executor is not None:
                # Sync tasks are never cancelled, because they close their files.
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
