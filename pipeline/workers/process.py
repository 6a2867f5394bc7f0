"""The main program of a worker process, which ``local`` starts and directs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import FrameType

from .messages import Asking, Computed, Done, Ended, Failed, Loading, Piece, Start, is_of_device, portable
from .work import Worker

_WATCH_S = 0.5
_LEAVE_S = 30.0

Send = Callable[[object], None]


def main(fd: int, parent: int) -> int:
    """Work for the process at the other end of a socket until it has no more pieces, or is gone.

    Args:
        fd: the socket.
        parent: that process.

    Returns:
        The exit code.
    """
    _obey(parent)
    with Connection(fd) as connection:
        sending = threading.Lock()

        def send(message: object) -> None:
            with sending:  # the writer's thread sends too
                connection.send(message)

        try:
            _work(connection, send)
        except KeyboardInterrupt:  # what was not committed has been discarded
            return 128 + signal.SIGTERM
        except (EOFError, BrokenPipeError, ConnectionResetError):  # likewise: the director is gone
            return 1
        except Exception as error:
            if is_of_device(error):
                raise  # ends this process as a kill would, and others do its parts
            send(Failed(portable(error)))
    return 0


def _work(connection: Connection, send: Send) -> None:
    start: Start = connection.recv()
    with Worker.start(start.order, start.attempt, lambda done, _total, _message: send(Loading(done))) as worker:
        worker.run(
            _pieces(connection, send),
            lambda: send(Computed(worker.timings.n_tokens)),
            lambda piece, outcome: send(Done(piece, outcome)),
        )
        send(Ended(worker.timings))


def _pieces(connection: Connection, send: Send) -> Iterator[int | None]:
    while True:
        send(Asking())
        while not connection.poll(_WATCH_S):
            yield None
        message: Piece = connection.recv()
        if message.piece is None:
            return
        yield message.piece


def _obey(parent: int) -> None:
    """Leave the terminal's signals to the director, and end cleanly on SIGTERM or when the director is gone."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LEAVE_S)
    os._exit(1)
