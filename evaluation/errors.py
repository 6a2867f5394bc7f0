"""Errors of the evaluation stage; every message says what was wrong and what to do next."""

from ..errors import MoaDataError


class EvaluationError(MoaDataError):
    """Something the user can mend kept the evaluation from running."""


class PromptsError(EvaluationError, ValueError):
    """The file of prompts cannot be read, or holds nothing that can be used."""
