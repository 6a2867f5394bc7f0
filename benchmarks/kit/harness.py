"""Runs benchmarks: parses options, runs work in turns, prints JSON figures, writes records."""

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
    """Return a parser with a module's docstring as its description.

    Args:
        module: Name of the module.
        positionals: Names of the positional arguments, in order. A name that ends with ``?`` is
            optional, ``+`` takes one or more values, and ``*`` takes any number.
        options: Maps the name of each option to its default. The option has the type of its
            default. If the default is a list, the option takes several values. If a type is given
            instead of a default, the option has no default. A dictionary holds the arguments of
            ``add_argument``.
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
    """Parse the options.

    A single number of threads is set as torch's number of threads.
    """
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
    """Parse the command line, measure, print the figures, and write the record.

    Args:
        name: Name of the record, or a function that returns the name for given options.
        measure: Function that takes the options and returns the contents of the record, without
            settings and provenance.
        positionals: See :func:`parser_of`.
        options: See :func:`parser_of`.
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
    """Return the seconds of each piece of work. The pieces take turns ``repeats`` times.

    The first turn of each piece is not counted. Work on the CPU is measured in CPU seconds of the
    process, because other processes may use the machine, too. With ``on_the_wall``, it is measured
    in wall-clock seconds.
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
    """Return the median of each figure over runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the median, the lower quartile and the upper quartile."""
    found: list[float] = np.percentile(values, (50, 25, 75)).tolist()
    return found
