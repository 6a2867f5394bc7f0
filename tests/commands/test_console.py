"""Progress: lines that a log can hold, one bar at a time on a terminal; standard output is never cut to a width."""

import io

import pytest
from rich.table import Table

from moa_data.commands import console
from moa_data.commands.console import ProgressLine, StandardOutput


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(console, "time", found)
    return found


def test_a_log_gets_a_line_every_ten_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("step") as progress:
        for step in range(101):
            progress(step, 100, f"train, loss {step}")
            clock.now_s += 0.25
    assert capsys.readouterr().err == (
        "train, loss 40: 40 of 100 steps (40%), 10 s, 15 s left\n"
        "train, loss 80: 80 of 100 steps (80%), 20 s, 5 s left\n"
        "train, loss 100: 100 of 100 steps (100%), 25 s\n"
    )


def test_a_short_phase_is_one_line_of_a_log(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("B", scaled=True) as progress:
        progress(1, 2, "first")
        progress(2, 2, "first")
        progress(5_000_000, 10_000_000, "second")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "first: 2 B of 2 B (100%), 0 s\nsecond: 5.0 MB of 10.0 MB (50%), 0 s\n"


def test_a_phase_ends_with_its_last_state(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("chat") as progress:
        progress(5, 5, "corpus")
        clock.now_s += 20  # work that tells nothing, until the next phase
        progress(1, 9, "target")
    assert capsys.readouterr().err.splitlines()[0] == "corpus: 5 of 5 chats (100%), 0 s"


def test_what_was_done_before_says_nothing_of_the_rest(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run that begins at 90 and does 5 in 10 s needs 10 s more."""
    with ProgressLine("step") as progress:
        progress(90, 100, "train")
        clock.now_s += 10
        progress(95, 100, "train")
    assert capsys.readouterr().err == "train: 95 of 100 steps (95%), 10 s, 10 s left\n"


def test_named_phases_have_lines_and_units_of_their_own(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where two of them count to the same total; and each says that it has begun."""
    with ProgressLine("tok") as progress:
        progress(24, 24, "tokenise")
        progress(0, 16_000_000_000, "load the target")
        clock.now_s += 5
        progress(16_000_000_000, 16_000_000_000, "load the target")
        progress(0, 4_096, "learn the codec's basis")
        progress(4_096, 4_096, "learn the codec's basis")
        progress(4_096, 4_096, "extract 29/29 parts")
    assert capsys.readouterr().err == (
        "tokenise: 24 of 24 chats (100%), 0 s\n"
        "load the target ...\n"
        "load the target: 16.0 GB of 16.0 GB (100%), 5 s\n"
        "learn the codec's basis ...\n"
        "learn the codec's basis: 4,096 of 4,096 steps (100%), 0 s\n"
        "extract 29/29 parts: 4,096 of 4,096 tokens (100%), 0 s\n"
    )


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_bar_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with ProgressLine("step") as progress:
        progress(3, 3, "target")
        bar = progress.phase
        progress(1, 9, "train")
        assert progress.phase is not bar
        assert terminal.getvalue().count("\n") == 1  # the first bar has got its last state, and its line has ended
    assert terminal.getvalue().splitlines()[-1].rpartition("\r")[2].startswith("train:  11%")


def test_output_is_as_wide_as_it_must_be(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    table = Table()
    table.add_column("a name of forty characters, or so, at least")
    table.add_row("f" * 64)
    StandardOutput().print(table)
    assert "f" * 64 in capsys.readouterr().out
