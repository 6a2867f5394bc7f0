"""The KV encoder of Mixture of Attentions: one vector per position, made from the KV of all layers.

Shapes: B batch, T tokens, n positions, L target layers with KV of their own, H_kv target KV heads,
d target head dim, D = 2 * H_kv * d (D of the widest layer if layers have different widths), E
target width, G groups of layers.

    KV of all layers [B, T, L, D] -> layer self-attention -> means over layers -> linear
                                  -> encoded KV [B, T, E]

In layer self-attention, the target layers are the tokens: the KV of each layer attends to the KV of
the other layers at the same position. Three settings can differ from the Mixture of Attentions
paper (arXiv 2410.03804):

- With ``layer_groups`` above 1, the layers are divided into groups, and the input of the linear
  layer is one mean per group. The paper has a single mean of D numbers. If a target has few KV
  heads, D is smaller than E, the width of the encoded KV, so a single mean would lose information.
- With ``unrotated_keys``, the keys before RoPE are encoded. After RoPE, the same content has a
  different key at each position.
- With a ``layer_stride`` n, only the last layer and every n-th layer below it are encoded. Training
  then reads less KV, and layer self-attention has fewer inputs. For an 8B target, layer
  self-attention takes most of the time of a training step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import DrafterError
from ..nn.kv import positions_from, rotate_packed_keys
from ..nn.layers import DecoderBlock, DecoderBlockSizes, Rotary
from ..nn.masks import added, positions_of
from ..targets.cache import KVSource, check_arrived
from ..targets.facts import TargetFacts
from .sizes import DrafterSizes, Flag, Indices, Size, SizeOrZero, largest_divisor, multiple_of_32

# Maximum number of positions in one call of layer self-attention. In this call, each position is a
# sequence of L layers, and CUDA attention kernels accept at most 65,535 sequences. The maximum also
# limits the memory of the MLP, which has L rows per position.
_MAX_POSITIONS = 1 << 13


@dataclass(frozen=True, kw_only=True)
class KVEncoderSizes(DrafterSizes):
    """The sizes of a KV encoder.

    In a drafter without a KV encoder, the sizes of layer self-attention are 0.
    """

    left_out = ("draft_", "kv_group")

    # D = 2 * target KV heads * target head dim. If the layers of the target have different KV
    # widths, D is the KV width of the widest layer.
    kv_width: SizeOrZero = 0
    # The index of the KV group of each layer with KV. The layers of a KV group have the same KV
    # shape. Empty if all layers have the same KV shape.
    kv_groups: Indices = ()
    # For each KV group, the KV width of its layers. This width replaces D.
    kv_group_widths: Indices = ()
    # Number of query heads of layer self-attention. This number must divide ``kv_width``.
    layer_attention_heads: SizeOrZero = 0
    layer_attention_head_dim: SizeOrZero = 0  # Head dim of layer self-attention.
    layer_attention_kv_heads: SizeOrZero = 0  # Number of KV heads of layer self-attention.
    # MLP width of layer self-attention.
    layer_attention_mlp_width: SizeOrZero = 0
    # If false, there is no layer self-attention, and only the KV of the target's last layer is
    # encoded.
    layer_attention: Flag = True
    # G, number of groups of consecutive layers; 1 in the Mixture of Attentions paper.
    layer_groups: Size = 2
    # True if the keys before RoPE are encoded. In the Mixture of Attentions paper, the keys after
    # RoPE are encoded.
    unrotated_keys: Flag = True
    # n: only the last layer and every n-th layer below it are encoded. With 1, all layers are
    # encoded, as in the Mixture of Attentions paper.
    layer_stride: Size = 1

    @property
    def n_kv_layers(self) -> int:
        """L, the number of target layers that have KV of their own."""
        return len(self.kv_groups) or self.n_layers

    @property
    def encoded_layers(self) -> tuple[int, ...]:
        """The encoded layers, as indices among the L layers with KV."""
        layers = strided_layers(self.n_kv_layers, self.layer_stride)
        return layers if self.layer_attention else layers[-1:]

    @property
    def read_kv_layers(self) -> tuple[int, ...] | None:
        """The layers whose KV training reads, as indices among the L layers with KV.

        None means all layers.
        """
        if not self.layer_attention:
            return (-1,)
        return None if self.layer_stride == 1 else self.encoded_layers

    def encoder_problems(self) -> Iterator[str]:
        """Yield one message for each contradiction between the sizes of the KV encoder."""
        heads = self.layer_attention_heads
        kv_heads = self.layer_attention_kv_heads
        head_dim = self.layer_attention_head_dim
        mlp_width = self.layer_attention_mlp_width
        n_layers = self.n_kv_layers
        n_groups = len(self.kv_group_widths)
        n_encoded = len(strided_layers(n_layers, self.layer_stride))
        if min(self.kv_width, heads, kv_heads, head_dim, mlp_width) < 1:
            yield (
                "kv_width, layer_attention_heads, layer_attention_kv_heads, "
                "layer_attention_head_dim and layer_attention_mlp_width must be at least 1"
            )
        if heads % max(1, kv_heads):
            yield (
                f"layer_attention_kv_heads is {kv_heads}, which must divide layer_attention_heads, "
                f"{heads}"
            )
        if head_dim % 2:
            yield f"layer_attention_head_dim is {head_dim}, expected an even number"
        if self.layer_stride > max(1, n_layers):
            yield (
                f"layer_stride is {self.layer_stride}, expected at most {n_layers}, the number of "
                "target layers"
            )
        if (
            not set(self.kv_groups) <= set(range(n_groups))
            or max(self.kv_group_widths, default=0) > self.kv_width
        ):
            yield (
                "kv_groups must contain indexes into kv_group_widths, and no width may be larger "
                f"than kv_width, {self.kv_width}"
            )
        if self.layer_groups > max(1, n_encoded):
            yield (
                f"layer_groups is {self.layer_groups}, expected at most {n_encoded}, the number of "
                "target layers that are encoded"
            )

    @staticmethod
    def encoder_defaults(facts: TargetFacts, given: Mapping[str, Any]) -> dict[str, Any]:
        """Choose sizes in the same proportions as the MoA authors' drafter for Llama-3-8B."""
        grouped = {}
        kv_width = facts.kv_width
        if facts.splits_kv:
            numbered_layers: list[tuple[int, int]] = []
            for number, group in enumerate(facts.kv_groups):
                for layer in group.layers:
                    numbered_layers.append((layer, number))
            grouped["kv_groups"] = tuple(number for _, number in sorted(numbered_layers))
            grouped["kv_group_widths"] = tuple(group.shape.width for group in facts.kv_groups)
        # A target that caches latents has many heads but narrow KV. If layer self-attention had as
        # many heads as the target, its heads would be too narrow. So limit their number.
        n_heads = min(facts.n_heads, max(1, kv_width // 64)) if grouped else facts.n_heads
        heads = given.get("layer_attention_heads") or _layer_attention_heads(kv_width, n_heads)
        # The number of heads must divide the KV width, with one exception: the target's number of
        # heads is accepted if it gives an even head dim after rounding down. The MoA authors' code
        # uses the target's number of heads, and rounds the head dim down.
        if kv_width % heads and (heads != facts.n_heads or kv_width // heads % 2):
            raise DrafterError(
                f"`layer_attention_heads` is {heads}, which does not divide {kv_width}, the KV "
                "width (the number of values in all keys and values of one token in one target "
                "layer). Give "
                f"`layer_attention_heads={_layer_attention_heads(kv_width, facts.n_heads)}`."
            )
        if given.get("unrotated_keys"):
            facts.check_rotation()
        return grouped | {
            "kv_width": kv_width,
            "unrotated_keys": facts.rotates_as_llama,
            "layer_attention_heads": heads,
            "layer_attention_head_dim": kv_width // heads,
            "layer_attention_kv_heads": largest_divisor(heads, min(heads, facts.n_kv_heads)),
            "layer_attention_mlp_width": multiple_of_32(kv_width * 1.5),
        }


def strided_layers(n_layers: int, stride: int) -> tuple[int, ...]:
    """Return the last of ``n_layers`` layers and every ``stride``-th layer below it, ascending."""
    return tuple(range((n_layers - 1) % stride, n_layers, stride))


def _layer_attention_heads(kv_width: int, n_heads: int) -> int:
    # RoPE needs an even head dim. So choose a number of heads that divides half of the KV width.
    return largest_divisor(kv_width // 2, min(n_heads, kv_width))


class KVEncoder(nn.Module):
    """The part of a drafter that encodes KV.

    Drafters inherit from this class. If the encoder were a submodule of a drafter, the names of its
    weights would get a prefix that the published names do not have.
    """

    config: KVEncoderSizes
    rotary: Rotary

    def build_encoder(self) -> None:
        """Create the weights of the encoder."""
        config = self.config
        if config.layer_attention:
            sizes = DecoderBlockSizes(
                config.kv_width, config.layer_attention_heads, config.layer_attention_kv_heads,
                config.layer_attention_head_dim, config.layer_attention_mlp_width, config.norm_eps,
                config.qkv_bias,
            )  # fmt: skip
            self.layer_self_attention = DecoderBlock(sizes)
        self._kv_groups = [
            config.kv_groups[layer] for layer in config.encoded_layers if config.kv_groups
        ]
        # If layers have different KV widths, project their KV to the width of the widest layer.
        if len(widths := config.kv_group_widths) > 1:
            self.kv_inputs = nn.ModuleDict()
            for group in sorted(set(self._kv_groups)):
                project = nn.Linear(widths[group], config.kv_width, bias=False)
                self.kv_inputs[str(group)] = project
        n_means = config.layer_groups if config.layer_attention else 1
        self.kv_to_hidden = nn.Linear(n_means * config.kv_width, config.hidden_size, bias=True)
        # If the target is remote, it sends numbers for each position: either the means over the
        # layer groups, or the encoded KV that is computed from these means. Send whichever has
        # fewer values.
        self._sends_means = n_means * config.kv_width < config.hidden_size
        self.sent_width = min(n_means * config.kv_width, config.hidden_size)
        rope = config.rope_parameters, config.max_position_embeddings
        self.layer_rotary = Rotary(config.layer_attention_head_dim, *rope)

    def encode_kv(self, kv: Tensor, positions: Tensor | None = None) -> Tensor:
        """Encode packed KV [B, T, L, D]: project the means of :meth:`encode_means` to [B, T, E]."""
        hidden: Tensor = self.kv_to_hidden(self.encode_means(kv, positions))
        return hidden

    def encode_means(self, kv: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run layer self-attention, and concatenate the means of the G layer groups: [B, T, G * D].

        Without layer self-attention, the result is the KV of the last layer.

        Args:
            kv: [B, T, L, D], packed KV of all layers, or only of the layers that are encoded.
            positions: [B or 1, T] int64, the positions of the keys in RoPE. If None, the positions
                are 0 to T - 1.
        """
        if self.config.layer_stride > 1 and kv.shape[2] == self.config.n_kv_layers:
            first = strided_layers(self.config.n_kv_layers, self.config.layer_stride)[0]
            kv = kv[:, :, first :: self.config.layer_stride]
        if not self.config.layer_attention:
            kv = kv[:, :, -1:]
        if positions is None:
            positions = positions_of(kv)[None, :]
        # In layer self-attention, the position of a layer is its index, and all layers see each
        # other.
        rotation = self.layer_rotary(torch.arange(kv.shape[2], device=kv.device)[None, :])
        summaries = []  # One tensor [n, G * D] for each chunk of n positions.
        position_parts = positions.expand(len(kv), -1).flatten().split(_MAX_POSITIONS)
        for part, part_positions in zip(
            kv.flatten(0, 1).split(_MAX_POSITIONS), position_parts, strict=True
        ):
            part = self._to_common_width(part.to(self.kv_to_hidden.weight.dtype))
            if self.config.unrotated_keys:
                part = rotate_packed_keys(part, self.rotary.inverse(part_positions))
            if self.config.layer_attention:
                means = self.layer_self_attention.attend_self_means(
                    part, rotation, self.config.layer_groups
                )
                summaries.append(means.flatten(1))
            else:
                summaries.append(part[:, 0])
        summary = summaries[0] if len(summaries) == 1 else torch.cat(summaries)
        all_means: Tensor = summary.unflatten(0, kv.shape[:2])
        return all_means

    def _to_common_width(self, kv: Tensor) -> Tensor:
        """Project the KV of layers with different widths to the common width D.

        The input [n, L, D] is padded to the common width. The result is [n, L, D].
        """
        if len(self.config.kv_group_widths) < 2:
            return kv
        layers = list(kv.unbind(1))
        for group, project in self.kv_inputs.items():
            indices: list[int] = []
            for index, layer_group in enumerate(self._kv_groups):
                if str(layer_group) == group:
                    indices.append(index)
            group_kv = torch.stack([layers[index] for index in indices], dim=1)
            for index, made in zip(
                indices, project(group_kv[..., : project.in_features]).unbind(1), strict=True
            ):
                layers[index] = made
        return torch.stack(layers, dim=1)

    def encode_cached(
        self, cache: KVSource, starts: Sequence[int], counts: Sequence[int]
    ) -> Tensor:
        """Encode the KV of ``counts[row]`` positions of each row, from ``starts[row]`` on.

        The result is [B, n, E], where n is the largest count. Rows with smaller counts are padded.
        """
        check_arrived(cache, added(starts, counts))
        n_tokens = max(counts)
        kv = cache.packed(
            starts, n_tokens, 0 if self.config.layer_attention else self.config.n_kv_layers - 1
        )
        return self.encode_kv(
            kv.to(self.kv_to_hidden.weight.dtype), positions_from(starts, n_tokens, kv.device)
        )

    # Drafting with the target on another machine

    def encoded_lengths(self, state: Any) -> Sequence[int]:
        """Return for each row the number of positions whose encoded KV is in the state."""
        raise NotImplementedError

    def append_encoded(
        self, state: Any, encoded: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        """Append the encoded KV [B, n, E] of the next n positions of each row to a state.

        Only the first ``counts[row]`` positions of a row are real, the others are padding. If
        ``counts`` is None, all positions are real.
        """
        raise NotImplementedError

    def _make_context(self, hidden: Tensor, kv: Tensor | None, positions: Tensor) -> Tensor:
        assert kv is not None
        encode = self.encode_means if self._sends_means else self.encode_kv
        return encode(kv[None], positions[None])[0]

    def _take_context(self, state: Any, context: Tensor) -> Tensor:
        self._append_sent(state, context[None])
        return context[:, self.sent_width :]

    def reuse_context(
        self, state: Any, contexts: Tensor, starts: Sequence[int], counts: Sequence[int]
    ) -> None:
        """See :meth:`.Drafter.reuse_context`."""
        state.forget_drafts()
        fitting: list[int] = []
        for length, start, count in zip(self.encoded_lengths(state), starts, counts, strict=True):
            fitting.append(count if length == start else 0)
        if any(fitting):
            self._append_sent(state, contexts, fitting)

    def _append_sent(
        self, state: Any, contexts: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        sent = contexts[..., : self.sent_width]
        encoded = self.kv_to_hidden(sent) if self._sends_means else sent
        self.append_encoded(state, encoded, counts)
