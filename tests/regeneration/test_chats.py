"""Rows become questions, and questions with answers become rows."""

from typing import Any

import pytest

from moa_data.moa.targets.chat import RejectReason
from moa_data.pipeline.chats.columns import Columns
from moa_data.regeneration.chats import Exchange, LossReason, Outcome, Question, Tally
from moa_data.tests.kit.chats import chat


def question(row: Any, *columns: str) -> Question:
    return Question.of(7, row, Columns.parse(columns))


def user(*texts: str) -> tuple[dict[str, str], ...]:
    return tuple({"role": "user", "content": text} for text in texts)


def test_old_answers_are_left_out() -> None:
    assert question(chat("a", "1", "b", "2")).turns == (user("a"), user("b"))
    assert question(chat("a", "1", "b")).turns == (user("a"), user("b"))
    assert question(chat("a")).turns == (user("a"),)
    twice = {"messages": [*chat("a", "1")["messages"], *chat("b", "2")["messages"][1:], *user("c")]}
    assert question(twice).turns == (user("a"), user("c")), "two answers in a row are one"


def test_a_system_column_comes_first() -> None:
    found = question(chat("a", "1", system="Be brief."))
    assert found.turns == (({"role": "system", "content": "Be brief."}, *user("a")),)
    assert found.system == "Be brief."


def test_columns_name_questions() -> None:
    assert question({"instruction": "Add.", "input": "1, 2", "output": "3"}, "alpaca").turns == (user("Add.\n\n1, 2"),)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "a"}, RejectReason.NO_MESSAGES),
        ("a", RejectReason.MALFORMED_ROW),
        ({"messages": [{"role": "assistant", "content": "1"}, *user("a")]}, LossReason.NO_QUESTION),
        (chat("a", "1", tools=[{"name": "add"}]), LossReason.TOOLS),
        ({"messages": [*user("a"), {"role": "tool", "content": "3"}]}, LossReason.TOOLS),
        (chat("\ud800", "1"), RejectReason.NO_UNICODE),
    ],
)
def test_rows_that_ask_nothing_have_a_reason(row: Any, reason: str) -> None:
    found = question(row)
    assert (found.row, found.turns, found.reason) == (7, (), reason)
    assert not Exchange(found).begin_turn()


def test_later_turns_see_the_new_answers() -> None:
    exchange = Exchange(question(chat("a", "1", "b", "2")))
    assert exchange.begin_turn()
    assert exchange.history == list(user("a"))
    exchange.answer("A", 3)
    assert exchange.begin_turn()
    assert [message["content"] for message in exchange.history] == ["a", "A", "b"]
    exchange.answer("B", 4)
    assert not exchange.begin_turn()
    outcome = exchange.outcome
    assert [message["content"] for message in outcome.messages] == ["a", "A", "b", "B"]
    assert (outcome.n_answers, outcome.n_tokens, outcome.reason) == (2, 7, "")
    assert Outcome.from_json(outcome.to_json()) == outcome


@pytest.mark.parametrize(("text", "reason"), [(" \n", LossReason.EMPTY), ("caf\ufffd", LossReason.NO_TEXT)])
def test_an_answer_that_is_none_ends_the_chat_before_it(text: str, reason: LossReason) -> None:
    exchange = Exchange(question(chat("a", "1", "b", "2")))
    exchange.begin_turn()
    exchange.answer("A", 3)
    exchange.begin_turn()
    exchange.answer(text, 1)
    assert not exchange.begin_turn()
    assert [message["content"] for message in exchange.outcome.messages] == ["a", "A"]
    assert exchange.outcome.reason == reason


def test_rows_are_counted_by_what_became_of_them() -> None:
    tally = Tally()
    kept = [{"role": "assistant", "content": "1"}]
    for row, (messages, reason) in enumerate([(kept, ""), (kept, "late"), ([], "late"), ([], "late")]):
        tally.add(Outcome(row, messages, len(messages), 5 * len(messages), reason, "60 s" if reason else ""))
    assert (tally.n_rows, tally.n_chats, tally.n_rejected, tally.n_answers, tally.n_tokens) == (4, 2, 2, 2, 10)
    assert tally.lines(tally.rejected) == ["2  late (first: row 1: 60 s)"]
    assert tally.lines(tally.cut) == ["1  late (first: row 1: 60 s)"]
