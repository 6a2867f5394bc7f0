"""Compares a training step from a store with an online step, in which the target runs first.

Both sides take turns in one process on the same batches. The store side waits for the loader and
takes a step. The online side first runs the target over the batch, for the KV of all layers and the
last hidden state, as an online trainer would. Then it takes the same step. The figures are medians
and quartiles over the pairs, and the cost of a step as a multiple of a target forward.

    python -m benchmarks.training.online_step STORE MODEL [--pairs 40] [--batch-size 8]
        [--threads 1] [drafter sizes]
        [--optimizer adamw] [--teacher-forced-weight 0] [--no-cross-attention-drafts]
        [--layer-groups 1] [--no-unrotated-keys]
"""

import argparse
import tempfile
import time
from typing import Any

import numpy as np
import torch

from benchmarks.kit.harness import quartiles, run
from benchmarks.training.runs import SIZE_OPTIONS, TRAINING_OPTIONS, chosen, small_config
from moa_data.machine import keep_freed_memory
from moa_data.moa.nn.kv import cache_layers, new_cache, pack_kv
from moa_data.moa.targets.live import Target
from moa_data.storage.read.store import ActivationStore
from moa_data.trainer.batches import Batch, BatchReader
from moa_data.trainer.data import StoreDataModule, TrainingStream
from moa_data.trainer.fit import build_module
from moa_data.trainer.step import DrafterModule


class DrafterStep:
    """A step of the training module without a Lightning loop around it.

    It runs the forward, the backward, clipping and the optimizer.
    """

    def __init__(self, module: DrafterModule) -> None:
        self._module = module
        # Lightning's log methods fail outside of a fit.
        vars(module).update(
            log=lambda *_args, **_kwargs: None, log_dict=lambda *_args, **_kwargs: None
        )
        self._optimizer = module.build_optimizer("32-true")

    def __call__(self, batch: Batch) -> float:
        """Take one step, and return its seconds."""
        start = time.perf_counter()
        loss = self._module.training_step(batch, 0)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._module.drafter.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - start


def run_target(target: Target, batch: Batch) -> float:
    """Run the target as an online trainer would, and put its activations into the batch.

    Returns the seconds.
    """
    start = time.perf_counter()
    model: Any = target.model
    with torch.inference_mode():
        cache = new_cache()
        hidden = model.model(
            input_ids=batch.inputs.tokens, past_key_values=cache, use_cache=True
        ).last_hidden_state
        packed = pack_kv(*cache_layers(cache))
    batch.inputs.kv, batch.inputs.hidden = packed.clone(), hidden.clone()
    return time.perf_counter() - start


def _pair(stream: Any, step: DrafterStep, target: Target, online_first: bool) -> tuple[float, ...]:
    """Run one batch on both sides.

    Returns its tokens, and the seconds of waiting, of the step from the store, of the target's
    forward, and of the online step.
    """
    start = time.perf_counter()
    batch = next(stream)
    wait_s = time.perf_counter() - start
    stored = batch.inputs.kv, batch.inputs.hidden
    if online_first:
        forward_s = run_target(target, batch)
        online_s = step(batch)
        batch.inputs.kv, batch.inputs.hidden = stored
        store_s = step(batch)
    else:
        store_s = step(batch)
        forward_s = run_target(target, batch)
        online_s = step(batch)
    return batch.n_tokens, wait_s, store_s, forward_s, online_s


def _figures(pairs: np.ndarray) -> dict[str, list[float]]:
    n_tokens, wait_s, store_s, forward_s, online_s = pairs.T
    from_store_s, online_total_s = wait_s + store_s, forward_s + online_s
    figures = {
        "store_tokens_per_s": n_tokens / from_store_s,
        "online_tokens_per_s": n_tokens / online_total_s,
        "target_forward_tokens_per_s": n_tokens / forward_s,
        "store_over_online": online_total_s / from_store_s,
        "store_step_in_target_forwards": from_store_s / forward_s,
        "data_wait_share": wait_s / from_store_s,
    }
    return {name: quartiles(values.tolist()) for name, values in figures.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the pairs, and return medians and quartiles.

    The first two pairs are not counted.
    """
    keep_freed_memory()
    n_pairs = options.pairs + 2
    with tempfile.TemporaryDirectory(prefix="moa-data-bench-") as folder:
        config = small_config(
            options.store, folder, max_steps=n_pairs, batch_size=options.batch_size,
            **chosen(options)
        )  # fmt: skip
        store = ActivationStore(options.store)
        data = StoreDataModule(store, config)
        step = DrafterStep(build_module(data))
        target = Target.load(options.model, torch.float32, "cpu")
        rows = data.train_sequences
        reader = BatchReader(store, data.config, torch.device("cpu"))
        stream = iter(TrainingStream(reader, rows, n_pairs, 0, 1))
        pairs = [_pair(stream, step, target, online_first=bool(i % 2)) for i in range(n_pairs)][2:]
    return {"figures": _figures(np.array(pairs)), "config": config.named()}


if __name__ == "__main__":
    run(
        "online",
        measure,
        "store",
        "model",
        pairs=40,
        batch_size=8,
        threads=1,
        **SIZE_OPTIONS,
        **TRAINING_OPTIONS,
    )
