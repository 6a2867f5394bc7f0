"""Errors of export, import and the torch datasets; every message says what was wrong and what to do next."""


class InteropError(Exception):
    """Something the user can mend kept data from being exchanged."""


class OptionInvalid(InteropError, ValueError):
    """An option, or an argument of a dataset, has a value that cannot be used."""


class FieldMissing(InteropError, LookupError):
    """The store lacks a field that the other layout needs."""


class ForeignInvalid(InteropError, ValueError):
    """A file of another project does not hold what its layout says."""


class TargetUnknown(InteropError, LookupError):
    """The target of a drafter is needed and cannot be found."""


class FolderOccupied(InteropError, FileExistsError):
    """The output folder holds an export of other data, or something else."""
