"""Let a target answer questions, and write the chats to a file for ``extract``.

The questions come from a dataset. The assistant's messages of each row are dropped, and the other
messages are divided into turns. The target answers one turn after the other, and sees its own
answers to the earlier turns::

    row       system  user  assistant  user  assistant        turns      [system, user]  [user]
    answered  system  user  ANSWER     user  ANSWER

If an answer reaches its token limit, the chat ends with this answer. The row then has the
``finish_reason`` ``length``, as in OpenAI's API. Without this mark, a drafter would learn an end of
turn that the target did not write.

Without a dataset, the target writes the questions too (Magpie, arXiv 2406.08464). The target gets
its chat template up to the start of the first user message. It continues this text, until it writes
the token that ends a user turn.

The JSON file OUT.regeneration.json, next to OUT, records the settings and the progress.
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
from pydantic import BaseModel

from .. import __version__
from ..errors import DatasetError, OptionInvalid, OutputOccupied, ServingError, TemplateError
from ..files import disk_full_guard, parsing, refuse_other_inputs, write_atomic
from ..moa.decoding.loop import generate_batch
from ..moa.decoding.proposer import DrafterProposer
from ..moa.decoding.sampling import SamplingConfig
from ..moa.formats.checkpoint import load_target_and_drafters
from ..moa.targets.chat import Message, Rejection, RejectReason, parse_prompt
from ..moa.targets.chat_tokens import prompt_tokens, tokenize_chat
from ..moa.targets.template import parse_template_arguments
from ..text import SILENT, Progress, counted, first_line, format_hours, printable
from .config import RegenerateConfig
from .dataset import RECORD_SUFFIX, ChatSource, Columns
from .report import reason_lines

# Name of the output file if the output is a folder.
_FILE = "chats.jsonl"
# To measure the speed, each sequence gets a prompt of this number of tokens, and generates the same
# number of new tokens.
_TIMED_TOKENS = 16
# Limit for unusable questions if the target writes the questions. When n questions have been
# answered, at most `_FEW_DROPPED + _MOST_DROPPED * n` questions may have been unusable. Otherwise
# the run stops.
_MOST_DROPPED = 9
_FEW_DROPPED = 64
# The seed for the answers of a row is the setting `seed` plus the row number. The seeds for questions
# start at `(seed + 1) * _SEED_FACTOR % 2**62`. The factor is large, so that the seeds for questions
# differ from the seeds for answers, and from the seeds for questions in runs with another `seed`.
_SEED_FACTOR = 0x9E3779B97F4A7C15


class LossReason(StrEnum):
    """Reasons for not answering a chat or the rest of a chat, as texts for the user."""

    TOOLS = "the chat has tools, whose results are not known"
    NO_QUESTION = "the chat has no message before the assistant's first message"
    TOO_LONG = "the prompt leaves no room for an answer"
    NO_END = "an answer has not ended within the tokens it may have"
    EMPTY = "an answer is empty"
    NO_TEXT = "an answer has bytes that are not text"
    UNFINISHED_QUESTION = "the target's question reached its token limit before it ended"
    EMPTY_QUESTION = "the target's question is empty"
    NO_TEXT_QUESTION = "the target's question has special tokens, or bytes that are not text"
    REPEATED_QUESTION = "the target's question was asked before"
    UNUSABLE_PROMPT = "a prompt cannot be rendered"
    REFUSED = "the server refuses to answer"
    LATE = "the server took too long"


@dataclass
class Row:
    """One row of the dataset, with its questions and the answers so far."""

    # Row number in the dataset, from 0.
    row: int
    # The chat up to and including the last answer. The list is empty if the row is rejected.
    messages: list[Message] = field(default_factory=list)
    n_answers: int = 0
    # Number of tokens in the answers.
    n_tokens: int = 0
    # Whether the last answer reached its token limit.
    is_cut: bool = False
    # The reason why the row is rejected, or why its later turns are not answered. The text is empty
    # if all turns are answered.
    reason: str = ""
    detail: str = ""
    # The turns that are not yet asked. A turn consists of the messages between two answers.
    turns: list[list[Message]] = field(default_factory=list)
    # The chat up to and including the turn that is being asked.
    prompt: list[Message] = field(default_factory=list)

    @classmethod
    def read(cls, row: int, content: Any, columns: Columns) -> "Row":
        """Divide the messages of a dataset row into turns, without the assistant's answers.

        A turn is the messages between two answers. The last turn is asked even if the row does not
        contain an answer to it. If the row cannot be used, the result has the reason and no turns.
        """
        chat = parse_prompt(columns.apply(content))
        if isinstance(chat, Rejection):
            return cls(row, reason=chat.reason.value, detail=printable(chat.detail))
        # Reject chats with tools. The target might call other tools than the dataset's assistant
        # did, and the results of these calls would be unknown.
        uses_tools = any(item["role"] == "tool" or "tool_calls" in item for item in chat.messages)
        if chat.tools or uses_tools:
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
        """Set ``prompt`` to the chat and its next turn. Return False if the chat has ended."""
        if self.reason or not self.turns:
            return False
        self.prompt = [*self.messages, *self.turns.pop(0)]
        return True

    def take(self, text: str, n_tokens: int, is_cut: bool = False, keep_cut: bool = True) -> None:
        """Append the target's answer to the chat. An empty, invalid or cut answer ends the chat.

        Args:
            text: the answer.
            n_tokens: number of tokens in the answer.
            is_cut: whether the answer reached its token limit.
            keep_cut: whether an answer that reached its token limit is kept.
        """
        if is_cut:
            # The token limit may cut the last character in two. The incomplete character is decoded
            # as replacement characters, so remove them.
            text = text.rstrip("\ufffd")
        if is_cut and not keep_cut:
            self.end(LossReason.NO_END, f"{n_tokens:,} tokens")
        elif not text.strip():
            self.end(LossReason.EMPTY)
        # Any other replacement character means that the target generated bytes that are not valid
        # UTF-8. Such an answer is not kept.
        elif "\ufffd" in text:
            self.end(LossReason.NO_TEXT)
        else:
            self.messages = [*self.prompt, {"role": "assistant", "content": text}]
            self.n_answers += 1
            self.n_tokens += n_tokens
            self.is_cut = is_cut
            if is_cut and self.turns:
                self.end(LossReason.NO_END)

    def json_line(self) -> str:
        """Return this chat as a line of the output file."""
        line = {
            "row": self.row,
            "messages": self.messages,
            "finish_reason": "length" if self.is_cut else "stop",
        }
        return json.dumps(line, ensure_ascii=False) + "\n"

    def end(self, reason: str, detail: str = "") -> None:
        """End the chat. The current turn is not answered.

        Args:
            reason: the reason, a LossReason or a RejectReason.
            detail: details about the reason, for the user. They may be empty.
        """
        self.reason = str(reason)
        self.detail = printable(detail)


def _as_one_line(messages: Sequence[Message]) -> str:
    """Return the text of the first message as one line, to compare questions."""
    return " ".join(messages[0]["content"].split())


class RowCounts(BaseModel):
    """Counts of the rows that a regeneration has processed."""

    n_rows: int = 0
    n_answers: int = 0
    n_tokens: int = 0
    # Number of chats whose last answer reached its token limit.
    n_at_limit: int = 0
    # Only if the target writes the questions: maps a reason to the number of questions that were
    # unusable for this reason.
    dropped: Counter[str] = Counter()
    rejected: Counter[str] = Counter()  # Maps a reason to the number of rows without a chat.
    cut: Counter[str] = Counter()  # Maps a reason to the number of chats that ended early.
    # Maps each reason in ``rejected`` or ``cut`` to an example for messages: the number of the
    # first row with this reason, and details.
    examples: dict[str, str] = {}

    @property
    def n_chats(self) -> int:
        """Number of chats in the output."""
        return self.n_rows - self.rejected.total()

    def add(self, row: Row) -> None:
        """Count a finished or rejected row."""
        self.n_rows += 1
        self.n_answers += row.n_answers
        self.n_tokens += row.n_tokens
        self.n_at_limit += row.is_cut
        if row.reason:
            counts = self.cut if row.messages else self.rejected
            counts[row.reason] += 1
            self.examples.setdefault(row.reason, f"row {row.row}: {row.detail}".removesuffix(": "))


class Work(NamedTuple):
    """The questions that a run asks: their source, and the number of answers that they need."""

    # The dataset with the questions. If the target writes the questions itself, the value is None.
    source: ChatSource | None
    n_rows: int
    # Number of answers that the target has to generate.
    n_answers: int
    # Settings that determine the questions.
    settings: dict[str, Any]
    # Description of the questions for the user: their number, and their source. The text ends with
    # the word "answers", so that a caller can append a limit such as "of at most 512 tokens".
    text: str


def count_work(config: RegenerateConfig, progress: Progress = SILENT) -> Work:
    """Describe the questions of a run, and count the answers that the target has to generate.

    If the questions come from a dataset, its rows are read to count the answers.
    """
    questions = config.questions
    if (n_questions := config.self_prompted) is not None:
        settings = questions.model_dump(
            include={"question_temperature", "question_top_p", "question_tokens"}
        )
        text = f"{counted(n_questions, 'question')} written by the target, with answers"
        return Work(None, n_questions, n_questions, settings, text)
    source = ChatSource(
        config.dataset or "", questions.split, questions.dataset_config, questions.dataset_revision
    )
    total = source.count_rows()
    n_rows = 0
    n_chats = 0
    n_answers = 0
    reading = progress.of("read rows", "row")
    for row in _rows(config, source):
        n_rows += 1
        n_chats += bool(row.turns)
        n_answers += len(row.turns)
        if n_rows % 1024 == 0:
            reading(n_rows, max(total, n_rows))
    if not n_answers:
        raise DatasetError(
            f"Dataset {source.name} has no chat with a question among {n_rows:,} rows. Point "
            "`dataset` at chats, or name their columns with `columns`."
        )
    dataset = {"name": source.describe()} | (source.origin() or {"sha256": source.identity(n_rows)})
    settings = {"dataset": dataset, "columns": list(questions.columns)}
    text = (
        f"{counted(n_rows, 'row')}, {counted(n_chats, 'chat')} that ask for {n_answers:,} answers"
    )
    return Work(source, n_rows, n_answers, settings, text)


def _rows(config: RegenerateConfig, source: ChatSource | None) -> Iterator[Row]:
    if source is None:
        yield from map(Row, range(config.self_prompted or 0))
        return
    columns = Columns.parse(config.questions.columns)
    for number, content in islice(source.rows(), config.questions.max_rows):
        yield Row.read(number, content, columns)


def preview(config: RegenerateConfig, progress: Progress = SILENT) -> str:
    """Return a text about the questions of a run, and an upper bound of the time of the run."""
    work = count_work(config, progress)
    text = f"{work.text} of at most {config.max_new_tokens:,} tokens, {config.n_together} at a time"
    return text if config.server else f"{text}; {LocalTarget(config).estimate(work.n_answers)}"


def regenerate(config: RegenerateConfig, progress: Progress = SILENT) -> "ChatFile":
    """Let the target answer questions and write the chats to a file, or resume an earlier run.

    The questions come from a dataset, or the target writes them.

    Returns:
        An object that describes the file of answered chats. The file itself is closed already.

    Raises:
        DatasetError: the dataset has no questions, or more rows are rejected than allowed.
        OutputOccupied: the output holds other data, or answers of a run with other settings.
        TemplateError: the target cannot write questions.
    """
    out = Path(config.out).expanduser()
    out = out if out.suffix == ".jsonl" else out / _FILE
    folder = Path(config.dataset or out).expanduser()
    if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
        raise OptionInvalid(
            f"`out={config.out}` is inside the dataset {config.dataset}, so the answers would "
            "become a part of the dataset. Choose another `out`."
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
    progress = progress.of("regenerate", "row")
    with open_chat_file(
        out, settings, work.n_rows, max_rejected_fraction=limit, progress=progress
    ) as chat_file:
        n_done = chat_file.counts.n_rows
        # The estimate measures the speed of the target. This takes time, so only do it if the
        # progress is shown.
        if progress.show is not None and isinstance(answering, LocalTarget):
            n_answers = work.n_answers * (1 - n_done / work.n_rows)
            progress(n_done, work.n_rows, answering.estimate(n_answers))
        answering.answer(islice(_rows(config, work.source), n_done, None), chat_file)
    return chat_file


@contextmanager
def open_chat_file(
    path: Path, settings: Mapping[str, Any], n_rows: int, **others: Any
) -> "Iterator[ChatFile]":
    """Open and lock a file of answered chats. Create the file if it does not exist.

    Args:
        path: path of the file.
        settings: settings that determine the answers.
        n_rows: number of rows to answer.
        others: values of further fields of `ChatFile`.

    Raises:
        OutputOccupied: another process writes the file, or the file was made with other settings.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputOccupied(
                f"Another process is writing {path}. Wait until it ends, or choose another `out`."
            ) from error
        yield ChatFile(path, file, settings, n_rows, **others)


class _Record(BaseModel):
    """Content of the JSON file next to the file of chats.

    The JSON file contains no times. So an interrupted and resumed run writes the same bytes as a
    run without an interruption.
    """

    moa_data: str = __version__
    settings: dict[str, Any]
    rows: RowCounts = RowCounts()
    # Size of the file of chats.
    n_bytes: int = 0
    # Hash of the file of chats. The value is None until the file is complete.
    sha256: str | None = None


@dataclass
class ChatFile:
    """The file of answered chats.

    ``record`` is the path of a JSON file next to this file. The JSON file contains the settings and
    the progress.
    """

    path: Path
    file: BinaryIO
    settings: Mapping[str, Any]  # settings that determine the answers
    n_rows: int  # number of rows to answer
    max_rejected_fraction: float = 1.0  # largest allowed fraction of rejected rows
    progress: Progress = SILENT

    def __post_init__(self) -> None:
        self.record = self.path.with_suffix(RECORD_SUFFIX)
        self._record = _Record(settings=dict(self.settings))
        self._resume()
        self._keeps_questions = "question_tokens" in self.settings
        # The questions that the target has written and that are in the file of chats. A new question
        # must not repeat one of them. If the questions come from a dataset, the set stays empty.
        self.asked = set[str]()
        if self._keeps_questions:
            for line in self.path.read_bytes().splitlines():
                self.asked.add(_as_one_line(json.loads(line)["messages"]))
        self._n_tokens_before = self.counts.n_tokens
        self._began_s = time.monotonic()
        self._check_rejected()  # Raise an error if an earlier run has rejected too many rows.

    @property
    def counts(self) -> RowCounts:
        """Counts of the rows that are written or rejected so far."""
        return self._record.rows

    def _resume(self) -> None:
        """Load the counts of an earlier run, and delete uncounted chats at the end of the file.

        Raises:
            OutputOccupied: the file was not written by a run with these settings.
        """
        n_bytes = self.path.stat().st_size
        recorded = self._record
        if self.record.exists():
            with parsing(
                f"{self.record} is not a record of `moa-data regenerate`",
                OutputOccupied,
                "Choose another `out`.",
            ):
                recorded = _Record.model_validate_json(self.record.read_bytes())
        elif n_bytes:
            raise OutputOccupied(
                f"{self.path} exists already, and was not written by `moa-data regenerate`. "
                "Choose another `out`."
            )
        # The settings must be the same as those of the earlier run, unless the earlier run has
        # answered nothing.
        if recorded.rows.n_rows:
            # Settings that were recorded but are missing in this run, such as the drafter, count as
            # None.
            current = dict.fromkeys(recorded.settings) | self._record.settings
            refuse_other_inputs(self.path, recorded.settings, current)
        if n_bytes < recorded.n_bytes or (recorded.sha256 and n_bytes > recorded.n_bytes):
            raise OutputOccupied(
                f"{self.path} was changed after `moa-data regenerate` had written it. Choose "
                f"another `out`, or delete this file and {self.record}."
            )
        self.file.truncate(recorded.n_bytes)
        if recorded.rows.n_rows:
            self._record = recorded
        else:
            self._save()

    def append(self, rows: Sequence[Row]) -> None:
        """Append a batch of rows to the file of chats, and sync the file to the disk."""
        answered = [row for row in rows if row.messages]
        data = "".join(row.json_line() for row in answered).encode()
        with disk_full_guard(self.path):
            self.file.write(data)
            self.file.flush()
            os.fsync(self.file.fileno())
            # Update the counts in the JSON file only after the chats are on the disk. If the
            # process is killed in between, the next run deletes the uncounted chats.
            self._record.n_bytes += len(data)
            for row in rows:
                self.counts.add(row)
            self._save()
        if self._keeps_questions:
            for row in answered:
                self.asked.add(_as_one_line(row.messages))
        n_new_tokens = self.counts.n_tokens - self._n_tokens_before
        tokens_per_s = n_new_tokens / (time.monotonic() - self._began_s)
        self.progress(self.counts.n_rows, self.n_rows, f"{tokens_per_s:.3g} answer tokens/s")
        self._check_rejected()

    def _save(self) -> None:
        if self.counts.n_rows == self.n_rows:
            with self.path.open("rb") as stream:
                self._record.sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        write_atomic(self.record, self._record.model_dump_json(indent=1).encode() + b"\n")

    def _check_rejected(self) -> None:
        """Raise an error as soon as more rows are rejected than the entire run may reject.

        Raises:
            DatasetError: too many rows are rejected.
        """
        counts = self.counts
        # Do not count rows that were rejected because an answer was cut. With keep_cut=false, users
        # expect to lose these rows.
        n_rejected = counts.rejected.total() - counts.rejected[LossReason.NO_END]
        if n_rejected > self.max_rejected_fraction * self.n_rows:
            reasons = "; ".join(reason_lines(counts.rejected, counts.examples))
            raise DatasetError(
                f"{n_rejected:,} of the first {counts.n_rows:,} rows were rejected, which is more "
                f"than `max_rejected_fraction={self.max_rejected_fraction}` allows for all "
                f"{self.n_rows:,} rows. Reasons: {reasons}. Raise "
                "this fraction and run the same command again, which keeps the answers so far, or "
                "correct the data."
            )

    def describe(self, config: RegenerateConfig) -> str:
        """Return a text about the chats in the file, with the command to run next."""
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
            f"{counts.n_at_limit:,} of the answers were cut at their token limit",
            *reason_lines(counts.dropped, counts.examples, "  dropped    "),
            *reason_lines(counts.rejected, counts.examples, "  rejected   "),
            *reason_lines(counts.cut, counts.examples, "  cut short  "),
            f"chats        {self.path}",
            f"record       {self.record}",
            f"next         {command}",
        ]
        return "\n".join(lines)


class LocalTarget:
    """A target that is loaded in this process, with a drafter if one is given.

    ``facts`` identify the target and the drafter. They are written to the JSON file next to the
    chats.
    """

    def __init__(self, config: RegenerateConfig) -> None:
        assert config.model is not None
        self._config = config
        folders = () if config.drafter is None else (config.drafter,)
        self._target, drafters = load_target_and_drafters(config, folders)
        self._target.prepare()
        self._max_tokens = min(config.questions.max_length, self._target.max_positions)
        sampling = SamplingConfig(**config.sampling.arguments())
        proposer = shape = None
        for drafter in drafters.values():
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

    def answer(self, rows: Iterator[Row], chat_file: ChatFile) -> None:
        """Answer all turns of the rows, batch by batch, and write each batch to the file."""
        # The rounding in a forward depends on all rows of the batch, and may change answers. So a
        # batch that was interrupted must be answered again with the same rows. For this reason, all
        # answers of a batch are written together.
        while batch := list(islice(rows, self._config.n_together)):
            if self._config.self_prompted is not None:
                self._ask(batch, chat_file)
            active = batch
            while active := [row for row in active if row.begin_turn()]:
                prompts: list[tuple[Row, list[int]]] = []
                for row in active:
                    if tokens := self._prompt(row):
                        prompts.append((row, tokens))
                self._generate(prompts)
            chat_file.append([self._checked(row) for row in batch])

    def estimate(self, n_answers: float) -> str:
        """Return a text with an upper bound of the time for ``n_answers`` answers.

        If the target writes the questions, the time includes them. The speed is measured with a
        batch of short prompts.
        """
        most_tokens = n_answers * self._config.max_new_tokens
        if self._config.self_prompted is not None:
            most_tokens += n_answers * self._config.questions.question_tokens
        began_s = time.perf_counter()
        prompts = [[0] * _TIMED_TOKENS] * self._config.n_together
        generations = self._decode(prompts, max_new_tokens=_TIMED_TOKENS)
        n_tokens = sum(len(generation.tokens) for generation in generations)
        tokens_per_s = n_tokens / (time.perf_counter() - began_s)
        return (
            f"at most about {format_hours(most_tokens / tokens_per_s)} at "
            f"{tokens_per_s:.3g} tokens/s"
        )

    def _ask(self, rows: Sequence[Row], chat_file: ChatFile) -> None:
        """Let the target write a question for each row. Repeated questions are dropped.

        Raises:
            DatasetError: too many questions are unusable.
        """
        settings = self._config.questions
        n_answered = chat_file.counts.n_rows
        dropped = chat_file.counts.dropped
        first_seed = (self._config.sampling.seed + 1) * _SEED_FACTOR % 2**62
        ends = {*self._target.eos_token_ids, self._user_end}
        # Maps each question to the messages that ask it. In the key, white space is normalised, so
        # that equal questions with different line breaks count as repeated.
        questions: dict[str, list[Message]] = {}
        while n_missing := len(rows) - len(questions):
            if dropped.total() > _FEW_DROPPED + _MOST_DROPPED * n_answered:
                reasons = "; ".join(reason_lines(dropped, {}))
                raise DatasetError(
                    f"The target wrote {dropped.total():,} unusable questions and only "
                    f"{n_answered:,} usable ones. Reasons: {reasons}. Choose another `out` and "
                    "change `question_temperature`, `question_top_p` or `question_tokens`, or give "
                    "a `dataset` instead of `self_prompted`."
                )
            n_before = n_answered + len(questions) + dropped.total()
            generations = generate_batch(
                self._target, [self._user_turn] * n_missing, max_new_tokens=settings.question_tokens,
                sampling=SamplingConfig(settings.question_temperature, settings.question_top_p),
                seed=first_seed + n_before, stop_token_ids=[self._user_end],
            )  # fmt: skip
            for generation in generations:
                *tokens, last = generation.tokens
                turn = [{"role": "user", "content": self._target.tokenizer.decode(tokens).strip()}]
                line = _as_one_line(turn)
                if last not in ends:
                    dropped[LossReason.UNFINISHED_QUESTION] += 1
                elif not line:
                    dropped[LossReason.EMPTY_QUESTION] += 1
                elif "\ufffd" in line or self._template.control_tokens.everywhere.search(line):
                    dropped[LossReason.NO_TEXT_QUESTION] += 1
                elif line in questions or line in chat_file.asked:
                    dropped[LossReason.REPEATED_QUESTION] += 1
                else:
                    questions[line] = turn
        for row, turn in zip(rows, questions.values(), strict=True):
            row.turns = [turn]

    def _prompt(self, row: Row) -> list[int]:
        """Return the token ids of a row's prompt.

        If the prompt cannot be rendered or is too long, end the row and return an empty list.
        """
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
        # All prompts of a batch have the same limit of new tokens: the room that the shortest
        # prompt leaves for an answer. Longer prompts leave less room, so their answers are
        # truncated afterwards.
        token_lists = [tokens for _, tokens in prompts]
        room = self._max_tokens - min(map(len, token_lists), default=0)
        seeds = [self._config.sampling.seed + row.row for row, _ in prompts]
        generations = self._decode(
            token_lists, max_new_tokens=min(self._config.max_new_tokens, room), seed=seeds
        )
        for (row, prompt), generation in zip(prompts, generations, strict=True):
            tokens = generation.tokens[: self._max_tokens - len(prompt)]
            text = self._target.tokenizer.decode(tokens, skip_special_tokens=True)
            is_cut = tokens[-1] not in self._target.eos_token_ids
            row.take(text, len(tokens), is_cut, self._config.questions.keep_cut)

    def _checked(self, row: Row) -> Row:
        """Return the row, or a rejected row if `extract` would reject its chat.

        For example, a chat template may refuse or rewrite the target's own answers.
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
# HTTP status codes with which a server refuses one request, but not all requests. The chat of the
# request ends, and the run continues.
_REFUSALS = (400, 408, 413, 422)
_FIRST_WAIT_S = 0.5
_MAX_WAIT_S = 20.0
_ADVICE = "Check `server`, `model` and OPENAI_API_KEY."


class Server:
    """A server with OpenAI's API that runs the target.

    Requests run in parallel. Answered rows are written to the file in the order of the dataset.
    """

    def __init__(self, config: RegenerateConfig) -> None:
        assert config.server is not None
        self._config = config
        self._url = config.server.rstrip("/").removesuffix("/v1") + "/v1"
        key = os.environ.get("OPENAI_API_KEY")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._arguments = parse_template_arguments(config.template_kwargs)
        self._model = asyncio.run(self._find_model())
        self.facts: dict[str, Any] = {
            "server_model": self._model,
            "template_kwargs": self._arguments,
        }

    def answer(self, rows: Iterable[Row], chat_file: ChatFile) -> None:
        """Answer all turns of the rows. A row is written once all rows before it are finished."""
        asyncio.run(self._answer_all(rows, chat_file))

    async def _answer_all(self, rows: Iterable[Row], chat_file: ChatFile) -> None:
        waiting: deque[asyncio.Task[Row]] = deque()

        async def commit_finished() -> None:
            await asyncio.wait({waiting[0]})
            finished = []
            while waiting and waiting[0].done():
                finished.append(waiting.popleft().result())
            chat_file.append(finished)

        async with self._client() as client:
            try:
                for row in rows:
                    waiting.append(asyncio.create_task(self._converse(client, row)))
                    # Rows are written in order, so finished rows wait for the oldest unfinished
                    # row. If the oldest row has a long answer, connections could become idle. To
                    # keep them busy, start up to four rows per connection.
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
        # Do not limit the time to wait for a free connection of the pool, because there are more
        # started rows than connections.
        timeout = httpx.Timeout(30, read=self._config.serving.answer_s, pool=None)
        return httpx.AsyncClient(headers=self._headers, limits=limits, timeout=timeout)

    async def _find_model(self) -> str:
        async with self._client() as client:
            answer = await self._request(client, "GET", "/models")
        status = f"{answer.status_code}: {_message(answer)}"
        with parsing(
            f"{self._url}/models did not return a list of models, but HTTP status {status}",
            ServingError,
            _ADVICE,
        ):
            names = [str(item["id"]) for item in answer.json()["data"]]
        wanted = self._config.model
        if wanted in names or (wanted is None and len(names) == 1):
            return wanted or names[0]
        raise ServingError(
            f"`model` is {wanted or 'missing'}, expected a model of the server {self._url}, which "
            f"has {', '.join(names) or 'no model'}."
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
                    f"The server {self._url} answered with HTTP status {answer.status_code} "
                    f"({_message(answer)}). {_ADVICE}"
                )
            else:
                self._take(row, answer)
        return row

    def _body(self, row: Row) -> dict[str, Any]:
        """Return the JSON body of the request for a row's next answer.

        Sampling settings at their defaults are left out, because some servers do not support them.
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
            if sampling.top_k:
                body["top_k"] = sampling.top_k
        if sampling.repetition_penalty != 1:
            body["repetition_penalty"] = sampling.repetition_penalty
        if self._arguments:
            body["chat_template_kwargs"] = self._arguments
        return body

    def _take(self, row: Row, answer: httpx.Response) -> None:
        with parsing(
            f"The server {self._url} did not answer with a chat completion", ServingError, _ADVICE
        ):
            document = answer.json()
            choice = document["choices"][0]
            message = choice["message"]
            ended = choice["finish_reason"]
            usage = document.get("usage") or {}
            n_tokens = int(usage.get("completion_tokens") or 0)
            n_prompt = int(usage.get("prompt_tokens") or 0)
            text = message.get("content") or ""
        # Refuse a server that returns reasoning separately from the answer. The chats would lack
        # the reasoning, and a drafter trained on them would not learn to draft it.
        if message.get("reasoning_content") or message.get("reasoning"):
            raise ServingError(
                f"The server {self._url} returns the reasoning separately from the answer, so the "
                "answer is not all that the model wrote. Start the server without a reasoning "
                "parser, or turn off thinking with `template_kwargs=enable_thinking=false`."
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
        """Send a request to the server and return the response.

        If the server is overloaded or cannot be reached, the request is repeated for `patience_s`.

        Raises:
            ServingError: the server was still overloaded or unreachable after `patience_s`.
            httpx.ReadTimeout: the response took longer than allowed.
        """
        wait_s = _FIRST_WAIT_S
        last_s = float("inf")
        while True:
            try:
                answer = await client.request(method, self._url + path, json=body)
                if answer.status_code not in _RETRIED:
                    return answer
                problem = f"answered with HTTP status {answer.status_code} ({_message(answer)})"
            except httpx.ReadTimeout:
                # The answer takes longer than allowed. Do not repeat the request: the server may
                # still be working on it.
                raise
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = f"cannot be reached ({first_line(error)})"
            # Count `patience_s` from the first failure. The start of the call may be much earlier,
            # because a request may wait long for a free connection.
            last_s = min(last_s, time.monotonic() + self._config.serving.patience_s)
            if time.monotonic() + wait_s > last_s:
                raise ServingError(
                    f"The server {self._url} {problem}, although the request was repeated for "
                    f"{self._config.serving.patience_s:g} s (`patience_s`). The answers so far are "
                    "kept. Start the server, then run the same command again to continue."
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_WAIT_S)


def _message(answer: httpx.Response) -> str:
    return " ".join(answer.text.split())[:200] or answer.reason_phrase
