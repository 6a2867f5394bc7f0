"""A text that the engine completes: what was asked for, how far it is, and what its target calls gave.

A *sequence* is one text: prompt and answer in one list of tokens, indexed from 0. The last token is the *root*: it is
committed and has no target KV yet. What is before it has target KV, or is *missing* and is read in chunks first::

    tokens     The cat sat on the mat       length of KV 3: "on the" are missing, "mat" is the root
    target KV  === === ===

One target call reads some of the missing tokens; a call that reaches the root also verifies drafts behind it, and
commits the drafts that are the target's own tokens and one token more.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from ...errors import ServingError
from ...moa.decoding.sampling import GREEDY, SamplingConfig
from .kv import SequenceKV


@dataclass(frozen=True)
class Request:
    """A text to complete.

    Attributes:
        tokens: the prompt, and what of the answer is already committed where a session is taken up again.
        n_prompt: tokens of the prompt.
        max_new_tokens: bound on the tokens of the answer.
        seed: with the position it decides each sampled token.
        deadline_s: ``time.monotonic()`` at which the answer ends; None for no end.
        drafter: name of the loaded drafter for drafts of the server and for contexts; None for neither.
        wants_context: the drafter's context of each position that got target KV is told, behind the tokens.
        n_context: positions whose context is known already; those of later ones are given.
    """

    tokens: tuple[int, ...]
    n_prompt: int
    max_new_tokens: int
    sampling: SamplingConfig = GREEDY
    seed: int = 0
    deadline_s: float | None = None
    drafter: str | None = None
    wants_context: bool = False
    n_context: int = 0


class Work(Enum):
    """What is to be done with a sequence."""

    IDLE = "idle"
    """Nothing; its KV stays until the memory is wanted."""
    PLAIN = "plain"
    """Decode until the answer ends, one token a call."""
    SPECULATE = "speculate"
    """Decode until the answer ends, with drafts of the server's own."""
    VERIFY = "verify"
    """One call over given drafts, then nothing."""


@dataclass(frozen=True)
class Commit:
    """What one target call gave one sequence.

    Attributes:
        start: index in the whole text of the first new token.
        tokens: the new tokens, drafts first; none after a call that only read a part of the text.
        n_accepted: how many of the tokens were drafts.
        finish: why the answer has ended: ``stop``, ``length`` or ``deadline``; empty while it goes on.
        call_s: seconds of the target call, which other sequences shared.
        draft_s: seconds of drafting for it, shared likewise.
        queue_s: seconds that the sequence waited for the call.
        context_start: position of the first of the contexts.
        context: [n, W], the drafter's contexts of positions that got target KV; None for none.
        answers: the tag given with the work.
    """

    sequence_id: int
    start: int
    tokens: tuple[int, ...]
    n_accepted: int
    finish: str
    call_s: float = 0.0
    draft_s: float = 0.0
    queue_s: float = 0.0
    context_start: int = 0
    context: Tensor | None = None
    answers: int = 0


@dataclass(eq=False)
class Sequence:
    """The state of one text.

    Attributes:
        limit: bound on the tokens of the whole text.
        drafts: what the next call verifies behind the root, in level order.
        parents: of each draft, an index into the drafts, -1 for the root.
        n_context: positions whose context was encoded.
        encoded: contexts [n, W] of the last of them, which were not given yet.
        unencoded: what the drafter sees of the positions behind them, [n, E] or [n, K * E] of K layers that it watches,
            whose context has still to be encoded.
        last_served: counts over all sequences how often one was served, when this one was last; 0 for never.
        since_s: ``time.perf_counter()`` since which it waits for a call.
        is_draftable: False once its drafter has failed; it is then decoded plainly.
    """

    id: int
    request: Request
    limit: int
    kv: SequenceKV
    on_commit: Callable[[Commit], None]
    on_error: Callable[[ServingError], None]
    tokens: list[int] = field(init=False)
    n_context: int = field(init=False)
    work: Work = Work.IDLE
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    answers: int = 0
    is_held: bool = False
    is_draftable: bool = True
    finish: str = ""
    last_served: int = 0
    since_s: float = 0.0

    encoded: list[Tensor] = field(default_factory=list)
    unencoded: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)
        self.n_context = self.request.n_context

    @property
    def n_unencoded(self) -> int:
        """Positions behind ``n_context`` that the target has read."""
        return sum(map(len, self.unencoded))

    @property
    def n_untold(self) -> int:
        """Positions before ``n_context`` whose context was not given yet."""
        return sum(map(len, self.encoded))

    @property
    def n_missing(self) -> int:
        """Tokens before the root that have no target KV."""
        return len(self.tokens) - 1 - self.kv.length

    @property
    def n_remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.limit - len(self.tokens)

    @property
    def is_runnable(self) -> bool:
        """Whether a target call would do something for it now."""
        return self.work is not Work.IDLE and not self.is_held and not self.finish

    def set_work(self, work: Work, drafts: tuple[int, ...], parents: tuple[int, ...], answers: int) -> None:
        """Take up other work, in place of any that was not done yet."""
        self.work, self.drafts, self.answers = work, drafts, answers
        self.parents = parents or tuple(range(-1, len(drafts) - 1))
        self.since_s = time.perf_counter()

    def end_round(self) -> None:
        """Forget the drafts that were verified; a VERIFY is done then."""
        self.drafts = self.parents = ()
        if self.work is Work.VERIFY:
            self.work = Work.IDLE

    def append(self, tokens: list[int], eos_token_ids: frozenset[int]) -> list[int]:
        """Commit tokens up to the end of the answer; returns those that were committed, and sets ``finish``."""
        kept = tokens[: self.n_remaining]
        for index, token in enumerate(kept):
            if token in eos_token_ids:
                kept, self.finish = kept[: index + 1], "stop"
                break
        self.tokens += kept
        if not self.finish and self.n_remaining == 0:
            self.finish = "length"
        return kept
