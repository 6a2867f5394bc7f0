"""Run the phases of the demo: corpus, target, extract, train, eval and serve.

With a pretrained model, the phase ``target`` is skipped, and the model writes the corpus. The file
``demo.json`` in the demo's folder contains the settings, and the duration and results of each
finished phase. If the demo is run again, it takes these results from the file and does not repeat
the phases. An interrupted phase is resumed by the command that it runs: ``regenerate``, ``extract``
or ``train``.
"""

import importlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import resolve
from ..errors import Interrupted, OutputOccupied
from ..files import PARTIAL_SUFFIX, refuse_other_files, refuse_other_inputs, write_atomic
from ..moa.drafters.advice import FAST_KIND, advise
from ..pipeline.config import (
    DataSettings,
    ExtractConfig,
    ForwardSettings,
    QuestionSettings,
    RegenerateConfig,
)
from ..pipeline.dataset import read_jsonl
from ..storage.read.verify import summarize_store
from ..text import SILENT, Progress, format_hours
from ..trainer.config import LAST, PRESETS, TrainConfig
from .config import DemoConfig
from .corpus import Corpus, generate_corpus, opening, write_jsonl
from .model import SMOLLM2, find_model

# Name of a result of a finished phase -> the result. The results can be written as JSON.
Facts = dict[str, Any]

STATE_FILE = "demo.json"
MODEL_SECONDS = {"corpus": 300.0, "extract": 70.0, "train": 250.0, "eval": 150.0, "serve": 60.0}
"""Phase -> the seconds that this phase takes with smollm2 on two idle cores at 2.5 GHz."""
# The phase ``serve`` uses the prompt with the longest answer. To find this prompt, a pretrained
# model answers this number of prompts. The number is low, because pretrained models are slow.
_SERVED_PROMPTS = 4


@dataclass(frozen=True)
class DemoReport:
    """The results of a finished demo, by phase."""

    folder: Path
    phases: dict[str, Facts]
    reused: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return the report as text for the terminal."""
        store = self.phases["extract"]
        measured = self.phases["eval"]
        served = self.phases["serve"]
        same = "SOME ANSWERS DIFFER from plain decoding"
        if measured["n_exact"] == measured["n_answers"] and served["is_equal"]:
            same = "every answer is identical to plain greedy decoding"
        times: list[str] = []
        for phase, facts in self.phases.items():
            times.append(f"{phase} {facts['seconds']:.0f} s")
        reused = f" (reused: {', '.join(self.reused)})" if self.reused else ""
        total_s = sum(facts["seconds"] for facts in self.phases.values())
        pictures = ", ".join(str(path) for path in sorted(self.folder.rglob("*.png")))
        break_even: list[str] = []
        for line in measured.get("break_even", ()):
            break_even.append(f"             {line[2:]}")
        return "\n".join((
            *self._choices(),
            f"acceptance   {measured['acceptance_length']:.2f} tokens per target call, bonus token "
            f"included; {same}",
            f"speed        {measured['ratio']:.2f} x plain decoding on this machine",
            *break_even,
            f"network cut  {served['n_alone']} tokens written without the network, "
            f"{served['n_rolled_back']} taken back when it returned",
            f"store        {store['bytes_per_token']:,.0f} bytes per token, {store['ratio']:.3f} "
            "of the uncompressed size",
            f"time         {total_s:.0f} s: {', '.join(times)}{reused}",
            f"pictures     {pictures}",
        ))  # fmt: skip

    def _choices(self) -> list[str]:
        """Return lines of text about the chats and the drafter of a demo with a pretrained model.

        The list is empty for a demo with its own tiny target.
        """
        chats = self.phases.get("corpus", {})
        if "n_answer_tokens" not in chats:
            return []
        drafter, *_ = advise(self.phases["extract"]["n_tokens"], is_on_cpu=True)
        return [
            f"chats        {chats['n_chats']:,} for training and {chats['n_held_out']:,} for the "
            "evaluation, with questions and answers that the model wrote itself "
            f"({chats['n_answer_tokens']:,} tokens of answers)",
            f"drafter      eagle on hidden:last: {drafter.reason}",
        ]


def run_demo(
    config: DemoConfig, progress: Progress = SILENT, provenance: dict[str, Any] | None = None
) -> DemoReport:
    """Run the phases of the demo that are not finished yet.

    Raises:
        OutputOccupied: the folder holds other files, or a demo with other settings.
    """
    folder = Path(config.out)
    phases = {
        "corpus": _corpus, "target": _target, "extract": _extract, "train": _train,
        "eval": _evaluate, "serve": _serve,
    }  # fmt: skip
    if config.model is not None:
        # If the pretrained model is not installed, this line raises an error before anything is
        # written.
        find_model(config.model)
        del phases["target"]
    finished = _open(config, folder)
    reused = tuple(finished)
    for name, phase in phases.items():
        if name in finished:
            continue
        began_s = time.perf_counter()
        noted = progress
        if config.model is not None:
            noted = _with_estimate(progress, name, config.model, finished)
        try:
            facts = phase(config, folder, noted, provenance or {})
        except (KeyboardInterrupt, Interrupted) as error:
            progress_note = f"The finished phases ({', '.join(finished) or 'none yet'}) are kept"
            raise Interrupted(
                f"interrupted in the phase {name}. {progress_note}; run the same command again."
            ) from error
        finished[name] = {"seconds": time.perf_counter() - began_s, **facts}
        _save(config, folder, finished)
    return DemoReport(folder, finished, reused)


def _with_estimate(
    progress: Progress, name: str, model: str, finished: dict[str, Facts]
) -> Progress:
    """Return a progress reporter that also shows how long all later phases will take.

    The estimate is the sum of ``MODEL_SECONDS`` over the later phases. It is scaled by the speed of
    the finished phases. In the first phase, this speed is unknown. Then an estimate is shown only
    for smollm2, because ``MODEL_SECONDS`` were measured with smollm2.

    Args:
        progress: shows the progress of the current phase.
        name: the current phase.
        model: name of the model.
        finished: the results of the finished phases.
    """
    names = list(MODEL_SECONDS)
    number = names.index(name) + 1
    note = f"phase {number} of {len(names)}"
    slowness = 1.0
    if finished:
        finished_s = sum(facts["seconds"] for facts in finished.values())
        slowness = finished_s / sum(MODEL_SECONDS[done] for done in finished)
    if number < len(names) and (finished or model == SMOLLM2):
        rest_s = slowness * sum(list(MODEL_SECONDS.values())[number:])
        note += f", then about {format_hours(rest_s)} more"

    def show(current: Progress, n_done: int, total: int, text: str) -> None:
        noted = progress.of(current.phase, current.unit)
        noted(n_done, total, f"{text} [{note}]".lstrip())

    return Progress(show)


def _save(config: DemoConfig, folder: Path, finished: dict[str, Facts]) -> None:
    state = {"settings": config.model_dump(mode="json", exclude={"out"}), "phases": finished}
    write_atomic(folder / STATE_FILE, (json.dumps(state, indent=1) + "\n").encode())


def _open(config: DemoConfig, folder: Path) -> dict[str, Facts]:
    """Create the folder of a demo, or open the folder of an earlier run.

    Returns:
        The results of the finished phases, by phase.

    Raises:
        OutputOccupied: the folder holds other files, or a demo with other settings. The folder is
            not changed.
    """
    file = folder / STATE_FILE
    settings = config.model_dump(mode="json", exclude={"out"})
    if not file.is_file():
        # The state of the demo is first written to a temporary file. If the demo is killed while it
        # starts, its folder contains only this file. So accept a folder with this file.
        leftovers = {STATE_FILE + PARTIAL_SUFFIX}
        refuse_other_files(folder, f"the folder of a demo ({STATE_FILE} is missing)", leftovers)
        folder.mkdir(parents=True, exist_ok=True)
        _save(config, folder, {})
        return {}
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        before, finished = dict(state["settings"]), dict(state["phases"])
    except (KeyError, TypeError, ValueError) as error:
        raise OutputOccupied(
            f"{file}, the state of an earlier demo, cannot be read ({error}). Delete {folder}, or "
            "choose another `out`."
        ) from error
    refuse_other_inputs(folder, before, settings)
    return finished


def _corpus(
    config: DemoConfig, folder: Path, progress: Progress, provenance: dict[str, Any]
) -> Facts:
    # Only later phases use these modules. Import them now, so that a missing package is found
    # before anything is written.
    for stage in ("target", "serving"):
        importlib.import_module(f"{__package__}.{stage}")
    (folder / "corpus").mkdir(exist_ok=True)
    facts: Facts = {}
    if config.model is None:
        corpus = generate_corpus(config.n_chats, config.n_held_out, config.seed)
        progress.of("corpus", "chat")(config.n_chats, config.n_chats)
    else:
        corpus, n_answer_tokens = _own_corpus(config, folder, progress)
        facts = {
            "n_chats": len(corpus.train),
            "n_held_out": len(corpus.held_out),
            "n_answer_tokens": n_answer_tokens,
        }
    write_jsonl(corpus.held_out, _held_out(folder))
    write_jsonl(corpus.train, folder / "corpus" / "train.jsonl")
    return facts


def _own_corpus(config: DemoConfig, folder: Path, progress: Progress) -> tuple[Corpus, int]:
    """Let the pretrained model write questions and their answers.

    The first chats are held out: the drafter is not trained on them, and the evaluation takes its
    prompts from them.

    Returns:
        The chats, and the number of tokens of all answers.
    """
    from ..pipeline.regenerate import regenerate

    settings = RegenerateConfig(
        model=_target_name(config, folder),
        self_prompted=config.n_held_out + config.n_chats,
        out=str(folder / "corpus" / "own.jsonl"),
        max_new_tokens=config.max_new_tokens,
        batch_size=2 * config.drafter_batch_size,
        device="cpu",
        questions=QuestionSettings(max_rejected_fraction=0.5),
    )
    chat_file = regenerate(settings, progress)
    rows = [*read_jsonl(chat_file.path)]
    held_out = rows[: config.n_held_out]
    questions = {opening(row["messages"]).casefold() for row in held_out}
    train: list[dict[str, Any]] = []
    for row in rows[len(held_out) :]:
        if opening(row["messages"]).casefold() not in questions:
            train.append(row)
    return Corpus(train, held_out), chat_file.counts.n_tokens


def _target_name(config: DemoConfig, folder: Path) -> str:
    return str(folder / "target") if config.model is None else find_model(config.model)


def _held_out(folder: Path) -> Path:
    return folder / "corpus" / "held_out.jsonl"


def _target(
    config: DemoConfig, folder: Path, progress: Progress, provenance: dict[str, Any]
) -> Facts:
    # Importing torch and transformers takes seconds. So import the module of a phase only when the
    # phase runs.
    from .target import train_target

    return train_target(
        [*read_jsonl(folder / "corpus" / "train.jsonl")], config, folder / "target", progress
    )


def _extract(
    config: DemoConfig, folder: Path, progress: Progress, provenance: dict[str, Any]
) -> Facts:
    from ..pipeline.extract import extract

    settings = ExtractConfig(
        model=_target_name(config, folder),
        dataset=str(folder / "corpus" / "train.jsonl"),
        out=str(folder / "store"),
        activations=config.activations,
        data=DataSettings(max_sequences=config.n_store_chats if config.model is None else None),
        forward=ForwardSettings(device="cpu"),
    )
    extract(settings, progress=progress, provenance=provenance)
    summary = summarize_store(folder / "store")
    return {
        "n_tokens": summary.n_tokens,
        "bytes_per_token": summary.bytes_per_token,
        "ratio": summary.ratio,
    }


def _train(
    config: DemoConfig, folder: Path, progress: Progress, provenance: dict[str, Any]
) -> Facts:
    from ..trainer.fit import train

    out = folder / "drafter"
    every = max(1, config.drafter_steps // 4)
    settings = {
        "store": str(folder / "store"),
        "out": str(out),
        "drafter": {} if config.model is None else {"kind": FAST_KIND},
        "schedule": {"max_steps": config.drafter_steps},
        "data": {"batch_size": config.drafter_batch_size},
        "optimizer": {"learning_rate": config.drafter_learning_rate},
        "validation": {"validate_every": every, "draft_length": config.draft_length},
        "record": {"checkpoint_every": every},
        "machine": {"accelerator": "cpu", "devices": "1"},
        "seed": config.seed,
        "resume": (out / LAST).is_file(),
    }
    train_config = resolve(TrainConfig, settings | {"preset": "small"}, presets=PRESETS)
    report = train(train_config, progress, provenance)
    return {"n_parameters": report.n_parameters, "n_tokens": report.n_tokens_total}


def _evaluate(
    config: DemoConfig, folder: Path, progress: Progress, provenance: dict[str, Any]
) -> Facts:
    from ..evaluation.config import EvalConfig
    from ..evaluation.run import evaluate
    from ..evaluation.views import break_even_lines

    (folder / "eval").mkdir(exist_ok=True)
    settings = EvalConfig(
        model=_target_name(config, folder),
        prompts=str(_held_out(folder)),
        drafter=(str(folder / "drafter"),),
        method=("plain", "chain") if config.model is None else ("plain", "chain", "auto"),
        out=str(folder / "eval" / "report.json"),
        n_prompts=config.n_eval_prompts,
        max_new_tokens=config.max_new_tokens,
        draft_length=config.draft_length,
        device="cpu",
    )
    report = evaluate(settings, progress=progress, provenance=provenance)
    chain = report.method("chain")
    facts: Facts = {
        "acceptance_length": chain.acceptance_length or 0.0,
        "ratio": chain.ratio,
        "calls_saved": chain.calls_saved,
        "n_exact": chain.n_exact,
        "n_answers": chain.n_answers,
    }
    if config.model is not None:
        facts["break_even"] = break_even_lines(report)
    return facts


def _serve(
    config: DemoConfig, folder: Path, progress: Progress, provenance: dict[str, Any]
) -> Facts:
    from .serving import answer_through_a_cut

    # A pretrained model is slower than the tiny target, so it answers fewer prompts.
    n_prompts = config.n_eval_prompts if config.model is None else _SERVED_PROMPTS
    rows = [*read_jsonl(_held_out(folder))][:n_prompts]
    progress.of("serve, and cut the network", "answer")(0, 1)
    # Leave out the last message of each chat, which is the reference answer.
    prompts = [row["messages"][:-1] for row in rows]
    # The server loads the target. The client needs only the target's frozen weights, which it reads
    # from the store.
    return answer_through_a_cut(
        folder, _target_name(config, folder), prompts, config.max_new_tokens
    )
