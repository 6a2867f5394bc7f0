"""A stream sends answers before contexts, and each context once and in order.

It reports when its reader is slow.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from moa_data.serving import moa_v1_pb2 as pb
from moa_data.serving import sessions as module
from moa_data.serving.sessions import ContextLog, Stream
from moa_data.serving.wire import decode

WIDTH = 6


def rows(start: int, stop: int) -> torch.Tensor:
    """Return contexts that hold their positions, exact in bfloat16."""
    return (torch.arange(start, stop) % 251)[:, None].expand(-1, WIDTH).float()


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def pong(number: int) -> pb.ServerMessage:
    return pb.ServerMessage(pong=pb.Pong(id=number))


def test_answers_overtake_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 5 * 2 * WIDTH)

    async def run() -> None:
        stream, log = Stream(), ContextLog(3)
        log.append(3, rows(3, 20))
        log.release()
        stream.send_contexts(log, "bf16", 4, WIDTH)
        stream.put(pong(1))
        got = [await stream.next(), await stream.next()]
        stream.put(pong(2))
        got.append(await stream.next())
        log.append(20, rows(20, 22))
        log.release()
        log.append(22, rows(22, 30))
        stream.close()
        stream.put(pong(3))  # This comes too late.
        while (message := await stream.next()) is not None:
            got.append(message)
        kinds = [message.WhichOneof("body") for message in got if message is not None]
        assert kinds == ["pong", "context", "pong", "context", "context", "context"]
        found = [
            message.context
            for message in got
            if message is not None and message.WhichOneof("body") == "context"
        ]
        assert [(one.start, one.n_positions) for one in found] == [(4, 5), (9, 5), (14, 5), (19, 3)]
        values = torch.cat([decode(one.codec, one.values, one.n_positions, WIDTH) for one in found])
        assert torch.equal(values, rows(4, 22))

    in_loop(run)


def test_a_stream_is_full_of_contexts_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_UNSENT", 2 * WIDTH * 10)

    async def run() -> None:
        stream, log = Stream(), ContextLog(0)
        stream.send_contexts(log, "bf16", 0, WIDTH)
        log.append(0, rows(0, 12))
        assert not stream.is_full, "what is not released waits elsewhere"
        log.release()
        stream.wake()
        assert stream.is_full
        waiting = asyncio.create_task(stream.has_room.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        await stream.next()
        assert not stream.is_full
        await waiting
        ending = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        stream.close()
        assert await ending is None

    in_loop(run)
