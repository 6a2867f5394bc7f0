"""Foreign text is escaped in terminals, logs and reports.

Control characters are written out, and markup in the text has no effect.
"""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from moa_data.commands.console import StandardOutput
from moa_data.tests.kit.chats import chat
from moa_data.tests.kit.command import build_room, run
from moa_data.text import SILENT, Progress, format_bytes, format_range, printable

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ATTACK = (
    "clear \x1b[2J copy \x1b]52;c;cm0=\x07 back\x08\r \x9b2J right \u202eleft\u2066 :smile: "
    "[red]x[/red] [/]"
)
SHOWN = (
    r"clear \x1b[2J copy \x1b]52;c;cm0=\x07 back\x08\x0d \x9b2J right \u202eleft\u2066 :smile: "
    "[red]x[/red] [/]"
)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with model/, drafter/, store/, and a chats.jsonl that contains the attack."""
    texts = [(f"{n} {ATTACK}", f"{ATTACK} {n}") for n in range(4)]
    return build_room(
        tmp_path_factory.mktemp("escaping"), [chat(*pair, category=ATTACK) for pair in texts]
    )


def test_control_characters_are_written_out_and_all_else_is_kept() -> None:
    assert printable(ATTACK) == SHOWN
    assert printable(SHOWN) == SHOWN
    for kept in ("line\n\ttab", "日本語 👩‍👩‍👧 é", "שלום \u200f", r"C:\x1b"):
        assert printable(kept) == kept
    everything = "".join(map(chr, range(0x110000)))
    assert not CONTROLS.search(printable(everything))
    printable(everything).encode()


def test_a_terminal_shows_text_tables_and_styles_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    terminal = StandardOutput()
    terminal.print(ATTACK, end="|")
    terminal.print(ATTACK.replace("\x1b", "\x1b\x1b"), style="green", end="|")
    table = Table("a", title=ATTACK, width=300)
    table.add_row(ATTACK)
    terminal.print(table)
    terminal.print(Text.assemble("a\x1bb\x9b", ("c", "bold")), end="|")
    assert not CONTROLS.search(screen.getvalue())
    assert screen.getvalue().startswith(SHOWN + "|")
    assert screen.getvalue().count(SHOWN) == 3
    assert r"a\x1bb\x9bc|" in screen.getvalue()


def test_inspect_shows_a_sample_without_obeying_it(room: Path) -> None:
    result = run("inspect", room / "store", "--sequence", "1")
    assert result.exit_code == 0, result.output
    assert not CONTROLS.search(result.output)
    assert result.output.count(SHOWN) == 2
    assert f"⟦{SHOWN}" in result.output.replace("⟦ ", "⟦")


def test_error_lines_quote_rows_and_names_without_obeying_them(room: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text(json.dumps({ATTACK: 1}) + "\n", encoding="utf-8")
    arguments = ("plan", "--model", room / "model", "--out", tmp_path / "store", "--dataset")
    result = run(*arguments, tmp_path / "odd.jsonl")
    assert result.exit_code == 2
    assert "columns are clear \\x1b[2J" in result.stderr
    assert not CONTROLS.search(result.stderr.split("\r")[-1])
    result = run(*arguments, tmp_path / "\x1b[2Jabsent.jsonl")
    assert "/\\x1b[2Jabsent.jsonl does not exist" in result.stderr
    assert not CONTROLS.search(result.stderr.split("\r")[-1])


def test_reports_of_eval_are_escaped(room: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = run(
        "eval", "--model", room / "model", "--drafter", room / "drafter", "--prompts",
        room / "chats.jsonl", "--method", "plain,chain", "--max-new-tokens", "4",
        "--n-prompts", "2", "--device", "cpu", "--out", report,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for text in (
        result.stdout,
        result.stderr.replace("\r", "\n"),
        report.with_suffix(".md").read_text("utf-8"),
    ):
        assert not CONTROLS.search(text)
    categories = json.loads(report.read_text())["rows"][0]["category"]
    assert categories == SHOWN


def test_a_range_whose_ends_look_alike_is_one_figure() -> None:
    assert format_range(2e9, 2.4e9, format_bytes) == "2.0 GB to 2.4 GB"
    assert format_range(0, 2.4e9, format_bytes) == "up to 2.4 GB"
    assert format_range(2.01e9, 2.04e9, format_bytes) == "2.0 GB"


def test_progress_names_its_phase_and_unit_and_is_silent_without_a_display() -> None:
    seen: list[tuple[str, str, int, int, str]] = []
    progress = Progress(
        lambda phase, n_done, total, note: seen.append(
            (phase.phase, phase.unit, n_done, total, note)
        )
    )
    progress.of("tokenise", "chat")(3, 4)
    progress.of("extract", "token")(10, 20, "1/2 parts")
    SILENT.of("extract", "token")(10, 20)
    assert seen == [("tokenise", "chat", 3, 4, ""), ("extract", "token", 10, 20, "1/2 parts")]
