"""The base install reads stores: nothing there needs a package of an extra, and what does says so in one line."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

_PROGRAM = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {extras}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
"""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[><=]", entry)[0].replace("-", "_") for entry in requirements}


def run(program: str) -> subprocess.CompletedProcess[str]:
    extras = PROJECT["optional-dependencies"]
    refused = names(extras["extract"] + extras["train"]) - names(PROJECT["dependencies"])
    assert {"torch", "transformers", "lightning", "datasets"} <= refused
    text = _PROGRAM.format(extras=refused) + program
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)


def test_all_of_storage_and_the_command_line_import_without_the_extras() -> None:
    done = run(
        "import moa_data.storage, moa_data.cli\n"
        "for item in pkgutil.walk_packages(moa_data.storage.__path__, 'moa_data.storage.'):\n"
        "    importlib.import_module(item.name)\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command", ["['train', 'STORE', '--out', 'RUN']", "['eval', '--model', 'M', '--prompts', 'P', '--drafter', 'D']"]
)
def test_a_command_says_in_one_line_what_to_install(command: str) -> None:
    done = run(f"from moa_data.cli import main\nmain({command})")
    assert done.returncode == 2
    assert re.fullmatch(r"Error: .*pip install 'moa-data\[all\]'.*\n", done.stderr), done.stderr


def test_every_package_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {path.parent.relative_to(ROOT) for path in ROOT.rglob("__init__.py")}
    ours = {
        path for path in folders if not any(part.startswith(".") or part in ("tests", "build") for part in path.parts)
    }
    assert {".".join(("moa_data", *path.parts)) for path in ours} == set(project["tool"]["setuptools"]["packages"])
