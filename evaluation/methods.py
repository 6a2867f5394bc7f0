"""The methods of an evaluation by name: each turns a batch of prompts into generations."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ..moa.decoding.auto_tree import AutoShape, choose_shape
from ..moa.decoding.loop import Generation, OpenSession, draft_session, generate_batch
from ..moa.decoding.prompt_lookup import prompt_lookup_session
from ..moa.decoding.shape_policy import ShapePolicy
from ..moa.decoding.tree import Shape, TreeShape
from ..moa.target.live import Target
from .config import DRAFTING, EvalConfig
from .drafters import DrafterFacts, load_drafters
from .peers import TransformersGenerate, load_assistant

Generate = Callable[[list[list[int]], Sequence[int]], list[Generation]]
"""A method: (prompts as token ids, a seed for each) -> a generation for each."""


@dataclass
class Methods:
    """What an evaluation compares.

    Attributes:
        by_name: the methods, the baseline first.
        choices: of those named auto.
        drafters: by the name that they have in the methods' names.
    """

    by_name: dict[str, Generate] = field(default_factory=dict)
    choices: dict[str, AutoShape] = field(default_factory=dict)
    drafters: dict[str, DrafterFacts] = field(default_factory=dict)

    def add(self, name: str, generate: Generate) -> str:
        """Take a method; one that occurs again gets a number (``plain#2``)."""
        number = 1 + sum(known.split("#")[0] == name for known in self.by_name)
        name = name if number == 1 else f"{name}#{number}"
        self.by_name[name] = generate
        return name


def build_methods(config: EvalConfig, target: Target, calibration_prompts: Sequence[list[int]]) -> Methods:
    """The methods of an evaluation; with several drafters their names are part of the methods' names.

    Args:
        config: names of the methods and their settings.
        target: the loaded target.
        calibration_prompts: token ids that ``auto`` chooses its shapes with.

    Raises:
        DrafterError: a drafter or assistant that cannot be loaded or belongs to another target.
    """
    methods = Methods()
    sessions = _open_sessions(config, target, methods) if set(config.method) & set(DRAFTING) else {}
    decode = partial(generate_batch, target, max_new_tokens=config.max_new_tokens, sampling=config.sampling.build())
    for method in config.method:
        if method == "plain":
            methods.add(method, _decoding(decode, None, None))
        elif method == "prompt-lookup":
            methods.add(method, _decoding(decode, prompt_lookup_session(target.device), TreeShape(config.draft_length)))
        elif method in ("assisted", "transformers"):
            assistant = load_assistant(str(config.assistant), target) if method == "assisted" else None
            methods.add(method, TransformersGenerate(target, assistant, config.max_new_tokens, config.sampling.build()))
        else:
            for drafter, open_session in sessions.items():
                name = f"{method} {drafter}" if len(sessions) > 1 else method
                shape: Shape | None = TreeShape(config.draft_length)
                if method == "tree":
                    shape = config.tree_shape()
                if method == "auto":
                    choice = choose_shape(
                        target,
                        open_session,
                        calibration_prompts,
                        batch_size=config.batch_size,
                        sampling=config.sampling.build(),
                    )
                    # A policy learns from the answers; each repeat has its own, which has not seen the prompt before.
                    policies = [choice.policy() for _ in range(config.repeats)]
                    methods.choices[methods.add(name, _decoding(decode, open_session, *policies))] = choice
                else:
                    methods.add(name, _decoding(decode, open_session, shape))
    return methods


def _decoding(
    decode: Callable[..., list[Generation]], open_session: OpenSession | None, *shapes: Shape | ShapePolicy | None
) -> Generate:
    """Decode with these shapes in turn."""
    turns = itertools.cycle(shapes)

    def generate(prompts: list[list[int]], seeds: Sequence[int]) -> list[Generation]:
        return decode(prompts, open_session=open_session, tree=next(turns), seed=seeds)

    return generate


def _open_sessions(config: EvalConfig, target: Target, methods: Methods) -> dict[str, OpenSession]:
    """How each drafter opens its sessions, by name."""
    loaded = load_drafters(config.drafter, target, getattr(torch, config.dtype))
    methods.drafters |= {name: one.facts for name, one in loaded.items()}
    sampling = config.sampling.build()
    return {name: draft_session(target, one.drafter, one.frozen, sampling) for name, one in loaded.items()}
