"""No name in the code contains a word of the list "Words that are not used" in docs/glossary.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from moa_data.tests.kit.tree import visible_files

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"
MADE = {"build", "demo-output", "dist", "runs", "site"}
"""Folders at the root that commands write."""


def banned_words() -> set[str]:
    """Return the first column of the glossary's table of words that are not used."""
    section = GLOSSARY.read_text(encoding="utf-8").partition("## Words that are not used")[2]
    words: set[str] = set()
    for cell in re.findall(r"^\| ([a-z, ]+) \|", section, re.MULTILINE):
        words.update(cell.split(", "))
    return words


def source_files() -> Iterator[Path]:
    """Yield all Python files of the checkout, except those that are generated."""
    for path in sorted(visible_files(ROOT)):
        is_made = path.relative_to(ROOT).parts[0] in MADE or "_pb2" in path.name
        if path.suffix == ".py" and not is_made:
            yield path


def names_in(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield the names in a file with their lines. The file's own name has line 1.

    These are the names of classes, functions, arguments, attributes and variables. Imported names
    are those of other files or libraries, but a name that an import gives them is checked.
    """
    yield 1, path.stem
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg() | ast.keyword():
                yield node.lineno, node.arg or ""
            case ast.Attribute():
                yield node.lineno, node.attr
            case ast.Name():
                yield node.lineno, node.id
            case ast.alias():
                yield node.lineno, node.asname or ""
            case ast.ExceptHandler() | ast.MatchAs() | ast.MatchStar():
                yield node.lineno, node.name or ""


def words_of(name: str) -> list[str]:
    """Split a name at underscores and capitals: ``_PoolKVSize2`` has pool, kv and size."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def test_names_are_split_into_words() -> None:
    assert words_of("_PoolKVSize2") == ["pool", "kv", "size"]
    assert words_of("MAX_ROWS_at_once") == ["max", "rows", "at", "once"]


def test_no_name_contains_a_word_that_is_not_used() -> None:
    banned = banned_words()
    assert banned >= {"joined", "place"}
    spellings = [f"(?<![a-zA-Z]){word}|{word.title()}|{word.upper()}" for word in banned]
    anywhere = re.compile("|".join(spellings))
    offences: set[str] = set()
    for path in source_files():
        text = path.read_text(encoding="utf-8")
        # Parsing takes most of the time, so parse only files that contain a word at all.
        if not anywhere.search(path.stem + text):
            continue
        for line, name in names_in(path, text):
            if not banned.isdisjoint(words_of(name)):
                offences.add(f"{path.relative_to(ROOT)}:{line} {name}")
    assert not offences, f"use the words of docs/glossary.md instead: {sorted(offences)}"
