"""Makes inputs of benchmarks: model folders with random weights, and manifests of stores."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from benchmarks.kit.shapes import SHAPES, shape_config
from moa_data.demo.corpus import generate_corpus
from moa_data.demo.target import train_tokenizer
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.plan import plan_counts, plan_parts
from moa_data.storage.schema import ALIGNMENT_TOKENS, FieldSpec, StoreManifest

N_TOKENIZER_CHATS = 256
STD = 0.02


def make_target(folder: Path, shape: str, n_layers: int | None = None, device: str = "cpu") -> None:
    """Write a model folder with random weights, one file per layer, and a small new tokenizer.

    Args:
        device: The device whose random generator draws the weights. Other devices give other
            weights.
    """
    folder.mkdir(parents=True)
    rows = generate_corpus(N_TOKENIZER_CHATS, 1, seed=0).train
    n_tokens = min(2048, SHAPES[shape]["vocab_size"])
    tokenizer = train_tokenizer([json.dumps(row["messages"]) for row in rows], n_tokens)
    tokenizer.model_max_length = SHAPES[shape]["max_position_embeddings"]
    tokenizer.save_pretrained(folder)
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = shape_config(shape, n_layers, architectures=["LlamaForCausalLM"], **special)
    config.save_pretrained(folder)
    GenerationConfig(do_sample=False, **special).save_pretrained(folder)
    write_weights(folder, config, device)


def write_weights(folder: Path, config: Any, device: str) -> None:
    """Write norms of 1 and matrices from N(0, 0.02), in bfloat16."""
    wide, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    narrow = wide * config.num_key_value_heads // config.num_attention_heads
    layer = {
        "self_attn.q_proj": (wide, wide), "self_attn.k_proj": (narrow, wide),
        "self_attn.v_proj": (narrow, wide), "self_attn.o_proj": (wide, wide),
        "mlp.gate_proj": (inner, wide), "mlp.up_proj": (inner, wide),
        "mlp.down_proj": (wide, inner), "input_layernorm": (wide,),
        "post_attention_layernorm": (wide,),
    }  # fmt: skip
    files: list[dict[str, tuple[int, ...]]] = [
        {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        for index in range(config.num_hidden_layers)
    ]
    files += [
        {"model.embed_tokens.weight": (vocabulary, wide)},
        {"lm_head.weight": (vocabulary, wide)},
    ]
    files[0]["model.norm.weight"] = (wide,)
    generator = torch.Generator(device).manual_seed(0)
    files_of_tensors: dict[str, str] = {}
    for number, shapes in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        tensors = {name: random_weight(shape, generator) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files_of_tensors |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files_of_tensors})
    )


def random_weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return the weights of a matrix or of a norm, bfloat16 in host memory.

    A matrix is drawn at random on the device of the generator. A norm has ones.
    """
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return drawn.normal_(0, STD, generator=generator).cpu()


def recipe(
    fields: tuple[FieldSpec, ...], lengths: Sequence[int], part_tokens: int = 1 << 40,
    codec: str = "lossless", target: dict[str, Any] | None = None,
) -> tuple[StoreManifest, pa.Table]:  # fmt: skip
    """Return the manifest and the plan of sequences of these lengths.

    All tokens of a sequence except the first are response tokens.
    """
    columns = {
        "sequence_id": [f"ffffffff{row:056x}" for row in range(len(lengths))],
        "source_row": pa.array(range(len(lengths)), pa.int64()),
        "n_tokens": pa.array(lengths, pa.int32()),
        "n_response_tokens": pa.array([length - 1 for length in lengths], pa.int32()),
    }
    plan = plan_parts(pa.table(columns), part_tokens, ALIGNMENT_TOKENS)
    counts: dict[str, Any] = plan_counts(plan)
    manifest = StoreManifest(
        fields=fields, target=target or {}, identities={}, extraction={},
        codec=StoreCodec(codec, fields).describe(), **counts,
    )  # fmt: skip
    return manifest, plan
