"""Commands that exchange data with other projects: export, import, export-drafter."""

import click

from ..pipeline.exchange.config import ExportConfig, ImportConfig
from ..trainer.config import DrafterExportConfig
from .console import ProgressLine, out
from .options import StageCommand, config_options
from .provenance import collect_provenance


@click.command("export", cls=StageCommand)
@config_options(ExportConfig, arguments=("store",))
def export_command(config: ExportConfig) -> None:
    """Write a store in the layout of speculators, SpecForge or EAGLE; `export-drafter` writes drafters.

    Numbers of layers and norms are converted; files that are there already are kept. If the store lacks a field that
    the layout needs, the command names the `moa-data add` that adds it.

    \b
    Example:
      moa-data export store --format specforge --out hidden_states
    """
    from ..pipeline.exchange.exporting import export_store

    with ProgressLine("sequence") as progress:
        report = export_store(config, progress=progress)
    out.print(report.describe())


@click.command("export-drafter", cls=StageCommand)
@config_options(DrafterExportConfig, arguments=("drafter",))
def export_drafter_command(config: DrafterExportConfig) -> None:
    """Write a trained drafter for vLLM, SGLang, or the code of the authors of EAGLE or MoA.

    A drafter that the other program would run differently is refused; of `moa` drafters that are those not trained with
    --preset paper. The folder is loaded again and compared before it gets its name; --drafter of `eval` and `generate`
    takes it, too.

    \b
    Examples:
      moa-data export-drafter runs/eagle --format vllm-eagle --out eagle-vllm
      moa-data export-drafter runs/paper --format moa --model ./llama3-8b --out moa-official
    """
    from ..trainer.export import export_drafter

    out.print(export_drafter(config).describe())


@click.command("import", cls=StageCommand)
@config_options(ImportConfig, arguments=("folder",))
def import_command(config: ImportConfig) -> None:
    """Make a store from files of speculators, SpecForge or EAGLE.

    The target gives the store its norm, embeddings and LM head; its layers are not run.

    \b
    Example:
      moa-data import hidden_states --format specforge --model ./llama3-8b --out store
    """
    from ..pipeline.exchange.importing import import_folder

    with ProgressLine("sequence") as progress:
        report = import_folder(config, progress=progress, provenance=collect_provenance())
    out.print(report.describe())
