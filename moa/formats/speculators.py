"""Layouts of drafters for speculators (vllm-project/speculators 0.9). vLLM loads these layouts too.

The drafters are EAGLE-3, DFlash and DSpark. In config.json, ``transformer_layer_config`` has the
sizes, and ``speculators_config`` names the target. ``from_pretrained`` of speculators loads the
embeddings and the LM head of the target, whose name or path is in ``verifier.name_or_path``. The
ids of the target layers that the drafter reads are counted from 1. With a reduced vocabulary, the
LM head of DFlash and DSpark consists of rows of the target's LM head.

Sources: ``src/speculators/models/{eagle3,dflash,dspark}/{config,core}.py`` and ``model.py``.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from ...errors import DrafterError
from ...files import parsing
from ..drafters.block import BlockDrafterSizes, DSparkSizes
from ..drafters.eagle3 import Eagle3Sizes
from ..targets.bundle import FROZEN_FILE
from . import layout
from .block import DFLASH, DSPARK
from .eagle import EAGLE3, EAGLE3_FLAGS
from .layout import ForeignConfig, Weights

_TYPE = "speculators_model_type"
# Key of the mapping in config.json that has the sizes of the layers.
LAYERS_KEY = "transformer_layer_config"
_EAGLE3_LAYERS = "eagle_aux_hidden_state_layer_ids"
_BLOCK_KEYS = ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "sample_from_anchor")
_DFLASH = dict.fromkeys(_BLOCK_KEYS) | {"sample_from_anchor": False}
_HEADS = {
    "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
# Type of drafter -> the keys of config.json that are read, each with the value that is used if
# config.json lacks the key. A config.json is refused if it has a key that is neither here nor in
# ``_SHARED``, unless the key's value is null, false, 0 or empty. An example of such a key is
# ``embed_requires_grad``: if it is true, the drafter has embeddings of its own, which are not
# supported.
_OWN: dict[str, dict[str, Any]] = {
    "eagle3": dict.fromkeys(EAGLE3_FLAGS, False) | {_EAGLE3_LAYERS: None},
    "dflash": _DFLASH,
    "dspark": _DFLASH | {"sample_from_anchor": True} | _HEADS,
}
_SHARED = {
    _TYPE, LAYERS_KEY, "speculators_config", "speculators_version", "auto_map", "draft_vocab_size",
    "target_hidden_size", "sliding_window_non_causal", "tie_word_embeddings", "torch_dtype",
    *PreTrainedConfig().to_dict(),
}  # fmt: skip


def _config(
    name: str, sizes: Any, target_config: Any, layers: Mapping[str, Any], **own: Any
) -> dict[str, Any]:
    folder = Path(target_config.name_or_path)
    if (folder / FROZEN_FILE).is_file():
        raise DrafterError(
            "the formats of speculators refer to the target's weight files, which a store does not "
            "contain. Give the target's folder or Hub id with `model`."
        )
    verifier_path = str(folder.resolve() if folder.is_dir() else folder)
    return {
        "architectures": [f"{name}DraftModel"],
        _TYPE: sizes.kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": sizes.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": sizes.max_depth or 5}
            ],
            "verifier": {
                "name_or_path": verifier_path,
                "architectures": target_config.architectures or [],
            },
        },
        "tie_word_embeddings": False,
        "draft_vocab_size": sizes.vocab_size,
        **own,
        LAYERS_KEY: layout.llama_config(sizes) | {"model_type": "qwen3", **layers},
    }


def _eagle3_config(sizes: Eagle3Sizes, target_config: Any) -> dict[str, Any]:
    layers = {"model_type": "qwen3" if sizes.query_key_norm else "llama", "num_hidden_layers": 1}
    additions: dict[str, Any] = {name: getattr(sizes, name) for name in EAGLE3_FLAGS}
    additions |= {
        _EAGLE3_LAYERS: [layer + 1 for layer in sizes.fused_layers],
        "draft_vocab_size": sizes.draft_vocabulary,
    }
    return _config("Eagle3", sizes, target_config, layers, **additions)


def _block_config(
    name: str, sizes: BlockDrafterSizes, target_config: Any, **heads: Any
) -> dict[str, Any]:
    # Leave ``sliding_window_non_causal`` out. If its value is false, vLLM 0.32 makes the blocks of
    # all layers causal.
    layers = [layer + 1 for layer in sizes.fused_layers]
    block_keys = zip(
        _BLOCK_KEYS,
        (sizes.block_size, sizes.mask_token, layers, sizes.sample_from_anchor),
        strict=True,
    )
    return _config(
        name,
        sizes,
        target_config,
        {"num_hidden_layers": sizes.block_layers},
        **dict(block_keys),
        **heads,
    )


def _dspark_config(sizes: DSparkSizes, target_config: Any) -> dict[str, Any]:
    has_markov = sizes.markov_head != "none"
    reads_markov = sizes.confidence_head and sizes.confidence_with_markov and has_markov
    head = sizes.markov_head if has_markov else "vanilla"
    heads = (sizes.markov_rank * has_markov, head, sizes.confidence_head, reads_markov)
    return _block_config("DSpark", sizes, target_config, **dict(zip(_HEADS, heads, strict=True)))


def _flat(weights: Weights, config: ForeignConfig) -> dict[str, Any]:
    """Merge the keys of config.json and of its layer config, and add the values of absent keys.

    Raises:
        DrafterError: a key would change the computation in a way that is not implemented.
    """
    kind = config[_TYPE]
    layer_config = {"model_type": "qwen3"} | layout.nested(config, LAYERS_KEY)
    if kind not in _OWN:
        raise DrafterError(
            f"config.json has {_TYPE} {str(kind)[:60]!r}, expected one of {', '.join(_OWN)}. "
            "Choose another drafter."
        )
    with parsing(
        f"{LAYERS_KEY} in config.json cannot be used",
        DrafterError,
        "Restore the original config.json.",
    ):
        known = AutoConfig.for_model(layer_config["model_type"]).to_dict().keys() | {
            "rope_theta",
            "rope_scaling",
        }
        layers = AutoConfig.for_model(
            **layer_config
            # ``to_dict`` also returns keys that are absent from ``layer_config``, with default
            # values.
        ).to_dict()
    merged = _OWN[kind] | dict(config) | layers
    merged["partial_rotary_factor"] = layout.nested(layers, "rope_parameters").get(
        "partial_rotary_factor"
    )
    plain = {
        "model_type": ("llama", "qwen3"),
        "num_hidden_layers": (1,) if kind == "eagle3" else (layout.count_layers(weights),),
        "partial_rotary_factor": (None, 1),
        "target_hidden_size": (None, layers.get("hidden_size")),
    }
    wrong = [name for name, values in plain.items() if merged.get(name) not in values]
    for values, names in ((config, _OWN[kind].keys() | _SHARED), (layer_config, known | _SHARED)):
        # Ignore unknown keys that are null or false, because they do not change the computation.
        for name, value in values.items():
            if value and name not in names:
                wrong.append(name)
    if wrong:
        raise DrafterError(
            f"config.json has {wrong[0]} {str(merged.get(wrong[0]))[:60]}, which is not "
            "supported. Choose another drafter."
        )
    return merged


def _read_block(weights: Weights, config: ForeignConfig) -> Any:
    keys = _flat(weights, config)
    read = DSPARK if keys[_TYPE] == "dspark" else DFLASH
    sizes: Any = read.read_sizes(weights, keys)
    sizes = replace(
        sizes, sample_from_anchor=keys["sample_from_anchor"], reduced_vocabulary="d2t" in weights
    )
    if refusals := _unfit(sizes):
        raise DrafterError(refusals[0])
    return sizes


def _unpack_block(weights: Weights, sizes: BlockDrafterSizes) -> Weights:
    """Convert the weights of a drafter with a reduced vocabulary to the full vocabulary.

    In the Markov head, the row of each draft token is moved to the index of the same token in the
    full vocabulary. The rows of all other tokens are zero. The drafter sets the logits of these
    tokens to -inf.
    """
    weights = layout.with_draft_vocabulary(weights, sizes.vocab_size)
    unpacked = dict(weights)
    unpacked.pop("d2t", None)
    if "d2t" in weights:
        offsets = weights["d2t"]
        layout.check_shape(weights, "t2d", [sizes.vocab_size])
        head = "markov_head.markov_w2.weight"
        tokens = offsets + torch.arange(len(offsets))
        if not torch.equal(tokens, unpacked["t2d"].nonzero()[:, 0]):
            raise DrafterError(
                "the tensors d2t and t2d must select the same tokens, but they do not. Restore the "
                "file of weights."
            )
        if isinstance(sizes, DSparkSizes) and head in unpacked:
            layout.check_shape(weights, head, [len(offsets), sizes.markov_rank])
            spread = torch.zeros(sizes.vocab_size, sizes.markov_rank, dtype=unpacked[head].dtype)
            unpacked[head] = spread.index_copy(0, tokens, unpacked[head])
    return unpacked


def _unfit(sizes: BlockDrafterSizes) -> list[str]:
    is_shifted = getattr(sizes, "markov_head", "") == "rnn" and not sizes.sample_from_anchor
    return [
        "speculators starts an rnn Markov head at the anchor (the last known token), but moa-data "
        "starts it at the first draft if sample_from_anchor is false"
    ] * is_shifted


SPECULATORS_EAGLE3 = replace(
    EAGLE3,
    name="speculators-eagle3",
    reader="speculators and vLLM",
    requires={"qkv_bias": (False,)},
    unfit=lambda sizes: [],
    config=_eagle3_config,
    # Write the target's embeddings into the file. If they are missing, from_pretrained of
    # transformers 5.19 initializes the embeddings at random.
    needs=("config", layout.EMBEDDINGS),
    file_name=lambda name: name.replace("midlayer.", "layers.0."),
    recognises=lambda names, config: config.get(_TYPE) == "eagle3",
    read_sizes=lambda weights, config: EAGLE3.read_sizes(weights, _flat(weights, config)),
)
SPECULATORS_DSPARK = replace(
    DSPARK,
    name="speculators-dspark",
    reader="speculators",
    requires={**DSPARK.requires, "sample_from_anchor": (True, False)},
    unfit=_unfit,
    notes=lambda sizes: [],
    config=_dspark_config,
    needs=("config",),
    unpack=_unpack_block,
    recognises=lambda names, config: config.get(_TYPE) == "dspark",
    read_sizes=_read_block,
)
SPECULATORS_DFLASH = replace(
    SPECULATORS_DSPARK,
    kind=DFLASH.kind,
    name="speculators-dflash",
    reader="speculators and vLLM",
    requires={**DFLASH.requires, "sample_from_anchor": (True, False)},
    config=lambda sizes, target_config: _block_config("DFlash", sizes, target_config),
    # Recognise every speculators drafter that the layouts above did not recognise, even if its type
    # is not supported. Reading an unsupported drafter then fails with an error that names the type.
    # If no layout recognised the folder, the error would only say that the folder is unknown.
    recognises=lambda names, config: _TYPE in config,
)
