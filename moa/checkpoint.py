"""Drafter checkpoints: our own layout, and the official one.

Own: ``drafter.json`` (:class:`DrafterSizes`, with kind and target identity; without a kind it is a Mixture of
Attentions) and ``drafter.safetensors``.
Official (``huawei-noah/MOASpec-*``): ``model.safetensors`` or ``pytorch_model.bin`` with 29 keys for a Llama target and
the TARGET's config.json; drafter sizes are read off the shapes.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from .config import DrafterConfig, DrafterSizes
from .drafter import Drafter
from .errors import CheckpointError, TargetMismatch
from .independent import IndependentDrafter
from .model import MoADrafter
from .registry import drafter_class
from .target import Target

CONFIG_FILE = "drafter.json"
WEIGHTS_FILE = "drafter.safetensors"
_OFFICIAL_PROJECTION = "Ekv2E"
_OWN_PROJECTION = "kv_to_hidden"


def save_drafter(drafter: Drafter, folder: str | Path) -> None:
    """Write the own layout; each file replaces its predecessor in one step."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in drafter.state_dict().items()}
    partial = folder / (WEIGHTS_FILE + ".partial")
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS_FILE)
    partial = folder / (CONFIG_FILE + ".partial")
    partial.write_text(json.dumps(drafter.config.to_dict(), indent=1) + "\n")
    partial.replace(folder / CONFIG_FILE)


def load_drafter(folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Drafter:
    """Load a drafter from its own layout, the official layout, or a training run that contains ``drafter/``.

    Raises:
        CheckpointError: nothing there, or keys and shapes that differ from what the sizes call for.
    """
    folder = Path(folder)
    if (folder / "drafter" / CONFIG_FILE).is_file():
        folder = folder / "drafter"
    config: DrafterSizes
    if (folder / CONFIG_FILE).is_file():
        try:
            values = json.loads((folder / CONFIG_FILE).read_text())
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{folder / CONFIG_FILE} is not JSON: {error}") from error
        config = drafter_class(values.get("kind", MoADrafter.kind)).config_class.from_dict(values)
        weights = _read_weights(folder / WEIGHTS_FILE)
    elif (folder / "config.json").is_file():
        weights, config = _read_official(folder)
    else:
        raise CheckpointError(f"{folder} holds no drafter: expected {CONFIG_FILE}, or an official config.json.")
    return build_drafter(config, weights, source=folder).to(device=device, dtype=dtype).eval()


def build_drafter(config: DrafterSizes, weights: dict[str, Tensor], source: str | Path = "weights") -> Drafter:
    """A drafter with the given weights; every key and shape must match.

    Raises:
        CheckpointError: naming the first missing, unexpected or misshapen key.
    """
    build = drafter_class(config.kind)
    with torch.device("meta"):
        expected = {name: value.shape for name, value in build(config).state_dict().items()}
    problems = [f"missing key {name}" for name in expected if name not in weights]
    problems += [f"unexpected key {name}" for name in weights if name not in expected]
    problems += [
        f"{name} has shape {tuple(weights[name].shape)}, expected {tuple(shape)}"
        for name, shape in expected.items()
        if name in weights and weights[name].shape != shape
    ]
    if problems:
        raise CheckpointError(f"{source} does not fit its sizes: {problems[0]} ({len(problems)} problems in all).")
    drafter = build(config)
    drafter.load_state_dict(weights, strict=True)
    return drafter


def to_official_keys(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Own state-dict keys -> official ones."""
    return {name.replace(_OWN_PROJECTION, _OFFICIAL_PROJECTION): value for name, value in weights.items()}


def from_official_keys(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Official state-dict keys -> own ones."""
    return {name.replace(_OFFICIAL_PROJECTION, _OWN_PROJECTION): value for name, value in weights.items()}


def save_official(drafter: MoADrafter, folder: str | Path, target_config: Any) -> None:
    """Write the official layout: 29 keys (Llama) and the target's config.json.

    Target identity and target layer inference have no place there and are lost.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in drafter.state_dict().items()}
    save_file(to_official_keys(weights), folder / "model.safetensors", metadata={"format": "pt"})
    target_config.save_pretrained(folder)


def save_as_llama(drafter: IndependentDrafter, folder: str | Path, target_config: Any) -> None:
    """Write an independent drafter as a transformers ``LlamaForCausalLM``, for assisted generation elsewhere.

    Args:
        drafter: of any dtype, which is kept.
        folder: gets config.json and model.safetensors; the tokenizer is the target's and is left to the caller.
        target_config: the target's transformers config, for the special tokens.
    """
    config = drafter.config
    sizes = config.own_block
    llama_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=sizes.width,
        intermediate_size=sizes.mlp_width,
        num_hidden_layers=config.independent_layers,
        num_attention_heads=sizes.n_heads,
        num_key_value_heads=sizes.n_kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.norm_eps,
        rope_parameters=dict(config.rope_parameters),
        tie_word_embeddings=True,
        **{name: getattr(target_config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    model: Any = LlamaForCausalLM(llama_config)
    model.to(drafter.dtype)
    # The weights have the names of a transformers Llama; its LM head is the embedding.
    weights = {f"model.{name}": value for name, value in drafter.state_dict().items()}
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, strict=True)
    model.save_pretrained(folder)


def sizes_from_official(weights: dict[str, Tensor], target_config: Any) -> DrafterConfig:
    """Infer drafter sizes from the shapes of official weights.

    Layer self-attention has the target's query heads and the head dim that its q_proj implies, also where that does not
    divide the KV width evenly (the official code rounds down).
    """
    try:
        layer_q = weights["layer_self_attention.self_attn.q_proj.weight"].shape[0]
        n_heads = target_config.num_attention_heads
        head_dim = getattr(target_config, "head_dim", None) or target_config.hidden_size // n_heads
        layer_head_dim = layer_q // n_heads
        kv_rows = {
            name: weights[f"{name}.self_attn.k_proj.weight"].shape[0]
            for name in ("self_attention", "cross_attention", "layer_self_attention")
        }
        mlp = {name: weights[f"{name}.mlp.gate_proj.weight"].shape[0] for name in kv_rows}
    except KeyError as error:
        raise CheckpointError(f"official drafter weights lack {error.args[0]}.") from error
    base = DrafterConfig.from_target(target_config).to_dict()
    return DrafterConfig.from_dict(
        base
        | {
            "self_attention_kv_heads": kv_rows["self_attention"] // head_dim,
            "self_attention_mlp_width": mlp["self_attention"],
            "cross_attention_kv_heads": kv_rows["cross_attention"] // head_dim,
            "cross_attention_mlp_width": mlp["cross_attention"],
            "layer_attention_heads": n_heads,
            "layer_attention_head_dim": layer_head_dim,
            "layer_attention_kv_heads": kv_rows["layer_self_attention"] // layer_head_dim,
            "layer_attention_mlp_width": mlp["layer_self_attention"],
            "qkv_bias": "self_attention.self_attn.q_proj.bias" in weights,
        }
    )


def check_drafter_matches(drafter: Drafter, target: Target) -> None:
    """Refuse a drafter that was trained for another target.

    Raises:
        TargetMismatch: sizes or weights differ.
    """
    config, sizes = drafter.config, target.sizes
    sizes = sizes | {"kv_width": 2 * sizes["n_kv_heads"] * sizes["head_dim"]}
    for name in ("n_layers", "hidden_size", "vocab_size", "n_heads", "head_dim", "kv_width"):
        if getattr(config, name, sizes[name]) != sizes[name]:
            raise TargetMismatch(
                f"the drafter was trained for another target: {name} {getattr(config, name)}, this target has "
                f"{sizes[name]}. Pass the target that its store was extracted from."
            )
    expected, got = config.target.get("weights_sha256"), target.identity.get("weights_sha256")
    if expected and got and expected != got:
        raise TargetMismatch(
            f"the drafter was trained for a target with weights {expected[:12]}, this one has {got[:12]}. "
            "Pass the target that its store was extracted from."
        )


def _read_weights(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing.")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error


def _read_official(folder: Path) -> tuple[dict[str, Tensor], DrafterConfig]:
    if (folder / "model.safetensors").is_file():
        weights = _read_weights(folder / "model.safetensors")
    elif (folder / "pytorch_model.bin").is_file():
        weights = _read_pickled(folder / "pytorch_model.bin")
    else:
        raise CheckpointError(f"{folder} has a config.json but neither model.safetensors nor pytorch_model.bin.")
    if "layer_self_attention.self_attn.q_proj.weight" not in weights:
        raise CheckpointError(f"{folder} holds no drafter: expected {CONFIG_FILE}, or official MoA weights.")
    try:
        target_config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder}/config.json is not the target's config ({str(error).splitlines()[0]}); copy the target's there."
        ) from error
    return from_official_keys(weights), sizes_from_official(weights, target_config)


def _read_pickled(file: Path) -> dict[str, Tensor]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, IndexError, KeyError) as error:
        raise CheckpointError(f"cannot read {file}: {(str(error).splitlines() or ['truncated'])[0]}") from error
