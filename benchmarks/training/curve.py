"""Fits acceptance length against training tokens on short runs, and predicts it for longer ones.

Runs report the expected acceptance length on held-out training chats. The curve ``a - b * tokens **
-c`` (tokens in millions) is fitted to the runs with at most ``--up-to`` tokens. Runs with the same
number of steps are averaged. Test prompts are not used. ::

    python -m benchmarks.training.curve OUT/96/run-moa-1-0 OUT/192/run-moa-1-0
        OUT/5392/run-moa-0.5-0 ... [--up-to 1e6]

Each run must have completed its own schedule. A point in the middle of a longer run is not on the
curve, because its learning rate is still high.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.kit.harness import run
from moa_data.trainer.config import REPORT_FILE

POWERS = np.geomspace(0.05, 4, 400)
"""Candidate values of c."""

Numbers = NDArray[np.float64]


def fit(tokens: Numbers, lengths: Numbers) -> tuple[float, float, float]:
    """Fit ``a - b * tokens ** -c`` by least squares, and return a, b and c."""
    found = []
    for power in POWERS:
        terms = np.stack([np.ones_like(tokens), -(tokens**-power)], axis=1)
        (a, b), *_ = np.linalg.lstsq(terms, lengths, rcond=None)
        found.append(
            (float(((terms @ (a, b) - lengths) ** 2).sum()), float(a), float(b), float(power))
        )
    return min(found)[1:]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Fit the runs, and compare the predictions with the results of longer runs."""
    by_steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for folder in options.runs:
        report = json.loads((Path(folder) / REPORT_FILE).read_text())
        by_steps[report["n_steps"]].append(report)
    n_runs = [len(by_steps[one]) for one in sorted(by_steps)]
    tokens, lengths = (
        np.array(
            [float(np.mean([report[key] for report in by_steps[one]])) for one in sorted(by_steps)]
        )
        for key in ("n_tokens_total", "best_expected_acceptance_length")
    )
    tokens /= 1e6
    fitted = tokens <= options.up_to / 1e6
    a, b, c = fit(tokens[fitted], lengths[fitted])
    predicted = a - b * tokens**-c
    columns = zip(
        tokens.tolist(), n_runs, lengths.tolist(), fitted.tolist(), predicted.tolist(), strict=True
    )
    names = ("tokens_m", "n_runs", "length", "is_fitted", "predicted")
    rows = [dict(zip(names, one, strict=True)) for one in columns]
    return {"a": a, "b": b, "c": c, "rows": rows}


if __name__ == "__main__":
    run("curve", measure, "runs+", up_to=1e6)
