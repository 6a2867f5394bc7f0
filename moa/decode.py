"""Greedy decoding: plain, and speculative with a chain of drafts (Algorithm 1 of the paper).

A round: the drafter proposes up to ``draft_length`` tokens after the root (the last committed token, which has no
target KV yet); one target call verifies root and drafts; those that equal the target's argmax are committed
together with the target's next token (the bonus). Everything beyond is rolled back.

Acceptance length = tokens committed per target call, bonus included; the prefill is not counted.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import kv_layout
from .bundle import FrozenTarget
from .errors import DrafterError
from .model import DraftState, MoADrafter
from .target import Target

OnTokens = Callable[[list[int], list[bool]], None]
"""Called with each committed run of tokens and, for each, whether it was drafted."""


@dataclass
class DecodeStats:
    """What a generation cost. Counted alike by plain and speculative decoding."""

    committed_per_call: list[int] = field(default_factory=list)
    """Tokens committed by each target call after the prefill."""
    n_prefill_calls: int = 1
    n_tokens: int = 0
    """All generated tokens, the one from the prefill included."""
    n_drafted: int = 0
    """Tokens proposed by the drafter."""
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0

    @property
    def n_target_calls(self) -> int:
        """Target calls after the prefill."""
        return len(self.committed_per_call)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per target call, bonus included; NaN when there was no call after the prefill."""
        return sum(self.committed_per_call) / self.n_target_calls if self.committed_per_call else float("nan")


@dataclass
class Generation:
    """Generated tokens, without the prompt, the end-of-sequence token included when there was one."""

    tokens: list[int]
    stats: DecodeStats


def plain_generate(
    target: Target, prompt_tokens: list[int], *, max_new_tokens: int, on_tokens: OnTokens | None = None
) -> Generation:
    """Greedy decoding with the target alone, one call per token.

    Args:
        target: the loaded target.
        prompt_tokens: at least one id.
        max_new_tokens: bound on generated tokens; also bounded by the target's positions.
        on_tokens: called at each commit.

    Raises:
        DrafterError: empty prompt, or one that leaves no position to generate into.
    """
    started = time.perf_counter()
    run = _Run(target, prompt_tokens, max_new_tokens, on_tokens)
    while not run.finished:
        began = time.perf_counter()
        hidden = target.forward(run.as_tensor([run.root]), run.cache)
        token = int(target.logits(hidden[0, -1]).argmax())
        run.stats.verify_s += time.perf_counter() - began
        run.commit([token], [False])
    run.stats.total_s = time.perf_counter() - started
    return Generation(run.tokens, run.stats)


def speculative_generate(
    target: Target,
    drafter: MoADrafter,
    frozen: FrozenTarget | None,
    prompt_tokens: list[int],
    *,
    max_new_tokens: int,
    draft_length: int = 5,
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Greedy chain decoding; the tokens are those of :func:`plain_generate`.

    Args:
        target: the loaded target.
        drafter: trained for this target.
        frozen: target pieces for the drafter, with its N layers; None takes them from the live target.
        prompt_tokens: at least one id.
        max_new_tokens: bound on generated tokens; also bounded by the target's positions.
        draft_length: tokens drafted per round, at least 1.
        on_tokens: called at each commit.

    Raises:
        DrafterError: empty or too long prompt, draft_length < 1, or drafter and frozen differ in dtype.
    """
    if draft_length < 1:
        raise DrafterError(f"draft_length must be at least 1, got {draft_length}.")
    if frozen is None:
        frozen = FrozenTarget.from_model(target.model, drafter.config.target_layer_inference)
    dtypes = next(drafter.parameters()).dtype, frozen.lm_head_weight.dtype
    if dtypes[0] != dtypes[1]:
        raise DrafterError(f"the drafter is {dtypes[0]}, its target pieces are {dtypes[1]}; load both in one dtype.")
    started = time.perf_counter()
    run = _Run(target, prompt_tokens, max_new_tokens, on_tokens)
    chain = ChainDrafter(target, drafter, frozen, run.cache)
    while not run.finished:
        began = time.perf_counter()
        drafts = chain.draft(run.committed, min(draft_length, run.n_remaining - 1))
        drafted_at = time.perf_counter()
        n_cached = len(run.committed) - 1
        hidden = target.forward(run.as_tensor([run.root, *drafts]), run.cache)
        predicted = target.logits(hidden[0]).argmax(dim=-1).tolist()
        n_accepted = count_accepted(drafts, predicted)
        kv_layout.crop_cache(run.cache, n_cached + 1 + n_accepted)
        run.stats.draft_s += drafted_at - began
        run.stats.verify_s += time.perf_counter() - drafted_at
        run.stats.n_drafted += len(drafts)
        run.commit([*drafts[:n_accepted], predicted[n_accepted]], [True] * n_accepted + [False])
    run.stats.total_s = time.perf_counter() - started
    return Generation(run.tokens, run.stats)


def count_accepted(drafts: list[int], predicted: list[int]) -> int:
    """Length of the run of drafts that equal the target's argmax.

    Args:
        drafts: g proposed tokens.
        predicted: g + 1 argmax tokens; ``predicted[k]`` follows root and the first k drafts.
    """
    n_accepted = 0
    while n_accepted < len(drafts) and drafts[n_accepted] == predicted[n_accepted]:
        n_accepted += 1
    return n_accepted


class ChainDrafter:
    """Drafts chains for one sequence and keeps the drafter's caches in step with the target's."""

    def __init__(self, target: Target, drafter: MoADrafter, frozen: FrozenTarget, cache: Any) -> None:
        self.drafter, self.frozen, self.cache = drafter, frozen, cache
        self.state = DraftState()
        self._device = target.device
        self._dtype = next(drafter.parameters()).dtype

    @torch.inference_mode()
    def draft(self, committed: list[int], n_drafts: int) -> list[int]:
        """Propose the next tokens.

        Args:
            committed: prompt and generated tokens; the last one is the root, all others have target KV.
            n_drafts: how many tokens to propose; 0 gives none.
        """
        n_verified = len(committed) - 1
        if n_verified > self.state.memory.length:
            kv = kv_layout.cache_kv(self.cache, self.state.memory.length, n_verified)
            self.drafter.extend_memory(self.state, kv.to(self._dtype))
        self.drafter.begin_round(self.state, n_verified)
        target_kv = self._target_layers_kv()
        fresh = committed[self.state.self_attention.length :]
        drafts: list[int] = []
        while len(drafts) < n_drafts:
            tokens = torch.tensor([fresh], device=self._device)
            features = self.drafter.step(self.state, self.frozen, tokens, target_kv)
            drafts.append(int(self.frozen.logits(features[0, -1]).argmax()))
            fresh = drafts[-1:]
        return drafts

    def _target_layers_kv(self) -> list[tuple[Tensor, Tensor]] | None:
        n_layers = self.drafter.config.target_layer_inference
        if not n_layers:
            return None
        keys, values = kv_layout.cache_layers(self.cache)
        return [
            (k.to(self._dtype), v.to(self._dtype)) for k, v in zip(keys[-n_layers:], values[-n_layers:], strict=True)
        ]


class _Run:
    """What plain and speculative decoding share: prefill, commits, and when to stop."""

    def __init__(
        self, target: Target, prompt_tokens: list[int], max_new_tokens: int, on_tokens: OnTokens | None
    ) -> None:
        if not prompt_tokens:
            raise DrafterError("the prompt is empty; give at least one token.")
        if max_new_tokens < 1:
            raise DrafterError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
        if len(prompt_tokens) >= target.max_positions:
            raise DrafterError(
                f"the prompt has {len(prompt_tokens)} tokens, the target has {target.max_positions} positions; "
                "shorten the prompt."
            )
        self._target, self._on_tokens = target, on_tokens
        self._limit = min(max_new_tokens, target.max_positions - len(prompt_tokens))
        self.committed = list(prompt_tokens)
        self.tokens: list[int] = []
        self.stats = DecodeStats()
        self.finished = False
        self.cache = target.new_cache()
        began = time.perf_counter()
        hidden = target.forward(self.as_tensor(prompt_tokens), self.cache)
        first = int(target.logits(hidden[0, -1]).argmax())
        self.stats.prefill_s = time.perf_counter() - began
        self._append([first], [False])

    @property
    def root(self) -> int:
        """The last committed token, which has no target KV yet."""
        return self.committed[-1]

    @property
    def n_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self._limit - len(self.tokens)

    def as_tensor(self, tokens: list[int]) -> Tensor:
        """[1, n] int64 on the target's device."""
        return torch.tensor([tokens], device=self._target.device)

    def commit(self, tokens: list[int], drafted: list[bool]) -> None:
        """Commit the tokens of one target call, cut after the first end-of-sequence token and at the limit."""
        self.stats.committed_per_call.append(self._append(tokens, drafted))

    def _append(self, tokens: list[int], drafted: list[bool]) -> int:
        kept = tokens[: self.n_remaining]
        for index, token in enumerate(kept):
            if token in self._target.eos_token_ids:
                kept, self.finished = kept[: index + 1], True
                break
        self.tokens += kept
        self.committed += kept
        self.stats.n_tokens = len(self.tokens)
        self.finished = self.finished or self.n_remaining == 0
        if self._on_tokens is not None:
            self._on_tokens(kept, drafted[: len(kept)])
        return len(kept)
