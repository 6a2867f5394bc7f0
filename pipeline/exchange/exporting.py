"""Writes a store in the file format of another project: `moa-data export`."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import OutputOccupied
from ...files import write_atomic
from ...moa.targets.bundle import layer_windows, load_target_config
from ...storage.read.store import ActivationStore
from ...text import Progress, counted
from .config import ExportConfig
from .formats import FileFormat, count_rows, make_format, require_fields, write_rows
from .torch_dataset import ActivationDataset

_N_WRITERS = 8

RECORD_NAME = "export.json"
"""File that says what an exported folder was made from; other projects do not read it."""


@dataclass(frozen=True)
class ExportReport:
    """What an export did.

    Attributes:
        format: its name, e.g. ``"specforge"``.
        fields: fields of the store that went into it.
        n_written: files written by this run; the others were there already.
        written_bytes: bytes of the files that this run wrote.
    """

    folder: Path
    format: str
    fields: tuple[str, ...]
    n_sequences: int
    n_written: int
    written_bytes: int

    def describe(self) -> str:
        """Return the report as text."""
        kept = self.n_sequences - self.n_written
        return (
            f"{self.folder}: {counted(self.n_sequences, 'sequence')} for {self.format} from {', '.join(self.fields)}; "
            f"{self.n_written:,} written ({self.written_bytes / 1e6:,.1f} MB), {kept:,} were there"
        )


def last_layers(store: ActivationStore) -> dict[str, int]:
    """Find the target's last layer with a sliding window, ``local``, and its last one without, ``global``."""
    windows = layer_windows(load_target_config(store.target_path))
    kinds = ["global" if window is None else "local" for window in windows]
    return {kind: layer for layer, kind in enumerate(kinds)}


def export_store(config: ExportConfig, progress: Progress | None = None) -> ExportReport:
    """Write a store's sequences as another project's files, in the store's order; files that are there stay.

    Raises:
        OptionInvalid: an option cannot be used.
        SelectionInvalid: the store lacks a field that the file format needs.
        OutputOccupied: the folder holds something else, or an export of another store.
        StoreError: the store cannot be read, or parts of it are still to be extracted.
    """
    folder = Path(config.out).expanduser()
    with ActivationStore(config.store, require_complete=True) as store:
        n_layers = int(store.manifest.target["n_layers"])
        shared = last_layers(store) if config.kv else None
        file_format = make_format(config.format, config.layers, n_layers, config.compress, shared)
        require_fields(file_format.fields, store.fields, str(store.path), file_format.name)
        n = min(config.max_sequences or len(store), len(store))
        _claim(folder, _record(config, file_format, store), n)
        dataset = ActivationDataset(store, file_format.fields, layers=file_format.kv_layers or None)
        sizes, pending = list[int](), deque[Future[None]]()
        # In threads, as a disk syncs many small files at once in the time of one.
        with ThreadPoolExecutor(_N_WRITERS) as threads:
            for i in range(n):
                data = _encode_sequence(folder, file_format, dataset, i)
                if data is not None:
                    pending.append(threads.submit(_write, file_format.file(folder, i), data))
                    sizes.append(len(data))
                if len(pending) > _N_WRITERS:
                    pending.popleft().result()
                if progress:
                    progress(i + 1, n, f"export to {file_format.name}")
            for future in pending:
                future.result()
        if file_format.name == "speculators" and count_rows(folder) != n:
            write_rows(folder, ((store.read(i, "tokens"), store.read(i, "response_mask")) for i in range(n)))
    return ExportReport(folder, config.format, file_format.fields, n, len(sizes), sum(sizes))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)


def _encode_sequence(folder: Path, file_format: FileFormat, dataset: ActivationDataset, i: int) -> bytes | None:
    """Return the content of one file; None if it exists with the same tokens."""
    path = file_format.file(folder, i)
    tokens = dataset.store.read(i, "tokens")
    if path.exists():
        if not np.array_equal(file_format.read_tokens(path), tokens):
            raise OutputOccupied(f"{path} holds other tokens than sequence {i} of the store. Choose another --out.")
        return None
    return file_format.encode(tokens, dataset.store.read(i, "response_mask"), dataset[i])


def _record(config: ExportConfig, file_format: FileFormat, store: ActivationStore) -> dict[str, Any]:
    return {
        "format": file_format.name,
        "fields": list(file_format.fields),
        "compress": config.compress,
        "store_sha256": hashlib.sha256(store.manifest.to_json().encode()).hexdigest(),
        "target": dict(store.manifest.target),
        "identities": dict(store.manifest.identities),
    }


def _claim(folder: Path, record: dict[str, Any], n_sequences: int) -> None:
    """Take an empty folder, or one that the same export began; write the record."""
    path = folder / RECORD_NAME
    if path.is_file():
        try:
            old = json.loads(path.read_bytes())
            n_before = int(old.pop("n_sequences"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OutputOccupied(f"{path} is no record of an export ({error!r}). Choose another --out.") from error
        if changed := [key for key in record if old.get(key) != record[key]]:
            raise OutputOccupied(
                f"{folder} holds another export: {', '.join(changed)} differ, see {RECORD_NAME}. Choose another --out."
            )
        if n_before > n_sequences:
            raise OutputOccupied(
                f"{folder} was begun with {n_before:,} sequences, {n_sequences:,} are asked for now. Choose another "
                "--out or a larger --max-sequences."
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputOccupied(f"{folder} is not an empty folder and no export of this program. Choose another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record | {"n_sequences": n_sequences}, indent=2, sort_keys=True) + "\n"
    write_atomic(path, text.encode())
