"""``evaluate``: load target, drafter and prompts, measure, and write the report."""

import dataclasses
import platform
from collections.abc import Mapping
from typing import Any

import torch

from ..moa.target import Target
from ..pipeline.prompts import check_template
from .config import EvalConfig
from .errors import EvalConfigError
from .figures import write_figures
from .markdown import write_report
from .measure import Progress, measure, opening_tokens
from .methods import build_methods
from .prompts import load_prompts
from .report import EvaluationReport, build_report, check_output


def evaluate(
    config: EvalConfig, progress: Progress | None = None, provenance: Mapping[str, Any] | None = None
) -> EvaluationReport:
    """Measure ways of decoding beside plain decoding of the same prompts.

    Args:
        config: what to measure.
        progress: called with (done, total, message) per prompt.
        provenance: command, versions and commit, for the report.

    Returns:
        The report, which was also written: JSON at ``config.out``, Markdown and figures beside it.

    Raises:
        EvaluationError: settings or prompts that cannot be used, or an output that holds something else.
        DrafterError: target or drafter cannot be loaded, or do not belong together.
        PipelineError: the target has no chat template.
    """
    if problems := config.problems():
        raise EvalConfigError("; ".join(problems) + ".")
    out = check_output(config.out)
    prompts = load_prompts(config.prompts, config.n_prompts)
    target = Target.load(config.model, getattr(torch, config.dtype), config.device)
    check_template(target.tokenizer, config.model)
    if config.compile:
        target.compile(config.compile)
    calibration_prompts = opening_tokens(target, prompts.prompts[: max(1, config.warmup)])
    if "auto" in config.method and not calibration_prompts:
        raise EvalConfigError(
            f"method auto calibrates on the first {max(1, config.warmup)} prompts, and none of them leaves the target "
            "a position to generate into; raise --warmup, or give shorter prompts."
        )
    methods = build_methods(config, target, calibration_prompts)
    measurement = measure(
        target,
        methods.by_name,
        prompts.prompts,
        warmup=config.warmup,
        batch_size=config.batch_size,
        repeats=config.repeats,
        seed=config.seed,
        progress=progress,
    )
    report = build_report(
        measurement,
        config=dataclasses.asdict(config) | {"method": list(config.method), "drafter": list(config.drafter)},
        environment=_environment(target, config.dtype),
        provenance=dict(provenance or {}),
        prompts={
            "file": config.prompts,
            "kind": prompts.kind,
            "n_in_file": prompts.n_in_file,
            "n_used": len(prompts.prompts),
        },
        choices={name: choice.describe() for name, choice in methods.choices.items()},
        drafters={name: dataclasses.asdict(facts) for name, facts in methods.drafters.items()},
    )
    write_figures(report, out)
    write_report(report, out)  # last: a report that is there is whole, its figures included
    return report


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
