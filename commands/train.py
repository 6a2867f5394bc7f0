"""Commands that train: train, demo."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from ..demo.config import DemoConfig
from ..errors import RunWarning
from ..text import counted
from ..trainer.config import PRESETS, TrainConfig, earlier_settings
from .console import ProgressLine, as_options, collect_provenance, out, run_stage, tell
from .options import stage_command


def _show_warning(
    others: Callable[..., None], message: Warning | str, category: type[Warning], *rest: Any
) -> None:
    """Show a warning about a training run as one line, and any other warning as Python does."""
    if issubclass(category, RunWarning):
        tell(as_options(str(message)))
    else:
        others(message, category, *rest)


@stage_command(TrainConfig, arguments=("store",), presets=PRESETS, earlier=earlier_settings)
def train(config: TrainConfig) -> None:
    """Train a drafter from a store. The target is never loaded.

    Checkpoints (best and last), logs (CSV and TensorBoard), all settings, a picture of the training
    curves and the drafter are written to --out. --resume continues a run from its last checkpoint
    with its settings; on a CPU the result is the same, bit for bit, as without the interruption.
    --resume with a larger --max-steps makes the run longer. --init-from starts a new run from the
    weights of another one.

    Settings that are not given are chosen from the target's size, the number of tokens and the
    length of the run: epochs, optimizer, learning rate, warm-up, decay, batch and validation. The
    command prints its choices and the reasons. --preset paper trains Mixture of Attentions as
    published, which `moa-data export-drafter --format moa` requires.

    A batch is processed in micro-batches, and their gradients are accumulated. On a GPU, a
    micro-batch has as many sequences as fit into memory; trial steps find this number. On a CPU, a
    micro-batch has at most 2,048 tokens. --micro-batch-size sets the number of sequences in a
    micro-batch, which changes the result only by rounding. --dry-run prints the chosen settings and
    the time, memory and disk space that the run needs, and writes nothing.

    With several devices, each batch is divided among them, which changes the result only by
    rounding. On several machines, run the command under torchrun or srun, with --num-nodes.

    \b
    Examples:
      moa-data train store --out runs/moa
      moa-data train store --out runs/eagle --drafter eagle --max-steps 340
      moa-data train store --out runs/moa --dry-run
      moa-data train store --out runs/moa --devices 8 --logger wandb
      torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
          -m moa_data train store --out runs/moa --num-nodes 2 --devices 8
      moa-data train store --out runs/moa --resume
      moa-data train store --out runs/moa --resume --max-steps 4000
      moa-data train other-store --out runs/more --init-from runs/moa
      moa-data train store --out runs/moa --config run.yaml --learning-rate 1e-4
    """
    from ..trainer.fit import RunPlan, plan_run
    from ..trainer.fit import train as run_train
    from .views import run_plan_view, train_view

    def announce(plan: RunPlan) -> None:
        out.print(run_plan_view(plan))
        for warning in plan.warnings:
            tell(f"warning: {as_options(warning)}.")

    if config.dry_run:
        announce(plan_run(config))
        return

    with ProgressLine() as progress, warnings.catch_warnings():
        warnings.showwarning = partial(_show_warning, warnings.showwarning)
        report = run_train(
            config,
            progress=progress,
            provenance=collect_provenance(),
            announce=announce,
        )
    out.print(train_view(report))
    if report.n_pending_parts:
        tell(
            f"The drafter was trained without {counted(report.n_pending_parts, 'part')} of "
            f"{config.store}, because the store is not complete yet."
        )


@stage_command(DemoConfig)
def demo(config: DemoConfig) -> None:
    """Run all steps of moa-data on a small machine, without network, in a few minutes.

    The demo generates chats, trains a tiny target on them, extracts its activations, and trains a
    drafter from the store. Then it decodes held-out prompts with the drafter, and serves one answer
    over a network that is cut in the middle. If the demo runs again, it reuses finished phases.

    With --model, the demo uses a pretrained target, which writes the chats itself. For smollm2,
    this takes about 20 minutes on two cores.

    \b
    Examples:
      moa-data demo --out demo-output
      moa-data demo --model smollm2 --out runs/demo-real
    """
    from ..demo.run import run_demo

    run_stage(run_demo, config, provenance=collect_provenance())
