"""Registry of drafters. Its keys are the values of ``kind`` in ``drafter.json``."""

from ...errors import DrafterError
from .base import Drafter
from .block import DFlashDrafter, DSparkDrafter
from .eagle import EagleDrafter
from .eagle3 import Eagle3Drafter
from .glide import GlideDrafter
from .independent import IndependentDrafter
from .medusa import MedusaDrafter
from .mixture import MoADrafter

DRAFTERS: dict[str, type[Drafter]] = {
    drafter.config_class.kind: drafter
    for drafter in (
        MoADrafter,
        EagleDrafter,
        Eagle3Drafter,
        DSparkDrafter,
        DFlashDrafter,
        GlideDrafter,
        MedusaDrafter,
        IndependentDrafter,
    )
}
REMOTE_KINDS = tuple(kind for kind, drafter in DRAFTERS.items() if drafter.drafts_remotely)
"""Kinds of drafters that can run on another machine than the target, as in `moa-data chat`."""


def drafter_class(kind: str) -> type[Drafter]:
    """Return the drafter class of a kind; raise DrafterError if the kind is unknown."""
    if kind not in DRAFTERS:
        raise DrafterError(
            f"{kind!r} is not a kind of drafter. Expected one of {', '.join(DRAFTERS)}."
        )
    return DRAFTERS[kind]
