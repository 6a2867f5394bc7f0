"""Official vectors: the folder they lie in, the kinds of files it may hold, and one file as a test reads it.

A file is named ``SET`` + kind + case, for example ``alt_moa_train_tli2_vfl1_stmix``; the weights and the batch that it
belongs to are those of the same set. Every file of the folder is read, and every tensor of a file is compared with
something: a name that nobody knows fails. A file may lack tensors of intermediate steps.
"""

import json
import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from moa_data.moa.drafters.base import Drafter
from moa_data.moa.drafters.training import LossTerms, TrainingInputs
from moa_data.moa.targets.bundle import FrozenTarget

COMMITTED = Path(__file__).parent / "data"
FOLDER = Path(os.environ.get("MOA_ORACLE") or COMMITTED).resolve()
KINDS = ("moa_weights", "moa_batch", "moa_trained_drafter_weights", "moa_train_", "moa_infer_", "eagle_train_",
         "glide_train_")  # fmt: skip
ACTIVATION, LOSS, GRADIENT = 2e-5, 1e-5, 1e-4
"""Largest absolute differences in float32; of a gradient, relative to its largest value."""

_NAME = re.compile(rf"(?P<set>.*?)(?P<kind>{'|'.join(KINDS)}).*")


def kind_of(name: str) -> str | None:
    """The kind of a file by its stem; None for an unknown one."""
    match = _NAME.fullmatch(name)
    return match["kind"] if match and (match["kind"].endswith("_") or name.endswith(match["kind"])) else None


def set_of(name: str) -> str:
    """What stands before the kind in a file's stem."""
    match = _NAME.fullmatch(name)
    assert match, name
    return match["set"]


def names(kind: str) -> list[str]:
    """Stems of the folder's files of a kind."""
    return [file.stem for file in sorted(FOLDER.glob("*.safetensors")) if kind_of(file.stem) == kind]


@cache
def tensors(name: str) -> dict[str, Tensor]:
    return load_file(FOLDER / f"{name}.safetensors")


@cache
def meta(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())["meta"]
    return values


class Compared:
    """The tensors of one file, each of which has to be read or compared, but for ``unread`` ones."""

    def __init__(self, found: dict[str, Tensor], unread: Iterable[str] = ()) -> None:
        self.tensors, self._waiting = found, set(found) - set(unread)

    def __getitem__(self, key: str) -> Tensor:
        self._waiting.discard(key)
        return self.tensors[key]

    def starting_with(self, prefix: str) -> dict[str, Tensor]:
        """Tensors by the rest of their names."""
        return {key.removeprefix(prefix): self[key] for key in self.tensors if key.startswith(prefix)}

    def skip(self, *keys: str) -> None:
        """Leave out tensors that say nothing of this package."""
        self._waiting -= set(keys)

    def all_read(self) -> None:
        """Fail if a tensor of the file was left out."""
        assert not self._waiting, f"tensors that nobody compared: {sorted(self._waiting)}"


class Vectors(Compared):
    """The tensors of a file of Mixture of Attentions, EAGLE or GLIDE.

    Args:
        name: stem of the file.
        real: [B, T] bool, positions where intermediate tensors are compared; the others are padding.
        unread: names that say nothing more than the others do.
    """

    def __init__(self, name: str, real: Tensor, unread: Iterable[str] = ()) -> None:
        super().__init__(tensors(name), unread)
        self.name, self._real = name, real

    def close(self, key: str, got: Tensor, real: Tensor | None = None) -> None:
        """Compare an intermediate tensor [B, T, ...], where the file has it."""
        if key in self.tensors:
            at = self._real if real is None else real
            torch.testing.assert_close(got[at], self[key][at], rtol=0, atol=ACTIVATION, msg=lambda m: f"{key}: {m}")

    def equal(self, key: str, got: Tensor, real: Tensor | None = None) -> None:
        """Compare a mask or positions exactly, where the file has them."""
        if key in self.tensors:
            at = self._real if real is None else real
            assert torch.equal(got[at], self[key].to(got.dtype)[at]), key

    def losses(self, terms: LossTerms) -> None:
        """Compare the loss and its terms."""
        found = {
            "loss": terms.total,
            "stat.forward_KL": terms.forward_kl,
            "stat.feature_loss": terms.feature,
            "stat.prev_feature_loss": terms.entering_feature,
        }
        for key, got in found.items():
            if key not in self.tensors:
                continue
            assert got is not None, key
            goal = self[key]
            torch.testing.assert_close(got.detach(), goal, rtol=0, atol=LOSS, msg=f"{key}: {{}}".format)

    def gradients(self, drafter: Drafter, own_key: Any) -> None:
        """Compare the gradient of every weight that the file has one of; ``own_key`` makes our name of theirs."""
        found = {key: weight.grad for key, weight in drafter.named_parameters()}
        goals = {own_key(key): goal for key, goal in self.starting_with("grad.").items()}
        assert goals, f"{self.name} holds no gradient"
        for key, goal in goals.items():
            got = found[key]
            assert got is not None, key
            atol = GRADIENT * goal.abs().max().item()
            torch.testing.assert_close(got, goal, rtol=0, atol=atol, msg=f"{key}: {{}}".format)


def target_config(sizes: dict[str, Any]) -> LlamaConfig:
    sizes = dict(sizes)
    sizes["rope_parameters"] = {"rope_theta": sizes.pop("rope_theta"), "rope_type": "default"}
    return LlamaConfig(**sizes)


def drafter_weights(name: str) -> dict[str, Tensor]:
    """The tensors of a file of weights that are not the target's."""
    return {key: value for key, value in tensors(name).items() if not _is_target(key)}


def frozen_target(name: str, n_layers: int = 0) -> FrozenTarget:
    """The target's pieces of the set that a file belongs to, float32."""
    weights = tensors(f"{set_of(name)}moa_weights")
    own = {key.removeprefix("model."): value for key, value in weights.items() if _is_target(key)}
    return FrozenTarget(target_config(meta(name)["target"]), own, n_layers)


def inputs_of(name: str, n_layers: int = 0) -> tuple[Tensor, TrainingInputs]:
    """Which positions of the set's batch are real, [B, T] bool, and the batch; ``n_layers`` of target inference."""
    batch = tensors(f"{set_of(name)}moa_batch")
    hidden = batch["hidden_states"]
    return batch["attention_mask"].bool(), TrainingInputs(
        tokens=batch["input_ids"],
        response_mask=batch["response_mask"],
        kv=batch["kv_stack"],
        hidden=hidden[-1],
        entering_hidden=hidden[-1 - n_layers] if n_layers else None,
    )


def _is_target(key: str) -> bool:
    return key.startswith(("model.", "lm_head."))
