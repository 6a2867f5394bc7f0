"""The frozen target weights that travel with a dataset: embeddings, final norm, LM head, last N decoder layers.

On disk (``STORE/target/``): config.json, generation_config.json, tokenizer files, and frozen.safetensors with the keys
``embed_tokens.weight``, ``norm.weight``, ``lm_head.weight`` and ``layers.{i}.*`` (i = absolute layer index),
in the target's dtype.
Shapes: B batch, T tokens, E width, V vocabulary.
"""

import hashlib
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from .errors import TargetError
from .layers import ROPE_TYPES, BlockSizes, DecoderBlock, RMSNorm, Rotary

FROZEN_FILE = "frozen.safetensors"
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def target_sizes(config: Any) -> dict[str, Any]:
    """Sizes of a target, from its transformers config.

    Returns:
        n_layers, n_heads, n_kv_heads, head_dim, hidden_size, vocab_size, max_position_embeddings, architecture.

    Raises:
        TargetError: the model type is not of the Llama family, or its rotation changes with the length of the input.
    """
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        known = ", ".join(SUPPORTED_MODEL_TYPES)
        raise TargetError(f"model type {config.model_type!r} is not supported; expected one of {known}.")
    rope_type = rope_parameters(config).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise TargetError(
            f"the target's rope type {rope_type!r} changes with the length of the input, so no drafter can use its "
            f"keys; expected one of {', '.join(ROPE_TYPES)}. Choose another target."
        )
    return {
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "architecture": config.model_type,
    }


def layer_kinds(config: Any) -> list[str]:
    """Kind of attention of each decoder layer, by its name in transformers; only the Qwen families mix them."""
    slides = getattr(config, "sliding_window", None) is not None
    kinds = getattr(config, "layer_types", None) if config.model_type.startswith("qwen") else None
    return list(kinds or ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers)


def layer_windows(config: Any) -> list[int | None]:
    """Positions that each decoder layer looks back, itself included; None where it sees everything."""
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in layer_kinds(config)]


def rope_parameters(config: Any) -> dict[str, Any]:
    """The RoPE parameters of a transformers config as a plain dict (``rope_theta``, ``rope_type``, ...)."""
    return {key: value for key, value in dict(config.rope_parameters).items() if value is not None}


def layer_sizes(config: Any) -> BlockSizes:
    """Block sizes of the target's own decoder layers.

    Raises:
        TargetError: another activation than silu.
    """
    if config.hidden_act != "silu":
        raise TargetError(f"hidden_act {config.hidden_act!r} is not supported in target layer inference, only silu.")
    sizes = target_sizes(config)
    qkv_bias = config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))
    return BlockSizes(
        width=sizes["hidden_size"],
        n_heads=sizes["n_heads"],
        n_kv_heads=sizes["n_kv_heads"],
        head_dim=sizes["head_dim"],
        mlp_width=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        qkv_bias=qkv_bias,
        output_bias=bool(getattr(config, "attention_bias", False)),
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        query_key_norm=config.model_type == "qwen3",
    )


def hash_target(folder: str | Path) -> dict[str, str]:
    """Content hashes that identify a target.

    Args:
        folder: local model folder.

    Returns:
        ``weights_sha256`` over the names and bytes of all weight files, ``config_sha256`` over config.json.

    Raises:
        TargetError: no config, no safetensors weights, or a weight file that is damaged.
    """
    folder = Path(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file():
        raise TargetError(f"{folder} has no config.json; expected a transformers model folder.")
    if not weights:
        raise TargetError(f"{folder} has no *.safetensors weights; save the model with safe serialization.")
    digest = hashlib.sha256()
    for file in weights:
        check_weight_file(file)
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    config_digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    return {"weights_sha256": digest.hexdigest(), "config_sha256": config_digest}


def check_weight_file(file: Path) -> None:
    """Refuse a safetensors file that is cut short; reads its header only.

    Raises:
        TargetError: the file does not hold what its header says.
    """
    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise TargetError(f"{file} is damaged or cut short ({error}). Restore or download it again.") from error


def save_target_bundle(model: PreTrainedModel, tokenizer: Any, path: str | Path, n_layers_kept: int) -> None:
    """Write the bundle of a loaded target.

    Args:
        model: transformers causal LM.
        tokenizer: its tokenizer.
        path: folder to create.
        n_layers_kept: N, the number of last decoder layers to keep, 0..n_layers.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    n_layers = model.config.num_hidden_layers
    if not 0 <= n_layers_kept <= n_layers:
        raise TargetError(f"cannot keep the last {n_layers_kept} layers of a target with {n_layers}.")
    model.config.save_pretrained(path)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    save_file(_frozen_weights(model, n_layers_kept), path / FROZEN_FILE, metadata={"format": "pt"})


def held_layers(path: str | Path) -> int:
    """How many of the target's last decoder layers a bundle holds; 0 for a folder that is none."""
    file = Path(path) / FROZEN_FILE
    if not file.is_file():
        return 0
    check_weight_file(file)
    with safe_open(file, framework="pt") as weights:
        keys: list[str] = weights.keys()
    return len({key.split(".")[1] for key in keys if key.startswith("layers.")})


def _frozen_weights(model: PreTrainedModel, n_layers_kept: int) -> dict[str, Tensor]:
    body, n_layers = model.model, model.config.num_hidden_layers
    weights = {
        "embed_tokens.weight": body.embed_tokens.weight,
        "norm.weight": body.norm.weight,
        "lm_head.weight": model.lm_head.weight,
    }
    for index in range(n_layers - n_layers_kept, n_layers):
        for name, value in body.layers[index].state_dict().items():
            weights[f"layers.{index}.{name}"] = value
    return {name: value.detach().cpu().clone().contiguous() for name, value in weights.items()}


class FrozenTarget(nn.Module):
    """Embeddings, final norm, LM head and the last N decoder layers of a target; never trained.

    Attributes:
        config: the target's transformers config.
        n_layers: N, how many decoder layers are here.
        windows: attention window of each of them in tokens, None where it sees everything.
        layers: the last N layers in order; ``layers[0]`` is target layer ``L - N``.
    """

    def __init__(self, config: Any, weights: dict[str, Tensor], n_layers: int) -> None:
        super().__init__()
        self.config = config
        self.n_layers = n_layers
        windows = layer_windows(config)
        self.windows = windows[len(windows) - n_layers :]
        dtype = weights["lm_head.weight"].dtype
        self.embed_tokens = nn.Embedding.from_pretrained(weights["embed_tokens.weight"], freeze=True)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.norm.weight = nn.Parameter(weights["norm.weight"])
        self.lm_head_weight = nn.Parameter(weights["lm_head.weight"])
        sizes = target_sizes(config)
        self.rotary = Rotary(sizes["head_dim"], rope_parameters(config), config.max_position_embeddings)
        first = sizes["n_layers"] - n_layers
        with torch.device("meta"):
            self.layers = nn.ModuleList(DecoderBlock(layer_sizes(config)) for _ in range(n_layers))
        for offset, layer in enumerate(self.layers):
            prefix = f"layers.{first + offset}."
            own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
            layer.load_state_dict(own, strict=True, assign=True)
        self.requires_grad_(False)

    @classmethod
    def load(cls, path: str | Path, n_layers: int = 0, dtype: torch.dtype | None = torch.float32) -> "FrozenTarget":
        """Load a bundle folder.

        Args:
            path: folder written by :func:`save_target_bundle`.
            n_layers: how many of the last decoder layers are needed (0 for none).
            dtype: dtype of the weights; None keeps the stored one.

        Raises:
            TargetError: no bundle there, or it holds fewer layers than asked for.
        """
        path = Path(path)
        if not (path / FROZEN_FILE).is_file():
            raise TargetError(
                f"{path} has no {FROZEN_FILE}, the target's frozen weights. Run extract again: it restores target/."
            )
        check_weight_file(path / FROZEN_FILE)
        config = AutoConfig.from_pretrained(path)
        first = config.num_hidden_layers - n_layers
        with safe_open(path / FROZEN_FILE, framework="pt") as file:
            keys: list[str] = file.keys()
            names = [k for k in keys if not k.startswith("layers.") or int(k.split(".")[1]) >= first]
            weights = {name: file.get_tensor(name) for name in names}
        held = len({name.split(".")[1] for name in names if name.startswith("layers.")})
        if held < n_layers:
            raise TargetError(
                f"{path} holds {held} decoder layers, {n_layers} are needed; "
                f"add them with `moa-data add STORE --model MODEL --target-layers {n_layers}`."
            )
        if dtype is not None:
            weights = {name: value.to(dtype) for name, value in weights.items()}
        return cls(config, weights, n_layers)

    @classmethod
    def from_model(cls, model: PreTrainedModel, n_layers: int = 0) -> "FrozenTarget":
        """The same pieces of a live target, sharing its weights."""
        body, total = model.model, model.config.num_hidden_layers
        weights = {
            "embed_tokens.weight": body.embed_tokens.weight.detach(),
            "norm.weight": body.norm.weight.detach(),
            "lm_head.weight": model.lm_head.weight.detach(),
        }
        for index in range(total - n_layers, total):
            weights |= {f"layers.{index}.{k}": v.detach() for k, v in body.layers[index].state_dict().items()}
        return cls(model.config, weights, n_layers).to(weights["lm_head.weight"].device)

    @property
    def blocks(self) -> list[DecoderBlock]:
        """:attr:`layers` with their type."""
        return cast(list[DecoderBlock], list(self.layers))

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] -> embeddings [B, T, E]."""
        return self.embed_tokens(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Features [..., E] (after the final norm) -> logits [..., V]."""
        return F.linear(hidden, self.lm_head_weight)
