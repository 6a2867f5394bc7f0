"""Format sizes, durations and commands, and escape untrusted text before it is printed.

This module imports only the standard library, so that every package can import it.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

# Characters that are escaped: C0 and C1 controls except newline and tab, DEL, characters that
# change the writing direction, and surrogates.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class Progress:
    """Reports the progress of one phase of a long task.

    A task is given an object of this class without a phase. At the start of each phase, the task
    calls the object's method :meth:`of`, which returns an object for this phase.
    """

    # Function that shows progress to the user. The function is called with this object, the number
    # of units that are done, the total number of units, and a note for the user. If the attribute
    # is None, nothing is reported.
    show: Callable[["Progress", int, int, str], None] | None = None
    phase: str = ""
    unit: str = ""  # Unit of the counts of this phase, such as "token", or "B" for bytes.

    def of(self, phase: str, unit: str) -> "Progress":
        """Return the object that reports the progress of a phase."""
        return replace(self, phase=phase, unit=unit)

    def __call__(self, n_done: int, total: int, note: str = "") -> None:
        """Report that ``n_done`` of ``total`` units are done."""
        if self.show is not None:
            self.show(self, n_done, total, note)


SILENT = Progress()  # Reports nothing.


def format_bytes(n_bytes: float) -> str:
    """Format a size with a decimal unit, e.g. ``31.5 TB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.1f} TB"


def counted(count: int, unit: str) -> str:
    """Format a count with its unit in the singular or plural: ``1 part``, ``1,200 parts``."""
    return f"{count:,} {unit}{'s' * (count != 1)}"


def format_hours(seconds: float) -> str:
    """Format a duration in seconds, minutes (from 2 minutes on) or hours (from 2 hours on)."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def format_range(low: float, high: float, form: Callable[[float], str]) -> str:
    """Format a range: ``2.1 GB to 2.4 GB``, or ``up to 2.4 GB`` if ``low`` is 0.

    If both ends are formatted as the same text, the result is this text alone.

    Args:
        low: lower end of the range.
        high: upper end of the range.
        form: function that formats one number.
    """
    return " to ".join(dict.fromkeys((form(low) if low else "up", form(high))))


def activation_name(field: str) -> str:
    """Return the name that the setting ``activations`` uses for a field of a store.

    For example, ``hidden/layer_6`` becomes ``hidden:layer:6``. Every field of keys and values
    becomes ``kv``. This includes fields for some of the layers, such as ``kv/full_attention``.
    """
    return (
        "kv"
        if field.startswith("kv/")
        else field.replace("hidden/layer_", "hidden:layer:").replace("/", ":")
    )


def add_command(
    store: str | os.PathLike[str], fields: Iterable[str], target_layers: int = 0
) -> str:
    """Return the command that adds fields to a store, in backquotes.

    Args:
        store: path or URL of the store.
        fields: names of the fields.
        target_layers: number of decoder layers to add to ``target/``.
    """
    names = ",".join(dict.fromkeys(map(activation_name, fields)))
    command = f"moa-data add {shlex.quote(os.fspath(store))} --model MODEL" + (
        f" --activations {names}" if names else ""
    )
    return f"`{command}{f' --target-layers {target_layers}' if target_layers else ''}`"


def printable(text: str) -> str:
    r"""Replace control characters by escapes such as ``\x1b``. Newlines and tabs are kept.

    The result can be encoded as UTF-8. Escaping the result again does not change it.
    """
    return _CONTROLS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the class name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
