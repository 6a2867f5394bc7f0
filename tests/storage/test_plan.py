"""The plan is aligned, complete and always the same.

Its parts follow the order of the source; inside a part, the longest sequence comes first.
"""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_data.errors import StoreDamaged
from moa_data.storage.plan import SEQUENCE_SCHEMA, check_plan, part_counts, plan_bytes, plan_parts
from moa_data.tests.kit.errors import raises_naming


def table(lengths: list[int]) -> pa.Table:
    columns = [
        [f"id-{k}" for k in range(len(lengths))],
        list(range(len(lengths))),
        lengths,
        [0] * len(lengths),
    ]
    return pa.table(dict(zip(SEQUENCE_SCHEMA.names, columns, strict=True)), schema=SEQUENCE_SCHEMA)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.integers(1, 1000),
    st.sampled_from([1, 16, 64]),
)
def test_rules_hold(lengths: list[int], part_tokens: int, alignment: int) -> None:
    plan = plan_parts(table(lengths), part_tokens, alignment)
    check_plan(plan, alignment)
    assert sorted(plan["source_row"].to_pylist()) == list(range(len(lengths)))
    assert plan_bytes(plan) == plan_bytes(plan_parts(table(lengths), part_tokens, alignment))
    part, n_tokens = plan["part"].to_numpy(), plan["n_tokens"].to_numpy()
    totals = [counts["allocated_tokens"] for counts in part_counts(plan, alignment)]
    last_row = -1
    for k, total in enumerate(totals):
        rows = plan["source_row"].to_numpy()[part == k]
        assert sorted(rows) == list(range(last_row + 1, last_row + 1 + len(rows)))
        last_row = rows.max()
        assert (np.diff(n_tokens[part == k]) <= 0).all()
        assert total <= part_tokens or len(rows) == 1
        assert total == sum(-(-n // alignment) * alignment for n in n_tokens[part == k])


def test_the_order_of_the_table_does_not_matter() -> None:
    shuffled = table([5, 80, 80, 7]).take([2, 0, 3, 1])
    assert plan_parts(shuffled, 300).equals(plan_parts(table([5, 80, 80, 7]), 300))


@pytest.mark.parametrize(
    ("broken", "facts"),
    [
        (table([]), ()),
        (table([3, 0]), ()),
        (table([3]).drop_columns(["n_tokens"]), (["n_tokens"],)),
        (pa.concat_tables([table([3]), table([3])]), (1, "id-0")),
    ],
)
def test_broken_tables_are_refused(broken: pa.Table, facts: tuple[object, ...]) -> None:
    with raises_naming(StoreDamaged, *facts):
        plan_parts(broken, 100)


def test_broken_plans_are_refused() -> None:
    plan = plan_parts(table([10, 100, 30]), 1000)
    for first in ([0, 64, 192], [0, 100, 192], [64, 192, 256]):
        moved = plan.set_column(5, "first_token", pa.array(first, pa.int64()))
        with raises_naming(StoreDamaged, "part 0", "first_token", 64):
            check_plan(moved, 64)
    with raises_naming(StoreDamaged, "'first_token'"):
        check_plan(table([1]), 64)
    with raises_naming(StoreDamaged, "part_tokens", 0):
        plan_parts(table([1]), 0)
