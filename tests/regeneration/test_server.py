"""Chats are answered by a server: this package's own over HTTP, and one that behaves badly."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import ServingError
from moa_data.moa.targets.live import Target
from moa_data.regeneration.chats import LossReason
from moa_data.regeneration.config import RegenerateConfig
from moa_data.regeneration.run import regenerate
from moa_data.tests.kit.chats import chat, write_jsonl
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.serving import MODEL, LiveServer


def texts(config: RegenerateConfig) -> list[Any]:
    rows = [json.loads(line) for line in Path(config.out).read_text(encoding="utf-8").splitlines()]
    return [(row["row"], [message["content"] for message in row["messages"]]) for row in rows]


def asking(config: RegenerateConfig, server: str, **changes: Any) -> RegenerateConfig:
    out = str(Path(config.out).with_name("served.jsonl"))
    return config.replaced(**{"model": None, "server": server, "out": out, "patience_s": 0.5} | changes)


@pytest.fixture(scope="module")
def live(target: Target) -> Iterator[LiveServer]:
    with LiveServer(target) as server:
        yield server


def test_our_server_gives_the_answers_of_the_target(config: RegenerateConfig, live: LiveServer) -> None:
    local, served = regenerate(config), asking(config, live.address)
    report = regenerate(served)
    assert texts(served) == texts(config)
    assert len(texts(served)) > 3
    assert vars(report.tally).keys() == vars(local.tally).keys()
    assert report.tally.n_rejected == local.tally.n_rejected
    assert report.tally.rejected[LossReason.REFUSED] == 1, "a special token in the text"
    assert report.tally.rejected[LossReason.TOO_LONG] == 1
    settings = json.loads(report.record.read_text())["settings"]
    assert settings["server_model"] == MODEL
    assert "batch_size" not in settings
    with pytest.raises(ServingError, match=f"has {MODEL}. Name one of them by --model, not other"):
        regenerate(asking(config, live.address, model="other"))


def test_seeds_are_sent(config: RegenerateConfig, live: LiveServer) -> None:
    first = asking(config, f"{live.address}/v1/", temperature=0.8, top_k=9)
    regenerate(first)
    again = first.replaced(out=first.out.replace("served", "again"), batch_size=1)
    regenerate(again)
    assert texts(again) == texts(first)
    other = first.replaced(out=first.out.replace("served", "other"), seed=5)
    regenerate(other)
    assert texts(other) != texts(first)


class Scripted:
    """A server whose answers come from a function: body of the request -> (status, JSON or None to hang up)."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.script: Any = lambda body: (200, said("yes"))


def said(text: str, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": usage}


@pytest.fixture
def scripted() -> Iterator[tuple[str, Scripted]]:
    state = Scripted()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send(200, {"data": [{"id": "scripted"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.bodies.append(body | {"authorization": self.headers.get("authorization")})
            status, document = state.script(body)
            if document is not None:
                self.send(status, document)

        def send(self, status: int, document: Any) -> None:
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: Any) -> None:
            """Say nothing of clients that have gone."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", state
    server.shutdown()
    server.server_close()
    thread.join()


def test_what_passes_is_asked_again(
    config: RegenerateConfig, scripted: tuple[str, Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, state = scripted
    n_asked: dict[str, int] = {}

    def flaky(body: dict[str, Any]) -> tuple[int, Any]:
        text = body["messages"][0]["content"]
        n_asked[text] = n_asked.get(text, 0) + 1
        first: dict[str, tuple[int, Any]] = {
            "what is 0?": (503, {}),
            "what is 1?": (429, {}),
            "what is 2?": (200, None),
        }
        return first.get(text, (200, said("yes"))) if n_asked[text] == 1 else (200, said("yes"))

    state.script = flaky
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    arguments = ("enable_thinking=false",)
    served = asking(config, url, patience_s=20, template_kwargs=arguments, max_new_tokens=9)
    regenerate(served)
    assert [row for row, _ in texts(served)] == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]
    assert {body["authorization"] for body in state.bodies} == {"Bearer secret"}
    wanted = {
        "max_tokens": 9,
        "temperature": 0,
        "model": "scripted",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert all(body.items() >= wanted.items() and "seed" not in body for body in state.bodies)
    assert "secret" not in Path(served.out).with_suffix(".regeneration.json").read_text()


@pytest.mark.parametrize(
    ("status", "document", "reason"),
    [
        (400, {"error": {"message": "a bad word"}}, LossReason.REFUSED),
        (400, {"message": "This model's maximum context length is 9"}, LossReason.TOO_LONG),
        (408, {"error": {"message": "late"}}, LossReason.LATE),
        (200, said("on and on", "length"), LossReason.NO_END),
        (200, said("", "tool_calls"), LossReason.TOOLS),
        (200, said(" "), LossReason.EMPTY),
    ],
)
def test_one_answer_that_fails_rejects_its_row(
    config: RegenerateConfig, scripted: tuple[str, Scripted], status: int, document: Any, reason: LossReason
) -> None:
    url, state = scripted
    state.script = lambda body: (
        (status, document) if body["messages"][-1]["content"] == "tell me of 1" else (200, said("yes"))
    )
    report = regenerate(asking(config, url))
    assert report.tally.rejected[reason] == 1
    assert report.tally.examples[reason].startswith("row 5")


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ((401, {"error": {"message": "no key"}}), "answers 401 (no key). Check"),
        ((500, {"error": {"message": "down"}}), "answers 500 (down), for 0.5 s. Start it"),
        ((200, {"hello": 1}), "gives no chat completion"),
        ((200, said("yes", reasoning_content="hm")), "keeps the reasoning apart"),
        ((200, None), "cannot be reached"),
    ],
)
def test_a_server_that_cannot_answer_stops_the_run_in_one_line(
    config: RegenerateConfig, scripted: tuple[str, Scripted], answer: Any, line: str
) -> None:
    url, state = scripted
    state.script = lambda body: answer
    options = ["--server", url, "--dataset", config.dataset, "--out", config.out, "--set", "serving.patience_s=0.5"]
    refused(run("regenerate", *options), line)
    state.script = lambda body: (200, said("yes"))
    done = run("regenerate", *options, "--max-rejected-fraction", "1")
    assert done.exit_code == 0, done.output


def test_a_run_that_was_stopped_goes_on(config: RegenerateConfig, scripted: tuple[str, Scripted]) -> None:
    url, state = scripted
    state.script = lambda body: (
        (404, {}) if body["messages"][0]["content"] == "tell me of 2" else (200, said(body["messages"][-1]["content"]))
    )
    served = asking(config, url, batch_size=1)
    with pytest.raises(ServingError, match="answers 404"):
        regenerate(served)
    n_before = len(state.bodies)
    state.script = lambda body: (200, said(body["messages"][-1]["content"]))
    regenerate(served.replaced(batch_size=4))
    asked = [body["messages"][0]["content"] for body in state.bodies[n_before:]]
    assert "what is 0?" not in asked
    whole = served.replaced(out=served.out.replace("served", "whole"))
    regenerate(whole)
    for suffix in (".jsonl", ".regeneration.json"):
        assert Path(served.out).with_suffix(suffix).read_bytes() == Path(whole.out).with_suffix(suffix).read_bytes()


def test_nobody_listens(config: RegenerateConfig, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "one.jsonl", [chat("a")])
    with pytest.raises(ServingError, match="cannot be reached"):
        regenerate(asking(config, "http://127.0.0.1:9", patience_s=0.1))
