"""Counts the padding of training batches: grouped by length as they are trained, in random order, and packed.

A step's matrices see the response positions of a micro-batch, padded to the longest response, and its attention all
tokens, padded to the longest sequence. Packed rows hold whole sequences behind each other, as long as the longest of
the micro-batch (first fit, the longest first), as trainers do that take sequences in random order.

What packing gives a step is seconds of forward and backward by two checkouts, this one and one whose drafters are
packed, each in a process of its own on one thread, in turn; seconds are of the process, so that others on the machine
do not count. The one that was tried packed the projections, MLPs and norms of every drafter::

    git worktree add ../packed 809a729
    python -m benchmarks.training.padding STORE --packed ../packed [--drafters moa,eagle3] [--batch 32]
        [--micro-batch 8]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kit.records import ROOT, add_out_option, settings_of, write_record
from moa_data.storage.read.store import ActivationStore
from moa_data.trainer.batches import BatchReader
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.data import StoreDataModule, TrainingStream, epoch_order
from moa_data.trainer.fit import build_module

SIZES = {"eagle3": {"fused_layers": (1, 3, 4)}}
"""Sizes of a drafter that has no default for small targets."""
DRAFTERS = "moa,eagle,eagle3,glide,medusa,independent"
N_WARM = 2
"""Forwards that ask for memory, and are not counted."""


def padding(store: ActivationStore, batch: int, micro_batch: int) -> dict[str, dict[str, float]]:
    """Count shares of padding among tokens and among response positions, by how micro-batches are made up."""
    tokens = store.lengths.astype(np.int64)
    responses = store.sequences["n_response_tokens"].to_numpy().astype(np.int64)
    grouped = epoch_order(tokens, batch, 0, 0).reshape(-1, micro_batch)
    random = np.random.default_rng(0).permutation(grouped.reshape(-1)).reshape(-1, micro_batch)
    found = {}
    for name, rows in (("grouped by length", grouped), ("random order", random)):
        found[name] = {"tokens": _share(tokens[rows]), "responses": _share(responses[rows])}
        packed = [_packed_rows(tokens[row], responses[row]) for row in rows]
        shares = []
        for parts in zip(*packed, strict=True):  # tokens, then response positions, of the rows of each micro-batch
            room = sum(len(part) * max(part) for part in parts)
            shares.append(1 - sum(map(sum, parts)) / room)
        found[f"{name}, rows packed"] = dict(zip(("tokens", "responses"), shares, strict=True))
    return found


def _share(lengths: np.ndarray) -> float:
    return float(1 - lengths.sum() / (lengths.max(axis=1) * lengths.shape[1]).sum())


def _packed_rows(tokens: np.ndarray, responses: np.ndarray) -> tuple[list[int], list[int]]:
    """Tokens and response positions of rows into which the sequences of a micro-batch fit, first fit."""
    rows: list[list[int]] = []
    for index in np.argsort(-tokens):
        for row in rows:
            if row[0] + tokens[index] <= tokens.max():
                row[0] += int(tokens[index])
                row[1] += int(responses[index])
                break
        else:
            rows.append([int(tokens[index]), int(responses[index])])
    return [row[0] for row in rows], [row[1] for row in rows]


def measure_steps(store_path: str, kind: str, batch: int, micro_batch: int, n_forwards: int) -> dict[str, Any]:
    """Seconds of the process of each forward and backward, and the losses; what a child does."""
    torch.set_num_threads(1)
    config = TrainConfig.of(
        store=store_path, out="unused", drafter=kind, batch_size=batch, micro_batch_size=micro_batch,
        accelerator="cpu", precision="32-true", validation_fraction=0.0, **SIZES.get(kind, {}),
    )  # fmt: skip
    store = ActivationStore(store_path)
    module = build_module(store, config, StoreDataModule(store, config))
    vars(module).update(log=lambda *_args, **_kwargs: None, log_dict=lambda *_args, **_kwargs: None)
    reader = BatchReader(store, config, torch.device("cpu"))
    batches = iter(TrainingStream(reader, np.arange(len(store)), store.lengths.astype(np.int64), 1000, 0, 1))
    seconds, losses = [], []
    for _ in range(N_WARM + n_forwards):
        micro = next(batches)
        began = time.process_time()
        loss = module.training_step(micro, 0)
        torch.autograd.backward(loss)
        seconds.append(time.process_time() - began)
        losses.append(float(loss.detach()))
    return {"seconds": seconds[N_WARM:], "losses": losses}


def in_tree(tree: Path, options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Run :func:`measure_steps` in a process that has the package of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "moa_data").symlink_to(tree.resolve())
        arguments = [options.store, kind, options.batch, options.micro_batch, options.forwards]
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, "child", *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT / 'benchmarks'}", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Compare seconds of forwards and backwards by both trees, in turn, and their losses."""
    trees = {"packed": options.packed, "padded": ROOT}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for turn in range(options.turns):
        for name in list(trees)[:: -1 if turn % 2 else 1]:
            found[name].append(in_tree(trees[name], options, kind))
    pairs = list(zip(found["packed"], found["padded"], strict=True))
    ratios = [sum(packed["seconds"]) / sum(padded["seconds"]) for packed, padded in pairs]
    one, other = pairs[0]
    apart = max(abs(a - b) / abs(b) for a, b in zip(one["losses"], other["losses"], strict=True))
    return {"ratio": statistics.median(ratios), "ratios": ratios, "losses_apart": apart}


def main() -> None:
    """Count the padding, compare the trees, print and record."""
    if sys.argv[1:2] == ["child"]:
        store, kind, *numbers = sys.argv[2:]
        print(json.dumps(measure_steps(store, kind, *map(int, numbers))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="a store with what the drafters need")
    parser.add_argument("--packed", type=Path, help="a checkout with packing; leave out to count padding alone")
    parser.add_argument("--drafters", default=DRAFTERS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--forwards", type=int, default=8, help="micro-batches of each turn")
    parser.add_argument("--turns", type=int, default=3)
    add_out_option(parser)
    options = parser.parse_args()
    shares = padding(ActivationStore(options.store), options.batch, options.micro_batch)
    for name, share in shares.items():
        print(f"{name:32} padding: {share['tokens']:6.1%} of tokens, {share['responses']:6.1%} of response positions")
    steps = {}
    for kind in options.drafters.split(",") if options.packed else ():
        steps[kind] = compare(options, kind)
        print(f"{kind:12} {steps[kind]['ratio']:.3f} of the time, losses apart {steps[kind]['losses_apart']:.1e}")
    document = {"settings": settings_of(options), "padding": shares, "steps": steps}
    print(write_record(options.out, "padding", document))


if __name__ == "__main__":
    main()
