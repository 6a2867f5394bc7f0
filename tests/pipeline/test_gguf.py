"""A store made from a GGUF file equals that of the model's folder, and belongs to that file."""

import hashlib
import shutil
from pathlib import Path

import pytest

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from moa_data.errors import StoreMismatch
from moa_data.moa.targets.live import resolve_model_folder
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.gguf_files import write_gguf


@pytest.fixture
def gguf_config(tmp_path: Path) -> ExtractConfig:
    """An extraction from a GGUF file."""
    write_gguf(tmp_path / "tiny.gguf", {"token_embd.weight": "Q8_0"})
    chats = write_jsonl(tmp_path / "chats.jsonl", random_chats(4))
    return ExtractConfig.of(
        model=str(tmp_path / "tiny.gguf"),
        dataset=str(chats),
        out=str(tmp_path / "store"),
        target_layers=1,
    )


def test_the_store_is_that_of_the_folder(tmp_path: Path, gguf_config: ExtractConfig) -> None:
    extract(gguf_config)
    folder = shutil.copytree(resolve_model_folder(gguf_config.model), tmp_path / "folder")
    extract(gguf_config.replaced(model=str(folder), out=str(tmp_path / "other")))
    with ActivationStore(gguf_config.out) as store, ActivationStore(tmp_path / "other") as other:
        assert store.fields == other.fields
        for index in range(len(store)):
            for field in store.fields:
                assert store.read(index, field).tobytes() == other.read(index, field).tobytes()
        identities, others = dict(store.manifest.identities), dict(other.manifest.identities)
        assert "sources" not in store.manifest.extraction
    digest = hashlib.sha256(Path(gguf_config.model).read_bytes()).hexdigest()
    assert identities.pop("target.weights_sha256") == digest != others.pop("target.weights_sha256")
    del others["target.config_sha256"]
    assert identities == others


def test_it_goes_on_with_the_same_file_alone(tmp_path: Path, gguf_config: ExtractConfig) -> None:
    done = extract(gguf_config)
    renamed = shutil.copy(gguf_config.model, tmp_path / "renamed.gguf")
    assert extract(gguf_config.replaced(model=str(renamed))).n_parts_done == 0 < done.n_parts_done
    write_gguf(tmp_path / "finer.gguf", {"token_embd.weight": "BF16"})
    with pytest.raises(StoreMismatch) as refused:
        extract(gguf_config.replaced(model=str(tmp_path / "finer.gguf")))
    assert "identities.target.weights_sha256" in refused.value.changes
