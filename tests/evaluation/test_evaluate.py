"""`evaluate` reports what it measured and how, and refuses unusable settings and inputs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moa_data import generate
from moa_data.errors import DrafterError, OptionInvalid, TargetError
from moa_data.evaluation.config import EvalConfig
from moa_data.evaluation.report import KIND
from moa_data.evaluation.run import evaluate
from moa_data.moa.decoding.loop import plain_generate
from moa_data.moa.drafters.mixture import MoADrafter, MoASizes
from moa_data.moa.formats.checkpoint import load_drafter, save_drafter
from moa_data.moa.targets.chat_tokens import prompt_tokens
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.chats import chat, write_jsonl
from moa_data.tests.kit.errors import raises_naming

from .conftest import MAX_POSITIONS


@pytest.mark.draws
def test_report_files(config: EvalConfig) -> None:
    report = evaluate(config.replaced(warmup=2), provenance={"argv": ["moa-data", "eval"]})
    out = Path(config.out)
    written = json.loads(out.read_text())
    assert written == json.loads(json.dumps(report.to_json()))
    assert (written["kind"], written["provenance"]) == (KIND, {"argv": ["moa-data", "eval"]})
    assert len(written["environment"]["target"]["weights_sha256"]) == 64
    plain, chain = written["methods"]
    assert chain["n_exact"] == chain["n_answers"] == plain["n_answers"] == len(written["rows"]) == 5
    assert chain["n_tokens"] == plain["n_tokens"]
    assert sum(chain["accepted_drafts"]) == chain["n_target_calls"]
    assert chain["acceptance_length"] * chain["n_target_calls"] == pytest.approx(
        chain["n_tokens"] - 5
    )
    for row in written["rows"]:
        assert row["runs"]["chain"]["exact_match"]
        assert (
            sum(row["runs"]["chain"]["committed_per_call"]) == row["runs"]["chain"]["n_tokens"] - 1
        )
    assert "| chain |" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    evaluate(config.replaced(n_prompts=1))  # an earlier report may be replaced


def test_spec_bench_questions_with_categories(config: EvalConfig, questions_file: Path) -> None:
    report = evaluate(config.replaced(prompts=str(questions_file), n_prompts=5, batch_size=3))
    assert set(report.categories) == {"math", "writing", "qa"}
    assert report.prompts["n_answers"] == len(report.measurement.rows) == 8
    assert [row.turn for row in report.measurement.rows if row.prompt_id == "1"] == [0, 1]
    assert report.method("chain").n_exact == 8


def test_plain_alone_needs_no_drafter_and_equals_itself(config: EvalConfig) -> None:
    first, second = evaluate(
        config.replaced(method=("plain", "plain"), drafter=(), n_prompts=2)
    ).methods
    assert [first.method, second.method] == ["plain", "plain#2"]
    assert (first.n_tokens, first.n_target_calls) == (second.n_tokens, second.n_target_calls)
    assert (first.acceptance_length, second.calls_saved, second.n_exact) == (1.0, 0.0, 2)


def test_all_methods_give_the_tokens_of_plain_decoding(config: EvalConfig) -> None:
    methods = ("plain", "chain", "tree", "auto", "prompt-lookup")
    report = evaluate(config.replaced(method=methods, tree="3x2x5", n_prompts=3))
    assert [summary.method for summary in report.methods] == list(methods)
    for summary in report.methods:
        assert summary.n_exact == summary.n_answers == 3, summary.method
        assert sum(summary.accepted_drafts) == summary.n_target_calls
    # Calls of the warm-up do not count as drafted. Neither do calls in which the end of the answer
    # leaves no room for drafts.
    n_drafted = sum(row.runs["auto"].n_drafted_calls for row in report.measurement.rows)
    assert set(report.auto) == {"auto"}
    assert (
        f"{n_drafted} of {report.method('auto').n_target_calls} target calls" in report.auto["auto"]
    )


def test_several_drafters_and_batches(
    config: EvalConfig, drafter_folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(drafter_folder, other)
    config = config.replaced(n_prompts=3)
    together = evaluate(config.replaced(drafter=(str(drafter_folder), str(other)), batch_size=2))
    assert [summary.method for summary in together.methods] == [
        "plain",
        f"chain {drafter_folder.name}",
        "chain other",
    ]
    weights = sum(weight.numel() for weight in load_drafter(drafter_folder).parameters())
    text = Path(config.out).with_suffix(".md").read_text()
    assert f"| other | moa | {weights:,} | - | - | - |" in text
    assert (
        "- it is unknown how other was trained, because its folder contains no training run" in text
    )
    alone = evaluate(config)
    for summary in together.methods[1:]:
        assert summary.accepted_drafts == alone.method("chain").accepted_drafts
        assert summary.n_exact == 3


def test_sampled_answers_do_not_depend_on_the_batch(config: EvalConfig) -> None:
    sampled = config.replaced(temperature=0.9, top_k=20, seed=7, n_prompts=4)
    reports = [evaluate(sampled.replaced(batch_size=size)) for size in (1, 3)]
    for name in ("plain", "chain"):
        one, other = (
            [row.runs[name].committed_per_call for row in report.measurement.rows]
            for report in reports
        )
        assert one == other
    assert "temperature 0.9" in Path(config.out).with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        ({"method": ("chain",)}, ("method", "chain", "plain")),
        ({"method": ("plain", "bush")}, ("method", "'bush'")),
        ({"drafter": ()}, ("chain", "drafter")),
        ({"drafter": (), "method": ("plain",), "disconnect": 3}, ("disconnect", "drafter")),
        ({"tree": "6x8"}, ("'6x8'",)),
        ({"tree": "6@0.2", "temperature": 0.5}, ("6@0.2", "tree", "temperature")),
        ({"temperature": -1.0}, ("temperature", -1.0)),
        ({"batch_size": 0, "repeats": 0}, ("batch_size", "repeats", 0)),
        ({"cuts": 0}, ("cuts", 0)),
        ({"seed": 99999999999999999999}, ("seed", 99999999999999999999)),
    ],
)
def test_bad_settings_are_refused_together(
    config: EvalConfig, values: dict[str, Any], facts: tuple[object, ...]
) -> None:
    with raises_naming(OptionInvalid, *facts):
        config.replaced(**values)


def test_outputs_that_cannot_be_written_are_refused_before_anything_is_measured(
    config: EvalConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "load", lambda *_: pytest.fail("loaded the target"))
    (tmp_path / "notes.json").write_text('{"mine": 1}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "text.md").write_text("mine")
    (tmp_path / "file").touch()
    long = ("x" * 300 + "/report.json", "x" * 245 + ".json")
    for name in (*long, "file/report.json", "notes.json", "list.json", "text.json", ""):
        with raises_naming(OptionInvalid, "`out`", tmp_path):
            evaluate(config.replaced(out=str(tmp_path / name)))
    assert (tmp_path / "notes.json").read_text() == '{"mine": 1}'
    assert (tmp_path / "text.md").read_text() == "mine"


def test_unusable_inputs_are_refused(config: EvalConfig, target: Target, tmp_path: Path) -> None:
    with raises_naming(TargetError, "'nothing'", "`device=cpu`"):
        evaluate(config.replaced(device="nothing"))
    long = write_jsonl(tmp_path / "long.jsonl", [chat("x" * MAX_POSITIONS)])
    with raises_naming(OptionInvalid, "1 prompts"):
        evaluate(config.replaced(prompts=str(long)))
    with raises_naming(DrafterError, tmp_path):
        evaluate(config.replaced(drafter=(str(tmp_path),)))
    stranger = MoADrafter(MoASizes.from_target(target.facts, target={"weights_sha256": "0" * 64}))
    stranger.initialize(torch.Generator().manual_seed(0))
    save_drafter(stranger, tmp_path / "stranger")
    with raises_naming(TargetError, "0" * 12):
        evaluate(config.replaced(drafter=(str(tmp_path / "stranger"),)))
    assert not Path(config.out).exists()


def test_texts_chats_and_tokens_give_one_answer(room: Path) -> None:
    target, drafter = Target.load(str(room / "model"), device="cpu"), load_drafter(room / "drafter")
    chat = [{"role": "user", "content": "What is 1 plus 1?"}]
    tokens = prompt_tokens(target.template, chat)
    by_text, by_chat, by_tokens = (
        generate(target, drafter, prompt, max_new_tokens=7)
        for prompt in (str(chat[0]["content"]), chat, tokens)
    )
    plain = plain_generate(target, tokens, max_new_tokens=7)
    assert generate(target, drafter, tokens, max_new_tokens=7, tree="2x2x3").tokens == plain.tokens
    assert by_text.tokens == by_chat.tokens == by_tokens.tokens == plain.tokens
    # Without a shape, "auto" is used. It begins to draft after three plain steps.
    assert by_text.stats.n_drafted > 0
    assert by_text.text == target.tokenizer.decode(by_text.tokens, skip_special_tokens=True)
    for wrong in ([chat], None, 5, [1.5], b"hi", [{"role": "user"}], [*chat, 5]):
        with raises_naming(DrafterError, "prompt"):
            generate(target, drafter, wrong, max_new_tokens=5)  # type: ignore[arg-type]
