"""Reads and writes drafter checkpoints: our own layout, and those of other programs, which :data:`LAYOUTS` lists.

Own: ``drafter.safetensors`` and ``drafter.json`` (:class:`DrafterSizes`; without a kind, of a Mixture of Attentions).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ...errors import DrafterError
from ...files import parsing, write_file
from ..drafters.base import Drafter
from ..drafters.mixture import MoASizes
from ..drafters.registry import drafter_class
from ..drafters.sizes import DrafterSizes, check_target_fits
from ..targets.live import Target
from ..targets.model_files import (
    check_finite,
    find_problems,
    load_pickled_tensors,
    read_header,
    read_json,
    write_tensors,
)
from ..targets.template import ChatTemplate, choose_template_arguments
from .block import DFLASH, DSPARK, HF_DFLASH, VLLM_DSPARK
from .eagle import EAGLE, EAGLE3, MOA_EAGLE, SGLANG_EAGLE, VLLM_EAGLE
from .layout import Layout, Weights
from .llama import LLAMA
from .moa import MOA, MOA_VLLM
from .speculators import SPECULATORS_DFLASH, SPECULATORS_DSPARK, SPECULATORS_EAGLE3

CONFIG_FILE = "drafter.json"
WEIGHTS_FILE = "drafter.safetensors"
_LAYOUT_CONFIG = "config.json"
_LAYOUT_WEIGHTS = "model.safetensors"
_LAYOUT_PICKLE = "pytorch_model.bin"
# of config.json, with what a layout has no place for; other programs do not look at it
_OWN_KEY = "moa_data"

# By name; a folder that this package did not write belongs to the first one that recognises it.
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        SPECULATORS_EAGLE3,
        SPECULATORS_DSPARK,
        SPECULATORS_DFLASH,
        MOA,
        MOA_VLLM,
        DFLASH,
        HF_DFLASH,
        DSPARK,
        VLLM_DSPARK,
        EAGLE,
        VLLM_EAGLE,
        SGLANG_EAGLE,
        MOA_EAGLE,
        EAGLE3,
        LLAMA,
    )
}


def save_drafter(drafter: Drafter, folder: str | Path) -> None:
    """Write our own layout and sync it, ``drafter.json`` last: a folder without it holds no drafter."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS_FILE, drafter.state_dict())
    write_file(
        folder / CONFIG_FILE, (json.dumps(drafter.config.to_dict(), indent=1) + "\n").encode()
    )


def load_drafter(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Drafter:
    """Load a drafter from the folder of a run, of our own layout, or of one of :data:`LAYOUTS`."""
    folder = Path(folder).expanduser()
    if (folder / "drafter" / CONFIG_FILE).is_file():
        folder = folder / "drafter"
    config: DrafterSizes
    if (folder / CONFIG_FILE).is_file():
        values = read_json(folder / CONFIG_FILE, DrafterError)
        config = drafter_class(str(values.get("kind", MoASizes.kind))).config_class.from_dict(
            values
        )
        weights = _read_safetensors(folder / WEIGHTS_FILE)
    elif (folder / _LAYOUT_CONFIG).is_file():
        config, weights = _read_layout(folder)
    else:
        raise DrafterError(_why_no_drafter(folder))
    drafter = build_drafter(config, weights, source=folder).to(device=device, dtype=dtype).eval()
    check_finite(drafter.state_dict(), folder, DrafterError)
    return drafter


def _why_no_drafter(folder: Path) -> str:
    if not folder.exists():
        return f"{folder} does not exist. Give the folder of a drafter, or of a run of `moa-data train`."
    if (folder / "run.yaml").is_file():
        resume = " with --resume" * (folder / "checkpoints" / "last.ckpt").is_file()
        return f"{folder} is a run that was stopped before it wrote a drafter. Run the same command again{resume}."
    if (folder / "plan.parquet").is_file():
        return f"{folder} is a store, which holds no drafter; `moa-data train {folder}` trains one."
    return (
        f"{folder} holds no drafter: expected a run, {CONFIG_FILE}, or {_LAYOUT_CONFIG} of one of the formats "
        f"{', '.join(LAYOUTS)}."
    )


def load_drafters(folders: Sequence[str], target: Target, dtype: torch.dtype) -> dict[str, Drafter]:
    """Load drafters of a target by name, the last part of the folder that is not ``drafter``, in the given order."""
    loaded: dict[str, Drafter] = {}
    for folder in folders:
        drafter = load_drafter(folder, dtype, target.device)
        check_drafter_matches(drafter, target)
        path = Path(folder).expanduser().absolute()  # a link keeps its own name
        name = path.parent.name if path.name == "drafter" else path.name
        while name in loaded:
            name += "'"
        loaded[name] = drafter
    return loaded


def ready_drafters(
    target: Target, folders: Sequence[str], template_kwargs: Sequence[str], where: str
) -> dict[str, Drafter]:
    """Load drafters to decode with, and give the target the chat template of the chats that they learned from.

    ``template_kwargs`` are arguments of that template, which win over those; ``where`` names the target in messages.
    """
    drafters = load_drafters(folders, target, target.model.dtype)
    for drafter in drafters.values():
        drafter.prepare()
    arguments = choose_template_arguments(
        template_kwargs, {name: one.config.target for name, one in drafters.items()}
    )
    target.template = ChatTemplate(target.tokenizer, arguments, where)
    return drafters


def build_drafter(
    config: DrafterSizes, weights: Weights, source: str | Path = "weights"
) -> Drafter:
    """Build a drafter with the given weights; every key and shape must match."""
    build = drafter_class(config.kind)
    with torch.device("meta"):
        state = build(config).state_dict()
    if problem := find_problems(weights, state):
        raise DrafterError(f"{source} does not fit its sizes: {problem}.")
    drafter = build(config)
    drafter.load_state_dict(weights, strict=True)
    drafter.check_weights()
    return drafter


def export_problems(sizes: DrafterSizes) -> dict[str, list[str]]:
    """Map the formats of this kind of drafter to why their reader would run it differently; empty if it would not."""
    return {
        name: layout.refusals(sizes)
        for name, layout in LAYOUTS.items()
        if layout.kind == sizes.kind
    }


def check_drafter_matches(drafter: Drafter, target: Target) -> None:
    """Refuse a drafter that was trained for another target."""
    check_target_fits(drafter.config, target.sizes, target.identity)


def write_layout(
    drafter: Drafter,
    layout: Layout,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    target: Mapping[str, Any] = {},  # pieces of the target by the names in ``layout.needs``
) -> int:
    """Write a drafter into an empty folder in the layout of another program; returns the number of tensors.

    Raises:
        DrafterError: the drafter is of another kind, or its sizes have no place in the layout.
    """
    sizes = drafter.config
    if drafter.kind != layout.kind:
        fitting = (
            ", ".join(name for name, other in LAYOUTS.items() if other.kind == drafter.kind)
            or "none"
        )
        raise DrafterError(
            f"the format {layout.name} holds drafters of kind {layout.kind}, this one is of kind {drafter.kind}; "
            f"formats for it: {fitting}."
        )
    if refusals := layout.refusals(sizes):
        raise DrafterError(
            f"{layout.reader} cannot run this drafter as it was trained: {'; '.join(refusals)}. Train it with these "
            "sizes: --set drafter.NAME=VALUE."
        )
    own = {name: value.detach().cpu() for name, value in drafter.state_dict().items()}
    weights = {layout.file_name(name): value for name, value in layout.pack(own, sizes).items()}
    # Tied weights are one tensor, which a file holds once.
    weights |= {name: target[name].clone() for name in layout.needs if name != "config"}
    weights = {
        name: (value.to(dtype) if value.is_floating_point() else value).contiguous()
        for name, value in weights.items()
    }
    config = layout.config(sizes, target.get("config")) | {
        "torch_dtype": str(dtype).removeprefix("torch.")
    }
    config.pop("dtype", None)
    config[_OWN_KEY] = {"format": layout.name, "drafter": sizes.to_dict()}
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / _LAYOUT_WEIGHTS, weights)
    (folder / _LAYOUT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return len(weights)


def _read_layout(folder: Path) -> tuple[DrafterSizes, Weights]:
    config = read_json(folder / _LAYOUT_CONFIG, DrafterError)
    found = {
        name.removeprefix("model."): value for name, value in _read_weight_file(folder).items()
    }
    own = config.get(_OWN_KEY)
    if own is None:
        layout = next((one for one in LAYOUTS.values() if one.recognises(set(found), config)), None)
    else:
        layout = LAYOUTS.get(str(own.get("format"))) if isinstance(own, dict) else None
    if layout is None:
        given = ", ".join(sorted(found)[:3]) if own is None else f"{_OWN_KEY} {str(own)[:60]}"
        raise DrafterError(
            f"{folder} ({given}, ...) holds a drafter of none of the formats {', '.join(LAYOUTS)}."
        )
    weights = {
        layout.own_name(name): value
        for name, value in found.items()
        if name not in layout.ignored and not name.endswith("rotary_emb.inv_freq")
    }
    try:
        if own is None:
            sizes = layout.read_sizes(weights, config)
        else:
            sizes = drafter_class(layout.kind).config_class.from_dict(own["drafter"])
        return sizes, layout.unpack(weights, sizes)
    except (DrafterError, KeyError, TypeError, AttributeError) as error:
        raise DrafterError(
            f"{folder} holds no usable {layout.kind} drafter of {layout.reader}: {error}"
        ) from error


def _read_weight_file(folder: Path) -> Weights:
    """Read all tensors of ``model.safetensors``, or else of ``pytorch_model.bin``."""
    file = folder / _LAYOUT_PICKLE
    if not file.is_file() or (folder / _LAYOUT_WEIGHTS).is_file():
        return _read_safetensors(folder / _LAYOUT_WEIGHTS)
    with parsing(f"cannot read {file}", DrafterError):
        weights = load_pickled_tensors(file)
        if not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in weights.items()
        ):
            raise ValueError("it holds something else than named tensors")
    return weights


def _read_safetensors(file: Path) -> Weights:
    read_header(file, DrafterError)
    with parsing(f"cannot read {file}", DrafterError):
        return load_file(file)
