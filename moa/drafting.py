"""Who proposes drafts: one small interface, and the Mixture of Attentions behind it.

Shapes: B rows, N nodes, V vocabulary, b nodes of one level.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .bundle import FrozenTarget
from .errors import DrafterError
from .model import DraftState, MoADrafter
from .sampling import SamplingConfig, distribution, draw
from .target import Target
from .target_cache import TargetCache
from .tree import DraftTree, TreeShape, pick_best


class DraftSession(Protocol):
    """Proposes drafts for the rows of one generation and keeps its own caches in step with what is committed."""

    def propose(self, committed: Sequence[list[int]], shape: TreeShape) -> DraftTree:
        """Propose the next tokens of each row.

        Args:
            committed: per row prompt and generated tokens; the last one is the root, all others have target KV.
            shape: of the tree.
        """
        ...

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        ...


class MoASession:
    """Drafts with a Mixture of Attentions drafter.

    Args:
        target: the live target, for its device.
        drafter: trained for it.
        frozen: target pieces of the drafter's dtype, with its N layers.
        cache: of the target's KV.
        sampling: given and not greedy: chains are drawn from the drafter's distribution under it.
        generators: one per row, of the draws.

    Raises:
        DrafterError: drafter and target pieces differ in dtype.
    """

    def __init__(
        self,
        target: Target,
        drafter: MoADrafter,
        frozen: FrozenTarget,
        cache: TargetCache,
        sampling: SamplingConfig | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        dtypes = next(drafter.parameters()).dtype, frozen.lm_head_weight.dtype
        if dtypes[0] != dtypes[1]:
            raise DrafterError(
                f"the drafter is {dtypes[0]}, its target pieces are {dtypes[1]}; load both in one dtype."
            )
        self.drafter, self.frozen, self.cache = drafter, frozen, cache
        self.state = DraftState(len(cache.lengths))
        self._device, self._dtype = target.device, dtypes[0]
        self._sampling = sampling if sampling is not None and sampling.temperature > 0 else None
        self._generators = list(generators)

    @torch.inference_mode()
    def propose(self, committed: Sequence[list[int]], shape: TreeShape) -> DraftTree:
        """A chain or a dynamic tree (EAGLE-2, section 4.1; official inference lines 622-660)."""
        self._catch_up(committed)
        features = self._root(committed)
        if shape.is_chain:
            return self._chain(features, committed, min(shape.depth, shape.n_nodes))
        tree = self._tree(features, shape)
        # Behind the root lie nodes in the order of feeding, not those of one path: they are encoded anew if accepted.
        self.state.self_attention.crop([len(tokens) for tokens in committed])
        return tree

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.state.select_rows(rows)
        self._generators = [self._generators[row] for row in rows] if self._generators else []

    def _catch_up(self, committed: Sequence[list[int]]) -> None:
        """Encode the target KV that came since the last round; forget what was drafted."""
        n_verified = [len(tokens) - 1 for tokens in committed]
        counts = [n - length for n, length in zip(n_verified, self.state.memory.lengths, strict=True)]
        if max(counts):
            kv = self.cache.packed(self.state.memory.lengths, max(counts))
            self.drafter.extend_memory(self.state, kv.to(self._dtype), counts)
        self.state.self_attention.crop(n_verified)

    def _root(self, committed: Sequence[list[int]]) -> Tensor:
        fresh = [tokens[n:] for tokens, n in zip(committed, self.state.self_attention.lengths, strict=True)]
        counts = [len(tokens) for tokens in fresh]
        longest = max(counts)
        padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in fresh], device=self._device)
        same = len(set(counts)) == 1
        return self.drafter.draft_root(self.state, self.frozen, padded, self._layers_kv, None if same else counts)

    def _layers_kv(self, n_slots: int) -> list[tuple[Tensor, Tensor]]:
        config = self.drafter.config
        first = config.n_layers - config.target_layer_inference
        return [self.cache.layer_view(layer, n_slots) for layer in range(first, config.n_layers)]

    def _chain(self, features: Tensor, committed: Sequence[list[int]], depth: int) -> DraftTree:
        tokens: list[Tensor] = []
        probabilities: list[Tensor] = []
        paths = [list(row) for row in committed]
        for level in range(1, depth + 1):
            if level > 1:
                seen = torch.ones(len(paths), 1, level, dtype=torch.bool, device=self._device)
                features = self.drafter.draft_level(
                    self.state, self.frozen, tokens[-1], seen, level - 1, self._layers_kv
                )
            logits = self.frozen.logits(features[:, 0])  # [B, V]
            if self._sampling is None:
                tokens.append(logits.argmax(dim=-1, keepdim=True))
                continue
            drawn = [distribution(row, path, self._sampling) for row, path in zip(logits, paths, strict=True)]
            picked = [draw(p, generator) for p, generator in zip(drawn, self._generators, strict=True)]
            for path, token in zip(paths, picked, strict=True):
                path.append(token)
            tokens.append(torch.tensor(picked, device=self._device)[:, None])
            probabilities.append(torch.stack(drawn))
        return DraftTree.chain(torch.cat(tokens, dim=1), torch.stack(probabilities, dim=1) if probabilities else None)

    def _tree(self, features: Tensor, shape: TreeShape) -> DraftTree:
        n_rows, b = features.shape[0], min(shape.breadth, self.frozen.lm_head_weight.shape[0])
        root = torch.zeros(n_rows, 1, dtype=torch.int64, device=self._device)
        # Candidates of all levels, and of the last one the b nodes that are extended: their place among the candidates,
        # cumulative score, and which fed tokens they see.
        tokens, parents, scores = [], [], []
        beam_at, beam_score = root - 1, features.new_zeros(n_rows, 1)
        beam_seen = torch.ones(n_rows, 1, 1, dtype=torch.bool, device=self._device)
        n_candidates = 0
        for level in range(1, shape.depth + 1):
            # A log-probability that rounds above 0 would let a child outrank its parent.
            log_p = self.frozen.logits(features).float().log_softmax(dim=-1).clamp(max=0)  # [B, b, V]
            best = log_p.topk(b, dim=-1)
            score = (beam_score[..., None] + best.values).flatten(1)  # [B, b * b]
            tokens.append(best.indices.flatten(1))
            parents.append(beam_at.repeat_interleave(b, dim=1))
            scores.append(score)
            if level == shape.depth:
                break
            kept = score.topk(b, dim=1)  # of this level alone
            beam_score = kept.values
            beam_at = n_candidates + kept.indices
            n_candidates += score.shape[1]
            fed = tokens[-1].gather(1, kept.indices)  # [B, b]
            came_from = (kept.indices // b)[..., None].expand(-1, -1, beam_seen.shape[2])
            own = torch.eye(b, dtype=torch.bool, device=self._device).expand(n_rows, -1, -1)
            beam_seen = torch.cat((beam_seen.gather(1, came_from), own), dim=2)
            features = self.drafter.draft_level(self.state, self.frozen, fed, beam_seen, level, self._layers_kv)
        return pick_best(torch.cat(tokens, dim=1), torch.cat(parents, dim=1), torch.cat(scores, dim=1), shape.n_nodes)
