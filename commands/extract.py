"""Commands that run the target or write a store.

The commands are regenerate, plan, extract, add, recode, compare, repair and audit.
"""

import json
from dataclasses import asdict

import click

from ..pipeline.config import AddConfig, ExtractConfig, RegenerateConfig
from .console import (
    FOUND,
    ProgressLine,
    StageFailure,
    collect_provenance,
    out,
    run_stage,
    show,
)
from .options import stage_command
from .signals import end_with_input
from .store import check_store

_seed_option = click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of the random numbers that choose the sequences.",
)
_device_option = click.option(
    "--device",
    default="auto",
    show_default=True,
    help="Device that runs the target: auto, cpu, cuda, or one GPU such as cuda:1. auto takes a GPU if "
    "the machine has one, otherwise the CPU.",
)


@stage_command(RegenerateConfig)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Write nothing; print how many answers would be generated, and how long that would take.",
)
def regenerate(config: RegenerateConfig, dry_run: bool) -> None:
    """Let the target answer the questions of a chat dataset, or write the questions too.

    Drafters learn best from text that the target wrote. `moa-data extract` can read the chats that
    this command writes. In chats with several turns, each question follows the target's own earlier
    answers. Rows that cannot be used are counted by reason. --drafter makes the command faster and
    does not change the answers. With --self-prompted no dataset is needed, because the target
    writes the questions too.

    Answered chats are appended to the file of --out in batches. Run the same command again after an
    interruption; the result has the same bytes as an uninterrupted run. The file
    NAME.regeneration.json next to NAME.jsonl records the target and all settings.

    \b
    Examples:
      moa-data regenerate --model ./llama3-8b --drafter runs/moa \\
          --dataset HuggingFaceH4/ultrachat_200k --split train_sft --out chats.jsonl \\
          --device cuda --dtype bfloat16 --batch-size 32
      moa-data regenerate --model ./llama3-8b --self-prompted 20000 --out chats.jsonl \\
          --device cuda --dtype bfloat16
      moa-data regenerate --server http://127.0.0.1:8000/v1 --dataset chats.jsonl --out answered \\
          --temperature 0.7
    """
    from ..pipeline import regenerate as job

    with ProgressLine() as progress:
        text = (
            job.preview(config, progress)
            if dry_run
            else job.regenerate(config, progress).describe(config)
        )
    show(text)


@stage_command(ExtractConfig)
@click.option(
    "--worker",
    type=(int, int),
    hidden=True,
    help="Run as worker K of N of the command that started this process.",
)
def extract(config: ExtractConfig, worker: tuple[int, int] | None) -> None:
    """Run a target over chats and store its activations.

    `moa-data plan` with the same options estimates the cost.

    Run the same command again to continue after an interruption. The parts of the store that are
    finished are kept. If the target, the dataset or a setting that affects the data has changed
    since then, the command refuses to continue and names the change. To add --activations or
    --target-layers to an existing store, use `moa-data add`.

    With --workers N, the command starts N worker processes with one device each. The same command
    can also be started several times, on one machine or on machines that share the disk. They then
    divide the parts of the store among themselves. With --engine ray, workers run on all machines
    of a Ray cluster, and a lost worker is started again.

    \b
    Examples:
      moa-data extract --model meta-llama/Meta-Llama-3-8B-Instruct \\
          --dataset HuggingFaceH4/ultrachat_200k --split train_sft --out stores/llama3-8b
      moa-data extract --model ./tiny-llama --dataset chats.jsonl --out store \\
          --max-sequences 500 --target-layers 1 --activations kv,hidden:last
      moa-data extract --model /shared/llama3-8b --dataset /shared/chats.jsonl \\
          --out /shared/store --engine ray --address auto --workers 64 --gpus-per-worker 1
    """
    from ..pipeline.extract import extract as run_extract

    if worker is None:
        run_stage(run_extract, config, provenance=collect_provenance())
        return
    end_with_input()
    with ProgressLine() as progress:
        report = run_extract(config, progress, share=worker)
    out.print(json.dumps(asdict(report.timings)))


@stage_command(ExtractConfig)
def plan(config: ExtractConfig) -> None:
    """Estimate the cost of an extraction, and recommend a drafter and activations.

    The options are those of `moa-data extract`. The command reads the dataset, the tokenizer and
    the target's config.json, but not its weights. To measure the speed, it runs three batches on
    this machine, with random weights in place of the target's, and writes their activations to the
    disk of --out. Then it prints ranges for bytes, memory and time, and deletes what it has
    written. The command ends with an error if the target does not fit into memory, or if the store
    does not fit on the disk.

    \b
    Example:
      moa-data plan --model ./llama3-8b --dataset HuggingFaceH4/ultrachat_200k --out /data/store
    """
    from ..pipeline.add import refuse_addition
    from ..pipeline.estimate import describe_estimate, has_device
    from ..pipeline.plan import build_plan

    with ProgressLine() as progress:
        extraction_plan = build_plan(config, progress=progress)
    refuse_addition(extraction_plan)
    show(extraction_plan)
    is_here = has_device(extraction_plan.forward.device)
    if is_here:
        extraction_plan.forward.check_memory()
    extraction_plan.check_disk()
    if config.forward.source == "vllm":
        out.print("time         not measured, because `moa-data plan` does not start vLLM")
    elif not is_here:
        out.print(
            "time         not measured, because this machine has no GPU; run `moa-data plan` on a "
            "machine like those of the workers"
        )
    else:
        out.print(describe_estimate(extraction_plan, config.scale.workers))
    for advice in extraction_plan.advice():
        show(f"{advice.topic:<13}{advice.choice}: {advice.reason}")


@stage_command(AddConfig, arguments=("store",))
@click.option(
    "--dry-run", is_flag=True, help="Write nothing; print what would be added, and its cost."
)
def add(config: AddConfig, dry_run: bool) -> None:
    """Add activations to a store. The activations that it already has do not change.

    The command runs the target again over the stored tokens, in the same batches as the extraction.
    The dataset is not needed. The new activations can be read when all parts of the store have
    them. Run the same command again to continue after an interruption.

    \b
    Examples:
      moa-data add store --model ./llama3-8b --activations hidden:layer:1,hidden:layer:15
      moa-data add store --model ./llama3-8b --target-layers 1
    """
    from ..pipeline.add import add as run_add
    from ..pipeline.add import plan_addition
    from ..pipeline.estimate import describe_estimate

    if dry_run:
        plan = plan_addition(config)
        show(plan)
        plan.check_disk()
        if plan.n_tokens and plan.forward.spec.fields:
            out.print(describe_estimate(plan))
        return
    run_stage(run_add, config, provenance=collect_provenance())


@click.command()
@click.argument("store")
@click.option(
    "--codec",
    required=True,
    help="Codec of the new store: lossless, int8, or transform:B with about B bits per value, for "
    "example transform:3. Fewer bits make the store smaller and its values less exact. The full form "
    "is transform:B[,hidden=B][,tokens][,from-kv][,joint][@SCOPE]; docs/codecs.md explains it.",
)
@click.option(
    "--out",
    required=True,
    help="Folder of the new store, or its URL in a bucket.",
)
@click.option(
    "--drafter",
    metavar="RUN",
    help="Only with a transform codec: a drafter that was trained from STORE. Keys and values get "
    "more bits where errors would change its drafts.",
)
def recode(store: str, codec: str, out: str, drafter: str | None) -> None:
    """Copy a lossless store with another codec. The target is not needed.

    The new store is the same as `moa-data extract --codec` would have written; with a transform
    codec it can differ by rounding. Run the same command again to continue after an interruption.
    The report ends with the output of `moa-data compare` for the two stores.

    With --drafter, keys and values get more bits where errors would change the next-token
    distributions of that drafter. The new store then suits drafters that read the same layers in
    the same way. Other drafters may lose more accuracy than without --drafter.

    \b
    Examples:
      moa-data recode store --codec int8 --out store-int8
      moa-data recode store --codec transform:1.0 --out store-small
      moa-data recode store --codec transform:0.86,hidden=3.2,tokens@all --out store-smaller
      moa-data recode store --codec transform:0.3,hidden=1.2,tokens,from-kv@all \\
          --drafter runs/moa --out store-smallest
    """
    from ..pipeline.recode import recode as run_recode

    with ProgressLine() as progress:
        metrics = None
        if drafter is not None:
            from ..moa.formats.checkpoint import load_drafter
            from ..trainer.sensitivity import DrafterMetrics

            metrics = DrafterMetrics(load_drafter(drafter), progress)
        report = run_recode(store, codec, out, progress, collect_provenance(), metrics)
    show(report)


@click.command()
@click.argument("reference")
@click.argument("store")
@click.option(
    "--model",
    help="The target of the stores. If it is given, the command also measures how well the target "
    "continues sequences from the keys and values of each store.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    metavar="N",
    help="Number of sequences to compare.",
)
@_seed_option
@_device_option
def compare(
    reference: str,
    store: str,
    model: str | None,
    samples: int,
    seed: int,
    device: str,
) -> None:
    """Measure the loss of a codec: compare a store with a lossless store of the same chats.

    Prints the bytes per token of both stores, the relative errors of keys, values, hidden states
    and logits, and the KL divergence (Kullback-Leibler) between the next-token distributions that
    the stored hidden states give. The sequences are chosen at random from those that are in both
    stores.

    With --model, the target also runs the second half of each sequence on the stored keys and
    values of the first half. The KL divergence of the resulting distributions is printed as well.

    \b
    Examples:
      moa-data compare store store-small
      moa-data compare store store-small --model ./llama3-8b --samples 64
    """
    from ..pipeline.compare import compare as run_compare

    run_stage(
        run_compare,
        reference,
        store,
        model=model,
        samples=samples,
        seed=seed,
        device=device,
    )


@click.command()
@click.argument("store")
@click.option(
    "--model",
    help="The target of the store. If it is given, damaged and missing parts are extracted again.",
)
@click.option(
    "--dataset",
    help="The dataset of the store. Give it only if it has moved since the last extraction.",
)
@click.option(
    "--device", help="Device that runs the target. Default: the device of the last extraction."
)
@click.option(
    "--drop",
    is_flag=True,
    help="Delete the damaged parts instead of extracting them again. The other parts are kept.",
)
def repair(
    store: str, model: str | None, dataset: str | None, device: str | None, drop: bool
) -> None:
    """Repair a damaged store: extract damaged and missing parts again, or delete the damaged ones.

    Every byte is checked first. With --model, damaged parts are deleted, and then extracted again
    together with missing parts. With --drop, damaged parts are only deleted. Without either option,
    the command only checks the store, as `moa-data verify` does. Run the same command again, or
    `moa-data extract`, to continue after an interruption. If a file cannot be checked, for example
    because this user may not read it, nothing is deleted and the exit code is 2.

    \b
    Examples:
      moa-data repair store
      moa-data repair store --model ./llama3-8b
      moa-data repair store --drop
    """
    if model and drop:
        raise StageFailure(
            "--model and --drop are both given. Give --model, which extracts the damaged parts "
            "again, or --drop, which only deletes them, but not both."
        )
    if model:
        from ..pipeline.extract import repair as run_repair

        run_stage(run_repair, store, model, dataset, device, provenance=collect_provenance())
    elif drop:
        from ..storage.write.repair import drop_damage

        with ProgressLine() as progress:
            damages = drop_damage(store, progress)
        lines = [
            f"{damage.path} was damaged ({damage.message}). It was deleted, with the files that belong "
            "to it."
            for damage in damages
        ]
        out.print("\n".join(lines) or f"{store} has no damage, so nothing was deleted")
    else:
        check_store(store)


@click.command()
@click.argument("store")
@click.option(
    "--model",
    required=True,
    help="The target of the store: a folder, a GGUF file, or a Hugging Face Hub id (OWNER/NAME).",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="N",
    help="Number of sequences to run again.",
)
@_seed_option
@_device_option
def audit(store: str, model: str, samples: int, seed: int, device: str) -> None:
    """Run the target on random sequences of a store, and compare its activations with the store.

    Tokens, masks, keys and values, hidden states and the target's logits are compared. The exit
    code is 1 if a difference exceeds the tolerance.

    \b
    Example:
      moa-data audit store --model ./llama3-8b --samples 20
    """
    from ..pipeline.audit import audit as run_audit

    if not run_stage(run_audit, store, model, samples=samples, seed=seed, device=device).ok:
        raise StageFailure(
            f"the activations of {store} differ from those that {model} computes now by more than "
            "the tolerance. Check that the store was extracted from this target.",
            FOUND,
        )
