"""Errors on one line, progress as lines of a log or as one bar on a terminal, and provenance."""

import errno
import io
import os
import re
import subprocess
from pathlib import Path

import pytest

from moa_data.commands import console
from moa_data.commands.console import FAULT, UNUSABLE, ProgressLine, collect_provenance, failure_of

ROOT = Path(__file__).parents[2]


def test_a_log_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log gets the first and the last state of each phase, and another every ten seconds."""
    monkeypatch.setattr(console, "LOG_LINE_EVERY_S", 1e9)
    with ProgressLine() as progress:
        for step in range(90, 101):
            progress.of("train", "step")(step, 100, "loss 0.5")
        progress.of("export", "step")(1, 2)
    monkeypatch.setattr(console, "LOG_LINE_EVERY_S", 0.0)
    with ProgressLine() as progress:
        for step in range(4):
            progress.of("train", "step")(step, 3, f"loss {step}")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.findall(
        r"^(\w+).*: (\d+) of (\d+) steps \((\d+)%\), 00:0\d, .* left$", shown.err, re.MULTILINE
    ) == [
        ("train", "90", "100", "90"), ("train", "100", "100", "100"), ("export", "1", "2", "50"),
        *(("train", str(step), "3", share) for step, share in enumerate(("0", "33", "67", "100"))),
    ]  # fmt: skip


def test_phases_have_lines_and_units_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Two phases may count to the same total."""
    with ProgressLine() as progress:
        progress.of("tokenise", "chat")(24, 24)
        progress.of("load the target", "B")(16_000_000_000, 16_000_000_000)
        progress.of("learn", "step")(4_096, 4_096, "the codec's basis")
        progress.of("extract", "token")(4_096, 4_096, "29/29 parts")
    assert [line.partition(")")[0] for line in capsys.readouterr().err.splitlines()] == [
        "tokenise: 24 of 24 chats (100%",
        "load the target: 16.0G of 16.0GB (100%",
        "learn, the codec's basis: 4096 of 4096 steps (100%",
        "extract, 29/29 parts: 4096 of 4096 tokens (100%",
    ]


def test_a_terminal_has_one_bar_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    with ProgressLine() as progress:
        progress.of("target", "step")(3, 3)
        progress.of("train", "step")(1, 9)
        # The first bar has reached its last state, and its line has ended.
        assert terminal.getvalue().count("\n") == 1
    assert terminal.getvalue().splitlines()[-1].rpartition("\r")[2].startswith("train:  11%")


class RustError(Exception):
    """An error class of a library that does not use errno."""


def caused_by(cause: BaseException) -> Exception:
    error = RustError("could not save")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "x", "/out/file"), errno.ENOSPC),
        (OSError(errno.EIO, "x"), errno.EIO),
        (OSError(errno.EPERM, "x", "/out/file"), errno.EPERM),
        (
            RustError("Error while serializing: I/O error: No space left on device (os error 28)"),
            errno.ENOSPC,
        ),
        (RustError("Permission denied (os error 13)"), errno.EACCES),
        (RustError("Generic LocalFileSystem error: disk quota exceeded"), errno.EDQUOT),
        (
            OSError("[Errno 27] Error writing bytes to file. Detail: [errno 27] File too large"),
            errno.EFBIG,
        ),
        (
            RuntimeError(
                "[enforce fail] . PytorchStreamWriter failed writing file data/0: file write failed"
            ),
            errno.EIO,
        ),
        (RustError("database or disk is full"), errno.ENOSPC),
        (caused_by(caused_by(OSError(errno.EROFS, "x", "/out/file"))), errno.EROFS),
    ],
)
def test_what_the_machine_refuses_is_one_line_whoever_says_it(
    error: Exception, reason: int
) -> None:
    failure = failure_of(error, "extract")
    assert failure.exit_code == UNUSABLE
    assert os.strerror(reason) in failure.message
    assert failure.message.endswith(".")
    assert "\n" not in failure.message


@pytest.mark.parametrize(
    "error", [RustError("28 tokens"), KeyError("x"), caused_by(OSError(errno.ENOENT, "x", "y"))]
)
def test_any_other_error_is_a_fault(error: Exception) -> None:
    assert failure_of(error, "extract").exit_code == FAULT


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_provenance_names_the_commit_of_the_checkout() -> None:
    head = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    )
    assert collect_provenance()["git_sha"] == head.stdout.strip()
