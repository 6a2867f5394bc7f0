"""The expected tensors of a weight file (names, shapes, dtypes), and the check of weights against them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import CheckpointError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that every engine accepts for weights and casts to its own."""


@dataclass(frozen=True)
class TensorSpec:
    """The expected shape and dtypes of one tensor."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    """Accepted dtypes."""


class TensorHeader(NamedTuple):
    """Shape and dtype of a tensor, from the header of a safetensors file."""

    shape: tuple[int, ...]
    dtype: Any
    """A torch dtype, or its name in the file where torch has none."""


TensorList = dict[str, TensorSpec]
"""Name of a tensor -> its expected shape and dtypes."""


def decoder_layer(
    prefix: str,
    width: int,
    query_width: int,
    key_width: int,
    mlp_width: int,
    *,
    qkv_bias: bool = False,
    input_norm: bool = True,
    input_width: int | None = None,
) -> TensorList:
    """List the tensors of a Llama decoder layer, as transformers, vLLM and SGLang name them.

    Args:
        width: E, width of the residual stream.
        query_width: query heads * head dim.
        key_width: KV heads * head dim.
        input_width: input width of q, k and v; default: E.
    """
    widths = {"q_proj": query_width, "k_proj": key_width, "v_proj": key_width}
    tensors = {f"self_attn.{name}.weight": TensorSpec((rows, input_width or width)) for name, rows in widths.items()}
    if qkv_bias:
        tensors |= {f"self_attn.{name}.bias": TensorSpec((rows,)) for name, rows in widths.items()}
    tensors |= {
        "self_attn.o_proj.weight": TensorSpec((width, query_width)),
        "mlp.gate_proj.weight": TensorSpec((mlp_width, width)),
        "mlp.up_proj.weight": TensorSpec((mlp_width, width)),
        "mlp.down_proj.weight": TensorSpec((width, mlp_width)),
        "post_attention_layernorm.weight": TensorSpec((width,)),
    }
    if input_norm:
        tensors["input_layernorm.weight"] = TensorSpec((width,))
    return {prefix + name: spec for name, spec in tensors.items()}


def find_problems(weights: Mapping[str, Tensor] | Mapping[str, TensorHeader], expected: TensorList) -> list[str]:
    """Describe every tensor that is missing, unexpected, or of another shape or dtype than expected."""
    problems = [f"missing key {name}" for name in expected if name not in weights]
    problems += [f"unexpected key {name}" for name in weights if name not in expected]
    for name, spec in expected.items():
        if name not in weights:
            continue
        shape, dtype = tuple(weights[name].shape), weights[name].dtype
        if shape != spec.shape:
            problems.append(f"{name} has shape {shape}, expected {spec.shape}")
        elif dtype not in spec.dtypes:
            known = " or ".join(str(choice).removeprefix("torch.") for choice in spec.dtypes)
            problems.append(f"{name} is {str(dtype).removeprefix('torch.')}, expected {known}")
    return problems


def check_tensors(
    weights: Mapping[str, Tensor] | Mapping[str, TensorHeader], expected: TensorList, source: object
) -> None:
    """Refuse weights that are not exactly the expected ones; raises CheckpointError with the first problem."""
    problems = find_problems(weights, expected)
    if problems:
        raise CheckpointError(f"{source} does not fit its sizes: {problems[0]} ({len(problems)} problems in all).")
