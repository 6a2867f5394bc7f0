"""Measures what packing saves: padding of micro-batches, and a step's CPU time against a tree without it.

Sequences are grouped by length, so that few of their tokens are padding; their responses differ more. For the
micro-batches of a store the first part counts both, and what the same would be with batches in random order, and with
whole sequences packed into rows as long as the longest (first fit, longest first), which is how trainers without
groups avoid padding.

The second part takes the same forwards and backwards, by this tree and by another one, in turn, each in a process of
its own; seconds are of the process on one thread, so that others on the machine do not count. The trees' losses are
compared too. The commit before packing is the one to compare with::

    git worktree add ../padded 'COMMIT'
    python benchmarks/packing.py STORE --against ../padded [--drafters moa eagle3] [--batch 32] [--micro-batch 8]
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
from records import ROOT, add_out_option, settings_of, write_record

from moa_data.moa.drafters.registry import DRAFTERS
from moa_data.storage.read.store import ActivationStore
from moa_data.trainer.batches.batch_reader import BatchReader
from moa_data.trainer.batches.datamodule import StoreDataModule, TrainingStream, epoch_order
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.fit.run import build_module

SIZES = {"eagle3": {"fused_layers": (1, 3, 4)}}
"""Sizes of a drafter that has no default for small targets."""


def padding(store: ActivationStore, batch: int, micro_batch: int) -> dict[str, dict[str, float]]:
    """Shares of padding among tokens and among response positions, by how micro-batches are made up."""
    tokens = store.lengths.astype(np.int64)
    responses = store.sequences["n_response_tokens"].to_numpy().astype(np.int64)
    grouped = epoch_order(tokens, batch, 0, 0).reshape(-1, micro_batch)
    random = np.random.default_rng(0).permutation(grouped.reshape(-1)).reshape(-1, micro_batch)
    found = {
        name: {"tokens": _share(tokens[rows]), "responses": _share(responses[rows])}
        for name, rows in (("grouped by length", grouped), ("random order", random))
    }
    for name, rows in (("grouped, rows packed", grouped), ("random order, rows packed", random)):
        batches = [_packed_rows(tokens[row], responses[row]) for row in rows]
        shares = []
        for parts in zip(*batches, strict=True):  # tokens, then response positions, of the rows of each micro-batch
            room = sum(len(part) * max(part) for part in parts)
            shares.append(1 - sum(map(sum, parts)) / room)
        found[name] = dict(zip(("tokens", "responses"), shares, strict=True))
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


def settings(store: str, kind: str, batch: int, micro_batch: int) -> TrainConfig:
    """The defaults of a drafter, on a CPU."""
    return TrainConfig.of(
        store=store, out="unused", drafter=kind, batch_size=batch, micro_batch_size=micro_batch, accelerator="cpu",
        precision="32-true", validation_fraction=0.0, **SIZES.get(kind, {}),
    )  # fmt: skip


def measure_steps(store_path: str, kind: str, batch: int, micro_batch: int, n_forwards: int) -> dict[str, Any]:
    """Seconds of the process of each forward and backward, and the losses; what a child does."""
    torch.set_num_threads(1)
    config, store = settings(store_path, kind, batch, micro_batch), ActivationStore(store_path)
    data = StoreDataModule(store, config)
    module = build_module(store, config, data)
    vars(module).update(log=lambda *_args, **_kwargs: None, log_dict=lambda *_args, **_kwargs: None)
    reader = BatchReader(store, config, torch.device("cpu"))
    lengths = store.lengths.astype(np.int64)
    batches = iter(TrainingStream(reader, np.arange(len(store)), lengths, 1000, 0, 1))
    seconds, losses = [], []
    for _ in range(n_forwards + 1):
        micro = next(batches)
        began = time.process_time()
        loss = module.training_step(micro, 0)
        torch.autograd.backward(loss)
        seconds.append(time.process_time() - began)
        losses.append(float(loss.detach()))
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.drafter.parameters() if p.grad is not None])
    return {"seconds": seconds[1:], "losses": losses, "gradient_norm": float(norm)}  # the first one asks for memory


def in_tree(tree: Path, options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Run :func:`measure_steps` in a process that has the package of another checkout."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "moa_data").symlink_to(tree.resolve())
        arguments = [options.store, kind, options.batch, options.micro_batch, options.forwards]
        done = subprocess.run(
            [sys.executable, __file__, "child", *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT / 'benchmarks'}", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Seconds of a forward and backward by both trees, in turn, and how far apart their losses and gradients are."""
    trees = {"packed": ROOT, "padded": options.against}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for turn in range(options.turns):
        for name in list(trees)[:: -1 if turn % 2 else 1]:
            found[name].append(in_tree(trees[name], options, kind))
    ratios = [
        sum(packed["seconds"]) / sum(padded["seconds"])
        for packed, padded in zip(found["packed"], found["padded"], strict=True)
    ]
    one, other = found["packed"][0], found["padded"][0]
    apart = max(abs(a - b) / abs(b) for a, b in zip(one["losses"], other["losses"], strict=True))
    return {
        "packed_s": statistics.median(sum(run["seconds"]) / options.forwards for run in found["packed"]),
        "padded_s": statistics.median(sum(run["seconds"]) / options.forwards for run in found["padded"]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "losses_apart": apart,
        "gradient_norms_apart": abs(one["gradient_norm"] - other["gradient_norm"]) / other["gradient_norm"],
    }


def main() -> None:
    """Count the padding, compare the trees, print and record."""
    if sys.argv[1:2] == ["child"]:
        store, kind, *numbers = sys.argv[2:]
        print(json.dumps(measure_steps(store, kind, *map(int, numbers))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="a store with what the drafters need")
    parser.add_argument("--against", type=Path, help="a checkout without packing; leave out to count padding alone")
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), choices=list(DRAFTERS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--forwards", type=int, default=8, help="micro-batches of each turn")
    parser.add_argument("--turns", type=int, default=3)
    add_out_option(parser)
    options = parser.parse_args()
    shares = padding(ActivationStore(options.store), options.batch, options.micro_batch)
    for name, share in shares.items():
        print(f"{name:26} padding: {share['tokens']:6.1%} of tokens, {share['responses']:6.1%} of response positions")
    steps = {}
    for kind in options.drafters if options.against else ():
        steps[kind] = compare(options, kind)
        print(f"{kind:12} {steps[kind]['ratio']:.3f} of the time, losses apart {steps[kind]['losses_apart']:.1e}")
    document = {"settings": settings_of(options), "padding": shares, "steps": steps}
    print(write_record(options.out, "packing", document))


if __name__ == "__main__":
    main()
