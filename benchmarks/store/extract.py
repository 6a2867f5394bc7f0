"""Measures how much time extraction takes in addition to the forwards of the target.

Bare forwards and extraction take turns on the same batches. The figures are wall-clock time. A bare
forward fills a KV cache and discards it. Extraction gathers the activations, compresses them,
computes checksums, and writes them. The utilisation of the device is given for both. It counts the
operations of the decoder layers on tokens without padding.

    python -m benchmarks.store.extract --model MODEL --dataset CHATS [--max-sequences 400]
        [--repeats 3] [--codec int8]
    # Random weights:
    python -m benchmarks.store.extract --shape llama-3-8b --layers 8 --max-sequences 64
        --device cuda
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch

from benchmarks.kit.accelerator import body_flops, peak_flops, synchronize, utilisation
from benchmarks.kit.harness import run
from benchmarks.kit.made import make_target
from benchmarks.kit.shapes import SHAPES
from moa_data.demo.corpus import generate_corpus, write_jsonl
from moa_data.moa.nn.kv import new_cache
from moa_data.moa.targets.live import Target, pick_device
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.forwards.parts import batches
from moa_data.pipeline.plan import ExtractPlan, build_plan
from moa_data.pipeline.report import Timings


def padded_batches(plan: ExtractPlan) -> list[torch.Tensor]:
    """Return the token ids [B, T] of every batch of the extraction, padded on the right."""
    padded = []
    for part in range(plan.manifest.n_parts):
        for rows in batches(plan.table.filter(pc.field("part") == part), plan.forward.batch_tokens):
            texts = [
                torch.from_numpy(plan.sequences.text(key)[0]).long()
                for key in rows["sequence_id"].to_pylist()
            ]
            padded.append(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True))
    return padded


@torch.inference_mode()
def forward_seconds(target: Target, padded: list[torch.Tensor]) -> float:
    """Return the seconds from the first bare forward to the end of the last one."""
    started = time.perf_counter()
    for tokens in padded:
        target.model.model(
            input_ids=tokens.to(target.device), past_key_values=new_cache(), use_cache=True
        )
    synchronize(target.device)
    return time.perf_counter() - started


def make_input(folder: Path, options: argparse.Namespace) -> tuple[str, str]:
    """Write a target with random weights, and chats whose answers fill whole sequences."""
    make_target(folder / "model", options.shape, options.layers, pick_device(options.device))
    rows = generate_corpus(64, 1, seed=1).train
    words = json.dumps([row["messages"] for row in rows]).split()
    draw = random.Random(0)
    chats: list[dict[str, object]] = []
    for number in range(options.max_sequences):
        answer = " ".join(draw.choices(words, k=options.max_length))
        question = {"role": "user", "content": f"Tell me {number} things."}
        chats.append({"messages": [question, {"role": "assistant", "content": answer}]})
    write_jsonl(chats, folder / "chats.jsonl")
    return str(folder / "model"), str(folder / "chats.jsonl")


def compare(config: ExtractConfig, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the bare forwards and the extraction in turns."""
    plan = build_plan(config.replaced(out=str(folder / "plan")))
    target = plan.forward.load_target()
    padded = padded_batches(plan)
    forward_seconds(target, padded[:2])
    forward_s: list[float] = []
    timings: list[Timings] = []
    for repeat in range(options.repeats):
        forward_s.append(forward_seconds(target, padded))
        store = folder / f"store-{repeat}"
        report = extract(config.replaced(out=str(store)))
        shutil.rmtree(store)
        timings.append(report.timings)
    flops = body_flops(target.facts.config, plan.table["n_tokens"].to_pylist())
    peak = peak_flops(target.device, options.peak_tflops)
    return figures_of(plan.n_tokens, forward_s, timings) | {
        "stored_over_raw": report.stored_bytes / plan.raw_bytes,
        "n_threads": torch.get_num_threads(),
        "flops": flops,
        "peak_flops_per_s": peak,
        "forward_mfu": utilisation(flops, statistics.median(forward_s), peak),
        "extract_mfu": utilisation(
            flops, statistics.median(run.extract_s for run in timings), peak
        ),
    }


def figures_of(n_tokens: int, forward_s: list[float], timings: list[Timings]) -> dict[str, Any]:
    """Return the ratios of both sides, and the parts of the extractions' time."""
    extract_s = [run.extract_s for run in timings]
    ratios = [whole / bare for whole, bare in zip(extract_s, forward_s, strict=True)]
    return {
        "extract_over_forward": statistics.median(ratios),
        "extract_over_forward_range": [min(ratios), max(ratios)],
        "forward_s": forward_s,
        "extract_s": extract_s,
        # Parts of a run's time. Their sum can be longer than the run, because the copies, the
        # writer's thread and the encoders run in parallel with the forwards.
        "forwards_and_gathering_s": [run.forward_s for run in timings],
        "copies_s": [run.copy_s for run in timings],
        "encoders_cpu_s": [run.encode_s for run in timings],
        "writer_thread_cpu_s": [run.writer_s for run in timings],
        "waiting_for_writer_s": [run.wait_s for run in timings],
        "first_and_last_s": [run.extract_s - run.forward_s - run.wait_s for run in timings],
        "padding_share": timings[-1].padding_fraction,
        "n_tokens": n_tokens,
        "extract_tokens_per_s": n_tokens / statistics.median(extract_s),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure on the given target, or on a generated one."""
    if bool(options.model) != bool(options.dataset):
        raise SystemExit("Give --model and --dataset together, or neither of them.")
    with tempfile.TemporaryDirectory(prefix="moa-data-bench-", dir=options.work) as name:
        folder = Path(name)
        model, dataset = (
            (options.model, options.dataset) if options.model else make_input(folder, options)
        )
        config = ExtractConfig.of(
            model=model, dataset=dataset, out="unused", max_sequences=options.max_sequences,
            max_length=options.max_length, device=options.device, codec=options.codec,
            tokenize_processes=None if options.model else 1,
        )  # fmt: skip
        return {"figures": compare(config, folder, options)}


if __name__ == "__main__":
    run(
        "extract", measure, model=str, dataset=str, shape={"choices": SHAPES, "default": "tiny"},
        layers=int, max_sequences=400, max_length=2048, codec="lossless", device="auto", repeats=3,
        threads=int, work=Path, peak_tflops=float,
    )  # fmt: skip
