"""The command line: the only module that reads arguments, prints and exits.

Stages are imported inside their commands, so that ``--help`` answers at once.
"""

import sys

import click

from . import __version__
from .commands import generate as cli_generate
from .commands import store as cli_store
from .commands.console import ProgressLine, StageGroup, out, quiet_libraries, tell
from .commands.options import config_options
from .commands.provenance import collect_provenance
from .demo.config import DemoConfig
from .evaluation.config import CompareConfig, DisconnectConfig, EvalConfig
from .pipeline.config import ExtractConfig
from .trainer.config import PRESETS, TrainConfig

EPILOG = """\b
A whole job:
  moa-data plan     --model M --dataset D --out STORE     what it will cost
  moa-data extract  --model M --dataset D --out STORE     run the target once
  moa-data inspect  STORE                                 look at what is there
  moa-data train    STORE --out RUN                       train without the target
  moa-data eval     --model M --drafter RUN --prompts P   acceptance length, speed
  moa-data generate --model M --drafter RUN --prompt "Why is the sky blue?"

\b
Exit codes:
  0    done
  1    done, and verify, repair or audit found something wrong
  2    the input or the options can't be used; one line on stderr says why
  70   a fault of moa-data itself; the lines on stderr are what to report
  130  interrupted with Ctrl-C, 143 by SIGTERM, 129 by SIGHUP; the line says how to go on
"""


@click.group(cls=StageGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="moa-data")
@click.option("--debug", is_flag=True, help="Show the traceback of an error instead of one line.")
def main(debug: bool) -> None:
    """Turn a language model's activations into a dataset, and train drafters for speculative decoding from it.

    Run the target once over a chat dataset (extract), then train as many drafters as you like from the store (train),
    and decode with them (generate, eval). `moa-data demo` shows all of it on a small machine.
    """
    quiet_libraries()


for _command in (
    cli_generate.generate,
    cli_store.add,
    cli_store.inspect,
    cli_store.verify,
    cli_store.audit,
    cli_store.repair,
    cli_store.recode,
    cli_store.export_command,
    cli_store.import_command,
    cli_store.export_drafter_command,
):
    main.add_command(_command)


@main.command()
@config_options(ExtractConfig)
@click.option("--dry-run", is_flag=True, help="Print the plan and stop, like `moa-data plan`.")
def extract(config: ExtractConfig, dry_run: bool) -> None:
    """Run a target over chats and store its activations.

    Run the same command again to go on after an interruption: committed parts are kept. If anything that shapes the
    data has changed meanwhile, the command refuses and names what; more --activations or --target-layers than the store
    has are what `moa-data add` is for.

    \b
    Examples:
      moa-data extract --model meta-llama/Meta-Llama-3-8B-Instruct \\
          --dataset HuggingFaceH4/ultrachat_200k --split train_sft --out stores/llama3-8b
      moa-data extract --model ./tiny-llama --dataset chats.jsonl --out store \\
          --max-sequences 500 --target-layers 1 --activations kv,hidden:last
    """
    if dry_run:
        _print_plan(config)
        return
    from .pipeline.extract import extract as run_extract

    with ProgressLine("tok") as progress:
        report = run_extract(config, progress=progress, provenance=collect_provenance())
    out.print(report.describe())


@main.command()
@config_options(ExtractConfig)
def plan(config: ExtractConfig) -> None:
    """Say what an extraction would cost: sequences, tokens, bytes, parts, hours.

    Takes the options of `extract`; reads the dataset and the tokenizer, runs no forward of the target and writes
    nothing. Fails when the disk can't hold the store.

    \b
    Example:
      moa-data plan --model ./llama3-8b --dataset HuggingFaceH4/ultrachat_200k --out /data/store
    """
    _print_plan(config)


def _print_plan(config: ExtractConfig) -> None:
    from .pipeline.add_plan import refuse_addition
    from .pipeline.plan import build_plan

    with ProgressLine("chat") as progress:
        extraction_plan = build_plan(config, progress=progress)
    refuse_addition(extraction_plan)
    out.print(extraction_plan.describe())
    extraction_plan.check_disk()


@main.command()
@config_options(TrainConfig, arguments=("store",), presets=PRESETS)
def train(config: TrainConfig) -> None:
    """Train a drafter from a store; the target is never loaded.

    Writes checkpoints (best and last), CSV and TensorBoard logs, the resolved configuration and a PNG of the curves
    to --out. With --resume it goes on from the last checkpoint, bit for bit on a CPU.

    The defaults suit targets of 7B and more. --preset small is for targets of some million weights: Muon, batches of 8,
    a learning rate that decays over the whole run. --preset paper is Mixture of Attentions as published, and what
    `export-drafter --format moa` takes. Where memory is short, lower --micro-batch-size: the result differs by rounding
    alone.

    \b
    Examples:
      moa-data train store --out runs/moa --max-steps 2000
      moa-data train store --out runs/small --preset small --max-steps 340
      moa-data train store --out runs/moa --resume
      moa-data train store --out runs/moa --config run.yaml --learning-rate 1e-4
    """
    from .commands.views import train_view
    from .trainer.run import train as run_train

    report = run_train(config, provenance=collect_provenance(), progress_bar=sys.stderr.isatty())
    out.print(train_view(report))
    if report.n_pending_parts:
        tell(
            f"{report.n_pending_parts} parts of {config.store} are not extracted yet; the drafter saw the others only."
        )


@main.command("eval")
@config_options(EvalConfig)
def evaluate(config: EvalConfig) -> None:
    """Measure drafters: acceptance length, target calls and tokens/s beside plain decoding.

    All methods decode the same prompts in turns. The prompts are chats (jsonl; the last assistant turn is left out) or
    Spec-Bench questions (multi-turn). Acceptance length = tokens committed per target call, bonus token included.

    \b
    Examples:
      moa-data eval --model ./llama3-8b --drafter runs/moa --prompts test.jsonl --out report.json
      moa-data eval --model ./llama3-8b --drafter runs/moa,runs/eagle --prompts spec_bench.jsonl \\
          --method plain,chain,tree,auto,prompt-lookup --repeats 3
      moa-data eval --model ./llama3-8b --prompts test.jsonl --method plain,plain     how much is noise
    """
    from .evaluation.markdown import markdown_report
    from .evaluation.run import evaluate as run_evaluate

    with ProgressLine("prompt") as progress:
        report = run_evaluate(config, progress=progress, provenance=collect_provenance())
    out.print(markdown_report(report))


@main.command()
@config_options(CompareConfig, arguments=("runs",))
def compare(config: CompareConfig) -> None:
    """Compare training runs: one table of what they cost, and what they give in decoding.

    Decodes the same prompts plainly and with chains and trees of each drafter, as `eval` does, and sets beside it what
    the runs say of themselves: weights, steps, training tokens, bytes read. Warns where runs were not trained alike.

    \b
    Example:
      moa-data compare runs/moa runs/eagle runs/glide --model ./llama3-8b --prompts test.jsonl --n-prompts 40
    """
    from .evaluation.comparison import comparison_markdown
    from .evaluation.run import compare as run_compare

    with ProgressLine("prompt") as progress:
        report = run_compare(config, progress=progress, provenance=collect_provenance())
    out.print(comparison_markdown(report))
    for warning in report.warnings:
        tell(f"not trained alike: {warning}.")


@main.command()
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
    from .evaluation.disconnection_report import disconnection_markdown
    from .evaluation.run import disconnect as run_disconnect

    with ProgressLine("cut") as progress:
        report = run_disconnect(config, progress=progress, provenance=collect_provenance())
    out.print(disconnection_markdown(report))


@main.command()
@config_options(DemoConfig)
def demo(config: DemoConfig) -> None:
    """Show the whole idea on a small machine, without network, in a few minutes.

    Generates chats, trains a tiny target on them, extracts its activations, trains a drafter from the store, and
    decodes held-out prompts with it. Running it again reuses what is finished.

    \b
    Example:
      moa-data demo --out runs/demo
    """
    from .demo.run import run_demo

    with ProgressLine("step") as progress:
        report = run_demo(config, progress=progress, provenance=collect_provenance())
    out.print(report.describe())


if __name__ == "__main__":
    main()
