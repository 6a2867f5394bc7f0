"""Settings of measurements: ``moa-data eval`` and ``generate``."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from typing_extensions import override

from ..config import Common, Config, Count, Natural, SamplingSettings, TargetSettings

if TYPE_CHECKING:
    from ..moa.decoding.tree import TreeShape

DRAFTING = ("chain", "tree", "auto")
Method = Literal["plain", "chain", "tree", "auto", "prompt-lookup"]


class DecodingConfig(TargetSettings):
    """Settings of every command that decodes with a target."""

    max_new_tokens: Common[Count] = 128
    """Stop an answer after this many tokens."""
    tree: Common[str] = "6x8x62"
    """Shape of method tree: levels of drafts x breadth x maximum number of verified nodes.
    LENGTH@PROBABILITY is a chain that stops early. The default is EAGLE-2's; its depth of 7
    includes the root."""
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    cuda_graphs: bool = True
    """On a CUDA device, launch all kernels of a target call as one graph, and those of a greedy
    chain of drafts as another. A step of an 8B target takes half the time. For targets with Llama's
    layers."""

    @override
    def problems(self) -> list[str]:
        return self.refusal_of(self.tree_shape)

    def tree_shape(self) -> "TreeShape | None":
        """Return the shape of ``tree``; raises DrafterError if this sampling cannot use it."""
        from ..moa.decoding.sampling import SamplingConfig
        from ..moa.decoding.tree import TreeShape

        shape = TreeShape.parse(self.tree)
        SamplingConfig(**self.sampling.arguments()).check_shape(shape)
        return shape


class DisconnectionSettings(Config):
    """Settings for drafters that continue without a reachable target."""

    disconnect: Common[Natural] = 0
    """Also cut the target's greedy answers, and let each drafter write this many tokens after a cut
    without verification. 0 skips this measurement."""
    cuts: Count = 3
    """Number of cuts of each answer, evenly spaced."""
    scorer: str | None = None
    """Function that scores answers after cuts, as module:function or file.py:function. It gets the
    prompt text and the answer text (up to the cut, and what followed), and returns a number."""


class EvalConfig(DecodingConfig):
    """Settings of `moa-data eval`."""

    # Type checkers only: at run time this signature would reject the names of grouped settings.
    if TYPE_CHECKING:

        def __init__(self, /, **values: Any) -> None: ...

    prompts: Common[str]
    """File of prompts, with a JSON object per line: chats (the last assistant turn is left out) or
    Spec-Bench questions."""
    drafter: Common[tuple[str, ...]] = ()
    """Runs of `moa-data train`, or folders with a drafter, also from the EAGLE or MoA authors.
    Separate several with commas to compare them."""
    method: Common[tuple[Method, ...]] = ("plain", "chain", "auto")
    """Methods to compare; plain, the baseline, comes first. Methods with each drafter: chain, tree
    and auto (chains that stop early, and plain decoding while drafts do not pay off). Method
    without a drafter: prompt-lookup."""
    out: Common[str] = "report.json"
    """File of the report as JSON. A Markdown file and figures are written next to it under the same
    name."""
    n_prompts: Common[Count | None] = None
    """Use this many prompts: the first chats, or Spec-Bench questions taken in turn from each
    category. The default is all."""
    draft_length: Count = 5
    """Tokens drafted per target call by chain and prompt-lookup."""
    batch_size: Count = 1
    """Prompts decoded together."""
    repeats: Count = 1
    """Number of times that each method decodes each prompt. The median is reported."""
    warmup: Natural = 2
    """Number of prompts that each method decodes before the measurement starts."""
    disconnection: DisconnectionSettings = Field(default_factory=DisconnectionSettings)

    @property
    def needs_drafters(self) -> bool:
        """Whether a method or the disconnection uses the drafters."""
        return bool(set(self.method) & set(DRAFTING)) or self.disconnection.disconnect > 0

    @override
    def problems(self) -> list[str]:
        problems = super().problems()
        if self.method[:1] != ("plain",):
            problems.append(
                f"method is {','.join(self.method) or 'empty'}, expected plain first (the baseline)"
            )
        if self.needs_drafters and not self.drafter:
            user = next(
                (f"method {name}" for name in self.method if name in DRAFTING), "disconnect"
            )
            problems.append(f"{user} needs a drafter: give --drafter RUN, or --method plain")
        return problems
