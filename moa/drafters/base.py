"""The interface of drafters, which training, validation, checkpoints and decoding use.

A drafter is a file in this folder. It contains a subclass of :class:`Drafter` and its
:class:`~.sizes.DrafterSizes`, and is registered in ``registry.DRAFTERS``. See
docs/adding-a-drafter.md for an example. Training calls :meth:`Drafter.objective`, validation calls
:meth:`Drafter.drafted_features`. In each round of a generation, decoding makes these calls (shown
for two levels of drafts)::

    observe(hidden states of the committed tokens)      the output of the last target call
    draft_root(committed tokens)                        -> features of the root, predict level 1
    draft_level(nodes of level 1)                       -> features of these nodes, predict level 2

If the target runs on another machine, the drafter gets a context for each of the target's
positions. The contexts replace ``observe`` and the target's KV cache::

    encode_context(hidden states, KV)    on the target's machine -> [n, W], contexts of n positions
    take_context(context)                on the drafter's machine, before the next draft_root

Token positions are absolute. The *root* is the last committed token; it has no target activations
yet. The *features* of a position stand for the target's hidden state after its final norm. The LM
head turns them into the distribution of the next token.

Shapes: B rows, T tokens, Q queries, E target width, V vocabulary, V_d draft vocabulary, b nodes of
one level, n nodes fed in a round, W numbers of a context, L target layers, D packed KV width.
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
    """The features that decoding would draft, for validation."""

    queries: Tensor  # [B, Q] int64, positions
    valid: Tensor  # [B, Q] bool; False is padding
    features: Tensor  # [B, Q, E]


@dataclass(frozen=True)
class DraftLevel:
    """The nodes of one level of a draft tree that are fed together."""

    tokens: Tensor  # [B, b] int64
    # [B, b, E], the features of each node's parent, from ``draft_root`` or ``draft_level``
    parent_features: Tensor
    # [B, b, n] bool, the tokens of this round that a node sees. The n tokens are in feeding order:
    # the root first, then level by level.
    seen: Tensor
    depth: int  # 1 for the children of the root


class Drafter(nn.Module, ABC):
    """A drafter: its trained weights, their training objective, and how it drafts."""

    config_class: ClassVar[type[DrafterSizes]]
    config: Any  # the sizes, an instance of ``config_class``
    # [V_d] int64, the tokens that can be drafted, ascending. Empty if all tokens can be drafted.
    draft_ids: Tensor
    # True if the drafter can draft when token ids and lengths are known on the device only.
    by_graph: ClassVar[bool] = False
    # Target layers whose outputs :meth:`observe` gets. If empty, it gets the last hidden state.
    observed_layers: tuple[int, ...] = ()
    # True if the drafter can run on another machine than its target.
    drafts_remotely: ClassVar[bool] = False
    # W, numbers of a position's context; 0 if the drafter needs no context. None if the drafter
    # must run on the target's machine.
    context_width: int | None = None
    context_needs_kv: bool = False  # True if :meth:`encode_context` reads the target's KV.
    # True if the target's LM head turns features into logits.
    uses_target_head: ClassVar[bool] = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        # LM head rows of the draft vocabulary: those of the target, with the state of its head, and
        # those of the drafter. The lists prevent PyTorch from registering them as submodules.
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
        """The decoder layers in order, for a drafter that has ``layers``."""
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
        """Set the starting weights that depend on target and data, after :meth:`initialize`.

        The default implementation chooses the draft vocabulary.

        Args:
            frozen: the target.
            count_tokens: counts the tokens of the training responses, [V] int64. A call reads all
                sequences.
        """
        if 0 < self.config.draft_vocabulary < self.config.vocab_size:
            tokens = most_frequent(count_tokens(), self.config.draft_vocabulary)
            self.config = replace(self.config, draft_tokens=tuple(tokens.tolist()))
            self.draft_ids = tokens.to(frozen.lm_head_weight.device)

    def check_weights(self) -> None:
        """Check that the loaded weights are consistent; raises DrafterError if they are not."""

    @classmethod
    def reads(cls, n_layers: int, settings: Any) -> Reads:
        """Return the activations that training reads, besides those that are always read.

        Tokens, response masks and the last hidden state are always read. By default nothing else is
        read.

        Args:
            n_layers: L.
            settings: the drafter settings of the run, or its sizes, which have the same names.
        """
        return Reads()

    @classmethod
    def loss_positions(cls, response_mask: Tensor, draws: Draws) -> Tensor:
        """Return loss weights [B, T], numbers or bool, for response masks [B, T].

        By default all positions have the same weight.
        """
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
        """Compute features for every position of ``masks.drafted_positions``, as decoding would.

        A round sees target activations up to its context position. The tokens of the batch take the
        place of drafts.
        """

    # Decoding on the target's machine

    def prepare(self) -> None:
        """Lay out the final weights for fast drafting on a CPU; drafts may differ slightly."""
        pack(self, is_exact=False)
        for module in self.modules():
            if isinstance(module, DecoderBlock):
                module.join()
        if self.config.draft_tokens and self.own_head is not None:
            self._own_rows = [rows_of(self.own_head, self.draft_ids, is_packed=True)]

    def draft_logits(self, frozen: FrozenTarget, features: Tensor) -> Tensor:
        """Turn features [..., E] into logits [..., V].

        Tokens outside the draft vocabulary get -inf. By default the target's LM head is applied.
        """
        return self.over_all_tokens(self.target_logits(frozen, features))

    @property
    def own_head(self) -> Tensor | None:
        """A trained matrix [V or V_d, n]; None by default.

        Its products are the logits, or are added to them.
        """
        return None

    def weights_per_draft(self) -> tuple[int, int]:
        """Count the weights that a draft reads: per token of the vocabulary, and all others."""
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
        """Compute the target's logits [..., V_d] of the draft vocabulary from features [..., E]."""
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
        """Spread logits [..., V_d] of the draft vocabulary over all tokens: [..., V].

        Tokens outside the draft vocabulary get -inf.
        """
        if not self.config.draft_tokens:
            return logits
        return over_all_tokens(logits, self.draft_ids, self.config.vocab_size)

    def confidence(self, features: Tensor) -> Tensor | None:
        """Estimate the acceptance probability [...] of the next draft; None by default.

        The argument is the features [..., E] that the draft is sampled from.
        """
        return None

    @abstractmethod
    def new_state(self, n_rows: int) -> Any:
        """Create an empty :class:`~.caches.RowState` of B rows, ``state`` of the methods below."""

    def observe(self, state: Any, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        """Receive the target's hidden states of newly committed tokens; ignored by default.

        Args:
            state: the state of the rows.
            hidden: [B, n, E], after the final norm, or the concatenated outputs of the K
                :attr:`observed_layers`, [B, n, K * E].
            kept: for each row, the indices of the committed tokens among the n tokens, in order.
        """

    @abstractmethod
    def draft_root(
        self, state: Any, frozen: FrozenTarget, committed: Sequence[list[int]], cache: KVSource
    ) -> Tensor:
        """Start a round: drop the drafts, catch up with the committed tokens, and feed the root.

        A round may start again at the root of the previous round.

        Args:
            state: the state of the rows.
            frozen: the target.
            committed: for each row, the prompt and the generated tokens. The last one is the root;
                all tokens before it have target KV or contexts.
            cache: the target's KV, or the contexts.

        Returns:
            Features of the root [B, 1, E].
        """

    @abstractmethod
    def draft_level(
        self, state: Any, frozen: FrozenTarget, level: DraftLevel, cache: KVSource
    ) -> Tensor:
        """Feed the nodes of one level and return their features [B, b, E]."""

    # Decoding on another machine than the target

    def new_context_cache(self) -> ContextCache:
        """Create the empty cache that :meth:`take_context` fills and :meth:`draft_root` reads."""
        if self.context_width is None:
            raise DrafterError(
                f"a {self.kind} drafter can only draft on the machine of its target; "
                "`moa-data chat --help` lists the kinds that can draft over a network."
            )
        n_layers = self.config.n_layers
        return ContextCache(range(n_layers - self.config.target_layer_inference, n_layers))

    @torch.inference_mode()
    def encode_context(self, hidden: Tensor, kv: Tensor | None, positions: Tensor) -> Tensor:
        """Encode the contexts [n, W] of n positions [n] int64 that the target has processed.

        The positions may belong to several sequences.

        Args:
            hidden: [n, E] or [n, K * E], as :meth:`observe` gets them.
            kv: [n, L, D], packed KV of all layers. None unless :attr:`context_needs_kv`.
            positions: [n] int64.
        """
        return self._make_context(hidden, kv, positions).to(self.dtype)

    @torch.inference_mode()
    def take_context(self, state: Any, cache: ContextCache, context: Tensor, start: int) -> None:
        """Store the contexts [n, W] of the next n positions in a state of one row and in a cache.

        ``start`` is the first of the n positions. A round starts at a token whose predecessors all
        have contexts. Known tokens after it are fed as levels of a chain.
        """
        width = self.context_width
        next_position = cache.lengths[0]
        if context.ndim != 2 or context.shape[1] != width or start != next_position:
            raise DrafterError(
                f"contexts {list(context.shape)} from position {start} do not fit: expected "
                f"[n, {width}] from position {next_position}."
            )
        weight = next(self.parameters())
        self._take_context(state, cache, context.to(weight.device, weight.dtype))

    def reuse_context(
        self, state: Any, contexts: Tensor, starts: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Reuse contexts [B, n, W] that were encoded for sending, instead of encoding them again.

        The first ``counts[row]`` contexts of a row are real; they belong to the positions from
        ``starts[row]``. Contexts that do not continue the state are ignored. By default all
        contexts are ignored.
        """

    def _make_context(self, hidden: Tensor, kv: Tensor | None, positions: Tensor) -> Tensor:
        return hidden[:, :0]

    def _take_context(self, state: Any, cache: ContextCache, context: Tensor) -> None:
        cache.extend(len(context), None, 0)
