"""Builds tiny targets, and serves them with a real server on a free port."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from moa_data.moa.decoding.loop import plain_generate
from moa_data.moa.targets.chat_tokens import prompt_tokens
from moa_data.moa.targets.live import Target
from moa_data.serving.access import BearerTokens
from moa_data.serving.config import ServeConfig
from moa_data.serving.engine.engine import Engine
from moa_data.serving.grpc import Identities
from moa_data.serving.http import Service
from moa_data.serving.run import ServerRun

from .models import build_text_model, build_tokenizer
from .templates import LLAMA3_TEMPLATE

MODEL = "tiny"


def never_ending(*parts: Any) -> Target:
    """Return a target, of a model and optionally a tokenizer, that never ends an answer itself."""
    target = Target(*parts)
    target.eos_token_ids = frozenset()
    return target


def text_target() -> Target:
    """Return a random target with a tokenizer of 400 entries. It writes arbitrary text."""
    return never_ending(build_text_model(num_hidden_layers=2), build_tokenizer(LLAMA3_TEMPLATE))


def plain_text(target: Target, prompt: str | list[int], n_new: int) -> str:
    """Return the answer of plain greedy decoding, to a user's message or after a list of tokens."""
    if isinstance(prompt, str):
        prompt = prompt_tokens(target.template, [{"role": "user", "content": prompt}])
    text: str = target.tokenizer.decode(
        plain_generate(target, prompt, max_new_tokens=n_new).tokens, skip_special_tokens=True
    )
    return text.rstrip("\ufffd")  # the server does not send an incomplete last character


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


class LiveServer:
    """A server in a thread of this process.

    ``address`` looks like ``http://127.0.0.1:41234``. Settings have the names of the command's.
    """

    address: str
    grpc_address: str  # only set with identities

    def __init__(
        self,
        target: Target,
        drafters: dict[str, Any] | None = None,
        identities: Identities | None = None,
        tokens: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        config = ServeConfig.of(**{"model": MODEL, "port": 0, "grace_s": 10} | settings)
        self.engine, self._identities = Engine(target, drafters, config.engine), identities
        self.service = Service(self.engine, config, BearerTokens(tokens))
        self._is_ready, self._thread = (
            threading.Event(),
            threading.Thread(target=self._main, daemon=True),
        )
        self._call: Callable[[Callable[[], None]], Any]

    def _main(self) -> None:
        async def serve() -> None:
            loop = asyncio.get_running_loop()
            self.run = ServerRun(self.service, self._ready, self._identities)
            self._call = loop.call_soon_threadsafe
            await self.run.serve()

        torch.set_num_threads(1)
        asyncio.run(serve())

    def _ready(self, address: str, grpc_address: Any) -> None:
        self.address, self.grpc_address = address, grpc_address
        self._is_ready.set()

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the HTTP server."""
        host, port = self.address.partition("://")[2].split(":")
        return host, int(port)

    @property
    def thread_id(self) -> int | None:
        """Identifier of the thread in which the server answers and logs."""
        return self._thread.ident

    def wait_until_free(self) -> None:
        """Wait until the engine holds no open sequence."""
        wait_for(lambda: not self.engine.snapshot().n_open)

    def end(self) -> None:
        """Tell the server to drain. A second call aborts what is still running."""
        self._call(self.run.end)

    def join(self) -> None:
        """Wait for the server's end."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server does not end"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_ready.wait(60), "the server does not start"
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._thread.is_alive():
            self.end()
        self.join()
