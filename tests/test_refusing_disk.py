"""If a disk refuses any call of any library, a command ends with one line and can be resumed."""

import errno
import itertools
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moa_data.storage.read.verify import verify_store
from moa_data.tests.kit.command import TRAIN, refused, run
from moa_data.tests.kit.disks import check_rights
from moa_data.tests.kit.refusals import refusing
from moa_data.tests.kit.variants import quick, quick_rows

CODES = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO,
)  # fmt: skip
MODEL = ("--model", "model", "--device", "cpu")
EXTRACT = ("--dataset", "chats.jsonl", "--part-tokens", "256", "--activations", "hidden:last")
COMMANDS: dict[str, tuple[str, ...]] = {
    "extract": ("extract", *MODEL, *EXTRACT, "--out", "out/store"),
    "learn": ("extract", *MODEL, *EXTRACT, "--out", "out/store", "--codec", "transform:3"),
    "add": ("add", "out/store", *MODEL, "--activations", "hidden:layer:0", "--target-layers", "1"),
    "recode": ("recode", "store", "--codec", "int8", "--out", "out/store"),
    "repair": ("repair", "out/store", *MODEL),
    "export": ("export", "store", "--format", "eagle", "--out", "out/files"),
    "index": ("export", "store", "--format", "index", "--out", "out/index.parquet"),
    "train": ("train", "store", "--out", "out/run", *TRAIN),
    "export-drafter": (
        "export-drafter", "drafter", "--format", "moa", "--model", "store", "--out", "out/moa",
    ),
    "eval": (
        "eval", *MODEL, "--drafter", "drafter", "--prompts", "chats.jsonl", "--out",
        "out/report.json", "--n-prompts", "1", "--max-new-tokens", "3", "--method", "plain",
    ),
    "regenerate": (
        "regenerate", *MODEL, "--dataset", "chats.jsonl", "--out", "out/answers.jsonl",
        "--max-rows", "3", "--max-new-tokens", "3", "--max-rejected-fraction", "1",
    ),
}  # fmt: skip
QUICK_COMMANDS = ["extract", "train", "export-drafter"]


@pytest.fixture
def work(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with inputs and out/ for all output, including temporary files."""
    for name in ("model", "drafter", "store"):
        (tmp_path / name).symlink_to(room / name)
    shutil.copy(room / "chats.jsonl", tmp_path)
    (tmp_path / "out/tmp").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "out/tmp"))
    return tmp_path


def prepare(name: str, work: Path) -> None:
    """Clear the output, and recreate what the command changes."""
    for path in (work / "out").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (work / "out/tmp").mkdir()
    if name in ("add", "repair"):
        shutil.copytree(work / "store", work / "out/store")
    if name == "repair":
        next((work / "out/store/parts").rglob("c.1.*")).unlink()


def check_goes_on(name: str, work: Path) -> None:
    resume = ["--resume"] if (work / "out/run/checkpoints/last.ckpt").exists() else []
    done = run(*COMMANDS[name], *resume)
    assert done.exit_code == 0, done.output
    assert not list((work / "out").rglob("*.partial"))
    if (store := work / "out/store").exists():
        assert verify_store(store).ok


def check_refused(result: Any, code: int) -> None:
    """Check for one line with the reason, and for no noise of libraries before it."""
    refused(result, os.strerror(code))
    assert "Exception" not in result.stderr, result.stderr


def sweep(name: str, work: Path, chosen: random.Random | None) -> None:
    prepare(name, work)
    with refusing(work / "out", None) as counted:
        done = run(*COMMANDS[name])
    assert done.exit_code == 0, done.output
    n_calls = counted.n_calls
    firsts = range(1, n_calls + 1) if chosen is None else [chosen.randint(1, n_calls)]
    for first in firsts:
        code = CODES[first % len(CODES)]
        prepare(name, work)
        with refusing(work / "out", first, code) as refusals:
            result = run(*COMMANDS[name])
        assert refusals.refused
        check_refused(result, code)
        check_goes_on(name, work)


@pytest.mark.parametrize("name", quick(COMMANDS, QUICK_COMMANDS))
def test_a_refused_call_is_one_line_and_the_command_goes_on(work: Path, name: str) -> None:
    sweep(name, work, random.Random(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_refused_call_is_one_line_and_the_command_goes_on(work: Path, name: str) -> None:
    sweep(name, work, None)


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """Make the kernel refuse writes beyond a file size, in any language that a library uses.

    Python writes no bytecode meanwhile. It would keep a truncated module, and fail on it in every
    later process.
    """
    compiles = not sys.dont_write_bytecode
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        sys.dont_write_bytecode = not compiles
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


# By default, each command meets one size. Those with small files meet the smallest size.
SMALL = {"extract", "add", "repair", "index", "export-drafter", "eval", "regenerate"}
SIZES = quick_rows(
    itertools.product(COMMANDS, (100, 3_000, 20_000)),
    [(name, 100 if name in SMALL else 20_000) for name in QUICK_COMMANDS],
)


@pytest.mark.parametrize(("name", "n_bytes"), SIZES)
def test_files_that_get_too_large_are_one_line(work: Path, name: str, n_bytes: int) -> None:
    prepare(name, work)
    with largest_file(n_bytes):
        result = run(*COMMANDS[name])
    if result.exit_code == 0:
        assert n_bytes > 100
        return  # the command writes no file of this size
    check_refused(result, errno.EFBIG)
    check_goes_on(name, work)


QUICK_MASKS = {"extract": (0o002,), "train": (0o077,), "export-drafter": (0o022, 0o002, 0o077)}


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        pytest.param(name, mask, marks=[] if mask in quick_masks else pytest.mark.slow)
        for name, quick_masks in QUICK_MASKS.items()
        for mask in (0o022, 0o002, 0o077)
    ],
)
def test_everything_has_the_rights_that_the_umask_gives(work: Path, name: str, mask: int) -> None:
    shutil.rmtree(work / "out/tmp")
    (work / "out").rmdir()
    before = os.umask(mask)
    try:
        done = run(*COMMANDS[name])
    finally:
        os.umask(before)
    assert done.exit_code == 0, done.output
    check_rights(work / "out", mask)
