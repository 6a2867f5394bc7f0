"""The card has the form that the Hub expects, and its snippets run.

Equal stores have equal cards.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from moa_data.pipeline.card import card_text, public_name, size_category, write_card
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.schema import hidden_field, response_mask_field, to_float32, tokens_field
from moa_data.tests.kit.stores import Recipe, make_recipe

ORIGIN = ("owner/tiny", "owner/chats")


def recipe(**options: Any) -> Recipe:
    """Return a recipe with the sizes of the target that a card names."""
    made = make_recipe(**options)
    return replace(
        made, manifest=replace(made.manifest, target={**made.manifest.target, "hidden_size": 16})
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return recipe().write(tmp_path / "store")


def front_matter(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return found


def test_front_matter_is_the_hubs(store: Path) -> None:
    card = card_text(store, 'a "b"', "ünï", ("llama3", "mit"), "moa-data extract")
    found = front_matter(card)
    assert found["license"] == "other"
    assert found["license_name"] == "llama3-and-mit"
    assert found["pretty_name"] == 'Activations of a "b" on ünï'
    assert found["size_categories"] == ["n<1K"]
    assert {"zarr", "speculative-decoding"} <= set(found["tags"])
    assert found["configs"] == [{"config_name": "sequences", "data_files": "plan.parquet"}]
    assert '| target | a "b" | llama3 |' in card


@pytest.mark.parametrize(
    ("licences", "found", "n_left"),
    [((None, None), "unknown", 2), (("mit", "mit"), "mit", 0), (("mit", None), "unknown", 1)],
)
def test_licences_are_left_to_fill_in_or_taken_from_the_options(
    store: Path, licences: tuple[str | None, str | None], found: str, n_left: int
) -> None:
    card = card_text(store, "m", "d", licences, "moa-data extract")
    assert (front_matter(card)["license"], card.count("**fill in**")) == (found, n_left)


def write(store: Path) -> str:
    """Write the card of a store, and return its text."""
    write_card(store, *ORIGIN)
    return (store / "README.md").read_text()


def test_equal_stores_have_equal_cards_without_times_or_paths(tmp_path: Path) -> None:
    cards = [write(recipe().write(tmp_path / name)) for name in ("one", "two")]
    assert cards[0] == cards[1]
    assert str(tmp_path) not in cards[0]
    assert not re.search(r"\b20\d\d-\d\d-\d\d\b|\d\d:\d\d:\d\d", cards[0])


def test_the_card_says_what_is_there(store: Path) -> None:
    card = write(store)
    reader = ActivationStore(store)
    counts = [f"{len(reader)}\nsequences of owner/chats", f"{int(reader.lengths.sum()):,} tokens"]
    facts = [*reader.manifest.conventions.values(), *reader.manifest.identities]
    for text in [*counts, *facts, *(f"| `{name}` |" for name in reader.fields)]:
        assert text in card


def test_sizes_that_a_store_does_not_record_are_left_out(tmp_path: Path) -> None:
    made = recipe()
    sizes = {"n_layers": made.manifest.target["n_layers"], "hidden_size": 16}
    made = replace(made, manifest=replace(made.manifest, target=sizes))
    assert f"({sizes['n_layers']} layers, hidden size 16) on" in write(
        made.write(tmp_path / "store")
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    fields = (tokens_field(), response_mask_field(), hidden_field("last", 16, dtype))

    def in_dtype(name: str, row: dict[str, Any], values: np.ndarray) -> Any:
        return (
            to_float32(values, "bfloat16")
            if (name, dtype) == ("hidden/last", "float32")
            else values
        )

    store = recipe(lengths=(70, 3, 33), fields=fields).write(tmp_path / "STORE", in_dtype)
    snippets = re.findall(r"```python\n(.*?)```", write(store), re.DOTALL)
    reader = ActivationStore(store)
    expected = to_float32(reader.read(0, "hidden/last"), dtype)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(snippets[0], "README.md", "exec"), names)
    np.testing.assert_array_equal(names["tokens"], reader.read(0, "tokens"))
    assert names["batch"]["hidden/last"].shape == (2, int(reader.lengths[:2].max()), 16)
    plain: dict[str, Any] = {}
    exec(compile(snippets[1], "README.md", "exec"), plain)
    np.testing.assert_array_equal(plain["values"], expected)


def test_names_that_may_be_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert public_name("meta-llama/Llama-3-8B") == "meta-llama/Llama-3-8B"
    assert public_name("/home/me/secret/llama") == "llama"
    assert public_name("data/sub/chats.jsonl") == "chats.jsonl"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chats").mkdir()
    assert public_name("data/chats") == "chats"


def test_size_categories() -> None:
    found = {n: size_category(n) for n in (1, 999, 1000, 7473, 10**12)}
    assert found == {1: "n<1K", 999: "n<1K", 1000: "1K<n<10K", 7473: "1K<n<10K", 10**12: "n>1T"}
