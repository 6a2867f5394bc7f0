"""Answers chats by asking a server that speaks OpenAI's API; many requests at once, rows in their order."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import httpx2 as httpx

from ..errors import ServingError
from ..moa.targets.template import parse_template_arguments
from ..text import first_line
from .chats import Exchange, LossReason, Outcome, Question
from .config import RegenerateConfig

_TOO_LONG = ("context_length_exceeded", "maximum context length", "shorten")
_AGAIN = (409, 425, 429, 500, 502, 503, 504)
"""Statuses that pass."""
_REFUSALS = (400, 413, 422)
"""Statuses that concern one request."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 20.0
_AHEAD = 4
"""Rows that are taken up for each request at once: one long answer does not hold up those behind it."""


class Server:
    """A server that answers chats.

    Attributes:
        model: name of its model.
        facts: what is recorded of it.

    Raises:
        ServingError: it cannot be reached, or has not the model.
    """

    def __init__(self, config: RegenerateConfig) -> None:
        assert config.server is not None
        self._config = config
        base = config.server.rstrip("/")
        self._url = base if base.endswith("/v1") else f"{base}/v1"
        key = os.environ.get("OPENAI_API_KEY")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._arguments = parse_template_arguments(config.template_kwargs)
        self.model = asyncio.run(self._find_model())
        self.facts: dict[str, Any] = {"server_model": self.model, "template_kwargs": self._arguments}

    def answer(self, questions: Iterable[Question], commit: Callable[[Sequence[Outcome]], None]) -> None:
        """Ask all questions.

        Args:
            commit: called with outcomes in the order of the questions, as soon as all before them are there.

        Raises:
            ServingError: it is gone, or cannot answer.
        """
        asyncio.run(self._answer_all(questions, commit))

    async def _answer_all(self, questions: Iterable[Question], commit: Callable[[Sequence[Outcome]], None]) -> None:
        free = asyncio.Semaphore(self._config.n_together)
        waiting: deque[asyncio.Task[Outcome]] = deque()
        async with self._client() as client:

            async def ask(question: Question) -> Outcome:
                async with free:
                    return await self._exchange(client, question)

            try:
                for question in questions:
                    waiting.append(asyncio.create_task(ask(question)))
                    while len(waiting) >= _AHEAD * self._config.n_together:
                        await _commit_finished(waiting, commit)
                while waiting:
                    await _commit_finished(waiting, commit)
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)

    def _client(self) -> httpx.AsyncClient:
        n_most = self._config.n_together
        limits = httpx.Limits(max_connections=n_most, max_keepalive_connections=n_most)
        timeout = httpx.Timeout(30, read=self._config.serving.answer_s, pool=None)
        return httpx.AsyncClient(headers=self._headers, limits=limits, timeout=timeout)

    async def _find_model(self) -> str:
        async with self._client() as client:
            answer = await self._request(client, "GET", "/models")
        if answer.status_code != 200:
            raise ServingError(f"{self._url}/models answers {answer.status_code} ({_message(answer)}). {_ADVICE}")
        try:
            names = [str(item["id"]) for item in answer.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ServingError(f"{self._url}/models gives no list of models. {_ADVICE}") from error
        wanted = self._config.model
        if wanted in names or (wanted is None and len(names) == 1):
            return wanted or names[0]
        has = f"has {', '.join(names) or 'no model'}"
        raise ServingError(f"{self._url} {has}. Name one of them by --model{f', not {wanted}' if wanted else ''}.")

    async def _exchange(self, client: httpx.AsyncClient, question: Question) -> Outcome:
        exchange = Exchange(question)
        while exchange.begin_turn():
            try:
                answer = await self._request(client, "POST", "/chat/completions", self._body(exchange))
            except httpx.ReadTimeout:
                exchange.end(LossReason.LATE, f"more than {self._config.serving.answer_s:g} s")
                break
            if answer.status_code == 408:
                exchange.end(LossReason.LATE, _message(answer))
            elif answer.status_code in _REFUSALS:
                _refuse(exchange, _message(answer))
            elif answer.status_code != 200:
                raise ServingError(f"{self._url} answers {answer.status_code} ({_message(answer)}). {_ADVICE}")
            else:
                self._take(exchange, answer)
        return exchange.outcome

    def _body(self, exchange: Exchange) -> dict[str, Any]:
        """Return a request; settings at their defaults are left out, since not every server knows all of them."""
        sampling = self._config.sampling
        body = {
            "model": self.model,
            "messages": exchange.history,
            "max_tokens": self._config.max_new_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.temperature:
            body |= {"top_p": sampling.top_p, "seed": sampling.seed + exchange.question.row}
        if sampling.temperature and sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.repetition_penalty != 1:
            body["repetition_penalty"] = sampling.repetition_penalty
        return body | ({"chat_template_kwargs": self._arguments} if self._arguments else {})

    def _take(self, exchange: Exchange, answer: httpx.Response) -> None:
        """Take the text of an answer that has ended by itself."""
        try:
            document = answer.json()
            choice = document["choices"][0]
            message, ended = choice["message"], choice["finish_reason"]
            n_tokens = int((document.get("usage") or {}).get("completion_tokens") or 0)
            n_prompt = int((document.get("usage") or {}).get("prompt_tokens") or 0)
            text = message.get("content") or ""
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServingError(f"{self._url} gives no chat completion ({first_line(error)}). {_ADVICE}") from error
        if message.get("reasoning_content") or message.get("reasoning"):
            raise ServingError(
                f"{self._url} keeps the reasoning apart from the answer, so that the text is not all that was written. "
                "Start it without a reasoning parser, or leave thinking out: --template-kwargs enable_thinking=false."
            )
        if ended == "stop" and n_prompt + n_tokens <= self._config.questions.max_length:
            exchange.answer(text, n_tokens)
        elif ended == "tool_calls":
            exchange.end(LossReason.TOOLS)
        else:
            exchange.end(LossReason.NO_END, f"{n_tokens:,} tokens behind {n_prompt:,}, {ended}")

    async def _request(
        self, client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        """Send a request until it is answered with something that does not pass by itself.

        Raises:
            ServingError: the server's patience is used up.
            httpx.ReadTimeout: the answer took too long.
        """
        wait_s, last_s = _FIRST_WAIT_S, time.monotonic() + self._config.serving.patience_s
        while True:
            try:
                answer = await client.request(method, self._url + path, json=body)
                if answer.status_code not in _AGAIN:
                    return answer
                problem, asked_s = f"answers {answer.status_code} ({_message(answer)})", _retry_after_s(answer)
            except httpx.ReadTimeout:
                raise
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem, asked_s = f"cannot be reached ({first_line(error)})", 0.0
            if time.monotonic() + wait_s > last_s:
                raise ServingError(
                    f"{self._url} {problem}, for {self._config.serving.patience_s:g} s. Start it, and run the same "
                    "command again: the answers so far are kept."
                )
            await asyncio.sleep(max(wait_s, min(asked_s, _LONGEST_WAIT_S)))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


_ADVICE = "Check --server, --model and OPENAI_API_KEY."


async def _commit_finished(waiting: deque[asyncio.Task[Outcome]], commit: Callable[[Sequence[Outcome]], None]) -> None:
    """Wait for the first row, and commit it with the rows behind it that are there too."""
    await asyncio.wait({waiting[0]})
    outcomes = []
    while waiting and waiting[0].done():
        outcomes.append(waiting[0].result())
        waiting.popleft()
    commit(outcomes)


def _refuse(exchange: Exchange, message: str) -> None:
    is_too_long = any(sign in message for sign in _TOO_LONG)
    exchange.end(LossReason.TOO_LONG if is_too_long else LossReason.REFUSED, message)


def _message(answer: httpx.Response) -> str:
    """Return what a server says of an error, shortened to one line."""
    try:
        error = answer.json()
        for key in ("error", "message"):
            error = error.get(key, error) if isinstance(error, dict) else error
        text = error if isinstance(error, str) else str(error)
    except ValueError:
        text = answer.text
    return " ".join(text.split())[:200] or answer.reason_phrase


def _retry_after_s(answer: httpx.Response) -> float:
    try:
        return max(0.0, float(answer.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0
