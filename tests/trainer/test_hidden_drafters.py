"""Runs with Medusa and the independent drafter: the last hidden state alone, exact resume, and clear refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.registry import DRAFTERS
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.targets.live import Target
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.training import build_store, tiny_model
from moa_data.trainer.batch_reader import BatchReader
from moa_data.trainer.curves import read_metrics
from moa_data.trainer.errors import MissingField, TrainingError

from .test_run import last_state, run, settings

MEDUSA: dict[str, Any] = {"drafter": "medusa", "medusa_heads": 3}
INDEPENDENT: dict[str, Any] = {"drafter": "independent", "independent_width": 24, "independent_layers": 1}


@pytest.fixture(scope="module")
def hidden_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(tmp_path_factory.mktemp("hidden") / "store", activations=("hidden:last",))


@pytest.mark.parametrize("own", [MEDUSA, INDEPENDENT], ids=lambda own: own["drafter"])
def test_it_learns_resumes_and_decodes(hidden_store: Path, tmp_path: Path, own: Any) -> None:
    own = own | {"optimizer": "muon", "matrix_learning_rate": 5e-3}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(hidden_store, whole, max_steps=40, validate_every=5, **own)
    run(hidden_store, parts, max_steps=40, validate_every=5, stop_after_steps=16, **own)
    report = run(hidden_store, parts, max_steps=40, validate_every=5, resume=True, **own)
    for name, value in last_state(whole)["state_dict"].items():
        assert torch.equal(value, last_state(parts)["state_dict"][name]), name
    metrics = {name: [value for _, value in points] for name, points in read_metrics(parts).items()}
    assert metrics["val/kl"][-1] < 0.85 * metrics["val/kl"][0]
    assert "train/feature_loss" not in metrics
    assert report.best_expected_acceptance_length == pytest.approx(max(metrics["val/expected_acceptance_length"]))
    drafter = load_drafter(parts)
    assert isinstance(drafter, DRAFTERS[own["drafter"]])
    assert drafter.config.target == {"weights_sha256": "ab" * 32}
    assert report.n_parameters == sum(value.numel() for value in drafter.state_dict().values())
    target, prompts = Target(tiny_model()), [[1, 2, 3, 4], [10, 12, 14], [5]]
    for tree in (TreeShape(3), TreeShape(3, 2, 6)):
        session = DrafterProposer(target, drafter)
        fast = generate_batch(target, prompts, max_new_tokens=12, proposer=session, tree=tree)
        for prompt, got in zip(prompts, fast, strict=True):
            assert got.tokens == plain_generate(target, prompt, max_new_tokens=12).tokens


@pytest.mark.parametrize("own", [MEDUSA, INDEPENDENT], ids=lambda own: own["drafter"])
def test_in_parts_and_in_low_precision(hidden_store: Path, tmp_path: Path, own: Any) -> None:
    for name, changes in (
        ("one", {}),
        ("parts", {"micro_batch_size": 2}),
        ("mixed", {"precision": "bf16-mixed"}),
    ):
        run(hidden_store, tmp_path / name, max_steps=4, validate_every=4, log_every=1, **own | changes)
    for name, value in last_state(tmp_path / "one")["state_dict"].items():
        torch.testing.assert_close(value, last_state(tmp_path / "parts")["state_dict"][name], rtol=1e-3, atol=2e-5)
    for name in ("train/loss", "val/kl"):
        low, full = (read_metrics(tmp_path / run_name)[name] for run_name in ("mixed", "one"))
        assert [v for _, v in low] == pytest.approx([v for _, v in full], rel=0.03), name


@pytest.mark.parametrize("kind", ["medusa", "independent"])
def test_only_the_last_hidden_state_is_read(store_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    store = ActivationStore(store_path)
    config = settings(store_path, drafter=kind)
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


def test_refusals(store_path: Path, hidden_store: Path, tmp_path: Path) -> None:
    bare = build_store(tmp_path / "bare", activations=("kv",), n_sequences=20)
    for own in (MEDUSA, INDEPENDENT):
        with pytest.raises(MissingField, match=r"lacks hidden/last; add with .*--activations hidden:last`"):
            run(bare, tmp_path / "run", max_steps=2, **own)
    with pytest.raises(TrainingError, match="asks validation for more levels than the 2 that this medusa"):
        run(hidden_store, tmp_path / "run", max_steps=2, **MEDUSA | {"medusa_heads": 2})
    assert not (tmp_path / "run").exists()
