"""Trains the demo's target: a byte-level BPE tokenizer and a tiny Llama, saved as an ordinary Hugging Face folder.

The chat template is Llama-3's with `{% generation %}` around the answers, so that masks come from the template itself.
The folder appears by one rename at the end: a folder without `MARKER` was not finished and is made again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..text import Progress
from ..trainer.muon import Muon
from .config import DemoConfig

MARKER = "training.json"
BOS, EOT, PAD = "<|begin_of_text|>", "<|eot_id|>", "<|pad|>"
SPECIAL_TOKENS = (BOS, "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", EOT, PAD)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim }}{{ '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim }}{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MAX_POSITIONS = 512
VALIDATE_EVERY = 100
PROMPT_WEIGHT = 0.1
WARMUP_STEPS = 40
IGNORED_LABEL = -100


@dataclass(frozen=True)
class TargetReport:
    """Figures of the target's training.

    Attributes:
        train_loss: Pairs of step and loss (nats per token, prompt tokens at weight `PROMPT_WEIGHT`).
        validation_loss: Pairs of step and held-out loss (nats per answer token).
        validation_accuracy: Share of held-out answer tokens that the target ranks first, at the end.
        n_tokens: Training tokens seen, prompts included.
        seconds: Wall time of tokenizer and target together.
    """

    n_parameters: int
    train_loss: list[tuple[int, float]]
    validation_loss: list[tuple[int, float]]
    validation_accuracy: float
    n_tokens: int
    seconds: float

    @staticmethod
    def load(folder: Path) -> TargetReport:
        """Read the report that stands beside the weights in `folder`."""
        return TargetReport(**json.loads((folder / MARKER).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class _Example:
    """One tokenised chat: ids int64 [T] and, for each, whether it belongs to an answer (bool [T])."""

    ids: np.ndarray
    answer: np.ndarray


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with Llama-3's special tokens and chat template; digits stay apart.

    Args:
        vocab_size: Entries, the special tokens and the 256 bytes included.

    Returns:
        A fast tokenizer that, like Llama-3's, puts a BOS before every plain text.
    """
    tokenizer = Tokenizer(models.BPE())
    words = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOT,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_target(config: DemoConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained target: float32, untied, grouped-query attention.

    Returns:
        The model, with a greedy generation config that stops at the end of a turn.
    """
    torch.manual_seed(config.seed)
    hf_config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.target.hidden_size,
        intermediate_size=config.target.hidden_size * 3,
        num_hidden_layers=config.target.n_layers,
        num_attention_heads=config.target.n_heads,
        num_key_value_heads=config.target.n_kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(hf_config)
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def train_target(
    train: list[dict[str, Any]],
    held_out: list[dict[str, Any]],
    config: DemoConfig,
    folder: Path,
    progress: Progress | None = None,
) -> TargetReport:
    """Train tokenizer and target on the corpus and save them; a finished folder is reused as it is.

    Args:
        held_out: Held-out rows: the validation loss is taken on their answers.
        progress: Called as (step, steps, message).
    """
    if (folder / MARKER).is_file():
        return TargetReport.load(folder)
    started = time.perf_counter()
    tokenizer = train_tokenizer([m["content"] for row in train for m in row["messages"]], config.target.vocab_size)
    train_examples = _tokenize(tokenizer, train)
    held_out_examples = _tokenize(tokenizer, held_out)
    model = build_target(config, tokenizer)
    train_loss, validation, accuracy, n_tokens = _fit(model, train_examples, held_out_examples, config, progress)
    report = TargetReport(
        n_parameters=sum(p.numel() for p in model.parameters()),
        train_loss=train_loss,
        validation_loss=validation,
        validation_accuracy=accuracy,
        n_tokens=n_tokens,
        seconds=time.perf_counter() - started,
    )
    _save(model, tokenizer, report, folder)
    return report


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, report: TargetReport, folder: Path) -> None:
    """Write the model folder beside its place, then rename it."""
    partial = folder.with_name(folder.name + ".partial")
    for stale in (partial, folder):
        if stale.exists():
            shutil.rmtree(stale)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / MARKER).write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    os.replace(partial, folder)


def _tokenize(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]]) -> list[_Example]:
    """Tokenise chats with the template's own answer mask."""
    examples = []
    for row in rows:
        encoded: Any = tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = np.asarray(encoded["input_ids"], dtype=np.int64)[:MAX_POSITIONS]
        answer = np.asarray(encoded["assistant_masks"], dtype=bool)[:MAX_POSITIONS]
        examples.append(_Example(ids, answer))
    return examples


def _batches(examples: list[_Example], batch_tokens: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return index batches of like length whose padded size stays within `batch_tokens`, in random order."""
    lengths = np.array([len(example.ids) for example in examples])
    order = np.argsort(lengths + rng.uniform(0, 16, len(lengths)))
    batches: list[np.ndarray] = []
    start = 0
    for stop in range(1, len(order) + 1):
        widest = lengths[order[start : stop + 1]].max()
        if stop == len(order) or widest * (stop + 1 - start) > batch_tokens:
            batches.append(order[start:stop])
            start = stop
    return [batches[i] for i in rng.permutation(len(batches))]


def _collate(
    examples: list[_Example], indices: np.ndarray, pad_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids and next-token labels (int64 [B, T]; labels are -100 on padding) and weights float32 [B, T].

    Rows are padded on the right; prompt tokens weigh `PROMPT_WEIGHT`.
    """
    width = max(len(examples[i].ids) for i in indices)
    ids = np.full((len(indices), width), pad_id, dtype=np.int64)
    labels = np.full((len(indices), width), IGNORED_LABEL, dtype=np.int64)
    weights = np.zeros((len(indices), width), dtype=np.float32)
    for row, index in enumerate(indices):
        example = examples[index]
        n = len(example.ids)
        ids[row, :n] = example.ids
        labels[row, : n - 1] = example.ids[1:]
        weights[row, : n - 1] = np.where(example.answer[1:], 1.0, PROMPT_WEIGHT)
    return torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(weights)


def _fit(
    model: LlamaForCausalLM,
    train: list[_Example],
    held_out: list[_Example],
    config: DemoConfig,
    progress: Progress | None,
) -> tuple[list[tuple[int, float]], list[tuple[int, float]], float, int]:
    """Train with warm-up and cosine; return train losses, validation losses, final accuracy and tokens seen."""
    rng = np.random.default_rng(config.seed)
    optimizers = _optimizers(model, config)
    warmup = min(WARMUP_STEPS, max(1, config.target.target_steps // 5))
    train_loss: list[tuple[int, float]] = []
    validation: list[tuple[int, float]] = []
    accuracy, n_tokens, started = 0.0, 0, time.perf_counter()
    pad_id = model.config.pad_token_id
    assert pad_id is not None
    pending: list[np.ndarray] = []
    model.train()
    for step in range(config.target.target_steps):
        pending = pending or _batches(train, config.target.target_batch_tokens, rng)
        ids, labels, weights = _collate(train, pending.pop(), pad_id)
        scale = _learning_rate_scale(step, config.target.target_steps, warmup)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak_lr"] * scale
        loss = _weighted_loss(model, ids, labels, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        n_tokens += int((labels != IGNORED_LABEL).sum())
        done = step + 1
        if done % 10 == 0 or done == config.target.target_steps:
            train_loss.append((done, loss.item()))
        if done % VALIDATE_EVERY == 0 or done == config.target.target_steps:
            value, accuracy = _validate(model, held_out, config.target.target_batch_tokens, pad_id)
            validation.append((done, value))
        if progress is not None and (done % 10 == 0 or done == config.target.target_steps):
            rate = n_tokens / (time.perf_counter() - started)
            held = f", held-out {validation[-1][1]:.3f}" if validation else ""
            progress(done, config.target.target_steps, f"target, loss {loss.item():.3f}{held}, {rate:,.0f} tok/s")
    model.eval()
    return train_loss, validation, accuracy, n_tokens


def _optimizers(model: LlamaForCausalLM, config: DemoConfig) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the decoder layers and AdamW for the rest, each with its `peak_lr`."""
    in_layers = {id(p) for p in model.model.layers.parameters() if p.dim() == 2}
    rest = [p for p in model.parameters() if id(p) not in in_layers]
    matrices = [p for p in model.parameters() if id(p) in in_layers]
    rates = config.target
    muon = Muon(matrices, lr=rates.target_matrix_learning_rate, weight_decay=0.05)
    adamw = torch.optim.AdamW(rest, lr=rates.target_learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for group in (*muon.param_groups, *adamw.param_groups):
        group["peak_lr"] = group["lr"]
    return [muon, adamw]


def _learning_rate_scale(step: int, n_steps: int, warmup: int) -> float:
    """Return the share of the peak rate at `step`: linear warm-up, then a cosine down to 2 %."""
    if step < warmup:
        return (step + 1) / warmup
    phase = (step - warmup) / max(1, n_steps - warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * phase))


def _weighted_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted mean cross-entropy in nats; padding stands at the right, so causality alone hides it."""
    logits = model(input_ids=ids, use_cache=False).logits  # [B, T, V]
    losses = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return (losses * weights.flatten()).sum() / weights.sum()


@torch.no_grad()
def _validate(model: LlamaForCausalLM, examples: list[_Example], batch_tokens: int, pad_id: int) -> tuple[float, float]:
    """Return the mean loss (nats) and top-1 accuracy over the answer tokens of `examples`."""
    model.eval()
    loss_sum, right, count = 0.0, 0, 0
    for indices in _batches(examples, batch_tokens, np.random.default_rng(0)):
        ids, labels, weights = _collate(examples, indices, pad_id)
        kept = weights == 1.0  # answers only; prompt tokens carry PROMPT_WEIGHT
        logits = model(input_ids=ids, use_cache=False).logits[kept]
        loss_sum += float(functional.cross_entropy(logits, labels[kept], reduction="sum"))
        right += int((logits.argmax(-1) == labels[kept]).sum())
        count += int(kept.sum())
    model.train()
    return loss_sum / max(count, 1), right / max(count, 1)


@torch.no_grad()
def greedy_answers(folder: Path, prompts: Sequence[list[dict[str, str]]], max_new_tokens: int) -> list[str]:
    """Return the target's greedy answers as text, one prompt at a time."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    model: Any = LlamaForCausalLM.from_pretrained(folder, use_safetensors=True, trust_remote_code=False)
    answers = []
    for messages in prompts:
        encoded: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids = encoded["input_ids"]
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
        )
        answers.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    return answers
