"""docs/results.md says what benchmarks/results holds, and every figure there has a command that exists."""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import click
import pytest

from moa_data.cli import main

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(tables: ModuleType) -> None:
    found = tables.load_tables()
    for name in tables.PAGES:
        page = tables.ROOT / "docs" / f"{name}.md"
        assert tables.page(name, found) == page.read_text(encoding="utf-8"), "run `make figures`"


def test_an_interval_stands_behind_its_figure(tables: ModuleType) -> None:
    assert tables.cell([4.28, 4.14, 4.43], "{:.2f}") == "4.28 (4.14-4.43)"
    assert tables.cell([-0.75, -0.86, -0.66], "{:.2f}") == "-0.75 (-0.86 to -0.66)"
    assert tables.cell(None, "{:.2f}") == ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_row_has_a_command_that_exists(path: Path) -> None:
    table = json.loads(path.read_text(encoding="utf-8"))
    assert table["rows"]
    assert {row["command"] for row in table["rows"]} <= set(table["commands"])
    shown = {key for part in (table, *table.get("more", ())) for key in part["columns"]}
    assert {key for row in table["rows"] for key in row} <= shown | {"command"}
    for command in table["commands"].values():
        program, first = shlex.split(command)[:2]
        assert program in ("moa-data", "python")
        assert main.get_command(click.Context(main), first) if program == "moa-data" else (ROOT / first).is_file()


def test_the_readme_quotes_the_figures_of_the_file() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "drafters-eagle.json").read_text(encoding="utf-8"))["rows"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\|[^|]*\| (chain of \d+) \| ([\d.]+), ([\d.]+) \| ([\d.]+) \(", readme, re.MULTILINE)
    assert len(quoted) == 4
    known = {
        (row["drafts"], f"{row['eagle']:.2f}", f"{row['moa']:.2f}", f"{row['length_ratio'][0]:.2f}") for row in rows
    }
    assert set(quoted) <= known
