"""File formats of speculators, SpecForge (EAGLE-3) and EAGLE v1, with one file per sequence.

``docs/interop.md`` compares the formats and their numbering of layers. Token ids and loss masks are
int64, with one mask entry per token id. Activations keep the store's dtype.

Shapes: S tokens of a sequence, L decoder layers of the target, K chosen layers, n layers whose keys
and values are written, H_kv key/value heads, d head dim, E width.

Sources, read as archived copies. In speculators, the target is called the verifier:

- speculators ``scripts/launch_vllm.py``: the default layer ids are ``[2, L // 2, L - 3, L]``. The
  last id, L, stands for the verifier's last hidden state.
- speculators ``src/speculators/train/data.py``: the last slot of ``hidden_states`` is the
  verifier's last hidden state.
- speculators pull request 313: vLLM saves the last hidden state before the final norm.
- speculators pull request 758: ``kv_last_*`` belong to the last layer with a sliding window and to
  the last layer without one; keys are stored after RoPE.
- speculators 0.9 ``hs_connectors/fp8_utils.py``: hidden states in float8_e4m3fn have one scale per
  token, and are read as bfloat16.
- vllm pull request 46788: the hidden state with layer id i is captured at the input of layer i.
- SpecForge ``scripts/prepare_hidden_states.py``: the default layers are
  ``[2 - 1, L // 2 - 1, L - 3 - 1]``. ``hidden_state`` is the input of the logits processor, after
  the norm. The loader reads any ``.ckpt`` or ``.ckpt.gz`` file below its folder.
- sglang pull request 25454: the default layers of speculators and SpecForge are the same layers,
  numbered differently.
- EAGLE ``eagle/ge_data/ge_data_all_vicuna.py``: writes ``outs_big.hidden_states[-1]``, which in
  transformers' Llama is the state after the final norm.
- EAGLE ``eagle/train/main.py``: feeds the state in the files to the LM head unchanged. The script
  reads every file in its folder, whatever the file's name.
"""

import gzip
import io
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

from ...errors import DatasetError, DrafterError, OptionInvalid
from ...files import (
    PARTIAL_SUFFIX,
    disk_full_guard,
    parse_object,
    parsing,
    read_bounded,
    write_atomic,
)
from ...moa.drafters.eagle3 import default_fused_layers
from ...moa.targets.model_files import check_regular, load_pickled_tensors, read_header
from ...storage.schema import HIDDEN_LAST, layer_field

# Number of files in one of SpecForge's ``rows_{a}-{b}`` folders. SpecForge's reader does not depend
# on this number.
ROWS_PER_FOLDER = 2000
# Maximum number of unpacked bytes per compressed byte. Hidden states hardly compress, so a file
# with a larger ratio is a decompression bomb.
_MAX_GROWTH = 32
_MIN_LIMIT_BYTES = 64 << 20
_ROWS_PER_BATCH = 256
_STATE = "state.json"
# `export` does not write existing files again, so the user must delete a damaged file first.
_ADVICE = "Delete it, and run the command again that wrote it."


class FileFormat(ABC):
    """The file format in which another project stores one sequence per file.

    The methods that read a file raise `DatasetError` if it is damaged or has another format.
    """

    name: str
    pattern: str
    # Whether the files hold ``hidden/last``, the state after the final norm.
    gives_last = True
    # Layers whose keys and values the files hold, in ascending order.
    kv_layers: tuple[int, ...] = ()
    # Names of the store's fields that a file holds, in the order within the file.
    fields: tuple[str, ...]

    @abstractmethod
    def file(self, folder: Path, i: int) -> Path:
        """Return the path of the file of sequence ``i``."""

    @abstractmethod
    def encode(self, tokens: np.ndarray, mask: np.ndarray, hidden: Mapping[str, Tensor]) -> bytes:
        """Return the content of a sequence's file.

        Args:
            tokens: token ids [S].
            mask: loss mask [S].
            hidden: maps the name of each field to the field's values: [S, E] for hidden states, and
                [S, n, H_kv, 2, d] for ``kv``.
        """

    def files(self, folder: Path) -> list[Path]:
        """Return the files below a folder, sorted by name. Numbers in names are sorted by value."""

        def words(path: Path) -> list[Any]:
            split: list[Any] = re.split(r"(\d+)", path.relative_to(folder).as_posix())
            # re.split has put the numbers at the odd indices. Convert them, to sort 9 before 10.
            split[1::2] = map(int, split[1::2])
            return split

        paths: list[Path] = []
        for path in folder.rglob(self.pattern):
            if not path.name.endswith(PARTIAL_SUFFIX):
                paths.append(path)
        if not paths:
            raise DatasetError(
                f"{folder} has no file named like {self.pattern}, so it is not in the format "
                f"{self.name}. Check the folder and `format`."
            )
        return sorted(paths, key=words)

    @abstractmethod
    def read_text(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids and the loss mask of a file. Both are int64 [S].

        The hidden states are not read.
        """

    def read_tokens(self, path: Path) -> np.ndarray:
        """Return the token ids of a file, int64 [S].

        Unlike :meth:`read_text`, this method reads only the given file. In speculators' format, the
        loss masks are in another file.
        """
        return self.read_text(path)[0]

    @abstractmethod
    def read_hidden(self, path: Path) -> dict[str, Tensor]:
        """Return the hidden states of a file. The dict maps each field to its values, [S, E]."""


class EagleFormat(FileFormat):
    """EAGLE v1: each file contains a dict that ``torch.save`` has written.

    The dict contains the last hidden state, after the final norm. The files are written to the
    subfolder ``0``, like the files of EAGLE's process of rank 0.
    """

    name = "eagle"
    pattern = "data_*.ckpt"
    fields: tuple[str, ...] = (HIDDEN_LAST,)

    @override
    def file(self, folder: Path, i: int) -> Path:
        return folder / "0" / f"data_{i}.ckpt"

    @override
    def encode(self, tokens: np.ndarray, mask: np.ndarray, hidden: Mapping[str, Tensor]) -> bytes:
        stream = io.BytesIO()
        ids = torch.from_numpy(tokens.astype(np.int64))
        loss_mask = torch.from_numpy(mask.astype(np.int64))
        torch.save(
            {"input_ids": ids, "loss_mask": loss_mask} | self._hidden_tensors(hidden), stream
        )
        return stream.getvalue()

    def _hidden_tensors(self, hidden: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"hidden_state": hidden[HIDDEN_LAST].contiguous()}

    @override
    def read_text(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        record = _load_checkpoint(path)
        tokens = _tensor(record, "input_ids", path)
        mask = _tensor(record, "loss_mask", path)
        return tokens.flatten().long().numpy(), mask.flatten().long().numpy()

    @override
    def read_hidden(self, path: Path) -> dict[str, Tensor]:
        return {HIDDEN_LAST: _matrix(_load_checkpoint(path), "hidden_state", path)}


class SpecForgeFormat(EagleFormat):
    """SpecForge's offline features for EAGLE-3.

    The files are those of EAGLE v1, with the outputs of further layers added. Compressed files
    (``.ckpt.gz``) can be read too.

    Args:
        layers: decoder layers, counted from 0. The files contain the outputs of these layers in
            this order, in addition to the last hidden state.
    """

    name = "specforge"
    pattern = "data_*.ckpt*"

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.fields = (HIDDEN_LAST, *map(layer_field, layers))

    @override
    def file(self, folder: Path, i: int) -> Path:
        first = i // ROWS_PER_FOLDER * ROWS_PER_FOLDER
        return folder / f"rows_{first}-{first + ROWS_PER_FOLDER}" / f"data_{i}.ckpt"

    @override
    def _hidden_tensors(self, hidden: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Concatenate the outputs of the K chosen layers: [S, K * E].
        layers = torch.cat([hidden[name] for name in self.fields[1:]], dim=-1)
        return {
            "hidden_state": hidden[HIDDEN_LAST][None].contiguous(),
            "aux_hidden_state": layers[None],
        }

    @override
    def read_hidden(self, path: Path) -> dict[str, Tensor]:
        record = _load_checkpoint(path)
        last = _matrix(record, "hidden_state", path)
        layers = _matrix(record, "aux_hidden_state", path)
        width = last.shape[1]
        count = len(self.fields) - 1
        if layers.shape[1] != count * width:
            raise DatasetError(
                f"The tensor aux_hidden_state in {path} has width {layers.shape[1]}, expected "
                f"{count} layers of width {width}. Give the layers of these files with `layers`."
            )
        return dict(zip(self.fields, (last, *layers.split(width, dim=1)), strict=True))


class SpeculatorsFormat(FileFormat):
    """speculators' offline data: the outputs of the chosen layers, then the output of the last layer.

    The output of the last layer is the hidden state before the final norm.

    Args:
        layers: the chosen decoder layers, counted from 0.
        n_layers: number of the target's decoder layers.
        last_layers: maps a kind of attention, ``local`` (sliding window) or ``global``, to the
            number of the target's last layer of this kind. The files contain the keys and values of
            these layers. If the target does not have layers of a kind, the kind is left out.
    """

    name = "speculators"
    pattern = "hs_*.safetensors"
    gives_last = False

    def __init__(
        self, layers: tuple[int, ...], n_layers: int, last_layers: Mapping[str, int] | None = None
    ) -> None:
        last = n_layers - 1
        lower_layers = [layer for layer in layers if layer != last]
        self._layers = (*lower_layers, last)
        self._last_layers = dict(last_layers or {})
        self.kv_layers = tuple(sorted(self._last_layers.values()))
        self._states = tuple(map(layer_field, self._layers))
        self.fields = (*self._states, "kv") if self.kv_layers else self._states
        self._rows: dict[Path, pa.Table] = {}

    @override
    def file(self, folder: Path, i: int) -> Path:
        return folder / "hidden_states" / f"hs_{i}.safetensors"

    @override
    def encode(self, tokens: np.ndarray, mask: np.ndarray, hidden: Mapping[str, Tensor]) -> bytes:
        # Stack the outputs of the K chosen layers and of the last layer: [S, K + 1, E].
        states = torch.stack([hidden[name] for name in self._states], dim=1)
        # In vLLM, the id of a layer's output is the number of layers that are computed so far. So
        # the output of layer 0 has id 1.
        ids = ",".join(str(layer + 1) for layer in self._layers)
        tensors = {
            "token_ids": torch.from_numpy(tokens.astype(np.int64)),
            "hidden_states": states.contiguous(),
        }
        for kind, layer in self._last_layers.items():
            # The keys and values of ``layer``: [S, H_kv, 2, d].
            of_layer = hidden["kv"][:, self.kv_layers.index(layer)]
            for index, part in enumerate("kv"):
                tensors[f"kv_last_{kind}_{part}"] = of_layer[:, :, index].contiguous()
        return save(tensors, metadata={"target_layer_ids": ids})

    @override
    def read_tokens(self, path: Path) -> np.ndarray:
        return _read_tensor(path, "token_ids").flatten().long().numpy()

    @override
    def read_text(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        tokens = self.read_tokens(path)
        rows = self._dataset(path)
        number = path.stem.removeprefix("hs_")
        row = int(number) if number.isdecimal() else len(rows)
        if row >= len(rows):
            raise DatasetError(
                f"{path} belongs to row {number} of the Arrow dataset, but this dataset has only "
                f"{len(rows)} rows. Put the files into the folder of the dataset that they were "
                "made from."
            )
        with parsing(
            f"Row {row} of the Arrow dataset, to which {path} belongs, lacks token ids or a loss "
            "mask",
            DatasetError,
            "Prepare the dataset again.",
        ):
            ids = rows["input_ids"][row].values.to_numpy(zero_copy_only=False).astype(np.int64)
            mask = rows["loss_mask"][row].values.to_numpy(zero_copy_only=False).astype(np.int64)
        if not np.array_equal(ids, tokens):
            raise DatasetError(
                f"The token_ids of {path} differ from the input_ids of row {row} of the Arrow "
                "dataset, so the file was made from another dataset. Make the files of this "
                "dataset again."
            )
        return tokens, mask

    @override
    def read_hidden(self, path: Path) -> dict[str, Tensor]:
        # The outputs of the K chosen layers and of the last layer: [S, K + 1, E].
        states = _read_tensor(path, "hidden_states")
        if states.dim() != 3 or states.shape[1] != len(self._states):
            raise DatasetError(
                f"The tensor hidden_states in {path} has shape {list(states.shape)}, expected "
                f"[tokens, {len(self._states)} layers, width]. Give the layers of these files "
                "with `layers`."
            )
        if states.dtype == torch.float8_e4m3fn:
            # The scales are float32. There is one scale per token.
            scales = _read_tensor(path, "hidden_states_scales")
            with parsing(
                f"The tensor hidden_states_scales in {path} does not fit hidden_states",
                DatasetError,
                "Make the file again.",
            ):
                # Multiply in bfloat16, so that the products are rounded as in speculators' reader.
                states = states.to(torch.bfloat16) * scales.to(torch.bfloat16).view(
                    len(states), 1, 1
                )
        return dict(zip(self._states, states.unbind(1), strict=True))

    def _dataset(self, path: Path) -> pa.Table:
        folder = _dataset_folder(path)
        if folder not in self._rows:
            self._rows = {folder: _load_rows(folder)}
        return self._rows[folder]


def _dataset_folder(path: Path) -> Path:
    """Search the folders above a file for an Arrow dataset. Return the closest folder with one."""
    for folder in path.parents:
        if (folder / _STATE).is_file():
            return folder
    raise DatasetError(
        "The Arrow dataset with the loss masks (a folder with state.json) is neither "
        f"{path.parent} nor a folder above it. Put hidden_states/ into the folder of the "
        "dataset."
    )


def make_format(
    name: str, layers: tuple[int, ...], n_layers: int, last_layers: Mapping[str, int] | None = None
) -> FileFormat:
    """Make the file format of a project.

    Args:
        name: ``eagle``, ``specforge`` or ``speculators``.
        layers: decoder layers whose outputs are stored, in addition to the output of the last
            layer. If the tuple is empty, EAGLE-3's default layers are used: ``1``, ``L // 2 - 1``
            and ``L - 4``.
        n_layers: number of the target's decoder layers, L.
        last_layers: maps a kind of attention, ``local`` (sliding window) or ``global``, to the
            number of a layer. The keys and values of these layers are written. Only
            ``speculators`` uses this argument.

    Raises:
        OptionInvalid: the target does not have these layers.
    """
    if name == "eagle":
        return EagleFormat()
    try:
        layers = layers or default_fused_layers(n_layers)
    except DrafterError as error:
        raise OptionInvalid(
            f"The target has {n_layers} decoder layers, which are too few for the default of "
            "`layers`. Choose layers, for example `layers=0,1`."
        ) from error
    for layer in layers:
        if not 0 <= layer < n_layers:
            raise OptionInvalid(
                f"`layers` has {layer}, but the target has only the decoder layers 0 to "
                f"{n_layers - 1}. Choose from these."
            )
    if name == "specforge":
        return SpecForgeFormat(layers)
    return SpeculatorsFormat(layers, n_layers, last_layers)


def _load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a dict of tensors from a file, and refuse other Python objects.

    An uncompressed file is memory-mapped. A compressed file is read into memory.
    """
    with parsing(
        f"{path} is damaged or cut short, or holds other Python objects than tensors",
        DatasetError,
        _ADVICE,
    ):
        if not path.name.endswith(".gz"):
            return load_pickled_tensors(path)
        limit = max(_MIN_LIMIT_BYTES, _MAX_GROWTH * check_regular(path))
        with gzip.open(path) as stream:
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"it would unpack to more than {limit:,} bytes")
        return load_pickled_tensors(io.BytesIO(data))


def write_rows(folder: Path, texts: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write the Arrow dataset of an export to speculators. Its `state.json` is written last.

    An existing dataset is always replaced, because damage to its token ids would not be noticed.

    Args:
        texts: token ids [S] and loss mask [S] of each sequence.
    """
    from datasets import Dataset

    partial = folder / ("rows" + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    ids_type = pa.list_(pa.int64())
    schema = pa.schema([("input_ids", ids_type), ("loss_mask", ids_type), ("seq_len", pa.int64())])
    with disk_full_guard(folder):
        (partial / "dataset").mkdir(parents=True)
        with (
            pa.OSFile(str(partial / "rows.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, schema) as writer,
        ):
            left = iter(texts)
            while rows := list(islice(left, _ROWS_PER_BATCH)):
                ids, masks = zip(*rows, strict=True)
                columns = {"input_ids": ids, "loss_mask": masks, "seq_len": list(map(len, ids))}
                writer.write_batch(pa.record_batch(columns, schema=schema))
        dataset = Dataset.from_file(str(partial / "rows.arrow")).with_format("torch")
        dataset.save_to_disk(str(partial / "dataset"))
        for path in sorted(
            (partial / "dataset").iterdir(), key=lambda path: (path.name == _STATE, path.name)
        ):
            write_atomic(folder / path.name, path.read_bytes())
        shutil.rmtree(partial)


def _load_rows(folder: Path) -> pa.Table:
    from datasets import load_from_disk

    trouble = f"{folder} has no usable Arrow dataset with the columns input_ids and loss_mask"
    # First read each file on its own, because errors of `datasets` do not name the damaged file.
    for file in (folder / _STATE, folder / "dataset_info.json", *folder.glob("data-*.arrow")):
        if not file.exists():
            raise DatasetError(f"{file} is missing. Run the command again that wrote the folder.")
        with parsing(f"{file} is damaged or cut short", DatasetError, _ADVICE):
            check_regular(file)
            if file.suffix == ".json":
                parse_object(read_bounded(file))
            else:
                pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
    with parsing(trouble, DatasetError, "Prepare the dataset again."):
        rows = load_from_disk(str(folder)).with_format(None)
        return rows.data.table.select(["input_ids", "loss_mask"])


def _read_tensor(path: Path, key: str) -> Tensor:
    if key not in read_header(path, DatasetError, _ADVICE):
        raise DatasetError(
            f"{path} lacks the tensor {key}. Check `format`, or make the file again."
        )
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(key)
    return tensor


def _tensor(record: Mapping[str, Any], key: str, path: Path) -> Tensor:
    value = record.get(key)
    if not isinstance(value, Tensor):
        raise DatasetError(
            f"{path} lacks the tensor {key}. It has {', '.join(map(str, record)) or 'no entries'}. "
            "Check `format`."
        )
    return value


def _matrix(record: Mapping[str, Any], key: str, path: Path) -> Tensor:
    """Return the tensor of a key, in the shape [S, width].

    In the file, the tensor may also have the shape [1, S, width].
    """
    value = _tensor(record, key, path)
    n_tokens = _tensor(record, "input_ids", path).numel()
    if value.dim() == 3 and len(value) == 1:
        value = value[0]
    if value.dim() != 2 or len(value) != n_tokens:
        raise DatasetError(
            f"The tensor {key} in {path} has shape {list(value.shape)}, expected [{n_tokens}, "
            f"width], because the file has {n_tokens} input_ids. Make the file again, or delete it."
        )
    return value
