"""DSpark (arXiv 2607.05147) and DFlash (arXiv 2602.06036), the block-parallel drafters without and with heads.

DSpark adds a Markov head, through which a draft follows from the one before it, and a confidence head, which says how
likely a draft is accepted. Without them and with the loss of the text's tokens alone it is DFlash; there, as in the
authors' own code, each slot drafts the token at its own position by default, and that of the anchor drafts none.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from ...errors import DrafterError
from ..nn.markov import MARKOV_HEADS, ConfidenceHead, markov_head
from .block import BlockDrafter
from .block_sizes import BlockDrafterSizes
from .sizes import DrafterSizes


@dataclass(frozen=True, kw_only=True)
class DFlashSizes(BlockDrafterSizes):
    """Everything needed to rebuild a DFlash drafter and to know which target it belongs to."""

    kind: ClassVar[str] = "dflash"

    block_size: int = 16
    """G, slots of a block."""
    sample_from_anchor: bool = False
    """The slot of the anchor drafts the token behind it; without, each further slot drafts its own token."""


class DFlashDrafter(BlockDrafter):
    """The backbone alone."""

    kind: ClassVar[str] = DFlashSizes.kind
    config_class: ClassVar[type[DrafterSizes]] = DFlashSizes
    config: DFlashSizes

    @property
    @override
    def reads_token_before(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class DSparkSizes(BlockDrafterSizes):
    """Everything needed to rebuild a DSpark drafter and to know which target it belongs to."""

    kind: ClassVar[str] = "dspark"

    block_size: int = 7
    """G, slots of a block."""
    sample_from_anchor: bool = True
    """The slot of the anchor drafts the token behind it; without, each further slot drafts its own token."""
    markov_head: str = "vanilla"
    """How a draft follows from the one before it, see :mod:`..nn.markov`."""
    markov_rank: int = 256
    """r, rank of the Markov head."""
    confidence_head: bool = True
    """Whether there is a confidence head."""
    confidence_with_markov: bool = True
    """Whether it reads the Markov head's embedding of the token before too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_head not in MARKOV_HEADS:
            raise DrafterError(f"markov_head is {self.markov_head!r}, expected one of {', '.join(MARKOV_HEADS)}.")
        self.check_at_least_one("markov_rank")


class DSparkDrafter(BlockDrafter):
    """The backbone, a Markov head and a confidence head."""

    kind: ClassVar[str] = DSparkSizes.kind
    config_class: ClassVar[type[DrafterSizes]] = DSparkSizes
    config: DSparkSizes

    def __init__(self, config: DSparkSizes) -> None:
        super().__init__(config)
        self.markov_head = markov_head(config.markov_head, config.vocab_size, config.markov_rank, config.hidden_size)
        if config.confidence_head:
            own = config.markov_rank if self.reads_token_before else 0
            self.confidence_head = ConfidenceHead(config.hidden_size + own)

    @property
    @override
    def reads_token_before(self) -> bool:
        return self.config.confidence_with_markov and self.config.markov_head != "none"
