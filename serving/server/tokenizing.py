"""Makes the tokens of prompts in threads, so that neither the event loop nor short prompts wait for long ones."""

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .openai_form import ApiError

_SHORT_CHARS = 1 << 15
"""Characters that take some hundredths of a second."""
_MOST_WAITING = (1024, 16)
"""Short and long prompts that wait for tokens; further ones are refused."""


@dataclass
class _Lane:
    """A thread with a tokenizer of its own: one is not meant to be used by several threads at once."""

    original: Any
    name: str
    most_waiting: int
    n_waiting: int = 0
    threads: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(1, thread_name_prefix=f"tokenize-{self.name}")

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, which is copied when it is first used."""
        return copy.deepcopy(self.original)


class Tokenizing:
    """Two lanes for prompts, the long ones in theirs.

    Args:
        most_tokens: that a prompt may have.
    """

    def __init__(self, tokenizer: Any, most_tokens: int) -> None:
        self._most_chars = most_tokens * max(len(token) for token in tokenizer.get_vocab())
        self._lanes = [
            _Lane(tokenizer, name, most) for name, most in zip(("short", "long"), _MOST_WAITING, strict=True)
        ]

    async def run(self, n_chars: int, encode: Callable[[Any], list[int]]) -> list[int]:
        """Encode a prompt with the tokenizer that it is given; when it is cancelled before its turn, never.

        Args:
            n_chars: of the prompt.

        Raises:
            ApiError: 400, the prompt has too many tokens whatever they are; or 503, too many wait.
        """
        if n_chars > self._most_chars:
            message = f"the prompt has {n_chars} characters, far more than fit; shorten it."
            raise ApiError(400, message, None, "context_length_exceeded")
        lane = self._lanes[n_chars > _SHORT_CHARS]
        if lane.n_waiting >= lane.most_waiting:
            raise ApiError(503, "too many prompts wait to be read; try again later.", None, "overloaded", 1)
        lane.n_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(lane.threads, lambda: encode(lane.tokenizer))
        finally:
            lane.n_waiting -= 1
