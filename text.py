"""Foreign text made safe to show: control characters become visible instead of reaching a terminal."""

import re

# C0 and C1 controls but newline and tab, DEL, signs that turn the direction of writing, halves of surrogate pairs.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Write each control character of a text as an escape, such as ``\x1b``; newlines and tabs stay.

    What comes out can be encoded as UTF-8, and escaping it again changes nothing.
    """
    return _CONTROLS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
