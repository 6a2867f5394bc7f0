"""Checkpoint files: one safetensors file each, everything but the tensors as JSON in its header.

Reading one executes nothing and allocates no more than the file holds; :mod:`.checkpoint_check` then compares it with
the run. Writing one leaves the file that it replaces whole until the end.
"""

import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import CheckpointError
from ...moa.drafters.base import Drafter
from ...moa.files import write_tensors
from ...moa.formats.checkpoint import CONFIG_FILE, WEIGHTS_FILE, save_drafter
from ...storage.disk.durable import PARTIAL_SUFFIX, disk_full_guard, fsync_directory, replacing
from ..files import CHECKPOINTS

FULL_DISK_ADVICE = (
    "A checkpoint that was there before is whole. Free some space and run the same command again, with --resume if "
    "there is one."
)
_STATE = "state"
_MOST_CHARACTERS = 16 << 20
_ZIP = b"PK\3\4"


class CheckpointFiles(CheckpointIO):
    """Lightning's plugin for reading and writing checkpoints of one run.

    Attributes:
        check: called with each checkpoint that is read and its file, before any tensor is; raises CheckpointError.
    """

    def __init__(self) -> None:
        self.check: Callable[[dict[str, Any], Path], None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint under a temporary name, sync and rename it.

        Raises:
            StorageUnavailable: no room; the checkpoint that was there is whole.
            OSError: the folder cannot be written to.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        state = json.dumps(_to_json(checkpoint, "", tensors))
        with replacing(path, FULL_DISK_ADVICE) as partial:
            write_tensors(partial, tensors, {_STATE: state})

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read and check a checkpoint, with its tensors in memory of their own.

        Raises:
            CheckpointError: it is no checkpoint, or not of this run.
        """
        checkpoint = read_checkpoint(Path(path))
        if self.check is not None:
            self.check(checkpoint, Path(path))
        return dict(_copied(checkpoint))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Refuse to: in this package a checkpoint is only replaced by the next one."""
        raise NotImplementedError(f"{path} is not removed")


def unusable(path: Path, reason: str) -> CheckpointError:
    """The error of a file that is no checkpoint, or one that the run cannot continue from."""
    return CheckpointError(
        f"{path} is damaged or not a checkpoint of this run: {reason}. Nothing of it was used; copy best.ckpt over "
        "it, if it is there, or train again with another --out."
    )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint; its tensors lie in the file until they are used.

    Returns:
        Nested dictionaries, lists and tuples of numbers, text, None and tensors.

    Raises:
        CheckpointError: the file is damaged or something else.
        OSError: it cannot be read, which says nothing about its bytes.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise unusable(path, "not a regular file")
        with path.open("rb") as file:
            if file.read(len(_ZIP)) == _ZIP:
                raise unusable(path, "pickled objects, as older releases wrote them; loading them runs code")
        with safe_open(path, framework="pt") as tensors:
            text = (tensors.metadata() or {})[_STATE]
            if len(text) > _MOST_CHARACTERS:
                raise unusable(path, f"{len(text)} characters of settings")
            state = json.loads(text)
            waiting = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
            checkpoint = _from_json(state, waiting)
    except CheckpointError:
        raise
    except SafetensorError as error:
        raise unusable(path, str(error)) from error
    except (ValueError, TypeError, KeyError, RuntimeError) as error:  # RecursionError is a RuntimeError
        raise unusable(path, f"no state of a training in its header ({type(error).__name__})") from error
    if waiting or not isinstance(checkpoint, dict):
        raise unusable(path, "tensors that its header does not name")
    return checkpoint


def export_drafter(drafter: Drafter, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a run's ``drafter/``: after a crash at any moment its files are those before, or the new ones, or none.

    Drafters of one run have the same sizes, so that replacing the weights replaces the folder.

    Args:
        weights: all of the drafter's, which may hold a share of them itself.

    Raises:
        StorageUnavailable: no room; the folder is as before.
    """
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    with disk_full_guard(folder, FULL_DISK_ADVICE):
        try:
            save_drafter(drafter, partial, weights)
            fsync_directory(partial)
            sizes = folder / CONFIG_FILE
            if sizes.is_file() and sizes.read_bytes() == (partial / CONFIG_FILE).read_bytes():
                os.replace(partial / WEIGHTS_FILE, folder / WEIGHTS_FILE)
                fsync_directory(folder)
            else:  # of a run with other settings that ended before its first checkpoint
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        fsync_directory(folder.parent)


def remove_leftovers(out: Path) -> None:
    """Delete unfinished files that a killed process left in a run's folder."""
    for file in (*out.glob("*" + PARTIAL_SUFFIX), *(out / CHECKPOINTS).glob("*" + PARTIAL_SUFFIX)):
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink()


def _to_json(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Turn a value into JSON; what JSON has no type for becomes a dictionary whose one key names its type."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _to_json(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_to_json(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint holds plain values and tensors, got {type(value).__name__} at {name}")


def _from_json(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo :func:`_to_json`; takes each tensor out of ``tensors`` once."""
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "tensor":
        return tensors.pop(content)
    if kind == "tuple":
        return tuple(_from_json(item, tensors) for item in content)
    if kind != "dict":
        raise ValueError(kind)
    return {key: _from_json(item, tensors) for key, item in content}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value
