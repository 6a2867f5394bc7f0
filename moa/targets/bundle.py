"""The folder of a target: its config, its identity, and the frozen weights that travel with a dataset.

A bundle (``STORE/target/``) is config.json, generation_config.json, tokenizer files, and frozen.safetensors with
``embed_tokens.weight``, ``norm.weight``, ``lm_head.weight`` and ``layers.{i}.*`` (i = absolute layer index), in the
target's dtype.
Shapes: B batch, T tokens, E width, V vocabulary, L decoder layers of the target, N of them that are kept.
"""

import contextlib
import copy
import hashlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from ...errors import DrafterError, TargetError
from ...files import parsing, write_atomic
from ...text import Progress
from ..nn.layers import ROPE_TYPES, BlockSizes, DecoderBlock, RMSNorm, Rotary
from ..nn.losses import logits_of
from .model_files import FLOATS, check_model_folder, find_problems, read_header, read_json

FROZEN_FILE = "frozen.safetensors"
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

# Upper limits of the sizes in a config.json, far above those of the largest models.
_LARGEST = {
    "num_hidden_layers": 1 << 10, "num_attention_heads": 1 << 12, "num_key_value_heads": 1 << 12, "head_dim": 1 << 12,
    "hidden_size": 1 << 18, "intermediate_size": 1 << 20, "vocab_size": 1 << 22, "max_position_embeddings": 1 << 26,
    "sliding_window": 1 << 26,
}  # fmt: skip
_SHA256 = re.compile(r"[0-9a-f]{64}")
# A file that changed less than this before it was hashed could change again within one tick of its clock.
_SETTLED_S = 2.0


def load_target_config(folder: Path) -> Any:
    """Load the transformers config of a model folder of a supported family, with plausible sizes."""
    folder, file = Path(folder), Path(folder) / "config.json"
    if not file.is_file():
        raise TargetError(f"{folder} has no config.json; expected a transformers model folder.")
    check_model_folder(folder)
    return parse_target_config(read_json(file, TargetError), file, folder)


def parse_target_config(values: Mapping[str, Any], source: object, folder: Path | None = None) -> Any:
    """Make the transformers config of a target from the values of its config.json, of a folder if there is one."""
    _check_family(values.get("model_type"), source)
    _check_counts(values, source)  # before transformers makes lists of that length
    with parsing(f"cannot read {source}", TargetError):
        if folder is not None:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        else:
            config = AutoConfig.for_model(**values)
    _check_config(config, source)
    sizes = target_sizes(config)
    try:
        Rotary(sizes["head_dim"], rope_parameters(config), sizes["max_position_embeddings"])
    except DrafterError as error:
        raise TargetError(f"{source}: {error}") from error
    return config


def _check_family(model_type: object, source: object = "its config") -> None:
    if model_type not in SUPPORTED_MODEL_TYPES:
        known = ", ".join(SUPPORTED_MODEL_TYPES)
        raise TargetError(f"model type {model_type!r} is not supported; expected one of {known} ({source}).")


def _check_counts(values: Mapping[str, Any], source: object) -> None:
    for name, largest in _LARGEST.items():
        value = values.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= largest):
            shown = f"{str(value)[:60]!r}, expected a whole number from 1 to {largest}"
            raise TargetError(f"{source}: {name} is {shown}. Restore the file.")


def _check_config(config: Any, source: object) -> None:
    """Refuse sizes that do not fit together, including those that transformers fills in."""
    _check_counts({name: getattr(config, name, None) for name in _LARGEST}, source)
    n_heads, n_kv_heads = config.num_attention_heads, config.num_key_value_heads
    kinds = set(getattr(config, "layer_types", None) or ())
    if n_heads % (n_kv_heads or n_heads):
        trouble = f"{n_kv_heads} KV heads do not divide {n_heads} heads"
    elif not 0 <= config.rms_norm_eps <= 1:
        trouble = f"rms_norm_eps is {config.rms_norm_eps!r}, expected a number from 0 to 1"
    elif config.dtype not in (None, *FLOATS):
        trouble = f"dtype is {str(config.dtype)[:60]!r}, expected a dtype of floating-point numbers"
    elif kinds - {"full_attention", "sliding_attention"}:
        trouble = "layer_types are not all full_attention or sliding_attention"
    elif "sliding_attention" in kinds and getattr(config, "sliding_window", None) is None:
        trouble = "layers have sliding_attention and there is no sliding_window"
    else:
        return
    raise TargetError(f"{source}: {trouble}. Restore the file.")


def target_sizes(config: Any) -> dict[str, Any]:
    """The sizes of a target, from its transformers config, checked to be of the Llama family."""
    _check_family(config.model_type)
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


def find_eos_token_ids(values: Iterable[Any]) -> frozenset[int]:
    """Find the ids that end a generation: those of the first ``eos_token_id`` that is set, one or a list."""
    for eos in values:
        if eos is not None:
            ids = eos if isinstance(eos, list | tuple) else [eos]
            if not all(type(token) is int for token in ids):
                raise TargetError(f"eos_token_id is {str(eos)[:60]!r}, expected ids. Correct generation_config.json.")
            return frozenset(ids)
    return frozenset()


def load_eos_token_ids(folder: Path) -> frozenset[int]:
    """Read the ids that end a generation from a model folder or a bundle."""
    files = [folder / name for name in ("generation_config.json", "config.json")]
    return find_eos_token_ids(read_json(file, TargetError).get("eos_token_id") for file in files if file.is_file())


def layer_kinds(config: Any) -> list[str]:
    """The kind of attention of each decoder layer, as transformers names it; only the Qwen families mix them."""
    slides = getattr(config, "sliding_window", None) is not None
    kinds = getattr(config, "layer_types", None) if config.model_type.startswith("qwen") else None
    return list(kinds or ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers)


def layer_windows(config: Any) -> list[int | None]:
    """The attention window of each decoder layer in tokens, the query included; None for full attention."""
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in layer_kinds(config)]


def rope_parameters(config: Any) -> dict[str, Any]:
    """The RoPE parameters of a transformers config as a plain dict (``rope_theta``, ``rope_type``, ...)."""
    return {key: value for key, value in dict(config.rope_parameters).items() if value is not None}


def layer_sizes(config: Any) -> BlockSizes:
    """The block sizes of the target's own decoder layers."""
    if config.hidden_act != "silu":
        raise TargetError(f"hidden_act {config.hidden_act!r} is not supported in target layer inference, only silu.")
    sizes, has_bias = target_sizes(config), bool(getattr(config, "attention_bias", False))
    return BlockSizes(
        width=sizes["hidden_size"],
        n_heads=sizes["n_heads"],
        n_kv_heads=sizes["n_kv_heads"],
        head_dim=sizes["head_dim"],
        mlp_width=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        qkv_bias=has_bias or config.model_type == "qwen2",
        output_bias=has_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        query_key_norm=config.model_type == "qwen3",
    )


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files that hold a model's weights, sorted by name; refuse a folder without any."""
    if not (files := sorted(folder.glob("*.safetensors"))):
        raise TargetError(f"{folder} has no *.safetensors weights; save the model with safe serialization.")
    # A consolidated.safetensors beside other files is the same weights in the layout of another program.
    return [file for file in files if not file.name.startswith("consolidated")] or files


def hash_target(folder: str | Path, progress: Progress | None = None) -> dict[str, str]:
    """Compute the content hashes that identify a target; the progress counts bytes of weights.

    Returns:
        ``weights_sha256`` over the names and bytes of all weight files, ``config_sha256`` over config.json.
    """
    folder = Path(folder)
    load_target_config(folder)  # refuses what is no target
    weights, digest = weight_files(folder), hashlib.sha256()
    n_bytes, n_done = sum(file.stat().st_size for file in weights), 0
    for number, file in enumerate(weights, start=1):
        read_header(file, TargetError)  # refuses a damaged file
        digest.update(file.name.encode() + bytes.fromhex(file_sha256(file)))
        n_done += file.stat().st_size
        if progress:
            progress(n_done, n_bytes, f"hash weights, file {number}/{len(weights)}")
    config_digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    return {"weights_sha256": digest.hexdigest(), "config_sha256": config_digest}


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes in hex; a file that has not changed is read once in all."""
    # A digest is kept under the file's path, size, times and inode in the user's cache folder. Whatever changes a file
    # changes one of them; the time of the last status change cannot be set by hand.
    real = path.resolve()
    # A file of the Hub's cache is a link to a blob that is named by its sha256.
    if path.is_symlink() and real.parent.name == "blobs" and _SHA256.fullmatch(real.name):
        return real.name
    before = real.stat()
    state = (str(real), before.st_size, before.st_mtime_ns, before.st_ctime_ns, before.st_dev, before.st_ino)
    kept = cache_folder() / hashlib.sha256("\0".join(map(str, state)).encode()).hexdigest()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if _SHA256.fullmatch(known := kept.read_text()):
            return known
    with real.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        after = os.fstat(stream.fileno())
    is_unchanged = (after.st_size, after.st_mtime_ns, after.st_ctime_ns) == state[1:4]
    if is_unchanged and time.time() - max(after.st_mtime, after.st_ctime) > _SETTLED_S:
        with contextlib.suppress(OSError):  # without room or rights it is computed again next time
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(kept, digest.encode())
    return digest


def cache_folder() -> Path:
    """The folder of the digests; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "moa-data" / "sha256"


def save_target_bundle(
    model: PreTrainedModel, tokenizer: Any, path: str | Path, n_layers_kept: int, dtype: torch.dtype | None = None
) -> None:
    """Write the bundle of a loaded target, with its last N decoder layers, into a new folder; a dtype converts it."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    n_layers = model.config.num_hidden_layers
    if not 0 <= n_layers_kept <= n_layers:
        raise TargetError(f"cannot keep the last {n_layers_kept} layers of a target with {n_layers}.")
    config = copy.copy(model.config)
    config.dtype = dtype or model.dtype
    config.save_pretrained(path)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    weights = {
        name: value.to("cpu", config.dtype, copy=True).contiguous()
        for name, value in _frozen_weights(model, n_layers_kept).items()
    }
    save_file(weights, path / FROZEN_FILE, metadata={"format": "pt"})


def held_layers(path: str | Path) -> int:
    """Count the decoder layers of the target that a bundle holds; 0 for a folder that is not a bundle."""
    file = Path(path) / FROZEN_FILE
    if not file.is_file():
        return 0
    return len({key.split(".")[1] for key in read_header(file, TargetError) if key.startswith("layers.")})


def frozen_tensors(config: Any, n_layers: int) -> dict[str, Tensor]:
    """Make the tensors of a bundle's file that a frozen target with the last N layers needs, on the meta device."""
    n_total = config.num_hidden_layers
    with torch.device("meta"):
        norm, embeddings = torch.empty(config.hidden_size), torch.empty(config.vocab_size, config.hidden_size)
        layer = DecoderBlock(layer_sizes(config)).state_dict() if n_layers else {}
    tensors = {"embed_tokens.weight": embeddings, "norm.weight": norm, "lm_head.weight": embeddings}
    for index in range(n_total - n_layers, n_total):
        tensors |= {f"layers.{index}.{name}": value for name, value in layer.items()}
    return tensors


def _frozen_weights(model: PreTrainedModel, n_layers_kept: int) -> dict[str, Tensor]:
    """List the live target's weights under the names of a bundle, not copied."""
    body, n_layers = model.model, model.config.num_hidden_layers
    weights = {
        "embed_tokens.weight": body.embed_tokens.weight,
        "norm.weight": body.norm.weight,
        "lm_head.weight": model.lm_head.weight,
    }
    for index in range(n_layers - n_layers_kept, n_layers):
        weights |= {f"layers.{index}.{name}": value for name, value in body.layers[index].state_dict().items()}
    return {name: value.detach() for name, value in weights.items()}


class FrozenTarget(nn.Module):
    """Embeddings, final norm, LM head and the last N decoder layers of a target; never trained.

    Attributes:
        windows: attention window of each of the N layers in tokens; None for full attention.
        layers: the last N layers in order; ``layers[0]`` is target layer ``L - N``.
    """

    def __init__(self, config: Any, weights: dict[str, Tensor], n_layers: int) -> None:
        super().__init__()
        self.config = config
        self.n_layers = n_layers
        windows = layer_windows(config)
        self.windows = windows[len(windows) - n_layers :]
        dtype = weights["lm_head.weight"].dtype
        self.compute_dtype: torch.dtype | None = None  # of what embed and logits give; None for that of the weights
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
    def load(
        cls,
        path: str | Path,
        n_layers: int = 0,
        dtype: torch.dtype | None = torch.float32,
        sizes: Mapping[str, Any] | None = None,
    ) -> "FrozenTarget":
        """Load a bundle folder; without a dtype in the stored one.

        Args:
            sizes: :func:`target_sizes` as recorded by the store that holds the bundle; None without a store.
        """
        path = Path(path)
        if not (path / FROZEN_FILE).is_file():
            raise TargetError(
                f"{path} has no {FROZEN_FILE}, the target's frozen weights. Run extract again: it restores target/."
            )
        headers = read_header(path / FROZEN_FILE, TargetError)
        config, advice = load_target_config(path), "Run `moa-data verify`, and `moa-data repair` with --model."
        own = target_sizes(config)
        if wrong := [
            f"{key} {own.get(key)} and not {size}" for key, size in (sizes or {}).items() if own.get(key, size) != size
        ]:
            raise TargetError(f"{path} is of another target than its store: it has {', '.join(wrong)}. {advice}")
        if (held := held_layers(path)) < n_layers:
            raise TargetError(
                f"{path} holds {held} decoder layers, {n_layers} are needed; "
                f"add them with `moa-data add STORE --model MODEL --target-layers {n_layers}`."
            )
        expected = frozen_tensors(config, n_layers)
        found = {name: header for name, header in headers.items() if name in expected}
        if problem := find_problems(found, expected):
            raise TargetError(f"{path / FROZEN_FILE} does not fit its config.json: {problem}. {advice}")
        with safe_open(path / FROZEN_FILE, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in expected}
        if dtype is not None:
            weights = {name: value.to(dtype) for name, value in weights.items()}
        return cls(config, weights, n_layers)

    @classmethod
    def from_model(cls, model: PreTrainedModel, n_layers: int = 0) -> "FrozenTarget":
        """Make the frozen target from a live one, sharing its weights."""
        weights = _frozen_weights(model, n_layers)
        return cls(model.config, weights, n_layers).to(weights["lm_head.weight"].device)

    @property
    def blocks(self) -> list[DecoderBlock]:
        """The typed :attr:`layers`."""
        return cast(list[DecoderBlock], list(self.layers))

    def compute_in(self, dtype: torch.dtype, casts_itself: bool) -> None:
        """Compute in a wider dtype than that of the weights; embeddings and LM head are kept as they are."""
        self.compute_dtype = dtype
        for module in self.modules():
            # Autocast casts the decoder layers' matrices in products itself.
            if isinstance(module, RMSNorm) or (isinstance(module, nn.Linear) and not casts_itself):
                module.to(dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed token ids: [B, T] -> [B, T, E]."""
        embedded: Tensor = self.embed_tokens(tokens)
        return embedded if self.compute_dtype is None else embedded.to(self.compute_dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the LM head to features (after the final norm): [..., E] -> [..., V]."""
        return logits_of(hidden, self.lm_head_weight)
