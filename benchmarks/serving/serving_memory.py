"""Samples the memory of ``moa-data serve`` under a mixed load of well-behaved clients.

Eight clients send requests with pauses between them: short chats, long prompts, streams, sampled
answers, several answers at once, streams that are abandoned in the middle, and calls of
``/tokenize``. The load is deliberately modest. The question is how much memory the process keeps,
not how fast it answers. ::

    python -m benchmarks.serving.serving_memory --model MODEL [--minutes 30] [--threads 1]

The record holds the resident memory of the process at its start, the maximum that the server
announced at its start, and the largest sample of each minute. The exit code is 1 if a sample is
above the announced maximum, if a request was refused, or if the server ended.
"""

import argparse
import http.client
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kit.harness import run

CHAT = "/v1/chat/completions"
WORDS = [
    "river",
    "stone",
    "window",
    "garden",
    "letter",
    "market",
    "winter",
    "engine",
    "paper",
    "silver",
    "bridge",
]
SAMPLE_S = 5.0
LONGEST_WORDS = 3000
"""Words of the longest prompt. Each word is about one token."""


class Server:
    """``moa-data serve`` as a separate process."""

    def __init__(self, options: argparse.Namespace) -> None:
        options.out.mkdir(parents=True, exist_ok=True)
        self.model = Path(options.model).name
        self._log_file = options.out / "serving-memory-server.log"
        self._log = self._log_file.open("w")
        command = [
            sys.executable, "-m", "moa_data", "serve", "--model", options.model, "--port", "0",
            "--grpc-port", "none", "--device", "cpu",
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )
        assert self.process.stdout is not None
        ready = re.search(r"http://127\.0\.0\.1:(\d+)", self.process.stdout.readline())
        if ready is None:
            raise SystemExit(
                "The server did not start. The end of its log is: "
                f"{self._log_file.read_text()[-2000:]}"
            )
        self.port = int(ready[1])

    def resident_mb(self) -> float:
        """Return the resident memory of the process in MB (10^6 bytes)."""
        status = Path("/proc", str(self.process.pid), "status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return round(int(found[1]) * 1024 / 1e6, 1)

    def announced_mb(self) -> float:
        """Return the maximum memory that the server announced."""
        found = re.search(r"memory: up to ([\d.]+) (MB|GB)", self._log_file.read_text())
        if found is None:
            raise SystemExit(
                f"The server's log {self._log_file} lacks the line that begins with `memory: up "
                "to`."
            )
        return float(found[1]) * (1000 if found[2] == "GB" else 1)

    def stop(self) -> None:
        """End the process."""
        with self.process:
            self.process.terminate()
        self._log.close()


class Clients:
    """Runs clients, each in a thread, until :meth:`end` is called."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.refused: list[str] = []
        roles: list[Callable[[random.Random], None]] = [
            self._ask_short, self._ask_short, self._ask_long, self._ask_several, self._stream,
            self._stream_long, self._leave, self._tokenize,
        ]  # fmt: skip
        self._threads = []
        for seed, role in enumerate(roles):
            self._threads.append(threading.Thread(target=self._play, args=(role, seed)))
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let all clients end."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _play(self, role: Callable[[random.Random], None], seed: int) -> None:
        chance = random.Random(seed)
        name = role.__name__.strip("_")
        while not self._is_over.is_set():
            try:
                role(chance)
            except (OSError, http.client.HTTPException) as error:
                with self._lock:
                    self.refused.append(f"{name}: {error!r}"[:300])
            with self._lock:
                self.counts[name] += 1
            self._is_over.wait(chance.uniform(0.5, 3))

    def _send(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=300)
        content = json.dumps({"model": self._server.model} | body)
        connection.request(
            "POST", path, content, {"content-type": "application/json", "connection": "close"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status}: {response.read()[:200]!r}")
        return response

    def _chat(
        self, chance: random.Random, n_words: int, **settings: Any
    ) -> http.client.HTTPResponse:
        content = " ".join(chance.choices(WORDS, k=n_words))
        return self._send(CHAT, {"messages": [{"role": "user", "content": content}]} | settings)

    def _ask_short(self, chance: random.Random) -> None:
        choices: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 0.8, "top_p": 0.9, "logprobs": True},
        ]
        settings = chance.choice(choices)
        with self._chat(
            chance, chance.randint(3, 60), max_tokens=chance.randint(8, 64), **settings
        ) as response:
            response.read()

    def _ask_long(self, chance: random.Random) -> None:
        n_words = chance.randint(300, LONGEST_WORDS)
        with self._chat(chance, n_words, max_tokens=16, temperature=0) as response:
            response.read()

    def _ask_several(self, chance: random.Random) -> None:
        with self._chat(
            chance, chance.randint(10, 200), max_tokens=32, n=chance.randint(2, 6)
        ) as response:
            response.read()

    def _stream(self, chance: random.Random) -> None:
        n_words = chance.randint(3, 100)
        with self._chat(
            chance, n_words, max_tokens=chance.randint(16, 200), stream=True
        ) as response:
            response.read()

    def _stream_long(self, chance: random.Random) -> None:
        with self._chat(chance, chance.randint(200, 1500), max_tokens=64, stream=True) as response:
            response.read()

    def _leave(self, chance: random.Random) -> None:
        with self._chat(chance, chance.randint(3, 800), max_tokens=400, stream=True) as response:
            for _ in range(chance.randint(0, 40)):
                response.readline()

    def _tokenize(self, chance: random.Random) -> None:
        text = " ".join(chance.choices(WORDS, k=chance.choice([5, 50, 5000, 20_000])))
        with self._send("/tokenize", {"prompt": text}) as response:
            response.read()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Load a server, sample its memory, and sum up.

    ``is_good`` is false if anything went wrong.
    """
    server = Server(options)
    start_mb = server.resident_mb()
    clients = Clients(server)
    began = time.monotonic()
    of_minutes: dict[int, float] = {}
    while (
        passed_s := time.monotonic() - began
    ) < 60 * options.minutes and server.process.poll() is None:
        minute = int(passed_s // 60) + 1
        of_minutes[minute] = max(server.resident_mb(), of_minutes.get(minute, 0.0))
        time.sleep(SAMPLE_S)
    clients.end()
    has_ended = server.process.poll() is not None
    server.stop()
    announced_mb = server.announced_mb()
    figures: dict[str, Any] = {
        "announced_mb": announced_mb,
        "start_mb": start_mb,
        "most_mb": max(of_minutes.values()),
        "most_mb_of_minutes": list(of_minutes.values()),
        "counts": dict(clients.counts),
        "refused": clients.refused[:5],
    }
    is_good = figures["most_mb"] <= announced_mb and not clients.refused and not has_ended
    return {"is_good": is_good, "figures": figures}


if __name__ == "__main__":
    record = run("serving-memory", measure, model={"required": True}, minutes=30.0, threads=1)
    sys.exit(not record["is_good"])
