"""The client's web page: the files it serves, the requests it refuses.

A browser displays an answer with a cut.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2 as httpx
import pytest

from moa_data.errors import Disconnected, OptionInvalid
from moa_data.serving.client.session import (
    Done,
    Event,
    Kind,
    LinkChanged,
    ModeChanged,
    RolledBack,
    Stats,
    Tokens,
    Verified,
)
from moa_data.serving.client.web import ChatPage

SENTENCE = (
    "The sky looks blue because air scatters short waves of sunlight "
    "far more strongly than long ones."
)
WORDS = SENTENCE.split()
GUESSED = ["At", "dusk", "the", "light", "goes", "further", "and", "reds", "are", "left"]
CORRECTED = ["At", "dusk", "its", "path", "is", "longer"]
TEXT = " ".join(WORDS + CORRECTED) + " <b>&amp;</b>"


Numbered = Iterator[tuple[str, dict[str, Any]]]


def tokens(start: int, words: list[str], kind: Kind) -> Tokens:
    return Tokens(
        start, tuple(range(len(words))), tuple(f"{word} " for word in words), (kind,) * len(words)
    )


class Scripted:
    """Plays an answer with one cut: it waits until the network is switched off, and on again."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.prompts: list[str] = []
        self._pause_s = pause_s
        self._off, self._on = threading.Event(), threading.Event()

    def set_network(self, is_up: bool) -> None:
        (self._on if is_up else self._off).set()

    def ask(self, prompt: str, on_event: Callable[[Event], None]) -> None:
        self.prompts.append(prompt)
        if prompt == "fail":
            raise Disconnected("The server is gone. Start it again.")
        n = len(WORDS)
        on_event(ModeChanged("client", "the session is open"))
        for start in range(0, n, 4):
            time.sleep(self._pause_s)
            part = WORDS[start : start + 4]
            on_event(tokens(start, part, "accepted"))
            on_event(Stats(start, start // 4, 0, 31.25, 3.5, 42.4, 25.1, 3.0, 900, 120_000))
        assert self._off.wait(60)
        on_event(LinkChanged(False, "switched off"))
        on_event(ModeChanged("offline", "no network"))
        for k, word in enumerate(GUESSED):
            time.sleep(self._pause_s)
            on_event(tokens(n + k, [word], "unverified"))
        on_event(ModeChanged("offline", "paused after 10 unverified tokens"))
        assert self._on.wait(60)
        time.sleep(self._pause_s * 4)
        on_event(LinkChanged(True))
        on_event(ModeChanged("client", "back"))
        on_event(Verified(n + 2))
        on_event(RolledBack(n + 2))
        for k, word in enumerate([*CORRECTED[2:], "<b>&amp;</b>"], n + 2):
            time.sleep(self._pause_s)
            on_event(tokens(k, [word], "bonus"))
        on_event(Stats(n + 7, 12, len(GUESSED) - 2, 30.5, 3.25, 8.25, None, 3.0, 1000, 150_000))
        on_event(Done("stop"))


def page_of(scripted: Scripted, port: int = 0) -> ChatPage:
    return ChatPage(scripted.ask, scripted.set_network, port)


@pytest.fixture
def page() -> Iterator[ChatPage]:
    with page_of(Scripted()) as page:
        yield page


def request(
    page: ChatPage, method: str, path: str, body: Any = None, **headers: str
) -> httpx.Response:
    return httpx.request(method, f"{page.url}{path}", json=body, headers=headers, timeout=60)


@contextmanager
def events_of(page: ChatPage, last_id: str = "") -> Iterator[Numbered]:
    """Yield the server-sent events, each with its id."""
    headers = {"last-event-id": last_id} if last_id else {}
    with httpx.stream("GET", f"{page.url}events", headers=headers, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        yield (
            (line.removeprefix("id: "), json.loads(next(lines).removeprefix("data: ")))
            for line in lines
            if line
        )


def until(events: Numbered, kind: str) -> list[dict[str, Any]]:
    found = [next(events)[1]]
    while found[-1]["type"] != kind:
        found.append(next(events)[1])
    return found


def ask(page: ChatPage, prompt: str = "Why?") -> None:
    assert request(page, "POST", "ask", {"prompt": prompt}).status_code == 202


def test_the_page_needs_nothing_from_elsewhere(page: ChatPage) -> None:
    found = request(page, "GET", "")
    assert (found.status_code, found.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert found.headers["content-security-policy"].startswith("default-src 'none'")
    assert "http://" not in found.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in found.text


def test_events_of_an_answer_come_in_order_and_again_for_a_page_that_reloads(
    page: ChatPage,
) -> None:
    with events_of(page) as events:
        assert [event["type"] for event in until(events, "Network")] == ["Began", "Network"]
        ask(page)
        assert next(events)[1] | {"t": 0} == {"type": "Began", "prompt": "Why?", "t": 0}
        for is_up in (False, True):
            request(page, "POST", "network", {"up": is_up})
        found = until(events, "Ended")
    with events_of(page) as again:
        replayed = until(again, "Ended")
    assert replayed[1:] == found
    assert [event["t"] for event in found] == sorted(event["t"] for event in found)
    assert {"RolledBack": len(WORDS) + 2}.items() <= {
        event["type"]: event.get("stop") for event in found
    }.items()


def test_a_page_that_lost_its_connection_goes_on_where_it_was(page: ChatPage) -> None:
    ask(page, "fail")
    with events_of(page) as events:
        last, first = next(events)
        assert first["prompt"] == "fail"
        rest = until(events, "Ended")
    assert {"type": "Failed", "message": "The server is gone. Start it again."}.items() <= rest[
        -2
    ].items()
    with events_of(page, last) as events:
        assert until(events, "Ended") == rest
    # This id is of a client that used the port before.
    with events_of(page, "another-17") as events:
        assert next(events)[1]["type"] == "Began"


def test_one_answer_at_a_time_and_another_after_it(page: ChatPage) -> None:
    ask(page)
    refused = request(page, "POST", "ask", {"prompt": "And?"})
    assert (refused.status_code, "Wait until it ends" in refused.text) == (409, True)
    for is_up in (False, True):
        request(page, "POST", "network", {"up": is_up})
    with events_of(page) as events:
        until(events, "Ended")
        ask(page, "fail")
        assert next(events)[1]["prompt"] == "fail"


BODIES: tuple[Any, ...] = ({}, {"prompt": ""}, {"prompt": 3}, {"prompt": "x" * 100_001}, [], "text")
FOREIGN = (
    {"Host": "evil.example"}, {"Host": "127.0.0.1"}, {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"}, {"Origin": ""},
)  # fmt: skip


def test_bad_questions_and_other_sites_are_refused(page: ChatPage) -> None:
    for body in BODIES:
        assert request(page, "POST", "ask", body).status_code == 422
    # Forms of other sites send such requests.
    assert (
        request(page, "POST", "ask", {"prompt": "x"}, **{"content-type": "text/plain"}).status_code
        == 422
    )
    for headers in FOREIGN:
        for method, path, asked in (
            ("GET", "", None),
            ("GET", "events", None),
            ("POST", "ask", {"prompt": "x"}),
        ):
            assert request(page, method, path, asked, **headers).status_code == 403
    for host in ("127.0.0.1", "localhost"):
        headers = {"Host": f"{host}:{page.port}", "Origin": f"http://{host}:{page.port}"}
        assert request(page, "POST", "network", {"up": True}, **headers).status_code == 200


def test_closing_ends_the_streams() -> None:
    with ExitStack() as stack:
        with page_of(Scripted()) as page:
            events = stack.enter_context(events_of(page))
            until(events, "Network")
            with pytest.raises(OptionInvalid):  # The port is in use.
                page_of(Scripted(), page.port)
        assert list(events) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "page"]


CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = (
    "no-sandbox disable-gpu disable-background-networking disable-component-update "
    "disable-sync no-first-run"
)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_cut_and_the_roll_back(scheme: Any) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with page_of(Scripted(pause_s=0.1)) as page, api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[f"--{flag}" for flag in FLAGS.split()]
        )
        view = browser.new_page(color_scheme=scheme, viewport={"width": 1100, "height": 900})
        problems: list[str] = []
        view.on(
            "console",
            lambda message: problems.append(message.text) if message.type == "error" else None,
        )
        view.on("pageerror", lambda error: problems.append(str(error)))
        view.goto(page.url)
        view.get_by_label("Prompt").fill("Why is the sky blue?")
        view.get_by_role("button", name="Ask").click()
        api.expect(view.locator("#answer")).to_contain_text("long ones.", timeout=60_000)
        api.expect(view.locator("#mode")).to_have_text("client drafts")
        api.expect(view.get_by_role("button", name="Ask")).to_be_disabled()
        network = view.get_by_role("switch")
        network.click()
        api.expect(view.locator("#answer .unverified")).to_have_count(len(GUESSED), timeout=60_000)
        api.expect(view.locator("#mode")).to_have_text("offline")
        api.expect(view.locator("#state")).to_contain_text("paused after 10 unverified tokens")
        api.expect(network).to_have_attribute("aria-checked", "false")
        view.set_viewport_size({"width": 1200, "height": 700})
        assert (
            view.evaluate("document.getElementById('form').getBoundingClientRect().bottom") <= 700
        )
        assert view.evaluate("document.getElementById('conversation').clientHeight") > 120
        network.click()
        api.expect(view.locator("#answer .rolled")).to_have_count(len(GUESSED) - 2)
        api.expect(view.locator("#state")).to_have_text("Complete", timeout=60_000)
        api.expect(view.locator("#answer .rolled")).to_have_count(0)
        api.expect(view.locator("#answer .unverified")).to_have_count(0)
        assert view.locator("#answer").inner_text().split() == TEXT.split()
        assert view.locator("#plot .cut").count() == view.locator("#plot .back").count() == 1
        assert view.locator("#rolled-back").inner_text() == f"{len(GUESSED) - 2} tokens"
        view.reload()  # The reloaded page must show the same.
        api.expect(view.locator("#state")).to_have_text("Complete", timeout=60_000)
        assert view.locator("#answer").inner_text().split() == TEXT.split()
        assert view.locator("#prompt-shown").inner_text() == "Why is the sky blue?"
        view.set_viewport_size({"width": 400, "height": 800})
        assert view.evaluate("document.documentElement.scrollWidth") <= 400
        assert problems == []
        browser.close()
