"""Writes docs/results/, docs/leaderboard.md and a table of docs/interop.md from benchmarks/results.

    python -m benchmarks.pages.tables [--check]

--check writes nothing, and fails if a page is not up to date. A file of figures is one table::

    {"order": 100, "title": "...", "text": "...",
     "data": "...", "machine": "...", "measured": "...",
     "caveats": ["..."],
     "commands": {"eval": "moa-data eval ..."},
     "columns": {"length": {"title": "...", "form": "{:.2f}"}},
     "rows": [{"length": [4.28, 4.14, 4.43], "command": "eval"}],
     "page": "results/codecs",
     "headlines": [{"what": "...", "row": 0, "column": "..."}],
     "by": "target",
     "more": [{"title": "...", "text": "...", "columns": {}}],
     "sources": [{"commit": "...", "cpu": "...", ...}]}

- ``order`` sorts the tables of a page. ``text`` says what was measured and how.
- ``data``, ``machine`` and ``measured`` name the data, the machine and the date.
- ``caveats`` are conclusions that a reader must not draw from the figures.
- ``page`` is the page that shows the table.
- ``headlines`` are lines of the first page of results that quote this table.
- ``by`` is optional. It names a column, and each value of this column gets a table of its own.
- ``more`` are further tables with the same rows and other columns.
- ``sources`` are the code and the machines, as ``kit/records.py`` writes them.

A value of three numbers is a figure with its 95 % interval. All other entries of a file are read by
``figures.py`` only.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
INDEX_HEAD = """\
# Results

Everything that was measured, with its command and its caveats, a page a topic. `make figures` writes these pages and
their pictures from `benchmarks/results/*.json`. Another machine gives other speeds; acceptance lengths depend on
target, data and training alone.

- *Acceptance length*: tokens committed per target call, the bonus token included. The prefill is not counted, nor the
  token it gives.
- *Tokens/s* of decoding: all new tokens over all seconds of a method, prefill included. Methods decode the same prompts
  in one process, in alternating order, after a warm-up.
- Brackets are 95 % intervals, bootstrap over prompts, unless said otherwise.
- *MoA* is Mixture of Attentions. STORE, MODEL, RUN, TRAIN_CHATS and TEST_CHATS stand for your own.

| what | measured | page |
|---|---|---|
"""
LEADERBOARD_HEAD = """\
# Leaderboard

This page compares drafters for the same target. For each drafter it shows the number of training tokens, the number of
tokens that a target call commits, and the speed of decoding. `make figures` writes this page from
`benchmarks/results/leaderboard.json`.

This command adds your drafter to the page. The drafter can have any format [that moa-data can load](interop.md):

```bash
python -m benchmarks.training.leaderboard MODEL TEST_CHATS DRAFTER --name "..." --target gsm8k
```

If an answer of the drafter differs from the answer of plain decoding, the command adds nothing. Numbers in brackets
are 95 % confidence intervals from a bootstrap over prompts.
"""

TOPICS = {
    "extraction": "The store: extraction and reading",
    "codecs": "Codecs: bytes and what they cost",
    "codec-speed": "Codecs: speed, bounds and scopes",
    "training": "Training",
    "drafters": "Drafters",
    "decoding": "Decoding",
    "serving": "Serving",
    "networks": "Serving over emulated networks",
}
"""Maps each page of docs/results to its heading."""
IMAGE = {
    "drafters": "![Tokens committed per target call by tokens of training]"
    "(../images/drafters.png)\n"
}
INDEX = "results/index"
PAGES = {f"results/{name}": f"# {title}\n\n{IMAGE.get(name, '')}" for name, title in TOPICS.items()}
PAGES |= {INDEX: INDEX_HEAD, "leaderboard": LEADERBOARD_HEAD, "interop": ""}
BEGIN, END = "<!-- by make figures -->\n", "<!-- end -->\n"
"""Marks around the tables on pages that are otherwise written by hand."""
Table = dict[str, Any]


def load_tables(folder: Path = RESULTS) -> list[Table]:
    """Read all files of figures, sorted by their order."""
    tables: list[Table] = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(tables, key=lambda table: int(table["order"]))


def page(name: str, tables: list[Table]) -> str:
    """Return a whole page as Markdown.

    It has the tables that belong to the page. The first page of results has headlines instead.
    """
    if name == INDEX:
        lines = [line for topic in TOPICS for table in tables for line in headlines(topic, table)]
        return PAGES[name] + "\n".join(lines) + "\n"
    sections = [section(table) for table in tables if table["page"] == name]
    if PAGES[name]:
        return "\n".join([PAGES[name], *sections])
    before, _, rest = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n".join(sections) + END + rest.partition(END)[2]


def headlines(topic: str, table: Table) -> list[str]:
    """Return the rows of the first page that quote a table of this topic."""
    if table["page"] != f"results/{topic}":
        return []
    link = f"[{TOPICS[topic]}]({topic}.md#{anchor(table['title'])})"
    quoted = table.get("headlines", [])
    values = [
        cell(table["rows"][one["row"]][one["column"]], form_of(table, one["column"]))
        for one in quoted
    ]
    return [
        f"| {one['what']} | {value} | {link} |" for one, value in zip(quoted, values, strict=True)
    ]


def form_of(table: Table, column: str) -> str:
    """Return the format of a column's values."""
    return next(
        str(part["columns"][column]["form"])
        for part in (table, *table.get("more", ()))
        if column in part["columns"]
    )


def anchor(title: str) -> str:
    """Return the anchor that Markdown gives a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def section(table: Table) -> str:
    """Return one table with its text, caveats, sources and commands."""
    columns, rows = table["columns"], table["rows"]
    lines = [f"## {table['title']}", "", table["text"]]
    if by := table.get("by"):
        rest = {key: column for key, column in columns.items() if key != by}
        for value in dict.fromkeys(row[by] for row in rows):
            own = [row for row in rows if row[by] == value]
            filled = {
                key: column
                for key, column in rest.items()
                if any(row.get(key) is not None for row in own)
            }
            lines += ["", f"### {value}", "", *grid(filled, own)]
    else:
        lines += ["", *grid(columns, rows)]
    for more in table.get("more", []):
        lines += ["", f"### {more['title']}", "", more["text"], "", *grid(more["columns"], rows)]
    lines += ["", *(f"- {caveat}" for caveat in table["caveats"])]
    lines.append(
        f"- Data: {table['data']}. Machine: {table['machine']}. Measured: {table['measured']}."
    )
    lines += [f"- {source_text(source)}." for source in table.get("sources", [])]
    used = list(dict.fromkeys(row["command"] for row in rows))
    others = [name for name in table["commands"] if name not in used]
    lines += ["", "```bash", *(table["commands"][name] for name in others + used), "```", ""]
    return "\n".join(lines)


def grid(columns: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of one table."""
    lines = [
        "| " + " | ".join(column["title"] for column in columns.values()) + " |",
        "|---" * len(columns) + "|",
    ]
    for row in rows:
        cells = (cell(row.get(key), column["form"]) for key, column in columns.items())
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def source_text(source: dict[str, Any]) -> str:
    """Describe the code and the machine of figures."""
    memory = f", {source['memory_gib']:g} GiB" if source["memory_gib"] else ""
    machine = f"{source['n_cpus']} CPUs ({source['cpu'] or 'unknown'}){memory}"
    return f"Code: commit {source['commit']}, {source['day']}, torch {source['torch']}, {machine}"


def cell(value: Any, form: str) -> str:
    """Format one value. Three numbers are a figure and its interval."""
    if value is None:
        return ""
    if isinstance(value, list):
        middle, low, high = (form.format(number) for number in value)
        return f"{middle} ({low}{' to ' if value[1] < 0 else '-'}{high})"
    # In a column of numbers, a value may also be a text such as "as above", which has no format.
    return value if isinstance(value, str) and form != "`{}`" else form.format(value)


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(
        description="Write the pages of docs/ that show the results in benchmarks/results."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing, and exit with 1 if a page is not up to date",
    )
    options = parser.parse_args()
    tables = load_tables()
    texts = {ROOT / "docs" / f"{name}.md": page(name, tables) for name in PAGES}
    if options.check:
        return int(any(file.read_text() != text for file, text in texts.items()))
    for file, text in texts.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
