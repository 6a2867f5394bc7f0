"""``evaluate``: load target, drafter and prompts, measure, and write the report."""

import dataclasses
import platform
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..moa.bundle import FrozenTarget
from ..moa.checkpoint import check_drafter_matches, load_drafter
from ..moa.decode import plain_generate, speculative_generate
from ..moa.drafter import Drafter
from ..moa.target import Target
from ..pipeline.prompts import check_template
from .config import EvalConfig
from .errors import EvalConfigError
from .figures import write_figures
from .measure import Generate, Progress, measure
from .prompts import load_prompts
from .report import EvaluationReport, build_report, check_output, write_report


def evaluate(
    config: EvalConfig, progress: Progress | None = None, provenance: Mapping[str, Any] | None = None
) -> EvaluationReport:
    """Measure decoding with a drafter beside plain decoding of the same prompts.

    Args:
        config: what to measure.
        progress: called with (done, total, message) per prompt.
        provenance: command, versions and commit, for the report.

    Returns:
        The report, which was also written: JSON at ``config.out``, Markdown and two figures beside it.

    Raises:
        EvaluationError: settings or prompts that cannot be used, or an output that holds something else.
        DrafterError: target or drafter cannot be loaded, or do not belong together.
        PipelineError: the target has no chat template.
    """
    if problems := config.problems():
        raise EvalConfigError("; ".join(problems) + ".")
    out = check_output(config.out)
    prompts = load_prompts(config.prompts, config.n_prompts)
    dtype = getattr(torch, config.dtype)
    target = Target.load(config.model, dtype, config.device)
    check_template(target.tokenizer, config.model)
    drafter = None
    if config.drafter is not None and "chain" in config.method:
        drafter = load_drafter(config.drafter, dtype, target.device)
        check_drafter_matches(drafter, target)
    methods = build_methods(config, target, drafter)
    measurement = measure(target, methods, prompts.prompts, warmup=config.warmup, progress=progress)
    report = build_report(
        measurement,
        config=dataclasses.asdict(config) | {"method": list(config.method)},
        environment=_environment(target, config.dtype),
        provenance=dict(provenance or {}),
        prompts={
            "file": config.prompts,
            "kind": prompts.kind,
            "n_in_file": prompts.n_in_file,
            "n_used": len(prompts.prompts),
        },
    )
    write_figures(report, out)
    write_report(report, out)  # last: a report that is there is whole, its figures included
    return report


def build_methods(config: EvalConfig, target: Target, drafter: Drafter | None) -> dict[str, Generate]:
    """The methods by name; one that occurs again gets a number (``plain#2``).

    Args:
        config: names of the methods and their settings.
        target: the loaded target.
        drafter: trained for it; needed by ``chain``.
    """
    methods: dict[str, Generate] = {}
    for method in config.method:
        if method == "plain":
            generate: Generate = partial(plain_generate, target, max_new_tokens=config.max_new_tokens)
        else:
            assert drafter is not None
            # Taken from the target once, not once per prompt.
            frozen = FrozenTarget.from_model(target.model, drafter.config.target_layer_inference)
            generate = partial(
                speculative_generate,
                target,
                drafter,
                frozen,
                max_new_tokens=config.max_new_tokens,
                draft_length=config.draft_length,
            )
        number = 1 + sum(name.split("#")[0] == method for name in methods)
        methods[method if number == 1 else f"{method}#{number}"] = generate
    return methods


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
