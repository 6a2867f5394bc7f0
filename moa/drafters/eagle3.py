"""EAGLE-3 drafter (Li et al., NeurIPS 2025, arXiv 2503.01840): fused layers of the target, and training-time test.

Shapes: B batch, T tokens, S slots (T - 1), Q queries, P loss positions, E target width, K fused layers, V vocabulary,
V_d draft vocabulary, J steps, H query heads, H_kv key/value heads, d head dim.

    outputs of K target layers -> linear K * E -> E -> feature of token t
    [norm(embedding of token t+1) ; norm(feature of t)] -> attention -> + feature of t -> + MLP -> feature of token t+1
    feature -> norm -> own LM head over the draft vocabulary

Slots, positions and decoding are those of EAGLE (:mod:`.eagle`): slot t is made from the feature of t and the token at
t+1. The output of the layer is fed back without a norm in place of a fused feature, and need not resemble any hidden
state of the target: only the distribution of the next token is taught.

Training-time test: step 1 is teacher forcing. In step j + 1 each position is a draft round of its own that is j tokens
further: it sees the slots of step 1 up to where its round began, and those that it made itself since. For a round that
begins at slot 4 (official ``traineagle3/cnets.py``, ``LlamaAttention.forward`` and ``Model.forward``)::

    step   fed slot   made from the feature of    sees slots of step 1    own slots
       1          4   the target                  0 1 2 3 4
       2          5   step 1                      0 1 2 3 4               5
       3          6   step 2                      0 1 2 3 4               5 6

A round carries loss as long as it stays in the response that its root is in, as the rounds of decoding do. The official
code also begins rounds in the prompt. Its teacher is normalised over the draft vocabulary, and positions whose
likeliest token is outside carry no loss; here only the teacher's probabilities of tokens outside are left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from ...errors import DrafterError
from ..nn import losses
from ..nn.layers import BlockSizes, DecoderBlock, RMSNorm
from ..targets.bundle import FrozenTarget
from ..targets.families import target_sizes
from .eagle import FeatureDrafter
from .sizes import DrafterSizes, LayerSizes, check_target_layers
from .training import (
    LossTerms,
    Reads,
    TrainingInputs,
    TrainingStep,
    at_queries,
    loss_queries,
    places,
)
from .vocabulary import most_frequent, over_all_tokens

# weight of a step's loss relative to the step before (official ``traineagle3/main.py``)
STEP_DECAY = 0.8

DEFAULT_DRAFT_VOCABULARY = 32_000
"""Tokens that can be drafted where the target has more, as the authors take of Llama 3's 128,256."""

_SCORE_BYTES = 1 << 27
"""Bytes of attention scores of a training step; more are computed in parts, of rows and then of queries."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Sizes(LayerSizes):
    """The sizes of an EAGLE-3 drafter, and the identity of its target."""

    kind: ClassVar[str] = "eagle3"
    without_weights: ClassVar[tuple[str, ...]] = ()

    fused_layers: tuple[int, ...]
    """Target layers, from 0, whose outputs are fused, in the order in which the linear layer takes them."""
    draft_vocabulary: int  # V_d, tokens that can be drafted
    test_time_steps: int = 7  # J, draft steps that training unrolls
    fc_norm: bool = False
    """Whether each of the outputs has a norm before they are fused, as in EAGLE-3.1 (arXiv 2605.09992)."""
    # whether the drafter is fed with its outputs after the final norm, as in EAGLE-3.1
    norm_output: bool = False
    # whether all outputs together have a norm before they are fused (speculators)
    norm_before_fc: bool = False
    # whether the residual begins after the norm of the features (speculators)
    norm_before_residual: bool = False
    # whether queries and keys have a norm per head, as Qwen3's (speculators)
    query_key_norm: bool = False

    @override
    def problems(self) -> Iterator[str]:
        yield from super().problems()
        # A foreign checkpoint does not say how many layers its target has.
        check_target_layers(
            self.fused_layers, self.n_layers or 1 + max(self.fused_layers, default=0)
        )

    @classmethod
    @override
    def defaults(cls, config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        facts = target_sizes(config)
        found = super().defaults(config, given)
        found["qkv_bias"] = False  # as engines run it, for Qwen2 too
        found["draft_vocabulary"] = min(facts["vocab_size"], DEFAULT_DRAFT_VOCABULARY)
        if "fused_layers" not in given:  # small targets have no default
            found["fused_layers"] = default_fused_layers(facts["n_layers"])
        return found


def default_fused_layers(n_layers: int) -> tuple[int, int, int]:
    """The default fused layers, low, middle and high: 1, L // 2 - 1 and L - 4, as in SpecForge, SGLang and vLLM."""
    layers = (1, n_layers // 2 - 1, n_layers - 4)
    if not layers[0] < layers[1] < layers[2]:
        raise DrafterError(
            f"EAGLE-3 reads three layers of the target, by default of one with 7 or more; this one has {n_layers}. "
            f"Choose them: --fused-layers {','.join(map(str, sorted({0, n_layers // 2, n_layers - 1})))}."
        )
    return layers


class Eagle3Block(DecoderBlock):
    """A decoder layer whose attention sees two streams of width E, each with a norm; its residual is the second one.

    The residual is that of before the norm, or, with ``norm_before_residual``, of after it (vLLM ``llama_eagle3.py``).
    """

    def __init__(self, sizes: BlockSizes, norm_before_residual: bool = False) -> None:
        super().__init__(sizes)
        self.hidden_norm = RMSNorm(sizes.width, eps=sizes.norm_eps)
        self._norms_residual = norm_before_residual

    @override
    def normed(self, x: Tensor) -> Tensor:
        embeddings, hidden = x.chunk(2, dim=-1)
        return torch.cat((self.input_layernorm(embeddings), self.hidden_norm(hidden)), dim=-1)

    @override
    def residual(self, x: Tensor) -> Tensor:
        hidden = x.chunk(2, dim=-1)[1]
        return self.hidden_norm(hidden) if self._norms_residual else hidden


class Eagle3Drafter(FeatureDrafter):
    """The trained part: fusing layer, decoder layer, final norm, LM head; weights have the names of other projects."""

    config_class: ClassVar[type[DrafterSizes]] = Eagle3Sizes
    config: Eagle3Sizes
    uses_target_head = False
    d2t: Tensor  # [V_d] int64, what to add to an index of the draft vocabulary to get the token
    t2d: Tensor  # [V] bool, whether a token can be drafted

    def __init__(self, config: Eagle3Sizes) -> None:
        super().__init__(config)
        self.observed_layers = config.fused_layers
        width = config.hidden_size
        self.fc = nn.Linear(len(config.fused_layers) * width, width, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(len(config.fused_layers) * width, eps=config.norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(width, eps=config.norm_eps) for _ in config.fused_layers
            )
        sizes = replace(config.layer, input_width=2 * width, query_key_norm=config.query_key_norm)
        self.midlayer = Eagle3Block(sizes, config.norm_before_residual)
        self.norm = RMSNorm(width, eps=config.norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocabulary, bias=False)
        self.rotary = config.rotary()
        self.register_buffer("d2t", torch.zeros(config.draft_vocabulary, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocabulary)

    @property
    @override
    def blocks(self) -> list[DecoderBlock]:
        return [self.midlayer]

    @property
    @override
    def own_head(self) -> Tensor:
        return self.lm_head.weight

    @property
    def draft_tokens(self) -> Tensor | None:
        """Tokens of the draft vocabulary, ascending, [V_d] int64; None where it is the target's."""
        if self.config.draft_vocabulary == self.config.vocab_size:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @classmethod
    @override
    def reads(cls, n_layers: int, settings: Any) -> Reads:
        layers = (
            default_fused_layers(n_layers)
            if settings.fused_layers is None
            else settings.fused_layers
        )
        check_target_layers(layers, n_layers)
        return Reads(outputs=layers)

    @override
    @torch.no_grad()
    def adopt(self, frozen: FrozenTarget, count_tokens: Callable[[], Tensor]) -> None:
        """Choose the draft vocabulary, of equally frequent tokens the lower ones, and begin with the target's head."""
        tokens = torch.arange(self.config.vocab_size)
        if self.config.draft_vocabulary < self.config.vocab_size:
            tokens = most_frequent(count_tokens(), self.config.draft_vocabulary)
        self.d2t.copy_(tokens - torch.arange(len(tokens)))
        self.t2d.fill_(False)[tokens] = True
        self.lm_head.weight.copy_(frozen.lm_head_weight[tokens.to(frozen.lm_head_weight.device)])
        self.norm.weight.copy_(frozen.norm.weight)

    @override
    def check_weights(self) -> None:
        ids = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        marked = self.t2d
        if not 0 <= int(ids.min()) <= int(ids.max()) < len(marked):
            raise DrafterError(
                f"d2t names the tokens {int(ids.min())} to {int(ids.max())}, expected ids from 0 to {len(marked) - 1}; "
                "it holds offsets (target id - draft id), not target ids."
            )
        if (
            len(ids.unique()) < len(ids)
            or int(marked.sum()) != len(ids)
            or not bool(marked[ids].all())
        ):
            raise DrafterError(
                f"d2t names {len(ids.unique())} different tokens of {len(ids)}, and t2d marks {int(marked.sum())} "
                "tokens; expected the same ones in both."
            )

    @override
    def join(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((embeddings, hidden.to(embeddings.dtype)), dim=-1)

    @override
    def target_states(self, inputs: TrainingInputs) -> Tensor:
        return torch.cat(inputs.layer_outputs, dim=-1)  # [B, T, K * E]

    @override
    def true_features(self, states: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        if self.config.fc_norm:
            parts = states.split(self.config.hidden_size, dim=-1)
            states = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        features: Tensor = self.fc(states)
        return features

    @override
    def fed_back(self, outputs: Tensor) -> Tensor:
        return self.norm(outputs) if self.config.norm_output else outputs

    def normed(self, features: Tensor) -> Tensor:
        """Turn features [..., E] into what the LM head takes."""
        return features if self.config.norm_output else self.norm(features)

    @override
    def draft_logits(self, frozen: FrozenTarget, features: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.normed(features))
        tokens = self.draft_tokens
        return logits if tokens is None else over_all_tokens(logits, tokens, self.config.vocab_size)

    @override
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of one mini-batch: the forward KL of all steps, each weighted 0.8 times the one before."""
        inputs = step.inputs
        queries, valid = loss_queries(self.loss_positions(inputs.response_mask, step.draws))
        features, reached = self.test_time_features(frozen, inputs, queries, valid)
        at = places(valid)
        n_steps = features.shape[0]
        n_positions = len(at[0])
        own = self.normed(features.transpose(0, 1).transpose(1, 2)[at])  # [P, J, E]
        if step.weights.d_pace is None:
            decay = STEP_DECAY ** torch.arange(n_steps, device=features.device)
            weights = reached * decay[:, None, None]
        else:
            weights = self.paced(inputs.tokens, queries, at, own, reached, step.weights.d_pace)
        total, by_step = losses.chunked_losses(
            own,
            at_queries(inputs.hidden, queries)[at],  # [P, E]
            frozen.lm_head_weight,
            weights.permute(1, 2, 0)[at][..., None],  # [P, J, 1]
            own_head=self.lm_head.weight,
            tokens=self.draft_tokens,
            divergence=step.weights.divergence,
            cap=frozen.logit_cap,
        )
        scale = step.scale(n_positions)
        # The first step, unweighted, is what other drafters report.
        return LossTerms(
            step.weights.forward_kl * scale * total, scale * by_step[:, 0].sum(), None, n_positions
        )

    def paced(
        self,
        tokens: Tensor,
        queries: Tensor,
        at: tuple[Tensor, ...],
        own: Tensor,
        reached: Tensor,
        smoothing: float,
    ) -> Tensor:
        """Weigh steps by D-PACE, each round a block: of tokens [B, T] and features ``own`` [P, J, E], [J, B, Q]."""
        labels = tokens[at[0], (queries[at] + 1).clamp(max=tokens.shape[1] - 1)]
        if self.draft_tokens is not None:  # a token that cannot be drafted has no probability
            order = labels.new_full((self.config.vocab_size,), -1)
            order[self.draft_tokens] = torch.arange(len(self.draft_tokens), device=labels.device)
            labels = order[labels]
        every = labels.clamp(min=0).repeat_interleave(own.shape[1])
        wrong = losses.chunked_cross_entropy(own.detach().flatten(0, 1), every, self.lm_head.weight)
        wrong = wrong.view(own.shape[:2]).masked_fill((labels < 0)[:, None], torch.inf)
        grid = wrong.new_zeros(*queries.shape, own.shape[1])
        grid[at] = wrong
        # Step j of the round that begins at a query stands j queries further (see below).
        by_round = [x.roll(-step, dims=1) for step, x in enumerate(grid.unbind(dim=-1))]
        seen = [x.roll(-step, dims=1) for step, x in enumerate(reached)]
        paced = losses.d_pace_weights(
            torch.stack(by_round, dim=-1), torch.stack(seen, dim=-1), smoothing
        )
        return torch.stack([x.roll(step, dims=1) for step, x in enumerate(paced.unbind(dim=-1))])

    def test_time_features(
        self, frozen: FrozenTarget, inputs: TrainingInputs, queries: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run every step of training-time test for positions of the response, as :func:`loss_queries` gives them.

        Returns features [J, B, Q, E] of each position in step j, and [J, B, Q] bool, whether a round whose root is
        j - 1 tokens before reaches it within the response.
        """
        embeddings = frozen.embed(inputs.tokens[:, 1:])  # of slot t, [B, S, E]
        hidden = self.true_features(self.target_states(inputs)[:, :-1].to(embeddings.dtype))
        block = self.midlayer
        slots = torch.arange(embeddings.shape[1], device=queries.device)
        first = (queries - 1).clamp(min=0)  # the slot that each round begins at
        joined = self.join(embeddings, hidden)
        keys, values = block.keys_values(joined, self.rotary(slots[None, :]))
        seen, x = slots <= first[..., None], at_queries(joined, first)  # [B, Q, S], [B, Q, 2E]
        own: list[tuple[Tensor, Tensor]] = []
        features: list[Tensor] = []
        reached: list[Tensor] = []
        outputs = x
        for step in range(self.config.test_time_steps):
            at = (first + step).clamp(max=len(slots) - 1)
            rotation = self.rotary(at)
            if step:
                x = self.join(at_queries(embeddings, at), outputs)
                own.append(block.keys_values(x, rotation))
            attended = attend_with_own_steps(block.queries(x, rotation), keys, values, seen, own)
            outputs = self.fed_back(
                block.finish(x, block.self_attn.o_proj(attended.transpose(1, 2).flatten(2)))
            )
            # Round p stands at the position that is `step` places further among the queries, if
            # none is left out.
            features.append(outputs.roll(step, dims=1))
            has_root = torch.arange(queries.shape[1], device=queries.device) >= step
            reached.append(valid & has_root & (queries - queries.roll(step, dims=1) == step))
        return torch.stack(features), torch.stack(reached)


def attend_with_own_steps(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Let each round, a query of q [B, H, Q, d], attend to slots that all share and to slots of its own: [B, H, Q, d].

    Shared keys and values are [B, H_kv, S, d], which of them a round sees [B, Q, S] bool; ``own`` has, per earlier
    step, keys and values [B, H_kv, Q, d], one of each round.
    """
    query_bytes = 4 * q.shape[1] * (keys.shape[2] + len(own))
    n_queries = max(1, _SCORE_BYTES // query_bytes)
    n_rows = max(1, n_queries // max(1, q.shape[2]))
    flat = [part for pair in own for part in pair]
    if q.shape[0] * q.shape[2] <= n_queries:
        return _attend(q, keys, values, seen, *flat)
    # The scores are computed again in the backward pass, so that few of them are held at a time.
    attended = []
    for rows in zip(
        *(tensor.split(n_rows) for tensor in (q, keys, values, seen, *flat)), strict=True
    ):
        row_q, row_keys, row_values, row_seen, *row_own = rows
        by_query = zip(
            *(part.split(n_queries, dim=2) for part in (row_q, row_seen[:, None], *row_own)),
            strict=True,
        )
        parts = [
            checkpoint(
                _attend,
                part_q,
                row_keys,
                row_values,
                part_seen[:, 0],
                *part_own,
                use_reentrant=False,
            )
            for part_q, part_seen, *part_own in by_query
        ]
        attended.append(torch.cat(parts, dim=2))
    return torch.cat(attended)


def _attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, *own: Tensor) -> Tensor:
    n_kv_heads = keys.shape[1]
    n_slots = keys.shape[2]
    rows = q.unflatten(1, (n_kv_heads, -1)) * q.shape[-1] ** -0.5  # [B, H_kv, group, Q, d]
    shared = rows @ keys[:, :, None].transpose(-1, -2)  # [B, H_kv, group, Q, S]
    scores = [shared.masked_fill(~seen[:, None, None], -torch.inf)]
    scores += [(rows * own_keys[:, :, None]).sum(dim=-1, keepdim=True) for own_keys in own[::2]]
    # [B, H_kv, group, Q, S + steps]
    share = torch.cat(scores, dim=-1).softmax(dim=-1).to(values.dtype)
    attended = share[..., :n_slots] @ values[:, :, None]
    for index, own_values in enumerate(own[1::2]):
        attended = attended + share[..., n_slots + index, None] * own_values[:, :, None]
    return attended.flatten(1, 2)
