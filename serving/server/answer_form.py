"""Answers in the form of OpenAI's API, whole and in chunks."""

import secrets
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from .answer import Answer


class AnswerForm(ABC):
    """Writes the JSON objects of one answer.

    Args:
        model: the model's name.
        fingerprint: stands for its weights; empty for none.

    Attributes:
        n_prompt: tokens of the prompt.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, fingerprint: str) -> None:
        self._facts = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._facts |= {"system_fingerprint": fingerprint or None}
        self.n_prompt = 0

    def whole(self, text: str, answer: Answer) -> dict[str, Any]:
        """The answer at once."""
        choice = self._choice(text) | {"finish_reason": answer.finish_reason}
        return self._object(self.whole_object, [choice]) | {"usage": self._usage(answer)}

    def first(self) -> dict[str, Any] | None:
        """The chunk before all text, if there is one."""
        return None

    def piece(self, text: str) -> dict[str, Any]:
        """A chunk of text."""
        return self._object(self.chunk_object, [self._delta(text) | {"finish_reason": None}])

    def last(self, answer: Answer) -> dict[str, Any]:
        """The chunk that tells why the answer has ended."""
        return self._object(self.chunk_object, [self._delta(None) | {"finish_reason": answer.finish_reason}])

    def usage(self, answer: Answer) -> dict[str, Any]:
        """The chunk behind the last one that counts tokens."""
        return self._object(self.chunk_object, []) | {"usage": self._usage(answer)}

    @staticmethod
    def with_usage(chunk: dict[str, Any], has_usage: bool) -> dict[str, Any]:
        """Say in a chunk that its usage comes later, where it does."""
        return chunk | {"usage": None} if has_usage else chunk

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._facts | {"object": name, "choices": choices}

    def _usage(self, answer: Answer) -> dict[str, int]:
        n_new = answer.n_tokens
        return {"prompt_tokens": self.n_prompt, "completion_tokens": n_new, "total_tokens": self.n_prompt + n_new}

    @abstractmethod
    def _choice(self, text: str) -> dict[str, Any]:
        """The only choice of a whole answer."""

    @abstractmethod
    def _delta(self, text: str | None) -> dict[str, Any]:
        """The only choice of a chunk; without a text that of the last one."""


class ChatForm(AnswerForm):
    """Answers of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first(self) -> dict[str, Any] | None:
        """The chunk that names the role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._object(self.chunk_object, [choice])

    def _choice(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None}

    def _delta(self, text: str | None) -> dict[str, Any]:
        return {"index": 0, "delta": {} if text is None else {"content": text}, "logprobs": None}


class CompletionForm(AnswerForm):
    """Answers of ``/v1/completions``."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _choice(self, text: str) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None}

    def _delta(self, text: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text or "", "logprobs": None}
