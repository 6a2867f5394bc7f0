"""Measures answers over emulated networks: two modes of an API, and drafting clients. Needs root.

Server and client are two processes in two network namespaces. The network between them has the
conditions of the Mixture of Attentions paper. The methods are:

- ``api``: The server decodes without drafts, and streams the answer over OpenAI's API.
- ``api+DRAFTER``: The server decodes with drafts, and streams the answer over OpenAI's API.
- MODE:DRAFTER: The drafting client. MODE is the machine that drafts, server or client. @int8 or
  @int4 at the end selects the codec of the activations that the server sends.

In each condition all methods take turns and answer the same prompts. The order is reversed each
turn. Opening the connections is not measured.

    python -m benchmarks.serving.network --model TARGET
        --drafters moa=RUN,eagle=RUN,independent=RUN --prompts CHATS
    python -m benchmarks.serving.network ... --conditions 4g --methods api,client:moa --sessions 1
        --target-ms 25 --turns 1

Tokens/s count the tokens of all sessions together. A gap is the time between two tokens of one
session that do not arrive together. Bytes are the sizes of IP packets. Both processes share this
machine's processors.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit.harness import medians, run
from benchmarks.serving.network_tunnel import CONDITIONS
from benchmarks.serving.network_world import JSON, World
from moa_data.evaluation.prompts import load_prompts
from moa_data.evaluation.report import ratio_with_interval

METHODS = "api,api+moa,client:moa,client:eagle,client:independent,server:moa"
PAIRS = (("client:moa", "client:eagle"), ("server:moa", "api"), ("server:moa", "api+moa"))
"""Pairs of methods. The tokens/s of the first are divided by those of the second, by prompt."""


MODELS: dict[str, Any] = {
    "model": {"required": True}, "drafters": {"required": True, "metavar": "NAME=RUN,..."},
    "prompts": {"type": Path, "required": True}, "n_prompts": 16, "max_new_tokens": 128, "seed": 0,
    "conditions": "wired,5g,4g,satellite", "target_ms": "0,8,25",
}  # fmt: skip
"""Options for the models, the prompts, the networks, and the minimum times of a target call."""


def world_of(options: argparse.Namespace, condition: str, target_ms: float) -> World:
    """Return a server and a client on both ends of a network, with the models of the options."""
    named = (drafter.partition("=") for drafter in options.drafters.split(","))
    drafters = {name: str(Path(run).absolute()) for name, _, run in named}
    return World(
        options.model, drafters, CONDITIONS[condition], target_ms, options.out, options.seed
    )


def chats_of(options: argparse.Namespace) -> tuple[list[str], list[Any]]:
    """Return the ids and messages of the prompts."""
    prompts = load_prompts(options.prompts, options.n_prompts).prompts
    chats = [
        [{"role": part["role"], "content": part["content"]} for part in prompt.turns[0]]
        for prompt in prompts
    ]
    return [prompt.prompt_id for prompt in prompts], chats


def figures(result: JSON, reference: list[str]) -> JSON:
    """Summarize one run of one method.

    ``equal`` counts the texts that equal those of the first method's first turn.
    """
    answers = result["answers"]
    times = [answer["times_s"] for answer in answers]
    n = sum(map(len, times))
    gaps = np.concatenate([np.diff(values) for values in times]) * 1e3
    p50, p95 = np.quantile(gaps, (0.5, 0.95))
    return {
        "tokens": n,
        "tokens_per_s": round(n / result["seconds"], 2),
        "first_token_ms": round(1e3 * statistics.median(values[0] for values in times), 2),
        "gap_p50_ms": round(float(p50), 2),
        "gap_p95_ms": round(float(p95), 2),
        "gap_max_ms": round(float(gaps.max()), 2),
        "calls": result["calls"],
        "tokens_per_call": round(n / max(1, result["calls"]), 3),
        "bytes_up_per_token": round(result["bytes_up"] / n, 1),
        "bytes_down_per_token": round(result["bytes_down"] / n, 1),
        "packets_lost": result["packets_lost"],
        "equal": sum(
            answer["text"] == text for answer, text in zip(answers, reference, strict=True)
        ),
        "seconds_per_answer": [round(values[-1], 4) for values in times],
        "tokens_per_answer": [len(values) for values in times],
    }


def summed(runs: list[JSON]) -> JSON:
    """Return the median of each figure over turns, and the spread of tokens/s."""
    single = [
        {name: value for name, value in one.items() if not isinstance(value, list)} for one in runs
    ]
    rates = [one["tokens_per_s"] for one in runs]
    return medians(single) | {
        "tokens_per_s_least": min(rates),
        "tokens_per_s_most": max(rates),
        "equal": min(run["equal"] for run in runs),
    }


def compare(ids: list[str], runs: dict[str, list[JSON]]) -> JSON:
    """Return the ratios of tokens/s of one session, with 95 % intervals over prompts."""
    ratios = {}
    for one, other in PAIRS:
        if one in runs and other in runs:
            names, values = [], []
            for a, b in zip(runs[one], runs[other], strict=True):
                names += ids
                columns = (
                    run[key]
                    for run in (a, b)
                    for key in ("tokens_per_answer", "seconds_per_answer")
                )
                values += list(zip(*columns, strict=True))
            ratio, interval = ratio_with_interval(names, values)
            ratios[f"{one} over {other}"] = {"ratio": ratio, "interval": interval}
    return ratios


def measure_cell(
    world: World, options: argparse.Namespace, chats: list[Any], n_sessions: int
) -> dict[str, list[JSON]]:
    """Let all methods answer in turns, and return the figures of each."""
    methods = options.methods.split(",")
    runs: dict[str, list[JSON]] = {method: [] for method in methods}
    reference: list[str] = []
    for turn in range(options.turns):
        for method in methods if turn % 2 == 0 else reversed(methods):
            job = {"do": "table", "method": method, "sessions": n_sessions, "chats": chats}
            result = world.run(job | {"max_new_tokens": options.max_new_tokens})
            reference = reference or [answer["text"] for answer in result["answers"]]
            runs[method].append(figures(result, reference))
    return runs


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each combination of network, target time and number of sessions."""
    options.out.mkdir(parents=True, exist_ok=True)
    ids, chats = chats_of(options)
    cells, summary = [], []
    for target_ms in map(float, options.target_ms.split(",")):
        for condition in options.conditions.split(","):
            with world_of(options, condition, target_ms) as world:
                for n_sessions in map(int, options.sessions.split(",")):
                    runs = measure_cell(world, options, chats, n_sessions)
                    cell = {"condition": condition, "target_ms": target_ms, "sessions": n_sessions}
                    cells.append(
                        cell
                        | {"runs": runs, "ratios": compare(ids, runs) if n_sessions == 1 else {}}
                    )
                    summary += [
                        cell | {"method": method} | summed(of) for method, of in runs.items()
                    ]
    return {"summary": summary, "cells": cells}


if __name__ == "__main__":
    run("network", measure, methods=METHODS, sessions="1,8", turns=3, **MODELS)
