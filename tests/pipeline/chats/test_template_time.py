"""A template that asks for the time always gets the same, which the store records; other stores record nothing."""

import datetime as datetime_module
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from moa_data.errors import DatasetError
from moa_data.moa.targets.chat_tokens import TokenizedChat, prompt_tokens, tokenize_chat
from moa_data.pipeline.audit import audit
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.plan import build_plan
from moa_data.tests.kit.models import build_tokenizer
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE, LLAMA31_TEMPLATE, LLAMA32_DATE

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
TIMED = "{{ 'Now ' + strftime_now('%A %d %B %Y, %H:%M:%S') }}" + LLAMA3_TEMPLATE


def on_day(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    """Let the clock of the library show another day."""

    class Clock(datetime_module.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Clock":
            return cls.fromisoformat(day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


@pytest.fixture
def model(model: Path) -> Path:
    (model / "chat_template.jinja").write_text(TIMED)
    return model


def extraction(model: Path, dataset: Path, store: Path, **options: Any) -> ExtractConfig:
    options = {"max_length": 128, "device": "cpu"} | options
    return ExtractConfig.of(model=str(model), dataset=str(dataset), out=str(store), **options)


@pytest.mark.parametrize("template", [TIMED, LLAMA32_DATE + LLAMA31_TEMPLATE, "{% set strf = strftime_now %}"
                                      "{{ strf('%Y') }}" + LLAMA3_TEMPLATE])  # fmt: skip
def test_tokens_and_prompts_are_those_of_one_day(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    found = []
    for day in ("2025-01-31", "2026-12-24T18:00:00"):
        on_day(monkeypatch, day)
        tokenizer = build_tokenizer(template)
        chat = tokenize_chat(tokenizer, CHAT, 400)
        assert isinstance(chat, TokenizedChat)
        found.append((chat.tokens.tolist(), prompt_tokens(tokenizer, CHAT[:1])))
        assert "2024" in tokenizer.decode(chat.tokens)
        # The library's own callers see the day that it is.
        assert day[:4] in tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert found[0] == found[1]


def test_a_store_is_resumed_and_audited_on_another_day(
    model: Path, chats_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = extraction(model, chats_file, tmp_path / "store")
    on_day(monkeypatch, "2025-01-31")
    assert extract(config).n_parts_done == 1
    manifest = json.loads((tmp_path / "store" / "store.json").read_text())
    assert manifest["extraction"]["template_time"] == "2024-07-26T00:00:00"
    on_day(monkeypatch, "2025-02-01")
    assert extract(config).n_parts_done == 0
    report = audit(tmp_path / "store", str(model), 4, 0, "cpu")
    assert report.ok
    assert not report.notes
    assert "tokenised again" in report.worst()["tokens"].detail


def test_an_early_store_of_such_a_template_is_audited_by_its_hashes(
    model: Path, chats_file: Path, tmp_path: Path
) -> None:
    """It does not say which day it was rendered on."""
    store = tmp_path / "store"
    extract(extraction(model, chats_file, store))
    manifest = json.loads((store / "store.json").read_text())
    del manifest["extraction"]["template_time"]
    (store / "store.json").write_text(json.dumps(manifest))
    (store / "commits" / "store.json").unlink()
    report = audit(store, str(model), 2, 0, "cpu")
    assert report.ok
    assert "on the day of the extraction" in report.notes[0]


DATED = "{% if not date_string is defined %}{% set date_string = strftime_now('%d') %}{% endif %}{{ date_string }}"


@pytest.mark.parametrize("template", [LLAMA3_TEMPLATE, DATED + LLAMA3_TEMPLATE])
def test_a_store_whose_template_does_not_ask_records_no_time(
    model: Path, chats_file: Path, tmp_path: Path, template: str
) -> None:
    (model / "chat_template.jinja").write_text(template)
    plan = build_plan(extraction(model, chats_file, tmp_path / "store"))
    assert "template_time" not in plan.manifest.extraction


def test_the_default_split_that_early_runs_recorded_is_the_only_one(
    target_folder: Path, chats_file: Path, tmp_path: Path
) -> None:
    """Early releases wrote `train_sft` into runs/ where none was given, and read folders of one split with it."""
    chats, store = tmp_path / "chats", tmp_path / "store"
    chats.mkdir()
    chats_file.rename(chats / "train.jsonl")
    extract(extraction(target_folder, chats, store))
    (record,) = (store / "runs").glob("*.json")
    run = json.loads(record.read_text())
    record.write_text(json.dumps(run | {"config": run["config"] | {"split": "train_sft"}}))
    assert "tokenised again" in audit(store, str(target_folder), 1, 0, "cpu").worst()["tokens"].detail
    with pytest.raises(DatasetError, match="holds the split train"):
        build_plan(extraction(target_folder, chats, store, split="train_sft"))
