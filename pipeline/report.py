"""Timings, progress and the final report of a command that writes a store.

A store is written in parts. A part is a range of sequences that is written and committed as a
whole.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..storage.commit import read_part_commit
from ..storage.paths import StorePath
from ..storage.schema import commit_path
from ..storage.write.addition import StoreAddition
from ..storage.write.store import StoreWriter
from ..text import Progress, counted, format_bytes, format_hours

# Entries for the JSON file of a run. They say how the run was started, such as the command line.
Provenance = Mapping[str, Any]


@dataclass
class Timings:
    """Durations in seconds, and counts of tokens and parts, of a run that writes a store."""

    # Duration of the forwards, including the time to gather the activations. On a GPU, it is
    # measured on the device.
    forward_s: float = 0.0
    # Duration of the copies from a GPU to the host. Copies run at the same time as forwards.
    copy_s: float = 0.0
    # Time for which the main thread waited because the writer thread's queue was full.
    wait_s: float = 0.0
    # CPU time of the writer thread.
    writer_s: float = 0.0
    # CPU time of all encoding threads.
    encode_s: float = 0.0
    # Time from the first forward to the last commit.
    extract_s: float = 0.0
    # Duration of the entire run.
    wall_s: float = 0.0
    # Number of tokens in the parts that this run committed.
    n_tokens: int = 0
    # Number of tokens in this run's forwards, without padding. Tokens also count if another run has
    # committed their part first.
    n_computed_tokens: int = 0
    # Number of tokens in this run's forwards, padding included.
    n_padded_tokens: int = 0
    # Number of parts that this run committed.
    n_parts: int = 0
    # Number of parts that this run wrote, but that another run committed first.
    n_late: int = 0

    @property
    def padding_fraction(self) -> float:
        """Fraction of padding among all positions that the target has processed."""
        return 1.0 - self.n_computed_tokens / self.n_padded_tokens if self.n_padded_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Stored tokens divided by the seconds from the first forward to the last commit."""
        return self.n_tokens / self.extract_s if self.extract_s else 0.0

    def add_part(self, n_tokens: int, was_first: bool) -> None:
        """Count a part that this run has written.

        Args:
            n_tokens: number of tokens in the part.
            was_first: whether this run has committed the part. It is False if another run has
                committed the part first.
        """
        self.n_parts += was_first
        self.n_late += not was_first
        self.n_tokens += n_tokens * was_first

    def __add__(self, other: "Timings") -> "Timings":
        """Add the timings of two workers.

        ``extract_s`` and ``wall_s`` are not added, because workers run at the same time. For these
        two, the larger value is kept.
        """
        total = asdict(self)
        for name, value in asdict(other).items():
            if name in ("extract_s", "wall_s"):
                total[name] = max(total[name], value)
            else:
                total[name] += value
        return Timings(**total)

    def record(self) -> dict[str, float]:
        """Return the values for the run's JSON file in runs/."""
        return asdict(self) | {
            "padding_fraction": self.padding_fraction,
            "tokens_per_s": self.tokens_per_s,
        }

    def describe(self) -> str:
        """Return a text about the parts that the run wrote and how long that took."""
        text = (
            f"{counted(self.n_parts, 'part')}, {self.n_tokens:,} tokens in "
            f"{format_hours(self.extract_s)} ({self.tokens_per_s:,.0f} tokens/s)"
        )
        if self.n_padded_tokens:
            text += (
                f"; the target ran for {format_hours(self.forward_s)} and waited for the writer "
                f"for {format_hours(self.wait_s)}; padding {self.padding_fraction:.1%}"
            )
        if self.n_late:
            text += f", {counted(self.n_late, 'part')} that another process had already written"
        return text


@dataclass
class WriteReport:
    """Report of a command on the store that it wrote to, and on the parts that this run wrote."""

    store: StorePath
    # The next four fields are about all committed parts of the store, including the parts of
    # earlier runs.
    n_sequences: int
    n_tokens: int
    n_parts: int
    stored_bytes: int
    timings: Timings = field(repr=False)
    # Lines of text that the command adds to the report, such as the names of added fields. The
    # lines are shown after the size of the store.
    lines: list[str] = field(default_factory=list)
    # Whether this run replaced an earlier store in the folder. An earlier store is replaced only if
    # it was made from other inputs and has no parts.
    has_begun_anew: bool = False

    @classmethod
    def of(cls, writer: StoreWriter, timings: Timings) -> "WriteReport":
        """Make the report of a store. The counts are read from the commits of its parts."""
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
        """Number of parts written by this run."""
        return self.timings.n_parts

    def describe(self) -> str:
        """Return the report as text."""
        lines = [
            f"store        {self.store}: {counted(self.n_sequences, 'sequence')}, "
            f"{self.n_tokens:,} tokens, {counted(self.n_parts, 'part')}",
            f"size         {format_bytes(self.stored_bytes)}, "
            f"{self.stored_bytes / max(self.n_tokens, 1):,.0f} bytes per token",
            *self.lines,
        ]
        if self.has_begun_anew:
            lines.append(
                "replaced     a store in this folder that was made from other inputs and had no "
                "parts"
            )
        if self.timings.n_parts or self.timings.n_late:
            lines.append(f"this run     {self.timings.describe()}")
        else:
            lines.append("this run     wrote no part, every part existed already")
        return "\n".join(lines)

    def record(self, provenance: Provenance | None) -> dict[str, Any]:
        """Return the content of the run's JSON file in runs/.

        The content may differ between two runs that write equal data.
        """
        return {
            "provenance": dict(provenance or {}),
            "n_parts_done": self.timings.n_parts,
            "n_parts_late": self.timings.n_late,
            "timings": self.timings.record(),
        }


def reason_lines(counts: Counter[str], examples: Mapping[str, str], start: str = "") -> list[str]:
    """Return a line of text for each reason, most frequent first.

    Args:
        counts: maps a reason to its number of rows.
        examples: maps a reason to a text about the first row with this reason. Not every reason has
            an example.
        start: text at the start of each line.
    """
    lines: list[str] = []
    for reason, n in counts.most_common():
        example = f" (first: {examples[reason]})" if reason in examples else ""
        lines.append(f"{start}{n:,} x {reason}{example}")
    return lines


class PartProgress:
    """Reports how many parts of a store are committed, and how many tokens are done.

    A token is done if its part is committed, or if this run's forwards have processed it.

    Args:
        progress: reports the phase in which the parts are written.
        store: writes parts of the store, or (for `add`) new fields of its parts.
    """

    def __init__(self, progress: Progress, store: StoreWriter | StoreAddition) -> None:
        self._progress = progress
        self._store = store
        self._n_tokens = sum(store.part_tokens.values())
        self.look()
        self._n_before_tokens = self._n_committed_tokens
        self._n_before_parts = self._n_committed

    def look(self) -> int:
        """Count the commits of all processes. Return the number of pending parts."""
        pending = self._store.pending_parts()
        n_pending_tokens = sum(self._store.part_tokens[part] for part in pending)
        self._n_committed_tokens = self._n_tokens - n_pending_tokens
        self._n_committed = self._store.n_parts - len(pending)
        return len(pending)

    def report(self, timings: Timings, note: str = "") -> None:
        """Report the tokens that are done.

        Args:
            timings: the timings and counts of this run. They may already count parts that this run
                has committed after the last call of :meth:`look`.
            note: text at the end of the progress line.
        """
        n_computed = min(self._n_before_tokens + timings.n_computed_tokens, self._n_tokens)
        n_parts = max(self._n_committed, self._n_before_parts + timings.n_parts)
        self._progress(
            max(self._n_committed_tokens, n_computed),
            self._n_tokens,
            f"{n_parts}/{self._store.n_parts} parts{note}",
        )
