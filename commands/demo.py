"""The command demo."""

import click

from ..demo.config import DemoConfig
from .console import ProgressLine, out
from .options import StageCommand, config_options
from .provenance import collect_provenance


@click.command(cls=StageCommand)
@config_options(DemoConfig)
def demo(config: DemoConfig) -> None:
    """Show the whole idea on a small machine, without network, in a few minutes.

    Generates chats, trains a tiny target on them, extracts its activations, trains a drafter from the store, decodes
    held-out prompts with it, and serves one answer over a network that is cut on the way. Running it again reuses what
    is finished.

    \b
    Example:
      moa-data demo --out demo-output
    """
    from ..demo.run import run_demo

    with ProgressLine("") as progress:
        report = run_demo(config, progress=progress, provenance=collect_provenance())
    out.print(report.describe())
