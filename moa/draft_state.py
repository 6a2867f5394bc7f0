"""What a Mixture of Attentions keeps between its draft steps.

Shapes: B rows.
"""

from collections.abc import Sequence

from .kv_buffer import KVBuffer


class DraftState:
    """The drafter's caches of B rows while decoding.

    Attributes:
        self_attention: of the verified tokens, then of this round's drafts in the order of feeding.
        memory: cross-attention keys and values of the positions that have target KV; behind them, where the drafter
            looks at them, of this round's drafts.
        n_fed: tokens of this round's tree that were fed, the root included.
    """

    def __init__(self, n_rows: int = 1) -> None:
        self.self_attention = KVBuffer(n_rows)
        self.memory = KVBuffer(n_rows)
        self.n_fed = 0

    def forget_drafts(self, in_memory: bool) -> None:
        """End the round: keep the verified positions and, of self-attention, the root, which is verified by now.

        Args:
            in_memory: the memory has the drafts too.
        """
        if not self.n_fed:
            return
        # Behind the last root lie nodes in the order of feeding, those accepted among others. Encoding the accepted
        # ones anew is two projections of a few tokens; which of them stand where they belong is not worth asking.
        self.self_attention.crop([length - self.n_fed + 1 for length in self.self_attention.lengths])
        if in_memory:
            self.memory.crop([length - self.n_fed for length in self.memory.lengths])
        self.n_fed = 0

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.self_attention.select_rows(rows)
        self.memory.select_rows(rows)
