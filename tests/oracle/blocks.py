"""Official vectors of block-parallel drafters: their folder, their weights, and a drafter of theirs as one of ours.

A file is named for its config and case, such as ``a_train_vanilla_conf``; its config has ``a_weights`` and
``a_train_inputs`` beside it. The layout is told in data_block/README.md.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from moa_data.moa.drafters.block import BlockDrafter, DFlashDrafter, DFlashSizes, DSparkDrafter, DSparkSizes
from moa_data.moa.targets.bundle import FrozenTarget

from .vectors import Compared

COMMITTED = Path(__file__).parent / "data_block"
BESIDE = Path(__file__).parents[3] / "shared" / "oracle-block"
FOLDER = Path(os.environ.get("MOA_BLOCK_ORACLE") or (BESIDE if BESIDE.is_dir() else COMMITTED)).resolve()
ACTIVATION, LOSS, GRADIENT = 1e-5, 1e-5, 1e-4
"""Largest absolute differences in float32, relative to a tensor's largest value."""


def names(case: str) -> list[str]:
    """Stems of the folder's files of a case: ``train`` or ``infer``."""
    stems = sorted(file.stem for file in FOLDER.glob("*.safetensors"))
    return [stem for stem in stems if stem[1:].startswith(f"_{case}_") and not stem.endswith("_train_inputs")]


@cache
def tensors(name: str) -> dict[str, Tensor]:
    """The tensors of a file; those of weights, which are exact in bfloat16, in float32."""
    found = load_file(FOLDER / f"{name}.safetensors")
    return {key: value.float() if value.dtype == torch.bfloat16 else value for key, value in found.items()}


@cache
def meta(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())["meta"]
    return values


def under(found: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}


class Vectors(Compared):
    """The tensors of a file of block-parallel drafters; tolerances are relative to a tensor's largest value."""

    def equal(self, key: str, got: Tensor, at: Tensor | None = None) -> None:
        """Compare integers or masks, where the file has them; ``at`` picks the places that count."""
        if key in self.tensors:
            goal, got = self[key], got
            pick = ... if at is None else at
            assert torch.equal(got[pick], goal[pick].to(got.dtype)), key

    def close(self, key: str, got: Tensor, at: Tensor | None = None, tolerance: float = ACTIVATION) -> None:
        """Compare numbers, where the file has them."""
        if key in self.tensors:
            pick = ... if at is None else at
            goal, got = self[key][pick], got.detach()[pick]
            atol = tolerance * goal.abs().max().item() if goal.numel() else 0.0
            torch.testing.assert_close(got, goal, rtol=0, atol=atol, msg=lambda m: f"{key}: {m}")

    def gradients(self, drafter: BlockDrafter) -> None:
        """Compare the gradient of every weight, where the file has gradients."""
        goals = under(self.tensors, "grad.")
        found = dict(drafter.named_parameters())
        assert not goals or goals.keys() == found.keys()
        for key in goals:
            gradient = found[key].grad
            assert gradient is not None, key
            self.close(f"grad.{key}", gradient, tolerance=GRADIENT)


def target_config(config: str) -> Any:
    """The transformers config of a config's target."""
    sizes = meta(f"{config}_weights")["sizes"]
    build = {"qwen3": Qwen3Config, "llama": LlamaConfig}[sizes["target_family"]]
    own = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "intermediate_size",
           "rms_norm_eps")  # fmt: skip
    return build(
        **{name: sizes[name] for name in own},
        num_hidden_layers=sizes["num_target_layers"],
        rope_parameters={"rope_theta": sizes["rope_theta"], "rope_type": sizes["rope_type"]},
        tie_word_embeddings=False,
    )


def target_model(config: str) -> Any:
    """The live target of a config."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(target_config(config)).eval().requires_grad_(False)
    model.load_state_dict(under(tensors(f"{config}_weights"), "target."))
    return model.float()


def frozen_target(config: str) -> FrozenTarget:
    """The target's pieces that a drafter of a config needs."""
    weights = under(tensors(f"{config}_weights"), "target.")
    pieces = {key.removeprefix("model."): value for key, value in weights.items()}
    return FrozenTarget(target_config(config), pieces, 0)


def build_drafter(config: str, settings: dict[str, Any]) -> BlockDrafter:
    """The drafter of a file of a config, from the ``meta`` of that file."""
    sizes, flags, weights = settings["sizes"], settings["flags"], tensors(f"{config}_weights")
    common = {
        "fused_layers": tuple(sizes["target_layer_ids"]),
        "mask_token": sizes["mask_token_id"],
        "block_size": sizes["block_size"],
        "block_layers": sizes["num_draft_layers"],
        "self_attention_mlp_width": sizes["intermediate_size"],
    }
    if "markov_head_type" not in flags:
        drafter: BlockDrafter = DFlashDrafter(DFlashSizes.from_target(target_config(config), **common))
        drafter.load_state_dict(under(weights, "zlab."))
        return drafter
    kind, has_confidence = flags["markov_head_type"], flags["confidence_head"]
    own = {
        "sample_from_anchor": True,
        "markov_head": kind,
        "markov_rank": sizes["markov_rank"],
        "confidence_head": has_confidence,
        "confidence_with_markov": flags["confidence_head_with_markov"],
    }
    drafter = DSparkDrafter(DSparkSizes.from_target(target_config(config), **common, **own))
    heads = under(weights, f"head.{kind}.")
    if not has_confidence:
        heads = {key: value for key, value in heads.items() if not key.startswith("confidence_head.")}
    drafter.load_state_dict(under(weights, "draft.") | heads)
    return drafter
