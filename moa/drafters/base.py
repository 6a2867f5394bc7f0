"""The interface of drafters, which training, validation, checkpoints and decoding use.

Each kind of drafter has a file in this folder. The file contains a subclass of :class:`Drafter` and
a subclass of :class:`~.sizes.DrafterSizes`. ``registry.DRAFTERS`` lists all kinds. See
docs/adding-a-drafter.md for an example. Training calls :meth:`Drafter.objective`, and validation
calls :meth:`Drafter.drafted_features`. In each round, decoding makes the following calls (example
with two levels of drafts)::

    observe(hidden states of the committed tokens)      the output of the last target call
    draft_root(committed tokens)                        -> features of the root, predict level 1
    draft_level(nodes of level 1)                       -> features of these nodes, predict level 2

If the target runs on another machine, that machine sends the drafter a *context* for each position:
the numbers about this position that the drafter needs from the target. With contexts, the drafter
needs neither ``observe`` nor the target's KV cache::

    encode_context(hidden states, KV)    on the target's machine -> [n, W], contexts of n positions
    take_context(context)                on the drafter's machine, before the next draft_root

Token positions are absolute. The *root* is the last committed token. The target has not processed
the root yet. The *features* of a position are a vector that the drafter computes in place of the
target's hidden state after the final norm. The LM head turns features into the distribution of the
next token.

Shapes: B rows, T tokens, Q queries, E target width, V vocabulary, V_d draft vocabulary, b nodes of
one level, n nodes fed in a round, W numbers per context, L target layers, D values of a token's
packed KV in one layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import DrafterError
from ..nn import losses
from ..nn.layers import DecoderBlock
from ..nn.packed import pack, rows_of, state_of
from ..targets.bundle import FrozenTarget
from ..targets.cache import ContextCache, KVSource
from .sizes import DrafterSizes
from .training import Draws, LossTerms, TrainingInputs, TrainingStep
from .vocabulary import most_frequent

CommittedTokens = Sequence[list[int]]
"""For each row, the prompt and the generated tokens. The last token is the root."""


@dataclass
class DraftedFeatures:
    """Features of drafts in validation. They equal the features that decoding would compute."""

    queries: Tensor  # [B, Q] int64, positions of the drafts.
    valid: Tensor  # [B, Q] bool; False is padding.
    features: Tensor  # [B, Q, E], features of the drafts.


@dataclass(frozen=True)
class DraftLevel:
    """The nodes of one level of a draft tree. They are fed to the drafter together."""

    # [B, b] int64, drafted token of each node.
    tokens: Tensor
    # [B, b, E], the features of each node's parent, as returned by ``draft_root`` or
    # ``draft_level``.
    parent_features: Tensor
    # [B, b, n] bool, true if a node attends to a token. The n tokens are all tokens that were fed
    # to the drafter in this round, in the order of feeding: the root first, then level by level.
    seen: Tensor
    depth: int  # The number of this level. The children of the root are level 1.


class Drafter(nn.Module, ABC):
    """A drafter: its trained weights, their training objective, and how it drafts."""

    config_class: ClassVar[type[DrafterSizes]]
    # The drafter's sizes, an instance of ``config_class``.
    config: Any
    # [V_d] int64, ascending ids of the tokens in the draft vocabulary. Other tokens cannot be
    # drafted. Empty if all tokens can be drafted.
    draft_ids: Tensor
    # True if drafting can be recorded as a CUDA graph. Such a drafter must read token ids and
    # lengths from tensors on the device, never from Python values.
    by_graph = False
    # Target layers whose outputs :meth:`observe` receives. If empty, :meth:`observe` receives the
    # last hidden state.
    observed_layers: tuple[int, ...]
    # True if the drafter can run on another machine than its target.
    drafts_remotely = False
    # W, the number of values in a context. A remote target sends one context for each position. 0
    # if the drafter needs no contexts. None if the drafter must run on the target's machine.
    context_width: int | None = None
    # Target layers whose KV the drafter reads unchanged. A context ends with the KV that these
    # layers have at its position.
    context_layers: tuple[int, ...] = ()
    # True if :meth:`encode_context` reads the target's KV.
    context_needs_kv = False
    # True if the target's LM head computes the drafter's logits. False if the drafter has its own
    # LM head.
    uses_target_head = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.observed_layers = config.reads.outputs
        # Linear layers whose weights are copies of rows of an LM head: the rows of the tokens in
        # the draft vocabulary. The dict ``_target_rows`` has rows of the target's head. Its key is
        # the address and the version of this head, so the rows are copied again if the head
        # changes. The list ``_own_rows`` has rows of the drafter's own head. A plain dict and a
        # plain list are used, so that PyTorch does not register the layers as submodules.
        self._target_rows: dict[tuple[int, int], nn.Linear] = {}
        self._own_rows: list[nn.Linear] = []
        self.register_buffer(
            "draft_ids", torch.tensor(config.draft_tokens, dtype=torch.int64), persistent=False
        )

    @property
    def kind(self) -> str:
        """The drafter's name in ``drafter.json`` and on the command line, such as ``eagle``."""
        return self.config_class.kind

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype

    @property
    def draft_tokens(self) -> Tensor | None:
        """[V_d] int64, ascending ids of the tokens that can be drafted.

        None if all tokens can be drafted.
        """
        return self.draft_ids if self.config.draft_tokens else None

    @property
    def blocks(self) -> list[DecoderBlock]:
        """The drafter's decoder layers, in the order in which they run.

        By default these are the layers in the attribute ``layers``. Without this attribute, the
        list is empty.
        """
        layers: Any = getattr(self, "layers", ())
        return list(layers)

    # Training

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Initialize the weights: N(0, std) for matrices, 0 for biases, 1 for norms."""
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, std, generator=generator)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)

    def adopt(self, frozen: FrozenTarget, count_tokens: Callable[[], Tensor]) -> None:
        """Set the initial weights that depend on the target and the data.

        This method is called after :meth:`initialize`. By default, the method chooses the draft
        vocabulary.

        Args:
            frozen: the target.
            count_tokens: a function that counts how often each token occurs in the training
                responses. It returns [V] int64. Each call of the function reads all sequences.
        """
        if 0 < self.config.draft_vocabulary < self.config.vocab_size:
            tokens = most_frequent(count_tokens(), self.config.draft_vocabulary)
            self.config = replace(self.config, draft_tokens=tuple(tokens.tolist()))
            self.draft_ids = tokens.to(frozen.lm_head_weight.device)

    def check_weights(self) -> None:
        """Raise DrafterError if loaded weights contradict each other; by default check nothing."""

    @classmethod
    def loss_positions(cls, response_mask: Tensor, draws: Draws) -> Tensor:
        """Return the loss weight of each position, [B, T] float or bool, for response masks [B, T].

        By default, positions of responses have the weight 1. Other positions and position 0 have
        the weight 0.
        """
        # Exclude the first position of a sequence, because no target activation precedes it.
        response = response_mask.bool().clone()
        response[:, :1] = False
        return response

    @abstractmethod
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of one mini-batch."""

    @abstractmethod
    def drafted_features(
        self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws
    ) -> DraftedFeatures:
        """Compute the features that decoding would compute for all drafted positions.

        ``masks.drafted_positions`` chooses the drafted positions. The drafts of a round see target
        activations only of positions before the root of the round. The tokens of the batch count as
        the drafted tokens.
        """

    # Decoding on the target's machine

    def prepare(self) -> None:
        """Pack the trained weights into a layout with which drafting on a CPU is fast.

        Packing may round the weights, so a few drafts may change.
        """
        pack(self, is_exact=False)
        for block in self.blocks:
            block.fuse()
        if self.config.draft_tokens and self.own_head is not None:
            self._own_rows = [rows_of(self.own_head, self.draft_ids, is_packed=True)]

    def draft_logits(self, frozen: FrozenTarget, features: Tensor) -> Tensor:
        """Compute the logits [..., V] of features [..., E].

        Tokens outside the draft vocabulary get -inf. By default the target's LM head computes the
        logits.
        """
        return self.over_all_tokens(self.target_logits(frozen, features))

    @property
    def own_head(self) -> Tensor | None:
        """A trained matrix [V or V_d, n] that computes logits; None by default.

        The matrix is multiplied by vectors of n numbers. Depending on the drafter, the products are
        the drafter's logits, or corrections that are added to the logits of the target's LM head.
        """
        return None

    def weights_per_draft(self) -> tuple[int, int]:
        """Count the weights that must be read from memory to compute one draft.

        Returns:
            Two counts. The first is the number of LM head weights for each token of the vocabulary.
            The second is the number of all other weights.
        """
        own_head = self.own_head
        width = self.config.hidden_size if self.uses_target_head else 0
        n_body = sum(weight.numel() for weight in self.parameters())
        if own_head is not None:
            width += own_head.shape[1]
            n_body -= own_head.numel()
        return width, n_body

    def own_logits(self, x: Tensor) -> Tensor:
        """Multiply x [..., n] by the rows of :attr:`own_head` for the draft vocabulary.

        The result is [..., V_d].
        """
        if self._own_rows:
            logits: Tensor = self._own_rows[0](x)
            return logits
        head = cast(Tensor, self.own_head)
        return F.linear(x, head[self.draft_ids] if self.config.draft_tokens else head)

    def target_logits(self, frozen: FrozenTarget, features: Tensor) -> Tensor:
        """Compute the target's logits [..., V_d] of the draft vocabulary from features [..., E]."""
        if not self.config.draft_tokens:
            return frozen.logits(features)
        head = frozen.lm_head_weight
        state = state_of(head)
        if state not in self._target_rows:
            self._target_rows = {state: frozen.head_of(self.draft_ids)}
        rows = self._target_rows[state]
        is_alike = features.dtype == head.dtype
        logits = rows(features) if is_alike else losses.logits_of(features, rows.weight)
        return losses.capped(logits, frozen.logit_cap)

    def over_all_tokens(self, logits: Tensor) -> Tensor:
        """Convert logits [..., V_d] of the draft vocabulary to logits [..., V] of all tokens.

        Tokens outside the draft vocabulary get -inf.
        """
        tokens = self.draft_tokens
        if tokens is None:
            return logits
        spread = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return spread.index_copy(-1, tokens, logits)

    def confidence(self, features: Tensor) -> Tensor | None:
        """Estimate the acceptance probability [...] of the next draft. By default, return None.

        The next draft is the draft that is chosen from the features [..., E].
        """
        return None

    @abstractmethod
    def new_state(self, n_rows: int) -> Any:
        """Create an empty state of B rows, a :class:`~.caches.RowState`."""

    def observe(self, state: Any, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        """Receive the target's hidden states of newly committed tokens; ignored by default.

        Args:
            state: the drafter's caches of all rows.
            hidden: [B, n, E], hidden states after the final norm. If there are K
                :attr:`observed_layers`, the concatenated outputs of these layers, [B, n, K * E].
            kept: for each row, the ascending indices of the committed tokens among the n tokens of
                the target call.
        """

    @abstractmethod
    def draft_root(
        self, state: Any, frozen: FrozenTarget, committed: CommittedTokens, cache: KVSource
    ) -> Tensor:
        """Start a round: drop the previous drafts, process new committed tokens, and feed the root.

        A round may start at the same root as the previous round.

        Args:
            state: the drafter's caches of all rows.
            frozen: the target.
            committed: the committed tokens of each row. ``cache`` must have the target's KV or
                contexts of all these tokens except the root.
            cache: the target's KV. If the target is remote, the cache contains contexts instead of
                KV.

        Returns:
            Features of the root [B, 1, E].
        """

    @abstractmethod
    def draft_level(
        self, state: Any, frozen: FrozenTarget, level: DraftLevel, cache: KVSource
    ) -> Tensor:
        """Feed the nodes of one level of drafts, and return their features [B, b, E]."""

    # Decoding with the target on another machine

    def new_context_cache(self) -> ContextCache:
        """Create the empty cache that :meth:`take_context` fills and :meth:`draft_root` reads."""
        if self.context_width is None:
            raise DrafterError(
                f"drafters of kind {self.kind} can draft only on the machine of their target. "
                "`moa-data chat --help` lists the kinds that can draft over a network."
            )
        return ContextCache(self.context_layers)

    @torch.inference_mode()
    def encode_context(self, hidden: Tensor, kv: Tensor | None, positions: Tensor) -> Tensor:
        """Compute the contexts [n, W] of n positions that the target has processed.

        The n positions may belong to several sequences.

        Args:
            hidden: [n, E] or [n, K * E], hidden states as :meth:`observe` receives them.
            kv: [n, L, D], packed KV of all target layers. May be None if :attr:`context_needs_kv`
                is false.
            positions: [n] int64.
        """
        context = self._make_context(hidden, kv, positions).to(self.dtype)
        if not self.context_layers:
            return context
        assert kv is not None
        layers = kv[:, list(self.context_layers)].flatten(1)
        return torch.cat((context, layers.to(self.dtype)), dim=1)

    @torch.inference_mode()
    def take_context(self, state: Any, cache: ContextCache, context: Tensor, start: int) -> None:
        """Store the contexts [n, W] of the next n positions in a state of one row and in a cache.

        ``start`` is the first of the n positions. A draft round needs the contexts of all positions
        before its root. If the newest contexts have not arrived, the round starts at an earlier
        token. The known tokens after this token are then fed like drafts, one per level of a chain.
        """
        width = self.context_width
        next_position = cache.lengths[0]
        if context.ndim != 2 or context.shape[1] != width or start != next_position:
            raise DrafterError(
                f"the contexts have the shape {list(context.shape)} and begin at position {start}, "
                f"expected the shape [n, {width}] and position {next_position}. Pass the contexts "
                "in order."
            )
        weight = next(self.parameters())
        state.forget_drafts()
        packed = self._take_context(state, context.to(weight.device, weight.dtype))
        cache.extend(packed, self.config.head_dim)

    def reuse_context(
        self, state: Any, contexts: Tensor, starts: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Use contexts [B, n, W] that have already been computed, to avoid computing them again.

        Only the first ``counts[row]`` contexts of a row are real, the others are padding. The first
        context of a row belongs to position ``starts[row]``. If the row's state needs another
        position next, the contexts of the row are ignored. By default all contexts are ignored.
        """

    def _make_context(self, hidden: Tensor, kv: Tensor | None, positions: Tensor) -> Tensor:
        """Compute the part of contexts that precedes the KV of :attr:`context_layers`.

        By default this part is empty.
        """
        return hidden[:, :0]

    def _take_context(self, state: Any, context: Tensor) -> Tensor:
        """Store the first part of contexts, which :meth:`_make_context` computed, in the state.

        Returns the other part [n, N * D], which is the KV of the N :attr:`context_layers`.
        """
        return context
