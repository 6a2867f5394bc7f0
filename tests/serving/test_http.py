"""The HTTP server, used by OpenAI's own client and by clients that behave worse."""

import asyncio
import json
import logging
import re
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import pytest

from moa_data.moa.targets.live import Target
from moa_data.serving.api import RequestOutput
from moa_data.serving.metrics import LOG, JsonLines
from moa_data.tests.kit.attackers import connect, post, stay_silent, wait_for_end
from moa_data.tests.kit.certificates import make_certificates
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.serving import MODEL, LiveServer, plain_text, text_target, wait_for

if TYPE_CHECKING:
    from openai import OpenAI

HELLO = [{"role": "user", "content": "Hello there"}]
JSON = {"content-type": "application/json"}
BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def target() -> Target:
    return text_target()


@pytest.fixture(scope="module")
def server(target: Target) -> Iterator[LiveServer]:
    with LiveServer(
        target, {"moa": build_drafter(target.model)}, tree="3", max_new_tokens=200
    ) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> "Iterator[OpenAI]":
    with client_of(server) as client:
        yield client


def client_of(server: LiveServer, key: str = "none", **options: Any) -> "OpenAI":
    from openai import OpenAI

    return OpenAI(
        base_url=f"{server.address}/v1", api_key=key, max_retries=0, timeout=60, **options
    )


def ask(client: "OpenAI", said: Any = "Hello there", **options: Any) -> Any:
    create: Any = client.chat.completions.create
    options = {"model": MODEL, "temperature": 0, "max_tokens": 16} | options
    return create(messages=[{"role": "user", "content": said}], **options)


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def streamed(client: "OpenAI", **options: Any) -> tuple[str, list[Any]]:
    chunks = list(ask(client, stream=True, **options))
    return "".join(
        chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
    ), chunks


def test_a_chat_is_answered_as_by_plain_decoding(client: "OpenAI", target: Target) -> None:
    import openai

    answer = ask(client)
    assert text_of(answer) == plain_text(target, "Hello there", 16) != ""
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
    assert answer.id.startswith("chatcmpl-")
    assert answer._request_id.startswith("req-")
    assert text_of(ask(client, extra_body={"drafter": "none"})) == text_of(answer)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "moa-data"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_streaming_gives_the_same_in_pieces(client: "OpenAI", target: Target) -> None:
    text, chunks = streamed(client, stream_options={"include_usage": True})
    assert text == plain_text(target, "Hello there", 16)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (
        len(chunks) - 2
    ) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 16
    assert len(chunks) > 6, "in pieces"
    text_again, chunks = streamed(client)
    assert text_again == text
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_completions_take_a_text_or_tokens(client: "OpenAI", target: Target) -> None:
    tokens = target.tokenizer("the cat sat")["input_ids"]
    answer = client.completions.create(model=MODEL, prompt="the cat sat", temperature=0)
    assert answer.choices[0].text == plain_text(target, tokens, 16)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16, "the API's default"
    expected = plain_text(target, tokens, 6)
    for prompt in (tokens, ["the cat sat"], [tokens]):
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=6)
        assert answer.choices[0].text == expected
        assert answer.object == "text_completion"
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=tokens, temperature=0, max_tokens=6, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "length"


def test_answers_end_at_stop_strings_wherever_tokens_begin(
    client: "OpenAI", target: Target
) -> None:
    text = plain_text(target, "Hello there", 40)
    stops = [
        stop
        for stop in (text[at : at + 4] for at in range(1, len(text) - 4, 15))
        if "\ufffd" not in stop
    ]
    assert len(stops) > 2
    for stop in stops:
        found, chunks = streamed(client, max_tokens=40, stop=["never there", stop])
        assert found == text[: text.index(stop)], "nothing of the stop string is sent"
        assert chunks[-1].choices[0].finish_reason == "stop"
    assert text_of(ask(client, max_tokens=40, stop=stops[0])) == text[: text.index(stops[0])]
    # The text is held back as a possible start of the stop string, and sent at the end.
    assert text_of(ask(client, max_tokens=40, stop=text[-3:] + "?")) == text


def test_seed_and_temperature(client: "OpenAI") -> None:
    def answer(**changes: Any) -> str:
        return text_of(ask(client, **{"temperature": 1.0, "top_p": 0.9, "max_tokens": 6} | changes))

    one, greedy = answer(seed=1), answer(temperature=0)
    assert answer(seed=1, extra_body={"drafter": "none"}) == one
    assert len({one, answer(seed=2), answer(), answer(), greedy}) == 5, "another seed each time"
    for changes in (
        {"top_p": 0},
        {"extra_body": {"top_k": 1}},
        {"temperature": 1e-308},
        {"temperature": 5e-324},
    ):
        assert answer(seed=1, **changes) == greedy
    for penalty in (3.0, 1e-308):
        assert answer(temperature=0, extra_body={"repetition_penalty": penalty}) != greedy


@pytest.mark.parametrize("n", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_each_of_many_at_once_gets_what_it_gets_alone(target: Target, n: int) -> None:
    """There are more requests than share a call, with less memory than they need."""
    asked = [(f"the cat {k} sat", 8 + k % 40) for k in range(n)]
    drafters = {"moa": build_drafter(target.model)}
    with (
        LiveServer(target, drafters, tree="3", kv_tokens=2048, max_sequences=16) as server,
        client_of(server) as client,
    ):

        def answer(index: int) -> str:
            content, n_new = asked[index]
            if index % 2:
                return text_of(ask(client, content, max_tokens=n_new, timeout=600))
            return streamed(client, said=content, max_tokens=n_new, timeout=600)[0]

        with ThreadPoolExecutor(n) as threads:
            texts = list(threads.map(answer, range(n)))
        counts = server.engine.snapshot()
        server.wait_until_free()
    assert texts == [plain_text(target, content, n_new) for content, n_new in asked]
    assert n == 8 or counts.n_evicted > 0
    assert counts.n_failed == 0


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"model": None}, "model", "invalid_value"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_value"),
    ({"top_p": -1}, "top_p", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 201}, "max_tokens", "invalid_value"),
    ({"max_tokens": 255}, "max_tokens", "context_length_exceeded"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"stop": list("abcde")}, "stop", "invalid_value"),
    ({"stop": [""]}, "stop", "invalid_value"),
    ({"stop": "x" * 257}, "stop", "invalid_value"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"chunks": 2}}, "stream_options", "unsupported_parameter"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "unsupported_parameter"),
    ({"n": 129}, "n", "invalid_value"),
    ({"min_p": 1.5}, "min_p", "invalid_value"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "invalid_value"),
    ({"logit_bias": {"400": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"7": 101}}, "logit_bias", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
        "unsupported_parameter",
    ),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
    ({"warmth": 0}, "warmth", "unknown_parameter"),
    ({"drafter": "condor"}, "drafter", "invalid_value"),
    (said("x", "oracle"), None, "invalid_prompt"),
    (said([{"type": "image_url", "image_url": {"url": "x"}}]), None, "invalid_prompt"),
    (said(""), None, "invalid_prompt"),
    (said("<|eot_id|>"), None, "invalid_prompt"),
    (said("word " * 300), None, "context_length_exceeded"),
]


@pytest.mark.parametrize(("changes", "param", "code"), BAD, ids=lambda value: str(value)[:60])
def test_bad_requests_are_refused_in_the_api_s_form(
    client: "OpenAI", changes: dict[str, Any], param: str | None, code: str
) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=BODY | changes, cast_to=object)
    error = caught.value
    assert isinstance(error.body, dict)
    assert "\n" not in error.body["message"]
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
    assert error.request_id is not None


def test_settings_that_change_nothing_are_taken(client: "OpenAI") -> None:
    answer = ask(
        client, n=1, frequency_penalty=0, presence_penalty=0.0, logprobs=False, logit_bias={},
        user="me", stop=None,
        response_format={"type": "text"}, metadata={"a": "b"}, seed=None, max_tokens=None,
        max_completion_tokens=5,
        extra_body={"top_k": -1, "stop_token_ids": [], "skip_special_tokens": True,
                    "length_penalty": 1.0},
    )  # fmt: skip
    assert answer.usage.completion_tokens == 5
    parts = [{"type": "text", "text": "Hello there"}]
    assert text_of(ask(client, parts, max_tokens=5)) == text_of(answer)


PROMPTS: tuple[Any, ...] = (
    [],
    [[]],
    ["a", [1]],
    [[1], []],
    ["a"] * 129,
    [400],
    [-1],
    {"a": 1},
    ["a", 1],
    "\ud800",
)
GARBAGE = (
    b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000,
    b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    *(json.dumps({"model": MODEL, "prompt": p}).encode() for p in PROMPTS),
)  # fmt: skip


def test_garbage_is_refused(server: LiveServer) -> None:
    for content, status in (
        *((content, 400) for content in GARBAGE),
        (b"x" * ((1 << 20) + 1), 413),
    ):
        answer = httpx.post(
            f"{server.address}/v1/completions", content=content, headers=JSON, timeout=60
        )
        assert answer.status_code == status, content[:80]
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
    ):
        answer = httpx.request(method, f"{server.address}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, "unknown_url")


def test_tokens_let_their_owners_in(target: Target) -> None:
    import openai

    with LiveServer(target, tokens=["secret-1", "secret-2"]) as server:
        with client_of(server, "secret-1") as client:
            assert ask(client, max_tokens=2).usage.completion_tokens == 2
        with (
            client_of(server, "secret-3") as client,
            pytest.raises(openai.AuthenticationError) as caught,
        ):
            ask(client)
        assert caught.value.code == "invalid_api_key"
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/metrics", f"/v1/models/{MODEL}"):
            assert httpx.get(f"{server.address}{path}").status_code == 401
        assert httpx.get(f"{server.address}/health").status_code == 200
        answer = httpx.get(
            f"{server.address}/metrics", headers={"authorization": "Bearer secret-2"}
        )
        assert "moa_http_requests_total" in answer.text


def test_rates_are_bounded(target: Target) -> None:
    import openai

    with LiveServer(
        target, tokens=["one", "two"], requests_per_s=0.5, requests_at_once=2
    ) as server:
        with client_of(server, "one") as client:
            for _ in range(2):
                client.models.list()
            with pytest.raises(openai.RateLimitError) as caught:
                client.models.list()
            assert caught.value.code == "rate_limit_exceeded"
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 4
        with client_of(server, "two") as client:
            client.models.list()


def test_a_full_server_says_so(target: Target) -> None:
    import openai

    with (
        LiveServer(target, max_sequences=1, max_waiting=1, target_ms=20) as server,
        client_of(server) as client,
    ):
        first, second = (ask(client, stream=True, max_tokens=100) for _ in range(2))
        next(first), next(second)
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client)
        assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
        assert caught.value.response.headers["retry-after"] == "1"
        first.close(), second.close()
        server.wait_until_free()
        assert ask(client, max_tokens=2).usage.completion_tokens == 2


def test_answers_that_take_too_long_end(target: Target) -> None:
    import openai

    with LiveServer(target, target_ms=50, answer_s=1.0) as server, client_of(server) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client, max_tokens=100)
        assert caught.value.status_code == 408
        stream = ask(client, max_tokens=100, stream=True)
        assert next(stream).choices
        with pytest.raises(openai.APIError):
            list(stream)
        server.wait_until_free()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_text(target: Target, stream: bool) -> None:
    with LiveServer(target, target_ms=10) as server:
        for n_read in (0, 1):
            with connect(server.endpoint) as connection:
                connection.sendall(
                    post("/v1/chat/completions", BODY | {"max_tokens": 200, "stream": stream})
                )
                if n_read and stream:
                    assert connection.recv(4096)
                else:
                    wait_for(lambda: server.engine.snapshot().n_open == 1)
            server.wait_until_free()
        assert server.engine.snapshot().n_committed < 390, "the rest was not decoded"


def test_a_slow_reader_is_held_and_loses_nothing(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moa_data.serving.api._HOLD_AT", 4)
    monkeypatch.setattr("moa_data.serving.api._RELEASE_AT", 1)
    held: list[bool] = []
    with LiveServer(target) as server, client_of(server) as client:
        hold = server.engine.hold

        def note(id_: int, is_held: bool) -> None:
            held.append(is_held)
            hold(id_, is_held)

        monkeypatch.setattr(server.engine, "hold", note)
        # This reader takes no piece until its sequence is held. uvicorn waits like this when a
        # client's buffer is full.
        pieces = RequestOutput.pieces

        async def slowly(answers: Any) -> Any:
            async for piece in pieces(answers):
                while not held:
                    await asyncio.sleep(0.01)
                yield piece

        monkeypatch.setattr(RequestOutput, "pieces", slowly)
        assert text_of(ask(client, max_tokens=40)) == plain_text(target, "Hello there", 40)
    assert True in held
    assert False in held


def test_metrics_count_what_happened(target: Target) -> None:
    import openai

    with (
        LiveServer(target, {"moa": build_drafter(target.model)}, tree="3") as server,
        client_of(server) as client,
    ):
        ask(client)
        with pytest.raises(openai.BadRequestError):
            ask(client, n=0)
        server.wait_until_free()
        httpx.get(f"{server.address}/some/path")
        text = httpx.get(f"{server.address}/metrics").text
    found = re.findall(r"^(moa_\S+) (\S+)$", text, flags=re.MULTILINE)
    values = {name.replace("moa_http_requests_total", ""): float(value) for name, value in found}
    assert values['{path="/v1/chat/completions",status="200"}'] == 1
    assert values['{path="/v1/chat/completions",status="400"}'] == 1
    assert values['{path="other",status="404"}'] == 1
    assert values["moa_tokens_committed_total"] == 16
    assert (
        min(values[f"moa_{name}_total"] for name in ("rounds", "drafts_verified", "target_calls"))
        > 0
    )
    assert values["moa_first_token_seconds_count"] == values["moa_http_requests_in_flight"] == 1, (
        "this one"
    )
    assert (values["moa_sequences_open"], values["moa_kv_tokens"]) == (0, 16384)


def test_each_request_is_one_json_line(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    import openai

    def lines(server: LiveServer) -> list[Any]:
        """Return what this server has logged. Other servers may log requests of earlier tests."""
        records = [record for record in caplog.records if record.thread == server.thread_id]
        return [json.loads(JsonLines().format(record)) for record in records]

    with (
        caplog.at_level(logging.INFO, LOG.name),
        LiveServer(target) as server,
        client_of(server) as client,
    ):
        ask(client, max_tokens=3)
        with pytest.raises(openai.BadRequestError):
            ask(client, n=0)
        wait_for(lambda: len(lines(server)) == 2)
        first, second = lines(server)
    assert (first["status"], first["path"], first["new_tokens"], first["finish"]) == (
        200, "/v1/chat/completions", 3, "length",
    )  # fmt: skip
    assert first["first_token_seconds"] <= first["seconds"]
    assert second["error"]
    failed = logging.LogRecord("moa_data.x", logging.ERROR, "f", 1, "no %s", ("luck",), None)
    assert json.loads(JsonLines().format(failed))["message"] == "no luck"


def test_tls_with_an_authority_of_one_s_own(target: Target, tmp_path: Path) -> None:
    """Handshakes must end in time, and silent ones give way."""
    import openai

    authority, tls = make_certificates(tmp_path)
    with LiveServer(target, max_connections_each=4, head_s=0.3, **tls) as server:
        assert server.address.startswith("https://")
        silent = stay_silent(server.endpoint, 6)
        context = ssl.create_default_context(cafile=str(authority))
        with httpx.Client(verify=context) as http, client_of(server, http_client=http) as client:
            assert ask(client, max_tokens=2).usage.completion_tokens == 2
        for connection in silent:
            with connection:
                wait_for_end(connection)
        with client_of(server) as client, pytest.raises(openai.APIConnectionError):
            ask(client)


def test_idle_connections_do_not_hold_up_a_drain(target: Target) -> None:
    with (
        LiveServer(target, grace_s=600) as server,
        connect(server.endpoint) as silent,
        connect(server.endpoint) as idle,
    ):
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        while not idle.recv(4096).endswith(b'{"status":"ok"}'):
            pass
        server.end()
        assert wait_for_end(silent) == wait_for_end(idle) == b""
        server.join()


@pytest.mark.parametrize("how", ["grace", "second signal"])
def test_a_server_that_cannot_wait_breaks_answers_off(target: Target, how: str) -> None:
    import openai

    with LiveServer(target, target_ms=100, grace_s=1 if how == "grace" else 600) as server:
        with client_of(server) as client:
            stream = ask(client, stream=True, max_tokens=200)
            next(stream)
            server.end()
            if how != "grace":
                threading.Timer(0.3, server.end).start()
            with pytest.raises(openai.APIConnectionError):
                list(stream)
        server.join()
    assert server.service.metrics.n_broken_off == 1
