"""The thread in which an engine steps."""

import logging
import threading

from .engine import Counts, Engine, OnCommit, OnError
from .sequence import Request, Work

_LOG = logging.getLogger(__name__)


class EngineThread:
    """Runs an engine in a thread of its own; its verbs are the engine's, and may be called from any thread.

    The functions that are given to :meth:`add` are called from the engine's thread: they hand over, and never wait.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake, self._is_stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the present step, and wait for that."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def add(self, request: Request, on_commit: OnCommit, on_error: OnError) -> int:
        """Take up a text, see :meth:`Engine.add`."""
        return self.engine.add(request, on_commit, on_error)

    def set_work(
        self,
        sequence_id: int,
        work: Work,
        drafts: tuple[int, ...] = (),
        parents: tuple[int, ...] = (),
        answers: int = 0,
    ) -> None:
        """Say what is to be done with a sequence, see :meth:`Engine.set_work`."""
        self.engine.set_work(sequence_id, work, drafts, parents, answers)
        self._wake.set()

    def hold(self, sequence_id: int, is_held: bool) -> None:
        """Stop or go on serving a sequence, whose reader is slow."""
        self.engine.hold(sequence_id, is_held)
        self._wake.set()

    def remove(self, sequence_id: int) -> None:
        """Forget a sequence."""
        self.engine.remove(sequence_id)
        self._wake.set()

    def snapshot(self) -> Counts:
        """Copy the engine's counts."""
        return self.engine.snapshot()

    def _run(self) -> None:
        while not self._is_stopping:
            # Cleared before the step: what comes during it wakes the thread again.
            self._wake.clear()
            try:
                is_done = not self.engine.step()
            except Exception as error:  # noqa: BLE001 - the thread must outlive it
                _LOG.exception("the engine failed; all texts end")
                self.engine.fail_all(error)
                continue
            if is_done and not self._is_stopping:
                self._wake.wait(self.engine.seconds_to_deadline())
