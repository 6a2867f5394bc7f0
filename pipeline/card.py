"""Write the dataset card: README.md in the store's root, with front matter for the Hub.

The card contains no times and no machine names, so that equal inputs give equal bytes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..storage.backend import backend_of
from ..storage.paths import StorePath
from ..storage.read.verify import FieldSummary, summarize_store
from ..storage.schema import CARD_NAME, FieldSpec

# The Hub's size categories of datasets. The first category has no lower bound, and the last
# category has no upper bound. Every other category covers one power of ten.
_SIZE_CATEGORIES = (
    "n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "1B<n<10B",
    "10B<n<100B", "100B<n<1T", "n>1T",
)  # fmt: skip
# Licences of the target and of the dataset, as the Hub names them. An unknown licence is None.
Licences = tuple[str | None, str | None]
# Maps a key of the manifest's entry ``target`` to a text for the card. In this text, ``{}`` stands
# for the value of the key.
_SIZES = {
    "architecture": "{}",
    "n_layers": "{} layers",
    "n_kv_heads": "{} KV heads",
    "hidden_size": "hidden size {}",
}
_CODES = (
    " Activations are stored as the codes of a lossy codec; `docs/format.md` of moa-data says how "
    "to decode them."
)
_FROM_BFLOAT16 = "(bits.astype(np.uint32) << 16).view(np.float32)      # bfloat16 -> float32, exact"
_CARD = """---
{licence}
pretty_name: {pretty_name}
task_categories:
- text-generation
tags:
- activations
- hidden-states
- kv-cache
- speculative-decoding
- distillation
- zarr
- moa-data
size_categories:
- {size}
configs:
- config_name: sequences
  data_files: plan.parquet
---

# Activations of {model} on {dataset}

Activations of {model} ({sizes}) on {summary.n_sequences:,}
sequences of {dataset}: {summary.n_tokens:,} tokens, {summary.n_response_tokens:,} of them in
the assistant's messages. Use them to train drafters for speculative decoding, probes or
autoencoders without running the target. `target/` holds the target's config, tokenizer,
embeddings, final norm and LM head.

## Fields

{fields}

{stored} in {summary.manifest.n_parts:,} parts, {summary.bytes_per_token:,.0f} bytes per token, \
{summary.ratio:.3f} of the size of the raw values; codec `{summary.codec}`.

## Load it with moa-data

```python
from moa_data import ActivationDataset, ActivationStore, pad_collate
from torch.utils.data import DataLoader

store = ActivationStore("STORE")                         # where you downloaded it
tokens = store.read(0, "tokens")                         # numpy, int32 [n_tokens]
dataset = ActivationDataset(store, fields=("tokens", "response_mask", "{example}"))
batch = next(iter(DataLoader(dataset, batch_size=2, collate_fn=pad_collate)))
```

## Load it without moa-data

Every array is plain Zarr v3 (sharded; blosc and crc32c inside).{note} A sequence is a span of
the token axis. Ignore parts without a file in `commits/`, because they are incomplete.

```python
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import zarr

store = Path("STORE")                                    # where you downloaded it
row = pq.read_table(store / "plan.parquet").to_pylist()[0]
array = zarr.open_group(store / "parts", mode="r")["{plain}"]
start = row["part"] * array.attrs["part_rows"] + row["first_token"]
bits = array[start : start + row["n_tokens"]]
values = {values}
```

## Conventions

{conventions}

## How it was made

{settings}

Made with `{command}`.

## Licence

{licences}

The activations and the tokens derive from both. The tokens can be decoded to the text of the \
dataset. The command overwrites this card each time it runs, so give the licences with \
`target_license` and `dataset_license`, or edit the card after the last run.
"""


def write_card(
    store: StorePath,
    model: str,
    dataset: str,
    licences: Licences = (None, None),
    command: str = "moa-data extract",
) -> None:
    """Write README.md to a store's root, or replace it.

    Args:
        model: folder or hub id of the target. Only the last component of a path is shown.
        dataset: path or hub id of the chats. Only the last component of a path is shown.
        licences: licences of the target and the dataset.
        command: the command that made the store, without paths.
    """
    text = card_text(store, public_name(model), public_name(dataset), licences, command)
    backend_of(store / CARD_NAME).put(text.encode())


def card_text(store: StorePath, model: str, dataset: str, licences: Licences, command: str) -> str:
    """Return the text of a store's dataset card."""
    summary = summarize_store(store)
    # The card's second example reads a field with plain Zarr. It needs a field whose values are
    # stored uncoded, in one array with the field's name. A lossy codec stores codes instead of
    # values, in arrays with other names.
    uncoded: list[FieldSummary] = []
    for field in summary.fields:
        if [array.name for array in field.arrays] == [field.spec.name]:
            uncoded.append(field)
    plain = _smallest(uncoded)
    is_bfloat16 = plain is not None and plain.dtype == "bfloat16"
    target_licence, dataset_licence = licences
    licence_rows = (
        ("target", model, target_licence or "**fill in**"),
        ("dataset", dataset, dataset_licence or "**fill in**"),
    )
    settings = {**summary.manifest.extraction, **summary.manifest.identities}
    settings_rows: list[tuple[str, str]] = []
    for key, value in sorted(settings.items()):
        settings_rows.append((key, f"`{value}`"))
    return _CARD.format(
        model=model,
        dataset=dataset,
        command=command,
        summary=summary,
        licence=_licence(*licences),
        pretty_name=json.dumps(f"Activations of {model} on {dataset}", ensure_ascii=False),
        size=size_category(summary.n_sequences),
        sizes=", ".join(_sizes_of(summary.manifest.target)),
        fields=_table(
            ("Field", "Values", "Shape", "Meaning", "On disk"), _field_rows(summary.fields)
        ),
        stored=_mb(summary.stored_bytes),
        example=(_smallest(summary.fields) or summary.manifest.fields[0]).name,
        note="" if plain else _CODES,
        plain=plain.name if plain else "tokens",
        values=_FROM_BFLOAT16 if is_bfloat16 else "bits",
        conventions=_table(("Convention", "Meaning"), summary.manifest.conventions.items()),
        settings=_table(("Setting", "Value"), settings_rows),
        licences=_table(("Source", "Name", "Licence"), licence_rows),
    )


def public_name(path_or_id: str) -> str:
    """Return the name of a model or dataset without the folders of a local path.

    The result is the hub id, or the last component of the local path.
    """
    is_path = (
        path_or_id.startswith((".", "/", "~"))
        or path_or_id.count("/") != 1
        or Path(path_or_id).exists()
    )
    return Path(path_or_id).resolve().name if is_path else path_or_id


def size_category(n_sequences: int) -> str:
    """Return the Hub's size category for a number of sequences, e.g. ``"1K<n<10K"``."""
    # Index of the category: 1 for thousands, 2 for tens of thousands, and so on.
    power = max(len(str(n_sequences)) - 3, 0)
    return _SIZE_CATEGORIES[min(power, len(_SIZE_CATEGORIES) - 1)]


def _licence(one: str | None, other: str | None) -> str:
    if not (one and other):
        return "license: unknown  # Fill in. The licences of target and dataset both apply."
    if one == other:
        return f"license: {json.dumps(one)}"
    return f"license: other\nlicense_name: {json.dumps(f'{one}-and-{other}')}"


def _sizes_of(target: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text about each size of the target that the manifest records."""
    for key, text in _SIZES.items():
        if key in target:
            yield text.format(target[key])


def _field_rows(fields: Iterable[FieldSummary]) -> list[tuple[str, ...]]:
    """Return the rows of the card's table of fields."""
    rows: list[tuple[str, ...]] = []
    for field in fields:
        spec = field.spec
        shape = ", ".join(["token", *map(str, spec.token_shape)])
        size = _mb(field.stored_bytes)
        rows.append((f"`{spec.name}`", spec.dtype, f"[{shape}]", spec.description, size))
    return rows


def _smallest(fields: Iterable[FieldSummary]) -> FieldSpec | None:
    activations = [field for field in fields if field.spec.token_shape]
    smallest = min(activations, key=lambda field: (field.raw_bytes, field.spec.name), default=None)
    return smallest.spec if smallest else None


def _table(header: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        cells = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.2f} MB"
