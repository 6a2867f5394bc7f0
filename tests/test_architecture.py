"""Imports flow one way: each folder imports only what the table allows, and the light folders stay light."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Folder or root module -> the parts of this package that it may import.
ALLOWED: dict[str, set[str]] = {
    "storage": set(),
    "moa": set(),
    "pipeline": {"storage", "moa"},
    "trainer": {"storage", "moa"},
    "evaluation": {"pipeline", "moa", "escaping"},
    "interop": {"storage", "moa"},
    "demo": {"storage", "moa", "pipeline", "trainer", "evaluation", "escaping"},
    "configuration": set(),
    "provenance": set(),
    "signals": set(),
    "escaping": set(),
    "cli_views": {"escaping"},
    "cli_support": {"signals", "escaping", "__version__"},
}
# Folders that name what they may import from outside the standard library.
OUTSIDE: dict[str, set[str]] = {
    "storage": {
        "numpy",
        "zarr",
        "numcodecs",
        "pyarrow",
        "google_crc32c",
        "zstandard",
        "array_api_compat",
        "safetensors",
        "fsspec",
    },
    "moa": {"torch", "transformers", "huggingface_hub", "safetensors", "numpy"},
    "interop": {"torch", "numpy", "pyarrow", "safetensors", "datasets", "yaml"},
}


def package_files(part: str) -> list[Path]:
    module = ROOT / f"{part}.py"
    return [module] if module.exists() else sorted((ROOT / part).rglob("*.py"))


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, absolute module) for each import of a file, at any depth; relative ones are resolved."""
    package = ["moa_data", *path.relative_to(ROOT).parent.parts]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.stem == "cli_views":  # shows the reports of all stages: it names their types, and imports nothing to run
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parts = [*base, *([node.module] if node.module else [])]
            if parts == ["moa_data"]:
                yield from ((node.lineno, f"moa_data.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, ".".join(parts)


def test_every_part_is_in_the_table() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    modules = {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__", "cli", "cli_generate", "cli_store"}
    assert folders | modules <= set(ALLOWED)


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_imports_flow_one_way(part: str) -> None:
    offences = []
    for path in package_files(part):
        for line, module in imported_modules(path):
            if not module.startswith("moa_data"):
                continue
            target = [*module.split("."), ""][1]
            if target not in ALLOWED[part] | {part}:
                offences.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not offences, f"{part} may import {sorted(ALLOWED[part]) or 'nothing in this package'}: {offences}"


@pytest.mark.parametrize("part", sorted(OUTSIDE))
def test_outside_imports_are_the_declared_ones(part: str) -> None:
    offences = []
    for path in package_files(part):
        for line, module in imported_modules(path):
            top = module.split(".")[0]
            if top != "moa_data" and top not in sys.stdlib_module_names and top not in OUTSIDE[part]:
                offences.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not offences, f"{part} may import {sorted(OUTSIDE[part])}: {offences}"


def test_only_the_command_line_prints_and_exits() -> None:
    offences = []
    for part in ALLOWED.keys() - {"cli_support"}:
        for path in package_files(part):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "sys.exit", "exit", "click.echo"}:
                    offences.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {ast.unparse(node.func)}")
    assert not offences, f"only cli.py prints and exits: {offences}"
