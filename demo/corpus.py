"""Generates a small, varied chat corpus from a seed, which the demo trains its target on.

The task families (see `FAMILIES`) draw their words, numbers and phrasings from one `random.Random`, so that text is
neither constant nor noise: answers follow from their prompts, and no prompt occurs twice. The held-out prompts come
from the same families and share no opening with the training chats. Every row is
`{"messages": [{"role", "content"}, ...], "category": family}`.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import OptionInvalid
from ..storage.disk.durable import write_atomic
from . import families
from .families import Chat

FAMILIES = families.FAMILIES
TRAIN_FILE = "train.jsonl"
HELD_OUT_FILE = "held_out.jsonl"
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly and correctly.", "You are a patient teacher.")
SYSTEM_SHARE = 0.1
MAX_REDRAWS = 200


@dataclass(frozen=True)
class CorpusStats:
    """Figures of how varied a set of chats is.

    Attributes:
        zlib_ratio: Raw bytes over zlib bytes (level 6); 1 for noise, hundreds for constant text.
        word_entropy_bits: Unigram entropy of the whitespace-separated words, in bits per word.
        distinct_openings: Share of chats whose opening (the text before the first answer) is unique.
    """

    n_chats: int
    n_chars: int
    zlib_ratio: float
    word_entropy_bits: float
    distinct_openings: float
    by_category: dict[str, int]

    def to_dict(self) -> dict[str, object]:
        """Return the fields as a JSON-ready dict."""
        return asdict(self)


@dataclass(frozen=True)
class Corpus:
    """Training chats and held-out chats (whose last message is the reference answer), in file order."""

    train: list[dict[str, object]]
    held_out: list[dict[str, object]]


def opening(messages: Chat) -> str:
    """Return the user text before the first answer: what must not be shared by the training and the held-out chats."""
    parts = []
    for message in messages:
        if message["role"] == "assistant":
            break
        if message["role"] == "user":
            parts.append(message["content"])
    return "\n".join(parts)


def generate_corpus(n_train: int, n_held_out: int, seed: int) -> Corpus:
    """Generate the corpus; equal arguments give equal rows on every machine.

    Args:
        n_held_out: Held-out chats; families take turns, so that each is represented.

    Raises:
        OptionInvalid: If a count is below 1, or a family cannot give as many different prompts.
    """
    if n_train < 1 or n_held_out < 1:
        raise OptionInvalid(
            f"a corpus needs at least one training and one held-out chat, got {n_train} and {n_held_out}"
        )
    rng = random.Random(seed)
    seen: set[str] = set()
    held_out = list(_rows(rng, n_held_out, seen))
    train = list(_rows(rng, n_train, seen))
    rng.shuffle(train)
    return Corpus(train=train, held_out=held_out)


def _rows(rng: random.Random, count: int, seen: set[str]) -> Iterator[dict[str, object]]:
    """Yield `count` rows, families in turn, each opening new to `seen` (which grows)."""
    names = list(FAMILIES)
    for index in range(count):
        name = names[index % len(names)]
        messages = _new_chat(rng, name, seen)
        if rng.random() < SYSTEM_SHARE:
            messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}, *messages]
        yield {"messages": messages, "category": name}


def _new_chat(rng: random.Random, name: str, seen: set[str]) -> Chat:
    """Draw chats of one family until the opening is new; record it in `seen`."""
    for _ in range(MAX_REDRAWS):
        messages = FAMILIES[name](rng)
        key = opening(messages)
        if key not in seen:
            seen.add(key)
            return messages
    raise OptionInvalid(
        f"family {name!r} gave no new prompt in {MAX_REDRAWS} draws ({len(seen)} used); ask for fewer chats"
    )


def corpus_stats(rows: list[dict[str, object]]) -> CorpusStats:
    """Measure the variety of `rows`."""
    texts = [message["content"] for row in rows for message in _messages(row)]
    raw = "\n".join(texts).encode("utf-8")
    words = Counter(word for text in texts for word in text.split())
    total = sum(words.values())
    openings = Counter(opening(_messages(row)) for row in rows)
    return CorpusStats(
        n_chats=len(rows),
        n_chars=sum(len(text) for text in texts),
        zlib_ratio=len(raw) / len(zlib.compress(raw, 6)),
        word_entropy_bits=-sum(n / total * math.log2(n / total) for n in words.values()),
        distinct_openings=sum(1 for n in openings.values() if n == 1) / len(rows),
        by_category=dict(Counter(str(row["category"]) for row in rows)),
    )


def _messages(row: dict[str, object]) -> Chat:
    """Return the messages of a row, with their type."""
    messages = row["messages"]
    assert isinstance(messages, list)
    return messages


def write_jsonl(rows: list[dict[str, object]], path: Path) -> None:
    """Write rows as JSON lines, atomically."""
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def read_jsonl(path: Path) -> list[dict[str, object]]:
    """Read the rows that `write_jsonl` wrote."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
