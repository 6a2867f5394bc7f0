"""docs/format.md is enough to read a store with plain Zarr libraries.

docs/protocol.md has the same numbers of bytes and the same codes as the package.
"""

import json
import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch
from transformers import LlamaConfig

from moa_data.moa.drafters.registry import drafter_class
from moa_data.moa.targets.facts import TargetFacts
from moa_data.serving.wire import CODECS, STATUSES, bytes_per_position
from moa_data.storage import schema
from moa_data.storage.plan import PLAN_SCHEMA
from moa_data.tests.kit import stores as kit

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "format.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_tree_is_the_one_of_the_schema() -> None:
    assert schema.__doc__ is not None
    tree = schema.__doc__.split("::\n\n")[1].split("\n\n")[0]
    assert block("text").rstrip() == textwrap.dedent(tree).rstrip()


def test_every_manifest_key_and_plan_column_is_explained() -> None:
    for name in [item.name for item in fields(schema.StoreManifest)] + PLAN_SCHEMA.names:
        assert f"`{name}`" in DOCUMENT


def test_the_example_reads_every_field_where_this_package_cannot_be_imported(
    tmp_path: Path,
) -> None:
    fields = (*kit.FIELDS, schema.hidden_field("layer_2", 16))
    recipe = kit.make_recipe(lengths=(70, 3, 200, 64, 1), fields=fields, part_tokens=300)
    recipe.write(tmp_path / "STORE")
    program = f"""
import sys
sys.modules['moa_data'] = None  # an import of it fails
{block("python")}
out = {{"bits": bits, "keys": keys, "values": values}}
for row in pq.read_table(store / 'plan.parquet').to_pylist():
    for name in {[spec.name for spec in fields]}:
        path = store / 'parts' / name
        room = json.loads((path / 'zarr.json').read_text())['attributes']['part_rows']
        start = row['part'] * room + row['first_token']
        array = ts.open({{'driver': 'zarr3', 'kvstore': {{'driver': 'file', 'path': str(path)}}}}).result()
        out[f"{{row['sequence_id']}}:{{name}}"] = array[start : start + row['n_tokens']].read().result()
np.savez('out.npz', **out)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    with np.load(tmp_path / "out.npz") as out:
        assert len(out.files) == 3 + 5 * 5
        for row in recipe.plan.to_pylist():
            for spec in fields:
                np.testing.assert_array_equal(
                    out[f"{row['sequence_id']}:{spec.name}"], recipe.values(spec, row)
                )
        bits = out["bits"]
        np.testing.assert_array_equal(bits, recipe.values(fields[2], recipe.plan.to_pylist()[0]))
        np.testing.assert_array_equal(out["keys"].view(np.uint32) >> 16, bits[:, :, :, 0])
        np.testing.assert_array_equal(out["values"].view(np.uint32) >> 16, bits[:, :, :, 1])


def test_metadata_and_checksums_are_as_the_document_says(tmp_path: Path) -> None:
    store = kit.make_recipe().write(tmp_path / "store")
    part = store / "parts"
    for name, chunk_tokens in re.findall(
        r"^\| `(tokens|response_mask)` \|.*\| (\d+) \|$", DOCUMENT, re.MULTILINE
    ):
        metadata = json.loads((part / name / "zarr.json").read_text())
        assert metadata["codecs"][0]["configuration"]["chunk_shape"] == [int(chunk_tokens)]
    metadata = json.loads((part / "kv" / "zarr.json").read_text())
    (sharding,) = metadata["codecs"]
    assert sharding["name"] == "sharding_indexed"
    assert sharding["configuration"]["index_location"] == "end"
    assert [codec["name"] for codec in sharding["configuration"]["index_codecs"]] == [
        "bytes",
        "crc32c",
    ]
    chain = sharding["configuration"]["codecs"]
    assert [codec["name"] for codec in chain] == re.findall(
        r"^\d\. `(\w+)`", DOCUMENT, re.MULTILINE
    )[-3:]
    blosc = chain[1]["configuration"]
    text = DOCUMENT.split("2. `blosc`:")[1].split("3. `crc32c`")[0]
    assert f"`cname` {blosc['cname']}" in text
    assert f"`shuffle` {blosc['shuffle']}" in text
    assert f"`blocksize` {blosc['blocksize']}" in text
    assert metadata["data_type"] == "uint16"
    assert metadata["attributes"]["logical_dtype"] == "bfloat16"


def test_a_shard_is_as_the_worked_example_draws_it(tmp_path: Path) -> None:
    """Check a shard with 64 tokens of the 32 layers of Llama-3-8B.

    It has the chunks in order, then the index of all rows that the part has space for, and then 4
    bytes of checksum.
    """
    recipe = kit.make_recipe(
        lengths=(64,), fields=(*kit.FIELDS[:2], schema.kv_field(32, 8, 128)), part_tokens=64
    )
    store = recipe.write(tmp_path / "store")
    drawn = re.search(
        r"^[\d,]+ +([\d,]+) +index: (\d+) rows x (\d+) layers", DOCUMENT, re.MULTILINE
    )
    assert drawn is not None
    n_index_bytes, n_rows, n_layers = (int(number.replace(",", "")) for number in drawn.groups())
    assert n_index_bytes == n_rows * n_layers * 16
    content = (store / "parts/kv/c.0.0.0.0.0").read_bytes()
    index = np.frombuffer(content[-4 - n_index_bytes : -4], "<u8").reshape(n_rows * n_layers, 2)
    assert (index[n_layers:] == 2**64 - 1).all()
    offsets, sizes = index[:n_layers].T
    assert offsets.tolist() == [0, *np.cumsum(sizes)[:-1].tolist()]
    assert len(content) == sizes.sum() + n_index_bytes + 4
    assert google_crc32c.value(content[-4 - n_index_bytes : -4]) == int.from_bytes(
        content[-4:], "little"
    )


PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
LLAMA_3_8B = LlamaConfig(
    hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32,
    intermediate_size=14336, vocab_size=128256, max_position_embeddings=8192,
)  # fmt: skip
DRAFTERS: list[tuple[str, str, dict[str, Any]]] = [
    ("`moa`", "moa", {}),
    ("`moa`, one group of layers (the paper)", "moa", {"layer_groups": 1}),
    ("`moa`, 1 target layer", "moa", {"target_layer_inference": 1}),
    ("`moa`, 3 target layers", "moa", {"target_layer_inference": 3}),
    ("`eagle`", "eagle", {}),
    ("`independent`", "independent", {}),
]


def test_bytes_of_contexts() -> None:
    rows = []
    for name, kind, sizes in DRAFTERS:
        drafter_type = drafter_class(kind)
        with torch.device("meta"):
            width = drafter_type(
                drafter_type.config_class.from_target(TargetFacts.of(LLAMA_3_8B), **sizes)
            ).context_width
        assert width is not None
        n_bytes = [bytes_per_position(codec, width) for codec in CODECS]
        cells = [f"{number:,}" for number in (width, *n_bytes)]
        rows.append(f"| {name} | {' | '.join(cells)} | {n_bytes[1] * 8 / 20e6 * 1000:.1f} |")
    assert rows == [
        line for line in PROTOCOL.splitlines() if re.match(r"\| `(moa|eagle|independent)`", line)
    ]


def test_codes_are_those_of_the_server() -> None:
    found = dict(re.findall(r"^\| `(\w+)` \| `([A-Z_]+)` \|", PROTOCOL, re.MULTILINE))
    assert found == {code: status.name for code, status in STATUSES.items()}
