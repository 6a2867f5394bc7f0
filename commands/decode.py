"""Commands that decode: generate, eval, conform."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from ..config import Common, Count
from ..errors import ReportUnwritten
from ..evaluation.config import DecodingConfig, EvalConfig
from ..files import write_atomic
from ..serving.detokenizer import Detokenizer
from .console import (
    FOUND,
    ProgressLine,
    StageFailure,
    collect_provenance,
    out,
    run_stage,
    show,
    tell,
)
from .options import stage_command

if TYPE_CHECKING:
    from ..moa.decoding.tree import TreeShape


class GenerateConfig(DecodingConfig):
    """Settings of `moa-data generate`."""

    drafter: Common[str]
    """The drafter: a run of `moa-data train`, or a folder with a drafter, which may also come from
    the authors of EAGLE or MoA."""
    max_new_tokens: Common[Count] = 256
    """Maximum length of an answer in tokens."""
    tree: Common[str] = "auto"
    """How many tokens are drafted per target call. 5: a chain of five drafts. 10@0.2: a chain of at
    most ten drafts, which ends when it becomes unlikely (below 0.2) that all of them are accepted.
    7c0.3: a chain of at most seven drafts, which ends before the first draft that dspark's
    confidence head rates below 0.3. 6x8x62: a tree with 6 levels, of which the target verifies the
    62 most likely nodes. auto: 10@0.2, but no drafts while they would make decoding slower. See
    docs/decoding.md."""
    compare: Common[bool] = False
    """Also decode without drafts, and compare the tokens and the speed. This takes more time."""

    @override
    def tree_shape(self) -> "TreeShape | None":
        return None if self.tree == "auto" else super().tree_shape()


@stage_command(GenerateConfig)
@click.option(
    "--prompt", "prompts", required=True, multiple=True, metavar="TEXT",
    help=(
        "The user's message. --prompt - reads it from standard input. Repeat the option to "
        "answer several prompts in one batch."
    ),
)  # fmt: skip
def generate(config: GenerateConfig, prompts: tuple[str, ...]) -> None:
    """Answer prompts with a target and a drafter, and show accepted drafts in green.

    Prints the answer, the acceptance length, the number of target calls, and tokens/s. The
    acceptance length is the number of tokens committed per target call, including the bonus token
    (the token that the target adds after the accepted drafts). --compare also decodes the same
    prompts without drafts and prints the same figures.

    With temperature 0 and float32, the tokens are the same as without drafts. With a higher
    temperature, they have the same distribution as without drafts. The same seed then gives the
    same answer only if --tree is a fixed shape, because auto depends on the timing of the machine.

    \b
    Examples:
      moa-data generate --model ./llama3-8b --drafter runs/moa --prompt "Why is the sky blue?"
      moa-data generate --model ./llama3-8b --drafter runs/moa --prompt "A poem." \\
          --temperature 0.8 --tree 6x8x62
    """
    texts = [_read_prompt(text) for text in prompts]
    from ..moa.decoding.loop import generate_batch
    from ..moa.decoding.policy import AutoPolicy
    from ..moa.decoding.proposer import DrafterProposer
    from ..moa.decoding.sampling import SamplingConfig
    from ..moa.decoding.tree import TreeShape
    from ..moa.formats.checkpoint import load_target_and_drafters
    from ..moa.targets.chat_tokens import prompt_tokens
    from .views import decoding_view

    target, drafters = load_target_and_drafters(config, [config.drafter])
    target.prepare(config.cuda_graphs)
    (drafter,) = drafters.values()
    rows = [prompt_tokens(target.template, [{"role": "user", "content": text}]) for text in texts]
    sampling = SamplingConfig(**config.sampling.arguments())
    proposer = DrafterProposer(target, drafter, sampling)
    shape = config.tree_shape()
    # Warm up. The first forwards also initialize kernels and buffers. Without a warm-up, the time
    # of the initialization would be counted for the decoding method that runs first.
    generate_batch(
        target,
        rows,
        max_new_tokens=4,
        proposer=proposer,
        tree=shape or TreeShape(1),
        sampling=sampling,
    )
    auto = AutoPolicy(sampling.temperature > 0, proposer.max_depth)
    text = Detokenizer(lambda ids: target.tokenizer.decode(ids, skip_special_tokens=True))

    def print_tokens(tokens: list[int], drafted: list[bool]) -> None:
        for token, is_drafted in zip(tokens, drafted, strict=True):
            if piece := text.append(token):
                out.print(piece, end="", style="green" if is_drafted else None)

    try:
        drafted = generate_batch(
            target, rows, max_new_tokens=config.max_new_tokens, proposer=proposer,
            tree=shape or auto, sampling=sampling, seed=config.sampling.seed,
            on_tokens=print_tokens if len(rows) == 1 else None,
        )  # fmt: skip
    finally:
        # Print the text of the last tokens that was not printed yet, and end the line. Do so even
        # if the answer was interrupted.
        out.print(text.rest)
    if len(rows) > 1:
        for number, generation in enumerate(drafted, start=1):
            out.print(f"[{number}]", style="bold")
            out.print(target.tokenizer.decode(generation.tokens, skip_special_tokens=True))
    if shape is None:
        stats = [answer.stats for answer in drafted]
        tell(f"auto: {auto.describe(stats)}")
    reference = None
    if config.compare:
        reference = generate_batch(
            target,
            rows,
            max_new_tokens=config.max_new_tokens,
            sampling=sampling,
            seed=config.sampling.seed,
        )
    out.print(decoding_view(drafted, reference, config.tree, sampling.temperature > 0))


def _read_prompt(text: str) -> str:
    """Return ``text`` as a prompt. If it is a dash, read the prompt from standard input."""
    try:
        if text == "-":
            text = sys.stdin.read() if sys.stdin else ""
        # Refuse bytes that are not UTF-8. In a command-line argument, Python replaces such bytes by
        # surrogates. Encoding a surrogate raises an error here.
        text.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise StageFailure(
            f"the prompt is not UTF-8 text ({error.reason} at position {error.start:,}). Convert "
            "it to UTF-8."
        ) from error
    if not text.strip():
        raise StageFailure(
            "the prompt is empty. Give --prompt TEXT, or --prompt - and a text on standard input."
        )
    return text


@stage_command(EvalConfig, name="eval")
def evaluate(config: EvalConfig) -> None:
    """Measure how much drafters speed up decoding: acceptance length, target calls and tokens/s.

    All methods decode the same prompts in turns, and are compared with plain decoding, which uses
    no drafts. The prompts are chats (jsonl), whose last assistant message is left out, or
    Spec-Bench questions, which have several turns. The acceptance length is the number of tokens
    committed per target call, including the bonus token (the token that the target adds after the
    accepted drafts). The report also shows on how many tokens each drafter was trained, and warns
    if the drafters were trained with different data or settings.

    With --disconnect N, the target's answers are also cut off at some positions, and each drafter
    writes N tokens after each cut without the target. The report then shows how long these tokens
    agree with the target's answer.

    \b
    Examples:
      moa-data eval --model ./llama3-8b --drafter runs/moa --prompts test.jsonl --out report.json
      moa-data eval --model ./llama3-8b --drafter runs/moa,runs/eagle --prompts spec_bench.jsonl \\
          --method plain,chain,tree,auto,prompt-lookup --repeats 3
      moa-data eval --model ./llama3-8b --prompts test.jsonl --method plain,plain  # the noise
      moa-data eval --model ./llama3-8b --drafter runs/moa --prompts gsm8k.jsonl --method plain \\
          --disconnect 256 --scorer my_scores.py:exact_answer
    """
    from ..evaluation.run import evaluate as run_evaluate
    from ..evaluation.views import markdown_report

    with ProgressLine() as progress:
        try:
            report = run_evaluate(config, progress=progress, provenance=collect_provenance())
        except ReportUnwritten as error:
            # The evaluation has finished, but the file of its report could not be written. Print
            # the report, so that the results are not lost.
            show(error.markdown)
            raise
    show(markdown_report(report))
    for warning in report.warnings:
        tell(f"The drafters were not trained in the same way: {warning}.")


@click.command()
@click.argument("drafter")
@click.option(
    "--model",
    required=True,
    metavar="TEXT",
    help="The target: a folder, a GGUF file, or a Hugging Face Hub id (OWNER/NAME).",
)
@click.option(
    "--with", "engine", required=True, type=click.Choice(["transformers", "vllm", "speculators"]),
    help="The other engine: transformers, vllm, or speculators (its model class).",
)  # fmt: skip
@click.option(
    "--python",
    default=sys.executable,
    metavar="FILE",
    help="Python interpreter of the environment in which the engine is installed. Default: the "
    "interpreter that runs this command.",
)
@click.option(
    "--prompts",
    metavar="FILE",
    help="File of chats or Spec-Bench questions to decode. Default: eight short questions.",
)
@click.option("--n-prompts", default=8, show_default=True, help="Number of prompts to use.")
@click.option(
    "--max-new-tokens", default=64, show_default=True, help="Maximum length of an answer in tokens."
)
@click.option(
    "--draft-length",
    default=5,
    show_default=True,
    help="Number of tokens drafted per target call. DFlash always drafts whole blocks.",
)
@click.option(
    "--dtype", default="float32", show_default=True,
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Data type of weights and computations in both engines.",
)  # fmt: skip
@click.option(
    "--out", "report", metavar="FILE", help="File to which the result is also written, as JSON."
)
def conform(
    drafter: str, model: str, engine: str, report: str | None, draft_length: int, **options: Any
) -> None:
    """Check whether another engine makes the same drafts as moa-data, and find the difference.

    Both engines decode the same prompts greedily, and the drafts of every round are compared. If
    drafts differ, the command looks for the cause: it makes known mistakes on purpose, one at a
    time, and names the mistake that leads to exactly the drafts of the other engine. Examples of
    such mistakes are layer numbers off by one, missing norms, and wrong positions. If DRAFTER is a
    run of `moa-data train`, it is first exported for the engine. A folder of another program is
    used unchanged.

    The exit code is 0 if all drafts are equal, 1 if they differ, and 2 if the engine or the drafter
    cannot be used.

    \b
    Examples:
      moa-data conform runs/dflash --model ./llama3-8b --with transformers
      moa-data conform runs/eagle3 --model ./llama3-8b --with vllm --python ~/vllm/bin/python \\
          --prompts test.jsonl
    """
    from ..conform.run import conform as run_conform

    result = run_stage(run_conform, drafter, model, engine, n_drafts=draft_length, **options)
    if report is not None:
        write_atomic(Path(report), (json.dumps(asdict(result), indent=2) + "\n").encode())
    if result.partings:
        raise StageFailure("", FOUND)
