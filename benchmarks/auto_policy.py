"""How fast `auto` is beside the best fixed shape, and where drafts fail or cost more than they should.

    python benchmarks/auto_policy.py MODEL RUN PROMPTS --n-prompts 24 --out auto_policy.json

What a drafter proposes at each position of each answer is noted once; answers are then decoded on paper, many times,
with the measured seconds of each part and a machine whose speed wanders. So a policy is judged in minutes, and by more
rounds than a run has. What a smaller shape would have drafted is told as `auto` itself tells it: from the widest tree.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from moa_data.commands.provenance import collect_provenance
from moa_data.evaluation.drafters import load_drafters
from moa_data.evaluation.measure import opening_tokens
from moa_data.evaluation.prompts import load_prompts
from moa_data.moa.decoding.auto_tree import measure_costs
from moa_data.moa.decoding.loop import OpenSession, draft_session, generate_batch
from moa_data.moa.decoding.sampling import accept_argmax
from moa_data.moa.decoding.session import DraftSession
from moa_data.moa.decoding.shape_costs import WIDEST, AcceptanceLog, DecodingCosts, candidates, n_nodes_of
from moa_data.moa.decoding.shape_policy import AdaptivePolicy, FixedShape, ShapePolicy
from moa_data.moa.decoding.tree import DraftTree, Shape, TreeShape
from moa_data.moa.target.live import Target

N_CALIBRATION_TOKENS = 48
"""Of each calibration prompt, as `choose_shape` has it."""


class NotingSession:
    """Proposes nothing, and notes what another session would have proposed."""

    def __init__(self, inner: DraftSession, noted: list[tuple[int, DraftTree]]) -> None:
        self._inner, self._noted = inner, noted

    @property
    def max_depth(self) -> int | None:
        """Of the other one."""
        return self._inner.max_depth

    def observe(self, hidden: torch.Tensor, kept: Sequence[Sequence[int]]) -> None:
        """Passed on."""
        self._inner.observe(hidden, kept)

    def propose(self, committed: Sequence[list[int]], shape: Shape) -> DraftTree:
        """Note the drafts; the round is a plain step, so that every position gets its turn."""
        drafts = self._inner.propose(committed, shape)
        self._noted.append((len(committed[0]), drafts))
        return DraftTree.empty(1, drafts.tokens.device)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Passed on."""
        self._inner.select_rows(rows)


@dataclass
class Answer:
    """What would be drafted at each position of one answer.

    Attributes:
        n_prompt_tokens: of its prompt.
        rounds: the drafts of each position and which of them the target accepts.
    """

    n_prompt_tokens: int
    rounds: list[tuple[DraftTree, list[int]]]
    _counted: dict[tuple[int, TreeShape], tuple[int, float]] = field(default_factory=dict)

    def outcome(self, position: int, shape: TreeShape) -> tuple[int, float]:
        """Accepted drafts of a round of this shape, and how many it drafts."""
        if (position, shape) not in self._counted:
            log, (drafts, accepted) = AcceptanceLog(), self.rounds[position]
            log.observe(drafts, [accepted])
            n_drafts = log.n_drafts(shape)
            found = (round(log.committed(shape) - 1), n_nodes_of(shape) if n_drafts is None else n_drafts)
            self._counted[position, shape] = found
        return self._counted[position, shape]


def note_answer(target: Target, open_session: OpenSession, prompt: list[int], max_new_tokens: int) -> Answer:
    """Decode plainly with the widest drafts of each position noted."""
    noted: list[tuple[int, DraftTree]] = []
    (generation,) = generate_batch(
        target,
        [prompt],
        max_new_tokens=max_new_tokens,
        open_session=lambda cache, generators: NotingSession(open_session(cache, generators), noted),
        tree=WIDEST,
    )
    text = [*prompt, *generation.tokens]
    rounds = []
    for n_committed, drafts in noted:
        tokens, parents = (rows[0] for rows in drafts.on_host)
        # The target's choice behind a node of depth d is the text's own token, as long as all above it are the text's.
        depths: list[int] = []
        for parent in parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        behind = [text[n_committed + depth] if n_committed + depth < len(text) else -1 for depth in (0, *depths)]
        rounds.append((drafts, accept_argmax(tokens, parents, behind)[0]))
    return Answer(len(prompt), rounds)


@dataclass(frozen=True)
class Scenario:
    """What becomes of a machine and a drafter after `auto` has measured them.

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
    policy: ShapePolicy, answers: Sequence[Answer], costs: DecodingCosts, scenario: Scenario, seed: int
) -> float:
    """Tokens/s over plain decoding's, of answers in random order on a machine whose speed wanders by half."""
    draws, slowness, spent_s, plain_s = random.Random(seed), 1.0, 0.0, 0.0
    for index, answer in enumerate(draws.sample(answers, len(answers))):
        fails = index * scenario.failing % 1 + scenario.failing >= 1
        policy.begin(answer.n_prompt_tokens, len(answer.rounds))
        position, n_unread = 0, answer.n_prompt_tokens
        while position < len(answer.rounds):
            n_left = len(answer.rounds) - position
            shape = policy.next_shape()
            assert shape is None or isinstance(shape, TreeShape)
            useful = shape.cut(n_left - 1) if shape and n_left > 1 else None
            n_accepted, n_drafts = answer.outcome(position, useful) if useful else (0, 0)
            if fails and draws.random() < 0.9:
                n_accepted = 0
            slowness = min(1.5, max(1.0, slowness * math.exp(draws.gauss(0, 0.03))))
            wanted_s = costs.round_s(useful, n_drafts if useful and useful.is_chain else None)
            if useful:
                wanted_s = wanted_s * scenario.dearness + costs.prompt_token_s * n_unread
            round_s = wanted_s * slowness * math.exp(draws.gauss(0, 0.07))
            policy.observe(round(n_drafts), [[0] * n_accepted], round_s, useful != shape)
            n_unread = 0 if useful else n_unread + 1
            spent_s += round_s
            plain_s += (1 + n_accepted) * costs.round_s(None) * slowness
            position += 1 + n_accepted
    return plain_s / spent_s


def calibrated(answers: Sequence[Answer]) -> AcceptanceLog:
    """What `auto` counts on its calibration prompts."""
    log = AcceptanceLog()
    for answer in answers:
        position = 0
        while position < min(N_CALIBRATION_TOKENS - WIDEST.depth, len(answer.rounds)):
            drafts, accepted = answer.rounds[position]
            log.observe(drafts, [accepted])
            position += 1 + len(accepted)
    return log


def judge(answers: Sequence[Answer], costs: DecodingCosts, n_calibration: int, n_seeds: int) -> list[dict[str, Any]]:
    """`auto` and the best fixed shape in each scenario."""
    log, rows = calibrated(answers[:n_calibration]), []
    chains = [shape for shape in candidates() if shape.is_chain]
    for scenario in SCENARIOS:
        adapted = [
            decode_on_paper(AdaptivePolicy(costs, log), answers, costs, scenario, seed) for seed in range(n_seeds)
        ]
        fixed = {str(shape): decode_on_paper(FixedShape(shape), answers, costs, scenario, seed=0) for shape in chains}
        best = max(fixed, key=lambda name: fixed[name])
        rows.append(
            {
                "scenario": scenario.name,
                "auto": float(np.median(adapted)),
                "auto_least": min(adapted),
                "auto_most": max(adapted),
                "best_chain": best,
                "best_chain_ratio": fixed[best],
            }
        )
    return rows


def main() -> None:
    """Note the answers, judge the policy, print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="folder or hub id of the target")
    parser.add_argument("run", help="folder of a drafter")
    parser.add_argument("prompts", help="chats or Spec-Bench questions")
    parser.add_argument("--n-prompts", type=int, default=24, help="default 24")
    parser.add_argument("--calibration-prompts", type=int, default=2, help="of these, the first (default 2)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default 128")
    parser.add_argument("--seeds", type=int, default=9, help="orders and machines to decode on (default 9)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("auto_policy.json"))
    options = parser.parse_args()
    if min(options.n_prompts, options.calibration_prompts, options.seeds, options.max_new_tokens) < 1:
        parser.error("--n-prompts, --calibration-prompts, --seeds and --max-new-tokens must be at least 1.")
    torch.set_num_threads(options.threads)
    target = Target.load(options.model, torch.float32, "cpu")
    loaded = next(iter(load_drafters([options.run], target, torch.float32).values()))
    open_session = draft_session(target, loaded.drafter, loaded.frozen)
    prompts = opening_tokens(target, load_prompts(options.prompts, options.n_prompts).prompts)
    costs = measure_costs(target, open_session, prompts[:1])
    answers = [
        note_answer(target, open_session, prompt, options.max_new_tokens)
        for prompt in tqdm(prompts, desc="noting", disable=not sys.stderr.isatty())
    ]
    rows = judge([answer for answer in answers if answer.rounds], costs, options.calibration_prompts, options.seeds)
    print(f"{'tokens/s over plain decoding':38s} {'auto':>5s} {'(least, most)':>14s}  best chain")
    for row in rows:
        spread = f"({row['auto_least']:.2f}, {row['auto_most']:.2f})"
        best = f"{row['best_chain_ratio']:.2f} ({row['best_chain']})"
        print(f"{row['scenario']:38s} {row['auto']:5.2f} {spread:>14s}  {best}")
    report = {"model": options.model, "run": options.run, "prompts": options.prompts, "rows": rows}
    options.out.write_text(json.dumps(report | {"provenance": collect_provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
