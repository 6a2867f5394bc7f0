"""Continuous batching: sequences of any length come and go between target calls, and each call serves many of them.

``step`` is the only verb that computes::

    schedule    who shares the call, and how much of its text each reads       scheduler
    draft       the server's own drafts                                        speculation
    run         one target call over all                                       runner
    accept      drafts that are the target's own choices, and one token more   moa.decoding.coupling
    commit      texts grow; whoever gave the sequence is told

Each token is a function of the target's logits, the settings, the seed and its position in the text. So a text is the
same whatever shares its calls, whatever is drafted for it, and after whatever interruptions.

The other verbs may be called from any thread, also from the functions that are called with commits: they take effect at
the next step.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import Overloaded, ServingError
from ...moa.decoding.coupling import Text, accept_chosen
from ...moa.decoding.policy import AUTO_SHAPE
from ...moa.decoding.sampling import accept_argmax
from ...moa.decoding.tree import Shape, StaticTree
from ...moa.drafters.base import Drafter
from ...moa.targets.live import Target
from ...text import first_line
from .admission import Admission, EngineSettings
from .kv import BLOCK_TOKENS, KVPool
from .runner import Output, Part, Runner
from .scheduler import Scheduler, Share
from .sequence import Commit, Request, Sequence, Work
from .speculation import Seen, Speculation

_LOG = logging.getLogger(__name__)
_CONTEXTS_AT_ONCE = 16
"""Positions whose contexts are told together in a run. A client that loses its network lacks those of fewer."""

OnCommit = Callable[[Commit], None]
OnError = Callable[[ServingError], None]


@dataclass
class Counts:
    """What an engine has done and holds.

    Attributes:
        n_open: sequences that were added and neither removed nor failed.
        n_working: those with work that is not finished.
        n_calls: target calls.
        n_read: tokens that were read by the target, drafts included.
        n_committed: new tokens.
        n_rounds: times that a sequence got new tokens; n_committed / n_rounds is the acceptance length.
        n_drafted: drafts that were verified.
        n_accepted: those that were committed.
        n_evicted: times that a sequence lost its KV.
        n_failed: sequences that ended with an error.
        call_s: seconds of all target calls.
        draft_s: seconds of the server's own drafting.
        kv_used: positions that are reserved, of kv_tokens.
    """

    n_open: int = 0
    n_working: int = 0
    n_calls: int = 0
    n_read: int = 0
    n_committed: int = 0
    n_rounds: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_evicted: int = 0
    n_failed: int = 0
    call_s: float = 0.0
    draft_s: float = 0.0
    kv_used: int = 0
    kv_tokens: int = 0

    def add_round(self, n_drafts: int, n_accepted: int, n_committed: int) -> None:
        """Count what a call gave one sequence."""
        self.n_rounds += n_committed > 0
        self.n_drafted += n_drafts
        self.n_accepted += n_accepted
        self.n_committed += n_committed


@dataclass(frozen=True)
class _Served:
    """What a call gave one sequence."""

    share: Share
    output: Output
    kept: list[int]
    """Which tokens of its part got KV, in order."""
    n_drafts: int
    commit: Commit


class Engine:
    """Completes texts with one target.

    Args:
        drafters: name -> loaded drafter of this target.

    Raises:
        DrafterError: drafter and target differ in dtype.
    """

    def __init__(
        self, target: Target, drafters: Mapping[str, Drafter] | None = None, settings: EngineSettings | None = None
    ) -> None:
        self.target, self.settings = target, settings or EngineSettings()
        self.drafters, sizes = dict(drafters or {}), target.sizes
        own_drafts = _n_nodes(self.settings.drafts or AUTO_SHAPE)
        most_drafts = max(own_drafts, self.settings.most_drafts)
        self._admission = Admission(target, self.drafters, self.settings, most_drafts)
        self._pool = KVPool(
            self.settings.kv_tokens, sizes["n_layers"], sizes["n_kv_heads"], sizes["head_dim"], target.model.dtype,
            target.device,
        )  # fmt: skip
        self._scheduler = Scheduler(self._pool, self.settings.most_sequences, self.settings.prefill_chunk, own_drafts)
        self._runner = Runner(target, self.settings.target_ms / 1000)
        self._speculations = {
            name: Speculation(target, drafter, self.settings.drafts) for name, drafter in self.drafters.items()
        }
        self._sequences: dict[int, Sequence] = {}
        self._mail: deque[Callable[[], None]] = deque()  # what other threads want done at the next step
        self._ids, self._counts, self._lock = itertools.count(1), Counts(), threading.Lock()

    @property
    def most_positions(self) -> int:
        """Tokens that a text can have, prompt included."""
        return self._admission.most_positions

    # Verbs for any thread

    def add(self, request: Request, on_commit: OnCommit, on_error: OnError) -> int:
        """Take up a text, which does nothing until it gets work.

        Args:
            on_commit: called from the thread that steps, after each target call that served the text.
            on_error: called from there when the text failed; it is removed then.

        Returns:
            The sequence's id.

        Raises:
            RequestInvalid: the request cannot be served by this engine.
            Overloaded: too many sequences are open.
        """
        self._admission.check(request)
        most = self.settings.most_sequences + self.settings.most_waiting
        with self._lock:
            if self._counts.n_open >= most:
                raise Overloaded(f"{most} texts are open, which is the most; try again later.")
            self._counts.n_open += 1
        limit = self._admission.limit(request)
        sequence = Sequence(next(self._ids), request, limit, self._pool.new(), on_commit, on_error)
        if not self.target.eos_token_ids.isdisjoint(request.tokens[request.n_prompt :]):
            sequence.finish = "stop"
        elif len(request.tokens) == limit:
            sequence.finish = "length"
        self._mail.append(lambda: self._sequences.update({sequence.id: sequence}))
        return sequence.id

    def set_work(
        self,
        sequence_id: int,
        work: Work,
        drafts: tuple[int, ...] = (),
        parents: tuple[int, ...] = (),
        answers: int = 0,
    ) -> None:
        """Say what is to be done with a sequence from the next step on, in place of what was said before.

        A sequence whose answer has ended, and one that becomes idle with a tag, answers with a commit without tokens.
        Without a drafter SPECULATE is PLAIN.

        Args:
            drafts: for VERIFY, tokens behind the root, in level order; none for a plain step.
            parents: of each draft, an index into them, -1 for the root; none for a chain.
            answers: a tag that the commits of this work carry.

        Raises:
            RequestInvalid: the drafts make no tree of tokens.
        """
        self._admission.check_drafts(drafts, parents)

        def apply(sequence: Sequence) -> None:
            sequence.set_work(work, drafts, parents, answers)
            if sequence.finish or (work is Work.IDLE and answers):
                self._tell(sequence, _without_tokens(sequence))

        self._post(sequence_id, apply)

    def hold(self, sequence_id: int, is_held: bool) -> None:
        """Stop or go on serving a sequence, whose reader is slow."""

        def apply(sequence: Sequence) -> None:
            sequence.is_held, sequence.since_s = is_held, time.perf_counter()

        self._post(sequence_id, apply)

    def remove(self, sequence_id: int) -> None:
        """Forget a sequence. The commit of a call that runs meanwhile may still be given."""
        self._post(sequence_id, self._remove)

    def snapshot(self) -> Counts:
        """Copy the counts."""
        with self._lock:
            n_working = sum(sequence.is_runnable for sequence in tuple(self._sequences.values()))
            used, most = self._pool.n_used * BLOCK_TOKENS, self._pool.n_blocks * BLOCK_TOKENS
            return replace(self._counts, n_working=n_working, kv_used=used, kv_tokens=most)

    # The thread that steps

    @torch.inference_mode()
    def step(self) -> bool:
        """Make one target call for the sequences whose turn it is; returns False if there was nothing to do."""
        self._take_mail()
        self._end_late()
        plan = self._scheduler.schedule(self._sequences.values())
        for sequence in plan.evicted:
            self._counts.n_evicted += 1
            self._forget_drafts(sequence)
        if not plan.shares:
            return False
        began = time.perf_counter()
        groups = self._draft(plan.shares)
        drafted = time.perf_counter()
        served = [self._accept(share, output) for share, output in self._run(plan.shares)]
        done = time.perf_counter()
        self._counts.n_calls += 1
        self._counts.draft_s += drafted - began
        self._counts.call_s += done - drafted
        succeeded = [one for one in served if one is not None]
        self._teach(groups, succeeded, done - began)
        for one in succeeded:
            sequence = one.share.sequence
            draft_s = drafted - began if sequence.work is Work.SPECULATE else 0.0
            queue_s, sequence.since_s = began - sequence.since_s, done
            self._tell(sequence, replace(one.commit, call_s=done - drafted, draft_s=draft_s, queue_s=queue_s))
        self._tell_contexts([one.share.sequence for one in succeeded])
        return True

    def seconds_to_deadline(self) -> float | None:
        """Seconds until the next answer has to end; None where none has to."""
        open_ends = [s.request.deadline_s for s in self._sequences.values() if not s.finish]
        deadlines = [deadline for deadline in open_ends if deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def fail_all(self, error: Exception) -> None:
        """End all sequences with an error, after a failure that is no single sequence's."""
        for sequence in list(self._sequences.values()):
            self._fail(sequence, error)

    def _post(self, sequence_id: int, apply: Callable[[Sequence], None]) -> None:
        def deliver() -> None:
            # One that failed meanwhile is gone, and its owner was told.
            if (sequence := self._sequences.get(sequence_id)) is not None:
                apply(sequence)

        self._mail.append(deliver)

    def _take_mail(self) -> None:
        while self._mail:
            self._mail.popleft()()

    def _end_late(self) -> None:
        now = time.monotonic()
        for sequence in list(self._sequences.values()):
            deadline = sequence.request.deadline_s
            if deadline is not None and now >= deadline and not sequence.finish:
                sequence.finish = "deadline"
                self._tell(sequence, _without_tokens(sequence))

    def _draft(self, shares: list[Share]) -> dict[str, list[Sequence]]:
        """Make the server's own drafts; returns by drafter the sequences that could draft."""
        groups: dict[str, list[Sequence]] = {name: [] for name in self._speculations}
        for sequence in (share.sequence for share in shares):
            name = sequence.request.drafter
            if name is None or not sequence.is_draftable:
                continue
            if sequence.kv.length == 0:
                self._speculations[name].begin(sequence)
            elif sequence.work is Work.SPECULATE and sequence.n_missing == 0:
                groups[name].append(sequence)
        for name, speculation in self._speculations.items():
            try:
                speculation.gather(groups[name])
                if groups[name]:
                    speculation.draft(groups[name])
            except Exception:  # noqa: BLE001 - drafts are no condition of a text: it goes on without, and is the same
                _LOG.exception("drafting with %s failed; %d texts go on without drafts", name, len(groups[name]))
                self._abandon_drafts(name, groups.pop(name))
        return {name: group for name, group in groups.items() if group}

    def _run(self, shares: list[Share]) -> list[tuple[Share, Output]]:
        """Call the target; if that fails, once for each sequence, so that only the faulty ones end."""
        parts = []
        for share in shares:
            sequence, start = share.sequence, share.sequence.kv.length
            known = sequence.tokens[start : start + share.n_known]
            drafts, parents = (sequence.drafts, sequence.parents) if share.has_root else ((), ())
            parts.append(Part(sequence.kv, [*known, *drafts], parents, share.has_root))
        try:
            outputs = self._runner.run(parts, self._watched_layers(shares))
        except Exception as error:  # noqa: BLE001 - whatever it is, other texts must go on
            if len(shares) == 1:
                self._fail(shares[0].sequence, error)
                return []
            _LOG.warning("a call over %d texts failed, each goes alone: %s", len(shares), first_line(error))
            return [result for share in shares for result in self._run([share])]
        self._counts.n_read += sum(len(part.tokens) for part in parts)
        return list(zip(shares, outputs, strict=True))

    def _accept(self, share: Share, output: Output) -> _Served | None:
        """Accept drafts, and commit tokens and KV; None where that failed."""
        sequence, n_known = share.sequence, share.n_known
        try:
            first, start = len(sequence.tokens), sequence.kv.length
            accepted: list[int] = []
            new: list[int] = []
            n_drafts = len(sequence.drafts) if share.has_root else 0
            if share.has_root:
                accepted, bonus = _accepted(sequence, output)
                new = sequence.append([*(sequence.drafts[node] for node in accepted), bonus], self.target.eos_token_ids)
                sequence.end_round()
            n_accepted = min(len(accepted), len(new))
            self._counts.add_round(n_drafts, n_accepted, len(new))
            kept = [*range(n_known), *(n_known + node for node in accepted)]
            sequence.kv.commit(kept)
            commit = Commit(sequence.id, first, tuple(new), n_accepted, sequence.finish, answers=sequence.answers)
            if sequence.request.wants_context:
                first = max(start, sequence.n_context + sequence.n_unencoded)
                if new_positions := kept[first - start :]:
                    assert sequence.request.drafter is not None
                    states = _states(output, self.drafters[sequence.request.drafter])
                    sequence.unencoded.append(states[new_positions])
                if commit.finish:  # nothing comes behind it
                    if self._has_context(sequence):
                        self._encode_contexts([sequence])
                    commit = _with_context(commit, sequence)
            return _Served(share, output, kept, n_drafts, commit)
        except Exception as error:  # noqa: BLE001 - as in _run
            self._fail(sequence, error)
            return None

    def _has_context(self, sequence: Sequence) -> bool:
        """Whether contexts can be encoded; one that lost its KV meanwhile is read again first."""
        n_unencoded = sequence.n_unencoded
        return n_unencoded > 0 and sequence.kv.length >= sequence.n_context + n_unencoded

    def _encode_contexts(self, sequences: Rows[Sequence]) -> None:
        """Encode what the target has read for the drafter of these sequences; all have some."""
        name = sequences[0].request.drafter
        assert name is not None
        drafter, speculation = self.drafters[name], self._speculations[name]
        counts = [sequence.n_unencoded for sequence in sequences]
        hidden = torch.cat([part for sequence in sequences for part in sequence.unencoded])  # [n, E]
        spans = [(sequence, sequence.n_context, n) for sequence, n in zip(sequences, counts, strict=True)]
        positions = torch.cat([torch.arange(first, first + n, device=hidden.device) for _, first, n in spans])
        kv = None
        if drafter.context_needs_kv:
            kv = torch.cat([sequence.kv.packed(first, n) for sequence, first, n in spans])
        contexts = drafter.encode_context(speculation.frozen, hidden, kv, positions).split(counts)
        speculation.reuse_contexts(sequences, contexts)
        for (sequence, first, n), context in zip(spans, contexts, strict=True):
            sequence.n_context = first + n
            sequence.unencoded.clear()
            sequence.encoded.append(context)

    def _tell_contexts(self, sequences: Rows[Sequence]) -> None:
        """Tell contexts behind the tokens that they belong to.

        While the server decodes by itself they are told many at a time, and encoded so, which takes as long as a few;
        where the server's drafter needs the same, at once for both. Those of the prompt are told at once: without them
        the client could not go on alone.
        """
        due: dict[str, list[Sequence]] = {}
        for sequence in sequences:
            name, least = sequence.request.drafter, _contexts_at_once(sequence)
            if name is None or sequence.finish or not self._has_context(sequence):
                continue
            is_reused = sequence.work is Work.SPECULATE and self._speculations[name].reuses_contexts
            if is_reused or sequence.n_unencoded >= least:
                due.setdefault(name, []).append(sequence)
        for group in due.values():
            try:
                self._encode_contexts(group)
            except Exception as error:  # noqa: BLE001 - as in _run
                for sequence in group:
                    self._fail(sequence, error)
        for sequence in sequences:
            is_open = not sequence.finish and sequence.id in self._sequences
            if is_open and sequence.n_untold >= _contexts_at_once(sequence):
                self._tell(sequence, replace(_with_context(_without_tokens(sequence), sequence), answers=0))

    def _teach(self, groups: Mapping[str, list[Sequence]], served: list[_Served], round_s: float) -> None:
        """Hand the call's results to the drafters, and to the policies of those that drafted."""
        # Reading a chunk of a prompt takes longer than any round, and says nothing of drafts.
        is_comparable = all(one.share.n_known == 1 for one in served)
        for name, speculation in self._speculations.items():
            own = [one for one in served if one.share.sequence.request.drafter == name]
            own = [one for one in own if one.share.sequence.is_draftable]
            group = {sequence.id for sequence in groups.get(name, ())}
            try:
                drafter = speculation.drafter
                speculation.observe([Seen(one.share.sequence, _states(one.output, drafter), one.kept) for one in own])
            except Exception:  # noqa: BLE001 - as in _draft
                _LOG.exception("the drafter %s failed; %d texts go on without drafts", name, len(own))
                self._abandon_drafts(name, [one.share.sequence for one in own])
                continue
            rounds = [one for one in own if one.share.sequence.id in group]
            if is_comparable and rounds:
                n_drafts = sum(one.n_drafts for one in rounds)
                n_committed = sum(len(one.commit.tokens) for one in rounds)
                speculation.judge(len(rounds), n_drafts, n_committed, round_s)

    def _watched_layers(self, shares: list[Share]) -> list[int]:
        names = {share.sequence.request.drafter for share in shares}
        return sorted({layer for name in names if name for layer in self.drafters[name].observed_layers})

    def _tell(self, sequence: Sequence, commit: Commit) -> None:
        if commit.finish:
            self._release(sequence)
        try:
            sequence.on_commit(commit)
        except Exception as error:  # noqa: BLE001 - a listener's fault is its own
            self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """Remove a sequence and tell its owner."""
        _LOG.error("text %d failed: %s", sequence.id, first_line(error), exc_info=error)
        self._counts.n_failed += 1
        self._remove(sequence)
        try:
            sequence.on_error(ServingError(f"this text failed on the server ({first_line(error)}); ask for it again."))
        except Exception:  # noqa: BLE001 - likewise
            _LOG.exception("the owner of text %d failed too", sequence.id)

    def _remove(self, sequence: Sequence) -> None:
        if self._sequences.pop(sequence.id, None) is not None:
            self._release(sequence)
            with self._lock:
                self._counts.n_open -= 1

    def _release(self, sequence: Sequence) -> None:
        """Free what a text holds whose answer has ended."""
        self._pool.evict(sequence.kv)
        self._forget_drafts(sequence)

    def _forget_drafts(self, sequence: Sequence) -> None:
        if sequence.request.drafter is not None:
            self._speculations[sequence.request.drafter].forget(sequence)

    def _abandon_drafts(self, name: str, sequences: list[Sequence]) -> None:
        self._speculations[name].abandon(sequences)
        for sequence in sequences:
            sequence.is_draftable, sequence.drafts, sequence.parents = False, (), ()


def _states(output: Output, drafter: Drafter) -> Tensor:
    """Pick what a drafter sees of a call that may have watched more layers than its own: [n, E] or [n, K * E]."""
    if not drafter.observed_layers:
        return output.hidden
    return torch.cat([output.layers[layer] for layer in drafter.observed_layers], dim=-1)


def _accepted(sequence: Sequence, output: Output) -> tuple[list[int], int]:
    """The accepted drafts of a sequence from the root down, and the target's next token."""
    if sequence.request.sampling.is_argmax:
        return accept_argmax(sequence.drafts, sequence.parents, output.best)
    assert output.logits is not None
    text = Text(sequence.tokens, sequence.request.sampling, sequence.request.seed)
    return accept_chosen(sequence.drafts, sequence.parents, output.logits, text)


def _contexts_at_once(sequence: Sequence) -> int:
    """Positions whose contexts are told together."""
    is_run = sequence.work in (Work.PLAIN, Work.SPECULATE)
    has_prompt = sequence.n_context - sequence.n_untold >= sequence.request.n_prompt - 1
    return _CONTEXTS_AT_ONCE if is_run and has_prompt else 1


def _with_context(commit: Commit, sequence: Sequence) -> Commit:
    """Add the contexts of a sequence that were encoded and not given yet."""
    if not sequence.encoded:
        return commit
    first, context = sequence.n_context - sequence.n_untold, torch.cat(sequence.encoded)
    sequence.encoded.clear()
    return replace(commit, context_start=first, context=context)


def _without_tokens(sequence: Sequence) -> Commit:
    return Commit(sequence.id, len(sequence.tokens), (), 0, sequence.finish, answers=sequence.answers)


def _n_nodes(shape: Shape) -> int:
    """The most drafts of a round of some shape."""
    if isinstance(shape, StaticTree):
        return len(shape.parents)
    return shape.depth if shape.is_chain else min(shape.n_nodes, shape.n_candidates)
