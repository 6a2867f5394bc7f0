"""All sequences of a dataset: tokenised, without duplicates, with a count of every row that gave none."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from ..text import Progress
from .chats import Rejection, RejectReason, parse_chat
from .config import ExtractConfig
from .dataset import ChatSource
from .errors import DatasetError, SequenceTooLong, TooManyRejected
from .prompts import TokenizedChat, tokenize_chat

_REPORT_ROWS = 64


@dataclass
class Sequences:
    """Tokens and masks of all sequences on one flat axis, and what became of the other rows.

    Attributes:
        ids: sequence id -> index; the id is the sha256 of tokens and mask, so equal chats have one id.
        source_rows: row in the dataset of each sequence.
        offsets: n_sequences + 1 positions on the flat axis.
        n_duplicates: rows whose sequence was already there.
        n_truncated: sequences that were cut.
        rejections: reason -> rows.
        examples: reason -> the first row that had it, with details.
    """

    ids: dict[str, int] = field(default_factory=dict)
    source_rows: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])
    n_rows: int = 0
    n_duplicates: int = 0
    n_truncated: int = 0
    rejections: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    _tokens: array[int] = field(default_factory=lambda: array("i"), repr=False)
    _mask: bytearray = field(default_factory=bytearray, repr=False)

    def __len__(self) -> int:
        """Sequences so far."""
        return len(self.source_rows)

    @property
    def n_rejected(self) -> int:
        """Rows that gave no sequence, duplicates aside."""
        return sum(self.rejections.values())

    def tokens(self, sequence_id: str) -> np.ndarray:
        """Token ids, int32 [n_tokens]."""
        index = self.ids[sequence_id]
        return np.frombuffer(self._tokens, np.int32)[self.offsets[index] : self.offsets[index + 1]]

    def response_mask(self, sequence_id: str) -> np.ndarray:
        """Response mask, uint8 [n_tokens]."""
        index = self.ids[sequence_id]
        return np.frombuffer(self._mask, np.uint8)[self.offsets[index] : self.offsets[index + 1]]

    def source_row(self, sequence_id: str) -> int:
        """Row in the dataset, from 0."""
        return self.source_rows[self.ids[sequence_id]]

    def add(self, row: int, chat: TokenizedChat) -> None:
        """Take a sequence in, unless an equal one is there."""
        tokens = np.ascontiguousarray(chat.tokens, np.int32)
        mask = np.ascontiguousarray(chat.response_mask, np.uint8)
        sequence_id = content_id(tokens, mask)
        if sequence_id in self.ids:
            self.n_duplicates += 1
            return
        self.ids[sequence_id] = len(self)
        self.source_rows.append(row)
        self._tokens.frombytes(tokens.tobytes())
        self._mask += mask.tobytes()
        self.offsets.append(len(self._mask))
        self.n_truncated += chat.truncated

    def reject(self, row: int, rejection: Rejection) -> None:
        """Count a row that gives no sequence."""
        reason = rejection.reason.value
        self.rejections[reason] += 1
        self.examples.setdefault(reason, f"row {row}" + (f": {rejection.detail}" if rejection.detail else ""))

    def rejection_lines(self) -> list[str]:
        """One line for each reason, the most frequent first, with an example."""
        counted = self.rejections.most_common()
        return [f"               {count:,}  {reason} (first: {self.examples[reason]})" for reason, count in counted]

    def table(self) -> pa.Table:
        """Table for the storage plan: sequence_id, source_row, n_tokens, n_response_tokens."""
        offsets = np.asarray(self.offsets, np.int64)
        marked = np.concatenate([[0], np.cumsum(np.frombuffer(self._mask, np.uint8), dtype=np.int64)])
        return pa.table(
            {
                "sequence_id": pa.array(list(self.ids), pa.string()),
                "source_row": pa.array(self.source_rows, pa.int64()),
                "n_tokens": pa.array(np.diff(offsets), pa.int32()),
                "n_response_tokens": pa.array(np.diff(marked[offsets]), pa.int32()),
            }
        )


def content_id(tokens: np.ndarray, mask: np.ndarray) -> str:
    """Return the sha256 of a sequence's tokens (int32) and mask (uint8) in hex."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes())
    digest.update(np.ascontiguousarray(mask, np.uint8).tobytes())
    return digest.hexdigest()


def read_sequences(
    source: ChatSource,
    tokenizer: Any,
    config: ExtractConfig,
    sizes: Mapping[str, Any],
    progress: Progress | None = None,
) -> Sequences:
    """Tokenise a dataset, in its order, up to max_sequences.

    Args:
        sizes: the target's sizes (max_position_embeddings, vocab_size).

    Raises:
        DatasetError: nothing usable in the dataset, or the tokenizer does not fit the target.
        TooManyRejected: more rejected rows than allowed.
        SequenceTooLong: a sequence has more tokens than the target has positions.
    """
    sequences = Sequences()
    total = config.data.max_sequences or source.count_rows()
    for row, content in source.rows():
        sequences.n_rows += 1
        chat = tokenize_row(tokenizer, content, config.data.max_length)
        if isinstance(chat, Rejection):
            sequences.reject(row, chat)
        else:
            _check_fits(row, chat, sizes, config)
            sequences.add(row, chat)
        done = len(sequences) if config.data.max_sequences else sequences.n_rows
        if progress and done % _REPORT_ROWS == 0:
            progress(done, total, "tokenise")
        if len(sequences) == config.data.max_sequences:
            break
    if progress:
        progress(total, total, "tokenise")
    _check_counts(sequences, source, config)
    return sequences


def tokenize_row(tokenizer: Any, content: Any, max_length: int) -> TokenizedChat | Rejection:
    """Turn a row of a dataset into token ids and a response mask, both cut to ``max_length``."""
    chat = parse_chat(content)
    if isinstance(chat, Rejection):
        return chat
    return tokenize_chat(tokenizer, chat.messages, max_length, chat.tools, chat.system)


def _check_fits(row: int, chat: TokenizedChat, sizes: Mapping[str, Any], config: ExtractConfig) -> None:
    n_positions = sizes["max_position_embeddings"]
    if len(chat.tokens) > n_positions:
        raise SequenceTooLong(
            f"Row {row} of {config.dataset} has {len(chat.tokens):,} tokens after truncation to "
            f"{config.data.max_length:,}, but the target has {n_positions:,} positions. Use --max-length {n_positions}."
        )
    largest = int(chat.tokens.max())
    if largest >= sizes["vocab_size"]:
        raise DatasetError(
            f"Row {row}: the tokenizer gives token {largest}, but the target's vocabulary has {sizes['vocab_size']:,} "
            "entries. The tokenizer does not belong to this model; copy the model's own tokenizer files."
        )


def _check_counts(sequences: Sequences, source: ChatSource, config: ExtractConfig) -> None:
    if sequences.n_rows == 0:
        raise DatasetError(f"Dataset {source.name} is empty: no rows. Point --dataset at a file or folder with chats.")
    reasons = "; ".join(
        f"{count:,} x {reason} ({sequences.examples[reason]})" for reason, count in sequences.rejections.most_common()
    )
    if len(sequences) == 0:
        hint = ""
        if set(sequences.rejections) == {RejectReason.NO_MESSAGES.value}:
            hint = " Expected a column `messages` or `conversations`."
        raise DatasetError(
            f"Dataset {source.name} has no usable chat among {sequences.n_rows:,} rows: {reasons}.{hint} "
            "Choose another --dataset or convert it."
        )
    fraction = sequences.n_rejected / sequences.n_rows
    if fraction > config.data.max_rejected_fraction:
        raise TooManyRejected(
            f"{sequences.n_rejected:,} of {sequences.n_rows:,} rows ({fraction:.1%}) cannot be used, more than "
            f"--max-rejected-fraction {config.data.max_rejected_fraction}: {reasons}. Mend the data or raise the limit."
        )
