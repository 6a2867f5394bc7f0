"""Compiled layers train like plain ones."""

from pathlib import Path

import pytest

from moa_data.tests.kit.runs import assert_same_weights, run
from moa_data.trainer.fit import read_metrics
from moa_data.trainer.step import DrafterModule


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler itself, many
@pytest.mark.parametrize("kind", ["moa", "independent"])
def test_compiled_training_equals_eager(
    store_path: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    real = DrafterModule.on_fit_start

    def watched(module: DrafterModule) -> None:
        real(module)
        compiled.append(sum("finish" in vars(block) for block in module.drafter.modules()))

    monkeypatch.setattr(DrafterModule, "on_fit_start", watched)
    for name, compile in (("eager", False), ("compiled", True)):
        run(store_path, tmp_path / name, drafter=kind, max_steps=4, validate_every=4, log_every=1, compile=compile)
    assert compiled[0] == 0 < compiled[1]
    eager, fast = read_metrics(tmp_path / "eager"), read_metrics(tmp_path / "compiled")
    for name in ("train/loss", "train/forward_kl", "val/kl"):
        assert [v for _, v in fast[name]] == pytest.approx([v for _, v in eager[name]], rel=1e-5), name
    assert_same_weights(tmp_path / "eager", tmp_path / "compiled", rtol=1e-3, atol=2e-5)
