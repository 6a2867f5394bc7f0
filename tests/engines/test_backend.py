"""speculators' trainer reads a store: its batches equal those from its own files."""

import os
import subprocess
from pathlib import Path

import pytest

from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.exchange.config import ExportConfig
from moa_data.pipeline.exchange.transfer import export_store
from moa_data.pipeline.extract import extract
from moa_data.pipeline.recode import recode
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.models import write_target

PYTHON = Path(os.environ.get("MOA_DATA_SPECULATORS", "none"))
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        not PYTHON.is_file(), reason="MOA_DATA_SPECULATORS names no Python with speculators"
    ),
]
LAYERS = (1, 3, 4, 7)


def run(*words: object) -> str:
    done = subprocess.run(
        [str(word) for word in (PYTHON, *words)], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_batches_from_a_store_are_those_from_its_files(tmp_path: Path) -> None:
    """Batches are bitwise equal from a lossless store.

    From a compressed store their error is within what the codec states (0.6 %).
    """
    chats = write_jsonl(tmp_path / "chats.jsonl", random_chats(20))
    model = write_target(tmp_path / "model", num_hidden_layers=8)
    activations = ("hidden:last", *(f"hidden:layer:{layer}" for layer in LAYERS))
    store, small = tmp_path / "store", tmp_path / "int8"
    extract(ExtractConfig.of(
        model=str(model), dataset=str(chats), out=str(store), part_tokens=512, device="cpu",
        activations=activations,
    ))  # fmt: skip
    recode(store, "int8", small)
    export = ExportConfig(store=str(store), format="speculators", out=str(tmp_path / "files"))
    export_store(export)
    rows = export.model_copy(update={"out": str(tmp_path / "rows"), "rows_only": True})
    assert "without hidden states" in export_store(rows)
    assert not (tmp_path / "rows" / "hidden_states").exists()
    side = Path(__file__).with_name("backend_side.py")
    n = len(ActivationStore(store))
    for read, most in ((store, 0), (small, 0.01)):
        assert int(run(side, tmp_path / "rows", read, tmp_path / "files", most)) == n


def test_its_command_line_knows_the_backend() -> None:
    shown = run("-m", "moa_data.pipeline.exchange.speculators_backend", "train", "--help")
    assert "--moa-store" in shown
