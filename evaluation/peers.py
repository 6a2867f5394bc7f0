"""Other people's decoding, counted like our own: transformers' generate, alone or assisted by a small model."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ..moa.decoding.loop import DecodeStats, Generation
from ..moa.decoding.sampling import SamplingConfig
from ..moa.target.clock import DeviceClock, Mark
from ..moa.target.live import Target
from .errors import EvaluationError


def load_assistant(path_or_id: str, target: Target) -> PreTrainedModel:
    """A small model that drafts for transformers' assisted generation.

    Raises:
        EvaluationError: its vocabulary is not the target's.
        TargetError: it cannot be loaded.
    """
    assistant = Target.load(path_or_id, target.model.dtype, str(target.device))
    if assistant.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise EvaluationError(
            f"the assistant {path_or_id} has another vocabulary ({len(assistant.tokenizer):,} tokens) than the target "
            f"({len(target.tokenizer):,}); give one with the target's tokenizer."
        )
    return assistant.model


class TransformersGenerate:
    """``model.generate`` of transformers, one prompt at a time, observed from outside.

    The first target call is the prefill; assisted generation verifies its first drafts in it. As everywhere, the tokens
    that it commits are not counted as those of a target call.

    Args:
        target: the loaded target.
        assistant: small model that drafts; None for plain decoding.
        max_new_tokens: bound on generated tokens.
        sampling: how tokens are chosen.
    """

    def __init__(
        self, target: Target, assistant: PreTrainedModel | None, max_new_tokens: int, sampling: SamplingConfig
    ) -> None:
        self._target, self._assistant = target, assistant
        self._max_new_tokens, self._sampling = max_new_tokens, sampling

    def __call__(self, prompts: list[list[int]], seeds: Sequence[int]) -> list[Generation]:
        """Decode prompts one after the other; sampling draws from torch's global generator, seeded for each."""
        return [self._generate(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def _generate(self, prompt: list[int], seed: int) -> Generation:
        target_calls, draft_calls = _Calls(self._target.model), _Calls(self._assistant)
        tokens = torch.tensor([prompt], device=self._target.device)
        if self._sampling.temperature > 0:
            torch.manual_seed(seed)
        began = time.perf_counter()
        try:
            generated: Any = self._target.model.generate(  # type: ignore[operator]
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=self._config(len(prompt)),
                assistant_model=self._assistant,
            )
        finally:
            target_calls.remove()
            draft_calls.remove()
        total_s = time.perf_counter() - began
        answer = generated[0, len(prompt) :].tolist()
        # A call that finds n tokens in the cache follows n + 1 committed ones: the last of them is among its inputs.
        committed = [n + 1 for n in target_calls.n_cached[1:]] + [len(prompt) + len(answer)]
        target_s = target_calls.seconds
        stats = DecodeStats(
            committed_per_call=[after - before for before, after in itertools.pairwise(committed)],
            n_tokens=len(answer),
            n_drafted=sum(target_calls.n_inputs[1:]) - len(target_calls.n_inputs[1:]),
            prefill_s=target_s[0],
            draft_s=sum(draft_calls.seconds),
            verify_s=sum(target_s[1:]),
            total_s=total_s,
        )
        return Generation(answer, stats)

    def _config(self, n_prompt_tokens: int) -> GenerationConfig:
        sampling, target = self._sampling, self._target
        eos = sorted(target.eos_token_ids)
        values: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            values = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
            }
        return GenerationConfig(
            max_new_tokens=min(self._max_new_tokens, target.max_positions - n_prompt_tokens),
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            **values,
        )


class _Calls:
    """Forward calls of a model: what was in the cache, how many tokens came in, how long it took."""

    def __init__(self, model: PreTrainedModel | None) -> None:
        self.n_cached: list[int] = []
        self.n_inputs: list[int] = []
        self._clock = DeviceClock(torch.device("cpu") if model is None else model.device)
        self._marks: list[tuple[Mark, Mark]] = []
        self._began = self._clock.mark()
        self._handles = []
        if model is not None:
            self._handles = [
                model.register_forward_pre_hook(self._before, with_kwargs=True),
                model.register_forward_hook(self._after),
            ]

    @property
    def seconds(self) -> list[float]:
        """Of each call, on the device that ran it; waits for that."""
        return [self._clock.seconds(began, ended) for began, ended in self._marks]

    def remove(self) -> None:
        """Stop observing."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens: Tensor = named["input_ids"] if "input_ids" in named else arguments[0]
        cache = named.get("past_key_values")
        self.n_inputs.append(tokens.shape[1])
        self.n_cached.append(0 if cache is None else int(cache.get_seq_length()))
        self._began = self._clock.mark()

    def _after(self, module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        self._marks.append((self._began, self._clock.mark()))
