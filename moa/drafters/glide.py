"""GLIDE drafter (Du et al., ICML 2024, arXiv 2402.02082): a decoder layer that also attends to the target's last.

Shapes: B batch, T tokens, Q queries, E target width, L target layers, D packed KV width, H_kv target KV heads, d target
head dim, b nodes of one level, n tokens of one call, S slots.

    token embeddings -> + causal self-attention -> + cross-attention to the target's own keys and values of its last
    layer -> + MLP -> LM head

The cross-attention has queries and an output projection of its own; keys and values are the target's as they are, of
verified positions alone. Nothing of what is drafted is fed back but tokens. There is no norm before the cross-attention
and none before the LM head, as in the official code (``train/glide.py``).

Training cuts the text into blocks, each a draft round: its positions see the target's KV of the blocks before it. For
blocks of 3 and offset 1::

    position                   0 1 2 3 4 5 6 7 8
    last target KV it sees     . 0 0 0 3 3 3 6 6

The official form has offset 0 and lets a first block, which has nothing before it, attend to all keys alike; here it
is a round behind position 0, and position 0 itself carries no loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import DrafterError
from ..nn import masks
from ..nn.kv import KVBuffer, positions_behind, unpack_kv
from ..nn.layers import Attention, BlockSizes, DecoderBlock, Rotary, Rotation, rotate
from ..target.bundle import FrozenTarget, target_sizes
from ..target.cache import TargetCache
from .base import DraftedFeatures, Drafter
from .rounds import Draws, at_queries, loss_queries
from .sizes import DrafterSizes, target_facts
from .training import DEFAULT_WEIGHTS, LossTerms, LossWeights, TrainingInputs, distillation, loss_scale

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
    official_rotation: bool = False
    """The target's keys, which are rotated already, are rotated once more, as in the official code
    (``train/cross_attention.py``, lines 241-242)."""

    def __post_init__(self) -> None:
        self.check_kv_heads("self_attention_kv_heads")
        self.check_at_least_one("block_size")

    @classmethod
    def from_target(cls, config: Any, target: dict[str, str] | None = None, **sizes: Any) -> Self:
        """A layer of the target's own shape where not given otherwise; see :meth:`DrafterSizes.from_target`."""
        facts = target_sizes(config)
        defaults = {
            "kv_width": 2 * facts["n_kv_heads"] * facts["head_dim"],
            "self_attention_kv_heads": facts["n_kv_heads"],
            "self_attention_mlp_width": config.intermediate_size,
        }
        given = {name: value for name, value in sizes.items() if value is not None}
        return cls(**target_facts(config, target), **(defaults | given))

    @property
    def target_kv_heads(self) -> int:
        """H_kv."""
        return self.kv_width // (2 * self.head_dim)


class TargetAttention(Attention):
    """Attention to keys and values that someone else projected."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__(sizes)
        del self.k_proj, self.v_proj


class GlideState:
    """The drafter's cache of B rows while decoding; keys and values of verified positions are in the target's.

    Attributes:
        self_attention: of the verified tokens, then of this round's drafts in the order of feeding.
        n_fed: tokens of this round's tree that were fed, the root included.
    """

    def __init__(self, n_rows: int) -> None:
        self.self_attention = KVBuffer(n_rows)
        self.n_fed = 0

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.self_attention.select_rows(rows)


class GlideDrafter(Drafter):
    """The trained part: a decoder layer, and queries and output projection of its cross-attention."""

    kind: ClassVar[str] = GlideSizes.kind
    config_class: ClassVar[type[DrafterSizes]] = GlideSizes
    training_options: ClassVar[frozenset[str]] = frozenset({"official_quirks"})
    kv_layers: ClassVar[tuple[int, ...] | None] = (-1,)
    config: GlideSizes

    def __init__(self, config: GlideSizes) -> None:
        super().__init__()
        self.config = config
        mlp_width = config.self_attention_mlp_width
        self.self_attention = DecoderBlock(config.block(config.self_attention_kv_heads, mlp_width, config.qkv_bias))
        self.cross_attention = TargetAttention(config.block(config.target_kv_heads, mlp_width, False))
        self.rotary = Rotary(config.head_dim, config.rope_parameters, config.max_position_embeddings)

    def initialize(self, generator: torch.Generator | None = None, std: float = 0.02, official: bool = False) -> None:
        """Draw the starting weights, see :meth:`Drafter.initialize`.

        Args:
            generator: as there.
            std: as there.
            official: as there; the target's keys are rotated twice too, which the sizes record, for decoding has to do
                what training did.
        """
        super().initialize(generator, std, official)
        self.config = replace(self.config, official_rotation=official)

    @classmethod
    def needs(cls, n_layers: int, target_layer_inference: int) -> dict[str, str]:
        """Keys and values of ``kv_layers``, and the last hidden state, whose distribution is learned."""
        return {"kv": "kv", "hidden": "hidden/last"}

    @classmethod
    def loss_positions(cls, response_mask: Tensor, draws: Draws, official: bool) -> Tensor:
        """The response; but for the official form without position 0, before which nothing can be verified."""
        return response_mask.bool() if official else super().loss_positions(response_mask, draws, official)

    def objective(
        self,
        frozen: FrozenTarget,
        inputs: TrainingInputs,
        draws: Draws,
        weights: LossWeights = DEFAULT_WEIGHTS,
        official: bool = False,
        denominator: float | None = None,
    ) -> LossTerms:
        """Loss of one mini-batch: the forward KL alone; the feature loss is reported (official ``train/glide.py``).

        Blocks begin at the offset of the draws. The official form is meant for one sequence at a time without padding,
        for its first block attends to all there is.
        """
        kv = _kv_of(inputs)
        queries, valid = loss_queries(self.loss_positions(inputs.response_mask, draws, official))
        last_seen = block_context(queries, self.config.block_size, draws.offset)
        if not official:
            last_seen = last_seen.clamp(min=0)
        features = self(frozen, inputs.tokens, kv, last_seen, queries, official)[valid]  # [P, E]
        goal = at_queries(inputs.hidden, queries)[valid]
        n_positions = int(valid.sum())
        kl, feature = distillation(frozen, features, goal, loss_scale(n_positions, denominator))
        return LossTerms(weights.forward_kl * kl, kl, feature.detach(), n_positions)

    def drafted_features(self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws) -> DraftedFeatures:
        """The training forward with the rounds of the draws in place of blocks; only tokens are fed back."""
        drafted = masks.drafted_positions(inputs.response_mask, draws.step_bound, draws.offset)
        drafted[:, :1] = False
        queries, valid = loss_queries(drafted)
        context = masks.last_context(drafted).gather(1, queries)
        features = self(frozen, inputs.tokens, _kv_of(inputs), context, queries)
        return DraftedFeatures(queries, valid, features)

    def forward(
        self,
        frozen: FrozenTarget,
        tokens: Tensor,
        kv: Tensor,
        last_seen: Tensor,
        queries: Tensor | None = None,
        official: bool = False,
    ) -> Tensor:
        """Teacher-forced forward of many draft rounds.

        Args:
            frozen: target pieces.
            tokens: [B, T] int64, right padded.
            kv: [B, T, >= 1, D], packed target KV; the last layer is attended to.
            last_seen: [B, Q] int64, the last position whose target KV each query sees; from 0 on but for the official
                form, where queries without a key attend to all of them alike (``train/glide.py``, lines 145-147).
            queries: [B, Q] int64 positions to compute features for; None = all.
            official: the official form.

        Returns:
            Features [B, Q, E].
        """
        n_tokens = tokens.shape[1]
        positions = torch.arange(n_tokens, device=tokens.device)[None, :]  # [1, T]
        if queries is None:
            queries = positions.expand(tokens.shape[0], -1)
        embeddings, rotation = frozen.embed(tokens), self.rotary(positions)
        own = self.self_attention.keys_values(embeddings, rotation)
        causal = positions <= queries[..., None]  # [B, Q, T]
        target = self._rotated(unpack_kv(kv[:, :, -1], self.config.target_kv_heads), rotation)
        seen = masks.cross_attention_mask(last_seen, n_tokens)  # [B, Q, T]
        x = at_queries(embeddings, queries)
        return self._layer(x, self.rotary(queries), own, causal, target, seen, official)

    def _layer(
        self,
        x: Tensor,
        rotation: Rotation,
        own: KeysValues,
        own_mask: Tensor | None,
        target: KeysValues,
        target_mask: Tensor | None,
        official: bool = False,
    ) -> Tensor:
        """The layer for queries x [B, Q, E]; masks [B or 1, Q or 1, S] bool, True = may attend, None for no mask."""
        block = self.self_attention
        q = block.self_attn.queries(block.input_layernorm(x), rotation)
        x = x + block.self_attn(q, *own, own_mask)
        q = self.cross_attention.queries(x, rotation)
        if official and target_mask is not None:
            # The least number is added, not put in the scores' place: gradients of a query without a key differ. Fused
            # kernels get them wrong, for beside that number the logarithm of how many keys there are is lost.
            added = q.new_zeros(target_mask.shape).masked_fill(~target_mask, torch.finfo(q.dtype).min)
            with sdpa_kernel(SDPBackend.MATH):
                x = x + self.cross_attention(q, *target, added)
        else:
            x = x + self.cross_attention(q, *target, target_mask)
        return x + block.mlp(block.post_attention_layernorm(x))

    def _rotated(self, target: KeysValues, rotation: Rotation) -> KeysValues:
        """The target's keys as the cross-attention compares them, and its values."""
        return (rotate(target[0], rotation), target[1]) if self.config.official_rotation else target

    def new_state(self, n_rows: int) -> GlideState:
        """An empty cache of B rows."""
        return GlideState(n_rows)

    def root_features(
        self, state: GlideState, frozen: FrozenTarget, committed: Sequence[list[int]], cache: TargetCache
    ) -> Tensor:
        """Feed the tokens not yet fed, up to the root; of last round's nodes only its root is known to have stayed."""
        device, slots = frozen.lm_head_weight.device, state.self_attention
        if state.n_fed:
            slots.crop([length - state.n_fed + 1 for length in slots.lengths])
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

    def level_features(
        self,
        state: GlideState,
        frozen: FrozenTarget,
        tokens: Tensor,
        parent_features: Tensor,
        seen: Tensor,
        level: int,
        cache: TargetCache,
    ) -> Tensor:
        """Feed the nodes of one level; what was drafted before them is in the cache."""
        roots = [length - state.n_fed for length in state.self_attention.lengths]
        first = torch.tensor(roots, device=tokens.device)[:, None] + level
        positions = first.expand(-1, tokens.shape[1])  # [B, b]: a level stands at one position
        embeddings = frozen.embed(tokens)
        state.self_attention.append(*self.self_attention.keys_values(embeddings, self.rotary(positions)))
        state.n_fed += tokens.shape[1]
        return self._draft(state, embeddings, positions, seen, cache, is_chain=state.n_fed == level + 1)

    def _draft(
        self, state: GlideState, x: Tensor, positions: Tensor, seen: Tensor, cache: TargetCache, is_chain: bool
    ) -> Tensor:
        """Features of fed tokens x [B, b, E] at positions [B, b]; a chain of one row needs no masks."""
        n_verified = [length - state.n_fed for length in state.self_attention.lengths]
        n_slots = max(n_verified)
        own_mask = None if is_chain and len(n_verified) == 1 else masks.tree_mask(n_verified, seen)
        target_mask = None
        slots = torch.arange(n_slots, device=x.device)[None, :]
        if len(set(n_verified)) > 1:
            target_mask = (slots < torch.tensor(n_verified, device=x.device)[:, None])[:, None, :]  # [B, 1, S]
        target = cache.layer_view(self.config.n_layers - 1, n_slots)
        if self.config.official_rotation:
            target = self._rotated(target, self.rotary(slots))
        return self._layer(x, self.rotary(positions), state.self_attention.view(), own_mask, target, target_mask)


def block_context(queries: Tensor, block_size: int, offset: Tensor | None = None) -> Tensor:
    """The last position before the block of a query (official ``train/glide.py``, lines 145-147).

    Args:
        queries: [B, Q] int64 positions.
        block_size: tokens of a block.
        offset: [B] int64, where a block begins; zeros where None, as in the official code.

    Returns:
        [B, Q] int64, below 0 in a first block.
    """
    shift = 0 if offset is None else (offset % block_size)[:, None]
    return shift + (queries - shift) // block_size * block_size - 1


def _kv_of(inputs: TrainingInputs) -> Tensor:
    """The batch's KV [B, T, L, D].

    Raises:
        DrafterError: it has none.
    """
    if inputs.kv is None:
        raise DrafterError("GLIDE needs the target's keys and values of the last layer, which this batch lacks.")
    return inputs.kv
