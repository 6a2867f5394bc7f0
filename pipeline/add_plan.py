"""The plan of an addition to a store, made before the target is loaded: what is new, and what it costs."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..errors import OptionInvalid, SchemaVersionError, StorageUnavailable, StoreDamaged, StoreMismatch, StoreNotFound
from ..machine import free_memory
from ..moa.targets.bundle import load_target_config, target_sizes
from ..moa.targets.live import load_target_tokenizer, pick_device, resolve_model_folder
from ..storage.codecs.registry import StoreCodec
from ..storage.disk.files import open_path
from ..storage.names import PLAN_NAME
from ..storage.parts.manifest_commit import find_manifest_damage
from ..storage.parts.plan import read_plan
from ..storage.paths import RemotePath, StorePath
from ..storage.read.store import ActivationStore, read_manifest
from ..storage.schema import StoreManifest
from ..storage.write.addition import extended_codec, lacking_fields
from ..text import Progress, add_command, format_bytes
from .config import ActivationSpec, AddConfig, parse_activations, parse_fields
from .forwards.memory import ForwardMemory
from .plan import ExtractPlan, existing_parent, expected_bytes, field_specs, forward_memory, kept_weights, weight_bytes
from .sources import check_weights, pinned_revision, recorded_sources, target_identities

_SETTINGS = ("activations", "batch_tokens", "compute_dtype", "device", "dtype", "target_layers")


@dataclass(frozen=True)
class AddPlan:
    """What an addition will do.

    Attributes:
        stored: the store's manifest before the addition.
        manifest: the manifest after it; of a codec that learns, without what the new fields will learn.
        codec: codec of all fields; new ones that learn have not learned yet.
        spec: the new activations.
        all_activations: fields of all activations, old and new.
        n_layers_before: decoder layers that the store keeps before the addition.
        n_layers_kept: decoder layers that it keeps after it.
        n_tokens: tokens of the committed parts.
        n_left_tokens: tokens of the committed parts that lack new fields.
        n_parts: committed parts.
        n_left_parts: committed parts that lack new fields.
        raw_bytes: bytes of the missing values, before compression.
        stored_bytes: expected bytes of these on disk, and of the layers for target/.
        free_bytes: free bytes on the store's disk.
        left: the plan of the parts that lack new fields.
        model_config: the target's transformers config.
        memory: the memory that its forwards take.
    """

    config: AddConfig
    store: StorePath
    stored: StoreManifest
    manifest: StoreManifest
    codec: StoreCodec = field(repr=False)
    spec: ActivationSpec
    all_activations: tuple[str, ...]
    n_layers_before: int
    n_layers_kept: int
    folder: Path
    device: str
    n_tokens: int
    n_left_tokens: int
    n_parts: int
    n_left_parts: int
    raw_bytes: int
    stored_bytes: int
    free_bytes: int
    left: pa.Table = field(repr=False)
    model_config: Any = field(repr=False)
    memory: ForwardMemory

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the new fields."""
        return self.spec.fields

    @property
    def batch_tokens(self) -> int:
        """Tokens per forward, as in the extraction."""
        return int(self.stored.extraction["batch_tokens"])

    @property
    def dtype(self) -> str:
        """Dtype of the stored activations."""
        return str(self.stored.extraction["dtype"])

    @property
    def compute_dtype(self) -> str:
        """Dtype of the forward, as in the extraction."""
        return str(self.stored.extraction["compute_dtype"])

    @property
    def uses_cache(self) -> bool:
        """Whether the forward of an extraction of all these fields fills a cache."""
        return "kv" in self.all_activations

    def describe(self) -> str:
        """Return the plan as text."""
        kept = f"{self.n_layers_kept} decoder layers instead of {self.n_layers_before}"
        lines = [
            f"store        {self.store}: {', '.join(self.stored.extraction['activations'])} in {self.dtype}, codec "
            f"{self.codec.name}; all of it is kept",
            f"adds         {', '.join(self.fields) or 'no field, the store has them all'}"
            + (f"; target/ keeps {kept}" if self.n_layers_kept > self.n_layers_before else ""),
            f"tokens       {self.n_left_tokens:,} of {self.n_tokens:,}, in {self.n_left_parts:,} of {self.n_parts:,} "
            "parts" + (" (the others have the new fields already)" if self.n_left_parts < self.n_parts else ""),
            f"raw          {format_bytes(self.raw_bytes)} ({self.raw_bytes / max(self.n_left_tokens, 1):,.0f} bytes "
            "per token)",
            f"on disk      about {format_bytes(self.stored_bytes)} more",
            f"free disk    {format_bytes(self.free_bytes)} at {existing_parent(self.store)}",
            f"memory       {self.memory.describe()}; free {format_bytes(free_memory() or 0)}",
        ]
        return "\n".join(lines)

    def check_disk(self) -> None:
        """Refuse an addition that the disk cannot hold; raises StorageUnavailable."""
        needed = self.stored_bytes
        if isinstance(self.store, RemotePath):  # only shards on their way lie on a disk
            needed = min(needed, 2 * self.stored_bytes // max(1, self.n_left_parts))
        if needed > self.free_bytes:
            raise StorageUnavailable(
                f"The new fields need about {format_bytes(needed)}, but {existing_parent(self.store)} has "
                f"{format_bytes(self.free_bytes)} free. Free some space, or add fewer --activations."
            )


def plan_addition(config: AddConfig, progress: Progress | None = None) -> AddPlan:
    """Plan an addition without running the target or writing anything.

    Args:
        progress: called with (bytes done, bytes of the target's weights, message) while these are hashed.

    Raises:
        OptionInvalid: `extract` did not make the store.
        NotEnoughMemory: the target's forwards do not fit in the memory that is free.
        OptionInvalid: unknown activations, or nothing to add.
        StoreMismatch: the store was made with another target, or on another kind of device.
        StoreError: the store cannot be read.
        TargetError: the model folder has no config, weights or tokenizer.
    """
    with ActivationStore(config.store) as reader:
        stored, commits, old_codec, path = reader.manifest, reader.commits, reader.codec, reader.path
        n_tokens, sequences = int(reader.lengths.sum()), reader.sequences
    _check_settings(path, stored)
    revision = pinned_revision(recorded_sources(stored.extraction), "model", config.model, None)
    folder = resolve_model_folder(config.model, revision=revision)
    check_weights(folder, is_local=Path(config.model).expanduser().is_dir())
    model_config = load_target_config(folder)
    sizes = target_sizes(model_config)
    device = _check_same_target(config, path, stored, folder, progress)
    old = parse_fields(spec.name for spec in stored.fields)
    n_before = int(stored.extraction["target_layers"])
    n_kept = max(n_before, config.target_layers)
    full = old | parse_activations(config.activations, n_kept, sizes["n_layers"])
    new = ActivationSpec(full.kv and not old.kv, full.last and not old.last, _without(full.layers, old.layers))
    specs = field_specs(full, sizes, str(stored.extraction["dtype"]))
    if not set(stored.fields) <= set(specs):
        raise OptionInvalid(f"{path} describes its fields in another way than this release. Extract to a new store.")
    codec = extended_codec(old_codec, specs)
    activations = list(full.fields)
    settings = {**stored.extraction, "activations": activations, "target_layers": n_kept}
    new_codec = codec.only(new.fields)
    described = stored.codec if not new.fields or new_codec.learned else codec.describe()
    left = [commit for commit in commits.values() if lacking_fields(commit, new.fields)]
    n_left_tokens = sum(commit.n_tokens for commit in left)
    kept_bytes = kept_weights(model_config, n_kept) * weight_bytes(model_config) if n_kept > n_before else 0
    memory = forward_memory(
        model_config,
        [spec for spec in specs if spec.name in new.fields],
        str(stored.extraction["compute_dtype"]),
        int(stored.extraction["batch_tokens"]),
        max(sequences["n_tokens"].to_pylist(), default=0),
        device,
    )
    if left:
        memory.check()
    return AddPlan(
        config=config,
        store=path,
        stored=stored,
        manifest=dataclasses.replace(stored, fields=specs, extraction=settings, codec=described),
        codec=codec,
        spec=new,
        all_activations=full.fields,
        n_layers_before=n_before,
        n_layers_kept=n_kept,
        folder=folder,
        device=device,
        n_tokens=n_tokens,
        n_left_tokens=n_left_tokens,
        n_parts=len(commits),
        n_left_parts=len(left),
        raw_bytes=sum(item.spec.token_bytes for item in new_codec.fields.values()) * n_left_tokens,
        stored_bytes=expected_bytes(new_codec, n_left_tokens) + kept_bytes,
        free_bytes=shutil.disk_usage(existing_parent(path)).free,
        left=sequences.filter(pa.array(np.isin(sequences["part"].to_numpy(), [commit.part for commit in left]))),
        model_config=model_config,
        memory=memory,
    )


def refuse_addition(plan: ExtractPlan) -> None:
    """Refuse an extraction to a store that agrees with it but lacks some of its fields or decoder layers.

    To add them the target must run again over parts that are complete, which a resumption does not do.

    Raises:
        OptionInvalid: naming what the store lacks, and the command that adds it.
    """
    path = open_path(plan.config.out)
    if find_manifest_damage(path):
        return  # opening the store for writing repairs it, or names the damage
    try:
        old, old_table = read_manifest(path), read_plan(path / PLAN_NAME)
    except (StoreNotFound, StoreDamaged, SchemaVersionError):
        return
    new = plan.manifest
    n_old, n_new = (manifest.extraction.get("target_layers", -1) for manifest in (old, new))
    lacking = [spec.name for spec in new.fields if spec not in old.fields]
    if not set(old.fields) <= set(new.fields) or n_old > n_new or not (lacking or n_old < n_new):
        return
    settings = dict(new.extraction) | {key: old.extraction.get(key) for key in ("activations", "target_layers")}
    identities = {key: value for key, value in old.identities.items() if key in new.identities}
    alike = dataclasses.replace(
        new,
        fields=old.fields,
        extraction=settings,
        codec=old.codec,
        identities=old.identities,
        schema_version=old.schema_version,
    )
    if alike != old or identities != new.identities or old.codec["name"] != new.codec["name"]:
        return
    if old_table.equals(plan.table.replace_schema_metadata(None)):
        what = [*lacking, *([f"{n_new} decoder layers in target/"] if n_old < n_new else [])]
        command = add_command(str(path), lacking, n_new if n_old < n_new else 0)
        raise OptionInvalid(f"{path} lacks {', '.join(what)}; what it has is whole. Add with {command}.")


def _without(layers: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(layer for layer in layers if layer not in others)


def _check_settings(path: StorePath, stored: StoreManifest) -> None:
    """Refuse a store whose forwards cannot be repeated."""
    missing = [name for name in _SETTINGS if name not in stored.extraction]
    if missing:
        origin = stored.extraction.get("imported_from")
        how = f"was imported from {origin}" if origin else f"does not say its {missing[0]}"
        raise OptionInvalid(
            f"{path} {how}, so the forwards that made it cannot be repeated. Extract to a new store with all fields."
        )
    if engine := stored.extraction.get("engine"):
        raise OptionInvalid(
            f"{path} was extracted by {engine['name']}, and forwards of transformers would differ from it in rounding. "
            "Extract to a new store with all fields."
        )
    names = stored.extraction["activations"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise OptionInvalid(f"{path} does not say its activations. Extract to a new store with all fields.")
    try:
        parse_fields(spec.name for spec in stored.fields)
    except OptionInvalid as error:
        raise OptionInvalid(f"{path}: {error} Extract to a new store.") from error


def _check_same_target(
    config: AddConfig, path: StorePath, stored: StoreManifest, folder: Path, progress: Progress | None
) -> str:
    """Return the device; refuse another target, tokenizer or template than the store's, or another kind of device."""
    live: dict[str, Any] = target_identities(folder, load_target_tokenizer(folder), True, progress)
    changes = {
        f"identities.{key}": (stored.identities[key], value)
        for key, value in live.items()
        if stored.identities.get(key, value) != value
    }
    wanted = str(stored.extraction["device"])
    device = config.device if config.device != "auto" else wanted
    if (kind := torch.device(pick_device(device)).type) != wanted:
        changes["extraction.device"] = (wanted, kind)
    if changes:
        raise StoreMismatch(str(path), changes)
    return device
