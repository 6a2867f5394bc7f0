"""A causal call in pieces or without a mask equals one call with a full mask.

It also needs less memory.
"""

import importlib.metadata
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import MagicMock

import huggingface_hub
import pytest
import torch

from moa_data.errors import TargetError
from moa_data.moa.decoding.loop import generate_batch
from moa_data.moa.targets import live as target_module
from moa_data.moa.targets.cache import Buffers, TargetCache
from moa_data.moa.targets.live import (
    Target,
    load_target_tokenizer,
    mark_moment,
    resolve_model_folder,
    seconds_between,
)
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.memory import LiveBytes
from moa_data.tests.kit.models import FAMILIES, build_model
from moa_data.tests.kit.variants import quick_rows


def with_full_mask(target: Any, tokens: Any, cache: Any) -> Any:
    """Make the same call with an explicit mask of each token's ancestors."""
    n_rows, n_tokens = tokens.shape
    return target.forward(
        tokens,
        cache,
        torch.ones(n_tokens, n_tokens, dtype=torch.bool).tril().expand(n_rows, -1, -1),
    )


@pytest.mark.parametrize(
    ("chunk", "family", "attention"),
    quick_rows(
        itertools.product((1, 7, 1024), FAMILIES, ("sdpa", "eager")),
        [
            (1, "llama", "eager"), (1, "qwen2-mixed", "sdpa"),
            (7, "qwen3", "sdpa"), (7, "qwen2-mixed", "eager"),
            (1024, "llama", "sdpa"), (1024, "qwen2-mixed", "sdpa"),
        ],
    ),
)  # fmt: skip
def test_causal_runs_equal_one_call_with_the_mask(
    family: str, attention: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "_CHUNK_TOKENS", chunk)
    model = build_model(family)
    model.config._attn_implementation = attention
    target, tokens = Target(model), torch.randint(0, 67, (3, 40))
    one, other = target.new_cache(3), target.new_cache(3)
    # The calls are a prefill of ragged prompts with right padding, a run after each, a short run, a
    # single token, and a run of which a row keeps all tokens or none.
    for n_tokens, kept in (
        (20, (20, 3, 11)),
        (12, (2, 12, 7)),
        (3, (1, 0, 2)),
        (1, (1, 1, 1)),
        (4, (0, 4, 4)),
    ):
        part, tokens = tokens[:, :n_tokens], tokens[:, n_tokens:]
        hidden, expected = target.forward(part, one), with_full_mask(target, part, other)
        torch.testing.assert_close(hidden, expected, rtol=0, atol=2e-5)
        assert one.n_pending == n_tokens
        for cache in (one, other):
            cache.commit([range(count) for count in kept])
        lengths = one.lengths
        assert lengths == other.lengths
        for row, length in enumerate(lengths):
            got, wanted = one.packed([0] * 3, length)[row], other.packed([0] * 3, length)[row]
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "n_rows"),
    quick_rows(
        itertools.product(FAMILIES, (1, 2)), [("llama", 1), ("llama", 2), ("qwen2-mixed", 2)]
    ),
)
def test_prefill_makes_no_tensor_of_all_tokens_by_all_tokens(
    family: str, n_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_tokens, piece = 1536, 96
    monkeypatch.setattr(target_module, "_CHUNK_TOKENS", piece)
    # The second layer has the window, in the family that has one.
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "max_window_layers": 1}
    model = build_model(family, **sizes, max_position_embeddings=n_tokens)
    target, tokens = Target(model), torch.randint(0, 67, (n_rows, n_tokens))
    cache = target.new_cache(n_rows)
    with LiveBytes() as made:
        target.forward(tokens, cache)
    cache_bytes = cache.layer_view(0, n_tokens)[0].untyped_storage().nbytes()
    piece_bytes = piece * n_tokens * 8  # distances in int64
    assert made.largest <= max(cache_bytes, piece_bytes)
    assert made.largest < n_tokens * n_tokens


def refuse(error: Exception) -> Callable[..., NoReturn]:
    def refused(*args: Any, **options: Any) -> NoReturn:
        raise error

    return refused


def test_a_mistyped_folder_is_not_only_a_failed_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", refuse(ConnectionError("no route to host."))
    )
    with raises_naming(TargetError, "models/nope", "no route to host"):
        resolve_model_folder("models/nope")


def test_each_device_is_timed_by_its_own_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    event = MagicMock()
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"the queue of {device}")
    mark_moment(torch.device("cuda:1"))
    event.assert_called_once_with(enable_timing=True)
    event().record.assert_called_once_with("the queue of cuda:1")
    cpu = torch.device("cpu")
    assert 0 <= seconds_between(mark_moment(cpu), mark_moment(cpu)) < 60


def test_a_batch_that_shrinks_keeps_one_buffer() -> None:
    """With a buffer for each number of rows, 32 rows would need 16 times the memory."""
    target = Target(build_model(num_hidden_layers=1))
    cache = target.new_cache(8)
    target.forward(torch.arange(4, 28).view(8, 3), cache)
    cache.commit([range(3)] * 8)
    expected, address, held = (
        cache.packed([0] * 8, 3)[[2, 5, 7]],
        cache.buffer.data_ptr(),
        cache.buffer.nbytes,
    )
    # In the end rows 2, 5 and 7 remain.
    for left in ([0, 1, 2, 4, 5, 6, 7], [2, 4, 5, 6], [0, 1, 3]):
        cache.select_rows(left)
    assert torch.equal(cache.packed([0] * 3, 3), expected)
    assert (cache.buffer.data_ptr(), cache.buffer.untyped_storage().nbytes()) == (address, held)
    shared: Buffers = {}
    static = TargetCache(1, 4, 16, shared)
    static.reserve(16, torch.zeros(4, 2, 1, 8))
    for n_rows in (3, 2, 1):
        static.select_rows(range(n_rows))
    static.release()
    assert [len(free) for free in shared.values()] == [1]


@pytest.mark.parametrize("is_prepared", [True, False])
def test_small_targets_decode_with_one_thread_and_give_the_others_back(is_prepared: bool) -> None:
    n_threads: list[int] = []
    target, n_before = Target(build_model()), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        if is_prepared:
            target.prepare()
        generate_batch(
            target,
            [[5, 6, 7]],
            max_new_tokens=2,
            on_tokens=lambda *_: n_threads.append(torch.get_num_threads()),
        )
        assert set(n_threads) == {1 if is_prepared else 2}
        with pytest.raises(KeyError), target.threads():
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(n_before)


@pytest.mark.parametrize("kind", ["fifo", "file"])
def test_what_is_neither_a_folder_nor_a_gguf_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model"
    os.mkfifo(path) if kind == "fifo" else path.touch()
    with pytest.raises(TargetError):
        resolve_model_folder(str(path))


@pytest.mark.parametrize(
    ("content", "package"), [(b"\n\x0e\n\x05<unk>", "sentencepiece"), (b"IQ== 0\n", "tiktoken")]
)
def test_the_package_that_reads_a_tokenizer_is_named(
    tmp_path: Path, content: bytes, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        one
        for one in importlib.metadata.distributions()
        if one.name not in ("sentencepiece", "tiktoken")
    ]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    (tmp_path / "tokenizer.model").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with raises_naming(TargetError, f"pip install {package}"):
        load_target_tokenizer(tmp_path)
