"""The site of docs/: every page is in its menu, its links lead somewhere, and `make docs` fails where one does not."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import markdown
import pytest
import yaml
from markdown.extensions.toc import slugify_unicode

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def pages_of(menu: Any) -> Iterator[str]:
    """The pages of a menu of mkdocs.yml, in order."""
    if isinstance(menu, str):
        yield menu
    else:
        for entry in menu.values() if isinstance(menu, dict) else menu:
            yield from pages_of(entry)


def anchors(page: Path) -> set[str]:
    """The names of the headings of a page, as mkdocs makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {slugify_unicode(re.sub(r"<[^>]+>", "", heading.replace("`", "")), "-") for heading in headings}


def test_every_page_is_in_the_menu() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages_of(menu)) == [str(page.relative_to(DOCS)) for page in PAGES]


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_of_links_exist(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if anchor and not path.startswith("http"):
            assert anchor in anchors((page.parent / path).resolve() if path else page), f"{path}#{anchor}"


def test_the_commands_page_shows_what_the_help_shows() -> None:
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    html = markdown.markdown(page, extensions=["mkdocs-click", "pymdownx.superfences"])
    assert "Sentinel" not in html
    assert "--checksums-only" in html


@pytest.mark.slow
def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    copy = tmp_path / "moa_data"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "site", "runs", "demo-output", "tests", "benchmarks")
    shutil.copytree(ROOT, copy, ignore=skipped)
    venv = Path(sys.prefix)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    build = ["make", "-o", f"{venv}/.installed", f"VENV={venv}", "docs"]

    done = subprocess.run(build, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Sentinel" not in (copy / "site" / "commands" / "index.html").read_text(encoding="utf-8")

    with (copy / "docs" / "glossary.md").open("a", encoding="utf-8") as page:
        page.write("\n[nowhere](not-there.md)\n")
    done = subprocess.run(build, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "not-there.md" in done.stderr
