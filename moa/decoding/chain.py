"""One chain of drafts per row, grown level by level with a trained drafter.

Shapes: B rows, E features, V vocabulary.

What was fed stays in the drafter's caches until the next root, wrong drafts included. A chain that goes on from one of
its own levels is a branch of a tree, in which a node sees its ancestors alone::

    fed            root  the  mat  .          go back to "the", feed "rug"
    path           root  the       rug
    "rug" sees       x    x         x         at the position of "mat"
"""

import torch
from torch import Tensor

from ...errors import DrafterError
from ..drafters.base import Drafter, DraftLevel
from ..targets.bundle import FrozenTarget
from ..targets.cache import KVSource


class Chain:
    """The chains of a round, one a row, all of one depth.

    Args:
        features: [B, 1, E] of the root, from ``Drafter.draft_root``.
    """

    def __init__(
        self, drafter: Drafter, frozen: FrozenTarget, state: object, cache: KVSource, features: Tensor
    ) -> None:
        self._drafter, self._frozen, self._state, self._cache = drafter, frozen, state, cache
        self._path = [(0, features)]  # of the root and each level: its place among what was fed, and its features
        self._n_fed = 1

    @property
    def depth(self) -> int:
        """The number of levels below the root."""
        return len(self._path) - 1

    @property
    def logits(self) -> Tensor:
        """The drafter's logits behind the last level: [B, V]."""
        return self._drafter.draft_logits(self._frozen, self._path[-1][1][:, 0])

    @property
    def confidence(self) -> Tensor:
        """The probability that the next draft is accepted, as the drafter tells it: [B] float32.

        Raises:
            DrafterError: it tells nothing.
        """
        found = self._drafter.confidence(self._path[-1][1][:, 0])
        if found is None:
            raise DrafterError(
                f"this {self._drafter.kind} drafter has no confidence head to cut chains by; give a chain's length "
                "such as 7, or LENGTH@PROBABILITY such as 10@0.2."
            )
        return found.float()

    def feed(self, tokens: Tensor) -> None:
        """Add a level of tokens [B, 1] int64."""
        seen = torch.ones(len(tokens), 1, self._n_fed + 1, dtype=torch.bool, device=tokens.device)
        if len(self._path) < self._n_fed:
            own = {place for place, _ in self._path}
            seen[..., [place for place in range(self._n_fed) if place not in own]] = False
        level = DraftLevel(tokens, self._path[-1][1], seen, len(self._path))
        features = self._drafter.draft_level(self._state, self._frozen, level, self._cache)
        self._path.append((self._n_fed, features))
        self._n_fed += 1

    def back_to(self, depth: int) -> None:
        """Go on from an earlier level; 0 is the root."""
        del self._path[depth + 1 :]
