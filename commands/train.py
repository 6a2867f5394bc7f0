"""The command train."""

import sys

import click

from ..trainer.config import PRESETS, TrainConfig
from .console import out, tell
from .options import StageCommand, config_options
from .provenance import collect_provenance

_SHOWN = {
    "Run": "out resume stop_after_steps seed",
    "Drafter": "drafter target_layer_inference",
    "Length and learning rate": "max_steps epochs learning_rate decay_steps optimizer",
    "Batches": "batch_size micro_batch_size",
    "Validation and records": "validation_fraction validate_every draft_length log_every checkpoint_every",
    "Machine": "accelerator devices precision",
}


@click.command(cls=StageCommand)
@config_options(TrainConfig, arguments=("store",), shown=_SHOWN, presets=PRESETS)
def train(config: TrainConfig) -> None:
    """Train a drafter from a store; the target is never loaded.

    Writes checkpoints (best and last), CSV and TensorBoard logs, the resolved configuration and a PNG of the curves
    to --out. With --resume it goes on from the last checkpoint, bit for bit on a CPU.

    The defaults suit targets of 7B and more. --preset small is for targets of some million weights: Muon, batches of 8,
    a learning rate that decays over the whole run. --preset paper is Mixture of Attentions as published, and what
    `export-drafter --format moa` takes. Where memory is short, lower --micro-batch-size: the result differs by rounding
    alone.

    \b
    Examples:
      moa-data train store --out runs/moa --max-steps 2000
      moa-data train store --out runs/small --preset small --max-steps 340
      moa-data train store --out runs/moa --resume
      moa-data train store --out runs/moa --config run.yaml --learning-rate 1e-4
    """
    from ..trainer.run import train as run_train
    from .views import train_view

    report = run_train(config, provenance=collect_provenance(), progress_bar=sys.stderr.isatty())
    out.print(train_view(report))
    if report.n_pending_parts:
        tell(
            f"{report.n_pending_parts} parts of {config.store} are not extracted yet; the drafter saw the others only."
        )
