"""Trains a small Llama chat target on real chats, and prepares chats for benchmarks of drafters.

If the chats are about both code and grade-school mathematics, the text of the target is less
predictable than with only one of these topics. Drafters then keep improving for more steps. ::

    python -m benchmarks.training.target OUT --train CHATS ... --test CHATS ...

Writes OUT/target (a Hugging Face folder, bfloat16), OUT/train.jsonl (shuffled), OUT/held_out.jsonl
(chats of the training files that are in neither other file) and OUT/test.jsonl (the test files,
interleaved). The same files, seed, threads and versions give the same target.
"""

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.kit.harness import parsed, parser_of
from moa_data.demo.config import DemoConfig
from moa_data.demo.target import train_target
from moa_data.text import Progress

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "n_layers": 8,
    "n_heads": 6,
    "n_kv_heads": 2,
}
"""Sizes of the target, which has 15.9 M weights."""
HELD_OUT_SHARE = 0.05


def chats(file: Path) -> list[dict[str, Any]]:
    """Read a file of chats, with one JSON object with ``messages`` per line."""
    # str.splitlines would also split at Unicode line separators inside a text.
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_chats(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write chats, one per line."""
    file.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )


def lay_out(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the files of chats, and return the training chats."""
    rows = [row for file in options.train for row in chats(file)]
    random.Random(options.seed).shuffle(rows)
    n_held_out = int(HELD_OUT_SHARE * len(rows))
    train, held_out = rows[n_held_out:], rows[:n_held_out]
    in_turns = itertools.zip_longest(*(chats(file) for file in options.test))
    write_chats(options.out / "train.jsonl", train)
    write_chats(options.out / "held_out.jsonl", held_out)
    write_chats(
        options.out / "test.jsonl", [row for rows in in_turns for row in rows if row is not None]
    )
    return train


def main() -> None:
    """Write the files of chats, and train unless the target exists."""
    files = {"type": Path, "nargs": "+", "required": True}
    numbers = {
        "steps": 700,
        "batch_tokens": 4096,
        "matrix_learning_rate": 0.02,
        "learning_rate": 3e-3,
        "seed": 0,
    }
    options = parsed(parser_of(__name__, "out", train=files, test=files, threads=2, **numbers))
    options.out = Path(options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    train = lay_out(options)
    config = DemoConfig(
        out=str(options.out), seed=options.seed, **SIZES,
        target_steps=options.steps, target_batch_tokens=options.batch_tokens,
        target_matrix_learning_rate=options.matrix_learning_rate,
        target_learning_rate=options.learning_rate,
    )  # fmt: skip
    folder = options.out / "target"

    def report(phase: Progress, step: int, n_steps: int, note: str) -> None:
        print(f"{step} of {n_steps}: {phase.phase}, {note}", flush=True)

    found = train_target(train, config, folder, Progress(report))
    model = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, use_safetensors=True, trust_remote_code=False
    )
    model.save_pretrained(folder)
    print(f"{found['n_parameters']:,} weights, last loss {found['train_loss']:.3f} nats a token")


if __name__ == "__main__":
    main()
