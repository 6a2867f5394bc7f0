"""docs/results says what benchmarks/results holds, and every figure there has a command that exists."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

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


def test_the_readme_quotes_the_leaderboard() -> None:
    """Its table, cell by cell: chains of 7 on both targets, and tokens/s."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "leaderboard.json").read_text(encoding="utf-8"))["rows"]
    found = {(row["drafter"], row["target"], row["tokens"] > 1_000_000): row for row in rows if row["seed"] == 0}
    names = {
        "Mixture of Attentions": ("Mixture of Attentions",) * 2,
        "the same of every second layer, one pass": ("Mixture of Attentions of every second layer, one pass", ""),
        "EAGLE-2": ("EAGLE-2",) * 2,
        "EAGLE-3": ("EAGLE-3",) * 2,
        "DSpark": ("DSpark",) * 2,
        "DSpark on keys and values": ("DSpark on keys and values of later layers", "DSpark on keys and values"),
    }

    def cell(row: dict[str, Any] | None, key: str) -> str:
        value = None if row is None else row[key]
        return "" if value is None else f"{value[0] if isinstance(value, list) else value:.2f}"

    table = (ROOT / "README.md").read_text(encoding="utf-8").split("| drafter |")[1].split("\n\n")[0]
    quoted = [[part.strip() for part in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [row[0] for row in quoted] == list(names)
    for title, *cells in quoted:
        hard, easy = names[title]
        long, short = (found.get((hard, "code-and-math", is_long)) for is_long in (True, False))
        first = found.get((easy, "gsm8k", False))
        assert cells == [cell(short, "chain7"), cell(long, "chain7"), cell(long, "speed"), cell(first, "chain7")]
