"""Plain steps through all layers in one operation give the values of layer after layer."""

from typing import Any

import pytest
import torch
from torch import nn

from moa_data.moa.nn import packed
from moa_data.moa.targets.live import Target
from moa_data.serving.engine import attention, steps
from moa_data.serving.engine.attention import Segment
from moa_data.serving.engine.pool import BLOCK_TOKENS, Pool, PooledKV
from moa_data.serving.engine.runner import Output, Runner
from moa_data.tests.kit.models import build_model
from moa_data.tests.kit.variants import quick_rows


def stepped(family: str, lengths: list[int]) -> tuple[list[Output], torch.Tensor]:
    """Run one token of each sequence.

    Returns the outputs, with those of two layers, and the content of the pool.
    """
    target, generator = Target(build_model(family)), torch.Generator().manual_seed(0)
    pool = Pool(16 * BLOCK_TOKENS, target.facts.sizes, torch.float32, target.device)
    pool.buffer.fill_(torch.nan)
    for length in lengths:
        pool.reserve(kv := PooledKV(pool), 1 + length // BLOCK_TOKENS)
        kv.length = length
    for kv in pool._held:
        kv.view(0, kv.length).normal_(generator=generator)
    with torch.inference_mode():
        return Runner(target).run(
            [Segment(kv, [7 + kv.length % 30]) for kv in pool._held], (0, 2)
        ), pool.buffer


LENGTHS = ([40], [30, 0, 31, 32, 33], [1, 2, 3, 90])
ROWS = [(family, lengths) for family in ("llama", "qwen2", "qwen3") for lengths in LENGTHS]


@pytest.mark.parametrize(
    ("family", "lengths"),
    # Layers of qwen3 take the same path for all lengths. Those of qwen2 only have biases more.
    quick_rows(ROWS, [row for row in ROWS if row[0] == "llama" or row[1] is LENGTHS[1]]),
    ids=str,
)
def test_all_layers_at_once_are_layer_by_layer(
    family: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed._works(torch.float32):
        pytest.skip("this machine gains nothing by the layout")
    monkeypatch.setattr(packed, "_FEWEST_VALUES", 1)
    assert isinstance(steps.run_layers, torch.jit.ScriptFunction)
    calls, compiled = list[int](), steps.run_layers

    def counted(*given: Any) -> Any:
        calls.append(len(given))
        return compiled(*given)

    monkeypatch.setattr(attention, "run_layers", counted)
    found, held = stepped(family, lengths)
    # Layers of qwen3 have another form. Sequences whose lengths differ too much get rows of their
    # own.
    assert bool(calls) == (family != "qwen3" and lengths != [1, 2, 3, 90])
    monkeypatch.setattr(attention.SegmentAttention, "run_layers", lambda *given: None)
    expected, expected_held = stepped(family, lengths)
    torch.testing.assert_close(held, expected_held, rtol=1e-5, atol=1e-6, equal_nan=True)
    for own, other in zip(found, expected, strict=True):
        assert own.best == other.best
        torch.testing.assert_close(own.logits, other.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            [own.hidden, *own.layers.values()], [other.hidden, *other.layers.values()]
        )


def test_layers_of_unlike_query_heads_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled function needs the same number of query heads in all layers."""
    if not packed._works(torch.float32):
        pytest.skip("this machine gains nothing by the layout")
    monkeypatch.setattr(packed, "_FEWEST_VALUES", 1)
    model = build_model()
    attention, width, head_dim = (
        model.model.layers[1].self_attn,
        model.config.hidden_size,
        model.config.head_dim,
    )
    n_wide = 2 * attention.q_proj.out_features
    attention.q_proj, attention.o_proj = (
        nn.Linear(width, n_wide, bias=False),
        nn.Linear(n_wide, width, bias=False),
    )
    attention.num_key_value_groups = n_wide // head_dim // model.config.num_key_value_heads
    target = Target(model.requires_grad_(False))
    tokens = list(range(4, 24))
    expected = model(torch.tensor([tokens])).logits[0, -1]
    runner, pool = (
        Runner(target),
        Pool(8 * BLOCK_TOKENS, target.facts.sizes, torch.float32, target.device),
    )
    pool.reserve(kv := PooledKV(pool), 1)
    with torch.inference_mode():
        runner.run([Segment(kv, tokens[:-1])])
        kv.length = len(tokens) - 1
        (output,) = runner.run([Segment(kv, tokens[-1:])])
    assert runner._fused is not None
    assert output.logits is not None
    torch.testing.assert_close(output.logits[0], expected, rtol=1e-5, atol=1e-5)
