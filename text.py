"""Texts that every stage uses: progress, sizes, durations, commands, and foreign text made safe to show.

Standard library only, so that each room may import it.
"""

import os
import re
from collections.abc import Callable, Iterable

Progress = Callable[[int, int, str], None]
"""Called with (done, total, message) while a long task runs; the message begins with the name of its phase."""

# C0 and C1 controls but newline and tab, DEL, signs that turn the direction of writing, halves of
# surrogate pairs.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def format_bytes(n_bytes: float) -> str:
    """Write a size with a decimal unit, e.g. ``31.5 TB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.1f} TB"


def counted(count: int, unit: str) -> str:
    """Write a count with its unit: ``1 part``, ``1,200 parts``."""
    return f"{count:,} {unit}{'s' * (count != 1)}"


def format_hours(seconds: float) -> str:
    """Write a duration in hours, or in minutes or seconds where it is short."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def format_range(low: float, high: float, form: Callable[[float], str]) -> str:
    """Write a range, e.g. ``2.1 GB to 2.4 GB`` or ``up to 2.4 GB``; one figure where both look alike."""
    return " to ".join(dict.fromkeys((form(low) if low else "up", form(high))))


def activation_name(field: str) -> str:
    """Return what ``--activations`` calls a field of a store: ``hidden/layer_6`` is ``hidden:layer:6``.

    Keys and values are ``kv``, also those of some layers, such as ``kv/full_attention``.
    """
    return (
        "kv"
        if field.startswith("kv/")
        else field.replace("hidden/layer_", "hidden:layer:").replace("/", ":")
    )


def add_command(
    store: str | os.PathLike[str], fields: Iterable[str], target_layers: int = 0
) -> str:
    """Return the command that adds fields, or decoder layers for ``target/``, to a store."""
    names = ",".join(dict.fromkeys(map(activation_name, fields)))
    command = f"moa-data add {os.fspath(store)} --model MODEL" + (
        f" --activations {names}" if names else ""
    )
    return f"`{command}{f' --target-layers {target_layers}' if target_layers else ''}`"


def printable(text: str) -> str:
    r"""Write each control character of a text as an escape, such as ``\x1b``; newlines and tabs stay.

    What comes out can be encoded as UTF-8, and escaping it again changes nothing.
    """
    return _CONTROLS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type where there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
