"""The plan is complete and deterministic. It names its inputs and what it takes.

Bad input is refused.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pytest

from moa_data.errors import (
    DatasetError,
    NotEnoughMemory,
    OptionInvalid,
    StorageUnavailable,
    StoreMismatch,
    TargetError,
)
from moa_data.moa.targets.facts import parse_facts
from moa_data.moa.targets.live import resolve_model_folder
from moa_data.pipeline import estimate as estimate_module
from moa_data.pipeline import plan as plan_module
from moa_data.pipeline.add import plan_addition
from moa_data.pipeline.audit import audit
from moa_data.pipeline.config import AddConfig, ExtractConfig, parse_activations, parse_fields
from moa_data.pipeline.dataset import ChatSource
from moa_data.pipeline.estimate import ForwardPlan, batches_of, estimate, field_specs
from moa_data.pipeline.extract import extract, repair
from moa_data.pipeline.plan import Sources, build_plan, pinned_revision, recorded_sources
from moa_data.pipeline.report import Timings
from moa_data.storage.codecs import transform as codec_module
from moa_data.storage.codecs.registry import StoreCodec
from moa_data.storage.read.store import read_manifest
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import TEXTS_NAME
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.families import write_family
from moa_data.tests.kit.hostile import change_json
from moa_data.tests.kit.hub import Hub, serving
from moa_data.tests.kit.models import build_text_model


def test_the_plan_counts_everything_before_any_forward(config: ExtractConfig) -> None:
    rows: list[Any] = ["{broken", *random_chats(30)]
    rows += [rows[1], {"messages": [{"role": "user", "content": "x"}]}]
    write_jsonl(Path(config.dataset), rows)
    config = config.replaced(max_rejected_fraction=0.2)
    plan = build_plan(config)
    assert plan.manifest.n_sequences == 30
    assert plan.sequences.n_duplicates == 1
    assert plan.sequences.rejections == {
        "the chat has no assistant message": 1,
        "the row is not a JSON object": 1,
    }
    n_tokens = sum(
        len(plan.sequences.text(key)[0]) for key in plan.table["sequence_id"].to_pylist()
    )
    assert plan.n_tokens == n_tokens
    assert plan.raw_bytes == n_tokens * (3 * 2 * 2 * 8 * 2 + 2 * 32 * 2 + 4 + 1)
    assert not Path(config.out).exists()
    text = plan.describe()
    for part in (
        "33 rows",
        "1 duplicate",
        "2 of 33 rows",
        "first: row 32",
        "3 layers, 2 KV heads of 8, width 32",
        "bytes per token",
        "free disk",
        "memory",
    ):
        assert part in text, text
    first = build_plan(config.replaced(max_sequences=4))
    assert sorted(first.table["source_row"].to_pylist()) == [1, 2, 3, 4]  # the first usable rows


def without(name: str) -> Callable[[Path], Any]:
    return lambda model: (model / name).unlink()


def rotate(model: Path) -> None:
    """Let RoPE depend on the length of the sequence, which no drafter supports."""
    document = json.loads((model / "config.json").read_text())
    document["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (model / "config.json").write_text(json.dumps(document))


def shrink(model: Path) -> None:
    build_text_model("llama", vocab_size=100).save_pretrained(model)


def lower_vocabulary(model: Path) -> None:
    """Let config.json have a token less than the weights."""
    document = json.loads((model / "config.json").read_text())
    document["vocab_size"] -= 1
    (model / "config.json").write_text(json.dumps(document))


LONG = {
    "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "word " * 400}]
}
GOOD: list[Any] = random_chats(8)


def test_embeddings_that_do_not_fit_the_vocabulary_are_named_before_chats_are_read(
    config: ExtractConfig, model: Path
) -> None:
    lower_vocabulary(model)
    Path(config.dataset).write_text("{broken")
    with raises_naming(TargetError, model, [400, 32], [399, 32]):
        build_plan(config.replaced(model=str(model)), with_weights=True)


@pytest.mark.parametrize(
    ("change", "rows", "options", "error", "facts"),
    [
        (None, [], {}, DatasetError, ("`dataset`",)),
        (
            None,
            [{"text": "hi"}] * 3,
            {},
            DatasetError,
            ("3 rows", "row 0", "text", "`messages`", "`conversations`", "`columns="),
        ),
        (None, ["{broken", "nonsense"], {}, DatasetError, ("2 rows", "row 0", "JSON")),
        (
            None,
            [*GOOD, "{broken", {"messages": []}],
            {},
            DatasetError,
            ("10 rows", "20.0%", "max_rejected_fraction", 0.05, "row 8"),
        ),
        (
            None,
            [*GOOD, LONG],
            {"max_length": 2048},
            DatasetError,
            ("Row 8", "max_length", 256),
        ),
        (shrink, GOOD, {}, DatasetError, ("Row 0", "vocabulary", 100)),
        (without("config.json"), GOOD, {}, TargetError, ("config.json",)),
        (without("tokenizer.json"), GOOD, {}, TargetError, ("tokenizer.json",)),
        (rotate, GOOD, {}, TargetError, ("config.json", "'dynamic'")),
        (None, GOOD, {"device": "nonsense"}, TargetError, ("'nonsense'", "`device=cpu`")),
        (None, None, {"codec": "zip"}, OptionInvalid, ("'zip'", "lossless", "`codec`")),
        # The group is too wide.
        (
            None,
            None,
            {"codec": "transform:1,tokens@group99"},
            OptionInvalid,
            ("'transform:1,tokens@group99'", "@group2"),
        ),
        (
            None,
            None,
            {"codec": "transform:4,from-kv", "activations": "hidden:last"},
            OptionInvalid,
            ("'transform:4,from-kv'", "'kv'"),
        ),
    ],
)
def test_input_that_cannot_be_used_is_refused(
    config: ExtractConfig,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], Any] | None,
    rows: list[Any] | None,
    options: dict[str, Any],
    error: type[Exception],
    facts: tuple[object, ...],
) -> None:
    """``rows`` is None if the input is refused before the chats are read."""
    monkeypatch.setattr(codec_module, "MAX_BASIS_WIDTH", 32)
    if change is not None:
        change(model)
    if rows is None:
        Path(config.dataset).unlink()
    else:
        write_jsonl(Path(config.dataset), rows)
    with raises_naming(error, *facts):
        build_plan(config.replaced(model=str(model), **options))
    assert not Path(config.out).exists()


def test_the_default_length_is_that_of_the_positions(config: ExtractConfig) -> None:
    write_jsonl(Path(config.dataset), [*GOOD, LONG])
    for length in (256, None):
        plan = build_plan(config.replaced(max_length=length))
        assert (plan.sequences.n_truncated, plan.config.data.max_length) == (1, 256)


def test_a_codec_that_learns_counts_what_it_needs(config: ExtractConfig) -> None:
    exact, learned = (build_plan(config.replaced(codec=codec)) for codec in ("int8", "transform:1"))
    assert "learn " not in exact.describe()
    assert f"runs over {learned.n_tokens:,} tokens to fit the codec" in learned.describe()


def test_a_disk_that_is_too_small_is_refused_without_options_that_a_command_lacks(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build_plan(config)
    plan.check_disk()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with raises_naming(StorageUnavailable, "10 B") as caught:
        plan.check_disk()
    # `add` and `repair` check the disk too, but have no --out.
    assert "--" not in str(caught.value)
    dataclasses.replace(plan, present_bytes=plan.stored_bytes).check_disk()


GB = 10**9
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
}  # fmt: skip


def forwards_of(**changes: Any) -> ForwardPlan:
    """Return the forwards of Llama-3-8B in float32 on a CPU, with some settings changed."""
    spec = parse_activations(("kv", "hidden:last"), 0, 32)
    facts = parse_facts(LLAMA_3_8B, "test")
    codec = StoreCodec("lossless", field_specs(spec, facts, "bfloat16"))
    given: dict[str, Any] = {"device": "cpu", "compute_dtype": "float32", "batch_tokens": 2048}
    return ForwardPlan(
        folder=Path("target"), facts=facts, spec=spec, codec=codec,
        dtype="bfloat16", longest_tokens=2048, uses_cache=True, n_encode_threads=1,
        **given | changes,
    )  # fmt: skip


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that sets the free bytes of the host and of the device (or None)."""

    def set_free(host: int | None, device: int | None = None) -> None:
        monkeypatch.setattr(estimate_module, "free_memory", lambda: host)
        monkeypatch.setattr(estimate_module, "free_device_memory", lambda _: device)

    return set_free


@pytest.mark.parametrize(
    ("host", "device", "need", "refused_by"),
    [
        (23, None, {}, "host memory"),  # The weights take 32 GB.
        (23, None, {"compute_dtype": "bfloat16"}, None),
        (60, None, {}, None),
        (None, None, {}, None),  # The free memory is unknown.
        (23, None, {"compute_dtype": "bfloat16", "batch_tokens": 65_536}, "host memory"),
        (100, None, {"n_workers": 3}, "host memory"),
        (64, 80, {"compute_dtype": "bfloat16", "batch_tokens": 16_384, "device": "cuda"}, None),
        (64, 24, {"compute_dtype": "bfloat16", "batch_tokens": 16_384, "device": "cuda"}, "cuda"),
    ],
)
def test_what_cannot_fit_is_refused(
    free: Any, host: int | None, device: int | None, need: dict[str, Any], refused_by: str | None
) -> None:
    forwards = forwards_of(**need)
    free(host and host * GB, device and device * GB)
    if refused_by is None:
        forwards.check_memory()
        return
    with raises_naming(NotEnoughMemory, refused_by, f"{device or host}.0 GB") as error:
        forwards.check_memory()
    assert "--" not in str(error.value)  # `add` and `repair` have fewer options than `extract`.


def test_memory_is_that_of_weights_batches_and_workers() -> None:
    one = forwards_of()
    assert one.weight_bytes == 4 * 8_030_261_248
    assert forwards_of(n_workers=3).memory_bytes[0] == 3 * one.memory_bytes[0]
    # The longest sequence makes a batch of its own.
    assert forwards_of(batch_tokens=256).memory_bytes == one.memory_bytes
    kept_bytes = 2 * (32 * 2 * 8 * 128 + 4096) + 4 + 1
    host_bytes, device_bytes = forwards_of(
        compute_dtype="bfloat16", batch_tokens=16_384, device="cuda"
    ).memory_bytes
    # The weights take 16.1 GB. Five copies of the kept values take 2.1 GB each; one of them lies in
    # a KV cache.
    assert 26 * GB < device_bytes < 34 * GB
    assert host_bytes == max(2 * 8_030_261_248, 5 * 16_384 * kept_bytes)


def test_plan_extract_and_add_refuse_before_they_read_or_load(
    config: ExtractConfig, free: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(config.replaced(activations=("hidden:last",)))
    free(1000)
    monkeypatch.setattr(
        plan_module, "read_sequences", lambda *_: pytest.fail("the chats were read")
    )
    with pytest.raises(NotEnoughMemory):
        extract(config.replaced(out=f"{config.out}-other"))
    with pytest.raises(NotEnoughMemory):
        plan_addition(AddConfig.of(store=config.out, model=config.model, activations=("kv",)))
    assert not Path(f"{config.out}-other").exists()
    folder, asked = Path(config.model), []

    def resolve(_model: str, with_weights: bool = True, _revision: str | None = None) -> Path:
        asked.append(with_weights)
        return folder

    monkeypatch.setattr(plan_module, "resolve_model_folder", resolve)
    with pytest.raises(NotEnoughMemory):
        build_plan(config.replaced(model="owner/name"), with_weights=True)
    assert asked == [False]  # The weights of a target on the Hub are not downloaded.
    monkeypatch.undo()
    free(1000)
    planned = run("plan", "--model", config.model, "--dataset", config.dataset, "--out", "new")
    refused(planned, "host memory")
    # A plan is printed even if the memory is too small for an extraction.
    assert "bytes per token" in planned.stdout


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ({}, ""),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
        ({"compression_config": {"format": "float-quantized"}}, "compressed-tensors"),
    ],
    ids=str,
)
def test_a_plan_needs_no_weights(
    config: ExtractConfig, model: Path, values: dict[str, Any], method: str
) -> None:
    """It reports that `extract` would refuse the weights."""
    without("model.safetensors")(model)
    change_json(model / "config.json", **values)
    planned = build_plan(config.replaced(model=str(model)))
    assert planned.describe().count(
        "refused      by `extract`: the weights are quantised by"
    ) == bool(method)
    assert method in planned.describe()
    with raises_naming(TargetError, model, method or "*.safetensors"):
        extract(config.replaced(model=str(model)))
    assert not Path(config.out).exists()


@pytest.mark.parametrize("name", ["hidden:last", "hidden:layer:3", "hidden/layer_-1", " kv", "foo"])
def test_a_field_that_extract_does_not_write_is_refused(name: str) -> None:
    with raises_naming(OptionInvalid, repr(name)):
        parse_fields(["tokens", "kv", name])


MODEL, DATASET = "owner/model", "owner/chats"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub on this machine, and an empty cache."""
    with serving(monkeypatch, tmp_path / "cache" / "hub") as hub:
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache" / "datasets")
        yield hub


def chats_of(seed: int, more: int = 0) -> dict[str, bytes]:
    text = "".join(json.dumps(row) + "\n" for row in random_chats(12 + more, seed))
    return {"data/train_sft-00000-of-00001.jsonl": text.encode(), "README.md": b"# Chats\n"}


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def hub_config(hub: Hub, target_folder: Path, config: ExtractConfig) -> ExtractConfig:
    """An extraction of a model and chats on the Hub."""
    hub.commit(f"models/{MODEL}", files_of(target_folder))
    hub.commit(f"datasets/{DATASET}", chats_of(0))
    return config.replaced(model=MODEL, dataset=DATASET)


def move(hub: Hub) -> None:
    """Add a commit to both main branches."""
    hub.commit(f"models/{MODEL}", {"config.json": b"{}"})
    hub.commit(f"datasets/{DATASET}", chats_of(1, more=3))


def test_later_starts_take_the_recorded_commits(
    hub: Hub, hub_config: ExtractConfig, tmp_path: Path
) -> None:
    plan = build_plan(hub_config)
    extract(hub_config)
    store = Path(hub_config.out)
    sources = recorded_sources(read_manifest(store).extraction)
    assert sources == {
        "model": {"id": MODEL, "revision": "main", "commit": hub.branches[f"models/{MODEL}@main"]},
        "dataset": {
            "id": DATASET,
            "revision": "main",
            "commit": hub.branches[f"datasets/{DATASET}@main"],
        },
    }
    move(hub)
    shutil.rmtree(tmp_path / "cache")
    (store / "commits/part-00001.json").unlink()
    (store / TEXTS_NAME).unlink()  # Without this cache, the rows are read again.
    assert extract(hub_config).n_parts_done == 1
    for shard in (store / "parts" / "kv").glob("c.0.*"):
        shard.unlink()
    repair(store, MODEL)
    assert verify_store(store).ok
    assert build_plan(hub_config).table.equals(plan.table)
    report = audit(store, MODEL, samples=2, device="cpu")
    assert report.ok
    assert not report.note
    assert plan_addition(
        AddConfig(store=str(store), model=MODEL, activations=("hidden:layer:0",))
    ).n_tokens
    by_commit = hub_config.replaced(
        revision=sources["model"]["commit"], dataset_revision=sources["dataset"]["commit"]
    )
    assert extract(by_commit).n_parts_done == 0


def test_another_commit_is_another_input(
    hub: Hub, hub_config: ExtractConfig, target_folder: Path
) -> None:
    extract(hub_config)
    move(hub)
    hub.commit(f"datasets/{DATASET}", chats_of(2), branch="v2")
    with raises_naming(StoreMismatch, "extraction.sources.dataset.commit"):
        extract(hub_config.replaced(dataset_revision="v2"))
    # The branch is another name of the same commit.
    old = hub.commit(f"datasets/{DATASET}", chats_of(0), branch="old")
    assert (
        old == recorded_sources(read_manifest(Path(hub_config.out)).extraction)["dataset"]["commit"]
    )
    assert (
        extract(hub_config.replaced(dataset_revision="old", model=str(target_folder))).n_parts_done
        == 0
    )


def test_a_configuration_is_chosen(hub: Hub) -> None:
    card = (
        "---\nconfigs:\n"
        + "".join(f"- config_name: {c}\n  data_files: {c}/*.jsonl\n" for c in "ab")
        + "---\n"
    )
    rows = {f"{name}/train.jsonl": json.dumps({"at": name}).encode() + b"\n" for name in "ab"}
    hub.commit(f"datasets/{DATASET}", rows | {"README.md": card.encode()})
    assert [row for _, row in ChatSource(DATASET, "train", "b").rows()] == [{"at": "b"}]
    with raises_naming(DatasetError, DATASET, "'train'", "dataset_config"):
        ChatSource(DATASET, "train")


def test_what_is_in_the_cache_is_not_taken_for_another_commit(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit(f"datasets/{DATASET}", chats_of(0))
    read = ChatSource(DATASET, None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert ChatSource(DATASET, None).commit == read.commit
    with raises_naming(DatasetError, DATASET, "0" * 40, read.commit, "HF_HUB_OFFLINE"):
        ChatSource(DATASET, None, revision="0" * 40)


def test_local_inputs_have_no_revision(target_folder: Path, chats_file: Path) -> None:
    with raises_naming(TargetError, target_folder, "`revision`", "v1"):
        resolve_model_folder(str(target_folder), revision="v1")
    for names in ({"config_name": "a"}, {"revision": "v1"}):
        with raises_naming(DatasetError, chats_file, "dataset_config", "dataset_revision"):
            ChatSource(str(chats_file), None, **names)


def test_recorded_sources_name_the_commit_of_what_they_were_recorded_for() -> None:
    for record in (
        None,
        3,
        {"model": 3},
        {"model": {"id": "a"}},
        {"model": {"id": "a", "revision": 1, "commit": "c"}},
    ):
        assert recorded_sources({"sources": record}) == {}
    sources: Sources = {"model": {"id": "a", "revision": "main", "commit": "c"}}
    assert recorded_sources({"sources": {"dataset": 3, **sources}}) == sources
    assert [pinned_revision(sources, "model", "a", asked) for asked in (None, "main", "c")] == [
        "c"
    ] * 3
    assert pinned_revision(sources, "model", "a", "v2") == "v2"
    assert pinned_revision(sources, "model", "b", None) is None
    assert pinned_revision(sources, "dataset", "a", None) is None
    assert pinned_revision(None, "model", "a", "v2") == "v2"


def test_batches_hold_neighbours_of_a_part_and_keep_to_the_budget(config: ExtractConfig) -> None:
    lengths, parts = [50, 30, 30, 9, 9, 9, 1, 40], [0] * 7 + [1]
    table = pa.table(
        {"n_tokens": pa.array(lengths, pa.int32()), "part": pa.array(parts, pa.int32())}
    )
    found = [batch["n_tokens"].to_pylist() for batch in batches_of(table, 60)]
    assert found == [[50], [30, 30], [9, 9, 9, 1], [40]]
    assert [len(batch) for batch in batches_of(table, 1)] == [1] * 8
    plan = build_plan(config)
    planned = [
        batch["n_tokens"].to_pylist() for batch in batches_of(plan.table, plan.forward.batch_tokens)
    ]
    assert (
        sum(len(batch) * max(batch) for batch in planned) == extract(config).timings.n_padded_tokens
    )


@pytest.mark.parametrize(
    "codec",
    ["lossless", pytest.param("int8", marks=pytest.mark.slow), "transform:1,tokens,from-kv"],
)
def test_a_plan_is_timed_and_leaves_nothing(
    config: ExtractConfig, tmp_path: Path, codec: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    least_s, most_s = estimate(build_plan(config.replaced(codec=codec)))
    assert sorted(tmp_path.rglob("*")) == before
    assert 0 < least_s < most_s


def test_a_plan_says_where_it_cannot_be_timed(
    config: ExtractConfig, tmp_path: Path, monkeypatch: Any
) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("the sizes do not match")

    monkeypatch.setattr(estimate_module, "estimate", fail)
    model = str(write_family(tmp_path / "other", "olmo"))
    other = build_plan(config.replaced(model=model, activations="hidden:last", target_layers=0))
    assert estimate_module.describe_estimate(other).endswith("failed (the sizes do not match)")
    # If the family is supported, a failure is a bug and is raised.
    with pytest.raises(RuntimeError):
        estimate_module.describe_estimate(build_plan(config))


def test_an_addition_is_timed_too(config: ExtractConfig) -> None:
    extract(config.replaced(activations=("hidden:last",), target_layers=0))
    plan = plan_addition(
        AddConfig.of(store=config.out, model=config.model, activations=("hidden:layer:1",))
    )
    least_s, most_s = estimate(plan)
    assert 0 < least_s < most_s
    done = run(
        "add", config.out, "--model", config.model, "--activations", "hidden:layer:1", "--dry-run"
    )
    assert "\ntime         " in done.stdout


def test_fewer_layers_are_timed_for_all_of_them(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These are the times of every batch, however many layers it computes.
    one_s = Timings(forward_s=1.0, extract_s=2.0, n_padded_tokens=100)
    monkeypatch.setattr(estimate_module, "_run", lambda *_: one_s)
    plan = build_plan(config.replaced(activations=("kv",)))
    _, whole_s = estimate(plan)
    monkeypatch.setattr(estimate_module, "_MAX_WEIGHTS", 1)  # so that one layer of three is timed
    _, of_one_s = estimate(plan)
    assert of_one_s == pytest.approx(3 * whole_s)


def test_plan_tells_what_workers_take(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments = ["plan", "--model", config.model, "--dataset", config.dataset, "--out", config.out]
    told = run(*arguments, "--device", "cpu", "--workers", "4", "--part-tokens", "512")
    assert told.exit_code == 0, told.output
    assert "\nworkers      4 in parallel take " in told.stdout
    elsewhere = run(*arguments, "--engine", "ray", "--gpus-per-worker", "1")
    assert "not measured, because this machine has no GPU" in elsewhere.stdout
