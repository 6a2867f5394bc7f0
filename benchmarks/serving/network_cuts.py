"""Measures answers when the network goes silent in the middle of them and comes back. Needs root.

During a cut, the network between the namespaces (see network.py) loses all packets. Neither side is
told, so the client must detect the beginning and the end of the cut by itself. Complete cuts begin
when 10 % or 50 % of an answer are verified. They end long after the client has written all tokens
that it may write without the server. Random cuts begin at any token and last 0.05 to 2 s.

    python -m benchmarks.serving.network_cuts --model TARGET --drafters moa=RUN,eagle=RUN
        --prompts CHATS --conditions 4g

The figures of each method are:

- seconds until the client continued alone
- tokens that it wrote alone, and the number of correct tokens before the first wrong one
- tokens that were rolled back
- seconds from the network's return to the next verified text
- whether the final text equals that of an answer without a cut
"""

import argparse
import random
import statistics
from typing import Any

from benchmarks.kit.harness import run
from benchmarks.serving.network import MODELS, chats_of, world_of
from benchmarks.serving.network_world import JSON, World

METHODS = "api,client:moa,client:eagle,client:independent,server:moa"
SHARES = (0.1, 0.5)


def cut_answer(
    world: World, method: str, chat: Any, max_new_tokens: int, cuts: list[tuple[int, float]]
) -> JSON:
    """Answer a chat while the network is cut.

    Each cut is a pair (number of verified tokens at which it begins, its length in seconds). The
    result contains the times at which each cut began and ended.
    """
    times: list[tuple[str, float]] = []

    def act(request: JSON) -> None:
        times.append(
            (request["request"], world.cut() if request["request"] == "cut" else world.restore())
        )

    job = {
        "do": "cut",
        "method": method,
        "chat": chat,
        "max_new_tokens": max_new_tokens,
        "cuts": cuts,
    }
    return world.run(job, act) | {"cut_times": times}


def complete_cut(result: JSON, reference: list[int]) -> JSON:
    """Return the figures of an answer with one cut."""
    (_, cut_s), (_, restored_s) = result["cut_times"]
    changes = [change for change in result["changes"] if change["at_s"] >= cut_s]
    alone = [change for change in changes if "alone" in change and change["at_s"] < restored_s]
    start = alone[0]["start"] if alone else 0
    tokens = [token for change in alone for token in change["alone"]]
    right = [token == other for token, other in zip(tokens, reference[start:], strict=False)]
    later = [at_s for at_s, _ in result["updates"] if at_s > restored_s]
    return {
        "alone_after_s": alone[0]["at_s"] - cut_s if alone else None,
        "alone_tokens": len(tokens),
        "prefix": next((index for index, same in enumerate(right) if not same), len(right)),
        "rolled_back": result["n_rolled_back"],
        "recovery_s": later[0] - restored_s if later else None,
    }


def median(values: list[Any]) -> float | None:
    """Return the median of the values that are not None."""
    found = [value for value in values if value is not None]
    return round(statistics.median(found), 3) if found else None


def summed(rows: list[JSON]) -> JSON:
    """Summarize the complete cuts of one method at one share of the answer."""
    return {
        "alone_after_s": median([row["alone_after_s"] for row in rows]),
        "alone_tokens": statistics.mean(row["alone_tokens"] for row in rows),
        "right_before_the_first_wrong": statistics.mean(row["prefix"] for row in rows),
        "rolled_back": statistics.mean(row["rolled_back"] for row in rows),
        "recovery_s": median([row["recovery_s"] for row in rows]),
        "recovery_s_worst": max((row["recovery_s"] or 0.0 for row in rows), default=0.0),
        "equal": sum(row["equal"] for row in rows),
        "answers": len(rows),
    }


def cuts_of(world: World, method: str, chats: list[Any], options: argparse.Namespace) -> JSON:
    """Make all cuts of one method, and summarize them."""
    chance, limit = random.Random(options.seed), options.max_new_tokens
    complete: dict[str, list[JSON]] = {f"{share:.0%}": [] for share in SHARES}
    at_random: list[JSON] = []
    for chat in chats:
        whole = cut_answer(world, method, chat, limit, [])
        n = len(whole["tokens"]) or len(whole["updates"])
        for share in SHARES:
            result = cut_answer(
                world, method, chat, limit, [(max(1, round(n * share)), options.cut_s)]
            )
            if len(result["cut_times"]) == 2:
                row = complete_cut(result, whole["tokens"]) | {
                    "equal": result["text"] == whole["text"]
                }
                complete[f"{share:.0%}"].append(row)
        indices = sorted(
            chance.sample(range(1, max(2, n - 1)), min(options.random_cuts, max(1, n - 2)))
        )
        cuts = [(index, chance.uniform(0.05, 2.0)) for index in indices]
        result = cut_answer(world, method, chat, limit, cuts)
        row = {
            "tokens": n,
            "cuts": len(result["cut_times"]) // 2,
            "cut_s": sum(seconds for _, seconds in cuts),
        }
        row |= {"seconds": result["ended_s"] - result["began_s"]}
        row |= {
            "seconds_without": whole["ended_s"] - whole["began_s"],
            "rolled_back": result["n_rolled_back"],
        }
        at_random.append(row | {"equal": result["text"] == whole["text"]})
    sums = {key: sum(row[key] for row in at_random) for key in at_random[0]} | {
        "answers": len(at_random)
    }
    return {
        "complete": {share: summed(rows) for share, rows in complete.items()},
        "random": sums,
        "rows": {"complete": complete, "random": at_random},
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each method."""
    options.out.mkdir(parents=True, exist_ok=True)
    _, chats = chats_of(options)
    cells = []
    for target_ms in map(float, options.target_ms.split(",")):
        for condition in options.conditions.split(","):
            with world_of(options, condition, target_ms) as world:
                for method in options.methods.split(","):
                    cell = {"condition": condition, "target_ms": target_ms, "method": method}
                    cells.append(cell | cuts_of(world, method, chats, options))
    return {"cells": cells}


if __name__ == "__main__":
    words = MODELS | {"conditions": "4g", "target_ms": "25"}
    run("network-cuts", measure, methods=METHODS, cut_s=5.0, random_cuts=4, **words)
