"""Runs a benchmark: its options, its figures as JSON on the screen, its record, and work in alternating turns."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.kit.accelerator import synchronize
from benchmarks.kit.records import add_out_option, settings_of, write_record


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the lines of a docstring, and shows defaults."""


def parser_of(module: str, *positionals: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser that describes a module, with options by their names.

    Args:
        module: name of the module, whose docstring is the description.
        positionals: names of the arguments without dashes, in order; ``?`` at the end lets one out,
            ``+`` takes several, and ``*`` any number.
        options: the name of an option -> its default, whose type it takes; a list takes several values, a type stands
            for an option without default, and a dictionary holds the arguments of ``add_argument`` itself.
    """
    parser = argparse.ArgumentParser(description=sys.modules[module].__doc__, formatter_class=_Help)
    for name in positionals:
        parser.add_argument(name.rstrip("?*+"), nargs=name[-1] if name[-1] in "?*+" else None)
    for name, default in options.items():
        own: dict[str, Any]
        if isinstance(default, dict):
            own = default
        elif isinstance(default, type):
            own = {"type": default}
        elif isinstance(default, bool):
            own = {"action": argparse.BooleanOptionalAction if default else "store_true"}
        elif isinstance(default, list | tuple):
            own = {"nargs": "+", "default": list(default), "type": type(default[0])}
        else:
            own = {"type": type(default), "default": default}
        parser.add_argument("--" + name.replace("_", "-"), **{"help": " ", **own})
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the options; a single number of threads holds for torch from then on."""
    options = parser.parse_args()
    if isinstance(getattr(options, "threads", None), int):
        torch.set_num_threads(options.threads)
    return options


def run(
    name: str | Callable[[argparse.Namespace], str],
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    *positionals: str,
    **options: Any,
) -> dict[str, Any]:
    """Measure as the command line says; prints what was found and writes the record.

    Args:
        name: of the record, or what names it by the options.
        measure: takes the options and returns the record's contents, without settings and provenance.
        positionals: see :func:`parser_of`.
        options: likewise.
    """
    parser = parser_of(measure.__module__, *positionals, **options)
    add_out_option(parser)
    given = parsed(parser)
    document = measure(given)
    print(json.dumps(document, indent=1, default=str))
    called = name if isinstance(name, str) else name(given)
    print(write_record(given.out, called, {"settings": settings_of(given)} | document))
    return document


def in_turn(
    works: Mapping[str, Callable[[], object]],
    repeats: int,
    device: str = "cpu",
    on_the_wall: bool = False,
) -> dict[str, list[float]]:
    """Seconds of each piece of work, run one after the other ``repeats`` times after a call that is not counted.

    Seconds of the process, not of the clock on the wall, where the work is on the CPU: others may use the machine too.
    """
    clock = time.process_time if device == "cpu" and not on_the_wall else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            synchronize(device)
            started = clock()
            work()
            synchronize(device)
            if repeat:
                taken[name].append(clock() - started)
    return taken


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure over runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def quartiles(values: Sequence[float]) -> list[float]:
    """The median, and the quartiles below and above it."""
    found: list[float] = np.percentile(values, (50, 25, 75)).tolist()
    return found
