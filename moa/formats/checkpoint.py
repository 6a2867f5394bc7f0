"""Reads and writes drafter checkpoints: our own layout, and those of other programs (``table.py``).

Own: ``drafter.json`` (:class:`DrafterSizes`, with kind and target identity; without a kind it is a Mixture of
Attentions) and ``drafter.safetensors``.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..drafters.base import Drafter
from ..drafters.mixture import MoADrafter
from ..drafters.registry import drafter_class
from ..drafters.sizes import DrafterSizes, check_identity_fits, check_sizes_fit
from ..files.foreign import read_json
from ..files.tensor_file import write_tensors
from ..files.tensor_list import FLOATS, TensorSpec, check_tensors
from ..targets.live import Target
from .table import CONFIG_NAME, LAYOUTS, read_layout, read_safetensors

CONFIG_FILE = "drafter.json"
WEIGHTS_FILE = "drafter.safetensors"


def save_drafter(drafter: Drafter, folder: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the own layout; each file replaces its predecessor in one step, ``drafter.json`` last.

    Args:
        weights: the drafter's, where they are elsewhere; None for its own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (WEIGHTS_FILE + ".partial")
    write_tensors(partial, drafter.state_dict() if weights is None else weights)
    partial.replace(folder / WEIGHTS_FILE)
    partial = folder / (CONFIG_FILE + ".partial")
    partial.write_text(json.dumps(drafter.config.to_dict(), indent=1) + "\n")
    partial.replace(folder / CONFIG_FILE)


def load_drafter(folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Drafter:
    """Load a drafter: a training run that contains ``drafter/``, its own layout, or one of :data:`.table.LAYOUTS`.

    Args:
        folder: folder of the drafter or the run; ``~`` is the home folder.

    Raises:
        CheckpointError: nothing there, or keys and shapes that differ from what the sizes call for.
    """
    folder = Path(folder).expanduser()
    if (folder / "drafter" / CONFIG_FILE).is_file():
        folder = folder / "drafter"
    config: DrafterSizes
    if (folder / CONFIG_FILE).is_file():
        values = read_json(folder / CONFIG_FILE, CheckpointError)
        config = drafter_class(str(values.get("kind", MoADrafter.kind))).config_class.from_dict(values)
        weights = read_safetensors(folder / WEIGHTS_FILE)
    elif (folder / CONFIG_NAME).is_file():
        config, weights = read_layout(folder)
    else:
        raise CheckpointError(_why_no_drafter(folder))
    return build_drafter(config, weights, source=folder).to(device=device, dtype=dtype).eval()


def _why_no_drafter(folder: Path) -> str:
    """Say what is there in the place of a drafter."""
    if not folder.exists():
        return f"{folder} does not exist. Give the folder of a drafter, or of a run of `moa-data train`."
    if (folder / "run.yaml").is_file():
        resume = " with --resume" * (folder / "checkpoints" / "last.ckpt").is_file()
        return (
            f"{folder} is a run of `moa-data train` that was stopped before it wrote a drafter. Run the same command "
            f"again{resume}, until it ends."
        )
    if (folder / "plan.parquet").is_file():
        return f"{folder} is a store of activations, which holds no drafter; `moa-data train {folder}` trains one."
    return (
        f"{folder} holds no drafter: expected a run, {CONFIG_FILE}, or {CONFIG_NAME} of one of the formats "
        f"{', '.join(LAYOUTS)}."
    )


def build_drafter(config: DrafterSizes, weights: dict[str, Tensor], source: str | Path = "weights") -> Drafter:
    """Build a drafter with the given weights; every key and shape must match."""
    build = drafter_class(config.kind)
    with torch.device("meta"):
        state = build(config).state_dict()
    expected = {
        name: TensorSpec(tuple(value.shape), FLOATS if value.is_floating_point() else (value.dtype,))
        for name, value in state.items()
    }
    check_tensors(weights, expected, source)
    drafter = build(config)
    drafter.load_state_dict(weights, strict=True)
    return drafter


def check_drafter_matches(drafter: Drafter, target: Target) -> None:
    """Refuse a drafter that was trained for another target."""
    check_sizes_fit(drafter.config, target.sizes)
    check_identity_fits(drafter.config, target.identity)
