"""Official vectors: folders of files, and the tensors of one file.

Every file of a folder is read, and every tensor of a file is compared with something; an unknown
name fails. A file may lack tensors of intermediate steps. Files of Mixture of Attentions, EAGLE and
GLIDE are named ``SET`` + kind + case, for example ``alt_moa_train_tli2_vfl1_stmix``; the weights
and the batch of the same set are in the same folder.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from moa_data.moa.drafters.base import Drafter
from moa_data.moa.drafters.training import LossTerms, TrainingInputs
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.facts import TargetFacts

COMMITTED = Path(__file__).parent / "data"
FOLDER = Path(os.environ.get("MOA_ORACLE") or COMMITTED).resolve()
KINDS = (
    "moa_weights", "moa_batch", "moa_trained_drafter_weights", "moa_train_", "moa_infer_",
    "eagle_train_", "glide_train_",
)  # fmt: skip
LOSS, GRADIENT = 1e-5, 1e-4
"""Largest absolute differences. That of a gradient is relative to its largest value."""

_NAME = re.compile(rf"(?P<set>.*?)(?P<kind>{'|'.join(KINDS)}).*")


@cache
def tensors(name: str, folder: Path = FOLDER) -> dict[str, Tensor]:
    """Load the tensors of a file. Those in bfloat16 become float32, without loss."""
    found = load_file(folder / f"{name}.safetensors")
    return {
        key: value.float() if value.dtype == torch.bfloat16 else value
        for key, value in found.items()
    }


@cache
def meta(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())["meta"]
    return values


class Vectors:
    """The tensors of one file. Each must be read or compared, except for ``unread`` ones.

    Args:
        at: [B, T] bool, the positions that are compared by default; None for all.
        activation: Largest absolute difference in float32.
        is_relative: Whether ``activation`` is relative to a tensor's largest value.
    """

    def __init__(
        self,
        found: dict[str, Tensor],
        at: Tensor | None = None,
        unread: Iterable[str] = (),
        activation: float = 2e-5,
        is_relative: bool = False,
    ) -> None:
        self.tensors, self._waiting = found, set(found) - set(unread)
        self._at, self._activation, self._is_relative = (
            ... if at is None else at,
            activation,
            is_relative,
        )

    def __getitem__(self, key: str) -> Tensor:
        self._waiting.discard(key)
        return self.tensors[key]

    def starting_with(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with a prefix, without the prefix."""
        return {
            key.removeprefix(prefix): self[key] for key in self.tensors if key.startswith(prefix)
        }

    def close(self, key: str, got: Tensor, at: Any = None, tolerance: float | None = None) -> None:
        """Compare numbers, if the file has them."""
        if key in self.tensors:
            at = self._at if at is None else at
            goal, got = self[key][at], got.detach()[at]
            largest = goal.abs().max().item() if self._is_relative and goal.numel() else 1.0
            atol = largest * (self._activation if tolerance is None else tolerance)
            torch.testing.assert_close(got, goal, rtol=0, atol=atol, msg=lambda m: f"{key}: {m}")

    def equal(self, key: str, got: Tensor, at: Any = None) -> None:
        """Compare a mask or integers exactly, if the file has them."""
        if key in self.tensors:
            at = self._at if at is None else at
            assert torch.equal(got[at], self[key][at].to(got.dtype)), key

    def gradients(self, drafter: Drafter, own_key: Callable[[str], str] = str) -> set[str]:
        """Compare each gradient that the file has; ``own_key`` maps official names to ours."""
        weights = dict(drafter.named_parameters())
        goals = {own_key(key): goal for key, goal in self.starting_with("grad.").items()}
        for key, goal in goals.items():
            got, atol = weights[key].grad, GRADIENT * goal.abs().max().item()
            torch.testing.assert_close(got, goal, rtol=0, atol=atol, msg=f"{key}: {{}}".format)
        return set(goals)

    def losses(self, terms: LossTerms) -> None:
        """Compare the loss and its terms."""
        keys = {
            "loss": "loss",
            "forward_kl": "stat.forward_KL",
            "feature_loss": "stat.feature_loss",
            "entering_feature_loss": "stat.prev_feature_loss",
        }
        for name, got in terms.items():
            self.close(keys[name], got, ..., LOSS)

    def all_read(self) -> None:
        """Fail if a tensor of the file was neither read nor compared."""
        assert not self._waiting, f"tensors that nobody compared: {sorted(self._waiting)}"


def kind_of(name: str) -> str | None:
    """Return the kind of a file from its stem; None for an unknown one."""
    match = _NAME.fullmatch(name)
    return (
        match["kind"]
        if match and (match["kind"].endswith("_") or name.endswith(match["kind"]))
        else None
    )


def set_of(name: str) -> str:
    """Return the part of a file's stem before the kind."""
    match = _NAME.fullmatch(name)
    assert match, name
    return match["set"]


def names(kind: str) -> list[str]:
    """List the stems of the folder's files of a kind."""
    return [
        file.stem for file in sorted(FOLDER.glob("*.safetensors")) if kind_of(file.stem) == kind
    ]


def target_config(name: str) -> LlamaConfig:
    """Build the config of a file's target."""
    sizes = dict(meta(name)["target"])
    return LlamaConfig(
        rope_parameters={"rope_theta": sizes.pop("rope_theta"), "rope_type": "default"}, **sizes
    )


def load_official(folder: Path, weights: dict[str, Tensor], config: PretrainedConfig) -> Drafter:
    """Save weights and the target's config as the official code does, and load the drafter."""
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return load_drafter(folder)


def weights_of(name: str, of_target: bool) -> dict[str, Tensor]:
    """Return the tensors of a weights file that belong to the target, or those that do not."""
    return {
        key: value
        for key, value in tensors(name).items()
        if key.startswith(("model.", "lm_head.")) == of_target
    }


def frozen_target(name: str, n_layers: int = 0) -> FrozenTarget:
    """Build the float32 frozen target of the set that a file belongs to."""
    weights = weights_of(f"{set_of(name)}moa_weights", of_target=True)
    pieces = {key.removeprefix("model."): value for key, value in weights.items()}
    return FrozenTarget(TargetFacts.of(target_config(name)), pieces, n_layers)


def inputs_of(name: str, n_layers: int = 0) -> tuple[Tensor, TrainingInputs]:
    """Return the mask of real positions [B, T] and the batch of the set that a file belongs to.

    ``n_layers`` is the number of layers of target layer inference.
    """
    batch = tensors(f"{set_of(name)}moa_batch")
    hidden = batch["hidden_states"]
    entering = hidden[-1 - n_layers] if n_layers else None
    inputs = TrainingInputs(
        batch["input_ids"], batch["response_mask"], batch["kv_stack"], hidden[-1], entering
    )
    return batch["attention_mask"].bool(), inputs
