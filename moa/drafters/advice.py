"""Which drafter, activations and settings suit a target, each with the measurement that the advice rests on.

The figures are those of ``benchmarks/results/step-cost.json`` (processor time, acceptance length by training tokens),
``training-gpu.json`` (tokens/s on an H100), ``curve.json`` (acceptance length in validation) and ``docs/choosing.md``
(SmolLM2-135M).
"""

from dataclasses import dataclass

FEW_TOKENS = 2_000_000
"""Tokens of the chats up to which EAGLE-2 drafts as long as Mixture of Attentions."""


@dataclass(frozen=True)
class Job:
    """What advice depends on."""

    n_tokens: int  # of the chats
    is_on_cpu: bool
    has_kv: bool  # whether the target caches keys and values that drafters can read
    kv_growth: float  # bytes of a token's keys, values and last hidden state, over those of the hidden state alone


@dataclass(frozen=True)
class Advice:
    """What to choose, and why, in a sentence."""

    topic: str
    choice: str
    reason: str


def advise(job: Job) -> list[Advice]:
    """Advise a drafter, activations, settings and an amount of chats."""
    found = [*_drafter(job), Advice("settings", "none", _SETTINGS)]
    if job.n_tokens < FEW_TOKENS:
        found.append(Advice("chats", "as many as there are", _CHATS))
    return found


def _drafter(job: Job) -> list[Advice]:
    small = Advice(
        "activations",
        "--activations hidden:last",
        f"eagle reads nothing else; with kv a token takes {job.kv_growth:.0f} times the bytes.",
    )
    if not job.has_kv:
        return [
            Advice("drafter", "train --drafter eagle", "the target caches no keys and values, which moa reads."),
            Advice("activations", "--activations hidden:last", "eagle reads nothing else."),
        ]
    if job.is_on_cpu:
        return [Advice("drafter", "train --drafter eagle", _ON_CPU), small]
    if job.n_tokens < FEW_TOKENS:
        return [Advice("drafter", "train --drafter eagle", _FEW), small]
    return [
        Advice("drafter", "train --drafter moa, the default", _MANY),
        Advice(
            "activations",
            "--activations kv,hidden:last, the default",
            f"moa reads both; a token takes {job.kv_growth:.0f} times the bytes of hidden:last alone before a --codec.",
        ),
    ]


_ON_CPU = (
    "moa takes 2.8 times the processor time to train, and its drafts cost more; on SmolLM2-135M both had the same "
    "acceptance length after 0.27 million training tokens (1.65 and 1.64)."
)
_FEW = (
    "after 2.0 million training tokens its acceptance length was 1.01 of moa's (target of 17 million weights), and moa "
    "takes 3.3 times as long to train on an H100."
)
_MANY = (
    "after 8.0 million training tokens eagle had 0.95 of its acceptance length (target of 17 million weights; nothing "
    "was measured at 7B); eagle trains 3.3 times as fast on an H100."
)
_SETTINGS = "`train` chooses batch, rates and length from the target's size and the number of tokens, and says why."
_CHATS = (
    "acceptance length still rises steeply: 2.2 after 0.15 million training tokens, 3.4 after 0.57 and 4.0 after 2.0 "
    "(moa, target of 17 million weights)."
)
