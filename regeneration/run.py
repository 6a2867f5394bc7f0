"""``regenerate``: reads the questions, has them answered, and writes a dataset that ``extract`` takes.

Beside ``chats.jsonl`` there are, while the work is going on, ``chats.journal`` (``journal``) and a lock; at its end
``chats.regeneration.json``, which says who answered what and how. Files hold no times, so that a run that was
interrupted ends in the bytes of one that was not.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import DatasetError, OptionInvalid, OutputOccupied
from ..pipeline.chats.columns import Columns
from ..pipeline.chats.dataset import ChatSource
from ..pipeline.chats.splits import RECORD_SUFFIX
from ..storage.disk.durable import replacing, write_atomic
from ..storage.disk.locking import LockHeld, lock_file
from ..text import Progress, counted, format_hours
from .chats import Exchange, Outcome, Question, Tally
from .config import RegenerateConfig
from .journal import Journal, differences
from .local import LocalTarget
from .server import Server

_FILE = "chats.jsonl"
"""Name of the file in a folder."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class _Places:
    """The files of a regeneration."""

    chats: Path

    @classmethod
    def of(cls, out: str) -> _Places:
        path = Path(out).expanduser()
        return cls(path if path.suffix == ".jsonl" else path / _FILE)

    @property
    def record(self) -> Path:
        return self.chats.with_suffix(RECORD_SUFFIX)

    @property
    def journal(self) -> Path:
        return self.chats.with_suffix(".journal")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the output against other processes."""
        self.chats.parent.mkdir(parents=True, exist_ok=True)
        lock = self.chats.with_name(f".{self.chats.stem}.lock")
        try:
            held = lock_file(lock)
        except LockHeld as error:
            raise DatasetError(f"{self.chats} is being written by {error.holder}; wait for it to end.") from error
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            os.close(held)


@dataclass(frozen=True)
class Work:
    """What there is to do.

    Attributes:
        n_rows: rows that are read.
        n_chats: rows among them that ask something.
        n_answers: answers that they ask for.
        dataset: what identifies the dataset.
    """

    n_rows: int
    n_chats: int
    n_answers: int
    dataset: dict[str, Any]

    def describe(self, config: RegenerateConfig) -> str:
        """Say in one line what will be done."""
        drafts = f", drafts by {config.drafter}" if config.drafter else ""
        who = f"requests at once to {config.server}" if config.server else f"chats at a time by {config.model}{drafts}"
        return (
            f"{counted(self.n_rows, 'row')}, {counted(self.n_chats, 'chat')} that ask for {self.n_answers:,} answers "
            f"of at most {config.max_new_tokens:,} tokens; {config.n_together} {who}"
        )


@dataclass(frozen=True)
class RegenerationReport:
    """What a regeneration gave.

    Attributes:
        path: the dataset.
        command: the command that comes next.
        was_complete: whether all of it was there before.
    """

    path: Path
    record: Path
    tally: Tally
    command: str
    was_complete: bool = False

    def describe(self) -> str:
        """Return the report as lines."""
        tally = self.tally
        lines = [
            f"answered     {tally.n_chats:,} of {counted(tally.n_rows, 'row')}, {counted(tally.n_answers, 'answer')}, "
            f"{tally.n_tokens:,} tokens{', all there before' if self.was_complete else ''}",
            *(f"  rejected   {line}" for line in tally.lines(tally.rejected)),
            *(f"  cut short  {line}" for line in tally.lines(tally.cut)),
            f"chats        {self.path}",
            f"record       {self.record}",
            f"next         {self.command}",
        ]
        return "\n".join(lines)


def count_work(config: RegenerateConfig, progress: Progress | None = None) -> Work:
    """Read all rows once, to count what they ask and to identify the dataset.

    Raises:
        DatasetError: the dataset cannot be read, or asks nothing.
    """
    source, n_rows, n_chats, n_answers = _source(config), 0, 0, 0
    total = source.count_rows()
    for question in _questions(config, source):
        n_rows += 1
        n_chats += bool(question.turns)
        n_answers += len(question.turns)
        if progress and n_rows % 1024 == 0:
            progress(n_rows, max(total, n_rows), "read rows")
    if not n_chats:
        raise DatasetError(
            f"Dataset {source.name} has no chat that asks something among {n_rows:,} rows. Point --dataset at chats, "
            "or name their columns with --columns."
        )
    dataset = source.origin() or {"sha256": source.identity()}
    return Work(n_rows, n_chats, n_answers, {"name": source.describe()} | dataset)


def regenerate(
    config: RegenerateConfig, progress: Progress | None = None, tell: Tell | None = None
) -> RegenerationReport:
    """Have the questions of a dataset answered.

    Args:
        progress: called with (rows, all rows, message).
        tell: called with lines: what will be done, and after the first answers how long it takes.

    Raises:
        OptionInvalid: a journal of another run, an unusable server, or more rejected rows than allowed.
        WorkerError: the dataset or the target's template cannot be used.
        DrafterError: target or drafter cannot be loaded.
        OutputOccupied: the output holds something else.
        OptionInvalid: the output lies in the dataset.
    """
    places = _Places.of(config.out)
    folder = Path(config.dataset).expanduser()
    if folder.is_dir() and places.chats.resolve().is_relative_to(folder.resolve()):
        raise OptionInvalid(f"--out {config.out} lies in the dataset {config.dataset}, which it would change. Move it.")
    work = count_work(config, progress)
    if tell:
        tell(work.describe(config))
    answerer = LocalTarget(config) if config.server is None else Server(config)
    settings = _settings(config, work, answerer.facts)
    # Rounding in a batch depends on its rows, so that whole batches are kept or asked again; a server batches anyhow.
    unit = config.n_together if isinstance(answerer, LocalTarget) else 1
    with places.locked():
        if (tally := _finished(places, settings)) is not None:
            places.journal.unlink(missing_ok=True)  # a kill may have come between the record and this
            return _report(config, places, tally, settings, True)
        with Journal(places.journal, settings, unit, work.n_rows) as journal:
            run = _Run(config, work, journal, progress, tell)
            run.check_rejected()
            questions = islice(_questions(config, _source(config)), journal.n_rows, None)
            if isinstance(answerer, LocalTarget):
                _answer_in_batches(answerer, questions, run, unit)
            else:
                answerer.answer(questions, run.commit)
            tally = _write(places, settings, journal)
        places.journal.unlink()
    return _report(config, places, tally, settings)


class _Run:
    """Takes what was answered, and stops when too much of it is lost."""

    def __init__(
        self, config: RegenerateConfig, work: Work, journal: Journal, progress: Progress | None, tell: Tell | None
    ) -> None:
        self._config, self._work, self._journal = config, work, journal
        self._progress, self._tell = progress, tell
        self._tally = Tally()
        for outcome in journal.outcomes():
            self._tally.add(outcome)
        self._n_before, self._started_s = journal.n_rows, time.monotonic()
        if self._tell and self._n_before:
            self._tell(f"answered already: {counted(self._n_before, 'row')}")

    def commit(self, outcomes: Sequence[Outcome], acceptance_length: float | None = None) -> None:
        """Write the outcomes of a unit; rejects more than allowed as soon as that is certain."""
        is_first = self._journal.n_rows == self._n_before
        self._journal.append(outcomes)
        for outcome in outcomes:
            self._tally.add(outcome)
        if self._progress:
            self._progress(self._journal.n_rows, self._work.n_rows, "regenerate")
        if is_first and self._tell and any(outcome.n_tokens for outcome in outcomes):
            self._tell(self._estimate(outcomes, acceptance_length))
        self.check_rejected()

    def _estimate(self, outcomes: Sequence[Outcome], acceptance_length: float | None) -> str:
        """Say how long the rest takes if it goes on like the first answers, by answers: rows have one or many."""
        elapsed_s = time.monotonic() - self._started_s
        n_tokens = sum(outcome.n_tokens for outcome in outcomes)
        n_left = self._work.n_rows - self._journal.n_rows
        left = f"; about {format_hours(elapsed_s * n_left / len(outcomes))} for the rest" if n_left else ""
        length = f", {acceptance_length:.2f} per target call" if acceptance_length else ""
        return (
            f"first {counted(len(outcomes), 'row')}: {n_tokens:,} tokens in {elapsed_s:.1f} s "
            f"({n_tokens / elapsed_s:,.0f} tokens/s{length}){left}"
        )

    def check_rejected(self) -> None:
        """Refuse more rejected rows than allowed.

        Raises:
            DatasetError: so many are rejected that the rest cannot mend it.
        """
        tally, most = self._tally, self._config.questions.max_rejected_fraction
        if tally.n_rejected > most * self._work.n_rows:
            raise DatasetError(
                f"{tally.n_rejected:,} of the first {tally.n_rows:,} rows ({self._work.n_rows:,} in all) gave no chat, "
                f"more than --max-rejected-fraction {most}: {'; '.join(tally.lines(tally.rejected))}. Raise that "
                "fraction and run the same command again, which keeps the answers so far; or correct the data."
            )


def _answer_in_batches(target: LocalTarget, questions: Iterator[Question], run: _Run, unit: int) -> None:
    while batch := [Exchange(question) for question in islice(questions, unit)]:
        target.answer(batch)
        run.commit([exchange.outcome for exchange in batch], target.acceptance_length)


def _source(config: RegenerateConfig) -> ChatSource:
    asked = config.questions
    return ChatSource(config.dataset, asked.split, asked.dataset_config, asked.dataset_revision)


def _questions(config: RegenerateConfig, source: ChatSource) -> Iterator[Question]:
    columns = Columns.parse(config.questions.columns)
    for number, row in islice(source.rows(), config.questions.max_rows):
        source.count(number)
        yield Question.of(number, row, columns)


def _settings(config: RegenerateConfig, work: Work, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what shapes the answers, which a run that goes on must have in common with the one that began."""
    asked = config.questions
    settings = {
        "dataset": work.dataset,
        "n_rows": work.n_rows,
        "columns": list(asked.columns),
        "model": config.model,
        **facts,
        "max_new_tokens": config.max_new_tokens,
        "max_length": asked.max_length,
        **config.sampling.model_dump(mode="json"),
        **({} if config.server else {"batch_size": config.n_together}),
    }
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


def _finished(places: _Places, settings: Mapping[str, Any]) -> Tally | None:
    """Return the counts of a run that has ended with these settings; None where there is work to do.

    Raises:
        OutputOccupied: the file there is not of this run.
    """
    if not places.chats.exists():
        return None
    if not places.record.is_file():
        if places.journal.is_file():
            return None  # it ended between the two files
        raise OutputOccupied(f"{places.chats} is there already, and no regeneration wrote it. Choose another --out.")
    try:
        record = json.loads(places.record.read_bytes())
        begun, rows = record["settings"], record["rows"]
        tally = Tally(rows["n_rows"], rows["n_answers"], rows["n_tokens"])
        tally.rejected.update(rows["rejected"])
        tally.cut.update(rows["cut"])
        tally.examples.update(rows["examples"])
        is_whole = record["sha256"] == _sha256(places.chats)
    except (ValueError, KeyError, TypeError) as error:
        raise OutputOccupied(f"{places.record} is no record of a regeneration. Choose another --out.") from error
    if changed := differences(begun, settings):
        raise OutputOccupied(f"{places.chats} was made with {changed}. Choose another --out, or delete it.")
    if not is_whole:
        raise OutputOccupied(f"{places.chats} was changed after it was made. Choose another --out, or delete it.")
    return tally


def _write(places: _Places, settings: Mapping[str, Any], journal: Journal) -> Tally:
    """Write the dataset and then its record, which says that the dataset is whole."""
    tally, digest = Tally(), hashlib.sha256()
    with replacing(places.chats) as partial, partial.open("wb") as stream:
        for outcome in journal.outcomes():
            tally.add(outcome)
            if outcome.messages:
                row = {"row": outcome.row, "messages": outcome.messages}
                line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
                digest.update(line)
                stream.write(line)
        stream.flush()
        os.fsync(stream.fileno())
    rows = vars(tally) | {"rejected": dict(tally.rejected), "cut": dict(tally.cut), "n_chats": tally.n_chats}
    record = {"moa_data": __version__, "settings": settings, "rows": rows, "sha256": digest.hexdigest()}
    write_atomic(places.record, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    return tally


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _report(
    config: RegenerateConfig, places: _Places, tally: Tally, settings: Mapping[str, Any], was_complete: bool = False
) -> RegenerationReport:
    model = "MODEL" if config.server or config.model is None else config.model
    length = config.questions.max_length
    arguments = "".join(f" --template-kwargs '{json.dumps(found)}'" for found in [settings["template_kwargs"]] if found)
    command = f"moa-data extract --model {model} --dataset {places.chats} --max-length {length}{arguments} --out STORE"
    return RegenerationReport(places.chats, places.record, tally, command, was_complete)
