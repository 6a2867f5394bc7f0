"""The Parquet index of a store: a row for each sequence, to choose sequences by before any activation is read."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import OutputOccupied
from ...files import parse_object, replacing
from ...moa.targets.live import load_target_tokenizer
from ...storage.backend import read_file
from ...storage.plan import PLAN_SCHEMA, column, numbers, text_column
from ...storage.read.store import ActivationStore
from ...storage.schema import PARTS_NAME, TOKENS, ZARR_NAME
from ...text import Progress, counted

_ROWS = 1024
_STORE_KEY = b"moa_data.store"  # key of the file's metadata that says which store the index is of


def write_index(store: ActivationStore, path: Path, n_sequences: int, progress: Progress | None = None) -> str:
    """Write the index of the first sequences of a store, and say what was written; an older one is replaced.

    Raises OutputOccupied: the path holds something else, or the index of another store.
    """
    identity = hashlib.sha256(store.manifest.to_json().encode()).hexdigest()
    _check_path(path, identity)
    # docs/format.md: sequence s begins at row part * part_rows + first_token of the token axis.
    part_rows = parse_object(read_file(store.path / PARTS_NAME / TOKENS / ZARR_NAME))["attributes"]["part_rows"]
    has_tokenizer = (store.target_path / "tokenizer.json").is_file()
    tokenizer = load_target_tokenizer(store.target_path) if has_tokenizer else None
    about = {_STORE_KEY: json.dumps({"sha256": identity, **store.manifest.identities})}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        schema = _rows(store, range(1), part_rows, tokenizer).schema.with_metadata(about)
        with partial.open("wb") as sink:
            with pq.ParquetWriter(sink, schema, compression="zstd") as file:
                for start in range(0, n_sequences, _ROWS):
                    chosen = range(start, min(start + _ROWS, n_sequences))
                    file.write_table(_rows(store, chosen, part_rows, tokenizer))
                    if progress:
                        progress(chosen.stop, n_sequences, "index")
            os.fsync(sink.fileno())
    return f"{path}: {counted(n_sequences, 'sequence')}, columns {', '.join(schema.names)}"


def _check_path(path: Path, identity: str) -> None:
    if not path.exists():
        return
    try:
        about = parse_object((pq.read_schema(path).metadata or {}).get(_STORE_KEY, b"{}"))
    except (OSError, pa.ArrowException, ValueError):
        about = {}
    if about.get("sha256") != identity:
        raise OutputOccupied(f"{path} is not the index of this store. Choose another --out.")


def _rows(store: ActivationStore, chosen: range, part_rows: int, tokenizer: Any) -> pa.Table:
    plan = store.sequences.slice(chosen.start, len(chosen))
    lengths = numbers(plan, "n_tokens")
    texts = store.read_batch(chosen, (TOKENS, "response_mask"))
    is_token = np.arange(texts[TOKENS].shape[1]) < lengths[:, None]
    offsets = column(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    rows = numbers(plan, "part").astype(np.int64) * part_rows + numbers(plan, "first_token")
    columns = {"position": column(np.arange(chosen.start, chosen.stop)), "row": column(rows)}
    columns |= {name: plan[name] for name in PLAN_SCHEMA.names}
    columns |= {name: pa.ListArray.from_arrays(offsets, column(values[is_token])) for name, values in texts.items()}
    if tokenizer is not None:
        columns["text"] = text_column(tokenizer.batch_decode(columns[TOKENS].to_pylist()))
    return pa.table(columns)
