"""Commands on an existing store: look at it, check it, mend it, recode it, exchange it."""

from pathlib import Path

import click

from ..pipeline.config import AddConfig
from ..pipeline.exchange.config import ExportConfig, ImportConfig
from ..trainer.config import DrafterExportConfig
from .console import Findings, ProgressLine, StageFailure, out
from .options import config_options
from .provenance import collect_provenance


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--sample", type=int, metavar="I", help="Show sequence I, with the trained response in colour.")
def inspect(store: Path, sample: int | None) -> None:
    """Show what a store holds: identities, conventions, activations, sizes, lengths.

    \b
    Examples:
      moa-data inspect store
      moa-data inspect store --sample 3
    """
    from ..storage.care.summary import summarize_store
    from .views import sample_view, summary_view

    if sample is None:
        out.print(summary_view(summarize_store(store)))
        return
    from ..moa.target.live import load_target_tokenizer
    from ..storage.read.store import ActivationStore

    with ActivationStore(store) as reader:
        if not 0 <= sample < len(reader):
            raise StageFailure(f"--sample is {sample}, the store has {len(reader)} sequences, counted from 0.")
        tokenizer = load_target_tokenizer(reader.target_path)
        tokens, mask = reader.read(sample, "tokens").tolist(), reader.read(sample, "response_mask").tolist()
        row = {name: reader.sequences[name][sample].as_py() for name in reader.sequences.column_names}
        out.print(sample_view(row, tokens, mask, lambda ids: str(tokenizer.decode(ids))))


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option(
    "--codec",
    required=True,
    help="lossless, int8, int6 or transform:<bits per value>[,hidden=<bits>][,tokens][@<scope>].",
)
@click.option("--out", "folder", required=True, type=click.Path(path_type=Path), help="Folder of the new store.")
def recode(store: Path, codec: str, folder: Path) -> None:
    """Write a lossless store again with another codec, without the target.

    Gives what `extract --codec` would have given, with a transform codec up to rounding. Run the same command again to
    go on after an interruption.

    \b
    Examples:
      moa-data recode store --codec int8 --out store-int8
      moa-data recode store --codec transform:1.0 --out store-small
      moa-data recode store --codec transform:0.88,hidden=1.55,tokens@all --out store-smaller
    """
    from ..pipeline.recode import recode as run_recode

    with ProgressLine("tok") as progress:
        report = run_recode(store, codec, folder, progress=progress, provenance=collect_provenance())
    out.print(report.describe())


@click.command()
@config_options(AddConfig, arguments=("store",))
@click.option("--dry-run", is_flag=True, help="Print what would be added and what it costs, and stop.")
def add(config: AddConfig, dry_run: bool) -> None:
    """Add activations to a store; what it holds already is kept, byte for byte.

    Runs the target again over the stored tokens, in the batches of the extraction; the dataset is not needed. Until all
    parts have the new fields the store is as it was. Run the same command again to go on after an interruption.

    \b
    Examples:
      moa-data add store --model ./llama3-8b --activations hidden:layer:1,hidden:layer:15
      moa-data add store --model ./llama3-8b --target-layers 1
    """
    from ..pipeline.add import add as run_add
    from ..pipeline.add_plan import plan_addition

    if dry_run:
        plan = plan_addition(config)
        out.print(plan.describe())
        plan.check_disk()
        return
    with ProgressLine("tok") as progress:
        report = run_add(config, progress=progress, provenance=collect_provenance())
    out.print(report.describe())


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--checksums-only", is_flag=True, help="Compare all bytes, decode no values: as fast as the disk reads.")
def verify(store: Path, checksums_only: bool) -> None:
    """Check every byte of a store: sizes, checksums, counts, finite values.

    Exit code 1 if anything is damaged; each damage names its part. Exit code 2 if anything could not be checked, which
    is no damage; neither are parts that are still to be extracted.

    \b
    Examples:
      moa-data verify store
      moa-data verify store --checksums-only
    """
    from ..storage.care.verify import verify_store
    from .views import verify_view

    with ProgressLine("B", scaled=True) as progress:
        report = verify_store(store, progress=progress, values=not checksums_only)
    out.print(verify_view(report))
    report.check_complete(store)
    if not report.ok:
        raise Findings(f"{store} is damaged in {len(report.damages)} places; `moa-data repair` mends it.")


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--model", help="Extract what is damaged again with this target, the one the store was made with.")
@click.option("--dataset", help="The chats, if they are no longer where the store's last extraction found them.")
@click.option("--device", help="Device of the forward; default: as in the store's last extraction.")
@click.option("--drop", is_flag=True, help="Delete the damaged parts instead; the store goes on without them.")
def repair(store: Path, model: str | None, dataset: str | None, device: str | None, drop: bool) -> None:
    """Mend a damaged store: extract the damaged parts again, or drop them.

    Without --model and --drop it verifies the store, lists the damage and changes nothing; exit code 1 if there is any.
    Where a file could not be checked (too many open files, no right to read it) nothing is changed: exit code 2.

    \b
    Examples:
      moa-data repair store
      moa-data repair store --model ./llama3-8b
      moa-data repair store --drop
    """
    if model and drop:
        raise StageFailure("give --model to extract the damaged parts again, or --drop to delete them, not both.")
    from ..storage.care.repair import drop_damage, plan_repair

    with ProgressLine("B", scaled=True) as progress:
        damage = plan_repair(store, progress=progress)
    out.print(damage.describe() or f"{store} is whole, there is nothing to repair")
    if not damage.damages:
        return
    if drop:
        dropped = drop_damage(damage)
        out.print(f"dropped: {len(dropped)} parts{' and the target bundle' * damage.target}")
        return
    if model is None:
        raise Findings(f"{store} is damaged. Repair it with --model MODEL, or delete the damaged parts with --drop.")
    from ..pipeline.repair import repair as run_repair

    with ProgressLine("tok") as progress:
        report = run_repair(damage, model, dataset, device, progress, collect_provenance())
    out.print(report.describe())


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="The target the store was made with: a folder or a hub id.")
@click.option("--samples", default=8, show_default=True, metavar="N", help="Sequences to run again.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Picks the sequences."
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
def audit(store: Path, model: str, samples: int, seed: int, device: str) -> None:
    """Run random sequences on the live target and compare with the store.

    Compares tokens, masks, keys and values, hidden states and the teacher's logits. Exit code 1 if anything is out of
    tolerance.

    \b
    Example:
      moa-data audit store --model ./llama3-8b --samples 20
    """
    from ..pipeline.audit import audit as run_audit

    with ProgressLine("seq") as progress:
        report = run_audit(store, model, samples=samples, seed=seed, device=device, progress=progress)
    out.print(report.describe())
    if not report.ok:
        raise Findings(f"{store} differs from {model} beyond the tolerance.")


@click.command("export")
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

    with ProgressLine("seq") as progress:
        report = export_store(config, progress=progress)
    out.print(report.describe())


@click.command("export-drafter")
@config_options(DrafterExportConfig, arguments=("drafter",))
def export_drafter_command(config: DrafterExportConfig) -> None:
    """Write a trained drafter for vLLM, SGLang, or the code of the authors of EAGLE or MoA.

    A drafter that the other program would run differently is refused. The folder is loaded again and compared before it
    gets its name; --drafter of `eval` and `generate` takes it, too.

    \b
    Examples:
      moa-data export-drafter runs/eagle --format vllm-eagle --out eagle-vllm
      moa-data export-drafter runs/moa --format moa --model ./llama3-8b --out moa-official
    """
    from ..trainer.export import export_drafter

    out.print(export_drafter(config).describe())


@click.command("import")
@config_options(ImportConfig, arguments=("folder",))
def import_command(config: ImportConfig) -> None:
    """Make a store from files of speculators, SpecForge or EAGLE.

    The target gives the store its norm, embeddings and LM head; its layers are not run.

    \b
    Example:
      moa-data import hidden_states --format specforge --model ./llama3-8b --out store
    """
    from ..pipeline.exchange.importing import import_folder

    with ProgressLine("seq") as progress:
        report = import_folder(config, progress=progress, provenance=collect_provenance())
    out.print(report.describe())
