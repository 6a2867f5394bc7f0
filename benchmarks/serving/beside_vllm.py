"""Serves the same prompts with ``moa-data serve`` and with vLLM on this machine's CPU, in turns.

The servers are ours with each number of ``--threads``, vLLM with its defaults (it compiles the
model), and vLLM in eager mode. In its turn, a server answers all prompts greedily in concurrent
streams, while the other servers are stopped. In a round, each server has one turn. The order
changes from round to round, so that no server always follows the same other server. Ratios are
computed between turns of the same round. ``--vllm`` is the Python interpreter of an environment
with vLLM's build for CPUs (``make test-engines`` makes one). ``--vllm-threads 0`` lets vLLM choose
the number of threads. ::

    python -m benchmarks.serving.beside_vllm --model MODEL --prompts CHATS --vllm PYTHON
        [--streams 8] [--threads 1 2] [--vllm-threads 0]
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import operator
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx

from benchmarks.kit.harness import medians, quartiles, run
from moa_data.evaluation.prompts import load_prompts

NAME = "target"
STARTS_S = 400
RESTS_S = 2.0  # Pause before each turn.


@contextlib.contextmanager
def server(words: list[str], threads: int, log: Path) -> Iterator[tuple[str, int]]:
    """Run a server on a free port while the context is open.

    Yields its address and its process id.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    own = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if threads:
        own |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as file:
        process = subprocess.Popen(
            [*words, "--port", str(port)],
            env=os.environ | own,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        ends = time.monotonic() + STARTS_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > ends:
                raise SystemExit(
                    f"{words[0]} did not start. The end of its log is: {log.read_text()[-2000:]}"
                )
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        for number in (signal.SIGTERM, signal.SIGCONT):
            os.killpg(process.pid, number)
        process.wait(60)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds so far of a process and its living children."""
    tree, total = [pid], 0.0
    while tree:
        one = tree.pop()
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            for task in Path(f"/proc/{one}/task").iterdir():
                tree += map(int, (task / "children").read_text().split())
    return total


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, int, float]:
    """Stream an answer. Returns its text, its tokens and the seconds to the first piece."""
    began, first, text, n_tokens = time.perf_counter(), 0.0, "", 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            new = "".join(choice["delta"].get("content") or "" for choice in piece["choices"])
            first = first or (time.perf_counter() - began if new else 0.0)
            text += new
            if piece.get("usage"):
                n_tokens = piece["usage"]["completion_tokens"]
    return text, n_tokens, first


async def turn(
    address: str, questions: list[str], n_tokens: int
) -> tuple[list[str], int, float, float]:
    """Send all questions at once.

    Returns the texts, the number of tokens, the seconds, and the median seconds to a first piece.
    """
    settings = {
        "model": NAME,
        "max_tokens": n_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    settings["stream_options"] = {"include_usage": True}
    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        began = time.perf_counter()
        found = await asyncio.gather(
            *(
                answer(client, settings | {"messages": [{"role": "user", "content": text}]})
                for text in questions
            )
        )
        seconds = time.perf_counter() - began
    texts, counts, firsts = zip(*found, strict=True)
    return list(texts), sum(counts), seconds, statistics.median(firsts)


def sides_of(options: argparse.Namespace) -> dict[str, tuple[list[str], int]]:
    """Return the name, the command and the number of threads of each server, ours first."""
    model = ["--model", str(options.model)]
    ours = [
        sys.executable,
        "-m",
        "moa_data",
        "serve",
        *model,
        "--name",
        NAME,
        "--device",
        "cpu",
        "--grpc-port",
        "0",
    ]
    theirs = [
        str(options.vllm),
        "-m",
        "vllm.entrypoints.openai.api_server",
        *model,
        "--served-model-name",
        NAME,
    ]
    theirs += ["--dtype", "float32", "--max-num-seqs", "16"]
    sides = {f"moa-data, {threads}": (ours, threads) for threads in options.threads}
    eager = [*theirs, "--enforce-eager"]
    return sides | {
        "vllm": (theirs, options.vllm_threads),
        "vllm, eager": (eager, options.vllm_threads),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Let the servers take turns. The first round is not counted."""
    prompts = load_prompts(str(options.prompts), options.streams).prompts
    questions = [str(prompt.turns[0][-1]["content"]) for prompt in prompts]
    sides, texts = sides_of(options), dict[str, list[str]]()
    turns: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with contextlib.ExitStack() as stack:
        servers = {
            side: stack.enter_context(
                server(words, threads, options.logs / f"{side.replace(', ', '-')}.log")
            )
            for side, (words, threads) in sides.items()
        }
        # Stop the servers that are not measured. For a second after its last answer, vLLM polls for
        # more work, which would keep a core busy during the next server's turn.
        for _, pid in servers.values():
            os.killpg(pid, signal.SIGSTOP)
        for number in range(options.repeats + 1):
            first = number // 2 % len(sides)
            order = [*sides][first:] + [*sides][:first]
            for side in reversed(order) if number % 2 else order:
                address, pid = servers[side]
                os.killpg(pid, signal.SIGCONT)
                time.sleep(RESTS_S)
                load, before = os.getloadavg()[0], cpu_seconds(pid)
                texts[side], n_tokens, seconds, first_s = asyncio.run(
                    turn(address, questions, options.max_new_tokens)
                )
                cpu_s = cpu_seconds(pid) - before
                os.killpg(pid, signal.SIGSTOP)
                turns[side].append(
                    {
                        "tokens_per_s": n_tokens / seconds, "first_ms": 1e3 * first_s,
                        "cpu_ms_per_token": 1e3 * cpu_s / n_tokens, "load_before": load,
                    }
                )  # fmt: skip
    speeds = {side: [one["tokens_per_s"] for one in own[1:]] for side, own in turns.items()}
    ours, theirs = list(sides)[: len(options.threads)], list(sides)[len(options.threads) :]
    pairs = [*itertools.product(ours, theirs), *((other, ours[0]) for other in ours[1:])]
    return {
        "medians": {side: medians(own[1:]) for side, own in turns.items()},
        "ratios": {
            f"{a} / {b}": quartiles([x / y for x, y in zip(speeds[a], speeds[b], strict=True)])
            for a, b in pairs
        },
        "texts_equal": {
            side: sum(map(operator.eq, own, texts["vllm"])) for side, own in texts.items()
        },
        "turns": turns,  # The first turn is not counted.
    }


if __name__ == "__main__":
    path = {"type": Path, "required": True}
    run(
        "beside-vllm", measure, model=path, prompts=path, vllm=path, streams=8, max_new_tokens=128,
        repeats=11, threads=[1, 2], vllm_threads=0, logs={"type": Path, "default": Path()},
    )  # fmt: skip
