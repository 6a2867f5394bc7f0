"""The bounds of an engine, and the refusal of requests that are beyond them."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import DrafterError, RequestInvalid
from ...moa.decoding.sampling import check_seed
from ...moa.decoding.tree import Shape
from ...moa.drafters.base import Drafter
from ...moa.drafters.registry import REMOTE_KINDS
from ...moa.targets.live import Target
from .kv import BLOCK_TOKENS, blocks_for
from .sequence import Request


@dataclass(frozen=True)
class EngineSettings:
    """Bounds of an engine.

    Attributes:
        kv_tokens: positions whose KV is kept, of all sequences together.
        most_sequences: sequences that share a target call.
        most_waiting: open sequences beyond those; a further one is refused.
        prefill_chunk: tokens of texts that are read in a call, of all sequences together.
        most_drafts: drafts of one VERIFY.
        drafts: shape of the server's own drafts; None for chains that give way to plain steps where they do not pay.
        target_ms: milliseconds that a target call takes at least, to stand for a slower target.
    """

    kv_tokens: int = 16384
    most_sequences: int = 32
    most_waiting: int = 256
    prefill_chunk: int = 256
    most_drafts: int = 64
    drafts: Shape | None = None
    target_ms: float = 0.0


class Admission:
    """Checks requests before they are taken up; safe to call from any thread.

    Args:
        most_drafts: drafts of one round at most, the client's or the server's own.

    Attributes:
        most_positions: tokens that a text can have, prompt included.
    """

    def __init__(
        self, target: Target, drafters: Mapping[str, Drafter], settings: EngineSettings, most_drafts: int
    ) -> None:
        self._vocab_size: int = target.sizes["vocab_size"]
        self._max_positions = target.max_positions
        self._drafters, self._settings = drafters, settings
        self.most_positions = min(self._max_positions, blocks_for(settings.kv_tokens) * BLOCK_TOKENS - most_drafts)

    def limit(self, request: Request) -> int:
        """The bound on the tokens of the whole text."""
        return min(request.n_prompt + request.max_new_tokens, self._max_positions)

    def check(self, request: Request) -> None:
        """Refuse what cannot be served.

        Raises:
            RequestInvalid: a message for whoever sent the request.
        """
        n_prompt = request.n_prompt
        if not 1 <= n_prompt <= len(request.tokens):
            raise RequestInvalid("the prompt is empty; give at least one token.")
        if n_prompt >= self._max_positions:
            raise RequestInvalid(
                f"the prompt has {n_prompt} tokens, the model has {self._max_positions} positions; shorten the prompt."
            )
        self._check_tokens(request.tokens)
        if request.max_new_tokens < 1:
            raise RequestInvalid(f"max_new_tokens must be at least 1, got {request.max_new_tokens}.")
        if len(request.tokens) > self.limit(request):
            raise RequestInvalid(
                f"the text has {len(request.tokens)} tokens, more than its own bound of {self.limit(request)}."
            )
        if self.limit(request) > self.most_positions:
            raise RequestInvalid(
                f"the text may become {self.limit(request)} tokens long, {self.most_positions} fit in the server's "
                "memory; ask for fewer tokens or shorten the prompt."
            )
        if not 0 <= request.n_context <= len(request.tokens):
            raise RequestInvalid(f"contexts of {request.n_context} positions cannot be known of this text.")
        try:
            check_seed(request.seed)
        except DrafterError as error:
            raise RequestInvalid(str(error)) from error
        self._check_drafter(request)

    def check_drafts(self, drafts: tuple[int, ...], parents: tuple[int, ...]) -> None:
        """Refuse drafts that make no tree of tokens.

        Raises:
            RequestInvalid: a message for whoever sent them.
        """
        if len(drafts) > self._settings.most_drafts:
            raise RequestInvalid(
                f"{len(drafts)} drafts are more than the {self._settings.most_drafts} that one call verifies; send "
                "them in parts."
            )
        self._check_tokens(drafts)
        if parents and len(parents) != len(drafts):
            raise RequestInvalid(f"{len(drafts)} drafts have {len(parents)} parents; give one for each, or none.")
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise RequestInvalid(f"the parent of draft {node} is {parent}, expected one of the drafts before it.")

    def _check_tokens(self, tokens: tuple[int, ...]) -> None:
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
            raise RequestInvalid(f"tokens must be from 0 to {self._vocab_size - 1}; use the model's tokenizer.")

    def _check_drafter(self, request: Request) -> None:
        name = request.drafter
        if name is None:
            if request.wants_context:
                raise RequestInvalid("contexts are a drafter's; name one.")
            return
        if name not in self._drafters:
            known = ", ".join(self._drafters) or "none"
            raise RequestInvalid(f"there is no drafter {name!r} here; loaded: {known}.")
        if request.wants_context and self._drafters[name].context_width is None:
            raise RequestInvalid(
                f"{self._drafters[name].kind} cannot draft away from the target; use a drafter of a kind that can: "
                f"{', '.join(REMOTE_KINDS)}."
            )
