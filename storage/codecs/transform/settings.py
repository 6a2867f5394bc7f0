"""The name of a transform codec: bits, scope, and what values are predicted from.

Which layers share a basis, the *scope*, trades stored bytes for the cost of reading one layer. Layers hold much the
same information about a token, so that a basis over all of them needs less than half the bits of a basis per layer; but
a reader of one layer then reads the codes of all layers of the group, and multiplies by its layer's share of the basis.

============  ==========================================================================================
scope         a reader of one layer of L reads
============  ==========================================================================================
``@all``      all codes, or where keys of all layers are above 16,384 numbers wide, those of its group: the layers are
              then cut into as few equal groups as stay below (two groups of 16 layers for Llama-3-8B)
``@group<g>`` the codes of its group: g / L of them
``@layer``    the codes of its layer: 1 / L of them, but there are two to three times as many at equal error
(none)        as ``@group<g>`` with the largest g at which a group's keys are up to 4,096 numbers wide
============  ==========================================================================================

With ``,tokens`` keys and values are predicted from the token ids, and only the rest is stored: less error at equal
bits. Decoding then needs the tokens, which every store has, and costs one more matrix product; the basis holds up to
``2 * 512`` bytes more for each token of the vocabulary (131 MB at the 128,256 tokens of Llama 3).

With ``,from-kv`` hidden states are predicted from the keys and values of their token, as these decode. Keys and values
are linear in what their layer reads of the residual stream, so that those of all layers tell much of any state of it.
A reader of a hidden state then reads the codes of all keys and values too.

With ``,joint`` each hidden state is predicted from the one stored below it, the last one from the highest layer that is
stored; with ``,tokens`` but no ``,from-kv`` the lowest from the tokens. A decoder layer adds little to the residual
stream, so that what is left to store is small; a reader of one hidden state then reads the codes of those below it too.
The bits of all joint states are split among them so that they err alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

AUTO_GROUP_WIDTH = 4_096
MAX_BASIS_WIDTH = 16_384
"""Widest part of one group. A basis takes up to ``width * MAX_COMPONENTS`` numbers; learning it, several times that. A
wider one would keep too small a share of its components, and see fewer tokens than it has dimensions: in the
proportions of a target of 32 layers of 1,024, two groups err 30 % less at 1 bit per value than one basis
(``transform_rate.py``)."""
HIDDEN_BITS_RATIO = 1.7
"""Bits per value of a hidden state for each bit per value of keys and values, where the codec's name gives no other."""

TRANSFORM_GRAMMAR = "transform:<bits>[,hidden=<bits>][,tokens][,from-kv][,joint][@all|@layer|@group<layers>]"
_NAME = re.compile(
    r"transform:(?P<kv>\d+(?:\.\d+)?)(?:,hidden=(?P<hidden>\d+(?:\.\d+)?))?"
    r"(?P<tokens>,tokens)?(?P<from_kv>,from-kv)?(?P<joint>,joint)?"
    r"(?:@(?P<scope>all|layer|group(?P<layers>[1-9]\d*)))?"
)


@dataclass(frozen=True)
class TransformSettings:
    """The settings that the name of a transform codec spells.

    Attributes:
        kv_bits: stored bits per value of keys and values.
        hidden_bits: stored bits per value of hidden states.
        group_layers: layers that share a basis; 0 for all, None to choose by width.
        from_tokens: whether keys and values are predicted from the target's embeddings of the tokens.
        from_kv: whether hidden states are predicted from keys and values.
        is_joint: whether hidden states are predicted from each other.
    """

    kv_bits: float
    hidden_bits: float
    group_layers: int | None = None
    from_tokens: bool = False
    from_kv: bool = False
    is_joint: bool = False

    @classmethod
    def parse(cls, name: str) -> TransformSettings:
        """Read a name of :data:`TRANSFORM_GRAMMAR`; bits are 0.05 to 10."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f"Codec {name!r} is not {TRANSFORM_GRAMMAR}, in this order; for example transform:1.0, "
                "transform:0.5,hidden=0.9@group4 or transform:0.88,tokens@all."
            )
        kv_bits = float(match["kv"])
        hidden_bits = float(match["hidden"]) if match["hidden"] else kv_bits * HIDDEN_BITS_RATIO
        for bits in (kv_bits, hidden_bits):
            if not 0.05 <= bits <= 10:
                raise ValueError(f"Codec {name!r}: {bits:g} bits per value is outside 0.05 to 10. Use lossless above.")
        group_layers = {None: None, "all": 0, "layer": 1}.get(match["scope"], int(match["layers"] or 0))
        words = (match[word] is not None for word in ("tokens", "from_kv", "joint"))
        return cls(kv_bits, hidden_bits, group_layers, *words)

    def group_size(self, n_layers: int, layer_width: int) -> int:
        """Return the layers that share a basis, given the width of one layer's keys.

        Raises:
            ValueError: one layer, or the group that the name asks for, is above ``MAX_BASIS_WIDTH``.
        """
        check_width(layer_width, "the keys of one layer")
        most = MAX_BASIS_WIDTH // layer_width
        if self.group_layers is None:
            return max(1, min(n_layers, AUTO_GROUP_WIDTH // layer_width))
        if self.group_layers == 0:
            n_groups = -(-n_layers // most)
            return -(-n_layers // n_groups)
        size = min(self.group_layers, n_layers)
        if size > most:
            raise ValueError(
                f"a basis for {size} layers of {layer_width:,} keys is {size * layer_width:,} wide, above "
                f"{MAX_BASIS_WIDTH:,}; the widest is {self.spelling(f'@group{most}')}."
            )
        return size

    def spelling(self, scope: str) -> str:
        """Return the codec's name with another scope."""
        hidden = "" if self.hidden_bits == self.kv_bits * HIDDEN_BITS_RATIO else f",hidden={self.hidden_bits:g}"
        words = {",tokens": self.from_tokens, ",from-kv": self.from_kv, ",joint": self.is_joint}
        return f"transform:{self.kv_bits:g}{hidden}{''.join(word for word, is_on in words.items() if is_on)}{scope}"


def check_width(width: int, what: str) -> None:
    """Raise ValueError if a part is too wide for any basis."""
    if width > MAX_BASIS_WIDTH:
        raise ValueError(
            f"{what}: {width:,} numbers a token, above {MAX_BASIS_WIDTH:,}, the widest basis. Use lossless or int8."
        )
