"""Answers of a given form: which tokens may come next under a JSON schema or a regular expression.

A grammar is asked about an answer and about the drafts after it, and goes back where they are not accepted.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import RequestInvalid, ServingError
from ..moa.targets.live import Target


class Grammar:
    """Tells which tokens may follow those of one answer: [V] bool."""

    def __init__(self, matcher: Any, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab
        self._taken: list[int] = []  # tokens that the matcher has

    def __call__(self, answer: Sequence[int]) -> np.ndarray:
        """Move to an answer, whose tokens were allowed each at its place, from wherever this is."""
        matcher = self._matcher
        taken = self._taken
        answer = list(answer)
        n_same = min(len(taken), len(answer))
        while answer[:n_same] != taken[:n_same]:
            n_same -= 1
        if n_same < len(taken):
            matcher.rollback(len(taken) - n_same)
            del taken[n_same:]
        for token in answer[n_same:]:
            if matcher.is_stopped():  # nothing but the end is left
                break
            matcher.consume_token(token)
            taken.append(token)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise ServingError(
                f"the form cannot be followed further ({matcher.get_error().splitlines()[0]})"
            )
        return np.unpackbits(bits, count=self._n_vocab, bitorder="little").view(bool)


class Grammars:
    """Makes grammars for the tokens of a target; loading llguidance and its view of the tokenizer takes a second."""

    def __init__(self, target: Target) -> None:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise RequestInvalid(
                f"{error.name} is not installed where the server runs, and a form of answers needs it: "
                "pip install 'moa-data[structured]'."
            ) from error
        self._n_vocab = target.sizes["vocab_size"]
        self._matcher = LLMatcher
        ends = sorted(target.eos_token_ids) or None
        n_tokens = max(self._n_vocab, len(target.tokenizer))
        self._tokenizer = from_tokenizer(target.tokenizer, n_tokens, ends)

    def make(self, kind: str, form: Any, n: int) -> list[Grammar]:
        """Make grammars of one form for n answers; RequestInvalid where it cannot be followed."""
        grammar = (
            self._matcher.grammar_from_json_schema
            if kind == "json"
            else self._matcher.grammar_from_regex
        )
        matcher = self._matcher(self._tokenizer, grammar(form), log_level=0)
        if matcher.is_error():
            raise RequestInvalid(
                f"this {kind} cannot be followed: {matcher.get_error().splitlines()[0]}."
            )
        return [Grammar(matcher.deep_copy(), self._n_vocab) for _ in range(n)]
