"""Convert a lossless store to a different codec, without running the target.

Some codecs must be fitted to a sample of the values before they can encode.
"""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import CodecUnknown, OptionInvalid
from ..files import check_room, walk
from ..machine import fix_sums
from ..moa.targets.bundle import FrozenTarget
from ..moa.targets.facts import load_facts
from ..storage.backend import backend_of, open_path
from ..storage.codecs.registry import StoreCodec
from ..storage.codecs.transform import TransformCodec
from ..storage.paths import StoreLike, StorePath
from ..storage.plan import numbers, row_numbers
from ..storage.read.store import ActivationStore
from ..storage.schema import TARGET_NAME, TOKENS, StoreManifest, to_float32
from ..storage.write.store import StoreWriter
from ..text import SILENT, Progress
from .compare import compare
from .forwards.calibrate import calibrate, learned_before, learning_on, sample_rows, target_rope
from .report import Provenance, Timings, WriteReport

# Approximate number of tokens in the sample for ``KVMetrics``, which measures how much errors in
# keys and values affect a drafter.
_METRIC_TOKENS = 60_000
# Minimum number of response tokens of a sequence in the sample for ``KVMetrics``. A shorter response
# has no room for draft rounds.
_MIN_RESPONSE = 8


class KVMetrics(Protocol):
    """Measures how much errors in keys and values affect the output of a drafter."""

    @property
    def identity(self) -> str:
        """Hash of the drafter. A run can be resumed only with a drafter that has the same hash."""

    def __call__(
        self, store: ActivationStore, codec: TransformCodec, sequences: Sequence[int], /
    ) -> Sequence[Sequence[np.ndarray]]:
        """Measure how much errors in the keys and values of a store matter to a drafter.

        Returns:
            One entry per layer group of the codec. The entry has two matrices: one for the keys,
            and one for the values. The cost of an error vector ``e`` is proportional to
            ``e @ matrix @ e``.
        """


def recode(
    store: StoreLike,
    codec: str,
    out: StoreLike,
    progress: Progress = SILENT,
    provenance: Provenance | None = None,
    kv_metrics: KVMetrics | None = None,
) -> WriteReport:
    """Write the content of a lossless store with another codec, or resume an earlier run.

    Without ``kv_metrics``, the new store is the same as if the extraction had used the new codec.
    Only with a transform codec, the values may differ in their rounding. With ``kv_metrics``, the
    codec is fitted in another way, so the encoded values differ.

    Args:
        store: a complete lossless store.
        codec: name of the new codec.
        out: the new store.
        progress: reports the tokens of each phase.
        kv_metrics: measures how much errors in keys and values matter to a drafter. The result is
            used to fit a transform codec for keys and values. If an earlier run has fitted the
            codec, nothing is measured.

    Returns:
        A report about the new store. It also says how much the values of some sequences differ
        between the two stores.

    Raises:
        OptionInvalid: the source store is not lossless, or ``out`` is the source store, or
            ``kv_metrics`` is given for a codec that does not use it.
    """
    fix_sums()
    start = time.perf_counter()
    target_store = open_path(out)
    check_room(target_store)
    with ActivationStore(store, require_complete=True) as source:
        if not source.codec.is_lossless:
            raise OptionInvalid(
                f"{source.path} has codec {source.codec.name}, but only a lossless store can be "
                "recoded, because the loss of a codec cannot be undone. Give a lossless store, or "
                "extract again with `codec=lossless`."
            )
        folders = str(target_store), str(source.path)
        # Compare local paths with ``samefile``. The URL of a bucket is not a local path, so URLs
        # are compared as strings.
        are_local = all(map(os.path.exists, folders))
        if os.path.samefile(*folders) if are_local else folders[0] == folders[1]:
            raise OptionInvalid(
                f"`out={target_store}` is the store that is recoded. Choose another folder."
            )
        metric = {} if kv_metrics is None else {"drafter.weights_sha256": kv_metrics.identity}
        manifest = dataclasses.replace(
            source.manifest, identities={**source.manifest.identities, **metric}
        )
        new = _learned_codec(source, codec, target_store, manifest, progress, kv_metrics)
        manifest = dataclasses.replace(manifest, codec=new.describe())
        plan = source.sequences
        with StoreWriter.create_or_resume(
            target_store, manifest, plan, new.files(), begins_anew=True
        ) as writer:
            rows = row_numbers(source.sequences)
            _copy_target(source, writer)
            timings = write_parts(
                writer,
                lambda row: _encoded(source, rows[row["sequence_id"]], writer.codec),
                progress.of("recode", "token"),
            )
            timings.wall_s = time.perf_counter() - start
            report = WriteReport.of(writer, timings)
            source_bytes = sum(commit.stored_bytes for commit in source.commits.values())
            report.lines = [
                f"codec        {new.name}, {report.stored_bytes / source_bytes:.3f} of the size of "
                f"{source.path}"
            ]
            writer.record_run(
                report.record(provenance)
                | {"recode": {"source": str(source.path), "codec": new.name}}
            )
    report.lines += compare(store, target_store, progress=progress).lines()
    return report


def _learned_codec(
    source: ActivationStore,
    name: str,
    out: StorePath,
    manifest: StoreManifest,
    progress: Progress,
    kv_metrics: KVMetrics | None,
) -> StoreCodec:
    """Return the codec of the new store. If the codec needs fitting, fit it to the source store.

    If an earlier run has already fitted the codec and written it to ``out``, the result is the
    codec of that run.
    """
    try:
        codec = StoreCodec(name, source.manifest.fields)
    except CodecUnknown as error:
        raise OptionInvalid(f"{error} Change `codec`.") from error
    kv = codec.fields.get("kv")
    if kv_metrics is not None and kv is None:
        raise OptionInvalid(
            f"{source.path} stores no keys and values, so a drafter cannot decide how many bits "
            "each of them gets. Leave out `drafter`."
        )
    if kv_metrics is not None and not isinstance(kv, TransformCodec):
        raise OptionInvalid(
            f"Codec {name} gives all keys and values the same number of bits, so `drafter` has no "
            "effect. Give `codec=transform:BITS`, or leave out `drafter`."
        )
    if not codec.learned:
        return codec
    if (before := learned_before(codec, out, manifest)) is not None:
        return before

    def read(row: int) -> dict[str, np.ndarray]:
        values: dict[str, np.ndarray] = {}
        for field in codec.learned:
            values[field] = to_float32(source.read(row, field), source.fields[field].dtype)
        values[TOKENS] = source.read(row, TOKENS)
        return values

    if kv_metrics is not None and isinstance(kv, TransformCodec):
        kv.rope = target_rope(load_facts(source.target_path))
        answered = np.flatnonzero(numbers(source.sequences, "n_response_tokens") >= _MIN_RESPONSE)
        if not len(answered):
            raise OptionInvalid(
                f"No sequence of {source.path} has a response of at least {_MIN_RESPONSE} tokens, "
                "but `drafter` needs such responses to measure which values the drafter depends "
                "on. Leave out `drafter`."
            )
        spread = sample_rows(source.lengths[answered], _METRIC_TOKENS)
        kv.metrics = kv_metrics(source, kv, answered[spread].tolist())
    # The measurement with ``kv_metrics`` needs much memory, so load the target's weights only after
    # the measurement.
    frozen = FrozenTarget.load(source.target_path, 0, sizes=source.manifest.target)
    learning = learning_on("cpu", backend_of(out).local_folder(), progress)
    calibrate(
        codec,
        source.lengths,
        read,
        frozen.facts,
        frozen.lm_head_weight,
        frozen.embed_tokens.weight,
        learning,
    )
    return codec


def _copy_target(source: ActivationStore, writer: StoreWriter) -> None:
    if not writer.has_target and backend_of(source.path / TARGET_NAME).exists():
        with writer.target() as folder:
            # Copy file by file. If the disk is full, callers expect an OSError, but shutil.copytree
            # would raise another error with a list of tuples.
            for root, _, names in walk(source.target_path):
                copy = folder / root.relative_to(source.target_path)
                copy.mkdir(exist_ok=True)
                for name in names:
                    shutil.copyfile(root / name, copy / name)


def _encoded(source: ActivationStore, i: int, codec: StoreCodec) -> dict[str, Any]:
    values = source[i]
    exact: dict[str, np.ndarray] = {}
    for name in values:
        if not codec.fields[name].is_identity:
            exact[name] = to_float32(values[name], source.fields[name].dtype)
    return {**values, **codec.encode(exact, values[TOKENS])}


def write_parts(
    store: StoreWriter,
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    progress: Progress,
) -> Timings:
    """Write and commit all pending parts of a store, sequence by sequence.

    Args:
        read: maps a row of the plan to a dict. The dict maps the name of each field to the values
            for ``PartWriter.write``.
        progress: reports the number of tokens in the phase of the caller.

    Returns:
        The duration, and the counts of written tokens and parts.
    """
    timings = Timings()
    start = time.perf_counter()
    n_tokens = sum(store.part_tokens.values())
    n_done = sum(store.part_tokens[part] for part in store.committed_parts())
    for part in store.pending_parts():
        with store.part(part) as out:
            for row in out.sequences.to_pylist():
                for name, values in read(row).items():
                    out.write(name, row["first_token"], values)
                n_done += row["n_tokens"]
                progress(n_done, n_tokens, f"part {part + 1}/{store.n_parts}")
            commit = out.commit()
            timings.add_part(commit.n_tokens, out.was_first)
    timings.extract_s = time.perf_counter() - start
    return timings
