"""Recommend a drafter for a target, the activations to store, and settings.

Each recommendation has measurements as reasons. They come from these files:

- ``benchmarks/results/step-cost.json``: processor time of drafters, and their acceptance length
  after different numbers of training tokens
- ``benchmarks/results/training-gpu.json``: tokens/s on an H100
- ``benchmarks/results/curve.json``: acceptance length in validation
- ``docs/choosing.md``: measurements of SmolLM2-135M
"""

from dataclasses import dataclass

FAST_KIND = "eagle"
"""The kind of drafter that is fastest to train, and that drafts fastest on a CPU."""
FEW_TOKENS = 2_000_000
"""With at most this number of chat tokens for training, EAGLE-2 reaches the acceptance length of
Mixture of Attentions."""


@dataclass(frozen=True)
class Advice:
    """A recommendation with its reason."""

    topic: str
    choice: str
    reason: str


def advise(
    n_tokens: int, is_on_cpu: bool, has_kv: bool = True, kv_growth: float = 1.0
) -> list[Advice]:
    """Recommend a drafter, the activations to store, settings and a number of chats.

    Args:
        n_tokens: number of tokens of the chats.
        is_on_cpu: whether the drafter is trained on a CPU and drafts on a CPU.
        has_kv: whether the target has cached keys and values that drafters can read.
        kv_growth: size of a token's KV and last hidden state together, divided by the size of the
            last hidden state alone.
    """
    times = f"{kv_growth:.0f} times the bytes"
    drafter = "`moa-data train --drafter eagle`"
    activations = "`activations=hidden:last`"
    reads = f"eagle reads no other activations; with kv as well, each token would take {times}."
    if not has_kv:
        reason = _NO_KV
        reads = "eagle reads no other activations."
    elif is_on_cpu:
        reason = _ON_CPU
    elif n_tokens < FEW_TOKENS:
        reason = _FEW
    else:
        drafter = "`moa-data train --drafter moa`, the default"
        activations = "`activations=kv,hidden:last`, the default"
        reason = _MANY
        reads = f"moa reads both, and together they take {times} of hidden:last alone."
    advice = [
        Advice("drafter", drafter, reason),
        Advice("activations", activations, reads),
        Advice("settings", "the defaults", _SETTINGS),
    ]
    if n_tokens < FEW_TOKENS:
        advice.append(Advice("chats", "as many as you have", _CHATS))
    return advice


def other_drafter(kind: str, n_tokens: int, is_on_cpu: bool) -> Advice | None:
    """If another drafter suits the data better than the default ``moa``, recommend that drafter.

    Returns None if ``moa`` suits best, or if ``kind`` is not ``moa``.
    """
    advice = advise(n_tokens, is_on_cpu)[0]
    return advice if kind == "moa" and "drafter moa" not in advice.choice else None


_ON_CPU = (
    "in training, moa takes 2.8 times the processor time of eagle, and each of its drafts takes "
    "longer; on SmolLM2-135M, both had the same acceptance length after 0.27 million training "
    "tokens (eagle 1.65, moa 1.64)."
)
_NO_KV = "moa reads keys and values, but this target does not cache any."
_FEW = (
    "after 2.0 million training tokens, the acceptance length of eagle was 1.01 times that of moa "
    "(on a target of 17 million weights), and eagle trains 3.3 times as fast on an H100."
)
_MANY = (
    "after 8.0 million training tokens, the acceptance length of eagle was only 0.95 times that of "
    "moa (on a target of 17 million weights; nothing was measured at 7B), but eagle trains 3.3 "
    "times as fast on an H100."
)
_SETTINGS = (
    "`moa-data train` chooses batch size, learning rates and length of the run from the target's "
    "size and the number of tokens, and prints its reasons."
)
_CHATS = (
    "the acceptance length rises steeply with the number of training tokens; for moa on a target "
    "of 17 million weights, it was 2.2 after 0.15 million tokens, 3.4 after 0.57 million and 4.0 "
    "after 2.0 million."
)
