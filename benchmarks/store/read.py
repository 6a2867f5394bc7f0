"""Measures reading batches from this store and from other formats.

np.memmap of raw bfloat16 values is the upper bound of the speed. Every format holds the same
sequences and fills the same padded batch in preallocated memory. Before a format is timed, its
values are checked bit for bit. The formats take turns in one process, so that other work on the
machine slows all of them. Therefore, compare the ratios, which are computed for each turn. MB are
10^6 bytes of raw bfloat16 values without padding.

    python -m benchmarks.store.read --source STORE [--mb 300] [--batch 32] [--out FOLDER]
    python -m benchmarks.store.read --shape llama-3-8b --mb 500 --batch 8
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit.harness import run
from benchmarks.store import read_data
from benchmarks.store.read_formats import FORMATS, Format, Out, Read

CEILING = FORMATS[0].name
CASES = ("random all", "random layer", "random hidden", "epoch all")
"""Measured cases, as the order of the sequences and the fields that are read.

All files are in the page cache.
"""

Timing = dict[str, dict[str, list[float]]]


def batches(
    data: read_data.Data, case: str, batch: int, n_batches: int, turn: int
) -> list[np.ndarray]:
    """Return the rows of each batch. Random batches of a turn are the same for all formats."""
    n = len(data.lengths)
    order = (
        np.arange(n)
        if case.startswith("epoch")
        else np.random.default_rng([7, turn]).permutation(n)
    )
    cut = [order[start : start + batch] for start in range(0, n - batch + 1, batch)] or [order]
    return cut if case.startswith("epoch") else cut[:n_batches]


def buffers(data: read_data.Data, what: str, batch: int) -> Out:
    """Allocate memory for a batch of the longest sequences, and write to it once."""
    rows, longest = min(batch, len(data.lengths)), int(data.lengths.max())
    kv_shape = (1, *data.kv.shape[2:]) if what == "layer" else data.kv.shape[1:]
    out = {"kv": (rows, longest, *kv_shape), "hidden/last": (rows, longest, data.hidden.shape[1])}
    names = {"all": list(out), "layer": ["kv"], "hidden": ["hidden/last"]}[what]
    return {name: np.full(out[name], 1, np.uint16) for name in names}


def cut(out: Out, data: read_data.Data, rows: np.ndarray) -> Out:
    """Return views of the beginning of the memory with the padded shape of this batch.

    The sequences of a view are adjacent in memory.
    """
    longest = int(data.lengths[rows].max())
    small = {}
    for name, array in out.items():
        shape = (len(rows), longest, *array.shape[2:])
        small[name] = array.reshape(-1)[: int(np.prod(shape))].reshape(shape)
    return small


def check(read: Read, data: read_data.Data, rows: np.ndarray, name: str) -> None:
    """Exit if a format reads wrong values."""
    for what in ("all", "layer", "hidden"):
        out = cut(buffers(data, what, len(rows)), data, rows)
        read(rows, what, out)
        for field, array in out.items():
            source = (
                data.hidden if field != "kv" else data.kv[:, -1:] if what == "layer" else data.kv
            )
            for b, row in enumerate(rows.tolist()):
                n, start = data.lengths[row], data.starts[row]
                if (
                    not np.array_equal(array[b, :n], source[start : start + n])
                    or array[b, n:].any()
                ):
                    raise SystemExit(
                        f"{name} returns wrong values for {field} ({what}) of sequence {row}."
                    )


def raw_bytes(data: read_data.Data, what: str, rows: list[np.ndarray]) -> int:
    """Return the size in bytes of the values to read, without padding."""
    n_tokens = sum(int(data.lengths[part].sum()) for part in rows)
    kv, hidden, n_layers = int(data.kv[0].nbytes), int(data.hidden[0].nbytes), int(data.kv.shape[1])
    return n_tokens * {"all": kv + hidden, "layer": kv // n_layers, "hidden": hidden}[what]


def timed(read: Read, data: read_data.Data, what: str, rows: list[np.ndarray], out: Out) -> float:
    """Read the batches, and return MB/s of raw values."""
    views = [cut(out, data, part) for part in rows]
    began = time.perf_counter()
    for part, view in zip(rows, views, strict=True):
        read(part, what, view)
    return raw_bytes(data, what, rows) / (time.perf_counter() - began) / 1e6


def in_turns(
    formats: list[Format], folder: Path, data: read_data.Data, options: argparse.Namespace
) -> Timing:
    """Read with all formats in turn, ``options.turns`` times."""
    folders = {
        entry.name: folder / (entry.shares or entry.name.replace(" ", "-")) for entry in formats
    }
    found: Timing = {case: {entry.name: [] for entry in formats} for case in options.cases}
    for case in options.cases:
        _, what = case.split()
        out = buffers(data, what, options.batch)
        opened = {entry.name: entry.open(folders[entry.name], data) for entry in formats}
        for turn in range(options.turns + 1):  # The first turn opens files and is not counted.
            rows = batches(data, case, options.batch, options.batches, turn)
            for entry in formats if turn % 2 else reversed(formats):
                read_data.read_all(folders[entry.name])
                result = timed(opened[entry.name], data, what, rows, out)
                if turn:
                    found[case][entry.name].append(result)
    return found


def summarize(found: Timing) -> dict[str, dict[str, dict[str, float]]]:
    """Return medians over the turns. Ratios are computed within each turn."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for case, formats in found.items():
        figures[case] = {}
        for name, speeds in formats.items():
            ratios = [mb / ceiling for mb, ceiling in zip(speeds, formats[CEILING], strict=True)]
            figures[case][name] = {
                "mb_per_s": statistics.median(speeds),
                "to_memmap": statistics.median(ratios),
                "to_memmap_low": min(ratios),
                "to_memmap_high": max(ratios),
            }
    return figures


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Write, check and read all formats that are installed."""
    n_bytes = options.mb * 10**6
    data = (
        read_data.load(options.source, n_bytes)
        if options.source
        else read_data.draw(options.shape, n_bytes)
    )
    wanted = [
        entry
        for entry in FORMATS
        if not options.formats or any(part in entry.name for part in options.formats)
    ]
    formats = [entry for entry in wanted if entry.is_installed]
    if FORMATS[0] not in formats:
        formats.insert(0, FORMATS[0])
    raw, some = (
        data.kv.nbytes + data.hidden.nbytes,
        np.random.default_rng(1).permutation(len(data.lengths))[:4],
    )
    stored = {}
    with tempfile.TemporaryDirectory(prefix="moa-data-read-", dir=options.folder) as name:
        folder = Path(name)
        for entry in formats:
            location = folder / (entry.shares or entry.name.replace(" ", "-"))
            if not location.exists():
                location.mkdir()
                entry.write(data, location)
            stored[entry.name] = (
                sum(path.stat().st_size for path in read_data.files_below(location)) / raw
            )
            check(entry.open(location, data), data, some, entry.name)
        found = in_turns(formats, folder, data, options)
    shape = {
        "n_sequences": len(data.lengths),
        "n_tokens": int(data.lengths.sum()),
        "kv_shape": data.kv.shape[1:],
    }
    return {"figures": summarize(found), "turns": found, "stored": stored, "data": shape}


if __name__ == "__main__":
    run(
        lambda options: f"read-{'store' if options.source else options.shape}", measure,
        source=Path, mb=300, batch=32, shape={"choices": read_data.SHAPES, "default": "small"},
        batches=2, turns=5, folder=Path,
        cases={"nargs": "+", "choices": CASES, "default": list(CASES)}, formats={"nargs": "+"},
    )  # fmt: skip
