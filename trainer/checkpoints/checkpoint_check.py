"""Checks that a checkpoint is one that the run itself would write, before the run goes on from it.

Files are not trusted: names, types, shapes and dtypes are compared with those of the run, and what the run's settings
decide is taken from the settings.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor

from ..step.module import DrafterModule
from .saving import unusable

_STEPS = "epoch_loop.automatic_optimization.optim_progress"
_ADAM, _MUON = {"step", "exp_avg", "exp_avg_sq"}, {"momentum"}


def check_for(trainer: L.Trainer, module: DrafterModule, max_steps: int) -> Callable[[dict[str, Any], Path], None]:
    """Make the check of a run's checkpoints; call it once the trainer has the module.

    Returns:
        Function that checks a checkpoint of a file and replaces in it what the settings decide; it raises
        ``CheckpointError``.
    """

    def check(checkpoint: dict[str, Any], path: Path) -> None:
        try:
            _check(checkpoint, trainer, module, max_steps)
        except _Different as different:
            version = checkpoint.get("pytorch-lightning_version")
            of_version = "" if version == L.__version__ else f" (it says Lightning {version}, here is {L.__version__})"
            raise unusable(path, f"{different}{of_version}") from different

    return check


class _Different(Exception):
    """A difference between a checkpoint and what the run would write."""


def _check(checkpoint: dict[str, Any], trainer: L.Trainer, module: DrafterModule, max_steps: int) -> None:
    built = module.configure_optimizers()
    optimizer, schedule = built["optimizer"], built["lr_scheduler"]["scheduler"]
    loops = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
    precision = trainer.precision_plugin
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set in a connector of Lightning's
    expected: dict[str, Any] = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": "",
        "state_dict": module.state_dict(),
        "loops": {name: getattr(trainer, name).state_dict() for name in loops},
        "callbacks": {item.state_key: state for item in callbacks if (state := item.state_dict())},
        "optimizer_states": [{"state": ..., "param_groups": ...}],
        "lr_schedulers": [...],
    }
    if precision_state := precision.state_dict():
        expected[type(precision).__qualname__] = precision_state
    _compare(checkpoint, expected, "")
    step = checkpoint["global_step"]
    taken = checkpoint["loops"]["fit_loop"][_STEPS]["optimizer"]["step"]["total"]["completed"]
    if not 0 <= step == taken <= max_steps:
        raise _Different(f"it says step {step} and {taken} steps taken, of {max_steps}")
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    [state] = checkpoint["optimizer_states"]
    checkpoint["optimizer_states"] = [_optimizer_state(state, optimizer.state_dict(), weights)]
    [state] = checkpoint["lr_schedulers"]
    fresh = schedule.state_dict()
    checkpoint["lr_schedulers"] = [fresh | _chosen(state, fresh, ("last_epoch", "_step_count", "_last_lr"), "schedule")]


def _optimizer_state(state: dict[str, Any], fresh: dict[str, Any], weights: list[Tensor]) -> dict[str, Any]:
    """Combine the optimizer's own settings with the file's rates and moments, which must fit the weights."""
    groups, moments = state["param_groups"], state["state"]
    if not isinstance(groups, list) or len(groups) != len(fresh["param_groups"]) or not isinstance(moments, dict):
        raise _Different("its optimizer is another one")
    by_index: dict[Any, dict[str, Tensor]] = {}
    for group in fresh["param_groups"]:
        names = _MUON if "momentum" in group else _ADAM
        for index in group["params"]:
            like = weights[index]
            by_index[index] = {name: like.new_empty(()).float() if name == "step" else like for name in names}
    if not moments.keys() <= by_index.keys():
        raise _Different("its optimizer has other weights")
    _compare(moments, {index: by_index[index] for index in moments}, "optimizer")
    chosen = [
        new | _chosen(old, new, ("lr",), "optimizer") for old, new in zip(groups, fresh["param_groups"], strict=True)
    ]
    return {"state": moments, "param_groups": chosen}


def _chosen(state: Any, fresh: dict[str, Any], names: tuple[str, ...], place: str) -> dict[str, Any]:
    if not isinstance(state, dict) or not state.keys() >= set(names):
        raise _Different(f"its {place} is another one")
    chosen = {name: state[name] for name in names}
    _compare(chosen, {name: fresh[name] for name in names}, place)
    return chosen


def _compare(got: Any, expected: Any, place: str) -> None:
    """Raise :class:`_Different` unless both are alike; ``...`` is checked elsewhere, None stands for any number."""
    if expected is ...:
        return
    if isinstance(expected, Tensor):
        if not isinstance(got, Tensor) or (got.shape, got.dtype) != (expected.shape, expected.dtype):
            found = f"{list(got.shape)} {got.dtype}" if isinstance(got, Tensor) else type(got).__name__
            raise _Different(f"{place} is {found}, expected {list(expected.shape)} {expected.dtype}")
    elif isinstance(expected, dict):
        if not isinstance(got, dict):
            raise _Different(f"{place} is a {type(got).__name__}, expected names and values")
        if missing := expected.keys() - got.keys():
            raise _Different(f"{place or 'it'} lacks {min(map(str, missing))}")
        if others := got.keys() - expected.keys():
            raise _Different(f"{place or 'it'} holds {min(map(str, others))!r:.80}, which belongs to something else")
        for name, value in expected.items():
            _compare(got[name], value, f"{place}/{name}".lstrip("/"))
    elif isinstance(expected, list):
        if not isinstance(got, list) or len(got) != len(expected):
            raise _Different(f"{place} is no list of {len(expected)}")
        for index, value in enumerate(expected):
            _compare(got[index], value, f"{place}/{index}")
    elif expected is None:
        if got is not None and (type(got) is not int):
            raise _Different(f"{place} is a {type(got).__name__}, expected a number or nothing")
    elif isinstance(expected, float):
        if type(got) not in (int, float) or math.isnan(got):
            raise _Different(f"{place} is {got!r:.40}, expected a number")
    elif type(got) is not type(expected):
        raise _Different(f"{place} is a {type(got).__name__}, expected a {type(expected).__name__}")
