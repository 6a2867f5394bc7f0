"""What a training step sees: named tensors, never a store. Encoded activations are decoded on the training device.

Shapes: B sequences, T tokens (longest of the batch), L target layers, D packed KV width, E target width.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ...moa.drafters.training import Draws, TrainingInputs
from ...storage.codecs.field import FieldCodec
from ...storage.read.store import token_shape
from ...storage.schema import TOKENS

LAYER_OUTPUTS = "layer_outputs"
"""Attribute of ``TrainingInputs`` that is made of several fields."""


@dataclass
class EncodedField:
    """A field as the store holds it, for all sequences of a micro-batch."""

    codec: FieldCodec
    """The field's codec."""
    rows: dict[str, Tensor]
    """Stored array -> [B, n_rows, *row_shape]."""
    n_tokens: tuple[int, ...]
    """Length of each sequence."""
    dtype: torch.dtype
    """The dtype of the decoded values: the one in which the field would be stored without a codec."""
    layers: list[int] | None = None
    """The layers that the rows hold, of a field that has layers; None for all."""

    def decode(self, tokens: Tensor) -> Tensor:
        """Decode on the device of the rows: [B, T, *token_shape], zero behind each sequence.

        Args:
            tokens: int [B, T], the token ids, for codecs that predict from them.
        """
        device = next(iter(self.rows.values())).device
        shape = (len(self.n_tokens), max(self.n_tokens), *token_shape(self.codec.spec, self.layers))
        values = torch.zeros(shape, dtype=self.dtype, device=device)
        for index, n_tokens in enumerate(self.n_tokens):
            own = {name: rows[index] for name, rows in self.rows.items()} | {TOKENS: tokens[index]}
            values[index, :n_tokens] = self.codec.decode(own, 0, n_tokens, self.layers)
        return values


@dataclass
class Batch:
    """One micro-batch."""

    inputs: TrainingInputs
    """Right-padded activations."""
    draws: Draws
    """Step bounds and staircase rows, already drawn."""
    denominator: float
    """The divisor of sums over loss positions, which weighs unequal micro-batches and devices by their positions."""
    n_tokens: int
    """Real tokens, without padding."""
    n_tokens_of_all: int = 0
    """Those of the micro-batches that all devices take at the same time."""
    n_bytes_read: int = 0
    """Bytes of the store that were read for it."""
    index: int = 0
    """Number of a micro-batch within its step on this device; number of a validation batch over all devices."""
    n_parts: int = 1
    """Micro-batches of the step on this device."""
    copied: torch.cuda.Event | None = None
    """Done when the batch has arrived on its device; None where there is nothing to wait for."""
    encoded: dict[str, EncodedField] = field(default_factory=dict)
    """Attribute of ``inputs`` -> what it will be decoded from; until then the attribute is an empty tensor. Layer
    outputs are numbered: ``layer_outputs.0`` and so on."""

    def to(self, device: torch.device, **kwargs: Any) -> "Batch":
        """Copy the batch to a device."""
        encoded = {
            name: replace(item, rows={array: rows.to(device, **kwargs) for array, rows in item.rows.items()})
            for name, item in self.encoded.items()
        }
        inputs, draws = _move(self.inputs, device, **kwargs), _move(self.draws, device, **kwargs)
        return replace(self, inputs=inputs, draws=draws, encoded=encoded)

    @torch.no_grad()
    def decode(self) -> "Batch":
        """Decode what is encoded, on the device where it is."""
        if not self.encoded:
            return self
        decoded = {name: item.decode(self.inputs.tokens) for name, item in self.encoded.items()}
        if "kv" in decoded:
            decoded["kv"] = decoded["kv"].flatten(3)
        layers = tuple(
            decoded.pop(f"{LAYER_OUTPUTS}.{index}", states) for index, states in enumerate(self.inputs.layer_outputs)
        )
        return replace(self, inputs=replace(self.inputs, **decoded, layer_outputs=layers), encoded={})


def _move(item: Any, device: torch.device, **kwargs: Any) -> Any:
    values = {entry.name: getattr(item, entry.name) for entry in fields(item)}
    moved: dict[str, Any] = {name: v.to(device, **kwargs) for name, v in values.items() if isinstance(v, Tensor)}
    if layers := values.get(LAYER_OUTPUTS):
        moved[LAYER_OUTPUTS] = tuple(states.to(device, **kwargs) for states in layers)
    return replace(item, **moved)
