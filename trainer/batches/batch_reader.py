"""Reads the sequences of a batch into padded tensors, on reused memory."""

import math
import os

import numpy as np
import torch
from torch import Tensor

from ...errors import DrafterError, SelectionInvalid, TrainingError
from ...moa.drafters.registry import drafter_class
from ...moa.drafters.training import Reads, TrainingInputs
from ...storage.read.store import ActivationStore, layer_indices, row_shape, shared_arrays, token_shape
from ...storage.schema import StoredArray
from ...text import add_command
from ..config import AnyDrafter, TrainConfig, default_drafters
from .batch import LAYER_OUTPUTS, Batch, EncodedField
from .buffers import BufferPool
from .copies import SideCopies

_KEPT_BATCH_BYTES = 1 << 30
"""Bytes of a batch up to which its buffers are kept for the next one."""
_COUNTED_SEQUENCES = 256  # read at once to count their tokens
_HELD_BATCHES = 2  # that Lightning holds: the one in use, and the next
_MOST_THREADS = 16  # decode more than the bus to a GPU takes
_TEXT_FIELDS = ("tokens", "response_mask")
_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def needed_fields(store: ActivationStore, config: TrainConfig) -> dict[str, str]:
    """List the fields that the drafter is trained on, by the attribute of ``TrainingInputs`` that they become.

    Layer outputs are numbered: ``layer_outputs.0`` and so on.

    Raises:
        SelectionInvalid: the store lacks one; the message names the command that adds it.
        TrainingError: N is not below the target's number of layers.
    """
    n_layers = int(store.manifest.target["n_layers"])
    n_last = config.target_layer_inference
    if n_last >= n_layers:
        raise TrainingError(
            f"target_layer_inference ({n_last}) must be below the target's {n_layers} layers; lower it."
        )
    needed = read_fields(drafter_class(config.drafter.kind).reads(n_layers, config.drafter))
    missing = [name for name in needed.values() if name not in store.fields]
    if missing:
        how = f"add with {add_command(str(store.path), missing, n_last)}"
        if origin := store.manifest.extraction.get("imported_from"):
            how = f"nothing can be added to a store that was imported from {origin}, so extract one with all fields"
        trainable = [other.kind for other in default_drafters() if _has_all(store, other, n_layers)]
        others = f", or train another drafter on what there is: --drafter {' or '.join(trainable)}" if trainable else ""
        raise SelectionInvalid(f"{store.path} lacks {', '.join(missing)}; {how}{others}.")
    return needed


def read_fields(reads: Reads) -> dict[str, str]:
    """The fields to read, by the attribute of ``TrainingInputs`` that they become, layer outputs numbered."""
    outputs = {f"{LAYER_OUTPUTS}.{index}": f"hidden/layer_{layer}" for index, layer in enumerate(reads.outputs)}
    return reads.fields | outputs


def _has_all(store: ActivationStore, settings: AnyDrafter, n_layers: int) -> bool:
    """Whether a drafter with some settings can be trained from a store."""
    try:
        reads = drafter_class(settings.kind).reads(n_layers, settings)
    except DrafterError:  # the target is too small for the default
        return False
    return set(read_fields(reads).values()) <= set(store.fields)


def needed_layers(store: ActivationStore, config: TrainConfig, name: str) -> list[int] | None:
    """List the layers of a field that the drafter is trained on; None for all, or where the field has none."""
    spec = store.fields[name]
    return layer_indices(spec, _layers_read(store, config) if spec.layer_axis == 1 else None)


def _layers_read(store: ActivationStore, config: TrainConfig) -> tuple[int, ...] | None:
    n_layers = int(store.manifest.target["n_layers"])
    return drafter_class(config.drafter.kind).reads(n_layers, config.drafter).kv_layers


class BatchReader:
    """Reads given sequences of a store into right-padded batches, on reused memory.

    Args:
        device: the device that trains. On the CPU the thread that reads also decodes; another device decodes for
            itself, so that only codes travel to it.
        n_ranks: processes that read on this machine and share its cores.
    """

    def __init__(self, store: ActivationStore, config: TrainConfig, device: torch.device, n_ranks: int = 1) -> None:
        self.store, self.config = store, config
        self.n_threads = config.data.reader_threads or default_reader_threads(n_ranks)
        self._decodes = device.type == "cpu"
        self._copies = SideCopies(device) if device.type == "cuda" else None
        self._fields = needed_fields(store, config)
        self._layers = {name: needed_layers(store, config, name) for name in self._fields.values()}
        largest = max(sequence_bytes(store, config, store.lengths.max(initial=0)), _KEPT_BATCH_BYTES)
        self._buffers = BufferPool(
            (config.data.prefetch_mb << 20) + _HELD_BATCHES * largest, pin_memory=device.type == "cuda"
        )

    def read(
        self, sequences: np.ndarray, lengths: np.ndarray, response: Tensor | None = None
    ) -> tuple[TrainingInputs, dict[str, EncodedField]]:
        """Read sequences with the given token counts; padding is zero.

        Args:
            response: bool [B, at least T], their response masks; None to read them too.

        Returns:
            The inputs, and the fields that are not decoded yet, by attribute of the inputs (see ``Batch.encoded``).
        """
        n_rows, n_tokens = len(sequences), int(lengths.max())
        codecs = [(self.store.codec.fields[name], layers) for name, layers in self._layers.items()]
        plain = {codec.spec.name for codec, _ in codecs if codec.is_identity}
        buffers = {
            array.name: self._buffer(array, row_shape(array, indices), array.name in plain, n_rows, n_tokens)
            for array, indices in shared_arrays(codecs).items()
        }
        out = {name: _as_stored(buffer) for name, buffer in buffers.items()}
        names = _TEXT_FIELDS if response is None else ("tokens",)
        text = {name: np.empty((n_rows, n_tokens), self.store.fields[name].storage_dtype) for name in names}
        self.store.read_batch(
            sequences,
            [*names, *self._fields.values()],
            out=out | text,
            layers=_layers_read(self.store, self.config),
            n_threads=self.n_threads,
            decoded=False,
        )
        encoded = {}
        for attribute, name in self._fields.items():
            codec, layers = self.store.codec.fields[name], self._layers[name]
            if not codec.is_identity:
                rows = {array.name: buffers[array.name] for array in codec.arrays_read(layers)}
                dtype = _TORCH_DTYPES[codec.spec.dtype]
                encoded[attribute] = EncodedField(codec, rows, tuple(lengths.tolist()), dtype, layers)
                buffers[name] = torch.empty(0)
        if response is None:
            response = torch.from_numpy(text["response_mask"]).bool()
        read = {attribute: buffers[name] for attribute, name in self._fields.items()}
        inputs = TrainingInputs(
            tokens=torch.from_numpy(text["tokens"]).long(),
            response_mask=response[:, :n_tokens].contiguous(),
            kv=read["kv"].flatten(3) if "kv" in read and "kv" not in encoded else read.get("kv"),
            hidden=read["hidden"],
            entering_hidden=read.get("entering_hidden"),
            layer_outputs=tuple(states for name, states in read.items() if name.startswith(LAYER_OUTPUTS)),
        )
        return inputs, encoded

    def deliver(self, batch: Batch) -> Batch:
        """Decode a batch on the CPU, or start its copy to a CUDA device."""
        if self._decodes:
            return batch.decode()
        return batch if self._copies is None else self._copies.start(batch)

    def response_masks(self, sequences: np.ndarray) -> Tensor:
        """Read the response masks of sequences, padded with False: bool [B, T]."""
        return torch.from_numpy(self.store.read_batch(sequences, "response_mask")["response_mask"]).bool()

    def count_response_tokens(self, sequences: np.ndarray) -> Tensor:
        """Count how often each token of the vocabulary occurs in the responses of sequences: int64 [V]."""
        counts = np.zeros(int(self.store.manifest.target["vocab_size"]), np.int64)
        for part in np.array_split(sequences, -(-len(sequences) // _COUNTED_SEQUENCES) or 1):
            read = self.store.read_batch(part, list(_TEXT_FIELDS))
            counts += np.bincount(read["tokens"][read["response_mask"] != 0], minlength=len(counts))
        return torch.from_numpy(counts)

    def n_bytes(self, lengths: np.ndarray) -> int:
        """Count the bytes of activations in a batch of sequences with these token counts."""
        return len(lengths) * sequence_bytes(self.store, self.config, int(lengths.max()))

    def _buffer(
        self, array: StoredArray, row_shape: tuple[int, ...], is_field: bool, n_sequences: int, n_tokens: int
    ) -> Tensor:
        dtype = _TORCH_DTYPES[array.logical_dtype] if is_field else getattr(torch, array.dtype)
        return self._buffers.take((n_sequences, array.n_rows(n_tokens), *row_shape), dtype)


def default_reader_threads(n_ranks: int) -> int:
    """Choose this process's share of the cores that it may run on, among ``n_ranks`` processes."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // n_ranks))


def sequence_bytes(store: ActivationStore, config: TrainConfig, n_tokens: int) -> int:
    """Count the bytes of one sequence's activations, padded to ``n_tokens``."""
    specs = [(store.fields[name], needed_layers(store, config, name)) for name in needed_fields(store, config).values()]
    values = [(math.prod(token_shape(spec, layers)), spec.storage_dtype.itemsize) for spec, layers in specs]
    return int(n_tokens) * sum(n_values * n_bytes for n_values, n_bytes in values)


def _as_stored(buffer: Tensor) -> np.ndarray:
    """View a buffer in the stored dtype; numpy has no bfloat16, the store keeps its bits as uint16."""
    return buffer.view(torch.uint16).numpy() if buffer.dtype == torch.bfloat16 else buffer.numpy()
