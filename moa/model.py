"""Mixture of Attentions drafter (Zimmer et al., ICLR 2025, arXiv 2410.03804): training forward and decoding step.

Shapes: B batch, T tokens, Q drafted positions (queries), L target layers, H_kv target KV heads, d target head dim,
D = 2 * H_kv * d, E target width, V vocabulary, N target layers used for inference.

    KV of all layers [B, T, L, D] -> layer self-attention -> mean over layers -> linear -> memory [B, T, E]
    tokens -> embeddings -> causal self-attention -> cross-attention to the memory
           -> (last N target layers, final norm) -> LM head

Training runs many draft rounds at once: position i sees the memory up to its last context position s(i), exactly what a
draft step sees after the verification that ended at s(i). Both paths call the same blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import masks
from .bundle import FrozenTarget
from .config import DrafterConfig
from .kv_buffer import KVBuffer
from .kv_layout import unpack_kv
from .layers import DecoderBlock, Rotary, Rotation

TargetLayersKV = Callable[[int], list[tuple[Tensor, Tensor]]]
"""n_slots -> per layer used for inference, keys and values [B, H_kv, n_slots, d]: views of the target's cache, verified
positions first, writable behind them."""


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


class DraftState:
    """The drafter's caches of B rows while decoding.

    Attributes:
        self_attention: of every token that was fed; it depends on token and position alone, so that accepted drafts
            stay valid where they stand.
        memory: cross-attention keys and values of the positions that have target KV.
        n_fed: tokens of this round's tree that were fed, the root included.
    """

    def __init__(self, n_rows: int = 1) -> None:
        self.self_attention = KVBuffer(n_rows)
        self.memory = KVBuffer(n_rows)
        self.n_fed = 0

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.self_attention.select_rows(rows)
        self.memory.select_rows(rows)


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
        by_window = {window: _within(window, causal, positions, positions) for window in set(frozen.windows)}
        rotation = frozen.rotary(positions)
        for layer, window in zip(frozen.blocks, frozen.windows, strict=True):
            x = layer.attend_self(x, rotation, by_window[window])
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
        mask = torch.cat((verified, own), dim=-1)  # [B, Q, T + Q]
        past = torch.arange(n_tokens, device=x.device).expand(len(queries), -1)  # [B, T]
        keys = torch.cat((past, queries), dim=1)  # [B, T + Q]
        by_window = {window: _within(window, mask, queries, keys) for window in set(frozen.windows)}
        rotation = frozen.rotary(queries)
        first = self.config.n_layers - self.config.target_layer_inference
        for offset, (layer, window) in enumerate(zip(frozen.blocks, frozen.windows, strict=True)):
            target_kv = unpack_kv(kv[:, :, first + offset].to(x.dtype), layer.self_attn.n_kv_heads)
            x = _attend_to_both(layer, x, rotation, target_kv, by_window[window])
        return x

    def extend_memory(self, state: DraftState, kv: Tensor, counts: Sequence[int] | None = None) -> None:
        """Encode newly verified positions and append them to the cross-attention cache.

        Args:
            state: caches of B rows.
            kv: [B, n, L, D], packed target KV of the next n positions of each row.
            counts: how many of the n positions of each row are real; None for all.
        """
        memory = self.encode_memory(kv)  # [B, n, E]
        rotation = self.rotary(_positions(state.memory.lengths, kv.shape[1], kv.device))
        state.memory.append(*self.cross_attention.keys_values(memory, rotation), counts)

    def draft_root(
        self,
        state: DraftState,
        frozen: FrozenTarget,
        tokens: Tensor,
        target_kv: TargetLayersKV | None = None,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """First draft step of a round: feed the tokens not yet fed, up to the root.

        The root is fed anew in each round: where it stands, the cache may hold a draft that was rejected there. So crop
        ``state.self_attention`` to the verified tokens first.

        Args:
            state: caches of B rows.
            frozen: target pieces.
            tokens: [B, n] int64, the next tokens from position ``state.self_attention.lengths`` on; the last real one
                of each row is the root.
            target_kv: keys and values of the last N target layers; None when N = 0.
            counts: how many of the n tokens of each row are real; None for all.

        Returns:
            Features of the root [B, 1, E]: of the first drafted token.
        """
        positions = _positions(state.self_attention.lengths, tokens.shape[1], tokens.device)
        rotation = self.rotary(positions)
        embeddings = frozen.embed(tokens)
        state.self_attention.append(*self.self_attention.keys_values(embeddings, rotation), counts)
        state.n_fed = 1
        if counts is None:
            root, at = embeddings[:, -1:], positions[:, -1:]
        else:
            last = torch.tensor(counts, device=tokens.device)[:, None] - 1  # [B, 1]
            root = embeddings.gather(1, last[..., None].expand(-1, -1, embeddings.shape[-1]))
            at = positions.expand(len(counts), -1).gather(1, last)
        seen = torch.ones(tokens.shape[0], 1, 1, dtype=torch.bool, device=tokens.device)
        return self._draft(state, frozen, root, at, seen, target_kv, is_chain=True)

    def draft_level(
        self,
        state: DraftState,
        frozen: FrozenTarget,
        tokens: Tensor,
        seen: Tensor,
        level: int,
        target_kv: TargetLayersKV | None = None,
    ) -> Tensor:
        """Later draft step of a round: feed the nodes of one level of the tree.

        Args:
            state: caches of B rows.
            frozen: target pieces.
            tokens: [B, b] int64, nodes of this level.
            seen: [B, b, n] bool, which of the n tokens fed in this round each node sees: the root first, then all nodes
                level by level, itself included.
            level: of these nodes, 1 for the children of the root.
            target_kv: as for :meth:`draft_root`.

        Returns:
            Features of the nodes [B, b, E]: of their children.
        """
        roots = [length - state.n_fed for length in state.self_attention.lengths]
        first = torch.tensor(roots, device=tokens.device)[:, None] + level
        positions = first.expand(-1, tokens.shape[1])  # [B, b]: a level stands at one position
        embeddings = frozen.embed(tokens)
        state.self_attention.append(*self.self_attention.keys_values(embeddings, self.rotary(positions)))
        state.n_fed += tokens.shape[1]
        return self._draft(state, frozen, embeddings, positions, seen, target_kv, is_chain=tokens.shape[1] == 1)

    def _draft(
        self,
        state: DraftState,
        frozen: FrozenTarget,
        x: Tensor,
        positions: Tensor,
        seen: Tensor,
        target_kv: TargetLayersKV | None,
        is_chain: bool,
    ) -> Tensor:
        """Features of fed tokens x [B, b, E] at positions [B, b]; a chain of one row needs no masks."""
        rotation = self.rotary(positions)
        alone = is_chain and x.shape[0] == 1
        before = [length - state.n_fed for length in state.self_attention.lengths]
        self_mask = None if alone else masks.tree_mask(before, seen)
        x = self.self_attention(x, rotation, *state.self_attention.view(), mask=self_mask)
        memory_mask = None
        if len(set(state.memory.lengths)) > 1:
            slots = torch.arange(max(state.memory.lengths), device=x.device)
            memory_mask = (slots < torch.tensor(state.memory.lengths, device=x.device)[:, None])[:, None, :]
        x = self.cross_attention(x, rotation, *state.memory.view(), mask=memory_mask)
        if not self.config.target_layer_inference:
            return x
        assert target_kv is not None
        rotation = frozen.rotary(positions)
        by_window = {
            window: None if alone and window is None else masks.tree_mask(before, seen, window)
            for window in set(frozen.windows)
        }
        views = target_kv(max(before) + state.n_fed)
        for layer, view, window in zip(frozen.blocks, views, frozen.windows, strict=True):
            keys, values = layer.keys_values(x, rotation)
            x = layer(x, rotation, *_write_behind(view, before, state.n_fed, keys, values), by_window[window])
        return frozen.norm(x)


def _positions(starts: Sequence[int], n_tokens: int, device: torch.device) -> Tensor:
    """Positions of n tokens behind each row's start: [B, n], or [1, n] where all rows start alike."""
    starts = starts[:1] if len(set(starts)) == 1 else starts
    return torch.tensor(starts, device=device)[:, None] + torch.arange(n_tokens, device=device)


def _within(window: int | None, mask: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Mask [B, Q, K] less the keys at positions [B, K] that a layer's window does not reach from those of queries."""
    return mask if window is None else mask & (queries[..., None] - keys[:, None, :] < window)


def _write_behind(
    view: tuple[Tensor, Tensor], before: Sequence[int], n_fed: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Put the drafter's own keys and values of the newest tokens behind the target's verified ones, in place.

    Nothing is copied of the context; the target's next call writes over these slots.
    """
    n_new = keys.shape[2]
    for row, length in enumerate(before):
        stop = length + n_fed
        # A row's leftovers are masked slots of longer rows' calls, where a NaN would still spread.
        view[0][row, :, stop - n_new : stop] = keys[row].nan_to_num()
        view[1][row, :, stop - n_new : stop] = values[row].nan_to_num()
    return view


def _attend_to_both(
    layer: DecoderBlock, x: Tensor, rotation: Rotation, target_kv: tuple[Tensor, Tensor], mask: Tensor | None
) -> Tensor:
    """One target layer whose keys are the target's verified ones followed by the drafter's own."""
    keys, values = layer.keys_values(x, rotation)
    keys = torch.cat((target_kv[0].to(keys.dtype), keys), dim=2)
    values = torch.cat((target_kv[1].to(values.dtype), values), dim=2)
    return layer(x, rotation, keys, values, mask)
