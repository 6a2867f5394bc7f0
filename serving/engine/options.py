"""Settings of an engine. No torch here: the command line reads them for its help."""

from typing import TYPE_CHECKING

from typing_extensions import override

from ...config import Config, Count, NonNegative
from ...errors import DrafterError

if TYPE_CHECKING:
    from ...moa.decoding.tree import TreeShape


class EngineOptions(Config):
    """Bounds of the engine."""

    kv_tokens: Count = 16384
    """Positions whose keys and values are kept, of all texts together. Texts without work lose theirs first and are
    read again when they continue."""
    most_sequences: Count = 32
    """Texts that share a target call."""
    most_waiting: Count = 256
    """Open texts beyond those; a further one is refused as overloaded."""
    prefill_chunk: Count = 256
    """Tokens of prompts that a target call reads, of all texts together: more is faster, less delays others less."""
    most_drafts: Count = 64
    """Drafts of a client that one target call verifies."""
    tree: str = "auto"
    """Shape of the server's own drafts: a chain's length such as 5, LENGTH@PROBABILITY, DEPTHxBREADTHxNODES;
    or auto: 10@0.2, and plain steps while drafts do not pay."""
    target_ms: NonNegative = 0.0
    """Let each target call take at least so many milliseconds, to stand for a slower target."""

    @property
    def shape(self) -> "TreeShape | None":
        """The shape of the server's own drafts; None for auto. Raises DrafterError where ``tree`` is no shape."""
        from ...moa.decoding.tree import TreeShape  # imports torch

        return None if self.tree == "auto" else TreeShape.parse(self.tree)

    @override
    def problems(self) -> list[str]:
        try:
            _ = self.shape
        except DrafterError as error:
            return [str(error).rstrip(".")]
        return []
