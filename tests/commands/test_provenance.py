"""Outputs name the commit that made them."""

import subprocess
from pathlib import Path

import pytest

from moa_data.commands.provenance import collect_provenance

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_commit_is_that_of_the_checkout() -> None:
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert collect_provenance()["git_sha"] == head.stdout.strip()
