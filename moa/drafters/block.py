"""Block-parallel drafters: one forward drafts a whole block, whatever its length; DFlash and DSpark are such.

Shapes: B rows, T tokens, N blocks of a row, G slots of a block, K drafts of a block, Q queries, P loss positions,
E target width, m layers of the target that are read, H_kv key/value heads, d head dim, M memory and F feature width,
b nodes of one level.

    outputs of m target layers -> fc -> norm -> context, of verified positions
    [anchor, mask, mask, ...] -> decoder layers, whose slots see the context and each other -> norm -> hidden state
    hidden state -> the target's LM head, + what follows from the token before (:mod:`..nn.markov`) -> draft k

Each layer makes keys and values of the context with its own projections, without its input norm. What a block is and
sees stands in :mod:`.blocks`; training runs many blocks at once through :meth:`BlockDrafter.run_layers`, a round of
decoding one. The features of a node are the hidden state of its slot and, behind it, what the Markov head remembers of
the tokens before: they depend on the path, so that chains and trees are made of one forward alike. Layer -1 of the
target is its embedding.

The reference is deepseek-ai/DeepSpec, and z-lab/dflash for drafts at their own positions; weights have its names.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from ..errors import DrafterError
from ..nn import losses, masks
from ..nn.kv import KVBuffer, positions_behind
from ..nn.layers import DecoderBlock, RMSNorm, Rotary
from ..nn.markov import ConfidenceHead, MarkovHead
from ..targets.bundle import FrozenTarget, target_sizes
from ..targets.cache import KVSource
from . import blocks
from .base import DraftedFeatures, Drafter, DraftLevel
from .rounds import Draws, at_queries, loss_queries
from .sizes import DrafterSizes
from .training import LossTerms, TrainingInputs, TrainingStep, loss_scale

N_READ_LAYERS = 5
"""Target layers that are read by default, as in DSpark and DFlash."""

Append = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes the number of a layer, and its keys and values of slots; gives those of context and slots."""


@dataclass(frozen=True, kw_only=True)
class BlockDrafterSizes(DrafterSizes):
    """The sizes that block-parallel drafters share."""

    self_attention_kv_heads: int
    """KV heads of each layer."""
    self_attention_mlp_width: int
    """MLP width of each layer."""
    fused_layers: tuple[int, ...]
    """Target layers that are read, in the order in which ``fc`` takes them; -1 is the embedding."""
    mask_token: int
    """The token whose embedding stands for an unknown one."""
    block_size: int
    """G, slots of a block."""
    sample_from_anchor: bool
    """The slot of the anchor drafts the token behind it; without, each further slot drafts its own token."""
    block_layers: int = 5
    """Decoder layers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fused_layers", tuple(self.fused_layers))  # JSON knows lists alone
        self.check_kv_heads("self_attention_kv_heads")
        self.check_at_least_one("block_layers", "block_size")
        check_read_layers(self.fused_layers, self.n_layers or 1 + max(self.fused_layers, default=0))
        if self.n_drafts < 1:
            raise DrafterError("a block of 1 slot drafts nothing but from its anchor; give a block_size from 2 up.")
        if not 0 <= self.mask_token < self.vocab_size:
            raise DrafterError(f"mask_token must be one of the {self.vocab_size} tokens, got {self.mask_token}.")

    @property
    def n_drafts(self) -> int:
        """K, drafts of a block."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The first slot that drafts."""
        return 0 if self.sample_from_anchor else 1

    @property
    @override
    def max_depth(self) -> int:
        return self.n_drafts

    @classmethod
    @override
    def defaults(cls, config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        facts = target_sizes(config)
        found = {
            "self_attention_kv_heads": facts["n_kv_heads"],
            "self_attention_mlp_width": config.intermediate_size,
            "mask_token": facts["vocab_size"] - 1,
        }
        if "fused_layers" not in given:  # small targets have no default
            found["fused_layers"] = default_read_layers(facts["n_layers"])
        return found


def default_read_layers(n_layers: int) -> tuple[int, ...]:
    """The layers that are read by default: five from 1 to L - 3, evenly spread.

    Raises:
        DrafterError: the target is so small that these are no five layers.
    """
    layers = tuple(round(1 + index * (n_layers - 4) / (N_READ_LAYERS - 1)) for index in range(N_READ_LAYERS))
    if list(layers) != sorted(set(layers)):
        raise DrafterError(
            f"the default layers, five from 1 to L - 3, are no five layers of a target with {n_layers}; choose them "
            "with --set drafter.fused_layers=0,1 or other layers."
        )
    return layers


def check_read_layers(layers: Sequence[int], n_layers: int) -> None:
    """Refuse layers that a target of ``n_layers`` does not have or that do not ascend; -1, the embedding, may lead."""
    real = [layer for layer in layers if layer != -1]
    if not real or list(layers) != sorted(set(layers)) or layers[0] < -1 or layers[-1] >= n_layers:
        given = ",".join(map(str, layers))
        raise DrafterError(
            f"fused_layers must be ascending decoder layers between 0 and {n_layers - 1}, where -1, the embedding, may "
            f"come first, got {given or 'none'}."
        )


class BlockState:
    """What B rows know of the target while decoding, and the block of this round.

    Attributes:
        slots: keys and values of the context for each layer; those of a round's block stand behind it.
        lengths: context positions of each row.
        fresh: per row the outputs of the layers that are read, [n, m * E], of the committed positions from there on.
        hidden: [B, K, E] of the slots that draft; None before the first round.
    """

    def __init__(self, n_rows: int, n_layers: int) -> None:
        self.slots = [KVBuffer(n_rows) for _ in range(n_layers)]
        self.lengths = [0] * n_rows
        self.fresh: list[list[Tensor]] = [[] for _ in range(n_rows)]
        self.hidden: Tensor | None = None

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


class BlockDrafter(Drafter):
    """The trained part: the projection of the context, the decoder layers, and the heads that a drafter has."""

    config: BlockDrafterSizes
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None

    def __init__(self, config: BlockDrafterSizes) -> None:
        super().__init__()
        self.config = config
        self.markov_head = self.confidence_head = None
        width = config.hidden_size
        self.fc = nn.Linear(len(config.fused_layers) * width, width, bias=False)
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
        return tuple(layer for layer in self.config.fused_layers if layer >= 0)

    @classmethod
    @override
    def needed_layers(cls, n_layers: int, fused_layers: tuple[int, ...] | None) -> tuple[int, ...]:
        layers = default_read_layers(n_layers) if fused_layers is None else fused_layers
        check_read_layers(layers, n_layers)
        return tuple(layer for layer in layers if layer >= 0)

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

    def context(self, frozen: FrozenTarget, tokens: Tensor, states: Tensor) -> Tensor:
        """Make the context of verified positions: [..., E].

        Args:
            tokens: [...] int64.
            states: [..., m * E] without the embedding, outputs of the layers that are read.
        """
        if self.config.fused_layers[0] == -1:
            embeddings = frozen.embed(tokens)
            states = torch.cat((embeddings, states.to(embeddings.dtype)), dim=-1)
        context: Tensor = self.hidden_norm(self.fc(states))
        return context

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
        if len(inputs.layer_outputs) != len(self.observed_layers):
            layers = ", ".join(map(str, self.observed_layers))
            raise DrafterError(
                f"a {self.kind} drafter needs the outputs of the target's layers {layers}, which this batch lacks."
            )
        size, n_tokens = self.config.block_size, inputs.tokens.shape[1]
        x = self.slots(frozen, inputs.tokens.gather(1, anchors))
        states = torch.cat(inputs.layer_outputs, dim=-1).to(x.dtype)
        context = self.context(frozen, inputs.tokens, states)
        rotation = self.rotary(torch.arange(n_tokens, device=x.device)[None])
        of_context = [block.self_attn.keys_values(context, rotation) for block in self.blocks]

        def append(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            seen = of_context[layer]
            return torch.cat((seen[0], keys), dim=2), torch.cat((seen[1], values), dim=2)

        positions = blocks.draft_positions(anchors, size).flatten(1)
        mask = blocks.block_mask(anchors, valid, size, n_tokens)
        hidden = self.run_layers(x, positions, append, mask)
        return self.drafting(hidden)

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
        n_positions = torch.unique(rows * inputs.tokens.shape[1] + positions).numel()
        scale = loss_scale(float(share.sum()), step.denominator)
        of_terms = torch.tensor([weights.cross_entropy, weights.l1, weights.forward_kl], device=share.device)
        own_hidden, memory = self.split_features(features)
        head = self.markov_head
        total, terms = losses.chunked_token_losses(
            own_hidden,
            inputs.hidden[rows, positions],
            inputs.tokens[rows, positions + 1],
            frozen.lm_head_weight,
            share[:, None] * scale * of_terms,
            None if head is None else head.code(memory, own_hidden),
            None if head is None else head.markov_w2.weight,
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
    @torch.no_grad()
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
        return BlockState(n_rows, len(self.layers))

    @override
    def observe(self, state: BlockState, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        for row, indices in enumerate(kept):
            state.fresh[row].append(hidden[row, torch.tensor(list(indices), device=hidden.device)])

    @override
    def draft_root(
        self, state: BlockState, frozen: FrozenTarget, committed: Sequence[list[int]], cache: KVSource
    ) -> Tensor:
        device = frozen.lm_head_weight.device
        state.forget_block()
        self._extend_context(state, frozen, committed)
        anchors = torch.tensor([[tokens[-1]] for tokens in committed], device=device)
        size = self.config.block_size
        mask = None
        if len(set(state.lengths)) > 1:
            every = torch.ones(len(committed), size, size, dtype=torch.bool, device=device)
            mask = masks.tree_mask(state.lengths, every)

        def append(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return state.slots[layer].append(keys, values)

        hidden = self.run_layers(
            self.slots(frozen, anchors), positions_behind(state.lengths, size, device), append, mask
        )
        state.hidden = self.drafting(hidden)[:, 0]
        return self.begin_features(state.hidden[:, :1], anchors)

    def _extend_context(self, state: BlockState, frozen: FrozenTarget, committed: Sequence[list[int]]) -> None:
        """Add the positions that were committed since the last round to the context."""
        device, counts = frozen.lm_head_weight.device, [sum(map(len, parts)) for parts in state.fresh]
        if any(before + n != len(row) - 1 for before, n, row in zip(state.lengths, counts, committed, strict=True)):
            raise DrafterError("the target's states do not reach the token to draft behind: give them before drafting.")
        if not any(counts):
            return
        width = len(self.observed_layers) * self.config.hidden_size
        fresh = [torch.cat(parts) if parts else torch.empty(0, width, device=device) for parts in state.fresh]
        texts = [torch.tensor(row[start:-1]) for row, start in zip(committed, state.lengths, strict=True)]
        tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True).to(device)  # [B, n]
        states = nn.utils.rnn.pad_sequence([part.to(self.dtype) for part in fresh], batch_first=True)
        context = self.context(frozen, tokens, states)
        rotation = self.rotary(positions_behind(state.lengths, max(counts), device))
        for block, buffer in zip(self.blocks, state.slots, strict=True):
            buffer.append(*block.self_attn.keys_values(context, rotation), counts)
        state.lengths = [length + count for length, count in zip(state.lengths, counts, strict=True)]
        state.fresh = [[] for _ in counts]

    @override
    def draft_level(self, state: BlockState, frozen: FrozenTarget, level: DraftLevel, cache: KVSource) -> Tensor:
        assert state.hidden is not None, "a round begins with its root"
        hidden = state.hidden[:, level.depth, None].expand(-1, level.tokens.shape[1], -1)
        if self.markov_head is None:
            return hidden
        before, memory = self.split_features(level.parent_features)
        memory = self.markov_head.follow(memory, before, level.tokens)
        return torch.cat((hidden, memory.to(hidden.dtype)), dim=-1)
