"""The gRPC messages: generated code is current, codecs keep their bounds.

Identities belong to the loaded target, tokenizer and drafter.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moa_data.errors import ServingError
from moa_data.serving.wire import (
    CODECS,
    GROUP,
    bytes_per_position,
    decode,
    drafter_identity,
    encode,
    target_identity,
    tokenizer_identity,
)
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.models import build_byte_tokenizer, build_model, build_tokenizer

ROOT = Path(__file__).parents[2]
# These lines depend only on the release of grpcio-tools.
BANNERS = re.compile(r"^(# Protobuf Python Version: .*|    \d+,)$", re.MULTILINE)
MOST = {"int8": 127, "int4": 7}
SHAPES = st.tuples(st.integers(0, 5), st.sampled_from([0, 1, 2, 7, 63, 64, 65, 100, 129, 192]))


def numbers(n: int, width: int, seed: int, scale: float) -> Tensor:
    """Return numbers whose groups differ in size, like the keys and other parts of a context."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(n, -(-width // GROUP), generator=generator).mul(8).exp()
    return (
        torch.randn(n, width, generator=generator)
        * sizes.repeat_interleave(GROUP, dim=1)[:, :width]
        * scale
    )


def bound(codec: str, context: Tensor) -> Tensor:
    """Return the largest error that each number may have."""
    if codec == "bf16":
        return context.abs() / 256
    rest = -context.shape[1] % GROUP
    groups = torch.nn.functional.pad(context, (0, rest)).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(dim=2).repeat_interleave(GROUP, dim=1)[:, : context.shape[1]]
    # The bound is half a step. The scale itself is rounded to one part in 256.
    error: Tensor = largest / MOST[codec] * (0.5 + 1 / 256) + largest / 256
    return error


@given(
    st.sampled_from(CODECS),
    SHAPES,
    st.integers(0, 1 << 16),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]),
)
def test_roundtrip(codec: str, shape: tuple[int, int], seed: int, scale: float) -> None:
    context = numbers(*shape, seed, scale)
    values = encode(codec, context)
    assert len(values) == shape[0] * bytes_per_position(codec, shape[1])
    found = decode(codec, values, *shape)
    assert found.shape == shape
    assert found.dtype == torch.float32
    assert ((found - context).abs() <= bound(codec, context)).all()
    assert encode(codec, found) == values, "what was decoded is encoded to the same bytes"
    assert values == b"".join(encode(codec, row[None]) for row in context), (
        "each position on its own"
    )


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_becomes_0(codec: str) -> None:
    context = torch.tensor([[1.0, float("inf"), float("-inf"), float("nan"), -2.0, 3.4e38]])
    found = decode(codec, encode(codec, context), 1, 6)
    assert found.isfinite().all()
    assert found[0, 1:4].tolist() == [0, 0, 0]
    small = decode(codec, encode(codec, context[:, :5]), 1, 5)
    torch.testing.assert_close(small, torch.tensor([[1.0, 0, 0, 0, -2.0]]), rtol=0, atol=0.15)


@given(st.sampled_from(CODECS), st.binary(max_size=400), st.integers(0, 4), st.integers(0, 130))
def test_any_bytes_are_decoded_or_refused(codec: str, values: bytes, n: int, width: int) -> None:
    expected = n * bytes_per_position(codec, width)
    if len(values) != expected:
        with pytest.raises(ServingError):
            decode(codec, values, n, width)
        values = values[:expected].ljust(expected, b"\xff")
    found = decode(codec, values, n, width)
    assert found.shape == (n, width)
    assert found.isfinite().all()


def test_generated_code_is_current(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / ".ci" / "proto.py"), str(tmp_path)]
    subprocess.run(script, check=True, capture_output=True)
    made = sorted(tmp_path.iterdir())
    assert [path.name for path in made] == ["moa_v1_pb2.py", "moa_v1_pb2.pyi"]
    for path in made:
        checked_in = (ROOT / "serving" / path.name).read_text()
        assert BANNERS.sub("", checked_in) == BANNERS.sub("", path.read_text()), (
            f"{path.name} is old: run `make proto`"
        )


def test_identities() -> None:
    model = build_model()
    one = drafter_identity(build_drafter(model))
    assert one == drafter_identity(build_drafter(model))
    assert one == drafter_identity(build_drafter(model).bfloat16()), (
        "in whatever dtype it was loaded"
    )
    assert one != drafter_identity(build_drafter(model, seed=2))
    assert one != drafter_identity(build_drafter(model, unrotated_keys=True)), "sizes count"
    changed = build_drafter(model)
    with torch.no_grad():
        changed.kv_to_hidden.bias[3] += 1
    assert one != drafter_identity(changed)
    one = tokenizer_identity(build_tokenizer(None))
    assert one == tokenizer_identity(build_tokenizer("{{ messages }}")), (
        "the template is the client's affair"
    )
    assert one != tokenizer_identity(build_byte_tokenizer())
    assert tokenizer_identity(None) == target_identity({}) == ""
    assert target_identity({"weights_sha256": "ab", "config_sha256": "cd"}) == "ab"
