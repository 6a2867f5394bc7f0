"""Every command explains itself at once, errors are one line with exit code 2, findings give 1, Ctrl-C gives 130."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from moa_data import __version__
from moa_data.cli import main
from moa_data.commands.console import user_message
from moa_data.commands.signals import SignalReceived
from moa_data.commands.views import bars, decoding_view, sample_view, train_view
from moa_data.errors import Interrupted
from moa_data.tests.kit.chats import chat, write_jsonl
from moa_data.tests.kit.command import refused, run
from moa_data.text import format_bytes
from moa_data.trainer.fit import TrainReport

COMMANDS = (
    "extract", "plan", "add", "inspect", "verify", "repair", "audit", "train", "generate", "eval",
    "export", "import", "export-drafter", "demo", "serve", "chat",
)  # fmt: skip
ENVIRONMENT: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_a_summary_and_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"moa-data {command}" in result.output
    assert command in run("--help").output


def test_every_option_has_a_help_text() -> None:
    context = click.Context(main)
    for command in COMMANDS:
        loaded = main.get_command(context, command)
        assert loaded is not None
        for parameter in loaded.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{command} {parameter.name}"


def test_main_help_documents_the_exit_codes() -> None:
    page = run("--help").output
    for text in ("Exit codes:", "130", "verify, repair or audit", "A whole job:"):
        assert text in page


def test_help_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "lightning", "datasets", "zarr", "matplotlib")
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom moa_data.cli import main\n"
        f"for command in {COMMANDS!r}:\n    assert CliRunner().invoke(main, [command, '--help']).exit_code == 0\n"
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert shown.stdout.strip() == "[]"


def test_model_without_config_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    chats = write_jsonl(tmp_path / "chats.jsonl", [chat("Hi", "Hello")])
    arguments = ["--model", str(tmp_path / "model"), "--dataset", str(chats), "--out", str(tmp_path / "store")]
    for command in ("plan", "extract"):
        refused(run(command, *arguments), "config.json")
        assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--sample", "0"], ["verify"], ["train", "--out", "OUT"]])
def test_folder_that_is_no_store_is_one_line(tmp_path: Path, command: list[str]) -> None:
    words = [str(tmp_path / "run") if word == "OUT" else word for word in command]
    refused(run(*words, str(tmp_path / "absent")), str(tmp_path / "absent"))


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


def replaced(monkeypatch: pytest.MonkeyPatch, module: str, name: str, function: Callable[..., Any]) -> None:
    __import__(module)
    monkeypatch.setattr(sys.modules[module], name, function)


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise error

    return function


EXTRACT = ("extract", "--model", "m", "--dataset", "d", "--out", "s")


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, "moa_data.pipeline.extract", "extract", raising(KeyboardInterrupt()))
    result = run(*EXTRACT)
    refused(result, "run the same command again to go on", exit_code=130)
    replaced(monkeypatch, "moa_data.trainer.fit", "train", raising(Interrupted("stopped at step 3; --resume")))
    refused(run("train", "store", "--out", "run"), "stopped at step 3; --resume", exit_code=130)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from moa_data.errors import DatasetError

    error = DatasetError("empty")
    replaced(monkeypatch, "moa_data.pipeline.extract", "extract", raising(error))
    refused(run(*EXTRACT), "empty")
    shown = run("--debug", *EXTRACT)
    assert shown.exit_code == 2
    assert "Traceback" in shown.stderr
    assert shown.stderr.endswith("Error: empty\n")


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), SystemExit(0), SystemExit(1), AssertionError()])
def test_faults_of_the_code_are_70_and_say_what_to_report(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    replaced(monkeypatch, "moa_data.pipeline.extract", "extract", raising(error))
    result = run(*EXTRACT)
    assert result.exit_code == 70
    assert "Traceback" in result.stderr
    last = result.stderr.splitlines()[-1]
    for text in (f"Error: {type(error).__name__}: {error}", "report it", __version__, "is kept"):
        assert text in last


def test_a_signal_behind_another_error_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    def cleaning_up_fails(*args: Any, **kwargs: Any) -> None:
        try:
            raise SignalReceived(signal.SIGTERM)
        finally:
            raise RuntimeError("generator didn't stop")

    replaced(monkeypatch, "moa_data.pipeline.extract", "extract", cleaning_up_fails)
    result = run(*EXTRACT)
    assert result.exit_code == 143
    assert result.stderr.splitlines() == [
        "Error: interrupted. What is finished is kept; run the same command again to go on."
    ]


@pytest.mark.parametrize(
    ("error", "command", "flags"),
    [
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried. More."), "train", 1),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried. More."), "plan", 0),
        (MemoryError(), "extract", 0),  # the data, not the forward
    ],
)
def test_out_of_memory_names_a_flag_only_where_it_helps(error: Exception, command: str, flags: int) -> None:
    message = user_message(error, command)
    assert message is not None
    assert message.count("--") == flags


def rendered(view: Any) -> str:
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


def test_sample_view_marks_responses() -> None:
    view = sample_view({"sequence_id": "abc"}, [1, 2, 3, 4], [0, 1, 1, 0], lambda ids: "".join(map(str, ids)))
    assert "1⟦23⟧4" in rendered(view)
    assert "50%" in rendered(view)


def test_bars_and_sizes() -> None:
    text = rendered(bars(["0-9", "10-19", "20-29"], [400, 1, 0]))
    assert text.splitlines()[0].count("█") == 40
    assert text.splitlines()[1].count("█") == 1
    assert [format_bytes(n) for n in (12, 1500, 31.5e12)] == ["12 B", "1.5 kB", "31.5 TB"]


def test_decoding_view_compares_with_plain() -> None:
    def generation(tokens: list[int], calls: list[int], seconds: float) -> Any:
        stats = SimpleNamespace(
            n_tokens=len(tokens), committed_per_call=calls, n_target_calls=len(calls), prefill_s=0.0, draft_s=0.0,
            verify_s=seconds, acceptance_length=sum(calls) / len(calls),
        )  # fmt: skip
        return SimpleNamespace(tokens=tokens, stats=stats)

    text = rendered(decoding_view([generation([1] * 9, [4, 4], 1.0)], [generation([1] * 9, [1] * 8, 2.0)], "5"))
    assert "2.00 times the speed" in text
    assert "the same tokens" in text
    assert "4.00" in text
    other = [generation([1, 2], [1], 1.0)], [generation([1, 3], [1], 1.0)]
    assert "OTHER tokens" in rendered(decoding_view(*other, "5"))
    assert "other random draws" in rendered(decoding_view(*other, "5", sampled=True))
    text = rendered(decoding_view([generation([1], [4], 1.0), generation([1], [1, 1], 1.0)], None, "6x8x62"))
    assert "2.00" in text  # six tokens in three calls of two prompts


def test_a_run_without_figures_of_its_own_is_shown_without_them() -> None:
    """Nothing was validated, or all steps had been done before."""
    lines = rendered(train_view(TrainReport("runs/moa", 340, 1_894_784, 0, None, None, {}, None))).splitlines()
    assert [line.split()[-1] for line in lines if "waiting" in line or "acceptance" in line] == ["-", "-"]
    metrics = {"train/loss": 0.5, "train/tokens_per_s": 1234.5, "train/data_wait_share": 0.1}
    report = TrainReport("runs/moa", 340, 1_894_784, 10, 1300.4, 0.004, metrics, 3.8312)
    text = rendered(train_view(report))
    assert "10 (1,300/s)" in text
    assert "1234" not in text  # the speed stands there once, that of the run
    assert "runs/moa/drafter" in text
    assert "0.4%" in text
    assert "3.831" in text
