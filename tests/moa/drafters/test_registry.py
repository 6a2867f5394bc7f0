"""Only the registry lists kinds of drafters; other lists are made from it or equal it."""

import re
from pathlib import Path
from typing import get_args

from moa_data.commands.chat import ChatConfig
from moa_data.moa.drafters.registry import DRAFTERS, REMOTE_KINDS
from moa_data.trainer.config import AnyDrafter

ROOT = Path(__file__).parents[3]
# Files that may name drafters: the drafters and their settings, the file formats (some are named
# like a drafter), and other engines' methods, under the engines' names.
NAMING = (
    "moa/drafters/",
    "moa/formats/",
    "pipeline/exchange/",
    "trainer/config.py",
    "conform/other_side.py",
)
OTHERS = ("tests/", "benchmarks/", "docs/", "build/", "site/", ".")


def test_chat_names_the_kinds_that_draft_away_from_the_target() -> None:
    (text,) = (
        setting.field.description for setting in ChatConfig.settings() if setting.key == "drafter"
    )
    assert set(re.findall(r"\w+", str(text))) & DRAFTERS.keys() == set(REMOTE_KINDS)


def test_nothing_else_names_a_kind_of_drafter() -> None:
    classes = [one.__name__ for one in (*get_args(AnyDrafter), *DRAFTERS.values())]
    named = re.compile(rf"""["'](?:{"|".join(DRAFTERS)})["']|\b(?:{"|".join(classes)})\b""")
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in ROOT.glob("[!.]*/**/*.py")
    }
    texts = {name: text for name, text in texts.items() if not name.startswith((*NAMING, *OTHERS))}
    assert len(texts) > 50
    assert {name: named.findall(text) for name, text in texts.items() if named.search(text)} == {}
