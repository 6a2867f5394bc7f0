"""Constrain answers: which tokens may come next under a JSON schema or a regular expression.

A grammar is evaluated for an answer and the drafts after it, and rolled back when drafts are
rejected.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import RequestInvalid, ServingError
from ..moa.targets.live import Target


class Grammar:
    """Computes which tokens may follow an answer, as an array [V] bool."""

    def __init__(self, matcher: Any, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab
        self._taken: list[int] = []  # Tokens that the matcher has consumed.

    def __call__(self, answer: Sequence[int]) -> np.ndarray:
        """Move from the current state to an answer, and return the allowed next tokens.

        Each token of the answer must have been allowed at its position.
        """
        matcher = self._matcher
        consumed = self._taken
        answer = list(answer)
        n_same = min(len(consumed), len(answer))
        while answer[:n_same] != consumed[:n_same]:
            n_same -= 1
        if n_same < len(consumed):
            matcher.rollback(len(consumed) - n_same)
            del consumed[n_same:]
        for token in answer[n_same:]:
            # The form is complete, so only the end of the answer may follow.
            if matcher.is_stopped():
                break
            matcher.consume_token(token)
            consumed.append(token)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise ServingError(
                "the answer cannot continue in its requested form, because no token of the model "
                f"fits ({matcher.get_error().splitlines()[0]})"
            )
        return np.unpackbits(bits, count=self._n_vocab, bitorder="little").view(bool)


class Grammars:
    """Creates grammars for the tokens of a target.

    Loading llguidance and its view of the tokenizer takes a second.
    """

    def __init__(self, target: Target) -> None:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise RequestInvalid(
                f"{error.name} is not installed on the server, but answers of a given form need "
                "it. Install it there with: pip install 'moa-data[structured]'."
            ) from error
        self._n_vocab = target.facts.vocab_size
        self._matcher = LLMatcher
        ends = sorted(target.eos_token_ids) or None
        n_tokens = max(self._n_vocab, len(target.tokenizer))
        self._tokenizer = from_tokenizer(target.tokenizer, n_tokens, ends)

    def make(self, kind: str, form: Any, n: int) -> list[Grammar]:
        """Create n grammars of one form; raise RequestInvalid if the form is not supported."""
        grammar = (
            self._matcher.grammar_from_json_schema
            if kind == "json"
            else self._matcher.grammar_from_regex
        )
        matcher = self._matcher(self._tokenizer, grammar(form), log_level=0)
        if matcher.is_error():
            raise RequestInvalid(
                f"the server cannot use this {kind} form for answers: "
                f"{matcher.get_error().splitlines()[0]}."
            )
        return [Grammar(matcher.deep_copy(), self._n_vocab) for _ in range(n)]
