"""Starts a run from the weights of an existing drafter: ``--init-from``."""

from typing import Any

from ...errors import TrainingError
from ...moa.drafters.base import Drafter
from ...moa.drafters.sizes import check_identity_fits, check_sizes_fit
from ...moa.formats.checkpoint import build_drafter, load_drafter
from ..config import DrafterSettings


def initial_drafter(source: str, fresh: Drafter, settings: DrafterSettings, target: dict[str, Any]) -> Drafter:
    """Build the drafter of a run with the weights of another.

    Args:
        source: a run, or a folder with a drafter in any format that can be loaded.
        fresh: the drafter that the run would start with otherwise.
        settings: the run's settings of its drafter.
        target: sizes of the store's target (``bundle.target_sizes``).

    Raises:
        CheckpointError: there is no drafter, or its weights have other names or shapes.
        TargetError: it belongs to another target.
        TrainingError: it is of another kind, or was trained with other settings than the run's.
    """
    other = load_drafter(source)
    check_sizes_fit(other.config, target)
    check_identity_fits(other.config, fresh.config.target)
    if other.kind != fresh.kind:
        raise TrainingError(
            f"{source} holds a drafter of kind {other.kind}, this run trains {fresh.kind}. Give --drafter {other.kind}."
        )
    names = [name for name in type(settings).model_fields if hasattr(fresh.config, name)]
    needed = [
        f"--set drafter.{name}={_as_text(getattr(other.config, name))}"
        for name in names
        if name != "kind" and getattr(other.config, name) != getattr(fresh.config, name)
    ]
    if needed:
        raise TrainingError(f"the drafter of {source} has other settings than this run. Give {' '.join(needed)}.")
    return build_drafter(fresh.config, other.state_dict(), source)


def _as_text(value: Any) -> str:
    """Write a setting as ``--set`` takes it."""
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
