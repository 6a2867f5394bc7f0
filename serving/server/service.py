"""What a server answers with: the engine, the model's names, who may ask for how much."""

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest

from ...errors import Overloaded, PromptUnusable, ServingError, TemplateError
from ...moa.decoding.sampling import SamplingConfig
from ...moa.targets.live import Target
from ..engine.engine import Engine
from ..engine.sequence import Request, Work
from .access import BearerTokens, Rate
from .answer import Answer
from .connections import Connection
from .metrics import Metrics
from .openai_form import AnswerRequest, ApiError
from .tokenizing import Tokenizing

_LEAST_TOP_P = 1e-9
"""Stands for a top_p of 0: the most likely token alone."""
_ROOM_S = 5.0
"""Seconds that a request waits for the room of a reader that was cut off."""
_MOST_OWNERS = 10_000
"""Owners of tokens, or addresses, whose rates are remembered."""


@dataclass(frozen=True)
class HttpLimits:
    """Bounds on what one client may ask for.

    Attributes:
        most_body_bytes: of a request.
        body_s: seconds in which a body has to arrive.
        answer_s: seconds after which an answer ends, complete or not; 0 for no end.
        most_new_tokens: of an answer.
        requests_per_s: of one token or, without tokens, one address; 0 for any number.
        requests_at_once: that may come together after a rest.
    """

    most_body_bytes: int = 1 << 20
    body_s: float = 30.0
    answer_s: float = 600.0
    most_new_tokens: int = 4096
    requests_per_s: float = 0.0
    requests_at_once: int = 32


@dataclass
class Service:
    """What the routes work with.

    Attributes:
        model_name: by which requests name the target.
        drafter: the drafter of requests that name none; None for plain decoding.
        fingerprint: stands for the weights in answers.
        is_draining: set when the server ends: new requests are refused.
    """

    engine: Engine
    target: Target
    model_name: str
    drafter: str | None = None
    fingerprint: str = ""
    tokens: BearerTokens = field(default_factory=BearerTokens)
    limits: HttpLimits = field(default_factory=HttpLimits)
    is_draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine.snapshot)
        self._rates: OrderedDict[str, Rate] = OrderedDict()
        self._tokenizing = Tokenizing(self.target.tokenizer, self.engine.limits.max_positions)

    def admit(self, request: HttpRequest) -> None:
        """Check token and rate of a request.

        Raises:
            ApiError: 401 or 429.
        """
        owner = self.check_token(request)
        if self.limits.requests_per_s <= 0:
            return
        owner = owner or (request.client.host if request.client else "")
        rate = self._rates.pop(owner, None) or Rate(self.limits.requests_per_s, self.limits.requests_at_once)
        self._rates[owner] = rate
        if len(self._rates) > _MOST_OWNERS:
            self._rates.popitem(last=False)
        if wait_s := rate.take():
            raise ApiError(429, "too many requests; send fewer, or later.", None, "rate_limit_exceeded", wait_s)

    def check_token(self, request: HttpRequest) -> str:
        """Check the token of a request; returns what stands for its owner.

        Raises:
            ApiError: 401.
        """
        try:
            return self.tokens.check(request.headers.getlist("authorization"))
        except ServingError as error:
            raise ApiError.of(error) from error

    async def tokenize(self, n_chars: int, encode: Callable[[Any], list[int]]) -> list[int]:
        """Make the tokens of a prompt, see :meth:`Tokenizing.run`.

        Raises:
            ApiError: 400 or 503.
        """
        try:
            return await self._tokenizing.run(n_chars, encode)
        except (PromptUnusable, TemplateError, UnicodeError) as error:
            raise ApiError(400, f"the prompt cannot be used: {error}", None, "invalid_prompt") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn tokens into text, without special ones."""
        text: str = self.target.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    async def begin(self, asked: AnswerRequest, tokens: list[int], connection: Connection) -> Answer:
        """Give a prompt to the engine; where it is full, a reader that takes nothing gives way.

        Raises:
            ApiError: 400 or 503.
        """
        give_up_s, has_room = time.monotonic() + _ROOM_S, False
        while True:
            try:
                answer = self._begin(asked, tokens)
            except Overloaded as error:
                has_room = has_room or connection.book.drop_stuck()
                if not has_room or time.monotonic() > give_up_s:
                    raise ApiError.of(error) from error
                await asyncio.sleep(0.02)  # the engine forgets a text between two calls
            except ServingError as error:
                raise ApiError.of(error) from error
            else:
                if self.limits.answer_s > 0:
                    connection.ends_s = time.monotonic() + self.limits.answer_s
                return answer

    def _begin(self, asked: AnswerRequest, tokens: list[int]) -> Answer:
        drafter = self._drafter(asked)
        most, deadline = self._most_tokens(asked, len(tokens)), None
        if self.limits.answer_s > 0:
            deadline = time.monotonic() + self.limits.answer_s
        sampling = SamplingConfig(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else max(asked.top_p, _LEAST_TOP_P),
            top_k=asked.top_k or 0,
            repetition_penalty=asked.repetition_penalty or 1.0,
        )
        request = Request(
            tuple(tokens), len(tokens), most, sampling, secrets.randbits(63) if asked.seed is None else asked.seed,
            deadline, drafter,
        )  # fmt: skip
        work = Work.PLAIN if drafter is None else Work.SPECULATE
        return Answer(self.engine, request, work, asked.stops, self.decode)

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served here.

        Raises:
            ApiError: 404.
        """
        if name != self.model_name:
            message = f"there is no model {name[:120]!r} here; this server has {self.model_name}."
            raise ApiError(404, message, "model", "model_not_found")

    def _drafter(self, asked: AnswerRequest) -> str | None:
        if asked.drafter is None:
            return self.drafter
        if asked.drafter == "none":
            return None
        if asked.drafter not in self.engine.drafters:
            known = ", ".join((*self.engine.drafters, "none"))
            message = f"there is no drafter {asked.drafter[:120]!r} here; expected one of {known}."
            raise ApiError(400, message, "drafter", "invalid_value")
        return asked.drafter

    def _most_tokens(self, asked: AnswerRequest, n_prompt: int) -> int:
        """The bound on new tokens: what was asked for, else what is left of the context."""
        context = self.engine.limits.max_positions
        if n_prompt >= context:
            message = f"the prompt has {n_prompt} tokens, at most {context - 1} fit; shorten it."
            raise ApiError(400, message, None, "context_length_exceeded")
        most = asked.most_tokens
        if most is not None and n_prompt + most > context:
            message = (
                f"the prompt has {n_prompt} tokens and {most} are asked for, {context} fit in all; shorten the "
                "prompt or ask for fewer."
            )
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
        if most is not None and most > self.limits.most_new_tokens:
            message = f"at most {self.limits.most_new_tokens} tokens an answer; {most} are asked for."
            raise ApiError(400, message, "max_tokens", "invalid_value")
        return min(self.limits.most_new_tokens, context - n_prompt) if most is None else most
