"""How SIGINT, SIGTERM and SIGHUP end a command, whatever it is doing.

    while                     a signal
    ------------------------  ------------------------------------------------------------------------------------------
    the program is imported   ends the process: nothing has been done
    the command runs          raises SignalReceived in the main thread, again and again until it is being handled: a
                              destructor or a library may drop it. Never within an import, which would leave half a
                              module and a locked import system
    the outcome is decided    ends the process with the exit code that was decided

A thread hears of signals even while the main one is within a C library. It ends the process CLEANUP_S after the first
signal (_IMPORT_S within an import), and at a second SIGINT. Code that installs handlers of its own (training saves its
state, a server drains) takes the time it needs, until a second SIGINT.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ..errors import Interrupted
from ..machine import is_first_process

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

CLEANUP_S = 3.0
"""Time for a command to discard what it has in flight, from the signal on."""
_IMPORT_S = 1.0
"""Time for an import to end: there is nothing to discard while the libraries of a command are loaded."""
_REPEAT_S = 1.0
"""A second SIGINT within this time may be the same Ctrl-C, passed on by a shell or a launcher."""
_RAISE_AGAIN_S = 0.1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_IMPORT = "<frozen importlib._bootstrap"


class SignalReceived(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP arrived.

    SIGINT has it too: a plain ``KeyboardInterrupt`` that passes through ``exec`` of a text, as named tuples and
    dataclasses run theirs, makes Python end with that signal after everything was handled.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class _State:
    """What the main thread and the one that watches tell each other.

    Attributes:
        phase: of the process: "starting", "running" (a signal raises an exception) or "ending".
        signum: the first signal; None before.
        is_owed: whether it came to this module, not to a handler that a command has installed.
        is_importing: whether an import kept the signal from being raised.
        code: exit code of the process, once it is decided.
    """

    phase = "starting"
    signum: int | None = None
    is_owed = is_importing = False
    code: int | None = None


def watch_signals() -> None:
    """Let the three signals end the process, and from :func:`begin_command` on the command.

    A signal that is ignored when the process starts stays ignored: that is how ``nohup`` works.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in _ENDING:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _raise)
    with contextlib.suppress(RuntimeError):  # no thread can be started, of which the command itself will tell
        threading.Thread(target=_watch, args=(reading,), daemon=True).start()
    sys.unraisablehook = _drop
    atexit.register(_leave)  # registered first, called last
    os.register_at_fork(after_in_child=_forget_parent)


def begin_command() -> None:
    """Let signals raise :class:`SignalReceived` in the main thread."""
    _State.phase = "running"


def end_command() -> None:
    """Let signals raise no more: they would only break off telling how the command ended."""
    _State.phase = "ending"


def decide(code: int) -> int:
    """Decide the exit code of the process, and return it: 128 + the number of a signal that has come before.

    No signal changes it from here on.
    """
    end_command()
    if _State.signum is not None and code < 128:
        if code == 0:
            _tell("Error: interrupted at its very end. Run the same command again.")
        code = 128 + _State.signum
    _State.code = code
    return code


def interruption_code(error: BaseException) -> int | None:
    """Return the exit code of an error that a signal led to, 128 + its number; None for any other error.

    Args:
        error: what ended the command. A ``KeyboardInterrupt`` or :class:`~moa_data.errors.Interrupted` in its chain
            counts; ``signum`` on either tells which signal it was. Without either, any error after a signal counts:
            libraries replace exceptions by their own.
    """
    links = _interruptions(error)
    numbers = [number for link in links if isinstance(number := getattr(link, "signum", None), int)]
    if links:
        return 128 + int(next(iter(numbers), signal.SIGINT))
    return None if _State.signum is None else 128 + _State.signum


def _interruptions(error: BaseException | None) -> list[BaseException]:
    """Return the interruptions among an error and what led to it, the nearest first."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return [link for link in chain if isinstance(link, KeyboardInterrupt | Interrupted)]


def _raise(signum: int, frame: FrameType | None) -> None:
    """Raise the first signal in the main thread, unless it is being handled already or an import would break."""
    _State.is_owed = True
    _State.signum = _State.signum or signum
    if _State.phase != "running" or _interruptions(sys.exception()):
        return
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT):
            _State.is_importing = True
            return
        frame = frame.f_back
    _State.is_importing = False
    raise SignalReceived(_State.signum)


def _drop(unraisable: UnraisableHookArgs) -> None:
    """Say nothing of a signal's exception that was raised in a destructor: it will be raised again."""
    if not isinstance(unraisable.exc_value, SignalReceived):
        sys.__unraisablehook__(unraisable)


def _watch(pipe: int) -> NoReturn:
    """After a signal, see to it that the process ends."""
    while (signum := _next_signal(pipe, None)) is None:
        pass
    _State.signum = signum = _State.signum or signum
    if _State.code is not None:
        os._exit(_State.code)
    _follow(pipe, signum)


def _follow(pipe: int, signum: int) -> NoReturn:
    """Raise a signal until it is being handled, and end the process at a second SIGINT or when it takes too long."""
    main = threading.main_thread().ident or 0
    first_s = since_s = raised_s = now_s = time.monotonic()
    n_own, is_repeated, is_told = 0, False, False
    while now_s < since_s + (_IMPORT_S if _State.is_importing else CLEANUP_S):
        if _State.phase == "starting":
            _end("interrupted before anything was done.")
        # Whoever has installed another handler ends in its own time.
        is_patient = signal.getsignal(signum) is not _raise and not is_repeated
        if is_patient:
            since_s = now_s
            if now_s > first_s + _REPEAT_S and not is_told:
                _tell("Ending what has begun; a second Ctrl-C ends it at once.")
                is_told = True
        if _State.is_owed and _State.phase == "running" and now_s > raised_s + _RAISE_AGAIN_S:
            _State.is_owed = not is_patient  # else it is handed over
            n_own, raised_s = n_own + 1, now_s
            # To the very thread: a signal that another thread takes does not wake the main one from a sleep.
            signal.pthread_kill(main, signum)
        again = _next_signal(pipe, _RAISE_AGAIN_S)
        now_s = time.monotonic()
        if again == signum and n_own:
            n_own -= 1
        elif again == signal.SIGINT and now_s > first_s + _REPEAT_S:
            if is_repeated or not is_patient:
                _end("interrupted at once.")
            is_repeated = True
    _end("interrupted; the command did not end by itself.")


def _next_signal(pipe: int, wait_s: float | None) -> int | None:
    """Return the number of a signal of ours that has come; None where none has."""
    if not select.select([pipe], [], [], wait_s)[0]:
        return None
    [number] = os.read(pipe, 1)
    return number if number in _ENDING else None


def _end(line: str) -> NoReturn:
    """End the process without the main thread."""
    if _State.code is None:
        _tell(f"Error: {line} Run the same command again.")
    os._exit(128 + (_State.signum or 0) if _State.code is None else _State.code)


def _tell(line: str) -> None:
    """Print a line, without the locks of Python's streams, which the main thread may hold."""
    if is_first_process():
        with contextlib.suppress(OSError):
            os.write(2, f"\n{line}\n".encode())


def _leave() -> None:
    """Leave out what Python and libraries do at their very end: it can hang, crash or change the exit code."""
    if _State.code is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(_State.code)


def _forget_parent() -> None:
    """Leave the pipe and the exit code to the process that this one was forked from."""
    signal.set_wakeup_fd(-1)
    atexit.unregister(_leave)
