"""Checks assumptions about the family of a target by running a few tokens through the target.

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
from .bundle import final_norm, scaled_head
from .families import layer_outputs

# A function that runs the target over the next n tokens of a sequence, and returns the hidden
# states [n, E] of these tokens. The first argument is the list of the n tokens. The last tokens of
# the list may be drafts, which are rolled back after the call. The second argument has one number
# for each draft: the index of the draft's parent among the drafts. If the parent is the token
# before the drafts, the number is -1.
Call = Callable[[list[int], tuple[int, ...]], Tensor]
# A :class:`.live.Target`. The class cannot be imported here, because the module ``live`` imports
# this module.
Target = Any
_N_TOKENS = 12
# Maximum error of a token's logits in bfloat16 and float16, relative to the token's largest logit.
# Each rounding adds an error of up to 0.2 %.
_HEAD_ERROR = 0.012


@torch.inference_mode()
def prove_logits(target: Target) -> None:
    """Check that moa-data computes the same logits as transformers' model.

    Raises:
        TargetError: the logits that training or decoding computes differ from the model's logits,
            or the attention of the target is not causal.
    """
    model: Any = target.model
    states = list[Tensor]()
    # Some models limit their logits by a soft cap. A soft cap has no visible effect on small
    # logits, and makes all very large logits equal to the cap. So test logits of several sizes:
    # multiply the hidden states of the tokens by 1, 8 or 64. In float16, do not multiply them,
    # because the results might exceed the largest float16 number, 65,504.
    n_sizes = 1 if model.dtype == torch.float16 else 3
    sizes = (8.0 ** (torch.arange(_N_TOKENS, device=target.device) % n_sizes))[:, None].to(
        model.dtype
    )

    def enlarged(_module: Any, _inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * sizes
        states.append(output.last_hidden_state)
        return output

    trouble = f"{target.facts.model_type} cannot run with these weights and this config.json"
    with parsing(trouble, TargetError, "Choose another target."):
        tokens, hidden = _sample(target)
        half = _N_TOKENS // 2
        # Run a second sequence, which has the same first half as the sample and another second
        # half. If attention is causal, the hidden states of the first half are the same in both
        # sequences. The sequences have the same length, so that even the rounding errors are the
        # same.
        others = torch.cat((tokens[:, :half], tokens[:, :half]), dim=1)
        before = target.body(input_ids=others, use_cache=False).last_hidden_state[:, :half]
        handle = target.body.register_forward_hook(enlarged)
        try:
            known = model(input_ids=tokens, use_cache=False).logits
        finally:
            handle.remove()
    if not known.isfinite().all():
        # With these weights, the logits are NaN or infinite, so they cannot be compared. The error
        # is reported later, when the target runs its first sequence.
        return
    if not _agrees(before, hidden[:, :half]):
        raise TargetError(
            f"tokens of this {target.facts.model_type} attend to later tokens, so the model "
            "cannot generate text token by token. Choose another target."
        )
    # Cast the hidden states to the dtype of the weights, because Mamba returns them in a wider
    # dtype.
    head_inputs = states[0].to(model.dtype)
    trained_logits = capped(logits_of(head_inputs, scaled_head(model)), target.facts.logit_cap)
    largest = known.float().abs().amax(dim=-1, keepdim=True)
    bound = (1e-3 if model.dtype == torch.float32 else _HEAD_ERROR) * largest
    if any(
        ((logits.float() - known.float()).abs() > bound).any()
        for logits in (trained_logits, target.logits(head_inputs))
    ):
        raise TargetError(
            f"{target.facts.model_type} changes its logits in a way that moa-data does not "
            "support, so drafters would learn from wrong logits. Choose another target."
        )


@torch.inference_mode()
def prove_norm(target: Target) -> nn.Module:
    """Return the model's final norm, after a check that only this norm follows the last layer.

    Raises:
        TargetError: the model computes something else after its last layer.
    """
    norm = final_norm(target.body)
    if target.facts.family.has_llama_layers:
        return norm
    last = target.facts.n_layers - 1
    with layer_outputs(target.model, [last]) as outputs:
        _, hidden = _sample(target)
    normed = norm(outputs[last])
    if normed.shape != hidden.shape or not _agrees(normed, hidden):
        raise TargetError(
            f"moa-data does not know which norm {target.facts.model_type} applies after its last "
            "layer. Use a source that gives hidden states after the final norm, such as `moa-data "
            "extract --source transformers`."
        )
    return norm


@torch.inference_mode()
def decoding_problem(target: Target) -> str:
    """Return the reason why the target cannot verify drafts, or an empty text if it can.

    The target can verify drafts if processing a sequence in several calls with a KV cache gives the
    same hidden states as processing it in one call without a cache.
    """
    cache = target.make_cache()

    def call(tokens: list[int], parents: tuple[int, ...]) -> Tensor:
        device = target.device
        seen = None
        if parents:
            # All drafts follow the first token of the call. Each draft attends to this token and to
            # itself.
            seen = torch.eye(len(tokens), dtype=torch.bool, device=device)[None]
            seen[:, :, 0] = True
        hidden: Tensor = target.forward(torch.tensor([tokens], device=device), cache, seen)
        cache.commit([range(len(tokens) - len(parents))])
        return hidden[0]

    why = _problem_of_calls(target, call, not target.facts.has_states, (None,))
    name = target.facts.model_type
    return why and f"moa-data cannot decode {name} ({why}), but drafters can be trained for it"


@torch.inference_mode()
def serving_problem(target: Target, call: Call) -> str:
    """Return the reason why an engine cannot serve the target, or an empty text if it can.

    Args:
        target: the loaded target.
        call: a function that runs the target as the engine does.
    """
    # An engine may treat a call with one token as a special case. So test this case: the last call
    # has one token.
    why = _problem_of_calls(target, call, takes_trees=True, ends=(-1, None))
    return why and f"{why}. `moa-data generate` can decode it"


def _problem_of_calls(
    target: Target, call: Call, takes_trees: bool, ends: tuple[int | None, ...]
) -> str:
    """Compare running the sample tokens in several calls with running them in one call.

    Args:
        target: the loaded target.
        call: a function that runs the target over the next tokens of a sequence.
        takes_trees: whether a call may verify several drafts that follow the same token.
        ends: one entry for each of the last calls: the index of the sample token before which the
            call ends. If the entry is None, the call ends at the end of the sample.

    Returns:
        A text that says that the hidden states differ, or the error of a call. The text is empty if
        the hidden states agree.
    """
    start = _N_TOKENS // 2
    try:
        tokens, (known,) = _sample(target)
        text = tokens[0].tolist()
        is_right = _agrees(call(text[:start], ()), known[:start])
        if takes_trees:
            # Verify two drafts after the same token: a wrong draft and the right draft.
            branches = call([text[start], text[0], text[start + 1]], (-1, -1))
            start += 1
            is_right = _agrees(branches[2:], known[start : start + 1]) and is_right
        for end in ends:
            is_right = _agrees(call(text[start:end], ()), known[start:end]) and is_right
            start = end or 0
    # The calls run code of transformers, which may raise errors of all these types.
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        return first_line(error)[:200]
    if is_right:
        return ""
    return (
        "if a sequence is processed in several calls, its hidden states are not the same as in one "
        "call"
    )


def _sample(target: Target) -> tuple[Tensor, Tensor]:
    """Make sample tokens [1, n], and compute their hidden states [1, n, E] in one call."""
    tokens = torch.arange(_N_TOKENS, device=target.device)[None] * 7 % target.facts.vocab_size
    return tokens, target.body(input_ids=tokens, use_cache=False).last_hidden_state


def _agrees(found: Tensor, known: Tensor) -> bool:
    """Whether two tensors [..., m] have the same values for most tokens, up to rounding errors."""
    # If two experts have nearly equal scores, a rounding error may route a token to another expert.
    # So use the median of the errors of all tokens, which ignores single tokens.
    error = (found.float() - known.float()).abs().amax(dim=-1).median()
    return bool(
        error <= (1e-3 if known.dtype == torch.float32 else 0.06) * known.float().abs().max()
    )
