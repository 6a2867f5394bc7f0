"""Heads of block-parallel drafters (DSpark, arXiv 2607.05147): Markov heads over the previous token, and a confidence.

Shapes: E width, V vocabulary, r rank, M numbers that a head remembers of the tokens of its block; ``...`` is any shape.

All slots of a block are computed at once, so that a slot does not know which token was drafted before it. A Markov head
adds to its logits a term of that token x, through two narrow matrices::

    e = W1[x]                                   x is the anchor for the first slot, the previous draft for the others
    vanilla    logits += W2 e
    gated      logits += W2 (sigmoid(Wg [h; e]) * e)                  h is the slot's hidden state
    rnn        G, C, O = Wj [s; e; h]; logits += W2 tanh(O); s <- sigmoid(G) s + (1 - sigmoid(G)) tanh(C)
    product    logits += W2 (Wh h * e)          the scores of DFlash 2's candidate selector, here of all tokens

The state s is 0 in the first slot. The *memory* [..., M] of a slot is e, and for rnn s after it. Weights have the names
of the official code (deepseek-ai/DeepSpec); the product has no counterpart there.
"""

import torch
from torch import Tensor, nn
from typing_extensions import override


class MarkovHead(nn.Module):
    """The vanilla head: a bias that depends on the previous token alone."""

    n_states = 0  # width of the memory after the embedding, in ranks

    def __init__(self, vocab_size: int, rank: int, width: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def begin(self, tokens: Tensor) -> Tensor:
        """Make the memory of first slots from their anchors [...]: [..., M]."""
        return nn.functional.pad(self.markov_w1(tokens), (0, self.n_states * self.rank))

    def follow(self, memory: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Make the memory of the next slots, from memory [..., M], hidden [..., E] and drafts [...] of those before."""
        embedded: Tensor = self.markov_w1(tokens)
        return embedded

    def code(self, memory: Tensor, hidden: Tensor) -> Tensor:
        """Compute what ``markov_w2`` turns into the bias of the logits, from [..., M] and [..., E]: [..., r]."""
        return memory

    def read(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Make the memories [..., K, M] of K slots from hidden [..., K, E] and the tokens before each, [..., K]."""
        if not self.n_states:
            return self.begin(tokens)
        memories = [self.begin(tokens[..., 0])]
        for slot in range(1, tokens.shape[-1]):
            memories.append(self.follow(memories[-1], hidden[..., slot - 1, :], tokens[..., slot]))
        return torch.stack(memories, dim=-2)


class GatedMarkovHead(MarkovHead):
    """The gated head: the slot's hidden state chooses what of the embedding counts."""

    def __init__(self, vocab_size: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, rank, width)
        self.gate_proj = nn.Linear(width + rank, rank)

    @override
    def code(self, memory: Tensor, hidden: Tensor) -> Tensor:
        gate: Tensor = self.gate_proj(torch.cat((hidden, memory), dim=-1)).sigmoid()
        return gate * memory


class ProductMarkovHead(MarkovHead):
    """The product head: the slot's hidden state scales each number of the embedding."""

    def __init__(self, vocab_size: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, rank, width)
        self.hidden_proj = nn.Linear(width, rank, bias=False)

    @override
    def code(self, memory: Tensor, hidden: Tensor) -> Tensor:
        scale: Tensor = self.hidden_proj(hidden)
        return scale * memory


class RecurrentMarkovHead(MarkovHead):
    """The rnn head: a state runs over the tokens of the block."""

    n_states = 1

    def __init__(self, vocab_size: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, rank, width)
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def _joint(self, memory: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedded, state = memory.split(self.rank, dim=-1)
        gate, candidate, output = self.joint_proj(
            torch.cat((state, embedded, hidden), dim=-1)
        ).chunk(3, dim=-1)
        return gate, candidate, output

    @override
    def follow(self, memory: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        gate, candidate, _ = self._joint(memory, hidden)
        share = gate.sigmoid()
        state = share * memory[..., self.rank :] + (1 - share) * candidate.tanh()
        return torch.cat((self.markov_w1(tokens), state.to(memory.dtype)), dim=-1)

    @override
    def code(self, memory: Tensor, hidden: Tensor) -> Tensor:
        # The output is of the state before this slot's update.
        return self._joint(memory, hidden)[2].tanh()


MARKOV_HEADS: dict[str, type[MarkovHead] | None] = {
    "none": None,
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
    "product": ProductMarkovHead,
}


class ConfidenceHead(nn.Module):
    """Predicts the probability that a slot's draft is accepted, from its hidden state and the previous embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [...] from [..., width]."""
        logits: Tensor = self.proj(x)
        return logits[..., 0]
