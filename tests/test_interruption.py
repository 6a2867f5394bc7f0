"""Signals and broken streams, tested with real processes.

A signal ends the process with one line and its exit code. Closed or full streams do not hide
failures.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from moa_data.storage.read.verify import verify_store
from moa_data.tests.kit.command import DEMO_OPTIONS, error_line
from moa_data.tests.kit.runs import assert_same_run
from moa_data.tests.kit.variants import quick

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals"),
    pytest.mark.usefixtures("heeded_signals"),
]  # fmt: skip

MOA_DATA = f"exec {sys.executable} -m moa_data"
ENVIRONMENT: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1"}
# All commands. They run in a folder with model/, chats.jsonl, store/, exported/ and a run/.
EVERY_COMMAND: dict[str, Any] = {
    "plan": "plan --model model --dataset chats.jsonl --out OUT --device cpu",
    "extract": "extract --model model --dataset chats.jsonl --out OUT --device cpu",
    "inspect": "inspect store",
    "inspect --sequence": "inspect store --sequence 1",
    "verify": "verify store",
    "repair": "repair store",
    "audit": "audit store --model model --device cpu --samples 2",
    "recode": "recode store --codec int8 --out OUT",
    "add": "add store --model model --activations hidden:layer:0 --device cpu",
    "train": "train store --out OUT --preset paper --max-steps 2 --batch-size 2 --accelerator cpu",
    "generate": "generate --model model --drafter run --prompt Hi --max-new-tokens 4 --device cpu",
    "eval": "eval --model model --drafter run --prompts chats.jsonl --out OUT --n-prompts 2 "
            "--max-new-tokens 4",
    "export": "export store --format eagle --out OUT",
    "import": "import exported --format eagle --model model --out OUT",
    "export-drafter": "export-drafter run --format moa --model model --out OUT",
    "demo": f"demo --out OUT {DEMO_OPTIONS}",
}  # fmt: skip

# Stands in for the command line, because importing the real one takes a second.
FAKE_CLI = """
import signal, sys, time, types
from moa_data.__main__ import main
fake = types.ModuleType("moa_data.cli")
sys.modules["moa_data.cli"] = fake
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)


def one_line(done: subprocess.CompletedProcess[str], number: int = signal.SIGINT) -> str:
    return error_line(done.returncode, done.stderr, 128 + number)


IMPORTS = (
    FAKE_CLI
    + """
del sys.modules["moa_data.cli"]
class Finder:
    def find_spec(self, *args):
        RAISE
sys.meta_path.insert(0, Finder())
main()
"""
)
# Commands that handle a signal as libraries do, or that cannot be interrupted at all. BODY is the
# body of the command.
RUNS = (
    FAKE_CLI
    + """
import atexit, hashlib, os, threading, moa_data.commands.signals as ours
ours.CLEANUP_S, ours._REPEAT_S = 0.4, 0.2
class Dying:
    def __del__(self):
        RAISE
def later(seconds):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
def command():
    BODY
    time.sleep(200)
    print("went on")
fake.main = command
main()
"""
)
BODIES = {
    "drops it in a destructor": "Dying()",
    "swallows it": "try:\n        RAISE\n    except BaseException: pass",
    "is in an import": "import imported",
    "is in C code": "later(0.1); hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",
    "is in C code at a second one": "ours.CLEANUP_S = 99; later(0.1); later(0.5)\n"
    "    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",
    "hangs in its cleaning up": "lock = threading.Lock()\n    try:\n        RAISE\n    finally:\n"
    "        lock.acquire()\n        lock.acquire()",
    "hangs at its end": "threading.Thread(target=time.sleep, args=(200,)).start()\n    RAISE",
}


def raising(
    code: str, number: int = signal.SIGINT, body: str = ""
) -> subprocess.CompletedProcess[str]:
    return python(
        code.replace("BODY", body).replace("RAISE", f"signal.raise_signal({int(number)})")
    )


# Named tuples and dataclasses also run generated code with `exec`.
@pytest.mark.parametrize("how", ["RAISE", "exec('RAISE')"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_program_is_imported(number: signal.Signals, how: str) -> None:
    assert "interrupted before anything was done" in one_line(
        raising(IMPORTS.replace("RAISE", how), number), number
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_the_end_changes_nothing(number: signal.Signals) -> None:
    done = raising(
        FAKE_CLI
        + "import atexit\natexit.register(lambda: RAISE)\nfake.main = lambda: None\nmain()",
        number,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "how", quick(BODIES, BODIES.keys() - {"is in C code", "is in an import", "hangs at its end"})
)
def test_a_command_that_resists_ends_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / "imported.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    done = raising(RUNS, body=BODIES[how])
    one_line(done)
    assert "went on" not in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "body",
    ["Dying()", "os.register_at_fork(after_in_parent=lambda: RAISE)\n    os.fork() or os._exit(0)"],
)
def test_an_interruption_that_python_discards_is_raised_again(
    number: signal.Signals, body: str
) -> None:
    lines = [
        "try:", *(f"    {line.strip()}" for line in body.splitlines()), "    time.sleep(60)",
        "finally:", "    print('cleaned up', flush=True)",
    ]  # fmt: skip
    done = raising(RUNS.replace("0.4, 0.2", "60, 0.2"), number, "\n    ".join(lines))
    assert "did not end by itself" not in one_line(done, number)
    assert done.stdout.startswith("cleaned up\n")


def test_a_second_sigterm_does_not_break_off_the_cleaning_up() -> None:
    body = (
        "try:\n        RAISE\n    finally:\n        RAISE\n        print('cleaned up', flush=True)"
    )
    done = raising(RUNS, signal.SIGTERM, body)
    one_line(done, signal.SIGTERM)
    assert done.stdout == "cleaned up\n"


def test_what_handles_signals_itself_has_its_time() -> None:
    """A command may handle a signal itself, for example to save its state as training does.

    It gets the time to do so, until Ctrl-C is pressed again.
    """
    body = (
        "noted = threading.Event()\n    signal.signal(signal.SIGINT, lambda *_: noted.set())\n"
        "    RAISE\n"
    )
    body += (
        "    assert noted.wait(60)\n    time.sleep(1)\n    print('saved', flush=True)\n"
        "    raise KeyboardInterrupt"
    )
    done = raising(RUNS, body=body)
    one_line(done)
    assert done.stdout == "saved\n"
    assert "press Ctrl-C again to stop at once" in done.stderr


def test_signals_that_are_ignored_stay_ignored() -> None:
    """``nohup`` and background jobs of a shell start a process with such signals."""
    signals = "(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)"
    code = (
        f"import signal\nfor number in {signals}:\n    signal.signal(number, signal.SIG_IGN)\n"
        f"{FAKE_CLI}"
    )
    done = python(
        f"{code}fake.main = lambda: [signal.raise_signal(number) for number in {signals}]\nmain()\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_that_a_signal_leads_to_is_no_fault() -> None:
    """An interrupted library may raise an error of its own that does not mention the signal."""
    code = FAKE_CLI + (
        "import click\nfrom moa_data.commands.console import StageGroup\n"
        "fake.main = StageGroup('fake')\n"
        "@fake.main.command()\ndef fail():\n    try:\n        RAISE\n"
        "    except KeyboardInterrupt:\n        pass\n"
        "    raise AttributeError('partially initialized module')\n"
        "sys.argv[1:] = ['fail']\nmain()\n"
    )
    one_line(raising(code))


RESUMED: dict[str, Any] = {
    "extract": "extract --model model --dataset chats.jsonl --out OUT --part-tokens 256 "
    "--device cpu",
    "recode": "recode store --codec int8 --out OUT",
    "add": "add OUT --model model --activations hidden:layer:0 --device cpu",
    "train": "train store --out OUT --max-steps 24 --batch-size 2 --accelerator cpu "
    "--checkpoint-every 4",
    "eval": "eval --model model --drafter run --prompts chats.jsonl --out OUT/report.json "
    "--n-prompts 6 --max-new-tokens 24 --method plain,chain,tree --device cpu",
    "demo": f"demo --out OUT {DEMO_OPTIONS}",
}
"""Commands that resume, and then produce the same bytes as an uninterrupted run."""
SWEPT = EVERY_COMMAND | RESUMED | {
    "--help": "--help",
    "extract --workers": f"{RESUMED['extract']} --workers 2",
    "extract --engine": f"{RESUMED['extract']} --workers 2 --engine ray",
    "regenerate": "regenerate --model model --dataset chats.jsonl --out OUT --device cpu "
                  "--max-rejected-fraction 1",
    "serve": "serve --model model --drafter run --port 0 --grpc-port 0 --device cpu",
    "chat": "chat --server 127.0.0.1:PORT --drafter run --bundle store --prompt Hi",
    "push": "push store someone/store",
    "pull": "pull someone/store OUT",
}  # fmt: skip
"""All commands. The server that listens on PORT never answers."""
N_STRIKES = int(os.environ.get("N_STRIKES", "200"))
ENDS_S = 5.0
LEAVES_S = 1.0
"""Upper bound of the seconds from the end of a command to the exit of its process."""
LIVES_S = {"serve": 12.0, "chat": 12.0, "push": 12.0, "pull": 12.0}
"""Commands that wait for a server get a signal within this many seconds of their start."""


def data_files(out: Path) -> dict[str, bytes]:
    """Return a command's output: the data files of a store, a drafter and a target.

    Files that record runs, paths and times are left out.
    """
    data = re.compile(
        r"((store|drafter)/)?(parts|commits|codec|target|drafter)/.*|(store/)?plan\.parquet"
    )
    of_runs = {f"drafter/{name}.json" for name in ("report", "provenance", "store")}
    files = {
        path.relative_to(out).as_posix(): path for path in sorted(out.rglob("*")) if path.is_file()
    }
    return {
        name: path.read_bytes()
        for name, path in files.items()
        if data.fullmatch(name) and "/tensorboard/" not in name and name not in of_runs
        if path.suffix in (".json", ".parquet", ".safetensors", "") or "/c." in name
    }


def run_until(
    arguments: list[str], cwd: Path, moment_s: float | None, number: int
) -> tuple[int, str, float]:
    """Run the command line and send it a signal after some seconds.

    Returns:
        The exit code, the text on standard error, and the duration in seconds.
    """
    # The environment is read now, because a test may have set variables.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "moa_data", *arguments]
    began = time.perf_counter()
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as run:
        try:
            _, said = run.communicate(timeout=moment_s)
        except subprocess.TimeoutExpired:
            run.send_signal(number)
            _, said = run.communicate(timeout=300)
    return run.returncode, said.decode(errors="replace"), time.perf_counter() - began


def assert_interrupted(code: int, said: str, seconds: float, number: int = signal.SIGINT) -> None:
    # The bound holds on a machine with no other load.
    assert seconds < ENDS_S or number != signal.SIGINT, (seconds, said)
    is_early = "Fatal Python error: init_" in said or "Exception ignored in" in said
    if code == -number or (code in (0, 1) and is_early):
        return  # Python had not reached the first line of the program
    if code == 0 and seconds < LEAVES_S:
        return  # the result was decided, and the process was about to exit
    error_line(code, said, 128 + number)


def test_signals_at_random_moments_of_verify(room: Path) -> None:
    code, said, whole_s = run_until(["verify", "store"], room, None, 0)
    assert code == 0, said
    for share, number in ((0.45, signal.SIGINT), (0.75, signal.SIGTERM)):
        code, said, _ = run_until(["verify", "store"], room, share * whole_s, number)
        assert_interrupted(code, said, 0.0, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_repair_that_is_stopped_goes_on(
    full_room: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Stop a repair at random moments.

    `verify` never accepts a store with a missing part, and repeating the command restores the same
    bytes.
    """
    shutil.copytree(full_room / "model", tmp_path / "model")
    whole, damaged, out = full_room / "store", tmp_path / "damaged", tmp_path / "out"
    shutil.copytree(whole, damaged)
    commits = sorted((damaged / "commits").iterdir())
    for commit in commits[::2]:
        commit.unlink()
    words, random, n_struck = (
        ["repair", "out", "--model", "model", "--device", "cpu"],
        Random(int(number)),
        0,
    )
    shutil.copytree(damaged, out)
    code, said, whole_s = run_until(words, tmp_path, None, 0)
    assert code == 0, said
    while n_struck < 20:
        shutil.rmtree(out)
        shutil.copytree(damaged, out)
        moment_s = random.uniform(0.3 * whole_s, whole_s)
        _, _, seconds = run_until(words, tmp_path, moment_s, number)
        n_struck += seconds >= moment_s
        code, said, _ = run_until(["verify", "out", "--checksums-only"], tmp_path, None, 0)
        assert code == (0 if data_files(out) == data_files(whole) else 3), said
        code, said, _ = run_until(words, tmp_path, None, 0)
        assert code == 0, said
        assert data_files(out) == data_files(whole)


LOCAL = EVERY_COMMAND | {
    "repair --model": "repair damaged --model model --device cpu",
    "regenerate": SWEPT["regenerate"],
}


@pytest.mark.slow
def test_no_command_imports_pandas(full_room: Path, tmp_path: Path) -> None:
    """Importing pandas takes as long as many commands take to run.

    Only datasets of the Hub are read by a library that imports it.
    """
    work = Path(shutil.copytree(full_room, tmp_path / "room"))
    shutil.copytree(work / "store", work / "damaged")
    next((work / "damaged" / "commits").iterdir()).unlink()
    lines = [
        line.replace("OUT", f"out-{index}.json").split()
        for index, line in enumerate(LOCAL.values())
    ]
    code = """
import sys
from moa_data.cli import main
for words in LINES:
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, words
    assert "pandas" not in sys.modules, words
"""
    done = subprocess.run(
        [sys.executable, "-c", code.replace("LINES", repr(lines))], cwd=work, env=ENVIRONMENT,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", SWEPT)
def test_signals_at_any_moment_of_any_command(
    full_room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Send signals from the first moment on, in an environment with all extras.

    A command that resumes gets up to three signals in a row, and is then run to its end.
    """
    work = Path(shutil.copytree(full_room, tmp_path / "room"))

    def words(out: str) -> list[str]:
        if command == "add" and not (work / out).exists():
            shutil.copytree(work / "store", work / out)
        resumes = command == "train" and (work / out / "checkpoints" / "last.ckpt").is_file()
        return [
            *SWEPT[command].replace("OUT", out).replace("PORT", port).split(),
            *(["--resume"] if resumes else []),
        ]

    def finished(out: str) -> float:
        code, said, seconds = run_until(words(out), work, None, 0)
        assert code == 0, said
        return seconds

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("HF_TOKEN", "hf_some")
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        whole_s = LIVES_S.get(command) or finished("whole")
        random, n_struck, tries = Random(command), 0, 0
        # After every third signal, a command that resumes also runs to its end.
        n_strikes = N_STRIKES // 2 if command in RESUMED else N_STRIKES
        while n_struck < n_strikes:
            tries += 1
            assert tries < 4 * N_STRIKES + 20, f"struck {n_struck} times only"
            for _ in range(3 if command in RESUMED else 1):
                number = random.choice(
                    (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                )
                moment_s = random.uniform(0.0, whole_s)
                code, said, seconds = run_until(words("out"), work, moment_s, number)
                if seconds < moment_s:
                    break  # it ended before the signal
                assert_interrupted(code, said, seconds - moment_s, number)
                n_struck += 1
            if command in RESUMED:
                finished("out")
                assert data_files(work / "out") == data_files(work / "whole")
                assert not list((work / "out").rglob("*.partial"))
            if command == "train":
                assert_same_run(work / "whole", work / "out")
            shutil.rmtree(work / "out", ignore_errors=True)


def shell(
    line: str, cwd: Path, env: Mapping[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        errors="replace",
    )


@pytest.mark.parametrize(
    "streams", quick([">&-", "2>&-", ">&- 2>&- <&-", ">/dev/full"], [">/dev/full"])
)
def test_a_stream_that_cannot_be_written(room: Path, streams: str) -> None:
    done = shell(f"{MOA_DATA} verify {room / 'store'} {streams}", room)
    assert done.returncode == (2 if "full" in streams else 0), done.stderr
    assert ("Error: the command can't write to standard output: No space left" in done.stderr) == (
        "full" in streams
    )


def test_damage_is_reported_by_the_code_where_nobody_can_read_it(
    room: Path, tmp_path: Path
) -> None:
    store = Path(shutil.copytree(room / "store", tmp_path / "store"))
    (store / "parts" / "tokens" / "zarr.json").write_bytes(b"")
    assert shell(f"{MOA_DATA} verify {store} >&- 2>/dev/full", room).returncode == 1
    assert shell(f"{MOA_DATA} nonsense >&- 2>/dev/full", room).returncode == 2


@pytest.mark.parametrize(
    "command", quick(["--help", "inspect STORE", "verify STORE"], ["verify STORE"])
)
def test_a_reader_that_goes_away_ends_the_command_silently(room: Path, command: str) -> None:
    line = command.replace("STORE", str(room / "store"))
    done = shell(
        f"{sys.executable} -m moa_data {line} 2>error.txt | true; exit ${{PIPESTATUS[0]}}", room
    )
    assert done.returncode == 141
    assert "Error" not in (room / "error.txt").read_text()


def test_what_a_library_prints_does_not_land_in_a_file_of_the_store(tmp_path: Path) -> None:
    """If standard output is closed, the next file that is opened gets its descriptor."""
    code = (
        "import os, sys, types\nfrom pathlib import Path\nfrom moa_data.__main__ import main\n"
        "import moa_data.storage.write.part as shard\n"
        "from moa_data.tests.kit.stores import make_recipe\n"
        "real = shard.write_all\n"
        "def write_all(fd, data):\n    assert fd > 2\n    os.write(1, b'noise')\n"
        "    return real(fd, data)\n"
        "shard.write_all = write_all\nfake = types.ModuleType('moa_data.cli')\n"
        "sys.modules['moa_data.cli'] = fake\n"
        "fake.main = lambda: make_recipe().write(Path('store'))\nmain()\n"
    )
    script = tmp_path / "noisy.py"
    script.write_text(code)
    assert shell(f"{sys.executable} {script} >&-", tmp_path).returncode == 0
    assert verify_store(tmp_path / "store").ok


@pytest.fixture(scope="module")
def full_room(room: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the room with a trained drafter in run/ and the store as EAGLE files in exported/."""
    folder = Path(shutil.copytree(room, tmp_path_factory.mktemp("full") / "room"))
    for command, out in (("train", "run"), ("export", "exported")):
        done = shell(f"{MOA_DATA} {EVERY_COMMAND[command].replace('OUT', out)}", folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&- <&-", ">/dev/full", "2>/dev/full"])
@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_every_command_without_its_streams(
    full_room: Path, tmp_path: Path, command: str, streams: str
) -> None:
    folder = Path(shutil.copytree(full_room, tmp_path / "room"))
    usual = shell(f"{MOA_DATA} {EVERY_COMMAND[command].replace('OUT', 'usual')}", folder).returncode
    done = shell(f"{MOA_DATA} {EVERY_COMMAND[command].replace('OUT', 'out')} {streams}", folder)
    if streams == ">/dev/full":
        usual = 2
    assert done.returncode == usual, done.stderr
    assert "Traceback" not in done.stderr
