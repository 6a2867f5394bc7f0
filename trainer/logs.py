"""What a run writes for people: CSV and TensorBoard files, a tracker where asked for, and the picture of its curves."""

import contextlib
import csv
import importlib.util
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import matplotlib
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from ..errors import TrainingError
from ..files import write_atomic
from ..machine import is_first_process
from ..text import first_line
from .config import METRICS_FILE, TRACKER_FILE, TrainConfig

matplotlib.use("Agg")  # no display is needed; before pyplot is imported
import matplotlib.pyplot as plt


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
    """Make the loggers of a run; a resumed run continues its entry in the tracker.

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


def keep_earlier_metrics(run: Path) -> None:
    """Move metrics.csv of an earlier invocation aside; Lightning's logger would delete it."""
    if (run / METRICS_FILE).is_file():
        earlier = sorted(run.glob("metrics-[0-9][0-9][0-9].csv"))
        index = int(earlier[-1].stem[-3:]) + 1 if earlier else 0  # not their number: one of them may be gone
        (run / METRICS_FILE).rename(run / f"metrics-{index:03d}.csv")


def read_metrics(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Read all metrics files of a run: column -> (step, value) pairs; a later invocation replaces what it repeats."""
    series: dict[str, dict[int, float]] = {}
    for file in [*sorted(run.glob("metrics-*.csv")), run / METRICS_FILE]:
        if not file.is_file():
            continue
        with file.open(newline="", encoding="utf-8", errors="replace") as stream:
            whole = [line for line in stream if line.endswith("\n")]  # a kill can tear the last one
        for row in csv.DictReader(whole):
            for name, cell in row.items():
                if name in ("step", "epoch") or not cell:
                    continue
                # A plot must not end a training: what is no number is left out.
                with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
                    step, value = int(float(row["step"])), float(cell)
                    series.setdefault(name, {})[step] = value
    return {name: sorted(points.items()) for name, points in series.items()}


def plot_curves(run: Path, out: Path) -> None:
    """Plot loss terms, validation metrics, and throughput of a run against the step."""
    series = read_metrics(run)
    panels = [
        ("Training loss", {"train/loss": "total, weighted", "train/feature_loss": "features"}),
        # As in the paper, the target's entropy is not subtracted: its value is not comparable with the KL below.
        ("Training: KL + the target's entropy, or LK loss", {"train/forward_kl": "nats"}),
        ("Validation: KL from the target, entropy subtracted", {"val/kl": "nats"}),
        ("Validation: top-1 agreement", {"val/top1_agreement": "share of positions"}),
        ("Expected acceptance length", {"val/expected_acceptance_length": "tokens per target call, bonus included"}),
        ("Throughput", {"train/tokens_per_s": "tokens/s"}),
    ]
    figure, axes = plt.subplots(3, 2, figsize=(11, 10), constrained_layout=True)
    for axis, (title, names) in zip(axes.flat, panels, strict=True):
        for name, label in names.items():
            points = series.get(name, [])
            axis.plot(
                [p[0] for p in points], [p[1] for p in points], label=label, marker="." if len(points) < 40 else None
            )
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0, 0].set_yscale("log")  # the first losses are many times the later ones
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    plt.close(figure)
    write_atomic(out, picture.getvalue())
