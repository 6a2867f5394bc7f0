"""Under each attack, other requests are answered, ``/health`` too.

Afterwards the resources of the attackers are free again.
"""

import json
import logging
import random
import socket
import string
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_data.moa.targets.live import Target
from moa_data.serving import api as api_module
from moa_data.serving import http as http_module
from moa_data.serving.metrics import LOG
from moa_data.tests.kit.attackers import (
    HTTP2_PREFACE,
    WRONG_BODIES,
    connect,
    foreign_pages,
    head_of,
    leave_in_body,
    long_text,
    never_read,
    post,
    stay_silent,
    wait_for_end,
)
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.serving import MODEL, LiveServer, plain_text, text_target, wait_for
from moa_data.tests.kit.variants import quick

from .drafting import Server, Talk

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON_TYPE = {"content-type": "application/json"}
BODY: dict[str, Any] = {"model": MODEL, "prompt": "the cat sat", "temperature": 0, "max_tokens": 8}
STREAM = BODY | {"stream": True, "max_tokens": 60}


@pytest.fixture(scope="module")
def target() -> Target:
    return text_target()


@pytest.fixture(scope="module")
def _large_events() -> Iterator[None]:
    """Make events so large that a few fill the buffers of a client that does not read.

    The server notices such a client quickly.
    """
    event = api_module.event
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            api_module, "event", lambda value: b":" + b"x" * 30_000 + b"\n" + event(value)
        )
        patch.setattr("moa_data.serving.access._STUCK_S", 0.05)
        yield


@pytest.fixture(scope="module")
def server(target: Target, _large_events: None) -> Iterator[LiveServer]:
    engine: dict[str, Any] = {"kv_tokens": 4096, "max_sequences": 2, "max_waiting": 1, "tree": "3"}
    limits: dict[str, Any] = {"max_connections": 8, "max_connections_each": 6, "head_s": 60}
    with LiveServer(target, {"moa": build_drafter(target.model)}, **engine, **limits) as live:
        yield live


@cache
def innocent_text(target: Target) -> str:
    return plain_text(target, target.tokenizer("the cat sat")["input_ids"], 8)


def check_innocent(server: LiveServer, target: Target) -> None:
    answer = httpx.post(f"{server.address}{COMPLETIONS}", json=BODY, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == innocent_text(target)
    assert httpx.get(f"{server.address}/health").json() == {"status": "ok"}


# Attackers: each one gets a server, and a stack that keeps its connections open


def say(data: bytes, n: int = 8) -> Callable[[LiveServer, ExitStack], None]:
    def attack(server: LiveServer, held: ExitStack) -> None:
        for connection in stay_silent(server.endpoint, n, data):
            held.enter_context(connection)

    return attack


def read_nothing(server: LiveServer, held: ExitStack) -> None:
    for _ in range(3):
        held.enter_context(never_read(server.endpoint, post(COMPLETIONS, STREAM)))
    wait_for(
        lambda: server.engine.snapshot().n_open == 3 and not server.engine.snapshot().n_working
    )
    # The server notices that nobody reads only when the buffers of a connection are full.
    wait_for(
        lambda: (
            httpx.post(f"{server.address}{COMPLETIONS}", json=BODY, timeout=60).status_code == 200
        )
    )


def be_refused(data: bytes, status: int) -> Callable[[LiveServer, ExitStack], None]:
    """Send data that gets one answer, after which the connection is closed."""

    def attack(server: LiveServer, held: ExitStack) -> None:
        with connect(server.endpoint) as connection:
            connection.sendall(data)
            found = wait_for_end(connection)
        assert found.startswith(b"HTTP/1.1 %d " % status)
        assert found.count(b"HTTP/1.1") == 1

    return attack


def be_a_foreign_page(server: LiveServer, held: ExitStack) -> None:
    for headers, status in foreign_pages():
        answer = httpx.post(
            f"{server.address}{COMPLETIONS}", content=json.dumps(BODY), headers=headers
        )
        assert (answer.status_code, set(answer.json())) == (status, {"error"}), headers


def send_no_end(server: LiveServer, held: ExitStack) -> None:
    body = (b"x" * (1 << 16) for _ in range(40))  # in chunks, without a length
    assert (
        httpx.post(f"{server.address}{COMPLETIONS}", content=body, headers=JSON_TYPE).status_code
        == 413
    )


TWO_LENGTHS = b"0\r\n\r\nGET /health HTTP/1.1\r\n\r\n"
ATTACKS: dict[str, Callable[[LiveServer, ExitStack], None]] = {
    "silence": say(b""),
    "half a head": say(b"POST /v1/comp"),
    "half a body": say(head_of(COMPLETIONS, 10_000) + b"{"),
    "HTTP/2": say(HTTP2_PREFACE),
    "noise": say(random.Random(1).randbytes(9000)),
    "reading nothing": read_nothing,
    "leaving": lambda server, held: leave_in_body(server.endpoint, COMPLETIONS),
    "leaving by a reset": lambda server, held: leave_in_body(
        server.endpoint, COMPLETIONS, resets=True
    ),
    "a large head": be_refused(b"GET /health HTTP/1.1\r\nx: " + b"a" * (1 << 20), 400),
    "two lengths": be_refused(
        head_of(COMPLETIONS, 5, "transfer-encoding: chunked") + TWO_LENGTHS, 400
    ),
    "two lengths of a check": be_refused(
        head_of("/health", 5, "transfer-encoding: chunked") + TWO_LENGTHS, 400
    ),
    "an endless body": send_no_end,
    "foreign pages": be_a_foreign_page,
}


# Tests of garbage send noise and HTTP/2 as well.
LIKE_OTHERS = {"noise", "HTTP/2", "leaving by a reset", "two lengths of a check", "half a head"}


@pytest.mark.parametrize("name", quick(ATTACKS, ATTACKS.keys() - LIKE_OTHERS))
def test_others_are_answered_under_each_attack(
    name: str, server: LiveServer, target: Target
) -> None:
    with ExitStack() as held:
        ATTACKS[name](server, held)
        check_innocent(server, target)
    server.wait_until_free()


@pytest.mark.parametrize("young_s", [0.0, 60.0])
def test_silent_connections_of_any_age_give_way(
    server: LiveServer, target: Target, young_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moa_data.serving.access._YOUNG_S", young_s)
    with ExitStack() as held:
        say(b"", 40)(server, held)
        check_innocent(server, target)


@pytest.mark.usefixtures("_large_events")
@pytest.mark.parametrize(("answer_s", "write_s"), [(0.8, 30.0), (0, 0.3)], ids=["answer", "write"])
def test_readers_that_never_read_lose_their_slots(
    target: Target, answer_s: float, write_s: float
) -> None:
    limits: dict[str, Any] = {"answer_s": answer_s, "write_s": write_s}
    with (
        LiveServer(target, max_sequences=1, max_waiting=1, **limits) as server,
        ExitStack() as held,
    ):
        for _ in range(2):
            held.enter_context(never_read(server.endpoint, post(COMPLETIONS, STREAM)))
        wait_for(lambda: server.engine.snapshot().n_open == 2)
        server.wait_until_free()
        check_innocent(server, target)


def test_where_all_connections_work_others_are_told(target: Target) -> None:
    with LiveServer(target, target_ms=100, max_connections_each=2) as server:
        with ExitStack() as held:
            for _ in range(2):
                held.enter_context(connect(server.endpoint)).sendall(post(COMPLETIONS, STREAM))
            wait_for(lambda: server.engine.snapshot().n_open == 2)
            answer = httpx.post(f"{server.address}{COMPLETIONS}", json=BODY)
            assert answer.status_code == 503
            assert answer.headers["connection"] == "close"
            assert httpx.get(f"{server.address}/health").status_code == 200
        server.wait_until_free()
        check_innocent(server, target)


def test_heads_and_bodies_have_to_arrive_in_time(target: Target) -> None:
    with LiveServer(target, target_ms=20, head_s=1.0, body_s=0.8) as server, ExitStack() as held:
        long = httpx.Client(timeout=60)
        with long, long.stream("POST", f"{server.address}{COMPLETIONS}", json=STREAM) as stream:
            late = [
                *stay_silent(server.endpoint, 1),
                *stay_silent(server.endpoint, 1, b"GET /health HTT"),
            ]
            again, half = (held.enter_context(connect(server.endpoint)) for _ in range(2))
            again.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert again.recv(4096).startswith(b"HTTP/1.1 200")
            again.sendall(b"GET /hea")
            half.sendall(head_of(COMPLETIONS, 100) + b"{")
            assert b" 408 " in half.recv(4096)
            for connection in map(held.enter_context, [*late, again]):
                wait_for_end(connection)
            assert stream.read().endswith(b"data: [DONE]\n\n"), "an answer may take longer"


@pytest.mark.parametrize("wrong", WRONG_BODIES, ids=lambda wrong: str(wrong)[:40])
def test_a_body_with_many_wrong_items_is_refused_at_the_first(wrong: dict[str, Any]) -> None:
    """An error for each of half a million items took seconds of the event loop."""
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]} | wrong
    ).encode()
    with pytest.raises(api_module.ApiError) as refused:
        api_module.ChatRequest.parse(body)
    assert refused.value.status == 400
    # one error for each type that is allowed
    assert getattr(refused.value.__cause__, "error_count", lambda: 0)() <= 2


@pytest.mark.parametrize("prompt", [[0.5] * 9, [1, None], [{}], [[[]]], [["a"]], [True]], ids=str)
def test_prompts_are_texts_or_token_ids(prompt: list[Any]) -> None:
    body = json.dumps({"model": MODEL, "prompt": prompt}).encode()
    with raises_naming(api_module.ApiError, 400, "'prompt'"):
        _ = api_module.CompletionRequest.parse(body).prompts


def test_names_may_be_allowed_and_tokens_suffice(target: Target) -> None:
    with LiveServer(target, allowed_host=("LLM.example.org",)) as server:
        for host, status in (
            ("llm.example.org", 200), ("llm.example.org.evil.example", 403),
            ("rebound.example", 403),
            ("localhost:1", 200), ("[::1]:8000", 200), ("10.0.0.7", 200), ("[", 403),
        ):  # fmt: skip
            assert (
                httpx.get(f"{server.address}/metrics", headers={"host": host}).status_code == status
            )
        for origin, status in (
            ("https://llm.example.org", 200),
            ("http://evil.example", 403),
            ("http://127.0.0.1:1", 403),
        ):
            assert (
                httpx.get(f"{server.address}/v1/models", headers={"origin": origin}).status_code
                == status
            )
        own = {"host": "10.0.0.7", "origin": "http://10.0.0.7"}
        assert httpx.get(f"{server.address}/v1/models", headers=own).status_code == 200
    with LiveServer(target, tokens=["secret"]) as server:
        headers = {
            "authorization": "Bearer secret",
            "host": "llm.example.org",
            "origin": "https://other.example",
        }
        assert httpx.get(f"{server.address}/v1/models", headers=headers).status_code == 200
        both = [("authorization", "Bearer secret"), ("authorization", "Bearer other")]
        for order in (both, both[::-1]):
            assert httpx.get(f"{server.address}/v1/models", headers=order).status_code == 401


def test_long_prompts_hold_up_long_prompts_alone(
    server: LiveServer, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, encoded, encode = threading.Event(), list[int](), http_module._text_tokens

    def slowly(template: Any, text: str, adds_special: bool) -> list[int]:
        if len(text) > 1000:
            encoded.append(len(text))
            go_on.wait(60)
            return [5] * 1000
        return encode(template, text, adds_special)

    monkeypatch.setattr(http_module, "_text_tokens", slowly)
    monkeypatch.setattr("moa_data.serving.http._SHORT_CHARS", 1000)
    with ExitStack() as held:
        for length in (1001, 1002, 1003):
            request = post(COMPLETIONS, BODY | {"prompt": "x" * length})
            held.enter_context(connect(server.endpoint)).sendall(request)
            wait_for(lambda: bool(encoded))
        check_innocent(server, target)
    time.sleep(0.2)  # Their clients have gone by then.
    go_on.set()
    check_innocent(server, target)
    assert encoded == [1001], "nobody waits for the others"


def test_texts_that_cannot_fit_are_refused_unread(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "_text_tokens", lambda *_: pytest.fail("it was encoded"))
    monkeypatch.setattr(http_module, "_chat_tokens", lambda *_: pytest.fail("it was encoded"))
    text = long_text(random.Random(0), 1_000_000)
    parts = [{"type": "text", "text": text}]
    for path, asked in (
        (COMPLETIONS, {"prompt": text}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        (CHAT, {"messages": [{"role": "user", "content": parts}]}),
    ):
        answer = httpx.post(f"{server.address}{path}", json={"model": MODEL} | asked)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("resets", [False, True])
def test_a_client_that_leaves_during_its_body_is_one_line(
    target: Target, resets: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def statuses(server: LiveServer) -> list[int]:
        """Return the statuses that this server has logged, which has its own thread.

        Other servers may still be logging the clients that left them in earlier tests.
        """
        records = [record for record in caplog.records if record.thread == server.thread_id]
        return [vars(record)["facts"]["status"] for record in records]

    with caplog.at_level(logging.INFO, LOG.name), LiveServer(target) as server:
        leave_in_body(server.endpoint, COMPLETIONS, resets)
        wait_for(lambda: bool(statuses(server)))
        time.sleep(0.1)
        assert statuses(server) == [499]


# Random requests

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
TEXT = st.text(max_size=30) | st.sampled_from(
    ["<|eot_id|>", "\x00", "\ud800", "\ufffd", "🙂" * 5, " "]
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": TEXT | JSON}
)
SETTINGS = (
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "seed",
    "stop", "stream", "stream_options", "repetition_penalty", "drafter", "n", "tools", "logit_bias",
    "response_format", "user",
)  # fmt: skip
CHANGES = st.dictionaries(
    st.sampled_from(SETTINGS) | st.text(string.ascii_letters, max_size=8), JSON, max_size=4
)


@pytest.fixture(scope="module")
def fuzzing_client() -> Iterator[httpx.Client]:
    """Return a client that takes a new connection for each request."""
    # It has no certificates of authorities, whose reading would take a while.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(timeout=60, verify=False, limits=limits) as client:
        yield client


@settings(max_examples=30)
@given(changes=CHANGES | st.fixed_dictionaries({"messages": st.lists(MESSAGE | JSON, max_size=4)}))
def test_fuzzed_requests(
    server: LiveServer, fuzzing_client: httpx.Client, changes: dict[str, Any]
) -> None:
    for path, own in (
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        (COMPLETIONS, {"prompt": "a"}),
    ):
        content = json.dumps({"model": MODEL, "max_tokens": 2} | own | changes)
        answer = fuzzing_client.post(f"{server.address}{path}", content=content, headers=JSON_TYPE)
        if "text/event-stream" in answer.headers.get("content-type", ""):
            assert answer.text.endswith("data: [DONE]\n\n")
            continue
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=20)
@given(at=st.integers(0, 200), noise=st.binary(min_size=1, max_size=6), is_cut=st.booleans())
def test_fuzzed_bytes(server: LiveServer, at: int, noise: bytes, is_cut: bool) -> None:
    """The bytes are those of a request with some of them changed, and sometimes cut there."""
    whole = post(COMPLETIONS, BODY | {"max_tokens": 2})
    with connect(server.endpoint) as connection:
        connection.sendall(whole[:at] + noise + (b"" if is_cut else whole[at + len(noise) :]))
        connection.shutdown(socket.SHUT_WR)
        found = wait_for_end(connection)
    assert found == b"" or found.startswith(b"HTTP/1.1 "), found[:80]


def test_fuzz_left_the_server_well(server: LiveServer, target: Target) -> None:
    server.wait_until_free()
    check_innocent(server, target)


# gRPC


def test_silent_connections_of_grpc_end(target: Target) -> None:
    with Server(target, idle_s=1.0, head_s=0.5) as server:
        for said in (b"", HTTP2_PREFACE):
            silent = stay_silent(("127.0.0.1", server.port), 20, said)
            with Talk(server.grpc_address) as talk:
                talk.opened([5, 9, 33])
            for connection in silent:
                with connection:
                    wait_for_end(connection)


def test_silent_sessions_give_way(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moa_data.serving.grpc._SILENT_S", 0.2)
    with Server(target, max_sessions_each=2) as server, ExitStack() as held:
        silent = [held.enter_context(Talk(server.grpc_address)) for _ in range(2)]
        for talk in silent:
            talk.opened([5, 9, 33])
        time.sleep(0.3)
        with Talk(server.grpc_address) as talk:
            talk.opened([5, 9, 33])
            assert len(talk.verify(3).tokens) == 1
        assert silent[0].status().name == "UNAVAILABLE"
        assert len(silent[1].verify(3).tokens) == 1
