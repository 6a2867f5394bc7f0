"""Passes the progress of a task to a function of a test."""

from collections.abc import Callable

from moa_data.text import Progress


def progress_to(call: Callable[[int, int, str], object]) -> Progress:
    """Return a progress that calls a function with the units done, all units, and "PHASE, NOTE"."""

    def show(phase: Progress, n_done: int, total: int, note: str) -> None:
        call(n_done, total, ", ".join(filter(None, (phase.phase, note))))

    return Progress(show)
