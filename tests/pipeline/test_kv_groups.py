"""Targets whose layers cache different shapes, from extraction to decoding.

Other programs read their stores too.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
from transformers import DynamicCache

from moa_data.errors import OptionInvalid, SelectionInvalid, TargetError
from moa_data.evaluation.run import generate
from moa_data.moa.decoding.loop import generate_batch
from moa_data.moa.decoding.tree import TreeShape
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.moa.targets.facts import KVShape, TargetFacts, parse_facts
from moa_data.moa.targets.live import Target
from moa_data.pipeline import estimate as estimate_module
from moa_data.pipeline.add import add
from moa_data.pipeline.audit import audit
from moa_data.pipeline.config import AddConfig, ExtractConfig, parse_activations
from moa_data.pipeline.estimate import field_specs
from moa_data.pipeline.exchange.config import ExportConfig
from moa_data.pipeline.exchange.transfer import export_store
from moa_data.pipeline.extract import extract, repair
from moa_data.pipeline.forwards.capture import capture
from moa_data.pipeline.plan import build_plan
from moa_data.pipeline.recode import recode
from moa_data.serving.engine.engine import Engine
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import StoreManifest
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.drafters import NO_DRAWS
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.families import build_family, write_family
from moa_data.tests.kit.runs import run, settings
from moa_data.tests.kit.stores import flip, read_tree
from moa_data.tests.kit.variants import quick
from moa_data.trainer.batches import BatchReader

GROUPS: dict[str, dict[str, tuple[tuple[int, ...], KVShape]]] = {
    "deepseek_v3": {"kv/latent": ((0, 1, 2, 3), KVShape(1, 16, 8))},
    "glm4_moe_lite": {"kv/latent": ((0, 1, 2, 3), KVShape(1, 16, 8))},
    "gemma4_text": {
        "kv/sliding_attention": ((0,), KVShape(2, 16, 16)),
        "kv/full_attention": ((1,), KVShape(1, 24, 24)),
    },
    "qwen3_next": {"kv/full_attention": ((3,), KVShape(2, 16, 16))},
    "qwen3_5_text": {"kv/full_attention": ((3,), KVShape(2, 16, 16))},
    "qwen3_5_moe_text": {"kv/full_attention": ((3,), KVShape(2, 16, 16))},
}  # fmt: skip


@pytest.mark.parametrize("name", quick(GROUPS, ("deepseek_v3", "gemma4_text", "qwen3_next")))
def test_what_is_captured_is_the_models_own_cache(name: str) -> None:
    model, random = build_family(name), np.random.default_rng(0)
    groups = TargetFacts.of_model(model).kv_groups
    assert {group.field: (group.layers, group.shape) for group in groups} == GROUPS[name]
    rows = [random.integers(4, 60, length).astype(np.int32) for length in (19, 7)]
    fields = capture(
        model, rows, parse_activations(["kv"], 0, 4, tuple(GROUPS[name])), torch.float32
    ).fields
    assert set(fields) == set(GROUPS[name])
    for index, tokens in enumerate(rows):
        cache = DynamicCache(config=model.config)
        model(
            input_ids=torch.from_numpy(tokens.astype(np.int64))[None],
            past_key_values=cache,
            use_cache=True,
        )
        for group in groups:
            for layer_index, layer in enumerate(group.layers):
                # [H, n, widths]
                own = (
                    fields[group.field][index, : len(tokens), layer_index]
                    .transpose(0, 1)
                    .flatten(2)
                )
                kept: Any = cache.layers[layer]
                known = torch.cat((kept.keys, kept.values), dim=-1)[0]
                torch.testing.assert_close(own[:, -known.shape[1] :], known, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module", params=quick(GROUPS, ("gemma4_text",)))
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A folder with a target and a store made from it."""
    folder, name = tmp_path_factory.mktemp(request.param), request.param
    write_family(folder / "model", name, vocab_size_per_layer_input=400)
    extract(config_of(folder))
    return name, folder


def config_of(folder: Path, **changes: Any) -> ExtractConfig:
    chats = write_jsonl(folder / "chats.jsonl", random_chats(14))
    usual = {"out": str(folder / "store"), "device": "cpu", "part_tokens": 512, "batch_tokens": 256}
    return ExtractConfig.of(
        model=str(folder / "model"), dataset=str(chats), max_length=128, **usual | changes
    )


@pytest.mark.slow
def test_stores_are_sound_and_alike_however_they_are_made(
    made: tuple[str, Path], tmp_path: Path
) -> None:
    name, folder = made
    assert verify_store(folder / "store").ok
    report = audit(folder / "store", str(folder / "model"), 3, 0, "cpu")
    assert report.ok, report.describe()
    worst = {
        field: report.worst()[field].detail.removeprefix("worst in layer ")
        for field in GROUPS[name]
    }
    assert all(int(worst[field]) in layers for field, (layers, _) in GROUPS[name].items())
    with raises_naming(OptionInvalid, "transform:2", "'kv/"):
        recode(folder / "store", "transform:2", tmp_path / "small")
    with raises_naming(OptionInvalid, "`source=vllm`"):
        build_plan(config_of(folder, source="vllm", device="auto"))
    recode(folder / "store", "int8", tmp_path / "int8")
    assert verify_store(tmp_path / "int8").ok
    assert audit(tmp_path / "int8", str(folder / "model"), 3, 0, "cpu").ok
    batches = []
    for store in (folder / "store", tmp_path / "int8"):
        reader = BatchReader(
            ActivationStore(store), settings(store, layer_groups=1), torch.device("cpu")
        )
        batches.append(reader.batch(np.arange(3), NO_DRAWS).inputs.required_kv().float())
    assert (batches[1] - batches[0]).norm() < 0.02 * batches[0].norm()
    with raises_naming(SelectionInvalid, "`kv`"):
        export_store(
            ExportConfig.of(
                store=str(folder / "store"),
                out=str(tmp_path / "files"),
                format="speculators",
                kv=True,
            )
        )
    extract(config_of(folder, out=str(tmp_path / "added"), activations=("hidden:last",)))
    add(
        AddConfig.of(
            store=str(tmp_path / "added"), model=str(folder / "model"), activations=("kv",)
        )
    )
    assert verify_store(tmp_path / "added").ok
    one, other = (read_tree(store / "parts/kv") for store in (folder / "store", tmp_path / "added"))
    assert one
    assert one == other
    flip(next((tmp_path / "added/parts/kv").glob("*/c.1.*")))
    assert [damage.part for damage in verify_store(tmp_path / "added").damages] == [1]
    assert repair(tmp_path / "added", str(folder / "model")).n_parts_done == 1
    assert read_tree(tmp_path / "added/parts/kv") == one


def test_tensorstore_reads_them_as_the_page_on_the_format_says(made: tuple[str, Path]) -> None:
    name, folder = made
    store = folder / "store"
    with ActivationStore(store) as reader:
        row, tokens = reader.sequences.to_pylist()[0], reader.read(0, "tokens")
    page = (
        (Path(__file__).parents[2] / "docs/format.md")
        .read_text()
        .split("## Keys and values by groups")[1]
    )
    program = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert program is not None
    manifest = json.loads((store / "store.json").read_text())
    known = {"json": json, "np": np, "ts": ts, "store": store, "manifest": manifest, "row": row}
    exec(program[1], known)
    groups: Any = known["groups"]
    assert {field: tuple(layers) for field, (layers, _, _) in groups.items()} == {
        field: layers for field, (layers, _) in GROUPS[name].items()
    }
    model = Target.load(str(folder / "model"), device="cpu").model
    cache = DynamicCache(config=model.config)
    model(
        input_ids=torch.from_numpy(tokens.astype(np.int64))[None],
        past_key_values=cache,
        use_cache=True,
    )
    for layers, keys, values in groups.values():
        for index, layer in enumerate(layers):
            kept: Any = cache.layers[layer]
            for own, cached in ((keys, kept.keys), (values, kept.values)):
                # Layers with a window cache only the last tokens.
                last = own[-cached.shape[2] :, index].swapaxes(0, 1)
                np.testing.assert_allclose(last, cached[0].numpy(), rtol=1e-2, atol=1e-3)


def test_a_drafter_is_trained_and_decodes_by_what_it_has_learned_from(
    made: tuple[str, Path], tmp_path: Path
) -> None:
    name, folder = made
    assert run(folder / "store", tmp_path / "run", max_steps=2, layer_groups=1).n_steps == 2
    assert run(folder / "store", tmp_path / "glide", max_steps=1, drafter="glide").n_steps == 1
    drafter, glide = load_drafter(tmp_path / "run"), load_drafter(tmp_path / "glide")
    n_groups = len(GROUPS[name])
    assert sum(key.startswith("kv_inputs.") for key in drafter.state_dict()) == (
        n_groups if n_groups > 1 else 0
    )
    target = Target.load(str(folder / "model"), device="cpu")
    target.eos_token_ids = frozenset()
    prompt = list(range(20, 40))
    plain = generate_batch(target, [prompt], max_new_tokens=12)[0].tokens
    for one in (drafter, glide):
        assert generate(target, one, prompt, max_new_tokens=12, tree=TreeShape(3)).tokens == plain
    if name != "gemma4_text":  # The engine serves this one; its own tests cover that.
        for one in (drafter, glide):
            with raises_naming(TargetError, name):
                Engine(target, {"it": one})
    for changes in (
        {},
        {"layer_attention": False},
        {"layer_stride": 2} if name in ("deepseek_v3", "gemma4_text") else {},
    ):
        with ActivationStore(folder / "store") as store:
            reader = BatchReader(
                store, settings(folder / "store", layer_groups=1, **changes), torch.device("cpu")
            )
            rows = np.arange(2)
            inputs = reader.batch(rows, NO_DRAWS).inputs
            # A GPU packs and decodes the values itself, so the reader must not.
            reader._decodes = False
            there = reader.batch(rows, NO_DRAWS).to(torch.device("cpu")).decode().inputs
            assert torch.equal(there.required_kv(), inputs.required_kv())
            row = store.read(1, "tokens").tolist()
        cache = target.new_cache()
        target.forward(torch.tensor([row]), cache)
        cache.commit([range(len(row))])
        live = cache.packed([0], len(row))[0]
        live = (
            live[:, -1:]
            if "layer_attention" in changes
            else live[:, 1::2]
            if "layer_stride" in changes
            else live
        )
        torch.testing.assert_close(
            inputs.required_kv()[1, : len(row)].float(), live, rtol=2e-2, atol=2e-3
        )


@pytest.mark.parametrize(
    ("name", "attention", "keys", "order", "described"),
    [
        pytest.param(
            "qwen3_moe",
            "sdpa",
            "after RoPE, positions",
            "per kv head the key",
            "attention keys after RoPE",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gemma2",
            "eager",
            "after RoPE, positions",
            "per kv head the key",
            "attention keys after RoPE",
            marks=pytest.mark.slow,
        ),
        (
            "gpt_oss",
            "eager",
            "after RoPE, positions",
            "per kv head the key",
            "attention keys after RoPE",
        ),
        (
            "smollm3",
            "sdpa",
            "after RoPE in layers that rotate",
            "per kv head the key",
            "attention keys (0)",
        ),
        (
            "gemma4_text",
            "sdpa",
            "after RoPE, positions",
            "per kv head the key",
            "what layers 0 cache",
        ),
        (
            "deepseek_v3",
            "sdpa",
            "the latent after its norm",
            "the latent, then the part",
            "what layers 0, 1, 2, 3",
        ),
    ],
)
def test_what_a_store_says_of_its_values(
    name: str, attention: str, keys: str, order: str, described: str, tmp_path: Path
) -> None:
    write_family(tmp_path / "model", name, vocab_size_per_layer_input=400)
    plan = build_plan(config_of(tmp_path))
    manifest = StoreManifest.from_json(plan.manifest.to_json())
    assert manifest.extraction["attention"] == attention
    assert plan.forward.load_target().facts.config._attn_implementation == attention
    assert manifest.conventions["kv_keys"].startswith(keys)
    assert manifest.conventions["kv_order"].startswith(order)
    assert manifest.fields[2].description.startswith(described)


@pytest.mark.parametrize(
    ("values", "token_bytes"),
    [
        (
            {
                "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880,
                "num_attention_heads": 64,
                "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
            },
            24 * 8 * (64 + 64) * 2,  # 49,152
        ),
        (
            {
                "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
                "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            },
            48 * 4 * (128 + 128) * 2,  # 98,304, Qwen3-30B-A3B
        ),
        (
            {
                "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168,
                "num_attention_heads": 128,
                "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536,
            },
            61 * (512 + 64) * 2,  # 70,272
        ),
        (
            # All sizes are the defaults of transformers.
            {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}},
            25 * 4 * (256 + 256) * 2 + 5 * 4 * (512 + 512) * 2,  # 143,360
        ),
        (
            {
                "model_type": "gemma4_text", "num_hidden_layers": 30, "num_kv_shared_layers": 20,
                "num_key_value_heads": 4, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
            },
            # Only the first ten layers cache, and one of them has full attention.
            9 * 4 * (256 + 256) * 2 + 1 * 2 * (512 + 512) * 2,
        ),
        (
            {
                "model_type": "qwen3_5",
                "text_config": {
                    "model_type": "qwen3_5_text", "num_hidden_layers": 32, "hidden_size": 4096,
                    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
                },
            },
            8 * 4 * (256 + 256) * 2,  # 32,768, Qwen3.5-9B: every fourth layer
        ),
    ],
)  # fmt: skip
def test_bytes_of_a_token_follow_from_the_config_alone(
    values: dict[str, Any], token_bytes: int
) -> None:
    facts = parse_facts(values, "config.json")
    groups = facts.kv_groups
    spec = parse_activations(["kv"], 0, facts.n_layers, tuple(group.field for group in groups))
    fields = [one for one in field_specs(spec, facts, "bfloat16") if one.name.startswith("kv")]
    assert sum(field.token_bytes for field in fields) == token_bytes
    assert len(fields) == len(groups)


def test_times_are_estimated_of_fewer_layers(
    made: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = made
    monkeypatch.setattr(estimate_module, "_MAX_WEIGHTS", 60_000)
    least_s, most_s = estimate_module.estimate(build_plan(config_of(folder)))
    assert 0 < least_s < most_s
