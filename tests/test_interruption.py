"""Ctrl-C and kill -9 on the real process: one line and exit code 130, and the same command ends what was begun."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

SIZES = {
    "n-chats": 80, "n-store-chats": 60, "n-held-out": 11, "vocab-size": 300, "hidden-size": 16, "n-layers": 2,
    "n-heads": 2, "n-kv-heads": 1, "target-steps": 4, "target-batch-tokens": 512, "drafter-steps": 8,
    "drafter-batch-size": 4, "n-eval-prompts": 2, "max-new-tokens": 6, "draft-length": 2,
}  # fmt: skip
TINY = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]

# Sends a signal to itself the first time that a function is called, in the middle of a phase of the demo.
STRIKE = """
import importlib, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from moa_data.__main__ import main
module, _, attribute = sys.argv.pop(1).partition(":")
number = int(sys.argv.pop(1))
owner, calls = importlib.import_module(module), []
*path, name = attribute.split(".")
for step in path:
    owner = getattr(owner, step)
real = getattr(owner, name)
def struck(*args, **kwargs):
    calls.append(name)
    if len(calls) == 3 or name != "training_step":
        os.kill(os.getpid(), number)
        time.sleep(5)
    return real(*args, **kwargs)
setattr(owner, name, struck)
main()
"""

PHASES = {
    "corpus": "moa_data.demo.run:corpus_stats",
    "target": "moa_data.demo.target:_validate",
    "extract": "moa_data.pipeline.extract:_run_batch",
    "train": "moa_data.trainer.module:DrafterModule.training_step",
    "eval": "moa_data.evaluation.measure:_compare",
    "report": "moa_data.demo.report:greedy_answers",
}

# Stands in for the command line, whose imports take a second.
FAKE_CLI = """
import signal, sys, time, types
from moa_data.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)
fake = types.ModuleType("moa_data.cli")
sys.modules["moa_data.cli"] = fake
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_ctrl_c_while_importing() -> None:
    code = FAKE_CLI + "del sys.modules['moa_data.cli']\n"
    code += "class Finder:\n    def find_spec(self, *args):\n        signal.raise_signal(signal.SIGINT)\n"
    code += "sys.meta_path.insert(0, Finder())\nmain()\n"
    assert "interrupted before anything was done. Run the same command again." in one_line(python(code))


def test_ctrl_c_inside_a_destructor_is_not_lost() -> None:
    code = FAKE_CLI + "class Dying:\n    def __del__(self):\n        signal.raise_signal(signal.SIGINT)\n"
    code += "def command():\n    Dying()\n    time.sleep(20)\n    print('went on')\nfake.main = command\nmain()\n"
    done = python(code)
    one_line(done)
    assert "went on" not in done.stdout


def test_ctrl_c_after_the_end_changes_nothing() -> None:
    code = FAKE_CLI + "import atexit\natexit.register(lambda: signal.raise_signal(signal.SIGINT))\n"
    code += "fake.main = lambda: print('done')\nmain()\n"
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_each_phase_of_the_demo(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "demo"
    arguments = ("demo", "--out", str(out), *TINY)
    for index, (phase, place) in enumerate(PHASES.items()):
        done = python(STRIKE, place, str(int(number)), *arguments)
        finished = list(json.loads((out / "demo.json").read_text())["phases"])
        assert finished == list(PHASES)[:index]
        if number == signal.SIGKILL:
            assert done.returncode == -signal.SIGKILL, done.stderr
            continue
        line = one_line(done)
        assert f"interrupted in the {phase} phase; run the same command again, finished phases are kept" in line
        assert all(name in line for name in finished)
    done = subprocess.run([sys.executable, "-m", "moa_data", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "identical to plain greedy decoding" in done.stdout
    assert not list(out.rglob("*.partial"))
