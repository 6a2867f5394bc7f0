"""What README.md tells users to type exists: commands, options, make targets, files and Python names."""

import ast
import re
import shlex
from importlib import import_module
from pathlib import Path

import click
import pytest

from moa_data.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def command_lines() -> list[str]:
    lines = "\n".join(code_blocks("bash")).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("moa-data ")]


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 200


def test_there_are_commands_to_check() -> None:
    shown = {shlex.split(line, comments=True)[1] for line in command_lines()}
    assert {"plan", "extract", "inspect", "verify", "audit", "train", "generate", "eval"} <= shown


@pytest.mark.parametrize("line", command_lines())
def test_commands_and_options_exist(line: str) -> None:
    words = shlex.split(line, comments=True)
    command = main.get_command(click.Context(main), words[1])
    assert command is not None, f"no command {words[1]}"
    # Parsing fails on an unknown option or a missing argument, and runs nothing.
    command.make_context(words[1], words[2:])


def test_make_targets_exist() -> None:
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_links_lead_to_files() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_python_examples_name_what_exists() -> None:
    for block in code_blocks("python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                assert node.module is not None
                module = import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)
