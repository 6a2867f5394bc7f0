"""OpenAI's API over HTTP: chat completions, completions, models, streamed or not; health and metrics.

The way of a request: headers are checked (token, rate), the body is read within bounds of size and time, its settings
are checked (``openai_form``), the prompt becomes tokens in a thread of its own (``service``), the engine takes it up
(``answer``), and text goes out as it comes. A client that goes away frees its text in the engine, one that reads slowly
holds it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ...errors import PromptUnusable, ServingError
from ...moa.targets.chat import Rejection, parse_prompt
from ...moa.targets.chat_tokens import prompt_tokens
from .answer import Answer
from .answer_form import AnswerForm, ChatForm, CompletionForm
from .guard import Guard, Sites
from .openai_form import AnswerRequest, ApiError, ChatRequest, CompletionRequest
from .request_log import RequestLog, facts_of
from .service import Service

_T = TypeVar("_T")
_CLIENT_GONE = 499
"""Status in the log of a request whose client has gone; nobody gets it."""


def create_app(service: Service, sites: Sites) -> FastAPI:
    """Make the application, for :class:`~.connections.HttpServer`."""
    app = FastAPI(title="moa-data", openapi_url=None, docs_url=None, redoc_url=None)

    async def chat(request: HttpRequest) -> Response:
        asked = ChatRequest.parse(await _body(request, service))
        service.check_model(asked.model)
        encoding = service.tokenize(asked.n_chars, lambda tokenizer: _chat_tokens(tokenizer, asked.messages))
        tokens = await _while_connected(request, encoding)
        return await _answer(request, service, asked, tokens, ChatForm(service.model_name, service.fingerprint))

    async def completions(request: HttpRequest) -> Response:
        asked = CompletionRequest.parse(await _body(request, service))
        service.check_model(asked.model)
        prompt = asked.single_prompt
        if isinstance(prompt, list):
            tokens = prompt
        else:
            encoding = service.tokenize(len(prompt), lambda tokenizer: _text_tokens(tokenizer, prompt))
            tokens = await _while_connected(request, encoding)
        return await _answer(request, service, asked, tokens, CompletionForm(service.model_name, service.fingerprint))

    async def models(request: HttpRequest) -> Response:
        service.admit(request)
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def model(request: HttpRequest) -> Response:
        service.admit(request)
        service.check_model(request.path_params["name"])
        return JSONResponse(_model(service))

    async def health(request: HttpRequest) -> Response:
        if service.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(request: HttpRequest) -> Response:
        service.check_token(request)
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.add_api_route("/v1/chat/completions", chat, methods=["POST"])
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])
    app.add_exception_handler(ApiError, _show_error)
    app.add_exception_handler(HTTPException, _show_http_error)
    app.add_exception_handler(ClientDisconnect, _note_client_gone)
    app.add_exception_handler(Exception, _show_fault)
    app.add_middleware(Guard, sites=sites)
    app.add_middleware(RequestLog, metrics=service.metrics)
    return app


async def _show_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    facts_of(request).error = error.message
    return JSONResponse(error.body, error.status, error.headers)


async def _show_http_error(request: HttpRequest, error: Exception) -> Response:
    """Answer what no route takes."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}."
    return await _show_error(request, ApiError(error.status_code, message, None, "unknown_url"))


async def _note_client_gone(request: HttpRequest, error: Exception) -> Response:
    """Give a request whose client left in the middle of its body a status for the log."""
    return await _show_error(request, ApiError(_CLIENT_GONE, "the client has gone."))


async def _show_fault(request: HttpRequest, error: Exception) -> Response:
    """Answer a fault of the server, which the log has in full."""
    return await _show_error(request, ApiError(500, "the server failed at this request.", None, "internal_error"))


async def _body(request: HttpRequest, service: Service) -> bytes:
    """Read the body of a request that may be answered.

    Raises:
        ApiError: 400, 401, 408, 413, 429 or 503.
    """
    service.admit(request)
    if service.is_draining:
        raise ApiError(503, "the server is about to end; ask another, or later.", None, "draining", 5)
    most = service.limits.most_body_bytes
    too_large = ApiError(413, f"the body has more than {most} bytes; send less.", None, "request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise too_large
    parts, n_bytes = [], 0
    try:
        async with asyncio.timeout(service.limits.body_s):
            async for part in request.stream():
                n_bytes += len(part)
                if n_bytes > most:
                    raise too_large
                parts.append(part)
    except TimeoutError as error:
        message = f"the body did not arrive within {service.limits.body_s:g} s; send it at once."
        raise ApiError(408, message, None, "timeout") from error
    return b"".join(parts)


def _chat_tokens(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    chat = parse_prompt({"messages": messages})
    if isinstance(chat, Rejection):
        raise PromptUnusable(f"{chat.reason}: {chat.detail}")
    return prompt_tokens(tokenizer, chat.messages)


def _text_tokens(tokenizer: Any, text: str) -> list[int]:
    text.encode()  # halves of surrogate pairs are no text
    return list(tokenizer(text)["input_ids"])


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "moa-data",
        "drafters": list(service.engine.drafters),
    }


async def _answer(
    request: HttpRequest, service: Service, asked: AnswerRequest, tokens: list[int], form: AnswerForm
) -> Response:
    """Complete a prompt, streamed or at once; the log's middleware closes the answer in any case."""
    answer = await service.begin(asked, tokens, request.scope["moa_data.connection"])
    facts = facts_of(request)
    facts.answer, facts.n_prompt, form.n_prompt = answer, len(tokens), len(tokens)
    if asked.stream:
        has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(_events(request, answer, form, has_usage), 200, headers, "text/event-stream")
    try:
        text = await _while_connected(request, _whole(answer))
    except ServingError as error:
        raise ApiError.of(error) from error
    if answer.finish_reason == "deadline":
        raise _late()
    return JSONResponse(form.whole(text, answer))


async def _whole(answer: Answer) -> str:
    return "".join([piece async for piece in answer.pieces()])


async def _events(request: HttpRequest, answer: Answer, form: AnswerForm, has_usage: bool) -> AsyncIterator[bytes]:
    """Stream an answer as server-sent events; an error comes as the last one."""
    if (first := form.first()) is not None:
        yield _event(form.with_usage(first, has_usage))
    try:
        async for piece in answer.pieces():
            yield _event(form.with_usage(form.piece(piece), has_usage))
    except ServingError as error:
        facts_of(request).error = str(error)
        yield _event(ApiError.of(error).body)
        return
    if answer.finish_reason == "deadline":
        facts_of(request).error = _late().message
        yield _event(_late().body)
        return
    yield _event(form.with_usage(form.last(answer), has_usage))
    if has_usage:
        yield _event(form.usage(answer))
    yield b"data: [DONE]\n\n"


def _late() -> ApiError:
    return ApiError(408, "the answer took too long; ask for fewer tokens.", None, "timeout")


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


async def _while_connected(request: HttpRequest, work: Coroutine[Any, Any, _T]) -> _T:
    """Wait for some work as long as the client is there.

    Raises:
        ApiError: it has gone.
    """

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(_CLIENT_GONE, "the client has gone.")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
