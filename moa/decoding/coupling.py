"""The choice of a token as a function of logits, settings, seed and position, by which drafter and target agree.

Shapes: V vocabulary.

The randomness of each position is fixed beforehand: with a temperature, the token at a position is the one with the
largest log p + g, where g is Gumbel noise keyed by (seed, position). Over seeds it has exactly the distribution p (the
Gumbel-max trick); for a given seed it is a function. So a text is the same whatever drafts it, how often a call is
repeated, and which sequences share it. A drafter that adds the same noise to its own log-probabilities draws the
target's token wherever the two distributions are close, more often than by independent draws.

Drafts are accepted while they equal the target's own choice. With a temperature of 0 the choice is the argmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .sampling import SamplingConfig, distribution, penalised

_UINT64 = (1 << 64) - 1


def noise(seed: int, position: int, vocab_size: int) -> Tensor:
    """Draw Gumbel noise of a position: [V] float64 on the host.

    The random bits are those of Philox 4x64 with the key (seed, position), the same on every machine.

    Args:
        seed: any 64 bits, with or without a sign.
        position: index of the token in the whole text, the prompt included.
    """
    bits = np.random.Philox(key=np.array([seed & _UINT64, position], dtype=np.uint64)).random_raw(vocab_size)
    # 52 bits and a half: neither 0 nor 1 can come out, whose noise would be infinite.
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return torch.from_numpy(-np.log(-np.log(uniform)))


def choose(logits: Tensor, previous: Sequence[int], sampling: SamplingConfig, seed: int, position: int) -> int:
    """Choose the token at a position.

    Args:
        logits: [V], of the target or of a drafter, -inf where a token cannot come.
        previous: prompt and all tokens so far, for the repetition penalty.
        seed: of the text; tokens of one seed at different positions are independent.
        position: index of the chosen token in the whole text, the prompt included.
    """
    if sampling.temperature == 0:
        return int(penalised(logits, previous, sampling.repetition_penalty).argmax())
    probability = distribution(logits, previous, sampling)
    own_noise = noise(seed, position, probability.shape[0]).to(probability.device)
    return int((probability.log() + own_noise).argmax())


@dataclass(frozen=True)
class Text:
    """All tokens of a text so far, and what decides the next ones."""

    tokens: Sequence[int]
    sampling: SamplingConfig
    seed: int


class ChainChoice:
    """Chooses the tokens of chains of drafts, level by level, for the texts of a batch.

    Args:
        texts: one a row, each ends with the root.
    """

    def __init__(self, texts: Sequence[Text]) -> None:
        self._texts, self._is_argmax = texts, all(text.sampling.is_argmax for text in texts)
        self._paths = [list(text.tokens) for text in texts]

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose the next token of each row from the drafter's logits [B, V]: [B] int64."""
        if self._is_argmax:  # nothing comes to the host
            return logits.argmax(dim=-1)
        for row, path, text in zip(logits, self._paths, self._texts, strict=True):
            path.append(choose(row, path, text.sampling, text.seed, len(path)))
        return torch.tensor([path[-1] for path in self._paths], device=logits.device)


def accept_chosen(tokens: Sequence[int], parents: Sequence[int], logits: Tensor, text: Text) -> tuple[list[int], int]:
    """Verify drafts: follow the target's own choices from the root as long as the tree has them.

    Args:
        parents: node indices, -1 for the root.
        logits: [N + 1, V], the target's after the root and after each node.

    Returns:
        The accepted nodes from the root down, and the target's next token after the last of them.
    """
    children = {(parent, token): node for node, (token, parent) in enumerate(zip(tokens, parents, strict=True))}
    accepted: list[int] = []
    path = list(text.tokens)
    while True:
        at = accepted[-1] if accepted else -1
        token = choose(logits[at + 1], path, text.sampling, text.seed, len(path))
        node = children.get((at, token))
        if node is None:
            return accepted, token
        accepted.append(node)
        path.append(token)
