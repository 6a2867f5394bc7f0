"""The live target: a transformers causal LM with its cache, behind the few calls that decoding needs."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ...errors import TargetError
from ...machine import free_memory
from ...text import first_line, format_bytes
from ..files.foreign import check_model_folder, parsing, read_header, read_json
from ..nn import masks
from .bundle import (
    find_eos_token_ids,
    hash_target,
    layer_kinds,
    layer_windows,
    load_target_config,
    target_sizes,
    weight_files,
)
from .cache import TargetCache
from .static_calls import StaticCalls

_FOREIGN = ["consolidated*", "original/*"]
"""The same weights in the layouts of other programs."""
_CHUNK_TOKENS = 1024
"""Tokens of a causal run that share one mask, so that memory grows linearly with the context, not quadratically."""


def resolve_model_folder(path_or_id: str, with_weights: bool = True, revision: str | None = None) -> Path:
    """Find a local model folder, or download the snapshot of a Hub id.

    Args:
        revision: branch, tag or commit on the Hub; None for main.

    Returns:
        The folder; that of a snapshot is named after its commit.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        if revision:
            raise TargetError(f"{path_or_id} is a folder and has no revision {revision}. Leave out --revision.")
        return folder
    if path_or_id.startswith((".", "/", "~")) or path_or_id.count("/") != 1:
        raise TargetError(f"{path_or_id} is neither a folder nor a Hub id of the form owner/name.")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.model", "*.txt"] + (["*.safetensors"] if with_weights else [])
    try:
        return Path(snapshot_download(path_or_id, revision=revision, allow_patterns=patterns, ignore_patterns=_FOREIGN))
    except Exception as error:  # the Hub client raises many unrelated types for "cannot be reached"
        reason = first_line(error)
        raise TargetError(
            f"there is no folder {path_or_id} here, and the Hub gave no model of that name: {reason.rstrip('.')}. "
            "Check the path or the name."
        ) from error


def load_target_tokenizer(folder: Path) -> Any:
    """Load the fast tokenizer of a model folder, running no code of the folder."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise TargetError(f"{folder} has no tokenizer; put the model's tokenizer.json into the folder.")
    check_model_folder(folder)
    if (folder / "config.json").is_file():
        load_target_config(folder)  # the class of a tokenizer depends on it
    with parsing(f"{folder} has no usable tokenizer", TargetError, "Restore its tokenizer files."):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise TargetError(f"{folder} has no fast tokenizer; token offsets are needed for response masks.")
    with parsing(f"{folder} has no usable tokenizer", TargetError, "Restore its tokenizer files."):
        tokenizer.decode(tokenizer("a")["input_ids"])  # transformers validates some settings on first use only
    return tokenizer


def load_target_model(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Load the causal LM in evaluation mode.

    Raises:
        TargetError: it cannot be loaded, or its weights do not fit in the memory that is free.
    """
    config = load_target_config(folder)
    _check_memory(folder, _check_weights(folder, config), dtype, device)
    with parsing(f"cannot load the weights of {folder}", TargetError):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise TargetError(f"{folder} lacks {len(missing)} weights, the first is {missing[0]}.")
    frozen: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return frozen


def _check_weights(folder: Path, config: Any) -> int:
    """Refuse safetensors files that are damaged, outside the folder, or smaller than the config requires.

    Returns:
        The number of values that they hold.
    """
    weights = weight_files(folder)
    if not weights:
        raise TargetError(f"{folder} has no *.safetensors weights; save the model with safe serialization.")
    headers = [header for file in weights for header in read_header(file, TargetError).values()]
    index = folder / "model.safetensors.index.json"
    places = read_json(index, TargetError).get("weight_map") if index.is_file() else {}
    named = [*places.values()] if isinstance(places, dict) else [places]
    named += [name for name in [getattr(config, "transformers_weights", None)] if name is not None]
    known = {file.name for file in weights} | {index.name}
    if wrong := [name for name in named if name not in known]:
        raise TargetError(
            f"{folder}: the weights are said to lie in {str(wrong[0])[:60]!r}, which is no *.safetensors file of the "
            "folder. Download it again."
        )
    sizes = target_sizes(config)
    heads = sizes["n_heads"] + sizes["n_kv_heads"]
    layer_values = sizes["hidden_size"] * (2 * heads * sizes["head_dim"] + 3 * config.intermediate_size)
    called_for = sizes["vocab_size"] * sizes["hidden_size"] + sizes["n_layers"] * layer_values
    if (held := sum(math.prod(header.shape) for header in headers)) < called_for:
        raise TargetError(
            f"{folder}: the weights hold {held:,} values, config.json calls for more than {called_for:,}. Download the "
            "folder again."
        )
    return held


def _check_memory(folder: Path, n_values: int, dtype: torch.dtype, device: str) -> None:
    """Refuse weights for which there is no memory: the kernel would end the process without a word."""
    n_bytes = n_values * dtype.itemsize
    rooms = {"host memory": free_memory()}  # the weights are read into it, whatever the device
    if torch.device(device).type == "cuda":
        rooms[device] = torch.cuda.mem_get_info(torch.device(device))[0]
    for place, n_free in rooms.items():
        if n_free is not None and n_bytes > n_free:
            narrow = n_values * torch.bfloat16.itemsize
            way = (
                f"In bfloat16 they take {format_bytes(narrow)}." if narrow <= n_free < n_bytes else "Free some memory."
            )
            raise TargetError(
                f"the weights of {folder} take {format_bytes(n_bytes)} in {str(dtype).removeprefix('torch.')}, and "
                f"{format_bytes(n_free)} are free in {place}. {way}"
            )


def pick_device(device: str) -> str:
    """Resolve ``auto`` to cuda, mps or cpu; refuse any other device that this machine does not have."""
    if device != "auto":
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = first_line(error)
            raise TargetError(f"device {device!r} cannot be used: {reason}. Try --device cpu.") from error
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


class Target:
    """A loaded target with its tokenizer.

    Attributes:
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
        self.eos_token_ids = find_eos_token_ids(
            getattr(source, "eos_token_id", None) for source in (model.generation_config, model.config)
        )
        self._identity: dict[str, str] | None = None
        self._static: StaticCalls | None = None

    @classmethod
    def load(
        cls, path_or_id: str, dtype: torch.dtype = torch.float32, device: str = "auto", revision: str | None = None
    ) -> "Target":
        """Load a target from a folder, or a revision of it from the Hub."""
        folder = resolve_model_folder(path_or_id, revision=revision)
        model = load_target_model(folder, dtype, pick_device(device))
        return cls(model, load_target_tokenizer(folder), folder)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    @property
    def identity(self) -> dict[str, str]:
        """Content hashes of the target's files (:func:`hash_target`); empty for a bare model. Computed once."""
        if self._identity is None:
            self._identity = hash_target(self.folder) if self.folder else {}
        return self._identity

    def compile(self, n_slots: int, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile the target calls after the prefill with static shapes; on a CUDA device they become CUDA graphs.

        Args:
            n_slots: tokens of the longest text to decode; longer ones trigger another compilation.
        """
        self._static = StaticCalls(self.model.model, n_slots, backend, self.device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: TargetCache, seen: Tensor | None = None) -> Tensor:
        """Run tokens after the committed part of each row; they stay pending until ``cache.commit``.

        A causal run never builds a mask of all tokens by all tokens: a full-attention prefill needs none, any other run
        is computed in chunks.

        Args:
            tokens: [B, n] int64.
            seen: [B, n, n] bool, which of the tokens each of them sees, itself included (``tree.ancestors``); None for
                a causal run.

        Returns:
            Hidden states [B, n, E] after the final norm.
        """
        n_tokens, device = tokens.shape[1], tokens.device
        if self._static is not None and self._static.takes(n_tokens, cache):
            with layer_outputs(self.model, cache.watched_layers) as outputs:
                return self._static.forward(tokens, seen, cache, self._attention_mask, outputs)
        if seen is not None:
            cache.begin_call(n_tokens, device)
            positions = torch.tensor(cache.lengths, device=device)[:, None] + seen.sum(dim=2) - 1
            mask = self._attention_mask(lambda window: masks.tree_mask(cache.lengths, seen, window))
            return self._call(tokens, positions, mask, cache)
        lengths = (
            cache.lengths if len(set(cache.lengths)) > 1 else cache.lengths[:1]
        )  # rows of one length share positions
        needs_mask = self._needs_mask(cache, n_tokens)
        step = _CHUNK_TOKENS if needs_mask else n_tokens
        hidden = []
        for first in range(0, n_tokens, step):
            part = tokens[:, first : first + step]
            cache.begin_call(part.shape[1], device, goes_on=first > 0)
            at = torch.arange(first, first + part.shape[1], device=device)
            positions = torch.tensor(lengths, device=device)[:, None] + at  # [B or 1, n]
            build = partial(masks.causal_mask, positions, cache.n_slots)
            mask = self._attention_mask(build) if needs_mask else None
            hidden.append(self._call(part, positions, mask, cache))
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden, dim=1)

    def _call(self, tokens: Tensor, positions: Tensor, mask: Any, cache: TargetCache) -> Tensor:
        """Run one forward of the model: [B, n] -> [B, n, E]."""
        model: Any = self.model
        with layer_outputs(model, cache.watched_layers) as outputs:
            hidden: Tensor = model.model(
                input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
            ).last_hidden_state
        if outputs:
            cache.keep_layer_outputs([outputs[layer] for layer in cache.watched_layers])
        return hidden

    def _needs_mask(self, cache: TargetCache, n_tokens: int) -> bool:
        """Whether a causal run needs a mask, or the kernel's own causal masking is enough (padding comes last)."""
        is_prefill = not any(cache.lengths) and n_tokens > 1
        windows = [window for window in self._windows().values() if window is not None]
        return not is_prefill or n_tokens >= min(windows, default=n_tokens + 1) or not self._takes_bool_masks

    @property
    def _takes_bool_masks(self) -> bool:
        return getattr(self.config, "_attn_implementation", "sdpa") == "sdpa"

    def _windows(self) -> dict[str, int | None]:
        """Map each kind of layer to its sliding window in tokens; None for full attention."""
        return dict(zip(layer_kinds(self.config), layer_windows(self.config), strict=True))

    def _attention_mask(self, build: Callable[[int | None], Tensor]) -> Any:
        """Build the masks in the model's format: [B, 1, n, S], or a dict of them by kind where layers differ."""
        by_kind = {kind: self._as_taken(build(window)) for kind, window in self._windows().items()}
        return by_kind if len(by_kind) > 1 else next(iter(by_kind.values()))

    def _as_taken(self, mask: Tensor) -> Tensor:
        mask = mask[:, None]  # [B, 1, n, S]
        if self._takes_bool_masks:
            return mask
        dtype = self.model.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the LM head: [..., E] -> [..., V]."""
        logits: Tensor = self.model.lm_head(hidden)
        return logits

    def new_cache(self, n_rows: int = 1) -> TargetCache:
        """Make an empty cache for :meth:`forward`."""
        if self._static is None:
            return TargetCache(self.config.num_hidden_layers, n_rows)
        return TargetCache(self.config.num_hidden_layers, n_rows, self._static.n_slots, self._static.buffers)


@contextmanager
def layer_outputs(model: Any, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of decoder layers, before any final norm, of the forwards while the context is open.

    Args:
        layers: decoder layers, from 0.

    Yields:
        Layer -> [B, T, E] of the last forward.
    """
    outputs: dict[int, Tensor] = {}

    def keeper(layer: int) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            outputs[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    handles = [model.model.layers[layer].register_forward_hook(keeper(layer)) for layer in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
