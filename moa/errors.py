"""Errors of the drafter and decoding code. The command line turns each into one line and exit code 2."""

from ..errors import MoaDataError


class DrafterError(MoaDataError):
    """A drafter, a target or a decoding request that cannot be used as given."""


class TargetError(DrafterError):
    """A target model folder or Hub id that cannot be loaded or is not supported."""


class CheckpointError(DrafterError, ValueError):
    """Drafter weights whose keys or shapes differ from what the sizes call for."""


class TargetMismatch(DrafterError, ValueError):
    """A drafter used with another target than the one it was trained for."""
