"""The base install reads stores without the packages of extras.

Commands that need an extra name it in one line.
"""

import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

import moa_data
from moa_data.cli import COMMANDS
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.stores import make_recipe
from moa_data.tests.kit.tree import visible_files

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[><=]", entry)[0].replace("-", "_") for entry in requirements}


def test_public_names_are_those_of_their_modules() -> None:
    assert set(moa_data.__all__) == {*moa_data._HOMES, "__version__"} == set(dir(moa_data))
    for name in moa_data._HOMES:
        found = getattr(moa_data, name)
        assert found is getattr(importlib.import_module(found.__module__), name)
    with raises_naming(AttributeError, "'extrakt'"):
        _ = moa_data.extrakt


# Arguments of each command. STORE is a store, and the other names do not exist.
ARGUMENTS = {
    **dict.fromkeys(("inspect", "verify", "repair"), "STORE"),
    **dict.fromkeys(("plan", "extract", "regenerate"), "--model M --dataset D --out OUT"),
    "add": "STORE --model M --activations hidden:last",
    "audit": "STORE --model M",
    "compare": "STORE STORE",
    "recode": "STORE --out OUT --codec int8",
    "generate": "--model M --drafter D --prompt P",
    "export": "STORE --format eagle --out OUT",
    "import": "FOLDER --format eagle --model M --out OUT",
    "push": "STORE me/store",
    "pull": "me/store OUT",
    "train": "STORE --out OUT",
    "export-drafter": "RUN --format eagle --out OUT",
    "conform": "D --model M --with vllm",
    "serve": "--model M",
    "chat": "--server 127.0.0.1:1 --drafter D",
    "demo": "--out OUT --n-chats 8 --n-store-chats 8",
    "eval": "--model M --drafter D --prompts P",
}
RUN_ALL = """
import contextlib, importlib, io, json, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {extras}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
import moa_data.storage
from moa_data.cli import main

for item in pkgutil.walk_packages(moa_data.storage.__path__, "moa_data.storage."):
    importlib.import_module(item.name)
for name in ("ActivationStore", "MoaDataError", "ExtractConfig", "TrainConfig", "EvalConfig"):
    getattr(moa_data, name)

def run(name, arguments):
    output, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            main([name, *arguments.split()])
    except SystemExit as end:
        return end.code, errors.getvalue()

ended = {{name: run(name, arguments) for name, arguments in {commands}.items()}}
assert "pandas" not in sys.modules, "it takes as long to import as these commands take to run"
sys.stdout.write(json.dumps(ended))
"""


def test_storage_settings_and_the_table_of_installs_without_torch(tmp_path: Path) -> None:
    make_recipe(lengths=(12, 30)).write(tmp_path / "STORE")
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `moa-data(?:\[(\w+)\])?` \| [^|]* \| ([^|]*) \|$", page, flags=re.MULTILINE
    )
    extra_of = {name: extra for extra, names in rows for name in re.findall(r"`([a-z-]+)`", names)}
    assert extra_of.keys() == COMMANDS.keys() == ARGUMENTS.keys()
    assert {extra for extra in extra_of.values() if extra} <= PROJECT[
        "optional-dependencies"
    ].keys()

    extras = PROJECT["optional-dependencies"]
    refused = names(extras["extract"] + extras["train"]) - names(PROJECT["dependencies"])
    assert {"torch", "transformers", "lightning", "datasets"} <= refused
    program = RUN_ALL.format(extras=refused, commands=ARGUMENTS | {"inspect": "STORE --sequence 1"})
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, (code, errors) in json.loads(done.stdout).items():
        extra = extra_of[name]
        assert code == (2 if extra else 0), (name, errors)
        if extra:
            assert errors.splitlines()[-1].startswith("Error: "), errors
            assert f"'moa-data[{extra}]'" in errors
    assert not (tmp_path / "OUT" / "corpus").exists(), "the demo needs torch before it makes chats"


def test_every_file_of_the_package_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]
    data = {
        path for pattern in setuptools["package-data"]["moa_data"] for path in ROOT.glob(pattern)
    }
    kinds, others = (
        (".proto", ".html", ".js", ".css", ".typed"),
        ("tests", "build", "docs", "site", "runs"),
    )

    def ours(paths: Iterable[Path]) -> set[Path]:
        relative = {path.relative_to(ROOT) for path in paths}
        return {
            path
            for path in relative
            if not path.parts or (path.parts[0][0] != "." and path.parts[0] not in others)
        }

    assert ours(path for path in visible_files(ROOT) if path.suffix in kinds) <= ours(data)
    folders = ours(
        path.parent
        for path in (*data, *(path for path in visible_files(ROOT) if path.name == "__init__.py"))
    )
    assert {".".join(("moa_data", *path.parts)) for path in folders} == set(setuptools["packages"])


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    copy = tmp_path / "moa_data"
    skipped = shutil.ignore_patterns(
        ".*", "__pycache__", "site", "build", "runs", "demo-output", "tests", "*.egg-info"
    )
    shutil.copytree(ROOT, copy, ignore=skipped)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(copy),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "absent from the `packages`" not in done.stdout + done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        held = set(wheel.namelist())
    of_package = [
        path
        for path in copy.rglob("*")
        if path.suffix in (".py", ".proto", ".html", ".js", ".css", ".typed")
    ]
    wanted = {f"moa_data/{path.relative_to(copy)}" for path in of_package}
    extra = ("moa_data/docs/", "moa_data/benchmarks/", "moa_data/build/")
    assert {name for name in wanted if not name.startswith(extra)} <= held
