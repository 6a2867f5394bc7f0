"""A TCP proxy that delays what passes through it, and can be cut."""

import asyncio
import threading
from typing import Self


class CutProxy:
    """Listens on a port of 127.0.0.1 and forwards bytes to another, each way late by so many seconds.

    Runs in a thread of its own. While it is cut, connections stay open and silent, as on a network that loses packets.
    """

    def __init__(self, port: int, delay_s: float) -> None:
        self._upstream, self._delay_s = port, delay_s
        self._loop, self._is_open, is_ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        self._is_open.set()
        self._thread = threading.Thread(target=self._run, args=(is_ready,), name="proxy", daemon=True)
        self._thread.start()
        is_ready.wait()

    @property
    def address(self) -> str:
        """Host and port that a client connects to."""
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Let nothing pass."""
        self._loop.call_soon_threadsafe(self._is_open.clear)

    def restore(self) -> None:
        """Let everything pass again, what was held first."""
        self._loop.call_soon_threadsafe(self._is_open.set)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, is_ready: threading.Event) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = server.sockets[0].getsockname()[1]
        is_ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))

    async def _serve(self, up: asyncio.StreamReader, down: asyncio.StreamWriter) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        await asyncio.gather(self._forward(up, writer), self._forward(reader, down), return_exceptions=True)
        writer.close()
        down.close()

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while (arrival := await queue.get())[1]:
                await asyncio.sleep(arrival[0] - self._loop.time())
                await self._is_open.wait()
                sink.write(arrival[1])
            sink.write_eof()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(deliver())
            data = b"x"
            while data:
                data = await source.read(1 << 16)
                queue.put_nowait((self._loop.time() + self._delay_s, data))
