"""From an activation store to batches: split, order, draws, and reading with threads.

Batch k of a run is a pure function of the store, the settings and k, so a resumed run sees what an uninterrupted one
would.
"""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import lightning as L
import numpy as np
import torch
from torch import Tensor

from ..moa import masks
from ..moa.objective import Draws, TrainingInputs
from ..storage.reader import ActivationStore
from .batch import Batch
from .config import TrainConfig
from .errors import MissingField, TrainingError

_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_GROUPED_BATCHES = 32


def split_sequences(sequence_ids: list[str], validation_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split by content hash, so that the split survives re-ordering and growth of the dataset.

    Returns:
        Indices of the training and of the validation sequences, ascending.
    """
    points = np.array([int(sequence_id[:8], 16) / 2**32 for sequence_id in sequence_ids])
    held_out = points < validation_fraction
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def epoch_order(n_tokens: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Length-grouped random batches of one epoch; an incomplete last batch is left out.

    Args:
        n_tokens: length of each sequence.
        batch_size: sequences per batch.
        seed: of the run.
        epoch: 0-based.

    Returns:
        [n_batches, batch_size] positions into ``n_tokens``.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(n_tokens))
    group = batch_size * _GROUPED_BATCHES
    parts = [order[start : start + group] for start in range(0, len(order), group)]
    order = np.concatenate([part[np.argsort(n_tokens[part], kind="stable")] for part in parts])
    # A random rest is dropped, not the longest sequences: rotate before cutting.
    n_batches = len(order) // batch_size
    order = np.roll(order, random.integers(batch_size))[: n_batches * batch_size].reshape(n_batches, batch_size)
    return order[random.permutation(n_batches)]


def needed_fields(store: ActivationStore, config: TrainConfig) -> list[str]:
    """Fields that training reads: kv, hidden/last and, for N > 0, the state that enters the last N layers.

    Raises:
        MissingField: the store lacks one; the message names the flags that would add it.
        TrainingError: N is not below the target's number of layers.
    """
    n_layers = int(store.manifest.target["n_layers"])
    if config.target_layer_inference >= n_layers:
        raise TrainingError(
            f"--target-layer-inference {config.target_layer_inference} must be below the target's {n_layers} layers."
        )
    needed = ["kv", "hidden/last"]
    if config.target_layer_inference > 0:
        needed.append(f"hidden/layer_{n_layers - config.target_layer_inference - 1}")
    missing = [name for name in needed if name not in store.fields]
    if missing:
        flags = ",".join("kv" if name == "kv" else name.replace("/", ":").replace("_", ":") for name in needed)
        raise MissingField(
            f"{store.path} lacks {', '.join(missing)}; extract again with --activations {flags} "
            f"--target-layers {config.target_layer_inference}."
        )
    return needed


class BatchReader:
    """Reads given sequences of a store into one right-padded batch."""

    def __init__(self, store: ActivationStore, config: TrainConfig, pin_memory: bool) -> None:
        self.store, self.config, self._pin = store, config, pin_memory
        self._fields = needed_fields(store, config)
        self._entering = self._fields[2] if len(self._fields) > 2 else None

    def read(self, sequences: np.ndarray, lengths: np.ndarray) -> TrainingInputs:
        """Read sequences with the given token counts; padding is zero."""
        n_rows, n_tokens = len(sequences), int(lengths.max())
        tokens = torch.zeros(n_rows, n_tokens, dtype=torch.int64)
        response = torch.zeros(n_rows, n_tokens, dtype=torch.bool)
        activations = {name: self._buffer(name, n_rows, n_tokens) for name in self._fields}
        for row, (sequence, length) in enumerate(zip(sequences.tolist(), lengths.tolist(), strict=True)):
            tokens[row, :length] = torch.from_numpy(self.store.read(sequence, "tokens").astype(np.int64))
            response[row, :length] = torch.from_numpy(self.store.read(sequence, "response_mask").astype(bool))
            for name, buffer in activations.items():
                buffer[row, length:] = 0
                self.store.read_into(sequence, name, _as_stored(buffer[row]))
        return TrainingInputs(
            tokens=tokens,
            response_mask=response,
            kv=activations["kv"].flatten(3),
            hidden=activations["hidden/last"],
            entering_hidden=activations[self._entering] if self._entering else None,
        )

    def _buffer(self, name: str, n_rows: int, n_tokens: int) -> Tensor:
        spec = self.store.fields[name]
        dtype = _TORCH_DTYPES[spec.dtype]
        return torch.empty(n_rows, n_tokens, *spec.token_shape, dtype=dtype, pin_memory=self._pin)


def _as_stored(buffer: Tensor) -> np.ndarray:
    """A numpy view in the stored dtype; numpy has no bfloat16, the store keeps its bits as uint16."""
    return buffer.view(torch.uint16).numpy() if buffer.dtype == torch.bfloat16 else buffer.numpy()


class TrainingStream:
    """Endless micro-batches from a given step on, read ahead by threads."""

    def __init__(
        self, reader: BatchReader, sequences: np.ndarray, lengths: np.ndarray, max_steps: int, rank: int, n_ranks: int
    ) -> None:
        config = reader.config
        self._reader, self._sequences, self._lengths = reader, sequences, lengths
        self._max_steps, self._rank, self._n_ranks = max_steps, rank, n_ranks
        self.steps_per_epoch = len(sequences) // config.batch_size
        self.start_step = 0

    def __iter__(self) -> Iterator[Batch]:
        config = self._reader.config
        with ThreadPoolExecutor(config.reader_threads, thread_name_prefix="shard-reader") as pool:
            pending: deque[Future[list[Batch]]] = deque()
            step = self.start_step
            while True:
                while len(pending) < max(1, config.prefetch_batches):
                    pending.append(pool.submit(self._step_batches, step))
                    step += 1
                yield from pending.popleft().result()

    def _step_batches(self, step: int) -> list[Batch]:
        """All micro-batches of one optimizer step on this rank."""
        began = time.perf_counter()
        config = self._reader.config
        epoch, index = divmod(step, self.steps_per_epoch)
        rows = epoch_order(self._lengths, config.batch_size, config.seed, epoch)[index]
        draws = draw(config, step, self._max_steps)
        mine = np.arange(self._rank, config.batch_size, self._n_ranks)
        micro = micro_batch_size(config, self._n_ranks)
        batches = []
        for start in range(0, len(mine), micro):
            part = mine[start : start + micro]
            inputs = self._reader.read(self._sequences[rows[part]], self._lengths[rows[part]])
            picked = torch.from_numpy(part)
            own = _rows_of(draws, picked)
            batches.append(Batch(inputs, own, 1.0, int(self._lengths[rows[part]].sum())))
        n_positions = sum(count_loss_positions(batch.inputs.response_mask, batch.draws, config) for batch in batches)
        for row in np.setdiff1d(np.arange(config.batch_size), mine).tolist():  # of the other devices
            response = torch.from_numpy(self._reader.store.read(int(self._sequences[rows[row]]), "response_mask"))
            n_positions += count_loss_positions(response[None], _rows_of(draws, slice(row, row + 1)), config)
        for batch in batches:
            # Lightning averages over micro-batches, and over devices.
            batch.denominator = max(1, n_positions) / (len(batches) * self._n_ranks)
            batch.read_s = (time.perf_counter() - began) / len(batches)
        return batches


def micro_batch_size(config: TrainConfig, n_ranks: int) -> int:
    """Sequences per forward on one device; must divide the device's share of the batch."""
    share, rest = divmod(config.batch_size, n_ranks)
    if rest:
        raise TrainingError(f"--batch-size {config.batch_size} does not divide over {n_ranks} devices.")
    micro = config.micro_batch_size or share
    if share % micro:
        raise TrainingError(f"--micro-batch-size {micro} does not divide the {share} sequences of a device.")
    return micro


def count_loss_positions(response: Tensor, draws: Draws, config: TrainConfig) -> int:
    """Positions that carry loss, of response masks [B, T]."""
    if config.official_quirks:
        return int(response.bool().sum())
    return int(masks.drafted_positions(response, draws.step_bound, draws.offset).sum())


class DrawnRows(Draws):
    """Draws with every tensor present."""

    step_bound: Tensor
    offset: Tensor


def draw(config: TrainConfig, step: int, max_steps: int) -> DrawnRows:
    """The random draws of one optimizer step, a pure function of seed and step."""
    generator = torch.Generator().manual_seed((config.seed << 32) + step)
    rows = config.batch_size
    step_bound = torch.randint(config.step_bound_min, config.step_bound_max + 1, (rows,), generator=generator)
    phase = torch.rand(rows, generator=generator)
    dropped = torch.rand(rows, generator=generator) < masks.staircase_drop_probability(step / max_steps)
    staircase = ~dropped if config.staircase else torch.zeros(rows, dtype=torch.bool)
    offset = torch.zeros_like(step_bound) if config.official_quirks else (phase * step_bound).long()
    return DrawnRows(step_bound, staircase, offset)


def _rows_of(draws: DrawnRows, rows: Tensor | slice) -> Draws:
    return Draws(draws.step_bound[rows], draws.staircase_rows[rows], draws.offset[rows])


class FixedBatches:
    """Batches in memory; not a list, because Lightning takes a list for several dataloaders."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class StoreDataModule(L.LightningDataModule):
    """Training and validation batches of a store."""

    def __init__(self, store: ActivationStore, config: TrainConfig) -> None:
        super().__init__()
        self.store, self.config = store, config
        table = store.sequences
        self._lengths = table["n_tokens"].to_numpy().astype(np.int64)
        train, held_out = split_sequences(table["sequence_id"].to_pylist(), config.validation_fraction)
        responses = table["n_response_tokens"].to_numpy()
        self.train_sequences = train
        self.validation_sequences = held_out[responses[held_out] > config.draft_length][: config.validation_sequences]
        if len(train) < config.batch_size:
            raise TrainingError(
                f"{store.path} has {len(train)} committed training sequences, which cannot fill a batch of "
                f"{config.batch_size}; extract more or lower --batch-size."
            )
        needed_fields(store, config)
        self.steps_per_epoch = max(1, len(train) // config.batch_size)
        self.max_steps = config.max_steps or max(1, round((config.epochs or 1) * self.steps_per_epoch))
        self.n_validation_batches = -(-len(self.validation_sequences) // max(1, config.batch_size))

    def train_dataloader(self) -> TrainingStream:
        """Stream that starts at the trainer's current step."""
        trainer = self.trainer
        assert trainer is not None
        reader = BatchReader(self.store, self.config, pin_memory=trainer.strategy.root_device.type == "cuda")
        stream = TrainingStream(
            reader,
            self.train_sequences,
            self._lengths[self.train_sequences],
            self.max_steps,
            trainer.global_rank,
            trainer.world_size,
        )
        stream.start_step = trainer.global_step
        return stream

    def val_dataloader(self) -> "FixedBatches":
        """The validation batches, sorted by length; blocks of draft_length steps with a fixed phase per sequence."""
        reader = BatchReader(self.store, self.config, pin_memory=False)
        chosen = self.validation_sequences
        chosen = chosen[np.argsort(self._lengths[chosen], kind="stable")]
        batches = []
        for start in range(0, len(chosen), self.config.batch_size):
            part = chosen[start : start + self.config.batch_size]
            bound = torch.full((len(part),), self.config.draft_length + 1)
            phase = torch.arange(start, start + len(part)) % (self.config.draft_length + 1)
            draws = Draws(bound, torch.zeros(len(part), dtype=torch.bool), phase)
            inputs = reader.read(part, self._lengths[part])
            batches.append(Batch(inputs, draws, 1.0, int(self._lengths[part].sum())))
        return FixedBatches(batches)
