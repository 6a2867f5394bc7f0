"""The corpus is deterministic and neither constant nor noise, and its held-out prompts are new."""

import random
import zlib
from typing import Any

import pytest

from moa_data.demo.corpus import FAMILIES, NUMBER_WORDS, generate_corpus, opening
from moa_data.errors import OptionInvalid


@pytest.fixture(scope="module")
def rows() -> Any:
    return generate_corpus(1500, 110, seed=3)


def test_equal_seeds_give_equal_rows_and_others_do_not(rows: Any) -> None:
    assert generate_corpus(1500, 110, seed=3) == rows
    assert generate_corpus(1500, 110, seed=4).train != rows.train


def test_text_is_neither_constant_nor_noise_and_held_out_prompts_are_new(rows: Any) -> None:
    text = "\n".join(
        message["content"] for row in rows.train for message in row["messages"]
    ).encode()
    assert 3.0 < len(text) / len(zlib.compress(text)) < 12.0
    openings = [opening(row["messages"]) for row in (*rows.train, *rows.held_out)]
    assert len(set(openings)) == len(openings)
    for half in rows:
        assert {row["category"] for row in half} == set(FAMILIES)


def test_every_chat_alternates_and_ends_with_an_answer(rows: Any) -> None:
    for row in rows.train:
        messages = [message for message in row["messages"] if message["role"] != "system"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (
            len(messages) // 2
        )
        assert all(message["content"] == message["content"].strip() != "" for message in messages)


def test_answers_follow_from_their_prompts() -> None:
    rng = random.Random(0)
    for _ in range(100):
        answer = FAMILIES["sorting"](rng)[-1]["content"]
        words = [line.split(". ")[1] for line in answer.splitlines()[1:]]
        assert words == sorted(words)
        last = FAMILIES["shopping"](rng)[-1]["content"]
        count, things = last.split("list has ")[1].rstrip(".").split(" things: ")
        assert NUMBER_WORDS.index(count) == len(things.replace(" and ", ", ").split(", "))


def test_a_family_without_new_prompts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        FAMILIES,
        "story",
        lambda rng: [{"role": role, "content": "x"} for role in ("user", "assistant")],
    )
    with pytest.raises(OptionInvalid):
        generate_corpus(12, 1, seed=0)
