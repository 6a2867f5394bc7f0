"""Adding fields gives the bytes of one extraction of all fields, whatever interrupts it.

The old fields keep their bytes.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import OptionInvalid, StoreMismatch
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.pipeline import add as add_module
from moa_data.pipeline.add import add, plan_addition
from moa_data.pipeline.config import AddConfig, ExtractConfig
from moa_data.pipeline.extract import extract, repair
from moa_data.pipeline.forwards.capture import capture
from moa_data.pipeline.recode import recode
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.write import addition as addition_module
from moa_data.storage.write import part as part_writer
from moa_data.storage.write import publish
from moa_data.storage.write import store as store_writer
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.kills import kill_at_points, run_apart
from moa_data.tests.kit.models import write_target
from moa_data.tests.kit.progress import progress_to
from moa_data.tests.kit.stores import flip, read_tree
from moa_data.tests.kit.variants import quick
from moa_data.text import Progress

OLD, NEW = ("kv", "hidden:last"), ("kv", "hidden:last", "hidden:layer:0", "hidden:layer:1")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the chats and with the stores that several tests use.

    Tests copy these stores or compare with them, so each is made only once.
    """
    folder = tmp_path_factory.mktemp("stores")
    write_jsonl(folder / "chats.jsonl", random_chats(8))
    return folder


@pytest.fixture
def config(target_folder: Path, stores: Path, tmp_path: Path) -> ExtractConfig:
    return ExtractConfig.of(
        model=str(target_folder), dataset=str(stores / "chats.jsonl"), out=str(tmp_path / "store"),
        max_length=128, device="cpu", part_tokens=256, batch_tokens=256, activations=OLD,
    )  # fmt: skip


def made_once(config: ExtractConfig, **changes: Any) -> Path:
    config = config.replaced(**changes)
    name = f"{config.storage.codec}-{','.join(config.activations)}".replace(":", "_")
    folder = Path(config.dataset).with_name(name)
    if not folder.exists():
        extract(config.replaced(out=str(folder)))
    return folder


def begun(config: ExtractConfig) -> dict[str, bytes]:
    """Put a store of the old fields at ``config.out``; return its files."""
    shutil.copytree(made_once(config), config.out)
    return read_tree(config.out)


def fresh(config: ExtractConfig, **changes: Any) -> dict[str, bytes]:
    """Return the files of one extraction of all fields."""
    return read_tree(made_once(config, activations=NEW, target_layers=1, **changes))


def addition(config: ExtractConfig, **changes: Any) -> AddConfig:
    new: dict[str, Any] = {
        "store": config.out,
        "model": config.model,
        "activations": ("hidden:layer:0",),
        "target_layers": 1,
    }
    return AddConfig.of(**new | changes)


@pytest.mark.parametrize(
    "codec",
    quick(["lossless", "int8", "transform:3,tokens"], ["lossless", "transform:3,tokens"]),
)
def test_the_store_becomes_the_one_of_a_single_extraction(
    config: ExtractConfig, codec: str
) -> None:
    config = config.replaced(codec=codec)
    before = begun(config)
    plan = plan_addition(addition(config))
    assert plan.forward.spec.fields == ("hidden/layer_0", "hidden/layer_1")
    assert plan.raw_bytes == plan.n_stored_tokens * 2 * 32 * 2  # two fields of width 32 in bfloat16
    assert "(128 bytes per token)" in plan.describe()
    calls: list[tuple[int, int, str]] = []
    # The tokens are in the store, so the dataset is not needed.
    Path(config.dataset).rename(f"{config.dataset}.away")
    report = add(
        addition(config),
        progress=progress_to(lambda *call: calls.append(call)),
        provenance={"argv": ["moa-data"]},
    )
    Path(f"{config.dataset}.away").rename(config.dataset)
    after = read_tree(config.out)
    assert "added        hidden/layer_0, hidden/layer_1" in report.describe()
    assert report.n_parts == report.n_parts_done > 1
    assert ("relative error of 0.0e+00" in report.describe()) == (codec == "lossless")
    assert calls[-1][:2] == (report.n_tokens, report.n_tokens)
    arrays = [name for name in before if name.startswith("parts/")]
    assert {name: after[name] for name in arrays} == {name: before[name] for name in arrays}
    assert (
        sum(len(after[name]) for name in after if name.startswith("parts/") and "/c." in name)
        == report.stored_bytes
    )
    assert after == fresh(config)
    assert verify_store(config.out).ok
    assert not list(Path(config.out).rglob("*.partial"))


def test_extract_refuses_what_add_does_and_goes_on_with_the_rest_afterwards(
    config: ExtractConfig,
) -> None:
    begun(config)
    (Path(config.out) / "commits/part-00001.json").unlink()  # This part is still to be extracted.
    before, wanted = read_tree(config.out), config.replaced(activations=NEW, target_layers=1)
    command = (
        f"moa-data add {config.out} --model MODEL "
        "--activations hidden:layer:0,hidden:layer:1 --target-layers 1"
    )
    with raises_naming(OptionInvalid, command):
        extract(wanted)
    assert read_tree(config.out) == before
    assert "pending      1 part must still be extracted" in add(addition(config)).describe()
    assert extract(wanted).n_parts_done == 1
    expected = fresh(config)
    assert read_tree(config.out) == expected
    with pytest.raises(StoreMismatch) as caught:
        extract(config)
    assert "fields.hidden/layer_0.axes" in caught.value.changes
    assert read_tree(config.out) == expected


def test_a_bundle_can_grow_alone(config: ExtractConfig) -> None:
    begun(config)
    with raises_naming(OptionInvalid, "activations", "target_layers"):
        add(AddConfig(store=config.out, model=config.model))
    add(
        AddConfig(
            store=config.out, model=config.model, activations=("hidden:layer:1", "hidden:layer:0")
        )
    )
    before = read_tree(config.out)
    bundle = AddConfig(store=config.out, model=config.model, target_layers=1)
    assert "wrote target/ with 1 decoder layers" in add(bundle).describe()
    assert FrozenTarget.load(Path(config.out) / "target", 1).n_layers == 1
    after = read_tree(config.out)
    assert {name for name in after if after[name] != before[name]} == {
        "README.md", "commits/store.json", "commits/target.json", "store.json",
        "target/frozen.safetensors",
    }  # fmt: skip
    assert after == fresh(config)
    assert add(bundle).n_parts_done == 0
    assert read_tree(config.out) == after


def interrupt_at(phase: str, n_parts: int = -1) -> Progress:
    """Press Ctrl-C in a phase; in the phase of adding once ``n_parts`` parts are committed."""

    def progress(_done: int, _total: int, message: str) -> None:
        if message.startswith(phase) and (
            n_parts < 0 or int(message.split("/")[0].split()[-1]) >= n_parts
        ):
            raise KeyboardInterrupt

    return progress_to(progress)


@pytest.mark.parametrize(("phase", "n_parts"), [("hash", -1), ("add", 0), ("add", 1)])
def test_ctrl_c_leaves_the_old_store_and_the_next_run_goes_on(
    config: ExtractConfig, phase: str, n_parts: int
) -> None:
    before = begun(config)
    with pytest.raises(KeyboardInterrupt):
        add(addition(config), progress=interrupt_at(phase, n_parts))
    if phase == "hash":
        assert read_tree(config.out) == before
        return
    assert not list(Path(config.out).rglob("*.partial"))
    assert not (Path(config.out) / "locks").exists()
    with ActivationStore(config.out) as store:
        assert "hidden/layer_0" not in store.fields
    assert verify_store(config.out).ok
    plan = plan_addition(addition(config))
    assert (plan.n_parts < plan.n_stored_parts) == (n_parts > 0)
    assert add(addition(config)).n_parts_done == plan.n_parts
    assert read_tree(config.out) == fresh(config)


KILLS: dict[str, tuple[Any, ...]] = {
    "bundle": (publish, "name_files", 1, True),
    "basis": (addition_module, "write_atomic", 1, True),
    "mid_part": (part_writer.ArrayWriter, "write", 11),
    "before_seal": (store_writer, "write_manifest_commit", 1),
    "before_name": (store_writer, "name_next_basis", 2),
}


def kill(model: str, out: str, *names: str) -> None:
    config = AddConfig(store=out, model=model, activations=("hidden:layer:0",), target_layers=1)
    kill_at_points(
        {name: KILLS[name] for name in names},
        lambda name: add(config.replaced(store=f"{out}-{name}")),
    )


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
    run_apart(kill, config.model, config.out, *names)
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


@pytest.mark.slow
def test_another_addition_drops_what_an_unfinished_one_had_learned(config: ExtractConfig) -> None:
    config = config.replaced(codec="transform:3")
    begun(config)
    with pytest.raises(KeyboardInterrupt):
        add(
            addition(config, activations=("hidden:layer:2",), target_layers=0),
            progress=interrupt_at("add", 1),
        )
    add(addition(config))
    assert read_tree(config.out) == fresh(config)
    (Path(config.out) / "commits/part-00000.json").unlink()
    with raises_naming(OptionInvalid, config.out, 1, "hidden/layer_2"):
        add(addition(config, activations=("hidden:layer:2",)))


def test_a_recoded_store_takes_fields_too(config: ExtractConfig, tmp_path: Path) -> None:
    begun(config)
    recode(config.out, "int8", tmp_path / "int8")
    shutil.rmtree(config.out)
    add(addition(config, store=str(tmp_path / "int8")))
    expected = fresh(config, codec="int8")
    for name in ("README.md", "texts.arrow"):  # `recode` does not write these files.
        expected.pop(name)
    assert read_tree(tmp_path / "int8") == expected


def test_keys_and_values_can_be_added_and_repaired(config: ExtractConfig) -> None:
    extract(config.replaced(activations=("hidden:last",), codec="int8"))
    add(addition(config, activations=("kv", "hidden:layer:0")))
    assert read_tree(config.out) == fresh(config, codec="int8")
    flip(next(Path(config.out).glob("parts/kv/*/c.1.*")))
    assert [damage.part for damage in verify_store(config.out).damages] == [1]
    assert repair(config.out, config.model).n_parts_done == 1
    assert read_tree(config.out) == fresh(config, codec="int8")


def test_another_target_another_device_and_unknown_forwards_are_refused(
    config: ExtractConfig, tmp_path: Path
) -> None:
    before = begun(config)
    other = str(write_target(tmp_path / "other", seed=1))
    cases: list[tuple[Callable[[Any], Any], dict[str, Any], str]] = [
        (add, {"model": other}, "identities.target.weights_sha256"),
        (add, {"device": "meta"}, "extraction.device"),
        (add, {"activations": ("hidden:middle",)}, ""),
        (add, {"activations": ("hidden:layer:3",)}, ""),
        (add, {"target_layers": 9}, ""),
        (extract, {"dtype": "float32"}, "extraction.dtype"),
        (extract, {"codec": "int8"}, "codec.name"),
        (extract, {"max_length": 64}, "extraction.max_length"),
        (extract, {"model": other}, "identities.target.weights_sha256"),
    ]
    for command, changes, key in cases:
        given = (
            addition(config, **changes)
            if command is add
            else config.replaced(activations=NEW, **changes)
        )
        with pytest.raises(StoreMismatch if key else OptionInvalid) as caught:
            command(given)
        assert not key or (isinstance(caught.value, StoreMismatch) and key in caught.value.changes)
    assert read_tree(config.out) == before
    store = Path(config.out)
    (store / "commits/store.json").unlink()
    document = json.loads((store / "store.json").read_text())
    document["extraction"]["dtype"] = "float16"
    (store / "store.json").write_text(json.dumps(document))
    with raises_naming(OptionInvalid, config.out):
        add(addition(config))
    del document["extraction"]["batch_tokens"]
    for origin, fact in (({}, "batch_tokens"), ({"imported_from": "eagle"}, "eagle")):
        document["extraction"] |= origin
        (store / "store.json").write_text(json.dumps(document))
        with raises_naming(OptionInvalid, config.out, fact):
            add(addition(config))


def test_a_target_that_computes_something_else_is_refused(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = begun(config)

    def scaled(factor: float) -> Callable[..., Any]:
        def changed(*arguments: Any) -> Any:
            found = capture(*arguments)
            return dataclasses.replace(
                found, fields={name: x * factor for name, x in found.fields.items()}
            )

        return changed

    with monkeypatch.context() as patch:
        patch.setattr(add_module, "capture", scaled(1.1))
        with raises_naming(OptionInvalid, config.out, "hidden/last", "9.1%"):
            add(addition(config, target_layers=0))
        assert read_tree(config.out) == before
        patch.setattr(add_module, "capture", scaled(1.004))
        assert "relative error of" in add(addition(config)).describe()
    assert read_tree(config.out) == fresh(config)
