"""Flags, help pages and docs/options.md are derived from the settings of a stage."""

import runpy
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from moa_data.cli import main
from moa_data.commands.console import as_options
from moa_data.commands.options import stage_command
from moa_data.tests.test_config import Stage
from moa_data.trainer.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]


SEEN: list[Stage] = []


@stage_command(Stage, ("store",), {"small": {"names": ["a"]}})
@click.option("--dry-run", is_flag=True, help="Only look.")
def command(config: Stage, dry_run: bool) -> None:
    """Runs."""
    assert dry_run
    SEEN.append(config)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: {n_steps: 1, kind: long}\nnames: b\n")
    arguments = [
        "s",
        "--dry-run",
        "--config",
        str(path),
        "--n-steps",
        "2",
        "--resume",
        "--set",
        "steps.size=4",
    ]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert SEEN.pop() == Stage.of(
        store="s", names=("b",), resume=True, steps="long", n_steps=2, size=4
    )
    assert (
        CliRunner()
        .invoke(command, ["s", "--dry-run", "--preset", "small", "--steps", "long"])
        .exit_code
        == 0
    )
    assert SEEN.pop() == Stage.of(store="s", names=("a",), steps="long")
    wrong = CliRunner().invoke(command, ["s", "--dry-run", "--n-steps", "x"])
    assert wrong.exit_code == 2
    assert "--n-steps is 'x', expected a whole number" in wrong.output
    missing = CliRunner().invoke(command, ["--dry-run"])
    assert "required settings are missing (STORE)." in missing.output


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("`n_steps` is 0, expected at least 1", "--n-steps is 0, expected at least 1"),
        ("give `n_steps=4` or `names=a,b`.", "give --n-steps 4 or --names a,b."),
        ("give `layers={}`", "give --layers {}"),
        ("with `resume`, not without `resume`", "with --resume, not without --resume"),
        ("`resume=true` or `resume=false`", "--resume or --no-resume"),
        ("`animal=fish` has `fins`", "--animal fish has --fins"),
        ("`config_path=a.yaml`, `assignments=a=b`", "--config a.yaml, --set a=b"),
        ("`dry_run` writes nothing to `store`", "--dry-run writes nothing to STORE"),
        ("n_steps and store", "n_steps and store"),
    ],
)  # fmt: skip
def test_settings_in_a_text_are_written_as_options(text: str, shown: str) -> None:
    with click.Context(command):
        assert as_options(text) == shown
    assert as_options(text) == text


@pytest.mark.parametrize(
    "text",
    ["`max_length` and `max_length=5`", "`moa-data verify store`", "`store.json`", "`n_steps `"],
)  # fmt: skip
def test_everything_else_in_backticks_stays(text: str) -> None:
    with click.Context(command):
        assert as_options(text) == text


def test_help_shows_what_is_common_and_help_all_everything() -> None:
    short = CliRunner().invoke(command, ["--help"], terminal_width=200).output
    for text in (
        "[OPTIONS] STORE",
        "--names LIST ",
        "[default: kv,hidden:last]",
        "--n-steps N",
        "all 11 settings",
    ):
        assert text in short
    assert "--steps" not in short
    page = CliRunner().invoke(command, ["--help-all"], terminal_width=200).output
    for text in (
        "Settings:\n  STORE",
        "--resume/--no-resume",
        "Steps:\n  --steps short|long",
        "--dry-run",
    ):
        assert text in page


def test_the_settings_of_a_stage_are_listed_with_type_and_default() -> None:
    shown = CliRunner().invoke(main, ["train", "--help-all"])
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    for setting in TrainConfig.settings():
        option = f"--{setting.name.replace('_', '-')}"
        assert (option if setting.name != "store" else "STORE") in text
    assert "Drafter (eagle3):" in text
    assert "Give either this or --max-steps." in text
    assert "(tokens committed per target call). [default: 5]" in text


def test_pages_made_from_the_code_are_current() -> None:
    for name, page in runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"].items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == page(), "run docs/generate.py"
