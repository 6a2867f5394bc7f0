"""All errors that moa-data raises on purpose.

Each message states what was found, what was expected and what to do next. Some classes also inherit
from the matching builtin, so that callers can catch them without knowing moa-data.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MoaDataError(Exception):
    """Base class of all errors that the user can act on.

    Args:
        message: what was found and what was expected.
        hint: what to do next, if the message does not say it.
    """

    exit_code: int = 2  # Exit code of a command that ends with this error.

    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(f"{message} {hint}".rstrip())
        self.hint = hint


class Interrupted(MoaDataError):
    """A signal stopped the work; the message says what is saved and how to continue."""

    def __init__(self, message: str, signum: int | None = None) -> None:
        super().__init__(message)
        # None if the KeyboardInterrupt that caused this error knows the signal.
        self.signum = None if signum is None else int(signum)


class OptionInvalid(MoaDataError, ValueError):
    """An option, a configuration file or an argument has a value that cannot be used."""


class OutputOccupied(MoaDataError, FileExistsError):
    """The output folder holds something else."""


class StorageUnavailable(MoaDataError, OSError):
    """A disk or an object store is full, read-only, unreachable, or does not support locks.

    The files on it may be intact.
    """


class NotEnoughMemory(MoaDataError, MemoryError):
    """Host or device memory cannot hold the target and its batches."""


class StoreError(MoaDataError, ValueError):
    """Base class of errors of an activation store.

    It is raised itself for arrays that do not fit and for missing parts.
    """


class StoreNotFound(StoreError, FileNotFoundError):
    """The folder is not an activation store (no ``store.json``)."""


class StoreMismatch(StoreError):
    """An existing store was made from other inputs than the ones given now.

    The message shows the first key of each group that differs, up to a limit. A note of the
    exception, which tracebacks show, lists all keys.

    Args:
        path: the store.
        changes: dotted key -> (value in the store, value given now), for every key that differs.
        advice: what to do; the default is for somebody who extends a store.
    """

    _CAUSES = ("identities.", "extraction.", "codec.", "fields.")
    """Prefixes of keys, in the order of the message. Counts and the plan, which depend on them, are
    last."""
    _MAX_SHOWN = 3
    _MAX_VALUE_CHARS = 32

    def __init__(
        self,
        path: str,
        changes: Mapping[str, tuple[Any, Any]],
        advice: str = (
            "Restore those inputs to continue this store, or choose another output folder."
        ),
    ) -> None:
        self.changes = dict(changes)
        groups: dict[str, str] = {}
        for key in sorted(
            changes, key=lambda key: [not key.startswith(prefix) for prefix in self._CAUSES]
        ):
            groups.setdefault(".".join(key.split(".")[: 1 if key.startswith("codec.") else 2]), key)
        shown = list(groups.values())[: self._MAX_SHOWN]
        listed = "; ".join(self._line(key, self._MAX_VALUE_CHARS) for key in shown)
        n_more = len(changes) - len(shown)
        more = f"; {n_more} more, which `moa-data --debug` lists" if n_more else ""
        super().__init__(f"{path} was made from other inputs ({listed}{more}).", advice)
        self.add_note("\n".join(map(self._line, self.changes)))

    def _line(self, key: str, max_chars: int | None = None) -> str:
        old, new = (
            text if max_chars is None or len(text) <= max_chars else f"{text[: max_chars - 1]}…"
            for text in map(repr, self.changes[key])
        )
        return f"{key}: store has {old}, given {new}"


class StoreLocked(StoreError, BlockingIOError):
    """Another process is writing to this store."""


class SchemaVersionError(StoreError):
    """The store has another schema version than the one that this release reads."""


class StoreDamaged(StoreError):
    """A file of a store is missing, truncated, changed, or does not match its commit."""


class CodecUnknown(StoreError):
    """A codec does not exist, or does not support such fields."""


class SelectionInvalid(StoreError, IndexError):
    """The store does not have the requested field, layer, sequence or token."""


class ReportUnwritten(StorageUnavailable):
    """The report of an evaluation cannot be written after everything was measured."""

    def __init__(self, path: Path, error: Exception, markdown: str) -> None:
        reason = getattr(error, "strerror", None) or error
        super().__init__(
            f"{path} cannot be written ({reason}); the report is printed instead. Free some space "
            "first."
        )
        self.markdown = markdown  # The report as text.


class DatasetError(MoaDataError, ValueError):
    """Chats, prompts, a file of another project or a folder of the Hub cannot be read.

    Also raised if too many chats cannot be used.
    """


class TemplateError(DatasetError):
    """The tokenizer has no chat template, or its template cannot be used."""


class PromptUnusable(TemplateError):
    """A prompt holds control tokens of the target, or text that cannot be encoded."""


class DrafterError(MoaDataError, ValueError):
    """A drafter, its weights, a checkpoint or a decoding request cannot be used."""


class TargetError(DrafterError):
    """A target cannot be loaded, is not supported, or is not the expected one.

    Also raised if it computes values that are not finite.
    """


class TrainingError(MoaDataError):
    """Training cannot start or continue with these settings."""


class WorkerError(MoaDataError, RuntimeError):
    """The processes or the engine of an extraction cannot run, or ended before the work did."""


class ServingError(MoaDataError):
    """A server or a client cannot work with these settings."""


class Overloaded(ServingError):
    """The server accepts no more sessions, tokens or requests now; try again later."""


class RequestInvalid(ServingError, ValueError):
    """A request that cannot be served as given."""


class NotAllowed(ServingError, PermissionError):
    """The bearer token is missing or wrong."""


class ProtocolMismatch(ServingError):
    """Client and server have different protocol versions, targets, tokenizers or drafters."""


class Disconnected(ServingError, ConnectionError):
    """The connection ended, or could not be made."""


class RunWarning(UserWarning):
    """A training run deviates from its settings."""
