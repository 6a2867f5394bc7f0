"""Reads prompts from a file: chats, or multi-turn questions in the format of Spec-Bench.

A file of chats has one chat per line: ``{"messages": [{"role", "content"}]}``, or in ShareGPT's
format ``{"conversations": [{"from", "value"}]}``. If the last message is from the assistant, the
prompt is everything before this message. Otherwise the prompt is the whole chat. Optional keys are
``prompt_id`` or ``id``, ``category``, ``tools`` and ``system``. A prompt without an id has the
number of its row as the id.

A file of Spec-Bench has one question per line:
``{"question_id", "category", "turns": ["...", ...]}``. The target answers each turn, and its answer
becomes part of the history of the next turn.
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
    # The messages of each turn. The target answers after the last message of a turn.
    turns: tuple[tuple[Message, ...], ...]
    # JSON schemas of the tools that the target may call.
    tools: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class PromptFile:
    """Prompts that were selected from a file, and facts about the file."""

    kind: str  # The format of the file of prompts: ``chats`` or ``spec-bench``.
    n_in_file: int  # The number of all prompts in the file, selected or not.
    prompts: tuple[Prompt, ...]


def load_prompts(path: str | Path, n_prompts: int | None = None) -> PromptFile:
    """Read a file of prompts, one JSON object per line.

    Args:
        path: the file.
        n_prompts: number of prompts to use. From a file of chats, the first ones are used. From
            Spec-Bench, one question of each category is used in turn. If ``n_prompts`` is None, all
            prompts are used.

    Raises:
        DatasetError: the file cannot be read, has no prompts, or has a row that is not a prompt.
    """
    path = Path(path).expanduser()
    rows = list[tuple[str, Prompt]]()
    try:
        for number, row in enumerate(read_jsonl(path), start=1):
            where = f"{path} row {number}"
            rows.append(_parse(row, where, number))
            if rows[-1][0] != rows[0][0]:
                raise DatasetError(
                    f"{where} has the format {rows[-1][0]}, but the rows before it have the format "
                    f"{rows[0][0]}. Put rows of different formats into separate files."
                )
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be read ({error.strerror or error}). Give a JSONL file of chats or of "
            "Spec-Bench questions."
        ) from error
    if not rows:
        raise DatasetError(f"{path} has no prompts, expected one JSON object per line.")
    kind = rows[0][0]
    prompts = _with_own_ids([prompt for _, prompt in rows])
    return PromptFile(kind, len(prompts), tuple(_choose(prompts, kind, n_prompts)))


def _with_own_ids(prompts: list[Prompt]) -> list[Prompt]:
    # Statistics group answers by prompt id, so ids must be unique. If a second prompt has the id
    # ``x``, it is renamed to ``x#2``.
    taken = {prompt.prompt_id for prompt in prompts}
    n_seen = Counter[str]()
    renamed = []
    for prompt in prompts:
        name = prompt.prompt_id
        n_seen[name] += 1
        if n_seen[name] > 1:
            while f"{name}#{n_seen[name]}" in taken:
                n_seen[name] += 1
            prompt = replace(prompt, prompt_id=f"{name}#{n_seen[name]}")
        renamed.append(prompt)
    return renamed


def _parse(row: Any, where: str, number: int) -> tuple[str, Prompt]:
    chat = parse_prompt(row)
    if isinstance(chat, Rejection):
        raise DatasetError(
            f"{where} cannot be used ({chat.reason}: {chat.detail}). Correct the row."
        )
    messages = tuple(chat.messages)
    turns: tuple[tuple[Message, ...], ...] = tuple((message,) for message in messages)
    if not chat.asks_each:
        # If the last message is from the assistant, leave this message out. Otherwise the chat
        # already is a prompt.
        turns = (messages[:-1] if messages[-1]["role"] == "assistant" else messages,)
    if not turns[0]:
        raise DatasetError(
            f"{where} contains only an answer of the assistant, and no message before it. Add the "
            "user's message, or delete the row."
        )
    names = ("question_id",) if chat.asks_each else ("prompt_id", "id")
    identifier: Any = number
    for name in names:
        if row.get(name) is not None:
            identifier = row[name]
            break
    prompt_id = printable(str(identifier))
    category = printable(str(row.get("category") or "all"))
    tools = None if chat.tools is None else tuple(chat.tools)
    return SPEC_BENCH if chat.asks_each else CHATS, Prompt(prompt_id, category, turns, tools)


def _choose(prompts: list[Prompt], kind: str, n_prompts: int | None) -> Iterable[Prompt]:
    if kind == CHATS or n_prompts is None:
        return prompts[:n_prompts]
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    in_turn: list[Prompt] = []
    # If a category has fewer prompts than another one, ``zip_longest`` adds None for the missing
    # prompts. Leave out these values.
    for candidate in chain.from_iterable(zip_longest(*by_category.values())):
        if candidate is not None:
            in_turn.append(candidate)
    return in_turn[:n_prompts] if n_prompts < len(prompts) else prompts
