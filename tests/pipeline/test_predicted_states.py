"""Predicted hidden states from the target to training: extracted, recoded, audited, mended, added to and read."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moa_data.pipeline.add import add
from moa_data.pipeline.audit import audit
from moa_data.pipeline.config import AddConfig, ExtractConfig
from moa_data.pipeline.extract import extract, repair
from moa_data.pipeline.recode import recode
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import to_float32
from moa_data.storage.write.repair import plan_repair
from moa_data.tests.kit.stores import flip, read_tree
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.data import BatchReader

SOURCES = {
    "transform:4,hidden=4,tokens,joint": {"hidden/layer_1": ("hidden/layer_0",), "hidden/last": ("hidden/layer_1",)},
    "transform:4,hidden=4,tokens,from-kv,joint": {
        "hidden/layer_0": ("kv",), "hidden/layer_1": ("kv", "hidden/layer_0"), "hidden/last": ("kv", "hidden/layer_1"),
    },
}  # fmt: skip
"""Codec -> what its hidden states are predicted from."""
HIDDEN = ("hidden/last", "hidden/layer_0", "hidden/layer_1")


@pytest.fixture(params=SOURCES)
def joint(config: ExtractConfig, request: pytest.FixtureRequest) -> ExtractConfig:
    activations = ("kv", "hidden:last", "hidden:layer:0", "hidden:layer:1")
    config = config.replaced(activations=activations, codec=request.param)
    extract(config)
    return config


def error(one: Path, exact: Path, field: str) -> float:
    """The relative error of a field of a store beside a lossless one."""
    with ActivationStore(one) as store, ActivationStore(exact) as lossless:
        found, wanted = (
            np.concatenate([to_float32(own.read(i, field), "bfloat16") for i in range(len(own))])
            for own in (store, lossless)
        )
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def test_extracting_recoding_and_repairing(joint: ExtractConfig, tmp_path: Path) -> None:
    extract(joint.replaced(out=str(tmp_path / "lossless"), codec="lossless"))
    recode(tmp_path / "lossless", joint.storage.codec, tmp_path / "recoded")
    for store in (Path(joint.out), tmp_path / "recoded"):
        assert verify_store(store).ok
        assert max(error(store, tmp_path / "lossless", field) for field in HIDDEN) < 0.12
        assert 0.001 < error(store, tmp_path / "lossless", "kv") < 0.02
        with ActivationStore(store) as opened:
            assert opened.codec.sources == SOURCES[joint.storage.codec]
        report = audit(store, joint.model, samples=2, device="cpu")
        assert report.ok, report.describe()
    whole = read_tree(joint.out)
    flip(next(Path(joint.out).glob("parts/hidden/layer_0/*/c.1.*")))
    plan = plan_repair(joint.out)
    assert plan.parts == (1,)
    assert repair(plan, joint.model).n_parts_done == 1
    assert read_tree(joint.out) == whole


def test_a_state_that_is_added_leaves_the_others_as_they_are(joint: ExtractConfig) -> None:
    before = read_tree(joint.out)
    with ActivationStore(joint.out) as store:
        states = {name: store.read(3, name) for name in HIDDEN}
    add(AddConfig.of(store=joint.out, model=joint.model, activations=("hidden:layer:2",), device="cpu"))
    after = read_tree(joint.out)
    assert all(after[name] == content for name, content in before.items() if name.startswith("parts/"))
    assert verify_store(joint.out).ok
    with ActivationStore(joint.out) as store:
        assert "hidden/layer_2" not in store.codec.sources
        assert all(np.array_equal(store.read(3, name), values) for name, values in states.items())


@pytest.mark.parametrize("fields", [(0, 1), (1,)])
def test_training_reads_what_the_store_gives(joint: ExtractConfig, fields: tuple[int, ...]) -> None:
    settings = TrainConfig.of(
        store=joint.out, out="", batch_size=2, reader_threads=1, drafter="dspark", fused_layers=fields, block_layers=1
    )
    with ActivationStore(joint.out) as store:
        inputs, encoded = BatchReader(store, settings, torch.device("cpu")).read(
            np.array([4, 1]), store.lengths[[4, 1]]
        )
        for attribute, field in encoded.items():
            name = field.codec.spec.name
            decoded = field.decode(inputs.tokens)
            for row, i in enumerate((4, 1)):
                stored = torch.from_numpy(store.read(i, name)).view(torch.bfloat16)
                own = decoded[row, : len(stored)]
                torch.testing.assert_close(own, stored, rtol=2**-6, atol=1e-3, msg=f"{attribute} of {i}")
    assert len(encoded) == 1 + len(fields)
