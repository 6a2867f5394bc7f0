"""Train the demo's target, a tiny Llama with a byte-level BPE tokenizer.

The target is saved as an ordinary Hugging Face folder. Its chat template is Llama-3's, with the
tags `{% generation %}` around the answers. From these tags, transformers computes which tokens
belong to answers.
"""

import math
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

from ..files import replacing
from ..moa.targets.model_files import write_tensors
from ..text import SILENT, Progress
from ..trainer.muon import Muon
from .config import DemoConfig

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
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
MAX_POSITIONS = 512
# Loss weight of the tokens of prompts. It is above zero for this reason: answers copy words from
# prompts, so the embeddings of these words must be trained.
PROMPT_WEIGHT = 0.1
WARMUP_STEPS = 40

# A chat is represented by its token ids [T] int64 and loss weights [T] float32. Weight i belongs to
# the prediction of token i + 1.
_Example = tuple[Tensor, Tensor]


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with Llama-3's special tokens and chat template."""
    tokenizer = Tokenizer(models.BPE())
    # This is Llama-3's pattern for splitting a text into words, except that numbers are split into
    # digits.
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
    """Build the untrained target, a float32 Llama with untied embeddings.

    The target has grouped-query attention, and decodes greedily by default.
    """
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
        # Embeddings and LM head have separate weights, as in most large targets.
        tie_word_embeddings=False,
        **special,
    )
    model = LlamaForCausalLM(sizes)
    model.generation_config = GenerationConfig(do_sample=False, **special)
    return model


def train_target(
    train: list[dict[str, Any]],
    config: DemoConfig,
    folder: Path,
    progress: Progress = SILENT,
    build: Callable[[DemoConfig, PreTrainedTokenizerFast], Any] = build_target,
) -> dict[str, Any]:
    """Train the tokenizer and the target on the corpus, and save both to a folder.

    If the folder already contains a target, this target is replaced.

    Args:
        train: rows of the corpus.
        config: settings of the demo.
        folder: folder of the target.
        progress: reports the number of steps.
        build: builds the untrained target. The model must have its decoder layers in
            ``model.model.layers``.

    Returns:
        A dict with three entries. ``n_parameters`` is the number of parameters. ``n_tokens`` is the
        number of tokens seen in training, prompts included. ``train_loss`` is the loss of the last
        step in nats per token.
    """
    texts: list[str] = []
    for row in train:
        for message in row["messages"]:
            texts.append(message["content"])
    tokenizer = train_tokenizer(texts, config.vocab_size)
    model = build(config, tokenizer)
    n_tokens, loss = _fit(model, _tokenize(tokenizer, train), config, progress)
    model.save_pretrained(folder)
    # transformers writes weight files that other users cannot read. So write these files again, with
    # the usual permissions.
    for file in folder.glob("*.safetensors"):
        with replacing(file) as partial:
            write_tensors(partial, load_file(file))
    tokenizer.save_pretrained(folder)
    return {"n_parameters": model.num_parameters(), "n_tokens": n_tokens, "train_loss": loss}


def _tokenize(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]]) -> list[_Example]:
    """Tokenize chats. Tokens of answers have the loss weight 1, others have `PROMPT_WEIGHT`."""
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
    """Divide examples into batches of similar lengths, in random order.

    Returns:
        The indices of the examples in each batch. A batch has at most `batch_tokens` tokens with
        padding, unless a single example is longer.
    """
    lengths = np.array([len(ids) for ids, _ in examples])
    # Sort by length plus a random number from 0 to 16. So the batches differ between epochs.
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
    model: Any, train: list[_Example], config: DemoConfig, progress: Progress
) -> tuple[int, float]:
    """Train the target, with a linear warm-up and a cosine decay to 2 % of the peak learning rates.

    Returns:
        The number of tokens seen in training, and the loss of the last step.
    """
    rng = np.random.default_rng(config.seed)
    n_steps = config.target_steps
    # Muon updates the matrices of the decoder layers. AdamW updates embeddings, norms and LM head.
    optimizer = Muon(
        [weight for weight in model.model.layers.parameters() if weight.dim() == 2],
        model.parameters(),
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
    training = progress.of("target", "step")
    model.train()
    for step in range(1, n_steps + 1):
        pending = pending or _batches(train, config.target_batch_tokens, rng)
        batch_ids, batch_weights = zip(*[train[i] for i in pending.pop()], strict=True)
        # Pad on the right. Attention is causal, so no token attends to the padding and no mask is
        # needed. The loss weight is zero at the padding and at the last token of each chat.
        ids = pad_sequence(list(batch_ids), batch_first=True)
        weights = pad_sequence(list(batch_weights), batch_first=True)
        # The logits are [B, T, V]. B is the number of chats, T the number of tokens of the longest
        # chat, and V the size of the vocabulary.
        logits = model(input_ids=ids, use_cache=False).logits
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
        if step % 10 == 0 or step == n_steps:
            speed = n_tokens / (time.perf_counter() - started)
            training(step, n_steps, f"loss {loss.item():.3f}, {speed:,.0f} tok/s")
    model.eval()
    return n_tokens, loss.item()
