"""Measures tokenising: chats/s with one process and with several, in alternation, and the memory of many chats.

The speed is that of ``build_plan``'s reading of a file of chats, start of the processes included; beside it what the
processor time alone would give, which other programs on the machine hardly change. The memory is the
largest resident set of a process that tokenises many short chats, counts them and keeps them beside a plan, and that of
one that only starts again; what Python and its libraries take before the first chat is given beside it. Writes one JSON
file to runs/benchmarks.

    python benchmarks/tokenise.py --model MODEL --dataset CHATS.jsonl [--processes 2] [--repeats 3]
    python benchmarks/tokenise.py --model MODEL --short-chats 1000000
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from records import add_out_option, settings_of, write_record

from moa_data.moa.targets.bundle import load_target_config, target_sizes
from moa_data.moa.targets.live import load_target_tokenizer, resolve_model_folder
from moa_data.pipeline.chats.dataset import ChatSource
from moa_data.pipeline.chats.sequences import Sequences, read_sequences
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.sources import target_identities
from moa_data.pipeline.texts import keep_texts, read_texts, texts_origin

WORDS = [
    f"{first}{second}" for first in ("sun", "rain", "wood", "stone", "sea") for second in ("y", "ward", "work", "bird")
]


def write_short_chats(path: Path, n_chats: int) -> None:
    """Write chats of one question and one answer of 10 to 20 words each."""
    draw = random.Random(0)
    words = WORDS
    with path.open("w") as file:
        for number in range(n_chats):
            texts = [f"{number} " + " ".join(draw.choices(words, k=draw.randint(10, 20))) for _ in range(2)]
            roles = zip(("user", "assistant"), texts, strict=True)
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in roles]}) + "\n")


def peak_bytes() -> int:
    """Return the largest resident set of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def start(config: ExtractConfig) -> tuple[Sequences, dict[str, Any]]:
    """Tokenise as the start of an extraction does, or read what is kept in the output folder."""
    folder = resolve_model_folder(config.model, with_weights=False)
    tokenizer, sizes = load_target_tokenizer(folder), target_sizes(load_target_config(folder))
    source = ChatSource(config.dataset, config.data.split)
    before_bytes, began, began_cpu_s = peak_bytes(), time.perf_counter(), time.process_time()
    origin = texts_origin(source, target_identities(folder, tokenizer, with_weights=False), config, sizes)
    store = Path(config.out)
    sequences = read_texts(store, origin) or read_sequences(source, tokenizer, config, sizes)
    table = sequences.table()
    if config.data.tokenize_processes is None:  # the run whose memory is measured
        sequences = keep_texts(store, sequences, origin)
    return sequences, {
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - began_cpu_s,
        "children_cpu_s": sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]),
        "n_chats": table.num_rows,
        "n_tokens": sequences.offsets[-1],
        "before_bytes": before_bytes,
        "peak_bytes": peak_bytes(),
        "children_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
    }


def apart(config: ExtractConfig) -> dict[str, Any]:
    """Return the figures of a start in a process of its own."""
    command = [sys.executable, __file__, "--one-start", config.model_dump_json()]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def measure_speed(config: ExtractConfig, n_processes: int, repeats: int) -> dict[str, Any]:
    """Return chats/s of one process and of several, in alternation."""
    seconds: dict[int, list[float]] = {1: [], n_processes: []}
    cpu_s: dict[int, list[float]] = {1: [], n_processes: []}  # of the longest way through: one worker, then the rest
    for _ in range(repeats):
        for n, found in seconds.items():
            run = apart(config.replaced(tokenize_processes=n))
            found.append(run["seconds"])
            cpu_s[n].append(run["cpu_s"] + run["children_cpu_s"] / n)
            print(f"{n} processes: {run['n_chats'] / run['seconds']:,.0f} chats/s")
    ratios = [one / several for one, several in zip(*seconds.values(), strict=True)]
    cpu_ratios = [one / several for one, several in zip(*cpu_s.values(), strict=True)]
    return {
        "n_chats": run["n_chats"],
        "n_tokens": run["n_tokens"],
        "chats_per_s": {str(n): run["n_chats"] / statistics.median(found) for n, found in seconds.items()},
        "seconds": {str(n): found for n, found in seconds.items()},
        "cpu_s": {str(n): found for n, found in cpu_s.items()},
        "cpu_speedup": statistics.median(cpu_ratios),
        "cpu_speedup_range": [min(cpu_ratios), max(cpu_ratios)],
        "speedup": statistics.median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
    }


def measure_memory(config: ExtractConfig, n_chats: int, folder: Path) -> dict[str, Any]:
    """Return time and memory of the first start over many short chats, and of the next one."""
    write_short_chats(folder / "short.jsonl", n_chats)
    config = config.replaced(dataset=str(folder / "short.jsonl"))
    return {name: apart(config) for name in ("first_start", "next_start")}


def main() -> None:
    """Runs the benchmark, prints the figures and writes them."""
    parser = argparse.ArgumentParser(description="Measure how fast chats become tokens, and in how much memory.")
    parser.add_argument("--model")
    parser.add_argument("--dataset", help="chats whose speed is measured")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--short-chats", type=int, default=0, help="measure the memory of this many short chats")
    parser.add_argument("--one-start", help=argparse.SUPPRESS)
    add_out_option(parser)
    options = parser.parse_args()
    if options.one_start:
        print(json.dumps(start(ExtractConfig.model_validate_json(options.one_start))[1]))
        return
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="moa-data-bench-") as folder:
        config = ExtractConfig.of(
            model=options.model, dataset=options.dataset or "", out=folder, max_length=options.max_length
        )
        if options.dataset:
            figures |= measure_speed(config, options.processes, options.repeats)
        if options.short_chats:
            figures |= measure_memory(config, options.short_chats, Path(folder))
    print(json.dumps(figures, indent=1))
    print(write_record(options.out, "tokenise", {"figures": figures, "settings": settings_of(options, "one_start")}))


if __name__ == "__main__":
    main()
