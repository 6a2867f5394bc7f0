"""Advice follows from the data and the machine of a job, and quotes measured figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from moa_data.moa.drafters.advice import FEW_TOKENS, Advice, advise, other_drafter

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


def by_topic(n_tokens: int, is_on_cpu: bool, has_kv: bool = True) -> dict[str, Advice]:
    return {one.topic: one for one in advise(n_tokens, is_on_cpu, has_kv, kv_growth=21.0)}


@pytest.mark.parametrize(
    ("n_tokens", "is_on_cpu", "has_kv", "drafter", "activations"),
    [
        (100_000, True, True, "eagle", "hidden:last"),
        (10 * FEW_TOKENS, True, True, "eagle", "hidden:last"),
        (100_000, False, True, "eagle", "hidden:last"),
        (10 * FEW_TOKENS, False, True, "moa", "kv,hidden:last"),
        (10 * FEW_TOKENS, False, False, "eagle", "hidden:last"),
    ],
)
def test_the_drafter_follows_from_the_chats_and_the_machine(
    n_tokens: int, is_on_cpu: bool, has_kv: bool, drafter: str, activations: str
) -> None:
    advice = by_topic(n_tokens, is_on_cpu, has_kv)
    assert advice["drafter"].choice.startswith(f"`moa-data train --drafter {drafter}`")
    assert advice["activations"].choice.startswith(f"`activations={activations}`")
    assert ("chats" in advice) == (n_tokens < FEW_TOKENS)
    for one in advice.values():
        assert one.reason.endswith(".")
        assert one.reason.count(". ") == 0, "one sentence"


def test_another_drafter_is_advised_for_the_default_alone() -> None:
    assert other_drafter("eagle3", 1000, True) is None
    assert other_drafter("moa", 10 * FEW_TOKENS, False) is None
    assert other_drafter("moa", 10 * FEW_TOKENS, True) == by_topic(10 * FEW_TOKENS, True)["drafter"]


def test_the_figures_are_those_that_were_measured() -> None:
    cost = {row["drafter"]: row for row in rows("step-cost")}
    processor_time = float(cost["Mixture of Attentions"]["ratio"].split()[0])
    assert f"{processor_time:.1f} times the processor time" in by_topic(1, True)["drafter"].reason
    speeds = {row["what"].split(",")[0]: row["tokens_per_s"] for row in rows("training-gpu")}
    ratio = speeds["EAGLE"] / speeds["Mixture of Attentions"]
    few, many = (
        by_topic(1, False)["drafter"].reason,
        by_topic(10 * FEW_TOKENS, False)["drafter"].reason,
    )
    assert f"{cost['EAGLE-2']['l2']} times that of moa" in few
    assert f"{ratio:.1f} times as fast" in few
    assert f"{cost['EAGLE-2']['l8']} times that of moa" in many
    assert f"{ratio:.1f} times as fast" in many
    lengths = {
        round(row["tokens"], 2): row["length"]
        for row in rows("curve")
        if (row["target"], row["drafter"]) == ("code-and-math-2", "Mixture of Attentions")
    }
    chats = by_topic(1, True)["chats"].reason
    for n_millions in (0.15, 0.57, 2.01):
        assert f"{lengths[n_millions]:.1f} after {n_millions:.3g}"[:12] in chats
