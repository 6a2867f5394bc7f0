"""docs/adding-a-drafter.md works as written.

In a copy of the package, its drafter trains, decodes and passes the tests.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "adding-a-drafter.md"
RUN = """
from moa_data.evaluation.run import generate
from moa_data.moa.decoding.loop import plain_generate
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.training import build_store, tiny_model

from moa_data.tests.kit.runs import run


def test_a_run(tmp_path):
    store = build_store(tmp_path / "store", activations=("hidden:last",))
    run(store, tmp_path / "run", max_steps=20, drafter="linear")
    drafter, target = load_drafter(tmp_path / "run"), Target(tiny_model())
    assert drafter.kind == "linear"
    fast = generate(target, drafter, [1, 2, 3], max_new_tokens=12, tree=TreeShape(5))
    assert fast.tokens == plain_generate(target, [1, 2, 3], max_new_tokens=12).tokens
"""


def blocks(language: str) -> list[tuple[str, str]]:
    """Return the file and the text of the page's code blocks in a language that have a title."""
    pattern = rf'^```{language} title="(.*?)"\n(.*?)^```'
    return re.findall(pattern, PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def changed(text: str, diff: str) -> str:
    """Apply a diff block, whose old text must occur in the file exactly once."""
    lines = [line.rstrip("\n") for line in diff.splitlines()]
    old = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    new = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    assert text.count(old) == 1, f"{PAGE.name} changes what is not there: {old}"
    return text.replace(old, new)


@pytest.mark.slow
@pytest.mark.parametrize("tests", [
    ("tests/trainer/test_linear_run.py",),
    ("tests/moa/drafters/test_linear.py",),
], ids=["run", "contract"])  # fmt: skip
def test_the_page_word_for_word(tmp_path: Path, tests: tuple[str, ...]) -> None:
    package = tmp_path / "moa_data"
    ignored = shutil.ignore_patterns(
        ".*", "data", "docs", "benchmarks", "__pycache__", "build", "runs", "*.egg-info"
    )
    shutil.copytree(ROOT, package, ignore=ignored)
    for file, text in blocks("python"):
        (package / file).write_text(text, encoding="utf-8")
    for file, diff in blocks("diff"):
        (package / file).write_text(
            changed((package / file).read_text(encoding="utf-8"), diff), encoding="utf-8"
        )
    (package / "tests" / "trainer" / "test_linear_run.py").write_text(RUN, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=package, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
