"""Measures speculators' own dataset and collation on its own files and on stores.

It needs an environment with speculators and this package. All sides hold the same sequences. The
side ``files`` is the output of ``export --format speculators``. The other sides are the store that
was exported, and copies of this store with other codecs.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.harness import in_turn, quartiles, run


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Read all sequences in batches from each side in turn."""
    # Only an environment with speculators has these modules.
    from hs_connectors import FileTransfer, HiddenStatesTransfer
    from speculators.train.data import ArrowDataset, CollateFn

    from moa_data.pipeline.exchange.speculators_backend import StoreTransfer

    sides: dict[str, HiddenStatesTransfer] = {
        "files": FileTransfer(Path(options.files) / "hidden_states")
    }
    folders = {"files": Path(options.files) / "hidden_states"}
    for store in map(Path, options.stores):
        sides[store.name], folders[store.name] = StoreTransfer(str(store)), store / "parts"
    datasets = {
        name: ArrowDataset(options.max_length, options.files, side, on_missing="raise")
        for name, side in sides.items()
    }
    n_layers, width = sides["files"].get_cached(0)["hidden_states"].shape[1:]
    collate, n = CollateFn(options.max_length, width, n_layers - 1), len(datasets["files"])

    def batches(name: str) -> list[Any]:
        order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
        firsts = range(0, n, options.batch_size)
        return [
            collate([datasets[name][i] for i in order[k : k + options.batch_size]])["hidden_states"]
            for k in firsts
        ]

    wanted = batches("files")
    found: dict[str, Any] = {"n_sequences": n, "width": width, "n_layers": n_layers, "sides": {}}
    seconds = in_turn({name: partial(batches, name) for name in sides}, options.repeats)
    for name in sides:
        pairs = [(a.float(), b.float()) for a, b in zip(wanted, batches(name), strict=True)]
        error = max(float((a - b).norm() / a.norm()) for a, b in pairs)
        disk = sum(file.stat().st_size for file in folders[name].rglob("*") if file.is_file())
        rates = [n / second for second in quartiles(seconds[name])]
        found["sides"][name] = {
            "disk_bytes": disk, "sequences_per_cpu_s": rates, "relative_error": error,
        }  # fmt: skip
    return found | {"n_threads": torch.get_num_threads(), "cores": os.cpu_count()}


if __name__ == "__main__":
    run(
        "speculators-batches", measure, "files", "stores+", batch_size=8, repeats=5,
        max_length=2048, threads=1
    )  # fmt: skip
