"""The fastest shape follows from costs and acceptance; where nothing pays, that is plain decoding."""

import dataclasses

import pytest
import torch

from moa_data.moa.decoding.shape_costs import WIDEST, AcceptanceLog, DecodingCosts, candidates, fastest
from moa_data.moa.decoding.tree import DraftTree, TreeShape

#        root
#      0      1        level 1, scores -0.1, -1.0
#    2  3     4        level 2, scores -0.2, -1.5, -1.1
#    5                 level 3, score -0.3
PARENTS = [-1, -1, 0, 0, 1, 2]
SCORES = [-0.1, -1.0, -0.2, -1.5, -1.1, -0.3]


def tree() -> DraftTree:
    return DraftTree(torch.zeros(1, 6, dtype=torch.int64), torch.tensor([PARENTS]), torch.tensor([SCORES]))


def costs(plain: float = 10.0, per_token: float = 0.0, level: float = 1.0) -> DecodingCosts:
    verify = {n: plain + per_token * (n - 1) for n in (1, 2, 8, 63)}
    return DecodingCosts(verify, dict.fromkeys((1, 2, 4, 8), level), dict.fromkeys((1, 2, 4, 8), level))


def test_a_smaller_tree_is_credited_with_the_nodes_that_it_would_hold() -> None:
    log = AcceptanceLog()
    log.observe(tree(), [[0, 2, 5]])
    # A chain follows the best child each time: nodes 0, 2 and 5.
    assert [log.committed(TreeShape(depth)) for depth in (1, 2, 3, 4)] == [2.0, 3.0, 4.0, 4.0]
    log = AcceptanceLog()
    log.observe(tree(), [[1, 4]])
    # Node 1 is a second child: no chain holds it; node 4 is the fifth best of six.
    assert log.committed(TreeShape(3)) == 1.0
    assert log.committed(TreeShape(3, 2, 62)) == 3.0
    assert [log.committed(TreeShape(3, 2, n)) for n in (3, 4, 5)] == [1.0, 2.0, 3.0]
    assert log.committed(TreeShape(1, 2, 2)) == 2.0  # the nodes that are better lie deeper than such a tree
    log.observe(tree(), [[]])
    assert log.committed(TreeShape(3, 2, 62)) == 2.0
    assert log.committed(None) == 1.0


def test_the_fastest_shape_grows_as_calls_get_cheaper() -> None:
    log = AcceptanceLog()
    for accepted in ([0, 2, 5], [1, 4], [0], []):
        log.observe(tree(), [accepted])
    free_verification, _ = fastest(costs(per_token=0.0, level=0.01), log)
    assert free_verification is not None
    assert not free_verification.is_chain
    costly_verification, ratio = fastest(costs(per_token=6.0, level=0.01), log)
    assert costly_verification is None
    assert ratio == 1.0
    chain, ratio = fastest(costs(per_token=1.5, level=0.01), log)
    assert chain is not None
    assert ratio == pytest.approx(log.committed(chain) * 10 / costs(per_token=1.5, level=0.01).round_s(chain))
    assert fastest(costs(level=50.0), log)[0] is None


def test_candidates_are_distinct_and_bounded_by_the_widest() -> None:
    shapes = candidates()
    assert len(set(shapes)) == len(shapes)
    assert WIDEST in shapes
    assert all(shape.depth <= WIDEST.depth and min(shape.n_nodes, shape.n_candidates) <= 62 for shape in shapes)
    for depth in range(1, WIDEST.depth):
        fewer = candidates(widest=WIDEST.cut(depth))
        assert len(set(fewer)) == len(fewer)
        assert {shape.depth for shape in fewer} == set(range(1, depth + 1))


def log_of(*accepted: list[int]) -> AcceptanceLog:
    log = AcceptanceLog()
    for nodes in accepted:
        log.observe(tree(), [nodes])
    return log


def test_verification_costs_are_interpolated() -> None:
    assert costs(per_token=1.0).verification_s(5) == 14.0
    assert costs().round_s(TreeShape(3)) == 13.0
    assert costs().round_s(TreeShape(3), n_drafts=2) == 12.0


def test_a_chain_that_stops_is_credited_with_what_it_would_have_drafted() -> None:
    log = AcceptanceLog()
    log.observe(tree(), [[0, 2, 5]])  # its chain has probabilities 0.90, 0.82 and 0.74
    log.observe(tree(), [[0, 3]])
    log.observe(tree(), [[]])
    expected = (0.95, 1, 5 / 3), (0.85, 2, 2.0), (0.8, 3, 7 / 3), (0.1, 4, 7 / 3)
    for stop_below, n_drafts, committed in expected:
        shape = TreeShape(6, stop_below=stop_below)
        assert log.n_drafts(shape) == n_drafts
        assert log.committed(shape) == pytest.approx(committed)
    assert log.n_drafts(TreeShape(2, stop_below=0.1)) == 2
    assert log.n_drafts(TreeShape(5)) is None
    assert log.n_drafts(None) is None


def test_rows_of_a_batch_stop_together() -> None:
    log = AcceptanceLog()
    unlikely = [-1.0, -5.0, -5.0, -6.0, -6.0, -7.0]
    tokens, parents = torch.zeros(2, 6, dtype=torch.int64), torch.tensor([PARENTS] * 2)
    both = DraftTree(tokens, parents, torch.tensor([SCORES, unlikely]))
    log.observe(both, [[0, 2, 5], [0]])
    # Means of 0.90 and 0.37, 0.82 and 0.01, 0.74 and 0.00.
    assert [log.n_drafts(TreeShape(6, stop_below=bound)) for bound in (0.7, 0.6, 0.4, 0.38, 0.3)] == [1, 2, 3, 3, 4]
    assert log.committed(TreeShape(6, stop_below=0.7)) == 2.0
    assert log.committed(TreeShape(6, stop_below=0.6)) == 2.5


def test_a_chain_stops_where_its_confidence_tells_good_drafts_from_bad() -> None:
    log, bad = AcceptanceLog(), [-2.5, -9.0, -4.0, -9.0, -9.0, -5.5]
    for _ in range(5):
        log.observe(tree(), [[0, 2, 5]])
        log.observe(DraftTree(torch.zeros(1, 6, dtype=torch.int64), tree().parents, torch.tensor([bad])), [[]])
    dear = costs(per_token=2.0, level=2.0)
    chosen, ratio = fastest(dear, log)
    assert chosen is not None
    assert chosen.stop_below
    assert ratio == pytest.approx(2.5 * 10.0 / dear.round_s(chosen, n_drafts=2.5))
    drawn, drawn_ratio = fastest(dear, log, is_drawn=True)
    assert drawn is None or not drawn.stop_below
    assert drawn_ratio < ratio
    # Where it costs as much as it saves to ask, nobody asks.
    asked_dearly = dataclasses.replace(dear, stop_s=4.0)
    assert fastest(asked_dearly, log) == (drawn, drawn_ratio)
