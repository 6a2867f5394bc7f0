"""Compares training runs."""

from pathlib import Path
from typing import Any

import torch

from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.trainer.checkpoints.saving import read_checkpoint
from moa_data.trainer.fit.curves import read_metrics


def leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Yield everything in a checkpoint, with its place."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, f"{name}/{key}")]
    if isinstance(value, list | tuple):
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, f"{name}/{index}")]
    return [(name, value)]


def assert_same_run(whole: Path, parts: Path) -> None:
    """Weights, moments, rates, counts, the best drafter and the logged figures are the same, bit for bit."""
    one, other = (read_checkpoint(out / "checkpoints" / "last.ckpt") for out in (whole, parts))
    for state in (one, other):
        del state["loops"], state["epoch"]  # say how often a validation, and the whole, began
        del state["callbacks"]["Throughput"]["n_bytes_read"]  # holds what a validation reads at the same time
    for (name, value), (other_name, found) in zip(leaves(one), leaves(other), strict=True):
        assert name == other_name
        same = torch.equal(value, found) if isinstance(value, torch.Tensor) else value == found
        assert same, name
    exported = load_drafter(parts).state_dict()
    for name, weight in load_drafter(whole).state_dict().items():
        assert torch.equal(weight, exported[name]), name
    for name in ("train/loss", "val/kl"):
        assert read_metrics(whole).get(name) == read_metrics(parts).get(name)
    assert not list(parts.rglob("*.partial"))
