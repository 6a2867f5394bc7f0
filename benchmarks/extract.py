"""Measures what extraction adds to the bare forward: wall time of both over the very same batches, in alternation.

The bare forward fills a key/value cache and throws it away; extraction gathers, compresses, checksums and writes all of
it. Writes one JSON file to runs/benchmarks.

    python benchmarks/extract.py --model MODEL --dataset CHATS [--max-sequences 400] [--repeats 3] [--codec int8]
"""

import argparse
import statistics
import tempfile
import time

import pyarrow.compute as pc
import torch
from records import add_out_option, settings_of, write_record

from moa_data.moa.nn.kv import new_cache
from moa_data.moa.targets.live import Target
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.forwards.parts import Timings, batches
from moa_data.pipeline.jobs.extract import extract
from moa_data.pipeline.jobs.plan import ExtractPlan, build_plan


def padded_batches(plan: ExtractPlan) -> list[torch.Tensor]:
    """The token ids [B, T] of every batch that extraction runs, padded on the right."""
    padded = []
    for part in range(plan.n_parts):
        for rows in batches(plan.table.filter(pc.field("part") == part), plan.batch_tokens):
            texts = [torch.from_numpy(plan.sequences.tokens(key)).long() for key in rows["sequence_id"].to_pylist()]
            padded.append(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True))
    return padded


@torch.inference_mode()
def forward_seconds(target: Target, padded: list[torch.Tensor]) -> float:
    """Seconds of the bare forwards, from the first to the end of the last."""
    started = time.perf_counter()
    for tokens in padded:
        target.model.model(input_ids=tokens.to(target.device), past_key_values=new_cache(), use_cache=True)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter() - started


def main() -> None:
    """Runs the benchmark, prints the figures and writes them."""
    parser = argparse.ArgumentParser(description="Measure extraction against the bare forward.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--max-sequences", type=int, default=400)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--codec", default="lossless")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None, help="torch threads; default: torch's own choice")
    parser.add_argument("--work", default=None, help="folder on the disk to measure; default: a temporary one")
    add_out_option(parser)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    config = ExtractConfig.of(
        model=options.model,
        dataset=options.dataset,
        out="unused",
        max_sequences=options.max_sequences,
        max_length=options.max_length,
        device=options.device,
        codec=options.codec,
    )
    forward_s: list[float] = []
    timings: list[Timings] = []
    with tempfile.TemporaryDirectory(prefix="moa-data-bench-", dir=options.work) as folder:
        plan = build_plan(config.replaced(out=f"{folder}/plan"))
        target = Target.load(str(plan.folder), getattr(torch, plan.compute_dtype), plan.device)
        padded = padded_batches(plan)
        forward_seconds(target, padded[:2])
        for repeat in range(options.repeats):
            forward_s.append(forward_seconds(target, padded))
            report = extract(config.replaced(out=f"{folder}/store-{repeat}"))
            timings.append(report.timings)
            print(f"forward {forward_s[-1]:.2f} s, extract {timings[-1].extract_s:.2f} s")
    extract_s = [run.extract_s for run in timings]
    ratios = [whole / bare for whole, bare in zip(extract_s, forward_s, strict=True)]
    figures = {
        "extract_over_forward": statistics.median(ratios),
        "extract_over_forward_range": [min(ratios), max(ratios)],
        "forward_s": forward_s,
        "extract_s": extract_s,
        # Where a run's time goes; the writer thread runs beside the forwards.
        "forwards_and_gathering_s": [run.forward_s for run in timings],
        "waiting_for_writer_s": [run.wait_s for run in timings],
        "first_and_last_s": [run.extract_s - run.forward_s - run.wait_s for run in timings],
        "writer_thread_cpu_s": [run.writer_s for run in timings],
        "padding_share": timings[-1].padding_fraction,
        "n_tokens": plan.n_tokens,
        "extract_tokens_per_s": plan.n_tokens / statistics.median(extract_s),
        "stored_over_raw": report.stored_bytes / report.raw_bytes,
        "n_threads": torch.get_num_threads(),
    }
    for name, value in figures.items():
        shown = ", ".join(f"{item:,.3f}" for item in (value if isinstance(value, list) else [value]))
        print(f"{name:28} {shown}")
    print(write_record(options.out, "extract", {"figures": figures, "settings": settings_of(options)}))


if __name__ == "__main__":
    main()
