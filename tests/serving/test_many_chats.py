"""Chats of many clients are tokenised at the same time.

Short and long ones have threads of their own.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest

from moa_data.moa.targets.chat_tokens import prompt_tokens
from moa_data.tests.kit.serving import MODEL, LiveServer, text_target

N_TURNS = 1001
N_LONG_CHATS = 2
SHORT: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
LONG: list[dict[str, Any]] = [
    {"role": "assistant" if turn % 2 else "user", "content": "Tell me more."}
    for turn in range(N_TURNS)
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr("moa_data.serving.http._SHORT_CHARS", 1000)
    with LiveServer(text_target()) as live:
        monkeypatch.setattr(live.service, "_max_chars", 1_000_000)
        yield live


def test_short_texts_beside_long_chats_are_all_read(server: LiveServer) -> None:
    """Six clients tokenise a short chat all the time, while two send chats of many turns."""
    expected = {
        len(chat): prompt_tokens(server.service.target.template, chat) for chat in (SHORT, LONG)
    }
    is_over = threading.Event()
    # Without verification, since httpx would read all certificates of authorities for each client.

    def ask(client: httpx.Client, chat: list[dict[str, Any]]) -> str:
        answer = client.post(f"{server.address}/tokenize", json={"model": MODEL, "messages": chat})
        is_right = answer.status_code == 200 and answer.json()["tokens"] == expected[len(chat)]
        return "" if is_right else answer.text[:200]

    def ask_all_the_time() -> list[str]:
        found = []
        with httpx.Client(timeout=60, verify=False) as client:
            while not is_over.is_set():
                found.append(ask(client, SHORT))
        return found

    def ask_some_times() -> list[str]:
        with httpx.Client(timeout=60, verify=False) as client:
            return [ask(client, LONG) for _ in range(N_LONG_CHATS)]

    with ThreadPoolExecutor(8) as threads:
        short = [threads.submit(ask_all_the_time) for _ in range(6)]
        long = [threads.submit(ask_some_times) for _ in range(2)]
        try:
            refused = [problem for clients in long for problem in clients.result() if problem]
        finally:
            is_over.set()
        refused += [problem for clients in short for problem in clients.result() if problem]
    assert not refused
