"""Prints the records that `gpu.sh` has written to a folder as one table.

python -m benchmarks.gpu.gpu_report OUT
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

Record = dict[str, Any]
Lines = Iterator[tuple[str, str]]
"""Pairs (name of a measurement, its figures as text)."""


def share(value: float | None) -> str:
    """Format a share of a device's peak, or "unknown"."""
    return "unknown" if value is None else f"{value:.1%}"


def extraction(record: Record) -> Lines:
    """Report the share of the device's peak that extraction uses, and where its time goes."""
    found = record["figures"]
    yield (
        "MFU",
        f"{share(found['extract_mfu'])} with writing, {share(found['forward_mfu'])} bare forward",
    )
    yield "tokens/s", f"{found['extract_tokens_per_s']:,.0f}"
    parts = {
        "forward": "forwards_and_gathering_s",
        "copy": "copies_s",
        "encode (CPU)": "encoders_cpu_s",
    }
    parts |= {"wait": "waiting_for_writer_s", "whole": "extract_s"}
    yield "seconds", ", ".join(f"{name} {median(found[key]):.2f}" for name, key in parts.items())


def training(record: Record) -> Lines:
    """Report the time of a step of each drafter, and its attention kernels."""
    for kind, found in record["steps"].items():
        if "error" in found:
            yield kind, f"FAILED: {found['error']}"
            continue
        kernels = (
            ", ".join(f"{n} x {name}" for name, n in found["attention_kernels"].items()) or "none"
        )
        way = "recomputing" if found["recomputes"] else "plain"
        peak_gb = found["peak_bytes"] / 1e9
        yield (
            kind,
            f"MFU {share(found['mfu'])}, {found['step_s']:.3f} s a step of {found['micro_batch']}, "
            f"peak {peak_gb:.1f} GB ({way}), attention: {kernels}",
        )


def codecs(record: Record) -> Lines:
    """Report the speed of each codec on each device."""
    for row in record["codecs"]:
        works = {
            "encode": "encode",
            "decode": "decode",
            "chunks": "to bytes",
            "chunks_decode": "from bytes",
        }
        speeds = {text: row.get(f"{work}_gb_per_s") for work, text in works.items()}
        shown = ", ".join(
            f"{text} {speed:.2f}" for text, speed in speeds.items() if speed is not None
        )
        yield f"{row['codec']} on {row['device']}", f"{shown} GB/s"


def decoding(record: Record) -> Lines:
    """Report the tokens per second of each shape of drafts."""
    found = record["figures"]["rounds"]
    for name, one in found.items():
        ratio = one["tokens_per_s"] / found["plain"]["tokens_per_s"]
        yield (
            name,
            f"{one['tokens_per_s']:.1f} tokens/s, {ratio:.2f} of plain, "
            f"round {one['round_ms']:.2f} ms",
        )


def sampling(record: Record) -> Lines:
    """Report the time of a draw and of verifications."""
    for name, value in record["figures"].items():
        if isinstance(value, float):
            yield name, f"{value:.3f}"


def tests(file: Path) -> str:
    """Summarize the results of the tests from pytest's report."""
    suite = ElementTree.parse(file).getroot().find("testsuite")
    assert suite is not None
    return ", ".join(
        f"{name} {suite.get(name)}" for name in ("tests", "failures", "errors", "skipped", "time")
    )


SUMMARIES: dict[str, Callable[[Record], Lines]] = {
    "extract": extraction,
    "train-step": training,
    "codec-shape": codecs,
    "sampling": sampling,
    "decode": decoding,
    "decode-graphs": decoding,
}


def main() -> None:
    """Print the table, in the order of :data:`SUMMARIES`."""
    for file in sorted(Path(sys.argv[1]).glob("*.xml")):
        print(f"{file.stem:16} {'pytest -m gpu':36} {tests(file)}")
    files = [
        (re.sub(r"-\d{4}-\d\d-\d\dT\w+$", "", file.stem), file)
        for file in Path(sys.argv[1]).glob("*.json")
    ]
    for name, file in sorted(files, key=lambda item: (list(SUMMARIES).index(item[0]), item[1])):
        for what, figures in SUMMARIES[name](json.loads(file.read_text())):
            print(f"{name:16} {what:36} {figures}")


if __name__ == "__main__":
    main()
