"""One forward of the target over a batch of sequences, and everything it computed on the way.

Shapes: B sequences, T tokens of the longest one, L decoder layers, H_kv key/value heads, d head dim, E width.
Sequences are padded on the right. Attention is causal, so no token of a sequence sees its padding and no mask is
needed; what is computed at the padding is cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..moa.nn.kv import cache_layers, new_cache, pack_kv
from ..moa.target.live import layer_outputs
from ..storage.chunks.field import FieldCodec
from ..storage.codecs.registry import StoreCodec
from .config import ActivationSpec
from .errors import NonFiniteActivation


@dataclass(frozen=True)
class Capture:
    """Activations of one batch, on the target's device.

    Attributes:
        n_tokens: length of each sequence, without padding.
        fields: store field -> [B, T, *token_shape] in the storage dtype: kv [B, T, L, H_kv, 2, d] with keys after
            RoPE, hidden/last and hidden/layer_k [B, T, E].
        finite: store field -> bool [B, L] (kv) or [B, 1]: whether all values of a sequence are finite.
        tokens: int64 [B, T], what the target saw; beyond a sequence's length arbitrary.
        codecs: the fields that have been encoded, and with what.
    """

    n_tokens: tuple[int, ...]
    fields: dict[str, Tensor]
    finite: dict[str, Tensor]
    tokens: Tensor
    codecs: Mapping[str, FieldCodec] = field(default_factory=dict)

    def encode(self, codec: StoreCodec, names: Sequence[str]) -> Capture:
        """Encode, on the device, the fields that the store keeps encoded.

        Args:
            codec: the store's.
            names: what to call each sequence of the batch.

        Returns:
            A capture whose `fields` hold, under the names of the stored arrays, the rows of all sequences one after the
            other: [n_rows, *row_shape]. Fields that are stored as they are stay as they are.

        Raises:
            NonFiniteActivation: a value is NaN or infinite.
        """
        codecs = {name: codec.fields[name] for name in self.fields if not codec.fields[name].is_identity}
        if not codecs:
            return self
        _check_finite(self.finite, names)
        fields = {name: values for name, values in self.fields.items() if name not in codecs}
        with torch.inference_mode():
            for name, field_codec in codecs.items():
                encoded = [
                    field_codec.encode(self.fields[name][index, :n_tokens], self.tokens[index, :n_tokens])
                    for index, n_tokens in enumerate(self.n_tokens)
                ]
                for array in field_codec.arrays:
                    fields[array.name] = _concatenate([codes[array.name] for codes in encoded])
        return Capture(self.n_tokens, fields, self.finite, self.tokens, codecs)

    def to_host(self) -> HostCapture:
        """Start copying to the host; on a GPU into pinned memory on a stream of its own, without waiting."""
        tensors = {**self.fields, **{f"finite:{name}": flags for name, flags in self.finite.items()}}
        if next(iter(tensors.values())).device.type != "cuda":
            return HostCapture(
                self.n_tokens, {name: tensor.cpu() for name, tensor in tensors.items()}, None, self.codecs
            )
        stream = _copy_stream(next(iter(tensors.values())).device)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        copies = {}
        with torch.cuda.stream(stream):
            for name, tensor in tensors.items():
                copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
            done = torch.cuda.Event()
            done.record(stream)
        return HostCapture(self.n_tokens, copies, done, self.codecs)


@dataclass(frozen=True)
class HostCapture:
    """A capture on its way to, or in, host memory.

    Attributes:
        n_tokens: length of each sequence, without padding.
        tensors: as `Capture.fields`, and the flags under `finite:<field>`.
        done: set once the copies have arrived; None where they already have.
        codecs: the fields that have been encoded, and with what.
    """

    n_tokens: tuple[int, ...]
    tensors: dict[str, Tensor]
    done: Any
    codecs: Mapping[str, FieldCodec] = field(default_factory=dict)

    @property
    def plain_fields(self) -> list[str]:
        """The fields that are stored as they are."""
        encoded = {array.name for codec in self.codecs.values() for array in codec.arrays}
        return [name for name in self.tensors if not name.startswith("finite:") and name not in encoded]

    def codes(self, field: str, index: int) -> dict[str, np.ndarray]:
        """Rows of the stored arrays of one sequence of an encoded field."""
        rows = {}
        for array in self.codecs[field].arrays:
            start = sum(array.n_rows(n_tokens) for n_tokens in self.n_tokens[:index])
            rows[array.name] = self.tensors[array.name][start : start + array.n_rows(self.n_tokens[index])].numpy()
        return rows

    def wait(self) -> None:
        """Block until the copies have arrived."""
        if self.done is not None:
            self.done.synchronize()

    def array(self, field: str, index: int) -> np.ndarray:
        """Values of one sequence, [n_tokens, *token_shape] in the storage dtype (uint16 for bfloat16)."""
        values = self.tensors[field][index, : self.n_tokens[index]]
        return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()

    def check_finite(self, names: Sequence[str]) -> None:
        """Refuse NaN and infinity.

        Args:
            names: what to call each sequence of the batch.

        Raises:
            NonFiniteActivation: naming the first sequence, field and layer.
        """
        prefix = "finite:"
        _check_finite(
            {key[len(prefix) :]: flags for key, flags in self.tensors.items() if key.startswith(prefix)}, names
        )


def _concatenate(rows: Sequence[Tensor]) -> Tensor:
    """Join along axis 0; of 16-bit unsigned numbers, for which few kernels exist, the bits."""
    if rows[0].dtype == torch.uint16:
        return torch.cat([part.view(torch.int16) for part in rows]).view(torch.uint16)
    return torch.cat(list(rows))


def _check_finite(finite: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Refuse NaN and infinity.

    Args:
        finite: store field -> bool [B, L or 1].
        names: what to call each sequence of the batch.
    """
    for name, flags in finite.items():
        if not bool(flags.all()):
            index, layer = (int(value) for value in (~flags).nonzero()[0])
            where = f"kv of layer {layer}" if name == "kv" else name
            raise NonFiniteActivation(
                f"Sequence {names[index]}: {where} holds NaN or infinity. The target overflows in this dtype; "
                "choose another --dtype or --compute-dtype (bfloat16 has the range of float32, float16 has not)."
            )


def capture(
    model: Any,
    sequences: Sequence[np.ndarray],
    spec: ActivationSpec,
    dtype: torch.dtype,
    uses_cache: bool | None = None,
) -> Capture:
    """Run the target over a batch.

    Args:
        model: transformers causal LM in evaluation mode; its LM head is not run.
        sequences: B arrays of token ids, int32 [n_tokens].
        spec: what to keep.
        dtype: dtype in which activations are kept.
        uses_cache: whether the forward fills a cache; default: where keys and values are kept. A cache may change the
            kernels that attention picks, and so last bits.

    Returns:
        The activations, equal to those of each sequence alone up to rounding.
    """
    n_tokens = tuple(len(sequence) for sequence in sequences)
    width = max(n_tokens)
    # Repeating a sequence's own last token keeps the pad token, and warnings about it, out of the batch.
    padded = np.stack([np.pad(tokens, (0, width - len(tokens)), mode="edge") for tokens in sequences])
    input_ids = torch.from_numpy(padded.astype(np.int64)).to(model.device)
    valid = torch.arange(width, device=model.device) < torch.tensor(n_tokens, device=model.device)[:, None]  # [B, T]
    cache = new_cache() if spec.kv or uses_cache else None
    fields: dict[str, Tensor] = {}
    with torch.inference_mode(), layer_outputs(model, spec.layers) as outputs:
        last = model.model(input_ids=input_ids, past_key_values=cache, use_cache=cache is not None).last_hidden_state
        if cache is not None and spec.kv:
            keys, values = cache_layers(cache)
            packed = pack_kv([key.to(dtype) for key in keys], [value.to(dtype) for value in values])  # [B, T, L, D]
            fields["kv"] = packed.unflatten(-1, (keys[0].shape[1], 2, -1))  # [B, T, L, H_kv, 2, d]
        if spec.last:
            fields["hidden/last"] = last.to(dtype)
        for layer in spec.layers:
            fields[f"hidden/layer_{layer}"] = outputs[layer].to(dtype)
        finite = {name: _finite_rows(values, valid) for name, values in fields.items()}
    return Capture(n_tokens, fields, finite, input_ids)


def _finite_rows(values: Tensor, valid: Tensor) -> Tensor:
    """Whether the valid tokens of each sequence, and layer where there are several, are finite: bool [B, L or 1]."""
    n_layers = values.shape[2] if values.dim() > 3 else 1
    # x * 0 is NaN exactly where x is not finite, and a sum keeps it: two cheap passes without a large bool array.
    probe = (values * 0).flatten(2).unflatten(-1, (n_layers, -1)).sum(-1)  # [B, T, L]
    return (torch.isfinite(probe) | ~valid[..., None]).all(1)


_STREAMS: dict[torch.device, Any] = {}


def _copy_stream(device: torch.device) -> Any:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]
