"""Reads prompts from a file: chats, or multi-turn questions in the format of Spec-Bench.

Chats, one per line: ``{"messages": [{"role", "content"}]}`` or ShareGPT
``{"conversations": [{"from", "value"}]}``. The prompt is everything before the last assistant
message, or the whole chat if it ends with the user. Optional keys: ``prompt_id`` (or ``id``; the
default is the row's number), ``category``, ``tools``, ``system``.

Spec-Bench, one per line: ``{"question_id", "category", "turns": ["...", ...]}``. The target answers
each turn, and its answer becomes part of the history of the next turn.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from ..errors import DatasetError
from ..moa.targets.chat import Message, Rejection, parse_prompt
from ..pipeline.dataset import read_jsonl
from ..text import printable

CHATS = "chats"
SPEC_BENCH = "spec-bench"


@dataclass(frozen=True)
class Prompt:
    """A conversation that is answered turn by turn."""

    prompt_id: str
    category: str
    turns: tuple[tuple[Message, ...], ...]  # The new messages before each answer.
    # JSON schemas of the tools that the target may call.
    tools: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file, its format, and the number of prompts before a selection."""

    kind: str  # ``chats`` or ``spec-bench``
    n_in_file: int
    prompts: tuple[Prompt, ...]


def load_prompts(path: str | Path, n_prompts: int | None = None) -> PromptFile:
    """Read a file of prompts, one JSON object per line.

    Args:
        path: the file.
        n_prompts: use this many: the first chats, or Spec-Bench questions in turn from each
            category. None uses all.

    Raises:
        DatasetError: a row is not a prompt; the message names the row.
    """
    path = Path(path).expanduser()
    rows = list[tuple[str, Prompt]]()
    try:
        for number, row in enumerate(read_jsonl(path), start=1):
            where = f"{path} row {number}"
            rows.append(_parse(row, where, number))
            if rows[-1][0] != rows[0][0]:
                raise DatasetError(
                    f"{where} is not a prompt of {rows[0][0]} like the rows before it; put them "
                    "into two files."
                )
    except OSError as error:
        raise DatasetError(
            f"{path}: {error.strerror or error}; give a jsonl file of chats or of Spec-Bench "
            "questions."
        ) from error
    if not rows:
        raise DatasetError(f"{path} has no prompts; expected one JSON object per line.")
    kind = rows[0][0]
    prompts = _with_own_ids([prompt for _, prompt in rows])
    return PromptFile(kind, len(prompts), tuple(_choose(prompts, kind, n_prompts)))


def _with_own_ids(prompts: list[Prompt]) -> list[Prompt]:
    # Figures are grouped by id, so a repeated id gets a number, ``id#2``.
    all_ids = {prompt.prompt_id for prompt in prompts}
    n_seen = Counter[str]()
    renamed = []
    for prompt in prompts:
        name = prompt.prompt_id
        n_seen[name] += 1
        while n_seen[name] > 1 and f"{name}#{n_seen[name]}" in all_ids:
            n_seen[name] += 1
        renamed.append(
            prompt if n_seen[name] == 1 else replace(prompt, prompt_id=f"{name}#{n_seen[name]}")
        )
    return renamed


def _parse(row: Any, where: str, number: int) -> tuple[str, Prompt]:
    chat = parse_prompt(row)
    if isinstance(chat, Rejection):
        raise DatasetError(f"{where}: {chat.reason} ({chat.detail}); correct the line.")
    messages = tuple(chat.messages)
    turns: tuple[tuple[Message, ...], ...] = tuple((message,) for message in messages)
    if not chat.asks_each:
        # A chat that ends with a question is a prompt already.
        turns = (messages[:-1] if messages[-1]["role"] == "assistant" else messages,)
    if not turns[0]:
        raise DatasetError(
            f"{where}: no message comes before the assistant's message; correct the line."
        )
    names = ("question_id",) if chat.asks_each else ("prompt_id", "id")
    prompt_id = printable(
        str(next((row[name] for name in names if row.get(name) is not None), number))
    )
    category = printable(str(row.get("category") or "all"))
    tools = None if chat.tools is None else tuple(chat.tools)
    return SPEC_BENCH if chat.asks_each else CHATS, Prompt(prompt_id, category, turns, tools)


def _choose(prompts: list[Prompt], kind: str, n_prompts: int | None) -> Iterable[Prompt]:
    if kind == CHATS or n_prompts is None:
        return prompts[:n_prompts]
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    in_turn = [
        prompt
        for prompt in chain.from_iterable(zip_longest(*by_category.values()))
        if prompt is not None
    ]
    return in_turn[:n_prompts] if n_prompts < len(prompts) else prompts
