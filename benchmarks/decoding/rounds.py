"""Times decoding with the drafters of ``training/drafters.py`` at known acceptance lengths.

The time of a draft depends on the sizes of the drafter, but not on its weights. The weights only
determine how many drafts are accepted. So the drafters here have random weights, and their drafts
are replaced by the target's own tokens. In each round, some of these tokens are made wrong, so that
the acceptance length is the given one. Plain decoding takes turns with the drafters, prompt by
prompt. ::

    python -m benchmarks.decoding.rounds MODEL TEST_CHATS [--lengths moa=4.72 eagle=4.75 ...]
        [--draft-length 7]

Figures are tokens/s relative to plain decoding (the median over prompts, with quartiles), and
milliseconds per round.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from benchmarks.kit.harness import quartiles, run
from benchmarks.training.drafters import DRAFTERS
from benchmarks.training.runs import small_config
from moa_data.evaluation.measure import Generate, MethodRun, measure
from moa_data.evaluation.prompts import load_prompts
from moa_data.moa.decoding.loop import Generation, generate_batch
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import DraftTree, TreeShape
from moa_data.moa.drafters.base import Drafter
from moa_data.moa.drafters.registry import drafter_class
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target

SMALL_HEAD = "+1024"
"""Suffix of the name of a drafter with a draft vocabulary of 1,024 tokens."""


class KnownText(DrafterProposer):
    """Runs its drafter, and then replaces the drafts by tokens of a known text.

    In each round, the last of these tokens are wrong. Their number is chosen so that the rounds
    have the given mean length.
    """

    def __init__(self, target: Target, drafter: Drafter, mean: float) -> None:
        super().__init__(target, drafter)
        self._mean, self.text = mean, [0]
        self._due = 0.0

    @override
    @torch.inference_mode()
    def propose(self, committed: Sequence[list[int]], shape: TreeShape) -> DraftTree:
        drafts = super().propose(committed, shape)
        self._due += self._mean
        n_drafts = drafts.tokens.shape[1]  # There are fewer at the end of an answer.
        # The last token of a round is the target's own token and not a draft.
        n_right = min(int(self._due) - 1, n_drafts)
        self._due -= int(self._due)
        at, wrong = len(committed[0]), n_drafts - n_right
        right = (self.text + [0] * (n_drafts + 1))[at : at + n_right + 1]
        drafts.tokens[0, :n_right] = torch.tensor(right[:n_right], dtype=torch.int64)
        if wrong:
            drafts.tokens[0, n_right] = (right[n_right] + 1) % self.frozen.facts.vocab_size
        return drafts


def random_drafter(target: Target, name: str) -> Drafter:
    """Build a drafter as training does before its first step."""
    settings = dict(DRAFTERS[name.removesuffix(SMALL_HEAD)][1])
    if name.endswith(SMALL_HEAD):
        settings["draft_vocabulary"] = int(SMALL_HEAD)
    drafter_settings = small_config("", "", **settings).drafter
    build = drafter_class(drafter_settings.kind)
    known = {item.name for item in dataclasses.fields(build.config_class)}
    sizes = {key: value for key, value in drafter_settings if key in known}
    drafter = build(build.config_class.from_target(target.facts, **sizes))
    drafter.initialize(torch.Generator().manual_seed(0))
    n_tokens = target.facts.vocab_size
    drafter.adopt(FrozenTarget.from_model(target.model, 0), lambda: torch.arange(n_tokens, 0, -1))
    drafter.eval().requires_grad_(False).prepare()
    return drafter


def methods_of(
    target: Target, lengths: dict[str, float], shape: TreeShape, n_tokens: int
) -> dict[str, Generate]:
    """Return plain decoding, and decoding with each drafter at its acceptance length."""
    texts: dict[tuple[int, ...], list[int]] = {}

    def plain(prompts: list[list[int]], seeds: Sequence[int] = ()) -> list[Generation]:
        return generate_batch(target, prompts, max_new_tokens=n_tokens)

    def drafting(proposer: KnownText) -> Generate:
        def decode(prompts: list[list[int]], seeds: Sequence[int]) -> list[Generation]:
            (prompt,) = prompts
            if tuple(prompt) not in texts:
                texts[tuple(prompt)] = prompt + plain(prompts)[0].tokens
            proposer.text = texts[tuple(prompt)]
            return generate_batch(
                target, prompts, max_new_tokens=n_tokens, proposer=proposer, tree=shape
            )

        return decode

    drafters = {
        name: KnownText(target, random_drafter(target, name), mean)
        for name, mean in lengths.items()
    }
    return {"plain": plain} | {name: drafting(proposer) for name, proposer in drafters.items()}


def figures(runs: Sequence[MethodRun], plain: Sequence[MethodRun]) -> dict[str, Any]:
    """Return the times of a method's rounds, and its tokens/s relative to plain decoding."""
    n_calls = sum(run.n_target_calls for run in runs)
    ratios = [
        (run.n_tokens / run.total_s) / (other.n_tokens / other.total_s)
        for run, other in zip(runs, plain, strict=True)
    ]
    tokens, seconds = (sum(values) for values in zip(*(run.speed for run in runs), strict=True))
    return {
        "tokens_per_call": sum(run.calls[0] for run in runs) / n_calls,
        "tokens_per_s": tokens / seconds,
        "draft_ms": 1e3 * sum(run.draft_s for run in runs) / n_calls,
        "verify_ms": 1e3 * sum(run.verify_s for run in runs) / n_calls,
        "over_plain": quartiles(ratios),
    }


def timed(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures."""
    target = Target.load(options.model)
    target.prepare()
    lengths = {name: float(value) for name, value in (one.split("=") for one in options.lengths)}
    methods = methods_of(target, lengths, TreeShape(options.draft_length), options.max_new_tokens)
    prompts = load_prompts(options.prompts, options.n_prompts).prompts
    rows = measure(target, methods, prompts, repeats=options.repeats).rows
    by_method = {name: [row.runs[name] for row in rows] for name in methods}
    return {
        "rows": [
            {"drafter": name} | figures(runs, by_method["plain"])
            for name, runs in by_method.items()
        ]
    }


if __name__ == "__main__":
    run(
        "rounds", timed, "model", "prompts", lengths=["moa=4.72", "eagle=4.75"], draft_length=7,
        n_prompts=24, max_new_tokens=128, repeats=1,
    )  # fmt: skip
