"""Masks are as drawn in the module's docstring, and have the expected limits."""

import torch

from moa_data.moa.nn import masks


def test_the_docstring_example() -> None:
    response = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    drafted = masks.drafted_positions(response, torch.tensor([4]))
    assert drafted.int().tolist() == [[0, 0, 0, 1, 0, 1, 1, 1, 0]]
    context = masks.last_context(drafted)
    assert context.tolist() == [[0, 1, 2, 2, 4, 4, 4, 4, 8]]
    query = torch.tensor([[6]])
    seen = masks.Mask.up_to(context[:, 6:7], 9).dense
    assert seen[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    plain = masks.self_attention_mask(query, context[:, 6:7], torch.tensor([[False]]), 9).dense
    assert plain[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 6]
    stairs = masks.self_attention_mask(query, context[:, 6:7], torch.tensor([[True]]), 9).dense
    assert stairs[0, 0].nonzero().flatten().tolist() == [5, 6]


def test_no_row_is_ever_empty() -> None:
    generator = torch.Generator().manual_seed(0)
    response = torch.rand(16, 40, generator=generator) < 0.6
    bound = torch.randint(2, 9, (16,), generator=generator)
    offset = torch.randint(0, 9, (16,), generator=generator)
    drafted = masks.drafted_positions(response, bound, offset)
    context = masks.last_context(drafted)
    queries = torch.arange(40).expand(16, -1)
    stairs = torch.rand(16, generator=generator) < 0.5
    for mask in (
        masks.Mask.up_to(context, 40).dense,
        masks.self_attention_mask(queries, context, stairs[:, None], 40).dense,
        masks.round_mask(queries, context, None, 40).dense[..., 40:],
    ):
        assert mask.any(dim=-1).all()
        assert not (mask & (torch.arange(40) > torch.arange(40)[:, None])).any(), (
            "no query sees the future"
        )
    later = torch.arange(40) > context[:, :, None]
    assert not (masks.Mask.up_to(context, 40).dense & later).any()


def test_a_round_sees_verified_positions_and_its_own_drafts() -> None:
    queries = torch.tensor([[3, 4, 6, 4]])
    context, passes = torch.tensor([[2, 2, 5, 3]]), torch.tensor([0, 0, 0, 1])
    verified, own = masks.round_mask(queries, context, passes, 8).dense.int().split((8, 4), dim=-1)
    assert verified[0].tolist() == [
        [1] * 3 + [0] * 5,
        [1] * 3 + [0] * 5,
        [1] * 6 + [0] * 2,
        [1] * 4 + [0] * 4,
    ]
    assert own[0].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], (
        "the last is of another pass"
    )


def test_windows_and_parts_are_asked_by_the_same_rule() -> None:
    """The mask that kernels evaluate key by key equals the dense mask.

    A window removes the keys that are further back.
    """
    queries, passes = torch.tensor([[3, 4, 5, 6, 4, 0]]), torch.tensor([0, 0, 0, 0, 1, 1])
    context = torch.tensor([[2, 2, 2, 5, 3, 0]])
    whole = masks.round_mask(queries, context, passes, 8)
    slid = masks.round_mask(queries, context, passes, 8, window=2)
    at = torch.cat((torch.arange(8)[None], queries), dim=1)
    assert torch.equal(slid.dense, whole.dense & (queries[..., None] - at[:, None] < 2))
    assert slid.dense.sum() < whole.dense.sum()
    for mask in (whole, slid):
        assert mask.shape == mask.dense.shape == (1, 6, 14)
        asked = [
            [mask.sees(*torch.tensor([0, query, key])) for key in range(14)] for query in range(6)
        ]
        assert torch.equal(torch.tensor(asked), mask.dense[0])
