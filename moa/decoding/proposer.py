"""Proposers of drafts: chains and trees from a trained drafter, and prompt lookup.

Chains and trees are grown in the same way for all kinds of drafters.

Shapes: B rows, N nodes, V vocabulary, E target width, b nodes of one level.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ...errors import DrafterError
from ..drafters.base import Drafter, DraftLevel
from ..nn.masks import to_device
from ..targets.bundle import FrozenTarget
from ..targets.cache import KVSource, TargetCache
from ..targets.live import Target
from .graphs import ChainGraphs
from .sampling import GREEDY, SamplingConfig, distribution, draw_rows
from .tree import NO_DRAFT, DraftTree, TreeShape, most_likely, pick_best

# A chain can end early if its drafts become unlikely. This is checked only after every n-th draft,
# because each check synchronizes with the device. The dict has n for types of devices. For a type
# that is not listed, n is 1.
_ASKS_AFTER = {"cuda": 4}

# A function that takes the drafter's logits [B, V] and returns the drafts of one level, [B] int64,
# one token per row. It is called once for each level, in the order of the levels.
Choose = Callable[[Tensor], Tensor]


class Proposer:
    """Proposes drafts, for one generation at a time.

    After each target call, :meth:`observe` tells the proposer which tokens were committed, so that
    it can update its caches. This base class has no caches.
    """

    # Maximum number of draft levels. None if the number is not limited.
    max_depth: int | None = None

    def begin(self, cache: TargetCache, generators: Sequence[torch.Generator] = ()) -> None:
        """Start a generation, before the target reads the prompts.

        Args:
            cache: the target's cache.
            generators: a random generator for each row.
        """

    def observe(self, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        """Receive the hidden states of a target call.

        Args:
            hidden: [B, n, E], hidden states after the target's final norm.
            kept: for each row, the ascending indices of the committed tokens among the n tokens of
                the call.
        """

    def propose(self, committed: Sequence[list[int]], shape: TreeShape) -> DraftTree:
        """Propose drafts of the tokens that follow the committed tokens.

        Args:
            committed: for each row, the tokens of the prompt and of the answer so far. The target's
                cache has KV of all these tokens except the last one.
            shape: shape of the drafts.
        """
        raise NotImplementedError

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only the given rows of the batch, in the given order."""


class Chain:
    """A chain of drafts for each row, grown level by level. All chains have the same depth.

    Until the next round starts, the drafter's caches contain all tokens that were fed to the
    drafter, including wrong drafts. A chain can go back to one of its earlier levels, and continue
    from there with other tokens, like a branch of a tree. A mask then lets each token see only its
    ancestors. In the example, the chain has drafted "the mat is". It then goes back to level 1, and
    continues with "rug"::

        token          root  the  mat  is   rug
        level            0    1    2    3    2
        "rug" sees       x    x              x
    """

    def __init__(
        self,
        drafter: Drafter,
        frozen: FrozenTarget,
        state: object,
        cache: KVSource,
        features: Tensor,
    ) -> None:
        # ``features`` [B, 1, E] are the root's features, as ``Drafter.draft_root`` returns them.
        self._drafter = drafter
        self._frozen = frozen
        self._state = state
        self._cache = cache
        # One entry for the root, and one for the token of each level. An entry consists of the
        # token's index among all tokens that were fed to the drafter in this round, and of the
        # token's features [B, 1, E].
        self._path = [(0, features)]
        self._n_fed = 1

    @property
    def depth(self) -> int:
        """Number of drafts below the root."""
        return len(self._path) - 1

    @property
    def logits(self) -> Tensor:
        """The drafter's logits for the token after the last level, [B, V]."""
        return self._drafter.draft_logits(self._frozen, self._path[-1][1][:, 0])

    @property
    def confidence(self) -> Tensor:
        """The drafter's estimate of the acceptance probability of the next draft, [B] float32."""
        confidence = self._drafter.confidence(self._path[-1][1][:, 0])
        if confidence is None:
            raise DrafterError(
                "`tree=LENGTHcCONFIDENCE` needs a drafter with a confidence head, but this "
                f"{self._drafter.kind} drafter has none. Give a fixed length such as `tree=7`, or "
                "`tree=LENGTH@PROBABILITY` such as `tree=10@0.2`, which ends a chain when its "
                "drafts become unlikely."
            )
        return confidence.float()

    def feed(self, tokens: Tensor) -> None:
        """Add a level: feed one token per row, [B, 1] int64, to the drafter."""
        seen = torch.ones(len(tokens), 1, self._n_fed + 1, dtype=torch.bool, device=tokens.device)
        if len(self._path) < self._n_fed:
            path_indices = {index for index, _ in self._path}
            seen[..., [index for index in range(self._n_fed) if index not in path_indices]] = False
        level = DraftLevel(tokens, self._path[-1][1], seen, len(self._path))
        features = self._drafter.draft_level(self._state, self._frozen, level, self._cache)
        self._path.append((self._n_fed, features))
        self._n_fed += 1

    def back_to(self, depth: int) -> None:
        """Go back to the level ``depth``, so that :meth:`feed` adds the next level after it.

        Level 0 is the root.
        """
        del self._path[depth + 1 :]


class DrafterProposer(Proposer):
    """Proposes the drafts of a trained drafter.

    The drafter also needs some weights of its target, such as the LM head. These weights come from
    a live target or from a file of frozen weights. With a temperature above 0, the tokens of chains
    are sampled from the drafter's distribution at this temperature.
    """

    def __init__(
        self, target: Target | FrozenTarget, drafter: Drafter, sampling: SamplingConfig = GREEDY
    ) -> None:
        frozen = target
        if isinstance(frozen, Target):
            frozen = FrozenTarget.from_model(frozen.model, drafter.config.target_layer_inference)
        weight = frozen.lm_head_weight
        if drafter.dtype != weight.dtype:
            raise DrafterError(
                f"the drafter has the dtype {drafter.dtype}, but the target's weights have the "
                f"dtype {weight.dtype}. Load both with the same dtype."
            )
        self.frozen = frozen
        self.drafter = drafter
        self._device = weight.device
        self._sampling = sampling
        self.max_depth = drafter.config.max_depth
        self._generators: list[torch.Generator] = []
        self._choose: Choose | None = None
        self._graphs = ChainGraphs()
        self._uses_graphs = False

    @override
    def begin(self, cache: TargetCache, generators: Sequence[torch.Generator] = ()) -> None:
        self.cache: KVSource = cache
        self._live = cache
        self._generators = list(generators)
        # Target calls store the outputs of the watched layers in the cache. ``observe`` passes
        # these outputs to the drafter.
        cache.watched_layers = self.drafter.observed_layers
        self.state = self.drafter.new_state(len(cache.lengths))
        self._choose = None
        is_captured = cache.has_static_buffer and self._device.type == "cuda"
        self._uses_graphs = (
            is_captured and self.drafter.by_graph and self._sampling.temperature == 0
        )

    def resume(self, cache: KVSource, state: Any, choose: Choose | None = None) -> None:
        """Continue a generation with a state and a cache that the caller keeps up to date.

        Args:
            cache: the target's KV. If the target is remote, the cache contains the contexts that
                the target has sent in place of its KV (see ``drafters.base``).
            state: the drafter's state.
            choose: chooses the tokens of chains. If None, the tokens are sampled according to the
                sampling settings.
        """
        self.cache = cache
        self.state = state
        self._choose = choose
        self._uses_graphs = False

    @override
    @torch.inference_mode()
    def observe(self, hidden: Tensor, kept: Sequence[Sequence[int]]) -> None:
        states = self._live.take_layer_outputs() if self.drafter.observed_layers else hidden
        self.drafter.observe(self.state, states, kept)

    @override
    @torch.inference_mode()
    def propose(self, committed: Sequence[list[int]], shape: TreeShape) -> DraftTree:
        """Grow a chain or a tree.

        See section 4.1 of the EAGLE-2 paper, and lines 622-660 of
        ``inference/single_device/moa_spec.py`` in the MoA authors' code.
        """
        self.drafter.config.check_depth(shape.depth)
        if self._uses_graphs and shape.is_chain and not (shape.stop_below or shape.cut_below):
            drafts = self._graphs.run(
                self.state,
                self._live,
                committed,
                shape,
                lambda state: self._drafted(state, (), shape),
            )
            if drafts is not None:
                return DraftTree.chain(drafts)
        return self._drafted(self.state, committed, shape)

    def _drafted(self, state: Any, committed: Sequence[list[int]], shape: TreeShape) -> DraftTree:
        features = self.drafter.draft_root(state, self.frozen, committed, self.cache)
        return (
            self._chain(state, features, committed, shape)
            if shape.is_chain
            else self._tree(state, features, shape)
        )

    @override
    def select_rows(self, rows: Sequence[int]) -> None:
        self.state.select_rows(rows)
        self._generators = [self._generators[row] for row in rows] if self._generators else []

    def _chain(
        self, state: Any, features: Tensor, committed: Sequence[list[int]], shape: TreeShape
    ) -> DraftTree:
        self._sampling.check_shape(shape)
        is_drawn = self._sampling.temperature > 0
        tokens: list[Tensor] = []
        probabilities: list[Tensor] = []
        # One tensor [B] per draft: the product of the drafter's probabilities of all drafts up to
        # this draft.
        reached: list[Tensor] = []
        # One tensor [B] bool per draft: true if the row's chain includes the draft, false if the
        # chain ends before the draft.
        is_kept: list[Tensor] = []
        paths = [list(row) for row in committed]
        # [B], the product of the drafter's probabilities of all drafts of the chain so far.
        probability = features.new_ones(features.shape[0], dtype=torch.float32)
        chain = Chain(self.drafter, self.frozen, state, self.cache, features)
        asks_after = _ASKS_AFTER.get(self._device.type, 1)
        for level in range(min(shape.depth, shape.n_nodes)):
            if level:
                chain.feed(tokens[-1])
            if shape.cut_below:
                is_sure = chain.confidence >= shape.cut_below
                is_kept.append(is_kept[-1] & is_sure if is_kept else is_sure)
                # If tokens are sampled, continue even if all chains have ended. A row must draw the
                # same random numbers whether it is decoded in a batch or alone.
                if not is_drawn and level % asks_after == asks_after - 1 and not is_kept[-1].any():
                    break
            logits = chain.logits  # [B, V], logits of the next draft.
            if self._choose is None and is_drawn:
                drawn = [
                    distribution(row, path, self._sampling)
                    for row, path in zip(logits, paths, strict=True)
                ]
                probabilities.append(torch.stack(drawn))
                picked = draw_rows(probabilities[-1], self._generators)  # [B], one token per row.
                # ``paths`` has the tokens of each row so far, which only penalties read. Without
                # penalties, do not append the drafts to ``paths``, because copying the drafts to
                # the host would wait for the device.
                if self._sampling.reads_text:
                    for path, token in zip(paths, picked.tolist(), strict=True):
                        path.append(token)
            else:
                picked = logits.argmax(dim=-1) if self._choose is None else self._choose(logits)
            tokens.append(picked[:, None].to(self._device))
            if shape.stop_below:
                probability = probability * logits.float().softmax(dim=-1).amax(dim=-1)
                reached.append(probability)
                if level % asks_after == asks_after - 1 and probability.mean() < shape.stop_below:
                    break
        if is_kept:
            return _cut_chain(tokens, probabilities, torch.stack(is_kept, dim=1))
        return DraftTree.chain(
            torch.cat(tokens, dim=1),
            scores=torch.stack(reached, dim=1).log() if reached else None,
            probabilities=torch.stack(probabilities, dim=1) if probabilities else None,
        )

    def _tree(self, state: Any, features: Tensor, shape: TreeShape) -> DraftTree:
        n_rows = features.shape[0]
        b = min(shape.breadth, self.frozen.lm_head_weight.shape[0])
        root = torch.zeros(n_rows, 1, dtype=torch.int64, device=self._device)
        # ``tokens``, ``parents`` and ``scores`` describe the candidates of all levels. The beam is
        # the b nodes of a level that get children. The loop updates three tensors for the nodes of
        # the beam: their indices among the candidates, their cumulative scores, and the masks of
        # the tokens that they see.
        tokens = []
        parents = []
        scores = []
        beam_at = root - 1
        beam_score = features.new_zeros(n_rows, 1)
        beam_seen = torch.ones(n_rows, 1, 1, dtype=torch.bool, device=self._device)
        n_candidates = 0
        for level in range(1, shape.depth + 1):
            logits = self.drafter.draft_logits(self.frozen, features)
            # One distribution for each of the b nodes, [B, b, V]. Clamp log-probabilities to at
            # most 0. Rounding can make them larger, and a child would then have a higher score than
            # its parent.
            log_p = logits.float().log_softmax(dim=-1).clamp(max=0)
            best_score, best_token = most_likely(log_p, b)
            # [B, b * b], the scores of b children for each of b nodes.
            score = (beam_score[..., None] + best_score).flatten(1)
            tokens.append(best_token.flatten(1))
            parents.append(beam_at.repeat_interleave(b, dim=1))
            scores.append(score)
            if level == shape.depth:
                break
            # Choose the new beam among the candidates of this level only.
            beam_score, in_beam = most_likely(score, b)
            beam_at = n_candidates + in_beam
            n_candidates += score.shape[1]
            fed = tokens[-1].gather(1, in_beam)  # [B, b], the tokens of the new beam.
            # [B, b, 1], the index of each node's parent in the previous beam.
            came_from = (in_beam // b)[..., None]
            itself = torch.eye(b, dtype=torch.bool, device=self._device).expand(n_rows, -1, -1)
            above = beam_seen.gather(1, came_from.expand(-1, -1, beam_seen.shape[2]))
            beam_seen = torch.cat((above, itself), dim=2)
            parents_of_fed = features.gather(1, came_from.expand(-1, -1, features.shape[2]))
            nodes = DraftLevel(fed, parents_of_fed, beam_seen, level)
            features = self.drafter.draft_level(state, self.frozen, nodes, self.cache)
        return pick_best(
            torch.cat(tokens, dim=1),
            torch.cat(parents, dim=1),
            torch.cat(scores, dim=1),
            shape.n_nodes,
        )


def _cut_chain(
    tokens: Sequence[Tensor], probabilities: Sequence[Tensor], kept: Tensor
) -> DraftTree:
    """Shorten the chain of each row to the drafts in ``kept``.

    Rows that then have fewer drafts than another row are padded.

    Args:
        tokens: one tensor [B, 1] per draft.
        probabilities: one tensor [B, V] per draft: the distribution from which the draft was
            sampled. The sequence is empty if drafts were not sampled.
        kept: [B, N] bool, true for the drafts that remain. In each row, true values come before
            false values.
    """
    n_drafts = int(kept.sum(dim=1).max())
    if not n_drafts:
        return DraftTree.empty(len(kept), kept.device)
    chain = torch.where(kept[:, :n_drafts], torch.cat(list(tokens[:n_drafts]), dim=1), NO_DRAFT)
    drawn = torch.stack(list(probabilities[:n_drafts]), dim=1) if probabilities else None
    return DraftTree.chain(chain, probabilities=drawn)


class PromptLookupProposer(Proposer):
    """Proposes drafts by searching the sequence for an earlier occurrence of its last n tokens.

    The drafts are the tokens that followed the latest of these occurrences. At first, n is
    ``max_ngram``. If the last n tokens have not occurred before, n is reduced by 1. Source: Saxena,
    "Prompt Lookup Decoding" (2023). In transformers the same method is
    ``prompt_lookup_num_tokens``.
    """

    def __init__(self, device: torch.device, max_ngram: int = 3) -> None:
        self._device = device
        self._max_ngram = max_ngram

    @override
    def propose(self, committed: Sequence[list[int]], shape: TreeShape) -> DraftTree:
        """Propose a chain of at most ``shape.depth`` tokens.

        A row gets no drafts if its last token has not occurred before.
        """
        continuations = [self._continuation(tokens, shape.depth) for tokens in committed]
        longest = max(map(len, continuations))
        if not longest:
            return DraftTree.empty(len(continuations), self._device)
        padded = [[*tokens, *[NO_DRAFT] * (longest - len(tokens))] for tokens in continuations]
        return DraftTree.chain(to_device(padded, self._device))

    def _continuation(self, tokens: list[int], length: int) -> list[int]:
        for n in range(min(self._max_ngram, len(tokens) - 1), 0, -1):
            last = tokens[-n:]
            for start in range(len(tokens) - n - 1, -1, -1):
                if tokens[start : start + n] == last:
                    return tokens[start + n : start + n + length]
        return []
