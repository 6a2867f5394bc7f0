"""Format progress, sizes, durations and commands, and make foreign text safe to show.

Standard library only, so that every package can import it.
"""

import os
import re
from collections.abc import Callable, Iterable

Progress = Callable[[int, int, str], None]
"""Called with (done, total, message) during a long task; the message starts with the name of its
phase."""

# C0 and C1 controls except newline and tab, DEL, characters that change the writing direction, and
# surrogates.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def format_bytes(n_bytes: float) -> str:
    """Format a size with a decimal unit, e.g. ``31.5 TB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.1f} TB"


def counted(count: int, unit: str) -> str:
    """Format a count with its unit: ``1 part``, ``1,200 parts``."""
    return f"{count:,} {unit}{'s' * (count != 1)}"


def format_hours(seconds: float) -> str:
    """Format a duration in hours, or in minutes or seconds if it is short."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def format_range(low: float, high: float, form: Callable[[float], str]) -> str:
    """Format a range: ``2.1 GB to 2.4 GB``, ``up to 2.4 GB``, or one value if both are equal."""
    return " to ".join(dict.fromkeys((form(low) if low else "up", form(high))))


def activation_name(field: str) -> str:
    """Return the name of a field in ``--activations``: ``hidden/layer_6`` is ``hidden:layer:6``.

    All keys and values are ``kv``, including those of some layers, such as ``kv/full_attention``.
    """
    return (
        "kv"
        if field.startswith("kv/")
        else field.replace("hidden/layer_", "hidden:layer:").replace("/", ":")
    )


def add_command(
    store: str | os.PathLike[str], fields: Iterable[str], target_layers: int = 0
) -> str:
    """Return the command that adds fields to a store.

    Args:
        store: path or URL of the store.
        fields: names of the fields.
        target_layers: number of decoder layers to add to ``target/``.
    """
    names = ",".join(dict.fromkeys(map(activation_name, fields)))
    command = f"moa-data add {os.fspath(store)} --model MODEL" + (
        f" --activations {names}" if names else ""
    )
    return f"`{command}{f' --target-layers {target_layers}' if target_layers else ''}`"


def printable(text: str) -> str:
    r"""Escape the control characters of a text, such as ``\x1b``; newlines and tabs stay.

    The result can be encoded as UTF-8, and escaping it again changes nothing.
    """
    return _CONTROLS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
