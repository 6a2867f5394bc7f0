"""Estimate the time, memory and disk space of a run.

Time and memory are measured by training on a few micro-batches of the run itself, with optimizer
steps. The drafter's weights are restored afterwards, so that the estimate does not change a single
bit of the run's results. The disk space is computed from the size of the weights.
"""

import time
from dataclasses import dataclass

import lightning as L
import numpy as np
import torch

from ..machine import free_memory, peak_memory
from .batches import BatchReader, await_copy
from .config import known
from .data import StoreDataModule, TrainingStream, count_devices, device_share
from .step import DrafterModule, Trial

# The timed micro-batches contain sequences with lengths at these quantiles of all lengths.
_LENGTH_QUANTILES = (0.25, 0.5, 1.0)
# Uncertainty of the estimated time, as a factor. The upper estimate is computed from the slowest
# timed micro-batch, and multiplied by this factor. The lower estimate is computed from the fastest
# timed micro-batch, and divided by this factor.
_TIME_SHARE = 1.25
# Lower and upper estimate of a run's memory, as multiples of the peak memory of the timed
# micro-batches. A run may need more memory than these micro-batches, for validations, checkpoints,
# and batches that are read ahead.
_MEMORY_SHARES = (0.9, 1.5)
# Lower and upper estimate of a run's disk space, as multiples of the size of the weights. The lower
# estimate is for drafter/ and one checkpoint with one optimizer moment. The upper estimate is for
# drafter/ and three checkpoints with two moments each: last.ckpt, best.ckpt, and a checkpoint that
# is being written.
_DISK_COPIES = (3, 10)
_LOG_BYTES = 5 << 20  # Upper bound of the size of a run's logs, plots and records.


@dataclass(frozen=True)
class RunCost:
    """Lower and upper estimates of the disk space, memory and time of a run."""

    disk_bytes: tuple[int, int]
    # Memory of the training device. If it was not measured, the value is None.
    memory_bytes: tuple[float, float] | None = None
    # Time of all steps and validations. If it was not measured, the value is None.
    seconds: tuple[float, float] | None = None


def disk_range(module: DrafterModule) -> tuple[int, int]:
    """Return the lower and upper estimate of the size of a run's folder, in bytes."""
    n_bytes = sum(weight.nbytes for weight in module.drafter.parameters())
    lower, upper = _DISK_COPIES
    return lower * n_bytes, upper * n_bytes + _LOG_BYTES


def estimate_run(
    data: StoreDataModule, module: DrafterModule, precision: str, n_steps: int
) -> RunCost:
    """Estimate the time, memory and disk space of a run.

    The function trains on a few micro-batches, which takes seconds. The weights are restored
    afterwards.

    Args:
        n_steps: number of optimizer steps that the run still has to take.
    """
    config = data.config
    lengths = data.store.lengths
    token_s, peak_bytes = _measure(data, module, precision)
    n_tokens = n_steps * known(config.data.batch_size) * lengths[data.train_sequences].mean()
    n_validations = n_steps // known(config.validation.validate_every) + 1
    n_validated = n_validations * lengths[data.validation_sequences].sum()
    share = _TIME_SHARE * count_devices(config.machine)
    least_s = min(token_s) * n_tokens / share
    most_s = max(token_s) * (n_tokens + n_validated) / share * _TIME_SHARE**2
    low, high = _MEMORY_SHARES
    memory = (low * peak_bytes, high * peak_bytes) if peak_bytes else None
    return RunCost(disk_range(module), memory, (float(least_s), float(most_s)))


def _measure(
    data: StoreDataModule, module: DrafterModule, precision: str
) -> tuple[list[float], int]:
    """Train on micro-batches of several lengths.

    Returns:
        The seconds per token of each micro-batch, and the peak memory in bytes.
    """
    machine = data.config.machine
    fabric = L.Fabric(accelerator=machine.accelerator, devices=1, precision=precision)  # type: ignore[arg-type]
    trial = Trial(module, data.longest_sequence(), fabric.device, fabric.autocast)
    sizes = data.micro_batch_sizes(device_share(data.config, count_devices(machine)))
    size = trial.choose(sizes, free_memory(), 2).micro_batch
    module.drafter.to(fabric.device)
    module.frozen.to(fabric.device)
    reader = BatchReader(data.store, data.config, fabric.device)
    stream = TrainingStream(reader, data.train_sequences, data.max_steps, 0, 1, size)
    weights = list(module.drafter.parameters())
    before = [weight.detach().clone() for weight in weights]
    optimizer = module.build_optimizer(precision)
    lengths = data.store.lengths[data.train_sequences]
    by_length = data.train_sequences[np.argsort(lengths, kind="stable")]
    token_s = []
    # The first micro-batch has a single sequence. It is a warm-up, so its time is not used.
    micro_batches = [by_length[:1]]
    for quantile in _LENGTH_QUANTILES:
        stop = max(size, round(quantile * len(by_length)))
        micro_batches.append(by_length[stop - size : stop])
    for sequences in micro_batches:
        started_s = time.perf_counter()
        batch = await_copy(stream.micro_batch(sequences)).decode()
        with fabric.autocast():
            terms = module.compute_terms(batch.inputs, batch.draws, batch.denominator)
        terms["loss"].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        weights[0].sum().item()  # Wait until the device has finished the step.
        token_s.append((time.perf_counter() - started_s) / batch.n_tokens)
    with torch.no_grad():
        for weight, values in zip(weights, before, strict=True):
            weight.copy_(values)
    is_cuda = fabric.device.type == "cuda"
    return token_s[1:], torch.cuda.max_memory_allocated(fabric.device) if is_cuda else peak_memory()
