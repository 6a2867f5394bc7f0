"""Records the drafts of another inference engine, round by round.

This script runs in the engine's own Python, and imports nothing from moa-data::

    python other_side.py JOB.json ROUNDS.json

JOB.json has the engine, the folders of the target and of the drafter, the prompts as token ids, the
number of drafts per round, and the maximum length of an answer. ROUNDS.json has the ``tokens`` and
the ``rounds`` of each answer. A round is a pair of a number and a list. The number counts the
tokens of the prompt and the answer that were committed before the round. The list has the tokens
that were drafted in the round.
"""

import json
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answers = list[dict[str, Any]]


def _load(kind: Any, folder: str, dtype: str, **options: Any) -> Any:
    import torch

    made = kind.from_pretrained(folder, trust_remote_code=False, use_safetensors=True, **options)
    return made.to(getattr(torch, dtype)).eval()


def _transformers(job: dict[str, Any]) -> Answers:
    """Decode with transformers' ``generate(assistant_model=...)``, and record all drafts."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.generation import candidate_generator as made

    is_block = job["method"] == "dflash"
    target = _load(AutoModelForCausalLM, job["model"], job["dtype"])
    drafter = _load(AutoModel if is_block else AutoModelForCausalLM, job["drafter"], job["dtype"])
    if not is_block:
        generation_config = drafter.generation_config
        generation_config.num_assistant_tokens = job["n_drafts"]
        generation_config.num_assistant_tokens_schedule = "constant"
        generation_config.assistant_confidence_threshold = 0.0
    generator: Any = (
        made.DFlashTokenCandidateGenerator if is_block else made.AssistedCandidateGenerator
    )
    plain = generator.get_candidates
    rounds = list[tuple[int, list[int]]]()

    def get_candidates(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        candidates = plain(self, input_ids, *args, **kwargs)
        n = input_ids.shape[1]
        if candidates[0].shape[1] > n:
            rounds.append((n, candidates[0][0, n:].tolist()))
        return candidates

    generator.get_candidates = get_candidates
    answers: Answers = []
    for prompt in job["prompts"]:
        rounds.clear()
        ids = torch.tensor([prompt])
        token_ids = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=job["max_new_tokens"], assistant_model=drafter,
            **({"speculation_type": "dflash"} if is_block else {}),
        )  # fmt: skip
        answers.append({"tokens": token_ids[0, len(prompt) :].tolist(), "rounds": [*rounds]})
    return answers


def _vllm(job: dict[str, Any]) -> Answers:
    """Decode one prompt at a time with vLLM. Record the drafts that vLLM's scheduler receives."""
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    plain = Scheduler.update_draft_token_ids
    rounds = list[tuple[int, list[int]]]()

    def update(self: Any, drafts: Any) -> None:
        plain(self, drafts)
        for request in filter(None, map(self.requests.get, drafts.req_ids)):
            if request.spec_token_ids:
                rounds.append((request.num_tokens, [*request.spec_token_ids]))

    Scheduler.update_draft_token_ids = update
    longest = max(map(len, job["prompts"])) + job["max_new_tokens"] + 4 * job["n_drafts"]
    engine = LLM(
        model=job["model"], dtype=job["dtype"], enforce_eager=True, max_num_seqs=1,
        async_scheduling=False, enable_prefix_caching=False,
        max_model_len=min(longest, job["max_positions"]),
        speculative_config={
            "method": job["method"], "model": job["drafter"],
            "num_speculative_tokens": job["n_drafts"],
        },
    )  # fmt: skip
    answers: Answers = []
    for prompt in job["prompts"]:
        rounds.clear()
        sampling = SamplingParams(temperature=0, max_tokens=job["max_new_tokens"])
        (answer,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answers.append({"tokens": [*answer.outputs[0].token_ids], "rounds": [*rounds]})
    return answers


def _speculators(job: dict[str, Any]) -> Answers:
    """Run the drafter with the library speculators on answers that the target decodes alone.

    speculators has no decoding loop. So the target decodes the answer without drafts, and one round
    of drafts is recorded for each token of the answer. For EAGLE-3, speculators computes each draft
    from the tokens of the answer, not from the earlier drafts of the round. This gives the right
    draft only if all earlier drafts equal the answer. So a round ends at the first draft that
    differs from the answer.
    """
    import torch
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from transformers import AutoModelForCausalLM

    target = _load(AutoModelForCausalLM, job["model"], job["dtype"])
    config: Any = SpeculatorModelConfig.from_pretrained(job["drafter"], trust_remote_code=False)
    # Use eager attention. The default, FlexAttention, requires that the length of a sequence is a
    # multiple of 128, and answers have any length.
    config.transformer_layer_config._attn_implementation = "eager"
    model = _load(SpeculatorModel, job["drafter"], job["dtype"], config=config)
    chain = _chains_of_eagle3 if job["method"] == "eagle3" else _chains_of_blocks
    answers: Answers = []
    # The drafter may read the output of the target's last layer. transformers does not return this
    # output: the last entry of ``hidden_states`` is the output of the final norm. The input of the
    # final norm is the output of the last layer, so a hook on the norm records its input.
    last = deque[Any](maxlen=1)
    target.base_model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    for prompt in job["prompts"]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            token_ids = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=job["max_new_tokens"],
            )
            states = [*target(token_ids, output_hidden_states=True).hidden_states[:-1], last[-1]]
            hidden = torch.cat([states[layer] for layer in model.target_layer_ids], dim=-1)
            rounds = chain(model, token_ids, hidden, len(prompt) + 1, job["n_drafts"])
        answers.append({"tokens": token_ids[0, len(prompt) :].tolist(), "rounds": rounds})
    return answers


def _chains_of_eagle3(
    model: Any, token_ids: Any, hidden: Any, first: int, n_drafts: int
) -> list[tuple[int, list[int]]]:
    n_slots = token_ids.shape[1] - 1
    drafted = model(
        hidden[:, :-1], token_ids[:, 1:],
        document_ids=token_ids.new_zeros(1, n_slots), ttt_steps=n_drafts,
    )  # fmt: skip
    steps: list[Any] = []
    for step in drafted:
        draft_ids = step[0]
        steps.append(draft_ids if model.d2t is None else draft_ids + model.d2t[draft_ids])
    tokens = token_ids[0].tolist()
    rounds = []
    for n in range(first, len(tokens)):
        chain = [int(step[n - 2]) for step in steps]
        n_right = n_drafts
        for k, draft in enumerate(chain):
            if tokens[n + k : n + k + 1] != [draft]:
                n_right = k
                break
        rounds.append((n, chain[: n_right + 1]))
    return rounds


def _chains_of_blocks(
    model: Any, token_ids: Any, hidden: Any, first: int, n_drafts: int
) -> list[tuple[int, list[int]]]:
    import torch
    from speculators.models.dflash import core

    anchors = torch.arange(token_ids.shape[1] - model.block_size)[first - 1 :]
    if not len(anchors):  # The answer is shorter than one draft block. So record no round.
        return []
    core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    states, logits, *_ = model._backbone_forward(
        hidden, token_ids, torch.ones_like(token_ids), hidden[..., : model.norm.weight.shape[0]],
        torch.zeros_like(token_ids),
        max_anchors=len(anchors),
    )  # fmt: skip
    first_slot = 0 if model.config.sample_from_anchor else 1
    # `blocks` contains the logits [N, K, V] of N draft blocks with K drafts each. V is the size of
    # the draft vocabulary.
    blocks = logits.unflatten(1, (-1, model.block_size))[0, :, first_slot:]
    head: Any = getattr(model, "markov_head", None)
    before = token_ids[0, anchors][:, None].repeat(1, model.block_size)
    tokens = torch.empty_like(blocks[..., 0], dtype=token_ids.dtype)
    for k in range(blocks.shape[1]):
        scores = blocks[:, k]
        if head is not None:
            bias = head.block_bias(
                prev_token_ids=before, hidden_states=states.view(*before.shape, -1)
            )
            scores = scores + bias[:, first_slot + k]
        drafts = scores.argmax(-1)
        tokens[:, k] = drafts if model.d2t is None else drafts + model.d2t[drafts]
        before[:, first_slot + k + 1 : first_slot + k + 2] = tokens[:, k : k + 1]
    rounds: list[tuple[int, list[int]]] = []
    for anchor, block in zip(anchors, tokens.tolist(), strict=True):
        rounds.append((int(anchor) + 1, block[:n_drafts]))
    return rounds


ENGINES: dict[str, Callable[[dict[str, Any]], Answers]] = {
    "transformers": _transformers, "vllm": _vllm, "speculators": _speculators,
}  # fmt: skip

if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(ENGINES[given["engine"]](given)))
