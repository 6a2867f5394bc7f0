"""The Markov heads and the confidence head of block-parallel drafters (DSpark, arXiv 2607.05147).

A draft block is a sequence of slots, which are the input positions of the drafter. A block-parallel
drafter computes all slots of a block at once. So the hidden state of a slot cannot depend on the
token x that is drafted in the slot before it. A Markov head corrects this: it computes a bias from
x through two narrow matrices, and adds the bias to the slot's logits. A confidence head predicts
whether a draft is accepted. There are four kinds of Markov heads::

    e = W1[x]        x is the anchor for the first slot, and the previous draft for later slots
    vanilla    logits += W2 e
    gated      logits += W2 (sigmoid(Wg [h; e]) * e)     h is the slot's hidden state
    rnn        G, C, O = Wj [s; e; h]
               logits += W2 tanh(O)
               s <- sigmoid(G) s + (1 - sigmoid(G)) tanh(C)
    product    logits += W2 (Wh h * e)       the scores of DFlash 2's candidate selector, for all
                                             tokens of the vocabulary

The state s is 0 in the first slot. The *memory* [..., M] of a slot is e. For ``rnn``, it is the
concatenation of e and s. The weights have the same names as in deepseek-ai/DeepSpec, which has no
product head.

Shapes: E width, V vocabulary, r rank, M size of a head's memory, K slots of a block; ``...`` stands
for any number of axes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override


class MarkovHead(nn.Module):
    """The vanilla head: a bias that depends only on the previous token."""

    # Number of recurrent states s, with r values each, in the memory of a slot.
    n_states = 0

    def __init__(self, vocab_size: int, rank: int, width: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def begin(self, tokens: Tensor) -> Tensor:
        """Compute the memory [..., M] of the first slots of blocks.

        ``tokens`` [...] are the anchors, which are the known tokens at the start of the blocks.
        """
        return nn.functional.pad(self.markov_w1(tokens), (0, self.n_states * self.rank))

    def follow(self, memory: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Compute the memory [..., M] of the next slots.

        Args:
            memory: [..., M], memory of the previous slots.
            hidden: [..., E], hidden states of the previous slots.
            tokens: [...], tokens drafted in the previous slots.
        """
        embedded: Tensor = self.markov_w1(tokens)
        return embedded

    def code(self, memory: Tensor, hidden: Tensor) -> Tensor:
        """Compute the input [..., r] of the layer ``markov_w2``.

        The output of this layer is added to the logits.

        Args:
            memory: [..., M], memory of the slots.
            hidden: [..., E], hidden states of the slots.
        """
        return memory

    def read(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Compute the memory of each of the K slots of a block: [..., K, M].

        Args:
            hidden: [..., K, E], hidden states of the slots.
            tokens: [..., K], the token before each slot.
        """
        if not self.n_states:
            return self.begin(tokens)
        memories = [self.begin(tokens[..., 0])]
        for slot in range(1, tokens.shape[-1]):
            memories.append(self.follow(memories[-1], hidden[..., slot - 1, :], tokens[..., slot]))
        return torch.stack(memories, dim=-2)


class GatedMarkovHead(MarkovHead):
    """The gated head: a gate scales the embedding of the previous token.

    The gate is computed from the slot's hidden state and this embedding.
    """

    def __init__(self, vocab_size: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, rank, width)
        self.gate_proj = nn.Linear(width + rank, rank)

    @override
    def code(self, memory: Tensor, hidden: Tensor) -> Tensor:
        gate: Tensor = self.gate_proj(torch.cat((hidden, memory), dim=-1)).sigmoid()
        return gate * memory


class ProductMarkovHead(MarkovHead):
    """The product head: the slot's hidden state is multiplied by the token's embedding."""

    def __init__(self, vocab_size: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, rank, width)
        self.hidden_proj = nn.Linear(width, rank, bias=False)

    @override
    def code(self, memory: Tensor, hidden: Tensor) -> Tensor:
        scale: Tensor = self.hidden_proj(hidden)
        return scale * memory


class RecurrentMarkovHead(MarkovHead):
    """The rnn head: each token of the block updates a recurrent state."""

    n_states = 1

    def __init__(self, vocab_size: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, rank, width)
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def _joint(self, memory: Tensor, hidden: Tensor) -> Sequence[Tensor]:
        embedded, state = memory.split(self.rank, dim=-1)
        joint: Tensor = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1))
        return joint.chunk(3, dim=-1)

    @override
    def follow(self, memory: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        gate, candidate, _ = self._joint(memory, hidden)
        share = gate.sigmoid()
        state = share * memory[..., self.rank :] + (1 - share) * candidate.tanh()
        return torch.cat((self.markov_w1(tokens), state.to(memory.dtype)), dim=-1)

    @override
    def code(self, memory: Tensor, hidden: Tensor) -> Tensor:
        # The output of a slot is computed from the recurrent state before this slot updates it.
        return self._joint(memory, hidden)[2].tanh()


MARKOV_HEADS: dict[str, type[MarkovHead] | None] = {
    "none": None,
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
    "product": ProductMarkovHead,
}


class ConfidenceHead(nn.Module):
    """Predicts the probability that a slot's draft is accepted.

    The input of this head is the slot's hidden state and the embedding of the previous token.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [...] of the acceptance probability from inputs [..., width]."""
        logits: Tensor = self.proj(x)
        return logits[..., 0]
