"""``moa-data generate``: answer prompts with target and drafter."""

import sys
from typing import TYPE_CHECKING

import click

from .console import StageFailure, TokenStream, out, tell

if TYPE_CHECKING:
    from ..moa.decoding.auto_tree import AutoShape
    from ..moa.decoding.loop import Generation, OnTokens, OpenSession
    from ..moa.decoding.sampling import SamplingConfig
    from ..moa.decoding.shape_policy import ShapePolicy
    from ..moa.decoding.tree import Shape
    from ..moa.target.live import Target

_CALIBRATION_TOKENS = 48


@click.command()
@click.option("--model", required=True, help="The target: a folder or a hub id.")
@click.option(
    "--drafter",
    required=True,
    help="A run of `moa-data train`, or a folder with a drafter, also one of the EAGLE or MoA authors.",
)
@click.option(
    "--prompt", "prompts", required=True, multiple=True,
    help="What the user says; - reads it from standard input. Given several times, the prompts are decoded together.",
)  # fmt: skip
@click.option("--max-new-tokens", default=256, show_default=True, metavar="N", help="Stop after this many tokens.")
@click.option(
    "--tree", default="auto", show_default=True, metavar="SHAPE",
    help="Drafts per target call: a chain's length such as 5; 10@0.2 for a chain of at most 10 that stops where it is "
    "less likely than 0.2 to be accepted; a tree's DEPTHxBREADTHxNODES such as 6x8x62 (EAGLE-2's); static:NODES; or "
    "auto: the fastest shape on this machine by measured costs and acceptance, or none if none pays.",
)  # fmt: skip
@click.option("--temperature", default=0.0, show_default=True, help="0 decodes greedily, above it samples.")
@click.option(
    "--top-p", default=1.0, show_default=True, help="Sample from the likeliest tokens up to this probability."
)
@click.option("--top-k", default=0, show_default=True, help="Sample from this many likeliest tokens; 0 for all.")
@click.option("--repetition-penalty", default=1.0, show_default=True, help="Divide the logits of tokens that occurred.")
@click.option("--seed", default=0, show_default=True, help="Of sampling; prompt i draws from seed + i.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Dtype of target and drafter; only float32 promises the very tokens of plain decoding.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@click.option(
    "--compile",
    "compile_slots",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Compile the target's calls for texts of up to N tokens (CUDA graphs on a CUDA device); slower on a CPU.",
)
@click.option("--plain/--no-plain", default=True, help="Also decode plainly and compare (default) or not.")
def generate(
    model: str,
    drafter: str,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    tree: str,
    temperature: float,
    top_p: float,
    top_k: int,
    repetition_penalty: float,
    seed: int,
    dtype: str,
    device: str,
    compile_slots: int,
    plain: bool,
) -> None:
    """Answer prompts with target and drafter; drafted and accepted text is green.

    Afterwards prints acceptance length (tokens committed per target call, bonus token included), target calls and
    tokens/s beside plain decoding of the same prompts. With a temperature of 0 both give the same tokens; above it both
    sample from the same distribution, and equal seeds give equal answers where --tree names a shape (auto's choice
    depends on the machine's timing).

    \b
    Examples:
      moa-data generate --model ./llama3-8b --drafter runs/moa --prompt "Why is the sky blue?"
      moa-data generate --model ./llama3-8b --drafter runs/moa --prompt "A poem." --temperature 0.8 --tree 6x8x62
    """
    texts = [_read_prompt(text) for text in prompts]
    import torch

    from ..moa.decoding.loop import draft_session, generate_batch
    from ..moa.decoding.sampling import SamplingConfig, check_seed
    from ..moa.decoding.tree import TreeShape, parse_shape
    from ..moa.formats.checkpoint import check_drafter_matches, load_drafter
    from ..moa.target.live import Target
    from ..pipeline.prompts import check_template, prompt_tokens
    from .views import decoding_view

    sampling = SamplingConfig(temperature, top_p, top_k, repetition_penalty)
    check_seed(seed)
    shape = None if tree == "auto" else parse_shape(tree)
    if shape is not None:
        sampling.check_shape(shape)
    loaded = Target.load(model, getattr(torch, dtype), device)
    check_template(loaded.tokenizer, model)
    if compile_slots:
        loaded.compile(compile_slots)
    network = load_drafter(drafter, loaded.model.dtype, loaded.device)
    check_drafter_matches(network, loaded)
    rows = [prompt_tokens(loaded.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    session = draft_session(loaded, network, None, sampling)
    # The first calls set up kernels and buffers, which would be counted against whichever method comes first.
    generate_batch(loaded, rows, max_new_tokens=4, open_session=session, tree=shape or TreeShape(1), sampling=sampling)
    if shape is None:
        choice = _choose(loaded, session, rows, sampling)
        tell(f"{choice.describe()}; chosen in {choice.calibration_s:.1f} s")
    drafted = _answer(loaded, rows, max_new_tokens, session, shape or choice.policy(), sampling, seed)
    reference = None
    if plain:
        reference = generate_batch(loaded, rows, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    out.print(decoding_view(drafted, reference, tree, temperature > 0))


def _read_prompt(text: str) -> str:
    """A prompt as it was given, or from standard input for a dash."""
    try:
        if text == "-":
            text = sys.stdin.read() if sys.stdin else ""
        text.encode()  # bytes that are no text may come as halves of surrogate pairs
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise StageFailure(
            f"the prompt is no UTF-8 text (at {error.start:,}: {error.reason}); convert it, for example with "
            "`iconv -f latin1 -t utf8`."
        ) from error
    if not text.strip():
        raise StageFailure("the prompt is empty; give --prompt TEXT, or - and text on standard input.")
    return text


def _choose(target: "Target", session: "OpenSession", rows: list[list[int]], sampling: "SamplingConfig") -> "AutoShape":
    from ..moa.decoding.auto_tree import choose_shape

    return choose_shape(
        target, session, rows, max_new_tokens=_CALIBRATION_TOKENS, batch_size=len(rows), sampling=sampling
    )


def _answer(
    target: "Target",
    rows: list[list[int]],
    max_new_tokens: int,
    session: "OpenSession",
    shape: "Shape | ShapePolicy",
    sampling: "SamplingConfig",
    seed: int,
) -> "list[Generation]":
    """Decode and print; a single answer is printed as it comes."""
    from ..moa.decoding.loop import generate_batch

    stream = TokenStream(lambda ids: target.tokenizer.decode(ids, skip_special_tokens=True))
    on_tokens = _print_tokens(stream) if len(rows) == 1 else None
    try:
        generations = generate_batch(
            target, rows, max_new_tokens=max_new_tokens, open_session=session, tree=shape, sampling=sampling, seed=seed,
            on_tokens=on_tokens,
        )  # fmt: skip
    finally:
        out.print(stream.rest())  # also ends the line of an answer that Ctrl-C cuts short
    if on_tokens is None:
        for number, generation in enumerate(generations, start=1):
            out.print(f"[{number}]", style="bold")
            out.print(target.tokenizer.decode(generation.tokens, skip_special_tokens=True))
    return generations


def _print_tokens(stream: TokenStream) -> "OnTokens":
    def on_tokens(tokens: list[int], drafted: list[bool]) -> None:
        for text, is_drafted in stream.feed(tokens, drafted):
            out.print(text, end="", style="green" if is_drafted else None)

    return on_tokens
