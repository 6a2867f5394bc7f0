"""What a client keeps on disk, so that an answer outlives its process: session id, tokens and settings.

The file is replaced as a whole, so that a kill at any moment leaves the last state or the one before. Tokens that are
newer than it are known to the server, or are computed again.
"""

import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from ...errors import DrafterError, RequestInvalid
from ...moa.decoding.sampling import GREEDY, SamplingConfig

_VERSION = 1
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class SavedAnswer:
    """One answer, which may not have ended, in its conversation.

    Attributes:
        session: id that the server gave; empty for none.
        tokens: the prompt and what of the answer is committed.
        finish: why the answer ended; empty while it has not.
        messages: the conversation up to the prompt, with ``role`` and ``content``; empty for bare tokens.
    """

    session: str
    tokens: tuple[int, ...]
    n_prompt: int
    max_new_tokens: int
    sampling: SamplingConfig = GREEDY
    seed: int = 0
    finish: str = ""
    messages: tuple[dict[str, str], ...] = field(default_factory=tuple)

    def save(self, path: str | Path) -> None:
        """Write the file in one step.

        Raises:
            RequestInvalid: it cannot be written.
        """
        path = Path(path)
        partial = path.with_name(f"{path.name}.partial")
        try:
            # Not flushed to the disk: it is for a process that dies, and several times a second.
            partial.write_text(json.dumps({"version": _VERSION} | asdict(self)), encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            raise RequestInvalid(f"the session cannot be saved in {path}: {error.strerror}; give another.") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that :meth:`save` wrote.

        Raises:
            RequestInvalid: it cannot be read, or is something else.
        """
        path = Path(path)
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise RequestInvalid(f"{path} is larger than any saved session; give the file of one.")
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RequestInvalid(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise RequestInvalid(f"{path} is no saved session; give the file of one.") from error
        try:
            return cls._parse(values)
        except (TypeError, ValueError, KeyError, DrafterError) as error:
            raise RequestInvalid(f"{path} is no saved session of this version ({error}); begin a new one.") from error

    @classmethod
    def _parse(cls, values: Any) -> Self:
        if not isinstance(values, dict) or values.pop("version", None) != _VERSION:
            raise ValueError("another version")
        if unknown := set(values) - {item.name for item in fields(cls)}:
            raise ValueError(f"unknown keys {', '.join(sorted(unknown))}")
        tokens, counts = values["tokens"], [values[name] for name in ("n_prompt", "max_new_tokens", "seed")]
        if not isinstance(tokens, list) or not all(type(number) is int for number in [*tokens, *counts]):
            raise TypeError("tokens and counts are whole numbers")
        if not 0 < values["n_prompt"] <= len(tokens) or min(tokens) < 0 or values["max_new_tokens"] < 1:
            raise ValueError("the prompt has no place in the tokens")
        if not all(isinstance(values[name], str) for name in ("session", "finish")):
            raise TypeError("session and finish are texts")
        messages = values["messages"]
        if not all(
            isinstance(message, dict) and all(isinstance(text, str) for text in message.values())
            for message in messages
        ):
            raise TypeError("messages are roles and contents")
        values["sampling"] = SamplingConfig(**values["sampling"])
        return cls(**values | {"tokens": tuple(tokens), "messages": tuple(messages)})

    def advanced(self, session: str, tokens: list[int], finish: str) -> Self:
        """Return the answer as it has become."""
        return replace(self, session=session, tokens=tuple(tokens), finish=finish)
