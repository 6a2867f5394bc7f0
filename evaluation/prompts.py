"""Reads prompts from a file: chats, or multi-turn questions in the format of Spec-Bench.

Chats, one per line: ``{"messages": [{"role", "content"}]}`` or ShareGPT ``{"conversations": [{"from", "value"}]}``; the
prompt is everything before the last assistant message, or the whole chat where it ends with the user.
Optional keys: ``prompt_id`` (else ``id``, else the row's number), ``category``, ``tools``, ``system``.

Spec-Bench, one per line: ``{"question_id", "category", "turns": ["...", ...]}``. Each turn is answered by the target,
and its answer becomes part of the next turn's history.
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
    """One conversation to be answered, turn by turn."""

    prompt_id: str
    category: str
    turns: tuple[tuple[Message, ...], ...]  # for each answer, the messages after the answer before
    # JSON schemas of those that the target may call
    tools: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file, ``chats`` or ``spec-bench``, and how many it held before any were left out."""

    kind: str
    n_in_file: int
    prompts: tuple[Prompt, ...]


def load_prompts(path: str | Path, n_prompts: int | None = None) -> PromptFile:
    """Read a file of prompts, one JSON object per line; a row that is not a prompt is named.

    ``n_prompts``: use this many: of chats the first ones, of Spec-Bench questions in turn from each category.
    """
    path = Path(path).expanduser()
    found = list[tuple[str, Prompt]]()
    try:
        for number, row in enumerate(read_jsonl(path), start=1):
            where = f"{path} row {number}"
            found.append(_parse(row, where, number))
            if found[-1][0] != found[0][0]:
                raise DatasetError(
                    f"{where} is not a prompt of {found[0][0]} as those before; put them into two files."
                )
    except OSError as error:
        raise DatasetError(
            f"{path}: {error.strerror or error}; give a jsonl file of chats or of Spec-Bench questions."
        ) from error
    if not found:
        raise DatasetError(f"{path} holds no prompt; expected one JSON object per line.")
    kind = found[0][0]
    prompts = _with_own_ids([prompt for _, prompt in found])
    return PromptFile(kind, len(prompts), tuple(_choose(prompts, kind, n_prompts)))


def _with_own_ids(prompts: list[Prompt]) -> list[Prompt]:
    # Figures are summed by id: one that occurs again gets a number, ``id#2``.
    given = {prompt.prompt_id for prompt in prompts}
    n_seen = Counter[str]()
    found = []
    for prompt in prompts:
        name = prompt.prompt_id
        n_seen[name] += 1
        while n_seen[name] > 1 and f"{name}#{n_seen[name]}" in given:
            n_seen[name] += 1
        found.append(
            prompt if n_seen[name] == 1 else replace(prompt, prompt_id=f"{name}#{n_seen[name]}")
        )
    return found


def _parse(row: Any, where: str, number: int) -> tuple[str, Prompt]:
    chat = parse_prompt(row)
    if isinstance(chat, Rejection):
        raise DatasetError(f"{where}: {chat.reason} ({chat.detail}); correct the line.")
    messages = tuple(chat.messages)
    turns: tuple[tuple[Message, ...], ...] = tuple((message,) for message in messages)
    if not chat.asks_each:
        # A chat that ends with the question is a prompt as it stands.
        turns = (messages[:-1] if messages[-1]["role"] == "assistant" else messages,)
    if not turns[0]:
        raise DatasetError(
            f"{where}: nothing comes before the assistant's message; correct the line."
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
