"""A server under a short load of good and bad clients.

No good client is refused, no answer is wrong, and no resource leaks.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.bundle import save_target_bundle
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import build
from moa_data.tests.kit.models import write_target


@pytest.mark.slow
def test_a_short_load_of_good_and_bad_clients(tmp_path: Path) -> None:
    """Run the load script for some seconds instead of ten minutes; memory is not stable yet."""
    folder = write_target(tmp_path / "model", eos_token_id=399, max_position_embeddings=4096)
    served = Target.load(str(folder), device="cpu")
    save_target_bundle(served.model, served.tokenizer, tmp_path / "store" / "target", 0)
    save_drafter(build("moa", served.model), tmp_path / "drafter")
    command = [
        sys.executable, "-m", "benchmarks.serving.serving_load", "--model", str(folder),
        "--drafter",
        str(tmp_path / "drafter"), "--bundle", str(tmp_path / "store"), "--minutes", "0.3",
        "--out", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    (record,) = tmp_path.glob("serving-load-*.json")
    figures = json.loads(record.read_text())["figures"]
    assert figures["n_wrong"] == figures["n_refused"] == figures["n_held_at_the_end"] == 0, figures
    assert figures["answers_afterwards"]
    assert figures["memory"]["after_mib"] < figures["memory"]["before_mib"] + 64
    assert (
        min(
            figures["counts"][role]
            for role in ("draft", "stream", "ask", "ask_health", "leave_in_body")
        )
        > 0
    )
