"""A TCP proxy that delays and cuts what passes through it, after so many bytes where that is asked for."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Literal, Self

Way = Literal["up", "down"]


class _Flow:
    """Bytes that were forwarded in one direction by all connections, and where it is to be cut."""

    def __init__(self) -> None:
        self.n_bytes, self.resets = 0, False
        self.cut_at: int | None = None

    def take(self, n_bytes: int) -> int:
        """Count up to so many bytes as forwarded; returns how many of them come before the cut."""
        n = n_bytes if self.cut_at is None else min(n_bytes, self.cut_at - self.n_bytes)
        self.n_bytes += n
        return n


class Proxy:
    """Listens on a port of 127.0.0.1 and forwards to an address, each way late by some seconds.

    Runs in a thread of its own; every method may be called from any other thread, and holds when it returns.
    """

    def __init__(self, upstream: tuple[str, int], delay_s: float = 0.0) -> None:
        self._upstream, self._delay_s = upstream, delay_s
        self.flows: dict[Way, _Flow] = {"up": _Flow(), "down": _Flow()}
        self.is_cut, self._resets, self.n_connections = threading.Event(), False, 0
        self._connections: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="proxy", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._is_closed.set)
        self._thread.join()

    def cut(self, reset: bool = False) -> None:
        """Let nothing pass: connections stay open and silent, what is in flight is held.

        With ``reset``, end all connections, and new ones as soon as they are made, as a dying server does; what is in
        flight is lost.
        """
        self._call(lambda: self._cut_now(reset))

    def cut_after(self, n_bytes: int, way: Way, reset: bool = False) -> None:
        """Cut when exactly so many further bytes, of all connections, have been forwarded one way."""

        def arm() -> None:
            flow = self.flows[way]
            flow.cut_at, flow.resets = flow.n_bytes + n_bytes, reset
            if n_bytes == 0:
                self._cut_now(reset)

        self._call(arm)

    def restore(self) -> None:
        """Let everything pass again, what was held first; no cut is armed afterwards."""

        def restore() -> None:
            self.flows["up"].cut_at = self.flows["down"].cut_at = None
            self._resets = False
            self.is_cut.clear()
            self._is_open.set()

        self._call(restore)

    def _call(self, action: Callable[[], None]) -> None:
        """Run a function in the loop's thread and wait for it."""

        async def run() -> None:
            action()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _cut_now(self, reset: bool) -> None:
        self._resets = reset
        self._is_open.clear()
        if reset:
            for connection in self._connections:
                connection.cancel()
        self.is_cut.set()

    async def _run(self) -> None:
        self._loop, self._is_open, self._is_closed = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._is_open.set()
        accepting = asyncio.create_task(self._accept())
        self._is_ready.set()
        await self._is_closed.wait()
        tasks = [accepting, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            if self._resets:
                _abort(client)
                continue
            self.n_connections += 1
            task = asyncio.create_task(self._serve(client))
            self._connections.add(task)
            task.add_done_callback(partial(self._forget, client))

    def _forget(self, client: socket.socket, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        _abort(client)  # unless it is closed; a task that was cancelled at once has done nothing

    async def _serve(self, client: socket.socket) -> None:
        """Forward both ways until both ends have said all, or one of them resets the connection."""
        server = socket.socket()
        server.setblocking(False)
        try:
            await self._is_open.wait()
            await self._loop.sock_connect(server, self._upstream)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.TaskGroup() as tasks:
                for flow, source, sink in ((self.flows["up"], client, server), (self.flows["down"], server, client)):
                    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)
                    tasks.create_task(self._read(source, queue))
                    tasks.create_task(self._write(flow, queue, sink))
        except* (OSError, asyncio.CancelledError):
            _abort(client)
            _abort(server)
        else:
            client.close()
            server.close()

    async def _read(self, source: socket.socket, queue: asyncio.Queue[tuple[float, bytes]]) -> None:
        """Put what comes into the queue with the time of its arrival, also through a cut; no bytes are the end."""
        data = b"x"
        while data:
            data = await self._loop.sock_recv(source, 1 << 16)
            await queue.put((self._loop.time() + self._delay_s, data))

    async def _write(self, flow: _Flow, queue: asyncio.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        """Forward what has arrived, unless the network is cut."""
        has_ended = False
        while not has_ended:
            arrival, data = await queue.get()
            await asyncio.sleep(arrival - self._loop.time())
            has_ended, rest = not data, memoryview(data)
            while rest:
                await self._is_open.wait()
                n = flow.take(len(rest))
                is_last = flow.n_bytes == flow.cut_at
                if is_last:  # before other connections run
                    self._is_open.clear()
                await self._loop.sock_sendall(sink, rest[:n])
                rest = rest[n:]
                if is_last:
                    self._cut_now(flow.resets)
        await self._is_open.wait()
        with suppress(OSError):  # the other end may be gone already
            sink.shutdown(socket.SHUT_WR)


def _abort(end: socket.socket) -> None:
    """Close a socket with a TCP reset."""
    if end.fileno() >= 0:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()
