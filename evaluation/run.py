"""``eval`` and ``disconnect``: load target, drafters and prompts, measure, and write the report."""

import contextlib
import dataclasses
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ReportUnwritten
from ..moa.targets.chat_tokens import check_template
from ..moa.targets.live import Target
from ..moa.targets.template import choose_template_arguments
from ..text import Progress
from .config import DRAFTING, DisconnectConfig, EvalConfig
from .disconnection import measure_disconnections
from .disconnection_report import KIND as DISCONNECTION
from .disconnection_report import DisconnectionReport, build_disconnection_report, disconnection_markdown
from .drafters import LoadedDrafter, load_drafters
from .figures import disconnection_figure, write_figures
from .markdown import markdown_report, write_report
from .measure import measure
from .methods import build_methods
from .prompts import PromptFile, load_prompts
from .report import EvaluationReport, build_report, check_output
from .scorer import load_scorer


def evaluate(
    config: EvalConfig, progress: Progress | None = None, provenance: Mapping[str, Any] | None = None
) -> EvaluationReport:
    """Measure ways of decoding beside plain decoding of the same prompts.

    Args:
        progress: called with (done, total, message) per prompt.

    Returns:
        The report, which was also written: JSON at ``config.out``, Markdown and figures beside it.

    Raises:
        OptionInvalid: settings or prompts that cannot be used, or an output that holds something else.
        ReportUnwritten: all was measured, and the report cannot be written.
        DrafterError: target or drafter cannot be loaded, or do not belong together.
        WorkerError: the target has no chat template.
    """
    out = check_output(config.out)
    prompts = load_prompts(config.prompts, config.n_prompts)
    dtype = getattr(torch, config.dtype)
    target = Target.load(config.model, dtype, config.device, config.revision)
    check_template(target.tokenizer, config.model)
    if config.compile:
        target.compile(config.compile)
    drafters = load_drafters(config.drafter, target, dtype) if set(config.method) & set(DRAFTING) else {}
    _set_template_arguments(config, target, drafters)
    methods = build_methods(config, target, drafters)
    measurement = measure(
        target,
        methods.by_name,
        prompts.prompts,
        warmup=config.warmup,
        batch_size=config.batch_size,
        repeats=config.repeats,
        seed=config.sampling.seed,
        progress=progress,
        sampling=config.sampling.build(),
    )
    report = build_report(
        measurement,
        config=config.named() | {"method": list(config.method), "drafter": list(config.drafter)},
        environment=_environment(target, config.dtype),
        provenance=dict(provenance or {}),
        prompts=_prompt_facts(config.prompts, prompts),
        policies={name: policy.describe() for name, policy in methods.policies.items()},
        drafters={name: dataclasses.asdict(loaded.facts) for name, loaded in drafters.items()},
    )
    markdown = markdown_report(report)
    with _kept_on_failure(out, markdown):
        write_figures(report, out)
        # Last: a report that is there is whole, its figures included.
        write_report(report.to_json(), markdown, out)
    return report


def disconnect(
    config: DisconnectConfig, progress: Progress | None = None, provenance: Mapping[str, Any] | None = None
) -> DisconnectionReport:
    """Measure what drafters write when the target can no longer be reached.

    Args:
        progress: called with (done, total, message) per batch.

    Raises:
        OptionInvalid: settings, prompts or a scorer that cannot be used, or an output that holds something else.
        DrafterError: target or drafter cannot be loaded, or do not belong together.
        WorkerError: the target has no chat template.
    """
    out = check_output(config.out, DISCONNECTION)
    scorer = None if config.scorer is None else load_scorer(config.scorer)
    prompts = load_prompts(config.prompts, config.n_prompts)
    target = Target.load(config.model, getattr(torch, config.dtype), config.device, config.revision)
    check_template(target.tokenizer, config.model)
    drafters = load_drafters(config.drafter, target, getattr(torch, config.dtype))
    _set_template_arguments(config, target, drafters)
    rows = measure_disconnections(
        target,
        drafters,
        prompts.prompts,
        n_tokens=config.n_tokens,
        n_cuts=config.cuts,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        scorer=scorer,
        progress=progress,
    )
    report = build_disconnection_report(
        rows,
        config=config.named() | {"drafter": list(config.drafter)},
        environment=_environment(target, config.dtype),
        provenance=dict(provenance or {}),
        prompts=_prompt_facts(config.prompts, prompts),
        drafters={name: dataclasses.asdict(loaded.facts) for name, loaded in drafters.items()},
    )
    markdown = disconnection_markdown(report)
    with _kept_on_failure(out, markdown):
        disconnection_figure(report, out.with_suffix(".png"))
        write_report(report.to_json(), markdown, out)
    return report


@contextlib.contextmanager
def _kept_on_failure(out: Path, markdown: str) -> Iterator[None]:
    """Hand the report to the caller as text where it cannot be written."""
    try:
        yield
    except OSError as error:
        raise ReportUnwritten(out, error, markdown) from error


def _set_template_arguments(
    config: EvalConfig | DisconnectConfig, target: Target, drafters: Mapping[str, LoadedDrafter]
) -> None:
    """Let prompts be rendered as the settings say, else as the chats that the drafters were trained on."""
    recorded = {name: loaded.drafter.config.target for name, loaded in drafters.items()}
    check_template(target.tokenizer, config.model, choose_template_arguments(config.template_kwargs, recorded))


def _prompt_facts(path: str, prompts: PromptFile) -> dict[str, Any]:
    n_used = len(prompts.prompts)
    return {"file": path, "kind": prompts.kind, "n_in_file": prompts.n_in_file, "n_used": n_used}


def _environment(target: Target, dtype: str) -> dict[str, Any]:
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": str(device),
        "device_name": name,
        "dtype": dtype,
        "n_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "target": target.identity,
        "target_sizes": target.sizes,
        "eos_token_ids": sorted(target.eos_token_ids),
    }
