"""The command eval."""

import click

from ..errors import ReportUnwritten
from ..evaluation.config import EvalConfig
from .console import ProgressLine, out, tell
from .options import StageCommand, config_options
from .provenance import collect_provenance


@click.command("eval", cls=StageCommand)
@config_options(EvalConfig)
def evaluate(config: EvalConfig) -> None:
    """Measure drafters: acceptance length, target calls and tokens/s beside plain decoding.

    All methods decode the same prompts in alternation. The prompts are chats (jsonl; the last assistant turn is left
    out) or Spec-Bench questions (multi-turn). Acceptance length = tokens committed per target call, bonus token
    included. Beside it stands what each drafter's training cost, with a warning where drafters were not trained alike.

    With --disconnect N the target also answers up to cuts, from where each drafter writes N tokens without it: the
    report has a section on how far they agree with the target.

    \b
    Examples:
      moa-data eval --model ./llama3-8b --drafter runs/moa --prompts test.jsonl --out report.json
      moa-data eval --model ./llama3-8b --drafter runs/moa,runs/eagle --prompts spec_bench.jsonl \\
          --method plain,chain,tree,auto,prompt-lookup --repeats 3
      moa-data eval --model ./llama3-8b --prompts test.jsonl --method plain,plain     how much is noise
      moa-data eval --model ./llama3-8b --drafter runs/moa --prompts gsm8k.jsonl --method plain \\
          --disconnect 256 --scorer my_scores.py:exact_answer
    """
    from ..evaluation.run import evaluate as run_evaluate
    from ..evaluation.views import markdown_report

    with ProgressLine("prompt") as progress:
        try:
            report = run_evaluate(config, progress=progress, provenance=collect_provenance())
        except ReportUnwritten as error:
            out.print(error.markdown)  # what was measured is not lost
            raise
    out.print(markdown_report(report))
    for warning in report.warnings:
        tell(f"not trained alike: {warning}.")
