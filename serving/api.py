"""Requests, answers and errors in the form of OpenAI's API.

What is not supported is refused, and never left out silently; settings that are given at the value at which they do
nothing are taken. ``top_k``, ``repetition_penalty`` and ``drafter`` are additions of this server.
"""

import json
import math
import secrets
import time
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import NotAllowed, Overloaded, RequestInvalid, ServingError
from .answer import AnswerText

# Settings of the API that this server lacks -> values, besides null, at which they change nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "frequency_penalty": (0,),
    "presence_penalty": (0,), "logit_bias": ({},), "logprobs": (False,), "tools": ([],),
    "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "service_tier": ("auto", "default"), "store": (False,), "top_logprobs": (), "audio": (), "prediction": (),
    "reasoning_effort": (), "verbosity": (), "web_search_options": (),
}  # fmt: skip
# Settings that concern the caller's own records, and never the answer.
_OF_THE_CALLER = ("user", "metadata", "safety_identifier", "prompt_cache_key")


class ApiError(Exception):
    """An error that is answered in OpenAI's form.

    Args:
        status: HTTP status.
        message: one line: what was wrong and what to do.
        param: the setting that was wrong; None where it is no single one.
        code: a word for programs.
        retry_after_s: seconds after which it makes sense to try again; None where that is not known.
    """

    _TYPES: ClassVar[dict[int, str]] = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = self._TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers

    @classmethod
    def of(cls, error: ServingError) -> "ApiError":
        """Turn an error of serving into one of the API."""
        if isinstance(error, RequestInvalid):
            return cls(400, str(error), code="invalid_value")
        if isinstance(error, NotAllowed):
            return cls(401, str(error), code="invalid_api_key")
        if isinstance(error, Overloaded):
            return cls(503, str(error), code="overloaded", retry_after_s=1)
        return cls(500, str(error), code="internal_error")


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class AnswerRequest(BaseModel):
    """The settings that requests for chat completions and for completions have in common."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    drafter: str | None = None
    """Name of the drafter whose drafts speed the answer up, ``none`` for plain decoding."""

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def n_max_tokens(self) -> int | None:
        """The bound on the tokens of the answer; None where there is none."""
        return self.max_tokens

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read the body of a request.

        Raises:
            ApiError: it is no JSON, lacks something, or asks for what this server cannot do.
        """
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            raise _invalid(error) from error
        for name, value in (request.model_extra or {}).items():
            if name in _OF_THE_CALLER or (value is None and name in _NOTHING):
                continue
            if name not in _NOTHING:
                message = f"unrecognized request argument: {name[:60]}. Leave it out."
                raise ApiError(400, message, name[:60], "unknown_parameter")
            if value not in _NOTHING[name]:
                message = f"{name} is not supported by this server. Leave it out."
                raise ApiError(400, message, name, "unsupported_parameter")
        if len(request.stops) > 4 or not all(request.stops):
            raise ApiError(400, "stop takes up to 4 strings, none of them empty.", "stop", "invalid_value")
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options needs stream to be true.", "stream_options", "invalid_value")
        return request


class ChatRequest(AnswerRequest):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def n_chars(self) -> int:
        """Characters of all contents."""
        contents = [message.get("content") for message in self.messages]
        parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
        found = [part.get("text") if isinstance(part, dict) else part for part in parts]
        return sum(len(text) for text in found if isinstance(text, str))

    @property
    def n_max_tokens(self) -> int | None:
        """The bound on the tokens of the answer; None where there is none."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(AnswerRequest):
    """The body of ``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16

    @property
    def single_prompt(self) -> str | list[int]:
        """The prompt, as a text or as tokens.

        Raises:
            ApiError: there are several.
        """
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ApiError(400, "one request takes one prompt; send several requests.", "prompt", "invalid_value")
            prompt = prompt[0]
        return prompt  # type: ignore[return-value]  # a list of strings or lists has gone


def _invalid(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    param = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "json_invalid":
        reason = first["msg"].removeprefix("Invalid JSON: ")
        return ApiError(400, f"the body is no JSON: {reason}.", code="invalid_json")
    if first["type"] == "missing":
        return ApiError(400, f"the request lacks {param}.", param, "missing_required_parameter")
    return ApiError(400, f"{param or 'the body'}: {first['msg'].rstrip('.')}.", param or None, "invalid_value")


class AnswerForm:
    """Writes one answer as JSON, whole or as server-sent events.

    Args:
        is_chat: of ``/v1/chat/completions``, else of ``/v1/completions``.
        model: the model's name.
        fingerprint: stands for its weights; empty for none.
        n_prompt: tokens of the prompt.
        has_usage: whether a stream tells its usage at its end.
    """

    def __init__(self, is_chat: bool, model: str, fingerprint: str, n_prompt: int, has_usage: bool) -> None:
        prefix = "chatcmpl" if is_chat else "cmpl"
        self._is_chat, self._n_prompt, self._has_usage = is_chat, n_prompt, has_usage
        self._facts = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._facts |= {"system_fingerprint": fingerprint or None}

    def whole(self, text: str, answer: AnswerText) -> dict[str, Any]:
        """The answer at once."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = self._choice({"message": message} if self._is_chat else {"text": text}, answer.finish_reason)
        name = "chat.completion" if self._is_chat else "text_completion"
        return self._facts | {"object": name, "choices": [choice], "usage": self._usage(answer)}

    def first(self) -> bytes:
        """The event before all text, which names the role of a chat; empty for a completion."""
        return self._delta({"role": "assistant", "content": ""}, None) if self._is_chat else b""

    def piece(self, text: str) -> bytes:
        """An event with a piece of text."""
        return self._delta({"content": text} if self._is_chat else text, None)

    def last(self, answer: AnswerText) -> bytes:
        """The events that tell why the answer has ended and, where that was asked for, how many tokens it has."""
        events = self._delta({} if self._is_chat else "", answer.finish_reason)
        if self._has_usage:
            events += event(self._chunk([]) | {"usage": self._usage(answer)})
        return events + b"data: [DONE]\n\n"

    def _delta(self, delta: Any, finish_reason: str | None) -> bytes:
        chunk = self._chunk([self._choice({"delta" if self._is_chat else "text": delta}, finish_reason)])
        return event(chunk | {"usage": None} if self._has_usage else chunk)

    def _choice(self, content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0} | content | {"logprobs": None, "finish_reason": finish_reason}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._facts | {
            "object": "chat.completion.chunk" if self._is_chat else "text_completion", "choices": choices
        }  # fmt: skip

    def _usage(self, answer: AnswerText) -> dict[str, int]:
        n_prompt, n_new = self._n_prompt, answer.n_tokens
        return {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}


def event(value: dict[str, Any]) -> bytes:
    """Write one server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
