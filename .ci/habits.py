"""Checks that the package has few habits that make code slow to read. Each habit has a limit.

# By default, only findings of habits above their limit are listed. --list lists all findings.
python .ci/habits.py [--list]
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

NOT_THE_PACKAGE = ("tests/", "benchmarks/", "docs/", ".ci/")
# Names that say nothing about the value they hold.
EMPTY_NAMES = {
    "own", "found", "one", "at", "place", "kept", "each", "given", "said", "told", "what", "some",
    "most", "whole",
}  # fmt: skip
# A trailing comment that starts with one of these words continues a sentence that starts in the
# code, as in `n = 5  # of them are valid`.
CONTINUATIONS = {"of", "which", "else", "that", "as", "than", "so", "whose", "they"}
# Maps each habit to its limit, in findings per 1,000 statements of the package.
LIMITS = {
    "assignments of several values at once": 4.0,
    "variables with an empty name": 1.3,
    "comprehensions": 35.0,
    "trailing comments that continue the code": 0.0,
    "texts with 'is no'": 0.0,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Findings = dict[str, list[str]]


def package_files() -> list[Path]:
    """List the files of the package, except generated ones."""
    listing = subprocess.run(
        ["git", "ls-files", "*.py"], check=True, capture_output=True, text=True
    )
    names = listing.stdout.splitlines()
    return [
        Path(name) for name in names if not name.startswith(NOT_THE_PACKAGE) and "_pb2" not in name
    ]


def habits_of(node: ast.AST) -> Iterator[str]:
    """Yield the habits that a node of the syntax tree has."""
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
    ):
        yield "assignments of several values at once"
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES:
        yield "variables with an empty name"
    if isinstance(node, COMPREHENSIONS):
        yield "comprehensions"
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " is no " in node.value:
        yield "texts with 'is no'"


def continuing_comments(text: str) -> Iterator[int]:
    """Yield the lines with a trailing comment whose first word continues the code."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or not token.line[: token.start[1]].strip():
            continue
        words = token.string.lstrip("# ").split()
        if words and words[0].lower().strip(",") in CONTINUATIONS:
            yield token.start[0]


def main() -> int:
    """Check the package. Returns 1 if a habit is above its limit."""
    findings: Findings = {habit: [] for habit in LIMITS}
    n_statements = 0
    for file in package_files():
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            n_statements += isinstance(node, ast.stmt)
            for habit in habits_of(node):
                findings[habit].append(f"{file}:{getattr(node, 'lineno', 0)}")
        for line in continuing_comments(text):
            findings["trailing comments that continue the code"].append(f"{file}:{line}")
    is_above = False
    for habit, limit in LIMITS.items():
        share = 1000 * len(findings[habit]) / n_statements
        if share > limit or "--list" in sys.argv:
            sys.stderr.write("".join(f"{line}: {habit}\n" for line in findings[habit]))
        if share > limit:
            is_above = True
            sys.stderr.write(
                f"{len(findings[habit])} {habit}, {share:.1f} in 1,000 statements; "
                f"the limit is {limit:g}\n"
            )
    return int(is_above)


if __name__ == "__main__":
    sys.exit(main())
