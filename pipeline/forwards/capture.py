"""Run the target over a batch of sequences and copy the requested activations to the host.

Shapes: B sequences, T tokens of the longest sequence, L decoder layers, H_kv key/value heads, d
head dim, E width.

Sequences are padded on the right. Attention is causal, so no token of a sequence attends to the
padding, and no mask is needed. Values computed at padding positions are discarded.

A CUDA device copies asynchronously only to pinned memory. When a batch is freed, torch keeps its
pinned memory and reuses it for later batches. Each batch is copied on a stream of its own::

    main thread    forward 4 | forward 5 | forward 6 |
    copy streams     copy 3  |   copy 4  |   copy 5  |      waits only for the forward
    writer thread    write 2 |   write 3 |   write 4 |      waits for the copy
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import TargetError
from ...moa.nn.kv import cache_layers, new_cache, pack_kv
from ...moa.targets.facts import TargetFacts
from ...moa.targets.families import layer_outputs, text_model
from ...moa.targets.live import Mark, mark_moment, seconds_between
from ...storage.codecs.registry import StoreCodec
from ..config import ActivationSpec


@dataclass(frozen=True)
class Capture:
    """Activations of one batch. They are on the target's device, or on the host.

    The method :meth:`to_host` copies them to the host.
    """

    # Length of each sequence, without padding.
    n_tokens: tuple[int, ...]
    # Token ids, int64 [B, T], on the device. Values beyond a sequence's length are arbitrary.
    tokens: Tensor
    # Maps each field to a bool tensor that is true where all values are finite. For kv, the shape
    # is [B, L], with one entry per sequence and layer. For hidden states, it is [B, 1].
    finite: dict[str, Tensor]
    # Maps each field that is not encoded to its values, [B, T, *token_shape]. The shape of kv is
    # [B, T, L, H_kv, 2, d], and its keys are after RoPE. The shape of hidden/last and
    # hidden/layer_k is [B, T, E].
    fields: dict[str, Tensor]
    # The encoded fields, with one entry per sequence. The entry maps the name of a field to a dict.
    # The dict maps the name of a stored array to the rows for this array, [n_rows, *row_shape]. If
    # no field is encoded, there are no entries.
    codes: Sequence[Mapping[str, Mapping[str, Tensor]]] = ()
    # Maps each field of keys and values to the numbers of the layers that it contains, in the order
    # of its layer axis.
    layers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # The moments at which the asynchronous copy to the host starts and ends, as recorded on the
    # device. If the values were not copied asynchronously, the value is None.
    copying: tuple[Mark, Mark] | None = None

    def encode(self, codec: StoreCodec, names: Sequence[str]) -> "Capture":
        """Encode fields with the store's codec, on the device.

        Returns a capture in which the fields with a lossy codec are encoded. The other fields are
        unchanged.

        Args:
            codec: the codec of the store.
            names: names of the sequences, for error messages.
        """
        plain: dict[str, Tensor] = {}
        lossy: dict[str, Tensor] = {}
        for name, activations in self.fields.items():
            if codec.fields[name].is_identity:
                plain[name] = activations
            else:
                lossy[name] = activations
        if not lossy:
            return self
        self.check_finite(names)
        lossy_codec = codec.only(lossy)
        codes: list[dict[str, dict[str, Any]]] = []
        with torch.inference_mode():
            for index, n_tokens in enumerate(self.n_tokens):
                values: dict[str, Tensor] = {}
                for name, activations in lossy.items():
                    values[name] = activations[index, :n_tokens]
                tokens = self.tokens[index, :n_tokens]
                codes.append(lossy_codec.encode(values, tokens, is_finite=True))
        return replace(self, fields=plain, codes=codes)

    def to_host(self) -> "Capture":
        """Return a capture with copies of the values in host memory.

        Copies from a CUDA device are asynchronous. Call :meth:`wait` on the result before you read
        its values.
        """
        device = self.tokens.device
        if device.type != "cuda":
            return self._mapped(Tensor.cpu)
        # Copy each batch on a separate stream. When a batch is freed, torch reuses the batch's
        # pinned memory only after all work on the copying stream is done. On a shared stream, this
        # work would include the copies of later batches.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            began = mark_moment(device)
            copies = self._mapped(_start_copy)
            return replace(copies, copying=(began, mark_moment(device)))

    def _mapped(self, move: Callable[[Tensor], Tensor]) -> "Capture":
        finite = _each_moved(self.finite, move)
        fields = _each_moved(self.fields, move)
        codes: list[dict[str, dict[str, Tensor]]] = []
        for by_field in self.codes:
            codes.append({name: _each_moved(rows, move) for name, rows in by_field.items()})
        return replace(self, finite=finite, fields=fields, codes=codes)

    def wait(self) -> float:
        """Wait for an asynchronous copy and return its duration in seconds."""
        return 0.0 if self.copying is None else seconds_between(*self.copying)

    def check_finite(self, names: Sequence[str]) -> None:
        """Refuse NaN and infinity. The error names a sequence, field and layer with such a value."""
        for name, flags in self.finite.items():
            if not bool(flags.all()):
                index, layer = (~flags).nonzero()[0].tolist()
                where = (
                    f"{name} of layer {self.layers[name][layer]}" if name in self.layers else name
                )
                raise TargetError(
                    f"Sequence {names[index]} has NaN or infinity in {where}, because the target "
                    "computes numbers that its data type cannot represent. Choose bfloat16 or "
                    "float32 for `dtype` and `compute_dtype`. Their range is larger than that of "
                    "float16."
                )

    def rows(self, name: str, index: int) -> np.ndarray | dict[str, np.ndarray]:
        """Return the values of one field of one sequence, for ``PartWriter.write``.

        The values must be in host memory.

        Returns:
            For a field that is not encoded, the result is an array of its values, in the shape
            [n_tokens, *token_shape] and the storage dtype. NumPy has no bfloat16, so bfloat16
            values are returned as uint16 with the same bits. For an encoded field, the result is a
            dict from the name of each stored array to the rows for this array.
        """
        if name in self.fields:
            values = self.fields[name][index, : self.n_tokens[index]]
            return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
        return {array: rows.numpy() for array, rows in self.codes[index][name].items()}


def _start_copy(source: Tensor) -> Tensor:
    """Start copying a tensor to pinned host memory, on the current CUDA stream. Returns the copy."""
    copied = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    copied.copy_(source, non_blocking=True)
    # Tell torch's allocator that the copy stream uses the source. Otherwise, the allocator could
    # reuse the source's memory before the copy is done.
    source.record_stream(torch.cuda.current_stream(source.device))
    return copied


def _each_moved(
    tensors: Mapping[str, Tensor], move: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return a dict with the same keys, in which each tensor is replaced by ``move(tensor)``."""
    return {key: move(tensor) for key, tensor in tensors.items()}


def capture(
    model: Any,
    sequences: Sequence[np.ndarray],
    spec: ActivationSpec,
    dtype: torch.dtype,
    uses_cache: bool | None = None,
) -> Capture:
    """Run the target over a batch and collect the requested activations.

    Up to rounding, the activations of a sequence do not depend on the rest of the batch.

    Args:
        model: transformers causal LM in evaluation mode; its LM head is not run.
        sequences: B arrays of token ids, int32 [n_tokens].
        spec: the activations to capture.
        dtype: dtype of the captured activations.
        uses_cache: whether the forward fills a KV cache even if keys and values are not captured.
            With a KV cache, torch may choose other attention kernels, which change the last bits of
            the activations.

    Returns:
        The activations of the batch, on the device of the model.
    """
    input_ids, valid = padded_tokens(sequences, model.device)
    facts = TargetFacts.of_model(model)
    cache = None
    if spec.kv or uses_cache:
        cache = new_cache([shape is None for shape in facts.kv_shapes])
    fields: dict[str, Tensor] = {}
    with torch.inference_mode(), layer_outputs(model, spec.layers) as outputs:
        last = text_model(model)(
            input_ids=input_ids, past_key_values=cache, use_cache=cache is not None
        ).last_hidden_state
        if cache is not None and spec.kv:
            for group in facts.kv_groups:
                keys, values = cache_layers(cache, group.layers)
                # Pack the keys and values of the L layers in this KV group into one tensor,
                # [B, T, L, D]. D is the number of key and value elements per token and layer, over
                # all heads.
                packed = pack_kv(
                    [key.to(dtype) for key in keys], [value.to(dtype) for value in values]
                )
                is_equal = group.shape.key_width == group.shape.value_width
                heads = (group.shape.n_heads, 2, -1) if is_equal else (group.shape.n_heads, -1)
                # Split D into heads. The shape becomes [B, T, L, H_kv, 2, d]; the axis of size 2 is
                # for key and value. If key and value have different widths, they stay concatenated:
                # [B, T, L, H_kv, d_key + d_value].
                fields[group.field] = packed.unflatten(-1, heads)
        if spec.last:
            fields["hidden/last"] = last.to(dtype)
        for layer in spec.layers:
            fields[f"hidden/layer_{layer}"] = outputs[layer].to(dtype)
        finite = finite_rows(fields, valid)
    layers = {group.field: group.layers for group in facts.kv_groups}
    return Capture(tuple(map(len, sequences)), input_ids, finite, fields, layers=layers)


def padded_tokens(sequences: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Stack B sequences of token ids. Each is padded on the right with copies of its last token.

    The sequences are not padded with the pad token, because transformers would print a warning.

    Returns:
        Token ids, int64 [B, T], and a mask that is false at the padding, bool [B, T].
    """
    lengths = np.array([len(tokens) for tokens in sequences])
    width = lengths.max()
    padded = [np.pad(tokens, (0, width - len(tokens)), mode="edge") for tokens in sequences]
    valid = np.arange(width) < lengths[:, None]
    ids = torch.from_numpy(np.stack(padded).astype(np.int64))
    return ids.to(device), torch.from_numpy(valid).to(device)


def finite_rows(fields: Mapping[str, Tensor], valid: Tensor) -> dict[str, Tensor]:
    """Check whether all values at the valid tokens of each sequence are finite.

    Args:
        fields: maps each field to its values. The shape is [B, T, L, ...] if the field has a layer
            axis, and otherwise [B, T, E].
        valid: bool [B, T], false at the padding.

    Returns:
        A dict that maps each field to a bool tensor, which is true where all values are finite. The
        shape is [B, L] if the field has a layer axis, and otherwise [B, 1].
    """
    finite: dict[str, Tensor] = {}
    for name, values in fields.items():
        n_layers = values.shape[2] if values.dim() > 3 else 1
        # `isfinite` of all values would need a large bool tensor. Instead, use sums: `x * 0` is NaN if
        # x is not finite, and otherwise 0, and a sum with a NaN is NaN. So a sum of `x * 0` shows
        # whether all x are finite. There is one sum per sequence, token and layer: [B, T, L].
        probe = (values * 0).flatten(2).unflatten(-1, (n_layers, -1)).sum(-1)
        finite[name] = (torch.isfinite(probe) | ~valid[..., None]).all(1)
    return finite
