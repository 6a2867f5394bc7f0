"""Loads a server with good and bad clients at once for some minutes, and watches its memory.

Drafting clients connect over a network that is cut and resets their connections. Other clients
stream over HTTP, read slowly, leave in the middle of an answer, or send garbage to both ports.
There are also attackers. Some of them never read, send nothing, send the body of a request very
slowly, or disconnect in the middle of it. Others send requests like a web page of another site,
prompts of 1 MB, bodies with many wrong items, or stop strings as long as the answer. Every complete
answer must equal the text of plain decoding. No request of a good client may be refused, and
``/health`` must always answer. ::

    python -m benchmarks.serving.serving_load --model MODEL --drafter RUN [--bundle STORE]
        [--minutes 10] [--tls]

Memory counts as flat if the server's mean in the last quarter of the time is at most 5 % and 8 MiB
above the mean in the second quarter. The exit code is 1 in any of these cases: memory is not flat,
a text is wrong, ``/health`` or a good client got no answer, the engine still holds texts at the
end, or the server ended.
"""

import argparse
import contextlib
import http.client
import json
import random
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kit.harness import run
from moa_data.errors import MoaDataError
from moa_data.serving.client.client import MODES, DraftingClient, Timeouts
from moa_data.serving.client.drafting import DraftingModel
from moa_data.serving.run import raise_file_limit
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
from moa_data.tests.kit.certificates import make_certificates
from moa_data.tests.kit.proxy import Proxy

N_TOKENS = 40
QUESTIONS = [f"What is {n} plus {n + 3}, and why?" for n in range(8)]
BEGINNINGS = (
    b"", b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 99\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)  # fmt: skip
"""What garbage starts with: nothing, or the first bytes of one of the two protocols."""
LIMITS = (
    "limits.answer_s=20",
    "limits.write_s=5",
    "limits.head_s=5",
    "limits.body_s=5",
    "drafting.idle_s=20",
)
"""Limits of the server. They are short, so that clients often reach each of them."""
CHAT = "/v1/chat/completions"


class Server:
    """``moa-data serve`` as a separate process."""

    def __init__(self, options: argparse.Namespace) -> None:
        ports = []
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                ports.append(listener.getsockname()[1])
        self.port, self.grpc_port = ports
        self.model = Path(options.model).name
        options.out.mkdir(parents=True, exist_ok=True)
        self._log = (options.out / "serving-load-server.log").open("w")
        self.ca: Path | None = None
        settings: dict[str, str] = {}
        if options.tls:
            self.ca, settings = make_certificates(options.out)
        self.tls = ssl.create_default_context(cafile=self.ca) if self.ca else None
        command = [
            sys.executable, "-m", "moa_data", "serve", "--model", options.model,
            "--drafter", options.drafter, "--port", str(self.port),
            "--grpc-port", str(self.grpc_port), "--device", "cpu",
            *(word for limit in LIMITS for word in ("--set", limit)),
            *(
                word for name, file in settings.items()
                for word in (f"--{name.replace('_', '-')}", file)
            ),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def sample(self) -> tuple[float, int, int]:
        """Return the memory in MiB, the number of threads, and the number of open files."""
        folder = Path("/proc", str(self.process.pid))
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        return (
            int(status["VmRSS"].split()[0]) / 1024,
            int(status["Threads"]),
            len(list((folder / "fd").iterdir())),
        )

    def stop(self) -> None:
        """End the process."""
        with self.process:
            self.process.terminate()
        self._log.close()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of HTTP."""
        return "127.0.0.1", self.port

    def body(self, question: str, **changes: Any) -> dict[str, Any]:
        """Return the body of a request for an answer."""
        messages = [{"role": "user", "content": question}]
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": N_TOKENS,
            "temperature": 0,
        } | changes

    def _connection(self) -> http.client.HTTPConnection:
        if self.tls:
            return http.client.HTTPSConnection(*self.address, timeout=300, context=self.tls)
        return http.client.HTTPConnection(*self.address, timeout=300)

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and the text of a page."""
        with contextlib.closing(self._connection()) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def request(
        self, question: str, stream: bool, headers: dict[str, str] | None = None, **changes: Any
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a question over HTTP."""
        connection = self._connection()
        body = json.dumps(self.body(question, stream=stream, **changes))
        connection.request(
            "POST", CHAT, body, {"content-type": "application/json"} if headers is None else headers
        )
        return connection, connection.getresponse()

    def answer(self, question: str, **changes: Any) -> str:
        """Return the complete answer to a question."""
        connection, response = self.request(question, stream=False, **changes)
        with contextlib.closing(connection):
            found = json.loads(response.read())
            if response.status != 200:
                raise http.client.HTTPException(f"{response.status}: {found}")
            return str(found["choices"][0]["message"]["content"])

    def n_held(self) -> int:
        """Return the number of texts that the engine holds."""
        lines = self.get("/metrics")[1].splitlines()
        return next(
            round(float(line.split()[1]))
            for line in lines
            if line.startswith("moa_sequences_open ")
        )


class Load:
    """Runs clients of all kinds, each in a thread, until :meth:`end` is called.

    Attributes:
        counts: Counts of events, by kind of client.
        wrong: Texts that differ from plain decoding, and answers to attackers that are not
            refusals.
        refused: Errors that good clients got instead of an answer.
        health_s: Seconds of each request to ``/health``.
    """

    def __init__(self, server: Server, model: DraftingModel, texts: dict[str, str]) -> None:
        self._server, self._model, self._texts = server, model, texts
        self.counts: Counter[str] = Counter()
        self.wrong: list[tuple[str, str, str]] = []
        self.refused: list[str] = []
        self.health_s: list[float] = []
        self.answer_s: list[float] = []
        self._is_over, self._lock = threading.Event(), threading.Lock()
        self._proxy = Proxy(server.grpc_port, delay_s=0.002).__enter__()
        roles: list[tuple[Callable[[random.Random], None], int]] = [
            (self._draft, 5), (self._stream, 3), (self._read_slowly, 2), (self._leave, 2),
            (self._send_garbage, 2), (self._break_network, 1), (self._ask_health, 1),
            (self._ask, 2), (self._never_read, 4), (self._stay_silent, 3), (self._drip, 3),
            (self._leave_in_body, 2), (self._be_a_foreign_page, 1), (self._send_long_prompt, 4),
            (self._send_long_stops, 1), (self._send_wrong_items, 2),
        ]  # fmt: skip
        self._threads = [
            threading.Thread(target=self._play, args=(role, 100 * number + one))
            for number, (role, n) in enumerate(roles) for one in range(n)
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let all clients end."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._proxy.__exit__(None, None, None)

    def _play(self, role: Callable[[random.Random], None], seed: int) -> None:
        chance = random.Random(seed)
        name = role.__name__.strip("_")
        while not self._is_over.is_set():
            try:
                role(chance)
                self._count(name)
            except (MoaDataError, OSError, http.client.HTTPException) as error:
                self._count(f"{name}: {type(error).__name__}")
                if (
                    role in (self._ask, self._stream, self._ask_health)
                    and not self._is_over.is_set()
                ):
                    self.refused.append(f"{name}: {error!r}"[:300])
                self._is_over.wait(0.1)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _check(self, who: str, question: str, text: str) -> None:
        # An answer may end in the middle of a character. HTTP omits such a character, and the
        # client shows a replacement character.
        if text.rstrip("\ufffd") != self._texts[question].rstrip("\ufffd"):
            with self._lock:
                self.wrong.append((who, question, text))

    def _draft(self, chance: random.Random) -> None:
        mode: Any = chance.choice(MODES)
        own: dict[str, Any] = {
            "ca": self._server.ca,
            "timeouts": Timeouts(connect_s=60, silence_s=0.3, dead_s=2),
        }
        with DraftingClient(self._proxy.address, self._model, mode=mode, **own) as client:
            for question in chance.sample(QUESTIONS, 3):
                answer = client.chat(
                    [{"role": "user", "content": question}], max_new_tokens=N_TOKENS
                )
                self._check(mode, question, answer.text)

    def _pieces(
        self, response: http.client.HTTPResponse, pause_s: float = 0.0, most: int = 1 << 30
    ) -> str:
        text = ""
        for _, line in zip(range(most), response, strict=False):
            data = line.strip().removeprefix(b"data: ")
            if data and data != b"[DONE]":
                text += json.loads(data)["choices"][0]["delta"].get("content") or ""
            self._is_over.wait(pause_s)
        return text

    def _stream(self, chance: random.Random) -> None:
        question = chance.choice(QUESTIONS)
        connection, response = self._server.request(question, stream=True)
        with contextlib.closing(connection):
            if response.status != 200:
                raise http.client.HTTPException(response.read().decode())
            self._check("stream", question, self._pieces(response))

    def _read_slowly(self, chance: random.Random) -> None:
        question = chance.choice(QUESTIONS)
        connection, response = self._server.request(question, stream=True)
        with contextlib.closing(connection):
            self._check("slow reader", question, self._pieces(response, pause_s=0.1))

    def _leave(self, chance: random.Random) -> None:
        connection, response = self._server.request(chance.choice(QUESTIONS), stream=True)
        with contextlib.closing(connection):
            self._pieces(response, most=chance.randint(0, 20))

    def _send_garbage(self, chance: random.Random) -> None:
        port = chance.choice([self._server.port, self._server.grpc_port])
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(
                chance.choice(BEGINNINGS) + chance.randbytes(chance.randint(1, 50_000))
            )
            self._is_over.wait(chance.random())

    def _ask(self, chance: random.Random) -> None:
        """Ask for complete answers.

        Some requests have a temperature of nearly zero, or stop strings that never occur.
        """
        question, began = chance.choice(QUESTIONS), time.monotonic()
        stops = [self._texts[question][-200:] + "!", "".join(chance.choices("ab", k=200))]
        changes: dict[str, Any] = chance.choice([{}, {}, {"temperature": 1e-308}, {"stop": stops}])
        self._check(f"whole, {list(changes)}", question, self._server.answer(question, **changes))
        self.answer_s.append(time.monotonic() - began)

    def _ask_health(self, chance: random.Random) -> None:
        began = time.monotonic()
        if self._server.get("/health")[0] != 200:
            raise http.client.HTTPException("/health is not ok")
        self.health_s.append(time.monotonic() - began)
        self._is_over.wait(0.25)

    # Attackers

    def _never_read(self, chance: random.Random) -> None:
        body = self._server.body(
            chance.choice(QUESTIONS), stream=True, max_tokens=900, temperature=1
        )
        with never_read(self._server.address, post(CHAT, body), self._server.tls):
            self._is_over.wait(chance.uniform(5, 40))

    def _stay_silent(self, chance: random.Random) -> None:
        n = chance.choice([20, 100, 300])
        said = chance.choice([b"", b"GET /hea", HTTP2_PREFACE, head_of(CHAT, 10_000) + b"{"])
        with contextlib.ExitStack() as held:
            for address in (self._server.address, ("127.0.0.1", self._server.grpc_port)):
                for connection in stay_silent(address, n, said):
                    held.enter_context(connection)
            self._is_over.wait(chance.uniform(0, 12))

    def _drip(self, chance: random.Random) -> None:
        data = chance.choice([b"POST /v1/chat/comple", head_of(CHAT, 10_000)]) + b"x" * 9_000
        with connect(self._server.address, self._server.tls) as connection:
            for byte in data:
                connection.sendall(bytes([byte]))
                if self._is_over.wait(0.05):
                    return

    def _leave_in_body(self, chance: random.Random) -> None:
        leave_in_body(self._server.address, CHAT, chance.random() < 0.5, self._server.tls)
        self._is_over.wait(0.02)

    def _be_a_foreign_page(self, chance: random.Random) -> None:
        headers, status = chance.choice(list(foreign_pages()))
        connection, response = self._server.request(
            chance.choice(QUESTIONS), stream=False, headers=headers
        )
        with contextlib.closing(connection):
            if response.status != status:
                self.wrong.append(("foreign page", str(headers), response.read().decode()))
        with connect(self._server.address, self._server.tls) as both:
            both.sendall(head_of(CHAT, 5, "transfer-encoding: chunked") + b"0\r\n\r\n")
            if not (found := wait_for_end(both)).startswith(b"HTTP/1.1 400"):
                self.wrong.append(("two lengths", "", found.decode()))
        self._is_over.wait(0.1)

    def _send_long_prompt(self, chance: random.Random) -> None:
        text = long_text(chance, chance.choice([1_000_000, 1_000_000, 8_000]))
        connection, response = self._server.request(text, stream=False)
        with contextlib.closing(connection):
            if response.status not in (400, 503):
                self.wrong.append(("long prompt", "", response.read().decode()))
        self._is_over.wait(0.1)

    def _send_long_stops(self, chance: random.Random) -> None:
        connection, response = self._server.request(
            QUESTIONS[0], stream=True, stop="ab" * 100_000, max_tokens=900
        )
        with contextlib.closing(connection):
            if response.status != 400:
                self.wrong.append(("long stop string", "", response.read().decode()))

    def _send_wrong_items(self, chance: random.Random) -> None:
        connection, response = self._server.request(
            QUESTIONS[0], stream=False, **chance.choice(WRONG_BODIES)
        )
        with contextlib.closing(connection):
            if response.status != 400:
                self.wrong.append(("wrong items", "", response.read().decode()))
        self._is_over.wait(0.1)

    def _break_network(self, chance: random.Random) -> None:
        self._is_over.wait(chance.uniform(0, 4))
        self._proxy.cut(reset=chance.random() < 0.5)
        self._is_over.wait(chance.uniform(0.05, 2))
        self._proxy.restore()


def watch(server: Server, seconds: float) -> list[tuple[float, float, int, int]]:
    """Sample the server's memory, threads and files until the time is over or the server ends."""
    samples, began = [], time.monotonic()
    while (now := time.monotonic() - began) < seconds and server.process.poll() is None:
        samples.append((round(now, 1), *server.sample()))
        time.sleep(min(2.0, seconds / 40))
    return samples


def growth(samples: list[tuple[float, float, int, int]]) -> dict[str, Any]:
    """Compare the memory of the last quarter of the time with the second quarter, in MiB."""
    n = len(samples) // 4
    before, after = (
        statistics.mean(sample[1] for sample in part) for part in (samples[n : 2 * n], samples[-n:])
    )
    return {
        "before_mib": round(before, 1), "after_mib": round(after, 1),
        "is_flat": after <= before * 1.05 + 8, "threads": samples[-1][2], "files": samples[-1][3],
    }  # fmt: skip


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum."""
    ordered = sorted(seconds)
    picked = {"median": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: round(1e3 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 1)
        for name, q in picked.items()
    }


def wait_until_free(server: Server) -> int:
    """Wait at most a minute until the engine holds no text.

    Returns the number of texts that it still holds.
    """
    limit = time.monotonic() + 60
    while (n_held := server.n_held()) and time.monotonic() < limit:
        time.sleep(0.5)
    return n_held


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Load the server, watch it, and sum up. ``is_good`` is false if anything went wrong."""
    raise_file_limit()  # The server inherits the limit when it starts.
    model = DraftingModel.load(options.drafter, options.bundle)
    server = Server(options)
    try:
        texts = {question: server.answer(question, drafter="none") for question in QUESTIONS}
        load = Load(server, model, texts)
        samples = watch(server, 60 * options.minutes)
        load.end()
        has_ended = server.process.poll() is not None
        n_held = -1 if has_ended else wait_until_free(server)
        is_same = not has_ended and server.answer(QUESTIONS[0]) == texts[QUESTIONS[0]]
    finally:
        server.stop()
    memory = growth(samples)
    figures: dict[str, Any] = {
        "counts": dict(load.counts), "n_wrong": len(load.wrong), "wrong": load.wrong[:5],
        "n_refused": len(load.refused), "refused": load.refused[:5], "n_held_at_the_end": n_held,
        "health_ms": milliseconds(load.health_s), "whole_answer_ms": milliseconds(load.answer_s),
        "answers_afterwards": is_same, "memory": memory, "samples": samples,
    }  # fmt: skip
    is_good = not (load.wrong or load.refused or n_held) and is_same and memory["is_flat"]
    return {"is_good": is_good, "figures": figures}


if __name__ == "__main__":
    needed = {"required": True}
    record = run(
        "serving-load", measure, model=needed, drafter=needed, bundle=Path, minutes=10.0, tls=False
    )
    sys.exit(not record["is_good"])
