"""Errors of training. The command line turns each into one line and exit code 2."""


class TrainingError(Exception):
    """Training cannot start or go on as asked."""


class MissingField(TrainingError):
    """The store lacks an activation that the drafter needs."""


class RunExists(TrainingError):
    """The output folder holds another run."""


class TrainingInterrupted(TrainingError):
    """Stopped by the user; the state is saved."""


class NonFiniteGradient(TrainingError, FloatingPointError):
    """A gradient is NaN or infinite; the step was not taken."""
