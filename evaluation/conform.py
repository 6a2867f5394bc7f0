"""``conform``: whether another engine drafts the same tokens as this package, and what it computes differently.

The other side decodes greedily and says what it drafted in each round (:mod:`.other_side`). Here the same drafter
drafts after the same tokens. Where the two part, each known wrong choice (:mod:`.wrong_choices`) is put into our own
code: the first with which all rounds are those of the other side is what differs.

Shapes: n tokens of a text, E target width, V vocabulary.
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
from ..text import Progress, counted
from . import other_side
from .prompts import load_prompts
from .wrong_choices import CHOICES, Choice, Reading

QUESTIONS = (
    "What is 17 times 23?", "Why is the sky blue?", "Write a function that reverses a list.",
    "A shop sells 48 pens in April and half as many in May. How many in all?", "Name three rivers in Europe.",
    "What happened in 1969?", "Translate 'good morning' into French.", "How does a bicycle stay upright?",
)  # fmt: skip
_TIES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Difference of two logits, relative to the larger, below which rounding decides between them."""
_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Parting:
    """The first draft of a round that differs: the tokens that are drafted here and there."""

    prompt: int
    n_tokens: int  # committed before the round
    draft: int  # its number in the round, from 0
    here: int
    there: int
    gap: float  # by how much the first one's logit is higher here: little where precision decides


@dataclass
class Conformance:
    """What was compared, and what was found."""

    n_rounds: int
    n_prompts: int
    partings: list[Parting]
    other_answers: list[int]  # prompts whose answers differ from plain decoding here
    causes: list[str] = field(default_factory=list)  # choices each of which explains all rounds
    # where none does, the one that leaves the fewest rounds, and how many
    nearest: tuple[str, int] | None = None

    def describe(self) -> str:
        """Return the report as text, a line for each finding."""
        lines = []
        rounds = counted(self.n_rounds, "round")
        if self.partings:
            one = self.partings[0]
            lines += [
                f"parts        {len(self.partings)} of {rounds}; first after token {one.n_tokens} of prompt "
                f"{one.prompt + 1}, draft {one.draft + 1}: token {one.here} here, {one.there} there "
                f"(logits {max(one.gap for one in self.partings):.2g} apart at most)"
            ]
            known = self.causes or ["none of the known ones explains all rounds"]
            lines += [f"cause        {cause}" for cause in known]
        else:
            lines.append(
                f"equal        all drafts of {rounds} after {counted(self.n_prompts, 'prompt')}"
            )
        if self.nearest:
            lines.append(
                f"nearest      {self.nearest[0]} ({self.nearest[1]} of {rounds} still part)"
            )
        if self.other_answers:
            lines.append(
                f"answers      {len(self.other_answers)} of {self.n_prompts} differ from plain decoding here"
            )
        return "\n".join(lines)


def conform(
    drafter: str,
    model: str,
    engine: str,
    *,
    python: str = sys.executable,  # of the engine's environment
    prompts: str | None = None,  # a file of chats, or a few questions of :data:`QUESTIONS`
    n_prompts: int = 8,
    max_new_tokens: int = 64,
    n_drafts: int = 5,  # drafts of a round; DFlash drafts whole blocks
    dtype: str = "float32",
    progress: Progress | None = None,
) -> Conformance:
    """Compare an engine's drafts with ours, and name what differs.

    Raises:
        OptionInvalid: the engine takes no such drafter, failed, or drafted nothing.
    """
    target = Target.load(model, getattr(torch, dtype), "cpu")
    (own,) = load_drafters([drafter], target, target.model.dtype).values()
    # other programs draft all tokens by the target's LM head
    own.config = replace(own.config, draft_tokens=())
    if own.kind not in FORMATS[engine]:
        raise OptionInvalid(
            f"{engine} runs {', '.join(FORMATS[engine])}; this drafter is of kind {own.kind}."
        )
    layout, method = FORMATS[engine][own.kind]
    chats: list[Any] = [[{"role": "user", "content": text}] for text in QUESTIONS]
    if prompts:
        chats = [one.turns[0] for one in load_prompts(prompts).prompts]
    texts = [prompt_tokens(target.template, list(chat)) for chat in chats[:n_prompts]]
    most = own.config.max_depth or n_drafts
    with tempfile.TemporaryDirectory(prefix="moa-data-conform-") as folder:
        place = Path(drafter).expanduser()
        if any((place / name).is_file() for name in (CONFIG_FILE, f"drafter/{CONFIG_FILE}")):
            place = Path(folder) / "drafter"
            write_layout(own, LAYOUTS[layout], place, target.model.dtype, pieces_of(target))
        job = {
            "engine": engine, "method": method, "model": str(target.folder), "drafter": str(place.absolute()),
            "prompts": texts, "max_new_tokens": max_new_tokens, "dtype": dtype, "max_positions": target.max_positions,
            "n_drafts": most if method in WHOLE_BLOCKS else min(n_drafts, most),
        }  # fmt: skip
        answers = ask_engine(job, python, Path(folder))
    if not any(answer["rounds"] for answer in answers):
        raise OptionInvalid(
            f"{engine} drafted nothing after these prompts; ask for longer answers, or give others."
        )
    return compare(own, target, texts, answers, max_new_tokens, progress)


def pieces_of(target: Target) -> dict[str, Any]:
    """Name what folders of a drafter may hold of its target."""
    model: Any = target.model
    heads = {
        EMBEDDINGS: model.get_input_embeddings().weight,
        LM_HEAD: model.get_output_embeddings().weight,
    }
    return {"config": target.config, **heads}


def ask_engine(job: dict[str, Any], python: str, folder: Path) -> list[dict[str, Any]]:
    """Let another Python decode; OptionInvalid with its last line where it fails."""
    given = folder / "job.json"
    written = folder / "rounds.json"
    log = folder / "log"
    given.write_text(json.dumps(job))
    # vLLM in one process, where its scheduler can be watched; the other two are what its build for
    # CPUs wants.
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    } | os.environ
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONPATH", None)  # of this Python
    with log.open("w") as sink:
        words = [python, other_side.__file__, str(given), str(written)]
        try:
            code = subprocess.run(
                words, stdout=sink, stderr=sink, env=environment, timeout=_TIMEOUT_S
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise OptionInvalid(f"{python} did not run {job['engine']}: {error}.") from error
    if code or not written.is_file():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise OptionInvalid(
            f"{job['engine']} failed ({code}) in {python}: {(lines or [''])[-1].strip()[:300]}"
        )
    return list(json.loads(written.read_text()))


def compare(
    drafter: Drafter,
    target: Target,
    prompts: Sequence[list[int]],
    answers: Sequence[Mapping[str, Any]],
    max_new_tokens: int,
    progress: Progress | None = None,
) -> Conformance:
    """Compare the rounds of answers with ours, and look for what explains them."""
    texts = [[*prompt, *answer["tokens"]] for prompt, answer in zip(prompts, answers, strict=True)]
    outputs = [_outputs(target, text) for text in texts]
    frozen = FrozenTarget.from_model(target.model, drafter.config.target_layer_inference)

    def partings(change: Choice) -> Iterator[Parting]:
        reading = Reading.of(drafter, frozen, target.sizes["n_layers"])
        change(reading)
        for index, text in enumerate(texts):
            found = _partings(
                reading, text, answers[index]["rounds"], reading.states(outputs[index])
            )
            yield from (Parting(index, *one) for one in found)

    def count(change: Choice, most: int) -> int:
        try:
            return sum(1 for _ in islice(partings(change), most))
        # this drafter has no such part
        except (AttributeError, KeyError, IndexError, DrafterError):
            return most

    plain = [
        plain_generate(target, prompt, max_new_tokens=max_new_tokens).tokens for prompt in prompts
    ]
    result = Conformance(
        sum(len(answer["rounds"]) for answer in answers), len(prompts), [*partings(lambda reading: None)],
        [index for index, answer in enumerate(answers) if answer["tokens"] != plain[index]],
    )  # fmt: skip
    if not result.partings:
        return result
    for number, (name, change) in enumerate(CHOICES.items()):
        # one round that it leaves is enough to refute it
        result.causes += [name] * (count(change, 1) == 0)
        if progress:
            progress(number + 1, len(CHOICES), "wrong choices")
    if not result.causes:
        left = {name: count(change, len(result.partings)) for name, change in CHOICES.items()}
        nearest = min(left, key=lambda name: left[name])
        result.nearest = (nearest, left[nearest]) if left[nearest] < len(result.partings) else None
    return result


@torch.inference_mode()
def _outputs(target: Target, text: list[int]) -> dict[int, Tensor]:
    """Run a text: outputs [n, E] of the embedding, -1, all L layers, and the final norm, L."""
    cache = target.new_cache()
    n_layers = target.sizes["n_layers"]
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
    reading: Reading, text: list[int], rounds: Sequence[tuple[int, list[int]]], states: Tensor
) -> Iterator[tuple[int, int, int, int, float]]:
    """Draft in the rounds of another engine; yields the first draft of each round that differs, without near ties."""
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
        for place, token in enumerate(drafts[: drafter.config.max_depth]):
            if place:
                chain.feed(torch.tensor([[drafts[place - 1]]]))
            logits = chain.logits[0].float()
            best = int(logits.argmax())
            if best != token:
                gap = min(float(logits[best] - logits[token]), 1e9)  # JSON has no infinity
                if gap > _TIES[drafter.dtype] * float(logits[best].abs()):
                    yield n, place, best, token, gap
                break
