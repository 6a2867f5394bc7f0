"""EAGLE-3 drafter: reads several target layers, and is trained on its own outputs.

Li et al., NeurIPS 2025, arXiv 2503.01840.

Shapes: B batch, T tokens, S slots (T - 1), Q queries, P loss positions, E target width, K fused
target layers, V vocabulary, V_d draft vocabulary, J draft steps, H query heads, H_kv key/value
heads, d head dim.

    outputs of K target layers -> linear K * E -> E -> feature of token t
    [norm(embedding of token t+1) ; norm(feature of t)] -> attention -> + feature of t -> + MLP
                                                        -> feature of token t+1
    feature -> norm -> own LM head over the draft vocabulary

Slots, positions and decoding are as in EAGLE (:mod:`.eagle`): slot t is computed from the feature
of t and the token at t+1. In the first draft step, this feature is fused from the outputs of target
layers. From the second draft step on, it is the output of the decoder layer, to which no norm is
applied. The loss compares only distributions of the next token, so this output need not resemble
any hidden state of the target.

The drafter is trained on its own outputs, which the paper calls *training-time test*. Training
simulates J draft steps of decoding. Each position starts a draft round. The inputs of step 1 are
features of the target, and each later step advances all rounds by one token. A round sees the slots
of step 1 up to the slot at which the round starts, and the slots that the round itself has computed
in later steps. Example for a round that starts at slot 4 (``LlamaAttention.forward`` and
``Model.forward`` in the EAGLE authors' ``traineagle3/cnets.py``)::

    step   fed slot   made from the feature of    sees slots of step 1    own slots
       1          4   the target                  0 1 2 3 4
       2          5   step 1                      0 1 2 3 4               5
       3          6   step 2                      0 1 2 3 4               5 6

In decoding, all drafts of a round belong to one response. So in training, a round contributes to
the loss only until the response that contains its root ends. The EAGLE authors' code differs in
three points:

- It also starts rounds in the prompt.
- It normalises the teacher's distribution over the draft vocabulary. Here the distribution is
  normalised over all tokens, and the terms of tokens outside the draft vocabulary are left out.
- It skips the loss of positions whose most likely token is outside the draft vocabulary. Here all
  positions have a loss.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from ...errors import DrafterError
from ..nn import losses, masks
from ..nn.layers import DecoderBlock, DecoderBlockSizes, KeysValues, RMSNorm
from ..targets.bundle import FrozenTarget
from ..targets.facts import TargetFacts
from .eagle import FeatureDrafter
from .sizes import Flag, Indices, LayerSizes, Size, check_default_layers, check_target_layers
from .training import (
    LossTerms,
    Reads,
    TrainingInputs,
    TrainingStep,
    at_queries,
    loss_queries,
    true_indices,
)
from .vocabulary import most_frequent

# Each draft step has the loss weight of the previous step, multiplied by this factor
# (``traineagle3/main.py`` of the EAGLE authors).
STEP_DECAY = 0.8

DEFAULT_DRAFT_VOCABULARY = 32_000
"""Default size of the draft vocabulary for targets with more tokens. The EAGLE authors use this
size for Llama 3, which has 128,256 tokens."""

_SCORE_BYTES = 1 << 27
"""Maximum size in bytes of the attention scores that a training step computes at once. If the
scores take more bytes, the computation is split by rows of the batch, and then by queries."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Sizes(LayerSizes):
    """The sizes of an EAGLE-3 drafter, and the hashes that identify its target."""

    kind = "eagle3"
    without_weights = ()

    fused_layers: Indices
    """Target layers whose outputs are fused, counted from 0. The linear layer that fuses them reads
    the outputs in this order."""
    draft_vocabulary: Size  # V_d, number of tokens that can be drafted.
    test_time_steps: Size = 7  # J, number of draft steps that training unrolls.
    fc_norm: Flag = False
    """True if the output of each target layer has its own norm before the outputs are fused, as in
    EAGLE-3.1 (arXiv 2605.09992)."""
    # True if the final norm is applied to the decoder layer's outputs before the next draft step
    # reads them, as in EAGLE-3.1.
    norm_output: Flag = False
    # True if the outputs of the target layers have one common norm before they are fused, as in the
    # speculators library. The norm is applied to the concatenated outputs.
    norm_before_fc: Flag = False
    # True if the residual stream starts after the norm of the features, as in speculators.
    norm_before_residual: Flag = False
    # True if queries and keys have a norm per head, as in Qwen3 and speculators.
    query_key_norm: Flag = False

    @override
    def problems(self) -> Iterator[str]:
        yield from super().problems()
        # Checkpoints of other projects do not state the number of target layers. For such a
        # checkpoint, assume that the highest fused layer is the last layer of the target.
        check_target_layers(
            self.fused_layers, self.n_layers or 1 + max(self.fused_layers, default=0)
        )

    @property
    @override
    def reads(self) -> Reads:
        return Reads(outputs=self.fused_layers)

    @classmethod
    @override
    def defaults(cls, facts: TargetFacts, given: Mapping[str, Any]) -> dict[str, Any]:
        values = super().defaults(facts, given)
        # Use no biases of q, k and v, even for Qwen2 targets. Inference engines run EAGLE-3 without
        # these biases.
        values["qkv_bias"] = False
        values["draft_vocabulary"] = min(facts.vocab_size, DEFAULT_DRAFT_VOCABULARY)
        # Call ``default_fused_layers`` only if needed, because it fails for targets with few
        # layers.
        if "fused_layers" not in given:
            values["fused_layers"] = default_fused_layers(facts.n_layers)
        return values


def default_fused_layers(n_layers: int) -> tuple[int, int, int]:
    """Return the default target layers to fuse: a low layer, a middle layer and a high layer.

    For a target with L layers, these are the layers 1, L // 2 - 1 and L - 4. SpecForge, SGLang and
    vLLM use the same layers.
    """
    layers = (1, n_layers // 2 - 1, n_layers - 4)
    check_default_layers(layers, n_layers)
    return layers


class Eagle3Block(DecoderBlock):
    """A decoder layer whose input is the concatenation of embeddings and features, [..., 2E].

    Before attention, one norm is applied to the embeddings and another norm to the features. The
    output of attention is added to the features. With ``norm_before_residual``, the output of
    attention is added to the normed features (vLLM ``llama_eagle3.py``).
    """

    def __init__(self, sizes: DecoderBlockSizes, norm_before_residual: bool = False) -> None:
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
    """The trained weights: fusing layer, decoder layer, final norm and LM head.

    The weights have the names that other projects use.
    """

    config_class = Eagle3Sizes
    config: Eagle3Sizes
    uses_target_head = False
    # [V_d] int64. d2t[i] + i is the id of the token with index i in the draft vocabulary.
    d2t: Tensor
    t2d: Tensor  # [V] bool, whether a token can be drafted.

    def __init__(self, config: Eagle3Sizes) -> None:
        super().__init__(config)
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
    @override
    def draft_tokens(self) -> Tensor | None:
        is_reduced = self.config.draft_vocabulary < self.config.vocab_size
        return self._mapped_tokens() if is_reduced else None

    def _mapped_tokens(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @override
    @torch.no_grad()
    def adopt(self, frozen: FrozenTarget, count_tokens: Callable[[], Tensor]) -> None:
        """Choose the draft vocabulary, and initialize the LM head from the target's LM head.

        The draft vocabulary consists of the most frequent tokens. Among equally frequent tokens,
        lower ids come first.
        """
        tokens = torch.arange(self.config.vocab_size)
        if self.config.draft_vocabulary < self.config.vocab_size:
            tokens = most_frequent(count_tokens(), self.config.draft_vocabulary)
        self.d2t.copy_(tokens - torch.arange(len(tokens)))
        self.t2d.fill_(False)[tokens] = True
        self.lm_head.weight.copy_(frozen.lm_head_weight[tokens.to(frozen.lm_head_weight.device)])
        self.norm.weight.copy_(frozen.norm.weight)

    @override
    def check_weights(self) -> None:
        ids = self._mapped_tokens()
        marked = self.t2d.nonzero()[:, 0]
        if not torch.equal(ids.sort().values, marked):
            raise DrafterError(
                "the drafter's tensors d2t and t2d must select the same token ids of the target, "
                f"each once. But d2t gives {len(ids)} ids from {int(ids.min())} to "
                f"{int(ids.max())}, and t2d selects {len(marked)} of the ids from 0 to "
                f"{len(self.t2d) - 1}. d2t must hold offsets (target id - draft id), not target "
                "ids. Correct d2t, or restore the drafter's weights."
            )

    @override
    def combine(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((embeddings, hidden.to(embeddings.dtype)), dim=-1)

    @override
    def target_states(self, inputs: TrainingInputs) -> Tensor:
        return torch.cat(inputs.layer_outputs, dim=-1)  # K layer outputs, [B, T, K * E].

    @override
    def true_features(self, states: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        if self.config.fc_norm:
            parts = states.split(self.config.hidden_size, dim=-1)
            normed: list[Tensor] = []
            for norm, part in zip(self.fc_norm, parts, strict=True):
                normed.append(norm(part))
            states = torch.cat(normed, dim=-1)
        features: Tensor = self.fc(states)
        return features

    @override
    def fed_back(self, outputs: Tensor) -> Tensor:
        return self.norm(outputs) if self.config.norm_output else outputs

    def normed(self, features: Tensor) -> Tensor:
        """Apply the final norm to features [..., E], for the LM head.

        With ``norm_output``, the norm has already been applied, and features stay unchanged.
        """
        return features if self.config.norm_output else self.norm(features)

    @override
    def draft_logits(self, frozen: FrozenTarget, features: Tensor) -> Tensor:
        return self.over_all_tokens(self.lm_head(self.normed(features)))

    @override
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of one mini-batch: the forward KL of all draft steps, weighted.

        Each draft step has 0.8 times the weight of the previous step.
        """
        inputs = step.inputs
        queries, valid = loss_queries(self.loss_positions(inputs.response_mask, step.draws))
        features, reached = self.test_time_features(frozen, inputs, queries, valid)
        indices = true_indices(valid)
        # The normed features, [P, J, E].
        outputs = self.normed(features.transpose(0, 1).transpose(1, 2)[indices])
        # [P, J] bool, the second result of :meth:`test_time_features` at the loss positions.
        reached = reached.permute(1, 2, 0)[indices]
        if step.weights.d_pace is None:
            weights = reached * STEP_DECAY ** torch.arange(outputs.shape[1], device=outputs.device)
        else:
            weights = self.paced(
                inputs.tokens, queries, indices, outputs, reached, step.weights.d_pace
            )
        total, by_step = losses.chunked_losses(
            outputs,
            at_queries(inputs.hidden, queries)[indices],  # The target's hidden states, [P, E].
            frozen.lm_head_weight,
            weights[..., None],
            own_head=self.lm_head.weight,
            tokens=self.draft_tokens,
            divergence=step.weights.divergence,
            cap=frozen.logit_cap,
        )
        scale = step.scale(len(outputs))
        # The reported ``forward_kl`` is the unweighted loss of only the first draft step. So it is
        # comparable with the ``forward_kl`` of other drafters, which report a single step.
        return {
            "loss": step.weights.forward_kl * scale * total,
            "forward_kl": scale * by_step[:, 0].sum(),
        }

    def paced(
        self,
        tokens: Tensor,
        queries: Tensor,
        at: tuple[Tensor, ...],
        own: Tensor,
        reached: Tensor,
        smoothing: float,
    ) -> Tensor:
        """Compute the D-PACE weights [P, J] of the draft steps. Each round counts as a block.

        Args:
            tokens: [B, T], token ids.
            queries: [B, Q], positions.
            at: two tensors [P]: for each of the P loss positions, the index of its row, and its
                index in ``queries``.
            own: [P, J, E], normed features of the drafter.
            reached: [P, J] bool, the second result of :meth:`test_time_features`.
            smoothing: s of D-PACE. The probability q of a draft becomes (1 - s) q + s.
        """
        rows, columns = at
        n_steps = own.shape[1]
        labels = tokens[rows, (queries[at] + 1).clamp(max=tokens.shape[1] - 1)]
        # The drafter gives the probability 0 to tokens outside the draft vocabulary. Mark these
        # tokens with -1.
        if self.draft_tokens is not None:
            order = labels.new_full((self.config.vocab_size,), -1)
            order[self.draft_tokens] = torch.arange(len(self.draft_tokens), device=labels.device)
            labels = order[labels]
        every = labels.clamp(min=0).repeat_interleave(n_steps)
        wrong = losses.chunked_cross_entropy(own.detach().flatten(0, 1), every, self.lm_head.weight)
        wrong = wrong.view(own.shape[:2]).masked_fill((labels < 0)[:, None], torch.inf)
        # In step j, counted from 0, the query with index i belongs to the round that started at the
        # query with index i - j; see test_time_features.
        steps = torch.arange(n_steps, device=labels.device)
        rounds = (columns[:, None] - steps) % queries.shape[1]
        return losses.d_pace_at(
            (rows[:, None], rounds, steps), (*queries.shape, n_steps), wrong, reached, smoothing
        )

    def test_time_features(
        self, frozen: FrozenTarget, inputs: TrainingInputs, queries: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run all draft steps of training-time test.

        A draft round starts at each query, and each draft step advances all rounds by one token. So
        in step j, counted from 1, a query is computed by the round that started j - 1 tokens before
        it.

        Args:
            queries, valid: [B, Q], the loss positions and whether they are not padding, as
                :func:`loss_queries` returns them.

        Returns:
            Two tensors: the features [J, B, Q, E] of each query in each draft step, and bool
            [J, B, Q]. The second tensor is true if the round that computes a query in a step
            started in the response that contains the query.
        """
        embeddings, combined = self.true_inputs(frozen, inputs)
        block = self.midlayer
        slots = masks.positions_of(embeddings)
        first = (queries - 1).clamp(min=0)  # The slot at which each round starts.
        keys, values = block.keys_values(combined, self.rotary(slots[None, :]))
        # ``seen`` is [B, Q, S], and ``x`` is [B, Q, 2E].
        seen, x = slots <= first[..., None], at_queries(combined, first)
        own_kv: list[KeysValues] = []
        features: list[Tensor] = []
        reached: list[Tensor] = []
        outputs = x
        for step in range(self.config.test_time_steps):
            fed_slots = (first + step).clamp(max=len(slots) - 1)
            rotation = self.rotary(fed_slots)
            if step:
                x = self.combine(at_queries(embeddings, fed_slots), outputs)
                own_kv.append(block.keys_values(x, rotation))
            attended = attend_with_own_steps(block.queries(x, rotation), keys, values, seen, own_kv)
            outputs = self.fed_back(
                block.finish(x, block.self_attn.o_proj(attended.transpose(1, 2).flatten(2)))
            )
            # The round that started at query i has now drafted ``step`` more tokens. Its features
            # belong to query i + step, if both queries are in the same response. The queries are in
            # the same response if their positions differ by ``step``, because all positions between
            # them are queries then.
            features.append(outputs.roll(step, dims=1))
            has_root = masks.positions_of(queries) >= step
            reached.append(valid & has_root & (queries - queries.roll(step, dims=1) == step))
        return torch.stack(features), torch.stack(reached)


def attend_with_own_steps(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, own: Sequence[KeysValues]
) -> Tensor:
    """Attend to the slots that all rounds share, and to the slots of each query's own round.

    Args:
        q: [B, H, Q, d]. Each query belongs to a different round.
        keys: keys [B, H_kv, S, d] of the shared slots.
        values: values [B, H_kv, S, d] of the shared slots.
        seen: [B, Q, S] bool, true if the round of a query sees a shared slot.
        own: for each earlier draft step, keys and values [B, H_kv, Q, d], with one slot per round.

    Returns:
        [B, H, Q, d].
    """
    query_bytes = 4 * q.shape[1] * (keys.shape[2] + len(own))
    n_queries = max(1, _SCORE_BYTES // query_bytes)
    n_rows = max(1, n_queries // max(1, q.shape[2]))
    # The inputs that have an axis of queries. In each of these inputs, it is the third axis.
    of_queries = (q, seen[:, None], *chain.from_iterable(own))
    if q.shape[0] * q.shape[2] <= n_queries:
        return _attend(keys, values, *of_queries)
    # Split the queries into parts, and recompute the scores of a part in the backward pass. So the
    # scores of only one part are in memory at a time.
    attended: list[Tensor] = []
    for first_row in range(0, q.shape[0], n_rows):
        rows = slice(first_row, first_row + n_rows)
        parts: list[Tensor] = []
        for first in range(0, q.shape[2], n_queries):
            chosen = [tensor[rows, :, first : first + n_queries] for tensor in of_queries]
            part = checkpoint(_attend, keys[rows], values[rows], *chosen, use_reentrant=False)
            parts.append(part)
        attended.append(torch.cat(parts, dim=2))
    return torch.cat(attended)


def _attend(keys: Tensor, values: Tensor, q: Tensor, seen: Tensor, *own: Tensor) -> Tensor:
    n_kv_heads = keys.shape[1]
    n_slots = keys.shape[2]
    # The scaled queries, [B, H_kv, H / H_kv, Q, d].
    rows = q.unflatten(1, (n_kv_heads, -1)) * q.shape[-1] ** -0.5
    shared = rows @ keys[:, :, None].transpose(-1, -2)  # Scores, [B, H_kv, H / H_kv, Q, S].
    scores = [shared.masked_fill(~seen[:, :, None], -torch.inf)]
    for own_keys in own[::2]:
        scores.append((rows * own_keys[:, :, None]).sum(dim=-1, keepdim=True))
    # Attention weights, [B, H_kv, H / H_kv, Q, S + number of earlier steps].
    share = torch.cat(scores, dim=-1).softmax(dim=-1).to(values.dtype)
    attended = share[..., :n_slots] @ values[:, :, None]
    for index, own_values in enumerate(own[1::2]):
        attended = attended + share[..., n_slots + index, None] * own_values[:, :, None]
    return attended.flatten(1, 2)
