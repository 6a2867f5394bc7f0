"""EAGLE drafter (Li et al., ICML 2024, arXiv 2401.15077; trees of EAGLE-2, arXiv 2406.16858): one decoder layer.

Shapes: B batch, T tokens, Q queries, E target width, b nodes of one level, n tokens of one call, S slots.

    [embedding of token t+1 ; hidden state of token t] -> linear 2E -> E -> decoder layer(s) -> feature of token t+1

Hidden states are the target's AFTER its final norm, what transformers gives as ``hidden_states[-1]`` and the store as
``hidden/last``: the LM head turns them, and the features that stand for them, into logits with no norm in between. The
official code has the same convention (``train/eagle.py``).

Slot t of the drafter's cache is made from the hidden state of position t and the token at t+1, and its RoPE position is
t. In slots before the root's the hidden states are the target's own; behind it they are the drafter's, and each round
makes those of accepted tokens anew.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from . import masks
from .bundle import FrozenTarget, target_sizes
from .config import DrafterSizes, target_facts
from .drafter import DraftedFeatures, Drafter
from .errors import DrafterError
from .kv_buffer import KVBuffer, positions_behind
from .layers import DecoderBlock, Rotary
from .objective import (
    DEFAULT_WEIGHTS,
    Draws,
    LossTerms,
    LossWeights,
    TrainingInputs,
    at_queries,
    distillation,
    loss_queries,
    loss_scale,
)
from .target_cache import TargetCache


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DrafterSizes):
    """Everything needed to rebuild an EAGLE drafter and to know which target it belongs to."""

    kind: ClassVar[str] = "eagle"

    self_attention_kv_heads: int
    """KV heads of each layer."""
    self_attention_mlp_width: int
    """MLP width of each layer."""
    eagle_layers: int = 1
    """Decoder layers."""

    def __post_init__(self) -> None:
        if self.self_attention_kv_heads < 1 or self.n_heads % self.self_attention_kv_heads:
            raise DrafterError(
                f"self_attention_kv_heads ({self.self_attention_kv_heads}) must divide the {self.n_heads} query heads "
                "of the target."
            )
        if self.eagle_layers < 1:
            raise DrafterError(f"eagle_layers must be at least 1, got {self.eagle_layers}.")

    @classmethod
    def from_target(cls, config: Any, target: dict[str, str] | None = None, **sizes: Any) -> Self:
        """One layer of the target's own shape where not given otherwise; see :meth:`DrafterSizes.from_target`."""
        defaults = {
            "self_attention_kv_heads": target_sizes(config)["n_kv_heads"],
            "self_attention_mlp_width": config.intermediate_size,
        }
        given = {name: value for name, value in sizes.items() if value is not None}
        return cls(**target_facts(config, target), **(defaults | given))


class EagleState:
    """The drafter's caches of B rows while decoding.

    Attributes:
        slots: keys and values of each layer.
        n_true: per row, the slots that are made from the target's own states; they come first.
        fresh: per row, the target's states [n, E or K * E] of the committed positions from ``n_true`` on.
        n_fed: slots of this round's tree, the root's included.
    """

    def __init__(self, n_rows: int, n_layers: int) -> None:
        self.slots = [KVBuffer(n_rows) for _ in range(n_layers)]
        self.n_true = [0] * n_rows
        self.fresh: list[list[Tensor]] = [[] for _ in range(n_rows)]
        self.n_fed = 0

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        for buffer in self.slots:
            buffer.select_rows(rows)
        self.n_true = [self.n_true[row] for row in rows]
        self.fresh = [self.fresh[row] for row in rows]


class FeatureDrafter(Drafter):
    """What EAGLE and EAGLE-3 share: layers that are fed the token at t+1 with the feature of t, and feed themselves."""

    rotary: Rotary

    @property
    @abstractmethod
    def blocks(self) -> list[DecoderBlock]:
        """The decoder layers in order; the first one takes what :meth:`join` gives."""

    @abstractmethod
    def join(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings of tokens t+1 and features of tokens t, each [..., E] -> input of the layers."""

    def target_states(self, inputs: TrainingInputs) -> Tensor:
        """What the drafter sees of the target, as :meth:`observe` gets it: here the last hidden states [B, T, E]."""
        return inputs.hidden

    def true_features(self, states: Tensor) -> Tensor:
        """:meth:`target_states` [...] -> features [..., E] in place of the drafter's own; here the same."""
        return states

    @torch.no_grad()
    def drafted_features(self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws) -> DraftedFeatures:
        """Every round of a batch step by step, each step fed with the features of the one before."""
        drafted = masks.drafted_positions(inputs.response_mask, draws.step_bound, draws.offset)
        drafted[:, 0] = False
        context = masks.last_context(drafted)[:, 1:]  # [B, S]: the last true slot that a query sees
        slots = torch.arange(context.shape[1], device=context.device)
        step = torch.where(drafted[:, 1:], slots - context, -1)  # 0 for the root's slot, -1 for none
        embeddings = frozen.embed(inputs.tokens[:, 1:])
        joined = self.join(embeddings, self.true_features(self.target_states(inputs)[:, :-1].to(embeddings.dtype)))
        true_keys_values, features = [], joined
        rotation, causal = self.rotary(slots[None, :]), (slots[None, :] <= slots[:, None])[None]
        for block in self.blocks:
            true_keys_values.append(block.keys_values(features, rotation))
            features = block(features, rotation, *true_keys_values[-1], causal)
        own_keys_values = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in true_keys_values]
        rows = torch.arange(len(step), device=step.device)[:, None]
        for index in range(1, int(step.max()) + 1):
            queries, valid = loss_queries(step == index)
            limit = context.gather(1, queries)[..., None]
            seen = torch.cat((slots <= limit, (slots > limit) & (slots <= queries[..., None])), dim=-1)  # [B, Q, 2S]
            x = self.join(at_queries(embeddings, queries), at_queries(features, (queries - 1).clamp(min=0)))
            at = rows.expand_as(queries)[valid], queries[valid]
            rotation = self.rotary(queries)
            for block, true, own in zip(self.blocks, true_keys_values, own_keys_values, strict=True):
                for buffer, new in zip(own, block.keys_values(x, rotation), strict=True):
                    buffer[at[0], :, at[1]] = new.transpose(1, 2)[valid].to(buffer.dtype)
                keys, values = (torch.cat(pair, dim=2) for pair in zip(true, own, strict=True))
                x = block(x, rotation, keys, values, seen)
            features[at] = x[valid].to(features.dtype)
        queries, valid = loss_queries(drafted)
        return DraftedFeatures(queries, valid, at_queries(features, (queries - 1).clamp(min=0)))

    def new_state(self, n_rows: int) -> EagleState:
        """Empty caches of B rows."""
        return EagleState(n_rows, len(self.blocks))

    def observe(self, state: EagleState, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        """Keep the target's states of committed tokens until the next round encodes them."""
        for row, indices in enumerate(kept):
            state.fresh[row].append(hidden[row, torch.tensor(list(indices), device=hidden.device)])

    def root_features(
        self, state: EagleState, frozen: FrozenTarget, committed: Sequence[list[int]], cache: TargetCache
    ) -> Tensor:
        """Make the slots up to the root's from the target's own states, those of accepted drafts anew."""
        device = frozen.lm_head_weight.device
        fresh = [torch.cat(parts) for parts in state.fresh]
        counts = [len(hidden) for hidden in fresh]
        tokens = torch.zeros(len(fresh), max(counts), dtype=torch.int64, device=device)
        for row, (start, count) in enumerate(zip(state.n_true, counts, strict=True)):
            tokens[row, :count] = torch.tensor(committed[row][start + 1 : start + 1 + count])
        hidden = nn.utils.rnn.pad_sequence(fresh, batch_first=True).to(self.dtype)  # [B, n, E or K * E]
        x = self.join(frozen.embed(tokens), self.true_features(hidden))
        positions = positions_behind(state.n_true, max(counts), device).expand(len(fresh), -1)
        causal = torch.ones(max(counts), max(counts), dtype=torch.bool, device=device).tril().expand(len(fresh), -1, -1)
        last = torch.tensor(counts, device=device)[:, None] - 1  # [B, 1]
        before, is_alone = state.n_true, len(fresh) == 1
        state.n_true = [start + count for start, count in zip(before, counts, strict=True)]
        state.fresh = [[] for _ in fresh]
        state.n_fed = 1
        n_slots = max(state.n_true)
        for index, (block, slots) in enumerate(zip(self.blocks, state.slots, strict=True)):
            slots.crop(before)
            rotation = self.rotary(positions)
            keys, values = slots.append(*block.keys_values(x, rotation), counts)
            queries = causal
            if index == len(state.slots) - 1:  # only the root's feature is wanted
                x, rotation = at_queries(x, last), self.rotary(positions.gather(1, last))
                queries = at_queries(causal, last)
            needs_no_mask = is_alone and queries.shape[1] == 1
            mask = None if needs_no_mask else masks.tree_mask(before, queries)[..., :n_slots]
            x = block(x, rotation, keys, values, mask)
        return x

    def level_features(
        self,
        state: EagleState,
        frozen: FrozenTarget,
        tokens: Tensor,
        parent_features: Tensor,
        seen: Tensor,
        level: int,
        cache: TargetCache,
    ) -> Tensor:
        """Feed the nodes of one level with the features that the drafter gave for their parents."""
        first = torch.tensor(state.n_true, device=tokens.device)[:, None] + level - 1
        rotation = self.rotary(first.expand(-1, tokens.shape[1]))  # a level stands at one position
        state.n_fed += tokens.shape[1]
        is_alone = len(tokens) == 1 and state.n_fed == level + 1
        mask = None if is_alone else masks.tree_mask([n - 1 for n in state.n_true], seen)
        x = self.join(frozen.embed(tokens), parent_features)
        for block, slots in zip(self.blocks, state.slots, strict=True):
            x = block(x, rotation, *slots.append(*block.keys_values(x, rotation)), mask)
        return x


class EagleDrafter(FeatureDrafter):
    """The trained part: the linear layer that joins token and hidden state, and the decoder layers."""

    kind: ClassVar[str] = EagleConfig.kind
    config_class: ClassVar[type[DrafterSizes]] = EagleConfig
    training_options: ClassVar[frozenset[str]] = frozenset({"feature_noise", "feature_weight"})
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        sizes = config.block(config.self_attention_kv_heads, config.self_attention_mlp_width, config.qkv_bias)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(DecoderBlock(sizes) for _ in range(config.eagle_layers))
        self.rotary = Rotary(config.head_dim, config.rope_parameters, config.max_position_embeddings)

    @property
    def blocks(self) -> list[DecoderBlock]:
        """:attr:`layers` with their type."""
        return cast(list[DecoderBlock], list(self.layers))

    @classmethod
    def needs(cls, n_layers: int, target_layer_inference: int) -> dict[str, str]:
        """The last hidden state alone."""
        return {"hidden": "hidden/last"}

    @classmethod
    def loss_positions(cls, response_mask: Tensor, draws: Draws, official: bool) -> Tensor:
        """The response; the first position of a sequence has no hidden state before it."""
        response = response_mask.bool().clone()
        response[:, :1] = False
        return response

    def join(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings of tokens t+1 and hidden states of tokens t, each [..., E] -> input of the layers [..., E]."""
        joined = self.fc(torch.cat((embeddings, hidden), dim=-1))
        return joined.to(embeddings.dtype)  # under autocast the residual stream keeps its precision

    def forward(self, joined: Tensor, queries: Tensor | None = None) -> Tensor:
        """The layers over whole sequences.

        Args:
            joined: [B, S, E], slots 0..S-1.
            queries: [B, Q] int64 slots to compute features for; None = all.

        Returns:
            [B, Q, E]: of slot t the feature of token t+1.
        """
        slots = torch.arange(joined.shape[1], device=joined.device)
        rotation = self.rotary(slots[None, :])
        causal = (slots[None, :] <= slots[:, None])[None]  # [1, S, S]
        if queries is None:
            queries = slots.expand(joined.shape[0], -1)
        *before, last = self.blocks
        for block in before:
            joined = block.attend_self(joined, rotation, causal)
        keys, values = last.keys_values(joined, rotation)
        seen = slots <= queries[..., None]  # [B, Q, S]
        return last(at_queries(joined, queries), self.rotary(queries), keys, values, seen)

    def objective(
        self,
        frozen: FrozenTarget,
        inputs: TrainingInputs,
        draws: Draws,
        weights: LossWeights = DEFAULT_WEIGHTS,
        official: bool = False,
        denominator: float | None = None,
    ) -> LossTerms:
        """Loss of one mini-batch, see :func:`eagle_objective`; the noise is drawn from the seeds of the draws."""
        noise = _draw_noise(draws, inputs.hidden, 2 if official else 1)
        return eagle_objective(self, frozen, inputs, weights, noise, official, denominator)


def eagle_objective(
    drafter: EagleDrafter,
    frozen: FrozenTarget,
    inputs: TrainingInputs,
    weights: LossWeights = DEFAULT_WEIGHTS,
    noise: Tensor | None = None,
    official: bool = False,
    denominator: float | None = None,
) -> LossTerms:
    """Loss of one mini-batch (EAGLE section 3.2 with the weights of the MoA paper; official ``train/eagle.py``).

    Args:
        drafter: trained part.
        frozen: target pieces.
        inputs: stored activations; only tokens, response mask and hidden states are looked at.
        weights: of the terms.
        noise: [1 or 2, B, T, E], added to the hidden states and, where there is a second one, to the embeddings; None
            for none.
        official: the noise is added in place, to the targets of both terms too (``train/eagle.py``, lines 104-105).
        denominator: what the sums are divided by; the number of loss positions (+ 1e-5) where None.
    """
    embeddings = frozen.embed(inputs.tokens)[:, 1:]
    hidden = inputs.hidden.to(embeddings.dtype)
    noisy = hidden
    if noise is not None:
        noisy = hidden + noise[0]
        if len(noise) > 1:
            embeddings = embeddings + noise[1][:, 1:]
    queries, valid = loss_queries(inputs.response_mask[:, 1:].bool())
    features = drafter(drafter.join(embeddings, noisy[:, :-1]), queries)[valid]  # [P, E]
    goal = at_queries((noisy if official else hidden)[:, 1:], queries)[valid]
    n_positions = int(valid.sum())
    kl, feature = distillation(frozen, features, goal, loss_scale(n_positions, denominator))
    return LossTerms(weights.forward_kl * kl + weights.feature * feature, kl, feature, n_positions)


def _draw_noise(draws: Draws, hidden: Tensor, n_streams: int) -> Tensor | None:
    """Uniform noise [n_streams, B, T, E] in plus or minus half the width; each row has its own seed."""
    if not draws.noise_seeds or not draws.noise_width:
        return None
    rows = []
    for seed in draws.noise_seeds:
        generator = torch.Generator(hidden.device).manual_seed(seed)
        # Tokens first, so that what a token gets does not depend on the padding behind it.
        shape = hidden.shape[1], n_streams, hidden.shape[2]
        rows.append(torch.rand(shape, generator=generator, device=hidden.device))
    return (torch.stack(rows) - 0.5).permute(2, 0, 1, 3) * draws.noise_width
