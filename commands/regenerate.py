"""The command regenerate."""

import click

from ..regeneration.config import RegenerateConfig
from .console import ProgressLine, out, tell
from .options import StageCommand, config_options


@click.command(cls=StageCommand)
@config_options(RegenerateConfig)
@click.option("--dry-run", is_flag=True, help="Say what would be asked, and stop.")
def regenerate(config: RegenerateConfig, dry_run: bool) -> None:
    """Let the target answer the questions of a chat dataset, as chats to extract.

    Drafters learn best from the target's own words. Each turn is asked with the target's own answers before it. A chat
    is kept up to its last answer; rows that give none are counted by reason. Answers are those of plain decoding,
    whatever --drafter proposes.

    Run the same command again to go on after an interruption; the bytes are those of a run that was not interrupted.
    FILE.regeneration.json beside the chats says who answered and how.

    \b
    Examples:
      moa-data regenerate --model ./llama3-8b --drafter runs/moa --dataset HuggingFaceH4/ultrachat_200k \\
          --split train_sft --out chats.jsonl --device cuda --dtype bfloat16 --batch-size 32
      moa-data regenerate --server http://127.0.0.1:8000/v1 --dataset chats.jsonl --out answered --temperature 0.7
    """
    from ..regeneration.run import count_work
    from ..regeneration.run import regenerate as run_regenerate

    with ProgressLine("row") as progress:
        if dry_run:
            work = count_work(config, progress)
        else:

            def tell_between(line: str) -> None:
                progress.close()
                tell(line)

            report = run_regenerate(config, progress, tell_between)
    out.print(work.describe(config) if dry_run else report.describe())
