"""GLIDE drafter (Du et al., ICML 2024, arXiv 2402.02082): a decoder layer that also attends to the target's last.

Shapes: B batch, T tokens, Q queries, E target width, L target layers, D packed KV width, H_kv target KV heads, d target
head dim, b nodes of one level, n tokens of one call, S slots.

    token embeddings -> + causal self-attention -> + cross-attention to the target's own keys and values of its last
    layer -> + MLP -> LM head

The cross-attention has queries and an output projection of its own; keys and values are the target's as they are, of
verified positions alone. Only the tokens of drafts are fed back. There is no norm before the cross-attention and none
before the LM head, as in the official code (``train/glide.py``).

Training cuts the text into blocks, each a draft round: its positions see the target's KV of the blocks before it. For
blocks of 3 and offset 1::

    position                   0 1 2 3 4 5 6 7 8
    last target KV it sees     . 0 0 0 3 3 3 6 6

The released code has offset 0, rotates the target's keys a second time and lets a first block, which has nothing
before it, attend to all keys alike; here it is a round behind position 0, and position 0 itself carries no loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...errors import DrafterError
from ..nn import masks
from ..nn.kv import KVBuffer, positions_behind, unpack_kv
from ..nn.layers import Attention, BlockSizes, DecoderBlock, Rotary, Rotation
from ..targets.bundle import FrozenTarget, target_sizes
from ..targets.cache import KVSource
from .base import DraftedFeatures, Drafter, DraftLevel
from .rounds import Draws, at_queries, loss_queries
from .sizes import DrafterSizes
from .training import LossTerms, Reads, TrainingInputs, TrainingStep, distillation, loss_scale

KeysValues = tuple[Tensor, Tensor]
"""Keys and values, each [B, heads, S, d]."""


@dataclass(frozen=True, kw_only=True)
class GlideSizes(DrafterSizes):
    """Everything needed to rebuild a GLIDE drafter and to know which target it belongs to."""

    kind: ClassVar[str] = "glide"

    kv_width: int
    """D = 2 * target KV heads * target head dim."""
    self_attention_kv_heads: int
    """KV heads of the self-attention."""
    self_attention_mlp_width: int
    """MLP width."""
    block_size: int = 5
    """Tokens of a block in training."""

    def __post_init__(self) -> None:
        self.check_kv_heads("self_attention_kv_heads")
        self.check_at_least_one("block_size")

    @classmethod
    @override
    def defaults(cls, config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        facts = target_sizes(config)
        return {
            "kv_width": 2 * facts["n_kv_heads"] * facts["head_dim"],
            "self_attention_kv_heads": facts["n_kv_heads"],
            "self_attention_mlp_width": config.intermediate_size,
        }

    @property
    def target_kv_heads(self) -> int:
        """H_kv, key/value heads of the target."""
        return self.kv_width // (2 * self.head_dim)


class TargetAttention(Attention):
    """Attention to keys and values that the target projected."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__(sizes)
        del self.k_proj, self.v_proj


class GlideState:
    """The drafter's cache of B rows while decoding; cross-attention reads the target's.

    Attributes:
        self_attention: keys and values of the verified tokens, then of this round's drafts in the order of feeding.
        n_fed: tokens of this round's tree that were fed, the root included.
    """

    def __init__(self, n_rows: int) -> None:
        self.self_attention = KVBuffer(n_rows)
        self.n_fed = 0

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.self_attention.select_rows(rows)

    def forget_drafts(self) -> None:
        """End the round: of its nodes only the root is known to be committed."""
        if self.n_fed:
            self.self_attention.crop([length - self.n_fed + 1 for length in self.self_attention.lengths])
            self.n_fed = 0

    def take_rows(self, rows: Sequence[int]) -> "GlideState":
        """Copy these rows, in this order, to a state of their own."""
        self.forget_drafts()
        taken = GlideState(0)
        taken.self_attention = self.self_attention.take_rows(rows)
        return taken

    def add_rows(self, other: "GlideState") -> None:
        """Append the rows of another state."""
        for state in (self, other):  # their rounds may be of different lengths
            state.forget_drafts()
        self.self_attention.add_rows(other.self_attention)


class GlideDrafter(Drafter):
    """The trained part: a decoder layer, and queries and output projection of its cross-attention."""

    kind: ClassVar[str] = GlideSizes.kind
    config_class: ClassVar[type[DrafterSizes]] = GlideSizes
    config: GlideSizes

    def __init__(self, config: GlideSizes) -> None:
        super().__init__()
        self.config = config
        mlp_width = config.self_attention_mlp_width
        self.self_attention = DecoderBlock(config.block(config.self_attention_kv_heads, mlp_width, config.qkv_bias))
        self.cross_attention = TargetAttention(config.block(config.target_kv_heads, mlp_width, False))
        self.rotary = Rotary(config.head_dim, config.rope_parameters, config.max_position_embeddings)

    @classmethod
    @override
    def reads(cls, n_layers: int, settings: Any) -> Reads:
        return Reads(kv=True, kv_layers=(-1,))

    @override
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of one mini-batch: the forward KL alone; the feature loss is reported.

        Blocks begin at the offset of the draws.
        """
        inputs, draws = step.inputs, step.draws
        queries, valid = loss_queries(self.loss_positions(inputs.response_mask, draws))
        last_seen = block_context(queries, self.config.block_size, draws.offset).clamp(min=0)
        features = self._features(frozen, inputs, last_seen, queries)[valid]  # [P, E]
        goal = at_queries(inputs.hidden, queries)[valid]
        n_positions = int(valid.sum())
        scale = loss_scale(n_positions, step.denominator)
        kl, feature = distillation(frozen, features, goal, scale, step.weights.divergence)
        return LossTerms(step.weights.forward_kl * kl, kl, feature.detach(), n_positions)

    @override
    def drafted_features(self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws) -> DraftedFeatures:
        # Only tokens are fed back, so the training forward will do, with the rounds of the draws in place of blocks.
        drafted = masks.drafted_positions(inputs.response_mask, draws.step_bound, draws.offset)
        drafted[:, :1] = False
        queries, valid = loss_queries(drafted)
        context = masks.last_context(drafted).gather(1, queries)
        return DraftedFeatures(queries, valid, self._features(frozen, inputs, context, queries))

    def _features(self, frozen: FrozenTarget, inputs: TrainingInputs, last_seen: Tensor, queries: Tensor) -> Tensor:
        """Compute features [B, Q, E] of queries that see target KV up to ``last_seen``, both [B, Q] int64."""
        if inputs.kv is None:
            raise DrafterError("GLIDE needs the target's keys and values of the last layer, which this batch lacks.")
        seen = masks.cross_attention_mask(last_seen, inputs.tokens.shape[1])
        features: Tensor = self(frozen, inputs.tokens, inputs.kv, seen, queries)
        return features

    def forward(
        self, frozen: FrozenTarget, tokens: Tensor, kv: Tensor, seen: masks.Mask | Tensor, queries: Tensor | None = None
    ) -> Tensor:
        """Run many draft rounds at once, fed with the text.

        Args:
            tokens: [B, T] int64, right padded.
            kv: [B, T, >= 1, D], packed target KV; the last layer is attended to.
            seen: which positions' target KV each query sees; where it is a tensor, [B, Q, T] bool, or numbers that are
                added to the scores.
            queries: [B, Q] int64 positions to compute features for; None = all.

        Returns:
            Features [B, Q, E].
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None, :]  # [1, T]
        if queries is None:
            queries = positions.expand(tokens.shape[0], -1)
        embeddings = frozen.embed(tokens)
        own = self.self_attention.keys_values(embeddings, self.rotary(positions))
        causal = masks.Mask.up_to(queries, tokens.shape[1])
        target = unpack_kv(kv[:, :, -1], self.config.target_kv_heads)
        x = at_queries(embeddings, queries)
        return self._layer(x, self.rotary(queries), own, causal, target, seen)

    def _layer(
        self,
        x: Tensor,
        rotation: Rotation,
        own: KeysValues,
        own_mask: masks.Mask | Tensor | None,
        target: KeysValues,
        target_mask: masks.Mask | Tensor | None,
    ) -> Tensor:
        """Run the layer for queries x [B, Q, E]; masks as for ``attention.attend``."""
        block = self.self_attention
        x = x + block.self_attn(block.queries(x, rotation), *own, own_mask)
        q = self.cross_attention.queries(x, rotation)
        return block.finish(x, self.cross_attention(q, *target, target_mask))

    @override
    def new_state(self, n_rows: int) -> GlideState:
        return GlideState(n_rows)

    @override
    def draft_root(
        self, state: GlideState, frozen: FrozenTarget, committed: Sequence[list[int]], cache: KVSource
    ) -> Tensor:
        device, slots = frozen.lm_head_weight.device, state.self_attention
        state.forget_drafts()
        slots.crop([len(tokens) - 1 for tokens in committed])
        fresh = [torch.tensor(tokens[n:]) for tokens, n in zip(committed, slots.lengths, strict=True)]
        counts = [len(tokens) for tokens in fresh]
        embeddings = frozen.embed(nn.utils.rnn.pad_sequence(fresh, batch_first=True).to(device))
        positions = positions_behind(slots.lengths, max(counts), device)
        slots.append(*self.self_attention.keys_values(embeddings, self.rotary(positions)), counts)
        state.n_fed = 1
        last = torch.tensor(counts, device=device)[:, None] - 1  # [B, 1]
        at = positions.expand(len(counts), -1).gather(1, last)
        seen = torch.ones(len(counts), 1, 1, dtype=torch.bool, device=device)
        return self._draft(state, at_queries(embeddings, last), at, seen, cache, is_chain=True)

    @override
    def draft_level(self, state: GlideState, frozen: FrozenTarget, level: DraftLevel, cache: KVSource) -> Tensor:
        n_nodes, device = level.tokens.shape[1], level.tokens.device
        roots = [length - state.n_fed for length in state.self_attention.lengths]
        first = torch.tensor(roots, device=device)[:, None] + level.depth
        positions = first.expand(-1, n_nodes)  # [B, b]: a level stands at one position
        embeddings = frozen.embed(level.tokens)
        state.self_attention.append(*self.self_attention.keys_values(embeddings, self.rotary(positions)))
        state.n_fed += n_nodes
        return self._draft(state, embeddings, positions, level.seen, cache, is_chain=state.n_fed == level.depth + 1)

    def _draft(
        self, state: GlideState, x: Tensor, positions: Tensor, seen: Tensor, cache: KVSource, is_chain: bool
    ) -> Tensor:
        """Compute features of fed tokens x [B, b, E] at positions [B, b]; a chain of one row needs no masks."""
        n_verified = [length - state.n_fed for length in state.self_attention.lengths]
        n_slots = max(n_verified)
        own_mask = None if is_chain and len(n_verified) == 1 else masks.tree_mask(n_verified, seen)
        target_mask = None
        if len(set(n_verified)) > 1:
            slots = torch.arange(n_slots, device=x.device)[None, :]
            target_mask = (slots < torch.tensor(n_verified, device=x.device)[:, None])[:, None, :]  # [B, 1, S]
        target = cache.layer_view(self.config.n_layers - 1, n_slots)
        return self._layer(x, self.rotary(positions), state.self_attention.view(), own_mask, target, target_mask)


def block_context(queries: Tensor, block_size: int, offset: Tensor | None = None) -> Tensor:
    """Find the last position before the block of a query (official ``train/glide.py``, lines 145-147).

    Args:
        queries: [B, Q] int64 positions.
        offset: [B] int64, where a block begins; zeros where None.

    Returns:
        [B, Q] int64, below 0 in a first block.
    """
    shift = 0 if offset is None else (offset % block_size)[:, None]
    return shift + (queries - shift) // block_size * block_size - 1
