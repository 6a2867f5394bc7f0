"""All errors that moa-data raises on purpose.

Each says what was found, what was expected and what to do next. Some inherit the builtin that fits as well, so that
callers which know nothing of moa-data can catch them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MoaDataError(Exception):
    """The base of all errors that the user can act on.

    Args:
        message: what was found and what was expected.
        hint: what to do next, where the message does not say it.
    """

    exit_code: int = 2  # exit code of a command that ends with this error

    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(f"{message} {hint}".rstrip())
        self.hint = hint


class Interrupted(MoaDataError):
    """A signal stopped the work; the message says what is kept and how to continue."""

    def __init__(self, message: str, signum: int | None = None) -> None:
        super().__init__(message)
        # None: the KeyboardInterrupt that led here tells it
        self.signum = None if signum is None else int(signum)


class OptionInvalid(MoaDataError, ValueError):
    """An option, a configuration file or an argument has a value that cannot be used."""


class OutputOccupied(MoaDataError, FileExistsError):
    """The output folder holds something else."""


class StorageUnavailable(MoaDataError, OSError):
    """A disk or an object store is full, read-only, without locks or out of reach; files that are there may be fine."""


class NotEnoughMemory(MoaDataError, MemoryError):
    """Host or device memory cannot hold the target and its batches."""


class StoreError(MoaDataError, ValueError):
    """The base of what goes wrong with an activation store; itself for arrays that do not fit, and missing parts."""


class StoreNotFound(StoreError, FileNotFoundError):
    """The folder is not an activation store (no ``store.json``)."""


class StoreMismatch(StoreError):
    """An existing store was made from other inputs than the ones given now.

    The message shows the first keys of the groups that differ; a note of the exception, which tracebacks show, lists
    all of them. ``advice``: what to do; by default what one who extends a store can do.
    """

    _CAUSES = ("identities.", "extraction.", "codec.", "fields.")
    """Prefixes of keys in the order of the message; counts and the plan, which follow from them, come last."""
    _MAX_SHOWN = 3
    _MAX_VALUE_CHARS = 32

    def __init__(
        self,
        path: str,
        changes: Mapping[str, tuple[Any, Any]],
        advice: str = "Restore those inputs to go on with this store, or choose another output folder.",
    ) -> None:
        # dotted key -> (value in the store, value given now), for every key that differs
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
    """The store was written in another schema version than the one this release reads."""


class StoreDamaged(StoreError):
    """A file of a store is missing, truncated, changed or not what its commit says."""


class CodecUnknown(StoreError):
    """No codec has that name, or it does not take fields like these."""


class SelectionInvalid(StoreError, IndexError):
    """The store has no such field, layer, sequence or token."""


class ReportUnwritten(StorageUnavailable):
    """The report of an evaluation cannot be written after all was measured."""

    def __init__(self, path: Path, error: Exception, markdown: str) -> None:
        reason = getattr(error, "strerror", None) or error
        super().__init__(
            f"{path} cannot be written ({reason}); the report is printed instead. Free some space first."
        )
        self.markdown = markdown  # the report as text


class DatasetError(MoaDataError, ValueError):
    """Chats, prompts, a file of another project or a folder of the Hub cannot be read, or too much cannot be used."""


class TemplateError(DatasetError):
    """The tokenizer has no chat template, or one that cannot be used."""


class PromptUnusable(TemplateError):
    """A prompt holds control tokens of the target, or text that cannot be encoded."""


class DrafterError(MoaDataError, ValueError):
    """A drafter, its weights, a checkpoint or a decoding request cannot be used as given."""


class TargetError(DrafterError):
    """A target cannot be loaded, is not supported, is not the expected one, or gives values that are not finite."""


class TrainingError(MoaDataError):
    """Training cannot start or continue as asked."""


class WorkerError(MoaDataError, RuntimeError):
    """The processes or the engine that extract cannot run, or have ended with work left."""


class ServingError(MoaDataError):
    """A server or a client cannot work as asked."""


class Overloaded(ServingError):
    """The server takes no more sessions, tokens or requests just now; try again later."""


class RequestInvalid(ServingError, ValueError):
    """A request that cannot be served as given."""


class NotAllowed(ServingError, PermissionError):
    """The bearer token is missing or wrong."""


class ProtocolMismatch(ServingError):
    """Client and server differ in protocol version, target, tokenizer or drafter."""


class Disconnected(ServingError, ConnectionError):
    """The connection ended, or could not be made."""


class RunWarning(UserWarning):
    """Warns that a training run does not go as its settings say."""
