"""What shapes of drafts cost and commit: measured seconds, counted acceptance, and the fastest shape by both.

A round of a shape with depth d, breadth b and n nodes commits E(d, b, n) tokens and takes
draft(d, b) + verify(1 + n) + rest seconds; plain decoding commits one in verify(1). The fastest shape is the one with
the best ratio, and plain decoding is one of the candidates, so that drafting is used only where it pays.

E is counted, not modelled: a few answers are decoded with a wide tree, and each accepted node tells for which smaller
shapes it would have been drafted too. What a shape's rounds would have been is approximated by the wide tree's rounds.
Of a chain that stops by its probability the mean number of drafts is counted likewise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .tree import DraftTree, TreeShape

WIDEST = TreeShape(10, 8, 62)
"""The official tree of EAGLE-2 and MoA but for its depth, six: chains that stop gain from ten levels."""
BREADTHS = (1, 2, 4, 8)
STOPS = (0.05, 0.1, 0.2, 0.3)
"""Probabilities below which chains may stop."""
MARGIN = 1.03
"""Drafting must promise this many times plain decoding's speed: below it, the estimate's error decides."""


@dataclass(frozen=True)
class DecodingCosts:
    """Seconds of the parts of a round, for all rows of a batch together.

    Attributes:
        verify_s: tokens per row in a target call -> its seconds, not falling.
        root_s: breadth -> seconds of the first level of drafts.
        level_s: breadth -> seconds of each further level.
        rest_s: seconds of a round outside of drafting and the target call, and of reading what was just committed.
        prompt_token_s: seconds that the drafter needs for each token of a prompt before its first draft.
        stop_s: seconds of asking whether a chain stops, for each of its drafts but the last.
    """

    verify_s: dict[int, float]
    root_s: dict[int, float]
    level_s: dict[int, float]
    rest_s: float = 0.0
    prompt_token_s: float = 0.0
    stop_s: float = 0.0

    def verification_s(self, n_tokens: float) -> float:
        """Seconds of a target call over n tokens per row, interpolated."""
        return float(np.interp(n_tokens, list(self.verify_s), list(self.verify_s.values())))

    def draft_s(self, shape: TreeShape, n_drafts: float | None = None) -> float:
        """Seconds of the drafts of a round.

        Args:
            shape: of the drafts.
            n_drafts: of a chain that stopped, or its mean; None for all levels.
        """
        n_levels = shape.depth if n_drafts is None else n_drafts
        n_asked = min(n_levels, shape.depth - 1) if shape.stop_below else 0
        return self.root_s[shape.breadth] + (n_levels - 1) * self.level_s[shape.breadth] + n_asked * self.stop_s

    def round_s(self, shape: TreeShape | None, n_drafts: float | None = None) -> float:
        """Seconds of a round; None for plain decoding, ``n_drafts`` as in :meth:`draft_s`."""
        if shape is None:
            return self.verification_s(1)
        n_nodes = n_nodes_of(shape) if n_drafts is None else n_drafts
        return self.draft_s(shape, n_drafts) + self.verification_s(1 + n_nodes) + self.rest_s


@dataclass
class AcceptanceLog:
    """For each shape, how many of a wide tree's accepted nodes it would have drafted as well."""

    n_rounds: int = 0
    needed: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(breadth, depth) -> for each accepted node that a tree of this breadth and depth drafts, how many nodes the tree
    must have to hold it."""
    chains: list[tuple[list[float], list[int]]] = field(default_factory=list)
    """Of each call: how probable the drafter's likeliest chain was up to each of its drafts, the mean of the rows, and
    how many of these drafts each row accepted."""
    widest: TreeShape = WIDEST
    """The wide tree's shape; of deeper ones nothing is known."""

    def observe(self, drafts: DraftTree, accepted: Sequence[Sequence[int]]) -> None:
        """Count a round of each row.

        Args:
            drafts: of the wide tree, with scores.
            accepted: per row the accepted nodes from the root down.
        """
        self.n_rounds += len(accepted)
        if drafts.scores is None or not drafts.n_nodes:
            return
        self._observe_chains(drafts, accepted)
        for row, nodes in enumerate(accepted):
            if not nodes:
                continue
            parents, scores = drafts.on_host[1][row], drafts.scores[row].tolist()
            for breadth in BREADTHS:
                depths = np.array(_depths_within(parents, scores, breadth))
                for depth in range(1, self.widest.depth + 1):
                    drafted = (depths > 0) & (depths <= depth)
                    self.needed.setdefault((breadth, depth), []).extend(
                        1 + int((drafted & (np.array(scores) > scores[node])).sum()) for node in nodes if drafted[node]
                    )

    def committed(self, shape: TreeShape | None) -> float:
        """Tokens per target call that a shape would have had, the bonus included."""
        if shape is None or not self.n_rounds:
            return 1.0
        if shape.stop_below:
            calls = zip(self.chains, self._stops(shape), strict=True)
            return 1.0 + sum(min(n, stop) for (_, accepted), stop in calls for n in accepted) / self.n_rounds
        needed = self.needed.get((shape.breadth, shape.depth), ())
        return 1.0 + sum(n <= n_nodes_of(shape) for n in needed) / self.n_rounds

    def n_drafts(self, shape: TreeShape | None) -> float | None:
        """Mean drafts of a chain that stops by its probability; None for other shapes, whose costs need no count."""
        if shape is None or not shape.stop_below:
            return None
        return float(np.mean(self._stops(shape))) if self.chains else float(shape.depth)

    def _stops(self, shape: TreeShape) -> list[int]:
        """Drafts that such a chain would have had in each call."""
        return [
            min(shape.depth, 1 + sum(probability >= shape.stop_below for probability in probabilities))
            for probabilities, _ in self.chains
        ]

    def _observe_chains(self, drafts: DraftTree, accepted: Sequence[Sequence[int]]) -> None:
        assert drafts.scores is not None
        probabilities, n_accepted = np.zeros(self.widest.depth), []
        for row, nodes in enumerate(accepted):
            scores = drafts.scores[row].tolist()
            depths = _depths_within(drafts.on_host[1][row], scores, 1)
            for node, depth in enumerate(depths):
                if depth > 0:
                    probabilities[depth - 1] += np.exp(scores[node]) / len(accepted)
            n_accepted.append(sum(depths[node] > 0 for node in nodes))
        self.chains.append((probabilities.tolist(), n_accepted))


def fastest(costs: DecodingCosts, log: AcceptanceLog, is_drawn: bool = False) -> tuple[TreeShape | None, float]:
    """The shape with the best expected speed, and its ratio to plain decoding's; None for plain decoding.

    Args:
        costs: of the parts of a round.
        log: of acceptance.
        is_drawn: as of :func:`candidates`.
    """
    plain = 1.0 / costs.round_s(None)
    best: tuple[TreeShape | None, float] = (None, 1.0)
    for shape in candidates(is_drawn, log.widest):
        ratio = log.committed(shape) / costs.round_s(shape, log.n_drafts(shape)) / plain
        if ratio > max(best[1], MARGIN):
            best = (shape, ratio)
    return best


def candidates(is_drawn: bool = False, widest: TreeShape = WIDEST) -> list[TreeShape]:
    """Chains and trees up to the widest.

    Args:
        is_drawn: whether chains are drawn, which then do not stop by their probability.
        widest: none has more levels.
    """
    chains = [TreeShape(depth) for depth in range(1, widest.depth + 1)]
    if not is_drawn and widest.depth > 1:
        chains += [TreeShape(widest.depth, stop_below=probability) for probability in STOPS]
    trees = [
        TreeShape(depth, breadth, n_nodes)
        for breadth in BREADTHS[1:]
        for depth in range(1, widest.depth + 1)
        for n_nodes in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 62)
        if max(depth, 2) <= n_nodes <= TreeShape(depth, breadth).n_candidates
    ]
    return chains + trees


def n_nodes_of(shape: TreeShape) -> int:
    """Nodes that a tree of this shape has: no more than its levels give."""
    return min(shape.n_nodes, shape.n_candidates)


def _depths_within(parents: Sequence[int], scores: Sequence[float], breadth: int) -> list[int]:
    """Depth of each node that a tree of smaller breadth would have drafted too, from 1; -1 for the others.

    Such a node is among the best ``breadth`` children of its parent, and its parent among the best of its level.
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    by_parent: dict[int, list[int]] = {}
    by_depth: dict[int, list[int]] = {}
    for node in sorted(range(len(parents)), key=lambda node: -scores[node]):
        by_parent.setdefault(parents[node], []).append(node)
        by_depth.setdefault(depths[node], []).append(node)
    extended = {-1} | {node for nodes in by_depth.values() for node in nodes[:breadth]}
    kept = {node for parent, nodes in by_parent.items() if parent in extended for node in nodes[:breadth]}
    within = [-1] * len(parents)
    for node, parent in enumerate(parents):
        if node in kept and (parent < 0 or within[parent] > 0):
            within[node] = depths[node]
    return within
