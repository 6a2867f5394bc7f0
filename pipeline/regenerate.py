"""Let a target answer the questions of a chat dataset again, and write chats that ``extract`` takes.

The assistant's messages of a row are left out, and what stands between them is asked again, turn by turn, each with the
new answers before it::

    row       system  user  assistant  user  assistant        turns      [system, user]  [user]
    answered  system  user  ANSWER     user  ANSWER

Beside OUT is OUT.regeneration.json, the record of who answers what and how, and of how far.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import httpx2 as httpx
import torch

from .. import __version__
from ..errors import DatasetError, OptionInvalid, OutputOccupied, ServingError, TemplateError
from ..files import disk_full_guard, write_atomic
from ..moa.decoding.loop import generate_batch
from ..moa.decoding.proposer import DrafterProposer
from ..moa.decoding.sampling import SamplingConfig
from ..moa.decoding.tree import TreeShape
from ..moa.formats.checkpoint import ready_drafters
from ..moa.targets.chat import Message, Rejection, RejectReason, parse_prompt
from ..moa.targets.chat_tokens import prompt_tokens, tokenize_chat
from ..moa.targets.live import Target
from ..moa.targets.template import parse_template_arguments
from ..text import Progress, counted, first_line, printable
from .config import RegenerateConfig
from .dataset import RECORD_SUFFIX, ChatSource, Columns

_FILE = "chats.jsonl"  # name of the file in a folder
_WHEN_FULL = "The answers so far are safe. Free some space and run the same command again."


class LossReason(StrEnum):
    """Why a chat, or the rest of one, is not answered, as the user is told."""

    TOOLS = "the chat has tools, whose results are not known"
    NO_QUESTION = "nothing comes before the assistant's first message"
    TOO_LONG = "the prompt leaves no room for an answer"
    NO_END = "an answer has not ended within the tokens it may have"
    EMPTY = "an answer is empty"
    NO_TEXT = "an answer has bytes that are no text"
    UNUSABLE_PROMPT = "a prompt cannot be rendered"
    REFUSED = "the server refuses the prompt"
    LATE = "the server took too long"


@dataclass
class Row:
    """One row of the dataset: what is asked, and the answers so far."""

    row: int  # its number in the dataset, from 0
    messages: list[Message] = field(default_factory=list)  # up to its last answer; none where it is rejected
    n_answers: int = 0
    n_tokens: int = 0  # tokens of the answers
    reason: str = ""  # why the row is rejected, or its later turns were not answered; empty where all were
    detail: str = ""
    turns: list[list[Message]] = field(default_factory=list)  # before each answer to come, after the one before it
    prompt: list[Message] = field(default_factory=list)  # the messages of the turn that is being asked

    @classmethod
    def read(cls, row: int, content: Any, columns: Columns) -> "Row":
        """Read the questions of a row; the last turn is asked whether the row has an answer to it or not."""
        chosen = columns.apply(content)
        chat = chosen if isinstance(chosen, Rejection) else parse_prompt(chosen)
        if isinstance(chat, Rejection):
            return cls(row, reason=chat.reason.value, detail=printable(chat.detail))
        # The target would call them otherwise than the dataset's assistant did.
        if chat.tools or any(message["role"] == "tool" or "tool_calls" in message for message in chat.messages):
            return cls(row, reason=LossReason.TOOLS.value)
        try:
            json.dumps(chat.messages, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return cls(row, reason=RejectReason.NO_UNICODE.value)
        turns: list[list[Message]] = [[]]
        for message in chat.messages:
            if message["role"] != "assistant":
                turns[-1].append(message)
            elif turns[-1]:
                turns.append([])
            elif len(turns) == 1:
                return cls(row, reason=LossReason.NO_QUESTION.value)
        return cls(row, turns=[turn for turn in turns if turn])

    def begin_turn(self) -> bool:
        """Set the prompt of the next turn; False where the chat has ended."""
        if self.reason or not self.turns:
            return False
        self.prompt = [*self.messages, *self.turns.pop(0)]
        return True

    def take(self, text: str, n_tokens: int) -> None:
        """Add the answer to the prompt; one without a word ends the chat before it."""
        if not text.strip():
            self.end(LossReason.EMPTY)
        elif "\ufffd" in text:  # a replacement character: half a character's bytes were generated
            self.end(LossReason.NO_TEXT)
        else:
            self.messages = [*self.prompt, {"role": "assistant", "content": text}]
            self.n_answers += 1
            self.n_tokens += n_tokens

    def end(self, reason: str, detail: str = "") -> None:
        """End the chat before the turn that is being asked."""
        self.reason, self.detail = str(reason), printable(detail)


@dataclass
class RowCounts:
    """Counts of rows."""

    n_rows: int = 0
    n_answers: int = 0
    n_tokens: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # reason -> rows that gave no chat
    cut: Counter[str] = field(default_factory=Counter)  # reason -> kept chats whose later turns were not answered
    examples: dict[str, str] = field(default_factory=dict)  # reason -> the first row that had it

    @property
    def n_chats(self) -> int:
        """Rows that gave a chat."""
        return self.n_rows - self.rejected.total()

    def add(self, row: Row) -> None:
        """Count a row."""
        self.n_rows += 1
        self.n_answers += row.n_answers
        self.n_tokens += row.n_tokens
        if row.reason:
            (self.cut if row.messages else self.rejected)[row.reason] += 1
            self.examples.setdefault(row.reason, f"row {row.row}" + (f": {row.detail}" if row.detail else ""))

    def lines(self, counts: Counter[str], start: str = "") -> list[str]:
        """Return one line for each reason, the most frequent first, with an example."""
        return [f"{start}{n:,}  {reason} (first: {self.examples[reason]})" for reason, n in counts.most_common()]


def count_work(config: RegenerateConfig, progress: Progress | None = None) -> tuple[int, dict[str, Any], str]:
    """Read all rows once; returns their number, what identifies the dataset, and in one line what will be done."""
    source, n_rows, n_chats, n_answers = _source(config), 0, 0, 0
    total = source.count_rows()
    for row in _rows(config, source):
        n_rows += 1
        n_chats += bool(row.turns)
        n_answers += len(row.turns)
        if progress and n_rows % 1024 == 0:
            progress(n_rows, max(total, n_rows), "read rows")
    if not n_chats:
        raise DatasetError(
            f"Dataset {source.name} has no chat that asks something among {n_rows:,} rows. Point --dataset at chats, "
            "or name their columns with --columns."
        )
    dataset = source.origin() or {"sha256": source.identity()}
    drafts = f", drafts by {config.drafter}" if config.drafter else ""
    who = f"requests at once to {config.server}" if config.server else f"chats at a time by {config.model}{drafts}"
    text = (
        f"{counted(n_rows, 'row')}, {counted(n_chats, 'chat')} that ask for {n_answers:,} answers "
        f"of at most {config.max_new_tokens:,} tokens; {config.n_together} {who}"
    )
    return n_rows, {"name": source.describe()} | dataset, text


def regenerate(config: RegenerateConfig, progress: Progress | None = None) -> "Answers":
    """Have the questions of a dataset answered; returns the file of the answers, closed.

    Raises:
        DatasetError: the dataset asks nothing, or more rows are rejected than allowed.
        OutputOccupied: the output holds something else, or answers that were begun with other settings.
    """
    out, folder = Path(config.out).expanduser(), Path(config.dataset).expanduser()
    out = out if out.suffix == ".jsonl" else out / _FILE
    if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
        raise OptionInvalid(f"--out {config.out} lies in the dataset {config.dataset}, which it would change. Move it.")
    n_rows, dataset, _ = count_work(config, progress)
    asked, limit = config.questions, config.questions.max_rejected_fraction
    answering = LocalTarget(config) if config.server is None else Server(config)
    settings = {
        "dataset": dataset,
        "n_rows": n_rows,
        "columns": list(asked.columns),
        "model": config.model,
        **answering.facts,
        "max_new_tokens": config.max_new_tokens,
        "max_length": asked.max_length,
        **config.sampling.model_dump(mode="json"),
        **({} if config.server else {"batch_size": config.n_together}),
    }
    with open_answers(out, json.loads(json.dumps(settings)), n_rows) as answers:
        counts = answers.counts

        def commit(rows: Sequence[Row]) -> None:
            if rows:
                answers.append(rows)
            if progress:
                progress(counts.n_rows, n_rows, "regenerate")
            # As soon as it is certain that more rows are rejected than allowed.
            if counts.rejected.total() > limit * n_rows:
                raise DatasetError(
                    f"{counts.rejected.total():,} of the first {counts.n_rows:,} rows ({n_rows:,} in all) gave no "
                    f"chat, more than --max-rejected-fraction {limit}: {'; '.join(counts.lines(counts.rejected))}. "
                    "Raise that fraction and run the same command again, which keeps the answers so far; or correct "
                    "the data."
                )

        commit([])  # an earlier run may have rejected too many already
        answering.answer(islice(_rows(config, _source(config)), counts.n_rows, None), commit)
    return answers


def _source(config: RegenerateConfig) -> ChatSource:
    asked = config.questions
    return ChatSource(config.dataset, asked.split, asked.dataset_config, asked.dataset_revision)


def _rows(config: RegenerateConfig, source: ChatSource) -> Iterator[Row]:
    columns = Columns.parse(config.questions.columns)
    for number, content in islice(source.rows(), config.questions.max_rows):
        source.count_row()
        yield Row.read(number, content, columns)


@contextmanager
def open_answers(path: Path, settings: Mapping[str, Any], n_rows: int) -> "Iterator[Answers]":
    """Lock a file of answered chats, made if missing; one that was begun with other settings is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputOccupied(f"{path} is being written by another process; wait for it to end.") from error
        yield Answers(path, file, settings, n_rows)


class Answers:
    """The file of answered chats, and the ``record`` beside it, which says who answered what and how, and how far.

    Args:
        settings: what shapes the answers.
        n_rows: rows that there are to answer.
    """

    def __init__(self, path: Path, file: BinaryIO, settings: Mapping[str, Any], n_rows: int) -> None:
        self.path, self.record = path, path.with_suffix(RECORD_SUFFIX)
        self.counts = RowCounts()
        self._file, self._settings, self._n_rows, self._n_bytes = file, settings, n_rows, 0
        self._resume()

    def _resume(self) -> None:
        """Take up the counts of the record, and cut off what was written after it."""
        n_bytes = self.path.stat().st_size
        if not self.record.exists():
            if n_bytes:
                raise OutputOccupied(f"{self.path} exists, and no regeneration wrote it. Choose another --out.")
            self._save()
            return
        try:
            values = json.loads(self.record.read_bytes())
            rows, begun, self._n_bytes = values["rows"], dict(values["settings"]), int(values["n_bytes"])
            self.counts = RowCounts(**rows | {name: Counter(rows[name]) for name in ("rejected", "cut")})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OutputOccupied(f"{self.record} is no record of a regeneration. Choose another --out.") from error
        now = self._settings
        changed = [name for name in {**begun, **now} if begun.get(name) != now.get(name)]
        if changed and self.counts.n_rows:  # without a row nothing was answered by those settings
            listed = ", ".join(f"{name} {begun.get(name)} (now {now.get(name)})" for name in changed)
            raise OutputOccupied(f"{self.path} was begun with {listed}. Give those settings, or another --out.")
        is_complete = self.counts.n_rows == self._n_rows
        if n_bytes < self._n_bytes or (is_complete and n_bytes > self._n_bytes):
            raise OutputOccupied(f"{self.path} was changed after it was written. Choose another --out, or delete it.")
        self._file.truncate(self._n_bytes)
        if changed:
            self._save()

    def append(self, rows: Sequence[Row]) -> None:
        """Add a batch, and wait until it is on the disk."""
        lines = [{"row": row.row, "messages": row.messages} for row in rows if row.messages]
        data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        with disk_full_guard(self.path, _WHEN_FULL):
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
            # The record comes after the chats that it counts: what a kill leaves beyond them is cut off.
            self._n_bytes += len(data)
            for row in rows:
                self.counts.add(row)
            self._save()

    def _save(self) -> None:
        rows = vars(self.counts)
        # No times: a resumed run ends in the bytes of one that was not interrupted.
        record = {"moa_data": __version__, "settings": self._settings, "rows": rows, "n_bytes": self._n_bytes}
        if self.counts.n_rows == self._n_rows:
            with self.path.open("rb") as stream:
                record["sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
        write_atomic(self.record, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())

    def describe(self, config: RegenerateConfig) -> str:
        """Return the report as lines, the command that comes next included."""
        counts, arguments = self.counts, self._settings["template_kwargs"]
        command = (
            f"moa-data extract --model {(not config.server and config.model) or 'MODEL'} --dataset {self.path} "
            f"--max-length {config.questions.max_length}"
            + (f" --template-kwargs '{json.dumps(arguments)}'" if arguments else "")
            + " --out STORE"
        )
        lines = [
            f"answered     {counts.n_chats:,} of {counted(counts.n_rows, 'row')}, "
            f"{counted(counts.n_answers, 'answer')}, {counts.n_tokens:,} tokens",
            *counts.lines(counts.rejected, "  rejected   "),
            *counts.lines(counts.cut, "  cut short  "),
            f"chats        {self.path}",
            f"record       {self.record}",
            f"next         {command}",
        ]
        return "\n".join(lines)


class LocalTarget:
    """A target that is loaded here, with a drafter's drafts where there is one; ``facts`` identify both."""

    def __init__(self, config: RegenerateConfig) -> None:
        assert config.model is not None
        self._config, self._sampling = config, SamplingConfig(**config.sampling.arguments())
        self._target = Target.load(config.model, getattr(torch, config.dtype), config.device, config.revision)
        self._target.prepare()
        self._max_tokens = min(config.questions.max_length, self._target.max_positions)
        self._proposer: DrafterProposer | None = None
        self._shape: TreeShape | None = None
        folders = () if config.drafter is None else (config.drafter,)
        for drafter in ready_drafters(self._target, folders, config.template_kwargs, config.model).values():
            self._proposer, self._shape = DrafterProposer(self._target, drafter, self._sampling), config.shape()
            if config.tree is None and self._proposer.max_depth is not None:
                self._shape = self._shape.cut(self._proposer.max_depth)
        self._template = self._target.template
        self.facts: dict[str, Any] = {
            "target": dict(self._target.identity),
            "template_kwargs": self._template.arguments,
            "drafter": config.drafter,
            "tree": None if self._shape is None else str(self._shape),
            "dtype": config.dtype,
            "device": self._target.device.type,
        }

    def answer(self, rows: Iterator[Row], commit: Callable[[Sequence[Row]], None]) -> None:
        """Answer all turns of the rows, a batch at a time; each batch is committed."""
        # A batch that was interrupted is asked again as a whole, because rounding in a batch depends on its rows.
        while batch := list(islice(rows, self._config.n_together)):
            asked = batch
            while asked := [row for row in asked if row.begin_turn()]:
                self._generate([(row, tokens) for row in asked if (tokens := self._prompt(row))])
            commit([self._checked(row) for row in batch])

    def _prompt(self, row: Row) -> list[int]:
        """Return the tokens of a prompt; none where the chat ends before it."""
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
        # No row needs more than the shortest prompt has room for.
        room = self._max_tokens - min((len(tokens) for _, tokens in prompts), default=0)
        generations = generate_batch(
            self._target, [tokens for _, tokens in prompts], max_new_tokens=min(self._config.max_new_tokens, room),
            proposer=self._proposer, tree=self._shape, sampling=self._sampling,
            seed=[self._config.sampling.seed + row.row for row, _ in prompts],
        )  # fmt: skip
        for (row, prompt), generation in zip(prompts, generations, strict=True):
            tokens = generation.tokens
            if tokens[-1] in self._target.eos_token_ids and len(prompt) + len(tokens) <= self._max_tokens:
                row.take(self._target.tokenizer.decode(tokens, skip_special_tokens=True), len(tokens))
            else:
                row.end(LossReason.NO_END, f"{len(tokens):,} tokens after {len(prompt):,}")

    def _checked(self, row: Row) -> Row:
        """Reject what `extract` would: a template may refuse the target's own answers, or rewrite them."""
        if row.messages:
            length = self._config.questions.max_length
            found = tokenize_chat(self._template, row.messages, length)
            if isinstance(found, Rejection):
                return Row(row.row, reason=found.reason.value, detail=printable(found.detail))
        return row


_TOO_LONG = ("context_length_exceeded", "maximum context length", "shorten")
_RETRIED = (409, 425, 429, 500, 502, 503, 504)
_REFUSALS = (400, 413, 422)  # statuses that concern one request
_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 20.0
_ADVICE = "Check --server, --model and OPENAI_API_KEY."


class Server:
    """A server that speaks OpenAI's API: many requests at once, rows committed in their order."""

    def __init__(self, config: RegenerateConfig) -> None:
        assert config.server is not None
        self._config = config
        base = config.server.rstrip("/")
        self._url = base if base.endswith("/v1") else f"{base}/v1"
        key = os.environ.get("OPENAI_API_KEY")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._arguments = parse_template_arguments(config.template_kwargs)
        self._model = asyncio.run(self._find_model())
        self.facts: dict[str, Any] = {"server_model": self._model, "template_kwargs": self._arguments}

    def answer(self, rows: Iterable[Row], commit: Callable[[Sequence[Row]], None]) -> None:
        """Ask all rows; each is committed as soon as those before it are there."""
        asyncio.run(self._answer_all(rows, commit))

    async def _answer_all(self, rows: Iterable[Row], commit: Callable[[Sequence[Row]], None]) -> None:
        n_together = self._config.n_together
        waiting: deque[asyncio.Task[Row]] = deque()

        async def commit_finished() -> None:
            await asyncio.wait({waiting[0]})
            finished = []
            while waiting and waiting[0].done():
                finished.append(waiting[0].result())
                waiting.popleft()
            commit(finished)

        async with self._client() as client:
            try:
                for row in rows:
                    waiting.append(asyncio.create_task(self._converse(client, row)))
                    # Some rows ahead of the requests, so that one long answer does not hold up those after it.
                    while len(waiting) >= 4 * n_together:
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
        # Without a limit for the pool: rows wait there for one of the connections.
        timeout = httpx.Timeout(30, read=self._config.serving.answer_s, pool=None)
        return httpx.AsyncClient(headers=self._headers, limits=limits, timeout=timeout)

    async def _find_model(self) -> str:
        async with self._client() as client:
            answer = await self._request(client, "GET", "/models")
        try:
            names = [str(item["id"]) for item in answer.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            status = f"{answer.status_code} ({_message(answer)})"
            raise ServingError(f"{self._url}/models gives no list of models: {status}. {_ADVICE}") from error
        wanted = self._config.model
        if wanted in names or (wanted is None and len(names) == 1):
            return wanted or names[0]
        raise ServingError(f"{self._url} has {', '.join(names) or 'no model'}. Name one of them by --model.")

    async def _converse(self, client: httpx.AsyncClient, row: Row) -> Row:
        while row.begin_turn():
            try:
                answer = await self._request(client, "POST", "/chat/completions", self._body(row))
            except httpx.ReadTimeout:
                row.end(LossReason.LATE, f"more than {self._config.serving.answer_s:g} s")
                break
            if answer.status_code == 408:
                row.end(LossReason.LATE, _message(answer))
            elif answer.status_code in _REFUSALS:
                is_too_long = any(sign in answer.text for sign in _TOO_LONG)
                row.end(LossReason.TOO_LONG if is_too_long else LossReason.REFUSED, _message(answer))
            elif answer.status_code != 200:
                raise ServingError(f"{self._url} answers {answer.status_code} ({_message(answer)}). {_ADVICE}")
            else:
                self._take(row, answer)
        return row

    def _body(self, row: Row) -> dict[str, Any]:
        """Return a request; settings at their defaults are left out, since not every server knows all of them."""
        sampling = self._config.sampling
        body: dict[str, Any] = {
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
        try:
            document = answer.json()
            choice = document["choices"][0]
            message, ended = choice["message"], choice["finish_reason"]
            usage = document.get("usage") or {}
            n_tokens, n_prompt = (int(usage.get(f"{part}_tokens") or 0) for part in ("completion", "prompt"))
            text = message.get("content") or ""
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServingError(f"{self._url} gives no chat completion ({first_line(error)}). {_ADVICE}") from error
        # A drafter would learn answers without what led to them.
        if message.get("reasoning_content") or message.get("reasoning"):
            raise ServingError(
                f"{self._url} keeps the reasoning apart from the answer, so that the text is not all that was written. "
                "Start it without a reasoning parser, or leave thinking out: --template-kwargs enable_thinking=false."
            )
        if ended == "stop" and n_prompt + n_tokens <= self._config.questions.max_length:
            row.take(text, n_tokens)
        elif ended == "tool_calls":
            row.end(LossReason.TOOLS)
        else:
            row.end(LossReason.NO_END, f"{n_tokens:,} tokens after {n_prompt:,}, {ended}")

    async def _request(
        self, client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        """Send a request, again for `patience_s` while the server is overloaded or out of reach."""
        wait_s, last_s = _FIRST_WAIT_S, float("inf")
        while True:
            try:
                answer = await client.request(method, self._url + path, json=body)
                if answer.status_code not in _RETRIED:
                    return answer
                problem = f"answers {answer.status_code} ({_message(answer)})"
            except httpx.ReadTimeout:
                raise  # it is working on the request, and would begin anew
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = f"cannot be reached ({first_line(error)})"
            # From the first failure on: a request may have waited for one of the connections.
            last_s = min(last_s, time.monotonic() + self._config.serving.patience_s)
            if time.monotonic() + wait_s > last_s:
                raise ServingError(
                    f"{self._url} {problem}, for {self._config.serving.patience_s:g} s. Start it, and run the same "
                    "command again: the answers so far are kept."
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_WAIT_S)


def _message(answer: httpx.Response) -> str:
    return " ".join(answer.text.split())[:200] or answer.reason_phrase
