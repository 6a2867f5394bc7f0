"""GLIDE drafter: a decoder layer that also attends to the last layer of the target.

Du et al., ICML 2024, arXiv 2402.02082.

Shapes: B batch, T tokens, Q queries, E target width, L target layers, D width of packed KV, H_kv
target KV heads, d target head dim, b nodes of one level, n tokens fed at once, S slots.

    token embeddings -> + causal self-attention
                     -> + cross-attention to the KV of the target's last layer at verified positions
                     -> + MLP -> LM head

The input of a draft step is only the token that the previous step drafted, without its features. As
in the MoA authors' code (``train/glide.py``), neither the cross-attention nor the LM head has a
norm before it.

Training cuts sequences into blocks of consecutive positions. Each block is trained as a draft
round, so the positions of a block see only the target's KV of earlier blocks. In the example,
blocks have 3 positions. The offset is 1, so a block starts at position 1::

    position                   0 1 2 3 4 5 6 7 8
    last visible target KV     . 0 0 0 3 3 3 6 6

Some targets have layers of different shapes, or rotate keys in another way than Llama. For these
targets, the drafter attends to the last layer that has keys and values of its own. The drafter's
queries then have the width of the keys of this layer, and are not rotated. If this layer uses
multi-head latent attention, it caches latents. The drafter then attends to a single KV head: its
key is the concatenation of the latent and the rotated key, and its value is the latent. This is
multi-head latent attention with the projections absorbed into the queries and the output.

The MoA authors' code uses offset 0, so a block starts at position 0. It also rotates the target's
keys a second time. In their code, the first block attends to all keys, because no block precedes
it. Here the first block is a round that starts after position 0, and position 0 itself has no loss.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..nn import masks
from ..nn.layers import Attention, DecoderBlock, KeysValues, Rotation
from ..targets.bundle import FrozenTarget
from ..targets.cache import KVSource
from ..targets.facts import TargetFacts
from . import training
from .base import CommittedTokens, DraftedFeatures, Drafter, DraftLevel
from .caches import LayerState, lengths_mask
from .sizes import Flag, Indices, LayerSizes, Size
from .training import Draws, LossTerms, Reads, TrainingInputs, TrainingStep


@dataclass(frozen=True, kw_only=True)
class GlideSizes(LayerSizes):
    """The sizes of a GLIDE drafter, and the hashes that identify its target."""

    kind = "glide"
    left_out = ("draft_", "target_")

    # D = 2 * target KV heads * target head dim. If the layers of the target have different KV
    # widths, D is the KV width of the widest layer.
    kv_width: Size
    # Four numbers: the index of the target layer to which the drafter attends, the number of KV
    # heads of this layer, the width of a key, and the width of a value. If the target rotates keys
    # as Llama does, the tuple is empty, and the drafter attends to the last layer of the target.
    target_kv: Indices = ()
    # True if the layer in ``target_kv`` uses multi-head latent attention. The target's cache then
    # has latents in place of this layer's keys, and rotated keys in place of its values.
    target_latents: Flag = False
    block_size: Size = 5  # Number of tokens of a block in training.

    @property
    @override
    def reads(self) -> Reads:
        return Reads(kv=True, kv_layers=(-1,))

    @classmethod
    @override
    def defaults(cls, facts: TargetFacts, given: Mapping[str, Any]) -> dict[str, Any]:
        facts.check_kv()
        values = dict[str, Any]()
        if not facts.rotates_as_llama:
            last = max(facts.kv_groups, key=lambda group: group.layers[-1])
            values["target_kv"] = (last.layers[-1], *last.shape)
            values["target_latents"] = last.field == "kv/latent"
        values["kv_width"] = facts.kv_width
        return super().defaults(facts, given) | values

    @override
    def problems(self) -> Iterator[str]:
        yield from super().problems()
        layer, n_heads, key_width, value_width = self.attended
        is_whole = len(self.target_kv) in (0, 4) and min(n_heads, key_width, value_width) >= 1
        is_held = n_heads * (key_width + value_width) <= self.kv_width and layer < max(
            1, self.n_layers
        )
        if not (is_whole and is_held):
            yield (
                "target_kv must be four numbers that fit the target: the index of a layer, the "
                "number of its KV heads, the width of a key and the width of a value"
            )
        if self.n_heads % max(1, n_heads):
            yield (
                f"the target has {n_heads} KV heads and {self.n_heads} query heads, but the number "
                "of KV heads must divide the number of query heads"
            )

    @property
    def attended(self) -> tuple[int, int, int, int]:
        """Four numbers of the attended target layer: index, KV heads, key width, value width."""
        if len(self.target_kv) == 4:
            layer, n_heads, key_width, value_width = self.target_kv
            return layer, n_heads, key_width, value_width
        return self.n_layers - 1, self.kv_width // (2 * self.head_dim), self.head_dim, self.head_dim


class GlideDrafter(Drafter):
    """The trained weights: a decoder layer, and cross-attention without K and V projections."""

    config_class = GlideSizes
    config: GlideSizes
    by_graph = True

    def __init__(self, config: GlideSizes) -> None:
        super().__init__(config)
        self.self_attention = DecoderBlock(config.layer)
        _, n_heads, key_width, value_width = config.attended
        if config.target_latents:
            key_width, value_width = key_width + value_width, key_width
        sizes = replace(config.layer, n_kv_heads=n_heads, head_dim=key_width, qkv_bias=False)
        self.cross_attention = Attention(sizes)
        # Cross-attention needs no K and V projections, because the target has already projected its
        # keys and values.
        del self.cross_attention.k_proj, self.cross_attention.v_proj
        if key_width != value_width:
            self.cross_attention.o_proj = nn.Linear(
                config.n_heads * value_width, config.hidden_size, bias=False
            )
        self.rotary = config.rotary()

    @override
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of one mini-batch: the forward KL. The feature loss is only logged."""
        inputs = step.inputs
        draws = step.draws
        queries, valid = training.loss_queries(self.loss_positions(inputs.response_mask, draws))
        last_seen = block_context(queries, self.config.block_size, draws.offset).clamp(min=0)
        indices = training.true_indices(valid)
        features = self._features(frozen, inputs, last_seen, queries)[indices]  # Features, [P, E].
        goal = training.at_queries(inputs.hidden, queries)[indices]
        kl, feature = training.distillation(
            frozen, features, goal, step.scale(len(features)), step.weights.divergence
        )
        return {"loss": step.weights.forward_kl * kl, "forward_kl": kl, "feature_loss": feature}

    @override
    def drafted_features(
        self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws
    ) -> DraftedFeatures:
        # A draft step reads the tokens of earlier drafts, but not their features. The tokens of the
        # batch count as the drafted tokens, so one forward pass computes all drafts. Training does
        # the same, but with blocks in place of draft rounds.
        queries, valid, context = training.round_queries(inputs.response_mask, draws)
        return DraftedFeatures(queries, valid, self._features(frozen, inputs, context, queries))

    def _features(
        self, frozen: FrozenTarget, inputs: TrainingInputs, last_seen: Tensor, queries: Tensor
    ) -> Tensor:
        seen = masks.Mask.up_to(last_seen, inputs.tokens.shape[1])
        features: Tensor = self(frozen, inputs.tokens, inputs.required_kv(), seen, queries)
        return features

    def forward(
        self,
        frozen: FrozenTarget,
        tokens: Tensor,
        kv: Tensor,
        seen: masks.Mask | Tensor,
        queries: Tensor,
    ) -> Tensor:
        """Run many draft rounds at once over sequences [B, T].

        Returns the features of queries [B, Q].

        Args:
            frozen: the target.
            tokens: [B, T], token ids.
            kv: [B, T, n, D], packed target KV of n >= 1 layers. The drafter attends to the last of
                these layers.
            seen: the mask of the cross-attention. It says for each query and each of the T
                positions whether the query sees the target's KV of the position. A tensor mask is
                [B, Q, T]. Its values are bool, or floats that are added to the attention scores.
            queries: [B, Q], positions.
        """
        positions = masks.positions_of(tokens)[None, :]  # [1, T], the same positions for all rows.
        embeddings = frozen.embed(tokens)
        own_kv = self.self_attention.keys_values(embeddings, self.rotary(positions))
        causal = masks.Mask.up_to(queries, tokens.shape[1])
        _, n_heads, key_width, value_width = self.config.attended
        packed = (
            kv[:, :, -1, : n_heads * (key_width + value_width)]
            .unflatten(2, (n_heads, -1))
            .transpose(1, 2)
        )
        target = self._keys_values(*packed.split((key_width, value_width), dim=3))
        x = training.at_queries(embeddings, queries)
        return self._layer(target, seen, x, self.rotary(queries), *own_kv, causal)

    def _keys_values(self, keys: Tensor, values: Tensor) -> KeysValues:
        """Convert the target's keys and values [B, H_kv, T, d] to the form that attention reads.

        If the target caches latents, the module's docstring says how they are converted.
        """
        return (
            (torch.cat((keys, values), dim=3), keys)
            if self.config.target_latents
            else (keys, values)
        )

    def _layer(
        self,
        target: KeysValues,
        target_mask: masks.AnyMask,
        x: Tensor,
        rotation: Rotation,
        keys: Tensor,
        values: Tensor,
        mask: masks.AnyMask,
    ) -> Tensor:
        """Run the layer on x [B, Q, E]. Its queries attend to the drafter's and the target's KV."""
        block = self.self_attention
        x = x + block.self_attn(block.queries(x, rotation), keys, values, mask)
        q = self.cross_attention.queries(x, None if self.config.target_kv else rotation)
        return block.finish(x, self.cross_attention(q, *target, target_mask))

    @override
    def new_state(self, n_rows: int) -> LayerState:
        return LayerState(n_rows, 1)

    @override
    def draft_root(
        self,
        state: LayerState,
        frozen: FrozenTarget,
        committed: CommittedTokens,
        cache: KVSource,
    ) -> Tensor:
        tokens, _, counts = state.take_round(committed, frozen.lm_head_weight.device)
        last = self._decoding_layer(masks.added(masks.added(state.n_true, counts), -1), cache)
        return state.feed_committed(
            [self.self_attention], self.rotary, frozen.embed(tokens), counts, last
        )[0]

    @override
    def draft_level(
        self, state: LayerState, frozen: FrozenTarget, level: DraftLevel, cache: KVSource
    ) -> Tensor:
        fed = state.begin_level(self.rotary, level)
        x = frozen.embed(level.tokens)
        own_kv = state.slots[0].append(*self.self_attention.keys_values(x, fed.rotation))
        return self._decoding_layer(fed.before, cache)(x, fed.rotation, *own_kv, fed.mask)

    def _decoding_layer(self, before: Sequence[int], cache: KVSource) -> Callable[..., Tensor]:
        layer, n_heads, key_width, value_width = self.config.attended
        keys, values = cache.layer_view(layer, max(before))
        # The cache has the width of the target's widest layer. If the layer to which the drafter
        # attends is narrower, cut off the padding.
        keys = keys[:, :n_heads, :, :key_width]
        values = values[:, :n_heads, :, :value_width]
        target = self._keys_values(keys, values)
        return partial(self._layer, target, lengths_mask(before, keys.device))


def block_context(queries: Tensor, block_size: int, offset: Tensor | None = None) -> Tensor:
    """For each query, find the last position before the query's block: [B, Q] int64.

    Queries [B, Q] are positions. For queries in the block that contains position 0, the result is
    below 0. In each row, a block starts at the row's ``offset`` [B]. Without offsets, a block
    starts at position 0 (lines 145-147 of ``train/glide.py`` in the MoA authors' code).
    """
    shift = 0 if offset is None else (offset % block_size)[:, None]
    return shift + (queries - shift) // block_size * block_size - 1
