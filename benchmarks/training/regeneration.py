"""Compares training on a dataset's answers with training on the target's own answers.

The figure is the drafter's acceptance length. Both stores hold the same questions, and are cut to
the same number of tokens. The same drafter is trained on each store with every seed, and decodes
the same held-out prompts.

    python -m benchmarks.training.regeneration MODEL TRAIN_CHATS TEST_CHATS OUT --chats 400
        --steps 150 --seeds 0 1

Files that exist in OUT are not made again. OUT/regeneration-*.json has the figures.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit.harness import run
from benchmarks.kit.records import provenance
from benchmarks.training.runs import kept, small_config, trained
from moa_data.evaluation.config import EvalConfig
from moa_data.evaluation.report import ratio_with_interval
from moa_data.evaluation.run import evaluate
from moa_data.pipeline.config import ExtractConfig, RegenerateConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.regenerate import regenerate
from moa_data.storage.read.store import ActivationStore

KINDS = {"dataset": "the dataset's answers", "own": "the target's own answers"}
Rows = list[dict[str, Any]]


def answered(options: argparse.Namespace) -> tuple[Rows, Rows]:
    """Return the chats with the dataset's answers, and the chats with the target's answers.

    Both have the same questions. A question that the target has not answered is left out.
    """
    file = options.out / "answered.jsonl"
    regenerate(
        RegenerateConfig.of(
            model=options.model, dataset=options.train_chats, out=str(file), max_rows=options.chats,
            max_new_tokens=options.max_new_tokens, max_length=options.max_length,
            batch_size=options.batch_size, max_rejected_fraction=1, keep_cut=False,
            device=options.device,
        )
    )  # fmt: skip
    own = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = Path(options.train_chats).read_text(encoding="utf-8").split("\n")
    return [json.loads(rows[chat["row"]]) for chat in own], own


def store_of(
    options: argparse.Namespace, kind: str, chats: Rows, n_tokens: int | None = None
) -> int:
    """Extract chats, up to a number of tokens. Returns the tokens of the store."""
    if n_tokens is not None:
        with ActivationStore(options.out / f"store-{kind}-all") as store:
            table = store.sequences.sort_by("source_row")
        total = 0
        taken: list[int] = []
        for row, length in zip(
            table["source_row"].to_pylist(), table["n_tokens"].to_pylist(), strict=True
        ):
            if total + length > n_tokens:
                break
            total, taken = total + length, [*taken, row]
        chats = [chats[row] for row in taken]
    name = kind if n_tokens is not None else f"{kind}-all"
    file = options.out / f"{name}.jsonl"
    file.write_text(
        "".join(json.dumps({"messages": chat["messages"]}) + "\n" for chat in chats),
        encoding="utf-8",
    )
    out = options.out / f"store-{name}"
    extract(
        ExtractConfig.of(
            model=options.model, dataset=str(file), out=str(out), activations=("hidden:last",),
            device=options.device, max_length=options.max_length, max_rejected_fraction=1,
        ),
        provenance=provenance(),
    )  # fmt: skip
    with ActivationStore(out) as store:
        return int(sum(store.sequences["n_tokens"].to_pylist()))


def measured(options: argparse.Namespace, kind: str, seed: int) -> dict[str, Any]:
    """Train a drafter on a kind of chats, and decode the prompts with it.

    Returns the reports of both.
    """
    folder = str(options.out / f"run-{kind}-{seed}")
    given = {"seed": seed, "max_steps": options.steps, "validation_fraction": 0.0}
    config = small_config(str(options.out / f"store-{kind}"), folder, options.drafter, **given)
    training = trained(config)
    decoding = EvalConfig.of(
        model=options.model, prompts=options.test_chats, drafter=(folder,),
        method=("plain", "chain"), out=str(options.out / f"eval-{kind}-{seed}.json"),
        n_prompts=options.n_prompts, warmup=0, max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size, device=options.device,
    )  # fmt: skip
    return {"training": training, "rows": kept(decoding, evaluate)["rows"]}


def acceptance(rows: Rows) -> list[tuple[str, float, float]]:
    """Return the prompt, the tokens and the target calls of each answer."""
    calls = [(row["prompt_id"], row["runs"]["chain"]["committed_per_call"]) for row in rows]
    return [(prompt, float(sum(each)), float(len(each))) for prompt, each in calls]


def figures(
    found: dict[str, list[dict[str, Any]]], n_tokens: dict[str, int], seeds: Sequence[int]
) -> Rows:
    """Return a row for each kind of answers.

    A row has the acceptance length over all seeds, the acceptance length of each seed, and the
    ratio to the acceptance length with the dataset's answers.
    """
    values = {kind: [acceptance(one["rows"]) for one in runs] for kind, runs in found.items()}
    rows = []
    for kind, by_seed in values.items():
        pooled = [value for own in by_seed for value in own]
        base = [value for own in values["dataset"] for value in own]
        mean, interval = ratio_with_interval(
            [one[0] for one in pooled], [one[1:] for one in pooled]
        )
        pairs = [(*own[1:], *other[1:]) for own, other in zip(pooled, base, strict=True)]
        ratio, ratio_interval = ratio_with_interval([one[0] for one in pooled], pairs)
        rows.append(
            {
                "kind": kind,
                "what": KINDS[kind],
                "seeds": list(seeds),
                "store_tokens": n_tokens[kind],
                "trained_tokens": [one["training"].get("n_tokens_total") for one in found[kind]],
                "acceptance": [mean, *(interval or ())],
                "by_seed": [
                    ratio_with_interval([v[0] for v in own], [v[1:] for v in own])[0]
                    for own in by_seed
                ],
                "of_dataset": [ratio, *(ratio_interval or ())],
            }
        )
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Answer, extract, train and decode."""
    options.out = Path(options.folder)
    options.out.mkdir(parents=True, exist_ok=True)
    dataset, own = answered(options)
    if len(own) < 2:
        sys.exit("The target completed fewer than two answers. Raise --max-new-tokens or --chats.")
    chats = {"dataset": dataset, "own": own}
    most = min(store_of(options, kind, chats[kind]) for kind in KINDS)
    n_tokens = {kind: store_of(options, kind, chats[kind], most) for kind in KINDS}
    found = {kind: [measured(options, kind, seed) for seed in options.seeds] for kind in KINDS}
    return {"figures": figures(found, n_tokens, options.seeds)}


if __name__ == "__main__":
    run(
        "regeneration", measure, "model", "train_chats", "test_chats", "folder", chats=400,
        drafter="eagle", steps=150, seeds=[0, 1], n_prompts=60, max_new_tokens=192, max_length=512,
        batch_size=16, threads=1, device="cpu",
    )  # fmt: skip
