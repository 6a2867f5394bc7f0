"""Medusa drafter: several heads read the same hidden state, and predict tokens at later positions.

Cai et al., ICML 2024, arXiv 2401.10774.

Shapes: B rows, T tokens, Q queries, E target width, K heads, P loss positions, b nodes of one
level.

    hidden state of token t -> x + silu(W x + c) per layer -> linear
                            -> feature of token t+k (head k) -> LM head

Hidden states are the target's states AFTER its final norm, and t is the last *verified* position.
The target's own LM head predicts the root, the token at t+1, from this state. Head k predicts the
token at t+1+k. Head k drafts level k of a draft tree, so K heads draft K levels. A head does not
know the drafts of other heads, so all drafts of a level have the same distribution.

This is Medusa-1 (section 2.2.1 of the Medusa paper): the target is frozen. There are two
differences from the authors' code:

- In the authors' code, each head ends in its own LM head with V x E weights, which are initialized
  from the target's LM head. Here each head ends in a linear layer with E x E weights, which are
  initialized as the identity, followed by the target's LM head. At the start of training, both
  forms compute the same function.
- In the authors' code, the heads learn the tokens of the training text. Here they learn the
  target's whole distribution.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from ..nn import losses
from ..nn.masks import to_device
from ..targets.bundle import FrozenTarget
from ..targets.cache import KVSource
from .base import CommittedTokens, DraftedFeatures, Drafter, DraftLevel
from .caches import RowState
from .sizes import DrafterSizes, Size
from .training import (
    Draws,
    LossTerms,
    TrainingInputs,
    TrainingStep,
    at_queries,
    round_queries,
    true_indices,
)

# The loss weight of head k is ``HEAD_DECAY ** k`` (section 2.2.1 of the Medusa paper). Heads that
# predict further ahead have less weight, because the tokens that they predict are less certain.
HEAD_DECAY = 0.8


@dataclass(frozen=True, kw_only=True)
class MedusaSizes(DrafterSizes):
    """The sizes of a Medusa drafter, and the hashes that identify its target."""

    kind = "medusa"

    medusa_heads: Size = 6  # K, number of heads and maximum number of draft levels.
    medusa_layers: Size = 1  # Number of residual layers of each head.

    @property
    @override
    def max_depth(self) -> int:
        return self.medusa_heads


class MedusaState(RowState):
    """The target's hidden state of the last verified position of each row, [B, E]."""

    hidden: Tensor


class ResidualLayer(nn.Module):
    """Computes x + silu(W x + c), where W is a square matrix and c a bias.

    Here each layer has its own W. In the Medusa authors' ``medusa_model.py`` all layers of a head
    share one W.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x [..., E]."""
        return x + F.silu(self.linear(x))


def medusa_head(width: int, n_layers: int) -> nn.Sequential:
    """Make the residual layers of a head, and the linear layer before the target's LM head."""
    layers = nn.Sequential(*(ResidualLayer(width) for _ in range(n_layers)))
    projection = nn.Linear(width, width, bias=False)
    return nn.Sequential(OrderedDict(layers=layers, projection=projection))


class MedusaDrafter(Drafter):
    """The trained weights: the heads."""

    config_class = MedusaSizes
    config: MedusaSizes

    def __init__(self, config: MedusaSizes) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(
            medusa_head(config.hidden_size, config.medusa_layers)
            for _ in range(config.medusa_heads)
        )

    @override
    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Initialize each head so that it returns its input unchanged.

        The weights of residual layers are 0, and the final linear layers are the identity.
        """
        for name, weight in self.named_parameters():
            if name.endswith("projection.weight"):
                nn.init.eye_(weight)
            else:
                weight.zero_()

    @override
    def objective(self, frozen: FrozenTarget, step: TrainingStep) -> LossTerms:
        """Compute the loss of one mini-batch: the weighted mean of the heads' forward KL."""
        # Head k is trained at the positions for which it could draft in decoding: the position and
        # the k - 1 positions before it must be in the same response. For all heads, the sum of the
        # losses is divided by the number of loss positions of the first head.
        inputs = step.inputs
        hidden = inputs.hidden.to(self.dtype)
        # One mask [B, T] per head: the positions at which the head is trained.
        reached = [self.loss_positions(inputs.response_mask, step.draws)]
        for _ in self.heads[1:]:
            # Head k is trained at position t if head k - 1 is trained at the positions t and t - 1.
            reached.append(reached[-1] & F.pad(reached[-1][:, :-1], (1, 0)))
        every = torch.stack(reached)
        counts = every.sum(dim=(1, 2)).tolist()
        total_share = sum(HEAD_DECAY**k for k in range(1, len(self.heads) + 1))
        shares = [HEAD_DECAY**k / total_share for k in range(1, len(self.heads) + 1)]
        # Three tensors [P] int64. For each loss position of each head, they contain the index k - 1
        # of the head, the row, and the position.
        indices, rows, positions = true_indices(every)
        # Head k reads the hidden state that is k positions before the loss position. So head k is
        # not trained at positions below k.
        read = hidden[rows, positions - (indices + 1)].split(counts)
        features = [head(states) for head, states in zip(self.heads, read, strict=True)]
        kl, _ = losses.chunked_losses(
            torch.cat(features)[:, None],
            hidden[rows, positions],
            frozen.lm_head_weight,
            to_device(shares, hidden.device)[indices, None, None],
            divergence=step.weights.divergence,
            cap=frozen.logit_cap,
        )
        mean = kl * step.scale(counts[0])
        return {"loss": step.weights.forward_kl * mean, "forward_kl": mean}

    @override
    def drafted_features(
        self, frozen: FrozenTarget, inputs: TrainingInputs, draws: Draws
    ) -> DraftedFeatures:
        """Compute the features of drafts from the last verified hidden state of each round."""
        queries, valid, context = round_queries(inputs.response_mask, draws)
        # The number k of the head that drafts each position; 0 for padding.
        step = torch.where(valid, queries - context, 0)
        self.config.check_depth(int(step.max()))
        hidden = at_queries(inputs.hidden, context).to(self.dtype)
        features = torch.zeros_like(hidden)
        for k, head in enumerate(self.heads, start=1):
            features[step == k] = head(hidden[step == k]).to(features.dtype)
        return DraftedFeatures(queries, valid, features)

    @override
    def draft_logits(self, frozen: FrozenTarget, features: Tensor) -> Tensor:
        # All drafts of a level have the same features, in an expanded tensor with stride 0. So
        # compute the logits of a level only once.
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
        committed: CommittedTokens,
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
