"""Trains a small independent Llama on a store's tokens, for `moa-data eval --method assisted --assistant OUT`.

    python benchmarks/small_model.py STORE MODEL OUT [--steps 2000] [--hidden-size 128] [--layers 2]

It has MODEL's tokenizer and learns the responses by cross-entropy, without the target's activations.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from moa_data.moa.target import load_target_config
from moa_data.storage.reader import ActivationStore

IGNORED = -100


def small_llama(model: Path, hidden_size: int, n_layers: int) -> LlamaForCausalLM:
    """An untrained Llama with the vocabulary, positions and special tokens of a model folder."""
    torch.manual_seed(0)
    target = load_target_config(model)
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=n_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
    )
    return LlamaForCausalLM(config)


def batch(store: ActivationStore, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] and labels [B, T - 1] of the next token, ignored outside of responses."""
    read = store.read_batch(rows, ["tokens", "response_mask"])
    tokens = torch.from_numpy(read["tokens"]).long()
    response = torch.from_numpy(read["response_mask"])[:, 1:].bool()
    return tokens, tokens[:, 1:].masked_fill(~response, IGNORED)


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description="Train a small model for assisted generation.")
    parser.add_argument("store")
    parser.add_argument("model", type=Path, help="folder of the target, for its tokenizer")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()
    model = small_llama(options.model, options.hidden_size, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, options.steps, pct_start=0.05)
    random, losses = np.random.default_rng(0), []
    with ActivationStore(options.store) as store:
        print(f"{sum(weight.numel() for weight in model.parameters()):,} weights, {len(store):,} sequences")
        for step in range(1, options.steps + 1):
            tokens, labels = batch(store, random.choice(len(store), options.batch, replace=False))
            logits = model(input_ids=tokens).logits[:, :-1]
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            if step % 100 == 0:
                print(f"step {step}: {np.mean(losses[-100:]):.3f} nats per response token", flush=True)
    model.save_pretrained(options.out)
    AutoTokenizer.from_pretrained(options.model).save_pretrained(options.out)


if __name__ == "__main__":
    main()
