"""Commands go on with a store of schema version 1 in its own layout."""

from pathlib import Path

from moa_data.pipeline.add import add
from moa_data.pipeline.config import AddConfig, ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.repair import repair
from moa_data.storage.care.repair import plan_repair
from moa_data.storage.care.verify import verify_store
from moa_data.storage.read.store import read_manifest
from moa_data.tests.kit.stores import flip, read_tree
from moa_data.tests.kit.version_1 import write_as_version_1


def test_the_commands_go_on_with_it(config: ExtractConfig, tmp_path: Path) -> None:
    """Repair, add and an extraction that finds nothing to do, on a store that was extracted with a target."""
    extract(config)
    store = write_as_version_1(Path(config.out), tmp_path / "old")
    old = config.replaced(out=str(store))
    extract(old)
    whole = read_tree(store)
    assert extract(old).n_parts_done == 0
    flip(store / "parts/part-00001.zarr/kv/c/0/0/0/0/0")
    plan = plan_repair(store)
    assert plan.parts == (1,)
    repair(plan, config.model)
    assert read_tree(store) == whole
    report = add(AddConfig.of(store=str(store), model=config.model, activations=("hidden:layer:0",)))
    assert report.fields == ("hidden/layer_0",)
    assert read_manifest(store).schema_version == 1
    assert (store / "parts/part-00001.zarr/hidden/layer_0/c/0/0").exists()
    assert verify_store(store).ok
