"""After a kill at any moment a checkpoint file is the old one or the new one.

A run uses only its own files.
"""

import errno
import io
import os
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moa_data import files
from moa_data.errors import DrafterError, StorageUnavailable
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.targets import model_files as tensor_file
from moa_data.tests.kit.drafters import build
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.runs import run
from moa_data.tests.kit.training import tiny_model
from moa_data.trainer import checkpoints
from moa_data.trainer.checkpoints import CheckpointFiles, read_checkpoint, remove_leftovers

SETTINGS: dict[str, Any] = {"max_steps": 4, "optimizer": "muon", "checkpoint_every": 2}


@pytest.fixture(scope="module")
def trained(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped half way."""
    out = tmp_path_factory.mktemp("checkpoints") / "run"
    run(store_path, out, **SETTINGS, stop_after_steps=2)
    return out


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Any:
    return shutil.copytree(trained, tmp_path / "run")


def last_of(out: Any) -> Any:
    return out / "checkpoints" / "last.ckpt"


def test_a_checkpoint_gives_back_what_was_saved(tmp_path: Path) -> None:
    state: dict[Any, Any] = {
        "numbers": [1, -2.5, float("inf"), True, None, 10**30, 1e-45],
        "pair": (0.9, "ä"),
        3: {"empty": {}, "text": ""},
        "weights": [
            torch.arange(6).reshape(2, 3),
            torch.randn(3, 2).T,
            torch.tensor(2.0),
            torch.zeros(0, 4),
        ],
        "others": {
            t: torch.ones(3).to(getattr(torch, t))
            for t in ("bfloat16", "float16", "float64", "int8", "bool")
        },
    }
    file = tmp_path / "checkpoints" / "last.ckpt"
    CheckpointFiles().save_checkpoint(state, file)
    mask = os.umask(0)
    os.umask(mask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask
    found: dict[Any, Any] = CheckpointFiles().load_checkpoint(file)
    assert (found["numbers"], found["pair"], found[3]) == (
        state["numbers"],
        state["pair"],
        state[3],
    )
    for name in ("weights", "others"):
        # The dtypes must be equal too.
        torch.testing.assert_close(found[name], state[name], rtol=0, atol=0)


@pytest.mark.parametrize("was_there", [True, False])
def test_before_each_change_of_a_save_all_is_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_there: bool
) -> None:
    """A copy made at such a moment is the state after a kill.

    The moments include the middle of each write.
    """
    out, drafter = tmp_path / "out", build("eagle", tiny_model())
    seen: list[Any] = []
    is_looking: list[bool] = []
    out.mkdir()

    def save(value: Any) -> None:
        for weight in drafter.parameters():
            weight.data.fill_(value)
        CheckpointFiles().save_checkpoint({"weights": torch.full((4, 5), value)}, last_of(out))
        checkpoints.write_drafter(drafter, out / "drafter")

    def look() -> None:
        seen.append(_after_a_kill(shutil.copytree(out, tmp_path / str(len(seen)))))

    def looking(real: Any, *arguments: Any, **options: Any) -> Any:
        if not is_looking:
            is_looking.append(True)  # The check copies and deletes files with the same calls.
            look()
            is_looking.clear()
        return real(*arguments, **options)

    class Torn(io.FileIO):
        def write(self, data: Any) -> int:
            half = len(data) // 2
            return super().write(data[:half]) + int(looking(super().write, data[half:]))

    if was_there:
        save(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "open", lambda path, mode: Torn(path, mode), raising=False)
        for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
            real = getattr(os, name)
            patch.setattr(os, name, partial(looking, real))
        save(2.0)
    look()
    old = 1.0 if was_there else None
    assert list(dict.fromkeys(seen)) == [(old, old), (2.0, old), (2.0, 2.0)]
    assert len(seen) > 20


def _after_a_kill(out: Any) -> Any:
    """Return the single value of all weights in the checkpoint, and of those in the drafter.

    A value is None if the file does not exist.
    """
    remove_leftovers(out)
    assert {path.name for path in out.rglob("*")} <= {
        "checkpoints", "last.ckpt", "drafter", "drafter.json", "drafter.safetensors"
    }  # fmt: skip
    values: list[Any] = [[None], [None]]
    if last_of(out).exists():
        values[0] = read_checkpoint(last_of(out))["weights"].unique().tolist()
    if (out / "drafter").exists():
        values[1] = (
            torch.cat([weight.flatten() for weight in load_drafter(out).parameters()])
            .unique()
            .tolist()
        )
    [[weights], [exported]] = values
    return weights, exported


def test_a_full_disk_keeps_the_checkpoint_before(
    copied: Any, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = last_of(copied).read_bytes()

    def full(path: Path, *rest: Any) -> None:
        Path(path).write_bytes(b"begun")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "write_tensors", full)
    with pytest.raises(StorageUnavailable):
        run(store_path, copied, **SETTINGS, resume=True)
    assert last_of(copied).read_bytes() == before
    assert not list(copied.rglob("*.partial"))


@pytest.mark.draws
@pytest.mark.parametrize("name", ["curves.png", "report.json"])
def test_a_full_disk_after_a_checkpoint_advises_to_resume(
    copied: Any, store_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write = files.write_file

    def full(path: Path, data: bytes) -> None:
        if path.name.startswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(files, "write_file", full)
    with raises_naming(StorageUnavailable, name, "`resume`"):
        run(store_path, copied, **SETTINGS, resume=True)


def test_leftovers_of_a_kill_are_removed(copied: Any, store_path: Path) -> None:
    (copied / "checkpoints" / "last.ckpt.partial").write_bytes(b"torn")
    (copied / "drafter.partial").mkdir()
    (copied / "drafter.partial" / "drafter.json").write_text("{")
    (copied / "report.json.partial").write_text("{")
    run(store_path, copied, **SETTINGS, resume=True)
    assert not list(copied.rglob("*.partial"))


def header(text: Any, length: Any = None) -> Any:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


HOSTILE: dict[str, Any] = {
    "nothing": b"",
    "noise": bytes(range(256)) * 50,
    "pickle": pickle.dumps({"state_dict": {}}),
    "endless header": header(b"{}", 2**63 - 1),
    "no state": header(b'{"__metadata__":{"format":"pt"}}'),
    "deep": header(b'{"__metadata__":{"state":"' + b"[" * 200_000 + b'"}}'),
    "a number": header(b'{"__metadata__":{"state":"3"}}'),
    "absent tensors": header(
        b'{"__metadata__":{"state":"{\\"dict\\":[[1,{\\"tensor\\":\\"b\\"}]]}"}}'
    ),
}


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "last.ckpt"
    for content in HOSTILE.values():
        file.write_bytes(content)
        with pytest.raises(DrafterError):
            read_checkpoint(file)
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        file.rmdir() if file.is_dir() else file.unlink()
        make(file)
        with pytest.raises(DrafterError):
            read_checkpoint(file)


WEIGHT = "drafter.self_attention.self_attn.q_proj.weight"
STRANGE: dict[str, Any] = {
    "a weight is missing": lambda state: state["state_dict"].pop(WEIGHT),
    "another shape": lambda state: state["state_dict"].update({WEIGHT: torch.zeros(2, 2)}),
    "no optimizer": lambda state: state.pop("optimizer_states"),
    "another optimizer": lambda state: state["optimizer_states"][0].update(param_groups=[]),
    "a step that is none": lambda state: state.update(global_step="2"),
    "no counts": lambda state: state["loops"].update(fit_loop=[]),
}


@pytest.mark.parametrize("change", STRANGE.values(), ids=STRANGE)
def test_another_runs_checkpoint_is_refused(copied: Any, store_path: Path, change: Any) -> None:
    """All of these files are well-formed."""
    state = CheckpointFiles().load_checkpoint(last_of(copied))
    change(state)
    CheckpointFiles().save_checkpoint(state, last_of(copied))
    with pytest.raises(DrafterError):
        run(store_path, copied, **SETTINGS, resume=True)


def test_best_can_replace_last(copied: Any, store_path: Path) -> None:
    run(store_path, copied, **SETTINGS, resume=True)
    shutil.copy(copied / "checkpoints" / "best.ckpt", last_of(copied))
    assert run(store_path, copied, **SETTINGS, resume=True).n_steps == 4
