"""Reads and writes drafters in the layouts of other programs, which a table lists."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...errors import CheckpointError, DrafterError
from ..drafters.base import Drafter
from ..drafters.registry import drafter_class
from ..drafters.sizes import DrafterSizes
from ..files.foreign import check_regular, load_pickled_tensors, parsing, read_header, read_json
from ..files.tensor_list import check_tensors
from .base import OWN_KEY, DrafterLayout, Weights
from .block import DFlashLayout, DSparkLayout, VllmDSparkLayout
from .eagle import EagleAuthorsLayout, MoaEagleLayout, SglangEagleLayout, VllmEagleLayout
from .eagle3 import Eagle3Layout
from .moa import MoaLayout, MoaVllmLayout

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
_PICKLE_NAME = "pytorch_model.bin"
MAX_DRAFTER_BYTES = 64 << 30
"""Size limit of a drafter's weight file; those for the largest targets have a few GB."""

LAYOUTS: dict[str, DrafterLayout] = {
    layout.name: layout
    for layout in (
        MoaLayout(),
        MoaVllmLayout(),
        DFlashLayout(),
        DSparkLayout(),
        VllmDSparkLayout(),
        EagleAuthorsLayout(),
        VllmEagleLayout(),
        SglangEagleLayout(),
        MoaEagleLayout(),
        Eagle3Layout(),
    )
}
"""The layouts by name; a folder that is not ours belongs to the first one that recognises it."""


def read_layout(folder: Path) -> tuple[DrafterSizes, Weights]:
    """Read sizes and state dict of a drafter in any of the layouts, its tensors checked against the layout's list."""
    config = read_json(folder / CONFIG_NAME, CheckpointError)
    weights = read_weight_file(folder)
    own = config.get(OWN_KEY)
    if own is not None:
        layout, sizes = _own_entry(folder, own)
    else:
        layout = _recognise(folder, weights, config)
        weights = layout.canonical(weights)
        try:
            sizes = layout.read_sizes(weights, config)
        except DrafterError as error:
            raise CheckpointError(
                f"{folder} holds no usable {layout.kind} drafter of {layout.reader}: {error}"
            ) from error
    expected = layout.tensors(sizes)
    if own is None:
        expected = {name: spec for name, spec in expected.items() if name in weights or name not in layout.optional}
    check_tensors(weights, expected, folder)
    return sizes, layout.unpack(weights, sizes)


def write_layout(
    drafter: Drafter,
    layout: DrafterLayout,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    target_config: Any = None,
    embeddings: Tensor | None = None,
    lm_head: Tensor | None = None,
) -> None:
    """Write a drafter into an empty folder, and check the file against the layout's list of tensors.

    Args:
        target_config: the target's transformers config, for layouts that hold it.
        embeddings: [V, E] of the target, for layouts that hold them.
        lm_head: [V, E] of the target, likewise.

    Raises:
        CheckpointError: the drafter is of another kind, or its sizes have no place in the layout.
    """
    sizes = drafter.config
    if drafter.kind != layout.kind:
        fitting = ", ".join(name for name, other in LAYOUTS.items() if other.kind == drafter.kind) or "none"
        raise CheckpointError(
            f"the format {layout.name} holds drafters of kind {layout.kind}, this one is of kind {drafter.kind}; "
            f"formats for it: {fitting}."
        )
    if refusals := layout.refusals(sizes):
        raise CheckpointError(f"{layout.reader} cannot run this drafter as it was trained: {'; '.join(refusals)}.")
    weights = layout.pack({name: value.detach().cpu() for name, value in drafter.state_dict().items()}, sizes)
    for is_needed, copied, name, what in (
        (layout.needs_embeddings, embeddings, "embed_tokens.weight", "embeddings"),
        (layout.needs_head, lm_head, "lm_head.weight", "LM head"),
    ):
        if is_needed:
            if copied is None:
                raise CheckpointError(f"the format {layout.name} holds the target's {what}; give the target.")
            # Tied weights are one tensor, which a file of tensors holds once.
            weights[name] = copied.clone() if copied is embeddings else copied
    weights = {
        name: (value.to(dtype) if value.is_floating_point() else value).contiguous() for name, value in weights.items()
    }
    if layout.needs_target_config and target_config is None:
        raise CheckpointError(f"the format {layout.name} holds the target's config.json; give the target.")
    config = layout.config(sizes, target_config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    config.pop("dtype", None)
    config[OWN_KEY] = {"format": layout.name, "drafter": sizes.to_dict()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    check_tensors(load_file(folder / WEIGHTS_NAME), layout.tensors(sizes), folder)


def read_weight_file(folder: Path) -> Weights:
    """Read all tensors of ``model.safetensors``, or else of ``pytorch_model.bin``."""
    if (folder / WEIGHTS_NAME).is_file():
        return read_safetensors(folder / WEIGHTS_NAME)
    file = folder / _PICKLE_NAME
    if not file.is_file():
        raise CheckpointError(f"{folder} has a {CONFIG_NAME} but neither {WEIGHTS_NAME} nor {_PICKLE_NAME}.")
    with parsing(f"cannot read {file}", CheckpointError):
        check_regular(file, MAX_DRAFTER_BYTES)
        weights = load_pickled_tensors(file)
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in weights.items()):
        raise CheckpointError(f"{file} holds something else than named tensors; expected a state dict.")
    return weights


def read_safetensors(file: Path) -> Weights:
    """Read all tensors of a safetensors file; a missing or damaged one is refused."""
    if not file.is_file():
        raise CheckpointError(f"{file} is missing.")
    with parsing(f"cannot read {file}", CheckpointError):
        check_regular(file, MAX_DRAFTER_BYTES)
    read_header(file, CheckpointError)
    with parsing(f"cannot read {file}", CheckpointError):
        return load_file(file)


def _own_entry(folder: Path, entry: Any) -> tuple[DrafterLayout, DrafterSizes]:
    """Return layout and sizes from what :func:`write_layout` left in config.json."""
    where = f"{folder / CONFIG_NAME}, key {OWN_KEY!r}"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("drafter"), dict):
        raise CheckpointError(f"{where} is not what this program writes; export the drafter again.")
    if entry.get("format") not in list(LAYOUTS):  # a list may be asked for what has no hash
        raise CheckpointError(
            f"{where}: the format {entry.get('format')!r} is unknown; was it written by a newer release?"
        )
    layout = LAYOUTS[entry["format"]]
    try:
        return layout, drafter_class(layout.kind).config_class.from_dict(entry["drafter"])
    except DrafterError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _recognise(folder: Path, weights: Weights, config: Mapping[str, Any]) -> DrafterLayout:
    for layout in LAYOUTS.values():
        if layout.recognises(set(layout.canonical(weights)), config):
            return layout
    some = ", ".join(sorted(weights)[:3])
    raise CheckpointError(
        f"{folder} holds no drafter: its tensors ({some}, ...) are none of the layouts {', '.join(LAYOUTS)}."
    )
