"""How SIGINT, SIGTERM and SIGHUP end a command at any moment.

    state of the process      effect of a signal
    ------------------------  --------------------------------------------------------------------
    the program is imported   The process ends, because nothing has been done yet.
    the command runs          SignalReceived is raised in the main thread. During an import, the
                              process ends instead, because the exception would leave half a module
                              and a locked import system.
    the outcome is decided    The process ends with the exit code that was decided.

While the main thread is inside a C library, Python cannot run signal handlers. So a watching thread
receives the signals, too. It ends the process CLEANUP_S seconds after the first signal, or at a
second SIGINT. Some commands install their own signal handlers: training saves its state, and a
server completes its answers. The watching thread gives such a command unlimited time, until a
second SIGINT arrives.
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

# After a signal, a command has this number of seconds to discard its unfinished work. Then the
# process is ended.
CLEANUP_S = 3.0
# A shell or a launcher may send the SIGINT of one Ctrl-C twice. So a SIGINT is ignored if it
# arrives within this number of seconds after the first signal.
_REPEAT_S = 1.0
_POLL_S = 0.1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_IMPORT = "<frozen importlib._bootstrap"


class SignalReceived(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP arrived."""

    # Named tuples and dataclasses call `exec` with source text. If a plain KeyboardInterrupt passes
    # through such a call, Python later ends the process with SIGINT, even if the exception was
    # handled. This does not happen with a subclass of KeyboardInterrupt, so SIGINT raises this
    # class instead.

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class _State:
    """State shared by the main thread and the watching thread."""

    # The phase is "starting" before the command runs, "running" while signals raise exceptions, and
    # "ending" after that.
    phase = "starting"
    signum: int | None = None  # Number of the first signal that has arrived.
    # Whether SignalReceived was raised in the main thread. Later signals must not raise it again,
    # because they would interrupt the handling of the first one.
    is_raised = False
    is_lost = False  # Whether SignalReceived was raised, but Python has discarded it.
    code: int | None = None  # Exit code of the process, or None if the outcome is not decided yet.


def watch_signals() -> None:
    """Install handlers for SIGINT, SIGTERM and SIGHUP, and start the watching thread.

    Until :func:`begin_command` is called, a signal ends the process. After that call, a signal
    raises an exception instead. If a signal is already ignored when the process starts, it stays
    ignored, so that ``nohup`` works.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in _ENDING:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _raise)
    threading.Thread(target=_watch, args=(reading,), daemon=True).start()
    sys.unraisablehook = _drop
    # This exit hook must be called last, because it ends the process. Python calls exit hooks in
    # the reverse order of their registration, so register this hook before all others.
    atexit.register(_leave)
    os.register_at_fork(after_in_child=_forget_parent)


def begin_command() -> None:
    """From now on, let signals raise :class:`SignalReceived` in the main thread."""
    _State.phase = "running"


def end_with_input() -> None:
    """Send SIGTERM to this process when its standard input is closed.

    Worker processes call this function. When the parent process of a worker ends, the standard
    input of the worker is closed.
    """

    def wait_for_end() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_end, daemon=True).start()


def end_command() -> None:
    """From now on, do not let signals raise exceptions.

    The command has ended. An exception could interrupt the output of its result or of its error.
    """
    _State.phase = "ending"


def decide(code: int) -> int:
    """Decide the final exit code of the process, and return it.

    If no signal has arrived, the exit code is ``code``. Otherwise, it is 128 plus the number of the
    signal.
    """
    end_command()
    if _State.signum is not None and code < 128:
        if code == 0:
            _tell("Error: the command was interrupted just before its end. Run it again.")
        code = 128 + _State.signum
    _State.code = code
    return code


def interruption_code(error: BaseException | None) -> int | None:
    """Return the exit code of an error that was caused by a signal: 128 plus the signal's number.

    The result is None for any other error. An error was caused by a signal if there is a
    ``KeyboardInterrupt`` or :class:`~moa_data.errors.Interrupted` among the error and its causes.
    If a signal has arrived, any error counts as caused by the signal, because a library may have
    replaced the ``KeyboardInterrupt`` by an exception of its own.
    """
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    links = [link for link in chain if isinstance(link, KeyboardInterrupt | Interrupted)]
    signum = int(signal.SIGINT) if links else _State.signum
    for link in links:
        known_signum = getattr(link, "signum", None)
        if known_signum is not None:
            signum = known_signum
            break
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
    # Python discards exceptions that are raised in a destructor, or in a function that runs after a
    # fork. The watching thread raises a discarded SignalReceived again.
    if isinstance(unraisable.exc_value, SignalReceived):
        _State.is_raised = False
        _State.is_lost = True
    else:
        sys.__unraisablehook__(unraisable)


def _watch(pipe: int) -> NoReturn:
    """Wait for a signal. End the process at a second SIGINT, or when the time for cleanup is over."""
    while (signum := _next_signal(pipe, None)) is None:
        pass
    _State.signum = _State.signum or signum
    if _State.code is not None:
        os._exit(_State.code)
    # If the command has installed its own signal handler, wait until this handler ends the command.
    # Look for the handler only once: a handler that is installed later never learns of this signal.
    is_patient = signal.getsignal(signum) is not _raise
    is_hint_shown = False
    began_s = time.monotonic()
    while is_patient or time.monotonic() < began_s + CLEANUP_S:
        next_signal = _next_signal(pipe, _POLL_S)
        if _State.is_lost:
            _State.is_lost = False
            # Python has discarded the SignalReceived. Send a signal to this process, so that the
            # signal handler raises SignalReceived again. Send SIGTERM, because SIGINT could count
            # as a second Ctrl-C.
            os.kill(os.getpid(), signal.SIGTERM)
        is_later = time.monotonic() > began_s + _REPEAT_S
        if is_patient and is_later and not is_hint_shown:
            _tell("The command finishes what it has started; press Ctrl-C again to stop at once.")
            is_hint_shown = True
        if next_signal == signal.SIGINT and is_later:
            if not is_patient:
                _end("interrupted at once.")
            # The command's own handler has CLEANUP_S seconds from now to end the command.
            is_patient, began_s = False, time.monotonic()
    _end("interrupted; the command did not end by itself, so it was stopped at once.")


def _next_signal(pipe: int, wait_s: float | None) -> int | None:
    """Wait for SIGINT, SIGTERM or SIGHUP.

    Args:
        pipe: file descriptor of the reading end of a pipe. Python writes the number of each signal
            that arrives to the other end.
        wait_s: maximum time to wait in seconds. If the argument is None, the time is not limited.

    Returns:
        The number of the signal, or None if none has arrived.
    """
    if not select.select([pipe], [], [], wait_s)[0]:
        return None
    [number] = os.read(pipe, 1)
    return number if number in _ENDING else None


def _end(line: str) -> NoReturn:
    """End the process immediately. Print a message unless the exit code is already decided."""
    if _State.code is None:
        _tell(f"Error: {line} Run the same command again.")
    os._exit(128 + (_State.signum or 0) if _State.code is None else _State.code)


def _tell(line: str) -> None:
    # The main thread may hold the lock of ``sys.stderr``, so a write to it could block. Write
    # directly to the file descriptor instead.
    if is_first_process():
        with contextlib.suppress(OSError):
            os.write(2, f"\n{line}\n".encode())


def _leave() -> None:
    """If the exit code is decided, exit without the final cleanup of Python and libraries.

    This cleanup could hang, crash or change the exit code.
    """
    if _State.code is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(_State.code)


def _forget_parent() -> None:
    """In a forked child process, remove the wakeup pipe and the exit hook of the parent process.

    Both processes share the pipe. Without this function, the parent process would receive the
    child's signals, too.
    """
    signal.set_wakeup_fd(-1)
    atexit.unregister(_leave)
