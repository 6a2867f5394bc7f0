"""The plan of an extraction, complete before the first forward: what will be written, where, and what it costs."""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..errors import OptionInvalid
from ..moa.targets.bundle import load_target_config, target_sizes
from ..moa.targets.live import load_target_tokenizer, pick_device, resolve_model_folder
from ..storage.codecs.registry import StoreCodec
from ..storage.codecs.transform.calibration import MAX_FEATURES
from ..storage.errors import CodecUnknown
from ..storage.parts.plan import plan_counts, plan_parts
from ..storage.schema import (
    ALIGNMENT_TOKENS,
    FieldSpec,
    StoreManifest,
    hidden_field,
    kv_field,
    response_mask_field,
    tokens_field,
)
from ..text import Progress, format_bytes, format_hours
from .config import ActivationSpec, ExtractConfig, parse_activations
from .dataset import ChatSource
from .errors import NotEnoughDisk
from .identity import check_weights, collect_identities
from .prompts import check_template
from .rendering import TEMPLATE_TIME, asked_the_time
from .sequences import Sequences, read_sequences

FORWARD_EFFICIENCY = 0.5
"""Assumed speed of the forward as a fraction of a large matrix product on the same device."""


@dataclass(frozen=True)
class ExtractPlan:
    """What an extraction will do.

    Attributes:
        spec: the activations, layers resolved.
        manifest: content of store.json; of a codec that learns, without what it will learn.
        table: plan.parquet: sequence_id, source_row, n_tokens, n_response_tokens, part, first_token.
        sequences: the tokens and masks.
        dataset: the dataset, and which split and files of it are read, for people.
        compute_dtype: dtype of the forward, resolved.
        batch_tokens: tokens per forward, resolved.
        raw_bytes: field -> bytes of the planned tokens before compression.
        stored_bytes: expected bytes on disk, target/ included.
        free_bytes: free bytes on the disk of the output folder.
        present_bytes: bytes that the output folder already holds.
        forward_s: expected seconds of forwards.
        n_parameters: weights of the decoder layers.
        matmul_flops: measured floating point operations per second of a matrix product on the device.
    """

    config: ExtractConfig
    spec: ActivationSpec
    manifest: StoreManifest
    codec: StoreCodec = field(repr=False)
    table: pa.Table = field(repr=False)
    sequences: Sequences = field(repr=False)
    dataset: str
    folder: Path
    device: str
    compute_dtype: str
    batch_tokens: int
    raw_bytes: Mapping[str, int]
    stored_bytes: int
    free_bytes: int
    present_bytes: int
    forward_s: float
    n_parameters: int
    matmul_flops: float

    @property
    def n_sequences(self) -> int:
        """Sequences to be stored."""
        return self.manifest.n_sequences

    @property
    def n_tokens(self) -> int:
        """Tokens to be stored, without alignment padding."""
        return self.manifest.n_tokens

    @property
    def n_parts(self) -> int:
        """Parts of the store."""
        return self.manifest.n_parts

    @property
    def rejections(self) -> Counter[str]:
        """Reason -> rows that give no sequence."""
        return self.sequences.rejections

    def describe(self) -> str:
        """The plan as text for people."""
        counts, storage = self.sequences, self.config.storage
        n_response = int(self.table["n_response_tokens"].to_numpy().sum())
        lengths = np.sort(self.table["n_tokens"].to_numpy())
        raw = sum(self.raw_bytes.values())
        lines = [
            f"target       {self.config.model} ({self.manifest.target['architecture']}, "
            f"{self.manifest.target['n_layers']} layers, {self.manifest.target['n_kv_heads']} KV heads of "
            f"{self.manifest.target['head_dim']}, width {self.manifest.target['hidden_size']})",
            f"dataset      {self.dataset}: {counts.n_rows:,} rows read",
            f"sequences    {self.n_sequences:,} ({counts.n_truncated:,} cut at {self.config.data.max_length:,} tokens, "
            f"{counts.n_duplicates:,} duplicates left out)",
            f"rejected     {counts.n_rejected:,} rows" + "".join("\n" + line for line in counts.rejection_lines()),
            f"tokens       {self.n_tokens:,} ({n_response:,} in responses), length median "
            f"{int(lengths[len(lengths) // 2]):,}, longest {int(lengths[-1]):,}",
            f"fields       {', '.join(self.raw_bytes)} in {storage.dtype}, codec {storage.codec}",
            f"raw          {format_bytes(raw)} ({raw / self.n_tokens:,.0f} bytes per token)",
            f"on disk      about {format_bytes(self.stored_bytes)} "
            f"({', '.join(f'{name} {bits:.1f} bits per value' for name, bits in self._expected_bits().items())})",
            f"parts        {self.n_parts:,} of up to {storage.part_tokens:,} tokens",
            f"free disk    {format_bytes(self.free_bytes)} at {existing_parent(Path(self.config.out))}"
            + (f"; the store already holds {format_bytes(self.present_bytes)}" if self.present_bytes else ""),
            f"time         about {format_hours(self.forward_s)} of forwards on {self.device} in {self.compute_dtype} "
            f"(2 x {self.n_parameters / 1e6:,.1f} M weights x tokens at {FORWARD_EFFICIENCY:.0%} of the measured "
            f"{self.matmul_flops / 1e12:.2f} TFLOP/s)",
        ]
        return "\n".join(lines)

    def _expected_bits(self) -> dict[str, float]:
        """Field -> expected stored bits per value, without the fields of one number per token."""
        return {name: codec.expected_bits() for name, codec in self.codec.fields.items() if codec.spec.token_shape}

    def check_disk(self) -> None:
        """Refuse what the disk cannot hold."""
        needed = max(0, self.stored_bytes - self.present_bytes)
        if needed > self.free_bytes:
            raise NotEnoughDisk(
                f"The store needs about {format_bytes(needed)}, but {existing_parent(Path(self.config.out))} has "
                f"{format_bytes(self.free_bytes)} free. Free some space, choose another --out, lower --max-sequences, "
                "or store fewer --activations."
            )


def build_plan(config: ExtractConfig, progress: Progress | None = None, with_weights: bool = False) -> ExtractPlan:
    """Read the dataset and the tokenizer and decide everything; no forward, nothing written.

    Args:
        progress: called with (chats done, chats in all, message).
        with_weights: also hash the target's weights, which identifies the store; a hub target is downloaded.

    Returns:
        The plan; equal inputs give equal plans.

    Raises:
        PipelineError: configuration, dataset or tokenizer cannot be used.
        TargetError: the model folder has no config, weights or tokenizer.
    """
    folder = resolve_model_folder(config.model, with_weights=with_weights)
    model_config = load_target_config(folder)
    check_weights(folder, is_local=Path(config.model).expanduser().is_dir())
    sizes = target_sizes(model_config)
    spec = parse_activations(config.activations, config.target_layers, sizes["n_layers"])
    tokenizer = load_target_tokenizer(folder)
    check_template(tokenizer, config.model)
    source = ChatSource(config.dataset, config.data.split)
    sequences = read_sequences(source, tokenizer, config, sizes, progress)
    table = plan_parts(sequences.table(), config.storage.part_tokens, ALIGNMENT_TOKENS)
    device = pick_device(config.forward.device)
    compute_dtype = resolve_compute_dtype(config, device)
    batch_tokens = config.forward.batch_tokens or (2048 if torch.device(device).type == "cpu" else 16_384)
    fields = field_specs(spec, sizes, config.storage.dtype)
    codec = _codec(config.storage.codec, fields)
    counts = plan_counts(table)
    n_tokens = counts["n_tokens"]
    manifest = StoreManifest(
        fields=fields,
        target=sizes,
        identities=collect_identities(folder, tokenizer, source, with_weights),
        extraction=_extraction(config, spec, compute_dtype, device, batch_tokens) | _template_time(tokenizer),
        n_sequences=counts["n_sequences"],
        n_parts=counts["n_parts"],
        n_tokens=n_tokens,
        codec=codec.describe(),
        alignment_tokens=ALIGNMENT_TOKENS,
    )
    raw_bytes = {spec_.name: spec_.token_bytes * n_tokens for spec_ in fields}
    layer_parameters, kept_parameters = count_parameters(model_config, config.target_layers)
    flops = matmul_flops(device, getattr(torch, compute_dtype))
    out = Path(config.out).expanduser()
    return ExtractPlan(
        config=config,
        spec=spec,
        manifest=manifest,
        codec=codec,
        table=table,
        sequences=sequences,
        dataset=source.describe(),
        folder=folder,
        device=device,
        compute_dtype=compute_dtype,
        batch_tokens=batch_tokens,
        raw_bytes=raw_bytes,
        stored_bytes=expected_bytes(codec, n_tokens)
        + _feature_bytes(codec, sizes)
        + kept_parameters * weight_bytes(model_config),
        free_bytes=shutil.disk_usage(existing_parent(out)).free,
        present_bytes=_folder_bytes(out),
        forward_s=2 * layer_parameters * n_tokens / (flops * FORWARD_EFFICIENCY),
        n_parameters=layer_parameters,
        matmul_flops=flops,
    )


def field_specs(spec: ActivationSpec, sizes: Mapping[str, Any], dtype: str) -> tuple[FieldSpec, ...]:
    """The store's fields for a specification of activations."""
    fields = [tokens_field(), response_mask_field()]
    if spec.kv:
        fields.append(kv_field(sizes["n_layers"], sizes["n_kv_heads"], sizes["head_dim"], dtype))
    for name in spec.hidden_fields:
        fields.append(hidden_field(name.removeprefix("hidden/"), sizes["hidden_size"], dtype))
    return tuple(fields)


def resolve_compute_dtype(config: ExtractConfig, device: str) -> str:
    """The dtype of the forward: auto is the storage dtype on an accelerator and float32 on a CPU."""
    if config.forward.compute_dtype != "auto":
        return config.forward.compute_dtype
    return "float32" if device.startswith("cpu") else config.storage.dtype


def _codec(name: str, fields: tuple[FieldSpec, ...]) -> StoreCodec:
    try:
        return StoreCodec(name, fields)
    except CodecUnknown as error:
        raise OptionInvalid(f"{error} Mend --codec.") from error


def _extraction(
    config: ExtractConfig, spec: ActivationSpec, compute_dtype: str, device: str, batch_tokens: int
) -> dict[str, Any]:
    """What shapes the data besides the inputs; batches change the last bits of a forward, so they count."""
    return {
        "activations": (["kv"] if spec.kv else []) + list(spec.hidden_fields),
        "attention": "sdpa",
        "batch_tokens": batch_tokens,
        "bos": "one BOS where the model has one, as the chat template or the tokenizer sets it",
        "compute_dtype": compute_dtype,
        "device": torch.device(device).type,
        "dtype": config.storage.dtype,
        "max_length": config.data.max_length,
        "max_sequences": config.data.max_sequences,
        "part_tokens": config.storage.part_tokens,
        "target_layers": config.target_layers,
        "truncation": "right, tokens and mask together",
    }


def _template_time(tokenizer: Any) -> dict[str, str]:
    """The time that the chats were rendered with; nothing where the template did not ask for it."""
    return {"template_time": TEMPLATE_TIME.isoformat()} if asked_the_time(tokenizer) else {}


def expected_bytes(codec: StoreCodec, n_tokens: int) -> int:
    """Expected bytes of the parts, with 3 % for alignment padding, indexes and metadata."""
    bits = sum(field.expected_bits() * math.prod(field.spec.token_shape) for field in codec.fields.values())
    return int(1.03 * bits / 8 * n_tokens)


def _feature_bytes(codec: StoreCodec, sizes: Mapping[str, Any]) -> int:
    """Bytes of the token features in half precision, where keys and values are predicted from them."""
    if not any(field.needs_tokens for field in codec.fields.values()):
        return 0
    return 2 * int(sizes["vocab_size"]) * min(int(sizes["hidden_size"]), MAX_FEATURES)


def count_parameters(model_config: Any, target_layers: int) -> tuple[int, int]:
    """Weights of all decoder layers, and those that the target bundle keeps."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa", trust_remote_code=False)
    layers = sum(weight.numel() for weight in model.model.layers.parameters())
    frozen = 2 * model_config.vocab_size * model_config.hidden_size + model_config.hidden_size
    return layers, frozen + layers * target_layers // model_config.num_hidden_layers


def weight_bytes(model_config: Any) -> int:
    """Bytes of one of the target's weights on disk."""
    dtype = getattr(model_config, "dtype", None)
    return torch.empty(0, dtype=dtype).element_size() if isinstance(dtype, torch.dtype) else 4


def matmul_flops(device: str, dtype: torch.dtype) -> float:
    """Floating point operations per second of a matrix product, from a fraction of a second of them."""
    size = 4096 if torch.device(device).type == "cuda" else 768
    left = torch.randn(size, size, device=device).to(dtype)
    torch.mm(left, left)
    _wait(device)
    n_products, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < 0.1:
        torch.mm(left, left)
        _wait(device)
        n_products += 1
    return 2.0 * size**3 * n_products / elapsed


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path


def _folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0
