"""Read and write checkpoints of a run, write its drafter, and load its initial drafter.

A checkpoint is one safetensors file. All data except tensors is JSON in the header of the file.
Reading a checkpoint therefore runs no code, while unpickling a file could. When a checkpoint is
replaced, the old file stays intact until the new file is complete.
"""

import json
import os
import shutil
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.apply_func import apply_to_collection
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import DrafterError, TrainingError
from ..files import PARTIAL_SUFFIX, disk_full_guard, fsync_directory, replacing, write_atomic
from ..moa.drafters.base import Drafter
from ..moa.drafters.sizes import check_target_fits
from ..moa.formats.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    build_drafter,
    load_drafter,
    save_drafter,
)
from ..moa.targets.model_files import write_tensors
from .config import CHECKPOINTS, DrafterSettings

FULL_DISK_ADVICE = (
    "If there is a previous checkpoint, it is intact. Free some space and run the same command "
    "again, with `resume` if there is a checkpoint."
)
# Function that replaces a file of a run atomically. It is not used for checkpoints, which
# :class:`CheckpointFiles` writes.
write_beside = partial(write_atomic, advice=FULL_DISK_ADVICE)
_STATE = "state"


def damaged_checkpoint(path: Path, reason: str) -> DrafterError:
    """Return the error for a file that is not a checkpoint of the run.

    Args:
        path: the file.
        reason: the problem with the file, as text for the message.
    """
    return DrafterError(
        f"{path} is damaged, or it is not a checkpoint of this run ({reason}). Nothing was read "
        "from it. If there is a best.ckpt, copy it over this file. Otherwise train again with "
        "another `out`."
    )


class CheckpointFiles(CheckpointIO):
    """Lightning plugin that reads and writes the checkpoints of one run."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint atomically. If the disk is full, the previous file stays intact."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        state = json.dumps(_to_json(checkpoint, "", tensors))
        with replacing(path, FULL_DISK_ADVICE) as partial:
            write_tensors(partial, tensors, {_STATE: state})

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, and copy its tensors out of the file."""
        # Copy the tensors, because they are views of the memory-mapped file, which will be replaced
        # by the next checkpoint.
        return dict(apply_to_collection(read_checkpoint(Path(path)), Tensor, Tensor.clone))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Raise NotImplementedError. Checkpoints are never removed, only replaced by newer ones."""
        raise NotImplementedError(f"{path} is a checkpoint, and checkpoints are never removed")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint: nested dictionaries, lists and tuples of plain values and tensors.

    The tensors are memory-mapped, so they are read from the file when they are used.
    """
    if not path.is_file():
        raise damaged_checkpoint(path, "it is not a regular file")
    try:
        with safe_open(path, framework="pt") as tensors:
            state = json.loads((tensors.metadata() or {})[_STATE])
            waiting = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
            checkpoint = _from_json(state, waiting)
    except SafetensorError as error:
        raise damaged_checkpoint(path, str(error)) from error
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        # RuntimeError includes RecursionError, which deeply nested JSON may raise.
        raise damaged_checkpoint(
            path, f"its header does not contain a training state ({type(error).__name__})"
        ) from error
    if not isinstance(checkpoint, dict):
        raise damaged_checkpoint(path, "its header does not contain a training state")
    return checkpoint


def read_step(path: Path) -> int:
    """Read from a checkpoint how many optimizer steps the run had taken."""
    step = read_checkpoint(path).get("global_step")
    if not isinstance(step, int):
        raise damaged_checkpoint(path, "it does not contain the number of steps")
    return step


def _to_json(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a value to JSON, and move the tensors in it to ``tensors``.

    JSON has no tensors, no tuples, and no dictionaries with keys that are not strings. Each of
    these becomes a JSON object with a single key: ``tensor``, ``tuple`` or ``dict``. The value of
    this key is the name of the tensor, the list of the tuple's items, or the list of the
    dictionary's (key, value) pairs.

    Args:
        value: the value.
        name: path of the value in the checkpoint. It is used as the name of a tensor.
        tensors: the dictionary that gets the tensors by name.
    """
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        pairs: list[list[Any]] = []
        for key, item in value.items():
            pairs.append([key, _to_json(item, f"{name}/{key}", tensors)])
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        items = [_to_json(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"the entry {name} of the checkpoint has the type {type(value).__name__}, expected a "
        "tensor, number, text, list or dictionary"
    )


def _from_json(value: Any, tensors: dict[str, Tensor]) -> Any:
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


def write_drafter(drafter: Drafter, folder: Path) -> None:
    """Write the ``drafter/`` folder of a run.

    After a crash, the folder has either the old files or the new files, or does not exist.
    """
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    with disk_full_guard(folder, FULL_DISK_ADVICE):
        try:
            save_drafter(drafter, partial)
            # Sync the files to the disk before the rename. Otherwise, a crash could leave
            # incomplete files under the final name.
            fsync_directory(partial)
            sizes = folder / CONFIG_FILE
            # All drafters of a run have the same config, so only the weights need to be replaced.
            if sizes.is_file() and sizes.read_bytes() == (partial / CONFIG_FILE).read_bytes():
                os.replace(partial / WEIGHTS_FILE, folder / WEIGHTS_FILE)
                fsync_directory(folder)
            else:
                # If the folder exists, an earlier run with other settings has left it. That run
                # ended before its first checkpoint, so its drafter can be deleted.
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


def initial_drafter(
    source: str, fresh: Drafter, settings: DrafterSettings, target: dict[str, Any]
) -> Drafter:
    """Build the drafter of a run with the weights of an existing drafter.

    Args:
        source: the value of ``init_from``: a run, or a folder with a drafter in any format that
            can be loaded.
        fresh: the drafter of the run with random weights.
        settings: settings of the run's drafter.
        target: identity and sizes of the target.
    """
    other = load_drafter(source)
    check_target_fits(other.config, target, fresh.config.target)
    if other.kind != fresh.kind:
        raise TrainingError(
            f"{source} holds a drafter of kind {other.kind}, but this run trains a drafter of kind "
            f"{fresh.kind}. Give `drafter={other.kind}`, or choose another `init_from`."
        )
    needed: list[str] = []
    foreign: list[str] = []
    for item in fields(fresh.config):
        name = item.name
        value = getattr(other.config, name)
        if value == getattr(fresh.config, name) or name in fresh.config.without_weights:
            continue
        if name in type(settings).model_fields:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            needed.append(f"`{name}={text.lower()}`")
        elif item.default is False and value:
            foreign.append(name)
    if needed:
        raise TrainingError(
            f"the drafter of {source} was trained with other settings than this run. To start from "
            f"its weights, give {' '.join(needed)}."
        )
    if foreign:
        raise TrainingError(
            f"the drafter of {source} has {', '.join(foreign)}, and moa-data can run such drafters "
            "but not train them. Choose another `init_from`."
        )
    return build_drafter(fresh.config, other.state_dict(), source)
