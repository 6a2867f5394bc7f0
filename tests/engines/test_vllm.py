"""Extraction with vLLM itself as a source, on a CPU.

`make test-engines` makes the environment that these tests need.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moa_data.pipeline.audit import audit
from moa_data.storage.read.verify import verify_store
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.command import error_line
from moa_data.tests.kit.models import write_target
from moa_data.tests.kit.stores import read_tree

PYTHON = Path(os.environ.get("MOA_DATA_VLLM", "none"))
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON.is_file(), reason="MOA_DATA_VLLM names no Python with vLLM"),
]
SIZES = {"head_dim": 32, "num_hidden_layers": 3}  # vLLM has kernels for a few head sizes only


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    model = write_target(tmp_path / "model", **SIZES)
    chats = write_jsonl(tmp_path / "chats.jsonl", random_chats(40))
    line = (
        f"extract --model {model} --dataset {chats} --out {tmp_path / 'store'} --source vllm "
        "--max-length 90"
    )
    options = (
        "--activations kv,hidden:last,hidden:layer:1 --compute-dtype float32 --part-tokens 256 "
        "--batch-tokens 256"
    )
    return [str(PYTHON), "-m", "moa_data", *line.split(), *options.split()]


def begun(words: list[str], folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            words,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def engines(run: subprocess.Popen[str]) -> list[str]:
    """List the vLLM processes of a run."""
    listed = subprocess.run(
        ["ps", "-eo", "pid,sess,args"], capture_output=True, text=True, check=True
    ).stdout
    return [
        line for line in listed.splitlines() if "VLLM::" in line and line.split()[1] == str(run.pid)
    ]


def wait_for(is_so: Callable[[], bool], within_s: float) -> None:
    last_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < last_s
        time.sleep(0.1)


def wait_for_its_end(run: subprocess.Popen[str]) -> None:
    wait_for(lambda: not engines(run), 10)


def wait_for_parts(store: Path, n_parts: int, run: subprocess.Popen[str]) -> None:
    wait_for(
        lambda: len(list(store.glob("commits/part-*"))) >= n_parts or run.poll() is not None, 300
    )


@pytest.mark.usefixtures("heeded_signals")
def test_its_store_passes_the_audit_also_after_a_kill_and_an_interrupt(
    words: list[str], tmp_path: Path
) -> None:
    """The processes of vLLM end with ours, and the same command resumes and completes the store."""
    store = tmp_path / "store"
    for number, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        n_parts = len(list(store.glob("commits/part-*"))) + 1
        run = begun(words, tmp_path)
        wait_for_parts(store, n_parts, run)
        run.send_signal(number)
        assert run.wait(30) == code, (tmp_path / "log").read_text()
        wait_for_its_end(run)
    if number == signal.SIGINT:
        lines = [
            line for line in (tmp_path / "log").read_text().splitlines() if not line.startswith("(")
        ]
        assert any(line.startswith("Error: interrupted") for line in lines)
    before = read_tree(store)
    run = begun(words, tmp_path)
    assert run.wait(600) == 0, (tmp_path / "log").read_text()
    assert {name for name in before if name.startswith("parts")} <= {*read_tree(store)}
    assert verify_store(store).ok
    found = audit(str(store), str(tmp_path / "model"), samples=6)
    assert found.ok, found.describe()
    assert {row.field for row in found.rows} >= {"kv", "hidden/last", "hidden/layer_1", "logits"}


def test_a_process_of_its_own_that_stops_ends_in_a_line(words: list[str], tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from moa_data.pipeline.forwards import vllm_source\n"
        "vllm_source._WRITTEN_WITHIN_S = 10.0\n"
        "from moa_data.__main__ import main\nsys.argv = ['moa-data', *sys.argv[1:]]\nmain()"
    )
    run = begun([words[0], "-c", program, *words[3:]], tmp_path)
    wait_for_parts(tmp_path / "store", 1, run)
    for line in engines(run):
        if "EngineCore" in line:
            os.kill(int(line.split()[0]), signal.SIGSTOP)
    code = run.wait(60)
    said = "\n".join(
        line for line in (tmp_path / "log").read_text().splitlines() if not line.startswith("(")
    )
    assert "no progress for 10 s" in error_line(code, said.partition("/resource_tracker.py")[0], 2)
    wait_for_its_end(run)
