"""What shapes of drafts cost and commit: measured seconds, counted acceptance, and the fastest shape by both.

A round of a shape with depth d, breadth b and n nodes commits E(d, b, n) tokens and takes
draft(d, b) + verify(1 + n) + rest seconds; plain decoding commits one in verify(1). The fastest shape is the one with
the best ratio, and plain decoding is one of the candidates, so that drafting is used only where it pays.

E is counted, not modelled: a few answers are decoded with a wide tree, and each accepted node tells for which smaller
shapes it would have been drafted too. What a shape's rounds would have been is approximated by the wide tree's rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .tree import DraftTree, TreeShape

WIDEST = TreeShape(6, 8, 62)
"""The official tree of EAGLE-2 and MoA: seven levels with the root."""
BREADTHS = (1, 2, 4, 8)
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
    """

    verify_s: dict[int, float]
    root_s: dict[int, float]
    level_s: dict[int, float]
    rest_s: float = 0.0
    prompt_token_s: float = 0.0

    def verification_s(self, n_tokens: int) -> float:
        """Seconds of a target call over n tokens per row, interpolated."""
        return float(np.interp(n_tokens, list(self.verify_s), list(self.verify_s.values())))

    def round_s(self, shape: TreeShape | None) -> float:
        """Seconds of a round; None for plain decoding."""
        if shape is None:
            return self.verification_s(1)
        draft_s = self.root_s[shape.breadth] + (shape.depth - 1) * self.level_s[shape.breadth]
        return draft_s + self.verification_s(1 + n_nodes_of(shape)) + self.rest_s


@dataclass
class AcceptanceLog:
    """For each shape, how many of a wide tree's accepted nodes it would have drafted as well."""

    n_rounds: int = 0
    needed: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(breadth, depth) -> for each accepted node that a tree of this breadth and depth drafts, how many nodes the tree
    must have to hold it."""

    def observe(self, drafts: DraftTree, accepted: Sequence[Sequence[int]]) -> None:
        """Count a round of each row.

        Args:
            drafts: of the wide tree, with scores.
            accepted: per row the accepted nodes from the root down.
        """
        self.n_rounds += len(accepted)
        if drafts.scores is None or not drafts.n_nodes:
            return
        for row, nodes in enumerate(accepted):
            if not nodes:
                continue
            parents, scores = drafts.parents[row].tolist(), drafts.scores[row].tolist()
            for breadth in BREADTHS:
                depths = np.array(_depths_within(parents, scores, breadth))
                for depth in range(1, WIDEST.depth + 1):
                    drafted = (depths > 0) & (depths <= depth)
                    self.needed.setdefault((breadth, depth), []).extend(
                        1 + int((drafted & (np.array(scores) > scores[node])).sum()) for node in nodes if drafted[node]
                    )

    def committed(self, shape: TreeShape | None) -> float:
        """Tokens per target call that a shape would have had, the bonus included."""
        if shape is None or not self.n_rounds:
            return 1.0
        needed = self.needed.get((shape.breadth, shape.depth), ())
        return 1.0 + sum(n <= n_nodes_of(shape) for n in needed) / self.n_rounds


def fastest(costs: DecodingCosts, log: AcceptanceLog) -> tuple[TreeShape | None, float]:
    """The shape with the best expected speed, and its ratio to plain decoding's; None for plain decoding.

    Args:
        costs: of the parts of a round.
        log: of acceptance.
    """
    plain = 1.0 / costs.round_s(None)
    best: tuple[TreeShape | None, float] = (None, 1.0)
    for shape in candidates():
        ratio = log.committed(shape) / costs.round_s(shape) / plain
        if ratio > max(best[1], MARGIN):
            best = (shape, ratio)
    return best


def candidates() -> list[TreeShape]:
    """Chains and trees up to the widest."""
    chains = [TreeShape(depth) for depth in range(1, WIDEST.depth + 1)]
    trees = [
        TreeShape(depth, breadth, n_nodes)
        for breadth in BREADTHS[1:]
        for depth in range(1, WIDEST.depth + 1)
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
