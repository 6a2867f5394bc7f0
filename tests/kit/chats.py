"""Builds chats and files of chats."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from moa_data.moa.targets.chat import Rejection, RejectReason
from moa_data.moa.targets.chat_tokens import TokenizedChat

from .models import TEXT

WORDS = TEXT.split()


def chat(*contents: str, **extra: Any) -> dict[str, Any]:
    """Return a chat of alternating user and assistant messages."""
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)],
        **extra,
    }


def rejected(found: object, reason: RejectReason, *details: str) -> None:
    """Check that a row was rejected for a reason, and that its details contain these texts."""
    assert isinstance(found, Rejection), found
    assert found.reason is reason, found
    for detail in details:
        assert detail in found.detail


def marked_texts(tokenizer: Any, chat: object) -> list[str]:
    """Return the text of each run of tokens in the response mask."""
    assert isinstance(chat, TokenizedChat), chat
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chat.response_mask, [0]])))
    return [
        tokenizer.decode(chat.tokens[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]


def random_chats(n_chats: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return chats of one to three turns whose answers vary in length."""
    draw = random.Random(seed)
    chats = []
    for number in range(n_chats):
        messages = []
        for _ in range(draw.randint(1, 3)):
            messages.append(
                {"role": "user", "content": f"{number}: " + " ".join(draw.choices(WORDS, k=4))}
            )
            answer = " ".join(draw.choices(WORDS, k=draw.randint(1, 20)))
            messages.append({"role": "assistant", "content": answer})
        chats.append({"messages": messages})
    return chats


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Write rows as JSON lines. A string is written unchanged."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path
