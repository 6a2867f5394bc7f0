"""Where a run's figures go: CSV and TensorBoard files always, Weights & Biases or MLflow where asked for."""

import importlib.util
import json
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from ...machine import is_first_process
from ...storage.disk.durable import write_atomic
from ...text import first_line
from ..config import TrainConfig
from ..errors import LoggerMissing
from ..files import TRACKER_FILE


def check_logger(config: TrainConfig) -> None:
    """Refuse a logger whose package is not installed.

    Raises:
        LoggerMissing: naming the package.
    """
    name = config.record.logger
    if name is not None and importlib.util.find_spec(name) is None:
        raise LoggerMissing(_missing(name))


def _missing(name: str) -> str:
    return f'--logger {name} needs a package that is not installed: pip install "moa-data[{name}]"'


def build_loggers(config: TrainConfig) -> list[Logger]:
    """Make the loggers of a run; one that is resumed goes on with its entry in the tracker.

    Accounts, servers and whether to stay offline are the tracker's own settings: its environment variables.
    """
    out = Path(config.out)
    loggers = [CSVLogger(out, name="", version=""), TensorBoardLogger(out, name="tensorboard", version="")]
    if config.record.logger is not None:
        loggers.append(_tracker(config, out))
    return loggers


def _tracker(config: TrainConfig, out: Path) -> WandbLogger | MLFlowLogger:
    kind, project, file = config.record.logger, config.record.project, out / TRACKER_FILE
    known = json.loads(file.read_text()).get(kind) if config.resume and file.is_file() else None
    name = out.resolve().name
    tracker: WandbLogger | MLFlowLogger
    try:
        if kind == "wandb":
            tracker = WandbLogger(name=name, project=project, save_dir=out, id=known, resume="allow")
        else:
            tracker = MLFlowLogger(experiment_name=project, run_name=name, run_id=known)
    except ModuleNotFoundError as error:  # a part of the package is missing
        raise LoggerMissing(f"{_missing(str(kind))} ({first_line(error)})") from error
    if is_first_process():
        tracker.log_hyperparams(config.named())
        write_atomic(file, (json.dumps({kind: str(tracker.version)}) + "\n").encode())
    return tracker
