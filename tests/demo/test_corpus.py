"""The corpus is deterministic, neither constant nor noise, and its held-out prompts are new."""

import random
import zlib
from typing import Any

import pytest

from moa_data.demo.corpus import FAMILIES, generate_corpus, opening
from moa_data.errors import OptionInvalid


@pytest.fixture(scope="module")
def rows() -> Any:
    return generate_corpus(1500, 110, seed=3)


def test_equal_seeds_give_equal_rows_and_others_do_not(rows: Any) -> None:
    again = generate_corpus(1500, 110, seed=3)
    assert again == rows
    assert generate_corpus(1500, 110, seed=4).train != rows.train


def test_text_is_neither_constant_nor_noise(rows: Any) -> None:
    text = "\n".join(message["content"] for row in rows.train for message in row["messages"]).encode()
    assert 3.0 < len(text) / len(zlib.compress(text)) < 12.0
    assert len({opening(row["messages"]) for row in rows.train}) == len(rows.train)
    assert {row["category"] for row in rows.train} == set(FAMILIES)


def test_held_out_prompts_do_not_occur_in_training(rows: Any) -> None:
    train = {opening(row["messages"]) for row in rows.train}
    assert all(opening(row["messages"]) not in train for row in rows.held_out)
    assert {row["category"] for row in rows.held_out} == set(FAMILIES)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_chat_alternates_and_ends_with_an_answer(name: Any) -> None:
    rng = random.Random(1)
    for _ in range(100):
        messages = FAMILIES[name](rng)
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(m["content"] == m["content"].strip() and m["content"] for m in messages)
        assert "None" not in messages[-1]["content"]


def test_answers_follow_from_their_prompts() -> None:
    rng = random.Random(0)
    for _ in range(100):
        for line in FAMILIES["arithmetic"](rng)[-1]["content"].splitlines()[1:-1]:
            left, right = line.split(": ")[1].rstrip(".").split(" = ")
            first, sign, second = left.split()
            assert int(right) == (int(first) + int(second) if sign == "+" else int(first) - int(second)) >= 0
        words = [line.split(". ")[1] for line in FAMILIES["sorting"](rng)[-1]["content"].splitlines()[1:]]
        assert words == sorted(words)


def test_a_family_without_new_prompts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        FAMILIES, "echo", lambda rng: [{"role": role, "content": "x"} for role in ("user", "assistant")]
    )
    with pytest.raises(OptionInvalid):
        generate_corpus(12, 1, seed=0)
