"""Medusa drafter (Cai et al., ICML 2024, arXiv 2401.10774): heads on one hidden state, each for a token further ahead.

Shapes: B rows, T tokens, Q queries, E target width, K heads, P loss positions, b nodes of one level.

    hidden state of token t -> x + silu(W x + c) per layer -> linear -> feature of token t+k (head k) -> LM head

Hidden states are the target's AFTER its final norm, and t is the last *verified* position. The target's own head makes
the root, the token at t+1, of it; head k makes the token at t+1+k, so it stands for the target's hidden state at t+k.
All nodes of a level share the distribution of one head, whatever the path to them, so a level costs no more than its
LM head, and K heads draft K levels.

This is Medusa-1 (section 2.2.1): the target is frozen. Two things differ from the released code. There each head ends
in an LM head of its own, V x E weights that start as the target's; here it is the target's LM head behind a linear
layer of the head's own, E x E weights that start as the identity, which starts out as the same function and costs E / V
of it. And heads learn the target's whole distribution where the released code learns the tokens of the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn import losses, masks
from ..target.bundle import FrozenTarget
from ..target.cache import TargetCache
from .base import DraftedFeatures, Drafter
from .rounds import Draws, at_queries, loss_queries
from .sizes import DrafterSizes, target_facts
from .training import DEFAULT_WEIGHTS, LossTerms, LossWeights, TrainingInputs, loss_scale

HEAD_DECAY = 0.8
"""Head k weighs this to the power of k (section 2.2.1): far tokens are uncertain, and their loss is large."""


@dataclass(frozen=True, kw_only=True)
class MedusaSizes(DrafterSizes):
    """Everything needed to rebuild a Medusa drafter and to know which target it belongs to."""

    kind: ClassVar[str] = "medusa"

    medusa_heads: int = 6
    """K, heads: the most levels of drafts."""
    medusa_layers: int = 1
    """Residual layers of each head."""

    def __post_init__(self) -> None:
        self.check_at_least_one("medusa_heads", "medusa_layers")

    @property
    def max_depth(self) -> int:
        """One level per head."""
        return self.medusa_heads

    @classmethod
    def from_target(cls, config: Any, target: dict[str, str] | None = None, **sizes: Any) -> Self:
        """Six heads of one layer where not given otherwise; see :meth:`DrafterSizes.from_target`."""
        given = {name: value for name, value in sizes.items() if value is not None}
        return cls(**target_facts(config, target), **given)


class MedusaState:
    """The target's hidden state of the last verified position of each row, [B, E]; None before the first."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        if self.hidden is not None:
            self.hidden = self.hidden[list(rows)]


class ResidualLayer(nn.Module):
    """x + silu(W x + c), W square (official ``medusa_model.py``, ``ResBlock``; there all layers of a head share W)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """Residual layers, then the linear layer that makes the target's LM head the head's own."""

    def __init__(self, width: int, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(ResidualLayer(width) for _ in range(n_layers)))
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., E] -> features [..., E]."""
        return self.projection(self.layers(hidden))


class MedusaDrafter(Drafter):
    """The trained part: the heads."""

    kind: ClassVar[str] = MedusaSizes.kind
    config_class: ClassVar[type[DrafterSizes]] = MedusaSizes
    config: MedusaSizes

    def __init__(self, config: MedusaSizes) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(
            MedusaHead(config.hidden_size, config.medusa_layers) for _ in range(config.medusa_heads)
        )

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None, std: float = 0.02, official: bool = False) -> None:
        """Begin where each head says what the target's own says: residual layers are 0, projections the identity.

        Args:
            generator: not used, for nothing is drawn.
            std: not used.
            official: not used; the released code begins there too.
        """
        for name, weight in self.named_parameters():
            if name.endswith("projection.weight"):
                nn.init.eye_(weight)
            else:
                weight.zero_()

    @classmethod
    def needs(cls, n_layers: int, target_layer_inference: int) -> dict[str, str]:
        """The last hidden state alone."""
        return {"hidden": "hidden/last"}

    def objective(
        self,
        frozen: FrozenTarget,
        inputs: TrainingInputs,
        draws: Draws,
        weights: LossWeights = DEFAULT_WEIGHTS,
        official: bool = False,
        denominator: float | None = None,
    ) -> LossTerms:
        """Loss of one mini-batch: the mean of the heads' forward KL, head k weighing ``HEAD_DECAY ** k``.

        Head k is trained where decoding can ask it: on positions that stand, with the k - 1 before them, in one
        response. Each head's sum is divided by the denominator, the number of loss positions of the first.
        """
        hidden = inputs.hidden.to(self.dtype)
        features, goals, shares = [], [], []
        reached = self.loss_positions(inputs.response_mask, draws, official)  # [B, T]
        n_positions = int(reached.sum())
        total_share = sum(HEAD_DECAY**k for k in range(1, len(self.heads) + 1))
        for k, head in enumerate(self.heads, start=1):
            mask = reached[:, k:]  # [B, T - k]; nothing is reached before position k
            features.append(head(hidden[:, : mask.shape[1]][mask]))  # [P_k, E], each from k positions before
            goals.append(hidden[:, k:][mask])
            shares.append(torch.full((len(goals[-1]),), HEAD_DECAY**k / total_share, device=hidden.device))
            reached = reached & F.pad(reached[:, :-1], (1, 0))  # the position before is reached too
        kl = losses.chunked_forward_kl(torch.cat(features), torch.cat(goals), frozen.lm_head_weight)
        mean = (kl * torch.cat(shares)).sum() * loss_scale(n_positions, denominator)
        return LossTerms(weights.forward_kl * mean, mean, None, n_positions)

    @torch.no_grad()
    def drafted_features(self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws) -> DraftedFeatures:
        """The heads at the context position of each round.

        Raises:
            DrafterError: a round has more steps than there are heads.
        """
        drafted = masks.drafted_positions(inputs.response_mask, draws.step_bound, draws.offset)
        drafted[:, :1] = False
        queries, valid = loss_queries(drafted)
        context = masks.last_context(drafted).gather(1, queries)
        step = torch.where(valid, queries - context, 0)  # k of the head that drafts there
        self.config.check_depth(int(step.max()))
        hidden = at_queries(inputs.hidden, context).to(self.dtype)
        features = torch.zeros_like(hidden)
        for k, head in enumerate(self.heads, start=1):
            features[step == k] = head(hidden[step == k]).to(features.dtype)
        return DraftedFeatures(queries, valid, features)

    def draft_logits(self, frozen: FrozenTarget, features: Tensor) -> Tensor:
        """The target's LM head on the features [..., E]: [..., V], computed once where all nodes of a level share them.

        Args:
            frozen: target pieces.
            features: as for :meth:`Drafter.draft_logits`.
        """
        if features.ndim == 3 and features.stride(1) == 0:
            return frozen.logits(features[:, :1]).expand(-1, features.shape[1], -1)
        return frozen.logits(features)

    def new_state(self, n_rows: int) -> MedusaState:
        """Nothing seen yet."""
        return MedusaState()

    def observe(self, state: MedusaState, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        """Keep the hidden state of the last committed token of each row."""
        last = torch.tensor([indices[-1] for indices in kept], device=hidden.device)
        state.hidden = hidden[torch.arange(len(kept), device=hidden.device), last].to(self.dtype)

    def root_features(
        self, state: MedusaState, frozen: FrozenTarget, committed: Sequence[list[int]], cache: TargetCache
    ) -> Tensor:
        """The first head; there is nothing to catch up with."""
        assert state.hidden is not None, "a target call comes before the first round"
        return self.heads[0](state.hidden)[:, None]

    def level_features(
        self,
        state: MedusaState,
        frozen: FrozenTarget,
        tokens: Tensor,
        parent_features: Tensor,
        seen: Tensor,
        level: int,
        cache: TargetCache,
    ) -> Tensor:
        """The head of the level, the same for all of its nodes."""
        assert state.hidden is not None
        features: Tensor = self.heads[level](state.hidden)[:, None]
        return features.expand(-1, tokens.shape[1], -1)
