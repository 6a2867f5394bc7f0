"""What cannot fit is refused before anything is loaded, and the message names the option with which it would."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import NotEnoughMemory
from moa_data.machine import free_memory
from moa_data.moa.targets.bundle import parse_target_config
from moa_data.pipeline import plan as plan_module
from moa_data.pipeline.add import plan_addition
from moa_data.pipeline.config import AddConfig, ExtractConfig, parse_activations
from moa_data.pipeline.extract import extract
from moa_data.pipeline.forwards import memory as memory_module
from moa_data.pipeline.forwards.memory import ForwardMemory
from moa_data.pipeline.plan import build_plan, field_specs, forward_memory
from moa_data.tests.kit.command import refused, run

GB = 10**9
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
}  # fmt: skip


def memory_of(compute_dtype: str = "float32", batch_tokens: int = 2048, device: str = "cpu") -> ForwardMemory:
    config = parse_target_config(LLAMA_3_8B, "test")
    spec = parse_activations(("kv", "hidden:last"), 0, 32)
    fields = field_specs(spec, {"n_layers": 32, "n_kv_heads": 8, "head_dim": 128, "hidden_size": 4096}, "bfloat16")
    return forward_memory(config, fields, compute_dtype, batch_tokens, 2048, device)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what is free: (host bytes, device bytes or None)."""

    def set_free(host: int | None, device: int | None = None) -> None:
        monkeypatch.setattr(memory_module, "free_memory", lambda: host)
        monkeypatch.setattr(memory_module, "free_device_memory", lambda _: device)

    return set_free


def test_an_8b_in_float32_is_refused_where_bfloat16_fits(free: Any) -> None:
    assert memory_of().n_weights == 8_030_261_248
    free(23 * GB)
    with pytest.raises(
        NotEnoughMemory, match=r"weights 32\.1 GB in float32.*Free in host memory are 23\.0 GB"
    ) as error:
        memory_of().check()
    assert "Use --compute-dtype bfloat16." in str(error.value)
    memory_of("bfloat16").check()
    free(60 * GB)
    memory_of().check()
    free(None)  # it can't be told: nothing is refused
    memory_of().check()


def test_a_batch_that_is_too_large_is_refused_with_one_that_fits(free: Any) -> None:
    free(23 * GB)
    with pytest.raises(NotEnoughMemory, match=r"batches of 65,536 tokens.*Use --batch-tokens 4096\."):
        memory_of("bfloat16", 65_536).check()


def test_what_no_option_makes_fit_is_refused_plainly(free: Any) -> None:
    free(10 * GB)
    with pytest.raises(NotEnoughMemory, match="No option makes it fit"):
        memory_of("bfloat16").check()


def test_a_device_of_its_own_counts_apart(free: Any) -> None:
    whole = memory_of("bfloat16", 16_384, "cuda")
    # Weights of 16.1 GB, and 2.1 GB of kept values in each of five copies, of which one lies in a cache.
    assert 26 * GB < whole.device_bytes < 34 * GB
    assert 9 * GB < 4 * 16_384 * whole.kept_bytes < 10 * GB
    assert whole.host_bytes == max(whole.weight_bytes, 4 * 16_384 * whole.kept_bytes)
    free(64 * GB, 80 * GB)
    whole.check()
    free(64 * GB, 24 * GB)
    with pytest.raises(NotEnoughMemory, match=r"Free in cuda are 24\.0 GB\. Use --batch-tokens \d+\."):
        whole.check()


def test_plan_extract_and_add_refuse_before_they_read_or_load(
    config: ExtractConfig, free: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(config.replaced(activations=("hidden:last",)))
    free(1000)
    monkeypatch.setattr(plan_module, "read_sequences", lambda *_: pytest.fail("the chats were read"))
    for command in (build_plan, extract):
        with pytest.raises(NotEnoughMemory, match="The target's forwards need"):
            command(config.replaced(out=f"{config.out}-other"))
    with pytest.raises(NotEnoughMemory, match="The target's forwards need"):
        plan_addition(AddConfig.of(store=config.out, model=config.model, activations=("kv",)))
    refused(run("plan", "--model", config.model, "--dataset", config.dataset, "--out", "new"), "host memory")
    assert not Path(f"{config.out}-other").exists()


def test_weights_of_the_hub_are_not_downloaded_for_what_is_refused(
    config: ExtractConfig, free: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = Path(config.model), []

    def resolve(_: str, with_weights: bool = True, revision: str | None = None) -> Path:
        asked.append(with_weights)
        return folder

    monkeypatch.setattr(plan_module, "resolve_model_folder", resolve)
    free(1000)
    with pytest.raises(NotEnoughMemory):
        build_plan(config.replaced(model="owner/name"), with_weights=True)
    assert asked == [False]


def test_a_longer_sequence_than_a_batch_counts() -> None:
    small = memory_of(batch_tokens=256)
    assert replace(small, longest_tokens=256).host_bytes < small.host_bytes == memory_of(batch_tokens=2048).host_bytes


def test_this_machine_says_what_is_free() -> None:
    assert (free_memory() or 1) > 0


def test_each_worker_has_weights_and_batches_of_its_own(free: Any) -> None:
    one = memory_of()
    three = replace(one, n_workers=3)
    assert three.host_bytes == 3 * one.host_bytes
    assert "of host memory for 3 workers" in three.describe()
    free(int(2.5 * one.host_bytes))
    with pytest.raises(NotEnoughMemory, match=r"Use --workers 2\."):
        three.check()
