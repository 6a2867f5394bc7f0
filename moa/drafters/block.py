"""Block-parallel drafters: one forward drafts a whole block, whatever its length; DFlash and DSpark are such.

Shapes: B rows, T tokens, N blocks of a row, G slots of a block, K drafts of a block, Q queries, P loss positions,
E target width, m layers of the target that are read, H_kv key/value heads, d head dim, D = 2 * H_kv * d, M memory of
the Markov head and F feature width, b nodes of one level, n positions.

    [anchor, mask, mask, ...] -> decoder layers, whose slots see the context and each other -> norm -> hidden state
    hidden state -> the target's LM head, + what follows from the token before (:mod:`..nn.markov`) -> draft k

What the layers see of verified positions is the *context*, of one of three kinds:

    hidden    outputs of m target layers -> fc -> norm                     as published
    memory    KV of all target layers -> memory (:mod:`.layer_memory`) -> norm
    kv        each draft layer sees keys and values of one or more of the target's layers as they are, and nothing of
              them is projected; with several, each query head of a group sees those of another one

Of the first two each layer makes keys and values with its own projections, without its input norm. What a block is and
sees stands in :mod:`.blocks`; training runs many blocks at once through :meth:`BlockDrafter.run_layers`, a round of
decoding one. The features of a node are the hidden state of its slot and, behind it, what the Markov head remembers of
the tokens before: they depend on the path, so that chains and trees are made of one forward alike. Layer -1 of the
target is its embedding.

The reference is deepseek-ai/DeepSpec, and z-lab/dflash for drafts at their own positions; weights have its names. The
contexts memory and kv have none; that drafters gain from the target's own KV is found in arXiv 2604.26412.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from ...errors import DrafterError
from ..nn import losses, masks
from ..nn.attention import expand_heads
from ..nn.kv import KVBuffer, positions_behind, unpack_kv
from ..nn.layers import DecoderBlock, RMSNorm, Rotary
from ..nn.markov import ConfidenceHead, MarkovHead
from ..targets.bundle import FrozenTarget
from ..targets.cache import ContextCache, KVSource
from . import blocks
from .base import DraftedFeatures, Drafter, DraftLevel
from .block_sizes import BlockDrafterSizes, read_layers
from .layer_memory import LayerMemory, read_kv_layers
from .rounds import Draws, at_queries, loss_queries
from .target_layers import write_behind
from .training import LossTerms, Reads, TrainingInputs, TrainingStep, loss_scale

KeysValues = tuple[Tensor, Tensor]
"""Keys and values, each [B, H_kv, S, d]."""

Append = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes the number of a layer, and its keys and values of slots; gives those of context and slots."""


class BlockState:
    """What B rows know of the target while decoding, and the block of this round.

    Attributes:
        slots: keys and values of the context for each layer; those of a round's block stand behind it. None with the
            context kv.
        lengths: context positions of each row.
        fresh: per row what :meth:`BlockDrafter.project` made of the committed positions from there on, [n, E].
        hidden: [B, K, E] of the slots that draft; None before the first round.
    """

    def __init__(self, n_rows: int, n_layers: int) -> None:
        self.slots = [KVBuffer(n_rows) for _ in range(n_layers)]
        self.lengths = [0] * n_rows
        self.fresh: list[list[Tensor]] = [[] for _ in range(n_rows)]
        self.hidden: Tensor | None = None

    def take_fresh(self, counts: Sequence[int]) -> Tensor:
        """Hand over what is fresh, so many positions of each row: [B, n, E], right padded.

        Raises:
            DrafterError: there are not so many.
        """
        if [sum(map(len, parts)) for parts in self.fresh] != list(counts):
            raise DrafterError("the target's states do not reach the token to draft behind: give them before drafting.")
        like = next(part for parts in self.fresh for part in parts)
        rows = [torch.cat([like[:0], *parts]) for parts in self.fresh]
        self.fresh = [[] for _ in rows]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def forget_block(self) -> None:
        """Forget the keys and values of the round's block."""
        for buffer in self.slots:
            buffer.crop(self.lengths)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        for buffer in self.slots:
            buffer.select_rows(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.fresh = [self.fresh[row] for row in rows]
        if self.hidden is not None:
            self.hidden = self.hidden[list(rows)]

    def take_rows(self, rows: Sequence[int]) -> "BlockState":
        """Copy these rows, in this order, to a state of their own, without the block."""
        self.forget_block()
        taken = BlockState(0, 0)
        taken.slots = [buffer.take_rows(rows) for buffer in self.slots]
        taken.lengths = [self.lengths[row] for row in rows]
        taken.fresh = [list(self.fresh[row]) for row in rows]
        return taken

    def add_rows(self, other: "BlockState") -> None:
        """Append the rows of another state; the block is forgotten."""
        self.forget_block()
        other.forget_block()
        for own, others in zip(self.slots, other.slots, strict=True):
            own.add_rows(others)
        self.lengths = self.lengths + other.lengths
        self.fresh = self.fresh + other.fresh
        self.hidden = None


class BlockDrafter(LayerMemory, Drafter):
    """The trained part: what makes the context, the decoder layers, and the heads that a drafter has."""

    config: BlockDrafterSizes
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None

    def __init__(self, config: BlockDrafterSizes) -> None:
        super().__init__()
        self.config = config
        self.markov_head = self.confidence_head = None
        width = config.hidden_size
        if config.context == "hidden":
            self.fc = nn.Linear(len(config.fused_layers) * width, width, bias=False)
        if config.context == "memory":
            self.build_memory()
        if config.context != "kv":
            self.hidden_norm = RMSNorm(width, eps=config.norm_eps)
        sizes = config.block(config.self_attention_kv_heads, config.self_attention_mlp_width, qkv_bias=False)
        sizes = replace(sizes, query_key_norm=True)
        self.layers = nn.ModuleList(DecoderBlock(sizes) for _ in range(config.block_layers))
        self.norm = RMSNorm(width, eps=config.norm_eps)
        self.rotary = Rotary(config.head_dim, config.rope_parameters, config.max_position_embeddings)

    @property
    def blocks(self) -> list[DecoderBlock]:
        """:attr:`layers` with their type."""
        return cast(list[DecoderBlock], list(self.layers))

    @property
    @override
    def observed_layers(self) -> tuple[int, ...]:
        is_read = self.config.context == "hidden"
        return tuple(layer for layer in self.config.fused_layers if layer >= 0) if is_read else ()

    @classmethod
    @override
    def reads(cls, n_layers: int, settings: Any) -> Reads:
        layers = read_layers(settings, n_layers)
        if settings.context == "hidden":
            return Reads(outputs=tuple(layer for layer in layers if layer >= 0))
        if settings.context == "kv":
            return Reads(kv=True, kv_layers=layers)
        return Reads(kv=True, kv_layers=read_kv_layers(settings, n_layers))

    @classmethod
    @override
    def loss_positions(cls, response_mask: Tensor, draws: Draws) -> Tensor:
        return blocks.position_weights(response_mask, draws)

    @override
    @torch.no_grad()
    def adopt(self, frozen: FrozenTarget, count_tokens: Callable[[], Tensor]) -> None:
        """Begin with the target's final norm, since the hidden states go through its LM head."""
        self.norm.weight.copy_(frozen.norm.weight)

    # The block, in training and in decoding

    def context(self, frozen: FrozenTarget, tokens: Tensor, projected: Tensor) -> Tensor:
        """Make the context of verified positions: [..., E].

        Args:
            tokens: [...] int64.
            projected: [..., E], of :meth:`project`; or the memory.
        """
        if self.config.context == "hidden" and self.config.fused_layers[0] == -1:
            own = self.fc.weight[:, : self.config.hidden_size]
            projected = projected + F.linear(frozen.embed(tokens), own)
        context: Tensor = self.hidden_norm(projected)
        return context

    def project(self, states: Tensor) -> Tensor:
        """Apply ``fc`` to the outputs of the layers that are read, [..., m * E] without the embedding: [..., E]."""
        return F.linear(states, self.fc.weight[:, -states.shape[-1] :])

    def slots(self, frozen: FrozenTarget, anchors: Tensor) -> Tensor:
        """Make what the layers read of blocks, anchors [B, N] int64: [B, N * G, E]."""
        tokens = torch.full((*anchors.shape, self.config.block_size), self.config.mask_token, device=anchors.device)
        tokens[..., 0] = anchors
        return frozen.embed(tokens.flatten(1))

    def run_layers(self, x: Tensor, positions: Tensor, append: Append, mask: masks.Mask | Tensor | None) -> Tensor:
        """Run slots x [B, Q, E] at positions [B or 1, Q] through the layers: [B, Q, E] after the final norm."""
        rotation = self.rotary(positions)
        for index, block in enumerate(self.blocks):

            def behind(keys: Tensor, values: Tensor, index: int = index) -> tuple[Tensor, Tensor]:
                return append(index, keys, values)

            x = block.attend_behind(x, rotation, behind, mask)
        hidden: Tensor = self.norm(x)
        return hidden

    def drafting(self, hidden: Tensor) -> Tensor:
        """Pick the slots that draft of blocks [..., N * G, E]: [..., N, K, E]."""
        picked: Tensor = hidden.unflatten(-2, (-1, self.config.block_size))[..., self.config.first_slot :, :]
        return picked

    # Features: the hidden state of a slot, and the Markov head's memory

    def begin_features(self, hidden: Tensor, anchors: Tensor) -> Tensor:
        """Make the features [..., F] of first slots from hidden states [..., E] and anchors [...]."""
        if self.markov_head is None:
            return hidden
        return torch.cat((hidden, self.markov_head.begin(anchors).to(hidden.dtype)), dim=-1)

    def split_features(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Undo it: hidden states [..., E] and memories [..., M]."""
        width = self.config.hidden_size
        return features[..., :width], features[..., width:]

    @override
    def draft_logits(self, frozen: FrozenTarget, features: Tensor) -> Tensor:
        hidden, memory = self.split_features(features)
        logits = frozen.logits(hidden)
        if self.markov_head is None:
            return logits
        bias: Tensor = self.markov_head.markov_w2(self.markov_head.code(memory, hidden))
        return logits + bias

    def confidence_logits(self, features: Tensor) -> Tensor | None:
        """Compute the logit of each draft's acceptance, [...]; None without a confidence head."""
        if self.confidence_head is None:
            return None
        hidden, memory = self.split_features(features)
        x = hidden
        if self.reads_token_before:
            assert self.markov_head is not None
            x = torch.cat((hidden, memory[..., : self.markov_head.rank]), dim=-1)
        found: Tensor = self.confidence_head(x)
        return found

    @property
    @abstractmethod
    def reads_token_before(self) -> bool:
        """Whether the confidence head reads the Markov head's embedding too."""

    @override
    def confidence(self, features: Tensor) -> Tensor | None:
        found = self.confidence_logits(features)
        return None if found is None else found.float().sigmoid()

    # Training

    def text_hidden(self, frozen: FrozenTarget, inputs: TrainingInputs, anchors: Tensor, valid: Tensor) -> Tensor:
        """Run blocks over a text: hidden states of the slots that draft, [B, N, K, E].

        Args:
            anchors: [B, N].
            valid: [B, N] bool.
        """
        size, n_tokens = self.config.block_size, inputs.tokens.shape[1]
        x = self.slots(frozen, inputs.tokens.gather(1, anchors))
        of_context = self._text_context(frozen, inputs, x.dtype)

        def append(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            seen = of_context[layer]
            keys, values = (expand_heads(own, seen[0].shape[1]) for own in (keys, values))
            return torch.cat((seen[0].to(keys.dtype), keys), dim=2), torch.cat((seen[1].to(keys.dtype), values), dim=2)

        positions = blocks.draft_positions(anchors, size).flatten(1)
        mask = blocks.block_mask(anchors, valid, size, n_tokens)
        hidden = self.run_layers(x, positions, append, mask)
        return self.drafting(hidden)

    def _text_context(self, frozen: FrozenTarget, inputs: TrainingInputs, dtype: torch.dtype) -> list[KeysValues]:
        """Make keys and values of the context for each layer, of all positions of texts: each [B, H_kv, T, d]."""
        if self.config.context == "hidden":
            if len(inputs.layer_outputs) != len(self.observed_layers):
                layers = ", ".join(map(str, self.observed_layers))
                raise DrafterError(
                    f"a {self.kind} drafter needs the outputs of the target's layers {layers}, which this batch lacks."
                )
            made = self.project(torch.cat(inputs.layer_outputs, dim=-1).to(dtype))
        elif inputs.kv is None:
            raise DrafterError(
                f"a {self.kind} drafter with the context {self.config.context} needs the target's keys and values, "
                "which this batch lacks."
            )
        elif self.config.context == "kv":
            n_heads = self.config.self_attention_kv_heads
            packed = inputs.kv.to(dtype).tensor_split(len(self.layers), dim=2)
            return [_side_by_side([unpack_kv(layer, n_heads) for layer in seen.unbind(2)]) for seen in packed]
        else:
            made = self.encode_memory(inputs.kv)
        context = self.context(frozen, inputs.tokens, made)
        rotation = self.rotary(torch.arange(inputs.tokens.shape[1], device=context.device)[None])
        return [block.self_attn.keys_values(context, rotation) for block in self.blocks]

    def text_features(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Make features of drafts that are known.

        Args:
            hidden: [..., K, E].
            before: [..., K] int64, the token before each draft.

        Returns:
            [..., K, F].
        """
        if self.markov_head is None:
            return hidden
        return torch.cat((hidden, self.markov_head.read(hidden, before).to(hidden.dtype)), dim=-1)

    def tokens_before(self, tokens: Tensor, anchors: Tensor) -> Tensor:
        """Pick the token before each draft of blocks [B, N] from texts [B, T], past their ends the last: [B, N, K]."""
        before = blocks.draft_positions(anchors, self.config.n_drafts).clamp(max=tokens.shape[1] - 1)
        return tokens.gather(1, before.flatten(1)).view_as(before)

    @override
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of one mini-batch over the drafts of its blocks, each weighed by its place.

        The terms are the cross-entropy to the text, the L1 distance to the target's distribution, their forward KL, and
        the binary cross-entropy of the confidence head to the share of its drafts that sampling would accept.
        """
        inputs, weights = step.inputs, step.weights
        chosen = replace(step.draws.blocks or blocks.ALL_BLOCKS, n_drafts=self.config.n_drafts)
        draws = replace(step.draws, blocks=chosen)
        anchors, valid = blocks.draw_anchors(inputs.response_mask, draws)
        shares = blocks.draft_weights(inputs.response_mask, anchors, valid, chosen)  # [B, N, K]
        at = shares > 0
        places = blocks.draft_positions(anchors, self.config.n_drafts)
        hidden = self.text_hidden(frozen, inputs, anchors, valid)
        features = self.text_features(hidden, self.tokens_before(inputs.tokens, anchors))[at]  # [P, F]
        rows = torch.arange(len(at), device=at.device)[:, None, None].expand_as(at)[at]
        positions, share = places[at], shares[at]
        own_hidden, memory = self.split_features(features)
        head = self.markov_head
        code = None if head is None else head.code(memory, own_hidden)
        matrix = None if head is None else head.markov_w2.weight
        labels = inputs.tokens[rows, positions + 1]
        n_positions = torch.unique(rows * inputs.tokens.shape[1] + positions).numel()
        scale = loss_scale(float(share.sum()), step.denominator)
        if chosen.d_pace is not None:
            wrong = torch.zeros_like(shares)
            wrong[at] = losses.chunked_cross_entropy(own_hidden, labels, frozen.lm_head_weight, code, matrix)
            share = share * losses.d_pace_weights(wrong, at, chosen.d_pace)[at]
        of_terms = torch.tensor([weights.cross_entropy, weights.l1, weights.forward_kl], device=share.device)
        total, terms = losses.chunked_token_losses(
            own_hidden,
            inputs.hidden[rows, positions],
            labels,
            frozen.lm_head_weight,
            share[:, None] * scale * of_terms,
            code,
            matrix,
            divergence=weights.divergence,
        )
        sums = (terms * share[:, None]).sum(dim=0) * scale
        found = {"cross_entropy": sums[0], "l1": sums[1]}
        if (guess := self.confidence_logits(features)) is not None:
            accepted = (1 - 0.5 * terms[:, 1]).clamp(0, 1)
            error = F.binary_cross_entropy_with_logits(guess.float(), accepted, reduction="none")
            found["confidence"] = (error * share).sum() * scale
            total = total + weights.confidence * found["confidence"]
        return LossTerms(total, sums[2], None, n_positions, parts=found)

    @override
    def drafted_features(self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws) -> DraftedFeatures:
        """Run a block at the root of each round."""
        drafted = masks.drafted_positions(inputs.response_mask, draws.step_bound, draws.offset)
        drafted[:, :1] = False
        index = torch.arange(drafted.shape[1], device=drafted.device)
        queries, valid = loss_queries(drafted)
        root = masks.last_context(drafted) + 1  # of each position's round
        place = torch.where(valid, queries - root.gather(1, queries), 0)
        self.config.check_depth(1 + int(place.max()))
        begins = drafted & (index == root)
        anchors, is_block = loss_queries(begins)
        hidden = self.text_hidden(frozen, inputs, anchors, is_block)
        features = self.text_features(hidden, self.tokens_before(inputs.tokens, anchors)).flatten(1, 2)
        block = (begins.cumsum(dim=1) - 1).gather(1, queries).clamp(min=0)
        return DraftedFeatures(queries, valid, at_queries(features, block * self.config.n_drafts + place))

    # Decoding

    @override
    def new_state(self, n_rows: int) -> BlockState:
        # With the context kv the target's cache holds all that the layers see.
        return BlockState(n_rows, 0 if self.config.context == "kv" else len(self.layers))

    @override
    def observe(self, state: BlockState, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        if self.config.context != "hidden":
            return
        for row, indices in enumerate(kept):
            seen = hidden[row, torch.tensor(list(indices), device=hidden.device)]
            state.fresh[row].append(self.project(seen.to(self.dtype)))

    @override
    def draft_root(
        self, state: BlockState, frozen: FrozenTarget, committed: Sequence[list[int]], cache: KVSource
    ) -> Tensor:
        device, size = frozen.lm_head_weight.device, self.config.block_size
        before = [len(tokens) - 1 for tokens in committed]
        state.forget_block()
        append: Append
        if self.config.context == "kv":
            check_has_kv(cache, before)
            append = partial(self._behind_target, cache, before)
        else:
            self._extend_context(state, frozen, committed, cache)
            append = partial(_behind_context, state)
        mask = None
        if len(set(before)) > 1:
            every = torch.ones(len(committed), size, size, dtype=torch.bool, device=device)
            mask = masks.tree_mask(before, every)
        anchors = torch.tensor([[tokens[-1]] for tokens in committed], device=device)
        hidden = self.run_layers(self.slots(frozen, anchors), positions_behind(before, size, device), append, mask)
        state.hidden = self.drafting(hidden)[:, 0]
        return self.begin_features(state.hidden[:, :1], anchors)

    def _behind_target(
        self, cache: KVSource, before: Sequence[int], layer: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put the block's keys and values behind the target's own of each layer that a layer sees."""
        n_slots = keys.shape[2]
        views = [cache.layer_view(seen, max(before) + n_slots) for seen in self.config.seen_layers(layer)]
        return _side_by_side([write_behind(view, before, n_slots, keys, values) for view in views])

    def _extend_context(
        self, state: BlockState, frozen: FrozenTarget, committed: Sequence[list[int]], cache: KVSource
    ) -> None:
        """Add the positions that were committed since the last round to the context."""
        counts = [len(row) - 1 - before for row, before in zip(committed, state.lengths, strict=True)]
        if not any(counts):
            return
        device, starts = frozen.lm_head_weight.device, state.lengths
        positions = positions_behind(starts, max(counts), device)
        if self.config.context == "memory":
            first_layer = 0 if self.config.layer_attention else self.config.n_layers - 1
            made = self.encode_memory(cache.packed(starts, max(counts), first_layer).to(self.dtype), positions)
        else:
            made = state.take_fresh(counts)
        texts = [torch.tensor(row[start:-1]) for row, start in zip(committed, starts, strict=True)]
        tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True).to(device)  # [B, n]
        self._append_context(state, self.context(frozen, tokens, made), counts)

    def _append_context(self, state: BlockState, context: Tensor, counts: Sequence[int]) -> None:
        """Put keys and values of context [B, n, E], of which some are real, behind those of each layer."""
        rotation = self.rotary(positions_behind(state.lengths, context.shape[1], context.device))
        for block, buffer in zip(self.blocks, state.slots, strict=True):
            buffer.append(*block.self_attn.keys_values(context, rotation), counts)
        state.lengths = [length + count for length, count in zip(state.lengths, counts, strict=True)]

    # Where the target is on another machine

    @property
    @override
    def context_width(self) -> int:
        if self.config.context == "kv":
            return len(self.config.fused_layers) * self.config.kv_width
        return self.sent_width if self.config.context == "memory" else self.config.hidden_size

    @property
    @override
    def context_needs_kv(self) -> bool:
        return self.config.context != "hidden"

    @override
    def new_context_cache(self) -> ContextCache:
        return ContextCache(self.config.fused_layers if self.config.context == "kv" else ())

    @override
    def _make_context(self, hidden: Tensor, kv: Tensor | None, positions: Tensor) -> Tensor:
        if self.config.context == "hidden":
            return self.project(hidden.to(self.dtype))
        assert kv is not None
        if self.config.context == "memory":
            return self.sent_memory(kv, positions)
        return kv[:, list(self.config.fused_layers)].flatten(1)

    @override
    def _take_context(self, state: BlockState, cache: ContextCache, context: Tensor) -> None:
        state.forget_block()
        layers, n_heads = None, self.config.self_attention_kv_heads
        if self.config.context == "kv":
            layers = context.unflatten(1, (len(self.config.fused_layers), self.config.kv_width))
        elif self.config.context == "memory":
            self._extend_by_memory(state, context[None], [len(context)])
        else:
            state.fresh[0].append(context)
        cache.extend(len(context), layers, n_heads)

    @override
    def reuse_context(self, state: BlockState, contexts: Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        state.forget_block()
        rows = zip(state.lengths, starts, counts, strict=True)
        fitting = [count if length == start else 0 for length, start, count in rows]
        if self.config.context == "memory" and any(fitting):
            self._extend_by_memory(state, contexts, fitting)

    def _extend_by_memory(self, state: BlockState, sent: Tensor, counts: Sequence[int]) -> None:
        """Add the next n positions of each row to the context, from their memories [B, n, W] as they are sent."""
        context: Tensor = self.hidden_norm(self.received_memory(sent))
        self._append_context(state, context, counts)

    @override
    def draft_level(self, state: BlockState, frozen: FrozenTarget, level: DraftLevel, cache: KVSource) -> Tensor:
        assert state.hidden is not None, "a round begins with its root"
        hidden = state.hidden[:, level.depth, None].expand(-1, level.tokens.shape[1], -1)
        if self.markov_head is None:
            return hidden
        before, memory = self.split_features(level.parent_features)
        memory = self.markov_head.follow(memory, before, level.tokens)
        return torch.cat((hidden, memory.to(hidden.dtype)), dim=-1)


def _side_by_side(layers: Sequence[KeysValues]) -> KeysValues:
    """Join keys and values [B, H_kv, S, d] of n layers to heads of one, those of a group side by side."""
    if len(layers) == 1:
        return layers[0]
    keys, values = zip(*layers, strict=True)
    return torch.stack(keys, dim=2).flatten(1, 2), torch.stack(values, dim=2).flatten(1, 2)


def _behind_context(state: BlockState, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Put the block's keys and values behind those of the context."""
    return state.slots[layer].append(keys, values)


def check_has_kv(cache: KVSource, before: Sequence[int]) -> None:
    """Refuse to draft behind so many positions of each row where the target's KV of some has not arrived."""
    for have, n_positions in zip(cache.lengths, before, strict=True):
        if have < n_positions:
            raise DrafterError(
                f"the contexts of positions {have} to {n_positions - 1} have not arrived; begin the round at token "
                f"{have}, and feed the known tokens behind it as levels."
            )
