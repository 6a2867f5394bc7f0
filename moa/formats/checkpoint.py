"""Reads and writes drafter checkpoints in our own layout and in the layouts of other programs.

Our own layout consists of two files: ``drafter.safetensors`` has the weights, and ``drafter.json``
has the sizes (:class:`DrafterSizes`). If ``drafter.json`` does not state the kind of drafter, the
kind is Mixture of Attentions. :data:`LAYOUTS` lists the layouts of other programs.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig

from ...errors import DrafterError
from ...files import parsing, write_file
from ..drafters.base import Drafter
from ..drafters.mixture import MoASizes
from ..drafters.registry import drafter_class
from ..drafters.sizes import DrafterSizes, check_target_fits
from ..targets.live import Target
from ..targets.model_files import (
    FLOATS,
    check_finite,
    find_problems,
    load_pickled_tensors,
    read_header,
    read_json,
    write_tensors,
)
from ..targets.template import ChatTemplate, choose_template_arguments
from .block import DFLASH, DSPARK, HF_DFLASH, VLLM_DSPARK
from .eagle import EAGLE, EAGLE3, EAGLE3_FLAGS, MOA_EAGLE, SGLANG_EAGLE, VLLM_EAGLE
from .layout import LM_HEAD, ForeignConfig, Layout, Weights, check_shape, nested, target_keys
from .llama import LLAMA
from .moa import MOA, MOA_VLLM
from .speculators import (
    LAYERS_KEY,
    SPECULATORS_DFLASH,
    SPECULATORS_DSPARK,
    SPECULATORS_EAGLE3,
)

CONFIG_FILE = "drafter.json"
WEIGHTS_FILE = "drafter.safetensors"
_LAYOUT_CONFIG = "config.json"
_LAYOUT_WEIGHTS = "model.safetensors"
_LAYOUT_INDEX = "model.safetensors.index.json"
_LAYOUT_PICKLE = "pytorch_model.bin"
# The key in config.json under which moa-data records all sizes of the drafter. Some layouts have
# keys only for some of the sizes, so the other sizes could not be read without this key. Other
# programs ignore this key.
_OWN_KEY = "moa_data"
# Keys of config.json that say whether layers have biases or norms. An absent key means false.
_FLAGS = ("attention_bias", "qkv_bias", "mlp_bias", "bias", *EAGLE3_FLAGS)
# Keys of config.json whose values follow from the sizes that moa-data records under ``_OWN_KEY``.
# When a folder is read, these values must not contradict the recorded sizes.
_IMPLIED_KEYS = {
    "hidden_size", "vocab_size", "draft_vocab_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "rope_theta",
    "hidden_act", "tie_word_embeddings", "markov_rank", "markov_head_type",
    "enable_confidence_head", "confidence_head_with_markov", *_FLAGS,
}  # fmt: skip

# Layouts by name. The order of the layouts matters: if this package did not write a folder, the
# folder is read with the first layout that recognises it.
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
    """Write a drafter in our own layout, and sync the files to disk.

    ``drafter.json`` is written last, because a folder without this file counts as a folder without
    a drafter.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS_FILE, drafter.state_dict())
    write_file(
        folder / CONFIG_FILE, (json.dumps(drafter.config.to_dict(), indent=1) + "\n").encode()
    )


def load_drafter(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Drafter:
    """Load a drafter from the folder of a training run, or from a folder in any supported layout.

    :data:`LAYOUTS` lists the layouts of other programs.
    """
    folder = Path(folder).expanduser()
    if (folder / "drafter" / CONFIG_FILE).is_file():
        folder = folder / "drafter"
    config: DrafterSizes
    file_name: Callable[[str], str] = str
    if (folder / CONFIG_FILE).is_file():
        values = read_json(folder / CONFIG_FILE, DrafterError)
        config = drafter_class(str(values.get("kind", MoASizes.kind))).config_class.from_dict(
            values
        )
        weights = _read_safetensors(folder / WEIGHTS_FILE)
    elif (folder / _LAYOUT_CONFIG).is_file():
        config, weights, file_name = _read_layout(folder)
    else:
        raise DrafterError(_why_no_drafter(folder))
    drafter = build_drafter(config, weights, folder, file_name).to(device, dtype).eval()
    state = {file_name(name): value for name, value in drafter.state_dict().items()}
    check_finite(state, folder, DrafterError)
    return drafter


def _why_no_drafter(folder: Path) -> str:
    if not folder.exists():
        return (
            f"{folder} does not exist. Give the folder of a drafter, or of a run of "
            "`moa-data train`."
        )
    if (folder / "run.yaml").is_file():
        resume = " with `resume`" * (folder / "checkpoints" / "last.ckpt").is_file()
        return (
            f"{folder} is a training run that was stopped before it wrote a drafter. "
            f"Run the same command again{resume}."
        )
    if (folder / "plan.parquet").is_file():
        return (
            f"{folder} is a store and holds no drafter. Train one with `moa-data train {folder}`, "
            "and give the folder of that run."
        )
    return (
        f"{folder} holds no drafter. Expected the folder of a training run, a folder with "
        f"{CONFIG_FILE}, or a folder with {_LAYOUT_CONFIG} in one of the formats "
        f"{', '.join(LAYOUTS)}."
    )


def load_drafters(folders: Sequence[str], target: Target, dtype: torch.dtype) -> dict[str, Drafter]:
    """Load the drafters of a target, in the order of the folders.

    Returns:
        Name -> drafter. The name of a drafter is the name of its folder. If the folder is named
        ``drafter``, the drafter gets the name of the parent folder. If another drafter already has
        the same name, an apostrophe is appended.
    """
    loaded: dict[str, Drafter] = {}
    for folder in folders:
        drafter = load_drafter(folder, dtype, target.device)
        check_drafter_matches(drafter, target)
        # Do not resolve symbolic links. The name of a linked folder is the name of the link.
        path = Path(folder).expanduser().absolute()
        name = path.parent.name if path.name == "drafter" else path.name
        while name in loaded:
            name += "'"
        loaded[name] = drafter
    return loaded


def load_target_and_drafters(
    settings: Any, folders: Sequence[str]
) -> tuple[Target, dict[str, Drafter]]:
    """Load a target and drafters for decoding, and set the target's chat template.

    The chat template gets the same arguments as when the drafters' training chats were rendered.

    Args:
        settings: the settings of a target, such as ``config.TargetSettings``. The template
            arguments in these settings override the arguments of the training chats.
        folders: folders of the drafters.
    """
    target = Target.load(
        settings.model, getattr(torch, settings.dtype), settings.device, settings.revision
    )
    drafters = load_drafters(folders, target, target.model.dtype)
    for drafter in drafters.values():
        drafter.prepare()
    arguments = choose_template_arguments(
        settings.template_kwargs, {name: loaded.config.target for name, loaded in drafters.items()}
    )
    target.template = ChatTemplate(target.tokenizer, arguments, settings.model)
    return target, drafters


def build_drafter(
    config: DrafterSizes,
    weights: Weights,
    source: str | Path = "weights",
    file_name: Callable[[str], str] = str,
) -> Drafter:
    """Build a drafter with the given weights.

    Args:
        config: the sizes of the drafter.
        weights: the weights of the drafter. Wrong names or shapes of tensors are refused.
        source: where the weights come from, for error messages.
        file_name: converts the name of a tensor to the name in the file, for error messages.
    """
    build = drafter_class(config.kind)
    with torch.device("meta"):
        state = build(config).state_dict()
    found, expected = (
        {file_name(name): value for name, value in tensors.items()} for tensors in (weights, state)
    )
    if problem := find_problems(found, expected):
        raise DrafterError(
            f"{source}: the weights do not fit the sizes of the drafter ({problem}). Restore the "
            "drafter's files."
        )
    drafter = build(config)
    drafter.load_state_dict(weights, strict=True)
    drafter.check_weights()
    return drafter


def export_problems(sizes: DrafterSizes) -> dict[str, list[str]]:
    """Check each export format for a drafter.

    Returns:
        Name of the format -> reasons why the program that reads the format would not run the
        drafter as it was trained. If there are no such reasons, the list is empty.
    """
    problems: dict[str, list[str]] = {}
    for name, layout in LAYOUTS.items():
        if layout.kind == sizes.kind:
            problems[name] = layout.refusals(sizes)
    return problems


def check_drafter_matches(drafter: Drafter, target: Target) -> None:
    """Raise TargetError if a drafter was trained for another target."""
    check_target_fits(drafter.config, target.facts.sizes, target.identity)


def write_layout(
    drafter: Drafter,
    layout: Layout,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    target: Mapping[str, Any] = {},
) -> int:
    """Write a drafter into an empty folder in the layout of another program.

    Args:
        drafter: the drafter to write.
        layout: the layout of the other program.
        folder: the folder to write to. It is created if it does not exist.
        dtype: dtype of all floating-point tensors in the file.
        target: the target's config and tensors, under the names in ``layout.needs``.

    Returns:
        The number of written tensors.

    Raises:
        DrafterError: the layout is for another kind of drafter, or does not support the drafter's
            sizes.
    """
    sizes = drafter.config
    if drafter.kind != layout.kind:
        fitting = [name for name, other in LAYOUTS.items() if other.kind == drafter.kind]
        raise DrafterError(
            f"the format {layout.name} is for drafters of kind {layout.kind}, but this drafter is "
            f"of kind {drafter.kind}. Its formats are: {', '.join(fitting) or 'none'}. Choose one "
            "of them with `format`."
        )
    if refusals := layout.refusals(sizes):
        raise DrafterError(
            f"{layout.reader} cannot run this drafter as it was trained, because "
            f"{'; '.join(refusals)}. Train a drafter with other sizes "
            "(`moa-data train --set drafter.NAME=VALUE`), or choose another `format`."
        )
    weights = _layout_weights(drafter, layout, dtype, target)
    config = layout.config(sizes, target.get("config")) | {
        "torch_dtype": str(dtype).removeprefix("torch.")
    }
    config.pop("dtype", None)
    config[_OWN_KEY] = {"format": layout.name, "drafter": sizes.to_dict()}
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / _LAYOUT_WEIGHTS, weights)
    (folder / _LAYOUT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return len(weights)


def _layout_weights(
    drafter: Drafter, layout: Layout, dtype: torch.dtype, target: Mapping[str, Any]
) -> Weights:
    """Convert the weights of a drafter to a layout and a dtype.

    The result includes copies of the target's tensors that the layout needs.
    """
    state = {name: value.detach().cpu() for name, value in drafter.state_dict().items()}
    weights: Weights = {}
    for name, value in layout.pack(state, drafter.config).items():
        weights[layout.file_name(name)] = value
    for name in layout.needs:
        if name != "config":
            # Clone the tensor, because a safetensors file cannot hold tensors that share memory,
            # such as tied weights.
            weights[name] = target[name].clone()
    converted: Weights = {}
    for name, value in weights.items():
        in_dtype = value.to(dtype) if value.is_floating_point() else value
        converted[name] = in_dtype.contiguous()
    return converted


def _read_layout(folder: Path) -> tuple[DrafterSizes, Weights, Callable[[str], str]]:
    """Read a drafter in the layout of another program.

    Returns:
        The drafter's sizes, its weights, and a function that converts the name of a weight to its
        name in the file.
    """
    config = read_json(folder / _LAYOUT_CONFIG, DrafterError)
    tensors = _renamed(_read_weight_file(folder), lambda name: name.removeprefix("model."), folder)
    record = config.get(_OWN_KEY)
    if record is None:
        names = set(tensors)
        recognised = (known for known in LAYOUTS.values() if known.recognises(names, config))
        layout = next(recognised, None)
    else:
        layout = LAYOUTS.get(str(record.get("format"))) if isinstance(record, dict) else None
    if layout is None:
        description = f"{_LAYOUT_CONFIG} has {_OWN_KEY} {str(record)[:60]}"
        if record is None:
            description = (
                f"its tensors are {', '.join([*sorted(tensors)[:3], '...'])}"
                if tensors
                else "it has no tensors"
            )
        raise DrafterError(
            f"{folder} holds a drafter in an unknown format ({description}). Give a drafter in one "
            f"of the formats {', '.join(LAYOUTS)}."
        )
    weights: Weights = {}
    for name, value in tensors.items():
        if name not in layout.ignored and not name.endswith("rotary_emb.inv_freq"):
            weights[name] = value
    weights = _renamed(weights, layout.own_name, folder)
    try:
        if record is None:
            sizes = layout.read_sizes(weights, config)
        else:
            sizes = drafter_class(layout.kind).config_class.from_dict(record["drafter"])
            _check_record(sizes, layout, config, folder)
        unpacked = layout.unpack(weights, sizes)
        _check_ignored(tensors, layout, sizes, () if record is None else layout.needs)
        return sizes, unpacked, layout.file_name
    except (DrafterError, KeyError, TypeError, AttributeError) as error:
        reason = str(error)
        if isinstance(error, KeyError):
            reason = (
                f"{_OWN_KEY} in {_LAYOUT_CONFIG}, or the file of weights, lacks {error}. Restore "
                "the original files."
            )
        raise DrafterError(
            f"{folder} holds a drafter of kind {layout.kind} for {layout.reader} that cannot be "
            f"used: {reason}"
        ) from error


def _renamed(weights: Weights, rename: Callable[[str], str], folder: Path) -> Weights:
    """Rename tensors. Refuse two tensors that get the same name: their values may differ."""
    renamed: Weights = {}
    for name, value in weights.items():
        own_name = rename(name)
        if own_name in renamed:
            raise DrafterError(
                f"{folder}: the tensor {name} {list(value.shape)} and another tensor of the file "
                f"both stand for the drafter's tensor {own_name}. Remove one of them from the file."
            )
        renamed[own_name] = value
    return renamed


def _check_record(sizes: DrafterSizes, layout: Layout, config: ForeignConfig, folder: Path) -> None:
    """Refuse a config.json that contradicts itself.

    The file contains the sizes that moa-data has recorded, and the keys that other programs read.
    If the two differ, other programs would run a drafter with other sizes than moa-data.
    """
    # ``layout.config`` takes the target's config as an argument. An empty config is sufficient
    # here, because keys that come from the target's config are not compared.
    written = layout.config(sizes, PreTrainedConfig.from_dict({"name_or_path": str(folder)}))
    written = target_keys(sizes) | written | nested(written, LAYERS_KEY)
    if "hidden_act" in written:
        # ``written`` contains the keys that an export of this drafter writes. ``hidden_act`` is one
        # of them only if the layout describes the drafter's layers, not the target's. In such a
        # layout, an absent flag for a bias or a norm means that the drafter lacks it.
        written = dict.fromkeys(_FLAGS, False) | written
    layers = nested(config, LAYERS_KEY)
    for found in (config, layers, *(nested(part, "rope_parameters") for part in (config, layers))):
        for key in sorted(_IMPLIED_KEYS & found.keys() & written.keys()):
            # A null in config.json means the same as false.
            if (found[key] or False) != written[key]:
                raise DrafterError(
                    f"config.json has {key} {str(found[key])[:60]}, but its entry {_OWN_KEY} "
                    f"implies {written[key]}. Export the drafter again, or restore config.json."
                )


def _check_ignored(
    tensors: Weights, layout: Layout, sizes: DrafterSizes, needed: Collection[str]
) -> None:
    """Check tensors that are not used here, such as copies of target tensors.

    Other programs may use these tensors. Values that are not finite show that the file is damaged.

    Args:
        needed: names of tensors that must be in the file, because this package wrote them.
    """
    n_rows = {LM_HEAD: len(tensors["d2t"])} if "d2t" in tensors else {}
    # The unused tensor of an independent drafter is a copy of the drafter's embeddings, and not of
    # the target's. So it has the drafter's width.
    width = getattr(sizes, "independent_width", sizes.hidden_size)
    for name in layout.ignored:
        if name in tensors or name in needed:
            check_shape(tensors, name, [n_rows.get(name, sizes.vocab_size), width])
            values = tensors[name]
            # The check needs the smallest and the largest value of the tensor. PyTorch cannot
            # compute them in some dtypes, such as float8, so convert such a tensor to float32.
            checked = values if values.dtype in FLOATS else values.float()
            check_finite({name: checked}, "the drafter's file of weights", DrafterError)


def _read_weight_file(folder: Path) -> Weights:
    """Read all tensors of a folder.

    The first of these sources that exists is read: ``model.safetensors``, the safetensors files in
    ``model.safetensors.index.json``, ``pytorch_model.bin``.
    """
    if (folder / _LAYOUT_WEIGHTS).is_file():
        return _read_safetensors(folder / _LAYOUT_WEIGHTS)
    if (folder / _LAYOUT_INDEX).is_file():
        return _read_shards(folder / _LAYOUT_INDEX)
    file = folder / _LAYOUT_PICKLE
    if not file.is_file():
        raise DrafterError(
            f"{folder / _LAYOUT_WEIGHTS} does not exist, and the folder has neither "
            f"{_LAYOUT_INDEX} nor {_LAYOUT_PICKLE}. Download the folder again. If its weights are "
            "in several pickled files (pytorch_model.bin.index.json), convert them to "
            f"{_LAYOUT_WEIGHTS}."
        )
    with parsing(f"cannot read {file}", DrafterError):
        weights = load_pickled_tensors(file)
        for name, value in weights.items():
            if not isinstance(name, str) or not isinstance(value, Tensor):
                raise ValueError(
                    "it must contain only tensors and their names, but it has other entries"
                )
    return weights


def _read_shards(index: Path) -> Weights:
    """Read all tensors of the safetensors files that are listed in an index file."""
    weight_map = read_json(index, DrafterError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DrafterError(
            f"{index} has no weight_map, which says in which file each tensor is. Download the "
            "folder again."
        )
    weights: Weights = {}
    for name in sorted(set(map(str, weight_map.values()))):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise DrafterError(
                f"{index} says that there are tensors in {name[:60]!r}, which is not a "
                "*.safetensors file of the folder. Download the folder again."
            )
        shard = _read_safetensors(index.parent / name)
        if repeated := weights.keys() & shard.keys():
            raise DrafterError(
                f"the tensor {min(repeated)} is in two of the files that {index} names, and they "
                "may hold different values. Download the folder again."
            )
        weights |= shard
    return weights


def _read_safetensors(file: Path) -> Weights:
    read_header(file, DrafterError)
    with parsing(f"cannot read {file}", DrafterError):
        return load_file(file)
