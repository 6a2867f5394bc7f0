"""Draft trees: their shapes, the choice of nodes among candidates, and masks of ancestors.

Shapes: B rows, N nodes (drafts, without the root), C candidates for nodes.

Nodes are in level order: a node comes before all nodes of deeper levels. A parent is given by its
node index, or by -1 for the root. The root is the last committed token, and does not count as a
node. The target processes the root together with the nodes, so the mask of :func:`ancestors`
includes the root, as its first token.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...errors import DrafterError

_MAX_CANDIDATES = 1 << 16
_SHAPE = re.compile(r"([0-9]+)(?:x([0-9]+)x([0-9]+)|@(0?\.[0-9]+|0)|c(0?\.[0-9]+|0))?")
# Token id that pads rows with fewer drafts than others. The target never chooses it, so it is never
# accepted.
NO_DRAFT = -1


@dataclass(frozen=True)
class TreeShape:
    """The shape of the drafts of a round: a chain or a tree.

    The drafter's probabilities decide which tokens become nodes of a tree.
    """

    # Number of levels of drafts, without the root. The depth in the MoA authors' code also counts
    # the root.
    depth: int
    # At each level, this number of nodes get children, and each of these nodes gets this number of
    # children. A breadth of 1 makes a chain.
    breadth: int = 1
    # Maximum number of drafts that the target verifies. The candidates with the highest cumulative
    # log-probabilities are chosen.
    n_nodes: int = 1 << 30
    # A chain ends after the draft at which the product of the drafter's probabilities falls below
    # this value. In a batch, the mean of the products of all rows is compared with this value. On a
    # GPU the chain may be up to three drafts longer, because the product is checked only after
    # every fourth draft. With 0, chains always have the full depth.
    stop_below: float = 0.0
    # The drafter's confidence head estimates the acceptance probability of each draft. The chain of
    # a row ends before the first draft with an estimate below this value. If this is already the
    # first draft of the chain, the row has no drafts. With 0, chains always have the full depth.
    cut_below: float = 0.0

    def __post_init__(self) -> None:
        for name in ("depth", "breadth", "n_nodes"):
            if getattr(self, name) < 1:
                raise DrafterError(
                    f"{name} of a draft tree must be at least 1, got {getattr(self, name)}."
                )
        for name in ("stop_below", "cut_below"):
            if not 0 <= getattr(self, name) < 1:
                raise DrafterError(
                    f"{name} of a chain must be at least 0 and below 1, got {getattr(self, name)}."
                )
        if (self.stop_below and self.cut_below) or (
            (self.stop_below or self.cut_below) and not self.is_chain
        ):
            raise DrafterError(
                "only the shape of a chain (breadth 1) can have stop_below or cut_below, and it "
                "can have only one of them. Set the other to 0."
            )
        if not self.is_chain and self.n_nodes < self.depth:
            raise DrafterError(
                f"a draft tree of depth {self.depth} needs at least one node per level, but has "
                f"only {self.n_nodes} nodes. Give at least {self.depth} nodes."
            )
        if self.n_candidates > _MAX_CANDIDATES:
            raise DrafterError(
                f"a draft tree of depth {self.depth} and breadth {self.breadth} has "
                f"{self.n_candidates:,} candidates per round, but at most {_MAX_CANDIDATES:,} are "
                "allowed. Give a smaller depth or breadth."
            )

    @classmethod
    def parse(cls, text: str) -> "TreeShape":
        """Parse the text form of a shape.

        Args:
            text: ``5`` for a chain, ``10@0.2`` for a chain that stops below the probability 0.2,
                ``7c0.3`` for a chain that is cut below the confidence 0.3, ``6x8x62`` for a tree.
        """
        match = _SHAPE.fullmatch(text.lower())
        if match is None:
            raise DrafterError(
                f"{text!r} is not a shape of drafts. Expected the length of a chain such as 5, "
                "LENGTH@PROBABILITY such as 10@0.2, LENGTHcCONFIDENCE such as 7c0.3, or a tree as "
                "DEPTHxBREADTHxNODES such as 6x8x62."
            )
        depth, breadth, n_nodes, stop_below, cut_below = match.groups()
        if breadth:
            return cls(int(depth), int(breadth), int(n_nodes))
        return cls(int(depth), stop_below=float(stop_below or 0), cut_below=float(cut_below or 0))

    def __str__(self) -> str:
        if not self.is_chain:
            return f"{self.depth}x{self.breadth}x{self.n_nodes}"
        if self.cut_below:
            return f"{self.depth}c{self.cut_below:g}"
        return f"{self.depth}@{self.stop_below:g}" if self.stop_below else str(self.depth)

    @property
    def is_chain(self) -> bool:
        """Whether the shape is a chain, which has one draft per level."""
        return self.breadth == 1

    @property
    def max_drafts(self) -> int:
        """The largest number of drafts that a row can have in a round."""
        return self.depth if self.is_chain else min(self.n_nodes, self.n_candidates)

    @property
    def n_candidates(self) -> int:
        """The number of candidates from which the nodes of a tree are chosen."""
        return self.breadth + (self.depth - 1) * self.breadth**2

    def cut(self, depth: int) -> "TreeShape":
        """Return the shape with its depth limited to ``depth``, which is at least 1."""
        return replace(self, depth=min(self.depth, depth))


@dataclass
class DraftTree:
    """The drafts of one round. All rows have the same number of nodes."""

    # [B, N] int64, the drafted tokens. Rows with fewer drafts than others are padded with NO_DRAFT.
    tokens: Tensor
    # [B, N] int64, index of each node's parent; -1 for the root. A parent has a lower index than
    # its children.
    parents: Tensor
    # [B, N]. The score of a node is the sum of the drafter's log-probabilities of the node and its
    # ancestors. None if these probabilities were not computed.
    scores: Tensor | None = None
    # [B, N, V], the drafter's distributions from which the drafts were sampled. None if the drafts
    # were not sampled.
    probabilities: Tensor | None = None
    # True if each node is the child of the node before it. The target then verifies the drafts with
    # causal attention, and needs no tree mask.
    is_chain: bool = False

    @property
    def n_nodes(self) -> int:
        """The number of nodes of each row, N."""
        return self.tokens.shape[1]

    @cached_property
    def on_host(self) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens and parents of each row, copied from the device in one transfer."""
        tokens, parents = torch.stack((self.tokens, self.parents)).tolist()
        return tokens, parents

    def on_host_with(self, numbers: Tensor) -> list[list[int]]:
        """Copy tokens, parents and the given ``numbers`` from the device in one transfer.

        One transfer synchronizes with the device only once. Tokens and parents are stored in
        :attr:`on_host`.

        Args:
            numbers: [B, M] int64.

        Returns:
            For each row, its M numbers.
        """
        n = self.n_nodes
        rows = torch.cat((self.tokens, self.parents, numbers), dim=1).tolist()
        self.on_host = [row[:n] for row in rows], [row[n : 2 * n] for row in rows]
        return [row[2 * n :] for row in rows]

    @classmethod
    def empty(cls, n_rows: int, device: torch.device) -> "DraftTree":
        """Make a tree without drafts. With this tree, a round is a plain decoding step."""
        nothing = torch.empty(n_rows, 0, dtype=torch.int64, device=device)
        return cls(nothing, nothing, is_chain=True)

    @classmethod
    def chain(
        cls, tokens: Tensor, scores: Tensor | None = None, probabilities: Tensor | None = None
    ) -> "DraftTree":
        """Make a chain of tokens [B, N]."""
        parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
        return cls(tokens, parents, scores, probabilities, is_chain=True)


def ancestors(parents: Tensor) -> Tensor:
    """Build a tree mask: each token sees itself and its ancestors up to the root.

    Args:
        parents: [B, N] int64, index of each node's parent; -1 for the root.

    Returns:
        [B, 1 + N, 1 + N] bool. Index 0 is the root.
    """
    n_rows, n_nodes = parents.shape
    itself = torch.eye(1 + n_nodes, dtype=torch.bool, device=parents.device).expand(n_rows, -1, -1)
    # [B, 1 + N], the index of each token's parent. The root counts as its own parent.
    up = torch.cat((parents.new_zeros(n_rows, 1), parents + 1), dim=1)
    seen = itself
    reach = 1
    while reach <= n_nodes:
        # Find the ancestors of N nodes in log2(N) steps (pointer doubling). At the start of a step,
        # ``seen`` marks each token and its ancestors up to ``reach - 1`` levels above it. ``up`` is
        # the ancestor that is ``reach`` levels above the token. Let each token also see what this
        # ancestor sees. This doubles the number of levels that are seen.
        seen = seen | seen.gather(1, up[..., None].expand_as(seen))
        up = up.gather(1, up)
        reach *= 2
    return seen


def most_likely(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the k highest scores of each row. Equal scores are ordered by their indices.

    Returns:
        The scores and their indices, both [..., k], in descending order of scores.
    """
    # The order in which ``topk`` returns equal scores depends on the device and on the number of
    # rows. So sort by index first, and then by score with a stable sort.
    indices = scores.topk(k, dim=-1).indices.sort(dim=-1).values
    values = scores.gather(-1, indices)
    order = values.sort(dim=-1, descending=True, stable=True)
    return order.values, indices.gather(-1, order.indices)


def pick_best(tokens: Tensor, parents: Tensor, scores: Tensor, n_nodes: int) -> DraftTree:
    """Make a tree of the candidates with the best cumulative scores.

    See section 4.2 of the EAGLE-2 paper, and lines 392-406 of
    ``inference/single_device/moa_spec.py`` in the MoA authors' code.

    Args:
        tokens: [B, C] int64, in level order.
        parents: [B, C] int64, index of each candidate's parent, -1 for the root.
        scores: [B, C], cumulative log-probabilities.
        n_nodes: N, the number of candidates to keep.
    """
    # The parent of a chosen candidate is always chosen, too. The score of a parent is at least as
    # high as the score of its child. If both scores are equal, the parent is chosen before the
    # child, because its index is lower.
    if n_nodes >= tokens.shape[1]:
        return DraftTree(tokens, parents, scores)
    # Indices of the chosen candidates, [B, N], in level order.
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :n_nodes].sort(dim=1).values
    new_index = torch.full_like(parents, -1).scatter(
        1, best, torch.arange(n_nodes, device=best.device).expand_as(best)
    )
    old_parents = parents.gather(1, best)
    kept_parents = torch.where(old_parents < 0, -1, new_index.gather(1, old_parents.clamp(min=0)))
    return DraftTree(tokens.gather(1, best), kept_parents, scores.gather(1, best))
