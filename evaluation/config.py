"""Settings of measurements; ``moa-data eval``, ``compare`` and ``disconnect`` turn each field into an option."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..moa.decoding.sampling import SamplingConfig
    from ..moa.decoding.tree import Shape

DRAFTING = ("chain", "tree", "auto")
METHODS = ("plain", *DRAFTING, "prompt-lookup", "assisted", "transformers")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EvalConfig:
    """Which prompts to decode, with what, and where the report goes."""

    model: str
    """The target: a folder or a hub id."""
    prompts: str
    """File of prompts, a JSON object per line: chats (the last assistant turn is left out) or Spec-Bench questions."""
    drafter: tuple[str, ...] = ()
    """Runs of `moa-data train`, or folders with a drafter, also of the EAGLE or MoA authors; several, separated by
    commas, are compared."""
    method: tuple[str, ...] = ("plain", "chain", "auto")
    """Methods to compare, the baseline first: plain; with each drafter chain, tree, auto (the shape that is fastest
    here, from measured costs and acceptance); without one prompt-lookup, assisted (transformers with --assistant),
    transformers (its plain generate)."""
    assistant: str | None = None
    """Small model with the target's tokenizer for `assisted`: a folder or a hub id."""
    out: str = "report.json"
    """The report as JSON; a Markdown file and figures are written beside it under the same name."""
    n_prompts: int | None = None
    """Use this many prompts: the first ones of chats, taken in turn from each category of Spec-Bench; default: all."""
    max_new_tokens: int = 128
    """Stop an answer after this many tokens."""
    draft_length: int = 5
    """Tokens drafted per target call by chain and prompt-lookup."""
    tree: str = "6x8x62"
    """Shape for tree: levels of drafts x breadth x most nodes verified, static:NODES, or a chain as LENGTH@PROBABILITY,
    which stops where it is less likely than that to be accepted. The default is EAGLE-2's, whose depth 7 counts the
    root."""
    batch_size: int = 1
    """Prompts decoded together."""
    repeats: int = 1
    """Times that each method decodes each prompt; the median counts."""
    temperature: float = 0.0
    """0 decodes greedily; above it tokens are sampled, and drafting keeps the target's distribution."""
    top_p: float = 1.0
    """Sample from the most likely tokens up to this cumulative probability."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 for all."""
    repetition_penalty: float = 1.0
    """Divide the logits of tokens that occurred by this."""
    seed: int = 0
    """Of sampling; prompt i draws from seed + i."""
    dtype: str = "float32"
    """Dtype of target and drafter: float32, bfloat16 or float16; only float32 promises the tokens of plain decoding."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    compile: int = 0
    """Compile the target's calls for texts of up to this many tokens: static shapes, as CUDA graphs on a CUDA device. 0
    does not. The first call of each size takes a minute; raise --warmup. Slower on a CPU."""
    warmup: int = 2
    """Prompts that each method decodes before anything is measured; auto calibrates on them."""

    def problems(self) -> list[str]:
        """Every value that cannot be used, one line each; empty when all are good."""
        found = _below_one(self, ("max_new_tokens", "draft_length", "n_prompts", "batch_size", "repeats"))
        found += [
            f"{name} is {getattr(self, name)}, expected 0 or more"
            for name in ("warmup", "compile")
            if getattr(self, name) < 0
        ]
        if self.dtype not in DTYPES:
            found.append(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        from ..moa.decoding.sampling import check_seed
        from ..moa.errors import DrafterError

        for make in (self.sampling, self.tree_shape, partial(check_seed, self.seed)):
            try:
                make()
            except DrafterError as error:
                if (problem := str(error).rstrip(".")) not in found:
                    found.append(problem)
        return found + self._method_problems()

    def _method_problems(self) -> list[str]:
        found = []
        unknown = [name for name in self.method if name not in METHODS]
        if unknown or not self.method or self.method[0] not in ("plain", "transformers"):
            found.append(
                f"method is {','.join(self.method) or 'empty'}, expected plain first (the baseline), "
                f"then any of {', '.join(METHODS)}"
            )
        drafting = [name for name in self.method if name in DRAFTING]
        if drafting and not self.drafter:
            found.append(f"method {drafting[0]} needs a drafter: give --drafter RUN, or --method plain")
        if "assisted" in self.method and not self.assistant:
            found.append("method assisted needs a small model: give --assistant MODEL")
        return found

    def sampling(self) -> "SamplingConfig":
        """How tokens are chosen.

        Raises:
            DrafterError: a value without a meaning.
        """
        from ..moa.decoding.sampling import SamplingConfig

        return SamplingConfig(self.temperature, self.top_p, self.top_k, self.repetition_penalty)

    def tree_shape(self) -> "Shape":
        """Shape of the method ``tree``.

        Raises:
            DrafterError: no shape, or one that makes no sense or none with this sampling.
        """
        from ..moa.decoding.tree import parse_shape

        shape = parse_shape(self.tree)
        self.sampling().check_shape(shape)
        return shape


@dataclass(frozen=True)
class CompareConfig:
    """Which runs to compare, on which prompts, and where the report goes."""

    runs: tuple[str, ...]
    """Runs of `moa-data train`, or folders with a drafter."""
    model: str
    """The target: a folder or a hub id."""
    prompts: str
    """File of prompts, a JSON object per line: chats (the last assistant turn is left out) or Spec-Bench questions."""
    out: str = "comparison.json"
    """The report as JSON; a Markdown file and figures are written beside it under the same name."""
    n_prompts: int | None = None
    """Use this many prompts: the first ones of chats, taken in turn from each category of Spec-Bench; default: all."""
    max_new_tokens: int = 128
    """Stop an answer after this many tokens."""
    draft_length: int = 5
    """Tokens drafted per target call by chains."""
    tree: str = "6x8x62"
    """Shape of trees: levels of drafts x breadth x most nodes verified, static:NODES, or a chain as LENGTH@PROBABILITY,
    which stops where it is less likely than that to be accepted."""
    batch_size: int = 1
    """Prompts decoded together."""
    repeats: int = 1
    """Times that each drafter decodes each prompt; the median counts."""
    dtype: str = "float32"
    """Dtype of target and drafters: float32, bfloat16 or float16."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    warmup: int = 2
    """Prompts that are decoded before anything is measured."""

    def evaluation(self) -> EvalConfig:
        """The evaluation that measures them: plain decoding, and chains and trees of each drafter."""
        shared = {name: getattr(self, name) for name in vars(self) if name not in ("runs", "out")}
        return EvalConfig(drafter=self.runs, method=("plain", "chain", "tree"), out=self.out, **shared)

    def problems(self) -> list[str]:
        """Every value that cannot be used, one line each; empty when all are good."""
        return self.evaluation().problems() if self.runs else ["no run is given: name the folders to compare"]


@dataclass(frozen=True)
class DisconnectConfig:
    """Which drafters go on alone after a cut, on which prompts, and where the report goes."""

    model: str
    """The target: a folder or a hub id."""
    prompts: str
    """File of prompts, a JSON object per line: chats (the last assistant turn is left out) or Spec-Bench questions, of
    which the first turn is used."""
    drafter: tuple[str, ...]
    """Runs of `moa-data train`, or folders with a drafter; several are separated by commas."""
    out: str = "disconnection.json"
    """The report as JSON; a Markdown file and a figure are written beside it under the same name."""
    n_prompts: int | None = None
    """Use this many prompts: the first ones of chats, taken in turn from each category of Spec-Bench; default: all."""
    n_tokens: int = 32
    """Tokens that a drafter writes after each cut."""
    cuts: int = 3
    """Cuts of each answer, evenly spaced over it."""
    max_new_tokens: int = 128
    """Cut an answer within its first tokens up to this many."""
    scorer: str | None = None
    """Function that scores answers, module:function or file.py:function: called with the text of the prompt and that of
    the answer (what the target wrote up to the cut and what followed), it returns a number."""
    batch_size: int = 8
    """Cuts that are continued together."""
    dtype: str = "float32"
    """Dtype of target and drafters: float32, bfloat16 or float16."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""

    def problems(self) -> list[str]:
        """Every value that cannot be used, one line each; empty when all are good."""
        found = _below_one(self, ("n_tokens", "cuts", "max_new_tokens", "n_prompts", "batch_size"))
        if self.dtype not in DTYPES:
            found.append(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if not self.drafter:
            found.append("no drafter is given: give --drafter RUN")
        if self.scorer is not None and not all(self.scorer.rpartition(":")[::2]):
            found.append(f"scorer is {self.scorer!r}, expected module:function or file.py:function")
        return found


def _below_one(config: object, names: tuple[str, ...]) -> list[str]:
    return [
        f"{name} is {getattr(config, name)}, expected at least 1"
        for name in names
        if getattr(config, name) is not None and getattr(config, name) < 1
    ]
