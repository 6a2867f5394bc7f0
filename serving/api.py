"""Requests, answers and errors in the format of OpenAI's API.

A setting that is not supported is refused, unless its value changes nothing. ``drafter`` is an
extension of this server. ``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos``,
``min_tokens`` and ``structured_outputs`` are extensions of vLLM.
"""

import asyncio
import json
import math
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Self

from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from typing_extensions import override

from ..config import Count, Natural, Positive, SamplingSeed, Share
from ..errors import NotAllowed, Overloaded, RequestInvalid, ServingError
from .detokenizer import Detokenizer, StopStrings
from .engine.engine import Engine
from .engine.sequence import Commit, Logprobs, Request, Work
from .post import call_in

JsonObject = dict[str, Any]
_ENCODER = json.JSONEncoder(separators=(",", ":"))
# A commit is the new tokens of one target call. When ``_HOLD_AT`` commits of a sequence wait to be
# read, the sequence is paused. When only ``_RELEASE_AT`` commits are left, the sequence is resumed.
_HOLD_AT, _RELEASE_AT = 64, 8

# Settings of OpenAI's or vLLM's API that this server does not support. For each of them, the server
# accepts null and the values listed here, because these values change nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "suffix": ("",), "functions": ([],),
    "function_call": ("none", "auto"), "parallel_tool_calls": (True, False),
    "modalities": (["text"],), "service_tier": ("auto", "default"), "store": (False,), "audio": (),
    "prediction": (), "reasoning_effort": (), "verbosity": (), "web_search_options": (),
    "tools": ([],), "tool_choice": ("none", "auto"), "top_logprobs": (),
    "use_beam_search": (False,), "length_penalty": (1,), "stop_token_ids": ([],),
    "bad_words": ([],), "include_stop_str_in_output": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}  # fmt: skip
# Settings that only help the caller to keep records. They never affect the answer.
_OF_THE_CALLER = ("user", "metadata", "safety_identifier", "prompt_cache_key")


@dataclass(eq=False)
class ApiError(Exception):
    """An error that is sent to the client in OpenAI's format."""

    status: int  # HTTP status.
    message: str  # The error message, in one line: what was wrong, and what to do.
    param: str | None = None  # Name of the invalid setting.
    code: str | None = None  # Identifier of the error, for programs.
    retry_after_s: float | None = None  # Seconds after which the client should try again.

    @classmethod
    def of(cls, error: Exception) -> "ApiError":
        """Turn any error of a request into an ApiError."""
        if isinstance(error, cls):
            return error
        for kind, status, code, retry_s in (
            (RequestInvalid, 400, "invalid_value", None),
            (NotAllowed, 401, "invalid_api_key", None),
            (Overloaded, 503, "overloaded", 1), (ServingError, 500, "internal_error", None),
        ):  # fmt: skip
            if isinstance(error, kind):
                return cls(status, str(error), code=code, retry_after_s=retry_s)
        # Any other error is internal. The client gets only a general message, because the server's
        # log has the details.
        return cls(
            500,
            "the server failed while it answered this request; the server's log has the details.",
            code="internal_error",
        )

    def response(self, **headers: str) -> JSONResponse:
        """Create the HTTP response."""
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return JSONResponse(self.body, self.status, headers)

    @property
    def body(self) -> JsonObject:
        """The JSON object of the response."""
        kinds = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}
        kind = kinds.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


# A body of a megabyte can contain half a million wrong items. An error for each of them would take
# seconds, so validation stops at the first wrong item.
_FAILS_FAST = Field(fail_fast=True)
_MAX_MESSAGES = 10_000
_MAX_STOPS = 4
_MAX_STOP_CHARS = 256
_MAX_CHOICES = 128  # Maximum number of answers of one request.
_MAX_LOGPROBS = 20
# This number stands for log(0), which JSON cannot represent. vLLM uses this value, too.
_MIN_LOGPROB = -9999.0
# Maximum number of lists and objects in the body of a request, counted by opening brackets. Python
# needs 0.2 s to create this many.
_MAX_CONTAINERS = 100_000


_Objects = Annotated[list[JsonObject], _FAILS_FAST]
_Messages = Annotated[_Objects, Field(min_length=1, max_length=_MAX_MESSAGES)]
_Stop = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]
# A single stop string counts as a list of one.
_Stops = Annotated[
    list[_Stop],
    Field(max_length=_MAX_STOPS),
    _FAILS_FAST,
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
_Tokens = Annotated[list[int], _FAILS_FAST]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TopLogprobs = Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)]
# Some settings accept values of several types. This dict maps the name of such a setting to one
# error message, which is used for every wrong value of the setting.
_HINTS = {
    "prompt": "prompt must be a string, a list of token ids, a list of strings, or a list of lists "
    f"of token ids. The number of prompts, multiplied by n, may be at most {_MAX_CHOICES}.",
    "stop": f"stop must be a string or a list of at most {_MAX_STOPS} strings, each of 1 to "
    f"{_MAX_STOP_CHARS} characters.",
}


class Body(BaseModel):
    """The JSON object of a request."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse the body of a request, or raise ApiError."""
        if body.count(b"[") + body.count(b"{") > _MAX_CONTAINERS:
            raise ApiError(
                400,
                f"the JSON body has more than {_MAX_CONTAINERS:,} lists and objects, which is the "
                "limit; send a smaller request.",
                code="invalid_value",
            )
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            raise _invalid(error) from error
        for name, value in (request.model_extra or {}).items():
            is_known = name in _NOTHING
            if name in _OF_THE_CALLER or (is_known and value in (None, *_NOTHING[name])):
                continue
            message = f"this server does not support the parameter {name[:60]}. Leave it out."
            code = "unsupported_parameter" if is_known else "unknown_parameter"
            raise ApiError(400, message, name[:60], code)
        return request


class GenerationRequest(Body):
    """Settings that requests for chat completions and for completions share."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    # If ``top_k`` is -1 or 0, sampling may choose any token.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Positive | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: JsonObject | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Natural | None = None
    response_format: JsonObject | None = None
    structured_outputs: JsonObject | None = None
    logprobs: bool | int | None = None
    seed: SamplingSeed | None = None
    stop: _Stops | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    drafter: str | None = None
    """Name of the drafter that speeds up the answer; ``none`` for plain decoding."""

    @property
    def n_logprobs(self) -> int | None:
        """The number of top log-probabilities that the request asks for, per token.

        None if the request asks for no log-probabilities at all.
        """
        if self.logprobs is None or self.logprobs is False:
            return None
        return getattr(self, "top_logprobs", None) or 0 if self.logprobs is True else self.logprobs

    @property
    def form(self) -> tuple[str, Any] | None:
        """The form that the answer must have: ("json", schema) or ("regex", pattern).

        None if the answer may be any text.
        """
        match self.response_format, self.structured_outputs:
            case ((None | {"type": "text"}), None):
                return None
            case {"type": "json_object", **rest}, None if not rest:
                return "json", {"type": "object"}
            case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}, None:
                return "json", schema
            case ((None | {"type": "text"}), {"json": dict(schema), **rest}) if not rest:
                return "json", schema
            case ((None | {"type": "text"}), {"regex": str(regex), **rest}) if not rest:
                return "regex", regex
            case ((None | {"type": "text"}), {"choice": [str(), *others] as texts, **rest}) if (
                not rest
            ):
                if all(isinstance(text, str) for text in others):
                    return "regex", "|".join(map(re.escape, texts))
        param = "structured_outputs" if self.structured_outputs is not None else "response_format"
        message = (
            f"{param} asks for a form of the answer that this server does not support. Give "
            "response_format with the type text, json_object or json_schema, or give "
            "structured_outputs with exactly one of the keys json, regex and choice."
        )
        raise ApiError(400, message, param, "invalid_value")

    @override
    def model_post_init(self, context: Any) -> None:
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400,
                "stream_options applies only to streamed answers. Set stream to true, or leave out "
                "stream_options.",
                "stream_options",
                "invalid_value",
            )
        extra = self.stream_options.model_extra if self.stream_options is not None else None
        for name, value in (extra or {}).items():
            if value:
                message = (
                    f"this server does not support {name[:60]} in stream_options. Leave it out."
                )
                raise ApiError(400, message, "stream_options", "unsupported_parameter")


class ChatRequest(GenerationRequest):
    """The body of ``/v1/chat/completions``."""

    messages: _Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: _TopLogprobs | None = None
    tools: _Objects | None = None
    tool_choice: str | JsonObject | None = None

    @override
    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                400,
                "top_logprobs applies only if logprobs is true. Set logprobs to true, or leave out "
                "top_logprobs.",
                "top_logprobs",
                "invalid_value",
            )
        if self.tool_choice not in (("none",) if self.tools else (None, "none", "auto")):
            message = (
                'this server does not call tools. Leave tools and tool_choice out, or give "none" '
                "as tool_choice."
            )
            raise ApiError(
                400, message, "tools" if self.tools else "tool_choice", "unsupported_parameter"
            )


class CompletionRequest(GenerationRequest):
    """The body of ``/v1/completions``."""

    prompt: (
        str | _Tokens | Annotated[list[str], _FAILS_FAST] | Annotated[list[_Tokens], _FAILS_FAST]
    )
    max_tokens: Count | None = 16
    logprobs: _TopLogprobs | None = None

    @override
    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if len(self.prompts) * (self.n or 1) > _MAX_CHOICES:
            raise ApiError(400, _HINTS["prompt"], "prompt", "invalid_value")

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts of the request: either texts or lists of token ids. There is at least one."""
        prompt: Any = self.prompt
        is_single = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        return [prompt] if is_single else prompt


class TokenizeRequest(Body):
    """The body of ``/tokenize``, as in vLLM: a prompt or a chat."""

    prompt: str | None = None
    messages: _Messages | None = None
    tools: _Objects | None = None
    # This setting is allowed only with a prompt. The chat template adds the special tokens of a
    # chat.
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @override
    def model_post_init(self, context: Any) -> None:
        if self.prompt is not None:
            kind = "prompt"
            settings_of_others: tuple[str, ...] = ("messages", "tools", "add_generation_prompt")
        elif self.messages is not None:
            kind = "messages"
            settings_of_others = ("add_special_tokens",)
        else:
            message = "the request has neither prompt nor messages; give one of them."
            raise ApiError(400, message, "prompt", "missing_required_parameter")
        for name in settings_of_others:
            if getattr(self, name):
                message = f"{name} does not apply to a request with {kind}. Leave it out."
                raise ApiError(400, message, name, "unsupported_parameter")


class DetokenizeRequest(Body):
    """The body of ``/detokenize``, as in vLLM."""

    tokens: _Tokens


def _invalid(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    param = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "json_invalid":
        reason = first["msg"].removeprefix("Invalid JSON: ")
        return ApiError(400, f"the body is not valid JSON ({reason}).", code="invalid_json")
    if first["type"] == "missing":
        return ApiError(
            400,
            f"the request lacks the parameter {param}; add it.",
            param,
            "missing_required_parameter",
        )
    message = _HINTS.get(param, f"{param or 'the body'} is invalid: {first['msg'].rstrip('.')}.")
    return ApiError(400, message, param or None, "invalid_value")


class CompletionOutput:
    """One answer of a request.

    The engine's thread passes the new tokens of the answer to this object. Code in the event loop
    then reads the text of these tokens from the object.
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        index: int,
        stops: Sequence[str],
        news: asyncio.Event,
    ) -> None:
        self.index = index
        # The text of the answer so far. If the answer is streamed, the text is not collected here.
        self.text = ""
        self._engine = engine
        loop = asyncio.get_running_loop()
        self._commits: deque[Commit] = deque()
        self._has_come = news
        self._is_held = False
        # Decode with the tokenizer of the library ``tokenizers``. Its wrapper in transformers would
        # double the time that decoding takes in the event loop.
        decode = partial(engine.target.tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops, request.min_new_tokens)
        self._began = time.perf_counter()
        # ``finish_reason`` is "stop" or "length" once the answer has ended.
        self.n_tokens, self.finish_reason = 0, ""
        self.first_s: float | None = None  # Seconds from the request to the answer's first token.
        # Tokens that were not sent to the client yet, with their log-probabilities. If the request
        # asks for no log-probabilities, the list stays empty.
        self.scored: list[tuple[int, Logprobs]] = []
        self._id = engine.add(request, lambda commit: call_in(loop, self._arrive, commit))
        engine.set_work(self._id, Work.SPECULATE if request.drafter else Work.PLAIN)

    def pieces(self) -> Iterator[str]:
        """Yield the new text in pieces. Only the last piece of the answer may be empty.

        Raises:
            ServingError: the engine failed to complete the answer.
        """
        while self._commits and not self.finish_reason:
            piece = self._take(self._commits.popleft())
            if piece or self.finish_reason:
                yield piece
        if self._is_held and len(self._commits) <= _RELEASE_AT:
            self._hold(False)

    def close(self) -> None:
        """Remove the sequence from the engine."""
        self._engine.remove(self._id)

    def _take(self, commit: Commit) -> str:
        """Take the tokens of one target call, and return their text.

        Drop all tokens after a stop string.
        """
        if commit.error is not None:
            raise commit.error
        if commit.tokens and self.first_s is None:
            self.first_s = time.perf_counter() - self._began
        text = ""
        for index, token in enumerate(commit.tokens):
            self.n_tokens += 1
            if commit.logprobs:
                self.scored.append((token, commit.logprobs[index]))
            text += self._stops.push(self._detokenizer.append(token))
            if self._stops.is_found:
                self.finish_reason = "stop"
                return text
        self.finish_reason = commit.finish
        return text + self._stops.rest() if commit.finish else text

    def _hold(self, is_held: bool) -> None:
        self._is_held = is_held
        self._engine.hold(self._id, is_held)

    def _arrive(self, commit: Commit) -> None:
        self._commits.append(commit)
        self._has_come.set()
        if len(self._commits) >= _HOLD_AT and not self._is_held:
            self._hold(True)


class RequestOutput:
    """The answers of one request.

    ``ends_s`` is a deadline, as a value of ``time.monotonic()``. If an answer is still incomplete
    at this time, :meth:`pieces` raises ApiError.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[Request], stops: Sequence[str], ends_s: float
    ) -> None:
        self._has_come = asyncio.Event()
        self._is_late = False
        self.outputs: list[CompletionOutput] = []
        try:
            for index, request in enumerate(requests):
                self.outputs.append(CompletionOutput(engine, request, index, stops, self._has_come))
        except ServingError:
            for output in self.outputs:
                output.close()
            raise
        self._timer = asyncio.get_running_loop().call_at(ends_s, self._end_late)

    @property
    def n_tokens(self) -> int:
        """Number of new tokens of all answers."""
        return sum(output.n_tokens for output in self.outputs)

    @property
    def first_s(self) -> float | None:
        """Seconds from the request to the first token of any answer."""
        return min(
            (output.first_s for output in self.outputs if output.first_s is not None), default=None
        )

    @property
    def finish_reason(self) -> str:
        """The reasons why the answers ended, without repeats. Empty until all have ended."""
        reasons = [output.finish_reason for output in self.outputs]
        return ", ".join(dict.fromkeys(reasons)) if all(reasons) else ""

    async def pieces(self) -> AsyncIterator[tuple[CompletionOutput, str]]:
        """Yield each new piece of text, with the answer that it belongs to.

        Raises:
            ServingError: an answer failed.
            ApiError: the answers take too long.
        """
        while not self.finish_reason:
            await self._has_come.wait()
            if self._is_late:
                raise ApiError(
                    408,
                    "the answer took longer than this server allows, so it was cut off; ask for "
                    "fewer tokens.",
                    None,
                    "timeout",
                )
            self._has_come.clear()
            for output in self.outputs:
                for piece in output.pieces():
                    yield output, piece

    async def whole(self) -> None:
        """Wait until all answers have ended, and collect their texts."""
        async for output, piece in self.pieces():
            output.text += piece

    def close(self) -> None:
        """Remove the sequences from the engine, for example because nobody reads the answers."""
        self._timer.cancel()
        for output in self.outputs:
            output.close()

    def _end_late(self) -> None:
        self._is_late = True
        self._has_come.set()


class ResponseFormatter:
    """Formats the answers to a request as one JSON object or as server-sent events."""

    def __init__(
        self, asked: GenerationRequest, fingerprint: str | None, n_prompt: int, tokenizer: Any
    ) -> None:
        self._is_chat = isinstance(asked, ChatRequest)
        self._n_prompt = n_prompt
        self._decode = tokenizer.decode
        self._has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        # Index of an answer -> number of characters of this answer that were sent. The characters
        # are counted only if the request asks for log-probabilities.
        self._offsets: Counter[int] = Counter()
        self._facts = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()), "model": asked.model, "system_fingerprint": fingerprint,
        }  # fmt: skip

    def whole(self, request_output: RequestOutput) -> JsonObject:
        """Return the response with all answers as one JSON object. The answers must be complete."""
        choices = []
        for output in request_output.outputs:
            content: JsonObject = {"text": output.text}
            if self._is_chat:
                message = {"role": "assistant", "content": output.text, "refusal": None}
                content = {"message": message}
            choices.append(self._choice(output, content, output.finish_reason))
        name = "chat.completion" if self._is_chat else "text_completion"
        return self._facts | {
            "object": name,
            "choices": choices,
            "usage": self._usage(request_output),
        }

    def first(self, request_output: RequestOutput) -> bytes:
        """Return the server-sent events that come before the text of the answers.

        For a chat, these events contain the role. A completion has no such events.
        """
        outputs = request_output.outputs if self._is_chat else ()
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._delta(output, delta, None) for output in outputs)

    def piece(self, output: CompletionOutput, text: str) -> bytes:
        """Return the event for a piece of text.

        After the last piece of the answer, add the final event.
        """
        content = {"content": text} if self._is_chat else text
        events = self._delta(output, content, None) if text else b""
        if reason := output.finish_reason:
            events += self._delta(output, {} if self._is_chat else "", reason)
        return events

    def last(self, request_output: RequestOutput) -> bytes:
        """Return the server-sent events after all text, with the usage if it was requested."""
        events = (
            event(self._chunk([]) | {"usage": self._usage(request_output)})
            if self._has_usage
            else b""
        )
        return events + b"data: [DONE]\n\n"

    def _delta(self, output: CompletionOutput, delta: Any, finish_reason: str | None) -> bytes:
        chunk = self._chunk(
            [self._choice(output, {"delta" if self._is_chat else "text": delta}, finish_reason)]
        )
        return event(chunk | {"usage": None} if self._has_usage else chunk)

    def _choice(
        self, output: CompletionOutput, content: JsonObject, finish_reason: str | None
    ) -> JsonObject:
        logprobs = None
        if output.scored:
            logprobs = self._chat_logprobs(output) if self._is_chat else self._logprobs(output)
            output.scored.clear()
        return (
            {"index": output.index}
            | content
            | {"logprobs": logprobs, "finish_reason": finish_reason}
        )

    def _chat_logprobs(self, output: CompletionOutput) -> JsonObject:
        def entry(token: int, logprob: float) -> JsonObject:
            text = self._decode([token])
            # If the text contains the replacement character, the token has only some of the bytes
            # of a character. These bytes cannot be found from the text, so the field ``bytes`` is
            # null.
            is_whole = "\ufffd" not in text
            shown = {"token": text, "logprob": max(logprob, _MIN_LOGPROB)}
            return shown | {"bytes": list(text.encode()) if is_whole else None}

        content: list[JsonObject] = []
        for token, (logprob, likeliest) in output.scored:
            scored_token = entry(token, logprob)
            scored_token["top_logprobs"] = [entry(*alternative) for alternative in likeliest]
            content.append(scored_token)
        return {"content": content, "refusal": None}

    def _logprobs(self, output: CompletionOutput) -> JsonObject:
        tokens = [self._decode([token]) for token, _ in output.scored]
        offsets = [*accumulate(map(len, tokens), initial=self._offsets[output.index])]
        self._offsets[output.index] = offsets.pop()
        values = []
        tops = []
        for text, (_, (logprob_of_text, likeliest)) in zip(tokens, output.scored, strict=True):
            values.append(max(logprob_of_text, _MIN_LOGPROB))
            # Several tokens with incomplete characters can decode to the same text. Keep only one
            # of these tokens: the token of the answer if it is among them, otherwise the most
            # likely one.
            top: dict[str, float] = {}
            for token, logprob in reversed(likeliest):
                top[self._decode([token])] = max(logprob, _MIN_LOGPROB)
            tops.append(top | {text: values[-1]})
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        return self._facts | {
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "choices": choices,
        }  # fmt: skip

    def _usage(self, request_output: RequestOutput) -> dict[str, int]:
        n_prompt = self._n_prompt
        n_new = request_output.n_tokens
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_new,
            "total_tokens": n_prompt + n_new,
        }


def event(value: JsonObject) -> bytes:
    """Format one server-sent event."""
    return b"data: " + _ENCODER.encode(value).encode() + b"\n\n"
