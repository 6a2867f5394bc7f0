"""Compares drafters for targets of several families with drafters for a Llama of equal size.

The benchmark trains a target of each family for a number of steps. All targets have equal widths
and numbers of weights. It extracts the same chats with each target, and trains drafters from the
stores with equal settings. With --decode it also decodes the same test prompts. ::

    python -m benchmarks.training.families OUT --train CHATS ... --test CHATS ...
        --targets llama:700 qwen3:850 ... [--drafters moa eagle3] [--set fc_norm=true] [--decode]

All results are stored in OUT, and a later call continues from there. The record has these figures:

- the loss of each target on held-out chats, the entropy of its distributions on these chats (nats
  per token of answers), and the share of tokens that need only a short context
- with --decode, the acceptance length of each drafter
- the expected acceptance length on chats that neither target nor drafter saw in training
- the ratio of this length to the length for a Llama of equal loss. The length for this Llama is
  interpolated between the Llamas in the record

The chats are the same for all targets. Acceptance lengths on texts that the targets write
themselves would be harder to compare, because these texts repeat to different degrees.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.kit.harness import run
from benchmarks.training.drafters import train_config
from benchmarks.training.runs import FLAG, trained
from benchmarks.training.target import chats, lay_out
from moa_data.demo.config import DemoConfig
from moa_data.demo.target import MAX_POSITIONS, train_target

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 192,
    "n_layers": 8,
    "n_heads": 4,
    "n_kv_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},  # Like Llama, with norms of queries and keys.
    # The experts of a layer have as many weights as Llama's MLP. A token uses a quarter of them.
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 72,
        "norm_topk_prob": True,
    },
    "olmo2": {},  # The norms are after attention and MLP instead of before.
    # The sixth of the eight layers has full attention, and the others have sliding windows.
    "gemma3_text": {"sliding_window": 32, "query_pre_attn_scalar": 48},
    # Gemma differs from Llama in the sliding windows and in the scale of the embeddings
    # (``SCALES``). The variants of Gemma below lack one or both of these differences. In variants
    # with "wide", the window covers all positions.
    "gemma3_text-wide": {"sliding_window": MAX_POSITIONS, "query_pre_attn_scalar": 48},
    "gemma3_text-unscaled": {"sliding_window": 32, "query_pre_attn_scalar": 48},
    "gemma3_text-wide-unscaled": {"sliding_window": MAX_POSITIONS, "query_pre_attn_scalar": 48},
    "qwen3-windows": {"sliding_window": 32, "use_sliding_window": True, "layer_types": [
        "full_attention" if layer == 5 else "sliding_attention" for layer in range(8)
    ]},
    "llama-scaled": {},
}  # fmt: skip
"""Maps each model type, with a suffix for a variant, to the settings of its config.

The sizes are not included, because they are the same for all.
"""
SCALES = {"scaled": SIZES["hidden_size"] ** 0.5, "unscaled": SIZES["hidden_size"] ** -0.5}
"""Factors by which embeddings are multiplied in training, as Gemma's model code does.

The factor is multiplied into the saved weights.
"""
SEEN = 32


def build(model_type: str, config: DemoConfig, tokenizer: Any) -> Any:
    """Make an untrained target in float32."""
    torch.manual_seed(config.seed)
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": config.hidden_size,
        "intermediate_size": 3 * config.hidden_size, "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.hidden_size // config.n_heads, "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
    }  # fmt: skip
    found = AutoConfig.for_model(
        model_type.split("-")[0], **sizes, **FAMILIES[model_type], **special
    )
    model: Any = AutoModelForCausalLM.from_config(found, trust_remote_code=False)
    model.generation_config = GenerationConfig(do_sample=False, **special)
    if (scale := SCALES.get(model_type.rpartition("-")[2])) is not None:
        _scale_embeddings(model, scale)
    return model


class _Scaled(torch.nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self._scale


def _scale_embeddings(model: Any, scale: float) -> None:
    """Let a model multiply its embeddings by a factor in training.

    The weights keep their usual initial size. When the model is saved, the factor is multiplied
    into the weights.
    """
    embeddings, save = model.get_input_embeddings(), model.save_pretrained
    parametrize.register_parametrization(embeddings, "weight", _Scaled(scale))

    def save_plain(*given: Any) -> None:
        parametrize.remove_parametrizations(embeddings, "weight")
        save(*given)

    model.save_pretrained = save_plain


@torch.inference_mode()
def on_held_out(folder: Path, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Measure a target on the answers of chats.

    Returns the target's loss, and the entropy of its distributions, in nats per token. Also returns
    a share of a sample of tokens: those for which the target's choice stays the same if it sees
    only the first token of the text and the last ``SEEN`` tokens.
    """
    from moa_data.moa.targets.live import Target

    target, loss, entropy, n, draws = (
        Target.load(str(folder), device=DEVICE),
        0.0,
        0.0,
        0,
        random.Random(0),
    )
    model: Any = target.model
    cut, chosen = [], []
    for row in rows:
        encoded = target.tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = (
            torch.tensor(encoded[name][:MAX_POSITIONS]) for name in ("input_ids", "assistant_masks")
        )
        answered = mask[1:].bool()
        log_p = model(ids[None].to(DEVICE)).logits[0, :-1].cpu().log_softmax(dim=-1)
        loss -= float(log_p[answered].gather(1, ids[1:][answered][:, None]).sum())
        entropy -= float((log_p[answered].exp() * log_p[answered]).sum())
        n += int(answered.sum())
        late = [at for at in range(3 * SEEN, len(ids) - 1) if answered[at]]
        for at in draws.sample(late, min(12, len(late))):
            cut.append(torch.cat((ids[:1], ids[at + 1 - SEEN : at + 1])))
            chosen.append(log_p[at].argmax())
    alone = [
        model(part.to(DEVICE)).logits[:, -1].argmax(dim=-1).cpu()
        for part in torch.stack(cut).split(128)
    ]
    is_same = torch.cat(alone) == torch.stack(chosen)
    return {
        "held_out_loss": loss / n,
        "entropy": entropy / n,
        "same_by_near_tokens": float(is_same.double().mean()),
    }


def called(*words: object) -> None:
    """Run a Python module as a command, and stop if it fails."""
    subprocess.run([sys.executable, "-m", *map(str, words)], check=True)


def own_folder(options: argparse.Namespace) -> str:
    """Return the name of the folder for drafters with these steps and settings."""
    return "-".join([str(options.steps), *options.set])


def expected(options: argparse.Namespace, own: Path, drafter: str, seed: int, rate: float) -> float:
    """Train a drafter unless it exists.

    Returns its expected acceptance length on chats that neither target nor drafter saw.
    """
    named, steps = own_folder(options), options.steps
    given = argparse.Namespace(
        store=str(own / "store"),
        out=own / "drafters" / named,
        set=options.set,
        steps=steps,
        validation_sequences=150,
    )
    trained(config := train_config(given, drafter, rate, seed))
    # To validate the drafter on another store, start a run from its weights. The run takes one step
    # that changes nothing, and then validates on nine tenths of the store.
    given.store, given.out = str(own / "unseen"), own / "on-unseen" / named
    given.steps, given.validation_sequences = 1, 400
    given.set = [*options.set, f"init_from={config.out}", "validation_fraction=0.9"]
    return float(
        trained(train_config(given, drafter, 1e-30, seed))["best_expected_acceptance_length"]
    )


def decoded(
    options: argparse.Namespace, own: Path, family: str, drafter: str, seed: int
) -> dict[str, Any]:
    """Decode the test prompts with a drafter, and return its acceptance lengths by method."""
    out = own / "drafters" / own_folder(options)
    called(
        "benchmarks.training.drafters", own / "store", own / "target", own.parent / "test.jsonl",
        out, "--target", family, "--only", drafter, "--steps", options.steps, "--seeds", seed,
        "--rates", options.rate, *(("--set", *options.set) if options.set else ()),
    )  # fmt: skip
    lengths: dict[str, Any] = json.loads((out / f"row-{drafter}-{seed}.json").read_text())[
        "lengths"
    ]
    return lengths


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train, extract and decode what is missing."""
    folder = options.folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    options_of_chats = argparse.Namespace(**{**vars(options), "out": folder})
    train = lay_out(options_of_chats)
    rows: list[dict[str, Any]] = []
    for target, seed in itertools.product(options.targets, options.seeds):
        family, steps = target.split(":")
        own = folder / f"{family}-{steps}-{seed}"
        config = DemoConfig(
            out=str(own), seed=seed, **SIZES, target_steps=int(steps), target_batch_tokens=4096,
            target_matrix_learning_rate=0.02, target_learning_rate=3e-3,
        )  # fmt: skip
        with torch.device(DEVICE):
            found = train_target(
                train, config, own / "target", build=lambda *given, name=family: build(name, *given)
            )
        held_out = chats(folder / "held_out.jsonl")
        found |= on_held_out(own / "target", held_out)
        fields = "kv,hidden:last,hidden:layer:1,hidden:layer:3,hidden:layer:6"
        for name, file, n_chats in (
            ("store", "train.jsonl", options.sequences),
            ("unseen", "held_out.jsonl", len(held_out)),
        ):
            called(
                "moa_data", "extract", "--model", own / "target", "--dataset", folder / file,
                "--out", own / name, "--activations", fields, "--max-length", MAX_POSITIONS,
                "--max-sequences", n_chats,
            )  # fmt: skip
        for drafter in options.drafters:
            row = {
                "family": family,
                "target_steps": int(steps),
                "seed": seed,
                "target": found,
                "drafter": drafter,
            }
            row["expected_length"] = expected(options, own, drafter, seed, options.rate)
            if options.decode:
                row["lengths"] = decoded(options, own, family, drafter, seed)
            rows.append(row)
    for row in rows:
        # Interpolate between the Llamas of the same seed to get the length for the same loss.
        same = [
            one for one in rows if one["family"] == "llama" and one["drafter"] == row["drafter"]
        ]
        points = sorted(
            (one["target"]["held_out_loss"], one["expected_length"])
            for one in same
            if one["seed"] == row["seed"]
        )
        if points and points[0][0] <= row["target"]["held_out_loss"] <= points[-1][0]:
            losses, lengths = zip(*points, strict=True)
            at = float(np.interp([row["target"]["held_out_loss"]], losses, lengths)[0])
            row["to_llama"] = row["expected_length"] / at
    return {"rows": rows}


if __name__ == "__main__":
    files = {"type": Path, "nargs": "+", "required": True}
    named = {"nargs": "+", "required": True, "metavar": "FAMILY:STEPS"}
    changes = {"nargs": "+", "default": [], "metavar": "SETTING=VALUE"}
    run(
        "families", measure, "folder", train=files, test=files, targets=named,
        drafters=["moa", "eagle3"], steps=300, sequences=2500, seeds=[0], rate=1.0, seed=0,
        threads=1, set=changes, decode=FLAG,
    )  # fmt: skip
