"""What is known of a family of targets is proven on the loaded model before it is used: a few tokens tell.

Shapes: n tokens of the sample, E width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import TargetError
from ...files import parsing
from ...text import first_line
from ..nn.losses import capped, logits_of
from . import families
from .bundle import final_norm, scaled_head

Target = Any  # a :class:`.live.Target`, which asks here whether it can be decoded
_N_TOKENS = 12
_HEAD_ERROR = 0.012  # of logits of the same states, in narrow dtypes: some roundings of 0.2 %


@torch.inference_mode()
def prove_logits(target: Target) -> None:
    """Compare the logits that drafters learn from and those of decoding with the model's; raises TargetError."""
    model: Any = target.model
    states = list[Tensor]()
    # A bound doesn't show on small logits, and only the bound on large ones: states of some tokens
    # are enlarged.
    n_sizes = 1 if model.dtype == torch.float16 else 3  # which ends at 65,504
    sizes = (8.0 ** (torch.arange(_N_TOKENS, device=target.device) % n_sizes))[:, None].to(
        model.dtype
    )

    def enlarged(_module: Any, _inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * sizes
        states.append(output.last_hidden_state)
        return output

    trouble = f"{target.config.model_type} of transformers can't compute a text by these weights and config.json"
    with parsing(trouble, TargetError, "Choose another target."):
        tokens, hidden = _sample(target)
        half = _N_TOKENS // 2
        # in as long a text, whose rounding is the same
        others = torch.cat((tokens[:, :half], tokens[:, :half]), dim=1)
        before = target.body(input_ids=others, use_cache=False).last_hidden_state[:, :half]
        handle = target.body.register_forward_hook(enlarged)
        try:
            known = model(input_ids=tokens, use_cache=False).logits
        finally:
            handle.remove()
    if not known.isfinite().all():
        return  # what is wrong with the weights shows in the first sequence
    if not _agrees(before, hidden[:, :half]):
        raise TargetError(
            f"tokens of this {target.config.model_type} see those after them. Choose another target."
        )
    given = states[0].to(model.dtype)  # Mamba's are wider
    own = capped(logits_of(given, scaled_head(model)), families.logit_cap(target.config))
    largest = known.float().abs().amax(dim=-1, keepdim=True)
    bound = (1e-3 if model.dtype == torch.float32 else _HEAD_ERROR) * largest
    if any(
        ((one.float() - known.float()).abs() > bound).any() for one in (own, target.logits(given))
    ):
        raise TargetError(
            f"{target.config.model_type} does something to its logits that is not known here, so drafters would learn "
            "from wrong ones. Choose another target."
        )


@torch.inference_mode()
def prove_norm(target: Target) -> nn.Module:
    """Return the model's own final norm; raises TargetError where it alone doesn't follow the last layer."""
    norm = final_norm(target.body)
    outputs = list[Any]()
    if target.is_llama:
        return norm
    last_layer: Any = families.decoder_layers(target.model)[-1]
    handle = last_layer.register_forward_hook(lambda *call: outputs.append(call[-1]))
    try:
        _, hidden = _sample(target)
    finally:
        handle.remove()
    before: Tensor = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    normed = norm(before)
    if normed.shape != hidden.shape or not _agrees(normed, hidden):
        raise TargetError(
            f"what {target.config.model_type} makes of the output of its last layer is not known here. Choose a source "
            "that gives its hidden states after the final norm, such as `moa-data extract`."
        )
    return norm


@torch.inference_mode()
def decoding_problem(target: Target) -> str:
    """Say why drafts can't be verified; empty where calls over cached tokens give what one call over all gives."""
    half = _N_TOKENS // 2
    is_right = True
    why = "calls over its cache give other values"
    try:
        tokens, hidden = _sample(target)
        cache = target.make_cache()
        target.forward(tokens[:, :half], cache)
        cache.commit([range(half)])
        if not target.has_states:  # after a token stand a wrong one and the right one
            branches = torch.cat(
                (tokens[:, half : half + 1], tokens[:, :1], tokens[:, half + 1 : half + 2]), dim=1
            )
            seen = torch.tensor(
                [[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool, device=target.device
            )
            is_right = _agrees(target.forward(branches, cache, seen)[:, 2], hidden[:, half + 1])
            cache.commit([[]])
        is_right = _agrees(target.forward(tokens[:, half:], cache), hidden[:, half:]) and is_right
    # of code that is not ours
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        is_right, why = False, first_line(error)[:200]
    name = target.config.model_type
    return (
        ""
        if is_right
        else f"{name} can't be decoded here ({why}), but drafters can be trained for it"
    )


@torch.inference_mode()
def serving_problem(target: Target, call: Callable[[list[int], tuple[int, ...]], Tensor]) -> str:
    """Say why an engine can't serve; empty where its calls over the tokens of a text give what one call over all gives.

    ``call``: takes the next tokens, and the parent of each draft among them; gives their hidden states [n, E]. Drafts
    are forgotten.
    """
    half = _N_TOKENS // 2
    why = "calls of the engine give other values"
    try:
        tokens, hidden = _sample(target)
        text = tokens[0].tolist()
        (known,) = hidden
        is_right = _agrees(call(text[:half], ()), known[:half])
        # a wrong draft, and the right one
        branches = call([text[half], text[0], text[half + 1]], (-1, -1))
        is_right = _agrees(branches[[0, 2]], known[half : half + 2]) and is_right
        # steps of one token have a way of their own
        for first, last in ((half + 1, -1), (-1, None)):
            is_right = _agrees(call(text[first:last], ()), known[first:last]) and is_right
    # of code that is not ours
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        is_right, why = False, first_line(error)[:200]
    return "" if is_right else f"{why}. `moa-data generate` decodes it"


def _sample(target: Target) -> tuple[Tensor, Tensor]:
    """Make tokens [1, n], and compute their hidden states [1, n, E] in one call."""
    tokens = torch.arange(_N_TOKENS, device=target.device)[None] * 7 % target.sizes["vocab_size"]
    return tokens, target.body(input_ids=tokens, use_cache=False).last_hidden_state


def _agrees(found: Tensor, known: Tensor) -> bool:
    """Whether values [..., m] of most tokens are equal up to the rounding of their dtype."""
    # Of most: where two experts have nearly equal scores, rounding may send a token to the other
    # one.
    error = (found.float() - known.float()).abs().amax(dim=-1).median()
    return bool(
        error <= (1e-3 if known.dtype == torch.float32 else 0.06) * known.float().abs().max()
    )
