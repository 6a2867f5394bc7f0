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
    """Shape of the draft trees of the method tree, as LEVELSxBREADTHxNODES. On each level, the
    BREADTH most likely nodes get BREADTH children each. Of all nodes, the NODES most likely ones
    are verified. Larger trees get more tokens accepted per target call, but each call takes longer.
    LENGTH@PROBABILITY gives a chain in place of a tree; the chain ends when the probability that
    all its drafts are accepted falls below PROBABILITY. The default is the tree of EAGLE-2."""
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    cuda_graphs: bool = True
    """On a GPU, launch all kernels of a target call, or of a greedy chain of drafts, at once with
    CUDA graphs. For an 8B target this halves the time of a decoding step. It works for targets with
    Llama's layers; other targets ignore it."""

    @override
    def problems(self) -> list[str]:
        return self.refusal_of(self.tree_shape)

    def tree_shape(self) -> "TreeShape | None":
        """Parse ``tree``. Raises DrafterError if the sampling settings do not allow this tree."""
        from ..moa.decoding.sampling import SamplingConfig
        from ..moa.decoding.tree import TreeShape

        shape = TreeShape.parse(self.tree)
        SamplingConfig(**self.sampling.arguments()).check_shape(shape)
        return shape


class DisconnectionSettings(Config):
    """Settings for measuring how drafters continue an answer without their target."""

    disconnect: Common[Natural] = 0
    """Also measure how well drafters continue answers without the target, as after a loss of the
    network. The target's answers are cut off at some positions, and each drafter writes this number
    of tokens after each cut. 0 skips this measurement."""
    cuts: Count = 3
    """Only with `disconnect`, which lets drafters continue answers without the target: number of
    positions at which each answer is cut off. They are evenly spaced."""
    scorer: str | None = None
    """Only with `disconnect`, which lets drafters continue answers without the target: your Python
    function that scores the continued answers, as module:function or file.py:function. It gets two
    texts, the prompt and the whole answer, and returns a number. Default: answers are not
    scored."""


class EvalConfig(DecodingConfig):
    """Settings of `moa-data eval`."""

    # This signature is only for type checkers. At run time, it would reject settings of a nested
    # model, such as `temperature`. The base class accepts such settings, and moves them into the
    # nested model.
    if TYPE_CHECKING:

        def __init__(self, /, **values: Any) -> None: ...

    prompts: Common[str]
    """File of prompts with one JSON object per line: chats, or questions of the benchmark
    Spec-Bench. If a chat ends with an answer of the assistant, this answer is not part of the
    prompt."""
    drafter: Common[tuple[str, ...]] = ()
    """The drafters to measure, separated by commas. Each is a run of `moa-data train`, or a folder
    with a drafter, which may also come from the authors of EAGLE or MoA."""
    method: Common[tuple[Method, ...]] = ("plain", "chain", "auto")
    """Decoding methods to compare, separated by commas. plain: without drafts; this is the baseline
    and must be the first. chain: chains of drafts (`draft_length`). tree: trees of drafts (`tree`).
    auto: chains that end early, and no drafts while they would make decoding slower. prompt-lookup:
    drafts that are copied from the text, without a drafter. chain, tree and auto run once for each
    drafter."""
    out: Common[str] = "report.json"
    """File of the report, as JSON. The same report as Markdown and its figures are written next to
    this file."""
    n_prompts: Common[Count | None] = None
    """Number of prompts to use. From a file of chats, these are the first ones; from Spec-Bench,
    one question of each category in turn. Default: all."""
    draft_length: Count = 5
    """Number of tokens drafted per target call by the methods chain and prompt-lookup. The method
    tree has its own setting, `tree`."""
    batch_size: Count = 1
    """Number of prompts that are decoded together in one batch. Larger batches need more memory."""
    repeats: Count = 1
    """Number of times that each method decodes each prompt. The report shows the median of the
    times, so other load of the machine matters less with more repeats."""
    warmup: Natural = 2
    """Number of prompts that each method decodes before the measurement starts, so that one-time
    costs are not measured."""
    disconnection: DisconnectionSettings = Field(default_factory=DisconnectionSettings)

    @property
    def needs_drafters(self) -> bool:
        """Whether a method or the measurement of disconnections uses drafters."""
        return bool(set(self.method) & set(DRAFTING)) or self.disconnection.disconnect > 0

    @override
    def problems(self) -> list[str]:
        problems = super().problems()
        if self.method[:1] != ("plain",):
            problems.append(
                f"`method` is {','.join(self.method) or 'empty'}, expected plain as the first "
                "method, because it is the baseline"
            )
        if self.needs_drafters and not self.drafter:
            problems.append(
                f"the methods {', '.join(DRAFTING)} and `disconnect` need a drafter; give "
                "`drafter=RUN`, or `method=plain` without `disconnect`"
            )
        return problems
