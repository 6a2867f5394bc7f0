"""README.md and docs/ only name commands, links and files that exist.

`make docs` fails if a link is broken.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import markdown
import pytest
import yaml
from markdown.extensions.toc import slugify_unicode

import moa_data
from moa_data.cli import main
from moa_data.commands.console import out
from moa_data.commands.views import decoding_view
from moa_data.demo.config import DemoConfig
from moa_data.demo.run import DemoReport
from moa_data.moa.decoding.loop import DecodeStats, Generation
from moa_data.tests.kit.chats import chat, write_jsonl
from moa_data.tests.kit.command import run
from moa_data.tests.kit.stores import make_recipe

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
# docs/results has the commands of measurements, which benchmarks/test_tables.py checks.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [
    path for path in PAGES if path.name != "CONTRIBUTING.md" and path.parent.name != "results"
]


def code_blocks(path: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```",
        path.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )


def command_lines(path: Path) -> list[str]:
    """Return the commands of a page.

    These are lines of bash blocks, and lines of text blocks with output that start with a dollar.
    """
    shown = code_blocks(path, "bash") + re.findall(
        r"^\$ (.*)$", "\n".join(code_blocks(path, "text")), re.MULTILINE
    )
    lines = "\n".join(shown).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("moa-data ")]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130
    assert len(README.split()) <= 950


def test_the_readme_shows_a_whole_job_and_names_every_command() -> None:
    shown = {shlex.split(line, comments=True)[1] for line in command_lines(ROOT / "README.md")}
    assert {"plan", "extract", "train", "generate", "eval"} <= shown
    table = README[README.index("| Command | Does |") :].split("\n\n")[0]
    named = {
        name
        for row in table.splitlines()[2:]
        for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])
    }
    assert named == set(main.list_commands(click.Context(main)))


def test_commands_and_options_exist() -> None:
    for line in {line for path in GUIDES for line in command_lines(path)}:
        words = shlex.split(line, comments=True)
        command = main.get_command(click.Context(main), words[1])
        assert command is not None, line
        # Parsing fails on an unknown option or a missing argument, and runs nothing.
        command.make_context(words[1], words[2:])


def form(line: str) -> str:
    """Return a line of output without its numbers, byte units and spaces."""
    return "".join(
        re.sub(r"[\d.,]+ [kMG]?B\b|\d[\d.,]*", "0", line).replace("parts", "part").split()
    )


def test_quoted_output_has_the_form_of_today(tmp_path: Path) -> None:
    store = make_recipe(lengths=(12, 30)).write(tmp_path / "store")
    drafted = Generation([1, 2, 3], DecodeStats([2, 1], n_tokens=3, total_s=1.0))
    with out.capture() as captured:
        out.print(decoding_view([drafted], [drafted], "5"))
    figures = {
        "acceptance_length": 4.3,
        "ratio": 1.3,
        "n_exact": 8,
        "n_answers": 8,
        "bytes_per_token": 1213.0,
    }
    figures |= {"seconds": 1.0, "is_equal": True, "n_alone": 8, "n_rolled_back": 1}
    demo = DemoReport(tmp_path, dict.fromkeys(("extract", "eval", "serve"), figures))
    printed = [run("verify", store).stdout, captured.get(), demo.describe()]
    known = {form(line) for line in "\n".join(printed).splitlines()}
    quoted = re.compile(
        r"complete, no damage: |.* tokens/call |.* times the speed of |(acceptance|speed|network cut|store) .* "
    )
    n_quoted = 0
    for name in ("README.md", "docs/first-run.md", "docs/tutorial.md"):
        lines = "\n".join(code_blocks(ROOT / name, "text")).splitlines()
        found = {form(line) for line in lines if quoted.match(line) and "store: " not in line}
        assert found <= known, name
        n_quoted += len(found)
    assert n_quoted >= 6


def test_the_demo_writes_where_the_documents_look() -> None:
    (folder,) = re.findall(r"^DEMO_OUT \?= (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert folder == DemoConfig().out
    assert f"moa-data verify {folder}/store" in README


def test_make_targets_exist() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", pages, flags=re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs makes them."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {
        slugify_unicode(re.sub(r"<[^>]+>", "", heading.replace("`", "")), "-")
        for heading in headings
    }


def test_links_lead_to_files_and_headings() -> None:
    for page in PAGES:
        for path, anchor in re.findall(
            r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")
        ):
            if not path.startswith("http"):
                file = (page.parent / path).resolve() if path else page
                assert file.exists(), f"{page}: {path}"
                assert not anchor or anchor in anchors(file), f"{page}: {path}#{anchor}"


def test_python_examples_name_what_is_public() -> None:
    for node in ast.walk(
        ast.parse("\n".join(block for path in GUIDES for block in code_blocks(path, "python")))
    ):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert not node.module.startswith("moa_data."), f"{node.module} is not public"
            module = import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)


def test_the_readmes_python_runs_on_a_few_chats(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3-8b").symlink_to(room / "model")
    write_jsonl(
        tmp_path / "chats.jsonl",
        [chat(f"What is {n} plus {n}?", f"It is {2 * n}.") for n in range(14)],
    )
    write_jsonl(tmp_path / "spec_bench.jsonl", [chat("What is 1 plus 1?", "It is 2.")])
    block = next(one for one in code_blocks(ROOT / "README.md", "python") if "moa_data" in one)
    few_steps = block.replace("TrainConfig(", "TrainConfig(max_steps=3, ")
    exec(few_steps.replace("EvalConfig(", "EvalConfig(max_new_tokens=4, warmup=0, "), {})
    assert capsys.readouterr().out.strip()
    assert (tmp_path / "runs/moa/drafter").is_dir()


def test_settings_of_training_that_are_named_exist() -> None:
    known = {setting.key for setting in moa_data.TrainConfig.settings()}
    groups = "|".join(sorted({key.split(".")[0] for key in known if "." in key}))
    for page in (
        "training",
        "drafters",
        "interop",
        "results/training",
        "decisions/0004-two-passes-over-a-batch",
    ):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        named = set(re.findall(rf"(?:--set |`)((?:{groups})\.\w+)(?==|`)", text))
        assert named, page
        assert named <= known, page


def pages_of(menu: Any) -> Iterator[str]:
    """Yield the pages of a menu of mkdocs.yml, in order."""
    if isinstance(menu, str):
        yield menu
    else:
        for entry in menu.values() if isinstance(menu, dict) else menu:
            yield from pages_of(entry)


def test_every_page_is_in_the_menu() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages_of(menu)) == sorted(
        str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")
    )


def test_the_commands_page_shows_what_the_help_shows() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    html = markdown.markdown(page, extensions=["mkdocs-click", "pymdownx.superfences"])
    assert "Sentinel" not in html
    assert "--checksums-only" in html


@pytest.mark.slow
def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    copy = tmp_path / "moa_data"
    skipped = shutil.ignore_patterns(
        ".*", "__pycache__", "site", "runs", "demo-output", "tests", "benchmarks"
    )
    shutil.copytree(ROOT, copy, ignore=skipped)
    venv = Path(sys.prefix)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    build = ["make", "-o", f"{venv}/.installed", f"VENV={venv}", "docs"]

    def built() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            build, cwd=copy, env=environment, capture_output=True, text=True, check=False
        )

    assert (done := built()).returncode == 0, done.stderr
    assert "Sentinel" not in (copy / "site" / "commands" / "index.html").read_text(encoding="utf-8")

    with (copy / "docs" / "glossary.md").open("a", encoding="utf-8") as page:
        page.write("\n[nowhere](not-there.md)\n")
    assert (done := built()).returncode != 0
    assert "not-there.md" in done.stderr
