"""Every command explains itself quickly, and errors are one line with a documented exit code.

Errors exit with 2, findings with 1, and Ctrl-C with 130.
"""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest

from moa_data import __version__
from moa_data.cli import COMMANDS, main
from moa_data.commands.console import user_message
from moa_data.commands.signals import SignalReceived
from moa_data.commands.views import bars, decoding_view
from moa_data.errors import DatasetError, Interrupted
from moa_data.moa.decoding.loop import DecodeStats, Generation
from moa_data.tests.kit.command import run

ENVIRONMENT: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
EXTRACT = ("extract", "--model", "m", "--dataset", "d", "--out", "s")


def test_every_command_has_a_short_page_with_a_summary_and_an_example() -> None:
    listed = run("--help").output
    for text in ("Exit codes:", "130", "found a problem (verify, repair", "A whole job:"):
        assert text in listed
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        page = run(name, "--help").output
        assert "Example" in page
        assert f"moa-data {name}" in page
        assert name in listed
        options = [option for option in command.params if isinstance(option, click.Option)]
        assert all(option.help for option in options), name
        # The limit includes --config, --set, --preset and --help-all.
        assert sum(not option.hidden for option in options) <= 16, name


def test_help_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "lightning", "datasets", "zarr", "matplotlib")
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom moa_data.cli import main\n"
        f"for command in {list(COMMANDS)!r}:\n"
        "    assert CliRunner().invoke(main, [command, '--help']).exit_code == 0\n"
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    assert shown.stdout.strip() == "[]"


def test_generate_decodes_plainly_only_to_compare(room: Path) -> None:
    options = ("--max-new-tokens", "6", "--device", "cpu", "--tree", "2", "--prompt", "hello")
    words = ("generate", "--model", room / "model", "--drafter", room / "drafter", *options)
    alone = run(*words)
    assert alone.exit_code == 0, alone.output
    assert "plain" not in alone.stdout.replace("tokens/call", "")
    shown = run(*words, "--compare")
    assert shown.exit_code == 0, shown.output
    assert "the same tokens" in shown.stdout
    assert "`moa-data eval` measures" in shown.stdout


def cleaning_up_fails() -> None:
    try:
        raise SignalReceived(signal.SIGTERM)
    finally:
        raise RuntimeError("generator didn't stop")


def raised(error: BaseException) -> None:
    raise error


FAULT = f"This is a bug in moa-data {__version__}"


@pytest.mark.parametrize(
    ("fail", "exit_code", "text"),
    [
        (partial(raised, KeyboardInterrupt()), 130, "run the same command again to continue"),
        (
            partial(raised, Interrupted("stopped with `max_length=9`, not `resume`")),
            130,
            "stopped with --max-length 9, not `resume`",
        ),
        (cleaning_up_fails, 143, "Finished work is kept"),
        (partial(raised, DatasetError("empty")), 2, "empty"),
        (
            partial(raised, RuntimeError("shapes differ")),
            70,
            f"RuntimeError: shapes differ. {FAULT}",
        ),
        (partial(raised, SystemExit(0)), 70, f"SystemExit: 0. {FAULT}"),
        (partial(raised, AssertionError()), 70, f"AssertionError: . {FAULT}"),
    ],
)
def test_what_a_command_raises_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None], exit_code: int, text: str
) -> None:
    monkeypatch.setattr("moa_data.pipeline.extract.extract", lambda *_, **__: fail())
    for debug in ((), ("--debug",)):
        result = run(*debug, *EXTRACT)
        assert result.exit_code == exit_code
        *lines, last = result.stderr.splitlines()
        assert last.startswith("Error: ")
        assert text in last
        assert ("Traceback (most recent call last):" in lines) == (bool(debug) or exit_code == 70)


@pytest.mark.parametrize(
    ("error", "command", "flags"),
    [
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried. More."
            ),
            "train",
            1,
        ),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried. More."
            ),
            "plan",
            0,
        ),
        (MemoryError(), "extract", 0),  # raised for the data and not in the forward pass
    ],
)
def test_out_of_memory_names_a_flag_only_where_it_helps(
    error: Exception, command: str, flags: int
) -> None:
    message = user_message(error, command)
    assert message is not None
    assert message.count("--") == flags


def rendered(view: Any) -> str:
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


def test_the_longest_bar_has_forty_cells_and_any_count_one() -> None:
    lines = rendered(bars(["0-9", "10-19", "20-29"], [400, 1, 0])).splitlines()
    assert [line.count("█") for line in lines] == [40, 1, 0]


def test_decoding_view_compares_with_plain() -> None:
    def generation(tokens: list[int], calls: list[int], seconds: float) -> Generation:
        return Generation(tokens, DecodeStats(calls, n_tokens=len(tokens), verify_s=seconds))

    text = rendered(
        decoding_view([generation([1] * 9, [4, 4], 1.0)], [generation([1] * 9, [1] * 8, 2.0)], "5")
    )
    assert "2.00 times the speed" in text
    assert "the same tokens" in text
    assert "4.00" in text
    other = [generation([1, 2], [1], 1.0)], [generation([1, 3], [1], 1.0)]
    assert "OTHER tokens" in rendered(decoding_view(*other, "5"))
    assert "other random draws" in rendered(decoding_view(*other, "5", sampled=True))
    text = rendered(
        decoding_view([generation([1], [4], 1.0), generation([1], [1, 1], 1.0)], None, "6x8x62")
    )
    assert "2.00" in text  # two prompts have six tokens in three calls
