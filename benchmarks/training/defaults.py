"""Compares the defaults of `train` with a search over learning rates and batches, at equal tokens.

For each store and kind of drafter, the benchmark trains once with the settings that `train` chooses
by itself. Then it trains for the same number of epochs with each batch size, optimizer and factor
of the learning rates. The runs are compared by the expected acceptance length on the same held-out
chats of the store. ::

    moa-data extract --model MODEL --dataset CHATS --out STORE
        --activations kv,hidden:last,hidden:layer:1,...
    python -m benchmarks.training.defaults OUT --stores STORE ... [--drafters eagle] [--epochs 1]
        [--batches 4 8 16]

All results are stored in OUT. A later call resumes runs that were stopped, and does not repeat
finished runs. Several processes may share OUT if each trains different drafters. OUT/defaults.json
has a row for each store and kind of drafter in OUT.
"""

import json
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from benchmarks.kit.harness import parsed, parser_of
from benchmarks.kit.records import provenance
from benchmarks.training.runs import trained
from moa_data.trainer.config import RUN_FILE, TrainConfig

RATES = {"learning_rate": 1e-4, "matrix_learning_rate": 2e-3, "peak_multiplier": 10.0}
"""Learning rates of the search. A factor multiplies them, but not the peak multiplier."""


def run_folder(options: Namespace, store: str, kind: str, name: str) -> Path:
    """Return the folder of a run."""
    return Path(options.out) / f"{Path(store).name}-{kind}-{name}"


def train_chosen(options: Namespace, store: str, kind: str) -> dict[str, Any]:
    """Train without settings, except for the epochs if they are given.

    Returns the report, with the settings that `train` chose.
    """
    out = run_folder(options, store, kind, f"chosen-{options.epochs or 'epochs'}")
    length = {"epochs": options.epochs} if options.epochs else {}
    report = trained(
        TrainConfig.of(store=store, out=str(out), drafter=kind, seed=options.seed, **length)
    )
    return report | {"settings": yaml.safe_load((out / RUN_FILE).read_text())}


def train_other(
    options: Namespace,
    store: str,
    kind: str,
    epochs: float,
    optimizer: str,
    factor: float,
    batch: int,
) -> dict[str, Any]:
    """Train with a batch size, an optimizer and a factor of the rates. Returns the report."""
    out = run_folder(options, store, kind, f"{epochs:g}-{optimizer}-{factor:g}-{batch}")
    settings: dict[str, Any] = dict(RATES)
    for name in ("learning_rate", "matrix_learning_rate"):
        settings[name] = factor * RATES[name]
    config = TrainConfig.of(
        store=store, out=str(out), drafter=kind, seed=options.seed, epochs=epochs,
        optimizer=optimizer, batch_size=batch, **settings,
    )  # fmt: skip
    return trained(config)


def search(options: Namespace, store: str, kind: str) -> dict[str, Any]:
    """Make all missing runs of a store and a kind of drafter, and return the row."""
    chosen = train_chosen(options, store, kind)
    settings, length = chosen["settings"], float(chosen["best_expected_acceptance_length"])
    epochs = float(settings["schedule"]["epochs"])
    tried: dict[str, float] = {}
    for optimizer, factor, batch in product(options.optimizers, options.factors, options.batches):
        report = train_other(options, store, kind, epochs, optimizer, factor, batch)
        name = f"{optimizer}, rates x {factor:g}, batch {batch}"
        tried[name] = float(report["best_expected_acceptance_length"])
        print(f"{Path(store).name} {kind} {name}: {tried[name]:.3f}", flush=True)
    best = max(tried, key=lambda name: tried[name])
    row = {
        "store": Path(store).name,
        "drafter": kind,
        "training_tokens": chosen["n_tokens_total"],
        "epochs": epochs,
        "chosen_batch": settings["data"]["batch_size"],
        "chosen": length,
        "half_width": chosen["best_half_width"],
        "best": tried[best],
        "best_settings": best,
        "chosen_over_best": length / max(length, tried[best]),
        "tried": tried,
        "cpu_s": chosen.get("cpu_s"),
    }
    found = {name: row[name] for name in ("chosen", "best", "best_settings", "chosen_over_best")}
    print(f"{row['store']} {kind}: {found}", flush=True)
    return row


def main() -> None:
    """Make all missing runs, and write all rows."""
    stores = {"nargs": "+", "required": True, "metavar": "STORE"}
    own = {
        "drafters": ["eagle", "eagle3", "moa"],
        "optimizers": ["muon"],
        "factors": [0.5, 1.0, 2.0],
    }
    options = parsed(
        parser_of(__name__, "out", stores=stores, batches=[4, 8, 16], epochs=float, seed=0, **own)
    )
    options.out = Path(options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    for store, kind in product(options.stores, options.drafters):
        row = search(options, store, kind)
        (options.out / f"row-{row['store']}-{kind}-{row['epochs']:g}.json").write_text(
            json.dumps(row, indent=1) + "\n"
        )
    rows = [json.loads(file.read_text()) for file in sorted(options.out.glob("row-*.json"))]
    document = {"rows": rows, "provenance": provenance()}
    (options.out / "defaults.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
