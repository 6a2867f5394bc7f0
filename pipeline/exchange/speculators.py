"""The format of vllm-project/speculators: safetensors of hidden states beside an Arrow dataset of ids and masks.

Drafters that attend to the target's own keys and values, as Gemma 4's do, take those of its last layer with a sliding
window and of its last layer without (speculators issue 586, pull request 758): ``kv_last_local_k`` and so on, [S, H_kv,
d] of each, keys after RoPE. Its loader joins the two to ``verifier_kv_last_local`` [batch, S, 2, H_kv, d].
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from typing_extensions import override

from ...errors import InteropError
from ...moa.files import MAX_CONFIG_BYTES, check_regular, parsing, read_header
from ...storage.disk.durable import PARTIAL_SUFFIX, disk_full_guard, fsync_directory
from .conventions import layer_field, vllm_layer_id
from .formats import FileFormat, sort_by_number

_ROWS_PER_BATCH = 256
_STATE = "state.json"


class SpeculatorsFormat(FileFormat):
    """speculators' offline data: the chosen layers, and the last one before the final norm.

    Args:
        last_layers: ``local`` and ``global`` -> the layer whose keys and values go in, of those that the target has.
    """

    name = "speculators"
    gives_last = False

    def __init__(self, layers: tuple[int, ...], n_layers: int, last_layers: Mapping[str, int] | None = None) -> None:
        super().__init__(tuple(layer for layer in layers if layer != n_layers - 1), n_layers)
        self._last_layers = dict(last_layers or {})
        self.kv_layers = tuple(sorted(self._last_layers.values()))
        self._rows: tuple[Path, pa.Table] | None = None

    @property
    @override
    def fields(self) -> tuple[str, ...]:
        return (*self._states, "kv") if self.kv_layers else self._states

    @property
    def _states(self) -> tuple[str, ...]:
        return (*(layer_field(layer) for layer in self.layers), layer_field(self.n_layers - 1))

    @override
    def file(self, folder: Path, i: int) -> Path:
        return folder / "hidden_states" / f"hs_{i}.safetensors"

    @override
    def encode(self, tokens: np.ndarray, mask: np.ndarray, hidden: Mapping[str, Tensor]) -> bytes:
        states = torch.stack([hidden[name] for name in self._states], dim=1)  # [S, K + 1, E]
        ids = ",".join(str(vllm_layer_id(layer)) for layer in (*self.layers, self.n_layers - 1))
        tensors = {"token_ids": torch.from_numpy(tokens.astype(np.int64)), "hidden_states": states.contiguous()}
        for kind, layer in self._last_layers.items():
            of_layer = hidden["kv"][:, self.kv_layers.index(layer)]  # [S, H_kv, 2, d]
            for index, part in enumerate("kv"):
                tensors[f"kv_last_{kind}_{part}"] = of_layer[:, :, index].contiguous()
        return save(tensors, metadata={"target_layer_ids": ids})

    @override
    def files(self, folder: Path) -> list[Path]:
        return sort_by_number(list(folder.rglob("hs_*.safetensors")), folder, "hs_<number>.safetensors of speculators")

    @override
    def read_tokens(self, path: Path) -> np.ndarray:
        return _read(path, "token_ids").flatten().long().numpy()

    @override
    def read_mask(self, path: Path) -> np.ndarray:
        """Return the loss mask of a file's row; the row's ids must be the file's."""
        rows, number = self._dataset(path), path.stem.removeprefix("hs_")
        if not number.isdecimal():
            raise InteropError(f"{path}: the name ends in no number of a row. Take the file away.")
        row = int(number)
        if row >= len(rows):
            raise InteropError(f"{path}: the Arrow dataset has {len(rows)} rows, none with number {row}.")
        with parsing(f"{path}: row {row} of the Arrow dataset is no text", InteropError, "Prepare the dataset again."):
            ids, mask = (
                rows[name][row].values.to_numpy(zero_copy_only=False).astype(np.int64)
                for name in ("input_ids", "loss_mask")
            )
        if not np.array_equal(ids, self.read_tokens(path)):
            raise InteropError(
                f"{path}: its token_ids are not the input_ids of row {row} of the Arrow dataset. The files belong to "
                "another dataset; make them again."
            )
        return np.asarray(mask)

    @override
    def read_hidden(self, path: Path) -> dict[str, Tensor]:
        states = _read(path, "hidden_states")  # [S, K + 1, E]
        if states.dim() != 3 or states.shape[1] != len(self._states):
            raise InteropError(
                f"{path}: hidden_states has shape {list(states.shape)}, expected [tokens, {len(self._states)} layers, "
                "width]. Name the layers of these files with --layers."
            )
        return dict(zip(self._states, states.unbind(1), strict=True))

    def _dataset(self, path: Path) -> pa.Table:
        folder = next((parent for parent in path.parents if (parent / _STATE).is_file()), None)
        if folder is None:
            raise InteropError(
                f"{path.parent}: no Arrow dataset (state.json) in this folder or above it; the loss masks lie there. "
                "Put hidden_states/ into the folder of the dataset."
            )
        if self._rows is None or self._rows[0] != folder:
            self._rows = (folder, _load_rows(folder))
        return self._rows[1]


def write_rows(folder: Path, texts: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write the Arrow dataset of an export, whole or not at all: ``state.json`` comes last.

    Args:
        texts: tokens int32 [S] and mask uint8 [S] of every sequence, in the order of the files.
    """
    from datasets import Dataset

    partial = folder / ("rows" + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    with disk_full_guard(folder):
        (partial / "dataset").mkdir(parents=True)
        _write_stream(partial / "rows.arrow", texts)
        rows = Dataset.from_file(str(partial / "rows.arrow")).with_format("torch")
        rows.save_to_disk(str(partial / "dataset"))
        for path in sorted((partial / "dataset").iterdir(), key=lambda path: (path.name == _STATE, path.name)):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            os.replace(path, folder / path.name)
        fsync_directory(folder)
        shutil.rmtree(partial)


def count_rows(folder: Path) -> int:
    """Count the rows of the Arrow dataset in a folder; 0 where there is none yet."""
    return len(_load_rows(folder)) if (folder / _STATE).is_file() else 0


def _write_stream(path: Path, texts: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    ids_type = pa.list_(pa.int64())
    schema = pa.schema([("input_ids", ids_type), ("loss_mask", ids_type), ("seq_len", pa.int64())])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        columns: tuple[list[Any], list[Any], list[Any]] = ([], [], [])

        def flush() -> None:
            arrays = [pa.array(column, item.type) for column, item in zip(columns, schema, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
            for column in columns:
                column.clear()

        for tokens, mask in texts:
            columns[0].append(tokens.astype(np.int64))
            columns[1].append(mask.astype(np.int64))
            columns[2].append(len(tokens))
            if len(columns[0]) == _ROWS_PER_BATCH:
                flush()
        if columns[0]:
            flush()


def _load_rows(folder: Path) -> pa.Table:
    from datasets import load_from_disk

    trouble = f"{folder} holds no Arrow dataset with input_ids and loss_mask"
    with parsing(trouble, InteropError, "Prepare the dataset again."):
        for file in folder.glob("*.json"):
            check_regular(file, MAX_CONFIG_BYTES)
        rows = load_from_disk(str(folder)).with_format(None)
        return rows.data.table.select(["input_ids", "loss_mask"])


def _read(path: Path, key: str) -> Tensor:
    if key not in read_header(path, InteropError):
        raise InteropError(f"{path} has no tensor {key}. Make the file again.")
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(key)
    return tensor
