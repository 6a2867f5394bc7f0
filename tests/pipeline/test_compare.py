"""`compare` reports how two stores differ: errors by layer, and next-token distributions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa_data.errors import OptionInvalid, StoreMismatch
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.pipeline.compare import KEYS, VALUES, compare, continued_states, layer_caches
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.recode import recode
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import summarize_store
from moa_data.storage.schema import HIDDEN_LAST, TOKENS, to_float32
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.command import run
from moa_data.tests.kit.models import write_target


def write_store(folder: Path, target: Path, seed: int = 0) -> Path:
    dataset = write_jsonl(folder / "chats.jsonl", random_chats(10, seed=seed))
    extract(
        ExtractConfig.of(
            model=str(target),
            dataset=str(dataset),
            out=str(folder / "store"),
            max_length=128,
            device="cpu",
            compute_dtype="float32",
        )
    )
    return folder / "store"


@pytest.fixture(scope="module")
def lossless(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("lossless"), target_folder)


@pytest.fixture(scope="module")
def small(lossless: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("small") / "store"
    recode(lossless, "transform:2,hidden=2", out)
    return out


def read(store: Path, field: str) -> np.ndarray:
    with ActivationStore(store) as opened:
        values = [to_float32(opened.read(i, field), "bfloat16") for i in range(len(opened))]
    return np.concatenate(values)


def test_a_store_does_not_differ_from_itself(lossless: Path, target_folder: Path) -> None:
    found = compare(lossless, lossless, str(target_folder), samples=3, device="cpu")
    assert found.n_samples == 3
    assert set(found.errors) == {KEYS, VALUES, HIDDEN_LAST}
    for errors in found.errors.values():
        assert errors.total.relative == 0
        assert not any(layer.relative for layer in errors.by_layer.values())
    for divergence in (found.teacher, found.continued):
        assert divergence is not None
        assert divergence.kl == pytest.approx(0, abs=1e-12)
        assert divergence.top1_agreement == 1
        assert divergence.relative == 0


def test_errors_are_those_of_the_stored_values(lossless: Path, small: Path) -> None:
    found = compare(lossless, small, samples=100)
    exact, coded = read(lossless, "kv"), read(small, "kv")
    assert found.n_tokens == len(exact)
    for name, side in ((KEYS, 0), (VALUES, 1)):
        wrong = np.square(coded[:, :, :, side] - exact[:, :, :, side], dtype=np.float64).sum(
            (0, 2, 3)
        )
        energy = np.square(exact[:, :, :, side], dtype=np.float64).sum((0, 2, 3))
        by_layer = np.sqrt(wrong / energy)
        layers = found.errors[name].by_layer.values()
        assert [layer.relative for layer in layers] == pytest.approx(by_layer)
        assert found.errors[name].total.relative == pytest.approx(
            np.sqrt(wrong.sum() / energy.sum())
        )
        assert found.errors[name].worst_layer == by_layer.argmax()
    summary = summarize_store(small)
    assert found.bytes_per_token == summary.bytes_per_token
    assert found.times_smaller == pytest.approx(summary.raw_bytes / summary.stored_bytes)
    assert found.continued is None


def test_the_teachers_divergence_is_that_of_the_stored_states(lossless: Path, small: Path) -> None:
    found = compare(lossless, small, samples=100)
    frozen = FrozenTarget.load(lossless / "target")
    logits = [
        frozen.logits(torch.from_numpy(read(store, HIDDEN_LAST))).double()
        for store in (lossless, small)
    ]
    log_p, log_q = (own.log_softmax(-1) for own in logits)
    assert found.teacher is not None
    # A store this small is compared at every position.
    assert found.teacher.n_positions == found.n_tokens
    assert found.teacher.kl == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))
    agreement = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean()
    assert found.teacher.top1_agreement == pytest.approx(float(agreement))
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert found.teacher.relative == pytest.approx(float(error))


def test_the_target_continues_from_stored_keys_and_values(
    lossless: Path, target_folder: Path
) -> None:
    target = Target.load(str(target_folder), device="cpu")
    with ActivationStore(lossless) as store:
        kv = to_float32(store.read(2, "kv"), "bfloat16")
        caches = layer_caches(store.fields, {"kv": kv})
        states = continued_states(target, store.read(2, TOKENS), caches, len(kv) // 2)
        expected = torch.from_numpy(to_float32(store.read(2, HIDDEN_LAST), "bfloat16"))[
            len(kv) // 2 :
        ]
    # Keys and values are rounded to bfloat16.
    torch.testing.assert_close(states, expected, atol=0.05, rtol=0.02)


def test_worse_keys_and_values_change_what_the_target_continues_with(
    lossless: Path, small: Path, target_folder: Path, tmp_path: Path
) -> None:
    recode(lossless, "transform:0.3,hidden=2", tmp_path / "worse")
    found = [
        compare(lossless, store, str(target_folder), samples=4)
        for store in (small, tmp_path / "worse")
    ]
    first, second = (one.continued for one in found)
    assert first is not None
    assert second is not None
    assert 0 < first.kl < second.kl
    assert found[0].errors[KEYS].total.relative < found[1].errors[KEYS].total.relative


def test_stores_that_cannot_be_compared_are_refused(
    lossless: Path, target_folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other_target = write_target(tmp_path / "target", seed=1)
    (tmp_path / "chats").mkdir()
    (tmp_path / "targets").mkdir()
    other_chats = write_store(tmp_path / "chats", target_folder, seed=7)
    of_another = write_store(tmp_path / "targets", other_target)
    for store in (other_chats, of_another):
        with pytest.raises(OptionInvalid):
            compare(lossless, store)
    with pytest.raises(StoreMismatch):
        compare(lossless, lossless, str(other_target))


def test_the_command_and_recode_print_the_same_figures(lossless: Path, tmp_path: Path) -> None:
    recoded = run("recode", lossless, "--codec", "int8", "--out", tmp_path / "int8")
    compared: Any = run("compare", lossless, tmp_path / "int8")
    assert compared.exit_code == 0, compared.stderr
    figures = [
        line for line in compared.stdout.splitlines() if line.startswith(("errors", "teacher"))
    ]
    assert len(figures) == 2
    assert set(figures) <= set(recoded.stdout.splitlines())
