"""Extract the damaged parts of a store again, with the settings that its last extraction recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import StoreMismatch, WorkerError
from ..storage.care.repair import RepairPlan
from ..storage.names import CODEC_NAME
from ..text import Progress
from .extract import ExtractReport, extract
from .sources import recorded_config


def repair(
    plan: RepairPlan,
    model: str,
    dataset: str | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> ExtractReport:
    """Make the damaged parts and files of a store again.

    Nothing is deleted before target and dataset are known to be the ones that the store was made from, and what is
    deleted is checked once more right before.

    Args:
        model: the target that the store was made with: a folder or a hub id.
        dataset: the chats; None for those of the store's last extraction.
        device: device of the forward; None for that of the store's last extraction.

    Raises:
        WorkerError: no extraction is recorded, there is damage that this does not mend, or the codec learns something
            else than the parts were written with.
        StoreMismatch: the store was made from another target or dataset.
        WorkerError: the input cannot be used.
    """
    if plan.others:
        raise WorkerError(f"{plan.others[0].path}: {plan.others[0].message} This cannot be repaired; extract again.")
    try:
        recorded = recorded_config(plan.store)
    except WorkerError as error:
        if not plan.codec:
            raise
        raise WorkerError(
            f"{plan.store}: {CODEC_NAME}/ is damaged and no extraction is recorded. If `recode` made the store, run "
            "the same command again: it learns the codec from the lossless store anew."
        ) from error
    config = recorded.replaced(
        model=model,
        dataset=dataset or recorded.dataset,
        out=str(plan.store),
        device=device or recorded.forward.device,
        workers="1",
        engine="processes",
        address=None,
        gpus_per_worker=None,
    )
    try:
        return extract(config, progress, provenance, redo=plan)
    except StoreMismatch as error:
        if set(error.changes) != {"codec.basis_sha256"}:
            raise
        raise WorkerError(
            f"{plan.store}: what the codec learns here is not what the parts were written with, which another device "
            f"or number of threads is enough for ({error.changes['codec.basis_sha256'][0]} is recorded). Repair it "
            f"where it was extracted, restore {CODEC_NAME}/ from a copy, or extract to another folder."
        ) from error
