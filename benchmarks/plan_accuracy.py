"""Holds the hours that a plan promises against an extraction on the same machine, at two shapes.

The targets have random weights: one of the demo's kind (8 layers of width 384), and one layer pair of Llama-3-8B's
widths. Plan and extraction alternate; the ratio is predicted over actual seconds from the first forward to the last
commit.

    python benchmarks/plan_accuracy.py MODEL CHATS [--repeats 3] [--shapes small wide] [--work FOLDER]

MODEL gives the tokenizer, and is itself the small target.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from records import add_out_option, settings_of, write_record
from transformers import LlamaConfig, LlamaForCausalLM

from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.estimate import estimate_extraction
from moa_data.pipeline.extract import extract
from moa_data.pipeline.plan import build_plan

WIDE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
CHATS = {"small": 400, "wide": 24}


def make_wide(model: Path, folder: Path) -> Path:
    """Write a target of two layers of Llama-3-8B's widths, with another's tokenizer."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    own = json.loads((model / "config.json").read_text())
    config = LlamaConfig(
        **WIDE, head_dim=128, num_hidden_layers=2, vocab_size=own["vocab_size"], rms_norm_eps=1e-5,
        max_position_embeddings=8192, bos_token_id=own.get("bos_token_id"), eos_token_id=own.get("eos_token_id"),
    )  # fmt: skip
    network: Any = LlamaForCausalLM(config)
    network.to(torch.bfloat16).save_pretrained(folder)
    return folder


def measure(config: ExtractConfig, repeats: int, work: Path) -> dict[str, Any]:
    """Predicted and actual seconds, in alternation."""
    predicted, actual, stages = [], [], []
    for repeat in range(repeats):
        own = config.replaced(out=str(work / f"store-{repeat}"))
        estimate = estimate_extraction(build_plan(own))
        report = extract(own)
        shutil.rmtree(own.out)
        predicted.append(estimate.total_s)
        actual.append(report.timings.extract_s)
        stages.append({"slowest": estimate.slowest, "seconds": estimate.seconds, "was": report.timings.record()})
        print(f"predicted {predicted[-1]:.1f} s ({estimate.slowest}), took {actual[-1]:.1f} s")
    ratios = [one / other for one, other in zip(predicted, actual, strict=True)]
    return {
        "predicted_over_actual": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "predicted_s": predicted,
        "actual_s": actual,
        "stages": stages,
    }


def main() -> None:
    """Runs the benchmark, prints the figures and writes them."""
    parser = argparse.ArgumentParser(description="Hold plans against extractions.")
    parser.add_argument("model", type=Path)
    parser.add_argument("chats")
    parser.add_argument("--shapes", nargs="+", default=list(CHATS), choices=list(CHATS))
    parser.add_argument("--sequences", type=int, help=f"sequences of each shape; default {CHATS}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--codec", default="lossless")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", default=None, help="folder on the disk to measure; default: a temporary one")
    add_out_option(parser)
    options = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory(prefix="moa-data-bench-", dir=options.work) as name:
        work = Path(name)
        for shape in options.shapes:
            model = make_wide(options.model, work / "wide") if shape == "wide" else options.model
            config = ExtractConfig.of(
                model=str(model), dataset=options.chats, out="unused", device=options.device, codec=options.codec,
                max_sequences=options.sequences or CHATS[shape], max_rejected_fraction=1.0,
            )  # fmt: skip
            figures[shape] = measure(config, options.repeats, work)
            print(f"{shape}: predicted over actual {figures[shape]['predicted_over_actual']:.2f}")
    print(write_record(options.out, "plan-accuracy", {"figures": figures, "settings": settings_of(options)}))


if __name__ == "__main__":
    main()
