"""Measures `auto` beside the best fixed chain and plain decoding, also where drafts fail or cost more.

    python -m benchmarks.decoding.auto_policy MODEL RUN PROMPTS --n-prompts 24

What a drafter proposes at each position of each answer is recorded once. Decoding is then simulated many times, with
the measured seconds of each part on a machine whose speed wanders, so that a policy is judged by more rounds than a run
has, and within seconds.
"""

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.decoding.decode import PartCosts, measure_costs
from benchmarks.kit.harness import run
from moa_data.evaluation.drafters import load_with_facts
from moa_data.evaluation.measure import opening_tokens
from moa_data.evaluation.prompts import load_prompts
from moa_data.moa.decoding.loop import generate_batch
from moa_data.moa.decoding.policy import AutoPolicy, ShapePolicy
from moa_data.moa.decoding.proposer import DrafterProposer, Proposer
from moa_data.moa.decoding.tree import DraftTree, TreeShape
from moa_data.moa.targets.cache import TargetCache
from moa_data.moa.targets.live import Target

LONGEST = TreeShape(10, stop_below=1e-30)
"""The chain that is recorded; it never stops, but keeps the probabilities of its drafts."""
CHAINS = (
    *(TreeShape(length) for length in range(1, LONGEST.depth + 1)),
    *(TreeShape(LONGEST.depth, stop_below=probability) for probability in (0.05, 0.1, 0.2, 0.3)),
)


class Noting(Proposer):
    """Proposes nothing, and records what another proposer would have proposed."""

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner
        self.noted: list[tuple[int, DraftTree]] = []

    @property
    def max_depth(self) -> int | None:
        """The other's."""
        return self._inner.max_depth

    def begin(self, cache: TargetCache, generators: Sequence[torch.Generator] = ()) -> None:
        """Begin with the other."""
        self._inner.begin(cache, generators)

    def observe(self, hidden: torch.Tensor, kept: Sequence[Sequence[int]]) -> None:
        """Show the other what is committed."""
        self._inner.observe(hidden, kept)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep rows of the other."""
        self._inner.select_rows(rows)

    def propose(self, committed: Sequence[list[int]], shape: TreeShape) -> DraftTree:
        """Record the drafts; the round is a plain step, so that every position gets its turn."""
        drafts = self._inner.propose(committed, shape)
        self.noted.append((len(committed[0]), drafts))
        return DraftTree.empty(1, drafts.tokens.device)


@dataclass(frozen=True)
class Answer:
    """The recorded drafts at each position of one answer.

    Attributes:
        n_prompt_tokens: of its prompt.
        rounds: for each position how many drafts of the longest chain the target accepts, and how probable the drafter
            finds the chain up to each of its drafts.
    """

    n_prompt_tokens: int
    rounds: list[tuple[int, list[float]]]

    def outcome(self, position: int, shape: TreeShape) -> tuple[int, int]:
        """Return the accepted drafts of a chain of this shape, and how many it drafts."""
        n_accepted, probabilities = self.rounds[position]
        n_drafts = min(shape.depth, len(probabilities))
        if shape.stop_below:
            n_drafts = min(n_drafts, 1 + sum(probability >= shape.stop_below for probability in probabilities))
        return min(n_accepted, n_drafts), n_drafts


def note_answer(target: Target, proposer: Proposer, prompt: list[int], max_new_tokens: int) -> Answer:
    """Decode plainly, and record the longest chain at each position."""
    noting = Noting(proposer)
    (generation,) = generate_batch(target, [prompt], max_new_tokens=max_new_tokens, proposer=noting, tree=LONGEST)
    text, rounds = [*prompt, *generation.tokens], []
    for n_committed, drafts in noting.noted:
        tokens, following = drafts.tokens[0].tolist(), text[n_committed:]
        same = [ours == theirs for ours, theirs in zip(tokens, following, strict=False)]
        assert drafts.scores is not None
        rounds.append(([*same, False].index(False), drafts.scores[0].exp().tolist()))
    return Answer(len(prompt), rounds)


@dataclass(frozen=True)
class Scenario:
    """A simulated change of the drafter and its cost.

    Attributes:
        name: in the report.
        failing: share of the answers on which drafts fail 9 times of 10.
        dearness: how many times longer a round with drafts takes.
    """

    name: str
    failing: float = 0.0
    dearness: float = 1.0


SCENARIOS = (
    Scenario("as measured"),
    Scenario("drafts fail on every second answer", failing=0.5),
    Scenario("drafts fail on every answer", failing=1.0),
    Scenario("rounds with drafts take twice as long", dearness=2.0),
)


def decode_on_paper(
    policy: ShapePolicy, answers: Sequence[Answer], costs: PartCosts, scenario: Scenario, seed: int
) -> float:
    """Simulate answers in random order on a machine of wandering speed; return tokens/s over plain decoding's."""
    draws, slowness, spent_s, plain_s = random.Random(seed), 1.0, 0.0, 0.0
    for index, answer in enumerate(draws.sample(answers, len(answers))):
        fails = index * scenario.failing % 1 + scenario.failing >= 1
        policy.begin()
        position, n_unread = 0, answer.n_prompt_tokens
        while position < len(answer.rounds):
            shape, n_left = policy.next_shape(), len(answer.rounds) - position
            n_accepted, n_drafts, wanted_s = 0, 0, costs.verification_s(1)
            if isinstance(shape, TreeShape) and n_left > 1:
                n_accepted, n_drafts = answer.outcome(position, shape.cut(n_left - 1))
                round_s = costs.chain_s(n_drafts, bool(shape.stop_below)) + costs.verification_s(1 + n_drafts)
                wanted_s = round_s * scenario.dearness + costs.prompt_token_s * n_unread
            if fails and draws.random() < 0.9:
                n_accepted = 0
            slowness = min(1.5, max(1.0, slowness * math.exp(draws.gauss(0, 0.03))))
            round_s = wanted_s * slowness * math.exp(draws.gauss(0, 0.07))
            policy.observe(n_drafts, 1 + n_accepted, round_s)
            n_unread = 0 if n_drafts else n_unread + 1
            spent_s += round_s
            plain_s += (1 + n_accepted) * costs.verification_s(1) * slowness
            position += 1 + n_accepted
    return plain_s / spent_s


def judge(answers: Sequence[Answer], costs: PartCosts, n_seeds: int) -> list[dict[str, Any]]:
    """Compare `auto` with the best fixed chain in each scenario, over the same orders and machines."""
    rows = []
    for scenario in SCENARIOS:
        found: dict[str, list[float]] = {}
        for seed in range(n_seeds):
            found.setdefault("auto", []).append(decode_on_paper(AutoPolicy(), answers, costs, scenario, seed))
            for shape in CHAINS:
                ratio = decode_on_paper(ShapePolicy(shape), answers, costs, scenario, seed)
                found.setdefault(str(shape), []).append(ratio)
        auto = found.pop("auto")
        best = max(found, key=lambda name: float(np.median(found[name])))
        over_best = np.array(auto) / np.maximum(1.0, found[best])
        rows.append(
            {
                "scenario": scenario.name,
                "auto": float(np.median(auto)),
                "auto_least": min(auto),
                "auto_most": max(auto),
                "best_chain": best,
                "best_chain_ratio": float(np.median(found[best])),
                "auto_over_best_of_chains_and_plain": float(np.median(over_best)),
            }
        )
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Record the answers, and judge the policy."""
    target = Target.load(options.model, torch.float32, "cpu")
    loaded = next(iter(load_with_facts([options.run], target, torch.float32).values()))
    proposer = DrafterProposer(target, loaded.drafter, loaded.frozen)
    prompts = opening_tokens(target, load_prompts(options.prompts, options.n_prompts).prompts)
    costs = measure_costs(target, proposer, prompts[0], n_repeats=30)
    answers = [note_answer(target, proposer, prompt, options.max_new_tokens) for prompt in prompts]
    return {"rows": judge([answer for answer in answers if answer.rounds], costs, options.seeds)}


if __name__ == "__main__":
    options = {"n_prompts": 24, "max_new_tokens": 128, "seeds": 9, "threads": 1}
    run("auto-policy", measure, "model", "run", "prompts", **options)
