"""The demo: corpus -> target -> extract -> train -> eval -> serve, each phase kept once it is finished.

``demo.json`` in its folder holds the settings, and for each finished phase its seconds and figures.
"""

import importlib
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Interrupted, OptionInvalid
from ..files import PARTIAL_SUFFIX, write_atomic
from ..pipeline.config import DataSettings, ExtractConfig, ForwardSettings
from ..pipeline.dataset import read_jsonl
from ..storage.read.verify import summarize_store
from ..text import Progress
from ..trainer.config import LAST, PRESETS, TrainConfig
from .config import DemoConfig
from .corpus import generate_corpus, write_jsonl

STATE_FILE = "demo.json"
_OURS = {STATE_FILE + PARTIAL_SUFFIX}  # left by a kill before the first phase
PHASES = ("corpus", "target", "extract", "train", "eval", "serve")


@dataclass(frozen=True)
class DemoReport:
    """Figures of a finished demo, by phase."""

    folder: Path
    phases: dict[str, dict[str, Any]]
    reused: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return the report as lines for people."""
        store, measured, served = (self.phases[phase] for phase in ("extract", "eval", "serve"))
        same = "SOME ANSWERS DIFFER from plain decoding"
        if measured["n_exact"] == measured["n_answers"] and served["is_equal"]:
            same = "every answer is identical to plain greedy decoding"
        times = ", ".join(f"{phase} {facts['seconds']:.0f} s" for phase, facts in self.phases.items())
        reused = f" (reused: {', '.join(self.reused)})" if self.reused else ""
        total_s = sum(facts["seconds"] for facts in self.phases.values())
        return "\n".join((
            f"acceptance   {measured['acceptance_length']:.2f} tokens per target call, bonus token included; {same}",
            f"speed        {measured['ratio']:.2f} x plain decoding on this machine",
            f"network cut  {served['n_alone']} tokens written alone, {served['n_rolled_back']} taken back when it "
            "returned",
            f"store        {store['bytes_per_token']:,.0f} bytes per token, {store['ratio']:.3f} of raw",
            f"time         {total_s:.0f} s: {times}{reused}",
            f"pictures     {self.folder}/serving.png, drafter/curves.png and eval/report.png beside it",
        ))  # fmt: skip


def run_demo(
    config: DemoConfig, progress: Progress | None = None, provenance: dict[str, Any] | None = None
) -> DemoReport:
    """Run the demo, or what is left of it; OptionInvalid where the folder holds something else."""
    folder = Path(config.out)
    finished = _open(config, folder)
    reused = tuple(finished)
    phases = (_corpus, _target, _extract, _train, _evaluate, _serve)
    for name, phase in zip(PHASES, phases, strict=True):
        if name in finished:
            continue
        began_s = time.perf_counter()
        try:
            facts = phase(config, folder, progress or (lambda *_: None), provenance or {})
        except (KeyboardInterrupt, Interrupted) as error:
            kept = f"finished phases are kept ({', '.join(finished) or 'none yet'})"
            raise Interrupted(f"interrupted in the {name} phase; run the same command again, {kept}") from error
        finished[name] = {"seconds": time.perf_counter() - began_s, **facts}
        _save(config, folder, finished)
    return DemoReport(folder, finished, reused)


def _save(config: DemoConfig, folder: Path, finished: dict[str, dict[str, Any]]) -> None:
    state = {"settings": config.model_dump(mode="json", exclude={"out"}), "phases": finished}
    write_atomic(folder / STATE_FILE, (json.dumps(state, indent=1) + "\n").encode())


def _open(config: DemoConfig, folder: Path) -> dict[str, dict[str, Any]]:
    """Begin a demo's folder, or return its finished phases; anything else is refused and left as it is."""
    file, settings = folder / STATE_FILE, config.model_dump(mode="json", exclude={"out"})
    if not file.is_file():
        is_free = not folder.exists() or (folder.is_dir() and not {entry.name for entry in folder.iterdir()} - _OURS)
        if not is_free:
            raise OptionInvalid(f"{folder} exists and holds no demo ({STATE_FILE} is missing). Choose another --out.")
        folder.mkdir(parents=True, exist_ok=True)
        _save(config, folder, {})
        return {}
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        before, finished = dict(state["settings"]), dict(state["phases"])
    except (KeyError, TypeError, ValueError) as error:
        raise OptionInvalid(f"{file} cannot be read ({error}). Delete {folder}, or choose another --out.") from error
    changed = [
        f"{name} is {now!r}, was {before.get(name)!r}" for name, now in settings.items() if now != before.get(name)
    ]
    if changed:
        raise OptionInvalid(f"{folder} holds a demo with other settings: {'; '.join(changed)}. Choose another --out.")
    return finished


def _corpus(config: DemoConfig, folder: Path, progress: Progress, provenance: dict[str, Any]) -> dict[str, Any]:
    for stage in ("target", "serving"):  # which need every package: before anything is written
        importlib.import_module(f"{__package__}.{stage}")
    corpus = generate_corpus(config.n_chats, config.n_held_out, config.seed)
    (folder / "corpus").mkdir(exist_ok=True)
    write_jsonl(corpus.held_out, _held_out(folder))
    write_jsonl(corpus.train, folder / "corpus" / "train.jsonl")
    progress(config.n_chats, config.n_chats, "corpus")
    return {}


def _held_out(folder: Path) -> Path:
    return folder / "corpus" / "held_out.jsonl"


def _target(config: DemoConfig, folder: Path, progress: Progress, provenance: dict[str, Any]) -> dict[str, Any]:
    # The stages are imported where they run: torch and transformers take seconds.
    from .target import train_target

    return train_target([*read_jsonl(folder / "corpus" / "train.jsonl")], config, folder / "target", progress)


def _extract(config: DemoConfig, folder: Path, progress: Progress, provenance: dict[str, Any]) -> dict[str, Any]:
    from ..pipeline.extract import extract

    settings = ExtractConfig(
        model=str(folder / "target"),
        dataset=str(folder / "corpus" / "train.jsonl"),
        out=str(folder / "store"),
        activations=config.activations,
        data=DataSettings(max_sequences=config.n_store_chats),
        forward=ForwardSettings(device="cpu"),
    )
    # Continues by itself from what an interrupted phase has left, as training does.
    extract(settings, progress=progress, provenance=provenance)
    summary = summarize_store(folder / "store")
    return {"n_tokens": summary.n_tokens, "bytes_per_token": summary.bytes_per_token, "ratio": summary.ratio}


def _train(config: DemoConfig, folder: Path, progress: Progress, provenance: dict[str, Any]) -> dict[str, Any]:
    from ..trainer.fit import train

    out, every = folder / "drafter", max(1, config.drafter_steps // 4)
    can_resume = (out / LAST).is_file()  # an interrupted phase has left it
    if out.exists() and not can_resume:
        shutil.rmtree(out)  # stopped before its first checkpoint: nothing to keep
    own = {
        "store": str(folder / "store"),
        "out": str(out),
        "schedule": {"max_steps": config.drafter_steps},
        "data": {"batch_size": config.drafter_batch_size},
        "optimizer": {"learning_rate": config.drafter_learning_rate},
        "validation": {"validate_every": every, "draft_length": config.draft_length},
        "record": {"checkpoint_every": every},
        "machine": {"accelerator": "cpu", "devices": "1"},
        "seed": config.seed,
        "resume": can_resume,
    }
    report = train(TrainConfig.merged([("", PRESETS["small"]), ("", own)]), progress, provenance)
    return {"n_parameters": report.n_parameters, "n_tokens": report.n_tokens_total}


def _evaluate(config: DemoConfig, folder: Path, progress: Progress, provenance: dict[str, Any]) -> dict[str, Any]:
    from ..evaluation.config import EvalConfig
    from ..evaluation.run import evaluate

    (folder / "eval").mkdir(exist_ok=True)
    settings = EvalConfig(
        model=str(folder / "target"),
        prompts=str(_held_out(folder)),
        drafter=(str(folder / "drafter"),),
        method=("plain", "chain"),
        out=str(folder / "eval" / "report.json"),
        n_prompts=config.n_eval_prompts,
        max_new_tokens=config.max_new_tokens,
        draft_length=config.draft_length,
        device="cpu",
    )
    chain = evaluate(settings, progress=progress, provenance=provenance).method("chain")
    names = ("ratio", "calls_saved", "n_exact", "n_answers")
    return {"acceptance_length": chain.acceptance_length or 0.0} | {name: getattr(chain, name) for name in names}


def _serve(config: DemoConfig, folder: Path, progress: Progress, provenance: dict[str, Any]) -> dict[str, Any]:
    from .serving import answer_through_a_cut

    # The client needs no more than the store's frozen weights, and the server no more than the target.
    rows = [*read_jsonl(_held_out(folder))][: config.n_eval_prompts]
    progress(0, 1, "serve, and cut the network")
    prompts = [row["messages"][:-1] for row in rows]  # without the reference answer
    return answer_through_a_cut(folder, prompts, config.max_new_tokens)
