"""Threads change nothing but the time: equal bytes, bounded memory, errors that arrive, an end that comes soon."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

from moa_data.storage import encoding
from moa_data.storage.chunk import encode_chunk
from moa_data.storage.encoding import EncodePool
from moa_data.storage.grid import array_grid
from moa_data.storage.schema import StoredArray
from moa_data.storage.shard import ShardWriter
from moa_data.storage.write.store import StoreWriter
from moa_data.tests.kit.stores import Recipe, read_tree

ARRAY = StoredArray("kv", "uint16", (4, 2048), ("token", "layer", "width"), layer_axis=1)  # 256 KiB a chunk


@pytest.mark.parametrize("n_threads", [1, 3])
def test_any_number_of_threads_gives_equal_bytes(store: Path, tmp_path: Path, recipe: Recipe, n_threads: int) -> None:
    other = tmp_path / "threads"
    opened = StoreWriter.create_or_resume(other, recipe.manifest, recipe.plan)
    with opened as writer, EncodePool(n_threads) as pool:
        for part in writer.pending_parts():
            with writer.part(part, pool) as out:
                for field in recipe.manifest.fields:
                    for row in out.sequences.to_pylist():
                        values = recipe.values(field, row).copy()
                        out.write(field.name, row["first_token"], values)
                        out.settle()
                        values[...] = 1  # what is settled may change
                out.commit()
    assert pool.busy_s > 0
    assert read_tree(other) == read_tree(store)


def draw_rows(n_rows: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 16, (n_rows * 64, 4, 2048)).astype(np.uint16)


def test_a_shard_holds_few_chunks_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer waits for the oldest chunks, however slow the encoders are."""
    n_begun, n_written, most = 0, 0, 0

    def counted(chunk: np.ndarray) -> bytes:
        nonlocal n_begun, most
        n_begun += 1
        most = max(most, n_begun - n_written)
        return encode_chunk(chunk)

    class Counting(ShardWriter):
        def _write(self, data: bytes) -> None:
            nonlocal n_written
            n_written += 1
            super()._write(data)

    monkeypatch.setattr(encoding, "encode_chunk", counted)
    values = draw_rows(12)
    with EncodePool(2) as pool:
        shard = Counting(tmp_path / "shard", array_grid(ARRAY, 1, len(values)), pool)
        for row in range(12):
            shard.append_row(values[row * 64 : (row + 1) * 64])
        shard.finish()[1].result()
    assert n_written == 12 * 4 + 1
    assert most <= 4 * (pool.n_ahead + 1)  # a task is four chunks


def blocked(pool: EncodePool, action: Callable[[], object]) -> None:
    """Do something while all threads of a pool are busy; they go on afterwards."""
    gate = threading.Event()
    for _ in range(pool.n_threads):
        assert pool._encoders is not None
        pool._encoders.submit(gate.wait)
    try:
        action()
    finally:
        gate.set()


def test_an_error_of_an_encoder_reaches_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: np.ndarray) -> bytes:
        raise MemoryError("no room for a chunk")

    monkeypatch.setattr(encoding, "encode_chunk", fail)
    values = draw_rows(1)
    with EncodePool(2) as pool:
        shard = ShardWriter(tmp_path / "shard", array_grid(ARRAY, 1, len(values)), pool)
        shard.append_row(values)
        for wait in (shard.settle, shard.finish):
            with pytest.raises(MemoryError, match="no room for a chunk"):
                wait()
        shard.abort()


def test_a_closed_pool_drops_what_waits(tmp_path: Path) -> None:
    values = draw_rows(1)
    pool = EncodePool(1)
    shard = ShardWriter(tmp_path / "shard", array_grid(ARRAY, 1, len(values)), pool)

    def close_soon() -> None:
        shard.append_row(values)
        closing.start()
        with pytest.raises(CancelledError):
            shard.settle()

    closing = threading.Thread(target=pool.close)
    blocked(pool, close_soon)
    closing.join()
    shard.abort()
