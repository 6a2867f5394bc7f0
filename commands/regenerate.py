"""The command regenerate."""

import click

from ..pipeline.config import RegenerateConfig
from .console import ProgressLine, out
from .options import StageCommand, config_options


@click.command(cls=StageCommand)
@config_options(RegenerateConfig)
@click.option("--dry-run", is_flag=True, help="Say what would be asked, and stop.")
def regenerate(config: RegenerateConfig, dry_run: bool) -> None:
    """Let the target answer the questions of a chat dataset, as chats to extract.

    Drafters learn best from the target's own words. Each turn is asked with the target's own answers before it. A chat
    is kept up to its last answer; rows that give none are counted by reason. Answers are those of plain decoding,
    whatever --drafter proposes.

    Answered chats are appended to FILE batch by batch; run the same command again after an interruption, and the bytes
    are those of a run that was not interrupted. FILE.regeneration.json beside it says who answered, how, and how far.

    \b
    Examples:
      moa-data regenerate --model ./llama3-8b --drafter runs/moa --dataset HuggingFaceH4/ultrachat_200k \\
          --split train_sft --out chats.jsonl --device cuda --dtype bfloat16 --batch-size 32
      moa-data regenerate --server http://127.0.0.1:8000/v1 --dataset chats.jsonl --out answered --temperature 0.7
    """
    from ..pipeline import regenerate as job

    with ProgressLine("row") as progress:
        if dry_run:
            text = job.count_work(config, progress).describe(config)
        else:
            text = job.regenerate(config, progress).describe(config)
    out.print(text)
