"""Adding fields gives the bytes of one extraction of all fields, whatever interrupts it; the old fields keep theirs."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa_data.errors import Interrupted, OptionInvalid, SelectionInvalid, StorageUnavailable, StoreMismatch
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.pipeline import add as add_module
from moa_data.pipeline.add import add, plan_addition
from moa_data.pipeline.config import AddConfig, ExtractConfig
from moa_data.pipeline.extract import extract, repair
from moa_data.pipeline.forwards.capture import capture
from moa_data.pipeline.recode import recode
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.write.repair import plan_repair
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.models import write_target
from moa_data.tests.kit.stores import flip, read_tree
from moa_data.trainer.batches import BatchReader, needed_fields
from moa_data.trainer.config import TrainConfig

OLD, NEW = ("kv", "hidden:last"), ("kv", "hidden:last", "hidden:layer:0", "hidden:layer:1")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the chats, in which the stores that several tests start from or compare with are made once."""
    folder = tmp_path_factory.mktemp("stores")
    write_jsonl(folder / "chats.jsonl", random_chats(14))
    return folder


@pytest.fixture
def config(target_folder: Path, stores: Path, tmp_path: Path) -> ExtractConfig:
    return ExtractConfig.of(
        model=str(target_folder), dataset=str(stores / "chats.jsonl"), out=str(tmp_path / "store"), max_length=128,
        device="cpu", part_tokens=512, batch_tokens=256, activations=OLD,
    )  # fmt: skip


def made_once(config: ExtractConfig, **changes: Any) -> Path:
    config = config.replaced(**changes)
    name = f"{config.storage.codec}-{','.join(config.activations)}".replace(":", "_")
    folder = Path(config.dataset).with_name(name)
    if not folder.exists():
        extract(config.replaced(out=str(folder)))
    return folder


def begun(config: ExtractConfig) -> dict[str, bytes]:
    """Put a store of the old fields to ``config.out``; return its files."""
    shutil.copytree(made_once(config), config.out)
    return read_tree(config.out)


def fresh(config: ExtractConfig, **changes: Any) -> dict[str, bytes]:
    """The files of one extraction of all fields."""
    return read_tree(made_once(config, activations=NEW, target_layers=1, **changes))


def addition(config: ExtractConfig, **changes: Any) -> AddConfig:
    new: dict[str, Any] = {
        "store": config.out,
        "model": config.model,
        "activations": ("hidden:layer:0",),
        "target_layers": 1,
    }
    return AddConfig.of(**new | changes)


@pytest.mark.parametrize("codec", ["lossless", "int8", "transform:3,tokens"])
def test_the_store_becomes_the_one_of_a_single_extraction(config: ExtractConfig, codec: str) -> None:
    config = config.replaced(codec=codec)
    before = begun(config)
    calls: list[tuple[int, int, str]] = []
    Path(config.dataset).rename(f"{config.dataset}.away")  # the tokens are in the store
    report = add(addition(config), progress=lambda *call: calls.append(call), provenance={"argv": ["moa-data"]})
    Path(f"{config.dataset}.away").rename(config.dataset)
    after = read_tree(config.out)
    assert "added        hidden/layer_0, hidden/layer_1" in report.describe()
    assert report.n_parts == report.n_parts_done > 1
    assert ("bit for bit" in report.describe()) == (codec == "lossless")
    assert calls[-1][:2] == (report.n_tokens, report.n_tokens)
    arrays = [name for name in before if name.startswith("parts/")]
    assert {name: after[name] for name in arrays} == {name: before[name] for name in arrays}
    assert sum(len(after[name]) for name in after if name.startswith("parts/") and "/c." in name) == report.stored_bytes
    assert after == fresh(config)
    assert verify_store(config.out).ok
    assert not list(Path(config.out).rglob("*.partial"))


def test_extract_refuses_what_add_does_and_goes_on_with_the_rest_afterwards(config: ExtractConfig) -> None:
    begun(config)
    (Path(config.out) / "commits/part-00001.json").unlink()  # a part that is still to be extracted
    before, wanted = read_tree(config.out), config.replaced(activations=NEW, target_layers=1)
    lacking = "hidden/layer_0, hidden/layer_1, 1 decoder layers in target/; what it has is whole"
    command = f"moa-data add {config.out} --model MODEL --activations hidden:layer:0,hidden:layer:1 --target-layers 1"
    with pytest.raises(OptionInvalid, match=f"lacks {lacking}. Add with `{command}`"):
        extract(wanted)
    assert read_tree(config.out) == before
    added = add(addition(config))
    assert "pending      1 part to be extracted" in added.describe()
    assert extract(wanted).n_parts_done == 1
    expected = fresh(config)
    assert read_tree(config.out) == expected
    assert "nothing to do" in extract(wanted).describe()
    with pytest.raises(StoreMismatch, match=r"fields\.hidden/layer_0\.axes: store has"):
        extract(config)
    assert read_tree(config.out) == expected


def test_a_bundle_can_grow_alone(config: ExtractConfig) -> None:
    begun(config)
    with pytest.raises(OptionInvalid, match="nothing to add"):
        add(AddConfig(store=config.out, model=config.model))
    add(AddConfig(store=config.out, model=config.model, activations=("hidden:layer:1", "hidden:layer:0")))
    before = read_tree(config.out)
    report = add(AddConfig(store=config.out, model=config.model, target_layers=1))
    assert "wrote target/ with 1 decoder layers" in report.describe()
    assert FrozenTarget.load(Path(config.out) / "target", 1).n_layers == 1
    after = read_tree(config.out)
    assert {name for name in after if after[name] != before[name]} == {
        "README.md", "commits/store.json", "commits/target.json", "store.json", "target/frozen.safetensors",
    }  # fmt: skip
    assert after == fresh(config)
    assert add(AddConfig(store=config.out, model=config.model, target_layers=1)).n_parts_done == 0
    assert read_tree(config.out) == after


def test_what_a_plan_shows(config: ExtractConfig) -> None:
    begun(config)
    report = extract(config)
    plan = plan_addition(addition(config))
    assert plan.fields == ("hidden/layer_0", "hidden/layer_1")
    assert plan.n_raw_bytes == report.n_tokens * 2 * 32 * 2  # two fields of width 32 in bfloat16
    assert plan.n_left_tokens == plan.n_tokens == report.n_tokens
    for text in (
        "kv, hidden/last in bfloat16, codec lossless; all of it is kept",
        "adds         hidden/layer_0, hidden/layer_1; target/ keeps 1 decoder layers",
        f"tokens       {report.n_tokens:,} of {report.n_tokens:,}, in {report.n_parts} of {report.n_parts} parts",
        "(128 bytes per token)",
        "on disk      about",
    ):
        assert text in plan.describe()
    with pytest.raises(StorageUnavailable, match="has 10 B free"):
        dataclasses.replace(plan, free_bytes=10).check_disk()


def n_parts_added(message: str) -> int:
    """Parts that a message of progress calls committed, -1 before the first batch; not every number is shown."""
    return int(message.removeprefix("add ").split("/")[0]) if message.startswith("add ") else -1


@pytest.mark.parametrize("n_parts_before", [0, 1])
def test_ctrl_c_leaves_the_old_store_and_the_next_run_goes_on(config: ExtractConfig, n_parts_before: int) -> None:
    begun(config)

    def interrupt(_done: int, _total: int, message: str) -> None:
        if n_parts_added(message) >= n_parts_before:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="is as it was"):
        add(addition(config), progress=interrupt)
    assert not list(Path(config.out).rglob("*.partial"))
    with ActivationStore(config.out) as store:
        assert "hidden/layer_0" not in store.fields
    assert verify_store(config.out).ok
    plan = plan_addition(addition(config))
    assert (plan.n_left_parts < plan.n_parts) == (n_parts_before > 0)
    report = add(addition(config))
    assert report.n_parts_done == plan.n_left_parts
    assert read_tree(config.out) == fresh(config)


def test_ctrl_c_while_planning_leaves_the_store_as_it_was(config: ExtractConfig) -> None:
    begun(config)
    before = read_tree(config.out)

    def interrupt(_done: int, _total: int, message: str) -> None:
        if message.startswith("hash"):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="nothing was written"):
        add(addition(config), progress=interrupt)
    assert read_tree(config.out) == before


KILL_SCRIPT = """
    import sys
    import torch
    from moa_data.pipeline.add import add
    from moa_data.pipeline.config import AddConfig
    from moa_data.storage.write import addition, part as part_writer, publish, store as writer
    from moa_data.tests.kit.kills import die_at, kill_at_points

    torch.set_num_threads(1)
    model, out, *names = sys.argv[1:]

    POINTS = {
        "bundle": lambda: die_at(publish, "name_files", 1, after=True),
        "basis": lambda: die_at(addition, "write_atomic", 1, after=True),
        "mid_part": lambda: die_at(part_writer.ArrayWriter, "write", 11),
        "before_commit": lambda: die_at(publish, "replace_file", 2),
        "before_manifest": lambda: die_at(writer, "replace_file", 1),
        "before_seal": lambda: die_at(writer, "write_manifest_commit", 1),
        "before_name": lambda: die_at(writer, "name_next_basis", 2),
    }
    points = {name: POINTS[name] for name in names}
    kill_at_points(points, lambda name: add(AddConfig.of(
        store=f"{out}-{name}", model=model, activations=("hidden:layer:0",), target_layers=1)))
"""


@pytest.mark.parametrize(
    ("codec", "names"),
    [
        ("lossless", ["bundle", "mid_part", "before_seal"]),
        pytest.param("transform:3", ["basis", "before_name"], marks=pytest.mark.slow),
    ],
)
def test_kill_9_leaves_the_old_store_or_the_new_one_and_the_next_run_ends_in_the_same_bytes(
    config: ExtractConfig, codec: str, names: list[str]
) -> None:
    config = config.replaced(codec=codec)
    begun(config)
    for name in names:
        shutil.copytree(config.out, f"{config.out}-{name}")
    arguments = [sys.executable, "-c", textwrap.dedent(KILL_SCRIPT), config.model, config.out, *names]
    run = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    expected = fresh(config)
    for name in names:
        killed = f"{config.out}-{name}"
        with ActivationStore(killed) as store:
            is_new = name in ("before_seal", "before_name")
            assert ("hidden/layer_0" in store.fields) == is_new
            assert {field: len(store.read(0, field)) for field in store.fields}
        assert verify_store(killed).ok
        add(addition(config, store=killed))
        assert read_tree(killed) == expected, name


def test_another_addition_drops_what_an_unfinished_one_had_learned(config: ExtractConfig) -> None:
    config = config.replaced(codec="transform:3")
    begun(config)

    def interrupt(_done: int, _total: int, message: str) -> None:
        if n_parts_added(message) >= 1:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        add(addition(config, activations=("hidden:layer:2",), target_layers=0), progress=interrupt)
    add(addition(config))
    assert read_tree(config.out) == fresh(config)
    (Path(config.out) / "commits/part-00000.json").unlink()
    with pytest.raises(OptionInvalid, match="must learn from all sequences, but 1 parts are still to be extracted"):
        add(addition(config, activations=("hidden:layer:2",)))


def test_a_damaged_added_field_is_extracted_again(config: ExtractConfig) -> None:
    begun(config)
    add(addition(config))
    whole = read_tree(config.out)
    flip(next(Path(config.out).glob("parts/hidden/layer_1/c.1.*")))
    plan = plan_repair(config.out)
    assert plan.parts == (1,)
    assert repair(plan, config.model).n_parts_done == 1
    assert read_tree(config.out) == whole


def test_a_recoded_store_takes_fields_too(config: ExtractConfig, tmp_path: Path) -> None:
    begun(config)
    recode(config.out, "int8", tmp_path / "int8")
    shutil.rmtree(config.out)
    add(addition(config, store=str(tmp_path / "int8")))
    expected = fresh(config, codec="int8")
    for name in ("README.md", "texts.arrow"):  # `recode` writes none
        expected.pop(name)
    assert read_tree(tmp_path / "int8") == expected


def test_keys_and_values_can_be_added(config: ExtractConfig) -> None:
    extract(config.replaced(activations=("hidden:last",), codec="int8"))
    add(addition(config, activations=("kv", "hidden:layer:0")))
    assert read_tree(config.out) == fresh(config, codec="int8")


def test_another_target_and_another_device_are_refused(
    config: ExtractConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = begun(config)
    other = write_target(tmp_path / "other", seed=1)
    with pytest.raises(StoreMismatch, match=r"identities\.target\.weights_sha256: store has"):
        add(addition(config, model=str(other)))
    with pytest.raises(StoreMismatch, match=r"extraction\.device: store has 'cpu', given 'meta'"):
        add(addition(config, device="meta"))
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"activations": ("hidden:middle",)}, "Unknown activation 'hidden:middle'"),
        ({"activations": ("hidden:layer:3",)}, "the target has 3 decoder layers, 0 to 2"),
        ({"target_layers": 9}, "target_layers is 9, but the target has 3"),
        ({"target_layers": -1}, "target_layers is -1"),
    )
    for changes, message in refused:
        with pytest.raises(OptionInvalid, match=message):
            add(addition(config, **changes))
    different: tuple[tuple[dict[str, Any], str], ...] = (
        ({"dtype": "float32"}, r"extraction\.dtype"),
        ({"codec": "int8"}, r"codec\.name"),
        ({"max_length": 64}, r"extraction\.max_length"),
        ({"model": str(other)}, r"weights_sha256"),
    )
    for changes, key in different:
        wanted = config.replaced(activations=NEW, **changes)
        with pytest.raises(StoreMismatch, match=key):
            extract(wanted)
    assert read_tree(config.out) == before


def test_a_target_that_computes_something_else_is_refused(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = begun(config)
    real = capture

    def scaled(factor: float) -> Callable[..., Any]:
        def changed(*arguments: Any) -> Any:
            found = real(*arguments)
            return dataclasses.replace(found, fields={name: x * factor for name, x in found.fields.items()})

        return changed

    with monkeypatch.context() as patch:
        patch.setattr(add_module, "capture", scaled(1.1))
        with pytest.raises(OptionInvalid, match=r"hidden/last that differs by 9.\d% from the stored one"):
            add(addition(config, target_layers=0))
        assert read_tree(config.out) == before
        patch.setattr(add_module, "capture", scaled(1.004))
        assert "relative error of" in add(addition(config)).describe()
    assert read_tree(config.out) == fresh(config)


def test_a_store_whose_forwards_are_unknown_is_refused(config: ExtractConfig) -> None:
    begun(config)
    store = Path(config.out)
    (store / "commits/store.json").unlink()
    document = json.loads((store / "store.json").read_text())
    del document["extraction"]["batch_tokens"]
    (store / "store.json").write_text(json.dumps(document))
    with pytest.raises(
        OptionInvalid, match=r"does not say its batch_tokens, so the forwards .* Extract to a new store"
    ):
        add(addition(config))
    document["extraction"]["imported_from"] = "eagle"
    (store / "store.json").write_text(json.dumps(document))
    with pytest.raises(OptionInvalid, match="was imported from eagle"):
        add(addition(config))


def test_training_reads_the_new_field(config: ExtractConfig) -> None:
    begun(config)
    settings = TrainConfig.of(store=config.out, out="", batch_size=2, target_layer_inference=1, reader_threads=1)
    how = (
        f"lacks hidden/layer_1; add with `moa-data add {config.out} --model MODEL --activations hidden:layer:1 --target"
    )
    with ActivationStore(config.out) as store, pytest.raises(SelectionInvalid, match=re.escape(how)):
        needed_fields(store, settings)
    add(addition(config, activations=("hidden:layer:1",)))
    with ActivationStore(config.out) as store:
        batch, _ = BatchReader(store, settings, torch.device("cpu")).read(np.array([0, 1]), store.lengths[:2])
        assert batch.entering_hidden is not None
        for i in range(2):
            stored = torch.from_numpy(store.read(i, "hidden/layer_1")).view(torch.bfloat16)
            assert torch.equal(batch.entering_hidden[i, : len(stored)], stored)
        assert FrozenTarget.load(store.target_path, 1).n_layers == 1
