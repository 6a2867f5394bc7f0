"""Serve the demo's target, and answer one prompt over a slow network that fails for a while.

A figure shows over time how many tokens of the answer were shown and how many were verified.
"""

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from matplotlib.figure import Figure

from ..errors import ServingError
from ..moa.decoding.loop import plain_generate
from ..moa.targets.chat_tokens import prompt_tokens
from ..moa.targets.live import Target
from ..serving.client.client import DraftingClient
from ..serving.client.session import Event, RolledBack, Tokens, Verified

DELAY_S = 0.021  # One-way delay of the network in seconds, the mean delay of 4G.
# Minimum duration of a target call in milliseconds, as for an 8B target on a small GPU. Without it,
# a call of the demo's own target takes only 1 or 2 ms.
TARGET_MS = 25.0
# When the fraction CUT_AFTER of the answer is shown, the network is cut for CUT_S seconds.
CUT_AFTER, CUT_S = 0.35, 1.5


class CutProxy:
    """A TCP proxy on 127.0.0.1 that delays bytes in both directions and can cut the connection.

    The proxy listens at ``address`` and runs in its own thread. While the connection is cut, it
    stays open but transports no bytes, as on a network that loses all packets.

    Args:
        port: the port of 127.0.0.1 to which the proxy connects.
        delay_s: one-way delay in seconds.
    """

    def __init__(self, port: int, delay_s: float) -> None:
        self._upstream = port
        self._delay_s = delay_s
        is_ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(is_ready)), name="proxy", daemon=True
        )
        self._thread.start()
        is_ready.wait()

    def cut(self) -> None:
        """Hold back all bytes in both directions."""
        self._loop.call_soon_threadsafe(self._is_open.clear)

    def restore(self) -> None:
        """Forward bytes again, starting with the bytes that were held back."""
        # Ignore RuntimeError. It means that the proxy has ended, and its event loop is closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._is_open.set)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._has_ended.set)
        self._thread.join()

    async def _run(self, is_ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_open = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._is_open.set()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        is_ready.set()
        await self._has_ended.wait()
        server.close()

    async def _serve(self, up: asyncio.StreamReader, down: asyncio.StreamWriter) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        # When the proxy ends, the task that runs this method is cancelled. This is not an error.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(
                self._forward(up, writer), self._forward(reader, down), return_exceptions=True
            )
        writer.close()
        down.close()

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await asyncio.sleep(self._delay_s)
            await self._is_open.wait()
            sink.write(data)
        sink.write_eof()


class Timeline:
    """Records the number of shown and verified tokens over time.

    When ``n_tokens`` tokens are shown, this class cuts the network for ``CUT_S`` seconds.
    """

    def __init__(self, proxy: CutProxy, n_tokens: int) -> None:
        self._proxy = proxy
        self._n_tokens = n_tokens
        self._began_s = time.perf_counter()
        # One tuple for each event of the client: the seconds since the start, the number of tokens
        # that were shown until then, and the number of tokens that were verified until then.
        self.points: list[tuple[float, int, int]] = [(0.0, 0, 0)]
        self.cut: list[float] = []  # Times in seconds at which the network was cut and restored.
        self.n_rolled_back = 0

    def note(self, event: Event) -> None:
        """Record the numbers of shown and verified tokens after an event of the client."""
        now = time.perf_counter() - self._began_s
        _, shown, verified = self.points[-1]
        if isinstance(event, Tokens):
            shown = event.start + len(event.tokens)
            # The tokens of an event are either all unverified or all verified.
            if "unverified" not in event.kinds:
                verified = shown
        elif isinstance(event, Verified):
            verified = event.stop
        elif isinstance(event, RolledBack):
            self.n_rolled_back += shown - event.stop
            shown = verified = event.stop
        self.points.append((now, shown, verified))
        if not self.cut and shown >= self._n_tokens:
            self.cut.append(now)
            self._proxy.cut()
            timer = threading.Timer(CUT_S, self._restore)
            # The timer runs in a daemon thread. So if the demo is interrupted, Python need not wait
            # until the timer has restored the network.
            timer.daemon = True
            timer.start()

    def _restore(self) -> None:
        self.cut.append(time.perf_counter() - self._began_s)
        self._proxy.restore()

    def draw(self, path: Path) -> None:
        """Draw the number of shown and verified tokens over time."""
        seconds, shown, verified = zip(*self.points, strict=True)
        figure = Figure(figsize=(7.2, 3.8), layout="constrained")
        axes = figure.subplots()
        axes.axvspan(
            self.cut[0], self.cut[-1], color="tab:red", alpha=0.12, lw=0, label="no network"
        )
        axes.step(seconds, verified, where="post", color="tab:blue", label="verified")
        axes.step(seconds, shown, where="post", color="tab:orange", ls="--", lw=1, label="shown")
        axes.fill_between(
            seconds,
            verified,
            shown,
            step="post",
            color="tab:orange",
            alpha=0.35,
            label="not verified yet",
        )
        axes.set(
            xlabel="seconds",
            ylabel="tokens of the answer",
            title="An answer over 4G that loses the network",
        )
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left")
        figure.savefig(path, dpi=130)


def answer_through_a_cut(
    folder: Path, model: str, prompts: list[list[dict[str, Any]]], max_new_tokens: int
) -> dict[str, Any]:
    """Serve the target in a separate process, and answer one prompt over a network that is cut.

    Of the given prompts, the one with the longest answer is used.

    Args:
        folder: the demo's folder.
        model: the target.
        prompts: the chats to choose from.
        max_new_tokens: maximum number of tokens of an answer.

    Returns:
        The results for the report. ``is_equal`` says whether the tokens equal those of plain greedy
        decoding.
    """
    live = Target.load(model, device="cpu")
    live.prepare()
    references: list[list[int]] = []
    for prompt in prompts:
        tokens = prompt_tokens(live.template, prompt)
        answer_alone = plain_generate(live, tokens, max_new_tokens=max_new_tokens)
        references.append(answer_alone.tokens)
    # Choose the prompt with the longest answer, so that answering takes longer than the cut lasts.
    reference, messages = max(zip(references, prompts, strict=True), key=lambda pair: len(pair[0]))
    with (
        _served(folder, model) as port,
        CutProxy(port, DELAY_S) as proxy,
        DraftingClient(proxy.address, folder / "drafter", folder / "store") as client,
    ):
        timeline = Timeline(proxy, round(CUT_AFTER * len(reference)))
        began_s = time.perf_counter()
        answer = client.chat(messages, max_new_tokens=max_new_tokens, on_event=timeline.note)
        seconds = time.perf_counter() - began_s
    timeline.draw(folder / "serving.png")
    return {
        "is_equal": list(answer.tokens) == reference,
        "n_tokens": len(answer.tokens),
        "n_alone": max(shown - verified for _, shown, verified in timeline.points),
        "n_rolled_back": timeline.n_rolled_back,
        "n_target_calls": answer.stats.n_target_calls,
        "answer_s": seconds,
    }


@contextlib.contextmanager
def _served(folder: Path, model: str) -> Iterator[int]:
    """Run ``moa-data serve`` until the ``with`` block ends. Yields the server's gRPC port."""
    command = [
        sys.executable, "-m", "moa_data", "serve", "--model", model,
        "--drafter", str(folder / "drafter"), "--port", "0", "--grpc-port", "0", "--device", "cpu",
        "--set", f"engine.target_ms={TARGET_MS}",
    ]  # fmt: skip
    log = folder / "serve.log"
    pipe = subprocess.PIPE
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=errors, text=True
        ) as process,
    ):
        try:
            # The server writes a line when it is ready. If the server has ended instead, the line
            # is empty.
            line = process.stdout.readline() if process.stdout else ""
            if (match := re.search(r"gRPC \S+:(\d+)", line)) is None:
                raise ServingError(
                    f"The server of the demo did not start. Its output in {log} says why."
                )
            yield int(match[1])
        finally:
            process.terminate()
