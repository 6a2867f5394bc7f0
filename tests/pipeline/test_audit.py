"""An audit passes with the target that the store was made from, and finds changed values."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa_data.errors import StoreMismatch
from moa_data.pipeline.audit import AuditRow, audit
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.differences import LayerDifferences
from moa_data.pipeline.extract import extract
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.progress import progress_to
from moa_data.tests.kit.stores import flip


@pytest.fixture(scope="module")
def store(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    dataset = write_jsonl(folder / "chats.jsonl", random_chats(12))
    out = folder / "store"
    extract(
        ExtractConfig.of(
            model=str(target_folder),
            dataset=str(dataset),
            out=str(out),
            max_length=128,
            target_layers=1,
            device="cpu",
        )
    )
    return out


def test_a_fresh_store_passes(store: Path, target_folder: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    report = audit(
        store, str(target_folder), 5, 0, "cpu", progress_to(lambda *call: calls.append(call))
    )
    assert report.ok, report.describe()
    assert report.n_samples == 5
    assert list(report.worst()) == [
        "tokens",
        "response_mask",
        "kv",
        "hidden/last",
        "logits",
        "hidden/layer_1",
    ]
    assert calls[-1] == (5, 5, "audit")
    assert 0 < report.worst()["kv"].relative_error < 5e-3  # bfloat16 rounds to 2^-9
    assert {row.index for row in report.rows} != {
        row.index for row in audit(store, str(target_folder), 5, 1, "cpu").rows
    }
    assert "tokenised again" in report.worst()["tokens"].detail
    assert report.worst()["logits"].relative_error < 1e-2


def test_changed_values_are_found(
    store: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, field = ActivationStore.read, ""

    def changed(self: Any, i: int, name: str, *args: Any, **kwargs: Any) -> np.ndarray:
        values: np.ndarray = read(self, i, name, *args, **kwargs)
        if name == field:
            values = values.copy()
            values[-1] = 0x4100 if values.dtype == np.uint16 else 1 - values[-1]
        return values

    monkeypatch.setattr(ActivationStore, "read", changed)
    for field in ("tokens", "response_mask", "kv", "hidden/last", "hidden/layer_1"):
        report = audit(store, str(target_folder), 1, 0, "cpu")
        assert not report.ok
        assert not report.worst()[field].ok
        assert f"{field:16} DIFFERS" in report.describe()
        if field in ("tokens", "response_mask"):
            detail = report.worst()[field].detail
            assert "content hash differs" in detail
            n_tokens = int(detail.split(" tokens stored")[0].split()[-1])
            assert f"{field} differs by a relative error of inf ({detail})" in report.describe()
            assert detail.endswith(f"{n_tokens} now, {1 / n_tokens:.1%} differ")


def test_another_target_is_refused_and_without_the_dataset_the_content_hash_is_checked(
    store: Path, target_folder: Path, model: Path, tmp_path: Path
) -> None:
    flip(model / "model.safetensors", -1)
    with pytest.raises(StoreMismatch) as caught:
        audit(store, str(model), 2, 0, "cpu")
    assert "identities.target.weights_sha256" in caught.value.changes
    assert "`model`" in caught.value.hint
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    for run in (copy / "runs").iterdir():
        run.unlink()
    report = audit(copy, str(target_folder), 2, 0, "cpu")
    assert report.ok
    assert report.worst()["tokens"].detail == "content hash matches"
    assert "content hash only" in report.note


def test_values_that_are_not_finite_never_pass() -> None:
    layers = LayerDifferences()
    layers.add(0, torch.zeros(1), torch.zeros(1))
    layers.add(1, torch.zeros(1), torch.tensor([float("nan")]))
    layers.add(2, torch.ones(1), torch.ones(1))
    assert layers.worst_layer == 1
    assert not AuditRow(0, "id", "kv", layers.total.largest, layers.worst, 0.1).ok
