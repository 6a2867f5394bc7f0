"""Ends writers at chosen moments, in this process or in forks of it.

Forks are made in processes of ``kit.apart``, because pytest has threads.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from .apart import Apart

CHANGING_CALLS = ("write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "link")


class Killed(BaseException):
    """The simulated end of a writer's process. Nothing that it does afterwards reaches the disk."""


@contextmanager
def failing_at(
    n: int, fail: Callable[[], object], calls: Sequence[str] = CHANGING_CALLS, owner: Any = os
) -> Iterator[None]:
    """Make the n-th call that changes the disk, and all later calls, fail.

    If the n-th call is a write, half of its bytes are written.
    """
    left = n
    with pytest.MonkeyPatch.context() as patch:

        def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0 and name == "write":
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                if left <= 0:
                    fail()
                return real(*arguments, **options)

            return call

        for name in calls:
            patch.setattr(owner, name, wrap(name, getattr(owner, name)))
        yield


@contextmanager
def killed_at(n: int, calls: Sequence[str] = CHANGING_CALLS, owner: Any = os) -> Iterator[None]:
    """End the block at the n-th call that changes the disk, like a kill of the process."""

    def end() -> None:
        raise Killed

    with suppress(Killed), failing_at(n, end, calls, owner):
        yield


def killed_everywhere(
    make: Callable[[int], Path], act: Callable[[Path], object], every: int = 1
) -> Iterator[Path]:
    """Act on a new store again and again, killed at a later change each time, until it completes.

    Yields:
        The store that each kill leaves, and at last the complete store.
    """
    is_over = False
    for n in range(1, 10_000, every):
        store = make(n)
        with killed_at(n):
            act(store)
            is_over = True
        yield store
        if is_over:
            return


def full_at(n: int, call: str = "write", code: int = errno.ENOSPC) -> AbstractContextManager[None]:
    """Make the disk full from the n-th write on, or from the n-th call of another function."""

    def refuse() -> None:
        raise OSError(code, os.strerror(code))

    return failing_at(n, refuse, (call,))


def run_apart(function: Callable[..., object], *arguments: object) -> None:
    """Run a function of a test module in its own process, with text arguments. It must succeed."""
    with TemporaryDirectory() as folder:
        failure = Apart(function, *map(str, arguments), log=Path(folder) / "stderr").wait()
    assert not failure, failure


def die() -> None:
    """End this process like kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(owner: Any, name: str, at_call: int, after: bool = False) -> None:
    """Kill this process at the n-th call of a function, before or after the call is executed."""
    real, n_calls = getattr(owner, name), 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == at_call and not after:
            die()
        result = real(*arguments, **options)
        if n_calls == at_call:
            die()
        return result

    setattr(owner, name, call)


def _status_of(*actions: Callable[[], object]) -> int:
    """Run actions in order in a fork, and return its exit status."""
    child = os.fork()
    if child == 0:
        for action in actions:
            action()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def kill_at_points(points: Mapping[str, tuple[Any, ...]], action: Callable[[str], object]) -> None:
    """Run an action once for each point, and check that it is killed there.

    Args:
        points: names -> arguments of ``die_at``.
    """
    for name, point in points.items():
        status = _status_of(partial(die_at, *point), partial(action, name))
        assert os.WIFSIGNALED(status), (name, status)
        assert os.WTERMSIG(status) == signal.SIGKILL, (name, status)


def kill_at_every_change(
    action: Callable[[int, Callable[[], None]], object], every: int = 1
) -> None:
    """Run an action until it completes, killed at a later change each time.

    The action receives n and a function that arms the kill.
    """
    for n in range(1, 10_000, every):
        status = _status_of(partial(action, n, failing_at(n, die).__enter__))
        if os.WIFEXITED(status):
            if code := os.WEXITSTATUS(status):
                sys.exit(code)
            return
        assert os.WTERMSIG(status) == signal.SIGKILL
