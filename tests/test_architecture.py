"""Imports run one way between and inside rooms, light rooms stay light, and only commands print."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from moa_data.tests.kit.tree import visible_files

ROOT = Path(__file__).resolve().parent.parent
OTHERS = {"tests", "benchmarks", "build", "docs"}

LEAVES = {"errors", "files", "machine", "text"}
"""Modules of the root that all rooms may import. Together they form the room "root"."""
MOA = {"root", "moa.nn", "moa.targets", "moa.drafters"}
# Room -> the other rooms that it may import. A room is a module of the root, or a folder with those
# of its subfolders that are not rooms themselves.
ALLOWED: dict[str, set[str]] = {
    "root": set(),
    "config": {"root"},
    "storage": {"root"},
    "storage.write": {"root", "storage"},
    "moa.nn": {"root"},
    "moa.targets": {"root", "moa.nn"},
    "moa.drafters": MOA,
    "moa.decoding": MOA,
    "moa.formats": MOA,
    "pipeline": {"config", "storage", "storage.write", "moa.decoding", "moa.formats"} | MOA,
    "trainer": {"config", "storage", "moa.formats"} | MOA,
    "evaluation": {"config", "moa.decoding", "moa.formats", "pipeline", "trainer"} | MOA,
    "conform": {"moa.decoding", "moa.formats", "evaluation"} | MOA,
    "serving": {"config", "moa.decoding"} | MOA,
    "serving.client": {"config", "moa.decoding", "moa.formats", "serving"} | MOA,
    "demo": {
        "config",
        "storage",
        "moa.decoding",
        "pipeline",
        "trainer",
        "evaluation",
        "serving.client",
    }
    | MOA,
}
ABOVE = {"commands", "cli", "__main__", "__init__"}
"""The top of the package. It may import everything, and nothing imports it."""

# Room -> the packages outside the standard library that it may import.
OUTSIDE: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "config": {"pydantic", "pydantic_core", "yaml"},
    "storage": {
        "numpy", "zarr", "numcodecs", "pyarrow", "google_crc32c", "zstandard", "array_api_compat",
        "safetensors", "obstore", "pydantic", "typing_extensions",
    },
    "moa": {
        "torch", "transformers", "huggingface_hub", "safetensors", "numpy", "typing_extensions",
        "jinja2", "gguf", "accelerate", "pydantic",
    },
    "pipeline.exchange": {
        "torch", "numpy", "pyarrow", "safetensors", "datasets", "yaml", "typing_extensions",
        "hs_connectors", "speculators",
    },
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """Return all installed modules: dotted name inside the package -> file."""
    found = {}
    for path in sorted(path for path in visible_files(ROOT) if path.suffix == ".py"):
        relative = path.relative_to(ROOT)
        if relative.parts[0] in OTHERS or any(part.startswith(".") for part in relative.parts):
            continue
        found[".".join(relative.with_suffix("").parts)] = path
    return found


def room_of(module: str) -> str:
    """Return the room of a module, or the module itself if it belongs to the top of the package."""
    inside = [room for room in ALLOWED if module == room or module.startswith(f"{room}.")]
    return "root" if module in LEAVES else max(inside, key=len, default=module)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node, without the nodes of their expressions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)


@cache
def imports(module: str) -> tuple[tuple[int, str], ...]:
    """Return the imports of a module as (line, absolute name).

    Imports at any depth and under TYPE_CHECKING are included.
    """
    package = ["moa_data", *module.split(".")[:-1]]
    found: list[tuple[int, str]] = []
    for node in statements(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parts = [*base, *([node.module] if node.module else [])]
            for alias in node.names:
                name = ".".join([*parts[1:], alias.name])
                if parts[0] != "moa_data":
                    found.append((node.lineno, ".".join(parts)))
                elif name in modules():  # the imported name is itself a module
                    found.append((node.lineno, f"moa_data.{name}"))
                else:
                    found.append((node.lineno, ".".join(parts)))
    return tuple(found)


def own_imports(module: str) -> Iterator[tuple[int, str]]:
    """Yield a module's imports of this package as (line, module).

    A package is named by its ``__init__``.
    """
    for line, name in imports(module):
        if name.split(".")[0] == "moa_data":
            target = name.removeprefix("moa_data").lstrip(".")
            yield line, target if target in modules() else f"{target}.__init__".lstrip(".")


def in_room(room: str) -> list[str]:
    return [module for module in modules() if module == room or module.startswith(f"{room}.")]


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(module) for module in modules()}
    assert {room for room in rooms if room.split(".")[0] not in ABOVE} == {*ALLOWED, "moa.__init__"}


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_imports_between_rooms_run_one_way(room: str) -> None:
    offences = [
        f"{modules()[module].relative_to(ROOT)}:{line} imports {target}"
        for module in modules()
        if room_of(module) == room
        for line, target in own_imports(module)
        if room_of(target) not in ALLOWED[room] | {room} and target != "__init__"
    ]
    assert not offences, (
        f"{room} may import {sorted(ALLOWED[room]) or 'nothing of this package'}: {offences}"
    )


def test_no_circles_between_files() -> None:
    graph = {
        module: {target for _, target in own_imports(module)} - {module} for module in modules()
    }
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"imports run in a circle: {' -> '.join(error.args[1])}")


def test_every_folder_says_what_lives_there() -> None:
    for module, path in modules().items():
        if module.endswith(".__init__"):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            assert len(text.splitlines()) >= 2, (
                f"{path.relative_to(ROOT)}: what lives here, and what may not?"
            )


def test_the_index_of_the_tests_helpers_is_complete() -> None:
    kit = ROOT / "tests" / "kit"
    index = ast.get_docstring(ast.parse((kit / "__init__.py").read_text()))
    listed = set(re.findall(r"``(\w+)``", index or ""))
    assert listed == {file.stem for file in kit.glob("*.py")} - {"__init__"}


@pytest.mark.parametrize("room", sorted(OUTSIDE))
def test_outside_imports_are_the_declared_ones(room: str) -> None:
    offences = []
    for module in in_room(room):
        for line, name in imports(module):
            top = name.split(".")[0]
            if (
                top != "moa_data"
                and top not in sys.stdlib_module_names
                and top not in OUTSIDE[room]
            ):
                offences.append(f"{modules()[module].relative_to(ROOT)}:{line} imports {name}")
    assert not offences, f"{room} may import {sorted(OUTSIDE[room])}: {offences}"


def test_only_commands_print_and_exit() -> None:
    offences = []
    for module, path in modules().items():
        if module.split(".")[0] in ABOVE:
            continue
        text = path.read_text(encoding="utf-8")
        # Parsing takes most of the time, so parse only files that contain one of the words.
        if not re.search("print|exit|echo", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {
                "print",
                "sys.exit",
                "exit",
                "click.echo",
            }:
                offences.append(
                    f"{path.relative_to(ROOT)}:{node.lineno} calls {ast.unparse(node.func)}"
                )
    assert not offences, f"only commands print and exit: {offences}"


# Files whose texts may have flags outside backticks: they put a command together, or name a flag of
# another program.
FLAGS = {
    "moa/formats/block.py", "moa/targets/gguf.py", "pipeline/exchange/speculators_backend.py",
    "pipeline/exchange/transfer.py", "pipeline/hub.py", "pipeline/regenerate.py", "text.py",
}  # fmt: skip
F_STRING: Any = type(ast.parse('f""', mode="eval").body)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module, such as its messages, with their lines, but no docstrings.

    The help text of a setting is not a docstring. Values in a text are replaced by ``{}``.
    """
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and isinstance(node.body[0], ast.Expr):
            inner.add(node.body[0].value)
        if isinstance(node, F_STRING):
            inner.update(node.values)
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inner:
            yield node.lineno, node.value


def test_only_commands_write_flags() -> None:
    offences = []
    for module, path in modules().items():
        name = str(path.relative_to(ROOT))
        if module.split(".")[0] in ABOVE or name in FLAGS:
            continue
        source = path.read_text(encoding="utf-8")
        if "--" not in source:
            continue
        for line, text in texts(ast.parse(source)):
            # Whole commands in backticks may have flags. A text of one word is no message.
            rest = re.sub(r"`[a-z-]+ [^`]*`", "", text)
            if " " in text and re.search(r"(?<![\w-])--[a-z]", rest):
                offences.append(f"{name}:{line}: {text}")
    assert not offences, f"name a setting in backticks, such as `max_length`: {offences}"
