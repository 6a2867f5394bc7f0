"""Prompt lookup decoding: the drafts are what followed the last tokens where they occurred before.

Source: Saxena, "Prompt Lookup Decoding" (2023); transformers offers the same as ``prompt_lookup_num_tokens``. Here it
runs in this package's own decoding loop, so that it is counted and timed like every other method.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from ..targets.cache import TargetCache
from .proposer import Proposer
from .tree import NO_DRAFT, DraftTree, Shape


class PromptLookupProposer(Proposer):
    """Proposes the continuation of the latest earlier occurrence of the last n tokens, the longest n first.

    Args:
        max_ngram: longest n that is looked up.
    """

    def __init__(self, device: torch.device, max_ngram: int = 3) -> None:
        self._device, self._max_ngram = device, max_ngram

    # Nothing is kept between rounds: the committed tokens hold all that is looked up.

    @property
    @override
    def max_depth(self) -> None:
        return None

    @override
    def begin(self, cache: TargetCache, generators: Sequence[torch.Generator] = ()) -> None:
        pass

    @override
    def observe(self, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        pass

    @override
    def propose(self, committed: Sequence[list[int]], shape: Shape) -> DraftTree:
        """Draft a chain of at most ``shape.depth`` tokens; empty where no row's last token occurred before."""
        found = [self._continuation(tokens, shape.depth) for tokens in committed]
        longest = max(map(len, found))
        if not longest:
            return DraftTree.empty(len(found), self._device)
        padded = [[*tokens, *[NO_DRAFT] * (longest - len(tokens))] for tokens in found]
        return DraftTree.chain(torch.tensor(padded, device=self._device))

    @override
    def select_rows(self, rows: Sequence[int]) -> None:
        pass

    def _continuation(self, tokens: list[int], length: int) -> list[int]:
        for n in range(min(self._max_ngram, len(tokens) - 1), 0, -1):
            last = tokens[-n:]
            for start in range(len(tokens) - n - 1, -1, -1):
                if tokens[start : start + n] == last:
                    return tokens[start + n : start + n + length]
        return []
