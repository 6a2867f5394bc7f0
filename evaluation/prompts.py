"""Reads prompts from a file: chats, or multi-turn questions in the format of Spec-Bench.

Chats, one per line: ``{"messages": [{"role", "content"}]}`` or ShareGPT ``{"conversations": [{"from", "value"}]}``; the
prompt is everything before the last assistant message, or the whole chat where it ends with the user.
Optional keys: ``prompt_id`` (else ``id``, else the line's number), ``category``, ``tools``, ``system``.

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
from ..moa.targets.chat import Message, Rejection, UnreadableRow, parse_prompt
from ..pipeline.dataset import parse_json
from ..text import printable

CHATS, SPEC_BENCH = "chats", "spec-bench"


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered, turn by turn.

    Attributes:
        turns: for each answer, the messages that come before it and after the answer before.
        tools: JSON schemas of the tools that the target may call, None where there are none.
        system: text of the system column, which the chat template has to show; else empty.
    """

    prompt_id: str
    category: str
    turns: tuple[tuple[Message, ...], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    system: str = ""


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file.

    Attributes:
        kind: ``chats`` or ``spec-bench``.
        n_in_file: prompts in the file, before any were left out.
    """

    kind: str
    n_in_file: int
    prompts: tuple[Prompt, ...]


def load_prompts(path: str | Path, n_prompts: int | None = None) -> PromptFile:
    """Read a file of prompts, one JSON object per line; a line that is no prompt is named.

    Every prompt has an id of its own: one that occurs again gets a number, ``id#2``. Figures are summed by it.

    Args:
        n_prompts: use this many: of chats the first ones, of Spec-Bench questions in turn from each category, so that
            every category is there; None uses all.
    """
    path = Path(path).expanduser()
    try:
        # Not splitlines: JSON strings may hold U+2028 and other characters that it takes for the end of a line.
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise DatasetError(f"{path} does not exist; give a file of chats or of Spec-Bench questions.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read as UTF-8 text: {error}. Give a jsonl file.") from error
    prompts: list[Prompt] = []
    kinds: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        kind, prompt = _parse_line(line, where, number)
        kinds.add(kind)
        prompts.append(prompt)
        if len(kinds) > 1:
            raise DatasetError(f"{where} is a {kind} prompt, the lines before are not; put them into two files.")
    if not prompts:
        raise DatasetError(f"{path} holds no prompt; expected one JSON object per line.")
    kind = kinds.pop()
    return PromptFile(kind, len(prompts), tuple(_choose(_with_own_ids(prompts), kind, n_prompts)))


def _with_own_ids(prompts: list[Prompt]) -> list[Prompt]:
    given, n_seen, found = {prompt.prompt_id for prompt in prompts}, Counter[str](), []
    for prompt in prompts:
        name = prompt.prompt_id
        n_seen[name] += 1
        while n_seen[name] > 1 and f"{name}#{n_seen[name]}" in given:
            n_seen[name] += 1
        found.append(prompt if n_seen[name] == 1 else replace(prompt, prompt_id=f"{name}#{n_seen[name]}"))
    return found


def _parse_line(line: str, where: str, number: int) -> tuple[str, Prompt]:
    row = parse_json(line)
    if isinstance(row, UnreadableRow):
        raise DatasetError(f"{where} is {row.detail}; expected one JSON object per line.")
    if not isinstance(row, dict):
        raise DatasetError(f"{where} is a {type(row).__name__}, expected an object with messages or turns.")
    if "turns" in row:
        return SPEC_BENCH, _spec_bench_prompt(row, where, number)
    return CHATS, _chat_prompt(row, where, number)


def _spec_bench_prompt(row: dict[str, Any], where: str, number: int) -> Prompt:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise DatasetError(f"{where}: turns must be a list of texts, got {str(turns)[:60]!r}; correct the line.")
    return Prompt(
        prompt_id=_identity(row, number, "question_id"),
        category=printable(str(row.get("category", "all"))),
        turns=tuple(({"role": "user", "content": text},) for text in turns),
    )


def _chat_prompt(row: dict[str, Any], where: str, number: int) -> Prompt:
    chat = parse_prompt(row)
    if isinstance(chat, Rejection):
        raise DatasetError(f"{where}: {chat.reason} ({chat.detail}); correct the line.")
    # A chat that ends with the question is a prompt as it stands.
    messages = chat.messages
    n_before = len(messages)
    if messages[-1]["role"] == "assistant":
        n_before -= 1
    if n_before == 0:
        raise DatasetError(f"{where}: nothing comes before the assistant's message; correct the line.")
    category = printable(str(row.get("category") or "all"))
    tools = None if chat.tools is None else tuple(chat.tools)
    turns = (tuple(messages[:n_before]),)
    return Prompt(_identity(row, number, "prompt_id", "id"), category, turns, tools, chat.system)


def _identity(row: dict[str, Any], number: int, *keys: str) -> str:
    """Return the first of some keys that holds something, else the number of the line."""
    return printable(str(next((row[key] for key in keys if row.get(key) is not None), number)))


def _choose(prompts: list[Prompt], kind: str, n_prompts: int | None) -> Iterable[Prompt]:
    if n_prompts is None or n_prompts >= len(prompts):
        return prompts
    if kind == CHATS:
        return prompts[:n_prompts]
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    in_turn = [prompt for prompt in chain.from_iterable(zip_longest(*by_category.values())) if prompt is not None]
    return in_turn[:n_prompts]
