"""The choice of the mode, on simulated networks and targets: stated times, a clock that is counted, no waiting."""

import random
from dataclasses import dataclass, replace

import pytest

from moa_data.moa.decoding.policy import AutoPolicy
from moa_data.serving.client.events import Mode
from moa_data.serving.client.policy import ModePolicy


@dataclass(frozen=True)
class Cell:
    """A target, a network and two drafters; times in ms."""

    step: float
    round_trip: float
    jitter: float = 0.0
    draft: float = 1.0
    accuracy: float = 0.75
    """Share of the client's drafts that are right."""
    server_accuracy: float = 0.75
    server_draft: float = 1.0
    slope: float = 0.03
    """What a draft adds to a target call, as a share of a step."""
    server_has_drafter: bool = True

    def call(self, n_drafts: int) -> float:
        """The time of a target call."""
        return self.step * (1 + self.slope * n_drafts)


_draw = random.Random(3).random
LUCK = [_draw() for _ in range(3000)]


class Simulation:
    """Decodes with a policy; tokens are counted when they arrive."""

    def __init__(self, cell: Cell, policy: ModePolicy, seed: int = 0) -> None:
        self.cell, self.policy, self.chance = cell, policy, random.Random(seed)
        self.server_policy = AutoPolicy()
        self.now = self.compared_at = 0.0
        self.n_tokens = self.n_commits = 0

    def agreed(self, n_drafts: int, accuracy: float) -> int:
        """Drafts that are right; which tokens are easy is a matter of the text, the same for all who draft it."""
        n = 0
        while n < n_drafts and LUCK[self.n_tokens + n] < accuracy:
            n += 1
        return n

    def trip(self) -> float:
        """One way, in ms."""
        return max(0.1, self.cell.round_trip / 2 + self.chance.uniform(-1, 1) * self.cell.jitter / 2)

    def run(self, n_tokens: int, mode: Mode | None = None) -> float:
        """Decode, in a fixed mode or as the policy chooses; returns seconds."""
        cell, policy, started, first = self.cell, self.policy, self.now, self.n_tokens
        policy.begin()
        self.server_policy.begin()
        arrived_at = pinged_at = self.now
        serving: Mode = mode or policy.mode  # what the server does; it hears of a change half a round trip later
        server_at = heard_at = self.now + self.trip()
        while self.n_tokens - first < n_tokens:
            current = mode or policy.mode
            if self.now - pinged_at > 250 or pinged_at == started:
                pinged_at = self.now
                policy.observe_round_trip((self.trip() + self.trip()) / 1000)
            answers = serving not in ("stream", "server")
            drafting = 0.0
            if not answers:
                drafts = serving == "server" and cell.server_has_drafter and self.server_policy.next_shape() is not None
                n_drafts = 10 if drafts else 0
                n_new = 1 + self.agreed(n_drafts, cell.server_accuracy)
                call, drafting = cell.call(n_drafts), n_drafts * cell.server_draft * 0.7
                self.server_policy.observe(n_drafts, n_new, (call + drafting) / 1000)
                server_at += call + drafting
                arrived_at = self.now = max(arrived_at, server_at + self.trip())
                if self.n_tokens >= self.compared_at and policy.wants_comparison:
                    self.compared_at = self.n_tokens + 24
                    policy.observe_drafts(10, self.agreed(10, cell.accuracy))
                    for _ in range(10):
                        policy.observe_draft(cell.draft / 1000, is_compared=True)
            else:
                shape = policy.shape()
                n_drafts = max(1, shape.depth // 2) if shape.stop_below else shape.depth
                n_agreed = self.agreed(n_drafts, cell.accuracy)
                n_new, call, drafting = 1 + n_agreed, cell.call(n_drafts), n_drafts * cell.draft
                if serving == "ahead" and n_agreed == n_drafts and self.chance.random() < cell.accuracy:
                    drafting = 0.0
                trips = self.trip() + self.trip()
                policy.observe_round_trip(trips / 1000)
                self.now += drafting + call + trips
                server_at = heard_at = self.now
                policy.observe_drafts(n_drafts, n_agreed)
                policy.observe_draft(cell.draft / 1000)
            self.n_tokens += n_new
            if mode is None:
                if answers:
                    policy.observe_chain(self.now / 1000, n_new, call / 1000)
                else:
                    policy.observe_streamed(n_new, call / 1000, drafting / 1000)
                if policy.choose() != current:
                    heard_at = self.now + self.trip()
            if serving != policy.mode and mode is None and server_at >= heard_at:
                is_run = serving in ("stream", "server")
                serving = policy.mode
                if is_run and serving not in ("stream", "server"):
                    self.now = server_at + self.trip()  # the answer to the pause
                elif not is_run:
                    server_at = self.now + self.trip()
        return (self.now - started) / 1000


def seconds(cell: Cell, mode: Mode | None, seed: int, n_answers: int = 5) -> float:
    """The time of some answers of 200 tokens, from a cold start."""
    simulation = Simulation(cell, ModePolicy(), seed)
    return sum(simulation.run(200, mode) for _ in range(n_answers))


CELLS = {
    f"step {step}, round trip {round_trip}+-{jitter}, drafts {accuracy}, server {server}": Cell(
        step, round_trip, jitter, accuracy=accuracy, server_accuracy=0.75 if server else 0.0, server_has_drafter=server
    )
    for step in (2, 8, 25)
    for round_trip, jitter in ((0.2, 0.0), (9, 0.5), (20, 20), (42, 38), (200, 5))
    for accuracy in (0.3, 0.8)
    for server in (True, False)
}


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_never_slower_than_the_better_of_stream_and_server(cell: Cell) -> None:
    """Over five answers from a cold start."""
    for seed in range(2):
        best = min(seconds(cell, mode, seed + 10) for mode in ("stream", "server"))
        assert seconds(cell, None, seed) < best / 0.95


@pytest.mark.parametrize(("cell", "gain"), [
    (Cell(25, 0.2, accuracy=0.8, server_accuracy=0.0, server_has_drafter=False), 2.3),
    (Cell(25, 9, 0.5, accuracy=0.8, server_accuracy=0.0, server_has_drafter=False), 1.9),
    (Cell(8, 9, 0.5, accuracy=0.8, server_accuracy=0.0, server_has_drafter=False), 1.2),
    (Cell(25, 42, 38, accuracy=0.8, server_accuracy=0.0, server_has_drafter=False), 1.2),
    (Cell(8, 0.2, accuracy=0.9, server_draft=3.0), 1.3),
])  # fmt: skip
def test_drafts_where_that_is_faster(cell: Cell, gain: float) -> None:
    simulation = Simulation(cell, ModePolicy())
    took = sum(simulation.run(200) for _ in range(5))
    assert min(seconds(cell, mode, 10) for mode in ("stream", "server")) > gain * took


def test_follows_a_network_that_changes() -> None:
    """Near, then far, then near again: drafts, streams, and drafts again."""
    near = Cell(25, 2, accuracy=0.8, server_accuracy=0.0, server_has_drafter=False)
    simulation = Simulation(near, ModePolicy())
    chosen = []
    for cell in (near, replace(near, round_trip=300, jitter=10), near):
        simulation.cell = cell
        took = [simulation.run(200) for _ in range(4)]
        chosen.append(simulation.policy.mode)
        assert took[-1] < min(seconds(cell, mode, 10, 1) for mode in ("stream", "server")) / 0.95
    assert chosen[0] in ("sync", "ahead")
    assert chosen[1] in ("stream", "server")
    assert chosen[2] in ("sync", "ahead")


def test_without_a_drafter_the_client_never_drafts() -> None:
    policy = ModePolicy(can_draft=False)
    simulation = Simulation(Cell(25, 0.2, accuracy=0.9, server_accuracy=0.0), policy)
    for _ in range(4):
        simulation.run(100)
        assert policy.mode in ("stream", "server")


def test_chains_are_longer_where_the_network_is_slower() -> None:
    depths, thresholds = [], []
    for round_trip in (0.001, 0.05, 0.3):
        policy = ModePolicy()
        policy.observe_round_trip(round_trip)
        policy.observe_streamed(1, 0.02, 0.0)
        policy.observe_draft(0.002)
        for _ in range(10):
            policy.observe_drafts(10, 8)
        depths.append(policy.shape().depth)
        thresholds.append(policy.shape().stop_below)
    assert depths == sorted(depths)
    assert depths[0] < depths[-1] <= 24
    assert thresholds == sorted(thresholds, reverse=True)


def test_sampled_chains_have_a_fixed_length() -> None:
    policy = ModePolicy(is_drawn=True)
    assert policy.shape().stop_below == 0
    policy.limit_drafts(3)
    assert policy.shape().depth == 3
