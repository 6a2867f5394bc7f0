"""A sequence that the engine completes: its request, its state, and its commits.

A *sequence* holds prompt and answer in one list of tokens, indexed from 0. The last token is the
*root*: it is committed, but has no target KV yet. The tokens before the root either have target KV
or are *missing*. Missing tokens are prefilled first, in chunks::

    tokens     The cat sat on the mat       "on the" are missing, "mat" is the root
    target KV  === === ===

A target call processes some of the missing tokens. If it reaches the root, it also verifies the
drafts that follow the root. It then commits the drafts that the target accepts, and one more token.
"""

import functools
import time
from collections.abc import Callable
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from ...errors import ServingError
from ...moa.decoding.sampling import GREEDY, SamplingConfig, SamplingState, cut_answer
from .pool import PooledKV


@dataclass(frozen=True)
class Request:
    """A request to complete a prompt."""

    # The prompt, followed by the answer so far if a session is resumed.
    tokens: tuple[int, ...]
    n_prompt: int
    max_new_tokens: int
    sampling: SamplingConfig = GREEDY
    # The seed and a token's position determine the random numbers for sampling this token.
    seed: int = 0
    # Name of the server's drafter for this sequence. This drafter makes the server's drafts. If the
    # client drafts, this drafter also encodes the contexts for the client.
    drafter: str | None = None
    # Whether commits contain contexts. The context of a position is the data that a client's
    # drafter needs about this position after the target has processed it.
    wants_context: bool = False
    # The number of positions whose context (data for its drafter) the client already has.
    n_context: int = 0
    # A function that gets the tokens of the answer so far, and returns which tokens may follow. The
    # result is a bool array with one value per token of the vocabulary. If the function is None,
    # all tokens are allowed.
    allowed: Callable[[GenericSequence[int]], np.ndarray] | None = None
    # If this is a number k, commits contain the log-probability of each new token, and the
    # log-probabilities of the k most likely tokens at the same position. None if no
    # log-probabilities are needed.
    n_logprobs: int | None = None
    # Whether the answer continues after an end-of-sequence token.
    ignores_eos: bool = False
    # The answer has at least this many tokens before an end-of-sequence token.
    min_new_tokens: int = 0


class Work(Enum):
    """What the engine does for a sequence."""

    # Do nothing. The KV stays until another sequence needs its memory.
    IDLE = "idle"
    # Decode until the answer ends, one token per call.
    PLAIN = "plain"
    # Decode until the answer ends, with drafts that the server makes.
    SPECULATE = "speculate"
    # Verify the client's drafts in one target call, then become idle.
    VERIFY = "verify"


# The log-probability of a new token, and a list of the most likely tokens at its position, each
# with its log-probability. All log-probabilities are computed before temperature, top-k and top-p.
Logprobs = tuple[float, list[tuple[int, float]]]


@dataclass(frozen=True)
class Commit:
    """The result of one target call for one sequence."""

    sequence_id: int
    # Index of the first new token in the sequence.
    start: int
    # The new tokens, drafts first. Empty after a target call that only prefilled.
    tokens: tuple[int, ...]
    # The number of new tokens that were drafts.
    n_accepted: int
    # Why the answer ended, "stop" or "length". Empty while it continues.
    finish: str
    # Duration in seconds of the target call, which may have served other sequences, too.
    call_s: float = 0.0
    # Seconds that the sequence waited for this target call to start.
    queue_s: float = 0.0
    # Position to which the first row of ``context`` belongs.
    context_start: int = 0
    # The contexts (data for the client's drafter) of consecutive positions that the target has
    # processed, one row of numbers per position. None if the commit has no contexts.
    context: Tensor | None = None
    # The tag that was passed to ``set_work`` together with the work that led to this commit. 0 if
    # there was no tag.
    answers: int = 0
    # The error with which the sequence failed and was removed. None if it did not fail.
    error: ServingError | None = None
    # Log-probabilities of each new token. Empty if they were not requested.
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(eq=False)
class Sequence:
    """The state of one sequence."""

    id: int
    request: Request
    # Upper bound of the number of tokens, prompt included.
    limit: int
    # The target's KV of the first ``n_cached`` tokens.
    kv: PooledKV
    on_commit: Callable[[Commit], object]
    # The target's end-of-sequence tokens.
    ends: frozenset[int]
    tokens: list[int] = field(init=False)
    work: Work = Work.IDLE
    # The drafts that the next target call verifies. They follow the root, which is the last
    # committed token. If they form a tree, all drafts of one level come before the drafts of the
    # next level.
    drafts: tuple[int, ...] = ()
    # For each draft, the index of its parent among the drafts. -1 stands for the root.
    parents: tuple[int, ...] = ()
    # The tag of the present work, which all commits of this work carry.
    answers: int = 0
    # Whether the sequence is paused because the client reads slowly.
    is_held: bool = False
    # Whether the server may draft for the sequence. False after the drafter failed.
    is_draftable: bool = True
    # Why the answer ended, "stop" or "length". Empty while it continues.
    finish: str = ""
    # The scheduler counts how often it has scheduled any sequence. This is the count when this
    # sequence was last scheduled, or 0 if it was never scheduled.
    last_served: int = 0
    # ``time.perf_counter()`` at which the sequence began to wait for its next target call.
    since_s: float = 0.0
    # The number of positions whose context (data for the client's drafter) was encoded.
    n_context: int = field(init=False)
    # Contexts that are encoded but not sent yet, one row of numbers per position. The last row
    # belongs to position ``n_context - 1``.
    encoded: list[Tensor] = field(default_factory=list)
    # Hidden states of the target for the positions from ``n_context`` on. The drafter later encodes
    # these hidden states to contexts (data for the client's drafter). Each tensor has one row per
    # position. The row is the last hidden state, or the concatenated outputs of the layers that the
    # drafter reads.
    unencoded: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens, self.n_context = list(self.request.tokens), self.request.n_context

    # The methods below concern tokens and positions.

    @functools.cached_property
    def sampling_state(self) -> SamplingState:
        """The sampling state: everything that determines the next token, except the logits.

        The state contains the sequence's own list of tokens, not a copy. So it includes tokens that
        are added later.
        """
        request = self.request
        return SamplingState(
            self.tokens,
            request.sampling,
            request.seed,
            request.n_prompt,
            request.allowed,
            request.min_new_tokens,
            self.ends,
        )

    @property
    def n_cached(self) -> int:
        """The number of tokens that have target KV."""
        return self.kv.length

    @property
    def n_unencoded(self) -> int:
        """The number of positions that have a hidden state, but no encoded context yet."""
        return sum(map(len, self.unencoded))

    @property
    def can_encode(self) -> bool:
        """Whether there are contexts to encode, and the KV of their positions exists.

        The drafter may need this KV. After an eviction, it does not exist until the sequence has
        been prefilled again.
        """
        return 0 < self.n_unencoded <= self.n_cached - self.n_context

    @property
    def n_unsent(self) -> int:
        """The number of contexts (data for the client's drafter) that are encoded but not sent."""
        return sum(map(len, self.encoded))

    @property
    def n_missing(self) -> int:
        """The number of tokens before the root that have no target KV."""
        return len(self.tokens) - 1 - self.n_cached

    @property
    def n_remaining(self) -> int:
        """The number of tokens that may still be committed."""
        return self.limit - len(self.tokens)

    @property
    def is_runnable(self) -> bool:
        """Whether the sequence can take part in a target call now."""
        return self.work is not Work.IDLE and not self.is_held and not self.finish

    def set_work(self, work: Work, drafts: tuple[int, ...], answers: int) -> None:
        """Replace the present work.

        Args:
            work: the new work.
            drafts: for VERIFY, a chain of drafts after the root, which is the last committed token.
            answers: a tag. All commits of this work carry it, so that the caller can recognise
                them.
        """
        self.work = work
        self.drafts = drafts
        self.answers = answers
        self.parents = tuple(range(-1, len(drafts) - 1))
        self.since_s = time.perf_counter()

    def append(self, tokens: list[int]) -> list[int]:
        """Append tokens up to the end of the answer, and set ``finish`` if the end is reached.

        Returns:
            The tokens that were appended.
        """
        ends = frozenset[int]() if self.request.ignores_eos else self.ends
        appended, self.finish = cut_answer(tokens, self.n_remaining, ends)
        self.tokens += appended
        return appended

    def commit(
        self, start: int | None = None, tokens: GenericSequence[int] = (), n_accepted: int = 0
    ) -> Commit:
        """Create the commit of new tokens.

        Args:
            start: index of the first new token; by default the present number of tokens.
            tokens: the new tokens.
            n_accepted: the number of new tokens that were drafts.
        """
        start = len(self.tokens) if start is None else start
        return Commit(self.id, start, tuple(tokens), n_accepted, self.finish, answers=self.answers)

    def take_contexts(self, commit: Commit) -> Commit:
        """Return a copy of a commit that also has all encoded contexts that were not sent yet.

        A context is the data that the client's drafter needs about one position.
        """
        if not self.encoded:
            return commit
        first = self.n_context - self.n_unsent
        context = torch.cat(self.encoded)
        self.encoded.clear()
        return replace(commit, context_start=first, context=context)


def contexts_to_host(sequences: GenericSequence[Sequence]) -> None:
    """Copy unsent contexts (data for clients' drafters) to the host, with one GPU sync per drafter.

    Args:
        sequences: sequences with unsent contexts.
    """
    for name in dict.fromkeys(sequence.request.drafter for sequence in sequences):
        members = [sequence for sequence in sequences if sequence.request.drafter == name]
        together = torch.cat(
            [contexts for sequence in members for contexts in sequence.encoded]
        ).cpu()
        for sequence, contexts in zip(
            members, together.split([member.n_unsent for member in members]), strict=True
        ):
            sequence.encoded = [contexts]
