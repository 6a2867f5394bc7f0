"""Make answers follow a JSON schema or a regular expression.

A grammar says which tokens may come next. It is evaluated for the tokens of an answer and for the
drafts that follow them. If drafts are rejected, the grammar is rolled back.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import RequestInvalid, ServingError
from ..moa.targets.live import Target


class Grammar:
    """Computes which tokens may follow an answer.

    The result is a bool array with one value per token of the vocabulary.
    """

    def __init__(self, matcher: Any, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab
        # The tokens of the answer that the matcher (llguidance's state of the grammar) has
        # consumed.
        self._taken: list[int] = []

    def __call__(self, answer: Sequence[int]) -> np.ndarray:
        """Return the tokens that may follow an answer.

        Each token of the answer must have been allowed at its position. The grammar still has the
        state after the answer of the previous call. It rolls back to the tokens that both answers
        have in common, and then consumes the other tokens of the new answer.
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
            # The answer is complete under the grammar, so only an end-of-sequence token may follow.
            if matcher.is_stopped():
                break
            matcher.consume_token(token)
            consumed.append(token)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise ServingError(
                "the answer cannot continue, because no token of the model fits the requested JSON "
                f"schema or regular expression: {matcher.get_error().splitlines()[0]}"
            )
        return np.unpackbits(bits, count=self._n_vocab, bitorder="little").view(bool)


class Grammars:
    """Creates grammars for the tokens of a target.

    Creating this object takes a second, because it loads llguidance and converts the tokenizer.
    """

    def __init__(self, target: Target) -> None:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise RequestInvalid(
                "answers that follow a JSON schema or a regular expression need the Python package "
                f"{error.name}, which is not installed on the server. Install it there with `pip "
                "install 'moa-data[structured]'`."
            ) from error
        self._n_vocab = target.facts.vocab_size
        self._matcher = LLMatcher
        ends = sorted(target.eos_token_ids) or None
        n_tokens = max(self._n_vocab, len(target.tokenizer))
        self._tokenizer = from_tokenizer(target.tokenizer, n_tokens, ends)

    def make(self, kind: str, form: Any, n: int) -> list[Grammar]:
        """Create n grammars for one form of answers.

        Args:
            kind: ``json`` for a JSON schema, or ``regex`` for a regular expression.
            form: the JSON schema or the regular expression.
            n: the number of grammars.

        Raises:
            RequestInvalid: the form is not supported.
        """
        grammar = (
            self._matcher.grammar_from_json_schema
            if kind == "json"
            else self._matcher.grammar_from_regex
        )
        matcher = self._matcher(self._tokenizer, grammar(form), log_level=0)
        if matcher.is_error():
            raise RequestInvalid(
                "the requested form of the answer "
                f"({'JSON schema' if kind == 'json' else 'regular expression'}) cannot be used: "
                f"{matcher.get_error().splitlines()[0]}."
            )
        return [Grammar(matcher.deep_copy(), self._n_vocab) for _ in range(n)]
