"""Other programs choose sequences by a store's index, as docs/interop.md shows."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from moa_data.errors import OutputOccupied
from moa_data.moa.targets.live import load_target_tokenizer
from moa_data.pipeline.exchange import transfer
from moa_data.pipeline.exchange.config import ExportConfig
from moa_data.pipeline.exchange.transfer import export_store
from moa_data.storage.read.store import ActivationStore
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.stores import read_by_zarr
from moa_data.tests.kit.variants import quick

PAGE = (Path(__file__).parents[3] / "docs" / "interop.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Choosing sequences by an index")[1].split("\n## ")[0]
# The lines after each example collect the sequences that it reads, for comparison with the store:
# their positions and the bits of their last hidden states.
READ = {
    "duckdb": (
        "found = [(i, batch['hidden/last'][b, :store.lengths[i]]) "
        "for b, i in enumerate(chosen.tolist())]"
    ),
    "polars": (
        "rows = pl.read_parquet('index.parquet')['row'].to_list()\n"
        "found = [(rows.index(r), hidden[r : r + n]) for r, n in chosen.iter_rows()]\n"
        "assert (found[-1][1].astype(np.uint32) << 16 == states.view(np.uint32)).all()"
    ),
    "datasets": (
        "assert batch['hidden/last'].ndim == 3\n"
        "import numpy as np, torch\n"
        "bits = [item['hidden/last'].view(torch.uint16).numpy() for item in dataset]\n"
        "found = list(zip(chosen['position'], bits))"
    ),
}


def export_index(store: Path, out: Path, **options: Any) -> str:
    return export_store(ExportConfig(store=str(store), format="index", out=str(out), **options))


@pytest.mark.parametrize("library", quick(READ, ["duckdb"]))
def test_the_examples_read_what_they_choose(store: Path, tmp_path: Path, library: str) -> None:
    (tmp_path / "store").symlink_to(store)
    export_index(store, tmp_path / "index.parquet")
    (block,) = (
        one
        for one in re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
        if f" {library}" in one[:40]
    )
    lines = ["import numpy as np", block.replace("%what%", "%"), READ[library]]
    program = "\n".join([*lines, "np.savez('found.npz', **{str(i): bits for i, bits in found})"])
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    opened = ActivationStore(store)
    with np.load(tmp_path / "found.npz") as found:
        assert found.files
        for i in map(int, found.files):
            np.testing.assert_array_equal(found[str(i)], opened.read(i, "hidden/last"))


def test_a_row_has_what_the_store_knows_of_a_sequence(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_INDEX_ROWS", 5)  # so that the table has several row groups
    said = export_index(store, tmp_path / "new" / "index.parquet")
    table = pq.read_table(tmp_path / "new" / "index.parquet")
    opened, tokenizer = ActivationStore(store), load_target_tokenizer(store / "target")
    assert f"{len(opened)} sequences" in said
    assert all(f"`{name}`" in SECTION for name in table.column_names)
    plan = opened.sequences.to_pylist()
    for i, row in enumerate(table.to_pylist()):
        tokens = opened.read(i, "tokens")
        assert {name: row[name] for name in plan[i]} == plan[i]
        assert (row["position"], row["text"]) == (i, tokenizer.decode(tokens))
        assert row["tokens"] == tokens.tolist()
        assert row["response_mask"] == opened.read(i, "response_mask").tolist()
        rows = read_by_zarr(store / "parts", "tokens", row["row"], row["row"] + row["n_tokens"])
        np.testing.assert_array_equal(rows, tokens)


def test_an_index_replaces_its_own_kind_alone(
    store: Path, recipe_store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "index.parquet"
    export_index(recipe_store, out, max_sequences=2)
    export_index(recipe_store, out)
    table = pq.read_table(out)
    assert table.num_rows == len(ActivationStore(recipe_store))
    # The store was made without a target, so it has no tokenizer.
    assert "text" not in table.column_names
    with pytest.raises(OutputOccupied):
        export_index(store, out)
    out.write_text("a note")
    with pytest.raises(OutputOccupied):
        export_index(store, out)
    assert out.read_text() == "a note"
    refused(
        run("export", store, "--format", "index", "--layers", "1", "--out", out),
        "--layers has no meaning with --format index",
    )
