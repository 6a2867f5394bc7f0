"""Tokenise the chats of a dataset, drop duplicates, count rejected rows, and cache the sequences.

A sequence is a tokenised chat: token ids and a response mask. The file ``texts.arrow`` in the store
caches all sequences, one per row, so that chats are not tokenised again at every start. Readers
memory-map the file. The metadata of the file contains the origin of the tokens, counts of rows, and
a sha256 of the content. The origin is all inputs that determine the tokens. If the origin has
changed or the file is damaged, the file is written again.
"""

import contextlib
import hashlib
import json
import os
import signal
import tempfile
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from ..errors import DatasetError, WorkerError
from ..files import replacing
from ..machine import usable_cores
from ..moa.targets.chat import (
    NEEDED_KEYS,
    Rejection,
    RejectReason,
    names_beside_chat,
    parse_chat,
)
from ..moa.targets.chat_tokens import TokenizedChat, tokenize_chat
from ..moa.targets.facts import TargetFacts
from ..moa.targets.finish import find_cuts
from ..moa.targets.template import ChatTemplate, texts
from ..storage.paths import StorePath
from ..storage.plan import (
    TEXTS_SHA256,
    column,
    map_texts,
    numbers,
    row_numbers,
    text_column,
    texts_sha256,
)
from ..storage.schema import TEXTS_NAME
from ..text import SILENT, Progress
from .config import DEFAULT_MAX_LENGTH, ExtractConfig
from .dataset import FORMATS, ChatSource, Columns
from .report import reason_lines

# Minimum number of rows for which processes are forked. Forking takes longer than tokenising fewer
# rows in one process.
MIN_ROWS = 2000
ROWS_PER_PROCESS = 16_384
"""Maximum number of rows that a process gets from one block.

A block is a list of rows that is read at once and divided among processes. New processes are started
for each block. A process needs some seconds to tokenise this number of rows, which is much longer
than it takes to start the process.
"""
_BLOCK_CHARS = 1 << 28  # Approximate maximum number of characters in a block of rows.
Tokenised = tuple[TokenizedChat | Rejection, bool]
"""Result of tokenising a row: the sequence or a rejection, and a flag.

The flag says whether the chat template has asked for the current time, in this row or in an earlier
row of the same process.
"""
Tokenise = Callable[[Any], Tokenised]
# Token ids, int32 [n_tokens], and response mask, uint8 [n_tokens], of a sequence.
TokensAndMask = tuple[np.ndarray, np.ndarray]
_REPORT_ROWS = 64
_COUNTS = (
    "n_rows",
    "n_duplicates",
    "n_truncated",
    "beside",
    "asked_the_time",
    "dataset_sha256",
    "rejections",
    "examples",
)
_COUNTS_KEY = b"counts"
_ORIGIN_KEY = b"origin"
# Version of the tokenisation code. Increase it whenever the code gives chats other tokens than
# before. A file ``texts.arrow`` from an earlier version is then ignored and written again.
_ORIGIN_VERSION = 5
# The columns of the rows that `regenerate` writes. If a row has exactly these columns, the target has
# generated the answers, each directly after the generation prompt of the chat template. In a
# finished chat, some templates put another text in the position of the generation prompt. An answer
# that was cut at its token limit must be tokenised after the generation prompt, as it was generated.
REGENERATED_COLUMNS = {"row", "messages", "finish_reason"}
_MOST_NAMES = 12  # Maximum number of columns and keys that a report lists.
# For datasets whose rows are chats already. This instance leaves rows unchanged.
_ALL_COLUMNS = Columns()


@dataclass
class Sequences:
    """Token ids and response masks of all sequences, and counts of rows without a sequence.

    The token ids of all sequences are concatenated into one array, and so are the masks.
    """

    # Maps the id of each sequence to the sequence's index. The id is the sha256 of tokens and mask,
    # so equal sequences have the same id.
    ids: dict[str, int] = field(default_factory=dict)
    # For each sequence, the number of its row in the dataset: int64 [n_sequences].
    source_rows: Any = field(default_factory=lambda: array("q"))
    # int64 [n_sequences + 1]. Entry i is the index of the first token of sequence i in the
    # concatenated tokens. The last entry is the total number of tokens.
    offsets: Any = field(default_factory=lambda: array("q", [0]))
    n_rows: int = 0
    n_duplicates: int = 0
    n_truncated: int = 0
    # Whether the chat template has asked for the current time.
    asked_the_time: bool = False
    # Hash of the rows or files that were read (``ChatSource.identity``).
    dataset_sha256: str = ""
    # The columns of the dataset, and the keys of messages, whose content is not part of the tokens.
    # Each name is mapped to the number of sequences that have such content in this column or key.
    beside: Counter[str] = field(default_factory=Counter)
    # Maps a rejection reason to the number of rows that were rejected for it.
    rejections: Counter[str] = field(default_factory=Counter)
    # Maps a rejection reason to details about the first row that was rejected for this reason.
    examples: dict[str, str] = field(default_factory=dict)
    _tokens: Any = field(default_factory=lambda: array("i"), repr=False)
    _mask: Any = field(default_factory=bytearray, repr=False)

    def __len__(self) -> int:
        return len(self.source_rows)

    @property
    def n_rejected(self) -> int:
        """The number of rejected rows. Duplicates do not count as rejected."""
        return self.rejections.total()

    def text(self, sequence_id: str) -> TokensAndMask:
        """Return the token ids and the response mask of a sequence."""
        index = self.ids[sequence_id]
        span = slice(self.offsets[index], self.offsets[index + 1])
        tokens = np.frombuffer(self._tokens, np.int32)
        mask = np.frombuffer(self._mask, np.uint8)
        return tokens[span], mask[span]

    def add(self, row: int, chat: TokenizedChat) -> None:
        """Add a tokenised chat. If an equal sequence exists already, count a duplicate instead.

        Args:
            row: number of the chat's row in the dataset.
            chat: the tokenised chat.
        """
        sequence_id = content_id(chat.tokens, chat.response_mask)
        if sequence_id in self.ids:
            self.n_duplicates += 1
            return
        self.ids[sequence_id] = len(self)
        self.source_rows.append(row)
        self._tokens.frombytes(chat.tokens.tobytes())
        self._mask += chat.response_mask.tobytes()
        self.offsets.append(len(self._mask))
        self.n_truncated += chat.truncated
        self.beside.update(chat.beside)

    def reject(self, row: int, rejection: Rejection) -> None:
        """Count a rejected row by its reason. The first row with a reason is kept as an example."""
        reason = rejection.reason.value
        self.rejections[reason] += 1
        self.examples.setdefault(reason, f"row {row}: {rejection.detail}".removesuffix(": "))

    def beside_lines(self) -> list[str]:
        """Describe the columns and the keys of messages whose content is not part of the tokens.

        Returns:
            A list with one line of text. If there are no such columns and keys, the list is empty.
        """
        if not self.beside:
            return []
        names = [f"{name} ({count:,})" for name, count in self.beside.most_common(_MOST_NAMES)]
        return [
            f"not used     {len(self.beside)} columns and keys that are not part of the tokens, "
            f"such as {', '.join(names)}"
        ]

    def table(self) -> pa.Table:
        """Return a table with one row per sequence. The parts of a store are planned from it.

        The columns are sequence_id, source_row, n_tokens and n_response_tokens.
        """
        mask = np.frombuffer(self._mask, np.uint8)
        offsets = np.frombuffer(self.offsets, np.int64)
        # Entry i of `n_before` is the number of response tokens among the first i tokens of all
        # sequences together. So `n_before` has one entry more than there are tokens.
        n_before = np.concatenate(([0], np.cumsum(mask, dtype=np.int64)))
        return pa.table(
            {
                "sequence_id": text_column(self.ids),
                "source_row": column(np.frombuffer(self.source_rows, np.int64)),
                "n_tokens": column(np.diff(offsets).astype(np.int32)),
                "n_response_tokens": column(np.diff(n_before[offsets]).astype(np.int32)),
            }
        )

    def to_arrow(self) -> pa.Table:
        """Return all fields as an Arrow table. The method :meth:`from_arrow` reads such a table.

        Token ids and masks are not copied.
        """
        offsets = column(np.frombuffer(self.offsets, np.int64))
        columns = {
            "sequence_id": text_column(self.ids),
            "source_row": column(np.frombuffer(self.source_rows, np.int64)),
            "tokens": pa.LargeListArray.from_arrays(
                offsets, column(np.frombuffer(self._tokens, np.int32))
            ),
            "response_mask": pa.LargeListArray.from_arrays(
                offsets, column(np.frombuffer(self._mask, np.uint8))
            ),
        }
        counts = {name: getattr(self, name) for name in _COUNTS}
        return pa.table(columns).replace_schema_metadata({_COUNTS_KEY: json.dumps(counts)})

    @classmethod
    def from_arrow(cls, table: pa.Table) -> "Sequences":
        """Make sequences from a table that :meth:`to_arrow` has made.

        Each column of the table must consist of a single Arrow chunk. Token ids and masks are not
        copied, but are views of the table's memory.
        """
        counts = json.loads(table.schema.metadata[_COUNTS_KEY])
        tokens = table["tokens"].chunk(0)
        for name in ("rejections", "beside"):
            counts[name] = Counter(counts[name])
        return cls(
            ids=row_numbers(table),
            source_rows=numbers(table, "source_row"),
            offsets=np.from_dlpack(tokens.offsets),
            _tokens=np.from_dlpack(tokens.values),
            _mask=np.from_dlpack(table["response_mask"].chunk(0).values),
            **counts,
        )


def content_id(tokens: np.ndarray, mask: np.ndarray) -> str:
    """Return the id of a sequence: the sha256 of its tokens (int32) and mask (uint8), in hex."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes())
    digest.update(np.ascontiguousarray(mask, np.uint8).tobytes())
    return digest.hexdigest()


def read_sequences(
    source: ChatSource,
    template: ChatTemplate,
    config: ExtractConfig,
    facts: TargetFacts,
    progress: Progress = SILENT,
) -> Sequences:
    """Tokenise the rows of a dataset in order, until there are ``max_sequences`` sequences.

    Returns the sequences, with counts of rejected rows and duplicates.
    """
    sequences = Sequences()
    limit = config.data.max_sequences
    total = limit or source.count_rows()
    max_length = config.data.max_length or DEFAULT_MAX_LENGTH
    columns = Columns.parse(config.data.columns)

    def tokenise(content: Any) -> Tokenised:
        return tokenize_row(template, content, max_length, columns), template.asked_the_time

    contents = (content for _, content in source.rows())
    n_processes = config.data.tokenize_processes or usable_cores()
    results = tokenise_rows(contents, tokenise, n_processes)
    tokenising = progress.of("tokenise", "chat")
    for row, (chat, asked_the_time) in enumerate(results):
        sequences.n_rows += 1
        sequences.asked_the_time |= asked_the_time
        if isinstance(chat, Rejection):
            sequences.reject(row, chat)
        else:
            _check_fits(row, chat, facts, config)
            sequences.add(row, chat)
        done = len(sequences) if limit else sequences.n_rows
        if done % _REPORT_ROWS == 0:
            tokenising(done, total)
        if len(sequences) == limit:
            break
    tokenising(total, total)
    sequences.dataset_sha256 = source.identity(sequences.n_rows)
    return sequences


def tokenise_rows(rows: Iterator[Any], tokenise: Tokenise, n_processes: int) -> Iterator[Tokenised]:
    """Tokenise rows, and yield the results in the order of the rows.

    The rows are read in blocks. Large blocks are divided among forked processes.

    Args:
        rows: the rows of the dataset.
        tokenise: tokenises a row.
        n_processes: number of processes.
    """
    if n_processes == 1:
        yield from map(tokenise, rows)
        return

    def tokenise_or_raise(row: Any) -> Tokenised:
        if isinstance(row, DatasetError):
            raise row
        return tokenise(row)

    # Start with a small block, because the caller may need only a few sequences. Later blocks are
    # larger.
    n_rows = MIN_ROWS
    rows = _ending_in_error(rows)
    while block := _read_block(rows, n_rows):
        yield from (
            _in_forks(block, tokenise_or_raise, n_processes)
            if len(block) >= MIN_ROWS
            else map(tokenise_or_raise, block)
        )
        n_rows = min(4 * n_rows, n_processes * ROWS_PER_PROCESS)


def _ending_in_error(rows: Iterator[Any]) -> Iterator[Any]:
    """Yield rows. If reading a row raises a DatasetError, yield the error as the last row.

    In this way, the rows before the error are tokenised before the error is raised.
    """
    try:
        yield from rows
    except DatasetError as error:
        yield error


def _read_block(rows: Iterator[Any], n_rows: int) -> list[Any]:
    """Read the next block of at most ``n_rows`` rows. The block is empty if no rows follow."""
    block: list[Any] = []
    n_chars = 0
    for row in islice(rows, n_rows):
        block.append(row)
        # `texts` raises RecursionError if a row is nested too deeply. Do not count the characters of
        # such a row, because the row is rejected later.
        with contextlib.suppress(RecursionError):
            n_chars += sum(map(len, texts(row)))
        if n_chars >= _BLOCK_CHARS:
            break
    return block


def _in_forks(contents: Sequence[Any], tokenise: Tokenise, n_processes: int) -> Iterator[Tokenised]:
    """Tokenise rows in forked processes and yield the results in order.

    With n processes, process k tokenises the rows k, k + n, k + 2 n and so on.
    """
    # Use forks, because a fork inherits the rows, the tokenizer and the template without copying
    # them. When the caller stops iterating, this process kills the forks. If this process itself is
    # killed, the pipes break, and the forks exit.
    forks: list[tuple[int, Connection]] = []
    try:
        with warnings.catch_warnings():
            # Since Python 3.12, forking a process with threads gives a warning: the fork may need a
            # lock that a thread has held. The code in these forks does not need such a lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            for first in range(n_processes):
                receiver, sender = Pipe(duplex=False)
                if not (pid := os.fork()):
                    receiver.close()
                    _work(contents[first::n_processes], tokenise, sender)
                sender.close()
                forks.append((pid, receiver))
        for index, content in enumerate(contents):
            # A fork sends None if tokenising a row raised an error. Tokenising the row here raises
            # the error again, in the caller's process.
            yield forks[index % n_processes][1].recv() or tokenise(content)
    except (EOFError, ConnectionError) as error:
        raise WorkerError(
            "A process that tokenised chats was killed, most likely because memory ran out. Use "
            "fewer processes, such as `tokenize_processes=1`, or free some memory."
        ) from error
    finally:
        for pid, receiver in forks:
            receiver.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _work(contents: Sequence[Any], tokenise: Tokenise, sender: Connection) -> NoReturn:
    try:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            # Ignore signals that end the command, because the parent process kills its forks.
            signal.signal(number, signal.SIG_IGN)
        # The tokenizer must not use its threads, because threads do not survive a fork.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        for content in contents:
            result = None
            with contextlib.suppress(Exception):
                result = tokenise(content)
            sender.send(result)
    finally:
        os._exit(0)


def tokenize_row(
    template: ChatTemplate, content: Any, max_length: int, columns: Columns = _ALL_COLUMNS
) -> TokenizedChat | Rejection:
    """Turn a row of a dataset into token ids and a response mask, both truncated to ``max_length``.

    The last answer of a row may have been cut off at a token limit. A column such as
    ``finish_reason`` says so; see :func:`.find_cuts`.
    """
    row: Any = columns.apply(content)
    chat = parse_chat(row)
    if isinstance(chat, Rejection):
        return chat
    n_answers = sum(message["role"] == "assistant" for message in chat.messages)
    is_cut = bool(find_cuts(row, n_answers)[-1] or find_cuts(chat.messages[-1])[0])
    is_generated = content.keys() == REGENERATED_COLUMNS
    tokenized = tokenize_chat(template, chat.messages, max_length, chat.tools, is_cut, is_generated)
    if isinstance(tokenized, Rejection):
        return tokenized
    ends_in_call = "tool_calls" in chat.messages[-1]
    beside = names_beside_chat(row, tokenized.shown_keys, ends_in_call)
    for name in NEEDED_KEYS:
        if name in beside:
            return Rejection(
                RejectReason.CONTENT_NOT_READ, f"{name}, which the chat template does not show"
            )
    beside += [f"column {name}" for name in columns.left_out(content)]
    return replace(tokenized, beside=tuple(beside))


def _check_fits(row: int, chat: TokenizedChat, facts: TargetFacts, config: ExtractConfig) -> None:
    n_positions = facts.max_position_embeddings
    largest = int(chat.tokens.max())
    if len(chat.tokens) > n_positions:
        raise DatasetError(
            f"Row {row} of {config.dataset} has {len(chat.tokens):,} tokens after truncation to "
            f"`max_length={config.data.max_length:,}`, but the target has only {n_positions:,} "
            f"positions. Use `max_length={n_positions}`."
        )
    if largest >= facts.vocab_size:
        raise DatasetError(
            f"Row {row} of the dataset gets the token id {largest} from the tokenizer, but the "
            f"target's vocabulary has only {facts.vocab_size:,} entries, so the tokenizer does not "
            "belong to this target. Copy the target's own tokenizer files into its folder."
        )


def check_counts(sequences: Sequences, source: ChatSource, config: ExtractConfig) -> None:
    """Refuse a dataset without usable rows, or with too many rejected rows."""
    if sequences.n_rows == 0:
        raise DatasetError(
            f"Dataset {source.name} has no rows. Point `dataset` at a file or folder with chats."
        )
    rejections = sequences.rejections
    reasons = "; ".join(reason_lines(rejections, sequences.examples))
    if len(sequences) == 0:
        hint = "Choose another `dataset`, or correct this one."
        if set(rejections) == {RejectReason.NO_MESSAGES.value}:
            hint = (
                "Expected a column `messages` or `conversations`. If questions and answers are in "
                "other columns, name them: `columns=user=question,assistant=answer`, or "
                f"{' or '.join(FORMATS)}. For a column of messages: `columns=messages=NAME`."
            )
        raise DatasetError(
            f"Dataset {source.name} has no usable chat among {sequences.n_rows:,} rows. Reasons: "
            f"{reasons}. {hint}"
        )
    fraction = sequences.n_rejected / sequences.n_rows
    if fraction > config.data.max_rejected_fraction:
        raise DatasetError(
            f"{sequences.n_rejected:,} of {sequences.n_rows:,} rows ({fraction:.1%}) cannot be "
            "used, which is more than "
            f"`max_rejected_fraction={config.data.max_rejected_fraction}` allows. Reasons: "
            f"{reasons}. Correct the dataset, or raise this fraction."
        )


def texts_origin(
    source: ChatSource,
    identities: Mapping[str, str],
    config: ExtractConfig,
    rendering: Mapping[str, Any],
    facts: TargetFacts,
) -> dict[str, Any] | None:
    """Return all inputs that determine the token ids of a dataset.

    The result is None if the dataset can only be identified by reading its rows.
    """
    dataset = source.origin()
    if dataset is None:
        return None
    return {
        "version": _ORIGIN_VERSION,
        "dataset": dataset,
        "tokenizer": identities["tokenizer.sha256"],
        "template": identities["template.sha256"],
        **rendering,
        "max_length": config.data.max_length,
        "max_sequences": config.data.max_sequences,
        "max_position_embeddings": facts.max_position_embeddings,
        "vocab_size": facts.vocab_size,
    }


def read_texts(store: StorePath, origin: Mapping[str, Any] | None) -> Sequences | None:
    """Return the sequences that are cached in a store.

    The result is None if the store has no cache, or if the cache is damaged or was made from other
    inputs.
    """
    path = store / TEXTS_NAME
    if origin is None or (isinstance(path, Path) and (path.is_symlink() or not path.is_file())):
        return None
    try:
        table = map_texts(path)
        metadata = table.schema.metadata
        if json.loads(metadata[_ORIGIN_KEY]) != origin:
            return None
        table.validate(full=True)
        return (
            Sequences.from_arrow(table) if texts_sha256(table) == metadata[TEXTS_SHA256] else None
        )
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        return None


def keep_texts(
    store: StorePath, sequences: Sequences, origin: Mapping[str, Any] | None
) -> Sequences:
    """Write sequences to the file ``texts.arrow`` in a store, so that later runs can read them.

    Args:
        store: path of the store.
        sequences: the sequences to write.
        origin: all inputs that determine the sequences (:func:`texts_origin`), or None if they are
            unknown. Without an origin, nothing is written, because a later run could not check
            whether the file is still valid.

    Returns:
        The sequences, memory-mapped from the file, so that the copy in memory can be freed. If
        nothing was written, the given sequences are returned.
    """
    if origin is None:
        return sequences
    path = store / TEXTS_NAME
    if isinstance(path, Path):
        return write_texts(path, sequences, origin)
    with tempfile.TemporaryDirectory(prefix="moa-data-") as folder:
        mapped = write_texts(Path(folder) / TEXTS_NAME, sequences, origin)
        path.bucket.put(path.key, Path(folder) / TEXTS_NAME)
    return mapped


def write_texts(path: Path, sequences: Sequences, origin: Mapping[str, Any] | None) -> Sequences:
    """Write sequences to an Arrow file. Return the sequences, memory-mapped from the file."""
    table = sequences.to_arrow()
    added = {_ORIGIN_KEY: json.dumps(origin, sort_keys=True), TEXTS_SHA256: texts_sha256(table)}
    table = table.replace_schema_metadata({**table.schema.metadata, **added})
    with replacing(path) as partial:
        with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        with open(partial, "rb") as written:
            os.fsync(written.fileno())
    return Sequences.from_arrow(map_texts(path))
