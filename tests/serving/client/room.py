"""A real server with a tiny target, and drafters that are trained to be often right about it."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from moa_data.moa.decoding.sampling import GREEDY, SamplingConfig, choose
from moa_data.moa.targets.live import Target
from moa_data.serving.client.client import Answer, DraftingClient, Timeouts
from moa_data.serving.client.drafting import DraftingModel
from moa_data.serving.client.session import Event
from moa_data.tests.kit.drafters import build, frozen_for, teach
from moa_data.tests.kit.models import build_model, random_prompts
from moa_data.tests.kit.proxy import Proxy
from moa_data.tests.kit.serving import never_ending

from .world import Display

PROMPTS = random_prompts(7, 7)
HASTY = Timeouts(connect_s=20.0, silence_s=0.2, dead_s=1.0)
"""Waits that are short enough for a test, and long enough for a machine that is busy."""
DRAFTERS: dict[str, dict[str, Any]] = {
    "moa": {}, "moa with 1 layer": {"target_layer_inference": 1},
    "moa with 2 layers": {"target_layer_inference": 2},
    "eagle": {}, "independent": {},
}  # fmt: skip


@cache
def target() -> Target:
    """Return a target that never ends an answer."""
    return never_ending(build_model(num_hidden_layers=3))


@cache
def model(name: str = "moa") -> DraftingModel:
    """Return a trained drafter in the form that a client loads."""
    drafter = build(name.split()[0], target().model, **DRAFTERS[name])
    n_steps = 40 if name == "eagle" else 20
    drafter = teach(drafter, target(), PROMPTS[:4], n_steps)
    return DraftingModel(drafter, frozen_for(drafter, target().model), None, frozenset())


def plain(
    tokens: Sequence[int], n_new: int, sampling: SamplingConfig = GREEDY, seed: int = 0
) -> list[int]:
    """Return the target's own continuation, with one token per call."""
    return list(_plain(tuple(tokens), n_new, sampling, seed))


@cache
def _plain(tokens: tuple[int, ...], n_new: int, sampling: SamplingConfig, seed: int) -> list[int]:
    text = list(tokens)
    for _ in range(n_new):
        hidden = target().forward(torch.tensor([text]), target().new_cache())
        text.append(choose(target().logits(hidden[0, -1]), text, sampling, seed, len(text)))
    return text[len(tokens) :]


class Watched:
    """A client whose events are checked as they come: none is lost, none comes twice."""

    def __init__(self, client: DraftingClient) -> None:
        self.client, self.display = client, Display()
        self.events: list[Event] = []

    def note(self, event: Event) -> None:
        self.events.append(event)
        self.display.show(event)

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    def complete(self, tokens: Sequence[int], n_new: int, **settings: Any) -> Answer:
        """Complete a sequence, and compare the displayed tokens with the answer."""
        self.display, self.events = Display(), []
        answer = self.client.complete(tokens, max_new_tokens=n_new, on_event=self.note, **settings)
        assert self.display.tokens == list(answer.tokens)
        assert self.display.n_verified == len(answer.tokens)
        assert self.display.finish == answer.finish
        return answer


@contextmanager
def restored(proxy: Proxy) -> Iterator[None]:
    """Restore the network shortly after each cut, from another thread."""
    is_over = threading.Event()

    def restore() -> None:
        while not is_over.is_set():
            if proxy.is_cut.wait(0.02):
                time.sleep(0.02)
                proxy.restore()

    thread = threading.Thread(target=restore)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
