"""The live target: a transformers causal LM with its cache, seen as the few calls that decoding needs."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from . import masks
from .bundle import check_weight_file, hash_target, target_sizes
from .errors import TargetError
from .target_cache import TargetCache


def resolve_model_folder(path_or_id: str, with_weights: bool = True) -> Path:
    """A local folder as it is, or the downloaded snapshot of a Hub id.

    Raises:
        TargetError: neither a folder nor a Hub id that can be reached.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    if path_or_id.startswith((".", "/", "~")) or path_or_id.count("/") != 1:
        raise TargetError(f"{path_or_id} is neither a folder nor a Hub id of the form owner/name.")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.model", "*.txt"] + (["*.safetensors"] if with_weights else [])
    try:
        return Path(snapshot_download(path_or_id, allow_patterns=patterns))
    except Exception as error:  # the Hub client raises many unrelated types for "cannot be reached"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TargetError(f"cannot download {path_or_id} from the Hub: {reason}") from error


def load_target_config(folder: Path) -> Any:
    """The transformers config of a model folder, checked to be of a supported family."""
    if not (folder / "config.json").is_file():
        raise TargetError(f"{folder} has no config.json; expected a transformers model folder.")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise TargetError(f"cannot read {folder}/config.json: {reason} Restore the file.") from error
    target_sizes(config)
    return config


def load_target_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a model folder."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise TargetError(f"{folder} has no tokenizer; put the model's tokenizer.json into the folder.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"{folder} has no usable tokenizer: {str(error).splitlines()[0]}") from error
    if not tokenizer.is_fast:
        raise TargetError(f"{folder} has no fast tokenizer; token offsets are needed for response masks.")
    return tokenizer


def load_target_model(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Load the causal LM in evaluation mode.

    Raises:
        TargetError: weights missing or not matching the config.
    """
    load_target_config(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise TargetError(f"{folder} has no *.safetensors weights; save the model with safe serialization.")
    for file in weights:
        check_weight_file(file)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise TargetError(f"cannot load the weights of {folder}: {str(error).splitlines()[0]}") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise TargetError(f"{folder} lacks {len(missing)} weights, the first is {missing[0]}.")
    return model.to(device).eval().requires_grad_(False)


def pick_device(device: str) -> str:
    """``auto`` -> cuda, mps or cpu, whichever is there; anything else unchanged.

    Raises:
        TargetError: this machine has no such device.
    """
    if device != "auto":
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TargetError(f"device {device!r} cannot be used: {reason}. Try --device cpu.") from error
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


class Target:
    """A loaded target with its tokenizer.

    Attributes:
        model: transformers causal LM, eval mode.
        tokenizer: its tokenizer, None where built from a bare model.
        eos_token_ids: ids that end a generation.
        max_positions: largest sequence length in tokens.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, folder: Path | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.folder = folder
        self.config = model.config
        self.sizes = target_sizes(model.config)
        self.max_positions: int = model.config.max_position_embeddings
        self.eos_token_ids = _eos_token_ids(model)
        self._identity: dict[str, str] | None = None

    @classmethod
    def load(cls, path_or_id: str, dtype: torch.dtype = torch.float32, device: str = "auto") -> "Target":
        """Load a target from a folder or the Hub."""
        folder = resolve_model_folder(path_or_id)
        model = load_target_model(folder, dtype, pick_device(device))
        return cls(model, load_target_tokenizer(folder), folder)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def identity(self) -> dict[str, str]:
        """Content hashes of the target's files (:func:`hash_target`); empty for a bare model. Computed once."""
        if self._identity is None:
            self._identity = hash_target(self.folder) if self.folder else {}
        return self._identity

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: TargetCache, seen: Tensor | None = None) -> Tensor:
        """Run tokens behind the committed part of each row; they stay pending until ``cache.commit``.

        Args:
            tokens: [B, n] int64.
            cache: of B rows.
            seen: [B, n, n] bool, which of the tokens each of them sees, itself included (``tree.ancestors``); None for
                a causal run.

        Returns:
            Hidden states [B, n, E] after the final norm.
        """
        n_rows, n_tokens = tokens.shape
        if seen is None:
            seen = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=tokens.device).tril().expand(n_rows, -1, -1)
        lengths = torch.tensor(cache.lengths, device=tokens.device)
        cache.begin_call(n_tokens, tokens.device)
        model: Any = self.model
        return model.model(
            input_ids=tokens,
            position_ids=lengths[:, None] + seen.sum(dim=2) - 1,
            attention_mask=self._attention_mask(cache.lengths, seen),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    def _attention_mask(self, lengths: list[int], seen: Tensor) -> Any:
        """Mask [B, 1, n, S] in the form that the model's attention takes; a dict where layers differ."""
        config = self.config
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        if len(kinds) > 1:
            return {
                kind: self._as_taken(masks.tree_mask(lengths, seen, window if "sliding" in kind else None))
                for kind in kinds
            }
        slides = kinds == {"sliding_attention"} if kinds else getattr(config, "use_sliding_window", True)
        return self._as_taken(masks.tree_mask(lengths, seen, window if slides else None))

    def _as_taken(self, mask: Tensor) -> Tensor:
        mask = mask[:, None]  # [B, 1, n, S]
        if getattr(self.config, "_attn_implementation", "sdpa") == "sdpa":
            return mask
        dtype = self.model.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., V]."""
        return self.model.lm_head(hidden)

    def new_cache(self, n_rows: int = 1) -> TargetCache:
        """An empty cache for :meth:`forward`."""
        return TargetCache(self.config.num_hidden_layers, n_rows)


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    for source in (model.generation_config, model.config):
        eos = getattr(source, "eos_token_id", None) if source is not None else None
        if eos is not None:
            return frozenset(eos if isinstance(eos, list | tuple) else [eos])
    return frozenset()
