"""Commands that exchange stores and drafters with the Hugging Face Hub: push, pull."""

from pathlib import Path

import click

from .console import ProgressLine, out


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("repo")
@click.option("--private", is_flag=True, help="Make the repository private; one that is there and public is refused.")
def push(path: Path, repo: str, private: bool) -> None:
    """Push a store or a drafter to the Hugging Face Hub, with its card.

    A store becomes a dataset, a drafter (or the drafter of a run) a model; REPO is OWNER/NAME, and made where it is
    missing. Run the same command again to continue after an interruption. Logs of runs stay here: they tell of paths
    and machines. The token comes from HF_TOKEN.

    \b
    Examples:
      moa-data push store me/llama3-8b-ultrachat --private
      moa-data push runs/moa me/llama3-8b-moa
    """
    from ..pipeline.hub import push as run_push

    report = run_push(path, repo, private)
    out.print(report.describe())


@click.command()
@click.argument("repo")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--revision", metavar="TEXT", help="Branch, tag or commit; default: main.")
def pull(repo: str, path: Path, revision: str | None) -> None:
    """Pull a store or a drafter from the Hugging Face Hub, and check every byte.

    Each file is compared with the hash of its commit, and a store with its own checksums. Run the same command again to
    go on after an interruption. A private repository needs HF_TOKEN.

    \b
    Example:
      moa-data pull me/llama3-8b-ultrachat store
    """
    from ..pipeline.hub import pull as run_pull

    with ProgressLine("B", scaled=True) as progress:
        report = run_pull(repo, path, revision, progress)
    out.print(report.describe())
