"""The demo: corpus -> target -> extract -> train -> eval -> serve -> report, each phase kept once it is finished."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Interrupted
from ..pipeline.config import DataSettings, ExtractConfig, ForwardSettings
from ..storage.names import COMMITS_NAME
from ..text import Progress
from ..trainer.config import LAST, PRESETS, TrainConfig
from .config import DemoConfig
from .corpus import HELD_OUT_FILE, TRAIN_FILE, corpus_stats, generate_corpus, read_jsonl, write_jsonl
from .state import FIGURES, PHASES, REPORT_FILE, DemoState


@dataclass(frozen=True)
class DemoReport:
    """Figures of a finished demo.

    Attributes:
        acceptance_length: Tokens committed per target call, bonus token included.
        speedup: Tokens per second with the drafter over tokens per second without.
        identical: Whether every answer equalled plain greedy decoding, the served one included.
        n_alone: Tokens that the client wrote while it had no network.
        n_rolled_back: How many of these were taken back.
        stored_share: Stored bytes over raw bytes.
        seconds: Seconds of each phase, in order; reused phases count what they took when they ran.
    """

    folder: Path
    report: Path
    acceptance_length: float
    speedup: float
    identical: bool
    n_alone: int
    n_rolled_back: int
    bytes_per_token: float
    stored_share: float
    seconds: dict[str, float]
    reused: tuple[str, ...]

    def describe(self) -> str:
        """Return the report as lines for people."""
        times = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in self.seconds.items())
        reused = f" (reused: {', '.join(self.reused)})" if self.reused else ""
        same = (
            "every answer is identical to plain greedy decoding"
            if self.identical
            else "SOME ANSWERS DIFFER from plain decoding"
        )
        return "\n".join((
            f"acceptance   {self.acceptance_length:.2f} tokens per target call, bonus token included; {same}",
            f"speed        {self.speedup:.2f} x plain decoding on this machine",
            f"network cut  {self.n_alone} tokens written alone, {self.n_rolled_back} taken back when it returned",
            f"store        {self.bytes_per_token:,.0f} bytes per token, {self.stored_share:.3f} of raw",
            f"time         {sum(self.seconds.values()):.0f} s: {times}{reused}",
            f"report       {self.report}",
        ))  # fmt: skip


class _Run:
    """The phases of one demo, over one folder."""

    def __init__(self, config: DemoConfig, progress: Progress | None, provenance: dict[str, Any] | None) -> None:
        self.config = config
        self.state = DemoState.open(config)
        self.folder = self.state.folder
        self.progress = progress
        self.provenance = provenance or {}
        self.corpus = self.folder / "corpus"
        self.target = self.folder / "target"
        self.store = self.folder / "store"
        self.drafter = self.folder / "drafter"
        self.evaluation = self.folder / "eval" / "report.json"

    def run_corpus(self) -> dict[str, Any]:
        """Generate training and held-out chats; the held-out ones are the evaluation's prompts."""
        config = self.config
        corpus = generate_corpus(config.corpus.n_chats, config.corpus.n_held_out, config.seed)
        self.corpus.mkdir(exist_ok=True)
        write_jsonl(corpus.held_out, self.corpus / HELD_OUT_FILE)
        write_jsonl(corpus.train, self.corpus / TRAIN_FILE)
        if self.progress is not None:
            self.progress(config.corpus.n_chats, config.corpus.n_chats, "corpus")
        return {"train": corpus_stats(corpus.train).to_dict(), "held_out": corpus_stats(corpus.held_out).to_dict()}

    def run_target(self) -> dict[str, Any]:
        """Train tokenizer and target."""
        from .target import train_target

        train, held_out = read_jsonl(self.corpus / TRAIN_FILE), read_jsonl(self.corpus / HELD_OUT_FILE)
        report = train_target(train, held_out, self.config, self.target, self.progress)
        return {"validation_loss": report.validation_loss[-1][1], "validation_accuracy": report.validation_accuracy}

    def run_extract(self) -> dict[str, Any]:
        """Run the target over the chats and store its activations; committed parts are kept."""
        from ..pipeline.extract import extract

        report = extract(self.extract_config(), progress=self.progress, provenance=self.provenance)
        timings = report.timings
        return {"tokens_per_s": timings.tokens_per_s, "forward_s": timings.forward_s, "extract_s": timings.extract_s}

    def extract_config(self) -> ExtractConfig:
        """Return the settings of the extraction."""
        return ExtractConfig(
            model=str(self.target),
            dataset=str(self.corpus / TRAIN_FILE),
            out=str(self.store),
            activations=self.config.activations,
            data=DataSettings(max_sequences=self.config.corpus.n_store_chats),
            forward=ForwardSettings(device="cpu"),
        )

    def run_train(self) -> dict[str, Any]:
        """Train the drafter from the store; an interrupted run goes on from its last checkpoint."""
        from ..trainer.fit import train

        can_resume = (self.drafter / LAST).is_file()
        if self.drafter.exists() and not can_resume:
            shutil.rmtree(self.drafter)  # stopped before its first checkpoint: nothing to keep
        report = train(self.train_config(can_resume), progress=self.progress, provenance=self.provenance)
        return {
            "tokens_per_s": report.tokens_per_s,
            "data_wait_share": report.data_wait_share,
            "n_parameters": report.n_parameters,
            "expected_acceptance_length": report.best_expected_acceptance_length,
        }

    def train_config(self, resume: bool) -> TrainConfig:
        """Return the settings of the drafter's training."""
        config, every = self.config, max(1, self.config.drafter.drafter_steps // 4)
        own = {
            "store": str(self.store),
            "out": str(self.drafter),
            "schedule": {"max_steps": config.drafter.drafter_steps},
            "data": {"batch_size": config.drafter.drafter_batch_size},
            "optimizer": {"learning_rate": config.drafter.drafter_learning_rate},
            "validation": {"validate_every": every, "draft_length": config.evaluation.draft_length},
            "record": {"checkpoint_every": every},
            "machine": {"accelerator": "cpu", "devices": "1"},
            "seed": config.seed,
            "resume": resume,
        }
        return TrainConfig.merged([("", PRESETS["small"]), ("", own)])

    def run_eval(self) -> dict[str, Any]:
        """Decode held-out prompts with and without the drafter."""
        from ..evaluation.config import EvalConfig
        from ..evaluation.run import evaluate

        self.evaluation.parent.mkdir(exist_ok=True)
        config = EvalConfig(
            model=str(self.target),
            prompts=str(self.corpus / HELD_OUT_FILE),
            drafter=(str(self.drafter),),
            method=("plain", "chain"),
            out=str(self.evaluation),
            n_prompts=self.config.evaluation.n_eval_prompts,
            max_new_tokens=self.config.evaluation.max_new_tokens,
            draft_length=self.config.evaluation.draft_length,
            device="cpu",
        )
        report = evaluate(config, progress=self.progress, provenance=self.provenance)
        plain, chain = report.method("plain"), report.method("chain")
        return {
            "acceptance_length": chain.acceptance_length or 0.0,
            "ratio": chain.ratio,
            "plain_tokens_per_s": plain.tokens_per_s,
            "chain_tokens_per_s": chain.tokens_per_s,
            "calls_saved": chain.calls_saved,
            "n_exact": chain.n_exact,
            "n_answers": chain.n_answers,
        }

    def run_serve(self) -> dict[str, Any]:
        """Serve the target, and answer a held-out prompt through a network that is cut on the way."""
        from .figures import answer_over_time
        from .serving import answer_through_a_cut

        rows: list[dict[str, Any]] = read_jsonl(self.corpus / HELD_OUT_FILE)[: self.config.evaluation.n_eval_prompts]
        if self.progress is not None:
            self.progress(0, 1, "serve, and cut the network")
        answered = answer_through_a_cut(
            self.target, self.store, self.drafter, [row["messages"][:-1] for row in rows],
            self.config.evaluation.max_new_tokens,
        )  # fmt: skip
        pictures = self.folder / FIGURES
        pictures.mkdir(exist_ok=True)
        answer_over_time(answered.timeline, pictures / "serving.png")
        return {
            "is_equal": answered.is_equal,
            "n_tokens": answered.n_tokens,
            "n_alone": answered.n_alone,
            "n_rolled_back": answered.timeline.n_rolled_back,
            "n_target_calls": answered.n_target_calls,
            "answer_s": answered.seconds,
        }

    def run_report(self) -> dict[str, Any]:
        """Write the Markdown report and its pictures."""
        from .report import write_report

        summary = write_report(self.folder, self.config, self.state, self.provenance)
        return {"bytes_per_token": summary.bytes_per_token, "stored_share": summary.ratio}

    def kept(self) -> str:
        """Say what an interruption leaves for the next run."""
        finished = [phase for phase in PHASES if self.state.is_done(phase)]
        text = f"finished phases are kept ({', '.join(finished) or 'none yet'})"
        n_parts = len(list((self.store / COMMITS_NAME).glob("part-*.json")))
        if "extract" not in finished and n_parts:
            text += f", and the {n_parts} committed parts of the store"
        if "train" not in finished and (self.drafter / LAST).is_file():
            text += ", and the drafter's last checkpoint"
        return text

    @property
    def phases(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return the phases in order."""
        return {
            "corpus": self.run_corpus,
            "target": self.run_target,
            "extract": self.run_extract,
            "train": self.run_train,
            "eval": self.run_eval,
            "serve": self.run_serve,
            "report": self.run_report,
        }


def run_demo(
    config: DemoConfig, progress: Progress | None = None, provenance: dict[str, Any] | None = None
) -> DemoReport:
    """Run the demo, or what is left of it: finished phases are reused, interrupted ones go on or start again.

    Args:
        progress: Called as (done, total, message) all the way.

    Raises:
        OptionInvalid: If the folder holds something else.
        Interrupted: If Ctrl-C stopped a phase.
        Exception: Whatever the stages raise (`WorkerError`, `StoreError`, `TrainingError`, `OptionInvalid`).
    """
    run = _Run(config, progress, provenance)
    reused = tuple(phase for phase in PHASES if run.state.is_done(phase))
    for phase, work in run.phases.items():
        if run.state.is_done(phase):
            continue
        started = time.perf_counter()
        try:
            facts = work()
        except (KeyboardInterrupt, Interrupted) as error:
            raise Interrupted(f"interrupted in the {phase} phase; run the same command again, {run.kept()}") from error
        run.state.finish(phase, time.perf_counter() - started, facts)
    measured, served, size = (run.state.facts(phase) for phase in ("eval", "serve", "report"))
    return DemoReport(
        folder=run.folder,
        report=run.folder / REPORT_FILE,
        acceptance_length=measured["acceptance_length"],
        speedup=measured["ratio"],
        identical=measured["n_exact"] == measured["n_answers"] and served["is_equal"],
        n_alone=served["n_alone"],
        n_rolled_back=served["n_rolled_back"],
        bytes_per_token=size["bytes_per_token"],
        stored_share=size["stored_share"],
        seconds={phase: run.state.facts(phase)["seconds"] for phase in PHASES},
        reused=reused,
    )
