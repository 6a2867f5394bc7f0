"""Answers chats with a target that is loaded here, in batches, with a drafter's drafts where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import TemplateError
from ..moa.decoding.loop import Generation, generate_batch
from ..moa.decoding.proposer import DrafterProposer
from ..moa.decoding.tree import Shape
from ..moa.formats.checkpoint import check_drafter_matches, load_drafter
from ..moa.targets.chat import Rejection
from ..moa.targets.chat_tokens import check_template, prompt_tokens, tokenize_chat
from ..moa.targets.live import Target
from ..moa.targets.template import choose_template_arguments
from .chats import Exchange, LossReason
from .config import RegenerateConfig


class LocalTarget:
    """A target with its drafter.

    Attributes:
        facts: what identifies both, and how they are used, for the record.

    Raises:
        DrafterError: target or drafter cannot be loaded, or do not belong together.
        WorkerError: the target has no chat template.
    """

    def __init__(self, config: RegenerateConfig) -> None:
        assert config.model is not None
        self._config, self._sampling = config, config.sampling.build()
        self._target = Target.load(config.model, getattr(torch, config.dtype), config.device, config.revision)
        self._proposer: DrafterProposer | None = None
        self._shape: Shape | None = None
        recorded = {}
        if config.drafter is not None:
            drafter = load_drafter(config.drafter, self._target.model.dtype, self._target.device)
            check_drafter_matches(drafter, self._target)
            self._proposer, self._shape = DrafterProposer(self._target, drafter, None, self._sampling), config.shape()
            if config.tree is None and self._proposer.max_depth is not None:
                self._shape = self._shape.cut(self._proposer.max_depth)
            recorded = {config.drafter: drafter.config.target}
        check_template(self._target.tokenizer, config.model)
        arguments = choose_template_arguments(config.template_kwargs, recorded)
        check_template(self._target.tokenizer, config.model, arguments)
        self.facts: dict[str, Any] = {
            "target": dict(self._target.identity),
            "template_kwargs": arguments,
            "drafter": config.drafter,
            "tree": None if self._shape is None else str(self._shape),
            "dtype": config.dtype,
            "device": self._target.device.type,
        }
        self.n_tokens = self.n_calls = 0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per target call so far, the prefill's not counted; None before the first and without drafts."""
        return self.n_tokens / self.n_calls if self.n_calls and self._proposer is not None else None

    def answer(self, exchanges: Sequence[Exchange]) -> None:
        """Answer all turns of some chats together."""
        asked = list(exchanges)
        while asked := [exchange for exchange in asked if exchange.begin_turn()]:
            prompts = {id(exchange): self._prompt(exchange) for exchange in asked}
            ready = [exchange for exchange in asked if prompts[id(exchange)]]
            generations = self._generate([prompts[id(exchange)] for exchange in ready], ready)
            for exchange, generation in zip(ready, generations, strict=True):
                self._take(exchange, generation, len(prompts[id(exchange)]))
        for exchange in exchanges:
            if exchange.outcome.messages:
                self._check(exchange)

    def _prompt(self, exchange: Exchange) -> list[int]:
        """Return the tokens of a prompt; none where the chat ends before it."""
        try:
            tokens = prompt_tokens(self._target.tokenizer, exchange.history, None, exchange.question.system)
        except TemplateError as error:
            exchange.end(LossReason.UNUSABLE_PROMPT, str(error))
            return []
        if len(tokens) >= self._most_tokens:
            exchange.end(LossReason.TOO_LONG, f"{len(tokens):,} tokens")
            return []
        return tokens

    @property
    def _most_tokens(self) -> int:
        return min(self._config.questions.max_length, self._target.max_positions)

    def _generate(self, prompts: list[list[int]], exchanges: Sequence[Exchange]) -> list[Generation]:
        seed = self._config.sampling.seed
        # No row needs more than the shortest prompt has room for.
        room = self._most_tokens - min(map(len, prompts), default=0)
        generations = generate_batch(
            self._target, prompts, max_new_tokens=min(self._config.max_new_tokens, room), proposer=self._proposer,
            tree=self._shape, sampling=self._sampling, seed=[seed + each.question.row for each in exchanges],
        )  # fmt: skip
        self.n_tokens += sum(sum(each.stats.committed_per_call) for each in generations)
        self.n_calls += sum(each.stats.n_target_calls for each in generations)
        return generations

    def _take(self, exchange: Exchange, generation: Generation, n_prompt: int) -> None:
        tokens = generation.tokens
        if tokens[-1] not in self._target.eos_token_ids or n_prompt + len(tokens) > self._most_tokens:
            exchange.end(LossReason.NO_END, f"{len(tokens):,} tokens behind {n_prompt:,}")
            return
        exchange.answer(self._target.tokenizer.decode(tokens, skip_special_tokens=True), len(tokens))

    def _check(self, exchange: Exchange) -> None:
        """Reject what `extract` would: a template may refuse the target's own answers, or rewrite them."""
        outcome = exchange.outcome
        length = self._config.questions.max_length
        found = tokenize_chat(self._target.tokenizer, outcome.messages, length, None, exchange.question.system)
        if isinstance(found, Rejection):
            exchange.reject(found.reason.value, found.detail)
