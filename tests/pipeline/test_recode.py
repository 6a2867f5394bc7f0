"""Recoding gives the bytes of an extraction with the new codec.

Every job works with states that are predicted from others.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import zarr

from moa_data.errors import OptionInvalid
from moa_data.moa.drafters.training import Draws
from moa_data.pipeline.add import add
from moa_data.pipeline.audit import audit
from moa_data.pipeline.config import AddConfig, ExtractConfig
from moa_data.pipeline.extract import extract, repair
from moa_data.pipeline.forwards.calibrate import sample_rows
from moa_data.pipeline.recode import recode
from moa_data.storage.codecs import coding
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import to_float32
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.disks import mounted
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.progress import progress_to
from moa_data.tests.kit.stores import flip, read_tree
from moa_data.tests.kit.variants import quick
from moa_data.trainer.batches import BatchReader
from moa_data.trainer.config import TrainConfig


@pytest.fixture(scope="module")
def chats_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same chats for all tests, so that they can share a store."""
    return write_jsonl(tmp_path_factory.mktemp("chats") / "chats.jsonl", random_chats(12))


@pytest.fixture
def lossless(config: ExtractConfig) -> Path:
    """A lossless store of the chats, which is made once. Tests must not change it."""
    folder = Path(config.dataset).with_name("lossless")
    if not folder.exists():
        extract(config.replaced(out=str(folder)))
    return folder


def data(store: Path) -> dict[str, bytes]:
    """Return the files that depend on the codec: all but the card, the texts and the bundle."""
    kept = ("parts/", "commits/", "codec/", "store.json")
    return {name: content for name, content in read_tree(store).items() if name.startswith(kept)}


def test_recoding_gives_the_bytes_of_extracting_also_after_an_interruption(
    lossless: Path, config: ExtractConfig, tmp_path: Path
) -> None:
    def interrupt(done: int, total: int, message: str) -> None:
        if "part 2" in message:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recode(lossless, "int8", tmp_path / "recoded", progress=progress_to(interrupt))
    assert not (tmp_path / "recoded" / "locks").exists()
    report = recode(lossless, "int8", tmp_path / "recoded")
    assert report.n_parts_done == report.n_parts - 1 > 0
    assert "int8" in report.describe()
    extract(config.replaced(out=str(tmp_path / "extracted"), codec="int8"))
    assert data(tmp_path / "recoded") == data(tmp_path / "extracted")
    assert verify_store(tmp_path / "recoded").ok
    with ActivationStore(tmp_path / "recoded") as store:
        assert (store.target_path / "config.json").exists()
    assert list((tmp_path / "recoded/runs").glob("*.json"))


def test_a_learned_codec_is_calibrated_once_and_kept(lossless: Path, tmp_path: Path) -> None:
    report = recode(lossless, "transform:3", tmp_path / "small")
    assert (tmp_path / "small/codec/basis.safetensors").exists()
    assert verify_store(tmp_path / "small").ok
    with ActivationStore(tmp_path / "small") as small:
        assert "basis_sha256" in small.manifest.codec
    assert error(tmp_path / "small", "kv", values(lossless, "kv")) < 0.3
    again = recode(lossless, "transform:3", tmp_path / "small")
    assert again.n_parts_done == 0
    assert again.stored_bytes == report.stored_bytes


def test_what_cannot_be_recoded_is_refused(lossless: Path, tmp_path: Path) -> None:
    recode(lossless, "int8", tmp_path / "int8")
    for source, codec, out in (
        (lossless, "zip", tmp_path / "out"),
        (lossless, "int8", lossless),
        (tmp_path / "int8", "transform:2", tmp_path / "out"),
    ):
        with pytest.raises(OptionInvalid):
            recode(source, codec, out)
    assert not (tmp_path / "out").exists()


def test_the_same_folder_at_another_path_is_refused(lossless: Path, tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "same", "--bind", str(lossless)) as same,
        raises_naming(OptionInvalid, same, "is the store that is recoded"),
    ):
        recode(lossless, "int8", same)


def test_the_sample_is_spread_over_the_plan() -> None:
    lengths = np.full(1000, 100)
    rows = sample_rows(lengths, 5_000)
    assert len(rows) == 50
    assert rows[0] == 0
    assert rows[-1] == 999
    assert max(np.diff(rows)) <= 21
    assert sample_rows(np.array([5, 6]), 1000) == [0, 1]


def test_audit_allows_a_codec_its_error_and_no_more(
    lossless: Path, target_folder: Path, tmp_path: Path
) -> None:
    recode(lossless, "int8", tmp_path / "int8")
    report = audit(tmp_path / "int8", str(target_folder), samples=2, device="cpu")
    assert report.ok, report.describe()
    kv = report.worst()["kv"]
    assert 0.003 < kv.relative_error < kv.tolerance < 0.3
    assert (
        audit(lossless, str(target_folder), samples=1, device="cpu").worst()["kv"].tolerance < 0.1
    )


@pytest.mark.parametrize("array", ["kv/codes_00", "kv/codes"])
def test_the_format_document_decodes_transform_codes(
    lossless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: str
) -> None:
    """The code of the document, without this package, decodes the same keys and values."""
    if array == "kv/codes":
        monkeypatch.setattr(coding, "MIN_GROUP_BYTES", 1)
    recode(lossless, "transform:3@all", tmp_path / "small")
    text = (Path(__file__).parents[2] / "docs" / "format-codecs.md").read_text(encoding="utf-8")
    block = next(
        part.split("```")[0] for part in text.split("```python")[1:] if "def decode_kv" in part
    )
    scope: dict[str, Any] = {}
    exec(block, scope)
    basis = safetensors.numpy.load_file(tmp_path / "small" / "codec" / "basis.safetensors")
    with ActivationStore(tmp_path / "small") as store:
        n_layers, n_kv_heads, _, head_dim = store.fields["kv"].token_shape
        for i in range(0, len(store), 4):
            row = {
                name: store.sequences[name][i].as_py()
                for name in ("part", "first_token", "n_tokens")
            }
            arrays = zarr.open_group(tmp_path / "small" / "parts", mode="r")
            first = row["part"] * arrays[array].attrs["part_rows"] + row["first_token"]
            got = scope["decode_kv"](
                arrays, basis, first, row["n_tokens"], (n_layers, n_kv_heads, head_dim)
            )
            kv = to_float32(store.read(i, "kv"), "bfloat16")
            for which, values in enumerate(got):
                np.testing.assert_allclose(values, kv[:, :, :, which], rtol=0.01, atol=0.02)


SOURCES = {
    "transform:4,hidden=4,tokens,joint": {"hidden/layer_1": ("hidden/layer_0",),
                                          "hidden/last": ("hidden/layer_1",)},
    "transform:4,hidden=4,tokens,from-kv,joint": {
        "hidden/layer_0": ("kv",), "hidden/layer_1": ("kv", "hidden/layer_0"),
        "hidden/last": ("kv", "hidden/layer_1"),
    },
}  # fmt: skip
"""Codec -> the fields that each hidden state is predicted from."""
HIDDEN = ("hidden/last", "hidden/layer_0", "hidden/layer_1")


@pytest.fixture(
    scope="module", params=quick(SOURCES, ["transform:4,hidden=4,tokens,from-kv,joint"])
)
def joint_once(
    request: pytest.FixtureRequest, target_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> ExtractConfig:
    """An extraction with predicted states. Tests must not change its store."""
    folder = tmp_path_factory.mktemp("joint")
    config = ExtractConfig.of(
        model=str(target_folder), out=str(folder / "store"), max_length=128, device="cpu",
        dataset=str(write_jsonl(folder / "chats.jsonl", random_chats(8))), target_layers=1,
        part_tokens=256, batch_tokens=256, compute_dtype="float32", codec=request.param,
        activations=("kv", "hidden:last", "hidden:layer:0", "hidden:layer:1"),
    )  # fmt: skip
    extract(config)
    return config


@pytest.fixture
def joint(joint_once: ExtractConfig, tmp_path: Path) -> ExtractConfig:
    """The same extraction with a copy of the store that a test may change."""
    shutil.copytree(joint_once.out, tmp_path / "store")
    return joint_once.replaced(out=str(tmp_path / "store"))


def values(path: Path, field: str) -> np.ndarray:
    """Return a field of all sequences of a store, in float32."""
    with ActivationStore(path) as store:
        return np.concatenate(
            [to_float32(store.read(i, field), "bfloat16") for i in range(len(store))]
        )


def error(path: Path, field: str, exact: np.ndarray) -> float:
    """Return the relative error of a field of a store, compared with the exact values."""
    return float(np.linalg.norm(values(path, field) - exact) / np.linalg.norm(exact))


def test_extracting_recoding_and_repairing(joint: ExtractConfig, tmp_path: Path) -> None:
    extract(joint.replaced(out=str(tmp_path / "lossless"), codec="lossless"))
    recode(tmp_path / "lossless", joint.storage.codec, tmp_path / "recoded")
    exact = {field: values(tmp_path / "lossless", field) for field in ("kv", *HIDDEN)}
    for store in (Path(joint.out), tmp_path / "recoded"):
        assert verify_store(store).ok
        assert max(error(store, field, exact[field]) for field in HIDDEN) < 0.12
        assert 0.001 < error(store, "kv", exact["kv"]) < 0.02
        with ActivationStore(store) as opened:
            assert opened.codec.sources == SOURCES[joint.storage.codec]
        report = audit(store, joint.model, samples=1, device="cpu")
        assert report.ok, report.describe()
    whole = read_tree(joint.out)
    flip(next(Path(joint.out).glob("parts/hidden/layer_0/*/c.1.*")))
    assert [damage.part for damage in verify_store(joint.out).damages] == [1]
    assert repair(joint.out, joint.model).n_parts_done == 1
    assert read_tree(joint.out) == whole


@pytest.mark.slow
def test_a_state_that_is_added_leaves_the_others_as_they_are(joint: ExtractConfig) -> None:
    before = read_tree(joint.out)
    with ActivationStore(joint.out) as store:
        states = {name: store.read(3, name) for name in HIDDEN}
    add(
        AddConfig.of(
            store=joint.out, model=joint.model, activations=("hidden:layer:2",), device="cpu"
        )
    )
    after = read_tree(joint.out)
    assert all(
        after[name] == content for name, content in before.items() if name.startswith("parts/")
    )
    assert verify_store(joint.out).ok
    with ActivationStore(joint.out) as store:
        assert "hidden/layer_2" not in store.codec.sources
        assert all(np.array_equal(store.read(3, name), values) for name, values in states.items())


@pytest.mark.parametrize("fields", [(0, 1), (1,)])
def test_training_reads_what_the_store_gives(
    joint_once: ExtractConfig, fields: tuple[int, ...]
) -> None:
    settings = TrainConfig.of(
        store=joint_once.out,
        out="",
        batch_size=2,
        reader_threads=1,
        drafter="dspark",
        fused_layers=fields,
        block_layers=1,
    )
    with ActivationStore(joint_once.out) as store:
        draws = Draws(None, torch.zeros(2, dtype=torch.bool))
        batch = BatchReader(store, settings, torch.device("meta")).batch(np.array([4, 1]), draws)
        for item in batch.stored:
            name = item.name
            decoded = item.decode(batch.rows, batch.inputs.tokens, batch.lengths)
            for row, i in enumerate((4, 1)):
                stored = torch.from_numpy(store.read(i, name)).view(torch.bfloat16)
                own = decoded[row, : len(stored)]
                torch.testing.assert_close(own, stored, rtol=2**-6, atol=1e-3, msg=f"{name} of {i}")
    assert len(batch.stored) == 1 + len(fields)
