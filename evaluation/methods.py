"""The methods of an evaluation by name: each turns a batch of prompts into generations."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from ..moa.auto_tree import AutoShape, choose_shape
from ..moa.bundle import FrozenTarget
from ..moa.checkpoint import check_drafter_matches, load_drafter
from ..moa.decode import Generation, OpenSession, draft_session, generate_batch
from ..moa.prompt_lookup import prompt_lookup_session
from ..moa.target import Target
from ..moa.tree import Shape, TreeShape
from .config import DRAFTING, EvalConfig
from .peers import TransformersGenerate, load_assistant

Generate = Callable[[list[list[int]], Sequence[int]], list[Generation]]
"""A method: (prompts as token ids, a seed for each) -> a generation for each."""


def build_methods(
    config: EvalConfig, target: Target, calibration_prompts: Sequence[list[int]]
) -> tuple[dict[str, Generate], dict[str, AutoShape]]:
    """The methods by name; one that occurs again gets a number (``plain#2``), with several drafters their names.

    Args:
        config: names of the methods and their settings.
        target: the loaded target.
        calibration_prompts: token ids that ``auto`` chooses its shapes with.

    Returns:
        The methods, and the choices of those named auto.

    Raises:
        DrafterError: a drafter or assistant that cannot be loaded or belongs to another target.
    """
    sessions = _open_sessions(config, target) if set(config.method) & set(DRAFTING) else {}
    decode = partial(generate_batch, target, max_new_tokens=config.max_new_tokens, sampling=config.sampling())
    methods: dict[str, Generate] = {}
    choices: dict[str, AutoShape] = {}

    def add(name: str, generate: Generate) -> str:
        number = 1 + sum(known.split("#")[0] == name for known in methods)
        name = name if number == 1 else f"{name}#{number}"
        methods[name] = generate
        return name

    for method in config.method:
        if method == "plain":
            add(method, _decoding(decode, None, None))
        elif method == "prompt-lookup":
            add(method, _decoding(decode, prompt_lookup_session(target.device), TreeShape(config.draft_length)))
        elif method in ("assisted", "transformers"):
            assistant = load_assistant(str(config.assistant), target) if method == "assisted" else None
            add(method, TransformersGenerate(target, assistant, config.max_new_tokens, config.sampling()))
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
                        sampling=config.sampling(),
                    )
                    choices[add(name, _decoding(decode, open_session, choice.shape))] = choice
                else:
                    add(name, _decoding(decode, open_session, shape))
    return methods, choices


def _decoding(
    decode: Callable[..., list[Generation]], open_session: OpenSession | None, shape: Shape | None
) -> Generate:
    if shape is None:
        open_session = None

    def generate(prompts: list[list[int]], seeds: Sequence[int]) -> list[Generation]:
        return decode(prompts, open_session=open_session, tree=shape, seed=seeds)

    return generate


def _open_sessions(config: EvalConfig, target: Target) -> dict[str, OpenSession]:
    """Drafters by name: the last part of the folder that is not shared."""
    sessions: dict[str, OpenSession] = {}
    dtype = getattr(torch, config.dtype)
    for folder in config.drafter:
        drafter = load_drafter(folder, dtype, target.device)
        check_drafter_matches(drafter, target)
        frozen = FrozenTarget.from_model(target.model, drafter.config.target_layer_inference)
        path = Path(folder).expanduser().absolute()  # a link keeps its own name
        name = path.parent.name if path.name == "drafter" else path.name
        while name in sessions:
            name += "'"
        sessions[name] = draft_session(target, drafter, frozen, config.sampling())
    return sessions
