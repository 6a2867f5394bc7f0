"""Errors of the evaluation stage; every message says what was wrong and what to do next."""


class EvaluationError(Exception):
    """Something the user can mend kept the evaluation from running."""


class EvalConfigError(EvaluationError, ValueError):
    """A field of the evaluation's configuration has a value that cannot be used."""


class PromptsError(EvaluationError, ValueError):
    """The file of prompts cannot be read, or holds nothing that can be used."""
