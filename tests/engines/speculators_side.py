"""Runs speculators itself, in an environment without this package.

::

    PYTHON speculators_side.py make FOLDER
        Write speculators' own drafters with random weights, and their logits.
    PYTHON speculators_side.py run DRAFTER VECTORS
        Add the drafter's logits for the inputs of a file to that file.
    PYTHON speculators_side.py fp8 FOLDER VECTORS
        Convert a folder's hidden states to fp8, and write what speculators reads from them.

``make`` wrote ``tests/moa/formats/data_speculators``. Vectors of EAGLE-3 are ``input_ids`` [S]
of the slots (each slot holds the token at the next position), ``hidden_states`` [S, K * E]
and ``logits`` [J, S, V_d] of J steps. Vectors of block drafters are ``input_ids`` [T],
``hidden_states`` [T, m * E], ``anchors`` [T] bool and ``logits`` [N, G, V_d]; drafters with a
confidence head also have ``confidence`` [N * G].
"""

import sys
from pathlib import Path
from typing import Any

import torch
from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8
from hs_connectors.transfer import FP8Transfer
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import core as dflash
from speculators.models.dspark import core as dspark
from speculators.models.eagle3 import core as eagle3
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "vocab_size": 40, "max_position_embeddings": 96, "rms_norm_eps": 1e-5,
}  # fmt: skip
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
SCALED["original_max_position_embeddings"] = 32
CORES = {"eagle3": eagle3, "dflash": dflash, "dspark": dspark}
CLASSES = {"eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark"}
# Name -> drafter type, whether its layers are Qwen3's (otherwise Llama's), its own config keys.
VARIANTS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "eagle3": ("eagle3", False, {"draft_vocab_size": 20}),
    "eagle3-residual": ("eagle3", False, {"norm_before_residual": True}),
    "eagle3-before-fc": ("eagle3", False, {"norm_before_fc": True, "draft_vocab_size": 20}),
    "eagle3-fc-norm": (
        "eagle3", False, {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    ),
    "eagle3-qwen3": ("eagle3", True, {"norm_output": True, "draft_vocab_size": 20}),
    "dflash": ("dflash", True, {}),
    "dflash-reduced": ("dflash", True, {"draft_vocab_size": 20, "sample_from_anchor": True}),
    "dspark": ("dspark", True, {"markov_rank": 4}),
    "dspark-gated": (
        "dspark", True, {"markov_rank": 4, "markov_head_type": "gated", "draft_vocab_size": 20},
    ),
    "dspark-rnn": (
        "dspark", True,
        {"markov_rank": 4, "markov_head_type": "rnn", "confidence_head_with_markov": False},
    ),
    "dspark-shifted": ("dspark", True, {"markov_rank": 4, "sample_from_anchor": False}),
    "dspark-no-heads": (
        "dspark", True,
        {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
    ),
}  # fmt: skip


def randomise(model: torch.nn.Module) -> None:
    for weight in model.parameters():
        torch.nn.init.normal_(weight, float(weight.ndim == 1), 0.1 if weight.ndim == 1 else 0.15)


def eager(config: Any) -> Any:
    """Select eager attention.

    On a CPU the default, FlexAttention, needs whole blocks of 128 tokens.
    """
    config.transformer_layer_config._attn_implementation = "eager"
    return config


def build(kind: str, is_qwen3: bool, own: dict[str, Any], verifier: Path) -> Any:
    layers = {
        "num_hidden_layers": 1 if kind == "eagle3" else 2,
        "rope_parameters": SCALED if is_qwen3 else None,
    }
    given = {name: value for name, value in (SIZES | layers).items() if value is not None}
    ids = "eagle_aux_hidden_state_layer_ids" if kind == "eagle3" else "aux_hidden_state_layer_ids"
    more = {} if kind == "eagle3" else {"block_size": 4, "mask_token_id": 39}
    core, own = CORES[kind], {"draft_vocab_size": 40} | own
    found = SpeculatorsConfig(
        algorithm=kind, proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy", verifier=VerifierConfig.from_pretrained(str(verifier)),
    )  # fmt: skip
    drafter = getattr(core, f"{CLASSES[kind]}DraftModel")
    config = drafter.config_class(
        transformer_layer_config=(Qwen3Config if is_qwen3 else LlamaConfig)(**given),
        speculators_config=found,
        **{ids: [1, 2, 4] if kind == "eagle3" else [0, 3]}, **more, **own,
    )  # fmt: skip
    model = drafter(eager(config))
    randomise(model)
    if own["draft_vocab_size"] < 40:
        tokens = torch.arange(40)[torch.arange(40) % 4 > 1]
        model.d2t.copy_(tokens - torch.arange(20))
        model.t2d.zero_()[tokens] = True
        # load_verifier_weights fills it with the verifier's rows.
        model.lm_head.weight.data.fill_(torch.nan)
    if kind == "eagle3":
        randomise(model.lm_head)
    model.embed_tokens.weight.data.fill_(torch.nan)
    model.load_verifier_weights()
    return model


@torch.no_grad()
def logits_of(model: Any, vectors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    kind = model.config.speculators_model_type
    core: Any = CORES[kind]
    seen: list[Any] = []

    def note(*given: Any, **_: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        seen.append(given)
        return torch.zeros(()), {}

    core.compute_metrics = note
    ids, hidden = vectors["input_ids"][None], vectors["hidden_states"][None]
    shared = {
        "document_ids": torch.zeros_like(ids),
        "verifier_last_hidden_states": hidden[..., : model.hidden_size],
    }
    if kind == "eagle3":
        model(hidden, ids, ttt_steps=3, **shared)
        return {"logits": torch.cat([given[0] for given in seen])}
    anchors = vectors["anchors"]
    n_anchors, size = int(anchors.sum()), model.block_size
    model(hidden, ids, loss_mask=anchors[None].long(), max_anchors=n_anchors, **shared)
    found = {"logits": seen[0][0].view(n_anchors, size, -1)}
    if kind == "dspark" and seen[0][2] is not None:
        found["confidence"] = seen[0][2][0]
    return found


def make(out: Path) -> None:
    torch.manual_seed(0)
    verifier = out / "verifier"
    target = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=4))
    randomise(target)
    target.save_pretrained(verifier)
    for name, (kind, is_qwen3, own) in VARIANTS.items():
        model = build(kind, is_qwen3, own, verifier).eval()
        model.save_pretrained(out / name)
        n_read, n_tokens = 3 if kind == "eagle3" else 2, 12
        vectors = {
            "input_ids": torch.randint(0, 40, (n_tokens,)),
            "hidden_states": torch.randn(n_tokens, n_read * 16),
        }  # fmt: skip
        if kind != "eagle3":
            vectors["anchors"] = torch.isin(torch.arange(n_tokens), torch.tensor([1, 4, 7]))
            # Layer id 0 is the output of the embedding.
            vectors["hidden_states"][:, :16] = target.model.embed_tokens(vectors["input_ids"])
        vectors = {key: value.detach().clone() for key, value in vectors.items()}
        save_file(vectors | logits_of(model, vectors), out / name / "vectors.safetensors")


def make_fp8(folder: Path, read: Path) -> None:
    found = {}
    for index, path in enumerate(sorted(folder.glob("hs_*.safetensors"))):
        tensors = load_file(path)
        tensors["hidden_states"], tensors[SCALES_KEY] = quantize_tensor_to_fp8(
            tensors["hidden_states"]
        )
        save_file(tensors, path)
        found[path.stem] = FP8Transfer(folder).get_cached(index)["hidden_states"]
    save_file(found, read)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    elif sys.argv[1] == "fp8":
        make_fp8(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        found = load_file(sys.argv[3])
        config = eager(SpeculatorModelConfig.from_pretrained(sys.argv[2]))
        loaded = SpeculatorModel.from_pretrained(sys.argv[2], config=config).eval()
        save_file(
            found | {key: value.contiguous() for key, value in logits_of(loaded, found).items()},
            sys.argv[3],
        )
