"""Commands that read a store: inspect, verify."""

from collections.abc import Callable
from pathlib import Path

import click

from ..text import counted
from .console import FOUND, INCOMPLETE, ProgressLine, StageFailure, out, tell


@click.command()
@click.argument("store")
@click.option(
    "--sequence",
    type=int,
    metavar="I",
    help="Show the text of sequence I, counted from 0, with the response in colour.",
)
def inspect(store: str, sequence: int | None) -> None:
    """Show what a store contains: activations, sizes, lengths, target, dataset and settings.

    \b
    Examples:
      moa-data inspect store
      moa-data inspect store --sequence 3
      moa-data inspect s3://bucket/store
    """
    from ..storage.read.verify import summarize_store
    from .views import sample_view, summary_view

    if sequence is None:
        out.print(summary_view(summarize_store(store)))
        return
    from ..storage.read.store import ActivationStore

    with ActivationStore(store) as reader:
        if not 0 <= sequence < len(reader):
            raise StageFailure(
                f"--sequence is {sequence}, expected a number of at least 0 and below {len(reader)}, "
                f"which is the number of sequences in {store}."
            )
        tokens = reader.read(sequence, "tokens").tolist()
        mask = reader.read(sequence, "response_mask").tolist()
        (row,) = reader.sequences.slice(sequence, 1).to_pylist()
        out.print(sample_view(row, tokens, mask, _decoder(reader.target_path)))


def _decoder(target: Path) -> Callable[[list[int]], str]:
    """Return a function that decodes a list of token ids to text.

    If the library for tokenizers is not installed, the returned function writes the ids as decimal
    numbers instead.
    """
    try:
        from ..moa.targets.live import load_target_tokenizer
    except ModuleNotFoundError as error:
        tell(
            f"Token ids are shown instead of text, because {error.name} is not installed. To see "
            "the text, run pip install 'moa-data[extract]'."
        )
        return lambda ids: " ".join(map(str, ids))
    tokenizer = load_target_tokenizer(target)
    return lambda ids: str(tokenizer.decode(ids))


@click.command()
@click.argument("store")
@click.option(
    "--checksums-only",
    is_flag=True,
    help="Only compare the checksums of all files. This is faster, because values are not decoded.",
)
def verify(store: str, checksums_only: bool) -> None:
    """Check every byte of a store: sizes and checksums of files, counts, and finite values.

    The exit code is 0 if the store is complete and undamaged, 1 if parts are damaged, 2 if files
    could not be checked (they may be undamaged), and 3 if no part is damaged, but parts are
    missing. Damaged files are listed with their parts.

    \b
    Examples:
      moa-data verify store
      moa-data verify store --checksums-only
      moa-data verify s3://bucket/store --checksums-only
    """
    check_store(store, values=not checksums_only)


def check_store(store: str, values: bool = True) -> None:
    """Check a store and print the result.

    Raises:
        StageFailure: the store is damaged, incomplete, or could not be checked.
    """
    from ..storage.read.verify import verify_store
    from .views import COMPLETE_IT, verify_view

    with ProgressLine() as progress:
        report = verify_store(store, progress=progress, values=values)
    out.print(verify_view(report))
    report.check_complete(store)
    if not report.ok:
        raise StageFailure(
            f"{store} is damaged in {counted(len(report.damages), 'place')}. `moa-data repair` "
            "extracts the damaged parts again (--model MODEL) or deletes them (--drop).",
            FOUND,
        )
    if report.missing:
        raise StageFailure(f"{store} is incomplete: {report.missing}. {COMPLETE_IT}", INCOMPLETE)
