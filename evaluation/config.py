"""Settings of an evaluation; ``moa-data eval`` turns each field into an option."""

from dataclasses import dataclass

METHODS = ("plain", "chain")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EvalConfig:
    """Which prompts to decode, with what, and where the report goes."""

    model: str
    """The target: a folder or a hub id."""
    prompts: str
    """File of prompts, a JSON object per line: chats (the last assistant turn is left out) or Spec-Bench questions."""
    drafter: str | None = None
    """A run of `moa-data train`, or a folder with a drafter; only `--method plain` alone goes without."""
    method: tuple[str, ...] = ("plain", "chain")
    """Methods to compare, the baseline first: plain, chain."""
    out: str = "report.json"
    """The report as JSON; a Markdown file and two figures are written beside it under the same name."""
    n_prompts: int | None = None
    """Use this many prompts: the first ones of chats, taken in turn from each category of Spec-Bench; default: all."""
    max_new_tokens: int = 128
    """Stop an answer after this many tokens."""
    draft_length: int = 5
    """Tokens drafted per target call."""
    dtype: str = "float32"
    """Dtype of target and drafter: float32, bfloat16 or float16; only float32 promises the tokens of plain decoding."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    warmup: int = 1
    """Prompts that each method decodes before anything is measured."""

    def problems(self) -> list[str]:
        """Every value that cannot be used, one line each; empty when all are good."""
        found = [
            f"{name} is {getattr(self, name)}, expected at least 1"
            for name in ("max_new_tokens", "draft_length", "n_prompts")
            if getattr(self, name) is not None and getattr(self, name) < 1
        ]
        if self.warmup < 0:
            found.append(f"warmup is {self.warmup}, expected 0 or more")
        if self.dtype not in DTYPES:
            found.append(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        unknown = [name for name in self.method if name not in METHODS]
        if unknown or not self.method or self.method[0] != "plain":
            found.append(
                f"method is {','.join(self.method) or 'empty'}, expected plain first (the baseline), "
                f"then any of {', '.join(METHODS)}"
            )
        if "chain" in self.method and not self.drafter:
            found.append("method chain needs a drafter: give --drafter RUN, or --method plain")
        return found
