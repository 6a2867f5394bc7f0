"""Add activations to a store: run its sequences through the target again and store new fields.

A part of a store is a range of sequences that is written and committed as a whole. The folder
``target/`` of a store contains the target's config, tokenizer, embeddings, final norm and LM head,
and optionally the target's last decoder layers.
"""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import OptionInvalid, StoreError, StoreMismatch, WorkerError
from ..machine import fix_sums
from ..moa.targets.bundle import held_layers
from ..moa.targets.facts import load_facts
from ..moa.targets.live import Target, load_target_tokenizer, pick_device
from ..storage.codecs.registry import StoreCodec
from ..storage.commit import has_parts
from ..storage.paths import StorePath
from ..storage.plan import numbers, read_plan, row_numbers, rows_where
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
from ..text import SILENT, Progress, activation_name, add_command, counted
from .audit import stored_tolerance
from .card import write_card
from .config import (
    ActivationSpec,
    AddConfig,
    parse_activations,
    parse_fields,
    resolve_encode_threads,
)
from .differences import Difference
from .estimate import ForwardPlan, WritePlan, field_specs
from .forwards.capture import capture
from .forwards.parts import Forwards, batches, run_parts, save_bundle
from .plan import (
    ExtractPlan,
    check_identities,
    find_same_target,
    recorded_config,
    tokenizer_identities,
)
from .report import Provenance, Timings, WriteReport

_SETTINGS = ("activations", "batch_tokens", "compute_dtype", "device", "dtype", "target_layers")


@dataclass(frozen=True)
class AddPlan(WritePlan):
    """The plan of adding fields to a store.

    ``table`` lists the sequences to process. If a committed part lacks a new field, the table
    contains all sequences of the part.
    """

    config: AddConfig
    # The store's manifest before the addition.
    stored: StoreManifest
    # The manifest that the addition will write. The codec of the new fields may not be fitted to
    # data yet. After it is fitted, the manifest's entry ``codec`` is replaced.
    manifest: StoreManifest
    codec: StoreCodec = field(repr=False)  # the store's codec for old and new fields together
    n_stored_tokens: int  # number of tokens in committed parts
    n_stored_parts: int  # number of committed parts

    @property
    def added(self) -> str:
        """A text with the names of the fields that are added."""
        return ", ".join(self.forward.spec.fields) or "no field, because the store has all of them"

    @property
    def n_parts(self) -> int:
        """Number of committed parts that lack new fields."""
        return len(self.table["part"].unique())

    def describe(self) -> str:
        """Return the plan as text."""
        bundle = (
            ""
            if self.bundle_layers is None
            else f"; target/ keeps {self.bundle_layers} decoder layers"
        )
        lines = [
            f"store        {self.store}: {', '.join(self.stored.extraction['activations'])} in "
            f"{self.forward.dtype}, codec {self.codec.name}; all of these are kept",
            f"adds         {self.added}{bundle}",
            f"tokens       {self.n_tokens:,} of {self.n_stored_tokens:,} to process, in "
            f"{self.n_parts:,} of {self.n_stored_parts:,} parts",
            *self.space(),
        ]
        return "\n".join(lines)


def add(
    config: AddConfig, progress: Progress = SILENT, provenance: Provenance | None = None
) -> WriteReport:
    """Add activations to every committed part of a store, or resume an earlier addition.

    Returns the report of the addition.

    Args:
        config: the settings of the addition.
        progress: reports the phases ``hash weights``, ``load the target``, ``learn`` and ``add``.
        provenance: entries for the JSON file of the run, such as the command line.

    Raises:
        MoaDataError: the store or the target cannot be used.
    """
    fix_sums()
    start = time.perf_counter()
    plan = plan_addition(config, progress)
    plan.check_disk()
    timings = Timings()
    fields = plan.forward.spec.fields
    with StoreWriter.create_or_resume(
        plan.store, plan.stored, read_plan(plan.store / PLAN_NAME)
    ) as writer:
        with ActivationStore(plan.store) as reader:
            agreement = _write_fields(plan, writer, reader, timings, progress)
        named: dict[str, Any] = {}
        # If the store has no record of its extraction, `recorded_config` raises WorkerError. In
        # that case, keep the old dataset card. A new card would need the dataset and the licences,
        # which only this record contains.
        with contextlib.suppress(WorkerError):
            extraction = plan.manifest.extraction
            recorded = recorded_config(plan.store).replaced(
                model=config.model,
                activations=tuple(dict.fromkeys(map(activation_name, extraction["activations"]))),
                target_layers=extraction["target_layers"],
            )
            write_card(plan.store, recorded.model, recorded.dataset, recorded.storage.licences)
            # Record the settings of an extraction that would write the old and the new fields
            # together. `repair` extracts damaged parts with these settings.
            named = {"config": recorded.named()}
        timings.wall_s = time.perf_counter() - start
        report = _report(plan, writer, timings, agreement)
        if fields or plan.bundle_layers is not None:
            addition = {"added": config.named() | {"fields": fields, "agreement": agreement}}
            writer.record_run(report.record(provenance) | addition | named)
    return report


def _write_fields(
    plan: AddPlan,
    writer: StoreWriter,
    reader: ActivationStore,
    timings: Timings,
    progress: Progress,
) -> str:
    """Write the store's folder ``target/``, then new fields of all parts, and the manifest last.

    Returns:
        A text about how closely the target reproduces the stored last hidden states. The text is
        empty if the store does not contain last hidden states, or if no part lacks new fields.
    """
    agreement = ""
    forward = plan.forward
    n_layers = int(plan.manifest.extraction["target_layers"])
    fields = forward.spec.fields
    needs_bundle = not writer.has_target or held_layers(reader.target_path) < n_layers
    if fields or needs_bundle:
        target = forward.load_target(progress)
    if needs_bundle:
        save_bundle(writer, target, forward.folder, n_layers)
    if forward.codec.learned and not load_next_basis(plan.store, plan.codec, writer.codec):
        _learn(plan, writer, reader, target, progress)
    manifest = replace(plan.manifest, codec=plan.codec.describe()) if fields else plan.manifest
    addition = StoreAddition(writer, manifest, plan.codec)
    if pending := addition.pending_parts():
        rows = row_numbers(reader.sequences)
        first = next(batches(writer.part_sequences(pending[0]), forward.batch_tokens))
        first_rows = [rows[key] for key in first["sequence_id"].to_pylist()]
        agreement = _compare(plan, reader, target, first_rows)
        # Use the same batches as the extraction. If the device, the libraries and the number of
        # threads are also the same, the new fields are bit-identical to the fields that a single
        # extraction of all fields would write. Otherwise, the last bits of the values may differ.
        forwards = Forwards(
            replace(forward, codec=plan.codec),
            target,
            lambda key: (reader.read(rows[key], TOKENS), reader.read(rows[key], "response_mask")),
        )
        run_parts(forwards, addition, pending, timings, progress.of("add", "token"))
    addition.finish()  # Publish the manifest, so that readers see the new fields.
    return agreement


def _learn(
    plan: AddPlan,
    writer: StoreWriter,
    reader: ActivationStore,
    target: Target,
    progress: Progress,
) -> None:
    """Fit the codec of the new fields to a sample of the store's sequences.

    The codec of the old fields was fitted to the same sample.
    """
    if n_pending := len(writer.pending_parts()):
        raise OptionInvalid(
            f"{n_pending} parts of {plan.store} are not extracted yet, but the codec of "
            f"{plan.added} must be fitted to sequences of all parts. Complete the store with the "
            "command that made it, then run this command again."
        )
    plan.learn(target, reader.lengths, lambda row: reader.read(row, TOKENS), progress)
    save_next_basis(writer, plan.codec)


def _compare(plan: AddPlan, reader: ActivationStore, target: Target, rows: list[int]) -> str:
    """Run the target on a batch of sequences, and compare ``hidden/last`` with the stored values.

    Args:
        rows: indices of the sequences in the store.

    Returns:
        A text about the difference. The text is empty if ``hidden/last`` is not stored.

    Raises:
        OptionInvalid: the difference is larger than rounding can explain.
    """
    if HIDDEN_LAST not in reader.fields:
        return ""
    tokens = [reader.read(row, TOKENS) for row in rows]
    dtype = plan.forward.dtype
    # If keys and values are captured, other kernels with other rounding may run. So if the store has
    # keys and values, capture them here, too. The same kernels then run as in the extraction.
    spec = ActivationSpec(parse_fields(reader.fields).kv, True, ())
    live = capture(
        target.model, tokens, spec, getattr(torch, dtype), plan.forward.uses_cache
    ).fields[HIDDEN_LAST]
    difference = Difference()
    for row, computed in zip(rows, live.float().cpu(), strict=True):
        stored = torch.from_numpy(to_float32(reader.read(row, HIDDEN_LAST), dtype))
        difference.add(computed[: len(stored)], stored)
    relative = difference.relative
    if not relative <= stored_tolerance(reader, dtype):
        raise OptionInvalid(
            f"The last hidden states (hidden/last) that {plan.config.model} computes differ by "
            f"{relative:.1%} from those in {plan.store}, which is more than rounding explains. "
            "Nothing was written, because new fields would not match the old ones. Install the "
            "release of transformers that the store was made with, and compare the store with the "
            "target by `moa-data audit`."
        )
    return (
        f"hidden/last of the first batch differs from the store by a relative error of "
        f"{relative:.1e}"
    )


def _report(plan: AddPlan, writer: StoreWriter, timings: Timings, agreement: str) -> WriteReport:
    report = WriteReport.of(writer, timings)
    report.lines = [f"added        {plan.added}"]
    if plan.bundle_layers is not None:
        report.lines.append(
            f"bundle       wrote {TARGET_NAME}/ with {plan.bundle_layers} decoder layers"
        )
    if agreement:
        report.lines.append(f"rounding     {agreement}")
    if n_pending := len(writer.pending_parts()):
        report.lines.append(
            f"pending      {counted(n_pending, 'part')} must still be extracted, with the old and "
            "the new fields"
        )
    return report


def plan_addition(config: AddConfig, progress: Progress = SILENT) -> AddPlan:
    """Plan an addition. The target does not run, and nothing is written.

    Args:
        progress: reports the bytes of the target's weights that are hashed.

    Raises:
        OptionInvalid: the store was not made by `extract`, or the activations are unknown.
        StoreMismatch: the store was made with another target, or on another kind of device.
    """
    with ActivationStore(config.store) as reader:
        path = reader.path
        stored = reader.manifest
        sequences = reader.sequences
        commits = reader.commits.values()
        codec = reader.codec
        lengths = reader.lengths
    _check_settings(path, stored)
    settings: Mapping[str, Any] = stored.extraction
    folder, device = _find_same_target(config, path, stored, progress)
    facts = load_facts(folder)
    n_layers = max(settings["target_layers"], config.target_layers)
    if config.target_layers:
        facts.layer_sizes()  # Raises an error if no drafter can use the target's last layers.
    old = parse_fields(spec.name for spec in stored.fields).fields
    wanted = (*map(activation_name, old), *config.activations)
    kv_fields = tuple(group.field for group in facts.kv_groups)
    full = parse_activations(wanted, n_layers, facts.n_layers, kv_fields)
    new = parse_fields(name for name in full.fields if name not in old)
    specs = field_specs(full, facts, settings["dtype"])
    if not set(stored.fields) <= set(specs):
        raise OptionInvalid(
            f"{path} describes its fields in another way than this release of moa-data, so no "
            "fields can be added to it. Extract a new store with all activations that you need."
        )
    codec = extended_codec(codec, specs)
    forward = ForwardPlan(
        folder=folder,
        facts=facts,
        spec=new,
        codec=codec.only(new.fields),
        device=device,
        dtype=settings["dtype"],
        compute_dtype=settings["compute_dtype"],
        batch_tokens=settings["batch_tokens"],
        longest_tokens=int(lengths.max(initial=0)),
        uses_cache=full.kv,
        n_encode_threads=resolve_encode_threads(config.encode_threads),
    )
    lacking = [commit.part for commit in commits if lacking_fields(commit, new.fields)]
    if lacking:
        forward.check_memory()
    return AddPlan(
        store=path,
        forward=forward,
        table=rows_where(sequences, np.isin(numbers(sequences, "part"), lacking)),
        bundle_layers=n_layers if n_layers > settings["target_layers"] else None,
        present_bytes=0,
        config=config,
        stored=stored,
        manifest=replace(
            stored,
            fields=specs,
            extraction={**settings, "activations": list(full.fields), "target_layers": n_layers},
        ),
        codec=codec,
        n_stored_tokens=int(lengths.sum()),
        n_stored_parts=len(commits),
    )


def refuse_addition(plan: ExtractPlan) -> None:
    """Refuse an extraction to an existing store if the user should run `add` instead.

    Raises:
        OptionInvalid: the store equals the plan, except that some fields or decoder layers are
            missing in the store. The command `add` can write the missing ones.
    """
    # `extract` skips committed parts, so only `add` can write more fields for these parts. If no
    # part is committed, `extract` writes all fields.
    if not has_parts(plan.store):
        return
    try:
        old = read_manifest(plan.store)
        new = plan.manifest
    except StoreError:
        return  # The store is damaged. Refuse nothing here: the writer repairs or refuses it later.
    n_old = old.extraction.get("target_layers", -1)
    n_new = new.extraction["target_layers"]
    n_added = n_new if n_old < n_new else 0
    lacking = [spec.name for spec in new.fields if spec not in old.fields]
    if not set(old.fields) <= set(new.fields) or n_old > n_new or not (lacking or n_added):
        return
    settings = dict(new.extraction)
    for key in ("activations", "target_layers"):
        settings[key] = old.extraction.get(key)
    # Identities are hashes of the inputs. A dry run does not hash the target's weights, so its plan
    # lacks this hash. If the plan lacks a hash, take it from the store, so that it is not compared.
    identities = {**old.identities, **new.identities}
    same = replace(
        new, fields=old.fields, extraction=settings, codec=old.codec, identities=identities
    )
    if same != old or old.codec["name"] != new.codec["name"]:
        return
    raise OptionInvalid(
        f"{plan.store} lacks fields or decoder layers that this command asks for, and `extract` "
        "does not process finished parts again. Add what is missing with "
        f"{add_command(str(plan.store), lacking, n_added)}."
    )


def _check_settings(path: StorePath, stored: StoreManifest) -> None:
    """Check whether the target of a store can be run in the same way as in the extraction.

    Raises:
        OptionInvalid: the manifest lacks a setting of the target's forward, or the activations were
            imported or computed with another inference engine.
    """
    extraction: Mapping[str, Any] = stored.extraction
    missing = [name for name in _SETTINGS if name not in extraction]
    if "imported_from" in extraction:
        how = f"was imported from files of {extraction['imported_from']}"
    elif missing:
        how = f"does not record the setting {missing[0]}"
    elif "engine" in extraction:
        how = f"was extracted with {extraction['engine']['name']}"
    else:
        return
    raise OptionInvalid(
        f"{path} {how}, so moa-data cannot run the target in the same way again, and cannot add "
        "activations. Extract a new store with all activations that you need."
    )


def _find_same_target(
    config: AddConfig, path: StorePath, stored: StoreManifest, progress: Progress
) -> tuple[Path, str]:
    """Find the target that a store was made with, and a device of the same kind.

    Returns:
        The target's folder, and the device that runs the target.

    Raises:
        StoreMismatch: the store was made with another target, tokenizer, chat template or kind of
            device.
    """
    wanted = str(stored.extraction["device"])
    device = config.device if config.device != "auto" else wanted
    if (kind := torch.device(pick_device(device)).type) != wanted:
        advice = "Give a `device` of the kind (CPU or GPU) that the store was extracted with."
        raise StoreMismatch(str(path), {"extraction.device": (wanted, kind)}, advice)
    folder = find_same_target(config.model, path, stored, progress)
    tokenizer = tokenizer_identities(folder, load_target_tokenizer(folder))
    check_identities(path, stored.identities, tokenizer)
    return folder, device
