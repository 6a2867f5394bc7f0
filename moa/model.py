"""Mixture of Attentions drafter (Zimmer et al., ICLR 2025, arXiv 2410.03804): training forward and decoding step.

Shapes: B batch, T tokens, Q drafted positions (queries), L target layers, H_kv target KV heads, d target head dim,
D = 2 * H_kv * d, E target width, V vocabulary, N target layers used for inference.

    KV of all layers [B, T, L, D] -> layer self-attention -> mean over layers -> linear -> memory [B, T, E]
    tokens -> embeddings -> causal self-attention -> cross-attention to the memory
           -> (last N target layers, final norm) -> LM head

Training runs many draft rounds at once: position i sees the memory up to its last context position s(i), exactly what a
draft step sees after the verification that ended at s(i). Both paths call the same blocks.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from . import masks
from .bundle import FrozenTarget
from .config import DrafterConfig
from .kv_layout import unpack_kv
from .layers import DecoderBlock, KVBuffer, Rotary, Rotation


@dataclass
class DrafterOutputs:
    """What the training forward gives, for the queries [B, Q] it was asked for (all T positions by default)."""

    queries: Tensor
    """[B, Q] int64, positions."""
    memory: Tensor
    """[B, T, E], the projection that cross-attention attends to."""
    self_attention: Tensor
    """[B, Q, E]."""
    cross_attention: Tensor
    """[B, Q, E]; with target layer inference this is regressed onto the hidden state that enters the last N layers."""
    target_layers_input: Tensor
    """[B, Q, E]; differs from cross_attention only under the official overwriting of context positions."""
    target_layers_output: Tensor
    """[B, Q, E], before the final norm; the cross-attention itself when N = 0."""
    features: Tensor
    """[B, Q, E], what the LM head sees."""


@dataclass
class DraftState:
    """The drafter's caches of one sequence while decoding (batch 1)."""

    self_attention: KVBuffer = field(default_factory=KVBuffer)
    """Of every token that was fed; depends on token and position alone, so accepted drafts stay valid."""
    memory: KVBuffer = field(default_factory=KVBuffer)
    """Cross-attention keys and values of the positions that have target KV."""
    target_layers: list[KVBuffer] = field(default_factory=list)
    """Of the drafted positions of this round, one per target layer used for inference."""


class MoADrafter(nn.Module):
    """The trained part: layer self-attention, projection, self-attention, cross-attention."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.self_attention = DecoderBlock(config.self_attention)
        self.cross_attention = DecoderBlock(config.cross_attention)
        self.layer_self_attention = DecoderBlock(config.layer_self_attention)
        self.kv_to_hidden = nn.Linear(config.kv_width, config.hidden_size, bias=True)
        rope = config.rope_parameters, config.max_position_embeddings
        self.rotary = Rotary(config.head_dim, *rope)
        self.layer_rotary = Rotary(config.layer_attention_head_dim, *rope)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None, std: float = 0.02, official: bool = False) -> None:
        """Draw the starting weights: N(0, std) for matrices, 0 for biases, 1 for norms.

        Args:
            generator: of the draws.
            std: standard deviation of the matrices.
            official: norms are drawn from N(0, std) too, as the official code does by accident (``train/moa_spec.py``,
                lines 78-91); it costs about half of the acceptance length of a short run.
        """
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                weight.zero_()
            elif official:
                weight.normal_(0.0, std, generator=generator)
            else:
                weight.fill_(1.0)

    def encode_layers(self, kv: Tensor) -> Tensor:
        """Layer self-attention, bidirectional, RoPE position = layer index: [B, T, L, D] -> [B, T, L, D]."""
        out = self.layer_self_attention.attend_self(kv.flatten(0, 1), self._layer_rotation(kv), mask=None)
        return out.unflatten(0, kv.shape[:2])

    def encode_memory(self, kv: Tensor) -> Tensor:
        """What cross-attention attends to: kv_to_hidden of the mean of :meth:`encode_layers`.

        Args:
            kv: [B, T, L, D].

        Returns:
            [B, T, E].
        """
        mean = self.layer_self_attention.attend_self_mean(kv.flatten(0, 1), self._layer_rotation(kv))  # [B * T, D]
        return self.kv_to_hidden(mean).unflatten(0, kv.shape[:2])

    def _layer_rotation(self, kv: Tensor) -> Rotation:
        return self.layer_rotary(torch.arange(kv.shape[2], device=kv.device)[None, :])

    def forward(
        self,
        frozen: FrozenTarget,
        tokens: Tensor,
        kv: Tensor,
        drafted: Tensor,
        staircase_rows: Tensor,
        queries: Tensor | None = None,
        overwrite_context: Tensor | None = None,
    ) -> DrafterOutputs:
        """Teacher-forced forward of many draft rounds.

        Args:
            frozen: target pieces, with at least N layers.
            tokens: [B, T] int64, right padded.
            kv: [B, T, L, D], packed target KV.
            drafted: [B, T] bool, from :func:`masks.drafted_positions`.
            staircase_rows: [B] bool, rows whose self-attention sees only the drafted block.
            queries: [B, Q] int64 positions to compute features for; None = all.
            overwrite_context: [B, T, E] target hidden state that enters the last N layers. Given: the official form of
                target layer inference, where context positions are overwritten with it and the layers recompute all
                keys from their input (needs ``queries=None``). None: drafted positions attend to the target's own KV
                of verified positions, as in decoding.

        Returns:
            All intermediates, see :class:`DrafterOutputs`.
        """
        n_tokens = tokens.shape[1]
        positions = torch.arange(n_tokens, device=tokens.device)[None, :]  # [1, T]
        if queries is None:
            queries = positions.expand(tokens.shape[0], -1)
        context = masks.last_context(drafted).gather(1, queries)  # [B, Q]

        memory = self.encode_memory(kv)  # [B, T, E]

        rotation = self.rotary(positions)
        query_rotation = self.rotary(queries)
        embeddings = frozen.embed(tokens)
        query_embeddings = embeddings.gather(1, queries[..., None].expand(-1, -1, embeddings.shape[-1]))  # [B, Q, E]
        keys, values = self.self_attention.keys_values(embeddings, rotation)
        self_mask = masks.self_attention_mask(queries, context, staircase_rows, n_tokens)
        x1 = self.self_attention(query_embeddings, query_rotation, keys, values, self_mask)

        keys, values = self.cross_attention.keys_values(memory, rotation)
        x2 = self.cross_attention(x1, query_rotation, keys, values, masks.cross_attention_mask(context, n_tokens))

        entering = x2
        if self.config.target_layer_inference and overwrite_context is not None:
            entering = torch.where(drafted[..., None], x2, overwrite_context.to(x2.dtype))
            leaving = self._recomputed_target_layers(frozen, entering, positions)
        elif self.config.target_layer_inference:
            leaving = self._mixed_target_layers(frozen, entering, kv, queries, context)
        else:
            leaving = x2
        features = frozen.norm(leaving) if self.config.target_layer_inference else leaving
        return DrafterOutputs(queries, memory, x1, x2, entering, leaving, features)

    def _recomputed_target_layers(self, frozen: FrozenTarget, x: Tensor, positions: Tensor) -> Tensor:
        """Official target layer inference: causal layers over the overwritten stream (``moa_spec.py`` 223-251)."""
        queries = positions.expand(x.shape[0], -1)
        causal = queries[0][None, None, :] <= queries[0][None, :, None]
        if frozen.sliding_window is not None:
            causal = causal & (queries[0][None, :, None] - queries[0][None, None, :] < frozen.sliding_window)
        rotation = frozen.rotary(positions)
        for layer in frozen.blocks:
            x = layer.attend_self(x, rotation, causal)
        return x

    def _mixed_target_layers(
        self, frozen: FrozenTarget, x: Tensor, kv: Tensor, queries: Tensor, context: Tensor
    ) -> Tensor:
        """Target layers over drafted features [B, Q, E]: the target's KV up to s(i), the drafter's own after it."""
        n_tokens = kv.shape[1]
        verified = masks.cross_attention_mask(context, n_tokens)  # [B, Q, T]
        # A context query is its own drafted key too, so it must not see its target KV a second time.
        verified = verified & (torch.arange(n_tokens, device=x.device) != queries[..., None])
        own = masks.drafted_block_mask(queries, context)  # [B, Q, Q]
        if frozen.sliding_window is not None:
            key = torch.arange(n_tokens, device=x.device)
            verified = verified & (queries[..., None] - key < frozen.sliding_window)
            own = own & (queries[..., None] - queries[:, None, :] < frozen.sliding_window)
        mask = torch.cat((verified, own), dim=-1)  # [B, Q, T + Q]
        rotation = frozen.rotary(queries)
        first = self.config.n_layers - self.config.target_layer_inference
        for offset, layer in enumerate(frozen.blocks):
            target_kv = unpack_kv(kv[:, :, first + offset].to(x.dtype), layer.self_attn.n_kv_heads)
            x = _attend_to_both(layer, x, rotation, target_kv, None, mask)
        return x

    def extend_memory(self, state: DraftState, kv: Tensor) -> None:
        """Encode newly verified positions and append them to the cross-attention cache.

        Args:
            state: caches of the sequence.
            kv: [1, n, L, D], packed target KV of the next n positions.
        """
        memory = self.encode_memory(kv)  # [1, n, E]
        start = state.memory.length
        positions = torch.arange(start, start + kv.shape[1], device=kv.device)[None, :]
        state.memory.append(*self.cross_attention.keys_values(memory, self.rotary(positions)))

    def begin_round(self, state: DraftState, n_verified: int) -> None:
        """Forget what was drafted beyond the verified tokens.

        The root is fed anew: where it stands, the cache may hold the draft that was rejected there.

        Args:
            state: caches of the sequence.
            n_verified: committed tokens without the root.
        """
        state.self_attention.crop(n_verified)
        state.target_layers = [KVBuffer() for _ in range(self.config.target_layer_inference)]

    def step(
        self, state: DraftState, frozen: FrozenTarget, tokens: Tensor, target_kv: list[tuple[Tensor, Tensor]] | None
    ) -> Tensor:
        """One draft step: feed the tokens not yet fed and return the features of the last one.

        Args:
            state: caches of the sequence.
            frozen: target pieces.
            tokens: [1, n] int64, the next tokens at positions ``state.self_attention.length`` and on.
            target_kv: verified keys and values [1, H_kv, n_memory, d] of the last N target layers; None when N = 0.

        Returns:
            Features [1, 1, E].
        """
        start = state.self_attention.length
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None, :]
        rotation = self.rotary(positions)
        last: Rotation = (rotation[0][:, -1:], rotation[1][:, -1:])
        embeddings = frozen.embed(tokens)
        keys, values = state.self_attention.append(*self.self_attention.keys_values(embeddings, rotation))
        x = self.self_attention(embeddings[:, -1:], last, keys, values, mask=None)
        x = self.cross_attention(x, last, *state.memory.view(), mask=None)
        if not self.config.target_layer_inference:
            return x
        assert target_kv is not None
        last = frozen.rotary(positions[:, -1:])
        for layer, verified, buffer in zip(frozen.blocks, target_kv, state.target_layers, strict=True):
            mask = None
            if frozen.sliding_window is not None:
                n_verified, n_drafted = verified[0].shape[2], buffer.length + 1
                key = torch.arange(n_verified + n_drafted, device=x.device)
                mask = (n_verified + n_drafted - 1 - key < frozen.sliding_window)[None, None, :]
            x = _attend_to_both(layer, x, last, verified, buffer, mask)
        return frozen.norm(x)


def _attend_to_both(
    layer: DecoderBlock,
    x: Tensor,
    rotation: Rotation,
    target_kv: tuple[Tensor, Tensor],
    drafted: KVBuffer | None,
    mask: Tensor | None,
) -> Tensor:
    """One target layer whose keys are the target's verified ones followed by the drafter's own."""
    keys, values = layer.keys_values(x, rotation)
    if drafted is not None:
        keys, values = drafted.append(keys, values)
    keys = torch.cat((target_kv[0].to(keys.dtype), keys), dim=2)
    values = torch.cat((target_kv[1].to(values.dtype), values), dim=2)
    return layer(x, rotation, keys, values, mask)
