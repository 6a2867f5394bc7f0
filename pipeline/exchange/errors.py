"""Errors of export, import and the torch datasets; every message says what was wrong and what to do next."""

from ...errors import MoaDataError


class InteropError(MoaDataError):
    """Something the user can mend kept data from being exchanged."""


class FieldMissing(InteropError, LookupError):
    """The store lacks a field that the other format needs."""


class ForeignInvalid(InteropError, ValueError):
    """A file of another project does not hold what its format says."""
