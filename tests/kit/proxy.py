"""The demo's proxy with additional faults.

It can cut connections at an exact byte, and reset them like a dying server.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from typing import Literal

from typing_extensions import override

from moa_data.demo.serving import CutProxy

Way = Literal["up", "down"]


class Proxy(CutProxy):
    """A proxy that other threads control.

    Every method may be called from any other thread, and has taken effect when it returns.
    """

    def __init__(self, port: int, delay_s: float = 0.0) -> None:
        self.n_bytes: dict[Way, int] = {"up": 0, "down": 0}  # sum over all connections
        self.is_cut, self.n_connections, self._resets = threading.Event(), 0, False
        # Direction, number of forwarded bytes at which to cut, and whether to cut by a reset.
        self._cut_at: tuple[Way, int, bool] | None = None
        self._clients: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}
        super().__init__(port, delay_s)

    @override
    def cut(self, reset: bool = False) -> None:
        """Let nothing pass. Connections stay open and silent, and data in flight is held back.

        With ``reset``, all connections are reset, and new ones as soon as they are made. Data in
        flight is lost.
        """
        self._call(lambda: self._cut_now(reset))

    def cut_after(self, n_bytes: int, way: Way, reset: bool = False) -> None:
        """Cut after ``n_bytes`` more bytes in one direction, exactly, over all connections."""

        def arm() -> None:
            self._cut_at = way, self.n_bytes[way] + n_bytes, reset
            if n_bytes == 0:
                self._cut_now(reset)

        self._call(arm)

    @override
    def restore(self) -> None:
        """Let everything pass again, first the data that was held back. Disarms any planned cut."""

        def restore() -> None:
            self._cut_at, self._resets = None, False
            self.is_cut.clear()
            self._is_open.set()

        self._call(restore)

    def _call(self, action: Callable[[], None]) -> None:
        async def run() -> None:
            action()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _cut_now(self, reset: bool) -> None:
        self._resets = reset
        self._is_open.clear()
        for task, client in self._clients.items() if reset else ():
            _reset(client)
            if task is not None:
                task.cancel()
        self.is_cut.set()

    @override
    async def _serve(self, up: asyncio.StreamReader, down: asyncio.StreamWriter) -> None:
        if self._resets:
            _reset(down)
            return
        self.n_connections += 1
        task = asyncio.current_task()
        self._clients[task] = down
        try:
            await self._is_open.wait()
            await super()._serve(up, down)
        finally:
            del self._clients[task]

    @override
    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        way: Way = "down" if sink in self._clients.values() else "up"
        while data := await source.read(1 << 16):
            await asyncio.sleep(self._delay_s)
            while data:
                await self._is_open.wait()
                ways, at, reset = self._cut_at or ("", 0, False)
                now = data[: at - self.n_bytes[way]] if ways == way else data
                sink.write(now)
                self.n_bytes[way] += len(now)
                data = data[len(now) :]
                # Cut in the same step, before the event loop runs other connections.
                if ways == way and self.n_bytes[way] == at:
                    self._cut_now(reset)
        await self._is_open.wait()
        sink.write_eof()


def _reset(end: asyncio.StreamWriter) -> None:
    """Close a connection with a TCP reset."""
    end.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    end.transport.abort()
