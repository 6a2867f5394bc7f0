"""Exit codes of the real process where standard streams are closed or full."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moa_data.storage.read.verify import verify_store
from moa_data.tests.kit.command import DEMO_OPTIONS
from moa_data.tests.kit.variants import quick

MOA_DATA = f"exec {sys.executable} -m moa_data"
ENVIRONMENT: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1"}
# Every command, in a folder with model/, chats.jsonl, store/, exported/ and a run/ that was trained with PREPARE.
COMMANDS: dict[str, Any] = {
    "plan": "plan --model model --dataset chats.jsonl --out OUT --device cpu",
    "extract": "extract --model model --dataset chats.jsonl --out OUT --device cpu",
    "inspect": "inspect store",
    "inspect --sample": "inspect store --sample 1",
    "verify": "verify store",
    "repair": "repair store",
    "audit": "audit store --model model --device cpu --samples 2",
    "recode": "recode store --codec int8 --out OUT",
    "add": "add store --model model --activations hidden:layer:0 --device cpu",
    "train": "train store --out OUT --preset paper --max-steps 2 --batch-size 2 --accelerator cpu",
    "generate": "generate --model model --drafter run --prompt Hi --max-new-tokens 4 --device cpu",
    "eval": "eval --model model --drafter run --prompts chats.jsonl --out OUT --n-prompts 2 --max-new-tokens 4",
    "export": "export store --format eagle --out OUT",
    "import": "import exported --format eagle --model model --out OUT",
    "export-drafter": "export-drafter run --format moa --model model --out OUT",
    "demo": f"demo --out OUT {DEMO_OPTIONS}",
}  # fmt: skip
PREPARE = (COMMANDS["train"].replace("OUT", "run"), COMMANDS["export"].replace("OUT", "exported"))
"""What makes run/ and exported/, which some commands read."""


def shell(line: str, cwd: Path, env: Mapping[str, str] = ENVIRONMENT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, errors="replace"
    )


@pytest.mark.parametrize("streams", quick([">&-", "2>&-", ">&- 2>&- <&-", ">/dev/full"], [">&-", ">/dev/full"]))
def test_a_stream_that_cannot_be_written(room: Path, streams: str) -> None:
    done = shell(f"{MOA_DATA} verify {room / 'store'} {streams}", room)
    assert done.returncode == (2 if "full" in streams else 0), done.stderr
    assert ("Error: standard output can't be written: No space left" in done.stderr) == ("full" in streams)


def test_damage_is_reported_by_the_code_where_nobody_can_read_it(room: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(room / "store", tmp_path / "store"))
    (store / "parts" / "tokens" / "zarr.json").write_bytes(b"")
    assert shell(f"{MOA_DATA} verify {store} >&- 2>/dev/full", room).returncode == 1
    assert shell(f"{MOA_DATA} nonsense >&- 2>/dev/full", room).returncode == 2


@pytest.mark.parametrize("command", ["--help", "inspect STORE", "verify STORE"])
def test_a_reader_that_goes_away_ends_the_command_silently(room: Path, command: str) -> None:
    line = command.replace("STORE", str(room / "store"))
    done = shell(f"{sys.executable} -m moa_data {line} 2>error.txt | true; exit ${{PIPESTATUS[0]}}", room)
    assert done.returncode == 141
    assert "Error" not in (room / "error.txt").read_text()


def test_what_a_library_prints_does_not_land_in_a_file_of_the_store(tmp_path: Path) -> None:
    """With standard output closed, the next file to be opened would get its number."""
    code = (
        "import os, sys, types\nfrom pathlib import Path\nfrom moa_data.__main__ import main\n"
        "import moa_data.storage.write.part as shard\nfrom moa_data.tests.kit.stores import make_recipe\n"
        "real = shard.write_all\n"
        "def write_all(fd, data):\n    assert fd > 2\n    os.write(1, b'noise')\n    return real(fd, data)\n"
        "shard.write_all = write_all\nfake = types.ModuleType('moa_data.cli')\nsys.modules['moa_data.cli'] = fake\n"
        "fake.main = lambda: make_recipe().write(Path('store'))\nmain()\n"
    )
    script = tmp_path / "noisy.py"
    script.write_text(code)
    assert shell(f"{sys.executable} {script} >&-", tmp_path).returncode == 0
    assert verify_store(tmp_path / "store").ok


@pytest.fixture(scope="module")
def full_room(room: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The room with a trained drafter in run/."""
    folder = Path(shutil.copytree(room, tmp_path_factory.mktemp("full") / "room"))
    for command in PREPARE:
        done = shell(f"{MOA_DATA} {command}", folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&- <&-", ">/dev/full", "2>/dev/full"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_without_its_streams(full_room: Path, tmp_path: Path, command: str, streams: str) -> None:
    folder = Path(shutil.copytree(full_room, tmp_path / "room"))
    usual = shell(f"{MOA_DATA} {COMMANDS[command].replace('OUT', 'usual')}", folder).returncode
    done = shell(f"{MOA_DATA} {COMMANDS[command].replace('OUT', 'out')} {streams}", folder)
    if streams == ">/dev/full":
        usual = 2
    assert done.returncode == usual, done.stderr
    assert "Traceback" not in done.stderr
