"""Train a drafter from a store. The target is never loaded.

The functions of a run, from the outermost to the innermost::

    train                    turns an interruption into an error message of one line
      _train                 locks the output folder, checks that the settings and the store fit an
                             earlier invocation, and records the settings
        build_module         loads the frozen target weights, and builds the initial drafter
        _fit                 runs Lightning's trainer with the callbacks. The trainer calls
                             DrafterModule.training_step for each micro-batch. Then _fit writes
                             the report, the curves and drafter/

A run may consist of several invocations of the command, because it can be interrupted and resumed.
"""

import contextlib
import csv
import dataclasses
import io
import json
import logging
import math
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib
import torch
import yaml
from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tensorboard.summary.writer import event_file_writer

from ..errors import DrafterError, Interrupted, MoaDataError, OutputOccupied, TrainingError
from ..files import (
    PARTIAL_SUFFIX,
    LockHeld,
    check_room,
    disk_full_guard,
    lock_file,
    nearest_folder,
    refuse_other_files,
    refuse_other_inputs,
)
from ..machine import is_first_process, keep_freed_memory
from ..moa.drafters.advice import Advice, other_drafter
from ..moa.drafters.registry import drafter_class
from ..moa.formats.checkpoint import export_problems
from ..moa.targets.bundle import FrozenTarget
from ..storage.commit import check_target_bundle
from ..storage.read.store import ActivationStore
from ..storage.read_cache import cache_at
from ..text import SILENT, Progress, first_line
from . import callbacks, checkpoints
from .batches import drafter_sizes, token_bytes
from .config import (
    CHANGE_NO_RESULT,
    CURVES_FILE,
    DRAFTER,
    LAST,
    LOCK_FILE,
    MEMORY_FILE,
    METRICS_FILE,
    PROVENANCE_FILE,
    REPORT_FILE,
    RUN_FILE,
    STORE_FILE,
    MachineSettings,
    TrainConfig,
    known,
)
from .data import (
    StoreDataModule,
    device_share,
    has_own_answers,
    target_identity,
    trains_on_cpu,
)
from .defaults import CHOOSABLE, ChosenSetting, is_open, schedule_warnings
from .estimate import RunCost, disk_range, estimate_run
from .step import WHAT_HELPS, DrafterModule
from .vocabulary import choose_vocabulary, count_response_tokens

# Use a backend of matplotlib that needs no display. It must be chosen before pyplot is imported.
matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Settings that may differ between two invocations of one run. :func:`_check_resumed` checks whether
# a new length of the run is possible.
_FREE_TO_CHANGE = CHANGE_NO_RESULT | {"max_steps", "epochs", "decay_steps"}


_write_log = event_file_writer._AsyncWriterThread.run


def _write_log_quietly(thread: Any) -> None:
    """Run TensorBoard's thread that writes a log, but print no traceback if a write fails.

    The logger raises the error of the thread later, in the main thread.
    """
    with contextlib.suppress(OSError):
        _write_log(thread)


event_file_writer._AsyncWriterThread.run = _write_log_quietly


@dataclass(frozen=True)
class TrainReport:
    """The results of a run."""

    out: str
    n_steps: int
    n_parameters: int
    n_tokens: int  # Number of tokens trained on in this invocation, without padding.
    # Training speed in tokens per second. If a resumed run had no step left to train, the value is
    # None.
    tokens_per_s: float | None
    # Fraction of the training time in which the trainer waited for data. If a resumed run had no
    # step left to train, the value is None.
    data_wait_share: float | None
    # Maps each training and validation metric to its last value. A metric is left out if its last
    # value is not finite.
    metrics: dict[str, float]
    # Largest expected acceptance length of all validations. If the run has no validation, the value
    # is None.
    best_expected_acceptance_length: float | None
    # Half width of the 95 % confidence interval of ``best_expected_acceptance_length``. If fewer
    # than two sequences were validated, the value is None.
    best_half_width: float | None
    n_validation_sequences: int
    # Number of parts of the store that are not extracted yet. Their sequences are not trained on.
    n_pending_parts: int = 0
    n_tokens_total: int = 0  # Number of tokens trained on in all invocations, without padding.
    n_bytes_read: int = 0  # Number of bytes read from the store in all invocations.


@dataclass(frozen=True)
class RunPlan:
    """What is known about a run before its first step: size, expected cost, and chosen settings."""

    n_steps: int
    steps_per_epoch: int
    n_sequences: int
    n_tokens_per_epoch: int
    read_bytes_per_epoch: int  # Size in bytes of the decoded activations of one epoch.
    n_parameters: int
    cost: RunCost
    # Advice to train another kind of drafter, if one is known to be better for this target.
    # Otherwise, the value is None.
    other_drafter: Advice | None
    free_disk_bytes: int
    # Maps each format of export-drafter to the reasons why it cannot hold this drafter. If the
    # format can hold this drafter, the list of reasons is empty.
    export_problems: dict[str, list[str]]
    hidden_size: int  # Hidden size of the target.
    n_validation_sequences: int
    n_validation_positions: int  # Number of response tokens in the validation sequences.
    # Whether the store records that the target itself wrote the answers.
    has_own_answers: bool
    chosen: tuple[ChosenSetting, ...]  # Settings that were not given and have been chosen.
    warnings: tuple[str, ...]  # Warnings about a schedule that does not fit the number of steps.


def train(
    config: TrainConfig,
    progress: Progress = SILENT,
    provenance: dict[str, Any] | None = None,
    announce: Callable[[RunPlan], None] | None = None,
) -> TrainReport:
    """Train a drafter from a store.

    Checkpoints, logs, curves.png and drafter/ are written to ``config.out``.

    Args:
        config: settings of the run.
        progress: reports the number of steps.
        provenance: command, versions and machine of the run, written to the run's folder.
        announce: function that is called with the plan of the run, once before the first step.

    Raises:
        Interrupted: a signal stopped the run after its state was saved.
    """
    keep_freed_memory()
    # Launchers such as torchrun start the same command once per device. Only the first process
    # announces the run and prints messages.
    out, is_first = Path(config.out), is_first_process()
    try:
        with disk_full_guard(out, checkpoints.FULL_DISK_ADVICE):
            return _train(
                config, out, progress, provenance, announce if is_first else None, is_first
            )
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"the device ran out of memory ({first_line(error)}). To save memory, use {WHAT_HELPS}"
        ) from error
    except (KeyboardInterrupt, SystemExit) as stop:
        # Ctrl-C was pressed while the guard did not handle signals, or it was pressed twice.
        # Lightning may have turned the KeyboardInterrupt into SystemExit. The KeyboardInterrupt is
        # then the context of the SystemExit.
        interrupt = stop if isinstance(stop, KeyboardInterrupt) else stop.__context__
        if not isinstance(interrupt, KeyboardInterrupt):
            raise
        signum = getattr(interrupt, "signum", signal.SIGINT)
        if not is_first:
            # Exit silently, because only the first process prints the message.
            raise SystemExit(128 + signum) from interrupt
        raise Interrupted(_how_to_continue(out, interrupt), signum) from interrupt


def _how_to_continue(out: Path, interrupt: KeyboardInterrupt) -> str:
    try:
        step = checkpoints.read_step(out / LAST)
    except (DrafterError, OSError):
        return (
            "stopped before the first checkpoint. Run the same command again, which starts from "
            "the beginning."
        )
    if isinstance(interrupt, callbacks.StoppedAtOnce):
        return (
            f"stopped without saving. Continue from the checkpoint of step {step} with the same "
            "command and `resume`."
        )
    return callbacks.stopped_at(step)


def _train(
    config: TrainConfig,
    out: Path,
    progress: Progress,
    provenance: dict[str, Any] | None,
    announce: Callable[[RunPlan], None] | None,
    is_first: bool,
) -> TrainReport:
    if config.resume:
        config = _as_recorded(config, out)
    if is_first:
        _check_folder(config, out)
        check_room(out)
    store = _open_store(config)
    data = StoreDataModule(store, config)
    choose_vocabulary(data)
    module = build_module(data)
    if is_first:
        # The run needs disk space for at least three copies of the weights. A checkpoint takes two,
        # for the weights and one optimizer moment, and drafter/ takes one.
        n_bytes = 3 * sum(weights.nbytes for weights in module.drafter.parameters())
        check_room(out, n_bytes, checkpoints.FULL_DISK_ADVICE)
    with _lock_run(out) if is_first else contextlib.nullcontext():
        if is_first:
            # Check again, because another process may have trained in this folder before this
            # process locked it.
            _check_folder(data.config, out)
            if config.resume:
                _check_resumed(data, out)
            checkpoints.remove_leftovers(out)
            _record_run(data, out, provenance)
        if announce is not None:
            # Measure the time and memory of steps only on a CPU. On an accelerator, only --dry-run
            # measures them, because the other processes would have to wait and kernels would have
            # to be compiled.
            announce(_plan(data, module, measures=trains_on_cpu(config.machine)))
        report = _fit(data, module, progress, is_first)
    store.close()
    return report


def _open_store(config: TrainConfig) -> ActivationStore:
    cache = cache_at(config.data.cache_dir, config.data.cache_gb)
    return ActivationStore(config.store, cache=cache)


def _fit(
    data: StoreDataModule, module: DrafterModule, progress: Progress, is_first: bool
) -> TrainReport:
    """Run the steps and write the results. Only the first process writes."""
    out = Path(data.config.out)
    guard = callbacks.StopGuard(out / LAST)
    throughput = callbacks.Throughput()
    saves = callbacks.Saves(out, data.config.record.checkpoint_every, data.max_steps)
    extra: list[L.Callback] = [guard, callbacks.MicroBatches(data, out / MEMORY_FILE), throughput]
    # Show metrics only if progress is shown, because reading metrics synchronizes with the device.
    if progress.show is not None:
        extra.append(callbacks.ShowSteps(progress, data.max_steps))
    _hush_lightning()
    # ``saves`` must be the last callback. Then all other callbacks have updated their state for a
    # step before ``saves`` saves a checkpoint of this step.
    trainer = _build_trainer(data, [*extra, saves])
    try:
        _run_steps(trainer, data, module, guard, saves)
    except Interrupted as stop:
        if is_first:
            raise
        # If Lightning started this process, exit with code 0. After any other exit code, Lightning
        # would kill all processes of the run, including the first one.
        is_ours = isinstance(
            getattr(trainer.strategy, "cluster_environment", None), LightningEnvironment
        )
        raise SystemExit(0 if is_ours else 128 + (stop.signum or signal.SIGINT)) from stop
    step_s = throughput.step_s
    report = TrainReport(
        out=str(out),
        n_steps=trainer.global_step,
        n_parameters=sum(p.numel() for p in module.drafter.parameters()),
        n_tokens=throughput.n_tokens,
        tokens_per_s=throughput.n_tokens / step_s if step_s else None,
        data_wait_share=throughput.wait_s / step_s if step_s else None,
        metrics=_finite_metrics(trainer),
        best_expected_acceptance_length=saves.best if math.isfinite(saves.best) else None,
        best_half_width=saves.best_half_width if math.isfinite(saves.best_half_width) else None,
        n_validation_sequences=len(data.validation_sequences),
        n_pending_parts=data.store.manifest.n_parts - len(data.store.commits),
        n_tokens_total=throughput.n_tokens_total,
        n_bytes_read=throughput.n_bytes_read,
    )
    if is_first:
        # Without a validation, no drafter has been written yet. Write the drafter as it is after
        # the last step.
        if report.best_expected_acceptance_length is None:
            checkpoints.write_drafter(module.drafter, out / DRAFTER)
        plot_curves(out, out / CURVES_FILE)
        _write_report(out / REPORT_FILE, report)
    return report


def _finite_metrics(trainer: L.Trainer) -> dict[str, float]:
    """Return the last value of each training and validation metric.

    A metric is left out if its last value is not finite.
    """
    metrics: dict[str, float] = {}
    for name, value in trainer.callback_metrics.items():
        number = float(value)
        if name.startswith(("train/", "val/")) and math.isfinite(number):
            metrics[name] = number
    return metrics


def _run_steps(
    trainer: L.Trainer,
    data: StoreDataModule,
    module: DrafterModule,
    guard: callbacks.StopGuard,
    saves: callbacks.Saves,
) -> None:
    last = Path(data.config.out) / LAST
    resumes = data.config.resume
    try:
        with guard:
            trainer.fit(module, datamodule=data, ckpt_path=last if resumes else None)
            if trainer.global_step >= data.max_steps != saves.validated_step and len(
                data.validation_sequences
            ):
                # An earlier invocation trained all steps, but was stopped during the last
                # validation. So only this validation is left to run.
                trainer.validate(module, datamodule=data, verbose=False)
            trainer.save_checkpoint(last)
        # The guard checks for signals only at the start of each micro-batch. If a signal arrived
        # after the start of the last micro-batch, the guard has not reacted to it. So react to it
        # here.
        if guard.signum:
            raise Interrupted(callbacks.stopped_at(trainer.global_step), guard.signum)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        # Lightning restores a checkpoint without checking its content, so a damaged checkpoint may
        # raise any of these errors. If training has started, the checkpoint was restored without an
        # error, so the error has another cause.
        if isinstance(error, MoaDataError) or guard.has_started or not resumes:
            raise
        raise checkpoints.damaged_checkpoint(
            last, f"loading it raises {type(error).__name__}: {first_line(error)}"
        ) from error


def _write_report(file: Path, report: TrainReport) -> None:
    """Write the report of a run to a JSON file.

    If a finished run is resumed, its earlier report is kept. If this invocation has run the last
    validation, the results of this validation are added to the earlier report.
    """
    facts = dataclasses.asdict(report)
    if not report.n_tokens and file.is_file():
        if not report.metrics:
            return
        # If the earlier report is damaged, replace it.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            earlier = json.loads(file.read_text())
            facts = earlier | {
                "n_steps": report.n_steps,
                "best_expected_acceptance_length": report.best_expected_acceptance_length,
                "metrics": earlier["metrics"] | report.metrics,
            }
    checkpoints.write_beside(file, (json.dumps(facts, indent=1, allow_nan=False) + "\n").encode())


def build_module(data: StoreDataModule) -> DrafterModule:
    """Build the module to train: frozen target weights from the store, and a drafter.

    The drafter has random weights, or the weights of the drafter given as ``init_from``.
    """
    config = data.config
    store = data.store
    frozen = FrozenTarget.load(
        store.target_path, config.target_layer_inference, None, store.manifest.target
    )
    check_target_bundle(store.path, store.target_path)
    identity = target_identity(store)
    if arguments := store.manifest.extraction.get("template_kwargs"):
        # Record the arguments of the chat template, because decoding must use the same ones.
        identity["template_kwargs"] = json.dumps(arguments, sort_keys=True)
    sizes = drafter_sizes(frozen.facts, config.drafter, identity)
    drafter = drafter_class(sizes.kind)(sizes)
    max_depth = drafter.config.max_depth
    if max_depth is not None and config.validation.draft_length > max_depth:
        raise TrainingError(
            f"`draft_length={config.validation.draft_length}` is more than the {max_depth} tokens "
            f"in a row that this {sizes.kind} drafter can draft. Lower `draft_length`, or raise "
            "`block_size` or `medusa_heads`."
        )
    # Use a separate generator, so that the initial weights do not depend on other random draws.
    drafter.initialize(torch.Generator().manual_seed(config.seed))
    frozen.compute_in(drafter.dtype, casts_itself=_precision(config.machine) != "32-true")
    drafter.adopt(frozen, lambda: count_response_tokens(store, data.train_sequences))
    if config.init_from and not config.resume:
        drafter = checkpoints.initial_drafter(
            config.init_from, drafter, config.drafter, frozen.facts.sizes
        )
    return DrafterModule(
        drafter, frozen, config, config.schedule.decay_end_step(data.steps_per_epoch)
    )


def _build_trainer(data: StoreDataModule, extra: list[L.Callback]) -> L.Trainer:
    config = data.config
    machine = config.machine
    has_validation = len(data.validation_sequences) > 0
    devices: Any = machine.devices if machine.devices == "auto" else int(machine.devices)
    try:
        trainer = L.Trainer(
            default_root_dir=config.out,
            accelerator=machine.accelerator,
            devices=devices,
            num_nodes=machine.num_nodes,
            precision=_precision(machine),
            max_steps=min(data.max_steps, config.schedule.stop_after_steps or data.max_steps),
            max_epochs=-1,  # The stream is endless, so only ``max_steps`` ends the run.
            gradient_clip_val=config.optimizer.gradient_clip or None,
            log_every_n_steps=known(config.record.log_every),
            val_check_interval=config.validation.validate_every if has_validation else None,
            check_val_every_n_epoch=None if has_validation else 1,
            limit_val_batches=1.0 if has_validation else 0,
            # Skip Lightning's sanity check, which would be logged as a validation of step 0.
            num_sanity_val_steps=0,
            logger=_loggers(config),
            callbacks=extra,
            plugins=[checkpoints.CheckpointFiles()],
            enable_checkpointing=False,  # The callback ``Saves`` writes checkpoints.
            enable_model_summary=False,
            enable_progress_bar=False,
            # Lightning must not divide the sequences among the devices, because the stream does so.
            use_distributed_sampler=False,
        )
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise TrainingError(
            f"this machine cannot train with `accelerator={machine.accelerator}` "
            f"`devices={machine.devices}` `num_nodes={machine.num_nodes}` "
            f"`precision={machine.precision}` ({error}). Choose other values, or auto."
        ) from error
    # Check the number of processes now. If a process were missing, the other processes would wait
    # for it forever.
    _check_processes(machine, trainer.num_nodes * trainer.num_devices)
    trainer._signal_connector = callbacks.SignalsLeftAlone(trainer)
    # The result is not used. The call raises TrainingError if the batch cannot be divided among the
    # devices.
    device_share(config, trainer.world_size)
    return trainer


def _loggers(config: TrainConfig) -> list[Logger]:
    """Create the loggers of a run.

    An experiment tracker reads its account and its server from environment variables.
    """
    out = Path(config.out)
    name = config.record.logger
    project = config.record.project
    loggers: list[Logger] = [
        CSVLogger(out, "", version=""),
        TensorBoardLogger(out, "tensorboard", version=""),
    ]
    if name is None:
        return loggers
    run = out.resolve().name
    try:
        if name == "wandb":
            loggers.append(WandbLogger(name=run, project=project, save_dir=out))
        else:
            loggers.append(MLFlowLogger(experiment_name=project, run_name=run))
        loggers[-1].log_hyperparams(config.named())
    except Exception as error:
        # All exceptions are caught here: the tracker's package may be missing, or its client may
        # refuse the account or the server with errors of its own.
        raise TrainingError(
            f"`logger={name}` cannot be used ({first_line(error)}). Run `pip install "
            f"'moa-data[{name}]'`, and set the tracker's account and server in its environment "
            "variables."
        ) from error
    return loggers


def _check_processes(machine: MachineSettings, n_devices: int) -> None:
    # If the number of launched processes differs from the number of devices, each process would
    # train alone in the same folder, or wait forever for missing processes.
    launched = n_devices
    if TorchElasticEnvironment.detect():
        launched = int(os.environ["WORLD_SIZE"])
    elif SLURMEnvironment.detect():
        launched = int(os.environ["SLURM_NTASKS"])
    if launched != n_devices:
        raise TrainingError(
            f"{launched} processes were launched for the {n_devices} devices of "
            f"`devices={machine.devices}` and `num_nodes={machine.num_nodes}`. Launch one process "
            "per device. `devices` is the number of devices of one machine."
        )


def plan_run(config: TrainConfig) -> RunPlan:
    """Compute the length of a run, and estimate its time, memory and disk space.

    To measure time and memory, the function trains on a few micro-batches. Nothing is written.
    """
    keep_freed_memory()
    with _open_store(config) as store:
        data = StoreDataModule(store, config)
        choose_vocabulary(data)
        return _plan(data, build_module(data), measures=True)


def _plan(data: StoreDataModule, module: DrafterModule, measures: bool) -> RunPlan:
    config = data.config
    store = data.store
    n_steps = data.max_steps - (
        checkpoints.read_step(Path(config.out) / LAST) if config.resume else 0
    )
    cost = RunCost(disk_range(module))
    if measures:
        cost = estimate_run(data, module, _precision(config.machine), n_steps)
    n_tokens = int(store.lengths[data.train_sequences].sum())
    return RunPlan(
        n_steps=data.max_steps,
        steps_per_epoch=data.steps_per_epoch,
        n_sequences=len(data.train_sequences),
        n_tokens_per_epoch=n_tokens,
        read_bytes_per_epoch=n_tokens * token_bytes(store, config),
        n_parameters=sum(weight.numel() for weight in module.drafter.parameters()),
        cost=cost,
        other_drafter=other_drafter(config.drafter.kind, n_tokens, trains_on_cpu(config.machine)),
        free_disk_bytes=shutil.disk_usage(nearest_folder(Path(config.out))).free,
        export_problems=export_problems(module.drafter.config),
        hidden_size=int(store.manifest.target["hidden_size"]),
        n_validation_sequences=len(data.validation_sequences),
        n_validation_positions=data.n_validation_positions,
        has_own_answers=has_own_answers(store),
        chosen=tuple(data.chosen),
        warnings=tuple(schedule_warnings(config, data.steps_per_epoch)),
    )


def _hush_lightning() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # Hide warnings of Lightning that do not help the user. They are about output folders that this
    # module has checked, about code of torch, and about logged values that are equal on all devices
    # anyway.
    advice = (
        "Experiment logs",
        "Checkpoint directory",
        "`isinstance\\(treespec",
        "It is recommended to use `self",
    )
    for message in advice:
        warnings.filterwarnings("ignore", message=message)


def _precision(machine: MachineSettings) -> Any:
    if machine.precision != "auto":
        return machine.precision
    return "32-true" if trains_on_cpu(machine) else "bf16-mixed"


def _check_folder(config: TrainConfig, out: Path) -> None:
    """Refuse an output folder that holds files of a different run."""
    last = out / LAST
    if config.resume:
        if not last.exists():
            raise TrainingError(
                f"there is nothing to resume, because {last} does not exist. Run the command "
                "without `resume`."
            )
        checkpoints.read_step(last)
        refuse_other_inputs(
            out,
            _recorded_config(out).named(),
            config.named(),
            _FREE_TO_CHANGE,
            advice="Give the earlier settings, or choose another `out` without `resume`.",
        )
    elif (out / RUN_FILE).is_file():
        # If the earlier run in this folder ended before its first checkpoint, there is nothing to
        # resume, so the run starts again.
        if last.is_file():
            raise OutputOccupied(
                f"{out} already holds a run. Give `resume` to continue it, or another `out`."
            )
    else:
        refuse_other_files(out, "a training run", {RUN_FILE + PARTIAL_SUFFIX, LOCK_FILE})


def _as_recorded(config: TrainConfig, out: Path) -> TrainConfig:
    """For settings that were not given, use the values that the resumed run has recorded."""
    if not (out / RUN_FILE).is_file():
        return config
    now = config.named()
    recorded = _recorded_config(out).named()
    has_length = now["max_steps"] is not None or now["epochs"] is not None
    fixed: set[str] = {"max_steps", "epochs"} if has_length else set()
    filled_in: dict[str, Any] = {}
    for name in CHOOSABLE:
        if is_open(now[name]) and name not in fixed:
            filled_in[name] = recorded[name]
    return config.replaced(**filled_in)


def _recorded_config(out: Path) -> TrainConfig:
    record = out / RUN_FILE
    try:
        return TrainConfig(**yaml.safe_load(record.read_text()))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise TrainingError(
            f"the run cannot be resumed, because {record} cannot be read or is damaged. Restore "
            "this file."
        ) from error


@contextlib.contextmanager
def _lock_run(out: Path) -> Iterator[None]:
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_file(out / LOCK_FILE)
    except LockHeld as held:
        raise OutputOccupied(
            f"{held.holder} is training in {out}. Wait until it ends, or choose another `out`."
        ) from held
    try:
        yield
    finally:
        os.close(lock)


def _store_facts(store: ActivationStore) -> dict[str, Any]:
    # Return the facts about the store that determine the order and content of batches. Between two
    # invocations of a run, these facts must not change. The store may be moved, so its path is not
    # returned.
    identities = dict(sorted(store.manifest.identities.items()))
    codec = store.manifest.codec["name"]
    return {
        "n_sequences": len(store),
        "n_tokens": int(store.lengths.sum()),
        "codec": codec,
        **identities,
    }


def _check_resumed(data: StoreDataModule, out: Path) -> None:
    """Refuse to resume a run with a different store, or with an incompatible number of steps.

    The learning rate may fall until the end of the run. If a new number of steps changes the step
    at which the learning rate stops falling, the learning rates of all steps change. The new number
    is then incompatible, because the run has already taken steps with the old learning rates.
    """
    if (out / STORE_FILE).is_file():
        try:
            recorded = dict(json.loads((out / STORE_FILE).read_text()))
        except (ValueError, TypeError) as error:
            raise TrainingError(
                f"the run cannot be resumed, because {out / STORE_FILE} is damaged. Restore this "
                "file."
            ) from error
        facts = _store_facts(data.store)
        # Compare only facts that are recorded. Earlier releases recorded fewer facts, for example
        # no codec.
        refuse_other_inputs(
            out,
            recorded,
            facts,
            free_to_change=facts.keys() - recorded.keys(),
            advice="Give the store that the run was trained from, or choose another `out` without "
            "`resume`.",
        )
    step = checkpoints.read_step(out / LAST)
    if data.max_steps < step:
        raise OutputOccupied(
            f"the run in {out} has taken {step} steps, more than the {data.max_steps} steps that "
            "are requested now. Give a larger `max_steps` or `epochs`."
        )
    before = _recorded_config(out).schedule.decay_end_step(data.steps_per_epoch)
    now = data.config.schedule.decay_end_step(data.steps_per_epoch)
    if now != before:
        raise OutputOccupied(
            f"with the new number of steps, the learning rate would fall until step {now} and not "
            f"until step {before}, but the run in {out} has already taken {step} steps. Give "
            f"`decay_steps={before}` to continue with the final rate, or start a new run from its "
            f"weights with `init_from={out}`."
        )


def _record_run(data: StoreDataModule, out: Path, provenance: dict[str, Any] | None) -> None:
    store = data.store
    # Record an absolute path, so that `export-drafter` finds the store from any working directory.
    store_path = store.path.absolute() if isinstance(store.path, Path) else store.path
    # Write RUN_FILE first, because it marks the folder as a run. If the process is killed before it
    # has written the other files, the same command can start the run again.
    config = data.config.replaced(store=str(store_path))
    checkpoints.write_beside(out / RUN_FILE, config.to_yaml().encode())
    checkpoints.write_beside(
        out / STORE_FILE, (json.dumps(_store_facts(store), indent=1) + "\n").encode()
    )
    keep_earlier_metrics(out)
    checkpoints.write_beside(
        out / PROVENANCE_FILE, (json.dumps(provenance or {}, indent=1, default=str) + "\n").encode()
    )


def keep_earlier_metrics(run: Path) -> None:
    """Rename metrics.csv of the previous invocation. Lightning's logger would delete it."""
    if (run / METRICS_FILE).is_file():
        earlier = sorted(run.glob("metrics-[0-9][0-9][0-9].csv"))
        # The next file gets the highest existing number plus one. Counting the existing files would
        # not work, because some may have been deleted.
        index = int(earlier[-1].stem[-3:]) + 1 if earlier else 0
        (run / METRICS_FILE).rename(run / f"metrics-{index:03d}.csv")


def read_metrics(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Read all metrics files of a run as a dict from column name to pairs (step, value).

    If a later invocation has repeated steps, its values replace the earlier values.
    """
    series: dict[str, dict[int, float]] = {}
    for file in [*sorted(run.glob("metrics-*.csv")), run / METRICS_FILE]:
        if not file.is_file():
            continue
        with file.open(newline="", encoding="utf-8", errors="replace") as stream:
            # Skip an incomplete last line, which a killed process can leave.
            lines = [line for line in stream if line.endswith("\n")]
        for row in csv.DictReader(lines):
            for name, cell in row.items():
                if name in ("step", "epoch") or not cell:
                    continue
                # Skip values that are not numbers, because an error in a plot must not stop a run.
                with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
                    step = int(float(row["step"]))
                    value = float(cell)
                    series.setdefault(name, {})[step] = value
    return {name: sorted(points.items()) for name, points in series.items()}


def plot_curves(run: Path, out: Path) -> None:
    """Plot loss terms, validation metrics and throughput of a run over the steps."""
    series = read_metrics(run)
    panels = [
        ("Training loss", {"train/loss": "total, weighted", "train/feature_loss": "features"}),
        # As in the Mixture of Attentions paper, the training loss includes the entropy of the
        # target's distribution, so it cannot be compared with the KL divergence of the validation.
        ("Training: KL + the target's entropy, or LK loss", {"train/forward_kl": "nats"}),
        ("Validation: KL from the target, entropy subtracted", {"val/kl": "nats"}),
        ("Validation: top-1 agreement", {"val/top1_agreement": "share of positions"}),
        (
            "Expected acceptance length, including the bonus token",
            {
                "val/expected_acceptance_length": "greedy",
                "val/expected_sampled_length": "samples at temperature 1",
            },
        ),
        ("Throughput", {"train/tokens_per_s": "tokens/s"}),
    ]
    figure, axes = plt.subplots(3, 2, figsize=(11, 10), constrained_layout=True)
    for axis, (title, names) in zip(axes.flat, panels, strict=True):
        for name, label in names.items():
            points = dict(series.get(name, []))
            widths = dict(series.get("val/expected_acceptance_half_width", []))
            if label != "greedy" or widths.keys() != points.keys():
                widths = dict.fromkeys(points, 0.0)
            marker = "." if len(points) < 40 else None
            axis.errorbar(
                list(points),
                list(points.values()),
                list(widths.values()),
                label=label,
                marker=marker,
            )
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend()
    # Use a log scale for losses, because the first losses are many times as large as later ones.
    axes[0, 0].set_yscale("log")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    plt.close(figure)
    checkpoints.write_beside(out, picture.getvalue())
