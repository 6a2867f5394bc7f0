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

Ids and masks are int64, a mask is aligned with its ids, and activations keep the store's dtype. Sources: those of
:mod:`.conventions`; SpecForge's loader takes any ``.ckpt`` or ``.ckpt.gz`` below its folder, EAGLE's any file at all.
"""

from __future__ import annotations

import gzip
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from ...errors import InteropError
from ...moa.files import check_regular, load_pickled_tensors, parsing
from .conventions import LAST, layer_field

_MAX_OVERHEAD_BYTES = 64 << 20
_MAX_GROWTH = 32
_PIECE_BYTES = 1 << 20

ROWS_PER_FOLDER = 2000
"""Files in one of SpecForge's ``rows_{a}-{b}`` folders; its reader does not depend on it."""


class FileFormat(ABC):
    """How one project keeps sequences on disk; reading a file that is damaged or another's raises `InteropError`.

    Args:
        layers: decoder layers (from 0) whose outputs lie beside the last hidden state, in the order of the files.

    Attributes:
        gives_last: whether ``hidden/last`` (after the final norm) is in the files.
    """

    name: str
    gives_last = True
    kv_layers: tuple[int, ...] = ()
    """Layers whose keys and values are in the files, ascending."""

    max_file_bytes = 1 << 30
    """Most bytes that a file holds uncompressed; :meth:`bound_files` sets it from the target."""

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
        return sort_by_number(found, folder, f"data_<number>.ckpt of {self.name}")

    @override
    def read_tokens(self, path: Path) -> np.ndarray:
        return self._vector(path, "input_ids")

    @override
    def read_mask(self, path: Path) -> np.ndarray:
        return self._vector(path, "loss_mask")

    @override
    def read_hidden(self, path: Path) -> dict[str, Tensor]:
        record = load_checkpoint(path, self.max_file_bytes)
        n_tokens = int(_tensor(record, "input_ids", path).numel())
        return self._split(record, n_tokens, path)

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

    @property
    @override
    def fields(self) -> tuple[str, ...]:
        return (LAST,)

    @override
    def file(self, folder: Path, i: int) -> Path:
        return folder / "0" / f"data_{i}.ckpt"

    def _hidden_tensors(self, hidden: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"hidden_state": hidden[LAST].contiguous()}

    def _split(self, record: Mapping[str, Any], n_tokens: int, path: Path) -> dict[str, Tensor]:
        return {LAST: _matrix(record, "hidden_state", n_tokens, path)}


def load_checkpoint(path: Path, max_bytes: int = FileFormat.max_file_bytes) -> dict[str, Any]:
    """Load a dict of tensors, and nothing but tensors; an uncompressed file is mapped, not read.

    Args:
        max_bytes: most bytes that it holds uncompressed.

    Raises:
        InteropError: damaged, too long, or it holds other objects.
    """
    advice = "Make the file again, or take it away."
    with parsing(f"{path} is damaged, or holds more than tensors", InteropError, advice):
        n_bytes = check_regular(path, max_bytes)
        if not path.name.endswith(".gz"):
            return load_pickled_tensors(path)
        # Hidden states hardly shrink in gzip: a file that grows by more is made to fill the memory.
        return load_pickled_tensors(_gunzip(path, min(max_bytes, max(_MAX_OVERHEAD_BYTES, _MAX_GROWTH * n_bytes))))


def _gunzip(path: Path, max_bytes: int) -> io.BytesIO:
    """Unpack a file piece by piece; raises ValueError beyond ``max_bytes``."""
    unpacked = io.BytesIO()
    with gzip.open(path) as stream:
        while piece := stream.read(_PIECE_BYTES):
            if unpacked.tell() + len(piece) > max_bytes:
                raise ValueError(f"it unpacks to more than {max_bytes:,} bytes")
            unpacked.write(piece)
    return unpacked


def sort_by_number(paths: list[Path], folder: Path, expected: str) -> list[Path]:
    """Sort by the numbers in the paths, so that 10 comes after 9."""
    if not paths:
        raise InteropError(f"{folder} holds no file {expected}. Check the folder and --format.")

    def numbers(path: Path) -> list[tuple[int, str]]:
        words = re.findall(r"\d+|\D+", path.relative_to(folder).as_posix())
        return [(int(word), "") if word.isdigit() else (-1, word) for word in words]

    return sorted(paths, key=numbers)


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
            "input_ids. Make the file again, or take it away."
        )
    return value
