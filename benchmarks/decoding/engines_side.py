"""Decodes with a drafter in vLLM or transformers: a script for their own Python, which needs nothing of this package.

    PYTHON benchmarks/decoding/engines_side.py JOB.json FOUND.json        what ``engines.py`` calls

Found are the engine's version, the answers as token ids, the target calls with drafts and those without, which give a
token each.
"""

import json
import sys
from pathlib import Path
from typing import Any


def with_vllm(job: dict[str, Any]) -> dict[str, Any]:
    """Decode one prompt after the other; vLLM's own counter has the rounds."""
    from vllm import LLM, SamplingParams, __version__

    drafter = {"method": job["method"], "model": job["drafter"], "num_speculative_tokens": job["n_drafts"]}
    engine = LLM(
        model=job["model"], dtype="float32", enforce_eager=True, max_num_seqs=1, max_model_len=job["max_positions"],
        disable_log_stats=False, speculative_config=drafter,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=job["max_new_tokens"])
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    answers = engine.generate(prompts, greedy, use_tqdm=False)
    counts = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return {
        "version": __version__,
        "answers": [list(answer.outputs[0].token_ids) for answer in answers],
        "n_rounds": counts["vllm:spec_decode_num_drafts"],
        "n_plain": len(answers),  # the first token of each
    }


def with_transformers(job: dict[str, Any]) -> dict[str, Any]:
    """Decode by ``generate(assistant_model=...)``; rounds are the target's calls with drafts."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, __version__
    from transformers.generation import candidate_generator as made

    torch.set_num_threads(1)

    def load(kind: Any, folder: str) -> Any:
        loaded = kind.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True)
        return loaded.eval()

    is_block = job["method"] == "dflash"
    target = load(AutoModelForCausalLM, job["model"])
    drafter = load(AutoModel if is_block else AutoModelForCausalLM, job["drafter"])
    if not is_block:
        own = drafter.generation_config
        own.num_assistant_tokens, own.num_assistant_tokens_schedule = job["n_drafts"], "constant"
        own.assistant_confidence_threshold = 0.0
    generator: Any = made.DFlashTokenCandidateGenerator if is_block else made.AssistedCandidateGenerator
    found, propose = {True: 0, False: 0}, generator.get_candidates

    def counted(self: Any, input_ids: Any, *arguments: Any, **options: Any) -> Any:
        candidates = propose(self, input_ids, *arguments, **options)
        found[candidates[0].shape[1] > input_ids.shape[1]] += 1
        return candidates

    generator.get_candidates = counted
    answers = []
    for prompt in job["prompts"]:
        ids = torch.tensor([prompt])
        text = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=job["max_new_tokens"],
            assistant_model=drafter, **({"speculation_type": "dflash"} if is_block else {}),
        )  # fmt: skip
        answers.append(text[0, len(prompt) :].tolist())
    return {"version": __version__, "answers": answers, "n_rounds": found[True], "n_plain": found[False]}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    decode = {"vllm": with_vllm, "transformers": with_transformers}[given["engine"]]
    Path(sys.argv[2]).write_text(json.dumps(decode(given)))
