"""What other projects mean by a layer's number and by the last hidden state, and how that is said here.

A target of L decoder layers has L + 1 boundaries. Here ``hidden/layer_k`` is the OUTPUT of decoder layer k (from 0),
before any final norm, and ``hidden/last`` is the state AFTER the final norm, the input of the LM head.

=====================  ============================================  =========================  ==================
project                number i of a layer means                     here                       last hidden state
=====================  ============================================  =========================  ==================
speculators, vLLM      state after i layers; 0 = embeddings, L last  ``hidden/layer_{i-1}``     before the norm
SpecForge, SGLang      output of layer i (SGLang captures the input  ``hidden/layer_i``         after the norm
                       of layer i + 1, hence its ``+ 1``)
EAGLE v1               transformers' ``hidden_states[-1]``           ``hidden/last``            after the norm
=====================  ============================================  =========================  ==================

All three take by default the states after 2, L // 2 and L - 3 layers, which SpecForge writes as 1, L // 2 - 1 and
L - 4.

Sources, read in stored copies:

- speculators ``scripts/launch_vllm.py`` (default ids ``[2, L // 2, L - 3, L]``, ids within 0..L, L appended for the
  verifier), ``src/speculators/train/data.py`` (the last slot is the verifier's last hidden state), pull request 313
  (vLLM saves it before the final norm; training applies the norm ahead of the LM head), vllm pull request 46788
  (id i is captured at the input of layer i, id L after the last layer).
- SpecForge ``scripts/prepare_hidden_states.py`` (default ``[2 - 1, L // 2 - 1, L - 3 - 1]`` with the remark that SGLang
  adds 1; ``hidden_state`` is what the logits processor receives, that is after the norm), sglang pull request 25454
  (both numberings name the same physical states), NickL77/BaldEagle#18.
- EAGLE ``eagle/ge_data/ge_data_all_vicuna.py`` (``outs_big.hidden_states[-1]``, after the norm in transformers' Llama)
  and ``eagle/train/main.py`` (feeds it to the LM head as it is).
"""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import OptionInvalid, SelectionInvalid
from ...text import add_command

LAST = "hidden/last"


def layer_field(layer: int) -> str:
    """The field of a decoder layer's output."""
    return f"hidden/layer_{layer}"


def default_layers(n_layers: int) -> tuple[int, int, int]:
    """The decoder layers whose outputs EAGLE-3 takes by default.

    Returns:
        (1, L // 2 - 1, L - 4), counted from 0.

    Raises:
        OptionInvalid: the target is so small that these do not exist, or not three of them.
    """
    from ...errors import DrafterError
    from ...moa.drafters.eagle3 import default_fused_layers

    try:
        return default_fused_layers(n_layers)
    except DrafterError as error:
        raise OptionInvalid(
            f"the default layers 1, L // 2 - 1 and L - 4 are no three layers of a target with {n_layers}; "
            "choose others with --layers, such as --layers 0,1."
        ) from error


def check_layers(layers: tuple[int, ...], n_layers: int) -> tuple[int, ...]:
    """Return the chosen layers, or the default ones, of a target of ``n_layers``; raises OptionInvalid."""
    layers = layers or default_layers(n_layers)
    wrong = [layer for layer in layers if not 0 <= layer < n_layers]
    if wrong:
        raise OptionInvalid(f"--layers {wrong[0]}: the target has decoder layers 0 to {n_layers - 1}. Choose others.")
    return layers


def vllm_layer_id(layer: int) -> int:
    """The number of a decoder layer's output in vLLM and speculators: layers passed so far; the embeddings are 0."""
    return layer + 1


def require_fields(needed: Iterable[str], present: Iterable[str], store: str, purpose: str) -> None:
    """Refuse a store that lacks fields, naming them and the command that adds them."""
    held = list(present)
    missing = [name for name in dict.fromkeys(needed) if name not in held]
    if not missing:
        return
    why = ""
    if any(name != LAST for name in missing) and purpose == "speculators":
        why = " It takes the last layer's output before the final norm, which hidden/last cannot give back."
    raise SelectionInvalid(
        f"{store} lacks {', '.join(missing)}, needed for {purpose}.{why} Add with "
        f"{add_command(store, missing)}, or choose other --layers."
    )
