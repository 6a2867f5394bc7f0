"""The interface of drafters, through which training, validation, checkpoints and decoding use them.

A drafter is a file of this folder with a subclass of :class:`Drafter` and its :class:`~.sizes.DrafterSizes`, entered in
``registry.DRAFTERS``; docs/adding-a-drafter.md writes one. Training calls :meth:`Drafter.objective`, validation
:meth:`Drafter.drafted_features`. Decoding calls, for each round of a generation (here with two levels of drafts)::

    observe(hidden states of the committed tokens)      what the last target call gave
    draft_root(committed tokens)                        -> features of the root, which predict level 1
    draft_level(nodes of level 1)                       -> features of these nodes, which predict level 2

Where the target is on another machine, contexts of its positions take the place of ``observe`` and of its KV::

    encode_context(hidden states, KV)                   beside the target -> [n, W], what drafting needs of n positions
    take_context(context)                               beside the drafter, before draft_root of the next round

Token positions are absolute. The *root* is the last committed token, which has no target activations yet; *features* of
a position stand for the target's hidden state there after its final norm, so the LM head turns them into the
distribution of the next token.

Shapes: B rows, T tokens, Q queries, E target width, V vocabulary, b nodes of one level, n nodes fed in a round,
W numbers of a context, L target layers, D packed KV width.
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
from .training import Draws, LossTerms, Reads, TrainingInputs, TrainingStep
from .vocabulary import most_frequent, over_all_tokens


@dataclass
class DraftedFeatures:
    """Features as decoding would draft them, for validation."""

    queries: Tensor  # [B, Q] int64, positions
    valid: Tensor  # [B, Q] bool; False is padding
    features: Tensor  # [B, Q, E]


@dataclass(frozen=True)
class DraftLevel:
    """The nodes of one level of a draft tree that are fed together."""

    tokens: Tensor  # [B, b] int64
    # [B, b, E], what ``draft_root`` or ``draft_level`` gave for the parent of each node
    parent_features: Tensor
    # [B, b, n] bool, which of the tokens fed in this round a node sees: root first, then level by
    # level
    seen: Tensor
    depth: int  # 1 for the children of the root


class Drafter(nn.Module, ABC):
    """A drafter: its trained weights, their training objective, and how it drafts."""

    config_class: ClassVar[type[DrafterSizes]]
    config: Any  # the sizes, of this class
    draft_ids: Tensor  # [V_d] int64, the tokens that are drafted, ascending; empty for all
    # whether it drafts from tokens and lengths that only the device knows
    by_graph: ClassVar[bool] = False
    # Target layers whose outputs :meth:`observe` gets; empty where it gets the last hidden state.
    observed_layers: tuple[int, ...] = ()
    # whether it can draft on another machine than its target, else beside it
    drafts_remotely: ClassVar[bool] = False
    # W, numbers of a position's context, 0 if it needs none; None beside the target
    context_width: int | None = None
    context_needs_kv: bool = False  # whether :meth:`encode_context` reads the target's KV
    # whether the target's LM head turns features into logits
    uses_target_head: ClassVar[bool] = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        # Rows of LM heads that belong to the draft vocabulary, in lists so that they are not
        # submodules: of the target,
        # with the state of its head, and of the drafter itself.
        self._target_rows: list[tuple[tuple[int, int], nn.Linear]] = []
        self._own_rows: list[nn.Linear] = []
        self.register_buffer(
            "draft_ids", torch.tensor(config.draft_tokens, dtype=torch.int64), persistent=False
        )

    @property
    def kind(self) -> str:
        """The drafter's name in ``drafter.json`` and on the command line."""
        return self.config_class.kind

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype

    @property
    def blocks(self) -> list[DecoderBlock]:
        """The decoder layers in order, of a drafter that has ``layers``."""
        return cast(list[DecoderBlock], list(cast(nn.ModuleList, self.layers)))

    # Training

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Draw the starting weights: N(0, std) for matrices, 0 for biases, 1 for norms."""
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, std, generator=generator)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)

    def adopt(self, frozen: FrozenTarget, count_tokens: Callable[[], Tensor]) -> None:
        """Set starting weights that follow from target and data, after :meth:`initialize`; here the draft vocabulary.

        ``count_tokens`` counts the tokens of the training responses, [V] int64; it reads all sequences.
        """
        if 0 < self.config.draft_vocabulary < self.config.vocab_size:
            tokens = most_frequent(count_tokens(), self.config.draft_vocabulary)
            self.config = replace(self.config, draft_tokens=tuple(tokens.tolist()))
            self.draft_ids = tokens.to(frozen.lm_head_weight.device)

    def check_weights(self) -> None:
        """Refuse loaded weights that contradict each other; raises DrafterError."""

    @classmethod
    def reads(cls, n_layers: int, settings: Any) -> Reads:
        """Return what training reads besides tokens, response masks and the last hidden state; by default nothing.

        ``settings`` are the run's of the drafter, or its sizes, which have the same names; ``n_layers`` is L.
        """
        return Reads()

    @classmethod
    def loss_positions(cls, response_mask: Tensor, draws: Draws) -> Tensor:
        """Weigh the positions of response masks [B, T] in the loss: [B, T] of numbers or bool; by default alike."""
        # No target activation precedes the first position of a sequence.
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
        """Compute features of every position of ``masks.drafted_positions``, each as its draft round gives them.

        A round sees target activations up to its context position, and the text of the batch in place of drafts.
        """

    # Decoding beside the target

    def prepare(self) -> None:
        """Lay out the weights for drafting on a CPU, once they don't change any more; drafts need not be exact."""
        pack(self, is_exact=False)
        for module in self.modules():
            if isinstance(module, DecoderBlock):
                module.join()
        if self.config.draft_tokens and self.own_head is not None:
            self._own_rows = [rows_of(self.own_head, self.draft_ids, is_packed=True)]

    def draft_logits(self, frozen: FrozenTarget, features: Tensor) -> Tensor:
        """Turn features [..., E] into logits [..., V], -inf where a token is never drafted; by default the target's."""
        return self.over_all_tokens(self.target_logits(frozen, features))

    @property
    def own_head(self) -> Tensor | None:
        """A trained matrix [V or V_d, n] whose products are logits, or are added to them; by default None."""
        return None

    def weights_per_draft(self) -> tuple[int, int]:
        """Count the weights that a draft reads: for each token that can be drafted, and besides."""
        own_head = self.own_head
        width = self.config.hidden_size if self.uses_target_head else 0
        n_body = sum(weight.numel() for weight in self.parameters())
        if own_head is not None:
            width += own_head.shape[1]
            n_body -= own_head.numel()
        return width, n_body

    def own_logits(self, x: Tensor) -> Tensor:
        """Multiply x [..., n] by the draft vocabulary's rows of :attr:`own_head`: [..., V_d]."""
        if self._own_rows:
            logits: Tensor = self._own_rows[0](x)
            return logits
        head = cast(Tensor, self.own_head)
        return F.linear(x, head[self.draft_ids] if self.config.draft_tokens else head)

    def target_logits(self, frozen: FrozenTarget, features: Tensor) -> Tensor:
        """Apply the draft vocabulary's rows of the target's LM head to features [..., E]: [..., V_d]."""
        if not self.config.draft_tokens:
            return frozen.logits(features)
        head = frozen.lm_head_weight
        if not self._target_rows or self._target_rows[0][0] != state_of(head):
            self._target_rows = [(state_of(head), frozen.head_of(self.draft_ids))]
        rows = self._target_rows[0][1]
        is_alike = features.dtype == head.dtype
        logits = rows(features) if is_alike else losses.logits_of(features, rows.weight)
        return losses.capped(logits, frozen.logit_cap)

    def over_all_tokens(self, logits: Tensor) -> Tensor:
        """Spread logits [..., V_d] of the draft vocabulary over all tokens, -inf for the others: [..., V]."""
        if not self.config.draft_tokens:
            return logits
        return over_all_tokens(logits, self.draft_ids, self.config.vocab_size)

    def confidence(self, features: Tensor) -> Tensor | None:
        """Estimate the probability [...] that the draft after features [..., E] is accepted; by default None."""
        return None

    @abstractmethod
    def new_state(self, n_rows: int) -> Any:
        """Make an empty :class:`~.caches.RowState` of B rows, which the methods below get back as ``state``."""

    def observe(self, state: Any, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        """Take the target's hidden states of tokens that were just committed; by default they are ignored.

        Args:
            hidden: [B, n, E], after the final norm; or the outputs of K :attr:`observed_layers`, [B, n, K * E].
            kept: per row which of the n tokens were committed, in order.
        """

    @abstractmethod
    def draft_root(
        self, state: Any, frozen: FrozenTarget, committed: Sequence[list[int]], cache: KVSource
    ) -> Tensor:
        """Begin a round: forget what was drafted, catch up with what was committed, and feed the root: [B, 1, E].

        A round may begin again at the root of the one before. ``committed``: per row prompt and generated tokens; all
        before the last, the root, have target KV or contexts.
        """

    @abstractmethod
    def draft_level(
        self, state: Any, frozen: FrozenTarget, level: DraftLevel, cache: KVSource
    ) -> Tensor:
        """Feed the nodes of one level; returns their features [B, b, E]."""

    # Decoding on another machine than the target

    def new_context_cache(self) -> ContextCache:
        """Make the empty cache that :meth:`take_context` fills and :meth:`draft_root` reads."""
        if self.context_width is None:
            raise DrafterError(
                f"a {self.kind} drafter can only draft beside its target; `moa-data chat --help` lists the kinds that "
                "can draft over a network."
            )
        n_layers = self.config.n_layers
        return ContextCache(range(n_layers - self.config.target_layer_inference, n_layers))

    @torch.inference_mode()
    def encode_context(self, hidden: Tensor, kv: Tensor | None, positions: Tensor) -> Tensor:
        """Make the contexts [n, W] of n positions [n] int64 that the target has seen, of one text or several.

        Args:
            hidden: [n, E] or [n, K * E], as :meth:`observe` gets them.
            kv: [n, L, D], packed KV of all layers; None unless :attr:`context_needs_kv`.
        """
        return self._make_context(hidden, kv, positions).to(self.dtype)

    @torch.inference_mode()
    def take_context(self, state: Any, cache: ContextCache, context: Tensor, start: int) -> None:
        """Take the contexts [n, W] of the next n positions from ``start`` on, into a state of one row and a cache.

        A round begins at a token whose predecessors all have contexts; known tokens after it are fed as levels of a
        chain.
        """
        width = self.context_width
        next_one = cache.lengths[0]
        if context.ndim != 2 or context.shape[1] != width or start != next_one:
            raise DrafterError(
                f"contexts {list(context.shape)} from position {start} on do not fit: the next ones are [n, {width}] "
                f"from {next_one} on."
            )
        weight = next(self.parameters())
        self._take_context(state, cache, context.to(weight.device, weight.dtype))

    def reuse_context(
        self, state: Any, contexts: Tensor, starts: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Take contexts [B, n, W] that were made to be sent, so that drafting need not make them again.

        They are of positions from each row's start on, so many real ones. By default, and where they do not continue
        what the state has, they are ignored.
        """

    def _make_context(self, hidden: Tensor, kv: Tensor | None, positions: Tensor) -> Tensor:
        return hidden[:, :0]

    def _take_context(self, state: Any, cache: ContextCache, context: Tensor) -> None:
        cache.extend(len(context), None, 0)
