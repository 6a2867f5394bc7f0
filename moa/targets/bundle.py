"""The bundle of a target: its config, its tokenizer, and the frozen weights that training needs.

A bundle is the folder ``target/`` of a store. It has config.json, generation_config.json, tokenizer
files, and frozen.safetensors. The file frozen.safetensors contains the tensors
``embed_tokens.weight``, ``norm.weight``, ``lm_head.weight`` and ``layers.{i}.*`` in the target's
dtype. The number i is the index of a decoder layer in the target. This module also computes the
hashes that identify a target.

Shapes: B batch, T tokens, E width, V vocabulary, L decoder layers of the target, N decoder layers
in the bundle.
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
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import TargetError
from ...files import write_atomic
from ...text import SILENT, Progress
from ..nn.layers import DecoderBlock, RMSNorm, Rotary
from ..nn.losses import capped, logits_of
from ..nn.packed import PackedLinear, as_layer, pack, rows_of
from .facts import TargetFacts, load_facts
from .families import first_attribute, text_model
from .model_files import check_finite, find_problems, read_header, read_json, write_tensors

FROZEN_FILE = "frozen.safetensors"
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm")

_ADVICE = (
    "Find the damaged files with `moa-data verify STORE`, and repair them with `moa-data repair "
    "STORE --model MODEL`."
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
# A file system's clock advances in ticks. If a file changes twice within one tick, the second
# change leaves the time stamp of the file as it is, so a cached digest would be wrong. So the
# digest of a file is cached only if the last change was at least this many seconds ago.
_SETTLED_S = 2.0


def find_eos_token_ids(values: Iterable[Any]) -> frozenset[int]:
    """Return the token ids that end a generation.

    Args:
        values: the ``eos_token_id`` of several configs. The first value that is not None is used.
    """
    for eos in values:
        if eos is not None:
            ids = eos if isinstance(eos, list | tuple) else [eos]
            if not all(type(token) is int for token in ids):
                raise TargetError(
                    f"eos_token_id is {str(eos)[:60]!r}, expected token ids. Correct it in "
                    "generation_config.json or config.json."
                )
            return frozenset(ids)
    return frozenset()


def load_eos_token_ids(folder: Path) -> frozenset[int]:
    """Read the token ids that end a generation from a model folder or a bundle."""
    files = [folder / "generation_config.json", folder / "config.json"]
    return find_eos_token_ids(
        read_json(file, TargetError, allows_infinity=True).get("eos_token_id")
        for file in files
        if file.is_file()
    )


def weight_files(folder: Path) -> list[Path]:
    """List a model's safetensors files, sorted by name. Raise TargetError if there are none."""
    if not (files := sorted(folder.glob("*.safetensors"))):
        raise TargetError(
            f"{folder} has no weights in *.safetensors files. Save the model in the safetensors "
            "format."
        )
    # A file consolidated.safetensors next to other weight files contains the same weights in
    # another layout, so skip it.
    return [file for file in files if not file.name.startswith("consolidated")] or files


def hash_target(folder: str | Path, progress: Progress = SILENT) -> dict[str, str]:
    """Compute the content hashes that identify a target.

    Args:
        folder: the model folder.
        progress: reports the number of bytes of weights that were hashed.

    Returns:
        A dict with ``weights_sha256``, the hash of the names and bytes of all weight files, and
        ``config_sha256``, the hash of config.json. If the folder was made from a GGUF file, the
        dict has only the key ``weights_sha256``, and its value is the hash of the GGUF file.
    """
    folder = Path(folder)
    # Check the config.json. This raises TargetError if the folder is not a target.
    load_facts(folder)
    if folder.parent == cache_folder("gguf"):
        # Use the hash of the GGUF file. Different releases of transformers may convert a GGUF file
        # to different weight files, whose hashes would differ.
        return {"weights_sha256": folder.name}
    weights = weight_files(folder)
    digest = hashlib.sha256()
    n_bytes = sum(file.stat().st_size for file in weights)
    n_done = 0
    hashing = progress.of("hash weights", "B")
    for number, file in enumerate(weights, start=1):
        # Check the header. This raises TargetError if the weight file is damaged.
        read_header(file, TargetError)
        digest.update(file.name.encode() + bytes.fromhex(file_sha256(file)))
        n_done += file.stat().st_size
        hashing(n_done, n_bytes, f"file {number}/{len(weights)}")
    config_digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    return {"weights_sha256": digest.hexdigest(), "config_sha256": config_digest}


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file in hex.

    The result is cached, so an unchanged file is read only once.
    """
    # The digest is cached in the user's cache folder. The cache key is made of the file's path,
    # size, times and inode. A change of the file always changes this key, because the key includes
    # the status change time (ctime), and programs cannot set this time back.
    real = path.resolve()
    # In the cache of the Hugging Face Hub, a file is a link to a blob, and the name of the blob is
    # the sha256 of its content. So the file need not be hashed.
    if path.is_symlink() and real.parent.name == "blobs" and _SHA256.fullmatch(real.name):
        return real.name
    before = real.stat()
    state = (
        str(real),
        before.st_size,
        before.st_mtime_ns,
        before.st_ctime_ns,
        before.st_dev,
        before.st_ino,
    )
    digest_file = (
        cache_folder("sha256") / hashlib.sha256("\0".join(map(str, state)).encode()).hexdigest()
    )
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if _SHA256.fullmatch(known := digest_file.read_text()):
            return known
    with real.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        after = os.fstat(stream.fileno())
    is_unchanged = (after.st_size, after.st_mtime_ns, after.st_ctime_ns) == state[1:4]
    if is_unchanged and time.time() - max(after.st_mtime, after.st_ctime) > _SETTLED_S:
        # The digest may not be saved, for example on a full disk. Then the file is hashed again
        # next time.
        with contextlib.suppress(OSError):
            digest_file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(digest_file, digest.encode())
    return digest


def cache_folder(name: str) -> Path:
    """Return the path of a folder in the user's cache. The folder may not exist yet.

    The folder ``sha256`` holds digests of files. The folder ``gguf`` holds model folders, each
    named after the digest of its GGUF file.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base).absolute() / "moa-data" / name


def save_target_bundle(
    model: PreTrainedModel,
    tokenizer: Any,
    path: str | Path,
    n_layers_kept: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the bundle of a loaded target into a new folder.

    Args:
        model: the loaded target.
        tokenizer: the tokenizer of the target.
        path: the new folder.
        n_layers_kept: the number of decoder layers to save. The last layers are saved.
        dtype: the dtype of the written weights. If it is None, it is the model's dtype.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = copy.copy(model.config.get_text_config(decoder=True))
    # Remove ``auto_map``, because it names code that is not in the bundle.
    vars(config).pop("auto_map", None)
    config.dtype = dtype or model.dtype
    config.save_pretrained(path)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    weights: dict[str, Tensor] = {}
    for name, value in frozen_weights(model, n_layers_kept).items():
        weights[name] = value.to(config.dtype)
    write_tensors(path / FROZEN_FILE, weights)


def held_layers(path: str | Path) -> int:
    """Return the number of decoder layers in a bundle. It is 0 if the folder is not a bundle."""
    file = Path(path) / FROZEN_FILE
    if not file.is_file():
        return 0
    layer_indices: set[str] = set()
    for key in read_header(file, TargetError):
        if key.startswith("layers."):
            layer_indices.add(key.split(".")[1])
    return len(layer_indices)


def frozen_tensors(facts: TargetFacts, n_layers: int) -> dict[str, Tensor]:
    """Create, on the meta device, the tensors that a bundle with the last N layers must have."""
    n_total = facts.n_layers
    with torch.device("meta"):
        norm = torch.empty(facts.hidden_size)
        embeddings = torch.empty(facts.vocab_size, facts.hidden_size)
        layer = DecoderBlock(facts.layer_sizes()).state_dict() if n_layers else {}
    tensors = {"embed_tokens.weight": embeddings, "norm.weight": norm, "lm_head.weight": embeddings}
    for index in range(n_total - n_layers, n_total):
        for name, value in layer.items():
            tensors[f"layers.{index}.{name}"] = value
    return tensors


def frozen_weights(model: PreTrainedModel, n_layers_kept: int = 0) -> dict[str, Tensor]:
    """Return a live target's weights, named as in a bundle. The weights are not copied.

    Raises:
        TargetError: drafters do not support the target's embeddings or LM head.
    """
    body: Any = text_model(model)
    facts = TargetFacts.of(body.config)
    weights = {
        "embed_tokens.weight": _embeddings(model),
        "norm.weight": _norm_factors(body, facts),
        "lm_head.weight": scaled_head(model),
    }
    size = facts.vocab_size, facts.hidden_size
    # Refuse models such as OPT-350m. Their embeddings have another width than their hidden states.
    if not weights["embed_tokens.weight"].shape == weights["lm_head.weight"].shape == size:
        raise TargetError(
            f"drafters need a target with embeddings and an LM head of {size[0]:,} tokens by "
            f"{size[1]:,} numbers, but those of this {facts.model_type} have another shape. Choose "
            "another target."
        )
    for index in range(facts.n_layers - n_layers_kept, facts.n_layers):
        for name, value in body.layers[index].state_dict().items():
            weights[f"layers.{index}.{name}"] = value
    return {name: value.detach() for name, value in weights.items()}


def _embeddings(model: PreTrainedModel) -> Tensor:
    """Return the embeddings [V, E] of all tokens, multiplied by the embedding layer's scale."""
    table: Any = model.get_input_embeddings()
    scale = getattr(table, "embed_scale", None)
    weight: Tensor = table.weight
    return (
        weight
        if scale is None
        else weight * torch.as_tensor(scale, device=weight.device).to(weight.dtype)
    )


def final_norm(body: nn.Module) -> nn.Module:
    """Return the norm after the last layer of a text model, or an identity if there is none."""
    norm: nn.Module | None = first_attribute(body, _FINAL_NORMS)
    return nn.Identity() if norm is None else norm


def _norm_factors(body: nn.Module, facts: TargetFacts) -> Tensor:
    """Return the elementwise factors [E] of the norm after the last layer.

    If the model has no such norm, the factors are 1.
    """
    weight: Tensor | None = getattr(final_norm(body), "weight", None)
    if weight is None:
        return torch.ones(
            facts.hidden_size, dtype=cast(Any, body).dtype, device=cast(Any, body).device
        )
    offset = facts.family.norm_offset
    return weight + offset if offset else weight


def scaled_head(model: PreTrainedModel) -> Tensor:
    """Return the LM head [V, E], multiplied by the scale that the model applies to logits."""
    head = cast(Any, model).get_output_embeddings()
    facts = TargetFacts.of_model(model)
    if head is None or getattr(head, "bias", None) is not None:
        raise TargetError(
            f"the LM head of {facts.model_type} is not a plain matrix, or has a bias, which "
            "drafters do not support. Choose another target."
        )
    weight = cast(Tensor, head.weight)
    return weight if facts.logit_scale == 1 else weight * facts.logit_scale


class FrozenTarget(nn.Module):
    """The frozen weights: a target's embeddings, final norm, LM head and last N decoder layers.

    Training a drafter does not change these weights.
    """

    def __init__(self, facts: TargetFacts, weights: dict[str, Tensor], n_layers: int) -> None:
        super().__init__()
        self.facts = facts
        self.n_layers = n_layers
        first = facts.n_layers - n_layers
        # The attention windows, in tokens, of the last N decoder layers. A layer with full
        # attention has None in place of a window.
        self.windows = facts.layer_windows[first:]
        dtype = weights["lm_head.weight"].dtype
        # `embed` and `logits` return results of this dtype. If it is None, the results have the
        # dtype of the weights.
        self.compute_dtype: torch.dtype | None = None
        self.embed_tokens = nn.Embedding.from_pretrained(
            weights["embed_tokens.weight"], freeze=True
        )
        self.norm = RMSNorm(facts.hidden_size, eps=facts.norm_eps, dtype=dtype)
        self.norm.weight = nn.Parameter(weights["norm.weight"])
        self.lm_head = as_layer(weights["lm_head.weight"])
        self.logit_cap = facts.logit_cap
        self.rotary = Rotary(facts.head_dim, facts.rope_parameters, facts.max_position_embeddings)
        with torch.device("meta"):
            # The last N layers, in the order of the target. So ``layers[0]`` is the target's layer
            # ``L - N``.
            self.layers = nn.ModuleList(DecoderBlock(facts.layer_sizes()) for _ in range(n_layers))
        for offset, layer in enumerate(self.layers):
            prefix = f"layers.{first + offset}."
            layer_weights: dict[str, Tensor] = {}
            for name, value in weights.items():
                if name.startswith(prefix):
                    layer_weights[name.removeprefix(prefix)] = value
            layer.load_state_dict(layer_weights, strict=True, assign=True)
        self.requires_grad_(False)

    @classmethod
    def load(
        cls,
        path: str | Path,
        n_layers: int = 0,
        dtype: torch.dtype | None = torch.float32,
        sizes: Mapping[str, Any] | None = None,
    ) -> "FrozenTarget":
        """Load a bundle.

        Args:
            path: the folder of the bundle.
            n_layers: the number of decoder layers to load. The last layers are loaded.
            dtype: the dtype of the loaded weights. If it is None, they keep their stored dtype.
            sizes: the target's sizes (:attr:`.TargetFacts.sizes`) from the manifest of the store
                that contains this bundle. None if the bundle is not part of a store.

        Raises:
            TargetError: the bundle is incomplete or damaged, or it belongs to another target.
        """
        path = Path(path)
        if not (path / FROZEN_FILE).is_file():
            raise TargetError(
                f"{path} has no {FROZEN_FILE}, the file of the target's frozen weights. Run "
                "`moa-data extract` again with the same options, which restores the folder target/."
            )
        headers = read_header(path / FROZEN_FILE, TargetError)
        facts = load_facts(path)
        _check_sizes(path, facts.sizes, sizes or {})
        if (held := held_layers(path)) < n_layers:
            raise TargetError(
                f"{path} holds {held} decoder layers of the target, but {n_layers} are needed. Add "
                "the missing layers with `moa-data add STORE --model MODEL --target-layers "
                f"{n_layers}`."
            )
        expected = frozen_tensors(facts, n_layers)
        stored = {name: header for name, header in headers.items() if name in expected}
        if problem := find_problems(stored, expected):
            raise TargetError(
                f"{path / FROZEN_FILE} does not fit its config.json ({problem}). {_ADVICE}"
            )
        with safe_open(path / FROZEN_FILE, framework="pt") as file:
            weights = {name: file.get_tensor(name).to(dtype=dtype) for name in expected}
        check_finite(weights, path / FROZEN_FILE, TargetError)
        return cls(facts, weights, n_layers)

    @classmethod
    def from_model(cls, model: PreTrainedModel, n_layers: int = 0) -> "FrozenTarget":
        """Make the frozen target from a live target. Both use the same weights in memory."""
        weights = frozen_weights(model, n_layers)
        frozen = cls(TargetFacts.of_model(model), weights, n_layers).to(
            weights["lm_head.weight"].device
        )
        head = cast(Any, model).get_output_embeddings()
        if (
            isinstance(head, PackedLinear)
            and head.weight.data_ptr() == frozen.lm_head_weight.data_ptr()
        ):
            frozen.lm_head = head
        return frozen

    @property
    def lm_head_weight(self) -> Tensor:
        """The weight [V, E] of the LM head."""
        return self.lm_head.weight

    @property
    def blocks(self) -> list[DecoderBlock]:
        """The decoder layers as a list. Type checkers know the type of its items."""
        return cast(list[DecoderBlock], list(self.layers))

    def compute_in(self, dtype: torch.dtype, casts_itself: bool) -> None:
        """Compute in a wider dtype than the weights have.

        This casts the norms and the linear layers of the decoder layers. The weights of the
        embeddings and the LM head are not cast.

        Args:
            dtype: the dtype to compute in.
            casts_itself: whether PyTorch casts the weights of linear layers itself, as under
                autocast. Then this method does not cast them.
        """
        self.compute_dtype = dtype
        for module in (self.norm, *self.layers.modules()):
            # Under autocast, PyTorch itself casts the weights of linear layers.
            if isinstance(module, RMSNorm) or (isinstance(module, nn.Linear) and not casts_itself):
                module.to(dtype)

    def prepare(self) -> None:
        """Pack the weights of the LM head, so that drafting is faster on a CPU.

        The weights of the LM head must not change afterwards. See :func:`..nn.packed.pack`.
        """
        pack(self.lm_head, is_exact=False)

    def head_of(self, tokens: Tensor) -> nn.Linear:
        """Return a linear layer that computes only the logits of the given tokens [n].

        Its weights are the rows of the LM head that belong to these tokens. If the LM head is
        packed, the weights of the new layer are packed, too.
        """
        return rows_of(self.lm_head_weight, tokens, isinstance(self.lm_head, PackedLinear))

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up the embeddings [B, T, E] of token ids [B, T]."""
        embedded: Tensor = self.embed_tokens(tokens)
        return embedded if self.compute_dtype is None else embedded.to(self.compute_dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] from features [..., E], to which the final norm was applied."""
        weight = self.lm_head_weight
        is_alike = hidden.dtype == weight.dtype
        logits = self.lm_head(hidden) if is_alike else logits_of(hidden, weight)
        return capped(logits, self.logit_cap)


def _check_sizes(path: Path, sizes: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """Raise TargetError if the sizes of a bundle differ from the sizes that its store records."""
    differences: list[str] = []
    for key, size in recorded.items():
        if sizes.get(key, size) != size:
            differences.append(f"{key} {sizes.get(key)} instead of {size}")
    if differences:
        raise TargetError(
            f"{path} does not belong to the target of its store, because it has "
            f"{', '.join(differences)}. {_ADVICE}"
        )
