"""Measures one forward, backward and optimizer step of each drafter at the sizes of a real target.

The target has random weights, by default in the shape of Llama-3-8B. Only a store with its
activations is made: two long sequences with the keys and values of all layers, the states that
drafters read, and the embeddings and LM head. Each drafter trains in a separate process, on these
sequences again and again. On a CPU, the micro-batch is one sequence. On other devices, it has the
size that a run would choose.

The figures are seconds and peak memory. On a CPU, it is the memory of the process. On a GPU, it is
the memory that torch allocated for the steps. The utilisation of the device counts all matrix
products that a step executes, with attention between all queries and all keys. The attention
kernels are those of the last step.

    python -m benchmarks.training.train_step [--tokens 2048] [--drafters moa eagle3] [--layers 32]
        [--folder DIR] [--threads 2] [--does auto]
    python -m benchmarks.training.train_step --device cuda --steps 4
"""

import argparse
import contextlib
import multiprocessing
import resource
import sys
import tempfile
import time
import traceback
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from benchmarks.kit.accelerator import (
    executed_flops,
    peak_flops,
    synchronize,
    utilisation,
    watched_attention,
)
from benchmarks.kit.harness import run
from benchmarks.kit.made import recipe
from benchmarks.kit.shapes import SHAPES, shape_config
from moa_data.machine import free_memory, keep_freed_memory
from moa_data.moa.drafters.registry import DRAFTERS
from moa_data.moa.targets.bundle import FROZEN_FILE
from moa_data.moa.targets.facts import TargetFacts
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import (
    TARGET_NAME,
    bfloat16_bits,
    hidden_field,
    kv_field,
    response_mask_field,
    tokens_field,
)
from moa_data.storage.write.store import StoreWriter
from moa_data.trainer.batches import Batch, BatchReader, drafter_sizes
from moa_data.trainer.config import AnyDrafter, TrainConfig
from moa_data.trainer.data import StoreDataModule, TrainingStream
from moa_data.trainer.fit import build_module
from moa_data.trainer.step import DrafterModule, Trial

N_SEQUENCES = 2


def write_store(path: Path, config: LlamaConfig, n_tokens: int) -> None:
    """Write random activations with the bundle of a random target."""
    rng, facts = np.random.default_rng(0), TargetFacts.of(config)
    wide, vocab_size = config.hidden_size, config.vocab_size
    reads = [drafter_sizes(facts, settings()).reads for settings in get_args(AnyDrafter)]
    hidden = [
        "last",
        *(f"layer_{layer}" for layer in sorted({layer for one in reads for layer in one.outputs})),
    ]
    kv = kv_field(facts.n_layers, facts.n_kv_heads, facts.head_dim)
    activations = (kv, *(hidden_field(name, wide) for name in hidden))
    fields = (tokens_field(), response_mask_field(), *activations)
    manifest, plan = recipe(fields, [n_tokens] * N_SEQUENCES, target=facts.sizes)
    with StoreWriter.create_or_resume(path, manifest, plan) as writer:
        with writer.target() as folder:
            config.save_pretrained(folder)
            matrix = torch.empty(vocab_size, wide, dtype=torch.bfloat16).normal_(0, 0.02)
            weights = {"embed_tokens.weight": matrix, "lm_head.weight": matrix.flip(0).contiguous()}
            save_file(
                weights | {"norm.weight": torch.ones(wide, dtype=torch.bfloat16)},
                folder / FROZEN_FILE,
            )
        with writer.part(0) as part:
            for row in part.sequences.to_pylist():
                part.write(
                    "tokens",
                    row["first_token"],
                    rng.integers(0, vocab_size, n_tokens).astype(np.int32),
                )
                part.write(
                    "response_mask", row["first_token"], (np.arange(n_tokens) > 0).astype(np.uint8)
                )
                for spec in activations:
                    for start in range(0, n_tokens, 256):
                        shape = (min(256, n_tokens - start), *spec.token_shape)
                        values = bfloat16_bits(rng.standard_normal(shape, dtype=np.float32))
                        part.write(spec.name, row["first_token"] + start, values)
            part.commit()


def settings(store: Path, kind: str, device: str = "cpu", **changes: Any) -> TrainConfig:
    """Return the settings of a long run, but with a batch of one sequence.

    The precision is the one that a run on this device has.
    """
    own: dict[str, Any] = {
        "optimizer": "adamw",
        "batch_size": 1,
        "validation_fraction": 0.0,
        "drafter": kind,
    }
    own |= (
        {"accelerator": "cpu", "precision": "32-true"}
        if device == "cpu"
        else {"precision": "bf16-mixed"}
    )
    return TrainConfig.of(store=str(store), out="unused", **(own | changes))


def measure_one(store_path: Path, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Choose a micro-batch and take the steps, in this process."""
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    device = torch.device(options.device)
    config, store = settings(store_path, kind, device.type), ActivationStore(store_path)
    data = StoreDataModule(store, config)
    module = build_module(data)
    vars(module).update(log=lambda *_args, **_kwargs: None, log_dict=lambda *_args, **_kwargs: None)
    found: dict[str, Any] = {
        "n_parameters": sum(weight.numel() for weight in module.drafter.parameters())
    }
    module.recomputes = options.does == "recompute"
    micro_batch = options.micro_batch or 1
    if options.does == "auto":
        began = time.perf_counter()
        mixed = partial(torch.autocast, device.type, torch.bfloat16, enabled=device.type != "cpu")
        trial = Trial(module, data.longest_sequence(), device, mixed)
        sizes = (
            [options.micro_batch or 1]
            if options.micro_batch or device.type == "cpu"
            else [32, 16, 8, 4, 2, 1]
        )
        chosen = trial.choose(sizes, free_memory(), 2)
        micro_batch, module.recomputes = chosen.micro_batch, chosen.recomputes
        found |= {"trial_s": time.perf_counter() - began}
    found |= {"recomputes": module.recomputes, "micro_batch": micro_batch}
    found |= _steps(module, data, device, micro_batch, options)
    if device.type == "cuda":
        return found | {"peak_bytes": torch.cuda.max_memory_allocated(device)}
    return found | {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _steps(
    module: DrafterModule,
    data: StoreDataModule,
    device: torch.device,
    micro_batch: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Take the steps on one micro-batch, and report the last one.

    Memory for gradients and optimizer moments is allocated before the steps. On a device other than
    the CPU, the operations of one sequence are counted first.
    """
    module.to(device)
    module.frozen.to(device)
    flops = 0
    if device.type != "cpu" or options.count_flops:
        one = partial(_loss, module, _batch(data, device, 1))
        flops = micro_batch * executed_flops(lambda: torch.autograd.backward(one()))
    optimizer = module.build_optimizer(module.config.machine.precision)
    for weight in module.drafter.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    batch = _batch(data, device, micro_batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(options.steps):
        synchronize(device)
        began = time.perf_counter()
        with watched_attention() as kernels:
            loss = _loss(module, batch)
            synchronize(device)
            forward_s = time.perf_counter() - began
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(module.drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        step_s = time.perf_counter() - began
    return {
        "loss": float(loss.detach()),
        "forward_s": forward_s,
        "step_s": step_s,
        "tokens_per_s": batch.n_tokens / step_s,
        "flops": flops or None,
        "mfu": utilisation(flops, step_s, peak_flops(device, options.peak_tflops))
        if flops
        else None,
        "attention_kernels": dict(kernels),
    }


def _loss(module: DrafterModule, batch: Batch) -> torch.Tensor:
    """Run the forward in the precision of a run."""
    device = batch.inputs.tokens.device.type
    is_mixed = module.config.machine.precision == "bf16-mixed"
    with torch.autocast(device, torch.bfloat16, enabled=is_mixed):
        return module.training_step(batch, 0)


def _batch(data: StoreDataModule, device: torch.device, n_sequences: int) -> Batch:
    """Read a micro-batch as a run does, repeating the stored sequences."""
    reader = BatchReader(
        data.store, data.config.replaced(batch_size=n_sequences, prefetch_batches=1), device
    )
    rows = np.resize(data.train_sequences, n_sequences)
    stream = TrainingStream(reader, rows, 2, 0, 1)
    return data.on_after_batch_transfer(next(iter(stream)), 0)


def in_a_process(limit_s: float | None, *arguments: Any) -> dict[str, Any]:
    """Measure one drafter in a separate process, within a time limit.

    Importing all modules takes long, and neither CUDA nor OpenMP work in a forked process. So the
    process is forked from a server process that has imported all modules, but computed nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["moa_data.trainer.fit", "moa_data.demo.target", "torch.utils.flop_counter"]
    )
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, *arguments))
    process.start()
    sender.close()
    found: dict[str, Any] | None = None
    if not receiver.poll(limit_s):
        found = {"error": f"the measurement took longer than {limit_s:.0f} s"}
        process.kill()
    else:
        with contextlib.suppress(EOFError):  # The process ended without a result.
            found = receiver.recv()
    process.join()
    return found or {"error": f"the process ended with exit status {process.exitcode}"}


def _send(sender: Connection, *arguments: Any) -> None:
    try:
        sender.send(measure_one(*arguments))
    except Exception as error:  # noqa: BLE001  # A failure must not hide the other drafters.
        traceback.print_exc()
        sender.send({"error": f"{type(error).__name__}: {error}"[:300]})


def measure_each(
    folder: Path, options: argparse.Namespace, ends: float | None
) -> dict[str, dict[str, Any]]:
    """Measure the drafters one after the other.

    The remaining time is divided equally among the remaining drafters, and each of them may take
    twice its share. The first drafter needs more time, because it compiles kernels that the other
    drafters find in a cache.
    """
    steps: dict[str, dict[str, Any]] = {}
    for number, kind in enumerate(options.drafters):
        n_left = len(options.drafters) - number
        share_s = ends and max(1.0, (ends - time.perf_counter()) * min(1.0, 2 / n_left))
        steps[kind] = in_a_process(share_s, folder, kind, options)
        print(kind, steps[kind], flush=True)
    return steps


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Write the store, and measure each drafter in a separate process."""
    ends = time.perf_counter() + options.limit_s if options.limit_s else None
    with contextlib.ExitStack() as stack:
        folder = (
            options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"
        )
        if not (folder / TARGET_NAME).exists():
            write_store(folder, shape_config(options.shape, options.layers), options.tokens)
        return {"steps": measure_each(folder, options, ends)}


if __name__ == "__main__":
    record = run(
        "train-step", measure, shape={"choices": SHAPES, "default": "llama-3-8b"}, tokens=2048,
        layers=int, does={"choices": ("auto", "plain", "recompute"), "default": "auto"},
        count_flops=False, device="cpu",
        drafters={"nargs": "*", "choices": list(DRAFTERS), "default": list(DRAFTERS)},
        micro_batch=int, steps=1, threads=2, folder=Path, limit_s=float, peak_tflops=float,
    )  # fmt: skip
    sys.exit(any("error" in found for found in record["steps"].values()))
