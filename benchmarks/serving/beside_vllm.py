"""Serves the same prompts with ``moa-data serve`` and with vLLM on this machine's CPU, in turns.

Both servers run all the time; streams of greedy tokens go to one at once, then to the other, and the one that came
first comes second in the next turn. ``--vllm`` names the Python of an environment with vLLM's build for CPUs (``make
test-engines`` makes one). ::

    python -m benchmarks.serving.beside_vllm --model MODEL --prompts CHATS --vllm PYTHON [--streams 8]
        [--threads 1] [--eager]                                    vLLM does not compile the model
"""

import argparse
import asyncio
import contextlib
import json
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

from benchmarks.kit.harness import quartiles, run
from moa_data.evaluation.prompts import load_prompts

STARTS_S = 400
# Before each turn. For about a second after its last answer vLLM's engine asks again and again for more work, on a core
# that the other side would lack.
RESTS_S = 2.0


@contextlib.contextmanager
def server(words: list[str], threads: int, log: Path) -> Iterator[tuple[str, int]]:
    """Run a server with a ``--port`` of its own until it is not needed any more: its address and process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    own = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*words, "--port", str(port)], env=os.environ | own, stdout=file, stderr=file, start_new_session=True
        )
    try:
        ends = time.monotonic() + STARTS_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > ends:
                raise SystemExit(f"{words[0]} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def cpu_seconds(pid: int) -> float:
    """CPU seconds so far of a process and its children that live."""
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
    """Stream an answer: its text, its tokens and the seconds to the first piece."""
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


async def turn(address: str, model: str, questions: list[str], n_tokens: int) -> tuple[list[str], int, float, float]:
    """Ask all at once: the texts, tokens, seconds, and the median seconds to a first piece."""
    settings = {"model": model, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    settings["stream_options"] = {"include_usage": True}
    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        began = time.perf_counter()
        found = await asyncio.gather(
            *(answer(client, settings | {"messages": [{"role": "user", "content": text}]}) for text in questions)
        )
        seconds = time.perf_counter() - began
    texts, counts, firsts = zip(*found, strict=True)
    return list(texts), sum(counts), seconds, statistics.median(firsts)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Take turns, after one of each that is not counted."""
    questions = [
        str(prompt.turns[0][-1]["content"]) for prompt in load_prompts(str(options.prompts), options.streams).prompts
    ]
    name = "target"
    ours = [sys.executable, "-m", "moa_data", "serve", "--model", str(options.model), "--name", name]
    ours += ["--device", "cpu"]
    theirs = [str(options.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.model)]
    theirs += ["--served-model-name", name, "--dtype", "float32", "--max-num-seqs", "16"]
    theirs += ["--enforce-eager"] if options.eager else []  # else it compiles the model first
    taken: dict[str, list[dict[str, float]]] = {"moa-data": [], "vllm": []}
    texts: dict[str, list[str]] = {}
    with contextlib.ExitStack() as stack:
        sides = {
            side: stack.enter_context(server(words, options.threads, options.logs / f"{side}.log"))
            for side, words in (("vllm", theirs), ("moa-data", ours))
        }
        for repeat in range(options.repeats + 1):
            for side in sorted(sides, reverse=bool(repeat % 2)):
                address, pid = sides[side]
                time.sleep(RESTS_S)
                before = cpu_seconds(pid)
                texts[side], n_tokens, seconds, first_s = asyncio.run(
                    turn(address, name, questions, options.max_new_tokens)
                )
                if repeat:
                    cpu_ms = 1e3 * (cpu_seconds(pid) - before) / n_tokens
                    taken[side].append(
                        {"tokens_per_s": n_tokens / seconds, "first_ms": 1e3 * first_s, "cpu_ms_per_token": cpu_ms}
                    )
    ratios = [one["tokens_per_s"] / other["tokens_per_s"] for one, other in zip(*taken.values(), strict=True)]
    figures: dict[str, Any] = {
        side: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for side, runs in taken.items()
    }
    equal = sum(one == other for one, other in zip(*texts.values(), strict=True))
    return {"figures": figures, "tokens_per_s_over_vllm": quartiles(ratios), "texts_equal": equal}


if __name__ == "__main__":
    path = {"type": Path, "required": True}
    run(
        "beside-vllm", measure, model=path, prompts=path, vllm=path, streams=8, max_new_tokens=128, repeats=5,
        threads=1, logs={"type": Path, "default": Path()}, eager={"action": "store_true"},
    )  # fmt: skip
