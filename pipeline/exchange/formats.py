"""The files of other projects: one per sequence, in the formats of speculators, SpecForge (EAGLE-3) and EAGLE v1.

========================================  =====================================================================
file                                      holds
========================================  =====================================================================
speculators                               ``token_ids`` [S], ``hidden_states`` [S, K + 1, E], the last slot the
``hidden_states/hs_{i}.safetensors``      last layer before the final norm, and where they are asked for keys and
                                          values ``kv_last_{local,global}_{k,v}`` [S, H_kv, d]; the Arrow dataset
                                          beside it has ``input_ids``, ``loss_mask`` and ``seq_len`` of row i
SpecForge                                 ``input_ids`` [S], ``loss_mask`` [S], ``hidden_state`` [1, S, E] after
``rows_{a}-{b}/data_{i}.ckpt[.gz]``       the norm, ``aux_hidden_state`` [1, S, K * E]
EAGLE v1 ``{rank}/data_{i}.ckpt``         ``input_ids`` [S], ``loss_mask`` [S], ``hidden_state`` [S, E] after it
========================================  =====================================================================

Ids and masks are int64, a mask is aligned with its ids, and activations keep the store's dtype. A target of L decoder
layers has L + 1 boundaries. Here ``hidden/layer_k`` is the OUTPUT of decoder layer k (from 0), before any final norm,
and ``hidden/last`` is the state AFTER the final norm, the input of the LM head.

=====================  ============================================  =========================  ==================
project                number i of a layer means                     here                       last hidden state
=====================  ============================================  =========================  ==================
speculators, vLLM      state after i layers; 0 = embeddings, L last  ``hidden/layer_{i-1}``     before the norm
SpecForge, SGLang      output of layer i (SGLang captures the input  ``hidden/layer_i``         after the norm
                       of layer i + 1, hence its ``+ 1``)
EAGLE v1               transformers' ``hidden_states[-1]``           ``hidden/last``            after the norm
=====================  ============================================  =========================  ==================

All three take by default the states after 2, L // 2 and L - 3 layers, which SpecForge writes as 1, L // 2 - 1 and
L - 4. Sources, read in stored copies:

- speculators ``scripts/launch_vllm.py`` (default ids ``[2, L // 2, L - 3, L]``, L appended for the verifier),
  ``src/speculators/train/data.py`` (the last slot is the verifier's last hidden state), pull request 313 (vLLM saves it
  before the final norm), pull request 758 (``kv_last_*`` of the last layer with a sliding window and of the last one
  without, keys after RoPE), vllm pull request 46788 (id i is captured at the input of layer i).
- SpecForge ``scripts/prepare_hidden_states.py`` (default ``[2 - 1, L // 2 - 1, L - 3 - 1]``; ``hidden_state`` is what
  the logits processor receives, after the norm; its loader takes any ``.ckpt`` or ``.ckpt.gz`` below its folder),
  sglang pull request 25454 (both numberings name the same physical states).
- EAGLE ``eagle/ge_data/ge_data_all_vicuna.py`` (``outs_big.hidden_states[-1]``, after the norm in transformers' Llama)
  and ``eagle/train/main.py`` (feeds it to the LM head as it is; takes any file at all).
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from typing_extensions import override

from ...errors import DrafterError, InteropError, OptionInvalid, SelectionInvalid
from ...files import PARTIAL_SUFFIX, disk_full_guard, fsync_directory
from ...moa.files import MAX_CONFIG_BYTES, check_regular, load_pickled_tensors, parsing, read_header
from ...text import add_command

LAST = "hidden/last"
ROWS_PER_FOLDER = 2000
"""Files in one of SpecForge's ``rows_{a}-{b}`` folders; its reader does not depend on it."""
_MAX_OVERHEAD_BYTES = 64 << 20
_MAX_GROWTH = 32
_BLOCK_BYTES = 1 << 20
_ROWS_PER_BATCH = 256
_STATE = "state.json"


def layer_field(layer: int) -> str:
    """Return the field of a decoder layer's output."""
    return f"hidden/layer_{layer}"


def default_layers(n_layers: int) -> tuple[int, int, int]:
    """Return the decoder layers whose outputs EAGLE-3 takes by default: (1, L // 2 - 1, L - 4), counted from 0."""
    from ...moa.drafters.eagle3 import default_fused_layers

    try:
        return default_fused_layers(n_layers)
    except DrafterError as error:
        raise OptionInvalid(
            f"the default layers 1, L // 2 - 1 and L - 4 are no three layers of a target with {n_layers}; "
            "choose others with --layers, such as --layers 0,1."
        ) from error


def vllm_layer_id(layer: int) -> int:
    """Return the number of a decoder layer's output in vLLM and speculators: layers passed so far."""
    return layer + 1


def require_fields(needed: Iterable[str], present: Iterable[str], store: str, purpose: str) -> None:
    """Refuse a store that lacks fields, naming them and the command that adds them."""
    held = list(present)
    missing = [name for name in dict.fromkeys(needed) if name not in held]
    if missing:
        raise SelectionInvalid(
            f"{store} lacks {', '.join(missing)}, needed for {purpose}. Add with {add_command(store, missing)}, or "
            "choose other --layers."
        )


class FileFormat(ABC):
    """How one project keeps sequences on disk; reading a file that is damaged or another's raises `InteropError`.

    Args:
        layers: decoder layers (from 0) whose outputs lie beside the last hidden state, in the order of the files.

    Attributes:
        gives_last: whether ``hidden/last`` (after the final norm) is in the files.
        kv_layers: layers whose keys and values are in the files, ascending.
        max_file_bytes: most bytes that a file holds uncompressed.
    """

    name: str
    gives_last = True
    kv_layers: tuple[int, ...] = ()
    max_file_bytes = 1 << 30

    def __init__(self, layers: tuple[int, ...], n_layers: int) -> None:
        self.layers = layers
        self.n_layers = n_layers

    def bound_files(self, width: int, max_positions: int) -> None:
        """Bound the size of a file: the target's longest sequence, with all its states in float32."""
        token_bytes = 4 * width * (len(self.layers) + 2) + 2 * 8
        self.max_file_bytes = max_positions * token_bytes + _MAX_OVERHEAD_BYTES

    @property
    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """The fields of the store that are in the files, in their order."""

    @abstractmethod
    def file(self, folder: Path, i: int) -> Path:
        """Return the path of sequence ``i``."""

    @abstractmethod
    def encode(self, tokens: np.ndarray, mask: np.ndarray, hidden: Mapping[str, Tensor]) -> bytes:
        """Return a file's content.

        Args:
            tokens: int32 [S].
            mask: uint8 [S].
            hidden: each of ``fields`` -> [S, E]; ``kv`` -> [S, n, H_kv, 2, d] of the ``kv_layers``.
        """

    @abstractmethod
    def files(self, folder: Path) -> list[Path]:
        """Return the files below a folder in the order of their numbers."""

    @abstractmethod
    def read_tokens(self, path: Path) -> np.ndarray:
        """Return a file's token ids, int64 [S], without its hidden states where the container allows it."""

    @abstractmethod
    def read_mask(self, path: Path) -> np.ndarray:
        """Return the loss mask of a file's sequence, int64 [S]."""

    @abstractmethod
    def read_hidden(self, path: Path) -> dict[str, Tensor]:
        """Return a file's hidden states: each of ``fields`` -> [S, E]."""


class CheckpointFormat(FileFormat):
    """What SpecForge and EAGLE share: a dict of tensors, written by ``torch.save``."""

    suffix = ".ckpt"

    @override
    def encode(self, tokens: np.ndarray, mask: np.ndarray, hidden: Mapping[str, Tensor]) -> bytes:
        stream = io.BytesIO()
        text = {
            "input_ids": torch.from_numpy(tokens.astype(np.int64)),
            "loss_mask": torch.from_numpy(mask.astype(np.int64)),
        }
        torch.save(text | self._hidden_tensors(hidden), stream)
        data = stream.getvalue()
        return gzip.compress(data, compresslevel=1, mtime=0) if self.suffix.endswith(".gz") else data

    @override
    def files(self, folder: Path) -> list[Path]:
        found = [path for path in folder.rglob("data_*.ckpt*") if path.name.endswith((".ckpt", ".ckpt.gz"))]
        return _sort_by_number(found, folder, f"data_<number>.ckpt of {self.name}")

    @override
    def read_tokens(self, path: Path) -> np.ndarray:
        return self._vector(path, "input_ids")

    @override
    def read_mask(self, path: Path) -> np.ndarray:
        return self._vector(path, "loss_mask")

    @override
    def read_hidden(self, path: Path) -> dict[str, Tensor]:
        record = load_checkpoint(path, self.max_file_bytes)
        return self._split(record, int(_tensor(record, "input_ids", path).numel()), path)

    @abstractmethod
    def _hidden_tensors(self, hidden: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    @abstractmethod
    def _split(self, record: Mapping[str, Any], n_tokens: int, path: Path) -> dict[str, Tensor]: ...

    def _vector(self, path: Path, key: str) -> np.ndarray:
        return _tensor(load_checkpoint(path, self.max_file_bytes), key, path).flatten().long().numpy()


class SpecForgeFormat(CheckpointFormat):
    """SpecForge's offline features for EAGLE-3; with ``compress`` in ``.ckpt.gz``."""

    name = "specforge"

    def __init__(self, layers: tuple[int, ...], n_layers: int, compress: bool = False) -> None:
        super().__init__(layers, n_layers)
        self.suffix = ".ckpt.gz" if compress else ".ckpt"

    @property
    @override
    def fields(self) -> tuple[str, ...]:
        return (LAST, *(layer_field(layer) for layer in self.layers))

    @override
    def file(self, folder: Path, i: int) -> Path:
        first = i // ROWS_PER_FOLDER * ROWS_PER_FOLDER
        return folder / f"rows_{first}-{first + ROWS_PER_FOLDER}" / f"data_{i}{self.suffix}"

    def _hidden_tensors(self, hidden: Mapping[str, Tensor]) -> dict[str, Tensor]:
        layers = torch.cat([hidden[layer_field(layer)] for layer in self.layers], dim=-1)  # [S, K * E]
        return {"hidden_state": hidden[LAST][None].contiguous(), "aux_hidden_state": layers[None]}

    def _split(self, record: Mapping[str, Any], n_tokens: int, path: Path) -> dict[str, Tensor]:
        last = _matrix(record, "hidden_state", n_tokens, path)
        layers = _matrix(record, "aux_hidden_state", n_tokens, path)
        width, count = last.shape[1], len(self.layers)
        if layers.shape[1] != count * width:
            raise InteropError(
                f"{path}: aux_hidden_state has width {layers.shape[1]}, expected {count} layers of {width}. "
                "Name the layers of these files with --layers."
            )
        states = layers.unflatten(1, (count, width)).unbind(1)
        return {LAST: last} | {layer_field(layer): state for layer, state in zip(self.layers, states, strict=True)}


class EagleFormat(CheckpointFormat):
    """EAGLE v1: the last hidden state after the final norm, in the folder of rank 0."""

    name = "eagle"
    fields = (LAST,)

    @override
    def file(self, folder: Path, i: int) -> Path:
        return folder / "0" / f"data_{i}.ckpt"

    def _hidden_tensors(self, hidden: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"hidden_state": hidden[LAST].contiguous()}

    def _split(self, record: Mapping[str, Any], n_tokens: int, path: Path) -> dict[str, Tensor]:
        return {LAST: _matrix(record, "hidden_state", n_tokens, path)}


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
        return _sort_by_number(list(folder.rglob("hs_*.safetensors")), folder, "hs_<number>.safetensors of speculators")

    @override
    def read_tokens(self, path: Path) -> np.ndarray:
        return _read_tensor(path, "token_ids").flatten().long().numpy()

    @override
    def read_mask(self, path: Path) -> np.ndarray:
        """Return the loss mask of a file's row; the row's ids must be the file's."""
        rows, number = self._dataset(path), path.stem.removeprefix("hs_")
        row = int(number) if number.isdecimal() else len(rows)
        if row >= len(rows):
            raise InteropError(f"{path}: the Arrow dataset has {len(rows)} rows, none with number {number}.")
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
        states = _read_tensor(path, "hidden_states")  # [S, K + 1, E]
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


def make_format(
    name: str,
    layers: tuple[int, ...],
    n_layers: int,
    compress: bool = False,
    last_layers: Mapping[str, int] | None = None,
) -> FileFormat:
    """Make a file format; raises OptionInvalid for layers that the target does not have.

    Args:
        layers: those beside the last one; empty for the default.
        compress: of specforge.
        last_layers: see :class:`SpeculatorsFormat`.
    """
    if name == "eagle":
        return EagleFormat((), n_layers)
    layers = layers or default_layers(n_layers)
    if wrong := [layer for layer in layers if not 0 <= layer < n_layers]:
        raise OptionInvalid(f"--layers {wrong[0]}: the target has decoder layers 0 to {n_layers - 1}. Choose others.")
    if name == "specforge":
        return SpecForgeFormat(layers, n_layers, compress)
    return SpeculatorsFormat(layers, n_layers, last_layers)


def load_checkpoint(path: Path, max_bytes: int = FileFormat.max_file_bytes) -> dict[str, Any]:
    """Load a dict of tensors, and nothing but tensors; an uncompressed file is mapped, not read.

    Args:
        max_bytes: most bytes that it holds uncompressed.

    Raises:
        InteropError: damaged, too long, or it holds other objects.
    """
    with parsing(f"{path} is damaged, or holds more than tensors", InteropError, "Make the file again, or delete it."):
        n_bytes = check_regular(path, max_bytes)
        if not path.name.endswith(".gz"):
            return load_pickled_tensors(path)
        # Hidden states hardly shrink in gzip: a file that grows by more is made to fill the memory.
        limit = min(max_bytes, max(_MAX_OVERHEAD_BYTES, _MAX_GROWTH * n_bytes))
        unpacked = io.BytesIO()
        with gzip.open(path) as stream:
            while block := stream.read(_BLOCK_BYTES):
                if unpacked.tell() + len(block) > limit:
                    raise ValueError(f"it unpacks to more than {limit:,} bytes")
                unpacked.write(block)
        unpacked.seek(0)
        return load_pickled_tensors(unpacked)


def write_rows(folder: Path, texts: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write the Arrow dataset of an export to speculators, whole or not at all: ``state.json`` comes last.

    Args:
        texts: tokens int32 [S] and mask uint8 [S] of every sequence, in the order of the files.
    """
    from datasets import Dataset

    partial = folder / ("rows" + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    ids_type = pa.list_(pa.int64())
    schema = pa.schema([("input_ids", ids_type), ("loss_mask", ids_type), ("seq_len", pa.int64())])
    with disk_full_guard(folder):
        (partial / "dataset").mkdir(parents=True)
        left = iter(texts)
        with pa.OSFile(str(partial / "rows.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            while rows := list(islice(left, _ROWS_PER_BATCH)):
                columns = zip(
                    *((ids.astype(np.int64), mask.astype(np.int64), len(ids)) for ids, mask in rows), strict=True
                )
                arrays = [pa.array(column, item.type) for column, item in zip(columns, schema, strict=True)]
                writer.write_batch(pa.record_batch(arrays, schema=schema))
        dataset = Dataset.from_file(str(partial / "rows.arrow")).with_format("torch")
        dataset.save_to_disk(str(partial / "dataset"))
        for path in sorted((partial / "dataset").iterdir(), key=lambda path: (path.name == _STATE, path.name)):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            os.replace(path, folder / path.name)
        fsync_directory(folder)
        shutil.rmtree(partial)


def count_rows(folder: Path) -> int:
    """Count the rows of the Arrow dataset in a folder; 0 where there is none yet."""
    return len(_load_rows(folder)) if (folder / _STATE).is_file() else 0


def _load_rows(folder: Path) -> pa.Table:
    from datasets import load_from_disk

    trouble = f"{folder} holds no Arrow dataset with input_ids and loss_mask"
    with parsing(trouble, InteropError, "Prepare the dataset again."):
        for file in folder.glob("*.json"):
            check_regular(file, MAX_CONFIG_BYTES)
        rows = load_from_disk(str(folder)).with_format(None)
        return rows.data.table.select(["input_ids", "loss_mask"])


def _sort_by_number(paths: list[Path], folder: Path, expected: str) -> list[Path]:
    """Sort by the numbers in the paths, so that 10 comes after 9."""
    if not paths:
        raise InteropError(f"{folder} holds no file {expected}. Check the folder and --format.")

    def numbers(path: Path) -> list[tuple[int, str]]:
        words = re.findall(r"\d+|\D+", path.relative_to(folder).as_posix())
        return [(int(word), "") if word.isdigit() else (-1, word) for word in words]

    return sorted(paths, key=numbers)


def _read_tensor(path: Path, key: str) -> Tensor:
    if key not in read_header(path, InteropError):
        raise InteropError(f"{path} has no tensor {key}. Make the file again.")
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(key)
    return tensor


def _tensor(record: Mapping[str, Any], key: str, path: Path) -> Tensor:
    value = record.get(key)
    if not isinstance(value, Tensor):
        raise InteropError(
            f"{path} has no tensor {key}; it holds {', '.join(map(str, record)) or 'nothing'}. Check --format."
        )
    return value


def _matrix(record: Mapping[str, Any], key: str, n_tokens: int, path: Path) -> Tensor:
    """Return a tensor [S, width] or [1, S, width] as [S, width]."""
    value = _tensor(record, key, path)
    if value.dim() == 3 and len(value) == 1:
        value = value[0]
    if value.dim() != 2 or len(value) != n_tokens:
        raise InteropError(
            f"{path}: {key} has shape {list(value.shape)}, expected [{n_tokens}, width] as there are {n_tokens} "
            "input_ids. Make the file again, or delete it."
        )
    return value
