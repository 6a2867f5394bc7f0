"""What clients do that no client should: the server answers with a status, or not at all, and others notice nothing."""

import json
import socket
import string
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_data.moa.targets.live import Target
from moa_data.serving.config import EngineOptions, LimitOptions
from moa_data.tests.kit.attackers import connect, post
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.models import build_text_model, build_tokenizer
from moa_data.tests.kit.serving import MODEL, LiveServer, plain_text, text_target
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE

CHAT = "/v1/chat/completions"
HEADERS = {"content-type": "application/json"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
SETTINGS = (
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed",
    "stop", "stream", "stream_options", "repetition_penalty", "drafter", "n", "tools", "logit_bias",
    "response_format", "user",
)  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return text_target()


@pytest.fixture(scope="module")
def server(target: Target) -> Iterator[LiveServer]:
    with LiveServer(target, {"moa": build_drafter(target.model)}, EngineOptions(tree="3")) as live:
        yield live


def body(content: str = "Hello there", **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0} | changes


def answers_well(server: LiveServer, target: Target) -> None:
    answer = httpx.post(f"{server.address}{CHAT}", json=body(max_tokens=8), timeout=60)
    assert answer.json()["choices"][0]["message"]["content"] == plain_text(target, "Hello there", 8)


def wait_until_free(server: LiveServer) -> None:
    limit = time.monotonic() + 60
    while server.engine.snapshot().n_open:
        assert time.monotonic() < limit, "a text is held for nobody"
        time.sleep(0.01)


def place(server: LiveServer) -> tuple[str, int]:
    host, port = server.address.removeprefix("http://").split(":")
    return host, int(port)


def check_refusal(answer: httpx.Response) -> None:
    if "text/event-stream" in answer.headers.get("content-type", ""):
        assert answer.text.endswith("data: [DONE]\n\n")
        return
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]


def test_fuzzed_settings(server: LiveServer, target: Target) -> None:
    with httpx.Client(base_url=server.address, timeout=60) as client:

        @settings(max_examples=30)
        @given(st.dictionaries(st.sampled_from(SETTINGS) | st.text(string.ascii_letters, max_size=8), JSON, max_size=4))
        def fuzz(changes: dict[str, Any]) -> None:
            for path, own in ((CHAT, {}), ("/v1/completions", {"prompt": "a"})):
                asked = {"model": MODEL, "max_tokens": 2} | (own or {"messages": body()["messages"]}) | changes
                check_refusal(client.post(path, content=json.dumps(asked), headers=HEADERS))

        fuzz()
    wait_until_free(server)
    answers_well(server, target)


def test_fuzzed_messages(server: LiveServer, target: Target) -> None:
    text = st.text(max_size=30) | st.sampled_from(["<|eot_id|>", "\x00", "\ud800", "\ufffd", "🙂" * 5, " "])
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | text, "content": text | JSON},
        optional={"name": JSON, "tool_calls": JSON, "weight": JSON},
    )
    with httpx.Client(base_url=server.address, timeout=60) as client:

        @settings(max_examples=30)
        @given(st.lists(message | JSON, max_size=4))
        def fuzz(messages: list[Any]) -> None:
            check_refusal(client.post(CHAT, content=json.dumps(body(messages=messages, max_tokens=2)), headers=HEADERS))

        fuzz()
    wait_until_free(server)
    answers_well(server, target)


def test_fuzzed_bytes(server: LiveServer, target: Target) -> None:
    """Of whole requests: cut, with bytes changed, and none of HTTP at all."""
    whole = post(CHAT, body(max_tokens=2))

    @settings(max_examples=30)
    @given(st.integers(0, len(whole)), st.binary(min_size=1, max_size=6), st.booleans())
    def fuzz(at: int, noise: bytes, is_cut: bool) -> None:
        data = whole[:at] + noise + (b"" if is_cut else whole[at + len(noise) :])
        with connect(place(server)) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(20)
            found = b""
            while part := connection.recv(65536):
                found += part
        assert found == b"" or found.startswith(b"HTTP/1.1 "), found[:80]

    fuzz()
    wait_until_free(server)
    answers_well(server, target)


def test_large_headers_are_refused(server: LiveServer, target: Target) -> None:
    with connect(place(server)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * (1 << 20))
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
    answers_well(server, target)


@pytest.mark.slow
def test_a_hundred_sessions_at_once(target: Target) -> None:
    """More than share a call, with less memory than they want; each gets the text that it gets alone."""
    asked = [(f"the cat {n} sat", 8 + n % 40) for n in range(100)]
    settings = EngineOptions(tree="3", kv_tokens=2048, most_sequences=16)
    with LiveServer(target, {"moa": build_drafter(target.model)}, settings) as server:

        def ask(index: int) -> str:
            content, n_new = asked[index]
            request = body(content, max_tokens=n_new, stream=index % 2 == 0)
            answer = httpx.post(f"{server.address}{CHAT}", json=request, timeout=600)
            if index % 2:
                return str(answer.json()["choices"][0]["message"]["content"])
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
            return "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines)

        with ThreadPoolExecutor(100) as threads:
            texts = list(threads.map(ask, range(100)))
        counts = server.engine.snapshot()
        wait_until_free(server)
    assert texts == [plain_text(target, content, n_new) for content, n_new in asked]
    assert counts.n_evicted > 0
    assert counts.n_failed == 0


@pytest.mark.slow
def test_readers_that_do_not_read_hold_their_own_texts_alone() -> None:
    """Their connections fill up, their texts wait, and are complete when they read at last."""
    model = build_text_model(max_position_embeddings=8192)
    target = Target(model, build_tokenizer(LLAMA3_TEMPLATE))
    target.eos_token_ids = frozenset()
    n_new = 4000
    settings = EngineOptions(kv_tokens=32768, prefill_chunk=4096)
    with LiveServer(target, engine=settings, limits=LimitOptions(write_s=600)) as server, ExitStack() as held:
        readers = [held.enter_context(connect(place(server), receive_buffer=4096)) for _ in range(3)]
        for reader in readers:
            reader.sendall(post(CHAT, body(max_tokens=n_new, stream=True)))
        limit = time.monotonic() + 300
        while server.engine.snapshot().n_working or not server.engine.snapshot().n_committed:
            assert time.monotonic() < limit
            time.sleep(0.1)
        assert server.engine.snapshot().n_committed < 3 * n_new, "they wait for their readers"
        answers_well(server, target)
        for reader in readers:
            found = b""
            while not found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                part = reader.recv(1 << 16)
                assert part, found[-200:]
                found += part
            assert found.count(b'"finish_reason":"length"') == 1
        assert server.engine.snapshot().n_committed == 3 * n_new + 8
