"""What a verification found: what is damaged, and apart from it what could not be checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..disk.checking import check_incomplete, reason
from ..paths import StorePath


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong.

    Attributes:
        part: number of the part, or None for what belongs to the whole store.
        path: the damaged file, relative to the store.
    """

    part: int | None
    path: str
    message: str


@dataclass(frozen=True)
class Unchecked:
    """One thing that could not be checked, because the machine refused; it may be whole."""

    part: int | None
    path: str
    error: OSError | MemoryError

    @property
    def message(self) -> str:
        """Why, in words."""
        return reason(self.error)


Finding = Damage | Unchecked


@dataclass
class VerifyReport:
    """Outcome of ``verify_store``.

    Attributes:
        damages: everything found, in order of parts.
        unchecked: what could not be checked, in order of parts.
        n_parts: committed parts.
        n_pending_parts: planned parts without a commit; the store is incomplete, which is no damage.
        lacks_target: whether the target bundle, which an extraction writes, has no commit.
        n_bytes: bytes of all committed files.
    """

    damages: list[Damage] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)
    n_parts: int = 0
    n_pending_parts: int = 0
    lacks_target: bool = False
    n_sequences: int = 0
    n_tokens: int = 0
    n_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything was checked and no damage was found."""
        return not self.damages and not self.unchecked

    @property
    def missing(self) -> str:
        """What of the plan is still to be written, in words; empty for a complete store."""
        return missing_text(self.n_pending_parts, self.n_parts + self.n_pending_parts, self.lacks_target)

    def add(self, findings: Iterable[Finding]) -> None:
        """Sort findings into damages and what could not be checked."""
        for finding in findings:
            if isinstance(finding, Damage):
                self.damages.append(finding)
            else:
                self.unchecked.append(finding)

    def check_complete(self, store: StorePath) -> None:
        """Refuse a report that leaves something open."""
        if self.unchecked:
            first = self.unchecked[0]
            n_files = len({item.path for item in self.unchecked})
            raise check_incomplete(store, first.path, first.error, n_files)


def missing_text(n_pending: int, n_planned: int, lacks_target: bool) -> str:
    """Return in words what of a plan is still to be written; empty where nothing is."""
    what = [f"{n_pending} of {n_planned} parts"] if n_pending else []
    what += ["the target bundle"] if lacks_target else []
    return f"{' and '.join(what)} still to be written" if what else ""
