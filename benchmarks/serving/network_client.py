"""The client process of network.py, which answers prompts over the network and times the tokens.

It reads jobs from standard input, one JSON object per line, and writes the result of each job as
one line. Before the result, it may write lines with a ``request``. If the request is ``count``, the
parent process answers with a line on standard input. The methods of a job are:

- ``api``: The HTTP server decodes without drafts, and streams the answer.
- ``api+DRAFTER``: The HTTP server decodes with drafts, and streams the answer.
- MODE:DRAFTER: The drafting client. The modes are server and client.
- MODE:DRAFTER@CODEC: The same, but the server sends activations in a codec other than int8.
"""

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import openai

from moa_data.serving.client.client import DraftingClient
from moa_data.serving.client.drafting import DraftingModel
from moa_data.serving.client.session import Event, LinkChanged, RolledBack, Tokens, Verified

JSON = dict[str, Any]
WARM_UP_TOKENS = 8


class Shown:
    """The text of an answer as it is shown, and when each piece of verified text arrived.

    A piece of a stream counts as a token.

    Attributes:
        updates: Pairs (time by ``time.monotonic``, number of verified characters so far).
        changes: All changes of the tokens and of the connection, for measurements of cuts.
    """

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.n_verified = self.n_chars = self.n_rolled_back = 0
        self.updates: list[tuple[float, int]] = []
        self.changes: list[JSON] = []

    def add_text(self, text: str) -> None:
        """Add a piece of a stream."""
        self.texts.append(text)
        self._verify(len(self.texts))

    def take(self, event: Event) -> None:
        """Process an event of the drafting client."""
        now = time.monotonic()
        if isinstance(event, Tokens):
            self.texts += event.texts
            self.tokens += event.tokens
            if "unverified" in event.kinds:
                self.changes.append(
                    {"at_s": now, "alone": list(event.tokens), "start": event.start}
                )
            else:
                self._verify(len(self.texts))
        elif isinstance(event, Verified):
            self._verify(event.stop)
        elif isinstance(event, RolledBack):
            self.n_rolled_back += len(self.tokens) - event.stop
            self.changes.append({"at_s": now, "rolled_back": len(self.tokens) - event.stop})
            del self.texts[event.stop :], self.tokens[event.stop :]
        elif isinstance(event, LinkChanged):
            self.changes.append({"at_s": now, "up": event.up, "reason": event.reason})

    def _verify(self, stop: int) -> None:
        added = sum(len(text) for text in self.texts[self.n_verified : stop])
        self.n_verified = stop
        self.n_chars += added
        if added:
            self.updates.append((time.monotonic(), self.n_chars))


class Clients:
    """Answers chats by every method. Models that are loaded once are reused."""

    def __init__(self, settings: JSON) -> None:
        self._settings = settings
        self._models = {name: DraftingModel.load(run) for name, run in settings["runs"].items()}

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return next(iter(self._models.values())).tokenizer

    def open(self, method: str) -> "ApiClient | DraftingClient":
        """Make a client for a method."""
        if method == "api" or method.startswith("api+"):
            _, _, drafter = method.partition("+")
            name = self._settings["served_names"][drafter] if drafter else "none"
            return ApiClient(self._settings["http"], self._settings["model"], name)
        mode, _, drafter = method.partition(":")
        drafter, _, codec = drafter.partition("@")
        chosen: Any = mode
        return DraftingClient(
            self._settings["grpc"], self._models[drafter], mode=chosen, codec=codec or "int8"
        )

    def calls(self) -> float:
        """Return the target calls of the server so far."""
        with urllib.request.urlopen(f"{self._settings['http']}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return next(
            float(line.split()[1]) for line in lines if line.startswith("moa_target_calls_total ")
        )


class ApiClient:
    """Streams answers of the HTTP server with OpenAI's client."""

    def __init__(self, url: str, model: str, drafter: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._model, self._drafter = model, drafter

    def stream(self, messages: Any, max_new_tokens: int) -> Iterator[str]:
        """Yield an answer's text as it arrives."""
        chunks: Any = self._client.chat.completions.create(
            model=self._model, messages=messages, max_tokens=max_new_tokens, temperature=0,
            stream=True, extra_body={"drafter": self._drafter},
        )  # fmt: skip
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content

    def close(self) -> None:
        """End the connection."""
        self._client.close()


def answer(
    client: ApiClient | DraftingClient,
    messages: Any,
    max_new_tokens: int,
    watch: Callable[[Shown], None] | None = None,
) -> Shown:
    """Answer one chat. ``watch`` is called after each piece of text or event."""
    shown = Shown()

    def take(event: Event) -> None:
        shown.take(event)
        if watch is not None:
            watch(shown)

    if isinstance(client, ApiClient):
        for text in client.stream(messages, max_new_tokens):
            shown.add_text(text)
            if watch is not None:
                watch(shown)
    else:
        client.chat(messages, max_new_tokens=max_new_tokens, on_event=take)
    return shown


def token_times(tokenizer: Any, text: str, shown: Shown) -> list[float]:
    """Return the seconds from the question to each token of the verified text.

    A token arrives with the piece that contains its last character.
    """
    ends = [
        end
        for _, end in tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)[
            "offset_mapping"
        ]
    ]
    updates, times = iter(shown.updates), []
    at_s, n_chars = next(updates, (shown.began_s, 0))
    for end in ends:
        while n_chars < end:
            at_s, n_chars = next(updates)
        times.append(at_s - shown.began_s)
    return times


def run_table(clients: Clients, job: JSON) -> JSON:
    """Answer chats in several concurrent sessions.

    Each session answers its chats one after the other.
    """
    n, chats = job["sessions"], job["chats"]
    found: list[JSON] = [{} for _ in chats]
    opened = [clients.open(job["method"]) for _ in range(n)]
    errors: list[BaseException] = []

    def session(number: int) -> None:
        try:
            for index in range(number, len(chats), n):
                shown = answer(opened[number], chats[index], job["max_new_tokens"])
                text = "".join(shown.texts)
                found[index] = {
                    "text": text,
                    "times_s": token_times(clients.tokenizer, text, shown),
                }
        except BaseException as error:
            errors.append(error)
            raise

    # Let each client answer once before the measurement, so that handshakes are not counted.
    for client in opened:
        answer(client, chats[0], WARM_UP_TOKENS)
    threads = [threading.Thread(target=session, args=(number,)) for number in range(n)]
    calls = clients.calls()
    count()
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    count()
    calls = clients.calls() - calls
    for client in opened:
        client.close()
    if errors:
        raise errors[0]
    return {"seconds": seconds, "calls": calls, "answers": found}


def run_cut(clients: Clients, job: JSON) -> JSON:
    """Answer one chat while its network is cut.

    Each cut of the job begins at a number of verified tokens, and lasts for some seconds.
    """
    client = clients.open(job["method"])
    answer(client, job["chat"], WARM_UP_TOKENS)
    # Pairs (number of verified tokens at which the cut begins, its length in seconds).
    cuts: list[list[float]] = [list(cut) for cut in job["cuts"]]
    timers: list[threading.Timer] = []

    def watch(shown: Shown) -> None:
        if cuts and shown.n_verified >= cuts[0][0]:
            _, seconds = cuts.pop(0)
            say({"request": "cut", "n_verified": shown.n_verified})
            timers.append(threading.Timer(seconds, say, [{"request": "restore"}]))
            timers[-1].start()

    count()
    shown = answer(client, job["chat"], job["max_new_tokens"], watch)
    count()
    for timer in timers:
        timer.join()
    client.close()
    return {
        "text": "".join(shown.texts), "tokens": shown.tokens, "began_s": shown.began_s,
        "updates": shown.updates, "changes": shown.changes, "n_rolled_back": shown.n_rolled_back,
        "ended_s": time.monotonic(),
    }  # fmt: skip


_saying = threading.Lock()


def say(what: JSON) -> None:
    """Write one line, from any thread."""
    with _saying:
        print(json.dumps(what), flush=True)


def count() -> None:
    """Request a count of the bytes so far.

    Nothing else may be in flight.
    """
    say({"request": "count"})
    sys.stdin.readline()


def main() -> None:
    """Run jobs until standard input ends."""
    clients = Clients(json.loads(sys.argv[1]))
    say({"ready": True})
    jobs: dict[str, Callable[[Clients, JSON], JSON]] = {"table": run_table, "cut": run_cut}
    while line := sys.stdin.readline():
        job = json.loads(line)
        say(jobs[job["do"]](clients, job))


if __name__ == "__main__":
    main()
