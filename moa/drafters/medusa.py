"""Medusa drafter: heads on one hidden state, each of which predicts a token further ahead.

Cai et al., ICML 2024, arXiv 2401.10774.

Shapes: B rows, T tokens, Q queries, E target width, K heads, P loss positions, b nodes of one
level.

    hidden state of token t -> x + silu(W x + c) per layer -> linear
                            -> feature of token t+k (head k) -> LM head

Hidden states are the target's states AFTER its final norm, and t is the last *verified* position.
The target's own LM head turns this state into the root, the token at t+1. Head k predicts the token
at t+1+k. All nodes of a level have the distribution of one head, whatever path leads to them, and K
heads draft K levels.

This is Medusa-1 (section 2.2.1): the target is frozen. In the released code each head ends in its
own LM head, V x E weights that start as those of the target. Here each head has E x E weights that
start as the identity, followed by the target's LM head. The two are the same function at the start.
The heads learn the target's whole distribution; those of the released code learn the tokens of the
text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from ..nn import losses
from ..nn.masks import to_device
from ..targets.bundle import FrozenTarget
from ..targets.cache import KVSource
from .base import DraftedFeatures, Drafter, DraftLevel
from .caches import RowState
from .sizes import DrafterSizes
from .training import (
    Draws,
    LossTerms,
    TrainingInputs,
    TrainingStep,
    at_queries,
    places,
    round_queries,
)

# The loss weight of head k is HEAD_DECAY ** k (section 2.2.1), because far tokens are uncertain.
HEAD_DECAY = 0.8


@dataclass(frozen=True, kw_only=True)
class MedusaSizes(DrafterSizes):
    """The sizes of a Medusa drafter, and the identity of its target."""

    kind: ClassVar[str] = "medusa"

    medusa_heads: int = 6  # K, number of heads and upper bound of draft levels
    medusa_layers: int = 1  # residual layers of each head

    @property
    @override
    def max_depth(self) -> int:
        return self.medusa_heads


class MedusaState(RowState):
    """The target's hidden state of the last verified position of each row, [B, E]."""

    hidden: Tensor


class ResidualLayer(nn.Module):
    """Computes x + silu(W x + c) with a square W.

    In the official ``medusa_model.py`` all layers of a head share W.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: [..., E] -> [..., E]."""
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """Residual layers, followed by a linear layer before the target's LM head."""

    def __init__(self, width: int, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(ResidualLayer(width) for _ in range(n_layers)))
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Turn hidden states [..., E] into features [..., E]."""
        features: Tensor = self.projection(self.layers(hidden))
        return features


class MedusaDrafter(Drafter):
    """The trained part: the heads."""

    config_class: ClassVar[type[DrafterSizes]] = MedusaSizes
    config: MedusaSizes

    def __init__(self, config: MedusaSizes) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(
            MedusaHead(config.hidden_size, config.medusa_layers) for _ in range(config.medusa_heads)
        )

    @override
    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Start with heads that predict like the target.

        Residual layers start at 0, projections as the identity.
        """
        for name, weight in self.named_parameters():
            if name.endswith("projection.weight"):
                nn.init.eye_(weight)
            else:
                weight.zero_()

    @override
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of a mini-batch: the mean forward KL of the heads.

        Head k has the weight ``HEAD_DECAY ** k``.
        """
        # Head k is trained at the positions at which decoding can use it: those that are in one
        # response with the k - 1 positions before them. The sum of each head is divided by the
        # number of loss positions of the first head.
        inputs = step.inputs
        hidden = inputs.hidden.to(self.dtype)
        features = []
        shares = []
        # One [B, T] per head, the positions that the head is trained at.
        reached = [self.loss_positions(inputs.response_mask, step.draws)]
        for _ in self.heads[1:]:
            # The previous head must reach the position, and the position before it.
            reached.append(reached[-1] & F.pad(reached[-1][:, :-1], (1, 0)))
        every = torch.stack(reached)
        counts = every.sum(dim=(1, 2)).tolist()
        n_positions = counts[0]
        total_share = sum(HEAD_DECAY**k for k in range(1, len(self.heads) + 1))
        # Head k reaches no position before k, so the index of the hidden state is never negative.
        _, rows, positions = places(every)
        of_heads = zip(self.heads, rows.split(counts), positions.split(counts), strict=True)
        for k, (head, head_rows, head_positions) in enumerate(of_heads, start=1):
            # [P_k, E], computed from the hidden state k positions earlier.
            features.append(head(hidden[head_rows, head_positions - k]))
            shares.append(
                torch.full(
                    (len(head_positions),), HEAD_DECAY**k / total_share, device=hidden.device
                )
            )
        kl, _ = losses.chunked_losses(
            torch.cat(features)[:, None], hidden[rows, positions], frozen.lm_head_weight,
            torch.cat(shares)[:, None, None], divergence=step.weights.divergence,
            cap=frozen.logit_cap,
        )  # fmt: skip
        mean = kl * step.scale(n_positions)
        return LossTerms(step.weights.forward_kl * mean, mean, None, n_positions)

    @override
    def drafted_features(
        self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws
    ) -> DraftedFeatures:
        """Run the heads at the context position of each round."""
        queries, valid, context = round_queries(inputs.response_mask, draws)
        step = torch.where(valid, queries - context, 0)  # k of the head that drafts the position
        self.config.check_depth(int(step.max()))
        hidden = at_queries(inputs.hidden, context).to(self.dtype)
        features = torch.zeros_like(hidden)
        for k, head in enumerate(self.heads, start=1):
            features[step == k] = head(hidden[step == k]).to(features.dtype)
        return DraftedFeatures(queries, valid, features)

    @override
    def draft_logits(self, frozen: FrozenTarget, features: Tensor) -> Tensor:
        # If all nodes of the level share their features, the logits are computed once.
        if features.ndim == 3 and features.stride(1) == 0:
            return super().draft_logits(frozen, features[:, :1]).expand(-1, features.shape[1], -1)
        return super().draft_logits(frozen, features)

    @override
    def new_state(self, n_rows: int) -> MedusaState:
        return MedusaState()

    @override
    def observe(self, state: MedusaState, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        last = to_device([indices[-1] for indices in kept], hidden.device)
        state.hidden = hidden[torch.arange(len(kept), device=hidden.device), last].to(self.dtype)

    @override
    def draft_root(
        self,
        state: MedusaState,
        frozen: FrozenTarget,
        committed: Sequence[list[int]],
        cache: KVSource,
    ) -> Tensor:
        features: Tensor = self.heads[0](state.hidden)[:, None]
        return features

    @override
    def draft_level(
        self, state: MedusaState, frozen: FrozenTarget, level: DraftLevel, cache: KVSource
    ) -> Tensor:
        features: Tensor = self.heads[level.depth](state.hidden)[:, None]
        return features.expand(-1, level.tokens.shape[1], -1)
