"""Settings of ``moa-data regenerate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from typing_extensions import override

from ..config import Common, Config, Count, Positive
from ..evaluation.config import SamplingSettings
from ..pipeline.config import TemplateKwargs

if TYPE_CHECKING:
    from ..moa.decoding.tree import Shape

_DEFAULT_BATCH, _DEFAULT_REQUESTS = 8, 32


class QuestionSettings(Config):
    """Which rows are answered, and what keeps a chat out."""

    split: Common[str | None] = None
    """Split of the dataset, chosen as `extract` does."""
    columns: tuple[str, ...] = ()
    """Columns of rows that are no chats, as ROLE=COLUMN; or alpaca, or prompt-completion. As in `extract`."""
    dataset_config: str | None = None
    """Configuration of a Hub dataset that has several."""
    dataset_revision: str | None = None
    """Branch, tag or commit of a Hub dataset; default: main."""
    max_rows: Common[Count | None] = None
    """Read this many rows, the first ones; default: all."""
    max_length: Count = 2048
    """Longest chat in tokens, answers included; as the --max-length of the extraction to come."""
    max_rejected_fraction: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Fail when more than this fraction of the rows gives no chat."""


class ServerSettings(Config):
    """How a server is asked."""

    answer_s: Positive = 600.0
    """Seconds after which a request is given up, and its row rejected."""
    patience_s: Positive = 120.0
    """Seconds for which a server that is overloaded or out of reach is asked again."""


class RegenerateConfig(Config):
    """Settings of `moa-data regenerate`: who answers which questions, and where to."""

    model: Common[str | None] = None
    """The target: a folder or a hub id. With --server its name there; default: the only model that the server has."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model; default: main."""
    drafter: Common[str | None] = None
    """A run of `moa-data train`, or a folder with a drafter, whose drafts speed up the target."""
    server: Common[str | None] = None
    """Ask a server that speaks OpenAI's API instead, such as http://HOST:8000/v1. A key is taken from the environment
    (OPENAI_API_KEY)."""
    dataset: Common[str]
    """Chats: a hub id, a jsonl, json, csv, tsv, parquet or arrow file, or a folder of them."""
    out: Common[str]
    """File of the answered chats (.jsonl), or a folder for it; the same command run again goes on where it stopped."""
    template_kwargs: TemplateKwargs = ()
    """Arguments of the chat template, as NAME=VALUE, such as enable_thinking=false of Qwen3; default: those that the
    drafter's store records. A server is sent them as chat_template_kwargs."""
    max_new_tokens: Common[Count] = 1024
    """Most tokens of an answer; one that has not ended by then is left out."""
    tree: str | None = None
    """Drafts per target call: a chain's length such as 5, 10@0.2 for one that stops where it is less likely than 0.2 to
    be accepted, DEPTHxBREADTHxNODES, static:NODES. Default: 10@0.2, and 5 where tokens are sampled."""
    batch_size: Common[Count | None] = None
    """Chats that are answered together; default: 8, and 32 requests at once with --server."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of target and drafter."""
    device: Common[str] = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    questions: QuestionSettings = Field(default_factory=QuestionSettings)
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    serving: ServerSettings = Field(default_factory=ServerSettings)

    @override
    def problems(self) -> list[str]:
        if self.server is None:
            if self.model is None:
                return ["nobody is named who answers: give --model MODEL or --server URL"]
            return self._shape_problems()
        local = {"drafter": self.drafter, "tree": self.tree, "revision": self.revision}
        given = [name for name, value in local.items() if value is not None]
        if given:
            return [f"{given[0]} is of a target that is loaded here; leave it out with --server"]
        if not self.server.startswith(("http://", "https://")):
            return [f"server is {self.server!r}, expected a URL such as http://127.0.0.1:8000/v1"]
        return []

    def _shape_problems(self) -> list[str]:
        from ..errors import DrafterError

        if self.tree is not None and self.drafter is None:
            return [f"tree is {self.tree!r}, but without a drafter nothing drafts; give --drafter RUN"]
        try:
            self.shape()
        except DrafterError as error:
            return [str(error).rstrip(".")]
        return []

    def shape(self) -> Shape:
        """Return the shape of the drafts, which is fixed: that of ``auto`` follows the machine's timing.

        Raises:
            DrafterError: ``tree`` is no shape, or one that cannot be decoded with this sampling.
        """
        from ..moa.decoding.tree import parse_shape

        shape = parse_shape(self.tree or ("5" if self.sampling.temperature else "10@0.2"))
        self.sampling.build().check_shape(shape)
        return shape

    @property
    def n_together(self) -> int:
        """Chats that are answered together."""
        return self.batch_size or (_DEFAULT_BATCH if self.server is None else _DEFAULT_REQUESTS)
