"""Flags, help pages and docs/options.md come from the settings of a stage."""

import runpy
from pathlib import Path
from typing import Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import Field

from moa_data.cli import main
from moa_data.commands.options import StageCommand, config_options
from moa_data.config import Common, Config, Count, option_name
from moa_data.trainer.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]


class Steps(Config):
    """A group."""

    kind: Literal["short", "long"] = "short"
    """Which steps."""
    n_steps: Common[Count | None] = None
    """How many steps."""
    hidden: int = 3
    """Seldom changed."""


class Stage(Config):
    """An example stage."""

    store: str
    """The store to read."""
    names: Common[tuple[str, ...]] = ("kv", "hidden:last")
    """What to
    store."""
    resume: bool = False
    """Go on."""
    steps: Steps = Field(default_factory=Steps)


SEEN: list[Stage] = []


@click.command(cls=StageCommand)
@config_options(Stage, ("store",), {"small": {"names": ["a"]}})
@click.option("--dry-run", is_flag=True, help="Only look.")
def command(config: Stage, dry_run: bool) -> None:
    """Runs."""
    assert dry_run
    SEEN.append(config)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: {n_steps: 1, kind: long}\nnames: b\n")
    arguments = ["s", "--dry-run", "--config", str(path), "--n-steps", "2", "--resume", "--set", "steps.hidden=4"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert SEEN.pop() == Stage.of(store="s", names=("b",), resume=True, steps="long", n_steps=2, hidden=4)
    assert CliRunner().invoke(command, ["s", "--dry-run", "--preset", "small", "--steps", "long"]).exit_code == 0
    assert SEEN.pop() == Stage.of(store="s", names=("a",), steps="long")
    wrong = CliRunner().invoke(command, ["s", "--dry-run", "--n-steps", "x"])
    assert wrong.exit_code == 2
    assert "--n-steps is 'x', expected a whole number" in wrong.output
    missing = CliRunner().invoke(command, ["--dry-run"])
    assert "missing: STORE." in missing.output


def test_help_shows_what_is_common_and_help_all_everything() -> None:
    short = CliRunner().invoke(command, ["--help"], terminal_width=200).output
    for text in (
        "[OPTIONS] STORE",
        "--names LIST ",
        "[default: kv,hidden:last]",
        "--n-steps N",
        "--preset",
        "--dry-run",
    ):
        assert text in short
    for text in ("--steps", "--hidden"):
        assert text not in short
    assert "all 6 settings" in short
    page = CliRunner().invoke(command, ["--help-all"], terminal_width=200).output
    for text in (
        "Settings:\n  STORE",
        "--resume/--no-resume",
        "Steps:\n  --steps short|long",
        "--hidden N",
        "--dry-run",
    ):
        assert text in page


@pytest.mark.parametrize("name", sorted(set(main.list_commands(click.Context(main))) - {"options"}))
def test_help_of_a_command_is_short(name: str) -> None:
    one = main.get_command(click.Context(main), name)
    assert one is not None
    shown = [option for option in one.params if isinstance(option, click.Option) and not option.hidden]
    assert len(shown) <= 16  # with --config, --set, --preset and --help-all


def test_the_settings_of_a_stage_are_listed_with_type_and_default() -> None:
    shown = CliRunner().invoke(main, ["options", "train"])
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    for setting in TrainConfig.settings():
        assert (option_name(setting.name) if setting.name != "store" else "STORE") in text
    assert "Drafter (eagle3):" in text
    assert "--validate-every N Steps between validations. [default: 100]" in text


@pytest.mark.parametrize("words", [["trainn"], ["options", "trainn"]])
def test_a_misspelt_command_names_the_nearest(words: list[str]) -> None:
    wrong = CliRunner().invoke(main, words)
    assert (wrong.exit_code, "'train'" in wrong.output) == (2, True)


@pytest.mark.parametrize(("given", "read"), [(["a", "b"], ("a", "b")), ([], ("kv", "hidden:last"))])
def test_an_argument_may_take_several(given: list[str], read: tuple[str, ...]) -> None:
    @click.command(cls=StageCommand)
    @config_options(Stage, arguments=("names",))
    def several(config: Stage) -> None:
        assert config.names == read

    assert CliRunner().invoke(several, [*given, "--store", "s"]).exit_code == 0
    assert "NAMES..." in CliRunner().invoke(several, ["--help"]).output


def test_pages_made_from_the_code_are_current() -> None:
    for name, page in runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"].items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == page(), "run docs/generate.py"
