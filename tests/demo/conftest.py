"""Fixture that interrupts the demo."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from moa_data.demo import run

Interrupt = Callable[[str], AbstractContextManager[None]]


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    """Return a context manager inside which a phase of the demo ends as if by Ctrl-C."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    @contextmanager
    def at(phase: str) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(run, f"_{phase}", interrupted)
            yield

    return at
