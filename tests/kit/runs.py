"""Runs short trainings on a CPU, and compares them."""

from pathlib import Path
from typing import Any

import torch

from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.trainer.checkpoints import read_checkpoint
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.fit import read_metrics, train

BASE: dict[str, Any] = {
    "optimizer": "adamw",
    "batch_size": 8,
    "learning_rate": 1e-3,
    "peak_multiplier": 3.0,
    "warmup_steps": 4,
    "decay_steps": -1,
    "validation_fraction": 0.2,
    "validate_every": 6,
    "checkpoint_every": 4,
    "log_every": 2,
    "draft_length": 3,
    "accelerator": "cpu",
    "precision": "32-true",
}

# Kind of drafter -> sizes that make it small and fit the stores of ``kit.training``.
SIZES: dict[str, dict[str, Any]] = {
    "moa": {},
    "eagle": {},
    "eagle3": {"fused_layers": (0, 1), "draft_vocabulary": 50, "test_time_steps": 3},
    "dspark": {"fused_layers": (0, 1), "block_layers": 1, "markov_rank": 8},
    "dflash": {"fused_layers": (-1, 1), "block_layers": 1, "block_size": 8},
    "glide": {"block_size": 4, "self_attention_mlp_width": 40},
    "medusa": {"medusa_heads": 3},
    "independent": {"independent_width": 24, "independent_layers": 1},
}


def settings(store: Any, out: str | Path = "unused", **changes: Any) -> Any:
    rounds = (
        {"step_bound_min": 3, "step_bound_max": 6} if changes.get("drafter", "moa") == "moa" else {}
    )
    return TrainConfig.of(store=str(store), out=str(out), **(BASE | rounds | changes))


def run(store: Any, out: Any, **changes: Any) -> Any:
    return train(settings(store, out, **changes), provenance={"argv": ["test"]})


def last_state(out: Any) -> Any:
    return read_checkpoint(out / "checkpoints" / "last.ckpt")


def assert_same_weights(one: Path, other: Path, rtol: float = 0, atol: float = 0) -> None:
    """Compare the last checkpoints of two runs, bit for bit unless a tolerance is given."""
    torch.testing.assert_close(
        last_state(one)["state_dict"], last_state(other)["state_dict"], rtol=rtol, atol=atol
    )


def leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return every value in a checkpoint with its path."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, f"{name}/{key}")]
    if isinstance(value, list | tuple):
        return [
            leaf for index, item in enumerate(value) for leaf in leaves(item, f"{name}/{index}")
        ]
    return [(name, value)]


def assert_same_run(whole: Path, parts: Path) -> None:
    """Check that an uninterrupted and a resumed run are the same, bit for bit.

    Weights, optimizer moments, learning rates, counters, the best drafter and the logged metrics
    must be equal.
    """
    one, other = (read_checkpoint(out / "checkpoints" / "last.ckpt") for out in (whole, parts))
    for state in (one, other):
        # These count the starts of validations and of the whole run, so they may differ.
        del state["loops"], state["epoch"]
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
