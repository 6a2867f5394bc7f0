"""Content hashes that tell one extraction from another: target, tokenizer, template, dataset."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ..moa.errors import TargetError
from ..moa.targets.bundle import hash_target
from .dataset import ChatSource
from .rendering import template_text

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def collect_identities(folder: Path, tokenizer: Any, source: ChatSource, with_weights: bool) -> dict[str, str]:
    """Hash everything an extraction reads.

    Args:
        with_weights: whether to hash the weights too, which takes a while for large targets.

    Returns:
        Dotted key -> sha256 in hex: dataset.sha256, tokenizer.sha256, template.sha256, and target.weights_sha256 and
        target.config_sha256.
    """
    return {"dataset.sha256": source.identity()} | target_identities(folder, tokenizer, with_weights)


def target_identities(folder: Path, tokenizer: Any, with_weights: bool) -> dict[str, str]:
    """Hash the target: what ``collect_identities`` gives, without the dataset."""
    identities = {
        "tokenizer.sha256": _hash_files(folder, TOKENIZER_FILES),
        "template.sha256": hashlib.sha256(template_text(tokenizer).encode()).hexdigest(),
    }
    if with_weights:
        identities |= {f"target.{key}": value for key, value in hash_target(folder).items()}
    return identities


def check_weights(folder: Path, is_local: bool) -> None:
    """Refuse a local model folder without safetensors files before any other work is done."""
    if is_local and not any(folder.glob("*.safetensors")):
        raise TargetError(f"{folder} has no *.safetensors weights; save the model with safe serialization.")


def _hash_files(folder: Path, names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        if (folder / name).is_file():
            digest.update(f"{name}\0".encode())
            digest.update(hashlib.sha256((folder / name).read_bytes()).digest())
    return digest.hexdigest()
