"""Calls posted together wake an event loop once and run in order.

An error in one of them does not affect the others.
"""

import asyncio
import threading

import pytest

from moa_data.serving.post import call_in


def test_calls_of_threads_arrive_in_order_with_few_wakings(monkeypatch: pytest.MonkeyPatch) -> None:
    async def post() -> None:
        loop, n_threads, n_calls = asyncio.get_running_loop(), 4, 500
        found: list[tuple[int, int]] = []
        n_wakings, real, ended = 0, loop.call_soon_threadsafe, asyncio.Event()

        def counted(*args):  # type: ignore[no-untyped-def]
            nonlocal n_wakings
            n_wakings += 1
            return real(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)

        def take(thread: int, number: int) -> None:
            found.append((thread, number))
            if len(found) == n_threads * n_calls:
                ended.set()

        def send(thread: int) -> None:
            for number in range(n_calls):
                call_in(loop, take, thread, number)

        threads = [threading.Thread(target=send, args=(number,)) for number in range(n_threads)]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(ended.wait(), 60)
        for thread in threads:
            thread.join()
            own = [number for one, number in found if one == threads.index(thread)]
            assert own == list(range(n_calls))
        n_wakings = 0
        for number in range(8):
            call_in(loop, found.append, (9, number))
        assert n_wakings == 1

    asyncio.run(post())


def test_an_error_of_one_call_is_not_the_others() -> None:
    async def post() -> tuple[list[int], list[object]]:
        loop = asyncio.get_running_loop()
        found: list[int] = []
        errors: list[object] = []
        loop.set_exception_handler(lambda _loop, context: errors.append(context["exception"]))
        call_in(loop, found.append, 1)
        call_in(loop, lambda: 1 / 0)
        call_in(loop, found.append, 2)
        await asyncio.sleep(0.05)
        return found, errors

    found, errors = asyncio.run(post())
    assert found == [1, 2]
    assert [type(error) for error in errors] == [ZeroDivisionError]
