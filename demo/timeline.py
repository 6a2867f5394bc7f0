"""Records when an answer's tokens came, were verified and were taken back."""

import time
from dataclasses import dataclass, field

from ..serving.client.events import Event, RolledBack, Tokens, Verified


@dataclass(frozen=True)
class Point:
    """The answer at one moment.

    Attributes:
        seconds: since the recording began.
        n_shown: tokens that were shown, unverified ones included.
        n_verified: of these, from the first on.
    """

    seconds: float
    n_shown: int
    n_verified: int


@dataclass
class Timeline:
    """The course of an answer, recorded by passing :meth:`note` as ``on_event``.

    Attributes:
        points: one after each change, in order.
        cuts: (seconds of the cut, of the return) of each cut that was marked; the second is None while it lasts.
        n_rolled_back: tokens that were taken back.
    """

    points: list[Point] = field(default_factory=lambda: [Point(0.0, 0, 0)])
    cuts: list[tuple[float, float | None]] = field(default_factory=list)
    n_rolled_back: int = 0
    began_s: float = field(default_factory=time.perf_counter)

    def note(self, event: Event) -> None:
        """Take what happened just now."""
        now, last = time.perf_counter() - self.began_s, self.points[-1]
        if isinstance(event, Tokens):
            shown = event.start + len(event.tokens)
            # A run of tokens is either unverified as a whole or not at all.
            verified = last.n_verified if "unverified" in event.kinds else shown
            self.points.append(Point(now, shown, verified))
        elif isinstance(event, Verified):
            self.points.append(Point(now, last.n_shown, event.stop))
        elif isinstance(event, RolledBack):
            self.n_rolled_back += last.n_shown - event.stop
            self.points.append(Point(now, event.stop, event.stop))

    def mark_cut(self) -> None:
        """Say that the network is cut now; the client itself notices later, or never where nothing was to come."""
        self.cuts.append((time.perf_counter() - self.began_s, None))

    def mark_mended(self) -> None:
        """Say that the network is back now."""
        self.cuts[-1] = (self.cuts[-1][0], time.perf_counter() - self.began_s)
