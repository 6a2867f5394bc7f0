"""Errors of the evaluation stage; every message says what was wrong and what to do next."""

from pathlib import Path

from ..errors import MoaDataError


class EvaluationError(MoaDataError):
    """Something the user can mend kept the evaluation from running."""


class ReportUnwritten(EvaluationError, OSError):
    """The report cannot be written after all was measured.

    Attributes:
        markdown: the report as text.
    """

    def __init__(self, path: Path, error: OSError, markdown: str) -> None:
        reason = error.strerror or str(error)
        super().__init__(f"{path} cannot be written ({reason}); the report is printed instead. Free some space first.")
        self.markdown = markdown


class PromptsError(EvaluationError, ValueError):
    """The file of prompts cannot be read, or holds nothing that can be used."""
