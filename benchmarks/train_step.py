"""Measures one forward, backward and step of each drafter at the sizes of a real target, and the loader beside it.

The target is Llama-3-8B's config with random weights: a store of a few long sequences with all layers' keys and values,
the bundle of embeddings and LM head, and no target. Each drafter trains one micro-batch of one sequence in a process of
its own. Reported are the process's peak memory and the seconds, and what the trial foretold: the bytes of a step and
the micro-batches of a batch of 32, here and with 80 GB. The loader reads the same sequences with 1 and 2 threads in
turn; GB are 10^9 raw bytes.

    python benchmarks/train_step.py [--tokens 2048] [--drafters moa eagle3] [--layers 32] [--folder DIR] [--threads 2]
        [--foretell]
"""

import argparse
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from records import add_out_option, settings_of, write_record
from safetensors.torch import save_file
from transformers import LlamaConfig

from moa_data.machine import keep_freed_memory
from moa_data.moa.drafters.registry import DRAFTERS
from moa_data.moa.targets.bundle import FROZEN_FILE, target_sizes
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.dtypes import bfloat16_bits
from moa_data.storage.names import TARGET_NAME
from moa_data.storage.parts.plan import plan_parts
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import StoreManifest, hidden_field, kv_field, response_mask_field, tokens_field
from moa_data.storage.write.store import StoreWriter
from moa_data.trainer.batches.batch_reader import BatchReader
from moa_data.trainer.batches.datamodule import StoreDataModule, TrainingStream
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.fit.callbacks import free_bytes
from moa_data.trainer.fit.run import build_module, measure_run
from moa_data.trainer.step.module import DrafterModule

N_SEQUENCES = 2
PAPER_SIZES: dict[str, dict[str, Any]] = {"eagle3": {"draft_vocabulary": 32_000}}
"""Where a paper's sizes are not the defaults: EAGLE-3 drafts the 32,000 most frequent tokens."""


def target_config(n_layers: int, vocab_size: int) -> LlamaConfig:
    """Llama-3-8B's config, with so many layers and tokens."""
    return LlamaConfig(
        hidden_size=4096, intermediate_size=14_336, num_hidden_layers=n_layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=vocab_size, max_position_embeddings=8192, rms_norm_eps=1e-5, head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )  # fmt: skip


def write_store(path: Path, n_layers: int, n_tokens: int, vocab_size: int) -> None:
    """Write drawn activations with the bundle of a drawn target."""
    config, rng = target_config(n_layers, vocab_size), np.random.default_rng(0)
    layers = (1, n_layers // 2 - 1, n_layers - 4)
    hidden = ["last", *(f"layer_{layer}" for layer in layers)]
    activations = (kv_field(n_layers, 8, 128), *(hidden_field(name, 4096) for name in hidden))
    fields = (tokens_field(), response_mask_field(), *activations)
    columns = {
        "sequence_id": [f"ffffffff{row:056x}" for row in range(N_SEQUENCES)],
        "source_row": pa.array(range(N_SEQUENCES), pa.int64()),
        "n_tokens": pa.array([n_tokens] * N_SEQUENCES, pa.int32()),
        "n_response_tokens": pa.array([n_tokens - 1] * N_SEQUENCES, pa.int32()),
    }
    plan = plan_parts(pa.table(columns), 1 << 40, 64)
    manifest = StoreManifest(
        fields=fields, target=target_sizes(config), identities={}, extraction={}, n_sequences=N_SEQUENCES, n_parts=1,
        n_tokens=N_SEQUENCES * n_tokens, codec=StoreCodec("lossless", fields).describe(),
    )  # fmt: skip
    with StoreWriter.create_or_resume(path, manifest, plan) as writer:
        with writer.target() as folder:
            config.save_pretrained(folder)
            matrix = torch.empty(vocab_size, 4096, dtype=torch.bfloat16).normal_(0, 0.02)
            weights = {"embed_tokens.weight": matrix, "lm_head.weight": matrix.flip(0).contiguous()}
            save_file(weights | {"norm.weight": torch.ones(4096, dtype=torch.bfloat16)}, folder / FROZEN_FILE)
        with writer.part(0) as part:
            for row in part.sequences.to_pylist():
                part.write("tokens", row["first_token"], rng.integers(0, vocab_size, n_tokens).astype(np.int32))
                part.write("response_mask", row["first_token"], (np.arange(n_tokens) > 0).astype(np.uint8))
                for spec in activations:
                    for start in range(0, n_tokens, 256):
                        shape = (min(256, n_tokens - start), *spec.token_shape)
                        values = bfloat16_bits(rng.standard_normal(shape, dtype=np.float32))
                        part.write(spec.name, row["first_token"] + start, values)
            part.commit()


def settings(store: Path, kind: str, **changes: Any) -> TrainConfig:
    """The defaults, with what a batch of one sequence needs."""
    own = {"batch_size": 1, "validation_fraction": 0.0, "accelerator": "cpu", "drafter": kind}
    return TrainConfig.of(store=str(store), out="unused", **(own | PAPER_SIZES.get(kind, {}) | changes))


def measure_one(store_path: Path, kind: str, foretell: bool) -> dict[str, Any]:
    """Run the trials, and then one micro-batch of one sequence, in this process."""
    keep_freed_memory()
    config, store = settings(store_path, kind), ActivationStore(store_path)
    free_before = free_bytes(torch.device("cpu"), 1)
    data = StoreDataModule(store, config)
    module = build_module(store, config, data)
    vars(module).update(log=lambda *_args, **_kwargs: None, log_dict=lambda *_args, **_kwargs: None)
    began = time.perf_counter()
    memory = measure_run(module, data)
    trial_s = time.perf_counter() - began
    held = memory.weight_bytes + memory.frozen_bytes
    found = {
        "n_parameters": sum(weight.numel() for weight in module.drafter.parameters()),
        "trial_s": trial_s,
        "fixed_bytes": memory.fixed_bytes,
        "sequence_bytes": memory.sequence_bytes(data.longest),
        "foretold_bytes": memory.fixed_bytes + memory.sequence_bytes(data.longest),
        "micro_batch_of_32_here": memory.micro_batch_size(32, data.longest, (free_before or 0) - held, held),
        "micro_batch_of_32_in_80_gb": memory.micro_batch_size(32, data.longest, 80 * 10**9),
    }
    if not foretell:
        found |= _step(module, store, config, data)
    return found | {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _step(module: DrafterModule, store: ActivationStore, config: TrainConfig, data: StoreDataModule) -> dict[str, Any]:
    """Take one step of one sequence."""
    optimizer = module.build_optimizer("32-true")
    reader, lengths = BatchReader(store, config, torch.device("cpu")), store.lengths.astype(np.int64)
    batch = next(iter(TrainingStream(reader, data.train_sequences, lengths, 2, 0, 1)))
    began = time.perf_counter()
    loss = module.training_step(batch, 0)
    forward_s = time.perf_counter() - began
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(module.drafter.parameters(), 1.0)
    optimizer.step()
    return {"loss": float(loss.detach()), "forward_s": forward_s, "step_s": time.perf_counter() - began}


def measure_loader(store_path: Path, turns: int) -> dict[str, list[float]]:
    """GB/s of raw activations with 1 and 2 reader threads, in turn."""
    store = ActivationStore(store_path)
    lengths, cpu = store.lengths.astype(np.int64), torch.device("cpu")
    readers = {n: BatchReader(store, settings(store_path, "moa", reader_threads=n), cpu) for n in (1, 2)}
    found: dict[str, list[float]] = {str(n): [] for n in readers}
    for turn in range(turns + 1):  # the first one opens files and takes memory
        for n, reader in readers.items():
            began = time.perf_counter()
            for sequence in range(N_SEQUENCES):
                reader.read(np.array([sequence]), lengths[[sequence]])
            if turn:
                n_bytes = reader.n_bytes(lengths[:1]) * N_SEQUENCES
                found[str(n)].append(n_bytes / (time.perf_counter() - began) / 1e9)
    return found


def main() -> None:
    """Write the store, measure each drafter in a process of its own, and write the figures."""
    parser = argparse.ArgumentParser(description="Measure a training step at the sizes of a real target.")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, default=32, help="layers of the target")
    parser.add_argument("--vocabulary", type=int, default=128_256, help="tokens of the target's vocabulary")
    parser.add_argument("--foretell", action="store_true", help="run the trials alone, and no step")
    parser.add_argument("--drafters", nargs="*", choices=list(DRAFTERS), default=list(DRAFTERS))
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--turns", type=int, default=5, help="turns of the loader")
    parser.add_argument("--folder", type=Path, help="keep the store there, and use one that is there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    add_out_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps(measure_one(options.folder, options.one, options.foretell)))
        return
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"
        if not (folder / TARGET_NAME).exists():
            write_store(folder, options.layers, options.tokens, options.vocabulary)
        loader = measure_loader(folder, options.turns)
        print("loader GB/s", {n: round(statistics.median(speeds), 2) for n, speeds in loader.items()})
        steps = {}
        for kind in options.drafters:
            chosen = ["--folder", str(folder), "--one", kind, "--threads", str(options.threads)]
            chosen += ["--foretell"] if options.foretell else []
            done = subprocess.run([sys.executable, __file__, *chosen], capture_output=True, text=True)
            if done.returncode:
                steps[kind] = {"error": f"exit status {done.returncode}: {done.stderr[-300:]}"}
            else:
                steps[kind] = json.loads(done.stdout.splitlines()[-1])
            print(kind, steps[kind], flush=True)
    record = {"steps": steps, "loader_gb_per_s": loader, "settings": settings_of(options, "folder", "one")}
    print(write_record(options.out, "train-step", record))


if __name__ == "__main__":
    main()
