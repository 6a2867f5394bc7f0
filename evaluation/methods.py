"""The methods of an evaluation by name: each turns a batch of prompts into generations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..moa.decoding.loop import Generation, generate_batch
from ..moa.decoding.policy import AutoPolicy, ShapePolicy
from ..moa.decoding.proposer import DrafterProposer, PromptLookupProposer, Proposer
from ..moa.decoding.tree import Shape, TreeShape
from ..moa.targets.live import Target
from .config import EvalConfig
from .drafters import LoadedDrafter

Generate = Callable[[list[list[int]], Sequence[int]], list[Generation]]
"""A method: (prompts as token ids, a seed for each) -> a generation for each."""


@dataclass
class Methods:
    """The methods that an evaluation compares.

    Attributes:
        by_name: the methods, the baseline first.
    """

    by_name: dict[str, Generate] = field(default_factory=dict)
    policies: dict[str, AutoPolicy] = field(default_factory=dict)

    def add(self, name: str, generate: Generate) -> str:
        """Add a method; a name that occurs again gets a number (``plain#2``)."""
        number = 1 + sum(known.split("#")[0] == name for known in self.by_name)
        name = name if number == 1 else f"{name}#{number}"
        self.by_name[name] = generate
        return name


def build_methods(config: EvalConfig, target: Target, drafters: Mapping[str, LoadedDrafter]) -> Methods:
    """Build the methods of an evaluation; with several drafters their names are part of the methods' names."""
    methods, sampling = Methods(), config.sampling.build()
    chain = TreeShape(config.draft_length)

    def decoding(proposer: Proposer | None, shape: Shape | ShapePolicy | None) -> Generate:
        decode = partial(generate_batch, target, max_new_tokens=config.max_new_tokens, sampling=sampling)
        return lambda prompts, seeds: decode(prompts, proposer=proposer, tree=shape, seed=seeds)

    for method in config.method:
        if method == "plain":
            methods.add(method, decoding(None, None))
            continue
        if method == "prompt-lookup":
            methods.add(method, decoding(PromptLookupProposer(target.device), chain))
            continue
        for drafter, loaded in drafters.items():
            name = f"{method} {drafter}" if len(drafters) > 1 else method
            proposer = DrafterProposer(target, loaded.drafter, loaded.frozen, sampling)
            if method == "auto":
                policy = AutoPolicy(sampling.temperature > 0, proposer.max_depth)
                methods.policies[methods.add(name, decoding(proposer, policy))] = policy
            else:
                methods.add(name, decoding(proposer, config.tree_shape() if method == "tree" else chain))
    return methods
