"""Implements ``moa-data eval``, from loading to the written report, and ``generate`` for Python."""

import platform
from collections.abc import Mapping, Sequence
from functools import partial
from operator import index
from typing import Any

import torch

from ..errors import DrafterError, OptionInvalid, ReportUnwritten, StorageUnavailable
from ..moa.decoding.loop import Generation, OnTokens, generate_batch
from ..moa.decoding.policy import AutoPolicy, ShapePolicy
from ..moa.decoding.proposer import DrafterProposer, PromptLookupProposer, Proposer
from ..moa.decoding.sampling import GREEDY, SamplingConfig
from ..moa.decoding.tree import TreeShape
from ..moa.drafters.base import Drafter
from ..moa.formats.checkpoint import load_target_and_drafters
from ..moa.targets.chat_tokens import prompt_tokens
from ..moa.targets.live import Target
from ..moa.targets.template import ChatTemplate, choose_template_arguments
from ..text import SILENT, Progress
from .config import DRAFTING, EvalConfig
from .drafters import drafter_facts
from .measure import Generate, load_scorer, measure, measure_disconnections
from .prompts import load_prompts
from .report import Disconnection, EvaluationReport, check_output, write_report


def evaluate(
    config: EvalConfig,
    progress: Progress = SILENT,
    provenance: Mapping[str, Any] | None = None,
) -> EvaluationReport:
    """Measure decoding methods against plain decoding of the same prompts.

    Returns:
        The report, which is also written: JSON to ``config.out``, Markdown and figures next to it.

    Raises:
        OptionInvalid: settings or prompts cannot be used, or ``config.out`` would replace a file
            that is not a report.
        ReportUnwritten: the measurement is complete, but the report cannot be written.
        DrafterError: target or drafter cannot be loaded, or do not belong together.
    """
    # Import this module here, because it imports matplotlib, which `generate` does not need.
    from .views import markdown_report, write_figures

    out = check_output(config.out)
    disconnection_settings = config.disconnection
    scorer = (
        None
        if disconnection_settings.scorer is None
        else load_scorer(disconnection_settings.scorer)
    )
    file = load_prompts(config.prompts, config.n_prompts)
    folders = config.drafter if config.needs_drafters else ()
    target, drafters = load_target_and_drafters(config, folders)
    target.prepare(config.cuda_graphs)
    facts: dict[str, dict[str, Any]] = {}
    for folder, (name, drafter) in zip(folders, drafters.items(), strict=True):
        facts[name] = drafter_facts(folder, drafter)
    disconnection = None
    if disconnection_settings.disconnect:
        cuts = measure_disconnections(
            target, drafters, file.prompts, n_tokens=disconnection_settings.disconnect,
            n_cuts=disconnection_settings.cuts, max_new_tokens=config.max_new_tokens,
            scorer=scorer, progress=progress,
        )  # fmt: skip
        disconnection = Disconnection.of(cuts, len(file.prompts))
    methods, policies = build_methods(config, target, drafters)
    measurement = measure(
        target, methods, file.prompts, warmup=config.warmup, batch_size=config.batch_size,
        repeats=config.repeats, seed=config.sampling.seed, progress=progress,
        sampling=SamplingConfig(**config.sampling.arguments()),
    )  # fmt: skip
    if not measurement.rows:
        raise OptionInvalid(
            f"each of the {len(file.prompts)} prompts of {config.prompts} fills the target's "
            f"{target.max_positions:,} positions, so the target cannot write an answer; give shorter "
            "prompts."
        )
    auto: dict[str, str] = {}
    for name, policy in policies.items():
        auto[name] = policy.describe([row.runs[name] for row in measurement.rows])
    report = EvaluationReport(
        measurement,
        config=config.named() | {"method": list(config.method), "drafter": list(config.drafter)},
        environment=_environment(target, config.dtype),
        provenance=dict(provenance or {}),
        prompts={
            "file": config.prompts,
            "kind": file.kind,
            "n_in_file": file.n_in_file,
            "n_used": len(file.prompts),
            "n_answers": len(measurement.rows),
            "n_skipped_turns": len(measurement.skipped),
        },
        auto=auto,
        drafters=facts,
        disconnection=disconnection,
    )
    markdown = markdown_report(report)
    try:
        write_figures(report, out)
        # `write_report` writes the JSON last. So if the JSON exists, the figures are complete.
        write_report(report, markdown, out)
    except (OSError, StorageUnavailable) as error:
        raise ReportUnwritten(out, error, markdown) from error
    return report


def build_methods(
    config: EvalConfig, target: Target, drafters: Mapping[str, Drafter]
) -> tuple[dict[str, Generate], dict[str, AutoPolicy]]:
    """Build the decoding methods of an evaluation.

    Returns:
        Two dicts. The first maps the name of each method to the method, with the baseline first.
        The second maps the name of each ``auto`` method to its policy.
    """
    methods: dict[str, Generate] = {}
    policies: dict[str, AutoPolicy] = {}
    sampling = SamplingConfig(**config.sampling.arguments())
    chain = TreeShape(config.draft_length)
    decode = partial(
        generate_batch, target, max_new_tokens=config.max_new_tokens, sampling=sampling
    )

    def add(
        name: str, proposer: Proposer | None = None, shape: TreeShape | ShapePolicy | None = None
    ) -> None:
        n_before = [known.split("#")[0] for known in methods].count(name)
        name = f"{name}#{n_before + 1}" if n_before else name
        methods[name] = lambda prompts, seeds: decode(
            prompts, proposer=proposer, tree=shape, seed=seeds
        )
        if isinstance(shape, AutoPolicy):
            policies[name] = shape

    for method in config.method:
        if method == "plain":
            add(method)
        elif method == "prompt-lookup":
            add(method, PromptLookupProposer(target.device), chain)
        for name, drafter in drafters.items() if method in DRAFTING else ():
            proposer = DrafterProposer(target, drafter, sampling)
            shape: TreeShape | ShapePolicy | None = (
                config.tree_shape() if method == "tree" else chain
            )
            if method == "auto":
                shape = AutoPolicy(sampling.temperature > 0, proposer.max_depth)
            add(f"{method} {name}" if len(drafters) > 1 else method, proposer, shape)
    return methods, policies


def _environment(target: Target, dtype: str) -> dict[str, Any]:
    device = target.device
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    return {
        "device": str(device),
        "device_name": name,
        "dtype": dtype,
        "n_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "target": target.identity,
        "target_sizes": target.facts.sizes,
        "eos_token_ids": sorted(target.eos_token_ids),
    }


def generate(
    target: Target,
    drafter: Drafter,
    prompt: str | Sequence[Mapping[str, Any]] | Sequence[int],
    *,
    max_new_tokens: int = 256,
    tree: str | TreeShape | ShapePolicy | None = None,
    sampling: SamplingConfig = GREEDY,
    seed: int = 0,
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Answer a prompt with speculative decoding. Greedy answers equal those of plain decoding.

    Target and drafter are prepared for decoding, so their weights must not change between calls.

    Args:
        target: the target.
        drafter: the result of ``load_drafter``.
        prompt: the user's message, a chat (messages with ``role`` and ``content``), or token ids.
        max_new_tokens: maximum number of tokens of the answer.
        tree: shape of the drafts, or a text such as ``6x8x62``. If it is None, chains are drafted,
            and drafting pauses while drafts cost more time than they save (``auto``).
        sampling: sampling settings; greedy by default.
        seed: seed of the sampling.
        on_tokens: called after each target call. It gets the new tokens, and for each new token
            whether it was a draft.

    Returns:
        The answer with ``text``, ``tokens`` and ``stats``.

    Raises:
        TemplateError: the target's chat template rejects the prompt.
        DrafterError: the drafter is not a Drafter, or the prompt is empty, too long or has tokens
            outside the target's vocabulary.
    """
    if not isinstance(drafter, Drafter):
        raise DrafterError(
            f"the argument drafter is {drafter!r:.60}, expected the result of load_drafter."
        )
    if isinstance(tree, str):
        tree = TreeShape.parse(tree)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    try:
        messages, tokens = _messages_or_tokens(prompt)
    except (TypeError, ValueError) as error:
        raise DrafterError(
            f"the argument prompt is {prompt!r:.60}, expected a text, messages with role and "
            "content, or token ids."
        ) from error
    if messages:
        arguments = choose_template_arguments((), {"drafter": drafter.config.target})
        tokens = prompt_tokens(ChatTemplate(target.tokenizer, arguments), messages)
    target.prepare()
    drafter.prepare()
    proposer = DrafterProposer(target, drafter, sampling)
    return generate_batch(
        target, [tokens], max_new_tokens=max_new_tokens, proposer=proposer, sampling=sampling,
        seed=seed, tree=tree or AutoPolicy(sampling.temperature > 0, proposer.max_depth),
        on_tokens=on_tokens,
    )[0]  # fmt: skip


def _messages_or_tokens(
    prompt: Sequence[Mapping[str, Any]] | Sequence[int],
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return a list of messages and a list of token ids, one of which is empty.

    Raises:
        TypeError, ValueError: the prompt is neither a chat nor token ids.
    """
    if isinstance(prompt, bytes):
        raise TypeError("bytes are neither a chat nor token ids")
    items: list[Any] = list(prompt)
    if not any(isinstance(item, Mapping) for item in items):
        return [], [index(item) for item in items]
    messages = [dict(item) for item in items]
    for message in messages:
        if "role" not in message or not {"content", "tool_calls"} & message.keys():
            raise ValueError("no chat")
    return messages, []
