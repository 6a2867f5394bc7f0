"""The data of a run: which sequences train, in which order, with which random draws, read ahead of the steps.

Batch k of a run is a pure function of the store, the settings and k, so a resumed run sees what an uninterrupted one
would.

Host memory of the input is bounded: micro-batches that are read ahead take at most ``prefetch_mb`` together (one is
read ahead however large it is), the trainer holds two more (the one in use and the next), and buffers that are free
again are kept within the same bounds.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import lightning as L
import numpy as np
import torch
from torch import Tensor

from ..errors import RunWarning, TrainingError
from ..moa.drafters.registry import drafter_class
from ..moa.drafters.training import BlockDraws, Draws, TrainingInputs
from ..moa.nn import masks
from ..storage.read.store import ActivationStore
from .batches import Batch, BatchReader, await_copy, needed_fields
from .config import AnyDrafter, BlockSettings, RoundSettings, TrainConfig

_GROUPED_BATCHES = 32
"""Batches that are formed by length among each other: more would pad less, and mix the data less."""


def split_sequences(sequence_ids: list[str], validation_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split by content hash, so that the split survives re-ordering and growth of the dataset.

    Returns:
        Indices of the training and of the validation sequences, ascending.
    """
    # 32 bits of a SHA-256 are uniform enough, and exact in a float.
    points = np.array([int(sequence_id[:8], 16) / 2**32 for sequence_id in sequence_ids])
    held_out = points < validation_fraction
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def epoch_order(n_tokens: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Group the sequences of one epoch by length into random batches; a random rest that fills no batch is left out.

    Returns:
        [n_batches, batch_size] positions into ``n_tokens``.
    """
    random = np.random.default_rng([seed, epoch])
    n_batches = len(n_tokens) // batch_size
    # Cut before sorting: the rest that is left out is random, not the longest of a group.
    order = random.permutation(len(n_tokens))[: n_batches * batch_size]
    group = batch_size * _GROUPED_BATCHES
    parts = [order[start : start + group] for start in range(0, len(order), group)]
    # Stable: sequences of equal length stay in random order, the same one with every sort.
    order = np.concatenate([part[np.argsort(n_tokens[part], kind="stable")] for part in parts])
    order = order.reshape(n_batches, batch_size)
    return order[random.permutation(n_batches)]


def draw(config: TrainConfig, step: int, max_steps: int) -> Draws:
    """Draw the random numbers of one optimizer step, a pure function of seed and step."""
    # A generator of its own for each step, so that step k needs none of the draws before it; no two seeds share one.
    generator = torch.Generator().manual_seed((config.seed << 32) + step)
    rows = config.data.batch_size
    # Drafters that have no rounds draw the same numbers, so that all kinds get one order of noise seeds.
    rounds = config.drafter if isinstance(config.drafter, RoundSettings) else RoundSettings()
    step_bound = torch.randint(rounds.step_bound_min, rounds.step_bound_max + 1, (rows,), generator=generator)
    phase = torch.rand(rows, generator=generator)
    dropped = torch.rand(rows, generator=generator) < masks.staircase_drop_probability(step / max_steps)
    has_staircase = rounds.staircase and rounds.on_policy
    return Draws(
        step_bound=step_bound if rounds.step_bound else None,
        staircase_rows=~dropped if has_staircase else torch.zeros(rows, dtype=torch.bool),
        offset=(phase * step_bound).long(),
        seeds=tuple(torch.randint(1 << 62, (rows,), generator=generator).tolist()),
        noise_width=config.drafter.noise_width(),
        on_policy_weight=float(rounds.on_policy),
        teacher_forced_weight=rounds.teacher_forced_weight if rounds.on_policy else 1.0,
        blocks=_blocks(config.drafter),
    )


def _blocks(drafter: AnyDrafter) -> BlockDraws | None:
    """Return which blocks a block-parallel drafter is trained on; None for other kinds."""
    if not isinstance(drafter, BlockSettings):
        return None
    n_drafts = drafter.block_size if drafter.sample_from_anchor else drafter.block_size - 1
    if drafter.position_weights == "d-pace":
        return BlockDraws(n_drafts, drafter.anchors, d_pace=drafter.d_pace_smoothing)
    return BlockDraws(n_drafts, drafter.anchors, drafter.decay())


def rows_of(draws: Draws, rows: Tensor) -> Draws:
    """Pick the draws of some rows of a step."""
    return replace(
        draws,
        step_bound=None if draws.step_bound is None else draws.step_bound[rows],
        staircase_rows=draws.staircase_rows[rows],
        offset=None if draws.offset is None else draws.offset[rows],
        seeds=tuple(draws.seeds[row] for row in rows.tolist()),
    )


def sum_loss_weights(response: Tensor, draws: Draws, config: TrainConfig) -> float:
    """Sum the weights of all positions of response masks [B, T] that carry loss; 1 each by default."""
    return float(drafter_class(config.drafter.kind).loss_positions(response, draws).sum())


def device_share(config: TrainConfig, n_ranks: int) -> int:
    """Count the sequences of a step on each device, which the micro-batch divides.

    Raises:
        TrainingError: the batch does not divide over the devices, or the share not over the micro-batches.
    """
    share, rest = divmod(config.data.batch_size, n_ranks)
    if rest:
        raise TrainingError(f"--batch-size {config.data.batch_size} does not divide over {n_ranks} devices.")
    if share % (config.data.micro_batch_size or share):
        raise TrainingError(
            f"--micro-batch-size {config.data.micro_batch_size} does not divide the {share} sequences of a device."
        )
    return share


def _read_ahead(reads: Iterator[tuple[int, Callable[[], Batch]]], max_batches: int, max_bytes: int) -> Iterator[Batch]:
    """Yield batches in order while a thread reads the next ones.

    Args:
        reads: for each batch its bytes and the function that reads it.
        max_batches: batches that are being read or wait.
        max_bytes: bytes of them together; one batch is read ahead however large it is.
    """
    # With more threads than cores OpenMP lets those of the forward sleep at each barrier, which costs up to 5 % of a
    # step: the thread that reads must not have a team of its own.
    with ThreadPoolExecutor(1, "read-ahead", torch.set_num_threads, (1,)) as pool:
        pending: deque[tuple[int, Future[Batch]]] = deque()
        ahead_bytes = 0
        waiting = next(reads, None)
        while waiting or pending:
            while waiting and (not pending or (len(pending) < max_batches and ahead_bytes + waiting[0] <= max_bytes)):
                pending.append((waiting[0], pool.submit(waiting[1])))
                ahead_bytes += waiting[0]
                waiting = next(reads, None)
            n_bytes, batch = pending.popleft()
            ahead_bytes -= n_bytes
            yield batch.result()


@dataclass
class _Step:
    """The sequences and draws of one optimizer step on one device."""

    rows: np.ndarray
    """Positions of all its sequences, those of other devices included."""
    draws: Draws
    """One row for each of them."""
    parts: list[np.ndarray]
    """For each micro-batch of this device, indices into ``rows``."""
    response: Tensor | None = None
    """bool [B, T], response masks of all rows; None until the first micro-batch is read."""
    denominator: float = 1.0
    """Divisor of each micro-batch's sums, from those masks."""


class TrainingStream:
    """Endless micro-batches from a given step on, read ahead of the trainer.

    Args:
        sequences: indices of the training sequences.
        lengths: tokens of each of them.
        max_steps: steps of the run, for the curriculum.
        micro_batch: sequences of each; None for the settings' number, or all of a device.

    Attributes:
        steps_per_epoch: optimizer steps in which all sequences are seen, but for a rest that fills no batch.
        start_step: the step that the stream begins with.
        wait_s: seconds that the consumer waited for micro-batches.
        asked_s: ``time.perf_counter()`` when one was last asked for.
    """

    def __init__(
        self,
        reader: BatchReader,
        sequences: np.ndarray,
        lengths: np.ndarray,
        max_steps: int,
        rank: int,
        n_ranks: int,
        micro_batch: int | None = None,
    ) -> None:
        config = reader.config
        self._reader, self._sequences, self._lengths = reader, sequences, lengths
        self._max_steps, self._rank, self._n_ranks = max_steps, rank, n_ranks
        self._micro = micro_batch or config.data.micro_batch_size or device_share(config, n_ranks)
        self._epoch_order: tuple[int, np.ndarray] | None = None
        self.steps_per_epoch = len(sequences) // config.data.batch_size
        self.start_step = 0
        self.wait_s = self.asked_s = 0.0

    def __iter__(self) -> Iterator[Batch]:
        data = self._reader.config.data
        batches = _read_ahead(self._reads(), data.prefetch_batches, data.prefetch_mb << 20)
        while True:
            self.asked_s = time.perf_counter()
            batch = next(batches)
            self.wait_s += time.perf_counter() - self.asked_s
            yield batch

    def _reads(self) -> Iterator[tuple[int, Callable[[], Batch]]]:
        """Yield for each micro-batch its bytes and the function that reads it."""
        step = self.start_step
        while True:
            plan = self._plan(step)
            for index, part in enumerate(plan.parts):
                yield self._reader.n_bytes(self._lengths[plan.rows[part]]), partial(self._read, plan, index)
            step += 1

    def _plan(self, step: int) -> _Step:
        config = self._reader.config
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = epoch, epoch_order(self._lengths, config.data.batch_size, config.seed, epoch)
        # Neighbours in a batch have like lengths, so dealing them in turn gives each device the same work.
        mine = np.arange(self._rank, config.data.batch_size, self._n_ranks)
        parts = [mine[start : start + self._micro] for start in range(0, len(mine), self._micro)]
        return _Step(self._epoch_order[1][index], draw(config, step, self._max_steps), parts)

    def _read(self, plan: _Step, index: int) -> Batch:
        """Read one micro-batch; the one thread that reads ahead calls this."""
        part, n_bytes_before = plan.parts[index], self._reader.store.n_bytes_read
        if plan.response is None:
            plan.response = self._reader.response_masks(self._sequences[plan.rows])
            total = sum_loss_weights(plan.response, plan.draws, self._reader.config)
            # Lightning averages over micro-batches, and over devices.
            plan.denominator = (total or 1.0) / (len(plan.parts) * self._n_ranks)
        rows, at_once = plan.rows[part], self._micro * self._n_ranks
        inputs, encoded = self._reader.read(self._sequences[rows], self._lengths[rows], plan.response[part])
        batch = Batch(
            inputs,
            rows_of(plan.draws, torch.from_numpy(part)),
            plan.denominator,
            n_tokens=int(self._lengths[rows].sum()),
            n_tokens_of_all=int(self._lengths[plan.rows[index * at_once : (index + 1) * at_once]].sum()),
            n_bytes_read=self._reader.store.n_bytes_read - n_bytes_before,
            index=index,
            n_parts=len(plan.parts),
            encoded=encoded,
        )
        return self._reader.deliver(batch)


class ValidationBatches:
    """One device's share of the validation batches, read ahead on each pass.

    The batches are those of a single device, dealt in turn, so that the metrics do not depend on the number of devices.
    Each device gets equally many, because all synchronise between two batches: where the number does not divide, the
    last batch is given to several, under its one ``index``. Rounds have draft_length steps with a fixed phase per
    sequence.

    Args:
        sequences: indices of all validation sequences, ascending by length.
    """

    def __init__(
        self,
        reader: BatchReader,
        sequences: np.ndarray,
        lengths: np.ndarray,
        batch_size: int,
        rank: int = 0,
        n_ranks: int = 1,
    ) -> None:
        self._reader, self._sequences, self._lengths, self._batch_size = reader, sequences, lengths, batch_size
        n_batches = -(-len(sequences) // batch_size)
        self._numbers = [min(turn + rank, n_batches - 1) for turn in range(0, n_batches, n_ranks)]

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Batch]:
        data, size = self._reader.config.data, self._batch_size
        reads = (
            (self._reader.n_bytes(self._lengths[number * size : (number + 1) * size]), partial(self._read, number))
            for number in self._numbers
        )
        return _read_ahead(reads, data.prefetch_batches, data.prefetch_mb << 20)

    def _read(self, number: int) -> Batch:
        start, n_steps = number * self._batch_size, self._reader.config.validation.draft_length + 1
        part = self._sequences[start : start + self._batch_size]
        lengths = self._lengths[start : start + self._batch_size]
        phase = torch.arange(start, start + len(part)) % n_steps  # fixed: the same rounds in each validation
        draws = Draws(torch.full((len(part),), n_steps), torch.zeros(len(part), dtype=torch.bool), phase)
        inputs, encoded = self._reader.read(part, lengths)
        batch = Batch(inputs, draws, 1.0, int(lengths.sum()), encoded=encoded, index=number)
        return self._reader.deliver(batch)


class StoreDataModule(L.LightningDataModule):
    """Training and validation batches of a store.

    Attributes:
        micro_batch: sequences per forward on one device; the whole batch until trial steps have chosen it.
        steps_per_epoch: optimizer steps of a pass over the training sequences.
        max_steps: optimizer steps of the run.
    """

    def __init__(self, store: ActivationStore, config: TrainConfig) -> None:
        super().__init__()
        table = store.sequences
        self.lengths = table["n_tokens"].to_numpy().astype(np.int64)
        train, held_out = split_sequences(table["sequence_id"].to_pylist(), config.validation.validation_fraction)
        responses = table["n_response_tokens"].to_numpy()
        self.train_sequences = train
        # A shorter response holds no complete round to measure.
        usable = held_out[responses[held_out] > config.validation.draft_length]
        self.validation_sequences = usable[: config.validation.validation_sequences]
        if 0 < len(train) < config.data.batch_size and "batch_size" not in config.data.model_fields_set:
            text = f"{store.path} has {len(train)} training sequences; the batch is all of them, not the default"
            warnings.warn(f"{text} {config.data.batch_size}.", RunWarning, stacklevel=2)
            config = config.replaced(batch_size=len(train))
        self.store, self.config = store, config
        self.micro_batch = config.data.micro_batch_size or config.data.batch_size
        if len(train) < config.data.batch_size:
            raise TrainingError(
                f"{store.path} has {len(train)} committed training sequences, which cannot fill a batch of "
                f"{config.data.batch_size}; extract more or lower --batch-size."
            )
        needed_fields(store, config)
        self.steps_per_epoch = max(1, len(train) // config.data.batch_size)
        self.max_steps = config.schedule.n_steps(self.steps_per_epoch)

    def train_dataloader(self) -> TrainingStream:
        """Make the stream that starts at the trainer's current step."""
        trainer = self.trainer
        assert trainer is not None
        stream = TrainingStream(
            self._reader(trainer),
            self.train_sequences,
            self.lengths[self.train_sequences],
            self.max_steps,
            trainer.global_rank,
            trainer.world_size,
            self.micro_batch,
        )
        stream.start_step = trainer.global_step
        return stream

    def val_dataloader(self) -> ValidationBatches:
        """Make the validation batches of the trainer's device."""
        trainer = self.trainer
        assert trainer is not None
        chosen = self.validation_sequences
        chosen = chosen[np.argsort(self.lengths[chosen], kind="stable")]
        size, ranks = self.micro_batch, (trainer.global_rank, trainer.world_size)
        return ValidationBatches(self._reader(trainer), chosen, self.lengths[chosen], size, *ranks)

    def _reader(self, trainer: L.Trainer) -> BatchReader:
        return BatchReader(self.store, self.config, trainer.strategy.root_device, trainer.num_devices)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Wait for the copy of a batch, and decode it on the training device."""
        return await_copy(batch).decode()

    def longest_sequence(self) -> TrainingInputs:
        """Read the longest training sequence, [1, T, ...], on the CPU."""
        index = self.train_sequences[np.argmax(self.lengths[self.train_sequences])][None]
        reader = BatchReader(self.store, self.config, torch.device("cpu"))
        inputs, encoded = reader.read(index, self.lengths[index])
        draws = Draws(None, torch.zeros(1, dtype=torch.bool))
        return reader.deliver(Batch(inputs, draws, 1.0, 0, encoded=encoded)).inputs
