"""Training from a store in a bucket equals training from the same store on a disk.

The second epoch sends no requests to the bucket.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from moa_data.moa.formats.layout import EMBEDDINGS
from moa_data.storage.object_store import ObjectStore
from moa_data.tests.kit.object_stores import copy_up
from moa_data.tests.kit.training import build_store
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.export import find_target
from moa_data.trainer.fit import train


def test_training_from_a_bucket_with_a_cache(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = build_store(tmp_path / "store", ("hidden:last",), n_sequences=12)
    remote = copy_up(local, f"{s3}/store")
    asked: list[tuple[str, int, int]] = []
    real = ObjectStore.read_ranges

    def noting(bucket: ObjectStore, ranges: Sequence[tuple[str, int, int]]) -> list[memoryview]:
        asked.extend(part for part in ranges if part[0].startswith("parts/"))
        return real(bucket, ranges)

    monkeypatch.setattr(ObjectStore, "read_ranges", noting)

    def run(name: str, store: str, cache: Path | None) -> dict[str, bytes]:
        train(
            TrainConfig.of(
                store=store, out=str(tmp_path / name), drafter="eagle", epochs=1, batch_size=4,
                micro_batch_size=4,
                validation_fraction=0.0, accelerator="cpu", seed=3,
                cache_dir=None if cache is None else str(cache), cache_gb=0.1,
            )
        )  # fmt: skip
        weights = load_file(next((tmp_path / name / "drafter").glob("*.safetensors")))
        return {key: value.tobytes() for key, value in weights.items()}

    expected = run("disk", str(local), None)
    assert not asked
    assert run("first", str(remote), tmp_path / "cache") == expected
    assert asked
    asked.clear()
    assert run("second", str(remote), tmp_path / "cache") == expected
    assert not asked
    _, _, tensors = find_target(None, tmp_path / "second" / "drafter", (EMBEDDINGS,))
    assert tensors[EMBEDDINGS].shape == (61, 32)
