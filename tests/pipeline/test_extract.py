"""The store holds the values of a plain forward.

The bytes are the same whatever ends a run or damages the store.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moa_data import files
from moa_data.errors import (
    StorageUnavailable,
    StoreDamaged,
    StoreMismatch,
    TargetError,
    WorkerError,
)
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract, repair
from moa_data.pipeline.forwards import calibrate
from moa_data.pipeline.forwards import parts as forwards_module
from moa_data.pipeline.plan import recorded_config
from moa_data.storage import chunk as chunk_module
from moa_data.storage.backend import backend_of
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.write import part as part_writer
from moa_data.storage.write.repair import drop_damage
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.kills import kill_at_points, run_apart
from moa_data.tests.kit.models import build_text_model, build_tokenizer, write_target
from moa_data.tests.kit.progress import progress_to
from moa_data.tests.kit.stores import flip, read_tree
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE
from moa_data.tests.kit.variants import quick, quick_rows


@pytest.fixture(scope="module")
def chats_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same chats for all tests, so that those of one setting can share a store."""
    return write_jsonl(tmp_path_factory.mktemp("chats") / "chats.jsonl", random_chats(12))


def elsewhere(config: ExtractConfig, name: str = "other") -> ExtractConfig:
    return config.replaced(out=str(Path(config.out).with_name(name)))


def made_once(config: ExtractConfig) -> Path:
    """Return the store of an extraction. Tests copy it or compare with it."""
    folder = Path(str(config.dataset)).with_name(f"store-{config.storage.codec}")
    if not folder.exists():
        extract(config.replaced(out=str(folder)))
    return folder


def extracted(config: ExtractConfig) -> tuple[Path, dict[str, bytes]]:
    """Put the store of an extraction at ``config.out``; return it and its files."""
    shutil.copytree(made_once(config), config.out)
    return Path(config.out), read_tree(config.out)


def test_the_store_holds_what_a_plain_forward_gives(config: ExtractConfig) -> None:
    # Each forward has one sequence, so that the values agree bit for bit.
    config = config.replaced(batch_tokens=1)
    report = extract(config, provenance={"argv": ["x"]})
    assert report.n_parts == report.n_parts_done > 1
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    with ActivationStore(config.out) as store:
        assert len(store) == report.n_sequences == 12
        assert set(store.fields) == {
            "tokens",
            "response_mask",
            "kv",
            "hidden/last",
            "hidden/layer_1",
        }
        for index in range(len(store)):
            tokens = torch.from_numpy(store.read(index, "tokens").astype(np.int64))[None]
            with torch.inference_mode():
                expected = model(tokens, output_hidden_states=True, use_cache=True)
            kv = torch.from_numpy(store.read(index, "kv")).view(torch.bfloat16)
            for layer in range(3):
                own = expected.past_key_values.layers[layer]
                assert torch.equal(kv[:, layer, :, 0], own.keys[0].transpose(0, 1).bfloat16())
                assert torch.equal(kv[:, layer, :, 1], own.values[0].transpose(0, 1).bfloat16())
            last = torch.from_numpy(store.read(index, "hidden/last")).view(torch.bfloat16)
            assert torch.equal(last, expected.hidden_states[-1][0].bfloat16())
            middle = torch.from_numpy(store.read(index, "hidden/layer_1")).view(torch.bfloat16)
            assert torch.equal(middle, expected.hidden_states[2][0].bfloat16())
            mask = store.read(index, "response_mask")
            assert mask.sum() == store.sequences["n_response_tokens"][index].as_py() > 0
    assert verify_store(config.out).ok


def test_the_bundle_is_cut_from_the_loaded_target_in_the_dtype_of_its_weights(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 holds bfloat16 weights exactly, so no second target needs to be loaded."""
    config = config.replaced(part_tokens=1 << 20, activations=("hidden:last",))
    extract(config.replaced(compute_dtype="bfloat16"))
    bundle = Path(config.out) / "target"
    assert FrozenTarget.load(bundle, 1, None).lm_head_weight.dtype == torch.bfloat16
    assert json.loads((bundle / "config.json").read_text())["dtype"] == "bfloat16"
    assert (bundle / "chat_template.jinja").read_text() == LLAMA3_TEMPLATE
    monkeypatch.setattr(
        forwards_module, "load_target_model", lambda *_: pytest.fail("the target was loaded again")
    )
    extract(elsewhere(config).replaced(compute_dtype="float32"))
    assert read_tree(bundle) == read_tree(Path(elsewhere(config).out) / "target")


def test_progress_and_the_record_of_a_run(config: ExtractConfig) -> None:
    calls: list[tuple[int, int, str]] = []
    config = config.replaced(part_tokens=1 << 20, batch_tokens=128)
    report = extract(
        config,
        progress=progress_to(lambda *call: calls.append(call)),
        provenance={"argv": ["moa-data"]},
    )
    (record,) = [
        json.loads(path.read_text()) for path in (Path(config.out) / "runs").glob("*.json")
    ]
    assert record["provenance"] == {"argv": ["moa-data"]}
    assert record["answers_by"] is None, "nothing says that the target wrote these answers"
    assert record["timings"]["n_tokens"] == report.n_tokens
    assert 0 < record["timings"]["forward_s"] <= record["timings"]["wall_s"]
    assert 0 <= record["timings"]["padding_fraction"] < 1
    for part in ("12 sequences", "bytes per token", "rejected     0 of 12 rows", "tokens/s"):
        assert part in report.describe()
    phases = list(dict.fromkeys(re.split("[ ,]", message)[0] for _, _, message in calls))
    assert phases == ["tokenise", "hash", "load", "extract"]
    for phase in ("hash", "load"):
        done, total, _ = [call for call in calls if call[2].startswith(phase)][-1]
        assert done == total > 30_000  # bytes of the weights
    told = [call for call in calls if call[2].startswith("extract")]
    assert told[0] == (0, report.n_tokens, "extract, 0/1 parts")
    # The single part reports its progress several times.
    assert len({done for done, _, _ in told}) > 5
    assert told[-1] == (report.n_tokens, report.n_tokens, "extract, 1/1 parts")


def test_a_second_run_has_nothing_to_do_and_changes_nothing(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before = extracted(config)
    # The number of encoding threads does not change the bytes.
    extract(elsewhere(config).replaced(encode_threads=3))
    assert read_tree(elsewhere(config).out) == before
    monkeypatch.setattr(Target, "load", lambda *_: pytest.fail("the target was loaded"))
    report = extract(config)
    assert report.n_parts_done == 0
    assert "wrote no part" in report.describe()
    assert read_tree(config.out) == before


NAN = float("nan")
AGAIN = "[Rr]un the same command again"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("module", "name", "at_call", "raised", "expected", "advice"),
    [
        (
            chunk_module,
            "encode_chunk",
            12,
            MemoryError("no room for a chunk"),
            MemoryError,
            "no room for a chunk",
        ),
        (
            part_writer,
            "write_all",
            25,
            FULL,
            StorageUnavailable,
            AGAIN,
        ),
        # Call 0 runs a few tokens to check the target.
        pytest.param(
            forwards_module,
            "capture",
            1,
            KeyboardInterrupt("Ctrl-C"),
            KeyboardInterrupt,
            "Ctrl-C",
            marks=pytest.mark.slow,
        ),
        (forwards_module, "capture", 5, KeyboardInterrupt("Ctrl-C"), KeyboardInterrupt, "Ctrl-C"),
    ],
)
def test_a_failure_discards_the_part_and_the_next_run_goes_on(
    config: ExtractConfig,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    at_call: int,
    raised: BaseException,
    expected: type[BaseException],
    advice: str,
) -> None:
    real, calls = getattr(module, name), count()

    def fails_late(*arguments: Any) -> Any:
        if next(calls) >= at_call:
            raise raised
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fails_late)
        with pytest.raises(expected, match=advice):
            extract(config)
    assert not list(Path(config.out).rglob("*.partial"))
    if isinstance(raised, KeyboardInterrupt):
        assert not (Path(config.out) / "locks").exists()
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(("encode", "sync", "activation"))
    ]
    parts = {int(path.name.split(".")[1]) for path in (Path(config.out) / "parts").rglob("c.*")}
    commits = {
        int(path.stem.removeprefix("part-"))
        for path in (Path(config.out) / "commits").glob("part-*.json")
    }
    assert parts == commits
    assert len(commits) < 5
    extract(config)
    assert not (Path(config.out) / "locks").exists()
    assert read_tree(config.out) == read_tree(made_once(config))


def shard_weights(folder: Path) -> Path:
    """Split the weights into two files with an index; return the second file."""
    whole = folder / "model.safetensors"
    weights, weight_map = load_file(whole), dict[str, str]()
    for number, names in enumerate((list(weights)[::2], list(weights)[1::2]), start=1):
        file = folder / f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in names}, file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file.name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    whole.unlink()
    return file


def spoil_weights(file: Path, value: float) -> None:
    weights = load_file(file)
    weights[next(name for name in weights if "mlp" in name)].fill_(value)
    save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize("workers", quick([1, 2], [2]))
def test_a_target_that_lacks_weights_leaves_nothing(
    config: ExtractConfig, model: Path, workers: int
) -> None:
    config = config.replaced(model=str(model), workers=workers, activations=("hidden:last",))
    shard = shard_weights(model)
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(TargetError):
        extract(config)
    assert not Path(config.out).exists()
    shard.write_bytes(content)
    assert extract(config.replaced(workers=1)).n_parts_done > 1


@pytest.mark.parametrize(
    ("value", "workers"),
    quick_rows([(NAN, 1), (NAN, 2), (3e38, 1), (3e38, 2)], [(NAN, 2), (3e38, 1)]),
)
def test_a_target_whose_values_are_not_finite_leaves_nothing(
    config: ExtractConfig, model: Path, value: float, workers: int
) -> None:
    spoil_weights(model / "model.safetensors", value)
    with pytest.raises(TargetError):
        extract(config.replaced(model=str(model), workers=workers))
    assert not Path(config.out).exists()


def test_a_codec_that_learns_from_a_target_that_overflows_says_so(
    config: ExtractConfig, model: Path
) -> None:
    """The advice of the codec, to choose the codec lossless, would not help."""
    spoil_weights(model / "model.safetensors", 3e38)
    with raises_naming(TargetError, "kv", 1, "dtype") as caught:
        extract(config.replaced(model=str(model), codec="transform:3"))
    assert "lossless" not in str(caught.value)
    assert not Path(config.out).exists()


def test_ray_leaves_nothing_of_a_target_whose_weights_cannot_be_used(
    config: ExtractConfig, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command itself proves the weights without loading them."""
    monkeypatch.setattr(Target, "load", lambda *_: pytest.fail("loaded"))
    config = config.replaced(model=str(model), engine="ray")
    spoil_weights(model / "model.safetensors", float("nan"))
    with raises_naming(TargetError, model, "model.layers.0.mlp.down_proj.weight"):
        extract(config)
    assert not Path(config.out).exists()


def test_a_store_of_another_target_without_parts_is_begun_anew(
    config: ExtractConfig, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is reused: neither sequences nor bundle, nor what its codec has learned."""
    config = config.replaced(codec="transform:3", activations=("hidden:last",), part_tokens=1 << 20)
    other = config.replaced(model=str(model))
    spoil_weights(model / "model.safetensors", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(part_writer.PartWriter, "commit", lambda _: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception):
            extract(other)
    assert (Path(config.out) / "commits/target.json").exists()
    report = extract(config)
    assert report.has_begun_anew
    assert not extract(config).has_begun_anew
    extract(elsewhere(config))
    assert read_tree(config.out) == read_tree(elsewhere(config).out)


@pytest.mark.parametrize("is_offline", [False, True])
def test_the_bytes_do_not_depend_on_the_network(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
    extract(config.replaced(part_tokens=1 << 20, activations=("hidden:last",)))
    saved = json.loads((Path(config.out) / "target/tokenizer_config.json").read_text())
    assert not saved.keys() & {"local_files_only", "is_local", "name_or_path"}


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_process(config: ExtractConfig) -> None:
    """Run ten processes with different hash seeds, with and without a network."""
    trees = []
    for seed in range(10):
        out = elsewhere(config, f"store-{seed}").out
        settings = config.named() | {"out": out}
        code = (
            "import torch; torch.set_num_threads(1); "
            "from moa_data.pipeline.config import ExtractConfig; "
            "from moa_data.pipeline.extract import extract; "
            f"extract(ExtractConfig.of(**{settings!r}))"
        )
        environment = os.environ | {"PYTHONHASHSEED": str(seed), "HF_HUB_OFFLINE": str(seed % 2)}
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, env=environment
        )
        trees.append(read_tree(out))
    assert all(tree == trees[0] for tree in trees)


CHANGES = {
    "target.weights": ("model.safetensors", None, b""),
    "target.config": ("config.json", b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1e-05'),
    "tokenizer": ("tokenizer.json", b"\n", b"\n "),
    "template": ("chat_template.jinja", b"\n\n", b"\n "),
}
"""Key of an identity -> file of the target, and bytes to replace in it (None: its last bit)."""


def test_a_changed_target_is_refused_by_name(config: ExtractConfig, model: Path) -> None:
    _, before = extracted(config)
    config = config.replaced(model=str(model))
    for key, (name, old, new) in CHANGES.items():
        content = (model / name).read_bytes()
        if old is None:
            flip(model / name, -1)
        else:
            (model / name).write_bytes(content.replace(old, new, 1))
        with pytest.raises(StoreMismatch) as caught:
            extract(config)
        assert any(changed.startswith(f"identities.{key}") for changed in caught.value.changes), key
        (model / name).write_bytes(content)
    assert read_tree(config.out) == before


def test_values_that_are_not_finite_stop_the_run_and_name_the_row(
    config: ExtractConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    model = build_text_model("llama")
    with torch.no_grad():
        # The weights are finite, but sums of products with them overflow.
        model.model.layers[2].self_attn.v_proj.weight[:] = 3e38
    model.save_pretrained(folder)
    build_tokenizer(LLAMA3_TEMPLATE).save_pretrained(folder)
    with raises_naming(TargetError, "row 0", "kv", 2, "dtype"):
        extract(config.replaced(model=str(folder)))
    assert not list((Path(config.out) / "parts").rglob("c.*"))


FOLDER_BACKEND = type(backend_of(Path()))
KILLS: dict[str, tuple[Any, ...]] = {
    "manifest": (FOLDER_BACKEND, "put_if_absent", 2),
    "bundle": (forwards_module, "save_target_bundle", 1, True),
    "mid_part": (part_writer.ArrayWriter, "write", 40),
    # Calls before this one write the plan, the manifest and the metadata of seven folders. Then
    # come the commits of the target and of each part.
    "before_commit": (FOLDER_BACKEND, "put_if_absent", 11),
    "after_commit": (FOLDER_BACKEND, "put_if_absent", 12, True),
}


def kill(settings: str, *names: str) -> None:
    config = ExtractConfig.model_validate_json(settings)
    kill_at_points(
        {name: KILLS[name] for name in names},
        lambda name: extract(elsewhere(config, f"store-{name}")),
    )


@pytest.mark.parametrize(
    "names",
    [
        ["mid_part", "before_commit"],
        pytest.param(["manifest", "bundle", "after_commit"], marks=pytest.mark.slow),
    ],
)
def test_kill_9_anywhere_leaves_no_torn_part_and_the_next_run_ends_in_identical_bytes(
    config: ExtractConfig, names: list[str]
) -> None:
    expected = read_tree(made_once(config))
    run_apart(kill, config.model_dump_json(), *names)
    for name in names:
        killed = elsewhere(config, f"store-{name}")
        if (Path(killed.out) / "store.json").exists():
            report = verify_store(killed.out)
            assert not [damage for damage in report.damages if damage.part is not None], (
                report.damages
            )
        extract(killed)
        assert read_tree(killed.out) == expected, name
        assert not list(Path(killed.out).rglob("*.partial"))


def test_tokens_of_a_part_that_another_run_committed_first_are_not_of_this_run(
    config: ExtractConfig,
) -> None:
    extracted(config)
    commit = Path(config.out, "commits/part-00001.json")
    content, n_told = commit.read_bytes(), 0
    commit.unlink()

    def commit_meanwhile(_done: int, _total: int, message: str) -> None:
        nonlocal n_told
        n_told += message.startswith("extract")
        if n_told == 2:  # The first batch has been computed.
            commit.write_bytes(content)

    timings = extract(config, progress=progress_to(commit_meanwhile)).timings
    assert (timings.n_parts, timings.n_late, timings.n_tokens) == (0, 1, 0)
    assert timings.n_computed_tokens > 0


def test_damaged_pieces_are_extracted_again(config: ExtractConfig, tmp_path: Path) -> None:
    store, whole = extracted(config)
    flip(next((store / "parts/kv").glob("c.1.*")))
    flip(store / "target/frozen.safetensors")

    other = write_target(tmp_path / "other", seed=1)
    before = read_tree(store)
    with raises_naming(StoreMismatch, store, "identities.target.weights_sha256") as caught:
        repair(store, str(other))
    assert "`model`" in caught.value.hint
    assert read_tree(store) == before

    report = repair(store, config.model)
    assert report.n_parts_done == 1
    assert (
        "damaged      target/frozen.safetensors: the checksum of the file is" in report.describe()
    )
    assert read_tree(store) == whole
    assert repair(store, config.model).n_parts_done == 0
    assert read_tree(store) == whole
    assert verify_store(store).ok


def test_a_repair_whose_target_cannot_be_loaded_drops_nothing(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = extracted(config)
    flip(next((store / "parts/kv").glob("c.1.*")))
    before = read_tree(store)
    monkeypatch.setattr("moa_data.moa.targets.loading.free_memory", lambda: 1000)
    with pytest.raises(TargetError):
        repair(store, config.model)
    assert read_tree(store) == before


def test_a_repair_on_a_full_disk_goes_on(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each damaged part is dropped when its turn comes. Any run extracts missing parts."""
    store, whole = extracted(config)
    n_damaged = 4
    for part in range(n_damaged):
        flip(next((store / "parts/kv").glob(f"c.{part}.*")))
    calls = iter(range(3))

    def full_after_some(fd: int, data: Any) -> None:
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        files.write_all(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(part_writer, "write_all", full_after_some)
        with pytest.raises(StorageUnavailable):
            repair(store, config.model)
    report = verify_store(store)
    assert report.ok
    assert 0 < report.n_pending_parts <= n_damaged
    n_planned = report.n_parts + report.n_pending_parts
    for command in ("verify", "repair"):
        refused(run(command, store), f"{report.n_pending_parts} of {n_planned} parts", exit_code=3)
    assert run("verify", store).stdout.startswith("INCOMPLETE")
    extract(config)
    assert read_tree(store) == whole


@pytest.mark.parametrize(
    ("name", "is_lost"),
    [
        ("store.json", False),
        ("plan.parquet", True),
        ("parts/kv/zarr.json", True),
        pytest.param("store.json", True, marks=pytest.mark.slow),
        pytest.param("plan.parquet", False, marks=pytest.mark.slow),
        pytest.param("parts/kv/zarr.json", False, marks=pytest.mark.slow),
    ],
)
def test_parts_that_other_damage_hides_are_repaired_at_once(
    config: ExtractConfig, name: str, is_lost: bool
) -> None:
    store, whole = extracted(config)
    if is_lost:
        (store / name).unlink()
    else:
        flip(store / name)
    flip(next((store / "parts/kv").glob("c.1.*")))
    done = run("repair", store, "--model", config.model)
    assert done.exit_code == 0, done.output
    assert read_tree(store) == whole


def test_a_lost_bundle_is_missing(config: ExtractConfig) -> None:
    store, whole = extracted(config)
    (store / "commits/target.json").unlink()
    refused(run("verify", store), "target/", exit_code=3)
    report = repair(store, config.model)
    assert report.n_parts_done == 0
    assert "wrote target/" in report.describe()
    assert read_tree(store) == whole
    assert "wrote no part" in extract(config).describe()


@pytest.mark.slow
def test_a_learned_codec_is_learned_again(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config.replaced(codec="transform:3,tokens")
    store, whole = extracted(config)
    flip(store / "codec/basis.safetensors")
    flip(next((store / "parts/kv").rglob("c.1.*")))
    before = read_tree(store)
    assert [damage.path for damage in verify_store(store).damages] == ["codec"]
    with raises_naming(StoreDamaged, "codec/"):
        drop_damage(store)

    with monkeypatch.context() as patch:
        patch.setattr(calibrate.sample_rows, "__defaults__", (500,))
        with pytest.raises(StoreMismatch) as caught:
            repair(store, config.model)
    assert list(caught.value.changes) == ["codec.basis_sha256"]
    records = {path: path.read_text() for path in (store / "runs").iterdir()}
    for path in records:
        path.unlink()
    with raises_naming(WorkerError, store / "runs"):
        repair(store, config.model)
    assert read_tree(store) == before

    for path, text in records.items():
        path.write_text(text)
    (store / "codec/basis.safetensors").unlink()
    assert repair(store, config.model).n_parts_done == 1
    assert read_tree(store) == whole
    assert verify_store(store).ok


def test_settings_come_from_the_last_record_that_can_be_read(
    config: ExtractConfig, tmp_path: Path
) -> None:
    runs = tmp_path / "store" / "runs"
    with raises_naming(WorkerError, runs, f'moa-data repair "{runs.parent}" --drop'):
        recorded_config(runs.parent)
    runs.mkdir(parents=True)
    own = json.dumps({"config": config.named() | {"max_length": 77, "added_later": 1}})
    for name, text in (("1.json", own), ("2.json", '{"config": {"model": 5}}'), ("3.json", "{")):
        (runs / name).write_text(text)
    assert recorded_config(runs.parent) == config.replaced(max_length=77)
