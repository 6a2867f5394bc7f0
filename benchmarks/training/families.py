"""Drafters of targets of several families: as good as those of a Llama of equal size, trained on the same chats?

Trains a target of each family, of equal widths and as many weights, extracts the same chats with each, trains drafters
from the stores with equal settings, and decodes the same test prompts. ::

    python -m benchmarks.training.families OUT --train CHATS ... --test CHATS ... [--families llama qwen3_moe]
        [--drafters moa eagle3]

Everything is kept in OUT, and running it again goes on from there. The record has the loss of each target on held-out
chats (nats a token of answers), the acceptance length of each drafter, also as a ratio to that of Llama's, and the one
that training expects on held-out texts of the dataset: what a target writes itself repeats more or less, they don't.
"""

import argparse
import csv
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.kit.harness import run
from benchmarks.training.target import chats, lay_out
from moa_data.demo.config import DemoConfig
from moa_data.demo.target import MAX_POSITIONS, train_target

SIZES: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 192, "n_layers": 8, "n_heads": 4, "n_kv_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},  # Llama with norms of queries and keys
    # The experts of a layer have as many weights as Llama's MLP; a token uses a quarter of them.
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 72, "norm_topk_prob": True},
    "gemma3_text": {"sliding_window": 32, "query_pre_attn_scalar": 48},  # five layers slide, the sixth sees all
}
"""Model type -> what its config has besides the sizes."""


def build(model_type: str, config: DemoConfig, tokenizer: Any) -> Any:
    """Make an untrained target in float32."""
    torch.manual_seed(config.seed)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": config.hidden_size, "intermediate_size": 3 * config.hidden_size,
        "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads, "head_dim": config.hidden_size // config.n_heads,
        "max_position_embeddings": MAX_POSITIONS, "tie_word_embeddings": False,
    }  # fmt: skip
    found = AutoConfig.for_model(model_type, **sizes, **FAMILIES[model_type], **special)
    model: Any = AutoModelForCausalLM.from_config(found, trust_remote_code=False)
    model.generation_config = GenerationConfig(do_sample=False, **special)
    return model


@torch.inference_mode()
def held_out_loss(folder: Path, rows: list[dict[str, Any]]) -> float:
    """The mean loss of a target on the answers of chats, in nats a token."""
    from moa_data.moa.targets.live import Target

    target, total, n = Target.load(str(folder), device="cpu"), 0.0, 0
    for row in rows:
        encoded = target.tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = (torch.tensor(encoded[name][:MAX_POSITIONS]) for name in ("input_ids", "assistant_masks"))
        model: Any = target.model
        losses = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
        total, n = total + float((losses * mask[1:]).sum()), n + int(mask[1:].sum())
    return total / n


def called(*words: object) -> None:
    """Run a command of Python, and end where it fails."""
    subprocess.run([sys.executable, "-m", *map(str, words)], check=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train, extract and decode what is not there yet."""
    folder = options.folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    options_of_chats = argparse.Namespace(**{**vars(options), "out": folder})
    train = lay_out(options_of_chats)
    rows: list[dict[str, Any]] = []
    for family in options.families:
        own = folder / family
        config = DemoConfig(
            out=str(own), seed=options.seed, **SIZES, target_steps=options.target_steps, target_batch_tokens=4096,
            target_matrix_learning_rate=0.02, target_learning_rate=3e-3,
        )  # fmt: skip
        found = train_target(train, config, own / "target", build=lambda *given, name=family: build(name, *given))
        loss = held_out_loss(own / "target", chats(folder / "held_out.jsonl")[:100])
        fields = "kv,hidden:last,hidden:layer:1,hidden:layer:3,hidden:layer:6"
        called(
            "moa_data", "extract", "--model", own / "target", "--dataset", folder / "train.jsonl", "--out",
            own / "store", "--activations", fields, "--max-sequences", options.sequences,
        )  # fmt: skip
        called(
            "benchmarks.training.drafters", own / "store", own / "target", folder / "test.jsonl", own / "drafters",
            "--target", family, "--only", *options.drafters, "--steps", options.steps, "--seeds", *options.seeds,
            "--rates", *options.rates,
        )  # fmt: skip
        for drafter, seed in itertools.product(options.drafters, options.seeds):
            row = json.loads((own / "drafters" / f"row-{drafter}-{seed}.json").read_text())
            kept = {key: row[key] for key in ("drafter", "title", "seed", "rate", "n_parameters", "lengths")}
            with (own / "drafters" / f"run-{drafter}-{row['rate']:g}-{seed}" / "metrics.csv").open() as file:
                expected = [line["val/expected_acceptance_length"] for line in csv.DictReader(file)]
            kept["expected_length"] = float([value for value in expected if value][-1])
            rows.append({"family": family, "held_out_loss": loss, "target": found} | kept)
    llama = {(row["drafter"], row["seed"]): row for row in rows if row["family"] == "llama"}
    for row in rows:
        if (other := llama.get((row["drafter"], row["seed"]))) is not None:
            row["to_llama"] = {key: value[0] / other["lengths"][key][0] for key, value in row["lengths"].items()}
            row["to_llama"]["expected"] = row["expected_length"] / other["expected_length"]
    return {"rows": rows}


if __name__ == "__main__":
    files = {"type": Path, "nargs": "+", "required": True}
    run(
        "families", measure, "folder", train=files, test=files, families=list(FAMILIES), drafters=["moa", "eagle3"],
        target_steps=400, steps=300, sequences=4000, seeds=[0], rates=[0.5, 1.0], seed=0, threads=1,
    )  # fmt: skip
