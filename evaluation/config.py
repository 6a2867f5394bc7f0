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
    """Maximum length of an answer in tokens."""
    tree: Common[str] = "6x8x62"
    """Shape of the draft trees of method tree, as LEVELSxBREADTHxNODES: on each level, the best
    BREADTH nodes get BREADTH children each, and the target verifies the best NODES nodes of all
    levels. Larger trees get more tokens accepted per target call, but each call takes longer.
    LENGTH@PROBABILITY gives a chain instead, which ends when the probability that all its drafts
    are accepted falls below PROBABILITY. The default is the tree of EAGLE-2, whose authors also
    count the root as a level."""
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    cuda_graphs: bool = True
    """Use CUDA graphs on a GPU: all kernels of a target call, or of a greedy chain of drafts, are
    launched at once. With graphs, a step of an 8B target takes half as long as without. Only for
    targets with Llama's layers."""

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
    """Settings for measuring how drafters continue an answer without their target."""

    disconnect: Common[Natural] = 0
    """Measure how well drafters continue without the target, as after a loss of the network:
    answers of the target are cut, and each drafter writes this many tokens after each cut. 0 skips
    this measurement."""
    cuts: Count = 3
    """Only with --disconnect, which cuts answers to measure how drafters continue them: number of
    positions at which each answer is cut. They are evenly spaced."""
    scorer: str | None = None
    """Only with --disconnect: Python function that scores the answers continued by a drafter, as
    module:function or file.py:function. It gets two texts, the prompt and the whole answer, and
    returns a number. Default: no scores."""


class EvalConfig(DecodingConfig):
    """Settings of `moa-data eval`."""

    # This signature is only for type checkers. At run time it would reject settings that belong to
    # a nested model, such as `temperature`, which the base class moves there.
    if TYPE_CHECKING:

        def __init__(self, /, **values: Any) -> None: ...

    prompts: Common[str]
    """File of prompts with one JSON object per line: chats, or questions of the benchmark
    Spec-Bench. If a chat ends with a message of the assistant, the prompt ends before this
    message."""
    drafter: Common[tuple[str, ...]] = ()
    """The drafters to measure, separated by commas. Each is a run of `moa-data train`, or a folder
    with a drafter, which may come from the EAGLE or MoA authors."""
    method: Common[tuple[Method, ...]] = ("plain", "chain", "auto")
    """Decoding methods to compare, separated by commas. plain: without drafts; it is the baseline
    and must come first. chain and tree: draft with each drafter. auto: chains that end early, and
    plain decoding while drafts would make decoding slower. prompt-lookup: drafts copied from the
    text, without a drafter."""
    out: Common[str] = "report.json"
    """File of the report (JSON). The report as Markdown and its figures are written next to this
    file."""
    n_prompts: Common[Count | None] = None
    """Number of prompts to use: the first chats, or Spec-Bench questions from each category in
    turn. Default: all."""
    draft_length: Count = 5
    """Number of tokens drafted per target call by the methods chain and prompt-lookup. The method
    tree has its own option, --tree."""
    batch_size: Count = 1
    """Number of prompts that are decoded together in one batch."""
    repeats: Count = 1
    """Number of times that each method decodes each prompt. The report has the median of the times,
    so more repeats make it less dependent on other load of the machine."""
    warmup: Natural = 2
    """Number of prompts that each method decodes before the measurement begins, so that one-time
    costs of the first prompts are not measured."""
    disconnection: DisconnectionSettings = Field(default_factory=DisconnectionSettings)

    @property
    def needs_drafters(self) -> bool:
        """Whether drafters are used by a method, or by the measurement of disconnections."""
        return bool(set(self.method) & set(DRAFTING)) or self.disconnection.disconnect > 0

    @override
    def problems(self) -> list[str]:
        problems = super().problems()
        if self.method[:1] != ("plain",):
            problems.append(
                f"method is {','.join(self.method) or 'empty'}, expected plain as the first one, "
                "because it is the baseline"
            )
        if self.needs_drafters and not self.drafter:
            problems.append(
                f"the methods {', '.join(DRAFTING)} and the setting disconnect need a drafter: "
                "give --drafter RUN, or --method plain"
            )
        return problems
