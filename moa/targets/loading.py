"""Loads a live target.

If weights do not fit config.json, or are NaN or infinite, loading raises TargetError.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import TargetError
from ...files import parsing
from ...machine import free_memory
from ...text import format_bytes
from . import bundle
from .facts import TargetFacts, load_facts
from .families import model_loader, transformers_config
from .model_files import (
    TensorHeader,
    check_finite,
    find_problems,
    read_config,
    read_header,
    read_json,
)

_ADVICE = "Correct config.json, or download the folder again."
_SIZE_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "n_routed_experts",
    "moe_intermediate_size", "attention_bias", "tie_word_embeddings",
)  # fmt: skip
# Layers for multi-token prediction contain modules with these names, and other layers do not. The
# names are from DeepSeek V3 and models derived from it.
_DRAFTING_PARTS = (
    "eh_proj",
    "enorm",
    "hnorm",
    "shared_head",
)
# In the most common model families, tensors with these names have one row per token of the
# vocabulary. The prefixes in `_PREFIXES` are left out of the names.
_VOCABULARY_TENSORS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "lm_head.weight",
)
# While transformers loads a model, it may add these prefixes to names of tensors in the files, or
# remove them, so that the names fit the model.
_PREFIXES = re.compile(r"^((model|language_model|transformer|gpt_neox)\.)+")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def load_target_model(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Load a target's causal LM in evaluation mode.

    Raises:
        TargetError: the weights do not fit in the free memory, do not fit config.json, or are not
            finite.
    """
    facts = load_facts(folder)
    headers = _read_headers(folder, facts.config)
    _check_memory(folder, headers, facts, dtype, device)
    model = _load_fitting(folder, headers, facts, dtype)
    frozen: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    check_finite(frozen.state_dict(), folder, TargetError)
    return frozen


def check_weights(folder: Path, dtype: torch.dtype) -> None:
    """Refuse a target that :func:`load_target_model` would refuse, without loading it as a whole.

    Not more than a few tensors are in memory at the same time.

    Raises:
        TargetError: the weights do not fit config.json, or are not finite.
    """
    facts = load_facts(folder)
    headers = _read_headers(folder, facts.config)
    _load_fitting(folder, headers, facts, dtype, device_map="meta")
    vocabulary = []
    for file in bundle.weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            # `tensors` is not a dict and cannot be iterated over, so `keys()` is necessary.
            for name in tensors.keys():  # noqa: SIM118
                values = tensors.get_tensor(name).to(dtype)
                check_finite({name: values}, folder, TargetError)
                if _PREFIXES.sub("", name) in _VOCABULARY_TENSORS:
                    vocabulary.append(values)
    # Some configs do not have the attribute ``tie_word_embeddings``. Their weights are not tied.
    is_tied = getattr(facts.config, "tie_word_embeddings", False)
    if is_tied and not all(torch.equal(values, vocabulary[0]) for values in vocabulary):
        raise _misfit(folder, facts.config, _differing_head(vocabulary[0]))


def _load_fitting(
    folder: Path,
    headers: Mapping[str, TensorHeader],
    facts: TargetFacts,
    dtype: torch.dtype,
    **options: Any,
) -> Any:
    """Load a causal LM, and check that its weights fit config.json.

    Args:
        options: further arguments of ``from_pretrained``. For example, with ``device_map="meta"``
            only the shapes are loaded.
    """
    _check_tied_head(folder, headers, facts.config)
    with parsing(f"cannot load the weights of {folder}", TargetError):
        try:
            loaded: Any = model_loader(folder).from_pretrained(
                folder, config=transformers_config(read_config(folder), folder),
                dtype=dtype, attn_implementation=facts.attention,
                output_loading_info=True, use_safetensors=True, trust_remote_code=False, **options,
                # With this setting, transformers does not raise an error if a tensor has a wrong
                # shape, but reports the tensor in the loading info. `_check_fit` reads the loading
                # info, and refuses such tensors.
                ignore_mismatched_sizes=True,
            )  # fmt: skip
        except RuntimeError as error:
            # transformers stacks the weights of all experts of a layer into one tensor. Stacking
            # fails if the tensor of an expert is missing or has a wrong shape. The error of
            # transformers does not name this tensor, so find its name here.
            if not (problem := _find_expert_problem(headers)):
                raise
            raise _misfit(folder, facts.config, problem) from error
    model, info = loaded
    _check_fit(folder, headers, facts.config, model, info)
    return model


def _find_expert_problem(headers: Mapping[str, TensorHeader]) -> str:
    """Describe the first tensor of an expert that is missing or has a wrong shape.

    The matrix of an expert has a wrong shape if the same matrix has another shape in most experts.
    All layers with experts must have the same number of experts. The result is empty if all tensors
    fit.
    """
    # The name of a tensor contains two numbers: the indices of the layer and of the expert. The
    # name is split into its numbers and its texts. For example, the name
    # model.layers.3.mlp.experts.7.up_proj.weight has the numbers (3, 7) and the texts
    # ("model.layers.", ".mlp.experts.", ".up_proj.weight"). Tensors with the same texts are the
    # same matrix in different layers or experts. `groups` has one dict for each such matrix. The
    # dict maps the numbers of a tensor to the shape of the tensor.
    groups: dict[tuple[str, ...], dict[tuple[int, ...], tuple[int, ...]]] = defaultdict(dict)
    # An expert has several matrices, and the last text of a name says which matrix the tensor is.
    # The texts before the last one, such as ("model.layers.", ".mlp.experts."), are the same for
    # all matrices. `experts` maps these texts to the numbers (layer, expert) of all experts that
    # have at least one matrix in the files.
    experts: dict[tuple[str, ...], set[tuple[int, ...]]] = defaultdict(set)
    for name, header in headers.items():
        if ".experts." in name:
            numbers = tuple(map(int, _NUMBER.findall(name)))
            parts = tuple(_NUMBER.split(name))
            groups[parts][numbers] = tuple(header.shape)
            experts[parts[:-1]].add(numbers)
    for parts, shapes in groups.items():
        shape = Counter(shapes.values()).most_common(1)[0][0]
        axes = (sorted(set(axis)) for axis in zip(*experts[parts[:-1]], strict=True))
        for numbers in itertools.product(*axes):
            name = parts[0]
            for number, part in zip(numbers, parts[1:], strict=True):
                name += f"{number}{part}"
            if numbers not in shapes:
                return f"missing tensor {name} {list(shape)}"
            if shapes[numbers] != shape:
                return f"{name} has shape {list(shapes[numbers])}, expected {list(shape)}"
    return ""


def check_vocabulary(folder: Path) -> None:
    """Refuse embeddings or an LM head that do not have vocab_size rows.

    Token ids are compared with vocab_size before the target is loaded, so vocab_size must be right.
    This function reads only the headers of the weight files.
    """
    facts = load_facts(folder)
    headers = _read_headers(folder, facts.config)
    for name, header in headers.items():
        expected = (facts.vocab_size, *header.shape[1:])
        if _PREFIXES.sub("", name) in _VOCABULARY_TENSORS and header.shape != expected:
            problem = f"{name} has shape {list(header.shape)}, expected {list(expected)}"
            raise _misfit(folder, facts.config, problem)


def _read_headers(folder: Path, config: Any) -> dict[str, TensorHeader]:
    """Read the shapes of all weights. Refuse damaged files, and references to other folders."""
    weights = bundle.weight_files(folder)
    headers: dict[str, TensorHeader] = {}
    # Name of a tensor, without prefixes -> description of this tensor in error messages.
    tensors: dict[str, str] = {}
    for file in weights:
        for name, header in read_header(file, TargetError).items():
            tensor = f"{name} {list(header.shape)} in {file.name}"
            other = tensors.setdefault(_PREFIXES.sub("", name), tensor)
            if other != tensor:
                raise TargetError(
                    f"{folder}: transformers may read {other} and {tensor} as the same tensor. "
                    "Remove the one that is not part of the model."
                )
            headers[name] = header
    index = folder / "model.safetensors.index.json"
    weight_map = read_json(index, TargetError).get("weight_map") if index.is_file() else {}
    names = [*weight_map.values()] if isinstance(weight_map, dict) else [weight_map]
    file_in_config = getattr(config, "transformers_weights", None)
    if file_in_config is not None:
        names.append(file_in_config)
    known = [*(file.name for file in weights), index.name]
    if wrong := [name for name in names if name not in known]:
        raise TargetError(
            f"{folder}: model.safetensors.index.json or config.json names {str(wrong[0])[:60]!r} "
            "as a file of weights, which is not a *.safetensors file of the folder. Download the "
            "folder again."
        )
    return headers


def _check_memory(
    folder: Path,
    headers: Mapping[str, TensorHeader],
    facts: TargetFacts,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Refuse weights that do not fit into memory.

    Otherwise the operating system would kill this process without an error message.
    """
    n_held = sum(math.prod(header.shape) for header in headers.values())
    # config.json may describe more weights than the files have. transformers allocates all of them
    # before it reports that some are missing, so count all of them.
    n_values = max(n_held, facts.n_weights)
    n_bytes = n_values * dtype.itemsize
    # Whatever the device is, the weights are first read into host memory.
    free_bytes = {"host memory": free_memory()}
    if torch.device(device).type == "cuda":
        free_bytes[device] = torch.cuda.mem_get_info(torch.device(device))[0]
    for memory, n_free in free_bytes.items():
        if n_free is None or n_bytes <= n_free:
            continue
        if n_values > n_held:
            problem = (
                f"config.json describes at least {n_values:,} weights, but the files hold only "
                f"{n_held:,}"
            )
            raise _misfit(folder, facts.config, problem)
        narrow = n_values * torch.bfloat16.itemsize
        advice = (
            f"With `dtype=bfloat16` they take {format_bytes(narrow)}."
            if narrow <= n_free
            else "Free some memory."
        )
        raise TargetError(
            f"the weights of {folder} take {format_bytes(n_bytes)} in "
            f"{str(dtype).removeprefix('torch.')}, but only {format_bytes(n_free)} are free in "
            f"{memory}. {advice}"
        )


def _check_fit(
    folder: Path,
    headers: Mapping[str, TensorHeader],
    config: Any,
    model: Any,
    info: Mapping[str, Any],
) -> None:
    """Refuse weights if some are missing, unexpected, or of another shape than expected.

    The model that transformers makes from config.json determines which weights are expected.
    ``info`` is the loading info that transformers returns.
    """
    expected = model.state_dict()
    problem = find_problems(_stored_headers(headers, config, expected, info), expected)
    if ".experts." in problem and not problem.startswith("unexpected"):
        # transformers stacks the weights of all experts into one tensor, and names only this
        # tensor. So find the expert whose weights are wrong.
        problem = _find_expert_problem(headers) or problem
    problem = problem or _find_cast_tensor(headers, model, info)
    head = model.get_output_embeddings().weight
    # If config.json ties the LM head to the embeddings, but the files have an LM head that differs
    # from the embeddings, transformers does not tie the two. Refuse such files. On the meta device,
    # weights have no values that transformers could compare, so skip this check.
    if (
        not head.is_meta
        and getattr(model.config, "tie_word_embeddings", False)
        and head is not model.get_input_embeddings().weight
    ):
        problem = problem or _differing_head(head)
    if problem:
        raise _misfit(folder, config, problem)


def _find_cast_tensor(
    headers: Mapping[str, TensorHeader], model: Any, info: Mapping[str, Any]
) -> str:
    """Describe the first tensor in the files that is not floating-point although it is a weight.

    transformers would cast such a tensor without a warning. Tensors that have the same name in the
    files and in the model are checked elsewhere. This function checks the tensors that transformers
    renames or stacks while it loads the files. If all of them are floating-point, the result is
    empty.
    """
    skipped = {_PREFIXES.sub("", name) for name in (*model.state_dict(), *info["unexpected_keys"])}
    # Old files of many models contain a tensor of position ids, which transformers ignores.
    patterns = {r"position_ids$", *(model._keys_to_ignore_on_load_unexpected or ())}
    cast: dict[str, TensorHeader] = {}
    for name, header in headers.items():
        is_ignored = any(re.search(pattern, name) for pattern in patterns)
        if _PREFIXES.sub("", name) not in skipped and not is_ignored:
            cast[name] = header
    return find_problems(
        cast, {name: torch.empty(header.shape, device="meta") for name, header in cast.items()}
    )


def _differing_head(head: Tensor | TensorHeader) -> str:
    return (
        f"lm_head.weight {list(head.shape)} differs from the embeddings, to which config.json ties "
        "it (tie_word_embeddings)"
    )


def _misfit(folder: Path, config: Any, problem: str) -> TargetError:
    # Read the sizes from a dict, not from attributes of the config. If the value of an attribute
    # differs between layers, Gemma 4's config raises an error when the attribute is read.
    known = config.to_dict()
    values = [f"{key} {known[key]}" for key in _SIZE_KEYS if known.get(key) is not None]
    return TargetError(
        f"the weights of {folder} do not fit config.json ({problem}). config.json has "
        f"{', '.join(values)}. {_ADVICE}"
    )


def _stored_headers(
    headers: Mapping[str, TensorHeader],
    config: Any,
    expected: Mapping[str, Tensor],
    info: Mapping[str, Any],
) -> dict[str, TensorHeader]:
    """Return the shapes and dtypes of the weights in the files, with the names of the model.

    Layers for multi-token prediction are left out.

    Args:
        headers: the headers of the weight files.
        config: the target's transformers config.
        expected: the model's state dict.
        info: the loading info that transformers returns.
    """
    # Take the dtypes from the headers of the files, because transformers has cast the loaded
    # weights. Look up the headers by names without prefixes, because transformers may have changed
    # the prefixes.
    dtypes: dict[str, Any] = {}
    for name, header in headers.items():
        dtypes[_PREFIXES.sub("", name)] = header.dtype
    stored: dict[str, TensorHeader] = {}
    for name, value in expected.items():
        if name not in info["missing_keys"]:
            dtype = dtypes.get(_PREFIXES.sub("", name), value.dtype)
            stored[name] = TensorHeader(tuple(value.shape), dtype)
    for name, shape, _ in info["mismatched_keys"]:
        stored[name] = TensorHeader(tuple(shape), expected[name].dtype)
    for name in sorted(info["unexpected_keys"]):
        if not _is_for_drafting(name, headers, config):
            # transformers renames some tensors, so the headers may not contain this name. The shape
            # and dtype of such a tensor are unknown.
            stored[name] = headers.get(name, TensorHeader((), None))
    return stored


def _check_tied_head(folder: Path, headers: Mapping[str, TensorHeader], config: Any) -> None:
    """Refuse files with a tied LM head that has another shape than the embeddings.

    This must be checked before the weights are loaded, because transformers compares the LM head
    with the embeddings during loading.
    """
    head = headers.get("lm_head.weight")
    embeddings = headers.get("model.embed_tokens.weight")
    # Some configs do not have the attribute ``tie_word_embeddings``. Their weights are not tied.
    is_tied = getattr(config, "tie_word_embeddings", False)
    if is_tied and head and embeddings and head.shape != embeddings.shape:
        raise _misfit(folder, config, _differing_head(head))


def _is_for_drafting(name: str, headers: Mapping[str, TensorHeader], config: Any) -> bool:
    """Whether a tensor belongs to a multi-token prediction layer after the last decoder layer."""
    layer = _NUMBER.search(name)
    n_drafting = getattr(config, "num_nextn_predict_layers", None) or 0
    if layer is None or not 0 <= int(layer[0]) - config.num_hidden_layers < n_drafting:
        return False
    drafting_tensor = re.compile(rf"\.{layer[0]}\.({'|'.join(_DRAFTING_PARTS)})\.")
    return any(drafting_tensor.search(key) for key in headers)
