"""Runs the tests that need an accelerator and counts what became of them; exits as pytest does.

python -m benchmarks.gpu.gpu_tests [PATH ...] [--collect-only]
"""

import argparse
import sys
import time
from collections import Counter

import pytest

from benchmarks.kit.records import ROOT, add_out_option, settings_of, write_record


class Outcomes:
    """A plugin of pytest that counts tests by outcome; a failure to set up or tear down counts as failed."""

    def __init__(self) -> None:
        self.counts = Counter(collected=0, passed=0, failed=0, skipped=0)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests that will run."""
        self.counts["collected"] = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test when it was called, or where it did not get there."""
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1


def main() -> int:
    """Run the tests and write the record."""
    parser = argparse.ArgumentParser(description="Run the tests marked gpu.")
    parser.add_argument("paths", nargs="*", default=["tests"], help="of tests, from the root (default tests)")
    parser.add_argument("--collect-only", action="store_true", help="find the tests and run none, as without a GPU")
    add_out_option(parser)
    options = parser.parse_args()
    outcomes = Outcomes()
    words = ["-m", "gpu", "-q", "--rootdir", str(ROOT), *(str(ROOT / path) for path in options.paths)]
    began = time.perf_counter()
    status = pytest.main([*words, *(["--collect-only"] if options.collect_only else [])], plugins=[outcomes])
    figures = {**outcomes.counts, "seconds": time.perf_counter() - began, "exit_status": int(status)}
    print(write_record(options.out, "gpu-tests", {"figures": figures, "settings": settings_of(options)}))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
