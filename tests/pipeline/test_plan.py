"""The plan is complete and deterministic, and bad input is refused with one line that says what to do."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import DatasetError, OptionInvalid, StorageUnavailable, TargetError, TemplateError
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.plan import build_plan
from moa_data.storage.codecs import transform as codec_module
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.models import build_text_model
from moa_data.text import format_bytes


def make_config(target: Path, dataset: Path, tmp_path: Path, **overrides: Any) -> ExtractConfig:
    return ExtractConfig.of(
        model=str(target), dataset=str(dataset), out=str(tmp_path / "store"),
        **{"max_length": 128, "device": "cpu"} | overrides,
    )  # fmt: skip


def test_the_plan_counts_everything_before_any_forward(target_folder: Path, tmp_path: Path) -> None:
    rows: list[Any] = random_chats(30)
    rows += [rows[0], {"messages": [{"role": "user", "content": "x"}]}, "{broken"]
    config = make_config(target_folder, write_jsonl(tmp_path / "c.jsonl", rows), tmp_path, max_rejected_fraction=0.2)
    plan = build_plan(config)
    assert plan.n_sequences == 30
    assert plan.sequences.n_duplicates == 1
    assert plan.sequences.rejections == {"the chat has no assistant message": 1, "the row is no JSON object": 1}
    n_tokens = sum(len(plan.sequences.tokens(key)) for key in plan.table["sequence_id"].to_pylist())
    assert plan.n_tokens == n_tokens
    assert plan.raw_bytes["kv"] == n_tokens * 3 * 2 * 2 * 8 * 2
    assert plan.raw_bytes["hidden/last"] == n_tokens * 32 * 2
    assert not (tmp_path / "store").exists()
    text = plan.describe()
    for part in ("33 rows read", "1 duplicates", "2 rows", "first: row 31", "bytes per token", "free disk", "memory"):
        assert part in text, text


def test_equal_inputs_give_equal_plans(target_folder: Path, chats_file: Path, tmp_path: Path) -> None:
    config = make_config(target_folder, chats_file, tmp_path, part_tokens=512)
    first, second = build_plan(config, with_weights=True), build_plan(config, with_weights=True)
    assert first.manifest == second.manifest
    assert first.table.equals(second.table)
    assert first.n_parts > 1
    assert "target.weights_sha256" in first.manifest.identities


def test_max_sequences_takes_the_first_usable_ones(target_folder: Path, tmp_path: Path) -> None:
    rows: list[Any] = ["{broken", *random_chats(10)]
    path = write_jsonl(tmp_path / "c.jsonl", rows)
    plan = build_plan(make_config(target_folder, path, tmp_path, max_sequences=4, max_rejected_fraction=0.5))
    assert sorted(plan.table["source_row"].to_pylist()) == [1, 2, 3, 4]


def test_progress_is_told_while_tokenising(target_folder: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", random_chats(130))
    calls: list[tuple[int, int, str]] = []
    build_plan(make_config(target_folder, path, tmp_path), progress=lambda *call: calls.append(call))
    assert calls == [(64, 130, "tokenise"), (128, 130, "tokenise"), (130, 130, "tokenise")]


def test_target_layers_add_the_state_that_enters_them(target_folder: Path, chats_file: Path, tmp_path: Path) -> None:
    plan = build_plan(make_config(target_folder, chats_file, tmp_path, target_layers=1))
    assert [spec.name for spec in plan.manifest.fields][2:] == ["kv", "hidden/last", "hidden/layer_1"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty: no rows"),
        ([{"text": "hi"}] * 3, r"has no usable chat among 3 rows: .*columns: text.*Expected a column `messages`"),
        (["{broken", "nonsense"], r"has no usable chat among 2 rows: 2 x the row is no JSON object \(row 0"),
        ([{"messages": 3}], "has no usable chat among 1 rows: 1 x messages is no list"),
    ],
)
def test_datasets_without_chats_are_refused(target_folder: Path, tmp_path: Path, rows: list[Any], message: str) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", rows)
    with pytest.raises(DatasetError, match=message):
        build_plan(make_config(target_folder, path, tmp_path))


def test_too_many_unusable_rows_fail_the_run_and_are_counted(target_folder: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [*random_chats(8), "{broken", {"messages": []}])
    with pytest.raises(DatasetError, match=r"2 of 10 rows \(20\.0%\) cannot be used.*0\.05.*1 x the row is no JSON"):
        build_plan(make_config(target_folder, path, tmp_path))


def test_a_sequence_longer_than_the_positions_is_named(target_folder: Path, tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "word " * 400}]}
    path = write_jsonl(tmp_path / "c.jsonl", [*random_chats(2), long])
    with pytest.raises(DatasetError, match=r"Row 2 of .* tokens after truncation to 2,048.*Use --max-length 256"):
        build_plan(make_config(target_folder, path, tmp_path, max_length=2048))
    for length in (256, None):  # the default is the target's positions
        plan = build_plan(make_config(target_folder, path, tmp_path, max_length=length))
        assert (plan.sequences.n_truncated, plan.config.data.max_length) == (1, 256)


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("config.json", r"has no config\.json"),
        ("model.safetensors", r"has no \*\.safetensors weights"),
        ("tokenizer.json", "has no tokenizer; put"),
    ],
)
def test_an_incomplete_model_folder_is_refused(
    model: Path, chats_file: Path, tmp_path: Path, removed: str, message: str
) -> None:
    (model / removed).unlink()
    with pytest.raises(TargetError, match=message):
        build_plan(make_config(model, chats_file, tmp_path))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@pytest.mark.parametrize("command", [build_plan, extract])
def test_a_rotation_that_no_drafter_can_use_is_refused(
    model: Path, chats_file: Path, tmp_path: Path, rope_type: str, command: Callable[..., Any]
) -> None:
    document = json.loads((model / "config.json").read_text())
    factors = [1.0] * 4
    document["rope_parameters"] = {
        "rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, "short_factor": factors, "long_factor": factors,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(document))
    config = make_config(model, chats_file, tmp_path)
    with pytest.raises(TargetError, match=f"rope type '{rope_type}' changes with the length.*llama3, yarn"):
        command(config)
    assert not Path(config.out).exists()


def test_a_model_without_chat_template_is_refused(model: Path, chats_file: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").unlink()
    with pytest.raises(TemplateError, match=rf"{model}: the tokenizer has no chat template"):
        build_plan(make_config(model, chats_file, tmp_path))


def test_a_tokenizer_of_another_model_is_refused(model: Path, chats_file: Path, tmp_path: Path) -> None:
    build_text_model("llama", vocab_size=100).save_pretrained(model)
    with pytest.raises(DatasetError, match=r"vocabulary has 100 entries.*does not belong to this model"):
        build_plan(make_config(model, chats_file, tmp_path))


def test_all_problems_of_the_configuration_are_named_at_once(target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionInvalid, match=r"max_length is 0.*dtype is 'int4', expected one of.*batch_tokens is 0"):
        make_config(target_folder, tmp_path, tmp_path, max_length=0, dtype="int4", batch_tokens=0)


def test_unknown_codec_and_device_are_refused(target_folder: Path, chats_file: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionInvalid, match=r"Unknown codec 'zip'.*--codec"):
        build_plan(make_config(target_folder, chats_file, tmp_path, codec="zip"))
    config = make_config(target_folder, chats_file, tmp_path, device="nonsense")
    with pytest.raises(TargetError, match=r"device 'nonsense' cannot be used.*--device cpu"):
        build_plan(config)


def test_the_plan_says_what_learning_takes(target_folder: Path, chats_file: Path, tmp_path: Path) -> None:
    plans = [build_plan(make_config(target_folder, chats_file, tmp_path, codec=c)) for c in ("int8", "transform:1")]
    lines = [[line for line in plan.describe().splitlines() if line.startswith("learn ")] for plan in plans]
    assert lines[0] == []
    sample = f"forwards of {plans[1].n_tokens:,} tokens before the first part"
    assert sample in lines[1][0]


def test_a_codec_that_is_too_wide_is_refused_before_chats_are_read(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_module, "MAX_BASIS_WIDTH", 32)
    config = ExtractConfig.of(
        model=str(target_folder),
        dataset=str(tmp_path / "not-there.jsonl"),
        out=str(tmp_path / "store"),
        codec="transform:1,tokens@group99",
    )
    with pytest.raises(OptionInvalid, match="@group2"):
        build_plan(config)


def test_a_disk_that_is_too_small_is_refused(target_folder: Path, chats_file: Path, tmp_path: Path) -> None:
    plan = build_plan(make_config(target_folder, chats_file, tmp_path))
    plan.check_disk()
    with pytest.raises(StorageUnavailable, match="has 10 B free"):
        dataclasses.replace(plan, free_bytes=10).check_disk()
    dataclasses.replace(plan, free_bytes=10, present_bytes=plan.stored_bytes).check_disk()


def test_features_of_tokens_count_as_stored(target_folder: Path, chats_file: Path, tmp_path: Path) -> None:
    plain, predicted = (
        build_plan(make_config(target_folder, chats_file, tmp_path, codec=codec))
        for codec in ("transform:1", "transform:1,tokens")
    )
    assert predicted.stored_bytes - plain.stored_bytes == 2 * 400 * 32  # float16 [vocab_size, width]


def test_bytes_are_shown_in_decimal_units() -> None:
    assert [format_bytes(n) for n in (999, 1500, 31.5e12, 4e15)] == ["999 B", "1.5 kB", "31.5 TB", "4,000.0 TB"]
