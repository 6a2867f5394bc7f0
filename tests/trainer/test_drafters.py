"""Runs with EAGLE, EAGLE-3 and GLIDE: one command and store, fewer activations, exact resume, clear refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa_data.moa.decoding.loop import generate, generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.eagle import EagleDrafter
from moa_data.moa.drafters.eagle3 import Eagle3Drafter
from moa_data.moa.drafters.glide import GlideDrafter
from moa_data.moa.errors import DrafterError
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.targets.live import Target
from moa_data.pipeline.recode import recode
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.training import VOCABULARY, build_store, tiny_model
from moa_data.trainer.batch import Batch
from moa_data.trainer.batch_reader import BatchReader, sequence_bytes
from moa_data.trainer.curves import read_metrics
from moa_data.trainer.data import StoreDataModule, draw
from moa_data.trainer.errors import MissingField
from moa_data.trainer.run import build_module

from .test_run import last_state, run, settings

EAGLE = {"drafter": "eagle"}
GLIDE = {"drafter": "glide"}
EAGLE3: dict[str, Any] = {"drafter": "eagle3", "fused_layers": (0, 1)}


@pytest.fixture(scope="module")
def hidden_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(tmp_path_factory.mktemp("eagle") / "store", activations=("hidden:last",))


def test_it_learns_and_decodes(hidden_store: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    report = run(hidden_store, out, max_steps=60, validate_every=6, **EAGLE)
    metrics = {name: [value for _, value in points] for name, points in read_metrics(out).items()}
    assert metrics["val/kl"][-1] < 0.8 * metrics["val/kl"][0]
    assert "train/entering_feature_loss" not in metrics
    assert report.best_expected_acceptance_length == pytest.approx(max(metrics["val/expected_acceptance_length"]))
    drafter = load_drafter(out)
    assert isinstance(drafter, EagleDrafter)
    assert drafter.config.target == {"weights_sha256": "ab" * 32}
    target = Target(tiny_model())
    prompts = [[1, 2, 3, 4], [10, 12, 14], [5]]
    for tree in (TreeShape(3), TreeShape(3, 2, 6)):
        fast = generate_batch(target, prompts, max_new_tokens=16, proposer=DrafterProposer(target, drafter), tree=tree)
        for prompt, got in zip(prompts, fast, strict=True):
            assert got.tokens == plain_generate(target, prompt, max_new_tokens=16).tokens
            alone = generate(target, drafter, prompt, max_new_tokens=16, tree=tree)
            assert alone.tokens == got.tokens


def test_resume_is_bit_exact(hidden_store: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"micro_batch_size": 4, "optimizer": "muon"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(hidden_store, whole, max_steps=8, **EAGLE, **changes)
    run(hidden_store, parts, max_steps=8, stop_after_steps=4, **EAGLE, **changes)
    run(hidden_store, parts, max_steps=8, resume=True, **EAGLE, **changes)
    one, other = last_state(whole), last_state(parts)
    assert one["global_step"] == other["global_step"] == 8
    for name, value in one["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name


def test_accumulation_equals_the_whole_batch(hidden_store: Path, tmp_path: Path) -> None:
    """The noise belongs to the sequence, however the batch is split."""
    run(hidden_store, tmp_path / "one", max_steps=4, **EAGLE)
    run(hidden_store, tmp_path / "parts", max_steps=4, micro_batch_size=2, **EAGLE)
    for name, value in last_state(tmp_path / "one")["state_dict"].items():
        torch.testing.assert_close(value, last_state(tmp_path / "parts")["state_dict"][name], rtol=1e-3, atol=2e-5)


def test_noise_changes_the_run(hidden_store: Path, tmp_path: Path) -> None:
    weights = []
    for width in (0.0, 0.2):
        run(hidden_store, tmp_path / str(width), max_steps=2, feature_noise=width, **EAGLE)
        weights.append(last_state(tmp_path / str(width))["state_dict"]["drafter.fc.weight"])
    assert not torch.equal(weights[0], weights[1])


def test_low_precision_follows_float32(hidden_store: Path, tmp_path: Path) -> None:
    for precision in ("32-true", "bf16-mixed"):
        run(hidden_store, tmp_path / precision, max_steps=3, validate_every=3, log_every=1, **EAGLE | {
            "precision": precision})  # fmt: skip
    full, low = read_metrics(tmp_path / "32-true"), read_metrics(tmp_path / "bf16-mixed")
    for name in ("train/loss", "train/forward_kl", "val/kl"):
        assert [v for _, v in low[name]] == pytest.approx([v for _, v in full[name]], rel=0.03), name


def test_only_what_the_drafter_needs_is_read(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ActivationStore(store_path)
    config, eagle = settings(store_path), settings(store_path, **EAGLE)
    asked = []
    real = ActivationStore.read_batch

    def read_batch(self: Any, sequences: Any, names: Any, **kwargs: Any) -> Any:
        asked.append(names)
        return real(self, sequences, names, **kwargs)

    monkeypatch.setattr(ActivationStore, "read_batch", read_batch)
    sequences = np.arange(3)
    inputs, _ = BatchReader(store, eagle, torch.device("cpu")).read(sequences, store.lengths[sequences])
    assert asked == [["tokens", "response_mask", "hidden/last"]]
    assert inputs.kv is None
    assert inputs.entering_hidden is None
    ratio = sequence_bytes(store, config, 10) / sequence_bytes(store, eagle, 10)
    assert ratio == 1 + 3 * 2 * 2 * 8 / 32, "keys and values of three layers beside a hidden state"


def test_refusals(store_path: Path, hidden_store: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingField, match=r"lacks kv; add with `moa-data add .* --model MODEL --activations kv`"):
        run(hidden_store, tmp_path / "run", max_steps=2)
    bare = build_store(tmp_path / "bare", activations=("kv",), n_sequences=20)
    with pytest.raises(MissingField, match=r"lacks hidden/last; add with .*--activations hidden:last`"):
        run(bare, tmp_path / "run", max_steps=2, **EAGLE)
    assert not (tmp_path / "run").exists()


def test_glide_learns_resumes_and_decodes(store_path: Path, tmp_path: Path) -> None:
    own = GLIDE | {"block_size": 4, "self_attention_mlp_width": 40}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(store_path, whole, max_steps=30, **own)
    run(store_path, parts, max_steps=30, stop_after_steps=16, **own)
    report = run(store_path, parts, max_steps=30, resume=True, **own)
    for name, value in last_state(whole)["state_dict"].items():
        assert torch.equal(value, last_state(parts)["state_dict"][name]), name
    metrics = {name: [value for _, value in points] for name, points in read_metrics(parts).items()}
    assert metrics["val/kl"][-1] < 0.9 * metrics["val/kl"][0]
    assert report.best_expected_acceptance_length == pytest.approx(max(metrics["val/expected_acceptance_length"]))
    drafter = load_drafter(parts)
    assert isinstance(drafter, GlideDrafter)
    assert (drafter.config.block_size, drafter.config.self_attention_mlp_width) == (4, 40)
    target, tree = Target(tiny_model()), TreeShape(3, 2, 6)
    prompts = [[1, 2, 3, 4], [10, 12, 14], [5]]
    fast = generate_batch(target, prompts, max_new_tokens=12, proposer=DrafterProposer(target, drafter), tree=tree)
    for prompt, got in zip(prompts, fast, strict=True):
        assert got.tokens == plain_generate(target, prompt, max_new_tokens=12).tokens


def test_glide_in_parts_and_in_low_precision(store_path: Path, tmp_path: Path) -> None:
    for name, changes in (("one", {}), ("parts", {"micro_batch_size": 2}), ("bf16", {"precision": "bf16-mixed"})):
        run(store_path, tmp_path / name, max_steps=4, validate_every=4, log_every=1, **GLIDE | changes)
    for name, value in last_state(tmp_path / "one")["state_dict"].items():
        torch.testing.assert_close(value, last_state(tmp_path / "parts")["state_dict"][name], rtol=1e-3, atol=2e-5)
    for name in ("train/loss", "val/kl"):
        low, full = (read_metrics(tmp_path / run_name)[name] for run_name in ("bf16", "one"))
        assert [v for _, v in low] == pytest.approx([v for _, v in full], rel=0.03), name


@pytest.mark.parametrize("codec", ["lossless", "int8", "transform:2@layer", "transform:2,tokens@all"])
def test_glide_reads_the_last_layer_alone(store_path: Path, tmp_path: Path, codec: str) -> None:
    path = store_path
    if codec != "lossless":
        recode(store_path, codec, path := tmp_path / "store")
    store = ActivationStore(path)
    config = settings(path, **GLIDE)
    sequences = np.array([5, 0, 17])
    inputs, encoded = BatchReader(store, config, torch.device("cpu")).read(sequences, store.lengths[sequences])
    assert bool(encoded) == (codec != "lossless")
    if codec == "transform:2@layer":
        assert all(name.startswith("kv/codes_02") for name in encoded["kv"].rows)
    kv = Batch(inputs, draw(config, 0, 10), 1.0, 0, encoded=encoded).decode().inputs.kv
    assert kv.shape[2:] == (1, 2 * 2 * 8)
    for row, i in enumerate(sequences.tolist()):
        n_tokens = int(store.lengths[i])
        expected = store.read(i, "kv", layers=[-1]).reshape(n_tokens, 1, -1)
        np.testing.assert_allclose(kv[row, :n_tokens].numpy(), expected, atol=1e-4)
        assert not kv[row, n_tokens:].any()
    assert sequence_bytes(store, config, 10) == 10 * 4 * (2 * 2 * 8 + 32)


@pytest.fixture(scope="module")
def layers_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(
        tmp_path_factory.mktemp("eagle3") / "store", activations=("hidden:last", "hidden:layer:0", "hidden:layer:1")
    )


def test_eagle3_learns_resumes_and_decodes(layers_store: Path, tmp_path: Path) -> None:
    own = EAGLE3 | {"draft_vocabulary": 50, "test_time_steps": 3, "micro_batch_size": 4, "optimizer": "muon"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(layers_store, whole, max_steps=30, **own)
    run(layers_store, parts, max_steps=30, stop_after_steps=16, **own)
    report = run(layers_store, parts, max_steps=30, resume=True, **own)
    for name, value in last_state(whole)["state_dict"].items():
        assert torch.equal(value, last_state(parts)["state_dict"][name]), name
    metrics = {name: [value for _, value in points] for name, points in read_metrics(parts).items()}
    assert metrics["val/kl"][-1] < 0.9 * metrics["val/kl"][0]
    assert "train/feature_loss" not in metrics
    assert report.best_expected_acceptance_length == pytest.approx(max(metrics["val/expected_acceptance_length"]))
    drafter = load_drafter(parts)
    assert isinstance(drafter, Eagle3Drafter)
    assert (drafter.config.fused_layers, drafter.config.draft_vocabulary) == ((0, 1), 50)
    store, counts = ActivationStore(layers_store), torch.zeros(VOCABULARY, dtype=torch.int64)
    module = build_module(store, (config := settings(layers_store, **own)), (
        data := StoreDataModule(store, config)))  # fmt: skip
    for i in data.train_sequences:
        counts += torch.bincount(torch.from_numpy(store.read(i, "tokens")[store.read(i, "response_mask") > 0]).long(),
            minlength=VOCABULARY)  # fmt: skip
    chosen = module.drafter.draft_tokens
    assert counts[chosen].min() >= counts[~module.drafter.t2d].max() > 0
    assert torch.equal(chosen, drafter.draft_tokens)
    target, tree = Target(tiny_model()), TreeShape(3, 2, 6)
    prompts = [[1, 2, 3, 4], [10, 12, 14], [5]]
    fast = generate_batch(target, prompts, max_new_tokens=12, proposer=DrafterProposer(target, drafter), tree=tree)
    for prompt, got in zip(prompts, fast, strict=True):
        assert got.tokens == plain_generate(target, prompt, max_new_tokens=12).tokens


def test_eagle3_in_parts_and_in_low_precision(layers_store: Path, tmp_path: Path) -> None:
    for name, changes in (("one", {}), ("parts", {"micro_batch_size": 2}), ("bf16", {"precision": "bf16-mixed"})):
        run(layers_store, tmp_path / name, max_steps=4, validate_every=4, log_every=1, **EAGLE3 | changes)
    for name, value in last_state(tmp_path / "one")["state_dict"].items():
        torch.testing.assert_close(value, last_state(tmp_path / "parts")["state_dict"][name], rtol=1e-3, atol=2e-5)
    for name in ("train/loss", "train/forward_kl", "val/kl"):
        full, low = (read_metrics(tmp_path / run_name)[name] for run_name in ("one", "bf16"))
        assert [v for _, v in low] == pytest.approx([v for _, v in full], rel=0.03), name


@pytest.mark.parametrize("codec", ["lossless", "int8"])
def test_eagle3_reads_the_fused_layers_alone(store_path: Path, layers_store: Path, tmp_path: Path, codec: str) -> None:
    path = layers_store
    if codec != "lossless":
        recode(layers_store, codec, path := tmp_path / "store")
    store = ActivationStore(path)
    config = settings(path, **EAGLE3)
    sequences = np.array([5, 0, 17])
    inputs, encoded = BatchReader(store, config, torch.device("cpu")).read(sequences, store.lengths[sequences])
    batch = Batch(inputs, draw(config, 0, 10), 1.0, 0, encoded=encoded).to(torch.device("cpu")).decode()
    assert batch.inputs.kv is None
    assert len(batch.inputs.layer_outputs) == 2
    for layer, states in enumerate(batch.inputs.layer_outputs):
        for row, i in enumerate(sequences.tolist()):
            n_tokens = int(store.lengths[i])
            np.testing.assert_allclose(states[row, :n_tokens], store.read(i, f"hidden/layer_{layer}"), atol=1e-6)
            assert not states[row, n_tokens:].any()
    assert sequence_bytes(store, config, 10) == 10 * 4 * 3 * 32


def test_eagle3_refusals(store_path: Path, layers_store: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingField, match=r"lacks hidden/layer_0; add with .*--activations hidden:layer:0`"):
        run(store_path, tmp_path / "run", max_steps=2, **EAGLE3)
    for changes, message in (
        ({"fused_layers": None}, "no three layers of a target with 3; choose them with --set drafter.fused_layers"),
        ({"fused_layers": (0, 7)}, "between 0 and 2, got 0,7"),
    ):
        with pytest.raises(DrafterError, match=message):
            run(layers_store, tmp_path / "run", max_steps=2, **EAGLE3 | changes)
    assert not (tmp_path / "run").exists()
