"""Known wrong ways to compute a drafter, each applied to our own code, to name what another program does differently.

A choice changes a :class:`Reading`, a drafter as it is computed here. Where a drafter has no such part the change
raises an ``AttributeError``, ``KeyError`` or ``IndexError``: it says nothing of that drafter. Choices that change
training alone (losses, weights of positions, teachers) draft the same tokens and cannot be seen in drafts.

Shapes: B = 1 row, n tokens, Q slots of a block, E target width, L target layers.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..moa.drafters.base import Drafter
from ..moa.nn.layers import RMSNorm, Rotary, rotate
from ..moa.targets.bundle import FrozenTarget


@dataclass
class Reading:
    """A drafter as it is computed: a copy of it that may be changed, and what it is given of the target."""

    drafter: Any
    frozen: FrozenTarget
    n_layers: int  # L
    # Outputs of these layers are observed, joined: -1 is the embedding, L the last one's after the final norm.
    layers: tuple[int, ...]
    ahead: int = 0  # states that are observed beyond those of the tokens before the root

    @classmethod
    def of(cls, drafter: Drafter, frozen: FrozenTarget, n_layers: int) -> "Reading":
        """Compute a copy of it as this package does."""
        return cls(copy.deepcopy(drafter), copy.copy(frozen), n_layers, drafter.observed_layers or (n_layers,))

    def states(self, outputs: Mapping[int, Tensor]) -> Tensor:
        """Join what is observed of a text, of outputs [n, E] by layer."""
        return torch.cat([outputs[layer] for layer in self.layers], dim=-1).to(self.drafter.dtype)


Choice = Callable[[Reading], None]


def _around(name: str, method: Callable[..., Any]) -> Choice:
    """Replace a method of the drafter, or of all layers for ``layers.*.NAME``: called with its owner and itself."""

    def change(r: Reading) -> None:
        *path, last = name.split(".")
        owners: list[Any] = [r.drafter]
        for step in path:
            owners = [one for owner in owners for one in (owner if step == "*" else [getattr(owner, step)])]
        for owner in owners:
            setattr(owner, last, partial(method, owner, getattr(owner, last)))

    return change


def _layers(pick: Callable[[Reading], Iterable[int]]) -> Choice:
    return lambda r: setattr(r, "layers", tuple(pick(r)))


def _size(name: str, pick: Callable[[Reading], Any]) -> Choice:
    def change(r: Reading) -> None:
        value, sizes = pick(r), r.drafter.config
        if getattr(sizes, name) != value:
            r.drafter.config = replace(sizes, **{name: value[0] if isinstance(value, list) else value})

    return change


def _special(name: str) -> Choice:
    return _size("mask_token", lambda r: getattr(r.frozen.config, f"{name}_token_id"))


def _without(pattern: str) -> Choice:
    """Leave out the norms whose names match, of those that the drafter has."""

    def change(r: Reading) -> None:
        for name, module in list(r.drafter.named_modules()):
            if isinstance(module, RMSNorm) and re.fullmatch(pattern, name):
                r.drafter.set_submodule(name, nn.Identity())

    return change


def _input_norm(r: Reading) -> None:
    first, sizes = r.drafter.layers[0], r.drafter.config
    is_there = isinstance(first.input_layernorm, RMSNorm)
    first.input_layernorm = nn.Identity() if is_there else RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)


def _other_residual(r: Reading) -> None:
    r.drafter.midlayer._norms_residual ^= True


def _rotation(**parameters: Any) -> Choice:
    def change(r: Reading) -> None:
        sizes, width = r.drafter.config, len(r.drafter.rotary.frequencies)
        r.drafter.rotary = Rotary(width, {**sizes.rope_parameters, **parameters}, sizes.max_position_embeddings)

    return change


def _slots_at(move: Callable[[Tensor], Tensor]) -> Choice:
    """Move the positions of a block's slots, [B, Q]."""
    return _around("run_layers", lambda own, plain, x, at, *rest: plain(x, move(at), *rest))


def _slots_see(rule: Callable[[Tensor, Tensor], Tensor]) -> Choice:
    """Let slot q of a block see key k, both counted from its first slot, where the rule [Q, S] says so."""

    def run_layers(own: Any, plain: Any, x: Tensor, at: Tensor, appends: Any, _: Any) -> Any:
        slots = torch.arange(x.shape[1])
        return plain(x, at, appends, rule(slots[:, None], torch.arange(-int(at[0, 0]), len(slots)))[None])

    return _around("run_layers", run_layers)


def _sees_anchor(r: Reading) -> None:
    def extend(own: Any, plain: Any, state: Any, frozen: Any, text: Any, cache: Any) -> None:
        plain(state, frozen, [[*row, row[-1]] for row in text], cache)

    _around("_extend_context", extend)(r)
    r.ahead = 1


def _context_normed_again(r: Reading) -> None:
    for block in r.drafter.blocks if r.drafter.hidden_norm else ():
        plain, norm = block.self_attn.keys_values, block.input_layernorm
        block.self_attn.keys_values = lambda x, rotation, plain=plain, norm=norm: plain(norm(x), rotation)


def _unnormed_keys(own: Any, plain: Any, x: Tensor, rotation: Any) -> tuple[Tensor, Tensor]:
    keys = own.k_proj(x).unflatten(-1, (-1, own.head_dim)).transpose(1, 2)
    return rotate(keys, rotation), own._heads("v", x)


def _code_after(own: Any, plain: Any, memory: Tensor, hidden: Tensor) -> Any:
    gate, candidate, _ = own._joint(memory, hidden)
    embedded, state = memory.split(own.rank, dim=-1)
    state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
    return own._joint(torch.cat((embedded, state), dim=-1), hidden)[2].tanh()


def _no_markov(r: Reading) -> None:
    r.drafter.markov_head = r.drafter.markov_head and None


def _draft_ids(make: Callable[[Tensor], Tensor]) -> Choice:
    return lambda r: setattr(r.drafter, "d2t", make(r.drafter.d2t))


def _at_depth(pick: Callable[[int], int]) -> Choice:
    def draft_level(own: Any, plain: Any, state: Any, frozen: Any, level: Any, cache: Any) -> Any:
        return plain(state, frozen, replace(level, depth=pick(level.depth)), cache)

    return _around("draft_level", draft_level)


def _unshifted(own: Any, plain: Any, state: Any, frozen: Any, text: Any, cache: Any) -> Any:
    return plain(state, frozen, [[row[0], *row[:-1]] for row in text], cache)


def _in_bfloat16(r: Reading) -> None:
    r.drafter, r.frozen = r.drafter.to(torch.bfloat16), copy.deepcopy(r.frozen).to(torch.bfloat16)


CHOICES: dict[str, Choice] = {
    # What is taken of the target.
    "its hidden states are taken before the final norm": _layers(
        lambda r: [r.n_layers - 1] if r.layers == (r.n_layers,) else r.layers
    ),
    "the target's layers are counted one too low": _layers(lambda r: [layer - 1 for layer in r.layers]),
    "the target's layers are counted one too high": _layers(lambda r: [layer + 1 for layer in r.layers]),
    "the target's layers are joined in reverse": _layers(lambda r: r.layers[::-1]),
    "the output of the target's last layer is taken after the final norm": _layers(
        lambda r: [layer + (layer == r.n_layers - 1) for layer in r.layers]
    ),
    # Norms.
    "the drafter's final norm is left out": _without("norm"),
    "the norm of the target's states (hidden_norm) is left out": _without(r"(midlayer\.)?hidden_norm"),
    "the norm of the embeddings (input_layernorm) is left out": _without(r"midlayer\.input_layernorm"),
    "the norm of all states together (norm_before_fc) is left out": _without("input_norm"),
    "the norms of each state (fc_norm) are left out": _without(r"fc_norm\.\d+"),
    "the residual starts on the other side of hidden_norm (norm_before_residual)": _other_residual,
    "outputs are fed back on the other side of the final norm (norm_output)": _size(
        "norm_output", lambda r: not r.drafter.config.norm_output
    ),
    "the first layer's input norm is added or left out": _input_norm,
    "the norms of the heads (q_norm, k_norm) are left out": _without(r".*\.[qk]_norm"),
    "the context's keys go without k_norm": _around("layers.*.self_attn.keys_values", _unnormed_keys),
    "the context is normed again by each layer": _context_normed_again,
    # Positions.
    "the block's positions are one too high": _slots_at(lambda at: at + 1),
    "the block's positions are one too low": _slots_at(lambda at: at - 1),
    "all slots of a block have its first position": _slots_at(lambda at: at[:, :1].expand_as(at)),
    "the context's keys are not rotated": _around(
        "layers.*.self_attn.keys_values", lambda own, plain, x, rotation: (own._heads("k", x), own._heads("v", x))
    ),
    "positions of drafts after the first are one too high": _at_depth(lambda depth: depth + 1),
    "all drafts of a chain have the position of the first": _at_depth(lambda depth: 0),
    "RoPE has the base 10,000": _rotation(rope_theta=10_000.0),
    "RoPE is not scaled": _rotation(rope_type="default"),
    "RoPE has the base 10,000 and is not scaled": _rotation(rope_theta=10_000.0, rope_type="default"),
    # Attention.
    "slots of a block see only those before them": _slots_see(lambda q, k: k <= q),
    "slots of a block see no other slot": _slots_see(lambda q, k: (k < 0) | (k == q)),
    "the context ends one token too early": _slots_see(lambda q, k: (k != -1) & (q == q)),
    "a block sees the target's state of its own anchor": _sees_anchor,
    # Slots.
    "the mask token is 0": _size("mask_token", lambda r: 0),
    "the mask token is one too low": _size("mask_token", lambda r: r.drafter.config.mask_token - 1),
    "the mask token is one too high": _size("mask_token", lambda r: r.drafter.config.mask_token + 1),
    "the mask token is the last one": _size("mask_token", lambda r: r.drafter.config.vocab_size - 1),
    "the mask token is the padding token": _special("pad"),
    "the mask token is the first token of texts": _special("bos"),
    "the mask token is the end of texts": _special("eos"),
    "the first slot holds the mask token": _around(
        "slots", lambda own, plain, frozen, anchors: plain(frozen, torch.full_like(anchors, own.config.mask_token))
    ),
    "all slots hold the anchor": _around(
        "slots", lambda own, plain, frozen, anchors: frozen.embed(anchors.expand(-1, own.config.block_size))
    ),
    "drafts are read one slot off (sample_from_anchor)": _size(
        "sample_from_anchor", lambda r: not r.drafter.config.sample_from_anchor
    ),
    # Heads.
    "the Markov head is left out": _no_markov,
    "the Markov head reads the anchor for every draft": _around(
        "markov_head.follow", lambda own, plain, memory, hidden, tokens: memory
    ),
    "the Markov head's state begins anew with every draft": _around(
        "markov_head.follow", lambda own, plain, memory, hidden, tokens: own.begin(tokens)
    ),
    "the Markov head's output is read after the state's update": _around("markov_head.code", _code_after),
    "the Markov head is read as a vanilla one": _around(
        "markov_head.code", lambda own, plain, memory, hidden: memory[..., : own.rank]
    ),
    "draft ids are taken as tokens (d2t is left out)": _draft_ids(torch.zeros_like),
    "d2t is taken as tokens, not as distances": _draft_ids(lambda d2t: d2t - torch.arange(len(d2t))),
    "the target's LM head takes the place of the drafter's": _around(
        "draft_logits", lambda own, plain, frozen, features: frozen.logits(own.normed(features))
    ),
    # Order and precision.
    "embedding and hidden state are joined the other way round": _around(
        "join", lambda own, plain, embeddings, hidden: plain(hidden, embeddings)
    ),
    "each hidden state is joined with its own token, not the next one": _around("draft_root", _unshifted),
    "it computes in bfloat16": _in_bfloat16,
}
"""What differs, in words -> the change, in the order in which they are tried."""
