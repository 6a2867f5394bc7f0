"""The target is an ordinary Hugging Face folder.

Its chat template marks the answers. Equal settings give equal weights.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moa_data.demo.config import DemoConfig
from moa_data.demo.corpus import generate_corpus
from moa_data.demo.target import BOS, EOT, train_target
from moa_data.tests.kit.progress import progress_to

SMALL = DemoConfig.of(
    hidden_size=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    vocab_size=400,
    target_steps=12,
    target_batch_tokens=512,
)


@pytest.fixture(scope="module")
def rows() -> Any:
    return generate_corpus(120, 1, seed=0).train


@pytest.fixture(scope="module")
def trained(rows: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder, told = tmp_path_factory.mktemp("demo") / "target", []
    train_target(rows, SMALL, folder, progress_to(lambda done, total, text: told.append(text)))
    return folder, told


def test_loads_as_a_hugging_face_folder(trained: tuple[Path, list[str]]) -> None:
    folder = trained[0]
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_key_value_heads == 2
    assert not model.config.tie_word_embeddings
    assert (
        model.get_output_embeddings().weight.data_ptr()
        != model.get_input_embeddings().weight.data_ptr()
    )
    assert len(tokenizer) == model.config.vocab_size <= 400
    assert (
        model.generation_config.eos_token_id
        == tokenizer.convert_tokens_to_ids(EOT)
        == tokenizer.eos_token_id
    )


def test_template_marks_the_answers_and_has_one_bos(
    trained: tuple[Path, list[str]], rows: Any
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    row = next(row for row in rows if row["category"] == "shopping")
    encoded: Any = tokenizer.apply_chat_template(
        row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    assert ids.count(tokenizer.convert_tokens_to_ids(BOS)) == 1
    assert mask[0] == 0
    assert mask[-1] == 1
    marked = tokenizer.decode(
        [token for token, is_answer in zip(ids, mask, strict=True) if is_answer]
    )
    assert marked == EOT.join(
        [m["content"] for m in row["messages"] if m["role"] == "assistant"] + [""]
    )


def test_loss_falls_and_an_unfinished_folder_is_made_again_with_equal_weights(
    trained: tuple[Path, list[str]], rows: Any, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_text("of a run that was killed")
    again = train_target(rows, SMALL.replaced(out="x"), tmp_path)
    first, last = (
        float(text.split("loss ")[1].split(",")[0]) for text in (trained[1][0], trained[1][-1])
    )
    assert round(again["train_loss"], 3) == last < first
    one, two = (
        AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (trained[0], tmp_path)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
