"""Let a target answer the questions of a dataset, or its own, and write chats for ``extract``.

The assistant's messages of a row are dropped. The other messages are asked turn by turn, each turn
after the new answers to earlier ones::

    row       system  user  assistant  user  assistant        turns      [system, user]  [user]
    answered  system  user  ANSWER     user  ANSWER

An answer that reaches its limit of tokens ends its chat. Its row has the ``finish_reason``
``length``, as in OpenAI's API, so that no drafter learns an end of turn that the target did not
write.

Without a dataset, the target writes the questions too (Magpie, arXiv 2406.08464). It continues the
empty user turn of its chat template up to the token that ends such a turn.

OUT.regeneration.json, next to OUT, records the settings and the progress.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import httpx2 as httpx
import torch
from pydantic import BaseModel

from .. import __version__
from ..errors import DatasetError, OptionInvalid, OutputOccupied, ServingError, TemplateError
from ..files import disk_full_guard, parsing, write_atomic
from ..moa.decoding.loop import generate_batch
from ..moa.decoding.proposer import DrafterProposer
from ..moa.decoding.sampling import SamplingConfig
from ..moa.formats.checkpoint import ready_drafters
from ..moa.targets.chat import Message, Rejection, RejectReason, parse_prompt
from ..moa.targets.chat_tokens import prompt_tokens, tokenize_chat
from ..moa.targets.live import Target
from ..moa.targets.template import parse_template_arguments
from ..text import Progress, counted, first_line, format_hours, printable
from .config import RegenerateConfig
from .dataset import RECORD_SUFFIX, ChatSource, Columns

_FILE = "chats.jsonl"  # name of the output file if the output is a folder
_TIMED_TOKENS = 16  # prompt tokens and new tokens of each text with which the speed is measured
# Maximum number of unusable questions of the target for each usable one.
_MOST_DROPPED = 9
_FEW_DROPPED = 64  # number of unusable questions that is always allowed in addition
# Keeps the seeds of questions apart from those of answers, and of questions with other seeds.
_SEED_FACTOR = 0x9E3779B97F4A7C15
_WHEN_FULL = "The answers so far are safe. Free some space and run the same command again."


class LossReason(StrEnum):
    """Reasons, as shown to the user, for not answering a chat or the rest of a chat."""

    TOOLS = "the chat has tools, whose results are not known"
    NO_QUESTION = "nothing comes before the assistant's first message"
    TOO_LONG = "the prompt leaves no room for an answer"
    NO_END = "an answer has not ended within the tokens it may have"
    EMPTY = "an answer is empty"
    NO_TEXT = "an answer has bytes that are not text"
    UNFINISHED_QUESTION = "the target's question has not ended within the tokens it may have"
    EMPTY_QUESTION = "the target's question is empty"
    NO_TEXT_QUESTION = "the target's question has special tokens, or bytes that are not text"
    REPEATED_QUESTION = "the target's question was asked before"
    UNUSABLE_PROMPT = "a prompt cannot be rendered"
    REFUSED = "the server refuses to answer"
    LATE = "the server took too long"


@dataclass
class Row:
    """One row of the dataset, with its questions and the answers so far."""

    row: int  # row number in the dataset, from 0
    # The chat up to the last answer; empty if the row is rejected.
    messages: list[Message] = field(default_factory=list)
    n_answers: int = 0
    n_tokens: int = 0  # tokens of the answers
    is_cut: bool = False  # whether the last answer reached a limit
    # Why the row is rejected, or later turns are not answered; empty if all are answered.
    reason: str = ""
    detail: str = ""
    # The turns that are still to be asked. Each has the messages between two answers.
    turns: list[list[Message]] = field(default_factory=list)
    # The chat up to the turn that is being asked.
    prompt: list[Message] = field(default_factory=list)

    @classmethod
    def read(cls, row: int, content: Any, columns: Columns) -> "Row":
        """Read the questions of a row.

        The last turn is asked even if the row has no answer to it.
        """
        chosen = columns.apply(content)
        chat = chosen if isinstance(chosen, Rejection) else parse_prompt(chosen)
        if isinstance(chat, Rejection):
            return cls(row, reason=chat.reason.value, detail=printable(chat.detail))
        # The target would call other tools than the dataset's assistant did.
        if chat.tools or any(
            message["role"] == "tool" or "tool_calls" in message for message in chat.messages
        ):
            return cls(row, reason=LossReason.TOOLS.value)
        try:
            json.dumps(chat.messages, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return cls(row, reason=RejectReason.NO_UNICODE.value)
        turns: list[list[Message]] = [[]]
        for message in chat.messages:
            if message["role"] != "assistant":
                if chat.asks_each and turns[-1]:
                    turns.append([])
                turns[-1].append(message)
            elif turns[-1]:
                turns.append([])
            elif len(turns) == 1:
                return cls(row, reason=LossReason.NO_QUESTION.value)
        return cls(row, turns=[turn for turn in turns if turn])

    def begin_turn(self) -> bool:
        """Set the prompt of the next turn. Returns False if the chat has ended."""
        if self.reason or not self.turns:
            return False
        self.prompt = [*self.messages, *self.turns.pop(0)]
        return True

    def take(self, text: str, n_tokens: int, is_cut: bool = False, keep_cut: bool = True) -> None:
        """Add the answer to the prompt. An empty, invalid or cut answer ends the chat."""
        if is_cut:
            text = text.rstrip("\ufffd")  # the incomplete bytes of the last character
        if is_cut and not keep_cut:
            self.end(LossReason.NO_END, f"{n_tokens:,} tokens")
        elif not text.strip():
            self.end(LossReason.EMPTY)
        # A replacement character: the target generated bytes that are not valid UTF-8.
        elif "\ufffd" in text:
            self.end(LossReason.NO_TEXT)
        else:
            self.messages = [*self.prompt, {"role": "assistant", "content": text}]
            self.n_answers += 1
            self.n_tokens += n_tokens
            self.is_cut = is_cut
            if is_cut and self.turns:
                self.end(LossReason.NO_END)

    def end(self, reason: str, detail: str = "") -> None:
        """End the chat before the current turn."""
        self.reason = str(reason)
        self.detail = printable(detail)


def _as_one_line(messages: Sequence[Message]) -> str:
    """Return the text of the first message with normalised white space."""
    return " ".join(messages[0]["content"].split())


class RowCounts(BaseModel):
    """Counts of rows."""

    n_rows: int = 0
    n_answers: int = 0
    n_tokens: int = 0
    n_at_limit: int = 0  # chats whose last answer was cut
    dropped: Counter[str] = Counter()  # unusable questions of the target, by reason
    rejected: Counter[str] = Counter()  # rows without a chat in the output, by reason
    cut: Counter[str] = Counter()  # chats whose later turns were not answered, by reason
    examples: dict[str, str] = {}  # text about the first row of each reason

    @property
    def n_chats(self) -> int:
        """Number of chats in the output."""
        return self.n_rows - self.rejected.total()

    def add(self, row: Row) -> None:
        """Count a row."""
        self.n_rows += 1
        self.n_answers += row.n_answers
        self.n_tokens += row.n_tokens
        self.n_at_limit += row.is_cut
        if row.reason:
            (self.cut if row.messages else self.rejected)[row.reason] += 1
            self.examples.setdefault(
                row.reason, f"row {row.row}" + (f": {row.detail}" if row.detail else "")
            )

    def lines(self, counts: Counter[str], start: str = "") -> list[str]:
        """Return a line with an example for each reason, the most frequent first."""
        return [
            f"{start}{n:,}  {reason} (first: {self.examples[reason]})"
            for reason, n in counts.most_common()
        ]


class Work(NamedTuple):
    """The questions of a run."""

    source: ChatSource | None  # None if the target writes the questions
    n_rows: int
    most_tokens: int  # upper bound of the tokens that the target writes
    settings: dict[str, Any]  # settings that determine the questions
    text: str  # summary in one line


def count_work(config: RegenerateConfig, progress: Progress | None = None) -> Work:
    """Count the questions of a run. This reads all rows of a dataset."""
    limits = f"of at most {config.max_new_tokens:,} tokens, {config.n_together} at a time"
    questions = config.questions
    if config.self_prompted is not None:
        n_rows = config.self_prompted
        settings = questions.model_dump(
            include={"question_temperature", "question_top_p", "question_tokens"}
        )
        text = f"{counted(n_rows, 'question')} that the target writes, and answers {limits}"
        most_tokens = n_rows * (config.max_new_tokens + questions.question_tokens)
        return Work(None, n_rows, most_tokens, settings, text)
    source = ChatSource(
        config.dataset or "", questions.split, questions.dataset_config, questions.dataset_revision
    )
    total = source.count_rows()
    n_rows = 0
    n_chats = 0
    n_answers = 0
    for row in _rows(config, source):
        n_rows += 1
        n_chats += bool(row.turns)
        n_answers += len(row.turns)
        if progress and n_rows % 1024 == 0:
            progress(n_rows, max(total, n_rows), "read rows")
    if not n_chats:
        raise DatasetError(
            f"Dataset {source.name} has no chat with a question among {n_rows:,} rows. Point "
            "--dataset at chats, or name their columns with --columns."
        )
    dataset = {"name": source.describe()} | (source.origin() or {"sha256": source.identity()})
    text = (
        f"{counted(n_rows, 'row')}, {counted(n_chats, 'chat')} that ask for {n_answers:,} answers "
        f"{limits}"
    )
    settings = {"dataset": dataset, "columns": list(questions.columns)}
    return Work(source, n_rows, n_answers * config.max_new_tokens, settings, text)


def _rows(config: RegenerateConfig, source: ChatSource | None) -> Iterator[Row]:
    if source is None:
        yield from map(Row, range(config.self_prompted or 0))
        return
    columns = Columns.parse(config.questions.columns)
    for number, content in islice(source.rows(), config.questions.max_rows):
        source.count_row()
        yield Row.read(number, content, columns)


def preview(config: RegenerateConfig, progress: Progress | None = None) -> str:
    """Return a text about the questions of a run, and an upper bound of its time."""
    work = count_work(config, progress)
    if config.server is not None:
        return work.text
    return f"{work.text}; {LocalTarget(config).estimate(work.most_tokens)}"


def regenerate(config: RegenerateConfig, progress: Progress | None = None) -> "Answers":
    """Answer the questions of a dataset, or the target's own, or resume an earlier run.

    Returns:
        The answers. Their file is closed.

    Raises:
        DatasetError: the dataset has no questions, or more rows are rejected than allowed.
        OutputOccupied: the output holds something else, or answers of a run with other settings.
        TemplateError: the target cannot write questions.
    """
    out = Path(config.out).expanduser()
    out = out if out.suffix == ".jsonl" else out / _FILE
    folder = Path(config.dataset or out).expanduser()
    if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
        raise OptionInvalid(
            f"--out {config.out} is inside the dataset {config.dataset}, which it would change. "
            "Choose another --out."
        )
    work = count_work(config, progress)
    answering = LocalTarget(config) if config.server is None else Server(config)
    settings = {
        **work.settings,
        "n_rows": work.n_rows,
        "model": config.model,
        **answering.facts,
        "max_new_tokens": config.max_new_tokens,
        **config.questions.model_dump(include={"max_length", "keep_cut"}),
        **config.sampling.model_dump(mode="json"),
        **({} if config.server else {"batch_size": config.n_together}),
    }
    settings = json.loads(json.dumps(settings))
    limit = config.questions.max_rejected_fraction
    with open_answers(
        out, settings, work.n_rows, max_rejected_fraction=limit, progress=progress
    ) as answers:
        n_done = answers.counts.n_rows
        if progress and isinstance(answering, LocalTarget):
            most_tokens = work.most_tokens * (1 - n_done / work.n_rows)
            progress(n_done, work.n_rows, f"regenerate, {answering.estimate(most_tokens)}")
        answering.answer(islice(_rows(config, work.source), n_done, None), answers)
    return answers


@contextmanager
def open_answers(
    path: Path, settings: Mapping[str, Any], n_rows: int, **others: Any
) -> "Iterator[Answers]":
    """Open and lock a file of answered chats, which is created if it does not exist.

    Raises:
        OutputOccupied: another process writes the file, or it was made with other settings.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputOccupied(
                f"{path} is being written by another process; wait for it to end."
            ) from error
        yield Answers(path, file, settings, n_rows, **others)


class _Record(BaseModel):
    """Content of the record next to the chats.

    It contains no times, so that a resumed run writes the same bytes.
    """

    moa_data: str = __version__
    settings: dict[str, Any]
    rows: RowCounts = RowCounts()
    n_bytes: int = 0  # length of the file of chats
    sha256: str | None = None  # hash of the file of chats, once it is complete


@dataclass
class Answers:
    """The file of answered chats, and its ``record`` of the settings and the progress."""

    path: Path
    file: BinaryIO
    settings: Mapping[str, Any]  # settings that determine the answers
    n_rows: int  # number of rows to answer
    max_rejected_fraction: float = 1.0  # allowed fraction of rejected rows
    progress: Progress | None = None

    def __post_init__(self) -> None:
        self.record = self.path.with_suffix(RECORD_SUFFIX)
        self._record = _Record(settings=dict(self.settings))
        self._resume()
        self._keeps_questions = "question_tokens" in self.settings
        self.asked = set[str]()  # questions of the chats, if the target writes them
        if self._keeps_questions:
            self.asked = {
                _as_one_line(json.loads(line)["messages"])
                for line in self.path.read_bytes().splitlines()
            }
        self._n_tokens_before = self.counts.n_tokens
        self._began_s = time.monotonic()
        self._check_rejected()  # an earlier run may already have rejected too many rows

    @property
    def counts(self) -> RowCounts:
        """Counts of the rows so far."""
        return self._record.rows

    def _resume(self) -> None:
        """Load the counts of the record, and truncate chats that were written after it."""
        n_bytes = self.path.stat().st_size
        if not self.record.exists():
            if n_bytes:
                raise OutputOccupied(
                    f"{self.path} exists, but no regeneration wrote it. Choose another --out."
                )
            self._save()
            return
        with parsing(
            f"{self.record} is not a record of a regeneration",
            OutputOccupied,
            "Choose another --out.",
        ):
            recorded = _Record.model_validate_json(self.record.read_bytes())
        current = self._record.settings
        earlier = recorded.settings
        changed = [
            name for name in {**earlier, **current} if earlier.get(name) != current.get(name)
        ]
        # If the record counts no row, nothing was answered with the earlier settings.
        if changed and recorded.rows.n_rows:
            listed = ", ".join(
                f"{name} {earlier.get(name)} (now {current.get(name)})" for name in changed
            )
            raise OutputOccupied(
                f"{self.path} was begun with {listed}. Give those settings, or another --out."
            )
        if n_bytes < recorded.n_bytes or (recorded.sha256 and n_bytes > recorded.n_bytes):
            raise OutputOccupied(
                f"{self.path} was changed after it was written. Choose another --out, or delete it."
            )
        self.file.truncate(recorded.n_bytes)
        if changed:
            self._save()
        else:
            self._record = recorded

    def append(self, rows: Sequence[Row]) -> None:
        """Add a batch of rows, and sync it to the disk."""
        answered = [row for row in rows if row.messages]
        lines = [
            {
                "row": row.row,
                "messages": row.messages,
                "finish_reason": "length" if row.is_cut else "stop",
            }
            for row in answered
        ]
        data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        with disk_full_guard(self.path, _WHEN_FULL):
            self.file.write(data)
            self.file.flush()
            os.fsync(self.file.fileno())
            # The record is written after the chats that it counts. If the process is killed in
            # between, the chats that are not counted are truncated on resume.
            self._record.n_bytes += len(data)
            for row in rows:
                self.counts.add(row)
            self._save()
        if self._keeps_questions:
            self.asked.update(_as_one_line(row.messages) for row in answered)
        if self.progress:
            tokens_per_s = (self.counts.n_tokens - self._n_tokens_before) / (
                time.monotonic() - self._began_s
            )
            self.progress(
                self.counts.n_rows, self.n_rows, f"regenerate at {tokens_per_s:.3g} answer tokens/s"
            )
        self._check_rejected()

    def _save(self) -> None:
        if self.counts.n_rows == self.n_rows:
            with self.path.open("rb") as stream:
                self._record.sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        write_atomic(self.record, self._record.model_dump_json(indent=1).encode() + b"\n")

    def _check_rejected(self) -> None:
        """Stop as soon as more rows are rejected than allowed for the whole run.

        Raises:
            DatasetError: too many rows are rejected.
        """
        counts = self.counts
        # With keep_cut=false, users expect to lose the rows with cut answers.
        n_rejected = counts.rejected.total() - counts.rejected[LossReason.NO_END]
        if n_rejected > self.max_rejected_fraction * self.n_rows:
            raise DatasetError(
                f"{n_rejected:,} of the first {counts.n_rows:,} rows ({self.n_rows:,} in all) gave "
                f"no chat, more than --max-rejected-fraction {self.max_rejected_fraction}: "
                f"{'; '.join(counts.lines(counts.rejected))}. Raise that fraction and run the same "
                "command again, which keeps the answers so far, or correct the data."
            )

    def describe(self, config: RegenerateConfig) -> str:
        """Return the report as text, with the command to run next."""
        counts = self.counts
        arguments = self.settings["template_kwargs"]
        command = (
            f"moa-data extract --model {(not config.server and config.model) or 'MODEL'} --dataset "
            f"{self.path} --max-length {config.questions.max_length}"
            + (f" --template-kwargs '{json.dumps(arguments)}'" if arguments else "")
            + " --out STORE"
        )
        lines = [
            f"answered     {counts.n_chats:,} of {counted(counts.n_rows, 'row')}, "
            f"{counted(counts.n_answers, 'answer')}, {counts.n_tokens:,} tokens; "
            f"{counts.n_at_limit:,} of the answers reached their limit",
            *(f"  dropped    {n:,}  {reason}" for reason, n in counts.dropped.most_common()),
            *counts.lines(counts.rejected, "  rejected   "),
            *counts.lines(counts.cut, "  cut short  "),
            f"chats        {self.path}",
            f"record       {self.record}",
            f"next         {command}",
        ]
        return "\n".join(lines)


class LocalTarget:
    """A target that is loaded in this process, with a drafter if one is given.

    ``facts`` identify both in the record.
    """

    def __init__(self, config: RegenerateConfig) -> None:
        assert config.model is not None
        self._config = config
        self._target = Target.load(
            config.model, getattr(torch, config.dtype), config.device, config.revision
        )
        self._target.prepare()
        self._max_tokens = min(config.questions.max_length, self._target.max_positions)
        sampling = SamplingConfig(**config.sampling.arguments())
        proposer = shape = None
        folders = () if config.drafter is None else (config.drafter,)
        for drafter in ready_drafters(
            self._target, folders, config.template_kwargs, config.model
        ).values():
            proposer = DrafterProposer(self._target, drafter, sampling)
            shape = config.shape()
            if config.tree is None and proposer.max_depth is not None:
                shape = shape.cut(proposer.max_depth)
        self._template = self._target.template
        if config.self_prompted is not None:
            self._user_turn, self._user_end = self._template.open_user_turn()
        self._decode = partial(
            generate_batch, self._target, proposer=proposer, tree=shape, sampling=sampling
        )
        self.facts: dict[str, Any] = {
            "target": dict(self._target.identity),
            "template_kwargs": self._template.arguments,
            "drafter": config.drafter,
            "tree": None if shape is None else str(shape),
            "dtype": config.dtype,
            "device": self._target.device.type,
        }

    def answer(self, rows: Iterator[Row], answers: Answers) -> None:
        """Answer all turns of the rows in batches, and commit each batch."""
        # The whole batch is asked again after an interruption, because the rounding of a forward
        # depends on all rows of its batch.
        while batch := list(islice(rows, self._config.n_together)):
            if self._config.self_prompted is not None:
                self._ask(batch, answers)
            active = batch
            while active := [row for row in active if row.begin_turn()]:
                self._generate([(row, tokens) for row in active if (tokens := self._prompt(row))])
            answers.append([self._checked(row) for row in batch])

    def estimate(self, most_tokens: float) -> str:
        """Return a text with the time that a number of tokens takes at most.

        The speed is measured with a batch of short prompts.
        """
        began_s = time.perf_counter()
        prompts = [[0] * _TIMED_TOKENS] * self._config.n_together
        generations = self._decode(prompts, max_new_tokens=_TIMED_TOKENS)
        n_tokens = sum(len(generation.tokens) for generation in generations)
        tokens_per_s = n_tokens / (time.perf_counter() - began_s)
        return (
            f"at most about {format_hours(most_tokens / tokens_per_s)} at "
            f"{tokens_per_s:.3g} tokens/s"
        )

    def _ask(self, rows: Sequence[Row], answers: Answers) -> None:
        """Let the target write a question for each row. It must not repeat an earlier question."""
        settings = self._config.questions
        n_answered = answers.counts.n_rows
        dropped = answers.counts.dropped
        first_seed = (self._config.sampling.seed + 1) * _SEED_FACTOR % 2**62
        ends = {*self._target.eos_token_ids, self._user_end}
        questions: dict[str, list[Message]] = {}  # each question's turn, by its normalised text
        while n_missing := len(rows) - len(questions):
            if dropped.total() > _FEW_DROPPED + _MOST_DROPPED * n_answered:
                reasons = "; ".join(f"{n:,} {reason}" for reason, n in dropped.most_common())
                raise DatasetError(
                    f"{dropped.total():,} questions had to be dropped, and only {n_answered:,} "
                    f"could be kept: {reasons}. Change --question-temperature, --question-top-p or "
                    "--question-tokens, with another --out, or give a --dataset."
                )
            n_before = n_answered + len(questions) + dropped.total()
            generations = generate_batch(
                self._target, [self._user_turn] * n_missing, max_new_tokens=settings.question_tokens,
                sampling=SamplingConfig(settings.question_temperature, settings.question_top_p),
                seed=first_seed + n_before, stop_token_ids=[self._user_end],
            )  # fmt: skip
            for *tokens, last in (generation.tokens for generation in generations):
                turn = [{"role": "user", "content": self._target.tokenizer.decode(tokens).strip()}]
                line = _as_one_line(turn)
                if last not in ends:
                    dropped[LossReason.UNFINISHED_QUESTION] += 1
                elif not line:
                    dropped[LossReason.EMPTY_QUESTION] += 1
                elif "\ufffd" in line or self._template.control_tokens.everywhere.search(line):
                    dropped[LossReason.NO_TEXT_QUESTION] += 1
                elif line in questions or line in answers.asked:
                    dropped[LossReason.REPEATED_QUESTION] += 1
                else:
                    questions[line] = turn
        for row, turn in zip(rows, questions.values(), strict=True):
            row.turns = [turn]

    def _prompt(self, row: Row) -> list[int]:
        """Return the tokens of a row's prompt; empty if the prompt cannot be answered."""
        try:
            tokens = prompt_tokens(self._template, row.prompt)
        except TemplateError as error:
            row.end(LossReason.UNUSABLE_PROMPT, str(error))
            return []
        if len(tokens) >= self._max_tokens:
            row.end(LossReason.TOO_LONG, f"{len(tokens):,} tokens")
            return []
        return tokens

    def _generate(self, prompts: Sequence[tuple[Row, list[int]]]) -> None:
        # The shortest prompt has the most room for an answer, so its room bounds the batch.
        room = self._max_tokens - min((len(tokens) for _, tokens in prompts), default=0)
        generations = self._decode(
            [tokens for _, tokens in prompts], max_new_tokens=min(self._config.max_new_tokens, room),
            seed=[self._config.sampling.seed + row.row for row, _ in prompts],
        )  # fmt: skip
        for (row, prompt), generation in zip(prompts, generations, strict=True):
            tokens = generation.tokens[: self._max_tokens - len(prompt)]
            text = self._target.tokenizer.decode(tokens, skip_special_tokens=True)
            is_cut = tokens[-1] not in self._target.eos_token_ids
            row.take(text, len(tokens), is_cut, self._config.questions.keep_cut)

    def _checked(self, row: Row) -> Row:
        """Reject a row that `extract` would reject.

        A chat template may refuse the target's own answers, or rewrite them.
        """
        if row.messages:
            length = self._config.questions.max_length
            tokenized = tokenize_chat(self._template, row.messages, length, is_cut=row.is_cut)
            if isinstance(tokenized, Rejection):
                return Row(
                    row.row, reason=tokenized.reason.value, detail=printable(tokenized.detail)
                )
        return row


_RETRIED = (409, 425, 429, 500, 502, 503, 504)
_REFUSALS = (400, 408, 413, 422)  # statuses that concern a single request, not the server
_FIRST_WAIT_S = 0.5
_MAX_WAIT_S = 20.0
_ADVICE = "Check --server, --model and OPENAI_API_KEY."


class Server:
    """A server with OpenAI's API. Requests run in parallel, and rows are committed in order."""

    def __init__(self, config: RegenerateConfig) -> None:
        assert config.server is not None
        self._config = config
        base = config.server.rstrip("/")
        self._url = base if base.endswith("/v1") else f"{base}/v1"
        key = os.environ.get("OPENAI_API_KEY")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._arguments = parse_template_arguments(config.template_kwargs)
        self._model = asyncio.run(self._find_model())
        self.facts: dict[str, Any] = {
            "server_model": self._model,
            "template_kwargs": self._arguments,
        }

    def answer(self, rows: Iterable[Row], answers: Answers) -> None:
        """Ask all rows. Each row is committed as soon as all rows before it are finished."""
        asyncio.run(self._answer_all(rows, answers))

    async def _answer_all(self, rows: Iterable[Row], answers: Answers) -> None:
        waiting: deque[asyncio.Task[Row]] = deque()

        async def commit_finished() -> None:
            await asyncio.wait({waiting[0]})
            finished = []
            while waiting and waiting[0].done():
                finished.append(waiting.popleft().result())
            answers.append(finished)

        async with self._client() as client:
            try:
                for row in rows:
                    waiting.append(asyncio.create_task(self._converse(client, row)))
                    # Queue more rows than connections, so that requests continue while the first
                    # row waits for a long answer.
                    if len(waiting) == 4 * self._config.n_together:
                        await commit_finished()
                while waiting:
                    await commit_finished()
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)

    def _client(self) -> httpx.AsyncClient:
        n_together = self._config.n_together
        limits = httpx.Limits(max_connections=n_together, max_keepalive_connections=n_together)
        # The pool has no timeout, because rows wait in it for a free connection.
        timeout = httpx.Timeout(30, read=self._config.serving.answer_s, pool=None)
        return httpx.AsyncClient(headers=self._headers, limits=limits, timeout=timeout)

    async def _find_model(self) -> str:
        async with self._client() as client:
            answer = await self._request(client, "GET", "/models")
        status = f"{answer.status_code}: {_message(answer)}"
        with parsing(
            f"{self._url}/models returned no list of models, but {status}", ServingError, _ADVICE
        ):
            names = [str(item["id"]) for item in answer.json()["data"]]
        wanted = self._config.model
        if wanted in names or (wanted is None and len(names) == 1):
            return wanted or names[0]
        raise ServingError(
            f"{self._url} has {', '.join(names) or 'no model'}. Name one of them with --model."
        )

    async def _converse(self, client: httpx.AsyncClient, row: Row) -> Row:
        while row.begin_turn():
            try:
                answer = await self._request(client, "POST", "/chat/completions", self._body(row))
            except httpx.ReadTimeout:
                row.end(LossReason.LATE, f"more than {self._config.serving.answer_s:g} s")
                break
            if answer.status_code in _REFUSALS:
                row.end(LossReason.REFUSED, _message(answer))
            elif answer.status_code != 200:
                raise ServingError(
                    f"{self._url} answers {answer.status_code} ({_message(answer)}). {_ADVICE}"
                )
            else:
                self._take(row, answer)
        return row

    def _body(self, row: Row) -> dict[str, Any]:
        """Return the body of a request.

        Settings at their defaults are left out, because not all servers support all settings.
        """
        sampling = self._config.sampling
        body = {
            "model": self._model,
            "messages": row.prompt,
            "max_tokens": self._config.max_new_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.temperature:
            body |= {"top_p": sampling.top_p, "seed": sampling.seed + row.row}
            body |= {"top_k": sampling.top_k} if sampling.top_k else {}
        if sampling.repetition_penalty != 1:
            body["repetition_penalty"] = sampling.repetition_penalty
        return body | ({"chat_template_kwargs": self._arguments} if self._arguments else {})

    def _take(self, row: Row, answer: httpx.Response) -> None:
        with parsing(f"{self._url} gives no chat completion", ServingError, _ADVICE):
            document = answer.json()
            choice = document["choices"][0]
            message = choice["message"]
            ended = choice["finish_reason"]
            usage = document.get("usage") or {}
            n_tokens, n_prompt = (
                int(usage.get(f"{part}_tokens") or 0) for part in ("completion", "prompt")
            )
            text = message.get("content") or ""
        # A drafter would learn answers without the reasoning before them.
        if message.get("reasoning_content") or message.get("reasoning"):
            raise ServingError(
                f"{self._url} keeps the reasoning apart from the answer, so the text is not all "
                "that the model wrote. Start the server without a reasoning parser, or turn off "
                "thinking: --template-kwargs enable_thinking=false."
            )
        questions = self._config.questions
        if ended in ("stop", "length"):
            is_cut = ended == "length" or n_prompt + n_tokens > questions.max_length
            row.take(text, n_tokens, is_cut, questions.keep_cut)
        else:
            row.end(
                LossReason.TOOLS if ended == "tool_calls" else LossReason.REFUSED,
                f"finish_reason {ended}",
            )

    async def _request(
        self, client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        """Send a request. Retry for `patience_s` if the server is overloaded or unreachable."""
        wait_s = _FIRST_WAIT_S
        last_s = float("inf")
        while True:
            try:
                answer = await client.request(method, self._url + path, json=body)
                if answer.status_code not in _RETRIED:
                    return answer
                problem = f"answers {answer.status_code} ({_message(answer)})"
            except httpx.ReadTimeout:
                raise  # the server is working on the request; a retry would start it again
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = f"cannot be reached ({first_line(error)})"
            # Patience starts at the first failure, because a request may wait for a connection.
            last_s = min(last_s, time.monotonic() + self._config.serving.patience_s)
            if time.monotonic() + wait_s > last_s:
                raise ServingError(
                    f"{self._url} {problem}, for {self._config.serving.patience_s:g} s. Start the "
                    "server, and run the same command again: the answers so far are kept."
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_WAIT_S)


def _message(answer: httpx.Response) -> str:
    return " ".join(answer.text.split())[:200] or answer.reason_phrase
