"""Shapes of drafts, and the order of candidates."""

import pytest
import torch

from moa_data.errors import DrafterError
from moa_data.moa.decoding.tree import TreeShape, most_likely


@pytest.mark.parametrize("text", ["5", "10@0.2", "7c0.3", "6x8x62"])
def test_shapes_are_read_from_text(text: str) -> None:
    assert str(TreeShape.parse(text)) == text
    assert TreeShape.parse("2X3X4") == TreeShape(2, 3, 4)
    assert TreeShape.parse("5@0") == TreeShape(5)
    assert TreeShape.parse("6@0.2").cut(3) == TreeShape.parse("3@0.2")


@pytest.mark.parametrize(
    "text",
    ["six", "6x8", "static:16", "²", "0", "3x-1x5", "6x8x5", "99x99x999", "5@", "5c", "5c0.2@0.3",
     "5c1", "6x8x62c0.2", "@0.5", "5@often", "5@1", "5@-0.1", "5@nan", "6x8x62@0.2"],
)  # fmt: skip
def test_shapes_without_a_meaning_are_refused(text: str) -> None:
    with pytest.raises(DrafterError):
        TreeShape.parse(text)
    with pytest.raises(DrafterError):
        TreeShape(5, stop_below=0.1, cut_below=0.1)


def test_equal_scores_stand_in_the_order_of_their_places() -> None:
    scores = torch.randint(0, 4, (3, 5, 40), generator=torch.Generator().manual_seed(2)).float()
    values, places = most_likely(scores, 12)
    for rows in zip(
        scores.flatten(0, 1).tolist(), values.flatten(0, 1).tolist(), places.flatten(0, 1).tolist(), strict=True
    ):
        row, found, at = rows
        assert found == sorted(row, reverse=True)[:12]
        assert [row[place] for place in at] == found
        assert all(one < other for one, other, a, b in zip(at, at[1:], found, found[1:], strict=False) if a == b)
