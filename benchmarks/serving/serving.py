"""Measures the throughput of the serving engine with concurrent and with consecutive sessions.

Each repeat runs the same prompts both ways, in one process and with one engine. The order of the
two ways alternates, and the first repeat is not counted. The texts of both ways must be equal token
for token. With a drafter, both ways are also measured with drafts of the server. ::

    python -m benchmarks.serving.serving --model MODEL --prompts CHATS [--drafter RUN] [--threads 2]
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.harness import quartiles, run
from moa_data.evaluation.prompts import load_prompts
from moa_data.moa.formats.checkpoint import check_drafter_matches, load_drafter
from moa_data.moa.targets.chat_tokens import prompt_tokens
from moa_data.moa.targets.live import Target
from moa_data.serving.config import EngineOptions
from moa_data.serving.engine.engine import Engine
from moa_data.serving.engine.sequence import Commit, Request, Work


def complete(engine: Engine, requests: list[Request], work: Work) -> list[list[int]]:
    """Run requests concurrently to their ends, and return the new tokens of each."""
    texts: list[list[int]] = [[] for _ in requests]
    ids = []
    for text, request in zip(texts, requests, strict=True):

        def keep(commit: Commit, text: list[int] = text) -> None:
            text += commit.tokens

        ids.append(engine.add(request, keep))
        engine.set_work(ids[-1], work)
    while engine.step():
        pass
    for id_ in ids:
        engine.remove(id_)
    return texts


def tokens_per_s(
    engine: Engine, requests: list[Request], work: Work, at_once: bool
) -> tuple[float, list[list[int]]]:
    """Run requests concurrently or one after the other. Returns tokens/s and the texts."""
    began = time.perf_counter()
    if at_once:
        texts = complete(engine, requests, work)
    else:
        texts = [text for request in requests for text in complete(engine, [request], work)]
    return sum(map(len, texts)) / (time.perf_counter() - began), texts


def compare(engine: Engine, requests: list[Request], work: Work, n_repeats: int) -> dict[str, Any]:
    """Measure both ways in turns."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(n_repeats + 1):
        texts = {}
        for at_once in (True, False) if repeat % 2 else (False, True):
            rate, texts[at_once] = tokens_per_s(engine, requests, work, at_once)
            if repeat:  # Do not count the first repeat, because it sets up kernels and buffers.
                rates[at_once].append(rate)
        if texts[True] != texts[False]:
            raise AssertionError("answers depend on the other requests of their target calls")
    ratios = [together / apart for together, apart in zip(rates[True], rates[False], strict=True)]
    counts = engine.snapshot()
    return {
        "at_once_tokens_per_s": quartiles(rates[True]),
        "one_after_the_other_tokens_per_s": quartiles(rates[False]),
        "ratio": quartiles(ratios),
        "ratios": ratios,
        "n_tokens": sum(map(len, texts[True])),
        "acceptance_length": counts.n_committed / max(1, counts.n_rounds),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures."""
    target = Target.load(options.model, getattr(torch, options.dtype), options.device)
    drafters = {}
    if options.drafter:
        drafters["drafter"] = load_drafter(options.drafter, target.model.dtype, target.device)
        check_drafter_matches(drafters["drafter"], target)
    chats = load_prompts(options.prompts, options.sessions).prompts
    prompts = [prompt_tokens(target.template, list(chat.turns[0]), chat.tools) for chat in chats]
    found: dict[str, Any] = {
        "n_threads": torch.get_num_threads(),
        "prompt_tokens": [len(p) for p in prompts],
    }
    for work in (Work.PLAIN, Work.SPECULATE) if drafters else (Work.PLAIN,):
        engine = Engine(target, drafters, EngineOptions())
        name = "drafter" if work is Work.SPECULATE else None
        requests = [
            Request(tuple(p), len(p), options.max_new_tokens, drafter=name) for p in prompts
        ]
        found[work.value] = compare(engine, requests, work, options.repeats)
    return {"figures": found}


if __name__ == "__main__":
    needed = {"required": True}
    run(
        "serving", measure, model=needed, prompts=needed | {"type": Path}, drafter=str, sessions=8,
        max_new_tokens=128, repeats=7, threads=2, device="cpu", dtype="float32",
    )  # fmt: skip
