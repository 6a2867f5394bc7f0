"""Chooses which variants of a test run by default; the others are slow tests."""

from collections.abc import Iterable
from typing import Any

import pytest

from .models import FAMILIES


def quick(names: Iterable[Any], by_default: Iterable[Any]) -> list[Any]:
    """Return all names for ``parametrize``; those that are not run by default are marked slow.

    Raises:
        ValueError: a default is no name.
    """
    names, chosen = list(names), list(by_default)
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(f"{unknown} are none of {names}")
    return [
        name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names
    ]


QUICK_FAMILIES = quick(FAMILIES, ("llama", "qwen3", "qwen2-mixed"))
"""All families of targets: by default a plain one, one with norms of queries and keys, one with biases and a window."""
