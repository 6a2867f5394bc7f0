"""Runs with each drafter: fewer activations, exact resume, clear refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa_data.errors import DrafterError, SelectionInvalid, TrainingError
from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.eagle3 import Eagle3Drafter
from moa_data.moa.drafters.registry import DRAFTERS
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.targets.live import Target
from moa_data.pipeline.recode import recode
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.runs import SIZES, assert_same_weights, last_state, run, settings
from moa_data.tests.kit.training import VOCABULARY, build_store, tiny_model
from moa_data.tests.kit.variants import quick
from moa_data.trainer.data import Batch, BatchReader, StoreDataModule, draw, sequence_bytes
from moa_data.trainer.fit import build_module, read_metrics

KINDS = {kind: sizes for kind, sizes in SIZES.items() if kind != "moa"}
# How each learns enough in few steps.
RATES: dict[str, dict[str, Any]] = {
    "eagle": {"micro_batch_size": 4, "matrix_learning_rate": 5e-3},
    "eagle3": {"micro_batch_size": 4},
    "glide": {"optimizer": "adamw"},
}
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


@pytest.mark.parametrize("kind", quick(KINDS, ["eagle", "glide", "dflash"]))
def test_it_learns_resumes_and_decodes(store_path: Path, hidden_store: Path, tmp_path: Path, kind: str) -> None:
    store = store_path if kind == "glide" else hidden_store
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = {"max_steps": 40, "validate_every": 5} | own(kind)
    run(store, whole, **changes)
    run(store, parts, stop_after_steps=16, **changes)
    report = run(store, parts, resume=True, **changes)
    assert last_state(whole)["global_step"] == last_state(parts)["global_step"] == 40
    assert_same_weights(whole, parts)
    metrics = {name: [value for _, value in points] for name, points in read_metrics(parts).items()}
    assert metrics["val/kl"][-1] < 0.85 * metrics["val/kl"][0]
    assert ("train/feature_loss" in metrics) == (kind in ("eagle", "glide"))
    assert report.best_expected_acceptance_length == pytest.approx(max(metrics["val/expected_acceptance_length"]))
    drafter = load_drafter(parts)
    assert type(drafter) is DRAFTERS[kind]
    assert drafter.config.target == {"weights_sha256": "ab" * 32}
    assert all(getattr(drafter.config, name, value) == value for name, value in KINDS[kind].items())
    assert report.n_parameters == sum(weight.numel() for weight in drafter.parameters())
    target, prompts = Target(tiny_model()), [[1, 2, 3, 4], [10, 12, 14], [5]]
    for tree in (TreeShape(3), TreeShape(3, 2, 6)):
        proposer = DrafterProposer(target, drafter)
        fast = generate_batch(target, prompts, max_new_tokens=12, proposer=proposer, tree=tree)
        for prompt, got in zip(prompts, fast, strict=True):
            assert got.tokens == plain_generate(target, prompt, max_new_tokens=12).tokens


@pytest.mark.parametrize("kind", quick(["moa", "moa with a target layer", *KINDS], ["moa", "eagle", "dspark"]))
def test_in_parts_and_in_low_precision(store_path: Path, hidden_store: Path, tmp_path: Path, kind: str) -> None:
    """The noise of EAGLE belongs to the sequence, however the batch is split."""
    own = KINDS.get(kind, {}) | ({"target_layer_inference": 1} if kind.endswith("layer") else {})
    store = store_path if kind.startswith(("moa", "glide")) else hidden_store
    own |= {"drafter": kind.split()[0], "max_steps": 4, "validate_every": 4, "log_every": 1}
    for name, changes in (("one", {}), ("parts", {"micro_batch_size": 2}), ("bf16", {"precision": "bf16-mixed"})):
        run(store, tmp_path / name, **own, **changes)
    assert_same_weights(tmp_path / "one", tmp_path / "parts", rtol=1e-3, atol=2e-5)
    full, low, split = (read_metrics(tmp_path / name) for name in ("one", "bf16", "parts"))
    assert full.keys() == low.keys()
    for name in full.keys() & {"train/loss", "train/forward_kl", "train/feature_loss"}:
        assert [v for _, v in split[name]] == pytest.approx([v for _, v in full[name]], rel=1e-4), "of whole steps"
    for name in full.keys() & {"train/loss", "train/forward_kl", "train/feature_loss", "val/kl"}:
        assert [v for _, v in low[name]] == pytest.approx([v for _, v in full[name]], rel=0.03), name


def test_noise_changes_the_run(hidden_store: Path, tmp_path: Path) -> None:
    weights = []
    for width in (0.0, 0.2):
        run(hidden_store, tmp_path / str(width), max_steps=2, feature_noise=width, drafter="eagle")
        weights.append(last_state(tmp_path / str(width))["state_dict"]["drafter.fc.weight"])
    assert not torch.equal(weights[0], weights[1])


def test_eagle3_drafts_the_most_frequent_tokens(hidden_store: Path) -> None:
    store, config = ActivationStore(hidden_store), settings(hidden_store, **own("eagle3"))
    module = build_module(store, config, data := StoreDataModule(store, config))
    counts = torch.zeros(VOCABULARY, dtype=torch.int64)
    for i in data.train_sequences:
        responses = store.read(i, "tokens")[store.read(i, "response_mask") > 0]
        counts += torch.bincount(torch.from_numpy(responses).long(), minlength=VOCABULARY)
    drafter = module.drafter
    assert isinstance(drafter, Eagle3Drafter)
    assert counts[drafter.draft_tokens].min() >= counts[~drafter.t2d].max() > 0


@pytest.mark.parametrize("kind", ["eagle", "medusa", "independent"])
def test_only_what_the_drafter_needs_is_read(store_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    store, config = ActivationStore(store_path), settings(store_path, drafter=kind)
    asked = []
    real = ActivationStore.read_batch

    def read_batch(self: Any, sequences: Any, names: Any, **kwargs: Any) -> Any:
        asked.append(names)
        return real(self, sequences, names, **kwargs)

    monkeypatch.setattr(ActivationStore, "read_batch", read_batch)
    sequences = np.arange(3)
    inputs, _ = BatchReader(store, config, torch.device("cpu")).read(sequences, store.lengths[sequences])
    assert asked == [["tokens", "response_mask", "hidden/last"]]
    assert inputs.kv is None
    assert inputs.entering_hidden is None
    ratio = sequence_bytes(store, settings(store_path), 10) / sequence_bytes(store, config, 10)
    assert ratio == 1 + 3 * 2 * 2 * 8 / 32, "keys and values of three layers beside a hidden state"


def read_rows(path: Path, codec: str, tmp_path: Path, config: Any) -> tuple[ActivationStore, Any, Any]:
    """Three sequences of a store that is recoded first: the store, the decoded inputs and the codes."""
    if codec != "lossless":
        recode(path, codec, path := tmp_path / "store")
    store, sequences = ActivationStore(path), np.array(ROWS)
    inputs, encoded = BatchReader(store, config, torch.device("cpu")).read(sequences, store.lengths[sequences])
    return store, Batch(inputs, draw(config, 0, 10), 1.0, 0, encoded=encoded).decode().inputs, encoded


@pytest.mark.parametrize("codec", ["lossless", "int8", "transform:2@layer", "transform:2,tokens@all"])
def test_glide_reads_the_last_layer_alone(store_path: Path, tmp_path: Path, codec: str) -> None:
    config = settings(store_path, drafter="glide")
    store, inputs, encoded = read_rows(store_path, codec, tmp_path, config)
    assert bool(encoded) == (codec != "lossless")
    if "tokens" in codec:
        assert encoded["kv"].codec.needs_tokens
    if codec == "transform:2@layer":
        assert all(name.startswith("kv/codes_02") for name in encoded["kv"].rows)
    assert inputs.kv.shape[2:] == (1, 2 * 2 * 8)
    for row, i in enumerate(ROWS):
        n_tokens = int(store.lengths[i])
        expected = store.read(i, "kv", layers=[-1]).reshape(n_tokens, 1, -1)
        np.testing.assert_allclose(inputs.kv[row, :n_tokens].numpy(), expected, atol=1e-4)
        assert not inputs.kv[row, n_tokens:].any()
    assert sequence_bytes(store, config, 10) == 10 * 4 * (2 * 2 * 8 + 32)


@pytest.mark.parametrize("codec", ["lossless", "int8"])
def test_eagle3_reads_the_fused_layers_alone(hidden_store: Path, tmp_path: Path, codec: str) -> None:
    config = settings(hidden_store, **EAGLE3)
    store, inputs, _ = read_rows(hidden_store, codec, tmp_path, config)
    assert inputs.kv is None
    assert len(inputs.layer_outputs) == 2
    for layer, states in enumerate(inputs.layer_outputs):
        for row, i in enumerate(ROWS):
            n_tokens = int(store.lengths[i])
            np.testing.assert_allclose(states[row, :n_tokens], store.read(i, f"hidden/layer_{layer}"), atol=1e-6)
            assert not states[row, n_tokens:].any()
    assert sequence_bytes(store, config, 10) == 10 * 4 * 3 * 32


@pytest.mark.parametrize(("context", "layers"), [("kv", [1]), ("memory", [0, 1, 2])])
def test_block_drafters_train_on_keys_and_values(
    store_path: Path, tmp_path: Path, context: str, layers: list[int]
) -> None:
    """Of the layers alone that the context is made of; what is exported decodes."""
    sizes: dict[str, Any] = {"drafter": "dspark", "context": context, "block_layers": 1, "markov_rank": 8}
    sizes |= {"fused_layers": tuple(layers)} if context == "kv" else {}
    store, inputs, _ = read_rows(store_path, "lossless", tmp_path, settings(store_path, **sizes))
    assert not inputs.layer_outputs
    for row, i in enumerate(ROWS):
        n_tokens = int(store.lengths[i])
        expected = store.read(i, "kv", layers=layers).reshape(n_tokens, len(layers), -1)
        np.testing.assert_array_equal(inputs.kv[row, :n_tokens].numpy(), expected)
    run(store_path, tmp_path / "run", max_steps=2, **sizes)
    drafter, target = load_drafter(tmp_path / "run"), Target(tiny_model())
    assert drafter.config.context == context
    proposer = DrafterProposer(target, drafter)
    [fast] = generate_batch(target, [[1, 2, 3]], max_new_tokens=12, proposer=proposer, tree=TreeShape(3))
    assert fast.tokens == plain_generate(target, [1, 2, 3], max_new_tokens=12).tokens


def test_refusals(store_path: Path, hidden_store: Path, tmp_path: Path) -> None:
    bare = build_store(tmp_path / "bare", activations=("kv",), n_sequences=20)
    imported = Path(shutil.copytree(hidden_store, tmp_path / "imported"))
    (imported / "commits" / "store.json").unlink()  # so that an edited store.json is no damage
    document = json.loads((imported / "store.json").read_text())
    document["extraction"]["imported_from"] = "eagle"
    (imported / "store.json").write_text(json.dumps(document))
    cases: list[tuple[Path, dict[str, Any], type[Exception], str]] = [
        (bare, {}, SelectionInvalid, r"lacks hidden/last; add with .*--activations hidden:last`"),
        (bare, {"drafter": "eagle"}, SelectionInvalid, "lacks hidden/last"),
        (hidden_store, {}, SelectionInvalid, "lacks kv; add with `moa-data add"),
        (store_path, EAGLE3, SelectionInvalid, r"--activations hidden:layer:0`"),
        (imported, {}, SelectionInvalid, "imported from eagle"),
        (hidden_store, {"drafter": "eagle3", "fused_layers": None}, DrafterError, "--fused-layers 0,1,2"),
        (hidden_store, {"drafter": "eagle3", "fused_layers": (0, 7)}, DrafterError, "0,7"),
        (hidden_store, {"drafter": "medusa", "medusa_heads": 2}, TrainingError, "more levels than the 2"),
    ]
    for store, changes, error, message in cases:
        with pytest.raises(error, match=message):
            run(store, tmp_path / "run", max_steps=2, **changes)
    assert not (tmp_path / "run").exists()
