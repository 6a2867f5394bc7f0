"""Requests, answers and errors in the form of OpenAI's API.

A setting that is not supported is refused, unless its value changes nothing. ``top_k``, ``repetition_penalty`` and
``drafter`` are additions of this server.
"""

import asyncio
import json
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Self

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import override

from ..errors import NotAllowed, Overloaded, RequestInvalid, ServingError
from .detokenizer import Detokenizer, StopStrings
from .engine.engine import Engine
from .engine.sequence import Commit, Request, Work

# Commits that wait for a reader when its sequence is held, and when it is released.
_HOLD_AT, _RELEASE_AT = 64, 8
_MAX_STOPS, _MAX_STOP_CHARS = 4, 256

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


@dataclass(eq=False)
class ApiError(Exception):
    """An error that is answered in OpenAI's form."""

    status: int  # of HTTP
    message: str  # one line: what was wrong and what to do
    param: str | None = None  # the setting that was wrong
    code: str | None = None  # a word for programs
    retry_after_s: float | None = None  # when it makes sense to try again

    @classmethod
    def of(cls, error: Exception) -> "ApiError":
        """Turn any error of a request into one of the API."""
        if isinstance(error, cls):
            return error
        for kind, status, code, retry_s in (
            (RequestInvalid, 400, "invalid_value", None), (NotAllowed, 401, "invalid_api_key", None),
            (Overloaded, 503, "overloaded", 1), (ServingError, 500, "internal_error", None),
        ):  # fmt: skip
            if isinstance(error, kind):
                return cls(status, str(error), code=code, retry_after_s=retry_s)
        # A fault of the server, which the log has in full.
        return cls(500, "the server failed at this request.", code="internal_error")

    def response(self, **headers: str) -> JSONResponse:
        """Make the answer."""
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return JSONResponse(self.body, self.status, headers)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kinds = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


# A body of a megabyte can hold half a million wrong items, and each would become an error, for seconds.
_FAILS_FAST = Field(fail_fast=True)
_MAX_MESSAGES = 10_000
_MAX_CONTAINERS = 100_000  # lists and objects of a body, counted by their brackets: Python takes 0.2 s to make them


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
    stop: str | Annotated[list[str], _FAILS_FAST] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    drafter: str | None = None
    """Name of the drafter whose drafts speed the answer up, ``none`` for plain decoding."""

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read the body of a request, or raise ApiError."""
        if body.count(b"[") + body.count(b"{") > _MAX_CONTAINERS:
            raise ApiError(
                400, f"the body has more than {_MAX_CONTAINERS:,} brackets; send less.", code="invalid_value"
            )
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            raise _invalid(error) from error
        for name, value in (request.model_extra or {}).items():
            if name not in _NOTHING and name not in _OF_THE_CALLER:
                message = f"unrecognized request argument: {name[:60]}. Leave it out."
                raise ApiError(400, message, name[:60], "unknown_parameter")
            if name in _NOTHING and value is not None and value not in _NOTHING[name]:
                message = f"{name} is not supported by this server. Leave it out."
                raise ApiError(400, message, name, "unsupported_parameter")
        if len(request.stops) > _MAX_STOPS or not all(1 <= len(stop) <= _MAX_STOP_CHARS for stop in request.stops):
            message = f"stop takes up to {_MAX_STOPS} strings of 1 to {_MAX_STOP_CHARS} characters."
            raise ApiError(400, message, "stop", "invalid_value")
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options needs stream to be true.", "stream_options", "invalid_value")
        return request


class ChatRequest(AnswerRequest):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=_MAX_MESSAGES), _FAILS_FAST]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @override
    def model_post_init(self, context: Any) -> None:
        self.max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def n_chars(self) -> int:
        """Characters of all contents."""
        contents = [message.get("content") for message in self.messages]
        parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
        found = [part.get("text") if isinstance(part, dict) else part for part in parts]
        return sum(len(text) for text in found if isinstance(text, str))


class CompletionRequest(AnswerRequest):
    """The body of ``/v1/completions``."""

    prompt: str | list[Any]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16

    @property
    def single_prompt(self) -> str | list[int]:
        """The prompt, as a text or as tokens; ApiError where there are several."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise ApiError(400, "one request takes one prompt; send several requests.", "prompt", "invalid_value")
            (prompt,) = prompt
        # By hand: pydantic would try each kind of prompt on half a million items.
        if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
            raise ApiError(400, "prompt: Input should be a text or a list of token ids.", "prompt", "invalid_value")
        return prompt


def _invalid(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    param = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "json_invalid":
        reason = first["msg"].removeprefix("Invalid JSON: ")
        return ApiError(400, f"the body is no JSON: {reason}.", code="invalid_json")
    if first["type"] == "missing":
        return ApiError(400, f"the request lacks {param}.", param, "missing_required_parameter")
    return ApiError(400, f"{param or 'the body'}: {first['msg'].rstrip('.')}.", param or None, "invalid_value")


class AnswerText:
    """The text of one request on its way from the engine's thread to a reader in the event loop."""

    def __init__(self, engine: Engine, request: Request, stops: Sequence[str], ends_s: float) -> None:
        self._engine, loop = engine, asyncio.get_running_loop()
        self._commits: deque[Commit] = deque()
        self._has_come, self._is_held, self._is_late = asyncio.Event(), False, False
        decode = partial(engine.target.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._text, self._stops = Detokenizer(decode), StopStrings(stops)
        self._began = time.perf_counter()
        self.n_tokens, self.finish_reason = 0, ""  # the latter stop or length when the answer has ended
        self.first_s: float | None = None  # seconds from the request to its first token
        self._id: int | None = engine.add(request, lambda commit: loop.call_soon_threadsafe(self._arrive, commit))
        # The answer ends at ``ends_s`` of time.monotonic(), the loop's clock, complete or not.
        self._timer = loop.call_at(ends_s, self._end_late)
        engine.set_work(self._id, Work.SPECULATE if request.drafter else Work.PLAIN)

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the text as it comes, each piece not empty; ServingError or ApiError where it does not end well."""
        while not self.finish_reason:
            await self._has_come.wait()
            if self._is_late:
                raise ApiError(408, "the answer took too long; ask for fewer tokens.", None, "timeout")
            while self._commits and not self.finish_reason:
                if piece := self._take(self._commits.popleft()):
                    yield piece
            if not self._commits and not self._is_late:
                self._has_come.clear()
            if self._is_held and len(self._commits) <= _RELEASE_AT:
                self._hold(False)

    async def whole(self) -> str:
        """Wait for the end, and return the text."""
        return "".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """Free the sequence; the answer has ended, or its reader has gone."""
        self._timer.cancel()
        if self._id is not None:
            self._engine.remove(self._id)
            self._id = None

    def _take(self, commit: Commit) -> str:
        """Take the tokens of one call up to a stop string; returns the text that they add."""
        if commit.error is not None:
            raise commit.error
        if commit.tokens and self.first_s is None:
            self.first_s = time.perf_counter() - self._began
        text = ""
        for token in commit.tokens:
            self.n_tokens += 1
            text += self._stops.push(self._text.append(token))
            if self._stops.is_found:
                self.finish_reason = "stop"
                return text
        self.finish_reason = commit.finish
        return text + self._stops.rest() if commit.finish else text

    def _hold(self, is_held: bool) -> None:
        if self._id is not None:
            self._is_held = is_held
            self._engine.hold(self._id, is_held)

    def _end_late(self) -> None:
        self._is_late = True
        self._has_come.set()

    def _arrive(self, commit: Commit) -> None:
        self._commits.append(commit)
        self._has_come.set()
        if len(self._commits) >= _HOLD_AT and not self._is_held:
            self._hold(True)


class AnswerForm:
    """Writes the answer to a request as JSON, whole or as server-sent events."""

    def __init__(self, asked: AnswerRequest, fingerprint: str | None, n_prompt: int) -> None:
        self._is_chat, self._n_prompt = isinstance(asked, ChatRequest), n_prompt
        self._has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        self._facts = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}", "created": int(time.time()),
            "model": asked.model, "system_fingerprint": fingerprint,
        }  # fmt: skip

    def whole(self, text: str, answer: AnswerText) -> dict[str, Any]:
        """The answer at once."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = self._choice({"message": message} if self._is_chat else {"text": text}, answer.finish_reason)
        name = "chat.completion" if self._is_chat else "text_completion"
        return self._facts | {"object": name, "choices": [choice], "usage": self._usage(answer)}

    def first(self) -> bytes:
        """The event before all text, which names the role of a chat."""
        return self._delta({"role": "assistant", "content": ""}, None) if self._is_chat else b""

    def piece(self, text: str) -> bytes:
        """The event of a piece of text."""
        return self._delta({"content": text} if self._is_chat else text, None)

    def last(self, answer: AnswerText) -> bytes:
        """The events that say why the answer has ended and, where asked for, how many tokens it has."""
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
