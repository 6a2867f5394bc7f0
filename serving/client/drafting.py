"""Drafts on a machine without the target.

The client has a bundle, which contains a few frozen weights of the target. A server sends contexts
to the client. A *context* is the data that the drafter reads about one position that the target has
processed.

Shapes: n positions, W numbers in a context, V vocabulary.

In a round, the drafter extends one chain of tokens. The first token of the chain is the *root*. It
is the committed token at position ``n_context``, the first position without a context. Contexts may
arrive later than committed tokens, so more committed tokens may follow the root. These tokens are
fed to the drafter as if it had drafted them. The real drafts come after them::

    position         0    1    2    3    4    5    6
    contexts        The  cat  sat                        n_context = 3
    committed       The  cat  sat  on   the
    chain                          on   the  mat  .      "on" is the root, "the" is fed to the
                                                         drafter, "mat" and "." are drafted

Without a network the chain keeps growing. If the server disagrees with a draft, the chain is cut
after the last correct token. When newer contexts have arrived, a new round with a new root starts
in three cases: there are no drafts, a draft was wrong, or the chain has become long.
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
from ...moa.targets.live import load_target_tokenizer
from ...moa.targets.template import ChatTemplate, choose_template_arguments
from ..wire import n_common
from .session import Draft

# ``_RUN_FILE`` is a file in the folder of a training run. It contains the path of the store that
# the run was trained from. ``_BUNDLE`` is the folder in a store that contains the bundle.
_RUN_FILE = "run.yaml"
_BUNDLE = "target"
# Maximum number of committed tokens and earlier drafts that one call of ``SequenceDrafter.next``
# feeds to the drafter. After each call, the caller handles messages of the server.
_MAX_FED = 16
# If a chain has this many tokens and newer contexts (data of the target) have arrived, a new chain
# begins, because the target more often rejects drafts that are far from the last context.
_MAX_LEVELS = 32


@dataclass(frozen=True)
class DraftingModel:
    """A drafter, and the target's weights that it needs. Several clients may share one object."""

    drafter: Drafter
    frozen: FrozenTarget
    # The chat template of the target. It is None if the client works only with token ids.
    template: ChatTemplate | None
    eos_token_ids: frozenset[int]

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer. None if the model has no chat template."""
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
        """Load a drafter and the bundle of its target, but not the target itself.

        Args:
            folder: a training run, or the folder of a drafter.
            bundle: a store or its folder target/. By default the store that the run was trained
                from.
            dtype: the dtype of all weights.
            device: the device of all weights.
            template_arguments: ``name=value`` texts for the chat template; by default the arguments
                of the training chats.
        """
        drafter = load_drafter(folder, dtype, device)
        # Creating this cache raises an error if the drafter cannot draft without its target.
        drafter.new_context_cache()
        bundle_folder = find_bundle(folder, bundle)
        frozen = FrozenTarget.load(bundle_folder, drafter.config.target_layer_inference, dtype).to(
            device
        )
        check_target_fits(drafter.config, frozen.facts.sizes)
        drafter.prepare()
        frozen.prepare()
        recorded: Mapping[str, str] = drafter.config.target
        arguments = choose_template_arguments(template_arguments, {str(folder): recorded})
        template = ChatTemplate(load_target_tokenizer(bundle_folder), arguments, str(bundle_folder))
        return cls(drafter, frozen, template, load_eos_token_ids(bundle_folder))


def find_bundle(folder: str | Path, bundle: str | Path | None = None) -> Path:
    """Find the bundle of a drafter's target.

    Args:
        folder: a run of ``moa-data train``, its folder drafter/, or any other folder of a drafter.
        bundle: a store or its folder target/. By default the store that the run was trained from.

    Raises:
        RequestInvalid: no bundle was found.
    """
    if bundle is not None:
        base_folder = Path(bundle).expanduser()
        for bundle_folder in (base_folder, base_folder / _BUNDLE):
            if (bundle_folder / FROZEN_FILE).is_file():
                return bundle_folder
        raise RequestInvalid(
            f"{base_folder} has no file {FROZEN_FILE} with the target's frozen weights. Give a "
            "store, or its folder target/, as `bundle`."
        )
    run = Path(folder).expanduser()
    for base_folder in (run, run.parent):
        if (base_folder / _RUN_FILE).is_file():
            bundle_folder = (
                Path(str(read_config_file(base_folder / _RUN_FILE).get("store", ""))).expanduser()
                / _BUNDLE
            )
            if (bundle_folder / FROZEN_FILE).is_file():
                return bundle_folder
            raise RequestInvalid(
                f"{base_folder} was trained from the store {bundle_folder.parent}, whose folder "
                "target/ is missing on this machine. Give a copy of that folder with `bundle`."
            )
    raise RequestInvalid(
        f"{run} is not a run of `moa-data train`, so the store that it was trained from is not "
        "known. Give that store, or its folder target/, with `bundle`."
    )


class SequenceDrafter:
    """Drafts the next tokens of one sequence.

    The same object can later draft for another sequence.
    """

    def __init__(self, model: DraftingModel) -> None:
        # ``width`` is W, the size of a context. It is 0 if the drafter needs no contexts.
        self._model, self.width = model, model.drafter.context_width or 0
        self._device = model.frozen.lm_head_weight.device
        self._tokens: list[int] = []
        self._chain: Chain | None = None
        self._reset()

    def begin(self, tokens: Sequence[int], sampling: SamplingConfig = GREEDY, seed: int = 0) -> int:
        """Start a sequence, and return the number of its positions that already have contexts.

        If the sequence begins with the same tokens as the previous sequence, the caches of the
        drafter keep the contexts of these tokens. Otherwise the result is 0.
        """
        self._sampling = sampling
        self._seed = seed
        self._end_round()
        self._pending.clear()
        self.n_context = self._n_taken
        is_same = (
            len(tokens) > self._n_taken
            and list(tokens[: self._n_taken + 1]) == self._tokens[: self._n_taken + 1]
        )
        if not is_same:
            self._reset()
        return self.n_context

    def receive(self, context: Tensor) -> None:
        """Add the contexts [n, W] of the next n positions: the data that the drafter reads."""
        self._pending.append(context)
        self.n_context += len(context)

    @property
    def n_pending(self) -> int:
        """The number of arrived contexts (data of the target) not yet in the drafter's caches."""
        return self.n_context - self._n_taken

    def next(self, tokens: Sequence[int], drafts: Sequence[int]) -> Draft | None:
        """Draft one token after the prompt, the committed tokens and the earlier drafts.

        The result is None if contexts are missing, if the drafter has reached its maximum depth, or
        if the drafter must process more of the given tokens first. In the last case
        ``is_catching_up`` is true, and the caller should repeat the call.

        Args:
            tokens: the prompt and the committed tokens.
            drafts: the drafts so far.
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
            max_depth = self._model.drafter.config.max_depth
            assert chain is not None
            # If the maximum depth is reached, further drafts need a new chain. The new chain begins
            # when newer contexts (data of the target) have arrived.
            if max_depth is not None and len(known) >= max_depth:
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
        """Put arrived contexts (data of the target) into the drafter's caches before drafting."""
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
        # ``_root`` is the position of the round's root, or -1 without a round. ``_n_taken`` is the
        # number of contexts in the drafter's caches. ``n_context`` is the number of contexts that
        # have arrived.
        self._root, self._n_taken, self.n_context = -1, 0, 0
        self._end_round()

    def _end_round(self) -> None:
        self._chain = None
        # Whether the last call of `next` only fed tokens to the drafter, so that `next` should be
        # called again.
        self.is_catching_up = False

    def _newest_root(self, tokens: Sequence[int]) -> int | None:
        """Return the position of the next round's root: the last position that can be a root.

        If no new round can start, return the root of the current round. Without a current round,
        return None.
        """
        newest = len(tokens) - 1 if self.width == 0 else min(self.n_context, len(tokens) - 1)
        # The root must be a position without a context in the drafter's caches, and contexts cannot
        # be removed from these caches. If no such position is known, no new round can start.
        if newest < max(1, self._n_taken):
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
        self._tokens = list(tokens[: root + 1])
        features = drafter.draft_root(self._state, self._model.frozen, [self._tokens], self._cache)
        self._chain = Chain(drafter, self._model.frozen, self._state, self._cache, features)

    def _choose(self, logits: Tensor, tokens: Sequence[int], drafts: Sequence[int]) -> Draft:
        """Choose a token from logits [V] as the target does, with the same random numbers."""
        sampling = self._sampling
        previous = list[int]()
        if sampling.repetition_penalty != 1:
            previous = [*tokens, *drafts]
        token = choose(logits, previous, sampling, self._seed, len(tokens) + len(drafts))
        scores = penalised(logits, previous, sampling.repetition_penalty)
        if sampling.temperature:
            # Estimate the probability that the draft is right: take the probability of the most
            # likely token. The true probability is higher, because drafter and target use the same
            # random numbers.
            return Draft(
                token, float(((scores - scores.max()) / sampling.temperature).softmax(0).amax())
            )
        return Draft(token, float(scores.softmax(0)[token]))
