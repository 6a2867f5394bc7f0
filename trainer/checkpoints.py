"""Checkpoints of a run, the drafter that it exports, and the start from another drafter's weights.

A checkpoint is one safetensors file with everything but the tensors as JSON in its header: reading one runs no code.
Writing one leaves the file that it replaces whole until the end.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins import CheckpointIO
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, TrainingError
from ..files import PARTIAL_SUFFIX, disk_full_guard, fsync_directory, replacing
from ..moa.drafters.base import Drafter
from ..moa.drafters.sizes import check_identity_fits, check_sizes_fit
from ..moa.formats.checkpoint import CONFIG_FILE, WEIGHTS_FILE, build_drafter, load_drafter, save_drafter
from ..moa.targets.model_files import write_tensors
from ..text import first_line
from .batches import map_tensors
from .config import CHECKPOINTS, DrafterSettings
from .step import DrafterModule

FULL_DISK_ADVICE = (
    "A checkpoint that was there before is whole. Free some space and run the same command again, with --resume if "
    "there is one."
)
_STATE = "state"


def damaged_checkpoint(path: Path, reason: str) -> CheckpointError:
    """Make the error for a file that is no checkpoint, or one of another run."""
    return CheckpointError(
        f"{path} is damaged or not a checkpoint of this run: {reason}. Nothing of it was used; copy best.ckpt over "
        "it, if it is there, or train again with another --out."
    )


class CheckpointFiles(CheckpointIO):
    """Lightning's plugin for reading and writing checkpoints of one run.

    Attributes:
        check: called with each checkpoint that is read and its file, before Lightning uses it.
    """

    def __init__(self) -> None:
        self.check: Callable[[dict[str, Any], Path], None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint under a temporary name, sync and rename it.

        Raises:
            StorageUnavailable: no room; the checkpoint that was there is whole.
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
        """Read and check a checkpoint, with its tensors in memory of their own."""
        checkpoint = read_checkpoint(Path(path))
        if self.check is not None:
            self.check(checkpoint, Path(path))
        # The tensors lie in the mapped file, which the next checkpoint replaces.
        copied: dict[str, Any] = map_tensors(checkpoint, Tensor.clone)
        return copied

    def remove_checkpoint(self, path: str | Path) -> None:
        """Refuse to: in this package a checkpoint is only replaced by the next one."""
        raise NotImplementedError(f"{path} is not removed")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint; its tensors lie in the file until they are used.

    Returns:
        Nested dictionaries, lists and tuples of numbers, text, None and tensors.

    Raises:
        CheckpointError: the file is damaged or something else.
    """
    if not path.is_file():
        raise damaged_checkpoint(path, "not a regular file")
    try:
        with safe_open(path, framework="pt") as tensors:
            state = json.loads((tensors.metadata() or {})[_STATE])
            waiting = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
            checkpoint = _from_json(state, waiting)
    except SafetensorError as error:
        raise damaged_checkpoint(path, str(error)) from error
    except (ValueError, TypeError, KeyError, RuntimeError) as error:  # RecursionError is a RuntimeError
        raise damaged_checkpoint(path, f"no state of a training in its header ({type(error).__name__})") from error
    if not isinstance(checkpoint, dict):
        raise damaged_checkpoint(path, "no state of a training in its header")
    return checkpoint


def read_step(path: Path) -> int:
    """Read how many optimizer steps a checkpoint has taken."""
    step = read_checkpoint(path).get("global_step")
    if not isinstance(step, int):
        raise damaged_checkpoint(path, "no number of steps")
    return step


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


def check_for(module: DrafterModule) -> Callable[[dict[str, Any], Path], None]:
    """Return a function that refuses a checkpoint whose weights or moments are not those of a module."""

    def check(checkpoint: dict[str, Any], path: Path) -> None:
        try:
            _check_weights(checkpoint["state_dict"], module.state_dict())
            optimizer = module.build_optimizer("32-true")
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            [state] = checkpoint["optimizer_states"]
            for index, moments in state["state"].items():
                found = {name: moment for name, moment in moments.items() if moment.ndim}
                _check_weights(found, dict.fromkeys(found, weights[index]))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            version = str(checkpoint.get("pytorch-lightning_version"))
            of_version = "" if version == L.__version__ else f" (it says Lightning {version}, here is {L.__version__})"
            raise damaged_checkpoint(path, f"{first_line(error)}{of_version}") from error

    return check


def _check_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    if others := found.keys() ^ expected.keys():
        raise ValueError(f"either it or the run lacks {min(others)!r:.80}")
    for name, like in expected.items():
        shape, dtype = found[name].shape, found[name].dtype
        if (shape, dtype) != (like.shape, like.dtype):
            raise ValueError(f"{name} is {list(shape)} {dtype}, expected {list(like.shape)} {like.dtype}")


def write_drafter(drafter: Drafter, folder: Path, weights: Mapping[str, Tensor]) -> None:
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
            fsync_directory(partial)  # before it gets its name: a crash must not leave a name without content
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


def initial_drafter(source: str, fresh: Drafter, settings: DrafterSettings, target: dict[str, Any]) -> Drafter:
    """Build the drafter of a run with the weights of another: ``--init-from``.

    Args:
        source: a run, or a folder with a drafter in any format that can be loaded.
        fresh: the drafter that the run would start with otherwise.
        settings: the run's settings of its drafter.
        target: sizes of the store's target (``bundle.target_sizes``).

    Raises:
        CheckpointError: there is no drafter, or its weights have other names or shapes.
        TargetError: it belongs to another target.
        TrainingError: it is of another kind, or was trained with other settings than the run's.
    """
    other = load_drafter(source)
    check_sizes_fit(other.config, target)
    check_identity_fits(other.config, fresh.config.target)
    if other.kind != fresh.kind:
        raise TrainingError(
            f"{source} holds a drafter of kind {other.kind}, this run trains {fresh.kind}. Give --drafter {other.kind}."
        )
    names = [name for name in type(settings).model_fields if hasattr(fresh.config, name)]
    needed = [
        f"--set drafter.{name}={_as_option(getattr(other.config, name))}"
        for name in names
        if name != "kind" and getattr(other.config, name) != getattr(fresh.config, name)
    ]
    if needed:
        raise TrainingError(f"the drafter of {source} has other settings than this run. Give {' '.join(needed)}.")
    return build_drafter(fresh.config, other.state_dict(), source)


def _as_option(value: Any) -> str:
    """Write a setting as ``--set`` takes it."""
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
