"""All errors that moa-data raises on purpose.

Each message states what was found, what was expected and what the user can do. Some classes also
inherit from a builtin exception, so that callers can catch errors of these classes as builtin
exceptions.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MoaDataError(Exception):
    """Base class of all errors of moa-data.

    Args:
        message: what was found and what was expected.
        hint: what the user can do. The hint is empty if ``message`` already says what the user can
            do.
    """

    exit_code: int = 2  # Exit code of a command that ends with this error.

    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(f"{message} {hint}".rstrip())
        self.hint = hint


class Interrupted(MoaDataError):
    """A signal has stopped the command. The message says what was saved and how to continue."""

    def __init__(self, message: str, signum: int | None = None) -> None:
        super().__init__(message)
        # Number of the signal. If the value is None, the number is in the KeyboardInterrupt that
        # caused this error.
        self.signum = None if signum is None else int(signum)


class OptionInvalid(MoaDataError, ValueError):
    """An option, a configuration file or an argument has a value that cannot be used."""


class OutputOccupied(MoaDataError, FileExistsError):
    """The output path already contains files that the command can neither continue nor replace."""


class StorageUnavailable(MoaDataError, OSError):
    """A disk or object store is full, read-only or unreachable, or does not support locks.

    The files on this disk or in this object store may be intact.
    """


class NotEnoughMemory(MoaDataError, MemoryError):
    """Host or device memory cannot hold the target and its batches."""


class StoreError(MoaDataError, ValueError):
    """Base class of all errors of an activation store.

    This class itself is raised for arrays of the wrong shape or dtype, and for missing parts.
    """


class StoreNotFound(StoreError, FileNotFoundError):
    """The folder is not an activation store (no ``store.json``)."""


def _shortened(value: Any, max_chars: int = 32) -> str:
    """Return ``repr(value)``. If it is longer than ``max_chars``, it is cut and ends with …."""
    text = repr(value)
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


class StoreMismatch(StoreError):
    """An existing store was made from inputs that differ from the current inputs.

    Inputs are compared by dotted keys such as ``extraction.max_length``. The message shows at most
    three keys that differ, and 32 characters of each value. If several keys with the same prefix
    differ, the message shows only the first key. The exception also has a note for each key that
    differs, with both values in full. Tracebacks show these notes.

    Args:
        path: path of the store.
        changes: maps every dotted key that differs to (value in the store, current value).
        advice: what the user can do. The default is for a command that continues a store.
    """

    _CAUSES = ("identities.", "extraction.", "codec.", "fields.")
    """Prefixes of keys. The message shows keys that differ in the order of this list.

    Keys without such a prefix, for example counts and the plan, come last in the message. They
    usually differ only as a result of a difference in the other keys.
    """
    _MAX_SHOWN = 3

    def __init__(
        self,
        path: str,
        changes: Mapping[str, tuple[Any, Any]],
        advice: str = (
            "To continue this store, give the same model, dataset and settings as before. To make "
            "a new store, choose another output folder."
        ),
    ) -> None:
        self.changes = dict(changes)
        lines: dict[str, str] = {}
        for key in sorted(changes, key=self._rank):
            old, new = changes[key]
            self.add_note(f"{key}: the store has {old!r}, this command has {new!r}")
            prefix = ".".join(key.split(".")[: 1 if key.startswith("codec.") else 2])
            line = f"{key}: the store has {_shortened(old)}, this command has {_shortened(new)}"
            lines.setdefault(prefix, line)
        shown = list(lines.values())[: self._MAX_SHOWN]
        if n_more := len(changes) - len(shown):
            shown.append(f"{n_more} more, which `moa-data --debug ...` lists for the same command")
        super().__init__(
            f"{path} was made from another model or dataset, or with other settings "
            f"({'; '.join(shown)}).",
            advice,
        )

    def _rank(self, key: str) -> list[bool]:
        """Return a sort key, which sorts keys by the order of their prefixes in _CAUSES."""
        return [not key.startswith(prefix) for prefix in self._CAUSES]


class StoreLocked(StoreError, BlockingIOError):
    """Another process is writing to the store."""


class SchemaVersionError(StoreError):
    """This release cannot read the schema version of the store."""


class StoreDamaged(StoreError):
    """A file of a store is missing, or differs from the size and checksum in its commit."""


class CodecUnknown(StoreError):
    """A codec does not exist, or does not support the fields of the store."""


class SelectionInvalid(StoreError, IndexError):
    """The store does not have the requested field, layer, sequence or token."""


class ReportUnwritten(StorageUnavailable):
    """The report of an evaluation cannot be written, although the evaluation has finished."""

    def __init__(self, path: Path, error: Exception, markdown: str) -> None:
        reason = getattr(error, "strerror", None) or error
        super().__init__(
            f"{path} cannot be written ({reason}), so the report is printed instead. Before the "
            "next run, free some space or give yourself the right to write there."
        )
        # Text of the report. The command prints this text, because the file of the report could not
        # be written.
        self.markdown = markdown


class DatasetError(MoaDataError, ValueError):
    """Chats, prompts, a file of another project or a folder of the Hub cannot be read.

    This error is also raised if too many chats of a dataset cannot be used.
    """


class TemplateError(DatasetError):
    """The tokenizer has no chat template, or the chat template cannot be used."""


class PromptUnusable(TemplateError):
    """A prompt contains control tokens of the target, or text that cannot be encoded."""


class DrafterError(MoaDataError, ValueError):
    """A drafter, its weights, a checkpoint or a decoding request cannot be used."""


class TargetError(DrafterError):
    """A target cannot be loaded, is not supported, or is not the expected target.

    This error is also raised if a target computes values that are not finite.
    """


class TrainingError(MoaDataError):
    """Training cannot start or continue with these settings."""


class WorkerError(MoaDataError, RuntimeError):
    """The worker processes or the engine of an extraction cannot run, or ended too early."""


class ServingError(MoaDataError):
    """A server or a client cannot work with these settings."""


class Overloaded(ServingError):
    """The server temporarily accepts no more sessions, tokens or requests."""


class RequestInvalid(ServingError, ValueError):
    """A request is invalid, so the server cannot serve it."""


class NotAllowed(ServingError, PermissionError):
    """The bearer token of a request is missing or wrong."""


class ProtocolMismatch(ServingError):
    """Client and server have different protocol versions, targets, tokenizers or drafters."""


class Disconnected(ServingError, ConnectionError):
    """The connection between client and server has ended, or could not be opened."""


class RunWarning(UserWarning):
    """A warning that a training run deviates from its settings."""
