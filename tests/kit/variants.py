"""Chooses the variants of a test that run by default. The others are slow tests."""

from collections.abc import Iterable
from typing import Any

import pytest

from .models import FAMILIES


def quick(names: Iterable[Any], by_default: Iterable[Any]) -> list[Any]:
    """Return all names for ``parametrize``, and mark those as slow that do not run by default.

    Raises:
        ValueError: a default is not one of the names.
    """
    names, chosen = list(names), list(by_default)
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(f"{unknown} are none of {names}")
    return [
        name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names
    ]


def quick_rows(rows: Iterable[tuple[Any, ...]], by_default: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Do the same as :func:`quick` for several parameters. A row has a value of each parameter."""
    rows, chosen = list(rows), list(by_default)
    if unknown := [row for row in chosen if row not in rows]:
        raise ValueError(f"{unknown} are none of {rows}")
    return [row if row in chosen else pytest.param(*row, marks=pytest.mark.slow) for row in rows]


QUICK_FAMILIES = quick(FAMILIES, ("llama", "qwen3", "qwen2-mixed"))
"""All families of targets as parameters.

By default these run: a plain family, one with norms of queries and keys, and one with biases and a
sliding window.
"""
