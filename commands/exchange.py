"""Commands that exchange data with other projects: export, import, export-drafter, push, pull."""

from pathlib import Path

import click

from ..pipeline.exchange.config import ExportConfig, ImportConfig
from ..trainer.config import DrafterExportConfig
from .console import collect_provenance, out, run_stage, show
from .options import stage_command


@stage_command(ExportConfig, arguments=("store",), name="export")
def export_command(config: ExportConfig) -> None:
    """Write a store in the layout of speculators, SpecForge or EAGLE, or a Parquet index of it.

    In the written files, layers are numbered as in the other project, and the last hidden state is
    taken before or after the final norm, as the project expects it. Run the same command again
    after an interruption. Files that are already written are kept. If the store lacks activations
    that the layout needs, the error names the `moa-data add` command that adds them.

    The index (--format index) has the ids, lengths, tokens, masks and texts of all sequences, and
    the locations of their activations. DuckDB, Polars or `datasets` can select sequences with it.
    To export a drafter, use `moa-data export-drafter`.

    \b
    Examples:
      moa-data export store --format specforge --out hidden_states
      moa-data export store --format index --out index.parquet
    """
    from ..pipeline.exchange.transfer import export_store

    run_stage(export_store, config)


@stage_command(DrafterExportConfig, arguments=("drafter",), name="export-drafter")
def export_drafter_command(config: DrafterExportConfig) -> None:
    """Write a trained drafter in a format that vLLM, SGLang, transformers or other programs load.

    Among the other programs are speculators, and the code of the EAGLE and MoA authors. A drafter
    is refused if the other program would run it differently. For example, a drafter of the kind moa
    must have been trained with --preset paper. The exported folder is loaded again and compared
    with the drafter before it gets its final name. `moa-data eval` and `moa-data generate` accept
    the folder as --drafter.

    \b
    Examples:
      moa-data export-drafter runs/eagle --format vllm-eagle --out eagle-vllm
      moa-data export-drafter runs/paper --format moa --model ./llama3-8b --out moa-official
    """
    from ..trainer.export import export_drafter

    show(export_drafter(config))


@stage_command(ImportConfig, arguments=("folder",), name="import")
def import_command(config: ImportConfig) -> None:
    """Create a store from files of speculators, SpecForge or EAGLE.

    The target's final norm, embeddings and LM head are copied to the store. The target is not run.

    \b
    Example:
      moa-data import hidden_states --format specforge --model ./llama3-8b --out store
    """
    from ..pipeline.exchange.transfer import import_folder

    run_stage(import_folder, config, provenance=collect_provenance())


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("repo")
@click.option(
    "--private",
    is_flag=True,
    help="Create a private repository. If the repository exists and is public, nothing is pushed.",
)
def push(path: Path, repo: str, private: bool) -> None:
    """Push a store or a drafter to the Hugging Face Hub, with its card.

    PATH is a store, a run, or a folder with a drafter. On the Hub, a store becomes a dataset, and a
    drafter becomes a model. REPO is OWNER/NAME; it is created if it does not exist. Run the same
    command again to continue after an interruption. The logs of a run are not pushed, because they
    reveal paths and machines. The access token is read from the environment variable HF_TOKEN.

    \b
    Examples:
      moa-data push store me/llama3-8b-ultrachat --private
      moa-data push runs/moa me/llama3-8b-moa
    """
    from ..pipeline.hub import push as run_push

    out.print(run_push(path, repo, private))


@click.command()
@click.argument("repo")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--revision", metavar="TEXT", help="Branch, tag or commit of the repository. Default: main."
)
def pull(repo: str, path: Path, revision: str | None) -> None:
    """Pull a store or a drafter from the Hugging Face Hub, and check every byte.

    Each file is compared with the hash that the Hub has for it. A store is also compared with its
    own checksums. Run the same command again to continue after an interruption. For a private
    repository, set the environment variable HF_TOKEN to your access token.

    \b
    Example:
      moa-data pull me/llama3-8b-ultrachat store
    """
    from ..pipeline.hub import pull as run_pull

    run_stage(run_pull, repo, path, revision)
