"""Answers of a target with a drafter, from texts, chats or tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..moa.decoding.loop import Generation, OnTokens
from ..moa.decoding.loop import generate as generate_tokens
from ..moa.decoding.policy import ShapePolicy
from ..moa.decoding.sampling import GREEDY, SamplingConfig
from ..moa.decoding.tree import Shape
from ..moa.drafters.base import Drafter
from ..moa.targets.chat_tokens import check_template, prompt_tokens
from ..moa.targets.live import Target
from ..moa.targets.template import choose_template_arguments

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


def generate(
    target: Target,
    drafter: Drafter,
    prompt: Prompt,
    *,
    max_new_tokens: int = 256,
    tree: Shape | ShapePolicy | None = None,
    sampling: SamplingConfig = GREEDY,
    seed: int = 0,
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Answer a prompt with drafts; greedy answers are those of plain decoding.

    Args:
        prompt: what the user says, a chat (messages with ``role`` and ``content``), or token ids.
        max_new_tokens: most tokens of the answer.
        tree: shape of the drafts; None for ``auto``, chains that give way to plain decoding where they do not pay.
        on_tokens: called with each run of tokens, and for each of them whether it was drafted.

    Returns:
        The answer: ``text``, ``tokens`` and ``stats``.

    Raises:
        TemplateError: the target's chat template refuses the prompt.
        DrafterError: the prompt is empty or longer than the target's positions, or the drafter is of another target.
    """
    return generate_tokens(
        target, drafter, encode_prompt(target, drafter, prompt), max_new_tokens=max_new_tokens, tree=tree,
        sampling=sampling, seed=seed, on_tokens=on_tokens,
    )  # fmt: skip


def encode_prompt(target: Target, drafter: Drafter, prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt, with the template's arguments of the store that the drafter is from."""
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = [dict(item) for item in prompt if isinstance(item, Mapping)]
        if not messages:
            return [int(token) for token in prompt if not isinstance(token, Mapping)]
    check_template(target.tokenizer, "the target", choose_template_arguments((), {"drafter": drafter.config.target}))
    return prompt_tokens(target.tokenizer, messages)
