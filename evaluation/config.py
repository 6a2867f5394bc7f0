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
    """Shape for tree: levels of drafts x breadth x most nodes verified, or a chain that stops early, as
    LENGTH@PROBABILITY. The default is EAGLE-2's, whose depth 7 counts the root."""
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    cuda_graphs: bool = True
    """On a CUDA device, launch the kernels of a call of the target at once, and those of a greedy chain of drafts: a
    step of an 8B target takes half the time. For targets with Llama's layers."""

    @override
    def problems(self) -> list[str]:
        return self.refusal_of(self.tree_shape)

    def tree_shape(self) -> "TreeShape | None":
        """Return the shape of ``tree``; raises DrafterError where it cannot be decoded with this sampling."""
        from ..moa.decoding.sampling import SamplingConfig
        from ..moa.decoding.tree import TreeShape

        shape = TreeShape.parse(self.tree)
        SamplingConfig(**self.sampling.arguments()).check_shape(shape)
        return shape


class DisconnectionSettings(Config):
    """What drafters write when the target can no longer be reached."""

    disconnect: Common[Natural] = 0
    """Also cut the target's greedy answers, and let each drafter write this many tokens after a cut without
    verification; 0 does not."""
    cuts: Count = 3
    """Cuts of each answer, evenly spaced over it."""
    scorer: str | None = None
    """Function that scores answers after cuts, module:function or file.py:function: called with the texts of prompt and
    answer (up to the cut, and what followed), it returns a number."""


class EvalConfig(DecodingConfig):
    """Settings of `moa-data eval`."""

    if TYPE_CHECKING:  # else they refuse names of settings in groups

        def __init__(self, /, **values: Any) -> None: ...

    prompts: Common[str]
    """File of prompts, a JSON object per line: chats (the last assistant turn is left out) or Spec-Bench questions."""
    drafter: Common[tuple[str, ...]] = ()
    """Runs of `moa-data train`, or folders with a drafter, also of the EAGLE or MoA authors; several, separated by
    commas, are compared."""
    method: Common[tuple[Method, ...]] = ("plain", "chain", "auto")
    """Methods to compare, the baseline first: plain; with each drafter chain, tree, auto (chains that stop, and plain
    decoding while they do not pay); without one prompt-lookup."""
    out: Common[str] = "report.json"
    """The report as JSON; a Markdown file and figures are written beside it under the same name."""
    n_prompts: Common[Count | None] = None
    """Use this many prompts: the first ones of chats, taken in turn from each category of Spec-Bench; default: all."""
    draft_length: Count = 5
    """Tokens drafted per target call by chain and prompt-lookup."""
    batch_size: Count = 1
    """Prompts decoded together."""
    repeats: Count = 1
    """Times that each method decodes each prompt; the median counts."""
    warmup: Natural = 2
    """Prompts that each method decodes before anything is measured."""
    disconnection: DisconnectionSettings = Field(default_factory=DisconnectionSettings)

    @property
    def needs_drafters(self) -> bool:
        """Whether a method or the disconnection uses the drafters."""
        return bool(set(self.method) & set(DRAFTING)) or self.disconnection.disconnect > 0

    @override
    def problems(self) -> list[str]:
        found = super().problems()
        if self.method[:1] != ("plain",):
            found.append(
                f"method is {','.join(self.method) or 'empty'}, expected plain first (the baseline)"
            )
        if self.needs_drafters and not self.drafter:
            user = next(
                (f"method {name}" for name in self.method if name in DRAFTING), "disconnect"
            )
            found.append(f"{user} needs a drafter: give --drafter RUN, or --method plain")
        return found
