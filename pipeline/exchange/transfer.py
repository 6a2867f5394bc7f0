"""Export stores to other projects' file formats, and import files in these formats to new stores.

A store can also be exported to a Parquet index. An index lists the sequences of a store without
their activations, so an index cannot be imported.
"""

import copy
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ...errors import DatasetError, OutputOccupied
from ...files import (
    parse_object,
    refuse_other_files,
    refuse_other_inputs,
    replacing,
    whole_number,
    write_atomic,
)
from ...moa.targets.bundle import FrozenTarget, hash_target, save_target_bundle
from ...moa.targets.chat_tokens import TokenizedChat
from ...moa.targets.facts import load_facts
from ...moa.targets.live import Target, load_target_tokenizer, resolve_model_folder
from ...moa.targets.proof import prove_norm
from ...storage import schema
from ...storage.backend import backend_of, open_path
from ...storage.codecs.registry import LOSSLESS, StoreCodec
from ...storage.commit import has_parts
from ...storage.plan import PLAN_SCHEMA, column, numbers, plan_counts, plan_parts, text_column
from ...storage.read.store import ActivationStore
from ...storage.write.store import StoreWriter
from ...text import SILENT, Progress, counted
from ..card import write_card
from ..recode import write_parts
from ..report import WriteReport
from ..sequences import Sequences, TokensAndMask
from .config import ExportConfig, ImportConfig
from .formats import FileFormat, make_format, write_rows
from .torch_dataset import ActivationDataset, check_fields

_N_WRITERS = 8
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_INDEX_ROWS = 1024
# Key in the metadata of a Parquet index file. The value of this key identifies the store whose
# sequences the file lists.
_STORE_KEY = b"moa_data.store"
# JSON file in an exported folder that records the format, the fields and the store. Other projects
# do not read this file.
RECORD_NAME = "export.json"


def export_store(config: ExportConfig, progress: Progress = SILENT) -> str:
    """Write the sequences of a store in another project's file format, or as a Parquet index.

    The order of the sequences is kept. If an earlier export of this store was interrupted, its
    files are kept, and the missing files are written. An older index of this store is replaced.

    Returns:
        A line of text about the files that were written.

    Raises:
        SelectionInvalid: the store lacks a field that the file format needs.
        OutputOccupied: the folder holds files of another origin, or an export of another store.
    """
    folder = Path(config.out).expanduser()
    with ActivationStore(config.store, require_complete=True) as store:
        n = min(config.max_sequences or len(store), len(store))
        if config.format == "index":
            return _write_index(store, folder, n, progress)
        n_layers = int(store.manifest.target["n_layers"])
        if config.kv:
            store.refuse_groups("`kv`")
        windows = load_facts(store.target_path).layer_windows if config.kv else []
        last_layers: dict[str, int] = {}
        for layer, window in enumerate(windows):
            last_layers["global" if window is None else "local"] = layer
        file_format = make_format(config.format, config.layers, n_layers, last_layers)
        check_fields(store, file_format.fields, file_format.name)
        _claim(folder, file_format, store, n)
        dataset = ActivationDataset(store, file_format.fields, layers=file_format.kv_layers or None)
        sizes = list[int]()
        exporting = progress.of(f"export to {file_format.name}", "sequence")
        pending = deque[Future[None]]()
        # Write several files in parallel, because a disk syncs several small files in about the
        # time that it needs for one.
        with ThreadPoolExecutor(_N_WRITERS) as threads:
            for i in range(0 if config.rows_only else n):
                path = file_format.file(folder, i)
                tokens = store.read(i, "tokens")
                if not path.exists():
                    data = file_format.encode(tokens, store.read(i, "response_mask"), dataset[i])
                    path.parent.mkdir(parents=True, exist_ok=True)
                    pending.append(threads.submit(write_atomic, path, data))
                    sizes.append(len(data))
                elif not np.array_equal(file_format.read_tokens(path), tokens):
                    raise OutputOccupied(
                        f"{path} exists already, and its tokens differ from those of sequence {i} "
                        "of the store. Choose another `out`, or delete the file."
                    )
                if len(pending) > _N_WRITERS:
                    pending.popleft().result()
                exporting(i + 1, n)
            for future in pending:
                future.result()
        # Write the Arrow dataset last, because its state.json marks the folder as complete.
        if file_format.name == "speculators":
            texts = ((store.read(i, "tokens"), store.read(i, "response_mask")) for i in range(n))
            write_rows(folder, texts)
    if config.rows_only:
        return (
            f"{folder} contains the rows of {counted(n, 'sequence')} for {config.format}, "
            "without hidden states"
        )
    return (
        f"{folder} contains {counted(n, 'sequence')} for {config.format}, from the fields "
        f"{', '.join(file_format.fields)}. This run wrote {len(sizes):,} of them "
        f"({sum(sizes) / 1e6:,.1f} MB), {n - len(sizes):,} existed already."
    )


def _write_index(
    store: ActivationStore, path: Path, n_sequences: int, progress: Progress = SILENT
) -> str:
    """Write the index of the first ``n_sequences`` sequences of a store.

    An older index of the same store is replaced.

    Returns:
        A line of text about the index.

    Raises:
        OutputOccupied: the path holds a file that is not an index, or the index of another store.
    """
    identity = hashlib.sha256(store.manifest.to_json().encode()).hexdigest()
    _check_index(path, identity)
    # The index says where each sequence starts in the store's arrays. The first token of a sequence
    # is in row `part * part_rows + first_token` (docs/format.md), so read `part_rows`.
    array = store.path / schema.PARTS_NAME / schema.TOKENS / schema.ZARR_NAME
    part_rows = parse_object(backend_of(array).read())["attributes"]["part_rows"]
    has_tokenizer = (store.target_path / "tokenizer.json").is_file()
    tokenizer = load_target_tokenizer(store.target_path) if has_tokenizer else None
    about = {_STORE_KEY: json.dumps({"sha256": identity, **store.manifest.identities})}
    path.parent.mkdir(parents=True, exist_ok=True)
    indexing = progress.of("index", "sequence")
    with replacing(path) as partial:
        columns = _index_rows(store, range(1), part_rows, tokenizer).schema.with_metadata(about)
        with partial.open("wb") as sink:
            with pq.ParquetWriter(sink, columns, compression="zstd") as file:
                for start in range(0, n_sequences, _INDEX_ROWS):
                    chosen = range(start, min(start + _INDEX_ROWS, n_sequences))
                    file.write_table(_index_rows(store, chosen, part_rows, tokenizer))
                    indexing(chosen.stop, n_sequences)
            os.fsync(sink.fileno())
    return (
        f"{path} lists {counted(n_sequences, 'sequence')}, in the columns "
        f"{', '.join(columns.names)}"
    )


def _check_index(path: Path, identity: str) -> None:
    if not path.exists():
        return
    try:
        about = parse_object((pq.read_schema(path).metadata or {}).get(_STORE_KEY, b"{}"))
    except (OSError, pa.ArrowException, ValueError):
        about = {}
    if about.get("sha256") != identity:
        raise OutputOccupied(
            f"{path} exists already and is not the index of this store. Choose another `out`."
        )


def _index_rows(store: ActivationStore, chosen: range, part_rows: int, tokenizer: Any) -> pa.Table:
    plan = store.sequences.slice(chosen.start, len(chosen))
    lengths = numbers(plan, "n_tokens")
    texts = store.read_batch(chosen, (schema.TOKENS, "response_mask"))
    is_token = np.arange(texts[schema.TOKENS].shape[1]) < lengths[:, None]
    offsets = column(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    rows = numbers(plan, "part").astype(np.int64) * part_rows + numbers(plan, "first_token")
    columns = {"position": column(np.arange(chosen.start, chosen.stop)), "row": column(rows)}
    for name in PLAN_SCHEMA.names:
        columns[name] = plan[name]
    for name, values in texts.items():
        columns[name] = pa.ListArray.from_arrays(offsets, column(values[is_token]))
    if tokenizer is not None:
        columns["text"] = text_column(tokenizer.batch_decode(columns[schema.TOKENS].to_pylist()))
    return pa.table(columns)


def _claim(folder: Path, file_format: FileFormat, store: ActivationStore, n_sequences: int) -> None:
    """Claim the output folder for this export by writing ``export.json`` into it.

    The folder must be empty, or hold an earlier export of the same store with the same settings.
    The number of sequences may be larger than in the earlier export.

    Raises:
        OutputOccupied: the folder holds other files or another export.
    """
    path = folder / RECORD_NAME
    record = {
        "format": file_format.name,
        "fields": list(file_format.fields),
        "store_sha256": hashlib.sha256(store.manifest.to_json().encode()).hexdigest(),
        "target": dict(store.manifest.target),
        "identities": dict(store.manifest.identities),
        "n_sequences": n_sequences,
    }
    if path.is_file():
        try:
            recorded = parse_object(path.read_bytes())
            n_recorded = whole_number(recorded.get("n_sequences"), "n_sequences")
        except ValueError as error:
            raise OutputOccupied(
                f"{path} is not the record of an export ({error}). Choose another `out`."
            ) from error
        # Compare the entry ``store_sha256``, which is the hash of the store's manifest. The entries
        # ``target`` and ``identities`` are copied from this manifest, so they need not be compared.
        free_to_change = {"target", "identities"}
        if n_recorded <= n_sequences:
            free_to_change.add("n_sequences")
        refuse_other_inputs(
            folder,
            recorded,
            record,
            free_to_change,
            advice="Give the earlier store and settings, or choose another `out`.",
        )
    else:
        refuse_other_files(folder, "an earlier export of this program")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(record, indent=2, sort_keys=True) + "\n").encode())


def import_folder(
    config: ImportConfig,
    progress: Progress = SILENT,
    provenance: Mapping[str, Any] | None = None,
) -> WriteReport:
    """Create a store from another project's files, or continue an import that was interrupted.

    Raises:
        DatasetError: an option or a file cannot be used.
        StoreMismatch: the output folder holds a store that was made from other inputs.
    """
    folder = Path(config.folder).expanduser()
    if not folder.is_dir():
        raise DatasetError(
            f"{folder} is not a folder. Point to the folder with the files of {config.format}."
        )
    target_folder = resolve_model_folder(config.model)
    facts = load_facts(target_folder)
    if config.target_layers:
        facts.layer_sizes()  # Raises an error if no drafter can use the target's last layers.
    file_format = make_format(config.format, config.layers, facts.n_layers)
    paths = file_format.files(folder)[: config.max_sequences]
    sequences = _read_texts(file_format, paths, facts.vocab_size, progress)
    plan = plan_parts(sequences.table(), config.part_tokens, schema.ALIGNMENT_TOKENS)
    specs = _field_specs(file_format, paths[0], facts.hidden_size)
    manifest = _manifest(config, file_format, sequences, plan, specs, facts.sizes, target_folder)
    dtype = getattr(facts.config, "dtype", None) or torch.float32
    load = partial(Target.load, str(target_folder), dtype, "cpu")
    target = None
    norm = None
    # If the files contain the last hidden states before the final norm, the import applies the
    # norm. For targets with Llama layers, the norm is read later, from the new store's folder
    # target/. Other families have other kinds of norm, so for them the norm is copied from the
    # loaded target.
    if not (file_format.gives_last or facts.family.has_llama_layers):
        target = load()
        norm = copy.deepcopy(prove_norm(target)).float()
    elif not has_parts(open_path(config.out)):
        # Load the target now, before the store is created. If the target cannot be loaded, no
        # unfinished store is left behind.
        target = load()
    with StoreWriter.create_or_resume(config.out, manifest, plan, begins_anew=True) as store:
        if not store.has_target:
            target = target or load()
            with store.target() as bundle:
                save_target_bundle(target.model, target.tokenizer, bundle, config.target_layers)
        if not file_format.gives_last and norm is None:
            with ActivationStore(store.path) as reader:
                norm = FrozenTarget.load(reader.target_path, sizes=facts.sizes).norm
        timings = write_parts(
            store,
            lambda row: _read_sequence(
                file_format,
                paths[row["source_row"]],
                sequences.text(row["sequence_id"]),
                specs,
                norm,
            ),
            progress.of(f"import from {file_format.name}", "token"),
        )
        licences = (config.target_license, config.dataset_license)
        command = f"moa-data import --format {config.format}"
        write_card(store.path, config.model, config.folder, licences, command)
        report = WriteReport.of(store, timings)
        n_left_out = counted(sequences.n_duplicates, "duplicate")
        fields = ", ".join(spec.name for spec in specs)
        report.lines = [f"imported     {fields} from {file_format.name}; {n_left_out} left out"]
        store.record_run(report.record(provenance) | {"import": config.named()})
    return report


def _read_texts(
    file_format: FileFormat, paths: Sequence[Path], vocab_size: int, progress: Progress
) -> Sequences:
    """Return the token ids and response masks of all files, with one sequence per file.

    Duplicates are counted and left out.

    Raises:
        DatasetError: the token ids or the mask of a file cannot be used.
    """
    sequences = Sequences()
    has_response = False
    reading = progress.of("read tokens", "row")
    for row, path in enumerate(paths):
        tokens, mask = file_format.read_text(path)
        if not len(tokens) or len(tokens) != len(mask):
            raise DatasetError(
                f"{path} has {len(tokens)} token ids and a loss mask of length {len(mask)}. "
                "Expected the same number of both, at least 1. Make the file again."
            )
        if not np.isin(mask, (0, 1)).all():
            raise DatasetError(
                f"The loss mask in {path} contains the value {mask.max()}, expected only 0 and 1. "
                "Make the file again."
            )
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise DatasetError(
                f"{path} has token ids {tokens.min()} to {tokens.max()}, but the target's "
                f"vocabulary has {vocab_size:,} tokens. Give the `model` that the files were made "
                "with."
            )
        has_response = has_response or bool(mask.any())
        chat = TokenizedChat(tokens.astype(np.int32), mask.astype(np.uint8), truncated=False)
        sequences.add(row, chat)
        reading(row + 1, len(paths))
    if not has_response:
        raise DatasetError(
            f"The loss masks of all {len(paths)} files, such as {paths[0]}, are 0 at every token, "
            "so there is nothing to learn. Make the files again with masks that are 1 in the "
            "answers."
        )
    return sequences


def _field_specs(
    file_format: FileFormat, first: Path, target_width: int
) -> tuple[schema.FieldSpec, ...]:
    values = next(iter(file_format.read_hidden(first).values()))
    if values.dtype not in _DTYPES or values.shape[1] != target_width:
        raise DatasetError(
            f"{first} contains hidden states of type {values.dtype} and width {values.shape[1]}, "
            f"expected one of the types {', '.join(_DTYPES.values())}, and the target's width "
            f"{target_width}. Check `model`."
        )
    width = values.shape[1]
    dtype = _DTYPES[values.dtype]
    hidden: list[schema.FieldSpec] = []
    for name in dict.fromkeys((schema.HIDDEN_LAST, *file_format.fields)):
        hidden.append(schema.hidden_field(name.removeprefix("hidden/"), width, dtype))
    return (schema.tokens_field(), schema.response_mask_field(), *hidden)


def _manifest(
    config: ImportConfig,
    file_format: FileFormat,
    sequences: Sequences,
    plan: pa.Table,
    specs: tuple[schema.FieldSpec, ...],
    sizes: Mapping[str, Any],
    target_folder: Path,
) -> schema.StoreManifest:
    counts = plan_counts(plan)
    identities = {f"target.{key}": value for key, value in hash_target(target_folder).items()}
    dataset = hashlib.sha256("\n".join(sequences.ids).encode()).hexdigest()
    last = (
        "as in the files"
        if file_format.gives_last
        else "final norm applied in float32 to the files"
    )
    return schema.StoreManifest(
        fields=specs,
        target=sizes,
        identities=identities | {"dataset.sha256": dataset},
        extraction={
            "activations": [spec.name for spec in specs[2:]],
            "dtype": specs[-1].dtype,
            "hidden_last": last,
            "imported_from": file_format.name,
            "max_length": int(numbers(plan, "n_tokens").max()),
            "max_sequences": config.max_sequences,
            "part_tokens": config.part_tokens,
            "target_layers": config.target_layers,
        },
        codec=StoreCodec(LOSSLESS, specs).describe(),
        n_sequences=counts["n_sequences"],
        n_parts=counts["n_parts"],
        n_tokens=counts["n_tokens"],
        alignment_tokens=schema.ALIGNMENT_TOKENS,
    )


def _read_sequence(
    file_format: FileFormat,
    path: Path,
    text: TokensAndMask,
    specs: tuple[schema.FieldSpec, ...],
    norm: Callable[[Tensor], Tensor] | None,
) -> dict[str, np.ndarray]:
    tokens, mask = text
    hidden = file_format.read_hidden(path)
    if norm is not None:
        # Files of speculators contain the last hidden state before the final norm. Apply the norm
        # in float32, and round the result to the files' dtype.
        last = hidden[file_format.fields[-1]]
        with torch.inference_mode():
            hidden[schema.HIDDEN_LAST] = norm(last.float()).to(last.dtype)
    fields = {"tokens": tokens, "response_mask": mask}
    for spec in specs[2:]:
        values = hidden[spec.name]
        shape = [len(tokens), *spec.token_shape]
        if _DTYPES.get(values.dtype) != spec.dtype or list(values.shape) != shape:
            raise DatasetError(
                f"The field {spec.name} in {path} has type {values.dtype} and shape "
                f"{list(values.shape)}, expected {spec.dtype} and {shape}, as in the first file. "
                "Make the file again."
            )
        if not bool(torch.isfinite(values).all()):
            raise DatasetError(
                f"The field {spec.name} in {path} contains NaN or infinity. Make the file again, "
                "or delete it."
            )
        values = values.contiguous()
        if values.dtype == torch.bfloat16:
            values = values.view(torch.uint16)
        fields[spec.name] = values.numpy()
    return fields
