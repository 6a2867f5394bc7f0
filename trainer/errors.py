"""Errors of training. The command line turns each into one line and an exit code."""

from pathlib import Path

from ..errors import MoaDataError


class TrainingError(MoaDataError):
    """Training cannot start or go on as asked."""


class MissingField(TrainingError):
    """The store lacks an activation that the drafter needs."""


class RunExists(TrainingError):
    """The output folder holds another run."""


class CheckpointInvalid(TrainingError):
    """A file is no checkpoint, or one that the run cannot go on from; none of it was used."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} is damaged or not a checkpoint of this run: {reason}. Nothing of it was used; copy best.ckpt over "
            "it, if it is there, or train again with another --out."
        )


class LoggerMissing(TrainingError, ImportError):
    """The package of the logger that was asked for is not installed."""


class NonFiniteGradient(TrainingError, FloatingPointError):
    """A gradient is NaN or infinite; the step was not taken."""


class TargetUnknown(TrainingError, LookupError):
    """The target of a drafter is needed and cannot be found."""


class RunWarning(UserWarning):
    """A run does not go as its settings say."""


class BatchShrunk(RunWarning):
    """The store has fewer sequences than the default batch."""


class MemoryShort(RunWarning):
    """A run is foretold to take more memory than there is."""
