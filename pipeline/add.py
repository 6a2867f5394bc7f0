"""Add activations to a store: an extraction with another list of fields, over the sequences that the store holds."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..errors import OptionInvalid, StoreError, WorkerError
from ..machine import fix_sums
from ..moa.targets.bundle import held_layers, load_target_config, target_sizes
from ..moa.targets.live import Target, load_target_tokenizer, pick_device, resolve_model_folder
from ..storage.codecs.registry import StoreCodec
from ..storage.paths import StorePath
from ..storage.plan import read_plan
from ..storage.read.store import ActivationStore, read_manifest
from ..storage.schema import HIDDEN_LAST, PLAN_NAME, TARGET_NAME, TOKENS, StoreManifest, to_float32
from ..storage.write.addition import (
    StoreAddition,
    extended_codec,
    lacking_fields,
    load_next_basis,
    save_next_basis,
)
from ..storage.write.store import StoreWriter
from ..text import Progress, activation_name, add_command, counted, format_bytes
from .audit import stored_tolerance
from .card import CardOrigin, write_card
from .config import ActivationSpec, AddConfig, parse_activations, parse_fields, resolve_encode_threads
from .forwards.calibrate import learn_from_target, learning_on
from .forwards.capture import capture
from .forwards.parts import Forwards, batches, load_target, run_parts, save_bundle
from .plan import (
    ExtractPlan,
    ForwardPlan,
    bundle_bytes,
    existing_parent,
    expected_bytes,
    field_specs,
    forward_memory,
    interruptible,
)
from .report import Timings, WriteReport
from .sources import (
    check_identities,
    check_weights,
    pinned_revision,
    recorded_config,
    recorded_sources,
    tokenizer_identities,
    weight_identities,
)

_SETTINGS = ("activations", "batch_tokens", "compute_dtype", "device", "dtype", "target_layers")


@dataclass(frozen=True)
class AddPlan(ForwardPlan):
    """What an addition will do; ``table`` has the sequences of committed parts that lack new fields.

    Attributes:
        stored: the store's manifest before the addition.
        manifest: the manifest after it; of a codec that learns, without what the new fields will learn.
        full_codec: codec of old and new fields.
        n_tokens: tokens of the committed parts.
        n_parts: committed parts.
    """

    config: AddConfig
    stored: StoreManifest
    manifest: StoreManifest
    full_codec: StoreCodec = field(repr=False)
    n_tokens: int
    n_parts: int

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the new fields."""
        return self.spec.fields

    @property
    def n_layers_kept(self) -> int:
        """Decoder layers that target/ keeps after the addition."""
        return int(self.manifest.extraction["target_layers"])

    @property
    def grows_bundle(self) -> bool:
        """Whether target/ keeps more decoder layers than before."""
        return self.n_layers_kept > int(self.stored.extraction["target_layers"])

    @property
    def n_left_tokens(self) -> int:
        """Tokens of the committed parts that lack new fields."""
        return int(self.table["n_tokens"].to_numpy().sum())

    @property
    def n_left_parts(self) -> int:
        """Committed parts that lack new fields."""
        return len(self.table["part"].unique())

    def describe(self) -> str:
        """Return the plan as text."""
        kept = f"; target/ keeps {self.n_layers_kept} decoder layers" if self.grows_bundle else ""
        lines = [
            f"store        {self.store}: {', '.join(self.stored.extraction['activations'])} in {self.dtype}, codec "
            f"{self.codec.name}; all of it is kept",
            f"adds         {', '.join(self.fields) or 'no field, the store has them all'}{kept}",
            f"tokens       {self.n_left_tokens:,} of {self.n_tokens:,}, in {self.n_left_parts:,} of {self.n_parts:,} "
            "parts",
            f"raw          {format_bytes(self.n_raw_bytes)} ({self.n_raw_bytes / max(self.n_left_tokens, 1):,.0f} "
            "bytes per token)",
            f"on disk      about {format_bytes(self.stored_bytes)} more",
            *self.room(),
        ]
        return "\n".join(lines)


def add(
    config: AddConfig, progress: Progress | None = None, provenance: Mapping[str, Any] | None = None
) -> WriteReport:
    """Add activations to every committed part of a store, or continue where an earlier run stopped."""
    fix_sums()
    start = time.perf_counter()
    with interruptible("while planning; nothing was written"):
        plan = plan_addition(config, progress)
    plan.check_disk()
    timings = Timings()
    added = ", ".join(plan.fields) or "the target's layers"
    with StoreWriter.create_or_resume(plan.store, plan.stored, read_plan(plan.store / PLAN_NAME)) as writer:
        with (
            interruptible(f"in a part, which was discarded; until all of {added} is there, {plan.store} is as it was"),
            ActivationStore(plan.store) as reader,
        ):
            agreement = _write_fields(plan, writer, reader, timings, progress)
        named: dict[str, Any] = {}
        with contextlib.suppress(WorkerError):  # no extraction is recorded
            names = tuple(map(activation_name, plan.manifest.extraction["activations"]))
            recorded = recorded_config(plan.store)
            recorded = recorded.replaced(model=config.model, activations=names, target_layers=plan.n_layers_kept)
            write_card(plan.store, CardOrigin.of(recorded))
            named = {"config": recorded.named()}  # would make the whole store, for a repair
        timings.wall_s = time.perf_counter() - start
        report = _report(plan, writer, timings, agreement)
        if plan.fields or plan.grows_bundle:
            what = {"added": config.named() | {"fields": plan.fields, "agreement": agreement}}
            writer.record_run(report.record(provenance) | what | named)
    return report


def _write_fields(
    plan: AddPlan, writer: StoreWriter, reader: ActivationStore, timings: Timings, progress: Progress | None
) -> str:
    """Write the bundle and the new fields of all parts, then the manifest; returns how the target agrees."""
    agreement, codec = "", plan.full_codec
    needs_bundle = not writer.has_target or held_layers(writer.target_path) < plan.n_layers_kept
    if plan.fields or needs_bundle:
        target = load_target(plan.folder, plan.compute_dtype, plan.device, plan.memory.weight_bytes, progress)
    if needs_bundle:
        save_bundle(writer, target, plan.folder, plan.n_layers_kept)
    if plan.codec.learned and not load_next_basis(plan.store, codec, writer.codec):
        _learn(plan, writer, reader, target, progress)
    manifest = dataclasses.replace(plan.manifest, codec=codec.describe()) if plan.fields else plan.manifest
    addition = StoreAddition(writer, manifest, codec)
    if pending := addition.pending_parts():
        rows = {key: row for row, key in enumerate(reader.sequences["sequence_id"].to_pylist())}
        first = next(batches(writer.part_sequences(pending[0]), plan.batch_tokens))
        agreement = _compare(plan, reader, target, [rows[key] for key in first["sequence_id"].to_pylist()])
        # The same sequences in the same batches as in the extraction: on the same device, with the same libraries and
        # number of threads, the bits are those of one extraction of all fields. Elsewhere the last bits differ.
        forwards = Forwards(
            target=target,
            spec=plan.spec,
            codec=codec,
            dtype=getattr(torch, plan.dtype),
            batch_tokens=plan.batch_tokens,
            uses_cache=plan.uses_cache,
            text=lambda key: (reader.read(rows[key], TOKENS), reader.read(rows[key], "response_mask")),
            n_encode_threads=plan.n_encode_threads,
        )
        timings.n_before_tokens = plan.n_tokens - plan.n_left_tokens

        def tell(timings: Timings) -> None:
            if progress:
                n_done = addition.n_parts - len(addition.pending_parts())
                n_tokens = timings.n_before_tokens + timings.n_computed_tokens
                progress(n_tokens, plan.n_tokens, f"add {n_done}/{addition.n_parts} parts")

        run_parts(forwards, addition, pending, timings, tell)
    addition.finish()  # from now on readers see the new fields
    return agreement


def _learn(
    plan: AddPlan, writer: StoreWriter, reader: ActivationStore, target: Target, progress: Progress | None
) -> None:
    """Let the new fields learn from the sequences that the old ones learned from."""
    if n_pending := len(writer.pending_parts()):
        raise OptionInvalid(
            f"{plan.store}: {', '.join(plan.fields)} must learn from all sequences, but {n_pending} parts are still to "
            "be extracted. Run the extract command that began the store, then add."
        )
    learn_from_target(
        plan.full_codec.only(plan.fields),
        reader.lengths,
        lambda row: reader.read(row, TOKENS),
        target,
        plan.spec,
        plan.dtype,
        learning_on(target.device, plan.disk, progress),
        plan.uses_cache,
    )
    save_next_basis(writer, plan.full_codec)


def _compare(plan: AddPlan, reader: ActivationStore, target: Target, rows: list[int]) -> str:
    """Run a batch and compare hidden/last with the stored one; refuse more than rounding explains."""
    if HIDDEN_LAST not in reader.fields:
        return ""
    tokens = [reader.read(row, TOKENS) for row in rows]
    spec = ActivationSpec("kv" in reader.fields, True, ())  # keys and values may change the kernels, and so last bits
    live = capture(target.model, tokens, spec, getattr(torch, plan.dtype), plan.uses_cache).fields[HIDDEN_LAST]
    own = np.concatenate([values[: len(text)].numpy() for values, text in zip(live.float().cpu(), tokens, strict=True)])
    was = np.concatenate([to_float32(reader.read(row, HIDDEN_LAST), plan.dtype) for row in rows])
    relative = float(np.linalg.norm(was - own)) / max(float(np.linalg.norm(own)), 1e-15)
    if not relative <= stored_tolerance(reader, plan.dtype):
        raise OptionInvalid(
            f"{plan.store}: {plan.config.model} gives a hidden/last that differs by {relative:.1%} from the stored "
            "one, more than rounding explains, so new fields would not belong to the old ones. Nothing was written; "
            "check the release of transformers, and run `moa-data audit`."
        )
    if not relative:
        return "the first batch gave the stored hidden/last bit for bit"
    return f"the first batch gave the stored hidden/last up to a relative error of {relative:.1e}, by rounding or codec"


def _report(plan: AddPlan, writer: StoreWriter, timings: Timings, agreement: str) -> WriteReport:
    report = WriteReport.of(writer, timings)
    report.lines = [f"added        {', '.join(plan.fields) or 'no field, the store has them all'}"]
    if plan.grows_bundle:
        report.restored = f"{TARGET_NAME}/ with {plan.n_layers_kept} decoder layers"
    if agreement:
        report.lines.append(f"rounding     {agreement}")
    if n_pending := len(writer.pending_parts()):
        report.lines.append(f"pending      {counted(n_pending, 'part')} to be extracted, with all fields")
    return report


def plan_addition(config: AddConfig, progress: Progress | None = None) -> AddPlan:
    """Plan an addition without running the target or writing anything.

    Args:
        progress: called with (bytes done, bytes of the target's weights, message) while these are hashed.

    Raises:
        OptionInvalid: `extract` did not make the store, or the activations are unknown.
        StoreMismatch: the store was made with another target, or on another kind of device.
    """
    with ActivationStore(config.store) as reader:
        stored, commits, old_codec, path = reader.manifest, reader.commits, reader.codec, reader.path
        n_tokens, sequences = int(reader.lengths.sum()), reader.sequences
    settings = _check_settings(path, stored)
    folder, device = _find_same_target(config, path, stored, progress)
    model_config = load_target_config(folder)
    sizes = target_sizes(model_config)
    dtype, compute_dtype = str(settings["dtype"]), str(settings["compute_dtype"])
    n_kept = max(settings["target_layers"], config.target_layers)
    old = parse_fields(spec.name for spec in stored.fields)
    full = old | parse_activations(config.activations, n_kept, sizes["n_layers"])
    layers = tuple(layer for layer in full.layers if layer not in old.layers)
    new = ActivationSpec(full.kv and not old.kv, full.last and not old.last, layers)
    specs = field_specs(full, sizes, dtype)
    if not set(stored.fields) <= set(specs):
        raise OptionInvalid(f"{path} describes its fields in another way than this release. Extract to a new store.")
    codec = extended_codec(old_codec, specs)
    new_codec = codec.only(new.fields)
    described = stored.codec if not new.fields or new_codec.learned else codec.describe()
    extraction = {**settings, "activations": list(full.fields), "target_layers": n_kept}
    left = [commit.part for commit in commits.values() if lacking_fields(commit, new.fields)]
    table = sequences.filter(pa.array(np.isin(sequences["part"].to_numpy(), left)))
    n_left_tokens = int(table["n_tokens"].to_numpy().sum())
    kept_bytes = bundle_bytes(model_config, n_kept) if n_kept > settings["target_layers"] else 0
    new_specs = [spec for spec in specs if spec.name in new.fields]
    longest = max(sequences["n_tokens"].to_pylist(), default=0)
    memory = forward_memory(model_config, new_specs, compute_dtype, settings["batch_tokens"], longest, device)
    if left:
        memory.check()
    return AddPlan(
        store=path,
        spec=new,
        codec=new_codec,
        table=table,
        folder=folder,
        model_config=model_config,
        device=device,
        dtype=dtype,
        compute_dtype=compute_dtype,
        batch_tokens=settings["batch_tokens"],
        uses_cache=full.kv,
        n_encode_threads=resolve_encode_threads(config.encode_threads),
        raw_bytes={name: item.spec.token_bytes * n_left_tokens for name, item in new_codec.fields.items()},
        stored_bytes=expected_bytes(new_codec, n_left_tokens) + kept_bytes,
        free_bytes=shutil.disk_usage(existing_parent(path)).free,
        present_bytes=0,
        memory=memory,
        config=config,
        stored=stored,
        manifest=dataclasses.replace(stored, fields=specs, extraction=extraction, codec=described),
        full_codec=codec,
        n_tokens=n_tokens,
        n_parts=len(commits),
    )


def refuse_addition(plan: ExtractPlan) -> None:
    """Refuse an extraction to a store that lacks some of its fields or decoder layers, and agrees with it otherwise."""
    # A resumption does not run the target again over parts that are complete.
    try:
        old, new = read_manifest(plan.store), plan.manifest
    except StoreError:
        return  # opening the store for writing repairs it, or names the damage
    n_old, n_new = (manifest.extraction.get("target_layers", -1) for manifest in (old, new))
    lacking = [spec.name for spec in new.fields if spec not in old.fields]
    if not set(old.fields) <= set(new.fields) or n_old > n_new or not (lacking or n_old < n_new):
        return
    settings = dict(new.extraction) | {key: old.extraction.get(key) for key in ("activations", "target_layers")}
    # A plan for a dry run has not hashed the weights.
    identities = {key: value for key, value in old.identities.items() if key in new.identities}
    same = dataclasses.replace(new, fields=old.fields, extraction=settings, codec=old.codec, identities=old.identities)
    if same != old or identities != new.identities or old.codec["name"] != new.codec["name"]:
        return
    what = [*lacking, *([f"{n_new} decoder layers in target/"] if n_old < n_new else [])]
    command = add_command(str(plan.store), lacking, n_new if n_old < n_new else 0)
    raise OptionInvalid(f"{plan.store} lacks {', '.join(what)}; its parts are complete. Add with {command}.")


def _check_settings(path: StorePath, stored: StoreManifest) -> dict[str, Any]:
    """Return the settings of the extraction; refuse a store whose forwards cannot be repeated."""
    missing = [name for name in _SETTINGS if name not in stored.extraction]
    origin: Any = stored.extraction.get("imported_from")
    engine: Any = stored.extraction.get("engine")
    if missing or engine:
        how = f"does not say its {missing[0]}" if missing else f"was extracted by {engine['name']}"
        how = f"was imported from {origin}" if origin else how
        raise OptionInvalid(
            f"{path} {how}, so the forwards that made it cannot be repeated. Extract to a new store with all fields."
        )
    return dict(stored.extraction)


def _find_same_target(
    config: AddConfig, path: StorePath, stored: StoreManifest, progress: Progress | None
) -> tuple[Path, str]:
    """Return the target's folder and the device; refuse another target, tokenizer, template or kind of device."""
    revision = pinned_revision(recorded_sources(stored.extraction), "model", config.model, None)
    folder = resolve_model_folder(config.model, revision=revision)
    check_weights(folder, is_local=Path(config.model).expanduser().is_dir())
    wanted = str(stored.extraction["device"])
    device = config.device if config.device != "auto" else wanted
    kind = torch.device(pick_device(device)).type
    live = tokenizer_identities(folder, load_target_tokenizer(folder)) | weight_identities(folder, progress)
    others = {"extraction.device": (wanted, kind)} if kind != wanted else {}
    check_identities(path, stored.identities, live, others)
    return folder, device
