"""Trains the demo's target: a byte-level BPE tokenizer and a tiny Llama, saved as an ordinary Hugging Face folder.

The chat template is Llama-3's with `{% generation %}` around the answers, so that masks come from the template itself.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..files import replacing, write_atomic
from ..moa.targets.model_files import write_tensors
from ..text import Progress
from ..trainer.muon import Muon
from .config import DemoConfig

# file that is written last: a folder without it was not finished, and is made again
MARKER = "training.json"
BOS = "<|begin_of_text|>"
EOT = "<|eot_id|>"
PAD = "<|pad|>"
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
# a little, for the embeddings: what answers copy from prompts has to be read well
PROMPT_WEIGHT = 0.1
WARMUP_STEPS = 40

# Ids of one chat (int64) and the weights of the tokens that follow them (float32), [T] each.
_Example = tuple[Tensor, Tensor]


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with Llama-3's special tokens and chat template."""
    tokenizer = Tokenizer(models.BPE())
    # Llama-3's pattern, with digits apart: sums are learnt digit by digit.
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
    """Return the untrained target: float32, untied, grouped-query attention, greedy by default."""
    torch.manual_seed(config.seed)
    special: dict[str, Any] = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    sizes = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.hidden_size * 3,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,  # as in the targets that the package is for
        **special,
    )
    model = LlamaForCausalLM(sizes)
    model.generation_config = GenerationConfig(do_sample=False, **special)
    return model


def train_target(
    train: list[dict[str, Any]],
    config: DemoConfig,
    folder: Path,
    progress: Progress | None = None,
    build: Callable[[DemoConfig, PreTrainedTokenizerFast], Any] = build_target,
) -> dict[str, Any]:
    """Train tokenizer and target on the corpus and save them; a finished folder is left as it is.

    Args:
        build: makes the untrained target, of a family whose decoder layers are ``model.model.layers``.

    Returns:
        n_parameters, n_tokens (seen in training, prompts included), and train_loss of the last step (nats per token).
    """
    if (folder / MARKER).is_file():
        return dict(json.loads((folder / MARKER).read_text(encoding="utf-8")))
    tokenizer = train_tokenizer(
        [m["content"] for row in train for m in row["messages"]], config.vocab_size
    )
    model = build(config, tokenizer)
    n_tokens, loss = _fit(model, _tokenize(tokenizer, train), config, progress)
    facts = {"n_parameters": model.num_parameters(), "n_tokens": n_tokens, "train_loss": loss}
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):  # the library's own writer lets nobody else read them
        with replacing(file) as partial:
            write_tensors(partial, load_file(file))
    tokenizer.save_pretrained(folder)
    write_atomic(folder / MARKER, json.dumps(facts, indent=1).encode())
    return facts


def _tokenize(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]]) -> list[_Example]:
    """Tokenise chats; tokens of prompts, by the template's own mask, weigh `PROMPT_WEIGHT`."""
    examples = []
    for row in rows:
        encoded: Any = tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = torch.tensor(encoded["input_ids"][:MAX_POSITIONS])
        is_answer = torch.tensor(encoded["assistant_masks"][1:MAX_POSITIONS], dtype=torch.bool)
        weights = torch.where(torch.cat([is_answer, torch.tensor([False])]), 1.0, PROMPT_WEIGHT)
        weights[-1] = 0.0
        examples.append((ids, weights))
    return examples


def _batches(
    examples: list[_Example], batch_tokens: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return index batches of like length whose padded size stays within `batch_tokens`, in random order."""
    lengths = np.array([len(ids) for ids, _ in examples])
    # Jittered by up to 16 tokens, so that epochs form other batches.
    order = np.argsort(lengths + rng.uniform(0, 16, len(lengths)))
    batches: list[np.ndarray] = []
    start = 0
    for stop in range(1, len(order) + 1):
        widest = lengths[order[start : stop + 1]].max()
        if stop == len(order) or widest * (stop + 1 - start) > batch_tokens:
            batches.append(order[start:stop])
            start = stop
    return [batches[i] for i in rng.permutation(len(batches))]


def _fit(
    model: Any, train: list[_Example], config: DemoConfig, progress: Progress | None
) -> tuple[int, float]:
    """Train with a linear warm-up and a cosine down to 2 % of the peak rates; return the tokens seen and the loss."""
    rng = np.random.default_rng(config.seed)
    n_steps = config.target_steps
    # Muon for the matrices of the decoder layers, AdamW for embeddings, norms and head.
    in_layers = {id(p) for p in model.model.layers.parameters() if p.dim() == 2}
    optimizer = Muon(
        [p for p in model.parameters() if id(p) in in_layers],
        [p for p in model.parameters() if id(p) not in in_layers],
        lr=config.target_matrix_learning_rate,
        others_lr=config.target_learning_rate,
    )
    warmup = min(WARMUP_STEPS, max(1, n_steps // 5))

    def rate(step: int) -> float:
        phase = (step - warmup) / max(1, n_steps - warmup)
        return (
            (step + 1) / warmup if step < warmup else 0.02 + 0.49 * (1 + math.cos(math.pi * phase))
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    n_tokens = 0
    started = time.perf_counter()
    pending: list[np.ndarray] = []
    model.train()
    for step in range(1, n_steps + 1):
        pending = pending or _batches(train, config.target_batch_tokens, rng)
        columns = zip(*(train[i] for i in pending.pop()), strict=True)
        # Padding on the right, which causality alone hides, has no weight, nor has what follows the
        # last token.
        ids, weights = (pad_sequence(list(column), batch_first=True) for column in columns)
        logits = model(input_ids=ids, use_cache=False).logits  # [B, T, V]
        losses = functional.cross_entropy(
            logits.flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="none"
        )
        loss = (losses * weights.flatten()).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        n_tokens += int((weights > 0).sum())
        if progress is not None and (step % 10 == 0 or step == n_steps):
            speed = n_tokens / (time.perf_counter() - started)
            progress(step, n_steps, f"target, loss {loss.item():.3f}, {speed:,.0f} tok/s")
    model.eval()
    return n_tokens, loss.item()
