"""Commands that measure drafters: eval, disconnect."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..errors import ReportUnwritten
from ..evaluation.config import DisconnectConfig, EvalConfig
from .console import ProgressLine, out, tell
from .options import StageCommand, config_options
from .provenance import collect_provenance

_Report = TypeVar("_Report")


def _shown_if_unwritten(run: Callable[..., _Report], *args: Any, **options: Any) -> _Report:
    """Run a measurement; print its report where it cannot be written."""
    try:
        return run(*args, **options)
    except ReportUnwritten as error:
        out.print(error.markdown)
        raise


@click.command("eval", cls=StageCommand)
@config_options(EvalConfig)
def evaluate(config: EvalConfig) -> None:
    """Measure drafters: acceptance length, target calls and tokens/s beside plain decoding.

    All methods decode the same prompts in alternation. The prompts are chats (jsonl; the last assistant turn is left
    out) or Spec-Bench questions (multi-turn). Acceptance length = tokens committed per target call, bonus token
    included. Beside it stands what each drafter's training cost, with a warning where drafters were not trained alike.

    \b
    Examples:
      moa-data eval --model ./llama3-8b --drafter runs/moa --prompts test.jsonl --out report.json
      moa-data eval --model ./llama3-8b --drafter runs/moa,runs/eagle --prompts spec_bench.jsonl \\
          --method plain,chain,tree,auto,prompt-lookup --repeats 3
      moa-data eval --model ./llama3-8b --prompts test.jsonl --method plain,plain     how much is noise
    """
    from ..evaluation.markdown import markdown_report
    from ..evaluation.run import evaluate as run_evaluate

    with ProgressLine("prompt") as progress:
        report = _shown_if_unwritten(run_evaluate, config, progress=progress, provenance=collect_provenance())
    out.print(markdown_report(report))
    for warning in report.warnings:
        tell(f"not trained alike: {warning}.")


@click.command(cls=StageCommand)
@config_options(DisconnectConfig)
def disconnect(config: DisconnectConfig) -> None:
    """Measure drafters that go on alone: what they write when the target can no longer be reached.

    The target answers each prompt up to a cut, then each drafter writes the next tokens without verification. The
    report gives, by the number of tokens since the cut, the agreement with what the target itself would have written,
    and the target's log-probability of what the drafter wrote. --scorer names a function of yours for the answers.

    \b
    Examples:
      moa-data disconnect --model ./llama3-8b --drafter runs/moa,runs/eagle --prompts test.jsonl
      moa-data disconnect --model ./llama3-8b --drafter runs/moa --prompts gsm8k.jsonl \\
          --n-tokens 256 --scorer my_scores.py:exact_answer
    """
    from ..evaluation.disconnection_report import disconnection_markdown
    from ..evaluation.run import disconnect as run_disconnect

    with ProgressLine("cut") as progress:
        report = _shown_if_unwritten(run_disconnect, config, progress=progress, provenance=collect_provenance())
    out.print(disconnection_markdown(report))
