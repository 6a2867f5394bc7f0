"""Block-parallel drafters: one forward pass drafts a whole block of tokens.

The drafters are DSpark (arXiv 2607.05147) and DFlash (arXiv 2602.06036). The input of the forward
pass is a draft block. A draft block is a sequence of slots: the last committed token (the anchor),
followed by mask tokens. DSpark has two heads. Its Markov head makes each draft depend on the draft
before it. Its confidence head estimates the acceptance probability of a draft. DFlash has neither
head, and learns only the tokens of the training sequences, not the target's distribution. By
default, as in the DFlash authors' code, each masked slot of DFlash predicts the token at its own
position, and the anchor's slot predicts no token.

Shapes: B rows, T tokens, N blocks of a row, G slots of a block, K drafts of a block, Q queries,
P loss positions, E target width, m target layers that are read, H_kv key/value heads, d head dim,
D = 2 * H_kv * d, M width of the Markov head's memory, F feature width, b nodes of one level,
n positions.

    [anchor, mask, mask, ...] -> decoder layers, whose slots see the context and each other -> norm
                              -> hidden state
    hidden state -> the target's LM head, + bias from the previous token (:mod:`..nn.markov`)
                 -> draft k

The *context* is the data about verified positions to which the layers attend. There are three kinds
of contexts:

    hidden    outputs of m target layers (-1 is the embedding) -> fc -> norm    as published
    memory    KV of all target layers -> encoded KV (:mod:`.kv_encoder`) -> norm
    kv        unchanged keys and values of one or more target layers for each draft layer. If a
              draft layer has several target layers, its query heads are divided among them

With ``hidden`` and ``memory``, each draft layer computes keys and values from the context with its
own projections. The input norm of the layer is not applied to the context. Training runs many
blocks of a sequence at once (:mod:`.training`). A round of decoding runs one block per sequence.

The features of a draft are the hidden state of its slot, followed by the memory of the Markov head.
This memory is a vector that the head computes from the tokens before the draft. Hidden states do
not depend on drafted tokens. So one forward pass is enough for all drafts of a round, in chains and
in trees.

The reference implementation of DSpark is deepseek-ai/DeepSpec. For slots that predict the token at
their own position, the reference implementation is z-lab/dflash. The weights have the names of the
reference implementations. The contexts ``memory`` and ``kv`` have no reference implementation.
According to arXiv 2604.26412, drafters become better if they read the target's own KV.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from ...errors import DrafterError
from ..nn import losses, masks
from ..nn.kv import positions_from, unpack_kv
from ..nn.layers import AppendKV, DecoderBlock, KeysValues, RMSNorm
from ..nn.markov import MARKOV_HEADS, ConfidenceHead, MarkovHead
from ..nn.masks import to_device
from ..targets.bundle import FrozenTarget
from ..targets.cache import KVSource, check_arrived
from ..targets.facts import TargetFacts
from . import training
from .base import CommittedTokens, DraftedFeatures, Drafter, DraftLevel
from .caches import LayerState, concatenated, padded, write_after
from .kv_encoder import KVEncoder, KVEncoderSizes
from .sizes import (
    Flag,
    Indices,
    LayerSizes,
    Size,
    SizeOrZero,
    check_default_layers,
    check_target_layers,
)
from .training import Draws, LossTerms, Reads, TrainingInputs, TrainingStep

# The kinds of context that the layers of a drafter can see; see the docstring of the module.
CONTEXTS = ("hidden", "kv", "memory")
# Number of target layers whose outputs the drafter reads by default, as in DSpark and DFlash.
N_READ_LAYERS = 5


@dataclass(frozen=True, kw_only=True)
class BlockDrafterSizes(LayerSizes, KVEncoderSizes):
    """The sizes of block-parallel drafters.

    Layer self-attention exists only with the context ``memory``. With other contexts, its sizes are
    0.
    """

    # The token whose embedding is the input of masked slots.
    mask_token: SizeOrZero
    # G, number of slots of a block.
    block_size: Size
    # If true, the anchor slot predicts the next token. If false, each masked slot predicts the
    # token at its own position.
    sample_from_anchor: Flag
    # Kind of context that the layers see: hidden, kv or memory. See the docstring of the module.
    context: str = "hidden"
    fused_layers: Indices = ()
    """The target layers that are read. With the context ``hidden``, the outputs of these layers are
    the input of ``fc``. With the context ``kv``, these layers are divided evenly among the draft
    layers, in ascending order: the first draft layer sees the KV of the lowest target layers. With
    the context ``memory``, this field is empty."""
    # Number of decoder layers.
    block_layers: Size = 5
    # True if only the tokens that the tensor ``t2d`` marks can be drafted. Some checkpoints of the
    # speculators library have such a tensor.
    reduced_vocabulary: Flag = False

    @override
    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.context not in CONTEXTS:
            yield f"context is {self.context!r}, expected one of {', '.join(CONTEXTS)}"
        elif self.context == "memory":
            if self.fused_layers:
                yield (
                    "context is memory, which encodes all layers of the target, so `fused_layers` "
                    "must be empty. Remove `fused_layers`, or set `context` to hidden or kv"
                )
            yield from self.encoder_problems()
        else:
            n_layers = self.n_layers or 1 + max(self.fused_layers, default=0)
            check_target_layers(self.fused_layers, n_layers, embedding=True)
        if self.context == "kv":
            yield from self._kv_problems()
        if self.n_drafts < 1:
            yield (
                f"a block_size of {self.block_size} leaves no token to draft, because the first "
                "token of a block is already known. Set block_size to at least 2"
            )
        if not 0 <= self.mask_token < self.vocab_size:
            yield (
                f"mask_token is {self.mask_token}, but the target's token ids are from 0 to "
                f"{self.vocab_size - 1}"
            )

    def _kv_problems(self) -> Iterator[str]:
        if len(self.fused_layers) % self.block_layers or self.fused_layers[0] == -1:
            yield (
                "context is kv, so the number of layers in `fused_layers` must be a multiple of "
                f"{self.block_layers}, the number of the drafter's layers, and the embedding (-1) "
                "cannot be one of them"
            )
        n_kv_heads = self.kv_width // (2 * self.head_dim)
        if self.self_attention_kv_heads != n_kv_heads:
            yield (
                f"self_attention_kv_heads is {self.self_attention_kv_heads}, but with context kv "
                f"it must equal the target's number of KV heads, {n_kv_heads}"
            )
        n_seen = self.n_seen_layers * n_kv_heads
        if n_seen < 1 or self.n_heads % n_seen:
            yield (
                f"context is kv, so each layer of the drafter attends to {self.n_seen_layers} "
                f"target layers with {n_kv_heads} KV heads each, which together must divide the "
                f"{self.n_heads} query heads of the drafter. Set `fused_layers` to another number "
                "of layers"
            )

    @property
    @override
    def reads(self) -> Reads:
        if self.context == "hidden":
            return Reads(outputs=tuple(layer for layer in self.fused_layers if layer >= 0))
        return Reads(True, self.fused_layers if self.context == "kv" else self.read_kv_layers)

    @property
    def n_seen_layers(self) -> int:
        """With the context ``kv``, the number of target layers that one draft layer sees."""
        return len(self.fused_layers) // self.block_layers

    def seen_layers(self, index: int) -> tuple[int, ...]:
        """Return the target layers whose KV a layer of the drafter sees (context ``kv``)."""
        return self.fused_layers[index * self.n_seen_layers : (index + 1) * self.n_seen_layers]

    @property
    def n_drafts(self) -> int:
        """K, number of drafts of a block."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    @override
    def max_depth(self) -> int:
        return self.n_drafts

    @classmethod
    @override
    def defaults(cls, facts: TargetFacts, given: Mapping[str, Any]) -> dict[str, Any]:
        context = given.get("context", cls.context)
        values = super().defaults(facts, given) | {"mask_token": facts.vocab_size - 1}
        if context == "kv":
            facts.check_rotation()
            values["kv_width"] = facts.kv_width
        if context == "memory":
            values |= cls.encoder_defaults(facts, given)
        # Call ``default_read_layers`` only if needed, because it fails for targets with few layers.
        elif "fused_layers" not in given:
            n_read = (
                given.get("block_layers", cls.block_layers) if context == "kv" else N_READ_LAYERS
            )
            values["fused_layers"] = default_read_layers(facts.n_layers, n_read)
        return values


def default_read_layers(n_layers: int, n_read: int = N_READ_LAYERS) -> tuple[int, ...]:
    """Return the default target layers to read, evenly spaced from 1 to ``n_layers - 3``.

    If one layer is read, it is the middle layer.
    """
    if n_read == 1:
        return (n_layers // 2,)
    layers = tuple(round(1 + index * (n_layers - 4) / (n_read - 1)) for index in range(n_read))
    check_default_layers(layers, n_layers)
    return layers


class BlockState(LayerState):
    """One cache per layer. It contains the context, followed by the block of the current round.

    ``fresh`` contains target states of positions that the caches do not contain yet. ``fc`` has
    already been applied to these states.
    """

    def __init__(self, n_rows: int, n_layers: int) -> None:
        super().__init__(n_rows, n_layers)
        # [B, K, E], hidden states of the K slots that predict a draft. None between rounds.
        self.hidden: Tensor | None = None

    def take_fresh(self, counts: Sequence[int]) -> Tensor:
        """Return and clear the fresh states [B, n, E], right padded.

        ``counts`` is the number of states that each row should have. Raises DrafterError if states
        are missing.
        """
        like = next(chain.from_iterable(self.fresh), torch.empty(0))
        rows = [torch.cat([like[:0], *parts]) for parts in self.fresh]
        if [len(row) for row in rows] != list(counts):
            raise DrafterError(
                "the target's hidden states are missing for some committed tokens. Pass them to "
                "`observe` before drafting."
            )
        self.fresh = [()] * len(rows)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    @override
    def forget_drafts(self) -> None:
        self.hidden = None
        super().forget_drafts()


class BlockDrafter(KVEncoder, Drafter):
    """The trained weights: layers that compute the context, decoder layers, and optional heads.

    The subclasses differ in the heads.
    """

    config: BlockDrafterSizes
    drafts_remotely = True
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None
    # [V] bool, whether a token can be drafted. Only drafters with a reduced vocabulary have it.
    t2d: Tensor

    def __init__(self, config: BlockDrafterSizes) -> None:
        super().__init__(config)
        self.markov_head = self.confidence_head = None
        self.context_needs_kv = config.context != "hidden"
        self.context_width = width = config.hidden_size
        if config.context == "hidden":
            self.fc = nn.Linear(len(config.fused_layers) * width, width, bias=False)
        if config.context == "memory":
            self.build_encoder()
            self.context_width = self.sent_width
        if config.context == "kv":
            self.context_layers = config.fused_layers
            self.context_width = len(config.fused_layers) * config.kv_width
        else:
            self.hidden_norm = RMSNorm(width, eps=config.norm_eps)
        sizes = replace(config.layer, qkv_bias=False, query_key_norm=True)
        self.layers = nn.ModuleList(DecoderBlock(sizes) for _ in range(config.block_layers))
        self.norm = RMSNorm(width, eps=config.norm_eps)
        self.rotary = config.rotary()
        if config.reduced_vocabulary:
            self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))

    @classmethod
    @override
    def loss_positions(cls, response_mask: Tensor, draws: Draws) -> Tensor:
        anchors, valid = training.draw_anchors(response_mask, draws)
        weights = training.draft_weights(response_mask, anchors, valid, draws.blocks)
        positions = training.draft_positions(anchors, draws.blocks.n_drafts).clamp(
            max=response_mask.shape[1] - 1
        )
        by_position = torch.zeros(response_mask.shape, device=weights.device)
        return by_position.scatter_add_(1, positions.flatten(1), weights.flatten(1))

    @override
    @torch.no_grad()
    def adopt(self, frozen: FrozenTarget, count_tokens: Callable[[], Tensor]) -> None:
        """Initialize the final norm from the target's final norm.

        The reason is that the target's LM head reads the output of the drafter's final norm.
        """
        super().adopt(frozen, count_tokens)
        self.norm.weight.copy_(frozen.norm.weight)

    # Running a block, in training and in decoding

    def context(self, frozen: FrozenTarget, tokens: Tensor, projected: Tensor) -> Tensor:
        """Compute the context [..., E] of verified tokens [...].

        ``projected`` [..., E] is the output of :meth:`project` for these tokens. With the context
        ``memory``, ``projected`` is the encoded KV of these tokens.
        """
        if self.config.context == "hidden" and self.config.fused_layers[0] == -1:
            embedding_weight = self.fc.weight[:, : self.config.hidden_size]
            projected = projected + F.linear(frozen.embed(tokens), embedding_weight)
        return self.hidden_norm(projected)

    def project(self, states: Tensor) -> Tensor:
        """Apply ``fc`` to the outputs of the read layers: [..., m * E] becomes [..., E].

        If the embedding is one of the read layers, it is not part of ``states``. :meth:`context`
        later adds the product of ``fc`` and the embedding.
        """
        return F.linear(states, self.fc.weight[:, -states.shape[-1] :])

    def slots(self, frozen: FrozenTarget, anchors: Tensor) -> Tensor:
        """Embed the slots of blocks that start at anchor tokens [B, N] int64: [B, N * G, E]."""
        n_masked = self.config.block_size - 1
        tokens = F.pad(anchors[..., None], (0, n_masked), value=self.config.mask_token)
        return frozen.embed(tokens.flatten(1))

    def run_layers(
        self,
        x: Tensor,
        positions: Tensor,
        appends: Sequence[AppendKV],
        mask: masks.AnyMask,
    ) -> Tensor:
        """Run slots x [B, Q, E] at positions [B or 1, Q] through the layers and the final norm.

        The result is [B, Q, E]. ``appends`` has one function per layer. In each layer, the function
        of the layer appends the slots' keys and values to those of the context.
        """
        rotation = self.rotary(positions)
        for block, append in zip(self.blocks, appends, strict=True):
            x = block.attend_cached(x, rotation, append, mask)
        return self.norm(x)

    def drafting(self, hidden: Tensor) -> Tensor:
        """Select the K slots of each block that predict a draft.

        The shape changes from [..., N * G, E] to [..., N, K, E].
        """
        picked: Tensor = hidden.unflatten(-2, (-1, self.config.block_size))[
            ..., -self.config.n_drafts :, :
        ]
        return picked

    # Features: the hidden state of a slot, followed by the Markov head's memory

    def make_features(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Make features [..., K, F] from hidden states [..., K, E] and previous tokens [..., K]."""
        if self.markov_head is None:
            return hidden
        return torch.cat((hidden, self.markov_head.read(hidden, before).to(hidden.dtype)), dim=-1)

    def split_features(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Split features into hidden states [..., E] and the Markov head's memory [..., M]."""
        width = self.config.hidden_size
        return features[..., :width], features[..., width:]

    @override
    def draft_logits(self, frozen: FrozenTarget, features: Tensor) -> Tensor:
        hidden, markov = self.split_features(features)
        logits = self.target_logits(frozen, hidden)
        if self.markov_head is not None:
            code = self.markov_head.code(markov, hidden)
            bias: Tensor = (
                self.own_logits(code)
                if self.config.draft_tokens
                else self.markov_head.markov_w2(code)
            )
            logits = logits + bias
        logits = self.over_all_tokens(logits)
        return (
            logits.masked_fill(~self.t2d, -torch.inf) if self.config.reduced_vocabulary else logits
        )

    @property
    @override
    def own_head(self) -> Tensor | None:
        return None if self.markov_head is None else self.markov_head.markov_w2.weight

    def confidence_logits(self, features: Tensor) -> Tensor | None:
        """Compute the logit [...] of each draft's acceptance; None without a confidence head."""
        if self.confidence_head is None:
            return None
        # Features consist of the hidden state, the embedding of the previous token, and possibly a
        # recurrent state. The confidence head reads the hidden state, and the embedding only if the
        # width of its input includes the embedding.
        logits: Tensor = self.confidence_head(
            features[..., : self.confidence_head.proj.in_features]
        )
        return logits

    @override
    def confidence(self, features: Tensor) -> Tensor | None:
        logits = self.confidence_logits(features)
        return None if logits is None else logits.float().sigmoid()

    # Training

    def hidden_at_anchors(
        self, frozen: FrozenTarget, inputs: TrainingInputs, anchors: Tensor, valid: Tensor
    ) -> Tensor:
        """Run the blocks that start at anchor positions [B, N] of training sequences.

        ``valid`` [B, N] is false for padding. Returns the hidden states [B, N, K, E] of the slots
        that predict a draft.
        """
        size = self.config.block_size
        n_tokens = inputs.tokens.shape[1]
        x = self.slots(frozen, inputs.tokens.gather(1, anchors))
        appends: list[AppendKV] = []
        for keys_values in self._training_context(frozen, inputs, x.dtype):
            appends.append(partial(concatenated, keys_values))
        mask = training.block_mask(anchors, valid, size, n_tokens)
        return self.drafting(
            self.run_layers(x, training.draft_positions(anchors, size).flatten(1), appends, mask)
        )

    def _training_context(
        self, frozen: FrozenTarget, inputs: TrainingInputs, dtype: torch.dtype
    ) -> list[KeysValues]:
        """Compute the keys and values of the context for each layer, [B, H_kv, T, d] each."""
        if self.config.context == "hidden":
            made = self.project(torch.cat(inputs.layer_outputs, dim=-1).to(dtype))
        elif self.config.context == "kv":
            n_heads = self.config.self_attention_kv_heads
            seen_by_layer: list[KeysValues] = []
            for seen in inputs.required_kv().to(dtype).tensor_split(len(self.layers), dim=2):
                # [B, T, H_kv * n * 2 * d], where n is the number of target layers that this draft
                # layer sees. The heads are in the same order as in the result of _side_by_side.
                heads = seen.unflatten(-1, (n_heads, -1)).transpose(2, 3).flatten(2)
                seen_by_layer.append(unpack_kv(heads, n_heads * seen.shape[2]))
            return seen_by_layer
        else:
            made = self.encode_kv(inputs.required_kv())
        context = self.context(frozen, inputs.tokens, made)
        rotation = self.rotary(masks.positions_of(context)[None])
        return [block.self_attn.keys_values(context, rotation) for block in self.blocks]

    def tokens_before(self, tokens: Tensor, anchors: Tensor) -> Tensor:
        """For blocks that start at ``anchors``, return the token before each draft: [B, N, K].

        ``anchors`` [B, N] are positions, and ``tokens`` [B, T] are the training sequences.
        Positions after the end of a sequence get its last token.
        """
        before = training.draft_positions(anchors, self.config.n_drafts).clamp(
            max=tokens.shape[1] - 1
        )
        return tokens.gather(1, before.flatten(1)).view_as(before)

    @override
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of one mini-batch: a weighted sum over the drafts of all blocks.

        The weight of a draft depends on its index in the block. The confidence head learns the
        probability with which sampling would accept a draft.
        """
        inputs = step.inputs
        weights = step.weights
        blocks = replace(step.draws.blocks, n_drafts=self.config.n_drafts)
        anchors, valid = training.draw_anchors(inputs.response_mask, step.draws)
        # [B, N, K], the loss weights of K drafts for each of the N anchors of a row.
        shares = training.draft_weights(inputs.response_mask, anchors, valid, blocks)
        indices = training.true_indices(shares > 0)
        hidden = self.hidden_at_anchors(frozen, inputs, anchors, valid)
        # [P, F], the features of the P drafts that have a weight above 0.
        features = self.make_features(hidden, self.tokens_before(inputs.tokens, anchors))[indices]
        rows = indices[0]
        share = shares[indices]
        positions = training.draft_positions(anchors, self.config.n_drafts)[indices]
        own_hidden, markov = self.split_features(features)
        head = self.markov_head
        code = None if head is None else head.code(markov, own_hidden)
        matrix = None if head is None else head.markov_w2.weight
        labels = inputs.tokens[rows, positions + 1]
        scale = step.scale(share.sum())
        if weights.d_pace is not None:
            wrong = losses.chunked_cross_entropy(
                own_hidden, labels, frozen.lm_head_weight, code, matrix, frozen.logit_cap
            )
            share = share * losses.d_pace_at(indices, shares.shape, wrong, True, weights.d_pace)
        of_terms = [
            share * scale * weight
            for weight in (weights.forward_kl, weights.l1, weights.cross_entropy)
        ]
        total, terms = losses.chunked_losses(
            own_hidden[:, None],
            inputs.hidden[rows, positions],
            frozen.lm_head_weight,
            torch.stack(of_terms, dim=-1)[:, None],
            labels=labels[:, None],
            code=None if code is None else code[:, None],
            correction=matrix,
            divergence=weights.divergence,
            cap=frozen.logit_cap,
        )
        terms = terms[:, 0]  # [P, 3]: divergence, L1 distance and cross-entropy of each draft
        sums = (terms * share[:, None]).sum(dim=0) * scale
        named = {"forward_kl": sums[0], "cross_entropy_loss": sums[2], "l1_loss": sums[1]}
        if (guess := self.confidence_logits(features)) is not None:
            accepted = (1 - 0.5 * terms[:, 1]).clamp(0, 1)
            error = F.binary_cross_entropy_with_logits(guess.float(), accepted, reduction="none")
            named["confidence_loss"] = (error * share).sum() * scale
            total = total + weights.confidence * named["confidence_loss"]
        return {"loss": total, **named}

    @override
    def drafted_features(
        self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws
    ) -> DraftedFeatures:
        """Compute the features of drafts. A block starts at the root of each draft round."""
        drafted, context = training.draft_rounds(inputs.response_mask, draws)
        index = masks.positions_of(drafted)
        queries, valid = training.loss_queries(drafted)
        root = context + 1  # For each position, the position of its round's root.
        depth = torch.where(valid, queries - root.gather(1, queries), 0)
        self.config.check_depth(1 + int(depth.max()))
        begins = drafted & (index == root)
        anchors, is_block = training.loss_queries(begins)
        hidden = self.hidden_at_anchors(frozen, inputs, anchors, is_block)
        features = self.make_features(hidden, self.tokens_before(inputs.tokens, anchors)).flatten(
            1, 2
        )
        block = (begins.cumsum(dim=1) - 1).gather(1, queries).clamp(min=0)
        return DraftedFeatures(
            queries, valid, training.at_queries(features, block * self.config.n_drafts + depth)
        )

    # Decoding

    @override
    def new_state(self, n_rows: int) -> BlockState:
        # With the context ``kv``, the drafter needs no caches of its own, because its layers attend
        # to the target's cache.
        return BlockState(n_rows, 0 if self.config.context == "kv" else len(self.layers))

    @override
    def observe(self, state: BlockState, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        if self.config.context == "hidden":
            state.observe(hidden, kept, lambda states: self.project(states.to(self.dtype)))

    @override
    def draft_root(
        self,
        state: BlockState,
        frozen: FrozenTarget,
        committed: CommittedTokens,
        cache: KVSource,
    ) -> Tensor:
        device = frozen.lm_head_weight.device
        size = self.config.block_size
        before = [len(tokens) - 1 for tokens in committed]
        state.forget_drafts()
        appends: list[AppendKV]
        if self.config.context == "kv":
            check_arrived(cache, before)
            appends = []
            for index in range(len(self.layers)):
                appends.append(partial(self._write_after_target, cache, before, index))
        else:
            self._extend_context(state, frozen, committed, cache)
            appends = [buffer.append for buffer in state.slots]
        mask = None
        if len(set(before)) > 1:
            every = torch.ones(len(committed), size, size, dtype=torch.bool, device=device)
            mask = masks.tree_mask(before, every)
        anchors = to_device([[tokens[-1]] for tokens in committed], device)
        hidden = self.run_layers(
            self.slots(frozen, anchors), positions_from(before, size, device), appends, mask
        )
        state.hidden = self.drafting(hidden)[:, 0]
        return self.make_features(state.hidden[:, :1], anchors)

    def _write_after_target(
        self, cache: KVSource, before: Sequence[int], index: int, keys: Tensor, values: Tensor
    ) -> KeysValues:
        n_slots = keys.shape[2]
        views: list[KeysValues] = []
        for layer in self.config.seen_layers(index):
            views.append(cache.layer_view(layer, max(before) + n_slots))
        return _side_by_side([write_after(view, before, n_slots, keys, values) for view in views])

    def _extend_context(
        self,
        state: BlockState,
        frozen: FrozenTarget,
        committed: CommittedTokens,
        cache: KVSource,
    ) -> None:
        # The committed tokens that are not in the context yet, without the root. The root is the
        # anchor of the block, and not part of the context.
        new_tokens: list[list[int]] = []
        for row, start in zip(committed, state.n_true, strict=True):
            new_tokens.append(row[start:-1])
        counts = [len(row) for row in new_tokens]
        if not any(counts):
            return
        if self.config.context == "memory":
            made = self.encode_cached(cache, state.n_true, counts)
        else:
            made = state.take_fresh(counts)
        tokens = padded(new_tokens, frozen.lm_head_weight.device)  # [B, n], padded on the right.
        self._append_context(state, self.context(frozen, tokens, made), counts)

    def _append_context(self, state: BlockState, context: Tensor, counts: Sequence[int]) -> None:
        """Append the keys and values of context positions [B, n, E] to the cache of each layer.

        Only the first ``counts[row]`` positions of a row are real, the others are padding.
        """
        rotation = self.rotary(positions_from(state.n_true, context.shape[1], context.device))
        for block, buffer in zip(self.blocks, state.slots, strict=True):
            buffer.append(*block.self_attn.keys_values(context, rotation), counts)
        state.n_true = masks.added(state.n_true, counts)

    @override
    def encoded_lengths(self, state: BlockState) -> list[int]:
        return state.n_true

    @override
    def append_encoded(
        self, state: BlockState, encoded: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        self._append_context(state, self.hidden_norm(encoded), counts or [encoded.shape[1]])

    # Drafting with the target on another machine

    @override
    def _make_context(self, hidden: Tensor, kv: Tensor | None, positions: Tensor) -> Tensor:
        if self.config.context == "hidden":
            return self.project(hidden.to(self.dtype))
        if self.config.context == "memory":
            return super()._make_context(hidden, kv, positions)
        return hidden[:, :0]

    @override
    def _take_context(self, state: BlockState, context: Tensor) -> Tensor:
        if self.config.context == "memory":
            return super()._take_context(state, context)
        if self.config.context == "kv":
            return context
        state.fresh[0] = (*state.fresh[0], context)
        return context[:, :0]

    @override
    def reuse_context(
        self, state: BlockState, contexts: Tensor, starts: Sequence[int], counts: Sequence[int]
    ) -> None:
        if self.config.context == "memory":
            super().reuse_context(state, contexts, starts, counts)

    @override
    def draft_level(
        self, state: BlockState, frozen: FrozenTarget, level: DraftLevel, cache: KVSource
    ) -> Tensor:
        assert state.hidden is not None, "draft_root must run before draft_level"
        hidden = state.hidden[:, level.depth, None].expand(-1, level.tokens.shape[1], -1)
        if self.markov_head is None:
            return hidden
        before, markov = self.split_features(level.parent_features)
        markov = self.markov_head.follow(markov, before, level.tokens)
        return torch.cat((hidden, markov.to(hidden.dtype)), dim=-1)


def _side_by_side(layers: Sequence[KeysValues]) -> KeysValues:
    """Concatenate the KV heads of n target layers, [B, H_kv, S, d] each, to [B, H_kv * n, S, d].

    The heads are ordered by their index in the layer, and then by layer: head 0 of all n layers
    comes first, then head 1 of all n layers.
    """
    if len(layers) == 1:
        return layers[0]
    keys, values = zip(*layers, strict=True)
    return torch.stack(keys, dim=2).flatten(1, 2), torch.stack(values, dim=2).flatten(1, 2)


# The drafters


@dataclass(frozen=True, kw_only=True)
class DFlashSizes(BlockDrafterSizes):
    """The sizes of a DFlash drafter, and the hashes that identify its target."""

    kind = "dflash"

    block_size: Size = 16
    sample_from_anchor: Flag = False


class DFlashDrafter(BlockDrafter):
    """A block-parallel drafter that has neither a Markov head nor a confidence head."""

    config_class = DFlashSizes
    config: DFlashSizes


@dataclass(frozen=True, kw_only=True)
class DSparkSizes(BlockDrafterSizes):
    """The sizes of a DSpark drafter, and the hashes that identify its target."""

    kind = "dspark"

    block_size: Size = 7
    sample_from_anchor: Flag = True
    # Kind of Markov head, which makes a draft depend on the previous draft; see :mod:`..nn.markov`.
    markov_head: str = "vanilla"
    markov_rank: Size = 256  # r, rank of the Markov head.
    # Whether there is a confidence head.
    confidence_head: Flag = True
    # True if the confidence head also reads the Markov head's embedding of the previous token.
    confidence_with_markov: Flag = True

    @override
    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.markov_head not in MARKOV_HEADS:
            yield f"markov_head is {self.markov_head!r}, expected one of {', '.join(MARKOV_HEADS)}"


class DSparkDrafter(BlockDrafter):
    """A block-parallel drafter with a Markov head and a confidence head."""

    config_class = DSparkSizes
    config: DSparkSizes

    def __init__(self, config: DSparkSizes) -> None:
        super().__init__(config)
        if (head := MARKOV_HEADS[config.markov_head]) is not None:
            self.markov_head = head(config.vocab_size, config.markov_rank, config.hidden_size)
        if config.confidence_head:
            reads_markov = config.confidence_with_markov and config.markov_head != "none"
            self.confidence_head = ConfidenceHead(
                config.hidden_size + reads_markov * config.markov_rank
            )
