"""Drafts on a machine without the target: from the frozen weights of its bundle and contexts that arrive from a server.

Shapes: n positions, W numbers of a context, V vocabulary.

Contexts may be late. A round begins at the token at ``n_context``, the first one without a context; known tokens after
it are fed as levels of a chain, and drafts come after them::

    context        The  cat  sat                         n_context 3
    committed      The  cat  sat  on  the                "on" is the root, "the" a level that is fed, not drafted
    drafts                                 mat  .

Without a network the chain just gets longer. Where the server has disagreed with it, it returns to the last level that
is right; another round begins, with all contexts that have arrived, when nothing is drafted or something was wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import read_config_file
from ...errors import RequestInvalid
from ...moa.decoding.proposer import Chain
from ...moa.decoding.sampling import GREEDY, SamplingConfig, choose, penalised
from ...moa.drafters.base import Drafter
from ...moa.drafters.sizes import check_target_fits
from ...moa.formats.checkpoint import load_drafter
from ...moa.targets.bundle import FROZEN_FILE, FrozenTarget, load_eos_token_ids
from ...moa.targets.families import target_sizes
from ...moa.targets.live import load_target_tokenizer
from ...moa.targets.template import ChatTemplate, choose_template_arguments
from ..wire import n_common
from .session import Draft

# The file of a training run that records its store, and the folder of a store that holds the
# bundle.
_RUN_FILE = "run.yaml"
_BUNDLE = "target"
_MAX_FED = 16  # known tokens that one call feeds: the caller looks at the network in between
# Levels after which another chain begins where newer contexts are here: each level after a context
# agrees less.
_MAX_LEVELS = 32


@dataclass(frozen=True)
class DraftingModel:
    """A drafter with what it needs of its target; clients may share one."""

    drafter: Drafter
    frozen: FrozenTarget
    template: ChatTemplate | None  # None for a client of tokens, without text
    eos_token_ids: frozenset[int]

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer; None without one."""
        return self.template and self.template.tokenizer

    @classmethod
    def load(
        cls,
        folder: str | Path,
        bundle: str | Path | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        template_arguments: Sequence[str] = (),
    ) -> "DraftingModel":
        """Load a drafter and the bundle of its target, see :func:`find_bundle`; the target itself is not loaded.

        ``template_arguments`` are ``name=value`` of the chat template, by default those of the training chats.
        """
        drafter = load_drafter(folder, dtype, device)
        drafter.new_context_cache()  # refuses drafters that cannot do without their target
        found = find_bundle(folder, bundle)
        frozen = FrozenTarget.load(found, drafter.config.target_layer_inference, dtype).to(device)
        check_target_fits(drafter.config, target_sizes(frozen.config))
        drafter.prepare()
        frozen.prepare()
        recorded: Mapping[str, str] = drafter.config.target
        arguments = choose_template_arguments(template_arguments, {str(folder): recorded})
        template = ChatTemplate(load_target_tokenizer(found), arguments, str(found))
        return cls(drafter, frozen, template, load_eos_token_ids(found))


def find_bundle(folder: str | Path, bundle: str | Path | None = None) -> Path:
    """Find the target's bundle of a drafter: a run of ``moa-data train``, its folder drafter/, or any other folder.

    The bundle is a store or its folder target/; None for the store that the run was trained from.
    """
    if bundle is not None:
        place = Path(bundle).expanduser()
        for found in (place, place / _BUNDLE):
            if (found / FROZEN_FILE).is_file():
                return found
        raise RequestInvalid(
            f"{place} holds no {FROZEN_FILE}; give a store, or its folder target/."
        )
    run = Path(folder).expanduser()
    for place in (run, run.parent):
        if (place / _RUN_FILE).is_file():
            found = (
                Path(str(read_config_file(place / _RUN_FILE).get("store", ""))).expanduser()
                / _BUNDLE
            )
            if (found / FROZEN_FILE).is_file():
                return found
            raise RequestInvalid(
                f"{place} was trained from {found.parent}, which is not there; give --bundle."
            )
    raise RequestInvalid(
        f"{run} is not a run, so its store is not known; give --bundle STORE/target."
    )


class TextDrafter:
    """Drafts what follows one text after the other."""

    def __init__(self, model: DraftingModel) -> None:
        # W; 0 for one that needs no contexts
        self._model, self.width = model, model.drafter.context_width or 0
        self._device = model.frozen.lm_head_weight.device
        self._text: list[int] = []
        self._chain: Chain | None = None
        self._reset()

    def begin(self, tokens: Sequence[int], sampling: SamplingConfig = GREEDY, seed: int = 0) -> int:
        """Start a text; contexts that were taken are kept where it begins like the last one."""
        self._sampling = sampling
        self._seed = seed
        self._end_round()
        self._pending.clear()
        self.n_context = self._n_taken
        is_same = (
            len(tokens) > self._n_taken
            and list(tokens[: self._n_taken + 1]) == self._text[: self._n_taken + 1]
        )
        if not is_same:
            self._reset()
        return self.n_context

    def receive(self, context: Tensor) -> None:
        """Take the contexts [n, W] of the next n positions."""
        self._pending.append(context)
        self.n_context += len(context)

    @property
    def n_pending(self) -> int:
        """Positions whose contexts have arrived and are not in the drafter's caches."""
        return self.n_context - self._n_taken

    def next(self, tokens: Sequence[int], drafts: Sequence[int]) -> Draft | None:
        """Draft one token that follows committed tokens, the prompt among them, and drafts.

        Returns None where contexts are missing, the drafter drafts no deeper, or known tokens have to be fed first
        (``is_catching_up``).
        """
        newest = self._newest_root(tokens)
        if newest is None:
            return None
        with torch.inference_mode():
            known = [*tokens[self._root + 1 :], *drafts]
            n_agreed = n_common(self._fed, known)
            is_stale = newest > self._root and (
                not drafts or n_agreed < len(self._fed) or len(self._fed) >= _MAX_LEVELS
            )
            if self._chain is None or is_stale:
                self._begin_round(tokens, newest)
                known = [*tokens[self._root + 1 :], *drafts]
                n_agreed = 0
            chain = self._chain
            most = self._model.drafter.config.max_depth
            assert chain is not None
            if most is not None and len(known) >= most:  # no further before newer contexts are here
                self.is_catching_up = False
                return None
            chain.back_to(n_agreed)
            del self._fed[n_agreed:]
            todo = known[n_agreed:]
            for token in todo[:_MAX_FED]:
                chain.feed(torch.tensor([[token]], device=self._device))
                self._fed.append(token)
            self.is_catching_up = len(todo) > _MAX_FED
            return None if self.is_catching_up else self._choose(chain.logits[0], tokens, drafts)

    def warm(self, tokens: Sequence[int]) -> None:
        """Put what has arrived into the drafter's caches, so that drafting can begin at once."""
        newest = self._newest_root(tokens)
        if newest is not None and newest > self._root:
            with torch.inference_mode():
                self._begin_round(tokens, newest)

    def _reset(self) -> None:
        drafter = self._model.drafter
        self._state = drafter.new_state(1)
        self._cache = drafter.new_context_cache()
        self._pending: list[Tensor] = []
        self._fed: list[int] = []
        # the last: positions whose contexts have arrived
        self._root, self._n_taken, self.n_context = -1, 0, 0
        self._end_round()

    def _end_round(self) -> None:
        # The latter: whether the last call of next fed known tokens and should be made again.
        self._chain = None
        self.is_catching_up = False

    def _newest_root(self, tokens: Sequence[int]) -> int | None:
        """The newest position at which a round can begin, or has begun."""
        newest = len(tokens) - 1 if self.width == 0 else min(self.n_context, len(tokens) - 1)
        if newest < max(1, self._n_taken):  # contexts that were taken cannot be left out again
            return self._root if self._chain is not None and self._root < len(tokens) else None
        return newest

    def _begin_round(self, tokens: Sequence[int], root: int) -> None:
        drafter = self._model.drafter
        n_new = root - self._n_taken
        if self.width == 0:
            self.n_context = root
            self._pending = [torch.empty(n_new, 0)]
        if n_new:
            arrived = self._pending[0] if len(self._pending) == 1 else torch.cat(self._pending)
            drafter.take_context(self._state, self._cache, arrived[:n_new], self._n_taken)
            self._pending = [arrived[n_new:]] if len(arrived) > n_new else []
            self._n_taken = root
        self._root = root
        self._fed = []
        self._text = list(tokens[: root + 1])
        features = drafter.draft_root(self._state, self._model.frozen, [self._text], self._cache)
        self._chain = Chain(drafter, self._model.frozen, self._state, self._cache, features)

    def _choose(self, logits: Tensor, tokens: Sequence[int], drafts: Sequence[int]) -> Draft:
        """Choose as the target would from these logits [V], with the same noise at the same position."""
        sampling = self._sampling
        previous = list[int]()
        if sampling.repetition_penalty != 1:
            previous = [*tokens, *drafts]
        token = choose(logits, previous, sampling, self._seed, len(tokens) + len(drafts))
        scores = penalised(logits, previous, sampling.repetition_penalty)
        if sampling.temperature:
            # A cautious guess: with the same noise two models agree more often than the likeliest
            # token is drawn.
            return Draft(
                token, float(((scores - scores.max()) / sampling.temperature).softmax(0).amax())
            )
        return Draft(token, float(scores.softmax(0)[token]))
