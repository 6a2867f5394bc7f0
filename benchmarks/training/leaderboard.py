"""Adds a drafter to docs/leaderboard.md, the table of all drafters for one target.

The drafter may be anything that this package can load: a run of `moa-data train`, or a folder in
the layout of another program (docs/interop.md). It decodes the first test prompts greedily with
chains of several lengths, with a chain that stops at an uncertain draft, and with a tree. Every
answer must equal the answer of plain decoding. The target's answers are also cut off at some
positions, and the drafter continues them without the target. Tokens/s are measured one prompt at a
time. Plain decoding and the drafter take turns, and the machine must be idle. A chain stops if the
probability of acceptance falls below a threshold. The threshold is chosen by tokens/s on held-out
chats of the training data. Without --held-out, it is 0.1. A drafter that is not a run needs
--tokens, --seconds and --trained, because only runs record these figures. ::

    python -m benchmarks.training.leaderboard MODEL TEST_CHATS DRAFTER --name "DSpark"
        --target gsm8k [--out OUT] [--held-out CHATS] [--tokens N --seconds S --trained "how"]
    # Write the page:
    make figures

Reports are stored in OUT, and only missing reports are measured. If OUT is also the OUT of
``drafters.py``, the acceptance lengths of its drafters are there already.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.kit.harness import parsed, parser_of
from benchmarks.kit.records import provenance
from benchmarks.training.runs import kept
from moa_data.evaluation.config import EvalConfig
from moa_data.evaluation.report import ratio_with_interval
from moa_data.evaluation.run import evaluate
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.trainer.config import REPORT_FILE

TABLE = Path(__file__).parents[1] / "results" / "leaderboard.json"
SHAPES: dict[str, dict[str, Any]] = {
    "chain5": {"method": ("plain", "chain"), "draft_length": 5},
    "chain7": {"method": ("plain", "chain"), "draft_length": 7},
    "chain10": {"method": ("plain", "chain"), "draft_length": 10},
    "tree": {"method": ("plain", "tree"), "tree": "6x8x62"},
}
"""Maps the key of each shape of drafts to its settings for decoding."""
STOPS = (0.05, 0.1, 0.2, 0.3, 0.4)
"""Candidate probabilities of acceptance below which a chain stops."""
DEFAULT_STOP = 0.1
SPEED_LENGTH, STOPPED_LENGTH = 7, 10
"""Length of the chains whose tokens/s are measured, and maximum length of chains that stop."""
ALONE_TOKENS, ALONE_CUTS = 32, 3
POSITIONS = (1, 2, 3, 5, 7, 10)
"""Positions in a chain of ten for which the table shows the share of accepted drafts."""


DECODING: dict[str, Any] = {
    "target": {"required": True}, "n_prompts": 40, "batch_size": 10, "max_new_tokens": 128,
    "speed_prompts": 12, "threads": 1, "device": "auto",
}  # fmt: skip
"""Options for decoding test prompts. The batch size does not apply to tokens/s."""


def decoded(
    options: argparse.Namespace, name: str, run: str, shape: dict[str, Any], **own: Any
) -> dict[str, Any]:
    """Return the report of decoding the test prompts. If it is missing, measure first."""
    values = {
        "model": options.model, "prompts": options.prompts, "device": options.device,
        "n_prompts": options.n_prompts, "max_new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
    } | shape | own  # fmt: skip
    config = EvalConfig.of(drafter=(run,), out=str(options.out / f"{name}.json"), **values)
    found: dict[str, Any] = kept(config, evaluate)
    wrong = [row["method"] for row in found["methods"] if row["n_exact"] != row["n_answers"]]
    if wrong:
        sys.exit(
            f"Some answers of {', '.join(wrong)} differ from those of plain decoding, so the page "
            f"was not changed. {config.out} has the details."
        )
    return found


def report_name(name: str, target: str, seed: int | None) -> str:
    """Return the beginning of the names of a drafter's reports."""
    return f"{name}-{target}-{seed}".replace(" ", "-").lower()


def lengths(report: dict[str, Any], method: str) -> list[float]:
    """Return the acceptance length of a method, and its 95 % interval over prompts."""
    names: list[str] = []
    pairs: list[tuple[float, float]] = []
    for row in report["rows"]:
        calls = row["runs"][method]["committed_per_call"]
        names.append(row["prompt_id"])
        pairs.append((float(sum(calls)), float(len(calls))))
    mean, interval = ratio_with_interval(names, pairs)
    low, high = interval or (mean, mean)
    return [float("nan") if value is None else value for value in (mean, low, high)]


def acceptance(options: argparse.Namespace, name: str, run: str) -> dict[str, list[float]]:
    """Decode the test prompts with all shapes, and return acceptance lengths by key."""
    return {
        key: lengths(decoded(options, f"{name}-{key}", run, shape), shape["method"][1])
        for key, shape in SHAPES.items()
    }


def by_position(options: argparse.Namespace, name: str, run: str) -> str:
    """Return the share of target calls that accepted the draft at a position of a chain of ten.

    The text lists the percentages of all :data:`POSITIONS`.
    """
    report = decoded(options, f"{name}-chain10", run, SHAPES["chain10"])
    (found,) = [
        row["accepted_by_position"] for row in report["methods"] if row["method"] == "chain"
    ]
    return ", ".join(
        f"{100 * found[position - 1]:.0f}" if position <= len(found) else "0"
        for position in POSITIONS
    )


def alone(options: argparse.Namespace, name: str, run: str) -> list[float]:
    """Let the drafter continue without the target where the target's answers are cut off.

    Returns the number of tokens before the first one that differs from the target's answer: the
    mean over all cuts, and its 95 % interval.
    """
    config = EvalConfig.of(
        model=options.model, prompts=options.prompts, device=options.device,
        n_prompts=options.n_prompts, batch_size=options.batch_size, drafter=(run,),
        out=str(options.out / f"{name}-alone.json"), method=("plain",), disconnect=ALONE_TOKENS,
        cuts=ALONE_CUTS,
    )  # fmt: skip
    writers = kept(config, evaluate)["disconnection"]["writers"]
    (found,) = [row["common_prefix"] for row in writers if row["writer"] != "target"]
    return [found["mean"], *(found["interval"] or (found["mean"],) * 2)]


def one_at_a_time(
    options: argparse.Namespace,
    name: str,
    run: str,
    prompts: str,
    methods: tuple[str, ...],
    stop: float,
) -> dict[str, dict[str, Any]]:
    """Decode prompts one at a time, with plain decoding and the methods in turns.

    Returns the report's row of each method.
    """
    shape = {
        "method": ("plain", *methods),
        "draft_length": SPEED_LENGTH,
        "tree": f"{STOPPED_LENGTH}@{stop:g}",
    }
    own = {"prompts": prompts, "n_prompts": options.speed_prompts, "batch_size": 1}
    report = decoded(options, name, run, shape, **own)
    return {row["method"]: row for row in report["methods"]}


def chosen_stop(options: argparse.Namespace, name: str, run: str) -> float:
    """Choose the probability of acceptance below which chains stop.

    The choice has the best tokens/s relative to plain decoding, on held-out chats of the training
    data.
    """
    if options.held_out is None:
        return DEFAULT_STOP
    found = {
        stop: one_at_a_time(
            options, f"{name}-stop-{stop:g}", run, options.held_out, ("tree",), stop
        )["tree"]["ratio"]
        for stop in STOPS
    }
    return max(found, key=lambda stop: found[stop])


def speeds(options: argparse.Namespace, name: str, run: str) -> dict[str, Any]:
    """Decode one prompt at a time.

    Returns tokens/s relative to plain decoding, and the milliseconds of a round's drafts.
    """
    stop = chosen_stop(options, name, run)
    found = one_at_a_time(options, f"{name}-speed", run, options.prompts, ("chain", "tree"), stop)
    chain, stopped = found["chain"], found["tree"]
    return {
        "speed": chain["ratio"], "draft_ms": 1000 * chain["draft_s"] / chain["n_target_calls"],
        "stop": stop, "stopped": stopped["acceptance_length"],
        "stopped_drafts": stopped["n_drafted"] / stopped["n_target_calls"],
        "stopped_speed": stopped["ratio"],
    }  # fmt: skip


def main() -> None:
    """Measure a drafter and add its row to the table.

    The row replaces an earlier one with the same name, target, tokens and seed.
    """
    words = {"trained": "", "out": Path("runs/leaderboard"), "name": {"required": True}} | DECODING
    known = {"tokens": int, "seconds": float, "commit": str, "seed": int, "held_out": str}
    options = parsed(parser_of(__name__, "model", "prompts", "drafter", **words, **known))
    options.out.mkdir(parents=True, exist_ok=True)
    report_file = Path(options.drafter) / REPORT_FILE
    report = json.loads(report_file.read_text()) if report_file.is_file() else {}
    key = report_name(options.name, options.target, options.seed)
    row = {
        "drafter": options.name, "target": options.target, "seed": options.seed,
        "weights": sum(weight.numel() for weight in load_drafter(options.drafter).parameters()),
        "tokens": options.tokens or report.get("n_tokens_total"),
        "seconds": options.seconds or report.get("cpu_s") or None,
        **acceptance(options, key, options.drafter),
        "by_position": by_position(options, key, options.drafter),
        "alone": alone(options, key, options.drafter), **speeds(options, key, options.drafter),
        "commit": (options.commit or provenance()["git_sha"] or "")[:12],
        "trained": options.trained, "command": "enter",
    }  # fmt: skip
    table = json.loads(TABLE.read_text())
    same = ("drafter", "target", "tokens", "seed")
    others = [one for one in table["rows"] if any(one[name] != row[name] for name in same)]
    table["rows"] = sorted(
        [*others, row], key=lambda one: (one["target"], -(one["tokens"] or 0), -one["chain10"][0])
    )
    TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
