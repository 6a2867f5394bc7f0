"""Drafting without a drafter: what followed the last words when they occurred before (prompt lookup decoding).

Source: Saxena, "Prompt Lookup Decoding" (2023); transformers offers the same as ``prompt_lookup_num_tokens``. Here it
runs in this package's own decoding loop, so that it is counted and timed like every other method.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..target.cache import TargetCache
from .loop import OpenSession
from .tree import NO_DRAFT, DraftTree, Shape


class PromptLookupSession:
    """Proposes the continuation of the latest earlier occurrence of the last n tokens, the longest n first.

    Args:
        device: of the drafts.
        max_ngram: longest n that is looked up.
    """

    def __init__(self, device: torch.device, max_ngram: int = 3) -> None:
        self._device, self._max_ngram = device, max_ngram

    @property
    def max_depth(self) -> None:
        """As many as follow."""
        return None

    def observe(self, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        """Nothing to note: the tokens say it all."""

    def propose(self, committed: Sequence[list[int]], shape: Shape) -> DraftTree:
        """A chain of at most ``shape.depth`` tokens; empty where no row's last token occurred before."""
        found = [self._continuation(tokens, shape.depth) for tokens in committed]
        longest = max(map(len, found))
        if not longest:
            return DraftTree.empty(len(found), self._device)
        padded = [[*tokens, *[NO_DRAFT] * (longest - len(tokens))] for tokens in found]
        return DraftTree.chain(torch.tensor(padded, device=self._device))

    def select_rows(self, rows: Sequence[int]) -> None:
        """Nothing is kept per row."""

    def _continuation(self, tokens: list[int], length: int) -> list[int]:
        for n in range(min(self._max_ngram, len(tokens) - 1), 0, -1):
            last = tokens[-n:]
            for start in range(len(tokens) - n - 1, -1, -1):
                if tokens[start : start + n] == last:
                    return tokens[start + n : start + n + length]
        return []


def prompt_lookup_session(device: torch.device, max_ngram: int = 3) -> OpenSession:
    """Prompt lookup, for :func:`decode.generate_batch`.

    Args:
        device: the target's.
        max_ngram: longest n that is looked up.
    """

    def open_session(cache: TargetCache, generators: list[torch.Generator]) -> PromptLookupSession:
        return PromptLookupSession(device, max_ngram)

    return open_session
