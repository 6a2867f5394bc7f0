"""What a client tells those who show its text: a terminal, a web page, a measurement.

Tokens have indices in the answer, from 0. Each event turns into a JSON object by :func:`as_json`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

ChosenMode = Literal["server", "client"]
"""Where drafts are made while there is a network: ``server``, which drafts, verifies and streams, or ``client``, which
drafts on while the server verifies."""
Mode = Literal["server", "client", "offline"]
"""How tokens come: as chosen, or ``offline``, by the client's drafter without a network."""
Kind = Literal["streamed", "accepted", "bonus", "unverified"]
"""Where a token came from: a run of the server; a draft of the client that the target agreed with; the target's own
token after those; the client's drafter, not verified yet."""


@dataclass(frozen=True)
class Tokens:
    """Tokens appended to the answer at ``start``; texts are what each adds to the text, some of them empty."""

    start: int
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    kinds: tuple[Kind, ...]


@dataclass(frozen=True)
class Verified:
    """Unverified tokens before index ``stop`` agree with the target."""

    stop: int


@dataclass(frozen=True)
class RolledBack:
    """Tokens from index ``stop`` on are taken back: the target disagrees with the first of them."""

    stop: int


@dataclass(frozen=True)
class LinkChanged:
    """The network went or came back."""

    up: bool
    reason: str = ""


@dataclass(frozen=True)
class ModeChanged:
    """Tokens come another way from now on."""

    mode: Mode
    reason: str


@dataclass(frozen=True)
class Stats:
    """What was measured so far; times in ms, None before the first measurement."""

    n_tokens: int
    n_target_calls: int
    n_rolled_back: int
    tokens_per_s: float
    acceptance_length: float | None
    round_trip_ms: float | None
    verify_ms: float | None
    draft_ms: float | None
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class Done:
    """The answer has ended: ``stop`` (end of sequence), ``length`` (the bound on tokens) or ``deadline``."""

    reason: str


Event = Tokens | Verified | RolledBack | LinkChanged | ModeChanged | Stats | Done
OnEvent = Callable[[Event], None]


def as_json(event: Event) -> dict[str, Any]:
    """Return an event as a JSON object whose ``type`` is the name of its class."""
    return {"type": type(event).__name__} | asdict(event)
