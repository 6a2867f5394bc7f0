"""Flags, help pages and docs/options.md come from the settings of a stage."""

import runpy
from pathlib import Path
from typing import Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import Field

from moa_data.commands.options import StageCommand, config_options
from moa_data.config import Config, Count

ROOT = Path(__file__).resolve().parents[2]


class Steps(Config):
    """A group."""

    kind: Literal["short", "long"] = "short"
    """Which steps."""
    n_steps: Count | None = None
    """How many steps."""
    hidden: int = 3
    """Seldom changed."""


class Stage(Config):
    """An example stage."""

    store: str
    """The store to read."""
    names: tuple[str, ...] = ("kv", "hidden:last")
    """What to
    store."""
    resume: bool = False
    """Go on."""
    steps: Steps = Field(default_factory=Steps)


SEEN: list[Stage] = []


@click.command(cls=StageCommand)
@config_options(Stage, ("store",), {"Data": "names", "Steps": "resume steps n_steps"}, {"small": {"names": ["a"]}})
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
    assert "steps.n_steps is 'x', expected a whole number" in wrong.output


def test_help_has_headings_defaults_and_the_way_to_the_rest() -> None:
    page = CliRunner().invoke(command, ["--help"], terminal_width=200).output
    for text in (
        "[OPTIONS] STORE", "Data:\n  --names LIST  What to store. [default: kv,hidden:last]", "--resume / --no-resume",
        "--steps short|long", "--n-steps N", "--preset", "--set KEY=VALUE", "docs/options.md", "Other:\n  --dry-run",
    ):  # fmt: skip
        assert text in page
    assert "--hidden" not in page


@pytest.mark.parametrize(("given", "read"), [(["a", "b"], ("a", "b")), ([], ("kv", "hidden:last"))])
def test_an_argument_may_take_several(given: list[str], read: tuple[str, ...]) -> None:
    @click.command(cls=StageCommand)
    @config_options(Stage, arguments=("names",))
    def several(config: Stage) -> None:
        assert config.names == read

    assert CliRunner().invoke(several, [*given, "--store", "s"]).exit_code == 0
    assert "NAMES..." in CliRunner().invoke(several, ["--help"]).output


def test_the_page_of_options_is_current() -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == generate["page"](), "run docs/generate.py"
