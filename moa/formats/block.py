"""Layouts of the block-parallel drafters DFlash and DSpark, as other programs store them.

Sources:

- z-lab/dflash ``dflash/model.py``, ``tests/fixtures/``: the file has no embeddings and no LM head,
  because the drafter uses those of the target. The first slot of a draft block drafts nothing.
- deepseek-ai/DeepSpec ``deepspec/modeling/dspark/qwen3/{modeling,config}.py``, ``markov_head.py``:
  the file contains copies of the target's embeddings and LM head. Every slot drafts a token. All
  keys of config.json are at the top level.
- vllm-project/vllm ``vllm/model_executor/models/qwen3_dflash.py``, ``qwen3_dspark.py``,
  ``vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py``: the only Markov heads that vLLM supports
  are vanilla heads. If the file has no embeddings and no LM head, vLLM uses those of the target.
- sgl-project/sglang ``python/sglang/srt/models/dflash.py``, ``qwen3_dspark.py``,
  ``speculative/dflash_utils.py``: the file must have embeddings and an LM head. The only Markov
  heads that SGLang supports are vanilla heads. A confidence head must read the embedding of the
  Markov head.

In config.json, ``target_layer_ids`` lists the decoder layers whose outputs the drafter reads. The
first decoder layer has the id 0. The keys ``eagle_aux_hidden_state_layer_ids`` of vLLM and
``aux_hidden_state_layer_ids`` of speculators list the same layers, with ids that are larger by 1.
"""

from dataclasses import replace
from typing import Any

from ...errors import DrafterError
from ..drafters.block import BlockDrafterSizes, DFlashSizes, DSparkSizes
from . import layout
from .layout import ForeignConfig, Layout, Weights


def _config(sizes: BlockDrafterSizes) -> dict[str, Any]:
    """Return the config.json of a DFlash drafter.

    It is the config.json of a Qwen3 model that has the drafter's layers.
    """
    return layout.llama_config(sizes) | {
        "model_type": "qwen3",
        "num_hidden_layers": sizes.block_layers,
        "layer_types": ["full_attention"] * sizes.block_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "block_size": sizes.block_size,
        "num_target_layers": sizes.n_layers,
        "dflash_config": {
            "block_size": sizes.block_size,
            "mask_token_id": sizes.mask_token,
            "target_layer_ids": list(sizes.fused_layers),
        },
    }


def _reads_embedding(sizes: BlockDrafterSizes) -> list[str]:
    return [
        "the drafter reads the target's embedding (fused_layers contains -1), but this format "
        "supports only outputs of decoder layers"
    ] * (-1 in sizes.fused_layers)


def _is_dspark(config: ForeignConfig) -> bool:
    """Whether a config.json describes a DSpark drafter.

    The drafter may lack the Markov head, the confidence head, or both.
    """
    heads = dict(config) | layout.nested(config, "dflash_config")
    return "DSpark" in str(config.get("architectures")) or "markov_rank" in heads


def _is_block(names: set[str]) -> bool:
    # Every block-parallel drafter has these three tensors. ``fc`` and ``hidden_norm`` process the
    # layer outputs that the drafter reads from the target. ``q_norm`` is a norm of the queries.
    return {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= names


def _read_backbone(weights: Weights, config: ForeignConfig) -> dict[str, Any]:
    """Read the sizes that DFlash and DSpark share, from config.json and the shapes of tensors."""
    settings = dict(config) | layout.nested(config, "dflash_config")
    facts = layout.drafter_facts(config)
    block = settings.get("block_size")
    mask = settings.get("mask_token_id")
    # ModelOpt and vLLM write these keys into config.json. If one of them is true, each slot of a
    # block sees only itself and earlier slots, which is not supported.
    if settings.get("causal") or settings.get("is_causal"):
        raise DrafterError(
            "config.json sets causal to true, which is not supported, because all slots of a block "
            "must attend to each other. Choose another drafter."
        )
    if type(block) is not int or type(mask) is not int:
        raise DrafterError(
            "config.json must have whole numbers for block_size and mask_token_id. Restore the "
            "original config.json."
        )
    if (drafted := config.get("draft_vocab_size")) not in (facts["vocab_size"], None):
        layout.check_shape(weights, "d2t", [drafted])
    fused_layers = layout.read_layer_ids(
        (config.get("eagle_aux_hidden_state_layer_ids"), 1),
        (config.get("aux_hidden_state_layer_ids"), 1),
        (settings.get("target_layer_ids"), 0),
    )
    return (
        facts
        | layout.layer_facts(weights, facts["head_dim"], "layers.0", config)
        | {
            "n_layers": settings.get("num_target_layers") or 0,
            "block_layers": layout.count_layers(weights, config),
            "block_size": block,
            "mask_token": mask,
            "fused_layers": fused_layers,
        }
    )


DFLASH = Layout(
    # An example of this layout is z-lab/Qwen3-8B-DFlash-b16.
    name="dflash",
    kind=DFlashSizes.kind,
    reader="z-lab's code, vLLM and SGLang",
    requires={
        "context": ("hidden",),
        "sample_from_anchor": (False,),
        "reduced_vocabulary": (False,),
    },
    unfit=_reads_embedding,
    notes=lambda sizes: [
        f"set num_speculative_tokens to {sizes.n_drafts} in vLLM, or "
        f"--speculative-num-draft-tokens to {1 + sizes.n_drafts} in SGLang"
    ],
    config=lambda sizes, target_config: _config(sizes) | {"architectures": ["DFlashDraftModel"]},
    recognises=lambda names, config: _is_block(names) and not _is_dspark(config),
    read_sizes=lambda weights, config: DFlashSizes.from_dict(
        _read_backbone(weights, config) | {"sample_from_anchor": False}
    ),
)


def _hf_config(sizes: DFlashSizes, target_config: Any) -> dict[str, Any]:
    config = _config(sizes) | {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
    }
    block_settings = config.pop("dflash_config")
    # transformers has default token ids for this model type, which belong to another vocabulary.
    # Null turns the defaults off.
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    del config["sliding_window"]
    return {**config, **block_settings}


HF_DFLASH = replace(
    DFLASH,
    # To use the folder in transformers, call generate(speculation_type="dflash",
    # assistant_model=...).
    name="hf-dflash",
    reader="transformers",
    notes=lambda sizes: [],
    config=_hf_config,
    file_name=lambda name: name.replace("hidden_norm.", "encoder.output_norm_enc.").replace(
        "fc.", "encoder.fc."
    ),
    own_name=lambda name: name.replace("encoder.output_norm_enc.", "hidden_norm.").replace(
        "encoder.fc.", "fc."
    ),
    recognises=lambda names, config: config.get("model_type") == "muse_glimmer_assistant",
)


def _dspark_config(sizes: DSparkSizes, target_config: Any) -> dict[str, Any]:
    """Add the settings of the Markov and confidence heads to the DFlash config.

    The settings are at the top level, where DeepSpec and vLLM read them.
    """
    config = _config(sizes)
    has_markov = sizes.markov_head != "none"
    config["dflash_config"]["projector_type"] = "dspark"
    additions = {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": sizes.mask_token,
        "target_layer_ids": list(sizes.fused_layers),
        "num_anchors": 512,
        "markov_rank": sizes.markov_rank if has_markov else 0,
        "enable_confidence_head": sizes.confidence_head,
        "confidence_head_with_markov": sizes.confidence_with_markov and has_markov,
    }
    return config | additions | ({"markov_head_type": sizes.markov_head} if has_markov else {})


def _read_dspark_sizes(weights: Weights, config: ForeignConfig) -> DSparkSizes:
    facts = _read_backbone(weights, config)
    heads = dict(config) | layout.nested(config, "dflash_config")
    if rank := heads.get("markov_rank"):
        facts |= {"markov_rank": rank, "markov_head": heads.get("markov_head_type", "vanilla")}
    else:
        facts["markov_head"] = "none"
    has_confidence = "confidence_head.proj.weight" in weights
    facts["confidence_head"] = bool(heads.get("enable_confidence_head", has_confidence))
    if facts["confidence_head"]:
        facts["confidence_with_markov"] = bool(heads.get("confidence_head_with_markov", False))
    return DSparkSizes.from_dict(facts)


def _dspark_notes(sizes: DSparkSizes) -> list[str]:
    runs_in_sglang = sizes.markov_head == "vanilla" and (
        sizes.confidence_with_markov or not sizes.confidence_head
    )
    return (
        []
        if runs_in_sglang
        else [
            "SGLang cannot run this drafter, because it supports only Markov heads of the kind "
            "vanilla, and only confidence heads that read the Markov head"
        ]
    )


_DSPARK: dict[str, tuple[Any, ...]] = {
    "context": ("hidden",),
    "sample_from_anchor": (True,),
    "reduced_vocabulary": (False,),
    "markov_head": ("none", "vanilla", "gated", "rnn"),
}
DSPARK = Layout(
    # An example of this layout is deepseek-ai/dspark_qwen3_4b_block7. SGLang loads only drafters
    # with vanilla Markov heads.
    name="dspark",
    kind=DSparkSizes.kind,
    reader="DeepSpec and SGLang",
    needs=(layout.EMBEDDINGS, layout.LM_HEAD),
    requires=_DSPARK,
    unfit=_reads_embedding,
    notes=_dspark_notes,
    config=_dspark_config,
    recognises=lambda names, config: _is_block(names) and _is_dspark(config),
    read_sizes=_read_dspark_sizes,
)


VLLM_DSPARK = replace(
    DSPARK,
    # To load the folder in vLLM, give --speculative-config '{"method": "dspark", "model": FOLDER,
    # ...}'.
    name="vllm-dspark",
    reader="vLLM",
    needs=(),
    requires=_DSPARK | {"markov_head": ("vanilla",)},
    notes=lambda sizes: [f"set num_speculative_tokens to {sizes.n_drafts}"],
    # Never recognise a folder. A folder that this package did not write is read with the layout
    # ``dspark``.
    recognises=lambda names, config: False,
)
