"""Divide the sequences of a store into training and validation, order them, and read them ahead.

A batch is the sequences of one optimizer step on all devices. It is divided into micro-batches. In
one forward, a device processes one micro-batch. The draws of a step are its random numbers, for
example the lengths of draft rounds.

The classes, from the outermost to the innermost::

    StoreDataModule       chooses the training and validation sequences of a store
    TrainingStream        orders the sequences, makes the draws of each step, and reads
                          micro-batches ahead in a thread
    BatchReader           reads one micro-batch (in ``batches.py``)

Batch k of a run is a pure function of the store, the settings and k, so a resumed run sees the same
batches as an uninterrupted run. All micro-batches that are read ahead take at most ``prefetch_mb``
MiB of memory, and the trainer holds two more micro-batches.

Shapes: B sequences, T tokens of the longest sequence in the batch.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from ..errors import TrainingError
from ..files import parse_object
from ..moa.drafters.registry import drafter_class
from ..moa.drafters.training import BlockDraws, Draws, TrainingInputs, draw_anchors
from ..moa.nn import masks
from ..storage.backend import backend_of
from ..storage.plan import numbers
from ..storage.read.store import ActivationStore
from ..storage.schema import ANSWERS_BY, RUNS_NAME
from .batches import Batch, BatchReader, await_copy, fields_read
from .config import AnyDrafter, BlockSettings, MachineSettings, RoundSettings, TrainConfig, known
from .defaults import CPU_MICRO_BATCH_TOKENS, RunFacts, choose_settings, choose_validation_fraction

# Number of batches in a group. To reduce padding, the sequences of an epoch are divided into groups
# at random. Each group is sorted by length and then divided into batches. Larger groups give less
# padding, but the content of the batches is less random.
_GROUPED_BATCHES = 32


def target_identity(store: ActivationStore) -> dict[str, str]:
    """Return the hashes by which a store identifies its target, such as ``weights_sha256``."""
    hashes: dict[str, str] = {}
    for name, value in store.manifest.identities.items():
        if name.startswith("target."):
            hashes[name.removeprefix("target.")] = str(value)
    return hashes


def has_own_answers(store: ActivationStore) -> bool:
    """Return whether the store records that its target wrote the answers itself."""
    weights = target_identity(store).get("weights_sha256")
    runs = store.path / RUNS_NAME
    for name in backend_of(runs).names_in():
        with contextlib.suppress(OSError, ValueError):
            if weights and parse_object(backend_of(runs / name).read()).get(ANSWERS_BY) == weights:
                return True
    return False


def split_sequences(
    sequence_ids: list[str], validation_fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Split sequences into training and validation sequences.

    Returns:
        The indices of the training sequences and of the validation sequences, ascending.
    """
    # The split depends only on the content hash of each sequence, so a sequence stays in the same
    # split if the dataset is reordered or grows. The first 32 bits of the hash are uniform enough,
    # and a float represents a 32-bit number exactly.
    points = np.array([int(sequence_id[:8], 16) / 2**32 for sequence_id in sequence_ids])
    held_out = points < validation_fraction
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def epoch_order(n_tokens: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Divide the sequences of one epoch into batches in random order.

    The sequences of a batch have similar lengths. Every batch is complete: if the number of
    sequences is not a multiple of the batch size, some randomly chosen sequences are left out.

    Args:
        n_tokens: number of tokens of each sequence.

    Returns:
        Indices into ``n_tokens``, [n_batches, batch_size].
    """
    random = np.random.default_rng([seed, epoch])
    n_batches = len(n_tokens) // batch_size
    # Leave out the surplus sequences before sorting by length. After sorting, the last sequences
    # would be left out, which are the longest ones.
    order = random.permutation(len(n_tokens))[: n_batches * batch_size]
    group = batch_size * _GROUPED_BATCHES
    parts: list[np.ndarray] = []
    for start in range(0, len(order), group):
        part = order[start : start + group]
        # Use a stable sort, so that the order of sequences with equal length does not depend on the
        # sorting algorithm.
        parts.append(part[np.argsort(n_tokens[part], kind="stable")])
    order = np.concatenate(parts).reshape(n_batches, batch_size)
    return order[random.permutation(n_batches)]


def draw(config: TrainConfig, step: int, max_steps: int) -> Draws:
    """Draw the random numbers of one optimizer step. They depend only on settings and step."""
    # Each step has its own generator, so that a resumed run need not repeat the draws of earlier
    # steps. Runs with different seeds have different generators in every step.
    generator = torch.Generator().manual_seed((config.seed << 32) + step)
    rows = known(config.data.batch_size)
    # Draw the numbers for draft rounds even if the drafter does not train on rounds. The seeds of
    # the noise are drawn after these numbers. So all kinds of drafters get the same seeds.
    rounds = config.drafter if isinstance(config.drafter, RoundSettings) else RoundSettings()
    step_bound = torch.randint(
        rounds.step_bound_min, rounds.step_bound_max + 1, (rows,), generator=generator
    )
    phase = torch.rand(rows, generator=generator)
    dropped = torch.rand(rows, generator=generator) < masks.staircase_drop_probability(
        step / max_steps
    )
    has_staircase = rounds.staircase and rounds.on_policy
    return Draws(
        step_bound=step_bound if rounds.step_bound else None,
        staircase_rows=~dropped if has_staircase else torch.zeros(rows, dtype=torch.bool),
        offset=(phase * step_bound).long(),
        seeds=tuple(torch.randint(1 << 62, (rows,), generator=generator).tolist()),
        noise_width=getattr(config.drafter, "feature_noise", 0.0),
        on_policy_weight=float(rounds.on_policy),
        teacher_forced_weight=rounds.teacher_forced_weight if rounds.on_policy else 1.0,
        blocks=_blocks(config.drafter),
    )


def _blocks(drafter: AnyDrafter) -> BlockDraws:
    if not isinstance(drafter, BlockSettings):
        return BlockDraws()
    n_drafts = drafter.block_size if drafter.sample_from_anchor else drafter.block_size - 1
    return BlockDraws(
        n_drafts, drafter.anchors, drafter.decay() if drafter.position_weights == "decay" else 0.0
    )


def rows_of(draws: Draws, rows: Tensor) -> Draws:
    """Return the random choices for some sequences of a step.

    Args:
        draws: the random choices for all sequences of the step.
        rows: indices of the chosen sequences among all sequences of the step.
    """
    chosen: Draws = apply_to_collection(draws, Tensor, lambda tensor: tensor[rows])
    chosen.seeds = tuple(draws.seeds[row] for row in rows.tolist())
    return chosen


def with_anchors(draws: Draws, response: Tensor, config: TrainConfig) -> Draws:
    """Add random anchors to the random choices for a micro-batch.

    Anchors are the positions at which a block drafter starts its blocks of drafts. If the run's
    drafter is of another kind, it has no anchors, and ``draws`` is returned unchanged. The anchors
    are chosen on the host, because choosing them on the device would need a synchronization.

    Args:
        draws: the random choices for the sequences of the micro-batch, without anchors.
        response: response masks [B, T] on the host.
        config: the settings of the run.
    """
    if not isinstance(config.drafter, BlockSettings):
        return draws
    anchors, valid = draw_anchors(response, draws)
    return replace(draws, blocks=replace(draws.blocks, anchors=torch.where(valid, anchors, -1)))


def sum_loss_weights(response: Tensor, draws: Draws, config: TrainConfig) -> float:
    """Return the sum of the loss weights of all positions in B sequences.

    By default, positions of responses have the weight 1. Other positions and position 0 have the
    weight 0.

    Args:
        response: response masks [B, T] of the sequences.
        draws: random choices for the sequences, such as the lengths of their draft rounds. For some
            drafters, the weights depend on them.
        config: the settings of the run.
    """
    return float(drafter_class(config.drafter.kind).loss_positions(response, draws).sum())


def trains_on_cpu(machine: MachineSettings) -> bool:
    """Return whether a run with these settings trains on the CPU."""
    return machine.accelerator == "cpu" or (
        machine.accelerator == "auto" and not torch.cuda.is_available()
    )


def count_devices(machine: MachineSettings) -> int:
    """Return the number of devices that a run with these settings uses on all machines."""
    n_devices = 1 if trains_on_cpu(machine) else max(1, torch.cuda.device_count())
    return machine.num_nodes * (n_devices if machine.devices == "auto" else int(machine.devices))


def device_share(config: TrainConfig, n_ranks: int) -> int:
    """Return the number of sequences of a step that each device processes.

    Raises:
        TrainingError: the batch size is not a multiple of the number of devices, or the number of
            sequences per device is not a multiple of the micro-batch size.
    """
    share, rest = divmod(known(config.data.batch_size), n_ranks)
    if rest:
        raise TrainingError(
            f"`batch_size={config.data.batch_size}` is not a multiple of the {n_ranks} devices. "
            "Choose a multiple of this number."
        )
    if share % (config.data.micro_batch_size or share):
        raise TrainingError(
            f"`micro_batch_size={config.data.micro_batch_size}` does not divide the {share} "
            "sequences that each device processes per step. Choose a divisor of this number."
        )
    return share


def _read_ahead(
    reads: Iterator[tuple[int, Callable[[], Batch]]], max_batches: int, max_bytes: int
) -> Iterator[Batch]:
    """Yield batches while a thread reads the next ones.

    Args:
        reads: for each batch, its size in bytes and the function that reads it.
        max_batches, max_bytes: maximum number and total size of batches that are read ahead. At
            least one batch is read ahead, even if it is larger than ``max_bytes``.
    """
    # Limit the reading thread to one OpenMP thread. With more, there would be more OpenMP threads
    # than cores. OpenMP would then put the threads of the forward to sleep at each barrier, which
    # makes a step up to 5 % slower.
    with ThreadPoolExecutor(1, "read-ahead", torch.set_num_threads, (1,)) as pool:
        pending: deque[tuple[int, Future[Batch]]] = deque()
        ahead_bytes = 0
        for n_bytes, read in reads:
            while pending and (len(pending) >= max_batches or ahead_bytes + n_bytes > max_bytes):
                n_done_bytes, batch = pending.popleft()
                ahead_bytes -= n_done_bytes
                yield batch.result()
            pending.append((n_bytes, pool.submit(read)))
            ahead_bytes += n_bytes
        for _, batch in pending:
            yield batch.result()


@dataclass
class _Step:
    """The sequences and random choices of one optimizer step, divided into micro-batches."""

    sequences: np.ndarray  # Indices in the store of all sequences of the step, on all devices.
    # Random choices for all sequences of the step, such as the lengths of their draft rounds.
    draws: Draws
    # The sequences of each micro-batch of this device, as indices into ``sequences``.
    parts: list[np.ndarray]
    # Response masks of all sequences of the step, bool [B, T]. The value is None until the first
    # micro-batch is read.
    response: Tensor | None = None
    # Divisor of the loss of each micro-batch. It is computed from the response masks when the first
    # micro-batch is read.
    denominator: float = 1.0


class TrainingStream:
    """Endless stream of the micro-batches of one device. A thread reads them ahead of the trainer.

    Args:
        reader: reads the micro-batches.
        sequences: indices in the store of the training sequences.
        max_steps: number of steps of the run. Some draws depend on the completed fraction of the
            run.
        rank, n_ranks: rank of this process, and number of processes.
        micro_batch: number of sequences per micro-batch. If the argument is None, the number in the
            settings is used. Without such a setting, a micro-batch has all sequences of a step on
            this device.
    """

    def __init__(
        self,
        reader: BatchReader,
        sequences: np.ndarray,
        max_steps: int,
        rank: int,
        n_ranks: int,
        micro_batch: int | None = None,
    ) -> None:
        config = reader.config
        self._reader = reader
        self._sequences = sequences
        self._max_steps = max_steps
        self._rank = rank
        self._n_ranks = n_ranks
        self._micro = micro_batch or config.data.micro_batch_size or device_share(config, n_ranks)
        self.start_step = 0  # Index of the first optimizer step in the stream.
        self.wait_s = 0.0  # Seconds that the trainer has waited for micro-batches.
        # ``time.perf_counter()`` at the trainer's last request for a micro-batch.
        self.asked_s = 0.0

    def __iter__(self) -> Iterator[Batch]:
        data = self._reader.config.data
        batches = _read_ahead(self._reads(), data.prefetch_batches, data.prefetch_mb << 20)
        while True:
            self.asked_s = time.perf_counter()
            batch = next(batches)
            self.wait_s += time.perf_counter() - self.asked_s
            yield batch

    def micro_batch(self, sequences: np.ndarray) -> Batch:
        """Read a micro-batch of the given sequences, as if a step had only these sequences."""
        rows = np.arange(len(sequences))
        draws = rows_of(draw(self._reader.config, 0, self._max_steps), torch.from_numpy(rows))
        return self._read(_Step(sequences, draws, [rows]), 0)

    def _reads(self) -> Iterator[tuple[int, Callable[[], Batch]]]:
        config = self._reader.config
        batch_size = known(config.data.batch_size)
        lengths = self._reader.store.lengths[self._sequences]
        # Deal the sequences of the batch to the devices round-robin. Neighbours in the batch have
        # similar lengths, so all devices get about the same work.
        mine = np.arange(self._rank, batch_size, self._n_ranks)
        parts = [mine[start : start + self._micro] for start in range(0, len(mine), self._micro)]
        step = self.start_step
        while True:
            epoch, n_done = divmod(step, len(self._sequences) // batch_size)
            order = epoch_order(lengths, batch_size, config.seed, epoch)
            for rows in order[n_done:]:
                plan = _Step(self._sequences[rows], draw(config, step, self._max_steps), parts)
                for index, part in enumerate(parts):
                    n_bytes = self._reader.n_bytes(plan.sequences[part])
                    yield n_bytes, partial(self._read, plan, index)
                step += 1

    def _read(self, plan: _Step, index: int) -> Batch:
        """Read one micro-batch of a step. Only the read-ahead thread calls this method."""
        part = plan.parts[index]
        n_bytes_before = self._reader.store.n_bytes_read
        if plan.response is None:
            plan.response = self._reader.response_masks(plan.sequences)
            total = sum_loss_weights(plan.response, plan.draws, self._reader.config)
            # Lightning averages the loss over micro-batches and devices. This average must be the
            # mean over all loss positions of the step. So the summed loss of each micro-batch is
            # divided by the average number of loss positions per micro-batch: the number of loss
            # positions of the step, divided by the number of micro-batches of the step on all
            # devices.
            plan.denominator = (total or 1.0) / (len(plan.parts) * self._n_ranks)
        at_once = self._micro * self._n_ranks
        of_all = plan.sequences[index * at_once : (index + 1) * at_once]
        response = plan.response[part]
        draws = rows_of(plan.draws, torch.from_numpy(part))
        batch = self._reader.batch(
            plan.sequences[part],
            with_anchors(draws, response, self._reader.config),
            response,
            denominator=plan.denominator,
            n_tokens_of_all=int(self._reader.store.lengths[of_all].sum()),
            index=index,
            n_parts=len(plan.parts),
        )
        return replace(batch, n_bytes_read=self._reader.store.n_bytes_read - n_bytes_before)


class ValidationBatches:
    """One device's validation batches, sorted by sequence length. A thread reads them ahead."""

    def __init__(
        self,
        reader: BatchReader,
        sequences: np.ndarray,
        size: int,
        rank: int = 0,
        n_ranks: int = 1,
    ) -> None:
        self._reader = reader
        self._sequences = sequences
        self._size = size
        n_batches = -(-len(sequences) // size)
        # The batches are the same for any number of devices, so that the metrics do not depend on
        # the number of devices. The batches are dealt to the devices round-robin. Every device must
        # get the same number of batches, because all devices synchronize after each batch. If there
        # are too few batches for this, several devices get the last batch. Its index is the same on
        # these devices, so the metrics count it once.
        self._numbers = [min(turn + rank, n_batches - 1) for turn in range(0, n_batches, n_ranks)]

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Batch]:
        data = self._reader.config.data
        reads = (
            (self._reader.n_bytes(self._sequences[self._rows(n)]), partial(self._read, n))
            for n in self._numbers
        )
        return _read_ahead(reads, data.prefetch_batches, data.prefetch_mb << 20)

    def _rows(self, number: int) -> slice:
        return slice(number * self._size, (number + 1) * self._size)

    def _read(self, number: int) -> Batch:
        rows = self._rows(number)
        n_steps = self._reader.config.validation.draft_length + 1
        # A draft round and its bonus token take ``n_steps`` positions. The first round of a
        # sequence starts at the position ``phase``, the second at ``phase + n_steps``, and so on.
        # ``phase`` is computed from the index of the sequence and not drawn at random, so that
        # every validation has the same rounds.
        phase = torch.arange(len(self._sequences))[rows] % n_steps
        draws = Draws(
            torch.full_like(phase, n_steps), torch.zeros_like(phase, dtype=torch.bool), phase
        )
        return self._reader.batch(self._sequences[rows], draws, index=number)


class StoreDataModule(L.LightningDataModule):
    """Training and validation batches of a store.

    The constructor also chooses the settings of the run that were not given.
    """

    def __init__(self, store: ActivationStore, config: TrainConfig) -> None:
        super().__init__()
        table = store.sequences
        responses = numbers(table, "n_response_tokens")
        split = choose_validation_fraction(len(responses), int(responses.sum()))
        if is_split_open := config.validation.validation_fraction is None:
            config = config.replaced(validation_fraction=split.value)
        fraction = known(config.validation.validation_fraction)
        train, held_out = split_sequences(table["sequence_id"].to_pylist(), fraction)
        self.train_sequences = train
        # Leave out sequences whose responses are too short for one complete draft round.
        usable = held_out[responses[held_out] > config.validation.draft_length]
        self.validation_sequences = usable[: config.validation.validation_sequences]
        self.n_validation_positions = int(responses[self.validation_sequences].sum())
        if len(train) and not responses[train].any():
            raise TrainingError(
                f"the {len(train)} training sequences of {store.path} have no response tokens, so "
                "there is nothing to learn. Make the store from chats with answers."
            )
        facts = RunFacts(
            hidden_size=int(store.manifest.target["hidden_size"]),
            n_sequences=len(train),
            n_tokens=int(store.lengths[train].sum()),
            n_devices=count_devices(config.machine),
        )
        config, chosen = choose_settings(config, facts)
        self.chosen = [*chosen, split] if is_split_open else chosen
        batch_size = known(config.data.batch_size)
        self.store = store
        self.config = config
        # Number of sequences per forward on one device. It is the batch size until trial steps have
        # chosen a micro-batch size.
        self.micro_batch = config.data.micro_batch_size or batch_size
        if len(train) < batch_size:
            raise TrainingError(
                f"{store.path} has {len(train)} training sequences in its finished parts, too few "
                f"for a batch of {batch_size}. Extract more sequences, or lower `batch_size`."
            )
        # The result is not used. The call raises an error if the store lacks a field that the
        # drafter reads.
        fields_read(store, config)
        self.steps_per_epoch = len(train) // batch_size
        self.max_steps = config.schedule.n_steps(self.steps_per_epoch)

    def train_dataloader(self) -> TrainingStream:
        """Create the stream of micro-batches from the trainer's current step on."""
        trainer, reader = self._reader()
        stream = TrainingStream(
            reader, self.train_sequences, self.max_steps, trainer.global_rank, trainer.world_size,
            self.micro_batch,
        )  # fmt: skip
        stream.start_step = trainer.global_step
        return stream

    def val_dataloader(self) -> ValidationBatches:
        """Create the validation batches of this process's device."""
        trainer, reader = self._reader()
        chosen = self.validation_sequences
        chosen = chosen[np.argsort(self.store.lengths[chosen], kind="stable")]
        return ValidationBatches(
            reader, chosen, self.micro_batch, trainer.global_rank, trainer.world_size
        )

    def _reader(self) -> tuple[L.Trainer, BatchReader]:
        trainer = self.trainer
        assert trainer is not None
        return trainer, BatchReader(
            self.store, self.config, trainer.strategy.root_device, trainer.num_devices
        )

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Wait for the copy of a batch, and decode it on the training device."""
        return await_copy(batch).decode()

    def micro_batch_sizes(self, share: int) -> list[int]:
        """List the micro-batch sizes to try, largest first.

        Args:
            share: number of sequences of a step on each device.
        """
        if fixed_size := self.config.data.micro_batch_size:
            return [fixed_size]
        sizes = [size for size in range(share, 0, -1) if share % size == 0]
        if not trains_on_cpu(self.config.machine):
            return sizes
        longest = int(self.store.lengths[self.train_sequences].max())
        return [size for size in sizes if size * longest <= CPU_MICRO_BATCH_TOKENS] or [1]

    def longest_sequence(self) -> TrainingInputs:
        """Read the longest training sequence into CPU memory, as inputs [1, T, ...]."""
        longest = np.argmax(self.store.lengths[self.train_sequences])
        reader = BatchReader(self.store, self.config, torch.device("cpu"))
        draws = Draws(None, torch.zeros(1, dtype=torch.bool))
        return reader.batch(self.train_sequences[[longest]], draws).inputs
