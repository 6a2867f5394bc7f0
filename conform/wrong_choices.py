"""Known mistakes in the computation of a drafter, such as a norm that is left out.

If another program drafts other tokens than this package, that program may make one of these
mistakes, called *wrong choices*. A choice is a function that changes a :class:`Reading`. A Reading
contains a copy of a drafter. If the drafter lacks the module or setting that a choice changes, the
function raises ``AttributeError``, ``KeyError`` or ``IndexError``. The choice is then skipped.
Mistakes in training (losses, weights of positions, teachers) are not listed, because they do not
change how a given drafter drafts.

A block drafter drafts several tokens in one pass, one in each *slot* of its draft block. The
*anchor* is the last committed token, which is the input of the first slot. The *context* is what
the drafter reads about the committed tokens.

Shapes: B = 1 row, n tokens, Q slots of a draft block, S keys, E target width, L target layers.
"""

import copy
import re
from collections.abc import Callable, Mapping
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
    """A copy of a drafter, and the target layers that it reads. Wrong choices change both."""

    drafter: Any
    frozen: FrozenTarget
    n_layers: int  # L, the number of the target's layers
    # The drafter reads the concatenated outputs of these target layers. -1 stands for the
    # embeddings, and L stands for the output of the final norm.
    layers: tuple[int, ...]
    # Without a mistake, the drafter reads the target's outputs for all committed tokens except the
    # last one. With a wrong choice, it may also read the outputs for this number of tokens after
    # them. The first of these tokens is the last committed one.
    ahead: int = 0

    @classmethod
    def of(cls, drafter: Drafter, frozen: FrozenTarget, n_layers: int) -> "Reading":
        """Copy a drafter. The copy drafts the same tokens until a choice changes the copy."""
        return cls(
            copy.deepcopy(drafter),
            copy.copy(frozen),
            n_layers,
            drafter.observed_layers or (n_layers,),
        )

    def states(self, outputs: Mapping[int, Tensor]) -> Tensor:
        """Concatenate the outputs [n, E] of the layers that the drafter reads."""
        return torch.cat([outputs[layer] for layer in self.layers], dim=-1).to(self.drafter.dtype)


Choice = Callable[[Reading], None]


def _put(part: str, change: Callable[[Any, Any], Any]) -> Choice:
    """Return a wrong choice (a deliberate mistake) that replaces an attribute of a module.

    ``part`` is the dotted path of the attribute, such as ``layers.0.input_layernorm``. The new
    value is ``change(owner, value)``, where ``owner`` is the module and ``value`` is the right
    value.
    """

    def choice(r: Reading) -> None:
        path, _, name = part.rpartition(".")
        owner = r.drafter.get_submodule(path)
        setattr(owner, name, change(owner, getattr(owner, name)))

    return choice


def _layers(pick: Callable[[int, int], int]) -> Choice:
    """Return a wrong choice (a deliberate mistake) that makes the drafter read other target layers.

    In place of each layer that it should read, it reads the layer ``pick(layer, L)``.
    """
    return lambda r: setattr(r, "layers", tuple(pick(layer, r.n_layers) for layer in r.layers))


def _size(name: str, pick: Callable[[Any, Any], Any]) -> Choice:
    """Return a wrong choice (a deliberate mistake) that changes a setting of the drafter.

    ``name`` is the name of the setting. The new value is ``pick(sizes, size)``, where ``sizes`` are
    all settings of the drafter, and ``size`` is the right value.
    """
    return _put(
        "config",
        lambda owner, sizes: replace(sizes, **{name: pick(sizes, getattr(sizes, name))}),
    )


def _mask(name: str) -> Choice:
    def choice(r: Reading) -> None:
        token = getattr(r.frozen.facts.config, f"{name}_token_id")
        _size("mask_token", lambda sizes, _: token[0] if isinstance(token, list) else token)(r)

    return choice


def _without(pattern: str) -> Choice:
    """Return a wrong choice (a deliberate mistake) that leaves out norms.

    The drafter then computes without the norms whose names match ``pattern``.
    """

    def choice(r: Reading) -> None:
        for name, module in list(r.drafter.named_modules()):
            if isinstance(module, RMSNorm) and re.fullmatch(pattern, name):
                r.drafter.set_submodule(name, nn.Identity())

    return choice


def _other_input_norm(own: Any, norm: nn.Module) -> nn.Module:
    after = own.post_attention_layernorm
    return (
        nn.Identity()
        if isinstance(norm, RMSNorm)
        else RMSNorm(after.normalized_shape, eps=after.eps)
    )


def _rotation(**parameters: Any) -> Choice:
    def change(own: Any, rotary: Rotary) -> Rotary:
        known = {**own.config.rope_parameters, **parameters}
        return Rotary(len(rotary.frequencies), known, own.config.max_position_embeddings)

    return _put("rotary", change)


def _slots_at(move: Callable[[Tensor], Tensor]) -> Choice:
    """Return a wrong choice (a deliberate mistake) that moves the slots of a draft block.

    The wrong positions are ``move(positions)``, where ``positions`` [B, Q] are the right positions.
    """
    return _put(
        "run_layers",
        lambda owner, plain: lambda x, positions, *rest: plain(x, move(positions), *rest),
    )


def _slots_see(rule: Callable[[Tensor, Tensor], Tensor]) -> Choice:
    """Return a wrong choice (a deliberate mistake) that lets ``rule`` choose the keys of a slot.

    Slot q of a draft block attends to key k if ``rule(q, k)`` is true. The arguments of the rule
    are the numbers of all slots, q [Q, 1], and the numbers of all keys, k [S]. A slot and its key
    have the same number, and the first slot has the number 0. The committed tokens before the block
    have keys with negative numbers.
    """

    def run_layers(plain: Any, x: Tensor, at: Tensor, appends: Any, _: Any) -> Any:
        slots = torch.arange(x.shape[1])
        return plain(
            x, at, appends, rule(slots[:, None], torch.arange(-int(at[0, 0]), len(slots)))[None]
        )

    return _put("run_layers", lambda own, plain: partial(run_layers, plain))


def _text(part: str, edit: Callable[[list[int]], list[int]]) -> Choice:
    """Return a wrong choice (a deliberate mistake) that changes the tokens that a method gets.

    ``part`` is the name of the method of the drafter. ``edit`` takes the right committed tokens of
    one row. It returns the wrong tokens that the method gets instead.
    """
    return _put(
        part,
        lambda own, plain: (
            lambda state, frozen, text, cache: plain(state, frozen, [*map(edit, text)], cache)
        ),
    )


def _sees_anchor(r: Reading) -> None:
    _text("_extend_context", lambda row: [*row, row[-1]])(r)
    r.ahead = 1


def _context_normed_again(r: Reading) -> None:
    for block in r.drafter.blocks if r.drafter.hidden_norm else ():
        plain = block.self_attn.keys_values
        norm = block.input_layernorm
        block.self_attn.keys_values = lambda x, rotation, plain=plain, norm=norm: plain(
            norm(x), rotation
        )


def _keys(make: Callable[[Any, Tensor, Any], Tensor]) -> Choice:
    """Return a wrong choice (a deliberate mistake) about the keys of committed tokens.

    The call ``make(attention, states, rotation)`` computes these keys. ``attention`` is the
    attention module. ``states`` [B, n, E] are the hidden states of the committed tokens.
    ``rotation`` rotates keys to their positions (RoPE).
    """

    def choice(r: Reading) -> None:
        for layer in r.drafter.layers:
            own = layer.self_attn
            own.keys_values = lambda x, rotation, own=own: (
                make(own, x, rotation),
                own._heads("v", x),
            )

    return choice


def _unnormed(own: Any, x: Tensor, rotation: Any) -> Tensor:
    return rotate(own.k_proj(x).unflatten(-1, (-1, own.head_dim)).transpose(1, 2), rotation)


def _at_depth(pick: Callable[[int], int]) -> Choice:
    """Return a wrong choice (a deliberate mistake) that changes the depth of a draft.

    The depth of a draft is the number of drafts before it in the same chain. The draft is computed
    as if its depth were ``pick(depth)``.
    """
    return _put(
        "draft_level",
        lambda own, plain: (
            lambda state, frozen, level, cache: plain(
                state, frozen, replace(level, depth=pick(level.depth)), cache
            )
        ),
    )


def _code_after(own: Any, plain: Any) -> Callable[[Tensor, Tensor], Any]:
    def code(memory: Tensor, hidden: Tensor) -> Any:
        updated = own.follow(memory, hidden, memory.new_zeros(memory.shape[:-1], dtype=torch.int64))
        return plain(torch.cat((memory[..., : own.rank], updated[..., own.rank :]), dim=-1), hidden)

    return code


def _in_bfloat16(r: Reading) -> None:
    r.drafter, r.frozen = r.drafter.to(torch.bfloat16), copy.deepcopy(r.frozen).to(torch.bfloat16)


CHOICES: dict[str, Choice] = {
    # Wrong choices (deliberate mistakes) about the target's states
    "the target's hidden states are taken before the final norm": _layers(
        lambda layer, n: layer - (layer == n)
    ),
    "the target's layers are counted one too low": _layers(lambda layer, n: layer - 1),
    "the target's layers are counted one too high": _layers(lambda layer, n: layer + 1),
    "the outputs of the target's layers are concatenated in reverse order": lambda r: setattr(
        r, "layers", r.layers[::-1]
    ),
    "the output of the target's last layer is taken after the final norm": _layers(
        lambda layer, n: layer + (layer == n - 1)
    ),
    # Wrong choices (deliberate mistakes) about norms
    "the drafter's final norm is left out": _without("norm"),
    "the norm of the target's states (hidden_norm) is left out": _without(
        r"(midlayer\.)?hidden_norm"
    ),
    "the norm of the embeddings (input_layernorm) is left out": _without(
        r"midlayer\.input_layernorm"
    ),
    "the norm of the concatenated target states (norm_before_fc) is left out": _without(
        "input_norm"
    ),
    "the norms of the single target states (fc_norm) are left out": _without(r"fc_norm\.\d+"),
    "the residual is taken before instead of after hidden_norm, or the reverse "
    "(norm_before_residual)": _put(
        "midlayer._norms_residual", lambda own, is_normed: not is_normed
    ),
    "outputs are fed back from before instead of after the final norm, or the reverse "
    "(norm_output)": _size("norm_output", lambda sizes, is_normed: not is_normed),
    "the input norm of the drafter's first layer is added or left out": _put(
        "layers.0.input_layernorm", _other_input_norm
    ),
    "the norms of queries and keys (q_norm, k_norm) are left out": _without(r".*\.[qk]_norm"),
    "k_norm is not applied to the keys of committed tokens": _keys(_unnormed),
    "each layer norms the states of committed tokens once more": _context_normed_again,
    # Wrong choices (deliberate mistakes) about positions
    "the positions of the draft block are one too high": _slots_at(lambda at: at + 1),
    "the positions of the draft block are one too low": _slots_at(lambda at: at - 1),
    "all slots of a draft block have its first position": _slots_at(
        lambda at: at[:, :1].expand_as(at)
    ),
    "RoPE is not applied to the keys of committed tokens": _keys(
        lambda own, x, rotation: own._heads("k", x)
    ),
    "the positions of all drafts after the first are one too high": _at_depth(
        lambda depth: depth + 1
    ),
    "all drafts of a chain have the position of the first draft": _at_depth(lambda depth: 0),
    "RoPE has the base 10,000": _rotation(rope_theta=10_000.0),
    "RoPE is not scaled": _rotation(rope_type="default"),
    "RoPE has the base 10,000 and is not scaled": _rotation(
        rope_theta=10_000.0, rope_type="default"
    ),
    # Wrong choices (deliberate mistakes) about attention
    "slots of a draft block attend only to themselves and to earlier slots": _slots_see(
        lambda q, k: k <= q
    ),
    "slots of a draft block do not attend to each other": _slots_see(
        lambda q, k: (k < 0) | (k == q)
    ),
    "the draft block does not attend to the last token before its anchor": _slots_see(
        lambda q, k: (k != -1) & (q == q)
    ),
    "a draft block reads the target's state of its own anchor": _sees_anchor,
    # Wrong choices (deliberate mistakes) about the slots of draft blocks
    "the mask token is 0": _size("mask_token", lambda sizes, mask: 0),
    "the mask token is one too low": _size("mask_token", lambda sizes, mask: mask - 1),
    "the mask token is one too high": _size("mask_token", lambda sizes, mask: mask + 1),
    "the mask token is the last token of the vocabulary": _size(
        "mask_token", lambda sizes, mask: sizes.vocab_size - 1
    ),
    "the mask token is the padding token": _mask("pad"),
    "the mask token is the BOS token": _mask("bos"),
    "the mask token is the EOS token": _mask("eos"),
    "the first slot of a draft block contains the mask token": _put(
        "slots",
        lambda own, plain: (
            lambda frozen, at: plain(frozen, torch.full_like(at, own.config.mask_token))
        ),
    ),
    "all slots of a draft block contain the anchor": _put(
        "slots",
        lambda own, plain: lambda frozen, at: frozen.embed(at.expand(-1, own.config.block_size)),
    ),
    "drafts are read from slots that are off by one (sample_from_anchor)": _size(
        "sample_from_anchor", lambda sizes, is_anchor: not is_anchor
    ),
    # Wrong choices (deliberate mistakes) about the Markov head and the LM head
    "the Markov head is left out": _put("markov_head", lambda own, head: head and None),
    "the Markov head reads the anchor for every draft": _put(
        "markov_head.follow", lambda own, plain: lambda memory, hidden, tokens: memory
    ),
    "the Markov head's state is reset before every draft": _put(
        "markov_head.follow", lambda own, plain: lambda memory, hidden, tokens: own.begin(tokens)
    ),
    "the Markov head's output is computed after its state is updated": _put(
        "markov_head.code", _code_after
    ),
    "the Markov head is computed as if it had the type vanilla": _put(
        "markov_head.code", lambda own, plain: lambda memory, hidden: memory[..., : own.rank]
    ),
    "ids of the draft vocabulary are used as token ids (d2t is left out)": _put(
        "d2t", lambda own, d2t: 0 * d2t
    ),
    "the values of d2t are used as token ids, not as offsets": _put(
        "d2t", lambda own, d2t: d2t - torch.arange(len(d2t))
    ),
    "the target's LM head is used in place of the drafter's": _put(
        "draft_logits",
        lambda own, plain: lambda frozen, features: frozen.logits(own.normed(features)),
    ),
    # Wrong choices (deliberate mistakes) about the order of inputs, and about precision
    "embedding and hidden state are concatenated in the wrong order": _put(
        "combine", lambda own, plain: lambda embeddings, hidden: plain(hidden, embeddings)
    ),
    "each hidden state is combined with its own token, not with the next token": _text(
        "draft_root", lambda row: [row[0], *row[:-1]]
    ),
    "the engine computes in bfloat16": _in_bfloat16,
}
"""Description of a wrong choice (a deliberate mistake) -> the choice, in the order of trying."""
