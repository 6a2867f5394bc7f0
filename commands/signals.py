"""How SIGINT, SIGTERM and SIGHUP end a command, whatever it is doing.

    while                     a signal
    ------------------------  ------------------------------------------------------------------------------------------
    the program is imported   ends the process: nothing has been done
    the command runs          raises SignalReceived in the main thread; within an import, where that would leave half a
                              module and a locked import system, it ends the process
    the outcome is decided    ends the process with the exit code that was decided

A thread hears of signals even while the main one is within a C library. It ends the process CLEANUP_S after the first
signal, and at a second SIGINT. Code that installs handlers of its own (training saves its state, a server drains) takes
the time it needs, until a second SIGINT.
"""

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

CLEANUP_S = 3.0  # time for a command to discard what it has in flight, from the signal on
# a second SIGINT within this time may be the same Ctrl-C, passed on by a shell or a launcher
_REPEAT_S = 1.0
_POLL_S = 0.1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_IMPORT = "<frozen importlib._bootstrap"


class SignalReceived(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP arrived."""

    # SIGINT has it too: a plain KeyboardInterrupt that passes through `exec` of a text, as named
    # tuples and dataclasses
    # run theirs, makes Python end with that signal after everything was handled.

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class _State:
    """The state that the main thread and the watching one share."""

    phase = "starting"  # or "running", where a signal raises an exception, or "ending"
    signum: int | None = None  # of the first signal
    is_raised = False  # in the main thread; further ones must not break off its handling
    code: int | None = None  # exit code of the process, once it is decided


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
    threading.Thread(target=_watch, args=(reading,), daemon=True).start()
    sys.unraisablehook = _drop
    atexit.register(_leave)  # registered first, called last
    os.register_at_fork(after_in_child=_forget_parent)


def begin_command() -> None:
    """Let signals raise :class:`SignalReceived` in the main thread."""
    _State.phase = "running"


def end_with_input() -> None:
    """Send this process SIGTERM once its standard input is closed, which is when its parent has ended."""

    def wait_for_end() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_end, daemon=True).start()


def end_command() -> None:
    """Let signals raise no more: they would only break off the report of how the command ended."""
    _State.phase = "ending"


def decide(code: int) -> int:
    """Decide the exit code of the process for good, and return it: 128 + the number of a signal that came before."""
    end_command()
    if _State.signum is not None and code < 128:
        if code == 0:
            _tell("Error: interrupted at its very end. Run the same command again.")
        code = 128 + _State.signum
    _State.code = code
    return code


def interruption_code(error: BaseException | None) -> int | None:
    """Return the exit code of an error that a signal led to, 128 + its number; None for any other error.

    A ``KeyboardInterrupt`` or :class:`~moa_data.errors.Interrupted` in its chain counts, and without either any error
    after a signal: libraries replace exceptions by their own.
    """
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    links = [link for link in chain if isinstance(link, KeyboardInterrupt | Interrupted)]
    known = [signum for link in links if (signum := getattr(link, "signum", None)) is not None]
    signum = known[0] if known else int(signal.SIGINT) if links else _State.signum
    return None if signum is None else 128 + signum


def _raise(signum: int, frame: FrameType | None) -> None:
    _State.signum = _State.signum or signum
    if _State.phase == "starting":
        _end("interrupted before anything was done.")
    if _State.phase == "ending" or _State.is_raised:
        return
    _State.is_raised = True
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT):
            _end("interrupted.")
        frame = frame.f_back
    raise SignalReceived(_State.signum)


def _drop(unraisable: "UnraisableHookArgs") -> None:
    # Raised in a destructor, which drops it: the watching thread ends the process.
    if not isinstance(unraisable.exc_value, SignalReceived):
        sys.__unraisablehook__(unraisable)


def _watch(pipe: int) -> NoReturn:
    """End the process after a signal, at a second SIGINT or when the command takes too long to end itself."""
    while (signum := _next_signal(pipe, None)) is None:
        pass
    _State.signum = _State.signum or signum
    if _State.code is not None:
        os._exit(_State.code)
    # A handler that the command has installed by now takes its time; a later one does not know of
    # this signal.
    is_patient = signal.getsignal(signum) is not _raise
    is_told = False
    began_s = time.monotonic()
    while is_patient or time.monotonic() < began_s + CLEANUP_S:
        again = _next_signal(pipe, _POLL_S)
        is_later = time.monotonic() > began_s + _REPEAT_S
        if is_patient and is_later and not is_told:
            _tell("Ending what has begun; a second Ctrl-C ends it at once.")
            is_told = True
        if again == signal.SIGINT and is_later:
            if not is_patient:
                _end("interrupted at once.")
            # its handler ends the command now, or this thread does
            is_patient, began_s = False, time.monotonic()
    _end("interrupted; the command did not end by itself.")


def _next_signal(pipe: int, wait_s: float | None) -> int | None:
    """Return the number of a signal of ours that has come; None where none has."""
    if not select.select([pipe], [], [], wait_s)[0]:
        return None
    [number] = os.read(pipe, 1)
    return number if number in _ENDING else None


def _end(line: str) -> NoReturn:
    """End the process at once, with a line unless its exit code is decided."""
    if _State.code is None:
        _tell(f"Error: {line} Run the same command again.")
    os._exit(128 + (_State.signum or 0) if _State.code is None else _State.code)


def _tell(line: str) -> None:
    # Without the locks of Python's streams, which the main thread may hold.
    if is_first_process():
        with contextlib.suppress(OSError):
            os.write(2, f"\n{line}\n".encode())


def _leave() -> None:
    """Skip what Python and libraries do at their very end: it can hang, crash or change the exit code."""
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
