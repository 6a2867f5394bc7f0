"""Measures how long it takes to open a store of many parts, for writing and for reading, and counts files and folders.

The parts have the files of Llama-3-8B in parts of 65,536 tokens, with commits that say their sizes; the files hold next
to nothing, for opening a store does not read them.

    python -m benchmarks.store.start [--parts 3772] [--turns 3] [--out FOLDER]
"""

import argparse
import os
import statistics
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.kit.harness import in_turn, run
from benchmarks.kit.stores import recipe
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.commit import PartCommit
from moa_data.storage.grid import array_grid
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.summary import summarize_store
from moa_data.storage.schema import (
    PARTS_NAME,
    StoreManifest,
    commit_path,
    hidden_field,
    kv_field,
    response_mask_field,
    tokens_field,
)
from moa_data.storage.shard import FileRecord
from moa_data.storage.write.store import StoreWriter

PART_TOKENS = 65_536
SEQUENCES_PER_PART = 64
FIELDS = (tokens_field(), response_mask_field(), kv_field(32, 8, 128), hidden_field("last", 4096))


def filled(n_parts: int) -> tuple[StoreManifest, pa.Table]:
    """Manifest and plan of parts that are filled to the brim by equal sequences."""
    lengths = [PART_TOKENS // SEQUENCES_PER_PART] * (n_parts * SEQUENCES_PER_PART)
    return recipe(FIELDS, lengths, PART_TOKENS, target={"vocab_size": 128_256})


def part_files(part: int, n_parts: int) -> dict[str, bytes]:
    """Name -> content of the files of a part; of shards a few bytes."""
    arrays = tuple(StoreCodec("lossless", FIELDS).arrays)
    files: dict[str, bytes] = {}
    for array in arrays:
        grid = array_grid(array, n_parts, PART_TOKENS)
        files |= {f"{array.name}/{grid.shard_key(part, number)}": b"shard" for number in range(grid.shards_per_part)}
    return files


def make(store: Path, n_parts: int) -> dict[str, float]:
    """Make a store whose parts are all committed; return what each part has in files and folders."""
    manifest, plan = filled(n_parts)
    StoreWriter.create_or_resume(store, manifest, plan).close()
    before = count(store / "parts")
    for part in range(n_parts):
        records = {}
        for name, content in part_files(part, n_parts).items():
            path = store / PARTS_NAME / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            records[name] = FileRecord(len(content), zlib.crc32(content))
        commit = PartCommit(part, SEQUENCES_PER_PART, PART_TOKENS, PART_TOKENS, dict(sorted(records.items())))
        commit_path(store, part).write_bytes(commit.to_json())
    after = count(store / "parts")
    names = ("files_per_part", "folders_per_part")
    return {name: (a - b) / n_parts for name, a, b in zip(names, after, before, strict=True)}


def count(folder: Path) -> tuple[int, int]:
    """Files and folders below a folder."""
    found = [(len(names), len(folders)) for _, folders, names in os.walk(folder)]
    return sum(files for files, _ in found), sum(folders for _, folders in found)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Make a store that nothing is missing of, and start each of three commands on it in turns."""
    with tempfile.TemporaryDirectory(prefix="moa-data-start-", dir=options.folder) as folder:
        store = Path(folder) / "store"
        layout = make(store, options.parts)
        manifest, plan = filled(options.parts)
        works: dict[str, Callable[[], object]] = {
            "open for writing": lambda: StoreWriter.create_or_resume(store, manifest, plan).close(),
            "open for reading": lambda: ActivationStore(store).close(),
            "inspect": lambda: summarize_store(store),
        }
        turns = in_turn(works, options.turns, on_the_wall=True)
    medians = {f"{name} s": round(statistics.median(taken), 3) for name, taken in turns.items()}
    return {"figures": {"version 2": {"n_parts": options.parts} | layout | medians}}


if __name__ == "__main__":
    run("start", measure, parts=3772, turns=3, folder=Path)
