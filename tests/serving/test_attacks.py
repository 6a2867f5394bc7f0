"""Under each attack others are answered, ``/health`` too, and what the attackers held comes back."""

import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from moa_data.moa.targets.live import Target
from moa_data.serving import api as api_module
from moa_data.serving import grpc as drafting_module
from moa_data.serving import http as http_module
from moa_data.serving.access import BearerTokens
from moa_data.serving.config import DraftingOptions, EngineOptions, LimitOptions
from moa_data.serving.detokenizer import StopStrings
from moa_data.serving.metrics import LOG
from moa_data.tests.kit.attackers import (
    HTTP2_PREFACE,
    connect,
    foreign_pages,
    head_of,
    leave_in_body,
    never_read,
    post,
    stay_silent,
    wait_for_end,
)
from moa_data.tests.kit.certificates import make_certificates
from moa_data.tests.kit.serving import MODEL, LiveServer, plain_text, text_target

from .drafting import Server, Talk

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "the cat sat", "temperature": 0, "max_tokens": 8}
MANY = EngineOptions(kv_tokens=4096)


@pytest.fixture(scope="module")
def target() -> Target:
    return text_target()


@pytest.fixture(scope="module")
def server(target: Target) -> Iterator[LiveServer]:
    with LiveServer(target, engine=MANY) as live:
        yield live


def place(server: LiveServer) -> tuple[str, int]:
    host, port = server.address.partition("://")[2].split(":")
    return host, int(port)


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.01)


def check_innocent(server: LiveServer, target: Target) -> None:
    answer = httpx.post(f"{server.address}{COMPLETIONS}", json=BODY, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == plain_text(target, target.tokenizer("the cat sat")["input_ids"], 8)
    assert httpx.get(f"{server.address}/health").json() == {"status": "ok"}


@pytest.fixture
def large_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens fill the buffers of a reader that does not read."""
    event = api_module.event
    monkeypatch.setattr(api_module, "event", lambda value: b":" + b"x" * 30_000 + b"\n" + event(value))


STREAM = BODY | {"stream": True, "max_tokens": 60}


@pytest.mark.usefixtures("large_events")
@pytest.mark.parametrize(("answer_s", "write_s"), [(0.8, 30.0), (0, 0.3)], ids=["answer", "write"])
def test_readers_that_never_read_lose_their_slots(target: Target, answer_s: float, write_s: float) -> None:
    engine, limits = EngineOptions(most_sequences=1, most_waiting=1), LimitOptions(answer_s=answer_s, write_s=write_s)
    with LiveServer(target, engine=engine, limits=limits) as server, ExitStack() as held:
        for _ in range(2):
            held.enter_context(never_read(place(server), post(COMPLETIONS, STREAM)))
        wait_for(lambda: server.engine.snapshot().n_open == 2)
        wait_for(lambda: server.engine.snapshot().n_open == 0)
        check_innocent(server, target)


@pytest.mark.usefixtures("large_events")
def test_readers_that_never_read_give_way(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moa_data.serving.access._STUCK_S", 0.05)
    engine = EngineOptions(most_sequences=1, most_waiting=1)
    with LiveServer(target, engine=engine) as server, ExitStack() as held:
        for _ in range(2):
            held.enter_context(never_read(place(server), post(COMPLETIONS, STREAM)))
        wait_for(lambda: server.engine.snapshot().n_open == 2 and not server.engine.snapshot().n_working)
        time.sleep(0.2)
        check_innocent(server, target)


@pytest.mark.parametrize("young_s", [0.0, 60.0])
def test_connections_without_a_request_give_way(
    target: Target, young_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moa_data.serving.access._YOUNG_S", young_s)
    limits = LimitOptions(most_connections=6, most_connections_each=4, head_s=60)
    with LiveServer(target, limits=limits) as server, ExitStack() as held:
        for said in (b"", b"POST /v1/comp", head_of(COMPLETIONS, 10_000) + b"{"):
            for connection in stay_silent(place(server), 6, said):
                held.enter_context(connection)
            check_innocent(server, target)


def test_where_all_connections_work_others_are_told(target: Target) -> None:
    limits = LimitOptions(most_connections_each=2)
    with LiveServer(target, engine=EngineOptions(target_ms=50), limits=limits) as server:
        with ExitStack() as held:
            for _ in range(2):
                held.enter_context(connect(place(server))).sendall(post(COMPLETIONS, STREAM))
            wait_for(lambda: server.engine.snapshot().n_open == 2)
            answer = httpx.post(f"{server.address}{COMPLETIONS}", json=BODY)
            assert answer.status_code == 503
            assert answer.headers["connection"] == "close"
            assert httpx.get(f"{server.address}/health").status_code == 200
        wait_for(lambda: server.engine.snapshot().n_open == 0)
        check_innocent(server, target)


def test_a_head_has_to_arrive_in_time(target: Target) -> None:
    limits = LimitOptions(head_s=0.3)
    with LiveServer(target, engine=EngineOptions(target_ms=20), limits=limits) as server, ExitStack() as held:
        long = httpx.Client(timeout=30)
        with long, long.stream("POST", f"{server.address}{COMPLETIONS}", json=STREAM) as stream:
            late = [*stay_silent(place(server), 1), *stay_silent(place(server), 1, b"GET /health HTT")]
            again = held.enter_context(connect(place(server)))
            again.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert again.recv(4096).startswith(b"HTTP/1.1 200")
            again.sendall(b"GET /hea")
            for connection in map(held.enter_context, [*late, again]):
                wait_for_end(connection)
            assert stream.read().endswith(b"data: [DONE]\n\n"), "an answer may take longer"


def test_a_tls_handshake_has_to_end_in_time(target: Target, tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    limits = LimitOptions(most_connections_each=4, head_s=0.3)
    config = {"tls_cert": str(files.chain), "tls_key": str(files.key)}
    client = httpx.Client(verify=ssl.create_default_context(cafile=str(files.authority)))
    with LiveServer(target, config=config, limits=limits) as server, client:
        silent = stay_silent(place(server), 6)
        assert client.get(f"{server.address}/health").status_code == 200
        for connection in silent:
            with connection:
                wait_for_end(connection)


def test_web_pages_of_other_sites_are_refused(server: LiveServer, target: Target) -> None:
    for headers, status in foreign_pages():
        for content in (json.dumps(BODY), ""):
            answer = httpx.post(f"{server.address}{COMPLETIONS}", content=content, headers=headers)
            assert (answer.status_code, set(answer.json())) == (status, {"error"}), headers
    for path in ("/v1/models", "/metrics"):
        assert httpx.get(f"{server.address}{path}", headers={"host": "rebound.example"}).status_code == 403
        assert httpx.get(f"{server.address}{path}", headers={"origin": "http://evil.example"}).status_code == 403
        for host in ("localhost:1", "[::1]:8000", "10.0.0.7"):
            own = {"host": host, "origin": f"http://{host}"}
            assert httpx.get(f"{server.address}{path}", headers=own).status_code == 200
    check_innocent(server, target)


def test_names_may_be_allowed_and_tokens_suffice(target: Target) -> None:
    with LiveServer(target, config={"allowed_host": ("LLM.example.org",)}) as server:
        for host, status in (("llm.example.org", 200), ("llm.example.org.evil.example", 403)):
            for headers in ({"host": host}, {"origin": f"https://{host}"}):
                assert httpx.get(f"{server.address}/v1/models", headers=headers).status_code == status
    with LiveServer(target, tokens=BearerTokens(["secret"])) as server:
        headers = {"authorization": "Bearer secret", "host": "llm.example.org", "origin": "https://other.example"}
        assert httpx.get(f"{server.address}/v1/models", headers=headers).status_code == 200


def test_of_two_authorizations_none_counts(target: Target) -> None:
    both = [("authorization", "Bearer secret"), ("authorization", "Bearer other")]
    with LiveServer(target, tokens=BearerTokens(["secret"])) as server:
        for order in (both, both[::-1]):
            assert httpx.get(f"{server.address}/v1/models", headers=order).status_code == 401
    with Server(target, tokens=["secret"]) as drafting:
        for order in (both, both[::-1]):
            with Talk(drafting.address, order) as talk:
                talk.open([5, 9])
                assert talk.status().name == "UNAUTHENTICATED"


@pytest.mark.parametrize("path", ["/health", COMPLETIONS])
def test_a_request_of_two_lengths_is_refused_and_closed(server: LiveServer, path: str) -> None:
    with connect(place(server)) as connection:
        connection.sendall(head_of(path, 5, "transfer-encoding: chunked") + b"0\r\n\r\nGET /health HTTP/1.1\r\n\r\n")
        found = wait_for_end(connection)
    assert found.startswith(b"HTTP/1.1 400 ")
    assert found.count(b"HTTP/1.1") == 1


def test_long_prompts_hold_up_long_prompts_alone(
    server: LiveServer, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, encoded, encode = threading.Event(), list[int](), http_module._text_tokens

    def slowly(tokenizer: Any, text: str) -> list[int]:
        if len(text) > 1000:
            encoded.append(len(text))
            go_on.wait(30)
            return [5] * 1000
        return encode(tokenizer, text)

    monkeypatch.setattr(http_module, "_text_tokens", slowly)
    monkeypatch.setattr("moa_data.serving.http._SHORT_CHARS", 1000)
    with ExitStack() as held:
        for length in (1001, 1002, 1003):
            request = post(COMPLETIONS, BODY | {"prompt": "x" * length})
            held.enter_context(connect(place(server))).sendall(request)
            wait_for(lambda: bool(encoded))
        check_innocent(server, target)
    time.sleep(0.2)  # their clients have gone
    go_on.set()
    check_innocent(server, target)
    assert encoded == [1001], "nobody waits for the others"


def test_texts_that_cannot_fit_are_refused_unread(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "_text_tokens", lambda *_: pytest.fail("it was encoded"))
    monkeypatch.setattr(http_module, "_chat_tokens", lambda *_: pytest.fail("it was encoded"))
    text = "x" * 1_000_000
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
    server: LiveServer, resets: bool, caplog: pytest.LogCaptureFixture
) -> None:
    wait_for(lambda: not server.service.metrics.n_in_flight)  # requests before, which are logged after their answers
    time.sleep(0.05)
    with caplog.at_level(logging.INFO, LOG.name):
        leave_in_body(place(server), COMPLETIONS, resets)
        wait_for(lambda: bool(caplog.records))
        time.sleep(0.1)
    assert [vars(record)["facts"]["status"] for record in caplog.records] == [499]


def test_stop_strings_do_not_depend_on_pieces() -> None:
    def passed(stops: list[str], pieces: list[str]) -> str:
        search = StopStrings(stops)
        return "".join(map(search.push, pieces)) + search.rest()

    assert passed(["abc", "b"], ["abc"]) == passed(["abc", "b"], list("abc")) == "a"
    assert passed(["aab"], ["aa", "aab", "c"]) == "aa"
    assert passed(["a" * 255 + "b"], list("a" * 2000 + "c")) == "a" * 2000 + "c"


def test_tiny_temperatures_and_penalties_are_numbers(server: LiveServer, target: Target) -> None:
    greedy = plain_text(target, target.tokenizer("the cat sat")["input_ids"], 8)
    for temperature in (1e-308, 5e-324, 1e-5):
        answer = httpx.post(f"{server.address}{COMPLETIONS}", json=BODY | {"temperature": temperature, "seed": 1})
        assert answer.json()["choices"][0]["text"] == greedy
    extreme = BODY | {"temperature": 1.0, "repetition_penalty": 1e-308}
    assert httpx.post(f"{server.address}{COMPLETIONS}", json=extreme).json()["choices"][0]["text"]


def test_silent_connections_of_grpc_end(target: Target) -> None:
    with Server(target, settings=DraftingOptions(open_s=0.5, idle_s=1.0)) as server:
        host, port = server.address.split(":")
        for said in (b"", HTTP2_PREFACE):
            silent = stay_silent((host, int(port)), 20, said)
            with Talk(server.address) as talk:
                talk.opened([5, 9, 33])
            for connection in silent:
                with connection:
                    wait_for_end(connection)


def test_silent_sessions_give_way(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting_module, "_SILENT_S", 0.2)
    with Server(target, settings=DraftingOptions(most_sessions_each=2)) as server, ExitStack() as held:
        silent = [held.enter_context(Talk(server.address)) for _ in range(2)]
        for talk in silent:
            talk.opened([5, 9, 33])
        time.sleep(0.3)
        with Talk(server.address) as talk:
            talk.opened([5, 9, 33])
            assert len(talk.verify(3).tokens) == 1
        assert silent[0].status().name == "UNAVAILABLE"
        assert len(silent[1].verify(3).tokens) == 1
