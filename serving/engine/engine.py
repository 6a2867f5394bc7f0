"""The engine: continuous batching of sequences with a target and its drafters.

Sequences of any length join and leave between target calls, and each call serves many of them. Only
``step`` computes anything. Each phase of a step is in the module on the right::

    schedule    choose sequences for a target call, and their tokens          scheduler
    draft       make the server's drafts                                      speculation
    run         run one target call over all sequences                        runner
    accept      accept drafts that the target agrees with; add one token      moa.decoding.sampling
    commit      append the tokens, and pass them to the callbacks             engine

Each token is a function of the target's logits, the sampling settings, the seed, and the token's
position. So an answer does not depend on the other sequences of the target calls, on the drafts, or
on interruptions. Any thread may call the methods other than ``step``, even inside a callback that
receives a commit. These methods take effect at the next step.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ...errors import Overloaded, RequestInvalid, ServingError, TargetError
from ...moa.decoding.policy import AUTO_SHAPE
from ...moa.decoding.sampling import Verified, accept_argmax, accept_chosen, cut_answer
from ...moa.drafters.base import Drafter
from ...moa.drafters.registry import REMOTE_KINDS
from ...moa.nn.masks import to_device
from ...moa.targets.live import Target
from ...moa.targets.proof import serving_problem
from ...text import first_line
from ..config import EngineOptions
from .attention import Segment
from .pool import BLOCK_TOKENS, Pool, PooledKV
from .runner import Runner
from .scheduler import Scheduled, Scheduler
from .sequence import Commit, Logprobs, Request, Sequence, Work, contexts_to_host
from .speculation import Speculation

_LOG = logging.getLogger(__name__)
# While the server decodes without the client's drafts, it sends the client the contexts of this
# many positions together. (The context of a position is the data that the client's drafter needs
# about it.) If the connection is lost, the client lacks the contexts of fewer positions than this
# number.
_CONTEXTS_AT_ONCE = 16


def count(metric: str, what: str, is_gauge: bool = False, labels: tuple[str, ...] = ()) -> Any:
    """Define a field of :class:`Counts`.

    Args:
        metric: name of the count in ``/metrics``.
        what: help text of the count in ``/metrics``.
        is_gauge: whether the count can decrease.
        labels: names of labels. If there is a label, the field is a Counter with one count per
            value of the label.
    """
    default = Counter if labels else int
    return field(default_factory=default, metadata={"metric": (metric, what, is_gauge, labels)})


@dataclass
class Counts:
    """Counters and gauges of an engine."""

    n_open: int = count(
        "moa_sequences_open", "Sequences of the engine, including waiting and idle ones.", True
    )
    n_working: int = count(
        "moa_sequences_working", "Sequences that wait for a target call or take part in one.", True
    )
    n_calls: int = count("moa_target_calls", "Number of target calls.")
    n_read: int = count(
        "moa_tokens_read", "Number of tokens that the target processed, drafts included."
    )
    n_committed: int = count("moa_tokens_committed", "Number of new tokens of all sequences.")
    n_rounds: int = count(
        "moa_rounds",
        "Number of times that a sequence got new tokens. moa_tokens_committed divided by "
        "moa_rounds is the acceptance length.",
    )
    n_drafted: int = count("moa_drafts_verified", "Number of drafts that were verified.")
    n_accepted: int = count("moa_drafts_accepted", "Number of drafts that the target accepted.")
    n_evicted: int = count(
        "moa_evictions", "Number of times that the KV of a sequence was evicted from the KV cache."
    )
    n_failed: int = count("moa_sequences_failed", "Number of sequences that ended with an error.")
    call_s: float = count("moa_target_call_seconds", "Duration of all target calls in seconds.")
    draft_s: float = count(
        "moa_draft_seconds", "Duration of all drafting on the server in seconds."
    )
    kv_used: int = count(
        "moa_kv_tokens_used", "Tokens of the KV cache that are reserved for sequences.", True
    )
    kv_tokens: int = count("moa_kv_tokens", "Size of the KV cache in tokens.", True)


class Engine:
    """Completes sequences with one target.

    Either call :meth:`step` repeatedly, or call :meth:`start`, which starts a thread that does so.

    Raises TargetError if the target or a drafter cannot be served.

    Args:
        target: the target.
        drafters: drafters by name.
        options: limits of the engine.
    """

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter] | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        options = options or EngineOptions()
        self.target = target
        self.drafters = dict(drafters or {})
        shape = options.shape
        n_own_drafts = (shape or AUTO_SHAPE).max_drafts
        # A target call verifies at most this many drafts of a client.
        self.max_drafts = options.max_drafts
        if target.decoding_problem or target.facts.has_states:
            raise TargetError(
                f"a target of type {target.facts.model_type} cannot be served: "
                + (
                    target.decoding_problem
                    or "its layers carry a state from token to token, which the server does not "
                    "support. `moa-data generate` decodes it with chains of drafts"
                )
                + "."
            )
        for name, drafter in self.drafters.items():
            if drafter.config.reads.kv and hasattr(target.facts.config, "kv_lora_rank"):
                raise TargetError(
                    f"the drafter {name!r} cannot be served, because it reads latents (compressed "
                    f"keys and values) of the target {target.facts.model_type}, which the server "
                    "does not keep. `moa-data generate` can use this drafter."
                )
        facts = target.facts
        sizes = facts.sizes | facts.attention_sizes
        groups = () if facts.has_uniform_kv else facts.kv_groups
        self._pool = Pool(options.kv_tokens, sizes, target.model.dtype, target.device, groups)
        # A sequence may have at most as many tokens as the model has positions. It must also fit
        # into the KV memory, together with the drafts of a round.
        n_slots = self._pool.n_blocks * BLOCK_TOKENS - max(n_own_drafts, options.max_drafts)
        self.max_positions = min(target.max_positions, n_slots)
        self.kv_bytes = self._pool.buffer.nbytes
        # An estimate of the bytes that target calls and requests need besides the KV. It is high on
        # purpose. It includes activations, logits with their sorted copies for sampling, the masks
        # of a prompt chunk, the token lists, and freed memory that the allocator keeps. The factors
        # were measured with a target of 135 million weights.
        n_logits = options.max_sequences * (1 + n_own_drafts) + options.max_drafts
        activations = 100 * facts.hidden_size * (options.prefill_chunk + n_logits)
        masks = 5 * self.max_positions * options.prefill_chunk
        self.working_bytes = activations + 8 * facts.vocab_size * n_logits + masks + 200_000_000
        self._max_open = options.max_sequences + options.max_waiting
        self._scheduler = Scheduler(self._pool, options, n_own_drafts)
        self._runner = Runner(target, options.target_ms / 1000)
        if problem := self._problem():
            raise TargetError(
                f"a target of type {target.facts.model_type} cannot be served: {problem}."
            )
        self._speculations = {
            name: Speculation(
                name, self._runner.frozen(drafter.config.target_layer_inference), drafter, shape
            )
            for name, drafter in self.drafters.items()
        }
        self._sequences: dict[int, Sequence] = {}
        # Functions that other threads have posted. The next step calls them.
        self._mail: deque[Callable[[], None]] = deque()
        self._ids = itertools.count(1)
        self._counts = Counts()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _problem(self) -> str:
        """Test the target with short calls. Return why it can't be served, or "" if it can."""
        kv = PooledKV(self._pool)

        def call(tokens: list[int], parents: tuple[int, ...]) -> torch.Tensor:
            self._pool.reserve(kv, 1)
            (output,) = self._runner.run([Segment(kv, tokens, parents)])
            kv.length += len(tokens) - len(parents)
            return output.hidden

        problem = serving_problem(self.target, call)
        self._pool.free(kv)
        return problem

    # Any thread may call the methods below.

    def start(self) -> None:
        """Start a thread that calls :meth:`step`."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its present step, and wait until the thread has ended."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def add(self, request: Request, on_commit: Callable[[Commit], object]) -> int:
        """Add a sequence; it is idle until :meth:`set_work` is called.

        Args:
            request: the request to complete.
            on_commit: a callback, which must not block. The thread that calls :meth:`step` calls it
                with a commit after each target call that served the sequence. If the sequence fails
                and is removed, the callback gets one more commit, with the error.

        Returns:
            The id of the sequence.

        Raises:
            RequestInvalid: if the request cannot be served.
            Overloaded: if too many sequences are open.
        """
        limit = min(request.n_prompt + request.max_new_tokens, self.target.max_positions)
        self._check(request, limit)
        with self._lock:
            if self._counts.n_open >= self._max_open:
                raise Overloaded(
                    f"the server already has {self._max_open} open requests; try again later."
                )
            self._counts.n_open += 1
        sequence = Sequence(
            next(self._ids),
            request,
            limit,
            PooledKV(self._pool),
            on_commit,
            self.target.eos_token_ids,
        )
        answer = list(request.tokens[request.n_prompt :])
        n_answer = limit - request.n_prompt
        sequence.finish = cut_answer(answer, n_answer, self.target.eos_token_ids)[1]
        self._mail.append(lambda: self._sequences.update({sequence.id: sequence}))
        return sequence.id

    def set_work(
        self, sequence_id: int, work: Work, drafts: GenericSequence[int] = (), answers: int = 0
    ) -> None:
        """Replace the work of a sequence from the next step on.

        The sequence reports a commit without tokens if its answer has already ended, or if the new
        work is IDLE and has a tag. SPECULATE without a drafter is the same as PLAIN.

        Args:
            sequence_id: the sequence.
            work: its new work.
            drafts: for VERIFY, a chain of tokens that follows the root (the last committed token).
                Only the first ``max_drafts`` tokens are verified. Empty to decode one token without
                drafts.
            answers: a tag. All commits of this work carry it, so that the caller can recognise
                them. 0 if the work needs no tag.

        Raises:
            RequestInvalid: if a draft is not a token id of the target.
        """
        chain = tuple(drafts[: self.max_drafts])
        self.check_tokens(chain)

        def apply(sequence: Sequence) -> None:
            sequence.set_work(work, chain, answers)
            if sequence.finish or (work is Work.IDLE and answers):
                self._report(sequence, sequence.commit())

        self._post(sequence_id, apply)

    def hold(self, sequence_id: int, is_held: bool) -> None:
        """Pause a sequence whose reader is slow, or resume it."""

        def apply(sequence: Sequence) -> None:
            sequence.is_held = is_held
            sequence.since_s = time.perf_counter()

        self._post(sequence_id, apply)

    def remove(self, sequence_id: int) -> None:
        """Remove a sequence at the next step. The present step may still report a commit for it."""
        self._post(sequence_id, self._remove)

    def _check(self, request: Request, limit: int) -> None:
        """Raise RequestInvalid, with a message for the sender, if a request cannot be served.

        Args:
            request: the request.
            limit: upper bound of the number of tokens of prompt and answer together.
        """
        n_prompt = request.n_prompt
        n_tokens = len(request.tokens)
        name = request.drafter
        drafter = self.drafters.get(name or "")
        n_positions = self.target.max_positions
        problems = (
            (not 1 <= n_prompt <= n_tokens, "the prompt is empty; give at least one token."),
            (
                n_prompt >= n_positions,
                f"the prompt has {n_prompt} tokens, but the context of the model has only "
                f"{n_positions} tokens for prompt and answer together; shorten the prompt.",
            ),
            (
                request.max_new_tokens < 1,
                f"max_new_tokens is {request.max_new_tokens}; give at least 1.",
            ),
            (
                n_tokens > limit,
                f"prompt and answer already have {n_tokens} tokens, but this request allows at "
                f"most {limit}; send fewer tokens.",
            ),
            (
                limit > self.max_positions,
                f"prompt and answer may have {limit} tokens together, but only "
                f"{self.max_positions} fit into the server's KV cache; ask for fewer tokens or "
                "shorten the prompt.",
            ),
            (
                request.n_context > n_tokens,
                f"n_context is {request.n_context}, expected at most {n_tokens}, the number of "
                "tokens of prompt and answer; send the number of tokens whose contexts "
                "(activations for the drafter) the client has.",
            ),
            (
                name is not None and drafter is None,
                f"{name!r} is not a drafter of this server, which has the drafters "
                f"{', '.join(self.drafters) or '(none)'}.",
            ),
            (
                request.wants_context and name is None,
                (
                    "the request asks for contexts (activations of the target for a drafter) but "
                    "names no drafter; name the drafter that reads them."
                ),
            ),
            (
                request.wants_context and drafter is not None and drafter.context_width is None,
                f"the drafter {name!r} can only draft on the server; to draft on the client, use a "
                f"drafter of one of these kinds: {', '.join(REMOTE_KINDS)}.",
            ),
        )
        for is_wrong, message in problems:
            if is_wrong:
                raise RequestInvalid(message)
        self.check_tokens(request.tokens)

    def check_tokens(self, tokens: GenericSequence[int]) -> None:
        """Raise RequestInvalid if a number is not a token id of the target."""
        largest = self.target.facts.vocab_size - 1
        if tokens and not 0 <= min(tokens) <= max(tokens) <= largest:
            raise RequestInvalid(
                "the request has token ids outside the vocabulary, expected ids from 0 to "
                f"{largest}; use the model's tokenizer."
            )

    def snapshot(self) -> Counts:
        """Return a copy of the counts."""
        with self._lock:
            n_working = sum(sequence.is_runnable for sequence in tuple(self._sequences.values()))
            used = self._pool.n_used * BLOCK_TOKENS
            total = self._pool.n_blocks * BLOCK_TOKENS
            return replace(self._counts, n_working=n_working, kv_used=used, kv_tokens=total)

    # Only the thread that calls ``step`` may call the methods below.

    def _run(self) -> None:
        while not self._is_stopping:
            # Clear the event before the step. If it were cleared after the step, work that another
            # thread posts during the step would not wake this thread.
            self._wake.clear()
            try:
                is_done = not self.step()
            except Exception as error:  # noqa: BLE001 - the thread must survive
                _LOG.exception("the engine failed, so all running answers end")
                for sequence in list(self._sequences.values()):
                    self._fail(sequence, error)
                continue
            if is_done and not self._is_stopping:
                self._wake.wait()

    @torch.inference_mode()
    def step(self) -> bool:
        """Make one target call for several sequences. Return False if no sequence had work."""
        while self._mail:
            self._mail.popleft()()
        scheduled, evicted = self._scheduler.schedule(self._sequences.values())
        for sequence in evicted:
            self._counts.n_evicted += 1
            self._forget_drafts(sequence)
        if not scheduled:
            return False
        with self._runner.threads(sum(item.n_known for item in scheduled)):
            self._serve(scheduled)
        return True

    def _serve(self, scheduled: list[Scheduled]) -> None:
        began = time.perf_counter()
        drafting = self._draft([item.sequence for item in scheduled])
        drafted = time.perf_counter()
        called = self._retried("target call", scheduled, self._call)
        chosen = self._retried("choice of tokens", called, self._choose)
        served = self._each(chosen, self._accept)
        done = time.perf_counter()
        self._counts.n_calls += 1
        self._counts.draft_s += drafted - began
        self._counts.call_s += done - drafted
        self._observe(drafting, served, done - began)
        for item in served:
            sequence = item.sequence
            queue_s = began - sequence.since_s
            sequence.since_s = done
            self._report(sequence, replace(item.commit, call_s=done - drafted, queue_s=queue_s))
        self._send_contexts(served)

    def _post(self, sequence_id: int, apply: Callable[[Sequence], None]) -> None:
        def deliver() -> None:
            # If the sequence has failed meanwhile, it was removed, and its callback got the error.
            # Then do nothing.
            if (sequence := self._sequences.get(sequence_id)) is not None:
                apply(sequence)

        self._mail.append(deliver)
        self._wake.set()

    def _draft(self, sequences: GenericSequence[Sequence]) -> dict[str, list[Sequence]]:
        """Make the server's drafts. Return drafter name -> the sequences that could get drafts."""
        groups: dict[str, list[Sequence]] = {name: [] for name in self._speculations}
        for name, speculation in self._speculations.items():
            members = [
                member
                for member in sequences
                if member.request.drafter == name and member.is_draftable
            ]
            groups[name] = [
                s for s in members if s.n_cached and s.work is Work.SPECULATE and s.n_missing == 0
            ]
            for sequence in members:
                if sequence.n_cached == 0:
                    with self._dispensable(name, [sequence]):
                        speculation.begin(sequence)
            with self._dispensable(name, groups[name]):
                speculation.gather(groups[name])
                if groups[name]:
                    speculation.draft(groups[name])
        return groups

    @contextlib.contextmanager
    def _dispensable(self, name: str, sequences: GenericSequence[Sequence]) -> Iterator[None]:
        """Catch errors of the drafter in the ``with`` block.

        After an error, the sequences continue without drafts. Their tokens do not change, because
        drafts never change the target's output.
        """
        try:
            yield
        except Exception:  # noqa: BLE001 - a drafter may raise anything
            _LOG.exception(
                "the drafter %s failed; %d sequences continue without drafts", name, len(sequences)
            )
            self._speculations[name].abandon(sequences)

    def _retried(
        self,
        what: str,
        items: list[Scheduled],
        process: Callable[[list[Scheduled]], None],
    ) -> list[Scheduled]:
        """Process sequences as one batch. If that fails, process each sequence alone.

        Args:
            what: name of the processing, for log messages.
            items: the sequences.
            process: a function that processes a list of sequences. If it fails, it must be safe to
                call it again.

        Returns:
            The sequences that were processed. If a sequence fails alone, too, it is removed.
        """
        if len(items) > 1:
            try:
                process(items)
                return items
            except Exception as error:  # noqa: BLE001 - other sequences must continue
                _LOG.warning(
                    "the %s for %d sequences failed (%s), so it is repeated for each sequence alone",
                    what,
                    len(items),
                    first_line(error),
                )
        return self._each(items, lambda item: process([item]))

    def _each(
        self, items: list[Scheduled], process: Callable[[Scheduled], None]
    ) -> list[Scheduled]:
        """Process each sequence alone. If that fails for a sequence, end only this sequence.

        Returns:
            The sequences that were processed.
        """
        processed = []
        for item in items:
            try:
                process(item)
            except Exception as error:  # noqa: BLE001 - other sequences must continue
                self._fail(item.sequence, error)
            else:
                processed.append(item)
        return processed

    def _call(self, scheduled: list[Scheduled]) -> None:
        """Call the target once for all sequences. Store each output in its ``Scheduled`` object."""
        segments = []
        for item in scheduled:
            sequence = item.sequence
            start = sequence.n_cached
            known = sequence.tokens[start : start + item.n_known]
            drafts, parents = (sequence.drafts, sequence.parents) if item.has_root else ((), ())
            segments.append(Segment(sequence.kv, [*known, *drafts], parents, item.has_root))
        names = {item.sequence.request.drafter for item in scheduled} - {None}
        watched = sorted(
            {layer for name in names if name for layer in self.drafters[name].observed_layers}
        )
        outputs = self._runner.run(segments, watched, needs_hidden=bool(names))
        self._counts.n_read += sum(len(segment.tokens) for segment in segments)
        for item, output in zip(scheduled, outputs, strict=True):
            item.output = output

    def _choose(self, called: list[Scheduled]) -> None:
        """Verify the drafts of all sequences, with one GPU sync for all sampled sequences."""
        sampled = []
        for item in called:
            sequence = item.sequence
            if not item.has_root:
                continue
            if sequence.sampling_state.is_argmax:
                item.choice = accept_argmax(sequence.drafts, sequence.parents, item.output.best)
            else:
                sampled.append(item)
        choices = accept_chosen([_verified(item) for item in sampled])
        for item, choice in zip(sampled, choices, strict=True):
            item.choice = choice

    def _accept(self, one: Scheduled) -> None:
        """Commit the results of a sequence: new KV, accepted drafts, and the next token."""
        sequence = one.sequence
        n_known = one.n_known
        start = sequence.n_cached
        first = len(sequence.tokens)
        accepted: list[int] = []
        new: list[int] = []
        if one.choice is not None:
            one.n_drafts = len(sequence.drafts)
            accepted, bonus = one.choice
            new = sequence.append([*(sequence.drafts[node] for node in accepted), bonus])
            sequence.drafts = sequence.parents = ()
            if sequence.work is Work.VERIFY:
                sequence.work = Work.IDLE
        one.kept = [*range(n_known), *(n_known + node for node in accepted)]
        sequence.kv.commit(one.kept)
        one.commit = sequence.commit(first, new, min(len(accepted), len(new)))
        if new and sequence.request.n_logprobs is not None:
            one.commit = replace(one.commit, logprobs=_logprobs(one, accepted, new))
        self._counts.n_rounds += bool(new)
        self._counts.n_drafted += one.n_drafts
        self._counts.n_accepted += one.commit.n_accepted
        self._counts.n_committed += len(new)
        if sequence.request.wants_context:
            self._note_contexts(one, start)

    def _note_contexts(self, one: Scheduled, start: int) -> None:
        """Store the target's hidden states of new positions.

        The drafter later encodes these hidden states to contexts (data for the client's drafter).
        If the answer has ended, the hidden states are encoded now, and the last commit gets all
        contexts that are still unsent.

        Args:
            one: the results of the target call for a sequence.
            start: the number of positions that had KV before the target call.
        """
        sequence = one.sequence
        speculation = self._speculations[sequence.request.drafter or ""]
        first = max(start, sequence.n_context + sequence.n_unencoded)
        if new_positions := one.kept[first - start :]:
            states = speculation.states(one.output)
            sequence.unencoded.append(
                states.index_select(0, to_device(new_positions, states.device))
            )
        if one.commit.finish:
            if sequence.can_encode:
                speculation.encode_contexts([sequence])
            one.commit = sequence.take_contexts(one.commit)

    def _send_contexts(self, served: list[Scheduled]) -> None:
        """Encode and send contexts (data for clients' drafters), after the tokens were sent."""
        # A context is the data that a client's drafter needs about one position. Encoding many
        # contexts takes as long as encoding a few. So while the server decodes without the client's
        # drafts, it encodes and sends many contexts at a time. There are two exceptions. If the
        # server's own drafts need contexts too, contexts are encoded after every target call.
        # Contexts of the prompt are sent after every target call, because the client cannot draft
        # without them.
        due: dict[str, list[Scheduled]] = {}
        for item in served:
            sequence = item.sequence
            name = sequence.request.drafter
            if name is None or sequence.finish or not sequence.can_encode:
                continue
            is_reused = sequence.work is Work.SPECULATE and self._speculations[name].reuses_contexts
            if is_reused or sequence.n_unencoded >= _contexts_at_once(sequence):
                due.setdefault(name, []).append(item)
        for name, group in due.items():
            self._retried("encoding of contexts", group, partial(self._encode, name))
        ready = []
        for item in served:
            sequence = item.sequence
            is_open = sequence.id in self._sequences and not sequence.finish
            if is_open and sequence.n_unsent >= _contexts_at_once(sequence):
                ready.append(item)
        for item in self._retried("copy of contexts", ready, _copy_contexts):
            sequence = item.sequence
            commit = sequence.take_contexts(sequence.commit())
            self._report(sequence, replace(commit, answers=0))

    def _encode(self, name: str, items: list[Scheduled]) -> None:
        """Encode contexts (data for clients' drafters) of sequences that use one drafter.

        If the drafter can also use the contexts for the server's own drafts, put the contexts into
        the drafter's caches.
        """
        sequences = [item.sequence for item in items]
        speculation = self._speculations[name]
        contexts = speculation.encode_contexts(sequences)
        if speculation.reuses_contexts:
            with self._dispensable(name, sequences):
                speculation.reuse(contexts)

    def _observe(
        self, drafting: Mapping[str, list[Sequence]], served: list[Scheduled], round_s: float
    ) -> None:
        """Pass a target call's results to the drafters and to the policies that choose draft sizes.

        Args:
            drafting: drafter name -> the sequences that could get drafts.
            served: the results of the target call for each sequence.
            round_s: duration of drafting and target call in seconds.
        """
        # The policies ignore target calls that read a prompt chunk. Such a call takes longer than
        # any round of decoding, so its time says nothing about drafts.
        is_comparable = all(item.n_known == 1 for item in served)
        for name, speculation in self._speculations.items():
            drafter_items = [
                item
                for item in served
                if item.sequence.request.drafter == name and item.sequence.is_draftable
            ]
            with self._dispensable(name, [item.sequence for item in drafter_items]):
                speculation.observe(drafter_items)
                rounds = [item for item in drafter_items if item.sequence in drafting[name]]
                if is_comparable and rounds:
                    speculation.judge(rounds, round_s)

    def _report(self, sequence: Sequence, commit: Commit) -> None:
        if commit.finish:
            self._release(sequence)
        try:
            sequence.on_commit(commit)
        except Exception as error:  # noqa: BLE001 - other sequences must continue
            self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """Remove a sequence that has failed, and pass the error to its callback."""
        _LOG.error("sequence %d failed: %s", sequence.id, first_line(error), exc_info=error)
        self._counts.n_failed += 1
        self._remove(sequence)
        failure = ServingError(
            f"the request failed on the server ({first_line(error)}); send it again."
        )
        try:
            sequence.on_commit(replace(sequence.commit(), error=failure))
        except Exception:  # noqa: BLE001 - other sequences must continue
            _LOG.exception(
                "the error of sequence %d could not be reported to its client", sequence.id
            )

    def _remove(self, sequence: Sequence) -> None:
        if self._sequences.pop(sequence.id, None) is not None:
            self._release(sequence)
            with self._lock:
                self._counts.n_open -= 1

    def _release(self, sequence: Sequence) -> None:
        """Free the KV and the drafter's caches of a sequence that has ended."""
        self._pool.free(sequence.kv)
        self._forget_drafts(sequence)

    def _forget_drafts(self, sequence: Sequence) -> None:
        if (name := sequence.request.drafter) is not None:
            with self._dispensable(name, ()):
                self._speculations[name].forget(sequence)


def _copy_contexts(items: list[Scheduled]) -> None:
    contexts_to_host([item.sequence for item in items])


def _verified(one: Scheduled) -> Verified:
    assert one.output.logits is not None
    sequence = one.sequence
    return Verified(sequence.sampling_state, sequence.drafts, sequence.parents, one.output.logits)


def _logprobs(
    one: Scheduled, accepted: GenericSequence[int], new: GenericSequence[int]
) -> tuple[Logprobs, ...]:
    """Return the log-probabilities of the new tokens of a sequence.

    Args:
        one: the results of the target call for the sequence.
        accepted: indices of the accepted drafts.
        new: the new tokens. They are the accepted drafts and one more token, up to the end of the
            answer.
    """
    assert one.output.logits is not None
    state = one.sequence.sampling_state
    k = one.sequence.request.n_logprobs or 0
    rows = [
        replace(state, tokens=state.tokens[: len(state.tokens) - len(new) + index]).masked(
            one.output.logits[node + 1]
        )
        for index, node in enumerate([-1, *accepted][: len(new)])
    ]
    log_p = torch.stack(rows).float().log_softmax(dim=-1)  # The shape of ``log_p`` is [n, V].
    new_log_p = log_p.gather(1, to_device([[token] for token in new], log_p.device))
    values, tokens = log_p.topk(min(k, log_p.shape[1]), dim=-1)
    likeliest = [
        list(zip(*of_row, strict=True))
        for of_row in zip(tokens.tolist(), values.tolist(), strict=True)
    ]
    return tuple(zip(new_log_p[:, 0].tolist(), likeliest, strict=True))


def _contexts_at_once(sequence: Sequence) -> int:
    """Return how many new contexts a sequence must have before they are encoded and sent.

    A context is the data that a client's drafter needs about one position.
    """
    is_run = sequence.work in (Work.PLAIN, Work.SPECULATE)
    has_prompt = sequence.n_context - sequence.n_unsent >= sequence.request.n_prompt - 1
    return _CONTEXTS_AT_ONCE if is_run and has_prompt else 1
