"""``conform``: checks whether another engine drafts the same tokens as this package.

The other engine decodes greedily and reports the drafts of each round (:mod:`.other_side`). This
package then repeats each round: it drafts with the same drafter after the same tokens.

If drafts differ, this package looks for the cause. A *wrong choice* is a known mistake that is made
on purpose in a copy of the drafter (:mod:`.wrong_choices`). All wrong choices are tried: for each
of them, all rounds are repeated with a copy that makes this mistake. If the copy drafts the same
tokens as the other engine in all rounds, the wrong choice is reported as the cause.

Shapes: n tokens of prompt and answer, E target width, V vocabulary, L target layers.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DrafterError, OptionInvalid
from ..evaluation.prompts import load_prompts
from ..moa.decoding.loop import plain_generate
from ..moa.decoding.proposer import Chain
from ..moa.drafters.base import Drafter
from ..moa.formats.checkpoint import CONFIG_FILE, LAYOUTS, load_drafters, write_layout
from ..moa.formats.engines import FORMATS, WHOLE_BLOCKS
from ..moa.formats.layout import EMBEDDINGS, LM_HEAD
from ..moa.targets.bundle import FrozenTarget
from ..moa.targets.cache import ContextCache
from ..moa.targets.chat_tokens import prompt_tokens
from ..moa.targets.live import Target
from ..text import SILENT, Progress, counted
from . import other_side
from .wrong_choices import CHOICES, Choice, Reading

QUESTIONS = (
    "What is 17 times 23?", "Why is the sky blue?", "Write a function that reverses a list.",
    "A shop sells 48 pens in April and half as many in May. How many in all?",
    "Name three rivers in Europe.", "What happened in 1969?",
    "Translate 'good morning' into French.", "How does a bicycle stay upright?",
)  # fmt: skip
_TIES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""dtype -> the difference up to which two logits count as equal, relative to the higher logit."""
_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Parting:
    """The first draft of a round for which this package and the engine draft different tokens."""

    prompt: int  # index of the prompt
    n_tokens: int  # number of tokens of prompt and answer before the round
    draft: int  # index of the draft in the round, from 0
    here: int  # the token that this package drafts
    there: int  # the token that the other engine drafts
    # This package computes a logit for each of the two tokens. The gap is the logit of the token
    # that this package drafts, minus the logit of the token that the engine drafts. A small gap
    # means that rounding may have decided between the two tokens.
    gap: float


@dataclass
class Conformance:
    """The result of comparing an engine's drafts with the drafts of this package."""

    n_rounds: int
    n_prompts: int
    partings: list[Parting]
    # Indices of the prompts for which the engine's answer differs from the answer that this package
    # decodes without drafts.
    other_answers: list[int]
    # Names of the wrong choices (deliberate mistakes in a copy of the drafter) that explain all
    # differences: with such a mistake, this package drafts the same tokens as the engine in all
    # rounds.
    causes: list[str] = field(default_factory=list)
    # The wrong choice (a deliberate mistake) with which the fewest rounds still differ from the
    # engine's rounds, and the number of these rounds. None if a wrong choice explains all
    # differences, or if no wrong choice lowers the number of rounds that differ.
    nearest: tuple[str, int] | None = None

    def describe(self) -> str:
        """Return a report for the user as text, one line per result."""
        lines = []
        rounds = counted(self.n_rounds, "round")
        if self.partings:
            first = self.partings[0]
            largest_gap = max(parting.gap for parting in self.partings)
            lines += [
                f"differs      {len(self.partings)} of {rounds}. In the first of them, after "
                f"{first.n_tokens} tokens of prompt {first.prompt + 1} and its answer, draft "
                f"{first.draft + 1} is token {first.here} in moa-data and token {first.there} in "
                f"the other engine (logits of differing tokens are at most {largest_gap:.2g} apart)"
            ]
            for cause in self.causes or ["not found; no known mistake explains all differences"]:
                lines.append(f"cause        {cause}")
        else:
            lines.append(
                f"equal        all drafts of {rounds} after {counted(self.n_prompts, 'prompt')}"
            )
        if self.nearest:
            lines.append(
                f"nearest      {self.nearest[0]} (with this mistake, {self.nearest[1]} of {rounds} "
                "still differ)"
            )
        if self.other_answers:
            lines.append(
                f"answers      {len(self.other_answers)} of {self.n_prompts} answers of the other "
                "engine differ from plain decoding in moa-data"
            )
        return "\n".join(lines)


def conform(
    drafter: str,
    model: str,
    engine: str,
    *,
    python: str = sys.executable,
    prompts: str | None = None,
    n_prompts: int = 8,
    max_new_tokens: int = 64,
    n_drafts: int = 5,
    dtype: str = "float32",
    progress: Progress = SILENT,
) -> Conformance:
    """Compare an engine's drafts with this package's drafts, and find the cause of differences.

    Args:
        drafter: folder of the drafter.
        model: folder or name of the target.
        engine: name of the engine.
        python: path of the Python in the environment of the engine.
        prompts: a file of chats. If it is None, :data:`QUESTIONS` are used.
        n_prompts: maximum number of prompts.
        max_new_tokens: maximum number of tokens of an answer.
        n_drafts: number of drafts per round. DFlash ignores this number and always drafts a whole
            block.
        dtype: dtype of target and drafter, here and in the engine.
        progress: reports the number of wrong choices (deliberate mistakes) that were tried.

    Raises:
        OptionInvalid: the engine cannot run this kind of drafter, failed, or drafted nothing.
    """
    target = Target.load(model, getattr(torch, dtype), "cpu")
    (loaded,) = load_drafters([drafter], target, target.model.dtype).values()
    # A drafter may be limited to a part of the vocabulary. Other engines ignore this limit and
    # choose drafts among all tokens, with the target's LM head. An empty ``draft_tokens`` does the
    # same here.
    loaded.config = replace(loaded.config, draft_tokens=())
    if loaded.kind not in FORMATS[engine]:
        raise OptionInvalid(
            f"the drafter is of kind {loaded.kind}, but {engine} can run only drafters of kind "
            f"{', '.join(FORMATS[engine])}; choose another engine."
        )
    layout, method = FORMATS[engine][loaded.kind]
    texts = _encode_chats(target, prompts, n_prompts)
    max_drafts = loaded.config.max_depth or n_drafts
    with tempfile.TemporaryDirectory(prefix="moa-data-conform-") as folder:
        drafter_folder = Path(drafter).expanduser()
        config_file = drafter_folder / CONFIG_FILE
        nested_config_file = drafter_folder / f"drafter/{CONFIG_FILE}"
        if config_file.is_file() or nested_config_file.is_file():
            drafter_folder = Path(folder) / "drafter"
            write_layout(
                loaded, LAYOUTS[layout], drafter_folder, target.model.dtype, pieces_of(target)
            )
        job = {
            "engine": engine, "method": method, "model": str(target.folder),
            "drafter": str(drafter_folder.absolute()),
            "prompts": texts, "max_new_tokens": max_new_tokens, "dtype": dtype,
            "max_positions": target.max_positions,
            "n_drafts": max_drafts if method in WHOLE_BLOCKS else min(n_drafts, max_drafts),
        }  # fmt: skip
        answers = ask_engine(job, python, Path(folder))
    if not any(answer["rounds"] for answer in answers):
        raise OptionInvalid(
            f"{engine} made no drafts for these prompts; allow longer answers "
            "(`max_new_tokens`), or give other prompts (`prompts`)."
        )
    return compare(loaded, target, texts, answers, max_new_tokens, progress)


def _encode_chats(target: Target, prompts: str | None, n_prompts: int) -> list[list[int]]:
    """Encode the first chats of a file, or of :data:`QUESTIONS` if ``prompts`` is None."""
    chats: list[Any] = []
    if prompts:
        for prompt in load_prompts(prompts).prompts:
            chats.append(list(prompt.turns[0]))
    else:
        for question in QUESTIONS:
            chats.append([{"role": "user", "content": question}])
    return [prompt_tokens(target.template, chat) for chat in chats[:n_prompts]]


def pieces_of(target: Target) -> dict[str, Any]:
    """Return the target's config, embeddings and LM head.

    The folder of a drafter may contain these parts of the target.
    """
    model: Any = target.model
    return {
        "config": target.facts.config,
        EMBEDDINGS: model.get_input_embeddings().weight,
        LM_HEAD: model.get_output_embeddings().weight,
    }


def ask_engine(job: dict[str, Any], python: str, folder: Path) -> list[dict[str, Any]]:
    """Run an engine in its own Python, and return the engine's answers with their draft rounds.

    Raises:
        OptionInvalid: the engine failed. The message has the last line of the engine's output.
    """
    job_file = folder / "job.json"
    written = folder / "rounds.json"
    log = folder / "log"
    job_file.write_text(json.dumps(job))
    # Let vLLM run in one process, so that the script can read the drafts in its scheduler. The
    # variables whose names start with VLLM_CPU are needed by vLLM's build for CPUs.
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    } | os.environ
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TOKENIZERS_PARALLELISM": "false"}
    # Remove PYTHONPATH. It leads to packages for the Python of this process, and the engine's
    # Python must not import them.
    environment.pop("PYTHONPATH", None)
    with log.open("w") as sink:
        words = [python, other_side.__file__, str(job_file), str(written)]
        try:
            code = subprocess.run(
                words, stdout=sink, stderr=sink, env=environment, timeout=_TIMEOUT_S
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise OptionInvalid(
                f"{python} did not run {job['engine']} ({error}). With `python`, give the Python "
                "interpreter of the environment in which this engine is installed."
            ) from error
    if code or not written.is_file():
        lines = log.read_text(errors="replace").strip().splitlines() or [""]
        raise OptionInvalid(
            f"{job['engine']} failed in {python} (exit status {code}). The last line of its output "
            f"is: {lines[-1].strip()[:300]}"
        )
    return list(json.loads(written.read_text()))


def compare(
    drafter: Drafter,
    target: Target,
    prompts: Sequence[list[int]],
    answers: Sequence[Mapping[str, Any]],
    max_new_tokens: int,
    progress: Progress = SILENT,
) -> Conformance:
    """Repeat an engine's draft rounds, and look for the cause of differences.

    Args:
        drafter: the drafter.
        target: the target.
        prompts: the token ids of each prompt.
        answers: for each prompt, the tokens and the draft rounds of the engine's answer, as
            :func:`ask_engine` returns them.
        max_new_tokens: maximum number of tokens of an answer.
        progress: reports the number of wrong choices (deliberate mistakes) that were tried.
    """
    texts: list[list[int]] = []
    other_answers: list[int] = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        texts.append([*prompt, *answer["tokens"]])
        plain = plain_generate(target, prompt, max_new_tokens=max_new_tokens)
        if answer["tokens"] != plain.tokens:
            other_answers.append(index)
    outputs = [_outputs(target, text) for text in texts]
    frozen = FrozenTarget.from_model(target.model, drafter.config.target_layer_inference)

    def partings(change: Choice) -> Iterator[Parting]:
        reading = Reading.of(drafter, frozen, target.facts.n_layers)
        change(reading)
        for index, text in enumerate(texts):
            states = reading.states(outputs[index])
            yield from _partings(reading, index, text, answers[index]["rounds"], states)

    def count(change: Choice, most: int) -> int:
        try:
            return len(list(islice(partings(change), most)))
        # An error of one of these types means that the wrong choice (a deliberate mistake) cannot
        # be made with this kind of drafter. So it does not explain the differences.
        except (AttributeError, KeyError, IndexError, DrafterError):
            return most

    n_rounds = sum(len(answer["rounds"]) for answer in answers)
    all_partings = list(partings(lambda reading: None))
    result = Conformance(n_rounds, len(prompts), all_partings, other_answers)
    if not result.partings:
        return result
    trying = progress.of("wrong choices", "choice")
    for number, (name, change) in enumerate(CHOICES.items()):
        # If a single round still differs, the wrong choice (a deliberate mistake) does not explain
        # the differences. So stop counting at the first differing round.
        if not count(change, 1):
            result.causes.append(name)
        trying(number + 1, len(CHOICES))
    if not result.causes:
        fewest = len(result.partings)
        for name, change in CHOICES.items():
            n_left = count(change, len(result.partings))
            if n_left < fewest:
                fewest = n_left
                result.nearest = (name, n_left)
    return result


@torch.inference_mode()
def _outputs(target: Target, text: list[int]) -> dict[int, Tensor]:
    """Run the target over n tokens. Returns a dict from layer index to output [n, E].

    The embeddings have the key -1, and the output of the final norm has the key L.
    """
    cache = target.new_cache()
    n_layers = target.facts.n_layers
    cache.watched_layers = tuple(range(n_layers))
    tokens = torch.tensor([text])
    last = target.forward(tokens, cache)
    parts = cache.take_layer_outputs()[0].tensor_split(n_layers, dim=-1)
    return {
        -1: target.model.get_input_embeddings()(tokens)[0],
        **dict(enumerate(parts)),
        n_layers: last[0],
    }


@torch.inference_mode()
def _partings(
    reading: Reading,
    prompt: int,
    text: list[int],
    rounds: Sequence[tuple[int, list[int]]],
    states: Tensor,
) -> Iterator[Parting]:
    """Repeat the rounds of an engine's answer. Yields the first differing draft of each round.

    In each round, this package drafts after the tokens that the engine had committed before this
    round. If the drafts differ, but this package computes nearly equal logits for the two tokens,
    rounding may have decided between them. Such a difference is not yielded.

    Args:
        reading: a copy of the drafter, maybe with a wrong choice (a deliberate mistake).
        prompt: index of the prompt.
        text: tokens of the prompt and of the engine's answer.
        rounds: for each round, the number of tokens before the round, and the engine's drafts.
        states: [n, width]. Row i contains the concatenated outputs, for token i, of the target
            layers that the copy of the drafter reads.

    Yields:
        At most one difference of each round.
    """
    drafter = reading.drafter
    frozen = reading.frozen
    state = drafter.new_state(1)
    cache = ContextCache()
    n_seen = 0
    for n, drafts in rounds:
        if (n_known := min(n - 1 + reading.ahead, len(text))) > n_seen:
            drafter.observe(state, states[None, n_seen:n_known], [range(n_known - n_seen)])
            n_seen = n_known
        chain = Chain(
            drafter, frozen, state, cache, drafter.draft_root(state, frozen, [text[:n]], cache)
        )
        for index, token in enumerate(drafts[: drafter.config.max_depth]):
            if index:
                chain.feed(torch.tensor([[drafts[index - 1]]]))
            logits = chain.logits[0].float()
            best = int(logits.argmax())
            if best != token:
                # The gap between two logits may be infinite, but JSON has no infinity. So limit the
                # gap.
                gap = min(float(logits[best] - logits[token]), 1e9)
                if gap > _TIES[drafter.dtype] * float(logits[best].abs()):
                    yield Parting(prompt, n, index, best, token, gap)
                break
