"""OpenAI's API over HTTP: completions of chats and prompts, models, health, metrics.

A request passes these layers::

    access        limits connections and times
    metrics       counts and logs the request
    access        refuses foreign web pages
    this module   checks token and rate, reads the body, tokenizes the prompt in a thread
    api           turns settings into a request to the engine, and tokens into text and events

If a client disconnects, its sequence is removed from the engine. If a client reads slowly, its
sequence is paused.
"""

import asyncio
import contextlib
import copy
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..errors import Overloaded, PromptUnusable, ServingError, TemplateError
from ..moa.decoding.sampling import SamplingConfig
from ..moa.targets.chat import Message, Rejection, parse_prompt
from ..moa.targets.chat_tokens import prompt_tokens
from ..moa.targets.template import ChatTemplate
from .access import BearerTokens, Connection, Guard, Rate
from .api import (
    ApiError,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    RequestOutput,
    ResponseFormatter,
    TokenizeRequest,
    event,
)
from .config import ServeConfig
from .engine.engine import Engine
from .engine.sequence import Request
from .grammar import Grammars
from .metrics import Facts, Metrics, RequestLog
from .wire import target_identity

_T = TypeVar("_T")
_B = TypeVar("_B", bound=Body)
# A smaller ``top_p`` of a request, such as 0, is replaced by this value. Sampling then keeps only
# the most likely token.
_MIN_TOP_P = 1e-9
# If the engine is full, the server may drop another connection to make room for a request. The
# request then waits up to this many seconds until the engine has removed the sequence of the
# dropped connection.
_ROOM_S = 5.0
# Maximum number of clients for which the server remembers a request rate. A client is an owner of a
# bearer token, or an IP address.
_MAX_OWNERS = 10_000
# The request log shows this HTTP status if the client has disconnected. The status is never sent.
_CLIENT_GONE = 499
# Maximum number of characters of a short prompt. Tokenizing a prompt of this length takes a few
# hundredths of a second.
_SHORT_CHARS = 1 << 15
# How many short prompts, long prompts and forms of answers (JSON schemas, regular expressions) may
# wait at most, in this order. Further requests are refused.
_MAX_WAITING = (1024, 16, 1024)


class Service:
    """The routes of the HTTP server, and the state that they share.

    If a request names no drafter, the engine's first drafter is used.
    """

    def __init__(self, engine: Engine, config: ServeConfig, tokens: BearerTokens) -> None:
        self.engine = engine
        self.target = engine.target
        self.config = config
        self.tokens = tokens
        self.model_name = config.name or Path(config.model).name
        self.limits = config.limits
        weights = target_identity(self.target.identity)
        # The value of the field ``system_fingerprint``. It tells clients which weights the target
        # has.
        self._fingerprint = f"fp_{weights[:12]}" if weights else None
        # ``is_draining`` is true while the server shuts down. The server then refuses requests.
        self.is_draining, self._created = False, int(time.time())
        self.metrics = Metrics(engine.snapshot)
        rate = self.limits.requests_per_s, self.limits.requests_at_once
        self._rate_of = lru_cache(_MAX_OWNERS)(lambda owner: Rate(*rate))
        max_token_chars = max(map(len, self.target.tokenizer.get_vocab()))
        self._max_chars = engine.max_positions * max_token_chars
        self._grammars = cache(lambda: Grammars(self.target))
        # There are three threads: for short prompts, for long prompts, and for forms of answers
        # (JSON schemas, regular expressions). So short prompts never wait for long prompts or
        # forms.
        self._tokenizers = [
            _Tokenizer(self.target.template, max_waiting) for max_waiting in _MAX_WAITING
        ]

    def app(self, names: frozenset[str], checks_hosts: bool) -> FastAPI:
        """Create the application.

        Args:
            names: allowed host names of the server, besides ``localhost`` and IP addresses.
            checks_hosts: whether the ``Host`` header of a request must have an allowed name.
        """
        app = FastAPI(title="moa-data", openapi_url=None, docs_url=None, redoc_url=None)
        posts = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/tokenize": self._tokens,
            "/detokenize": self._text,
        }
        gets = {
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._model,
            "/health": self._health,
            "/metrics": self._metrics,
        }
        for method, routes in (("POST", posts), ("GET", gets)):
            for path, answer in routes.items():
                app.add_api_route(path, answer, methods=[method])
        for kind in (ApiError, ServingError, HTTPException, ClientDisconnect, Exception):
            app.add_exception_handler(kind, _show_error)
        app.add_middleware(
            Guard, names=names, checks_hosts=checks_hosts, checks_pages=self.tokens.is_open
        )
        app.add_middleware(RequestLog, metrics=self.metrics)
        return app

    # The methods below answer the requests of the routes.

    async def _chat(self, request: HttpRequest) -> Response:
        asked = await self._read(request, ChatRequest)
        prompt = await self._chat_prompt(request, asked.messages, asked.tools, True)
        return await self._respond(request, asked, [prompt])

    async def _completions(self, request: HttpRequest) -> Response:
        asked = await self._read(request, CompletionRequest)
        prompts: list[list[int]] = []
        for prompt in asked.prompts:
            if isinstance(prompt, list):
                prompts.append(prompt)
            else:
                prompts.append(await self._prompt(request, prompt))
        return await self._respond(request, asked, prompts)

    async def _tokens(self, request: HttpRequest) -> Response:
        asked = await self._read(request, TokenizeRequest)
        if asked.messages is None:
            tokens = await self._prompt(
                request, asked.prompt or "", asked.add_special_tokens is not False
            )
        else:
            is_open = asked.add_generation_prompt is not False
            tokens = await self._chat_prompt(request, asked.messages, asked.tools, is_open)
        names = (
            self.target.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
        )
        facts = {"count": len(tokens), "max_model_len": self.engine.max_positions, "tokens": tokens}
        return JSONResponse(facts | {"token_strs": names})

    async def _text(self, request: HttpRequest) -> Response:
        asked = await self._read(request, DetokenizeRequest)
        tokens = asked.tokens
        self.engine.check_tokens(tokens)
        decoding = self._tokenizers[len(tokens) > _SHORT_CHARS].run(
            lambda template: template.tokenizer.decode(tokens)
        )
        return JSONResponse({"prompt": await decoding})

    async def _models(self, request: HttpRequest) -> Response:
        self._admit(request)
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def _model(self, request: HttpRequest) -> Response:
        self._admit(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._description())

    async def _health(self, request: HttpRequest) -> Response:
        return (
            JSONResponse({"status": "draining"}, 503)
            if self.is_draining
            else JSONResponse({"status": "ok"})
        )

    async def _metrics(self, request: HttpRequest) -> Response:
        self._check_token(request)
        return PlainTextResponse(
            self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    def _description(self) -> dict[str, Any]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "moa-data",
            "drafters": list(self.engine.drafters),
        }

    # The methods below check requests. They raise ApiError or ServingError.

    def _admit(self, request: HttpRequest) -> None:
        """Check the bearer token and the rate of a request. The HTTP errors are 401 and 429."""
        owner = self._check_token(request)
        if self.limits.requests_per_s <= 0:
            return
        owner = owner or (request.client.host if request.client else "")
        if wait_s := self._rate_of(owner).take():
            raise ApiError(
                429,
                "this client has sent too many requests; send fewer, or try again later.",
                None,
                "rate_limit_exceeded",
                wait_s,
            )

    def _check_token(self, request: HttpRequest) -> str:
        return self.tokens.check(request.headers.getlist("authorization"))

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            message = (
                f"{name[:120]!r} is not the model of this server; request {self.model_name!r}."
            )
            raise ApiError(404, message, "model", "model_not_found")

    async def _read(self, request: HttpRequest, kind: type[_B]) -> _B:
        """Check whether a request may be answered, then read and parse its body.

        The HTTP errors are 400, 401, 404, 408, 413, 429 and 503.
        """
        self._admit(request)
        if self.is_draining:
            raise ApiError(
                503,
                "the server is shutting down; try another server, or try again later.",
                None,
                "draining",
                5,
            )
        limits = self.limits
        too_large = ApiError(
            413,
            f"the body of the request has more than {limits.max_body_bytes} bytes, which is the "
            "limit; send a smaller body.",
            None,
            "request_too_large",
        )
        # If the headers announce a body that is too large, refuse the request before the client
        # sends the body.
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limits.max_body_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_s):
                async for part in request.stream():
                    body += part
                    if len(body) > limits.max_body_bytes:
                        raise too_large
        except TimeoutError as error:
            message = (
                f"the body of the request did not arrive within {limits.body_s:g} s; send it "
                "without pauses."
            )
            raise ApiError(408, message, None, "timeout") from error
        asked = kind.parse(bytes(body))
        if asked.model is not None:
            self._check_model(asked.model)
        return asked

    async def _prompt(
        self, request: HttpRequest, text: str, adds_special: bool = True
    ) -> list[int]:
        encode = partial(_text_tokens, text=text, adds_special=adds_special)
        return await self._tokenize(request, len(text), encode)

    async def _chat_prompt(
        self, request: HttpRequest, messages: list[Message], tools: Any, is_open: bool
    ) -> list[int]:
        encode = partial(_chat_tokens, messages=messages, tools=tools, is_open=is_open)
        n_chars = len(str(tools)) if tools else 0
        for message in messages:
            content = message.get("content")
            parts = content if isinstance(content, list) else [content]
            for part in parts:
                text = part.get("text") if isinstance(part, dict) else part
                if isinstance(text, str):
                    n_chars += len(text)
        return await self._tokenize(request, n_chars, encode)

    async def _tokenize(
        self, request: HttpRequest, n_chars: int, encode: Callable[[ChatTemplate], list[int]]
    ) -> list[int]:
        """Tokenize a prompt. Stop if the client disconnects.

        The HTTP errors are 400 if the prompt cannot be used, and 503 if too many prompts wait.

        Args:
            request: the request that has the prompt.
            n_chars: length of the prompt in characters.
            encode: a function that tokenizes the prompt.
        """
        # If a prompt has more than ``_max_chars`` characters, it has too many tokens, even if every
        # token is as long as the longest token of the vocabulary.
        if n_chars > self._max_chars:
            message = (
                f"the prompt has {n_chars} characters, far more than the context of the model can "
                "hold; shorten the prompt."
            )
            raise ApiError(400, message, None, "context_length_exceeded")
        try:
            tokenizing = self._tokenizers[n_chars > _SHORT_CHARS].run(encode)
            return await _while_connected(request, tokenizing)
        except (PromptUnusable, TemplateError, UnicodeError) as error:
            raise ApiError(
                400, f"the prompt cannot be used: {error}", None, "invalid_prompt"
            ) from error

    # The methods below produce answers.

    async def _respond(
        self, request: HttpRequest, asked: GenerationRequest, prompts: list[list[int]]
    ) -> Response:
        """Answer prompts, and return the HTTP response: one JSON object or a stream of events.

        This method need not close the answers. The middleware of the request log closes them, even
        after an error.
        """
        output = await self._begin(asked, prompts, request.scope["moa_data.connection"])
        facts: Facts = request.scope["moa_data.facts"]
        facts.output = output
        facts.n_prompt = sum(map(len, prompts))
        formatter = ResponseFormatter(
            asked, self._fingerprint, facts.n_prompt, self.target.tokenizer
        )
        if asked.stream:
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            return StreamingResponse(
                _events(request, output, formatter), 200, headers, "text/event-stream"
            )
        await _while_connected(request, output.whole())
        return JSONResponse(formatter.whole(output))

    async def _begin(
        self, asked: GenerationRequest, prompts: list[list[int]], connection: Connection
    ) -> RequestOutput:
        """Add a sequence to the engine for each answer, and return the unfinished answers.

        If the engine is full, make room by dropping a connection whose client has stopped reading.
        """
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        # As in vLLM, the answers to one prompt have consecutive seeds. The first answers to all
        # prompts have the same seed.
        requests: list[Request] = []
        for tokens in prompts:
            for k in range(asked.n or 1):
                requests.append(self._request(asked, tokens, seed + k))
        if (form := asked.form) is not None:
            make = self._tokenizers[-1].run(lambda _: self._grammars().make(*form, len(requests)))
            grammars = await make
            requests = [
                replace(item, allowed=grammar)
                for item, grammar in zip(requests, grammars, strict=True)
            ]
        now = time.monotonic()
        has_room = False
        ends_s = now + self.limits.answer_s if self.limits.answer_s > 0 else math.inf
        while True:
            try:
                output = RequestOutput(self.engine, requests, asked.stop or (), ends_s)
            except Overloaded:
                has_room = has_room or connection.pool.drop_stuck()
                if not has_room or time.monotonic() > now + _ROOM_S:
                    raise
                # Wait, because the engine removes the sequence of the dropped connection only
                # between two target calls.
                await asyncio.sleep(0.02)
            else:
                connection.ends_s = ends_s
                return output

    def _request(self, asked: GenerationRequest, tokens: list[int], seed: int) -> Request:
        engine = self.engine
        drafter = next(iter(self.engine.drafters), None)
        if asked.drafter is not None:
            drafter = None if asked.drafter == "none" else asked.drafter
        if drafter is not None and drafter not in engine.drafters:
            known = ", ".join((*engine.drafters, "none"))
            message = f"{drafter[:120]!r} is not a drafter of this server; expected one of {known}."
            raise ApiError(400, message, "drafter", "invalid_value")
        sampling = SamplingConfig(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else max(asked.top_p, _MIN_TOP_P),
            top_k=max(asked.top_k or 0, 0),
            repetition_penalty=asked.repetition_penalty or 1.0,
            min_p=asked.min_p or 0.0,
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            logit_bias=self._logit_bias(asked),
        )
        max_tokens = self._max_new_tokens(asked, len(tokens))
        least = asked.min_tokens or 0
        if least > max_tokens:
            raise ApiError(
                400,
                f"min_tokens is {least}, but the answer may have only {max_tokens} tokens; lower "
                "min_tokens.",
                "min_tokens",
                "invalid_value",
            )
        return Request(
            tuple(tokens), len(tokens), max_tokens, sampling, seed, drafter,
            n_logprobs=asked.n_logprobs, ignores_eos=bool(asked.ignore_eos), min_new_tokens=least,
        )  # fmt: skip

    def _logit_bias(self, asked: GenerationRequest) -> tuple[tuple[int, float], ...]:
        biases = asked.logit_bias or {}
        n_vocab = self.target.facts.vocab_size
        for name, value in biases.items():
            is_token = (
                name.isascii() and name.isdecimal() and len(name) < 10 and int(name) < n_vocab
            )
            if not is_token or type(value) not in (int, float) or not -100 <= value <= 100:
                message = (
                    f"logit_bias has an invalid entry for {name[:60]!r}; expected token ids from 0 "
                    f"to {n_vocab - 1} as keys and numbers from -100 to 100 as values."
                )
                raise ApiError(400, message, "logit_bias", "invalid_value")
        return tuple((int(name), value) for name, value in biases.items())

    def _max_new_tokens(self, asked: GenerationRequest, n_prompt: int) -> int:
        context = self.engine.max_positions
        n_new = asked.max_tokens
        limit = self.limits.max_new_tokens
        if n_prompt >= context:
            message = (
                f"the prompt has {n_prompt} tokens, but at most {context - 1} fit into the "
                "context; shorten the prompt."
            )
            raise ApiError(400, message, None, "context_length_exceeded")
        if n_new is None:
            return min(limit, context - n_prompt)
        if n_prompt + n_new > context:
            message = (
                f"the prompt has {n_prompt} tokens and max_tokens is {n_new}, but the context has "
                f"only {context} tokens for both together; shorten the prompt or lower max_tokens."
            )
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
        if n_new > limit:
            message = (
                f"max_tokens is {n_new}, but this server allows at most {limit} tokens per answer; "
                "lower max_tokens."
            )
            raise ApiError(400, message, "max_tokens", "invalid_value")
        return n_new


class _Tokenizer:
    """A copy of the tokenizer that runs in its own thread.

    A copy is needed because a tokenizer is not thread-safe.
    """

    def __init__(self, template: ChatTemplate, max_waiting: int) -> None:
        self._template = copy.deepcopy(template)
        self._max_waiting = max_waiting
        self._n_waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def run(self, encode: Callable[[ChatTemplate], _T]) -> _T:
        """Run a function on this tokenizer's thread, such as one that tokenizes a prompt.

        If the caller is cancelled before the function starts, the function never runs.
        """
        if self._n_waiting >= self._max_waiting:
            raise Overloaded("too many requests are waiting for the tokenizer; try again later.")
        self._n_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, encode, self._template
            )
        finally:
            self._n_waiting -= 1


def _chat_tokens(
    template: ChatTemplate, messages: list[Message], tools: Any, is_open: bool
) -> list[int]:
    """Tokenize a chat, with its tools if the template can show them. The tools are never called."""
    chat = parse_prompt({"messages": messages, "tools": tools})
    if isinstance(chat, Rejection):
        raise PromptUnusable(f"{chat.reason}: {chat.detail}")
    # As in vLLM, developer messages become system messages if the template does not know the role
    # developer.
    for message in chat.messages:
        is_developer = message["role"] == "developer"
        if is_developer and not re.search("['\"]developer['\"]", template.text):
            message["role"] = "system"
    if chat.tools:
        with contextlib.suppress(TemplateError):
            return prompt_tokens(template, chat.messages, chat.tools, is_open=is_open)
    return prompt_tokens(template, chat.messages, is_open=is_open)


def _text_tokens(template: ChatTemplate, text: str, adds_special: bool) -> list[int]:
    # Refuse texts with surrogates, which are not characters: this line raises UnicodeError for
    # them.
    text.encode()
    return list(template.tokenizer(text, add_special_tokens=adds_special)["input_ids"])


async def _events(
    request: HttpRequest, request_output: RequestOutput, formatter: ResponseFormatter
) -> AsyncIterator[bytes]:
    if first := formatter.first(request_output):
        yield first
    try:
        async for output, piece in request_output.pieces():
            yield formatter.piece(output, piece)
        yield formatter.last(request_output)
    except (ApiError, ServingError) as error:
        failure = ApiError.of(error)
        request.scope["moa_data.facts"].error = failure.message
        yield event(failure.body)


async def _show_error(request: HttpRequest, error: Exception) -> Response:
    # An HTTPException means that the server has no route for the request. Report this in OpenAI's
    # format.
    if isinstance(error, HTTPException):
        message = (
            f"this server cannot answer {request.method} {request.url.path[:200]}: {error.detail}."
        )
        error = ApiError(error.status_code, message, None, "unknown_url")
    elif isinstance(error, ClientDisconnect):
        # The client disconnected while sending its body, so only the request log shows this error.
        error = ApiError(_CLIENT_GONE, "the client disconnected before its request was complete.")
    shown = ApiError.of(error)
    request.scope["moa_data.facts"].error = shown.message
    return shown.response()


async def _while_connected(request: HttpRequest, work: Coroutine[Any, Any, _T]) -> _T:
    """Wait for a coroutine. If the client disconnects, cancel the coroutine and raise ApiError."""

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    try:
        await first_of(task, until_gone())
        if not task.done():
            raise ApiError(_CLIENT_GONE, "the client disconnected before its answer was complete.")
        return task.result()
    finally:
        task.cancel()


async def first_of(work: asyncio.Future[Any], event: Coroutine[Any, Any, Any]) -> None:
    """Wait until the work or the event is done. If the work has failed, raise its error."""
    waiting = asyncio.ensure_future(event)
    try:
        await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        waiting.cancel()
