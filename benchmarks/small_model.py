"""Writes an independent drafter as a model of transformers, for `moa-data eval --method assisted --assistant OUT`.

    moa-data train STORE --drafter independent --preset small --out RUN
    python benchmarks/small_model.py RUN MODEL OUT

Its drafts, from the same weights, can then be compared with those of `--method chain --drafter RUN`.
"""

import argparse
from pathlib import Path

from moa_data.moa.drafters.independent import IndependentDrafter, save_as_llama
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.target.live import load_target_config, load_target_tokenizer


def main() -> None:
    """Convert and save, with the target's tokenizer."""
    parser = argparse.ArgumentParser(description="Write an independent drafter as a transformers model.")
    parser.add_argument("run", type=Path, help="of moa-data train --drafter independent")
    parser.add_argument("model", type=Path, help="folder of the target, for its tokenizer and special tokens")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    drafter = load_drafter(options.run)
    if not isinstance(drafter, IndependentDrafter):
        parser.error(f"{options.run} holds a drafter of kind {drafter.kind}, expected independent.")
    save_as_llama(drafter, options.out, load_target_config(options.model))
    load_target_tokenizer(options.model).save_pretrained(options.out)
    print(f"{options.out}: {sum(weight.numel() for weight in drafter.parameters()):,} weights")


if __name__ == "__main__":
    main()
