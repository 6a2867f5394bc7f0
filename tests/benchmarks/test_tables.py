"""docs/results shows the figures of benchmarks/results.

Every row has a command that exists.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import ModuleType

import click
import pytest

from moa_data.cli import main

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_the_page_is_current(benchmark: Callable[[str], ModuleType]) -> None:
    tables = benchmark("pages.tables")
    found = tables.load_tables()
    for name in tables.PAGES:
        page = tables.ROOT / "docs" / f"{name}.md"
        assert tables.page(name, found) == page.read_text(encoding="utf-8"), "run `make figures`"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_row_has_a_command_that_exists(path: Path) -> None:
    table = json.loads(path.read_text(encoding="utf-8"))
    assert table["rows"]
    assert {row["command"] for row in table["rows"]} <= set(table["commands"])
    shown = {key for part in (table, *table.get("more", ())) for key in part["columns"]}
    assert {key for row in table["rows"] for key in row} <= shown | {"command"}
    for command in table["commands"].values():
        program, first, *rest = shlex.split(command)
        assert program in ("moa-data", "python")
        if program == "moa-data":
            assert main.get_command(click.Context(main), first)
        else:
            assert first == "-m"
            assert (ROOT / rest[0].replace(".", "/")).with_suffix(".py").is_file()


def test_the_readme_quotes_the_figures() -> None:
    """Compare the README's table cell by cell.

    A cell has the mean over seeds for chains of 7 and the tokens/s. A star marks means of one seed.
    """
    results = ROOT / "benchmarks" / "results"
    rows = json.loads((results / "drafters-code-and-math-2.json").read_text(encoding="utf-8"))[
        "rows"
    ]
    speeds = json.loads((results / "rounds.json").read_text(encoding="utf-8"))["rows"]
    light = "the same, every second layer, one pass"

    def cell(names: set[str], tokens: str) -> str:
        found = [
            row["chain7"][0] for row in rows if row["drafter"] in names and row["tokens"] == tokens
        ]
        is_later = not any(row["drafter"] == name for row in rows if row["tokens"] == tokens)
        return f"{fmean(found):.2f}{'' if len(found) > 1 else '*'}{'†' if is_later else ''}"

    table = (
        (ROOT / "README.md").read_text(encoding="utf-8").split("| drafter |")[1].split("\n\n")[0]
    )
    for line in table.splitlines()[2:]:
        title, *cells = [part.strip() for part in line.split("|")[1:-1]]
        name = title.replace(light, "Mixture of Attentions of every second layer, one pass").split(
            ", ["
        )[0]
        names = {
            name,
            "DSpark on keys and values of later layers"
            if name == "DSpark on keys and values"
            else name,
        }
        speed = next(row["speed"] for row in speeds if row["drafter"] == name)
        assert cells == [
            *(cell(names, tokens) for tokens in ("0.57 M", "2.0 M", "8.0 M")),
            f"{speed:.2f}",
        ]


def test_speeds_that_were_measured_again_stand_on_one_page() -> None:
    """Acceptance lengths stay valid, but older tokens/s would contradict those of today's code."""
    rows = json.loads(
        (ROOT / "benchmarks" / "results" / "leaderboard.json").read_text(encoding="utf-8")
    )["rows"]
    entered = [row for row in rows if row["target"] == "code-and-math-2"]
    assert entered
    assert not any("speed" in row for row in entered)
