"""The formats that ``read.py`` compares. Each fills the same padded batch from its own files.

A format has two functions. ``write(data, folder)`` writes its files. ``open(folder, data)`` opens
the files, and returns the function ``read(rows, what, out)``, which fills a batch. ``what`` is
"all" (keys, values, hidden states), "layer" (keys and values of the last layer) or "hidden".
"""

import gzip
import importlib.util
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch

from benchmarks.store.read_data import Data, write_store
from moa_data.storage.read.store import ActivationStore

Out = dict[str, np.ndarray]
Read = Callable[[np.ndarray, str, Out], None]


@dataclass(frozen=True)
class Format:
    """A format in the comparison.

    Attributes:
        name: Name in tables.
        write: Writes the files.
        open: Opens the files and returns a function that reads a batch.
        shares: Name of another format, if this format reads the files of the other one.
        needs: Module that must be installed.
    """

    name: str
    write: Callable[[Data, Path], None]
    open: Callable[[Path, Data], Read]
    shares: str = ""
    needs: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether the format can be measured."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None


def copy_into(out: np.ndarray, b: int, values: np.ndarray) -> None:
    """Copy a sequence into a row of the batch, and zero the padding."""
    out[b, : len(values)] = values
    out[b, len(values) :] = 0


def per_sequence(
    sequence: Callable[[int, str], tuple[np.ndarray | None, np.ndarray | None]],
) -> Read:
    """Return a function that reads a batch one sequence after the other."""

    def read(rows: np.ndarray, what: str, out: Out) -> None:
        for b, row in enumerate(rows.tolist()):
            kv, hidden = sequence(row, what)
            if kv is not None and what != "hidden":
                copy_into(out["kv"], b, kv)
            if hidden is not None and what != "layer":
                copy_into(out["hidden/last"], b, hidden)

    return read


def write_raw(data: Data, folder: Path) -> None:
    """Write two flat files."""
    data.kv.tofile(folder / "kv.u16")
    data.hidden.tofile(folder / "hidden.u16")


def open_raw(folder: Path, data: Data) -> Read:
    """Open np.memmap, the upper bound. Nothing is decoded."""
    kv = np.memmap(folder / "kv.u16", np.uint16, "r", shape=data.kv.shape)
    hidden = np.memmap(folder / "hidden.u16", np.uint16, "r", shape=data.hidden.shape)
    starts, lengths = data.starts, data.lengths

    def sequence(row: int, what: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        span = slice(starts[row], starts[row] + lengths[row])
        return (kv[span, -1:] if what == "layer" else kv[span]), hidden[span]

    return per_sequence(sequence)


def sequences(data: Data) -> Iterable[dict[str, torch.Tensor]]:
    """Yield the sequences as bfloat16 tensors."""
    for start, n in zip(data.starts.tolist(), data.lengths.tolist(), strict=True):
        pair = {"kv": data.kv[start : start + n], "hidden": data.hidden[start : start + n]}
        yield {name: torch.from_numpy(array).view(torch.bfloat16) for name, array in pair.items()}


def as_bits(
    tensors: dict[str, torch.Tensor], what: str
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the wanted arrays of a sequence, as bits."""
    kv, hidden = (
        tensors[name].view(torch.uint16).numpy() if name in tensors else None
        for name in ("kv", "hidden")
    )
    return (kv[:, -1:] if what == "layer" and kv is not None else kv), hidden


def write_pt_gz(data: Data, folder: Path) -> None:
    """Write one gzipped .pt per sequence, as SpecForge does."""
    for row, tensors in enumerate(sequences(data)):
        with gzip.open(folder / f"{row}.pt.gz", "wb", compresslevel=6) as file:
            torch.save(
                {name: tensor.clone() for name, tensor in tensors.items()}, cast(IO[bytes], file)
            )


def open_pt_gz(folder: Path, data: Data) -> Read:
    """Load with torch.load from decompressed files."""

    def sequence(row: int, what: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        with gzip.open(folder / f"{row}.pt.gz", "rb") as file:
            return as_bits(torch.load(io.BytesIO(file.read()), weights_only=True), what)

    return per_sequence(sequence)


def write_safetensors(data: Data, folder: Path) -> None:
    """Write one .safetensors per sequence, as speculators does."""
    from safetensors.torch import save_file

    for row, tensors in enumerate(sequences(data)):
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folder / f"{row}.safetensors",
        )


def open_safetensors(folder: Path, data: Data) -> Read:
    """Read only the wanted values with safe_open."""
    from safetensors import safe_open

    def sequence(row: int, what: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        with safe_open(folder / f"{row}.safetensors", "pt") as file:
            if what == "layer":
                return as_bits({"kv": file.get_slice("kv")[:, -1:]}, "all")
            names = ["hidden"] if what == "hidden" else ["kv", "hidden"]
            return as_bits({name: file.get_tensor(name) for name in names}, what)

    return per_sequence(sequence)


def write_ours(data: Data, folder: Path) -> None:
    """Write the store."""
    write_store(data, folder / "store")


def part_and_starts(folder: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """Return the folder of the store's only part, and the starts and lengths of its sequences."""
    with ActivationStore(folder / "store") as store:
        first = store.sequences["first_token"].to_numpy()
        return folder / "store/parts", first, store.lengths.astype(np.int64)


def open_ours(n_threads: int) -> Callable[[Path, Data], Read]:
    """Read with ActivationStore.read_batch."""

    def opened(folder: Path, data: Data) -> Read:
        store = ActivationStore(folder / "store")

        def read(rows: np.ndarray, what: str, out: Out) -> None:
            fields = {"all": ["kv", "hidden/last"], "layer": ["kv"], "hidden": ["hidden/last"]}[
                what
            ]
            store.read_batch(
                rows, fields, out=out, layers=[-1] if what == "layer" else None, n_threads=n_threads
            )

        return read

    return opened


def open_zarr(folder: Path, data: Data) -> Read:
    """Read with zarr-python."""
    import zarr

    part, first, lengths = part_and_starts(folder)
    group: Any = zarr.open_group(part, mode="r")
    kv, hidden = group["kv"], group["hidden/last"]

    def sequence(row: int, what: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        span = slice(int(first[row]), int(first[row] + lengths[row]))
        got_kv = None if what == "hidden" else kv[span, -1:] if what == "layer" else kv[span]
        return got_kv, None if what == "layer" else hidden[span]

    return per_sequence(sequence)


def open_tensorstore(folder: Path, data: Data) -> Read:
    """Read with Tensorstore, all sequences of the batch concurrently."""
    import tensorstore as ts

    part, first, lengths = part_and_starts(folder)
    # The cache has room for the shard indexes, but not for whole batches.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 8 << 20}})
    arrays = {
        name: ts.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(part / name)}},
            context=context,
        )
        for name in ("kv", "hidden/last")
    }
    opened = {name: array.result() for name, array in arrays.items()}
    last = data.kv.shape[1] - 1

    def read(rows: np.ndarray, what: str, out: Out) -> None:
        names = {"all": ["kv", "hidden/last"], "layer": ["kv"], "hidden": ["hidden/last"]}[what]
        running = []
        for b, row in enumerate(rows.tolist()):
            span = slice(int(first[row]), int(first[row] + lengths[row]))
            for name in names:
                array = opened[name][span, last:] if what == "layer" else opened[name][span]
                running.append((name, b, array.read()))
        for name, b, future in running:
            copy_into(out[name], b, future.result())

    return read


FORMATS = [
    Format("np.memmap, raw", write_raw, open_raw),
    Format(".pt.gz per sequence", write_pt_gz, open_pt_gz),
    Format("safetensors per sequence", write_safetensors, open_safetensors, needs="safetensors"),
    Format("zarr-python", write_ours, open_zarr, shares="store"),
    Format("tensorstore", write_ours, open_tensorstore, shares="store", needs="tensorstore"),
    Format("read_batch, 1 thread", write_ours, open_ours(1), shares="store"),
    Format("read_batch, 2 threads", write_ours, open_ours(2), shares="store"),
]
