"""Where a run's figures go: CSV and TensorBoard files always, Weights & Biases or MLflow where asked for."""

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from ...errors import TrainingError
from ...machine import is_first_process
from ...storage.disk.durable import write_atomic
from ...text import first_line
from ..config import TrainConfig
from ..files import TRACKER_FILE


def check_logger(config: TrainConfig) -> None:
    """Refuse a logger whose package is not installed, or that is not told where to log.

    Raises:
        TrainingError: naming the package or the setting.
    """
    name = config.record.logger
    if name is not None and importlib.util.find_spec(name) is None:
        raise TrainingError(_missing(name))
    if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
        # Its own default, files in the folder that the command is run in, is refused by its newer releases.
        raise TrainingError(
            "--logger mlflow needs a place: set MLFLOW_TRACKING_URI to a server (http://host:5000) or a database "
            "(sqlite:////folder/mlflow.db, with mlflow in place of mlflow-skinny)."
        )


def build_loggers(config: TrainConfig) -> list[Logger]:
    """Make the loggers of a run; one that is resumed goes on with its entry in the tracker.

    Accounts, servers and whether to stay offline are the tracker's own settings: its environment variables.
    """
    out = Path(config.out)
    loggers = [CSVLogger(out, name="", version=""), TensorBoardLogger(out, name="tensorboard", version="")]
    if config.record.logger is not None:
        with _telling_errors(config.record.logger):
            loggers.append(_tracker(config, out))
    return loggers


def _tracker(config: TrainConfig, out: Path) -> WandbLogger | MLFlowLogger:
    kind, project, file = config.record.logger, config.record.project, out / TRACKER_FILE
    known = json.loads(file.read_text()).get(kind) if config.resume and file.is_file() else None
    name = out.resolve().name
    tracker: WandbLogger | MLFlowLogger
    if kind == "wandb":
        tracker = WandbLogger(name=name, project=project, save_dir=out, id=known, resume="allow")
    else:
        tracker = MLFlowLogger(experiment_name=project, run_name=name, run_id=known)
    if is_first_process() and known is None:  # MLflow refuses settings that have changed since
        tracker.log_hyperparams(config.named())
        write_atomic(file, (json.dumps({kind: str(tracker.version)}) + "\n").encode())
    return tracker


@contextlib.contextmanager
def _telling_errors(name: str) -> Iterator[None]:
    """Turn what a tracker says of its account, its server or its installation into one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise TrainingError(f"{_missing(name)} ({first_line(error)})") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != name:
            raise
        raise TrainingError(f"{name} refuses the run: {first_line(error)}") from error


def _missing(name: str) -> str:
    return f'--logger {name} needs a package that is not installed: pip install "moa-data[{name}]"'
