"""Layouts of block-parallel drafters: DFlash as z-lab publishes it, DSpark as DeepSpec does, and as vLLM takes it.

Sources:

- z-lab/dflash ``dflash/model.py`` and ``tests/fixtures/`` (names, shapes and config.json of a published checkpoint:
  neither embeddings nor LM head, which are the target's; the first slot of a block drafts nothing);
- deepseek-ai/DeepSpec ``deepspec/modeling/dspark/qwen3/{modeling,config}.py`` and ``markov_head.py`` (copies of the
  target's embeddings and LM head; every slot drafts; all keys of config.json on the top level);
- vllm-project/vllm ``vllm/model_executor/models/qwen3_dflash.py``, ``qwen3_dspark.py`` (vanilla Markov heads alone;
  without embeddings and LM head the target's are shared) and
  ``vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py``;
- sgl-project/sglang ``python/sglang/srt/models/dflash.py``, ``qwen3_dspark.py`` (embeddings and LM head have to be
  there; vanilla Markov heads, and a confidence head that reads them) and ``speculative/dflash_utils.py``.

``target_layer_ids`` are decoder layers from 0 whose outputs are read, the numbers of this package; vLLM counts layers
passed and adds 1 by itself. Its own key, ``eagle_aux_hidden_state_layer_ids`` and speculators'
``aux_hidden_state_layer_ids`` have 1 more.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from typing_extensions import override

from ...errors import CheckpointError, DrafterError
from ..drafters.block_sizes import BlockDrafterSizes
from ..drafters.dspark import DFlashSizes, DSparkSizes
from ..files.tensor_list import TensorList, TensorSpec, decoder_layer
from .base import DrafterLayout, Weights, drafter_facts, rope_keys, rows

_Sizes = TypeVar("_Sizes", bound=BlockDrafterSizes)
_COPIES = ("embed_tokens.weight", "lm_head.weight")
"""Copies of the target's weights; the target's own are used here."""


class BlockLayout(DrafterLayout):
    """What the layouts of block drafters share: the backbone and its config.json."""

    @override
    def refusals(self, sizes: Any) -> list[str]:
        """Refuse contexts that are not published, and other drafts of a block than the readers make."""
        if sizes.context != "hidden":
            return [f"its context is {sizes.context}, and theirs is hidden states"]
        return [f"it reads the embedding, and {self.reader} the outputs of layers"] if -1 in sizes.fused_layers else []

    @override
    def tensors(self, sizes: Any) -> TensorList:
        """List the tensors of the backbone."""
        width, head_dim = sizes.hidden_size, sizes.head_dim
        tensors = {
            "fc.weight": TensorSpec((width, len(sizes.fused_layers) * width)),
            "hidden_norm.weight": TensorSpec((width,)),
            "norm.weight": TensorSpec((width,)),
        }
        for index in range(sizes.block_layers):
            prefix = f"layers.{index}."
            tensors |= decoder_layer(
                prefix, width, sizes.n_heads * head_dim, sizes.self_attention_kv_heads * head_dim,
                sizes.self_attention_mlp_width,
            )  # fmt: skip
            tensors |= {f"{prefix}self_attn.{name}_norm.weight": TensorSpec((head_dim,)) for name in "qk"}
        return tensors

    @override
    def pack(self, weights: Weights, sizes: Any) -> Weights:
        return dict(weights)

    @override
    def unpack(self, weights: Weights, sizes: Any) -> Weights:
        return {name: value for name, value in weights.items() if name not in _COPIES}

    @override
    def config(self, sizes: Any, target_config: Any) -> dict[str, Any]:
        """Return a Qwen3 of the drafter's layers, the block and the layers that are read."""
        return {
            "model_type": "qwen3",
            "hidden_act": "silu",
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.self_attention_mlp_width,
            "num_hidden_layers": sizes.block_layers,
            "num_attention_heads": sizes.n_heads,
            "num_key_value_heads": sizes.self_attention_kv_heads,
            "head_dim": sizes.head_dim,
            "layer_types": ["full_attention"] * sizes.block_layers,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_position_embeddings": sizes.max_position_embeddings,
            "rms_norm_eps": sizes.norm_eps,
            "vocab_size": sizes.vocab_size,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "block_size": sizes.block_size,
            "num_target_layers": sizes.n_layers,
            "dflash_config": {
                "block_size": sizes.block_size,
                "mask_token_id": sizes.mask_token,
                "target_layer_ids": list(sizes.fused_layers),
            },
        } | rope_keys(sizes)

    @override
    def canonical(self, weights: Weights) -> Weights:
        """Leave out the prefix that vLLM puts before the names."""
        return {name.removeprefix("model."): value for name, value in super().canonical(weights).items()}

    def read_backbone(self, weights: Weights, config: Mapping[str, Any]) -> dict[str, Any]:
        """Read the sizes that DFlash and DSpark share, from config.json and the shapes."""
        nested = _nested(config)
        facts = drafter_facts(config)
        if "sliding_attention" in (config.get("layer_types") or ()):
            raise CheckpointError("its layers have a sliding window, which these drafters lack.")
        block = nested.get("block_size", config.get("block_size"))
        mask = nested.get("mask_token_id", config.get("mask_token_id"))
        if type(block) is not int or type(mask) is not int:
            raise CheckpointError("config.json lacks block_size or mask_token_id; restore the checkpoint's own.")
        return facts | {
            "n_layers": nested.get("num_target_layers", config.get("num_target_layers")) or 0,
            "self_attention_kv_heads": rows(weights, "layers.0.self_attn.k_proj.weight") // facts["head_dim"],
            "self_attention_mlp_width": rows(weights, "layers.0.mlp.gate_proj.weight"),
            "block_layers": len({name.split(".")[1] for name in weights if name.startswith("layers.")}),
            "block_size": block,
            "mask_token": mask,
            "fused_layers": read_layers_of(config),
        }


class DFlashLayout(BlockLayout):
    """z-lab's checkpoints, such as ``z-lab/Qwen3-8B-DFlash-b16``, which vLLM and SGLang load too."""

    name: ClassVar[str] = "dflash"
    kind: ClassVar[str] = DFlashSizes.kind
    reader: ClassVar[str] = "z-lab's code, vLLM and SGLang"

    @override
    def refusals(self, sizes: DFlashSizes) -> list[str]:
        """Refuse also blocks whose anchor's slot drafts."""
        found = super().refusals(sizes)
        if sizes.sample_from_anchor:
            found.append("the slot of its anchor drafts, and theirs does not (train with sample_from_anchor=false)")
        return found

    @override
    def config(self, sizes: DFlashSizes, target_config: Any) -> dict[str, Any]:
        return super().config(sizes, target_config) | {"architectures": ["DFlashDraftModel"]}

    @override
    def recognises(self, names: set[str], config: Mapping[str, Any]) -> bool:
        """Look for the context's norm and for per-head norms; DSpark says so in config.json."""
        has_backbone = {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= names
        return has_backbone and not _is_dspark(config)

    @override
    def read_sizes(self, weights: Weights, config: Mapping[str, Any]) -> DFlashSizes:
        return _made(DFlashSizes, self.read_backbone(weights, config) | {"sample_from_anchor": False})

    @override
    def notes(self, sizes: DFlashSizes) -> list[str]:
        """Tell how many tokens to ask an engine for."""
        n_drafts = sizes.n_drafts
        return [f"vLLM: num_speculative_tokens {n_drafts}; SGLang: --speculative-num-draft-tokens {1 + n_drafts}"]


class DSparkLayout(BlockLayout):
    """DeepSpec's checkpoints, such as ``deepseek-ai/dspark_qwen3_4b_block7``; SGLang loads those with vanilla heads."""

    name: ClassVar[str] = "dspark"
    kind: ClassVar[str] = DSparkSizes.kind
    reader: ClassVar[str] = "DeepSpec and SGLang"
    needs_embeddings: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True
    optional: ClassVar[frozenset[str]] = frozenset(_COPIES)

    @override
    def refusals(self, sizes: DSparkSizes) -> list[str]:
        """Refuse also blocks whose anchor's slot drafts nothing."""
        found = super().refusals(sizes)
        if not sizes.sample_from_anchor:
            found.append("the slot of its anchor drafts nothing, and theirs does (sample_from_anchor=true)")
        if sizes.markov_head == "product":
            found.append("its Markov head is product, and theirs are vanilla, gated and rnn")
        return found

    @override
    def tensors(self, sizes: DSparkSizes) -> TensorList:
        """List the backbone, the heads and the copies of the target's weights."""
        tensors = super().tensors(sizes)
        width, rank, vocabulary = sizes.hidden_size, sizes.markov_rank, sizes.vocab_size
        if sizes.markov_head != "none":
            tensors |= {f"markov_head.markov_w{i}.weight": TensorSpec((vocabulary, rank)) for i in (1, 2)}
        if sizes.markov_head == "gated":
            tensors |= _linear("markov_head.gate_proj", rank, width + rank)
        if sizes.markov_head == "rnn":
            tensors |= _linear("markov_head.joint_proj", 3 * rank, width + 2 * rank)
        if sizes.confidence_head:
            reads_markov = sizes.confidence_with_markov and sizes.markov_head != "none"
            tensors |= _linear("confidence_head.proj", 1, width + (rank if reads_markov else 0))
        copies = ("embed_tokens",) * self.needs_embeddings + ("lm_head",) * self.needs_head
        return tensors | {f"{name}.weight": TensorSpec((vocabulary, width)) for name in copies}

    @override
    def config(self, sizes: DSparkSizes, target_config: Any) -> dict[str, Any]:
        """Return the backbone's config with the heads, on the top level as DeepSpec and vLLM read them."""
        config = super().config(sizes, target_config)
        config["dflash_config"] = config["dflash_config"] | {"projector_type": "dspark"}
        has_markov = sizes.markov_head != "none"
        own = {
            "architectures": ["Qwen3DSparkModel"],
            "mask_token_id": sizes.mask_token,
            "target_layer_ids": list(sizes.fused_layers),
            "num_anchors": 512,
            "markov_rank": sizes.markov_rank if has_markov else 0,
            "enable_confidence_head": sizes.confidence_head,
            "confidence_head_with_markov": sizes.confidence_with_markov and has_markov,
        }
        return config | own | ({"markov_head_type": sizes.markov_head} if has_markov else {})

    @override
    def recognises(self, names: set[str], config: Mapping[str, Any]) -> bool:
        """Look for the context's norm, and for what config.json says of the heads."""
        return {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= names and _is_dspark(config)

    @override
    def read_sizes(self, weights: Weights, config: Mapping[str, Any]) -> DSparkSizes:
        found = self.read_backbone(weights, config)
        heads = dict(config) | _nested(config)
        if rank := heads.get("markov_rank"):
            found |= {"markov_rank": rank, "markov_head": heads.get("markov_head_type", "vanilla")}
        else:
            found["markov_head"] = "none"
        found["confidence_head"] = "confidence_head.proj.weight" in weights
        if found["confidence_head"]:
            found["confidence_with_markov"] = bool(heads.get("confidence_head_with_markov", False))
        return _made(DSparkSizes, found)

    @override
    def notes(self, sizes: DSparkSizes) -> list[str]:
        """Tell which heads SGLang cannot run."""
        if sizes.markov_head == "vanilla" and (sizes.confidence_with_markov or not sizes.confidence_head):
            return []
        return ["SGLang runs vanilla Markov heads alone, and confidence heads that read them"]


class VllmDSparkLayout(DSparkLayout):
    """The folder that vLLM loads with ``--speculative-config '{"method": "dspark", "model": FOLDER, ...}'``."""

    name: ClassVar[str] = "vllm-dspark"
    reader: ClassVar[str] = "vLLM"
    needs_embeddings: ClassVar[bool] = False
    needs_head: ClassVar[bool] = False

    @override
    def refusals(self, sizes: DSparkSizes) -> list[str]:
        """Refuse also other Markov heads than the vanilla one."""
        found = super().refusals(sizes)
        if sizes.markov_head not in ("vanilla", "product"):
            found.append(f"its Markov head is {sizes.markov_head}, and that of vLLM vanilla")
        return found

    @override
    def recognises(self, names: set[str], config: Mapping[str, Any]) -> bool:
        """Return False: without our key it is read as ``dspark``."""
        return False

    @override
    def notes(self, sizes: DSparkSizes) -> list[str]:
        """Tell how many tokens to ask for."""
        return [f"num_speculative_tokens: {sizes.n_drafts}"]


def read_layers_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the decoder layers, from 0, that a config.json names, whichever project's numbers it has.

    Raises:
        CheckpointError: it names none.
    """
    nested = _nested(config)
    for ids, shift in (
        (config.get("eagle_aux_hidden_state_layer_ids"), 1),
        (config.get("aux_hidden_state_layer_ids"), 1),
        (nested.get("target_layer_ids"), 0),
        (config.get("target_layer_ids"), 0),
    ):
        if ids:
            if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
                raise CheckpointError(f"target_layer_ids is {str(ids)[:60]!r}, expected a list of layers.")
            return tuple(layer - shift for layer in ids)
    raise CheckpointError(
        "config.json does not say which layers of the target are read; add target_layer_ids below dflash_config."
    )


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    nested = config.get("dflash_config")
    return dict(nested) if isinstance(nested, Mapping) else {}


def _is_dspark(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a drafter of DeepSpec's form, also one without heads."""
    heads = dict(config) | _nested(config)
    return "DSpark" in str(config.get("architectures")) or "markov_rank" in heads


def _linear(name: str, n_outputs: int, n_inputs: int) -> TensorList:
    return {f"{name}.weight": TensorSpec((n_outputs, n_inputs)), f"{name}.bias": TensorSpec((n_outputs,))}


def _made(build: type[_Sizes], values: dict[str, Any]) -> _Sizes:
    try:
        return build.from_dict(values)
    except DrafterError as error:
        raise CheckpointError(f"the weights do not fit config.json: {error}") from error
