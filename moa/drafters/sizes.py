"""The sizes that define a drafter: common fields, default values for a target, and JSON form."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import override

from ...errors import DrafterError, TargetError
from ..nn.layers import DecoderBlockSizes, Rotary
from ..targets.facts import TargetFacts
from .training import Reads

_MAX_SIZE = 1 << 26
# The types of the fields below. These types are strict, so pydantic refuses values of other types
# instead of converting them.
Size = Annotated[int, Field(strict=True, ge=1, le=_MAX_SIZE)]
SizeOrZero = Annotated[int, Field(strict=True, ge=0, le=_MAX_SIZE)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Epsilon = Annotated[float, Field(strict=True, ge=0, le=1)]
# Indices of target layers (-1 is the embedding), or token ids. A list from a JSON file is converted
# to a tuple.
Indices = tuple[Annotated[int, Field(strict=True, ge=-1, le=_MAX_SIZE)], ...]


@dataclass(frozen=True, kw_only=True)
class DrafterSizes:
    """The sizes of the target, which are part of every drafter's sizes.

    Each kind of drafter has a subclass, which adds the drafter's own sizes.
    """

    # Kind of drafter with these sizes, a key of ``registry.DRAFTERS``.
    kind: ClassVar[str]
    # Prefixes of field names. The JSON form omits a field if its name starts with one of these
    # prefixes, and its value is empty or 0.
    left_out: ClassVar[tuple[str, ...]] = ("draft_",)
    # Names of fields on which the drafter's weights do not depend.
    without_weights: ClassVar[tuple[str, ...]] = ("draft_vocabulary",)

    # E, width of the target.
    hidden_size: Size
    # Number of query heads of the target. The drafter's self- and cross-attention have the same
    # number.
    n_heads: Size
    # Head dim of the target. The drafter's self- and cross-attention have the same head dim.
    head_dim: Size
    # L, number of decoder layers of the target. 0 if a checkpoint of another project does not state
    # it.
    n_layers: SizeOrZero
    vocab_size: Size  # V, vocabulary size of the target.
    max_position_embeddings: Size  # Maximum number of positions of the target.
    # Epsilon of all RMSNorms, the same as in the target.
    norm_eps: Epsilon
    # RoPE parameters of the target (``rope_theta``, ``rope_type``, ...). All decoder blocks of the
    # drafter use these parameters.
    rope_parameters: dict[str, Any]
    # True if the q, k and v projections of self-attention have biases, as for Qwen2 targets.
    qkv_bias: Flag = False
    # Hashes that identify the target: weights_sha256 and config_sha256.
    target: dict[str, str] = field(default_factory=dict)
    # V_d, number of tokens that can be drafted. 0 means all tokens.
    draft_vocabulary: SizeOrZero = 0
    # Ascending ids of the tokens that can be drafted. Empty until these tokens are chosen.
    draft_tokens: Indices = ()

    def __post_init__(self) -> None:
        """Check each value, and check that the values are consistent with each other."""
        for item in fields(self):
            value = getattr(self, item.name)
            try:
                value = TypeAdapter[Any](cast(Any, item.type)).validate_python(value)
            except ValidationError as error:
                raise DrafterError(
                    f"the drafter's setting {item.name} has the value {str(value)[:60]!r}, which "
                    "is not valid. Correct this setting, or restore the drafter's drafter.json or "
                    "config.json."
                ) from error
            object.__setattr__(self, item.name, value)
        problems = list(self.problems())
        if max(self.draft_vocabulary, 1 + max(self.draft_tokens, default=0)) > self.vocab_size:
            problems.append(
                f"draft_vocabulary ({self.draft_vocabulary}) must not exceed the target's "
                f"vocabulary of {self.vocab_size} tokens, and the ids in draft_tokens must be "
                "below this number"
            )
        if problems:
            raise DrafterError(
                f"the sizes of the drafter do not fit together: {'; '.join(problems)}. Correct "
                "these settings, or restore the drafter's files."
            )

    def problems(self) -> Iterator[str]:
        """Yield one message for each contradiction between the sizes.

        Each single value has already been checked.
        """
        yield from ()

    @property
    def reads(self) -> Reads:
        """The activations that training reads for this drafter.

        Tokens, response masks and the last hidden state are read for all drafters. By default
        nothing else is read.
        """
        return Reads()

    @property
    def target_layer_inference(self) -> int:
        """N, the number of the target's last layers that the drafted features pass through."""
        return 0

    @property
    def max_depth(self) -> int | None:
        """The maximum number of draft levels. None if the number is not limited."""
        return None

    def check_depth(self, depth: int) -> None:
        """Check a number of draft levels; raise DrafterError if it exceeds ``max_depth``."""
        if self.max_depth is not None and depth > self.max_depth:
            raise DrafterError(
                f"this {self.kind} drafter can draft at most {self.max_depth} tokens in a row, but "
                f"{depth} were requested. Give a `tree` with at most {self.max_depth} levels, or a "
                "drafter that was trained for more."
            )

    def kv_head_problems(self, *names: str) -> Iterator[str]:
        """Check numbers of KV heads: they must divide the number of query heads.

        ``names`` are the names of the fields that contain numbers of KV heads. The result has one
        message for each field with a wrong number.
        """
        for name in names:
            if self.n_heads % (count := getattr(self, name)):
                yield (
                    f"{name} is {count}, which must divide the target's number of query heads, "
                    f"{self.n_heads}"
                )

    @classmethod
    def from_target(
        cls, facts: TargetFacts, target: dict[str, str] | None = None, **sizes: Any
    ) -> Self:
        """Create the sizes of a drafter for a target.

        Args:
            facts: facts about the target.
            target: hashes that identify the target.
            sizes: values that replace defaults. A value of None keeps the default.

        Raises:
            DrafterError: the sizes do not fit together.
        """
        values: dict[str, Any] = {
            "hidden_size": facts.hidden_size,
            "n_heads": facts.n_heads,
            "head_dim": facts.head_dim,
            "n_layers": facts.n_layers,
            "vocab_size": facts.vocab_size,
            "max_position_embeddings": facts.max_position_embeddings,
            "norm_eps": facts.norm_eps,
            "rope_parameters": facts.rope_parameters,
            "qkv_bias": facts.model_type == "qwen2",
            "target": dict(target or {}),
        }
        given_sizes = {name: value for name, value in sizes.items() if value is not None}
        if given_sizes.get("draft_vocabulary") == "all":
            given_sizes["draft_vocabulary"] = facts.vocab_size
        return cls(**(values | cls.defaults(facts, given_sizes) | given_sizes))

    @classmethod
    def defaults(cls, facts: TargetFacts, given: Mapping[str, Any]) -> dict[str, Any]:
        """Choose default sizes from the facts about a target and from the given sizes.

        This base class has no default sizes.
        """
        return {}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Create sizes from a result of :meth:`to_dict`; raise DrafterError if it is not valid."""
        sizes = dict(values)
        kind = sizes.pop("kind", cls.kind)
        if kind != cls.kind:
            raise DrafterError(
                f"the sizes are for a drafter of kind {kind!r}, expected the kind {cls.kind!r}."
            )
        known = {item.name for item in fields(cls)}
        if unknown := sorted(set(sizes) - known):
            raise DrafterError(
                f"drafter.json has keys that this release does not know: {', '.join(unknown)}. It "
                "was probably written by a newer release of moa-data. Install that release, or "
                "restore the file."
            )
        try:
            return cls(**sizes)
        except TypeError as error:
            raise DrafterError(
                f"drafter.json lacks some sizes of the drafter ({error}). Restore the file."
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes and the ``kind`` as plain values for JSON."""
        plain: dict[str, Any] = {"kind": self.kind}
        for name, value in asdict(self).items():
            if value or not name.startswith(self.left_out):
                plain[name] = value
        return plain

    def rotary(self) -> Rotary:
        """Create the rotary embedding for heads of the target's size."""
        return Rotary(self.head_dim, self.rope_parameters, self.max_position_embeddings)

    def block(self, kv_heads: int, mlp_width: int, qkv_bias: bool) -> DecoderBlockSizes:
        """Create sizes of a decoder block with the target's width and number of query heads."""
        return DecoderBlockSizes(
            self.hidden_size,
            self.n_heads,
            kv_heads,
            self.head_dim,
            mlp_width,
            self.norm_eps,
            qkv_bias=qkv_bias,
        )


@dataclass(frozen=True, kw_only=True)
class LayerSizes(DrafterSizes):
    """Sizes of drafters whose decoder layers have the target's width.

    By default the layers also have the target's number of KV heads and the target's MLP width.
    """

    self_attention_kv_heads: Size  # Number of KV heads of each layer.
    self_attention_mlp_width: Size  # MLP width of each layer.

    @override
    def problems(self) -> Iterator[str]:
        yield from self.kv_head_problems("self_attention_kv_heads")

    @classmethod
    @override
    def defaults(cls, facts: TargetFacts, given: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "self_attention_kv_heads": facts.n_kv_heads,
            "self_attention_mlp_width": facts.mlp_width,
        }

    @property
    def layer(self) -> DecoderBlockSizes:
        """Sizes of the drafter's decoder layers, which are all the same."""
        return self.block(
            self.self_attention_kv_heads, self.self_attention_mlp_width, self.qkv_bias
        )


def multiple_of_32(width: float) -> int:
    """Round a width to the nearest multiple of 32, but to at least 32."""
    return max(32, round(width / 32) * 32)


def largest_divisor(number: int, limit: int) -> int:
    """Among the divisors of ``number`` that are at most ``limit``, return the largest."""
    return next(divisor for divisor in range(limit, 0, -1) if number % divisor == 0)


def check_target_layers(layers: Sequence[int], n_layers: int, *, embedding: bool = False) -> None:
    """Check that the ``layers`` ascend and exist in the target; raise DrafterError if not.

    If ``embedding`` is true, the first layer may be -1, which means the embedding.
    """
    first = -1 if embedding else 0
    is_ascending = bool(layers) and list(layers) == sorted(set(layers))
    if not is_ascending or layers[0] < first or layers[-1] >= n_layers or tuple(layers) == (-1,):
        layer_names = ",".join(map(str, layers))
        also = "; the first may be -1, the embedding" if embedding else ""
        raise DrafterError(
            f"`fused_layers` is {layer_names or 'empty'}, expected decoder layers of the target "
            f"from 0 to {n_layers - 1} in ascending order{also}."
        )


def check_default_layers(layers: Sequence[int], n_layers: int) -> None:
    """Raise DrafterError if the target has too few layers for a drafter's default layers.

    If the target has too few layers, the indices of the default layers do not ascend.
    """
    if list(layers) != sorted(set(layers)):
        n_read = min(len(layers), n_layers)
        spread = [index * (n_layers - 1) // max(1, n_read - 1) for index in range(n_read)]
        raise DrafterError(
            f"by default, this drafter reads {len(layers)} layers of the target, but a target with "
            f"{n_layers} layers has too few for that. Choose the layers yourself, for example "
            f"evenly spread over the target: `fused_layers={','.join(map(str, spread))}`."
        )


def check_target_fits(
    config: DrafterSizes, sizes: Mapping[str, Any], identity: Mapping[str, str] = {}
) -> None:
    """Check that a drafter was made for a target; raise TargetError if it was not.

    Args:
        config: sizes of the drafter.
        sizes: sizes of the target, from ``TargetFacts.sizes``.
        identity: hashes of the target's weights, from ``bundle.hash_target``.
    """
    sizes = {"kv_width": 2 * sizes["n_kv_heads"] * sizes["head_dim"], **sizes}
    wrong: list[str] = []
    for name in ("n_layers", "hidden_size", "vocab_size", "n_heads", "head_dim", "kv_width"):
        # Ignore sizes that are 0. A checkpoint of another project may not state these sizes.
        size = getattr(config, name, 0)
        if size not in (0, sizes[name]):
            wrong.append(f"the drafter's {name} is {size}, but the target's is {sizes[name]}")
    if (last := max(getattr(config, "fused_layers", ()), default=-1)) >= sizes["n_layers"]:
        wrong.append(
            f"the drafter reads layer {last} (counted from 0), but the target has only "
            f"{sizes['n_layers']} layers"
        )
    expected = config.target.get("weights_sha256")
    got = identity.get("weights_sha256")
    if expected and got and expected != got:
        wrong.append(
            f"the drafter's target had weights with the hash {expected[:12]}, but this target has "
            f"weights with the hash {got[:12]}"
        )
    if wrong:
        raise TargetError(
            f"the drafter was trained for another target ({wrong[0]}). Pass the target that the "
            "drafter's store was extracted from."
        )
