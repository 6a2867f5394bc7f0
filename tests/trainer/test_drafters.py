"""Runs with each drafter: fewer activations, exact resume, clear refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa_data.errors import DrafterError, SelectionInvalid, TrainingError
from moa_data.moa.decoding.loop import generate_batch
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.eagle3 import Eagle3Drafter
from moa_data.moa.drafters.registry import DRAFTERS
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.targets.live import Target
from moa_data.pipeline.recode import recode
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.runs import (
    SIZES,
    assert_same_run,
    assert_same_weights,
    last_state,
    run,
    settings,
)
from moa_data.tests.kit.training import VOCABULARY, build_store, tiny_model
from moa_data.tests.kit.variants import quick
from moa_data.trainer.batches import Batch, BatchReader, fields_read, token_bytes
from moa_data.trainer.config import PRESETS
from moa_data.trainer.data import StoreDataModule, draw
from moa_data.trainer.fit import build_module, read_metrics

KINDS = {kind: sizes for kind, sizes in SIZES.items() if kind != "moa"}
# With these settings each drafter learns enough in few steps.
RATES: dict[str, dict[str, Any]] = {
    "eagle": {"micro_batch_size": 4, "matrix_learning_rate": 5e-3},
    "eagle3": {"micro_batch_size": 4},
    "glide": {"optimizer": "adamw"},
}
LEARN_SLOWLY = ("eagle", "independent")
EAGLE3: dict[str, Any] = {"drafter": "eagle3", "fused_layers": (0, 1)}
ROWS = [5, 0, 17]


def own(kind: str) -> dict[str, Any]:
    rates = RATES.get(kind, {"matrix_learning_rate": 5e-3})
    return {"drafter": kind, "optimizer": "muon"} | rates | KINDS[kind]


@pytest.fixture(scope="module")
def hidden_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without keys and values."""
    activations = ("hidden:last", "hidden:layer:0", "hidden:layer:1")
    return build_store(tmp_path_factory.mktemp("hidden") / "store", activations=activations)


@pytest.fixture(scope="module")
def few_sequences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store that every drafter can be trained from."""
    activations = ("kv", "hidden:last", "hidden:layer:0", "hidden:layer:1")
    return build_store(tmp_path_factory.mktemp("few") / "store", activations, n_sequences=18)


@pytest.mark.parametrize("kind", quick(KINDS, ["dflash"]))
def test_it_learns_resumes_and_decodes(
    store_path: Path, hidden_store: Path, tmp_path: Path, kind: str
) -> None:
    store = store_path if kind == "glide" else hidden_store
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    n_steps = 24 if kind in LEARN_SLOWLY else 12
    changes = {"max_steps": n_steps, "validate_every": n_steps // 4} | own(kind)
    at_once = run(store, whole, **changes)
    n_first = n_steps // 2 - 1
    run(store, parts, stop_after_steps=n_first, **changes)
    assert last_state(parts)["global_step"] == n_first
    report = run(store, parts, resume=True, **changes)
    assert last_state(whole)["global_step"] == last_state(parts)["global_step"] == n_steps
    assert report.n_tokens < at_once.n_tokens == at_once.n_tokens_total == report.n_tokens_total
    assert at_once.n_bytes_read == report.n_bytes_read > at_once.n_tokens
    assert_same_run(whole, parts)
    metrics = {name: [value for _, value in points] for name, points in read_metrics(parts).items()}
    assert metrics["val/kl"][-1] < 0.9 * metrics["val/kl"][0]
    assert ("train/feature_loss" in metrics) == (kind in ("eagle", "glide"))
    assert report.best_expected_acceptance_length == pytest.approx(
        max(metrics["val/expected_acceptance_length"])
    )
    drafter = load_drafter(parts)
    assert type(drafter) is DRAFTERS[kind]
    assert drafter.config.target == {"weights_sha256": "ab" * 32}
    assert all(getattr(drafter.config, name, value) == value for name, value in KINDS[kind].items())
    assert report.n_parameters == sum(weight.numel() for weight in drafter.parameters())
    check_decoding(drafter)


def check_decoding(drafter: Any) -> None:
    target, prompts = Target(tiny_model()), [[1, 2, 3, 4], [10, 12, 14], [5]]
    plain = generate_batch(target, prompts, max_new_tokens=8)
    for tree in (TreeShape(3), TreeShape(3, 2, 6)):
        fast = generate_batch(
            target, prompts, max_new_tokens=8, proposer=DrafterProposer(target, drafter), tree=tree
        )
        assert [one.tokens for one in fast] == [one.tokens for one in plain]


@pytest.mark.parametrize(
    "kind", quick(["moa", "moa with a target layer", *KINDS], ["moa", "eagle"])
)
def test_in_parts_and_in_low_precision(
    store_path: Path, hidden_store: Path, tmp_path: Path, kind: str
) -> None:
    """EAGLE's noise is drawn per sequence, so it does not depend on how the batch is split."""
    own = KINDS.get(kind, {}) | ({"target_layer_inference": 1} if kind.endswith("layer") else {})
    store = store_path if kind.startswith(("moa", "glide")) else hidden_store
    own |= {"drafter": kind.split()[0], "max_steps": 2, "validate_every": 2, "log_every": 1}
    for name, changes in (
        ("one", {}),
        ("parts", {"micro_batch_size": 2}),
        ("bf16", {"precision": "bf16-mixed"}),
    ):
        run(store, tmp_path / name, **own, **changes)
    assert_same_weights(tmp_path / "one", tmp_path / "parts", rtol=1e-3, atol=2e-5)
    full, low, split = (read_metrics(tmp_path / name) for name in ("one", "bf16", "parts"))
    assert full.keys() == low.keys()
    for name in full.keys() & {"train/loss", "train/forward_kl", "train/feature_loss"}:
        assert [v for _, v in split[name]] == pytest.approx([v for _, v in full[name]], rel=1e-4), (
            "of whole steps"
        )
    for name in full.keys() & {"train/loss", "train/forward_kl", "train/feature_loss", "val/kl"}:
        assert [v for _, v in low[name]] == pytest.approx([v for _, v in full[name]], rel=0.03), (
            name
        )


def test_noise_changes_the_run(hidden_store: Path, tmp_path: Path) -> None:
    weights = []
    for width in (0.0, 0.2):
        run(hidden_store, tmp_path / str(width), max_steps=2, feature_noise=width, drafter="eagle")
        weights.append(last_state(tmp_path / str(width))["state_dict"]["drafter.fc.weight"])
    assert not torch.equal(weights[0], weights[1])


def test_eagle3_drafts_the_most_frequent_tokens(hidden_store: Path) -> None:
    store, config = ActivationStore(hidden_store), settings(hidden_store, **own("eagle3"))
    module = build_module(data := StoreDataModule(store, config))
    counts = torch.zeros(VOCABULARY, dtype=torch.int64)
    for i in data.train_sequences:
        responses = store.read(i, "tokens")[store.read(i, "response_mask") > 0]
        counts += torch.bincount(torch.from_numpy(responses).long(), minlength=VOCABULARY)
    drafter = module.drafter
    assert isinstance(drafter, Eagle3Drafter)
    assert counts[drafter.draft_tokens].min() >= counts[~drafter.t2d].max() > 0


DSPARK: dict[str, Any] = {"drafter": "dspark", "block_layers": 1, "markov_rank": 8}
# Settings, layers of the keys and values that are read, and states that are read besides the last
# one.
READS: list[tuple[dict[str, Any], list[int], list[str]]] = [
    ({"drafter": "eagle"}, [], []),
    ({"drafter": "medusa"}, [], []),
    ({"drafter": "independent"}, [], []),
    (EAGLE3, [], ["hidden/layer_0", "hidden/layer_1"]),
    ({"drafter": "glide"}, [2], []),
    (DSPARK | {"context": "kv", "fused_layers": (1,)}, [1], []),
    (DSPARK | {"context": "memory"}, [0, 1, 2], []),
    ({}, [0, 1, 2], []),
    ({"target_layer_inference": 1}, [0, 1, 2], ["hidden/layer_1"]),
    ({"layer_attention": False}, [2], []),
    ({"layer_stride": 2}, [0, 2], []),
    ({"layer_stride": 2, "target_layer_inference": 1}, [0, 2], ["hidden/layer_1"]),
    ({"layer_stride": 2, "target_layer_inference": 2}, [0, 1, 2], ["hidden/layer_0"]),
]


def check_reads(
    path: Path, changes: dict[str, Any], layers: list[int], states: list[str]
) -> tuple[Batch, set[str]]:
    """Compare the values that are read for a drafter with the store.

    Returns:
        The batch before it is decoded, and the names of its encoded fields.
    """
    store, config, sequences = ActivationStore(path), settings(path, **changes), np.array(ROWS)
    assert {item.name for item in fields_read(store, config)} == {
        "hidden/last",
        *states,
        *(["kv"] if layers else []),
    }
    reader = BatchReader(store, config, torch.device("meta"))
    batch = reader.batch(sequences, draw(config, 0, 10))
    read = batch.decode().inputs
    entering = [] if read.entering_hidden is None else [read.entering_hidden]
    found = dict(
        zip(["hidden/last", *states], [read.hidden, *entering, *read.layer_outputs], strict=True)
    )
    assert (read.kv is None) == (not layers)
    for name, values in (found if read.kv is None else found | {"kv": read.kv}).items():
        for row, i in enumerate(ROWS):
            n_tokens = int(store.lengths[i])
            expected = store.read(i, name, layers=layers if name == "kv" else None)
            np.testing.assert_allclose(
                values[row, :n_tokens], expected.reshape(n_tokens, *values.shape[2:]), atol=1e-4
            )
            assert not values[row, n_tokens:].any()
    assert token_bytes(store, config) == 4 * (len(layers) * 2 * 2 * 8 + 32 * len(found))
    return batch, {item.name for item in batch.stored if not item.codec.is_identity}


@pytest.mark.parametrize(("changes", "layers", "states"), READS, ids=str)
def test_what_a_drafter_needs_is_read_and_nothing_else(
    store_of_all: Path, changes: dict[str, Any], layers: list[int], states: list[str]
) -> None:
    _, encoded = check_reads(store_of_all, changes, layers, states)
    assert not encoded


@pytest.mark.parametrize(
    "codec",
    quick(["int8", "transform:2@layer", "transform:2,tokens@all"], ["int8", "transform:2@layer"]),
)
def test_codes_of_what_a_drafter_needs_are_read(
    few_sequences: Path, tmp_path: Path, codec: str
) -> None:
    recode(few_sequences, codec, tmp_path / "store")
    _, encoded = check_reads(tmp_path / "store", EAGLE3, *READS[3][1:])
    assert encoded > {"hidden/last"}
    batch, _ = check_reads(tmp_path / "store", {"drafter": "glide"}, [2], [])
    if codec == "transform:2@layer":
        read = [name for name in batch.rows if name.startswith("kv/")]
        assert read
        assert all(name.startswith("kv/codes_02") for name in read)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"layer_attention": False, "target_layer_inference": 1}, marks=pytest.mark.slow
        ),
        pytest.param({"layer_stride": 2, "target_layer_inference": 1}, marks=pytest.mark.slow),
        pytest.param({"step_bound": False}, marks=pytest.mark.slow),
        pytest.param({"step_bound_min": 4, "step_bound_max": 4}, marks=pytest.mark.slow),
        pytest.param({"on_policy": False, "target_layer_inference": 1}, marks=pytest.mark.slow),
        pytest.param(PRESETS["paper"]["drafter"], marks=pytest.mark.slow),
        pytest.param(DSPARK | {"context": "kv", "fused_layers": (1,)}, marks=pytest.mark.slow),
        DSPARK | {"context": "memory"},
    ],
    ids=str,
)
def test_each_variant_trains_and_decodes(
    store_path: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    report = run(
        store_path, tmp_path / "run", max_steps=3, micro_batch_size=4, validate_every=3, **changes
    )
    assert report.best_expected_acceptance_length >= 1
    assert all(
        torch.isfinite(weight).all()
        for weight in last_state(tmp_path / "run")["state_dict"].values()
    )
    drafter = load_drafter(tmp_path / "run")
    expected = {
        name: drafter.config.vocab_size if value == "all" else value
        for name, value in changes.items()
    }
    assert all(getattr(drafter.config, name, value) == value for name, value in expected.items())
    check_decoding(drafter)


def test_refusals(store_path: Path, hidden_store: Path, tmp_path: Path) -> None:
    bare = build_store(tmp_path / "bare", activations=("kv",), n_sequences=20)
    imported = Path(shutil.copytree(hidden_store, tmp_path / "imported"))
    # Without the seal, an edited store.json is not damage.
    (imported / "commits" / "store.json").unlink()
    document = json.loads((imported / "store.json").read_text())
    document["extraction"]["imported_from"] = "eagle"
    (imported / "store.json").write_text(json.dumps(document))
    cases: list[tuple[Path, dict[str, Any], type[Exception], tuple[object, ...]]] = [
        (
            bare,
            {},
            SelectionInvalid,
            ("hidden/last", f"moa-data add {bare}", "--activations hidden:last"),
        ),
        (bare, {"drafter": "eagle"}, SelectionInvalid, ("hidden/last",)),
        (hidden_store, {}, SelectionInvalid, ("kv", f"moa-data add {hidden_store}")),
        (store_path, EAGLE3, SelectionInvalid, ("--activations hidden:layer:0",)),
        (imported, {}, SelectionInvalid, (imported, "kv", "eagle")),
        (
            hidden_store,
            {"drafter": "eagle3", "fused_layers": None},
            DrafterError,
            ("3 layers", "`fused_layers=0,1,2`"),
        ),
        (
            hidden_store,
            {"drafter": "eagle3", "fused_layers": (0, 7)},
            DrafterError,
            ("fused_layers", "0,7"),
        ),
        (
            hidden_store,
            {"drafter": "medusa", "medusa_heads": 2},
            TrainingError,
            ("`draft_length=3`", "2 tokens", "medusa_heads"),
        ),
    ]
    for store, changes, error, facts in cases:
        with raises_naming(error, *facts):
            run(store, tmp_path / "run", max_steps=2, **changes)
    assert not (tmp_path / "run").exists()
