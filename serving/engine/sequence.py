"""A text that the engine completes: what was asked for, its state, and what its target calls gave.

A *sequence* is one text: prompt and answer in one list of tokens, indexed from 0. The last token is the *root*: it is
committed and has no target KV yet. Tokens before it have target KV, or are *missing* and are read in chunks first::

    tokens     The cat sat on the mat       3 tokens have KV: "on the" are missing, "mat" is the root
    target KV  === === ===

One target call reads some of the missing tokens. A call that reaches the root also verifies the drafts after it, and
commits those that the target agrees with and one token more.
"""

import functools
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from ...errors import ServingError
from ...moa.decoding.sampling import GREEDY, SamplingConfig, Text, cut_answer
from .pool import PooledKV


@dataclass(frozen=True)
class Request:
    """A text to complete."""

    # the prompt, and the part of the answer that a resumed session has committed
    tokens: tuple[int, ...]
    n_prompt: int
    max_new_tokens: int
    sampling: SamplingConfig = GREEDY
    seed: int = 0  # together with the position it decides each sampled token
    drafter: str | None = None  # the loaded drafter for the server's drafts and for contexts
    # whether commits carry the drafter's context of each position that got target KV
    wants_context: bool = False
    n_context: int = 0  # positions whose context the client has already
    # which tokens may follow an answer, [V] bool; None: all
    allowed: Callable[[Rows[int]], np.ndarray] | None = None
    n_logprobs: int | None = (
        # most likely tokens whose log-probabilities commits carry beside those of the new ones
        None
    )
    ignores_eos: bool = False  # whether the answer continues after an end-of-sequence token
    min_new_tokens: int = 0  # before which no such token comes


class Work(Enum):
    """What is to be done with a sequence."""

    IDLE = "idle"  # nothing; its KV stays until the memory is needed
    PLAIN = "plain"  # decode until the answer ends, one token a call
    SPECULATE = "speculate"  # decode until the answer ends, with drafts of the server's own
    VERIFY = "verify"  # one call over given drafts, then nothing


# Log-probabilities of a new token and of the likeliest ones in its place, before the settings of
# sampling.
Logprobs = tuple[float, list[tuple[int, float]]]


@dataclass(frozen=True)
class Commit:
    """What one target call gave one sequence."""

    sequence_id: int
    start: int  # index in the whole text of the first new token
    # new ones, drafts first; none after a call that only read a part of the text
    tokens: tuple[int, ...]
    n_accepted: int  # how many of the tokens were drafts
    finish: str  # why the answer has ended: stop or length; empty while it continues
    call_s: float = 0.0  # seconds of the target call, which other sequences shared
    queue_s: float = 0.0  # seconds that the sequence waited for the call
    context_start: int = 0  # position of the first of the contexts
    context: Tensor | None = None  # [n, W], the drafter's contexts of positions that got target KV
    answers: int = 0  # the tag given with the work
    error: ServingError | None = None  # why the text has failed and was removed
    logprobs: tuple[Logprobs, ...] = ()  # of the tokens, where they were asked for


@dataclass(eq=False)
class Sequence:
    """The state of one text."""

    id: int
    request: Request
    limit: int  # bound on the tokens of the whole text
    kv: PooledKV  # target KV of its first tokens
    on_commit: Callable[[Commit], object]
    ends: frozenset[int]  # the target's end-of-sequence tokens
    tokens: list[int] = field(init=False)
    work: Work = Work.IDLE
    drafts: tuple[int, ...] = ()  # what the next call verifies after the root, in level order
    parents: tuple[int, ...] = ()  # of each draft, an index into the drafts, -1 for the root
    answers: int = 0
    is_held: bool = False
    is_draftable: bool = True  # False once its drafter has failed; it is then decoded plainly
    finish: str = ""
    last_served: int = 0  # number of its latest turn, counted over all sequences; 0 for never
    since_s: float = 0.0  # time.perf_counter() since which it waits for a call
    n_context: int = field(init=False)  # positions whose context was encoded
    # contexts [n, W] of the last of them, not sent yet
    encoded: list[Tensor] = field(default_factory=list)
    # What the drafter sees of the positions after these, [n, E] or [n, K * E] of K watched layers.
    unencoded: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens, self.n_context = list(self.request.tokens), self.request.n_context

    # Tokens and positions

    @functools.cached_property
    def text(self) -> Text:
        """What decides its next token; it holds the list of tokens, and grows with it."""
        request = self.request
        return Text(
            self.tokens, request.sampling, request.seed, request.n_prompt, request.allowed, request.min_new_tokens,
            self.ends,
        )  # fmt: skip

    @property
    def n_cached(self) -> int:
        """Tokens that have target KV."""
        return self.kv.length

    @property
    def n_unencoded(self) -> int:
        """Positions from ``n_context`` on that the target has read."""
        return sum(map(len, self.unencoded))

    @property
    def can_encode(self) -> bool:
        """Whether contexts can be encoded; a text that lost its KV meanwhile is read again first."""
        return 0 < self.n_unencoded <= self.n_cached - self.n_context

    @property
    def n_unsent(self) -> int:
        """Positions before ``n_context`` whose context was not sent yet."""
        return sum(map(len, self.encoded))

    @property
    def n_missing(self) -> int:
        """Tokens before the root that have no target KV."""
        return len(self.tokens) - 1 - self.n_cached

    @property
    def n_remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.limit - len(self.tokens)

    @property
    def is_runnable(self) -> bool:
        """Whether a target call would do something for it now."""
        return self.work is not Work.IDLE and not self.is_held and not self.finish

    def set_work(self, work: Work, drafts: tuple[int, ...], answers: int) -> None:
        """Replace the work by another, for VERIFY with a chain of drafts."""
        self.work = work
        self.drafts = drafts
        self.answers = answers
        self.parents = tuple(range(-1, len(drafts) - 1))
        self.since_s = time.perf_counter()

    def append(self, tokens: list[int]) -> list[int]:
        """Commit tokens up to the end of the answer; returns those that were committed, and sets ``finish``."""
        ends = frozenset[int]() if self.request.ignores_eos else self.ends
        kept, self.finish = cut_answer(tokens, self.n_remaining, ends)
        self.tokens += kept
        return kept

    def commit(
        self, start: int | None = None, tokens: Rows[int] = (), n_accepted: int = 0
    ) -> Commit:
        """Make the commit that reports new tokens from a position on, by default none at the end."""
        start = len(self.tokens) if start is None else start
        return Commit(self.id, start, tuple(tokens), n_accepted, self.finish, answers=self.answers)

    def take_contexts(self, commit: Commit) -> Commit:
        """Add the contexts that were encoded and not sent yet to a commit."""
        if not self.encoded:
            return commit
        first = self.n_context - self.n_unsent
        context = torch.cat(self.encoded)
        self.encoded.clear()
        return replace(commit, context_start=first, context=context)


def contexts_to_host(sequences: Rows[Sequence]) -> None:
    """Copy contexts that were not sent yet to the host, with one wait for the device for all of a drafter."""
    for name in dict.fromkeys(sequence.request.drafter for sequence in sequences):
        own = [sequence for sequence in sequences if sequence.request.drafter == name]
        together = torch.cat([part for sequence in own for part in sequence.encoded]).cpu()
        for sequence, part in zip(own, together.split([one.n_unsent for one in own]), strict=True):
            sequence.encoded = [part]
