"""Run random sequences of a store through the target and compare the activations.

"Stored" values are read from the store. "Live" values are computed here, by the loaded target.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DatasetError, OptionInvalid, WorkerError
from ..moa.targets.bundle import FrozenTarget
from ..moa.targets.chat_tokens import TokenizedChat
from ..moa.targets.live import Target
from ..moa.targets.template import TEMPLATE_TIME, ChatTemplate
from ..storage.paths import StoreLike, StorePath
from ..storage.read.store import ActivationStore
from ..storage.schema import HIDDEN_LAST, FieldSpec, to_float32
from ..text import SILENT, Progress, counted
from . import plan
from .config import TEXT_FIELDS, parse_fields
from .dataset import Columns
from .differences import Difference, Divergence, LayerDifferences
from .forwards.capture import capture
from .sequences import content_id, tokenize_row

# Allowed relative L2 error for each stored dtype, if the target's forward computes in float32.
_TOLERANCES = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4}
# Relative L2 error that each codec may add: about twice the measured error of the worst layer. The
# error of a transform codec depends on its bit rate. Its bound is chosen for low bit rates, so at
# higher bit rates an audit detects only gross errors.
_CODEC_TOLERANCES = {"lossless": 0.0, "int8": 0.02, "transform": 0.6}
# Factor by which the tolerance grows if the stored activations were computed in 16 bits, or by
# another engine. In both cases, different batches and kernels change the last bits of many values.
_LOW_PRECISION_FACTOR = 5.0


@dataclass(frozen=True)
class AuditRow:
    """Result of comparing one field of a stored sequence with the values that the target computes."""

    index: int
    sequence_id: str
    # Name of the field: tokens, response_mask, kv, hidden/..., or logits.
    field: str
    # Largest absolute difference; infinite if tokens or response_mask differ.
    max_error: float
    # Relative error `|stored - live| / |live|` in the L2 norm. For kv, it is the error of the worst
    # layer. For tokens and response_mask, it is 0 if stored and live values are equal, and
    # otherwise infinite.
    relative_error: float
    tolerance: float  # largest allowed relative error
    detail: str = ""  # text with details of the comparison, such as the worst layer

    @property
    def ok(self) -> bool:
        """Whether the relative error is within its tolerance."""
        return self.relative_error <= self.tolerance


@dataclass(frozen=True)
class AuditReport:
    """All comparisons of an audit.

    If some comparisons could not be made, ``note`` says why. Otherwise, ``note`` is empty.
    """

    store: StorePath
    model: str
    rows: tuple[AuditRow, ...]
    n_samples: int
    note: str

    @property
    def ok(self) -> bool:
        """Whether every comparison passed."""
        return all(row.ok for row in self.rows)

    def worst(self) -> dict[str, AuditRow]:
        """Select the worst comparison of each field: the one with the largest relative error.

        Returns:
            Name of the field -> the comparison.
        """
        worst: dict[str, AuditRow] = {}
        for row in self.rows:
            if row.field not in worst or not row.relative_error <= worst[row.field].relative_error:
                worst[row.field] = row
        return worst

    def describe(self) -> str:
        """Return the report as text.

        First comes the comparison with the largest error for each field, and then all failed
        comparisons.
        """
        lines = [
            f"audit of {counted(self.n_samples, 'sequence')} of {self.store} against {self.model}"
        ]
        for name, row in self.worst().items():
            verdict = "ok" if row.ok else "DIFFERS"
            lines.append(
                f"{name:16} {verdict:8} relative error {row.relative_error:.2e} "
                f"(allowed {row.tolerance:.0e}), largest difference {row.max_error:.2e}  "
                f"{row.detail}"
            )
        for row in self.rows:
            if not row.ok:
                line = (
                    f"sequence {row.index} ({row.sequence_id[:12]}): {row.field} differs by a "
                    f"relative error of {row.relative_error:.2e} ({row.detail})"
                )
                lines.append(line.removesuffix(" ()"))
        if self.note:
            lines.append(f"note: {self.note}")
        return "\n".join(lines)


def audit(
    store: StoreLike,
    model: str,
    samples: int = 8,
    seed: int = 0,
    device: str = "auto",
    progress: Progress = SILENT,
) -> AuditReport:
    """Compare random sequences of a store with the live target.

    A sequence's id is the content hash of its tokens and response mask. The hash of the stored
    tokens and mask must equal the id. If the dataset of the last extraction can be read, the
    dataset rows of these sequences are tokenised again and compared with the stored tokens and
    masks. To compare the activations, the target runs on one sequence at a time, without batching.

    Args:
        samples: number of sequences to compare.
        seed: seed of the random choice of sequences.
        progress: reports the number of compared sequences.

    Raises:
        DatasetError: no part of the store is committed.
        StoreMismatch: the store was made with another target.
    """
    with ActivationStore(store) as stored:
        if not len(stored):
            raise DatasetError(
                f"{stored.path} has no finished part yet, so there is nothing to audit. Run "
                "extract first."
            )
        extraction = stored.manifest.extraction
        folder = plan.find_same_target(model, stored.path, stored.manifest)
        compute_dtype = str(extraction.get("compute_dtype", "float32"))
        target = Target.load(str(folder), getattr(torch, compute_dtype), device)
        frozen = FrozenTarget.load(
            stored.target_path, 0, torch.float32, sizes=stored.manifest.target
        )
        indices = sorted(np.random.default_rng(seed).permutation(len(stored))[:samples].tolist())
        chats, note = _tokenize_again(stored, target.tokenizer, indices)
        rows: list[AuditRow] = []
        auditing = progress.of("audit", "sequence")
        for done, index in enumerate(indices):
            rows += [
                *_text_rows(stored, index, chats),
                *_activation_rows(stored, index, target, frozen),
            ]
            auditing(done + 1, len(indices))
        return AuditReport(stored.path, model, tuple(rows), len(indices), note)


def _tokenize_again(
    stored: ActivationStore, tokenizer: Any, indices: Sequence[int]
) -> tuple[dict[int, TokenizedChat], str]:
    """Tokenise the dataset rows of stored sequences again.

    Returns:
        A dict and a note. The dict maps the number of a dataset row to the row's tokenised chat. If
        the rows cannot be compared, the dict is empty, and the note says why.
    """
    only = "tokens and masks were checked by their content hash only"
    extraction: Mapping[str, Any] = stored.manifest.extraction
    wanted = {int(stored.sequences["source_row"][index].as_py()) for index in indices}
    chats: dict[int, TokenizedChat] = {}
    try:
        data = plan.recorded_config(stored.path)
        source = plan.open_dataset(data, plan.recorded_sources(extraction))
        arguments = extraction.get("template_kwargs")
        template = ChatTemplate(
            tokenizer, arguments if isinstance(arguments, dict) else {}, str(stored.path)
        )
        columns = Columns.parse(data.data.columns)
        for row, content in itertools.islice(source.rows(), max(wanted) + 1):
            if row in wanted:
                chat = tokenize_row(template, content, int(extraction["max_length"]), columns)
                if isinstance(chat, TokenizedChat):
                    chats[row] = chat
    except (DatasetError, OptionInvalid, WorkerError) as error:
        return {}, f"{only}, because the chats could not be tokenised again. {error}"
    recorded = extraction.get("template_time")
    if recorded != TEMPLATE_TIME.isoformat() and (recorded or template.asked_the_time):
        return {}, (
            f"{only}, because the chat template shows the current time, and the chats were "
            f"rendered for another time (recorded: {recorded})"
        )
    return chats, ""


def _text_rows(
    stored: ActivationStore, index: int, chats: Mapping[int, TokenizedChat]
) -> list[AuditRow]:
    values = {name: stored.read(index, name) for name in TEXT_FIELDS}
    sequence_id = stored.sequences["sequence_id"][index].as_py()
    source_row = stored.sequences["source_row"][index].as_py()
    is_intact = content_id(values["tokens"], values["response_mask"]) == sequence_id
    hashed = "content hash matches" if is_intact else "content hash differs"
    rows = []
    for name, stored_values in values.items():
        is_equal = is_intact
        detail = hashed
        if chats:
            live = getattr(chats.get(source_row), name, np.empty(0))
            is_equal = is_intact and np.array_equal(stored_values, live)
            detail += (
                f"; row {source_row} tokenised again: {len(stored_values)} tokens stored, "
                f"{len(live)} now"
            )
            if len(live) == len(stored_values):
                detail += f", {np.mean(stored_values != live):.1%} differ"
        error = 0.0 if is_equal else math.inf
        rows.append(AuditRow(index, sequence_id, name, error, error, 0.0, detail))
    return rows


def _activation_rows(
    stored: ActivationStore, index: int, target: Target, frozen: FrozenTarget
) -> list[AuditRow]:
    spec = dataclasses.replace(parse_fields(stored.fields), last=True)
    live = capture(target.model, [stored.read(index, "tokens")], spec, torch.float32).fields
    sequence_id = stored.sequences["sequence_id"][index].as_py()
    rows = []
    for name, field_spec in stored.fields.items():
        if name in TEXT_FIELDS:
            continue
        dtype = field_spec.dtype
        values = torch.from_numpy(to_float32(stored.read(index, name), dtype))
        comparisons = {name: _compare(values, live[name][0].cpu(), field_spec)}
        if name == HIDDEN_LAST:
            comparisons["logits"] = _compare_logits(values, live[name][0], target, frozen)
        for compared, (max_error, relative, detail) in comparisons.items():
            tolerance = stored_tolerance(stored, dtype)
            rows.append(
                AuditRow(index, sequence_id, compared, max_error, relative, tolerance, detail)
            )
    return rows


def stored_tolerance(stored: ActivationStore, dtype: str) -> float:
    """Return the largest relative L2 error that rounding and the store's codec may cause.

    Args:
        dtype: dtype of the stored field.
    """
    computed = stored.manifest.extraction.get("compute_dtype", "float32")
    is_inexact = computed != "float32" or "engine" in stored.manifest.extraction
    of_forward = _TOLERANCES[dtype] * (_LOW_PRECISION_FACTOR if is_inexact else 1.0)
    return of_forward + _CODEC_TOLERANCES[stored.codec.name.split(":")[0]]


def _compare(values: Tensor, live: Tensor, spec: FieldSpec) -> tuple[float, float, str]:
    """Compare stored and live values of one field.

    Args:
        values: the stored values. The shape is [n, ...] for n tokens, or [n, L, ...] for kv.
        live: the live values, with the same shape.
        spec: description of the field.

    Returns:
        The largest absolute difference, the relative L2 error, and a text with details. For kv, the
        relative error of the worst layer is returned.
    """
    if spec.layer_axis is None:
        difference = Difference()
        difference.add(live, values)
        return difference.largest, difference.relative, ""
    layers = LayerDifferences()
    for index, layer in enumerate(spec.layer_numbers):
        layers.add(layer, live[:, index], values[:, index])
    return layers.total.largest, layers.worst, f"worst in layer {layers.worst_layer}"


@torch.inference_mode()
def _compare_logits(
    hidden: Tensor, live: Tensor, target: Target, frozen: FrozenTarget
) -> tuple[float, float, str]:
    """Compare logits computed from stored states with logits computed from live states.

    The states are last hidden states. The LM head that is applied to the stored states is read from
    the store. The LM head that is applied to the live states belongs to the loaded target.

    Returns:
        The largest absolute difference of the logits, their relative L2 error, and a text about how
        often the stored and the live logits have the same largest entry.
    """
    divergence = Divergence()
    divergence.add_states(
        live.to(target.model.dtype),
        hidden,
        lambda states: target.logits(states).float().cpu(),
        frozen.logits,
    )
    return (
        divergence.largest,
        divergence.relative,
        f"top-1 agreement {divergence.top1_agreement:.2%}",
    )
