"""Errors of exchange with the Hub; every message says what was wrong and what to do next."""

from ..errors import MoaDataError


class HubError(MoaDataError):
    """The Hub refuses, cannot be reached, or holds something else."""


class NothingToPush(HubError, ValueError):
    """The path is neither a whole store nor a drafter."""


class PullDamaged(HubError, ValueError):
    """What was downloaded is not what the Hub or the store's own checksums say."""

    exit_code = 1
