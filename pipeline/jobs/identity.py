"""Content hashes that tell one target from another: weights, config, tokenizer, chat template."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ...errors import TargetError
from ...moa.targets.bundle import hash_target, weight_files
from ...moa.targets.template import template_text
from ...text import Progress

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def target_identities(
    folder: Path, tokenizer: Any, with_weights: bool, progress: Progress | None = None
) -> dict[str, str]:
    """Hash everything that an extraction reads of a target.

    Args:
        with_weights: whether to hash the weights too, which takes a while for large targets.
        progress: called with (bytes done, bytes of all weights, message).

    Returns:
        Dotted key -> sha256 in hex: tokenizer.sha256, template.sha256, and target.weights_sha256 and
        target.config_sha256.
    """
    identities = {
        "tokenizer.sha256": _hash_files(folder, TOKENIZER_FILES),
        "template.sha256": hashlib.sha256(template_text(tokenizer).encode()).hexdigest(),
    }
    if with_weights:
        identities |= {f"target.{key}": value for key, value in hash_target(folder, progress).items()}
    return identities


def check_weights(folder: Path, is_local: bool) -> None:
    """Refuse a local model folder without safetensors files before any other work is done."""
    if is_local and not weight_files(folder):
        raise TargetError(f"{folder} has no *.safetensors weights; save the model with safe serialization.")


def _hash_files(folder: Path, names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        if (folder / name).is_file():
            digest.update(f"{name}\0".encode())
            digest.update(hashlib.sha256((folder / name).read_bytes()).digest())
    return digest.hexdigest()
