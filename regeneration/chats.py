"""Turns rows of a dataset into questions, and questions with their answers into rows.

The assistant's messages of a row are left out, and what stands between them is asked again, turn by turn, each with the
new answers before it::

    row       system  user  assistant  user  assistant        turns   [system, user]  [user]
    outcome   system  user  ANSWER     user  ANSWER
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from ..moa.targets.chat import Message, Rejection, RejectReason, parse_prompt
from ..pipeline.chats.columns import Columns
from ..text import printable

Turns = tuple[tuple[Message, ...], ...]
"""For each answer, the messages that come before it and after the answer before."""


class LossReason(StrEnum):
    """Why a chat, or the rest of one, is not answered; the values are shown to the user."""

    TOOLS = "the chat has tools, and nobody could give their results"
    NO_QUESTION = "nothing comes before the assistant's first message"
    TOO_LONG = "the prompt leaves no room for an answer"
    NO_END = "an answer has not ended within the tokens it may have"
    EMPTY = "an answer is empty"
    NO_TEXT = "an answer has bytes that are no text"
    UNUSABLE_PROMPT = "a prompt cannot be rendered"
    REFUSED = "the server refuses the prompt"
    LATE = "the server took too long"


@dataclass(frozen=True)
class Question:
    """What is asked in one row, or why nothing is.

    Attributes:
        row: number of the row in the dataset, from 0.
        turns: none where the row is rejected.
        system: text that the chat template has to show; else empty.
    """

    row: int
    turns: Turns = ()
    system: str = ""
    reason: str = ""
    detail: str = ""

    @classmethod
    def of(cls, row: int, content: Any, columns: Columns) -> Self:
        """Read a row of a dataset; the last turn is asked whether the row has an answer to it or not."""
        chosen = columns.apply(content)
        chat = chosen if isinstance(chosen, Rejection) else parse_prompt(chosen)
        if isinstance(chat, Rejection):
            return cls(row, reason=chat.reason.value, detail=printable(chat.detail))
        calls = any(message["role"] == "tool" or "tool_calls" in message for message in chat.messages)
        if chat.tools or calls:
            return cls(row, reason=LossReason.TOOLS.value)
        if not _is_unicode(chat.messages):
            return cls(row, reason=RejectReason.NO_UNICODE.value)
        turns: list[list[Message]] = [[]]
        for message in chat.messages:
            if message["role"] != "assistant":
                turns[-1].append(message)
            elif turns[-1]:
                turns.append([])
            elif len(turns) == 1:
                return cls(row, reason=LossReason.NO_QUESTION.value)
        return cls(row, tuple(tuple(turn) for turn in turns if turn), chat.system)


@dataclass
class Outcome:
    """A row with the answers that it got, and why there are no more of them.

    Attributes:
        messages: the chat up to its last answer; none where the row is rejected.
        n_tokens: tokens that were generated for these answers.
        reason: why the row is rejected, or its later turns were not answered; empty where all were.
    """

    row: int
    messages: list[Message] = field(default_factory=list)
    n_answers: int = 0
    n_tokens: int = 0
    reason: str = ""
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what the journal holds of it."""
        return {name: value for name, value in vars(self).items() if value or name == "row"}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Undo :meth:`to_json`."""
        return cls(**values)


class Exchange:
    """One chat while it is answered.

    Attributes:
        question: the row.
        outcome: the answers so far.
        history: the messages of the next prompt.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.outcome = Outcome(question.row, reason=question.reason, detail=question.detail)
        self.history: list[Message] = []
        self._left = list(question.turns)

    def begin_turn(self) -> bool:
        """Put the messages of the next turn into the history; False where the chat has ended."""
        if self.outcome.reason or not self._left:
            return False
        self.history = [*self.outcome.messages, *self._left.pop(0)]
        return True

    def answer(self, text: str, n_tokens: int) -> None:
        """Take the answer to the turn that has begun; one without a word ends the chat."""
        if not text.strip():
            self.end(LossReason.EMPTY)
            return
        if "\ufffd" in text:
            self.end(LossReason.NO_TEXT)
            return
        self.outcome.messages = [*self.history, {"role": "assistant", "content": text}]
        self.outcome.n_answers += 1
        self.outcome.n_tokens += n_tokens

    def end(self, reason: LossReason, detail: str = "") -> None:
        """End the chat before the turn that has begun."""
        self.outcome.reason, self.outcome.detail = reason.value, printable(detail)

    def reject(self, reason: str, detail: str) -> None:
        """Take all answers back."""
        self.outcome = Outcome(self.question.row, reason=reason, detail=printable(detail))


def _is_unicode(messages: list[Message]) -> bool:
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass
class Tally:
    """Counts of rows.

    Attributes:
        n_cut: kept chats whose later turns were not answered.
        rejected: reason -> rows that gave no chat.
        cut: reason -> kept chats that end early.
        examples: reason -> the first row that had it, with details.
    """

    n_rows: int = 0
    n_answers: int = 0
    n_tokens: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def n_rejected(self) -> int:
        """Rows that gave no chat."""
        return self.rejected.total()

    @property
    def n_chats(self) -> int:
        """Rows that gave a chat."""
        return self.n_rows - self.n_rejected

    def add(self, outcome: Outcome) -> None:
        """Count a row."""
        self.n_rows += 1
        self.n_answers += outcome.n_answers
        self.n_tokens += outcome.n_tokens
        if outcome.reason:
            (self.cut if outcome.messages else self.rejected)[outcome.reason] += 1
            detail = f": {outcome.detail}" if outcome.detail else ""
            self.examples.setdefault(outcome.reason, f"row {outcome.row}{detail}")

    def lines(self, counts: Counter[str]) -> list[str]:
        """Return one line for each reason, the most frequent first, with an example."""
        return [f"{n:,}  {reason} (first: {self.examples[reason]})" for reason, n in counts.most_common()]
