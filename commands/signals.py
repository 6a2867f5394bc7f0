"""Ctrl-C, SIGTERM and SIGHUP end a command alike: by an exception in the main thread, which is never lost.

Whatever treats ``KeyboardInterrupt`` well treats all three well; only the exit code tells them apart.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from ..errors import Interrupted

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_RAISE_AGAIN_S = 0.05
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_is_ending = False


class SignalReceived(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP arrived.

    SIGINT has it too: a plain ``KeyboardInterrupt`` that passes through ``exec`` of a text, as named tuples and
    dataclasses run theirs, makes Python end with that signal after everything was handled.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def raise_signals() -> None:
    """Let the three signals raise :class:`SignalReceived`.

    A signal that is ignored when the process starts stays ignored: that is how ``nohup`` works.
    """
    sys.unraisablehook = _raise_again
    for number in _ENDING:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _raise)


def ignore_signals() -> None:
    """Ignore the three signals: the outcome is decided, and one more could only put a traceback behind it."""
    if sys.unraisablehook is _raise_again:  # else the caller is a test, whose signals are not ours
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)


def interruption_code(error: BaseException) -> int | None:
    """Return the exit code of an error that a signal led to, 128 + its number; None for any other error.

    Args:
        error: what ended the command. A ``KeyboardInterrupt`` or :class:`~moa_data.errors.Interrupted` behind it
            counts; ``signum`` on either tells which signal it was, SIGINT where it is absent.
    """
    chain = list(_chain(error))
    numbers = [number for link in chain if isinstance(number := getattr(link, "signum", None), int)]
    if numbers or any(isinstance(link, KeyboardInterrupt | Interrupted) for link in chain):
        return 128 + int(next(iter(numbers), signal.SIGINT))
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and what led to it, the nearest first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _raise(signum: int, frame: FrameType | None) -> None:
    # Schedulers send SIGTERM to a process and to its group: the second one must not break off the cleaning up.
    global _is_ending
    if signum == signal.SIGINT or not _is_ending:
        _is_ending = True
        raise SignalReceived(signum)


def _raise_again(unraisable: "UnraisableHookArgs") -> None:
    """Send a signal again whose exception was raised in a destructor or a weak reference's callback, and dropped."""
    global _is_ending
    error = unraisable.exc_value
    if not isinstance(error, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    _is_ending = False
    # To the very thread: a signal that another thread takes does not wake the main one from a sleep.
    number = getattr(error, "signum", signal.SIGINT)
    timer = threading.Timer(_RAISE_AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, number))
    timer.daemon = True
    timer.start()
