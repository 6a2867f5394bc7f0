"""The target folder is an ordinary Hugging Face folder whose template marks the answers; a finished one is reused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moa_data.demo.config import DemoConfig
from moa_data.demo.corpus import generate_corpus
from moa_data.demo.target import BOS, EOT, TargetReport, greedy_answers, train_target

SMALL = DemoConfig.of(
    hidden_size=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=400, target_steps=12, target_batch_tokens=512
)


@pytest.fixture(scope="module")
def corpus() -> Any:
    return generate_corpus(120, 22, seed=0)


@pytest.fixture(scope="module")
def folder(corpus: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "target"
    train_target(corpus.train, corpus.held_out, SMALL, folder)
    return folder


def test_loads_as_a_hugging_face_folder(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_key_value_heads == 2
    assert not model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    assert len(tokenizer) == model.config.vocab_size <= 400
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(EOT) == tokenizer.eos_token_id


def test_template_marks_the_answers_and_has_one_bos(folder: Path, corpus: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    row = next(row for row in corpus.train if row["category"] == "followup")
    encoded: Any = tokenizer.apply_chat_template(
        row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    assert ids.count(tokenizer.convert_tokens_to_ids(BOS)) == 1
    assert mask[0] == 0
    assert mask[-1] == 1
    marked = tokenizer.decode([token for token, is_answer in zip(ids, mask, strict=True) if is_answer])
    assert marked == EOT.join([m["content"] for m in row["messages"] if m["role"] == "assistant"] + [""])


def test_loss_falls_and_a_finished_folder_is_reused(folder: Path, corpus: Any) -> None:
    report = TargetReport.load(folder)
    assert report.train_loss[-1][1] < report.train_loss[0][1]
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = train_target(corpus.train, corpus.held_out, SMALL, folder)
    assert again.seconds == report.seconds
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_equal_seeds_give_equal_weights(folder: Path, corpus: Any, tmp_path: Path) -> None:
    train_target(corpus.train, corpus.held_out, SMALL.replaced(out="x"), tmp_path / "target")
    one, two = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (folder, tmp_path / "target"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_greedy_answers_are_bounded(folder: Path, corpus: Any) -> None:
    answers = greedy_answers(folder, [row["messages"][:-1] for row in corpus.held_out[:2]], max_new_tokens=5)
    assert len(answers) == 2
