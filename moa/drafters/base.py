"""What a drafter is: the one interface behind which training, validation, checkpoints and decoding know it.

A drafter is a file of this folder with a subclass of :class:`Drafter` and its :class:`~.config.DrafterSizes`, entered
in ``registry.DRAFTERS``. Token positions are absolute. The *root* is the last committed token, which has no target
activations yet; *features* of a position stand for the target's hidden state there after its final norm, so the LM head
turns them into the distribution of the next token.

Shapes: B rows, T tokens, Q queries, E target width, b nodes of one level, n nodes fed in a round.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ..target.bundle import FrozenTarget
from ..target.cache import TargetCache
from .rounds import Draws
from .sizes import DrafterSizes
from .training import DEFAULT_WEIGHTS, LossTerms, LossWeights, TrainingInputs


@dataclass
class DraftedFeatures:
    """Features as decoding would draft them, for validation."""

    queries: Tensor
    """[B, Q] int64, positions."""
    valid: Tensor
    """[B, Q] bool; the others are padding."""
    features: Tensor
    """[B, Q, E]."""


class DraftState(Protocol):
    """A drafter's caches of B rows while decoding."""

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        ...


class Drafter(nn.Module, ABC):
    """The trained part of a drafter."""

    kind: ClassVar[str]
    """Its name in ``drafter.json`` and on the command line."""
    config_class: ClassVar[type[DrafterSizes]]
    training_options: ClassVar[frozenset[str]] = frozenset()
    """Settings of a training run that mean something for this drafter alone; its sizes need not be named."""
    kv_layers: ClassVar[tuple[int, ...] | None] = None
    """Layers of the target's KV that training reads, negative ones counted from the last; None for all. Where it
    depends on the run, see :meth:`layers_read`."""

    config: Any
    """A ``config_class``."""

    @property
    def observed_layers(self) -> tuple[int, ...]:
        """Decoder layers of the target whose outputs :meth:`observe` gets; none for the last hidden state instead."""
        return ()

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.parameters()).dtype

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None, std: float = 0.02, official: bool = False) -> None:
        """Draw the starting weights: N(0, std) for matrices, 0 for biases, 1 for norms.

        Args:
            generator: of the draws.
            std: standard deviation of the matrices.
            official: norms are drawn from N(0, std) too, as the official code does by accident (``train/moa_spec.py``,
                lines 78-91, ``train/eagle.py``, lines 76-79); it costs about half of the acceptance length of a short
                run.
        """
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                weight.zero_()
            elif official:
                weight.normal_(0.0, std, generator=generator)
            else:
                weight.fill_(1.0)

    @classmethod
    @abstractmethod
    def needs(cls, n_layers: int, target_layer_inference: int) -> dict[str, str]:
        """What training reads besides tokens and response masks.

        Args:
            n_layers: decoder layers of the target.
            target_layer_inference: N, 0 for none.

        Returns:
            Attribute of :class:`~.objective.TrainingInputs` -> field of the store.
        """

    @classmethod
    def layers_read(cls, target_layer_inference: int, layer_attention: bool) -> tuple[int, ...] | None:
        """Layers of the target's KV that a run reads; here ``kv_layers``.

        Args:
            target_layer_inference: N, 0 for none.
            layer_attention: whether the drafter has a layer self-attention, where it can have one.
        """
        return cls.kv_layers

    @classmethod
    def needed_layers(cls, n_layers: int, fused_layers: tuple[int, ...] | None) -> tuple[int, ...]:
        """Decoder layers whose outputs training reads too, see ``TrainingInputs.layer_outputs``; by default none.

        Args:
            n_layers: decoder layers of the target.
            fused_layers: the user's choice; None where there is none.
        """
        return ()

    def adopt(self, frozen: FrozenTarget, count_tokens: Callable[[], Tensor]) -> None:
        """Take over what the starting weights owe to target and data, after :meth:`initialize`; by default nothing.

        Args:
            frozen: target pieces.
            count_tokens: gives how often each token of the vocabulary occurs in the responses of the training
                sequences, [V] int64; called only where that is needed, for it reads all of them.
        """

    @classmethod
    def loss_positions(cls, response_mask: Tensor, draws: Draws, official: bool) -> Tensor:
        """Weight of each position in the loss: [B, T] of numbers or bool, from response masks [B, T].

        Here the response; the first position of a sequence has nothing of the target's before it.
        """
        response = response_mask.bool().clone()
        response[:, :1] = False
        return response

    @abstractmethod
    def objective(
        self,
        frozen: FrozenTarget,
        inputs: TrainingInputs,
        draws: Draws,
        weights: LossWeights = DEFAULT_WEIGHTS,
        official: bool = False,
        denominator: float | None = None,
    ) -> LossTerms:
        """Loss of one mini-batch.

        Args:
            frozen: target pieces.
            inputs: stored activations.
            draws: random draws of this step.
            weights: of the terms.
            official: repeat the released code where it differs from what decoding sees.
            denominator: what the sums are divided by; the number of loss positions (+ 1e-5) where None.
        """

    @abstractmethod
    def drafted_features(self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws) -> DraftedFeatures:
        """Features of every drafted position of ``masks.drafted_positions``, each as its draft round gives them.

        A round starts behind a context position; the drafter sees target activations up to that one only, and the text
        of the batch in place of its own drafts.
        """

    def draft_logits(self, frozen: FrozenTarget, features: Tensor) -> Tensor:
        """What decoding and validation draft from; here the target's LM head on the features.

        Args:
            frozen: target pieces.
            features: [..., E] of :meth:`root_features`, :meth:`level_features` or :meth:`drafted_features`.

        Returns:
            [..., V] over the target's vocabulary; -inf where the drafter can't draft a token.
        """
        return frozen.logits(features)

    @abstractmethod
    def new_state(self, n_rows: int) -> Any:
        """An empty :class:`DraftState` of B rows, which the methods below get back."""

    def observe(self, state: Any, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        """Take the target's hidden states of tokens that were just committed; by default nothing is done with them.

        Args:
            state: of :meth:`new_state`.
            hidden: [B, n, E], after the final norm, of a target call; [B, n, K * E] where there are K
                :attr:`observed_layers`, one behind the other.
            kept: per row which of the n tokens were committed, in order.
        """

    @abstractmethod
    def root_features(
        self, state: Any, frozen: FrozenTarget, committed: Sequence[list[int]], cache: TargetCache
    ) -> Tensor:
        """First draft step of a round: catch up with what was committed, forget what was drafted, and feed the root.

        Args:
            state: of :meth:`new_state`.
            frozen: target pieces.
            committed: per row prompt and generated tokens; the last one is the root, all others have target KV.
            cache: the target's KV.

        Returns:
            Features of the root [B, 1, E].
        """

    @abstractmethod
    def level_features(
        self,
        state: Any,
        frozen: FrozenTarget,
        tokens: Tensor,
        parent_features: Tensor,
        seen: Tensor,
        level: int,
        cache: TargetCache,
    ) -> Tensor:
        """Later draft step of a round: feed the nodes of one level of the tree.

        Args:
            state: of :meth:`new_state`.
            frozen: target pieces.
            tokens: [B, b] int64, nodes of this level.
            parent_features: [B, b, E], what this or :meth:`root_features` gave for the parent of each node.
            seen: [B, b, n] bool, which of the n tokens fed in this round each node sees: the root first, then all nodes
                level by level, itself included.
            level: of these nodes, 1 for the children of the root.
            cache: the target's KV.

        Returns:
            Features of the nodes [B, b, E].
        """
