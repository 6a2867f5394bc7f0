"""Registry of drafters by the kind that their ``drafter.json`` names."""

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
REMOTE_KINDS = tuple(kind for kind, one in DRAFTERS.items() if one.drafts_remotely)
"""Kinds that can draft away from the target, as `moa-data chat` does."""


def drafter_class(kind: str) -> type[Drafter]:
    """Find the drafter of a kind; raises DrafterError for an unknown one."""
    if kind not in DRAFTERS:
        raise DrafterError(f"{kind!r} is not a drafter; expected one of {', '.join(DRAFTERS)}.")
    return DRAFTERS[kind]
