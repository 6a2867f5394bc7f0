"""Attention of queries to keys and values. The device and the mask decide which kernel is used.

| device | mask | kernel |
|---|---|---|
| CPU | none, many short sequences | matrix products, :func:`attend_many_short` |
| CUDA, training in half precision | a :class:`.masks.Mask` | FlexAttention, skips masked blocks |
| CUDA | any other mask | memory-efficient kernel, needs equal numbers of key and query heads |
| any other case | any | PyTorch's fused kernel, supports grouped heads and masks |

With a mask and grouped heads on CUDA, PyTorch would fall back to its math kernel. This kernel
materializes all scores: 4.6 GB per call for 16 sequences of 2,048 tokens and 32 heads. To avoid
this, keys and values are repeated until there are equal numbers of heads.

Shapes: B batch, Q queries, S keys, H query heads, H_kv key/value heads, d head dim.
"""

import functools
import warnings
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from ...text import first_line
from .masks import AnyMask, Mask

# Smallest number of queries for which FlexAttention is used. FlexAttention computes blocks of this
# number of queries, so it would waste time with fewer queries.
_MIN_FLEX_QUERIES = 128
_FLEX_HEAD_DIMS = (16, 32, 64, 128, 256)
_MAX_ERROR = 0.02
"""Largest allowed error of an attention result, relative to the norm of the expected result.

Rounding to bfloat16 gives an error of 0.003 (measured on an H100). Attending to one key too many or
too few gives an error of 0.3.
"""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AnyMask) -> Tensor:
    """Compute scaled dot-product attention, with scores scaled by 1/sqrt(d).

    Args:
        q: [B, H, Q, d].
        k: [B, H_kv, S, d]. The keys are cast to the dtype of ``q``.
        v: [B, H_kv, S, d]. The values are cast to the dtype of ``q``.
        mask: Which keys each query may attend to. A tensor has the shape [B or 1, Q, S] and the
            dtype bool. If None, each query attends to all keys.

    Returns:
        The attention output [B, H, Q, d].
    """
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    if mask is None and q.device.type == "cpu" and q.shape[0] > q.shape[2] * k.shape[2]:
        return attend_many_short(q, k, v)
    if isinstance(mask, Mask):
        if _takes_flex(q) and _flex_works(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[3]):
            return attend_blocks(q, k, v, mask)
        mask = mask.dense
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and needs_equal_heads(q.device, q.dtype, mask is not None):
        k = expand_heads(k, q.shape[1])
        v = expand_heads(v, q.shape[1])
        is_grouped = False
    seen = None if mask is None else mask.unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=is_grouped)


def attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute attention as :func:`attend` does, but with soft-capped scores and attention sinks.

    PyTorch's ``scaled_dot_product_attention`` supports neither soft caps nor sinks.

    Args:
        q: [B, H, Q, d].
        k: [B, H_kv, S, d].
        v: [B, H_kv, S, d].
        mask: [B or 1, Q, S] bool. If None, each query attends to all keys.
        cap: Soft cap: a tanh limits scores to the range from -cap to cap. If None, scores have no
            limit.
        sinks: [H], an additional score for each head, as in gpt-oss. This score takes part in the
            softmax, but it has no value vector, so it only reduces the weights of all values. If
            None, there are no sinks.
    """
    k = expand_heads(k.to(q.dtype), q.shape[1])
    v = expand_heads(v.to(q.dtype), q.shape[1])
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=3)
    probability = scores.softmax(dim=3, dtype=torch.float32).to(v.dtype)[..., : k.shape[2]]
    return torch.matmul(probability, v)


def needs_equal_heads(device: torch.device, dtype: torch.dtype, has_mask: bool) -> bool:
    """Whether grouped heads would make PyTorch fall back to its math kernel.

    Flash attention supports grouped heads, but neither masks nor float32.
    """
    return device.type == "cuda" and (has_mask or dtype == torch.float32)


def expand_heads(x: Tensor, n_heads: int) -> Tensor:
    """Repeat each key/value head for all query heads that share it.

    The shape changes from [B, H_kv, S, d] to [B, H, S, d].
    """
    return x.repeat_interleave(n_heads // x.shape[1], dim=1)


def attend_many_short(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend within many short sequences without a mask.

    Layer self-attention has such sequences: one per position, with the target's layers as tokens.
    PyTorch's fused kernel computes the same result.
    """
    # PyTorch's fused kernel would be slow for many short sequences: on a CPU, it has a fixed cost
    # for each sequence and each query head. Instead, compute all query heads that share a key head
    # as one matrix product.
    n_kv_heads = k.shape[1]
    head_dim = k.shape[3]
    # Queries, [B * H_kv, H / H_kv * Q, d].
    rows = q.unflatten(1, (n_kv_heads, -1)).flatten(2, 3).flatten(0, 1)
    # Scores, [B * H_kv, H / H_kv * Q, S]. All query heads that share a key head are rows of one
    # product.
    scores = torch.bmm(rows * head_dim**-0.5, k.flatten(0, 1).transpose(1, 2))
    attended = torch.bmm(scores.softmax(dim=-1), v.flatten(0, 1))
    return attended.reshape(*q.shape[:3], v.shape[3])


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attend with compiled FlexAttention. The mask is defined by rules."""
    rules = tuple(rule.__code__ for _, rule in mask.parts)
    # FlexAttention needs a block mask, which lists the blocks of scores that it can skip. All
    # layers have the same mask, so build the block mask only once and store it in ``mask``.
    if mask.block_mask is None:
        n_rows, n_queries, n_keys = mask.shape

        def rule(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # The kernel passes the index of the batch row as ``row``. If the mask has a single row,
            # all rows of the batch share it, so use index 0.
            return mask.sees(row if n_rows > 1 else row * 0, query, key)

        # Compile the function that creates the block mask, too. Without compilation, this function
        # would materialize the dense mask and intermediate tensors: 78 MB per row of 2,048 tokens.
        create = _compiled(flex.create_block_mask, rules)
        mask.block_mask = create(rule, n_rows, None, n_queries, n_keys, device=str(q.device))
    kernel = _compiled(flex.flex_attention, rules)
    attended: Tensor = kernel(
        q, k, v, block_mask=mask.block_mask, enable_gqa=q.shape[1] != k.shape[1]
    )
    return attended


@functools.cache
def _compiled(function: Any, rules: tuple[CodeType, ...]) -> Any:
    """Compile a function of FlexAttention for masks that are defined by the given rules.

    The rules of a mask are functions that decide which keys a query sees. Calling the compiled
    function raises an error if it needs more graphs than torch.compile keeps.
    """
    # torch.compile keeps at most 8 graphs per function. Beyond this limit it would silently run the
    # eager function, which materializes all scores. To stay below the limit, each combination of
    # rules gets its own copy of the function.
    code = function.__code__.replace(
        co_name=f"{function.__name__}_{rules[0].co_qualname.split('.')[0]}"
    )
    function_copy = FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )
    function_copy.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(function_copy, dynamic=True, fullgraph=True)


def _takes_flex(q: Tensor) -> bool:
    # Do not use FlexAttention for float32. A global setting of PyTorch changes how FlexAttention
    # rounds float32 products.
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    is_large = q.shape[2] >= _MIN_FLEX_QUERIES and q.shape[3] in _FLEX_HEAD_DIMS
    return q.device.type == "cuda" and torch.is_grad_enabled() and is_half and is_large


@functools.cache
def _flex_works(
    device: torch.device, dtype: torch.dtype, n_heads: int, n_kv_heads: int, head_dim: int
) -> bool:
    """Whether compiled FlexAttention gives correct values and gradients on this machine.

    The reference is PyTorch's attention in float32.
    """
    # FlexAttention can fail with some compilers and library versions. So compare its results with
    # the reference once.
    generator = torch.Generator(device).manual_seed(0)

    def drawn(heads: int, n: int) -> Tensor:
        normal = torch.randn(2, heads, n, head_dim, device=device, generator=generator)
        return normal.to(dtype).requires_grad_()

    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            for n_queries, n_keys in ((192, 320), (320, 448)):
                mask = Mask.up_to(torch.arange(n_queries, device=device).expand(2, -1), n_keys)
                q = drawn(n_heads, n_queries)
                k = drawn(n_kv_heads, n_keys)
                v = drawn(n_kv_heads, n_keys)
                plain = attend(q.float(), k.float(), v.float(), mask)
                results: list[list[Tensor]] = []
                for attended in (attend_blocks(q, k, v, mask), plain):
                    loss = attended.float().square().sum()
                    gradients = torch.autograd.grad(loss, (q, k, v))
                    results.append([x.float() for x in (attended.detach(), *gradients)])
                for got, expected in zip(*results, strict=True):
                    error = float((got - expected).norm() / expected.norm())
                    # Comparisons with NaN are false, so this negated comparison also finds an error
                    # that is NaN.
                    if not error <= _MAX_ERROR:
                        raise ValueError(
                            f"its results differ by {error:.1%} from those of the plain computation"
                        )
    except Exception as error:  # noqa: BLE001 - a compiler can raise any exception
        text = first_line(error)
        warnings.warn(
            f"FlexAttention fails on this machine ({text:.200}), so attention with masks runs "
            "without it, which may be slower.",
            stacklevel=2,
        )
        return False
    return True
