"""Measures memory, time and bytes of every stage on a CPU, with a target of Llama-3-8B's shape.

    python -m benchmarks.store.real_shape OUT [--layers 32] [--tokens 512]

The benchmark makes a folder with Llama-3-8B's config.json and random bfloat16 weights in OUT (16 GB
at 32 layers). Then it runs plan, extract, verify, audit, and two training steps of every drafter
with its default sizes. At the end, it generates four tokens with each drafter. Every stage is a
separate process, and the kernel reports the peak memory of each process. Random weights are enough
to measure memory, bytes, files, widths and load times at this shape, but not compression ratios or
acceptance. A machine with 24 GB is enough. Stages with a record in OUT do not run again.
Checkpoints are deleted after each training.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.kit.harness import parsed, parser_of
from benchmarks.kit.made import make_target
from benchmarks.kit.records import settings_of, write_record
from moa_data import Target, generate, load_drafter
from moa_data.demo.corpus import generate_corpus, write_jsonl
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.registry import DRAFTERS

SHAPE = "llama-3-8b"
N_CHATS = 64
NEW_TOKENS = 4


@dataclass(frozen=True)
class Stage:
    """Time, memory and output of one process."""

    name: str
    seconds: float
    peak_gb: float
    n_bytes: int = 0
    n_files: int = 0


def run_stage(name: str, command: list[str], log: Path, measured: Path | None = None) -> Stage:
    """Run one process and wait for it.

    Args:
        measured: Folder whose bytes and files are counted afterwards.

    Raises:
        SystemExit: The process failed. Its output is in the log.
    """
    print(f"{name} ...", flush=True)
    started = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds, peak_gb = time.perf_counter() - started, usage.ru_maxrss * 1024 / 1e9
    if process.returncode:
        sys.exit(
            f"The stage {name!r} failed with exit status {process.returncode} after "
            f"{seconds:.0f} s and a peak memory of {peak_gb:.1f} GB. Its output is in {log}."
        )
    found = [file for file in measured.rglob("*") if file.is_file()] if measured else []
    stage = Stage(name, seconds, peak_gb, sum(file.stat().st_size for file in found), len(found))
    print(f"    {seconds:.0f} s, peak {peak_gb:.1f} GB", flush=True)
    return stage


def stages(out: Path, options: argparse.Namespace) -> list[tuple[str, list[str], Path | None]]:
    """List the stages as (name, command, folder to measure)."""
    cli = [sys.executable, "-m", "moa_data"]
    model, store, chats = str(out / "target"), str(out / "store"), str(out / "chats.jsonl")
    middle = sorted({min(2, options.layers - 1), options.layers // 2, max(options.layers - 3, 0)})
    hidden = ",".join(f"hidden:layer:{layer}" for layer in middle)
    source = ["--model", model, "--dataset", chats, "--out", store, "--compute-dtype", "bfloat16"]
    source += [
        "--activations",
        f"kv,hidden:last,{hidden}",
        "--target-layers",
        "1",
        "--codec",
        options.codec,
    ]
    source += ["--max-sequences", str(options.sequences), "--max-length", str(options.tokens // 4)]
    part = [
        sys.executable,
        "-m",
        __spec__.name,
        str(out),
        "--layers",
        str(options.layers),
        "--part",
    ]
    rows: list[tuple[str, list[str], Path | None]] = [
        ("make the target", [*part, "target"], out / "target"),
        ("plan", [*cli, "plan", *source], None),
        ("extract", [*cli, "extract", *source], out / "store"),
        ("verify", [*cli, "verify", store], None),
        ("audit", [*cli, "audit", store, "--model", model, "--samples", "2"], None),
    ]
    for kind in DRAFTERS:
        run = out / "runs" / kind
        reads_layers = kind in ("eagle3", "dspark", "dflash")
        extra = (
            ["--set", f"drafter.fused_layers={','.join(map(str, middle))}"] if reads_layers else []
        )
        steps = [
            "--max-steps",
            "2",
            "--batch-size",
            "4",
            "--validation-fraction",
            "0.2",
            "--drafter",
            kind,
            *extra,
        ]
        rows.append(
            (f"train {kind}", [*cli, "train", store, "--out", str(run), *steps], run / "drafter")
        )
    return [*rows, ("generate with each", [*part, "generate"], None)]


def generate_with_each(out: Path) -> None:
    """Load the target once, and decode a prompt with each drafter in turn."""
    target = Target.load(str(out / "target"), dtype=torch.bfloat16, device="cpu")
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three rivers."}], add_generation_prompt=True
    )
    tokens = prompt if isinstance(prompt, list) else prompt["input_ids"]
    for kind in DRAFTERS:
        started = time.perf_counter()
        drafter = load_drafter(out / "runs" / kind, dtype=torch.bfloat16, device="cpu")
        found = generate(target, drafter, tokens, max_new_tokens=NEW_TOKENS, tree=TreeShape(3))
        if not 1 <= len(found.tokens) <= NEW_TOKENS:
            sys.exit(f"{kind} gave {len(found.tokens)} tokens")
        print(f"{kind}: {found.tokens} in {time.perf_counter() - started:.1f} s", flush=True)


def main() -> None:
    """Run all stages and write their figures."""
    numbers = {"layers": 32, "tokens": 512, "sequences": 8, "codec": "lossless", "keep": False}
    options = parsed(parser_of(__name__, "out", part={"help": argparse.SUPPRESS}, **numbers))
    out = Path(options.out)
    parts: dict[str, Callable[[], None]] = {
        "target": lambda: make_target(out / "target", SHAPE, options.layers),
        "generate": lambda: generate_with_each(out),
    }
    if options.part:
        parts[options.part]()
        return
    out.mkdir(parents=True, exist_ok=True)
    rows = generate_corpus(N_CHATS, 1, seed=1).train
    write_jsonl(sorted(rows, key=lambda row: len(json.dumps(row["messages"]))), out / "chats.jsonl")
    done = []
    for name, command, measured in stages(out, options):
        record = out / f"{name.replace(' ', '-')}.json"
        if not record.exists():
            stage = run_stage(name, command, record.with_suffix(".log"), measured)
            for checkpoints in out.glob("runs/*/checkpoints"):
                shutil.rmtree(checkpoints)
            record.write_text(json.dumps(asdict(stage)))
        done.append(Stage(**json.loads(record.read_text())))
    document = {
        "stages": [asdict(stage) for stage in done],
        "settings": settings_of(options, "keep", "part"),
    }
    print(write_record(out, "real-shape", document))
    if not options.keep:
        shutil.rmtree(out / "target")


if __name__ == "__main__":
    main()
