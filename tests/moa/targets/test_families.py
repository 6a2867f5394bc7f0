"""Targets of every family give drafters the model's own activations.

Decoding with drafts equals plain decoding.
"""

import contextlib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typing_extensions import override

from moa_data.errors import DrafterError, TargetError
from moa_data.moa.decoding.loop import generate_batch
from moa_data.moa.decoding.proposer import DrafterProposer, Proposer
from moa_data.moa.decoding.tree import DraftTree, TreeShape
from moa_data.moa.drafters.training import Draws, TrainingStep
from moa_data.moa.targets.bundle import FrozenTarget, scaled_head
from moa_data.moa.targets.cache import TargetCache
from moa_data.moa.targets.chat_tokens import prompt_tokens
from moa_data.moa.targets.facts import TargetFacts, load_facts, parse_facts
from moa_data.moa.targets.families import FAMILIES, empty_model, text_model
from moa_data.moa.targets.live import Target
from moa_data.moa.targets.proof import decoding_problem, prove_logits
from moa_data.pipeline.config import ActivationSpec
from moa_data.pipeline.forwards.capture import capture
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.command import TRAIN, refused, run
from moa_data.tests.kit.drafters import build, frozen_for, stored
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.families import (
    DRAFTERS,
    FEATURES,
    OTHERS,
    SIZES,
    SOME_FAMILIES,
    build_family,
    varied,
    works,
    write_family,
)
from moa_data.tests.kit.hostile import change_json
from moa_data.tests.kit.models import build_tokenizer, random_prompts, written_by_transformers
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE
from moa_data.tests.kit.variants import quick
from moa_data.text import printable

N_NEW = 14
_LAYERS = ["sliding_attention", "full_attention"] * 21
SOME_CONFIGS = ("mamba", "rwkv", "bamba", "blt", "gemma3n", "qwen2_moe", "dots3_note", "beam")


class Knowing(Proposer):
    """Propose the target's next tokens mixed with wrong ones, so that some drafts are rejected."""

    def __init__(self, texts: Sequence[list[int]], seed: int = 0) -> None:
        self._texts, self._random = (
            [list(text) for text in texts],
            torch.Generator().manual_seed(seed),
        )

    @override
    def propose(self, committed: Sequence[list[int]], shape: TreeShape) -> DraftTree:
        drafts, parents = [], []
        for row in committed:
            text = next(text for text in self._texts if text[: len(row)] == row)
            future = (text[len(row) :] + [5] * shape.depth)[: shape.depth]
            wrong = torch.rand(shape.depth, generator=self._random) < 0.3
            own = [
                6 if is_wrong else token
                for token, is_wrong in zip(future, wrong.tolist(), strict=True)
            ]
            if shape.is_chain:
                drafts.append(own)
                continue
            # Each level has a wrong token first and the text's token second.
            drafts.append([token for right in future for token in (7, right)])
            parents.append(
                [
                    -1 if level == 0 else 2 * level - 1
                    for level in range(shape.depth)
                    for _ in range(2)
                ]
            )
        if parents:
            return DraftTree(torch.tensor(drafts), torch.tensor(parents))
        return DraftTree.chain(torch.tensor(drafts))


def target_of(name: str, seed: int = 0, **changes: Any) -> Target:
    target = Target(build_family(name, seed, **changes))
    target.eos_token_ids = frozenset()
    return target


def assert_lossless(
    target: Target, prompts: list[list[int]], seed: int = 0, n_new: int = N_NEW
) -> None:
    """Decoding with drafts gives the text of transformers' own generate.

    All targets decode chains. Those without recurrent states also decode trees, and in a batch.
    """
    model: Any = target.model
    model.generation_config.eos_token_id = None
    texts = [
        [*prompt, *written_by_transformers(model, prompt, max_new_tokens=n_new)]
        for prompt in prompts
    ]
    shapes = [TreeShape(4)] if target.facts.has_states else [TreeShape(4), TreeShape(4, 2, 8)]
    batches = (
        [[index] for index in range(len(prompts))]
        if target.facts.has_states
        else [range(len(prompts))]
    )
    for shape in shapes:
        committed = []
        for batch in batches:
            own = Knowing([texts[index] for index in batch], seed)
            asked = [prompts[index] for index in batch]
            found = generate_batch(target, asked, max_new_tokens=n_new, proposer=own, tree=shape)
            for index, generation in zip(batch, found, strict=True):
                assert prompts[index] + generation.tokens == texts[index], (shape, index)
                committed += generation.stats.committed_per_call
        assert max(committed) >= 3, "no drafts were accepted"
        assert min(committed) < 4, "no draft was refused"


@pytest.mark.parametrize("name", quick(FEATURES, ("gemma2", "qwen3_next")))
def test_drafts_change_nothing(name: str) -> None:
    """The unusual features of each family are switched on."""
    target = target_of(name)
    assert decoding_problem(target) == ""
    assert_lossless(target, random_prompts(2, seed=4, longest=16))


@pytest.mark.parametrize("name", SOME_FAMILIES)
class TestWhatIsStored:
    """The unusual features of each family are switched on."""

    def test_what_drafters_learn_from_is_the_models_own(self, name: str) -> None:
        model = build_family(name)
        tokens = torch.tensor(random_prompts(1, seed=3, longest=30))
        with torch.inference_mode():
            out = text_model(model)(input_ids=tokens, use_cache=False).last_hidden_state
            logits = model(input_ids=tokens, use_cache=False).logits
        frozen = FrozenTarget.from_model(model)
        torch.testing.assert_close(frozen.logits(out), logits, rtol=1e-5, atol=1e-5)
        prove_logits(Target(model))

    def test_captured_is_what_the_model_computes(self, name: str) -> None:
        model = build_family(name)
        spec = ActivationSpec(
            kv=TargetFacts.of_model(model).family.keeps_kv, last=True, layers=(1,)
        )
        rows = [
            torch.tensor(prompt, dtype=torch.int32).numpy()
            for prompt in random_prompts(2, seed=5, longest=30)
        ]
        found = capture(model, rows, spec, torch.float32)
        for index, row in enumerate(rows):
            tokens = torch.from_numpy(row.astype("int64"))[None]
            with torch.inference_mode():
                out = model(input_ids=tokens, output_hidden_states=True, use_cache=True)
            own = slice(0, len(row))
            last = text_model(model)(input_ids=tokens, use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(
                found.fields["hidden/last"][index, own], last, rtol=1e-4, atol=1e-4
            )
            states = out.hidden_states[2][0]
            torch.testing.assert_close(
                found.fields["hidden/layer_1"][index, own], states, rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("name", quick(FEATURES, ("qwen3_moe", "gemma4_text")))
def test_what_works_with_every_drafter(name: str) -> None:
    """Every drafter learns, and drafts for chains, trees and batches.

    What does not work according to the list is refused.
    """
    target = target_of(name)
    prompts, tokens = random_prompts(2, seed=7), torch.tensor(random_prompts(1, seed=8, longest=30))
    plain = [generate_batch(target, [prompt], max_new_tokens=4)[0].tokens for prompt in prompts]
    for column, (kind, sizes) in DRAFTERS.items():
        letters = works(name, column)
        if not letters:
            with pytest.raises((DrafterError, TargetError)):
                build(kind, target.model, **sizes)
            continue
        drafter = build(kind, target.model, **sizes)
        inputs = stored(drafter, target.model, tokens, torch.ones_like(tokens))
        draws = Draws(None, torch.zeros(1, dtype=torch.bool), seeds=(0,))
        drafter.objective(frozen_for(drafter, target.model), TrainingStep(inputs, draws))[
            "loss"
        ].backward()
        gradients = [weight.grad for weight in drafter.parameters() if weight.grad is not None]
        assert gradients, column
        assert all(grad.isfinite().all() for grad in gradients), column
        proposer = DrafterProposer(target, drafter.eval())
        asked, shape = (
            (prompts, TreeShape(2, 2, 4)) if "T" in letters else (prompts[:1], TreeShape(2))
        )
        found = generate_batch(target, asked, max_new_tokens=4, proposer=proposer, tree=shape)
        assert [one.tokens for one in found] == plain[: len(asked)], column
        if "T" not in letters:
            with raises_naming(TargetError, "state"):
                generate_batch(
                    target,
                    prompts[:1],
                    max_new_tokens=5,
                    proposer=proposer,
                    tree=TreeShape(3, 2, 6),
                )


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_random_configurations(name: str) -> None:
    for seed in range(20):
        target = target_of(name, seed, **varied(name, seed))
        assert_lossless(target, random_prompts(3, seed=seed, longest=24), seed)


@pytest.mark.parametrize("name", quick(OTHERS, ("gpt2", "exaone4")))
def test_families_that_nothing_is_known_of(name: str) -> None:
    """Such a family is checked on the loaded model, and then decoded."""
    target = target_of(name)
    prove_logits(target)
    assert target.decoding_problem == ""
    assert_lossless(target, random_prompts(2, seed=6))


def test_layers_that_no_draft_passes_through_are_refused(tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", "qwen3_moe")
    chats, out = write_jsonl(tmp_path / "chats.jsonl", random_chats(6)), tmp_path / "store"
    made = ("--model", model, "--dataset", chats, "--out", out, "--device", "cpu")
    line = "the layers of qwen3_moe cannot run on the output of a drafter"
    for command in ("plan", "extract"):
        refused(run(command, *made, "--target-layers", "1"), line)
    assert not out.exists()
    assert run("extract", *made).exit_code == 0
    refused(run("add", out, "--model", model, "--target-layers", "1"), line)
    refused(
        run("train", out, "--out", tmp_path / "run", *TRAIN, "--target-layer-inference", "1"), line
    )


def test_from_a_folder_to_text_by_the_command_line(tmp_path: Path) -> None:
    """The drafter reads only hidden states, and the target's layers carry a state."""
    kinds = ["linear_attention", "full_attention"]
    model = write_family(tmp_path / "model", "qwen3_next", num_hidden_layers=2, layer_types=kinds)
    chats = write_jsonl(tmp_path / "chats.jsonl", random_chats(6))
    out = tmp_path / "store"
    extract = ("extract", "--dataset", chats, "--out", out, "--device", "cpu", "--activations")
    other = write_family(tmp_path / "other", "stablelm")
    refused(run(*extract, "kv,hidden:last", "--model", other), "--activations hidden:last")
    assert run(*extract, "hidden:last", "--model", model).exit_code == 0
    audited = run("audit", out, "--model", model, "--device", "cpu", "--samples", "2")
    assert audited.exit_code == 0, audited.output
    drafter = tmp_path / "run"
    trained = run("train", out, "--out", drafter, "--drafter", "eagle", *TRAIN)
    assert trained.exit_code == 0, trained.output
    generate = (
        "generate",
        "--model",
        model,
        "--prompt",
        "Hi",
        "--max-new-tokens",
        "9",
        "--device",
        "cpu",
    )
    drafted = run(*generate, "--drafter", drafter)
    assert drafted.exit_code == 0, drafted.output
    target = Target.load(str(model), device="cpu")
    prompt = prompt_tokens(target.template, [{"role": "user", "content": "Hi"}])
    written = written_by_transformers(target.model, prompt, max_new_tokens=9)
    text = target.tokenizer.decode(written, skip_special_tokens=True)
    assert text.strip()
    assert drafted.stdout.startswith(printable(text))
    refused(
        run("serve", "--model", model, "--port", "0", "--grpc-port", "0", "--device", "cpu"),
        "carry a state",
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"quantization_config": {"quant_method": "mxfp4"}},
        {"quantization_config": {"load_in_8bit": True}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
        {"quantization": {"group_size": 64, "bits": 4}},
        {"text_config": {"quantization_config": {"quant_method": "awq"}}},
        {"model_type": "bert"},
        {"model_type": "of_another_world"},
        {"model_type": "qwen3_vl"},
    ],
    ids=str,
)
def test_what_is_no_target_is_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = write_family(tmp_path / "model", "gpt_oss")
    change_json(model / "config.json", **changes)
    found = changes.get("text_config", changes)
    method = found.get("quantization_config") or found.get("compression_config", {})
    named = (
        method.get("quant_method")
        or changes.get("model_type")
        or ("mlx" if "quantization" in found else "bitsandbytes")
    )
    with raises_naming(TargetError, named):
        Target.load(str(model))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
        ("hf_quant_config.json", "modelopt"),
    ],
)
def test_files_that_tell_of_quantised_weights(tmp_path: Path, name: str, method: str) -> None:
    model = write_family(tmp_path / "model", "gpt_oss")
    (model / name).write_text("{}")
    with raises_naming(TargetError, method):
        Target.load(str(model))


@pytest.mark.parametrize("name", quick(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, SOME_CONFIGS))
def test_every_config_of_transformers_is_taken_or_refused(name: str) -> None:
    """The refusal is one line, whatever sizes the layers have."""
    try:
        values = json.loads(AutoConfig.for_model(name).to_json_string(use_diff=False))
    except StrictDataclassError:
        pytest.skip("transformers has no defaults of it")
    try:
        facts = parse_facts(values, "config.json")
    except TargetError:
        assert name not in SOME_CONFIGS or name == "blt"
    else:
        assert facts.head_dim % 2 == 0
        with contextlib.suppress(TargetError):
            scaled_head(empty_model(facts.config))


@pytest.mark.parametrize("name", ["phi", "gptj"])
def test_an_lm_head_with_a_bias_is_refused_before_its_weights_are_read(
    tmp_path: Path, name: str
) -> None:
    model = write_other(tmp_path / "model", name, num_attention_heads=4, intermediate_size=64)
    (model / "model.safetensors").unlink()
    chats = write_jsonl(tmp_path / "chats.jsonl", random_chats(2))
    made = ("--model", model, "--dataset", chats, "--out", tmp_path / "store", "--device", "cpu")
    for command in ("plan", "extract"):
        refused(
            run(command, *made, "--activations", "hidden:last"), f"LM head of {name}", "has a bias"
        )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 24}),
        ("moshi", {"num_attention_heads": 4, "ffn_dim": 64}),
    ],
)
def test_tables_of_other_sizes_are_refused_before_weights_are_read(
    tmp_path: Path, name: str, sizes: dict[str, Any]
) -> None:
    """A projection precedes the LM head, or there are more embeddings than tokens."""
    model = write_other(tmp_path / "model", name, **sizes)
    (model / "model.safetensors").unlink()
    chats = write_jsonl(tmp_path / "chats.jsonl", random_chats(2))
    made = ("--model", model, "--dataset", chats, "--out", tmp_path / "store", "--device", "cpu")
    for command in ("plan", "extract"):
        refused(
            run(command, *made, "--activations", "hidden:last"),
            f"400 tokens by 48 numbers, but those of this {name} have another shape",
        )


def test_a_config_that_does_not_say_whether_the_lm_head_is_tied(tmp_path: Path) -> None:
    model = write_other(
        tmp_path / "model", "inkling2_text", num_attention_heads=4, intermediate_size=64
    )
    chats = write_jsonl(tmp_path / "chats.jsonl", random_chats(4))
    made = ("--model", model, "--dataset", chats, "--out", tmp_path / "store", "--device", "cpu")
    extracted = run("extract", *made, "--max-length", "64", "--activations", "hidden:last")
    assert extracted.exit_code == 0, extracted.output


@pytest.mark.parametrize(("name", "value"), [("gemma3_text", True), ("gemma4_text", "all")])
def test_tokens_that_see_later_ones_are_refused(name: str, value: Any) -> None:
    """In such models, as in EmbeddingGemma, tokens see padding and drafts cannot be verified."""
    with raises_naming(TargetError, name):
        prove_logits(target_of(name, use_bidirectional_attention=value))


def test_what_transformers_itself_cannot_compute_is_refused() -> None:
    target = target_of("gpt2")
    target.body.wpe = torch.nn.Embedding(4, 48)
    with raises_naming(TargetError, "gpt2"):
        prove_logits(target)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (
            "recurrent_gemma",
            {"num_attention_heads": 4, "intermediate_size": 64, "logits_soft_cap": 0.5},
        ),
        ("xlstm", {"num_heads": 4, "output_logit_soft_cap": 0.5}),
    ],
)
def test_bounds_of_logits_by_their_names(name: str, sizes: dict[str, Any]) -> None:
    config = AutoConfig.for_model(name, hidden_size=48, num_hidden_layers=2, vocab_size=67, **sizes)
    prove_logits(Target(AutoModelForCausalLM.from_config(config).eval()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("mamba", {"state_size": 8}), ("xlstm", {"num_heads": 4, "output_logit_soft_cap": 5.0})],
)
def test_states_or_logits_wider_than_the_weights_are_proven(
    name: str, sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    config = AutoConfig.for_model(name, hidden_size=48, num_hidden_layers=2, vocab_size=67, **sizes)
    prove_logits(Target(AutoModelForCausalLM.from_config(config).eval().to(dtype)))


def test_rounding_of_many_layers_is_not_taken_for_sight_of_later_tokens() -> None:
    model = build_family(
        "gemma4_text", num_hidden_layers=42, initializer_range=0.02, layer_types=_LAYERS
    )
    prove_logits(Target(model.to(torch.bfloat16)))


def write_other(folder: Path, name: str, **sizes: Any) -> Path:
    """Write a target whose config has only the given sizes."""
    config = AutoConfig.for_model(
        name, hidden_size=48, num_hidden_layers=2, vocab_size=400, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    build_tokenizer(LLAMA3_TEMPLATE).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mamba", {"state_size": 8}),
        pytest.param("bloom", {"num_attention_heads": 4}, marks=pytest.mark.slow),
    ],
)
def test_targets_for_hidden_states_alone(tmp_path: Path, name: str, sizes: dict[str, Any]) -> None:
    """They have no attention, or their attention has no kernels here."""
    model = write_other(tmp_path / "model", name, **sizes)
    chats = write_jsonl(tmp_path / "chats.jsonl", random_chats(6))
    made = ("--model", model, "--dataset", chats, "--out", tmp_path / "store", "--device", "cpu")
    for command in ("plan", "extract"):
        done = run(command, *made, "--activations", "hidden:last,hidden:layer:0")
        assert done.exit_code == 0, done.output
    audited = run(
        "audit", tmp_path / "store", "--model", model, "--device", "cpu", "--samples", "2"
    )
    assert audited.exit_code == 0, audited.output
    trained = run(
        "train", tmp_path / "store", "--out", tmp_path / "run", "--drafter", "eagle", *TRAIN
    )
    assert trained.exit_code == 0, trained.output
    decoded = run(
        "generate",
        "--model",
        model,
        "--drafter",
        tmp_path / "run",
        "--prompt",
        "Hi",
        "--device",
        "cpu",
    )
    refused(decoded, f"moa-data cannot decode {name}")


@pytest.mark.parametrize("name", quick(["mistral", "ministral3"], ["ministral3"]))
def test_the_text_model_of_one_that_also_sees(tmp_path: Path, name: str) -> None:
    """The vision-language model is not one of the causal LMs of transformers."""
    own = SIZES | FEATURES.get(name, {"sliding_window": 7})
    small = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    sight = {"model_type": "pixtral", "image_size": 28, "patch_size": 14, **small}
    config = AutoConfig.for_model(
        "mistral3", text_config={"model_type": name, **own}, vision_config=sight
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    build_tokenizer(LLAMA3_TEMPLATE).save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), device="cpu")
    target.eos_token_ids = frozenset()
    assert (target.facts.model_type, target.decoding_problem) == (name, "")
    assert_lossless(target, random_prompts(2, seed=4, longest=16))


def test_layers_that_give_several_states_are_refused(tmp_path: Path) -> None:
    sizes = {
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
        "intermediate_size": 64,
    }
    kinds = {
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0] * 2,
    }
    model = write_other(tmp_path, "gemma3n_text", vocab_size_per_layer_input=400, **sizes, **kinds)
    tokens = torch.zeros(1, 4, dtype=torch.int32).numpy()
    target = Target.load(str(model), device="cpu")
    with raises_naming(TargetError, "gemma3n_text", "hidden:layer:K"):
        capture(
            target.model,
            list(tokens),
            ActivationSpec(kv=False, last=True, layers=(1,)),
            torch.float32,
        )
    plain = target_of("gpt2")
    plain.facts.config.hidden_size //= 2  # as if several states were concatenated
    with raises_naming(TargetError, "gpt2", "hidden:layer:K"):
        capture(
            plain.model,
            list(tokens),
            ActivationSpec(kv=False, last=False, layers=(1,)),
            torch.float32,
        )


def test_infinity_in_a_config(tmp_path: Path) -> None:
    """Infinity is read as folders on the Hub and as transformers write it."""
    config = AutoConfig.for_model("bamba", time_step_limit=(0.0, float("inf")))
    config.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    for limit in ("Infinity", '{"__float__": "Infinity"}'):
        change_json(tmp_path / "config.json", time_step_limit=[0.0, "LIMIT"])
        file = tmp_path / "config.json"
        file.write_text(file.read_text().replace('"LIMIT"', limit))
        assert load_facts(tmp_path).config.time_step_limit == (0.0, float("inf"))
    assert parse_facts(json.loads(text), "config.json").config.time_step_limit == (
        0.0,
        float("inf"),
    )


GUIDE = (
    (Path(__file__).parents[3] / "docs/real-model.md").read_text().split("## 7. Other families")[1]
)
IN_GUIDE = (
    "qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "gemma2", "gemma3_text", "gemma4_text",
    "deepseek_v3", "qwen3_next", "qwen3_5_text", "llama4_text", "phi3", "granite", "olmo2",
    "smollm3", "cohere2", "ministral", "olmo",
)  # fmt: skip
"""Model type of each command line in the guide."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"),
    [*zip(IN_GUIDE, re.findall(r"^moa-data (extract .*)$", GUIDE, re.MULTILINE), strict=True)],
)
def test_command_lines_of_the_guide_run(
    name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(
        line.replace("$DATA", str(write_jsonl(tmp_path / "chats.jsonl", random_chats(6)))),
        comments=True,
    )
    sizes = {"num_hidden_layers": 9} if name == "olmo" else {}
    model = write_family(tmp_path / "model", name, vocab_size_per_layer_input=400, **sizes)
    words[words.index("--model") + 1] = str(model)
    extracted = run(*words, "--device", "cpu", "--max-length", "128")
    assert extracted.exit_code == 0, extracted.output


def test_a_dequantised_folder_is_made_as_the_guide_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is one of gpt-oss, whose experts have 4 bits per number.

    A byte holds two numbers, and 32 numbers share an exponent.
    """
    model, random = (
        write_family(tmp_path / "small", "gpt_oss", hidden_size=64),
        torch.Generator().manual_seed(0),
    )
    weights = load_file(model / "model.safetensors")
    for name in [
        name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        n_experts, n_in, n_out = weights.pop(name).shape
        shape = n_experts, n_out, n_in // 32
        weights[f"{name}_blocks"] = torch.randint(
            256, (*shape, 16), dtype=torch.uint8, generator=random
        )
        weights[f"{name}_scales"] = torch.randint(
            122, 126, shape, dtype=torch.uint8, generator=random
        )
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    change_json(
        model / "config.json", quantization_config={"quant_method": "mxfp4"}, dtype="bfloat16"
    )
    with raises_naming(TargetError, "mxfp4"):
        Target.load(str(model))
    program = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert program is not None
    monkeypatch.chdir(tmp_path)
    exec(program[1].replace("openai/gpt-oss-20b", str(model)))
    assert Target.load("./gpt-oss-20b", torch.bfloat16).decoding_problem == ""


def test_what_is_wrong_with_a_family_shows_on_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_family(tmp_path / "model", "cohere2")
    monkeypatch.setattr("moa_data.moa.targets.facts.logit_scale", lambda config: 1.0)
    with raises_naming(TargetError, "cohere2", "logits"):
        Target.load(str(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "value"), [("logit_scale", 0.3 * 1.02), ("logit_cap", 30.0), ("logit_cap", 100.0)]
)
def test_logits_that_are_nearly_right_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float, dtype: torch.dtype
) -> None:
    """Logits of random weights are small, so the check scales hidden states up."""
    target = Target(build_family("cohere2").to(dtype))
    prove_logits(target)
    wrong: Any = {name: value}
    wrong_facts = replace(target.facts, **wrong)
    if name == "logit_cap":
        target.facts = wrong_facts
    # The LM head is scaled by facts that are computed from the model.
    monkeypatch.setattr(TargetFacts, "of", lambda config: wrong_facts)
    with raises_naming(TargetError, "cohere2", "logits"):
        prove_logits(target)


def test_a_bound_that_llama_does_not_have_is_noticed_on_loading(tmp_path: Path) -> None:
    """Our code would apply the bound, but the model does not."""
    model = write_family(tmp_path / "model", "llama")
    change_json(model / "config.json", final_logit_softcapping=30.0)
    with raises_naming(TargetError, "llama", "logits"):
        Target.load(str(model))


def test_a_cache_that_is_not_used_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("gpt2")
    monkeypatch.setattr(
        TargetCache, "write_pending", lambda self, layer, keys, values: (keys, values)
    )
    with raises_naming(TargetError, "gpt2"):
        target.new_cache()


def test_texts_end_where_the_rotation_changes() -> None:
    """Phi-3 rotates all keys differently if a text is longer than its original context length."""
    factors = {"short_factor": [1.0] * 6, "long_factor": [3.0] * 6}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
        **factors,
    }
    sizes: dict[str, Any] = {
        "head_dim": 12,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 32,
    }
    target = target_of("phi3", rope_parameters=rope, **sizes)
    assert target.max_positions == target.facts.max_position_embeddings == 32
    assert_lossless(target, [prompt[:8] for prompt in random_prompts(2, seed=9)], n_new=24)


def test_every_family_is_tested() -> None:
    assert set(FAMILIES) == set(FEATURES)
