"""The root of all errors that moa-data raises on purpose.

Each says what was found, what was expected and what to do next. Classes of a stage live in its ``errors`` module and
inherit also the builtin that fits, so that callers which know nothing of moa-data can still catch them.
"""

from typing import ClassVar


class MoaDataError(Exception):
    """The input or the options cannot be used, and the user can mend it.

    Args:
        message: what was found and what was expected.
        hint: what to do next, where the message does not say it.
    """

    exit_code: ClassVar[int] = 2
    """Exit code of a command that ends with this error."""

    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(f"{message} {hint}".rstrip())
        self.hint = hint


class OptionInvalid(MoaDataError, ValueError):
    """An option, a configuration file or an argument has a value that cannot be used."""


class FolderOccupied(MoaDataError, FileExistsError):
    """The output folder holds something else."""


class Interrupted(MoaDataError):
    """A signal stopped the work; the message says what is kept and how to go on.

    Attributes:
        signum: number of the signal; None where the ``KeyboardInterrupt`` that led to this error tells it.
    """

    def __init__(self, message: str, signum: int | None = None) -> None:
        super().__init__(message)
        self.signum = None if signum is None else int(signum)
