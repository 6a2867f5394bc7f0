"""What a command that writes a store did: times and tokens of its run, its progress, and the report of the store."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..storage.commit import read_part_commit
from ..storage.paths import StorePath
from ..storage.plan import numbers
from ..storage.schema import commit_path
from ..storage.write.store import StoreWriter
from ..text import Progress, counted, format_bytes, format_hours

_LOOK_EVERY_S = 1.0


@dataclass
class Timings:
    """The times and tokens of a run."""

    forward_s: float = 0.0  # forwards, gathering of activations included (device time on a GPU)
    copy_s: float = 0.0  # copies to the host on a GPU, which work beside the forwards
    wait_s: float = 0.0  # the next forward waited for the writer
    writer_s: float = 0.0  # CPU time of the writer's thread
    encode_s: float = 0.0  # CPU time of all threads that encode
    extract_s: float = 0.0  # from the first forward to the last commit
    wall_s: float = 0.0  # the whole run
    n_tokens: int = 0  # of the parts whose commit is of this run
    n_computed_tokens: int = 0  # of this run's forwards, those of ``n_late`` parts too
    n_padded_tokens: int = 0  # the same with padding
    n_before_tokens: int = 0  # tokens that earlier runs had committed
    n_parts: int = 0  # whose commit is of this run
    n_late: int = 0  # parts that this run wrote when another run had committed them already

    @property
    def padding_fraction(self) -> float:
        """Share of padding in what the target computed."""
        return 1.0 - self.n_computed_tokens / self.n_padded_tokens if self.n_padded_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens stored per second, from the first forward to the last commit."""
        return self.n_tokens / self.extract_s if self.extract_s else 0.0

    def add_part(self, n_tokens: int, was_first: bool) -> None:
        """Count a part that this run has written; ``was_first`` is false where another run's commit was there."""
        self.n_parts += was_first
        self.n_late += not was_first
        self.n_tokens += n_tokens * was_first

    def __add__(self, other: "Timings") -> "Timings":
        """Return the sums of two workers; the seconds of ``extract_s`` and ``wall_s`` are those of the longer one."""
        one = asdict(self)
        two = asdict(other)
        longest = {name: max(one[name], two[name]) for name in ("extract_s", "wall_s")}
        return Timings(**({name: one[name] + two[name] for name in one} | longest))

    def record(self) -> dict[str, float]:
        """Return the values for runs/."""
        return asdict(self) | {
            "padding_fraction": self.padding_fraction,
            "tokens_per_s": self.tokens_per_s,
        }

    def describe(self) -> str:
        """Return what the run wrote as text."""
        text = f"{counted(self.n_parts, 'part')}, {self.n_tokens:,} tokens in {format_hours(self.extract_s)}"
        text += f" ({self.tokens_per_s:,.0f} tokens/s)"
        if self.n_padded_tokens:
            text += f"; forwards {format_hours(self.forward_s)}, waiting for the writer {format_hours(self.wait_s)}"
            text += f", padding {self.padding_fraction:.1%}"
        return text + (
            f", {counted(self.n_late, 'part')} that another run committed first"
            if self.n_late
            else ""
        )


@dataclass
class WriteReport:
    """The store that a command has written, and what this run did of it."""

    store: StorePath
    n_sequences: int  # this and the next three are of all committed parts
    n_tokens: int
    n_parts: int
    stored_bytes: int
    timings: Timings = field(repr=False)
    compared: str = ""  # what ``stored_bytes`` is a fraction of, as text; empty for nothing
    lines: list[str] = field(default_factory=list)  # what the command adds to the text
    # whether the folder held a store of other inputs, without any part
    has_begun_anew: bool = False
    restored: str = ""  # what this run wrote beside parts, of a store whose parts were all there

    @classmethod
    def of(cls, writer: StoreWriter, timings: Timings) -> "WriteReport":
        """Count what the commits of a store list."""
        commits = [
            read_part_commit(commit_path(writer.path, part)) for part in writer.committed_parts()
        ]
        return cls(
            writer.path,
            sum(commit.n_sequences for commit in commits),
            sum(commit.n_tokens for commit in commits),
            len(commits),
            sum(commit.stored_bytes for commit in commits),
            timings,
            has_begun_anew=writer.has_begun_anew,
        )

    @property
    def n_parts_done(self) -> int:
        """Parts written by this run."""
        return self.timings.n_parts

    def describe(self) -> str:
        """Return the report as text."""
        did = f"wrote {self.restored}" if self.restored else "wrote no part"
        is_whole = not self.timings.n_parts and not self.timings.n_late
        lines = [
            f"store        {self.store}: {counted(self.n_sequences, 'sequence')}, "
            f"{self.n_tokens:,} tokens, {counted(self.n_parts, 'part')}",
            f"size         {format_bytes(self.stored_bytes)}{self.compared}, "
            f"{self.stored_bytes / max(self.n_tokens, 1):,.0f} bytes per token",
            *self.lines,
            *(
                ["begun anew   the folder held a store of other inputs, which had no part"]
                if self.has_begun_anew
                else []
            ),
            "this run     "
            f"{f'{did}, every part was there' if is_whole else self.timings.describe()}",
        ]
        return "\n".join(lines)

    def record(self, provenance: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the record for runs/: everything that may differ between runs that give equal data."""
        return {
            "provenance": dict(provenance or {}),
            "n_parts_done": self.timings.n_parts,
            "n_parts_late": self.timings.n_late,
            "timings": self.timings.record(),
        }


class PartProgress:
    """Tells how much of a store's plan is done: parts by their commits, and tokens of this run."""

    def __init__(self, store: StoreWriter, progress: Progress | None) -> None:
        self._store = store
        self._progress = progress
        lengths = numbers(store.plan, "n_tokens").astype(np.int64)
        self._tokens = np.bincount(numbers(store.plan, "part"), lengths, store.n_parts).astype(
            np.int64
        )
        self._parts = store.committed_parts()
        self._n_parts = self._n_before_parts = len(self._parts)
        self.n_before_tokens = self._n_done = int(self._tokens[self._parts].sum())
        self._looked_s = time.monotonic()

    def tell(self, timings: Timings, workers: str = "", looks: bool = False) -> None:
        """Call back with (tokens done, tokens of the plan, message).

        Args:
            workers: who works, for the message.
            looks: whether to ask for the commits now; else at most once a second, as a folder may be on a network.
        """
        if self._progress is None:
            return
        if looks or not self._store.is_shared or time.monotonic() > self._looked_s + _LOOK_EVERY_S:
            self._parts = self._store.committed_parts()
            self._looked_s = time.monotonic()
        committed = int(self._tokens[self._parts].sum())
        total = int(self._tokens.sum())
        self._n_done = max(
            self._n_done, committed, min(self.n_before_tokens + timings.n_computed_tokens, total)
        )
        self._n_parts = max(self._n_parts, len(self._parts), self._n_before_parts + timings.n_parts)
        self._progress(
            self._n_done, total, f"extract {self._n_parts}/{self._store.n_parts} parts{workers}"
        )
