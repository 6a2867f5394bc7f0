"""Every error the store raises: what was wrong, expected against got, what to do next.

Each class also inherits the builtin that fits, so that callers which know nothing of the store can still catch it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import MoaDataError


class StoreError(MoaDataError):
    """Base of everything that goes wrong with an activation store."""


class StoreNotFound(StoreError, FileNotFoundError):
    """The folder is not an activation store (no ``store.json``)."""


class ManifestInvalid(StoreError, ValueError):
    """``store.json`` or ``plan.parquet`` or a commit cannot be read as what it should be."""


class SchemaVersionError(StoreError, ValueError):
    """The store was written in another schema version than the one this release reads."""


class CodecUnknown(StoreError, ValueError):
    """There is no codec of that name, or not for fields like these."""


class PlanInvalid(StoreError, ValueError):
    """The table of sequences breaks a rule of the plan."""


class OutputOccupied(StoreError, FileExistsError):
    """The folder to write to holds something that is not an activation store."""


class StoreLocked(StoreError, BlockingIOError):
    """Another process is writing to this store."""


class LocksUnsupported(StoreError, OSError):
    """A file cannot be locked, so that two processes might write there at the same time."""


class LinkRefused(StoreError, OSError):
    """A symbolic link stands where a writer would have to leave its folder."""


class CheckIncomplete(StoreError, OSError):
    """Something of a store could not be looked at, for a reason that lies in the machine and not in the store."""


class StoreMismatch(StoreError, ValueError):
    """An existing store was made from other inputs than the ones given now.

    The message shows the first keys of the groups that differ; a note of the exception, which tracebacks show, lists
    all of them.

    Attributes:
        changes: dotted key -> (value in the store, value given now), for every key that differs.
    """

    _CAUSES = ("identities.", "extraction.", "codec.", "fields.")
    """Prefixes of keys in the order of the message; counts and the plan, which follow from them, come last."""
    _MAX_SHOWN = 3
    _MAX_VALUE_CHARS = 32

    def __init__(self, path: str, changes: Mapping[str, tuple[Any, Any]]) -> None:
        self.changes = dict(changes)
        groups: dict[str, str] = {}
        for key in sorted(changes, key=lambda key: [not key.startswith(prefix) for prefix in self._CAUSES]):
            groups.setdefault(".".join(key.split(".")[: 1 if key.startswith("codec.") else 2]), key)
        shown = list(groups.values())[: self._MAX_SHOWN]
        listed = "; ".join(self._line(key, self._MAX_VALUE_CHARS) for key in shown)
        n_more = len(changes) - len(shown)
        more = f"; {n_more} more, which `moa-data --debug` lists" if n_more else ""
        super().__init__(
            f"{path} was made from other inputs ({listed}{more}). Restore those inputs to go on with this store, or "
            "choose another output folder."
        )
        self.add_note("\n".join(map(self._line, self.changes)))

    def _line(self, key: str, max_chars: int | None = None) -> str:
        old, new = (
            text if max_chars is None or len(text) <= max_chars else f"{text[: max_chars - 1]}…"
            for text in map(repr, self.changes[key])
        )
        return f"{key}: store has {old}, given {new}"


class StorageUnavailable(MoaDataError, OSError):
    """An object store cannot be asked, or refuses; which says nothing about the files that it holds."""


class StoreReadOnly(StoreError, PermissionError):
    """The folder to write to lies on a read-only file system, or belongs to somebody else."""


class DiskFull(StoreError, OSError):
    """The file system has no room for what is being written."""


class WriteInvalid(StoreError, ValueError):
    """An array given to the writer has the wrong shape, dtype, order or range."""


class PartIncomplete(StoreError, ValueError):
    """A part was to be committed although planned sequences were not written to every field."""


class PartUncommitted(StoreError, LookupError):
    """Planned parts have no commit yet, and the caller asked for a complete store."""


class ShardMissing(StoreError, FileNotFoundError):
    """A file that a commit lists is gone."""


class ShardCorrupt(StoreError, ValueError):
    """A file's bytes are not the ones that were written (truncated, flipped, replaced)."""


class RepairImpossible(StoreError, ValueError):
    """The damage cannot be mended by leaving out what is damaged."""


class UnknownField(StoreError, LookupError):
    """The store has no such field, or the field has no such axis."""


class SliceInvalid(StoreError, IndexError):
    """A sequence, layer or token selection lies outside the store."""
