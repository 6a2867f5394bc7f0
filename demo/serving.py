"""Serves the demo's target, and answers one prompt through an emulated 4G network that is cut on the way."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from ..errors import OptionInvalid
from ..moa.decoding.loop import plain_generate
from ..moa.targets.chat_tokens import prompt_tokens
from ..moa.targets.live import Target
from ..serving.client.client import DraftingClient
from ..serving.client.events import Event
from .proxy import CutProxy
from .timeline import Timeline

DELAY_S = 0.021
"""Of each byte one way, the mean of 4G."""
TARGET_MS = 25.0
"""Least time of a target call, about that of an 8B target on a small GPU; the demo's own takes one or two."""
CUT_AFTER, CUT_S = 0.35, 1.5
"""The network is cut when this share of the answer is there, for so many seconds."""
_START_S = 60.0


@dataclass(frozen=True)
class Answered:
    """One answer over a network that was cut.

    Attributes:
        is_equal: whether its tokens are those of plain greedy decoding.
        n_alone: tokens that the client wrote while it had no network.
    """

    timeline: Timeline
    text: str
    is_equal: bool
    n_tokens: int
    n_alone: int
    n_target_calls: int
    seconds: float


def answer_through_a_cut(
    target: Path, store: Path, drafter: Path, prompts: list[list[dict[str, Any]]], max_new_tokens: int
) -> Answered:
    """Serve the target in a process of its own, and answer the prompt with the longest answer.

    Args:
        store: with the frozen pieces of the target, all that the client has of it.
        prompts: chats that end with a user's message.

    Raises:
        OptionInvalid: the server did not start.
        ServingError: it could not be talked to.
    """
    live = Target.load(str(target), device="cpu")
    references = []
    for messages in prompts:
        tokens = prompt_tokens(live.tokenizer, messages)
        references.append(plain_generate(live, tokens, max_new_tokens=max_new_tokens).tokens)
    longest = max(range(len(prompts)), key=lambda index: len(references[index]))
    messages, reference = prompts[longest], references[longest]
    timeline = Timeline()
    with _served(target, drafter) as port, CutProxy(port, DELAY_S) as proxy:
        watcher = _Cutter(proxy, timeline, round(CUT_AFTER * len(reference)))
        with DraftingClient(proxy.address, drafter, store) as client:
            timeline.began_s = time.perf_counter()
            answer = client.chat(messages, max_new_tokens=max_new_tokens, on_event=watcher.note)
        seconds = time.perf_counter() - timeline.began_s
    most_alone = max((point.n_shown - point.n_verified for point in timeline.points), default=0)
    return Answered(
        timeline=timeline,
        text=answer.text,
        is_equal=list(answer.tokens) == reference,
        n_tokens=len(answer.tokens),
        n_alone=most_alone,
        n_target_calls=answer.stats.n_target_calls,
        seconds=seconds,
    )


class _Cutter:
    """Notes events, and cuts the network once when enough of the answer is there."""

    def __init__(self, proxy: CutProxy, timeline: Timeline, n_tokens: int) -> None:
        self._proxy, self._timeline, self._n_tokens = proxy, timeline, n_tokens
        self._has_cut = False

    def note(self, event: Event) -> None:
        self._timeline.note(event)
        if not self._has_cut and self._timeline.points[-1].n_shown >= self._n_tokens:
            self._has_cut = True
            self._timeline.mark_cut()
            self._proxy.cut()
            threading.Timer(CUT_S, self._mend).start()

    def _mend(self) -> None:
        self._timeline.mark_mended()
        self._proxy.restore()


@contextmanager
def _served(target: Path, drafter: Path) -> Iterator[int]:
    """Run ``moa-data serve`` for as long as the context is open; yields its gRPC port."""
    http_port, grpc_port = _free_port(), _free_port()
    command = [
        sys.executable, "-m", "moa_data", "serve", "--model", str(target), "--drafter", str(drafter),
        "--port", str(http_port), "--grpc-port", str(grpc_port), "--device", "cpu",
        "--set", f"engine.target_ms={TARGET_MS}",
    ]  # fmt: skip
    log = drafter.parent / "serve.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL)
    try:
        _wait_until_healthy(http_port, process, log)
        yield grpc_port
    finally:
        process.terminate()
        process.wait()


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as response:
                if response.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.1)
    raise OptionInvalid(f"the server did not start within {_START_S:.0f} s; see {log}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
