"""What writing needs of the place where a store lies; ``folder`` and ``bucket`` give it.

A folder has locks and renames, a bucket has neither: there a record that is created once decides between writers.
Everything else about writing is the same and does not know which of them it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ..parts.commit import PartCommit
from ..parts.grid import ArrayGrid
from ..parts.shard import FileRecord, Keep


class Hold(Protocol):
    """A process's hold on a store.

    Attributes:
        is_alone: whether no other process can write to the store.
        joined: whether others were there before.
    """

    is_alone: bool
    joined: bool

    def share(self) -> None:
        """Let others write beside this process."""
        ...

    def try_alone(self) -> bool:
        """Stop sharing if nobody else holds the store now."""
        ...

    def publishing(self, slot: int) -> AbstractContextManager[None]:
        """Keep others from publishing the same part or document meanwhile, where that takes a lock."""
        ...

    def claim(self, part: int) -> int:
        """Tell others that a part is being written; returns a descriptor that says so until it is closed, or -1."""
        ...

    def is_claimed(self, part: int) -> bool:
        """Whether a part is being written at this moment; only a hint."""
        ...

    def close(self) -> None:
        """Let go of the store."""
        ...


class PartPlace(Protocol):
    """Where the files of one part that is being written go, and how they become the part's.

    Attributes:
        grids: array name -> its grid.
        existing: files that the part's commit lists already, where fields are added.
    """

    @property
    def grids(self) -> Mapping[str, ArrayGrid]: ...  # noqa: D102

    @property
    def existing(self) -> Mapping[str, FileRecord]: ...  # noqa: D102

    def write_documents(self) -> dict[str, FileRecord]:
        """Write metadata that the part has for itself; return the records of all files that it has so far."""
        ...

    def path_of(self, name: str) -> Path:
        """Return the local file in which a shard, called as its commit will list it, is written."""
        ...

    def keep(self, name: str) -> Keep:
        """Return what makes that file durable once it is written."""
        ...

    def publish(self, commit: PartCommit, shards: Collection[str]) -> tuple[PartCommit, bool]:
        """Make the part exist.

        Args:
            commit: lists the part's files.
            shards: those of them that this writer wrote.

        Returns:
            The part's commit, and whether it is this one; else another writer was first, and its commit stays.
        """
        ...

    def withdraw(self, shards: Collection[str]) -> bool:
        """Delete what was published or kept without a commit; returns whether there is a commit after all."""
        ...


class Site(Protocol):
    """Where a store is written.

    Attributes:
        hold: this process's hold on the store.
        attempt: a name of the writer that no other has.
    """

    @property
    def hold(self) -> Hold: ...  # noqa: D102

    @property
    def attempt(self) -> str: ...  # noqa: D102

    @property
    def scratch_path(self) -> Path:
        """A local folder for files on their way; a folder that is a store is its own."""
        ...

    @property
    def target_path(self) -> Path:
        """A local folder with the files of the target bundle."""
        ...

    def part(
        self,
        part: int,
        grids: Mapping[str, ArrayGrid],
        existing: Mapping[str, FileRecord],
        documents: Mapping[str, bytes],
    ) -> PartPlace:
        """Return the place of a part that is to be written.

        Args:
            existing: see ``PartPlace``.
            documents: in schema version 1 the metadata of the part's own group, name -> content; else empty.
        """
        ...

    def bundle(self) -> AbstractContextManager[Path]:
        """Yield a local folder to fill, which becomes the target bundle, with its commit, when the block ends well."""
        ...

    def drop_bundle(self) -> None:
        """Delete the target bundle."""
        ...

    def remove_unfinished(self) -> None:
        """Delete documents that a kill left unfinished, or finish them."""
        ...

    def remove_unlisted(self, kept: Collection[str]) -> None:
        """Delete what no commit lists, as far as nobody can commit it any more.

        Args:
            kept: files below ``parts/`` that belong to the store.
        """
        ...

    def remove_attempt(self, attempt: str) -> None:
        """Delete the unfinished shards of a writer that is dead, as far as it is known that it has not committed."""
        ...

    def close(self) -> None:
        """Let go of the store."""
        ...
