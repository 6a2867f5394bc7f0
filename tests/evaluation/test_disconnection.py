"""Drafters that go on without the target write what they would draft in one endless round.

Their texts are compared with the target's.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moa_data.errors import OptionInvalid
from moa_data.evaluation.config import EvalConfig
from moa_data.evaluation.measure import (
    TARGET,
    CutRow,
    cut_points,
    load_scorer,
    measure_disconnections,
)
from moa_data.evaluation.prompts import Prompt
from moa_data.evaluation.run import evaluate
from moa_data.moa.drafters.training import Draws, Rounds
from moa_data.moa.nn.kv import cache_layers, new_cache, pack_kv
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.chats import chat, write_jsonl
from moa_data.tests.kit.drafters import build, frozen_for
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import written_by_transformers

from .conftest import MAX_POSITIONS

PROMPTS = [
    Prompt(f"p{number}", "chat", (({"role": "user", "content": text},),))
    for number, text in enumerate(("hello", "what is two and two?", "why", "x" * 78, "x" * 120))
]


def random_drafter(target: Target, kind: str, seed: int = 0, **sizes: Any) -> Any:
    return build(kind, target.model, seed, 0.2, **sizes)


@pytest.fixture
def endless(target: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(target, "eos_token_ids", frozenset())
    return target


def measured(target: Target, drafters: dict[str, Any], batch_size: int) -> list[CutRow]:
    return measure_disconnections(
        target, drafters, PROMPTS, n_tokens=6, n_cuts=2, max_new_tokens=8, batch_size=batch_size
    )


def test_cuts_are_spread_over_the_answer() -> None:
    assert cut_points(12, 3) == [3, 6, 9]
    assert cut_points(2, 3) == [1], "never after the last token, and none twice"
    assert cut_points(1, 3) == cut_points(0, 3) == []


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        pytest.param("moa", {}, marks=pytest.mark.slow),
        ("moa", {"target_layer_inference": 1}),
        pytest.param("eagle3", {}, marks=pytest.mark.slow),
        ("dspark", {}),
        pytest.param("glide", {}, marks=pytest.mark.slow),
        pytest.param("medusa", {}, marks=pytest.mark.slow),
        pytest.param("independent", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_batches_give_what_each_cut_gives_alone(
    endless: Target, kind: str, sizes: dict[str, Any]
) -> None:
    drafters = {
        "a": random_drafter(endless, kind, **sizes),
        "b": random_drafter(endless, "eagle", 1),
    }
    together, alone = measured(endless, drafters, 7), measured(endless, drafters, 1)
    assert len(together) == len(alone) == 2 * 4, (
        "the last prompt leaves no position to generate into"
    )
    for row, own in zip(together, alone, strict=True):
        assert (row.prompt_id, row.cut, row.n_written) == (own.prompt_id, own.cut, own.n_written)
        for name, continuation in row.by_writer.items():
            assert continuation.tokens == own.by_writer[name].tokens
            assert continuation.log_probs == pytest.approx(own.by_writer[name].log_probs, abs=1e-4)
            room = MAX_POSITIONS - row.n_prompt_tokens - row.n_written
            assert len(continuation.tokens) <= min(6, room)
        target = row.by_writer[TARGET]
        assert all(target.agrees)
        assert target.n_common == len(target.tokens)


@torch.no_grad()
def test_moa_writes_what_its_training_forward_predicts(endless: Target) -> None:
    """The training forward over the finished text gives the same tokens.

    The whole continuation is one draft round of that forward.
    """
    drafter = random_drafter(endless, "moa")
    frozen = frozen_for(drafter, endless.model)
    rows = measured(endless, {"moa": drafter}, 3)
    tokenizer = endless.tokenizer
    for row in rows:
        prompt = next(prompt for prompt in PROMPTS if prompt.prompt_id == row.prompt_id)
        before = tokenizer.apply_chat_template(list(prompt.turns[0]), add_generation_prompt=True)[
            "input_ids"
        ]
        answer = before + written_by_transformers(
            endless.model, before, max_new_tokens=row.n_written, eos_token_id=-1
        )
        written = list(row.by_writer["moa"].tokens)
        tokens = torch.tensor([answer + written])
        root = len(answer) - 1
        cache = new_cache()
        endless.model.model(tokens, past_key_values=cache)
        drafted = (torch.arange(tokens.shape[1]) >= root)[None]
        rounds = Rounds.packed(Draws(None, torch.zeros(1, dtype=torch.bool)), drafted)
        features, _ = drafter(frozen, tokens, pack_kv(*cache_layers(cache)), rounds)
        assert frozen.logits(features)[0, :-1].argmax(dim=-1).tolist() == written
        log_p = endless.model(tokens).logits[0, root:-1].log_softmax(dim=-1)
        expected = log_p.gather(1, torch.tensor(written)[:, None])[:, 0].tolist()
        assert row.by_writer["moa"].log_probs == pytest.approx(expected, abs=1e-4)


def test_writing_stops_at_the_end_of_sequence(
    endless: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = measured(endless, {"d": random_drafter(endless, "glide")}, 4)
    token = free[0].by_writer["d"].tokens[2]
    monkeypatch.setattr(endless, "eos_token_ids", frozenset({token}))
    rows = measured(endless, {"d": random_drafter(endless, "glide")}, 4)
    for row in rows:
        for continuation in row.by_writer.values():
            assert token not in continuation.tokens[:-1]
            assert len(continuation.log_probs) == len(continuation.tokens)
        assert len(row.by_writer["d"].agrees) == len(row.by_writer[TARGET].tokens)
    assert any(row.by_writer["d"].tokens[-1] == token for row in rows)


@pytest.fixture
def cutting(config: EvalConfig) -> EvalConfig:
    return config.replaced(method=("plain",), disconnect=6, cuts=2)


@pytest.mark.draws
def test_a_report_has_a_section_with_scores(cutting: EvalConfig, tmp_path: Path) -> None:
    scorer = tmp_path / "scores.py"
    scorer.write_text(
        "def length(prompt, answer):\n"
        "    assert prompt and '<' not in prompt\n"
        "    return len(answer)\n"
    )
    prompts = write_jsonl(
        tmp_path / "mixed.jsonl", [chat(text) for text in ("hello", "x" * MAX_POSITIONS, "why")]
    )
    found = evaluate(
        cutting.replaced(scorer=f"{scorer}:length", prompts=str(prompts))
    ).disconnection
    out, name = Path(cutting.out), Path(cutting.drafter[0]).name
    assert found is not None
    assert (found.n_cuts, found.n_cut_prompts, found.n_skipped) == (len(found.rows), 2, 1)
    assert [
        summary["writer"] for summary in json.loads(out.read_text())["disconnection"]["writers"]
    ] == [TARGET, name]
    ours, theirs = found.writers
    assert ours.agreement.mean == 1.0
    assert (theirs.score.mean or 0) > 1
    text = out.with_suffix(".md").read_text()
    for line in (
        f"| {name} |",
        f"Greedy answers to 2 prompts were cut off at {found.n_cuts} positions",
        "1 prompts were skipped",
    ):
        assert line in text
    assert out.with_name("report_disconnection.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("return float('nan')", "nan"),
        ("return None", "NoneType"),
        ("raise KeyError('gold')", "gold"),
    ],
)
def test_a_scorer_without_a_number_is_named_and_nothing_is_written(
    cutting: EvalConfig, tmp_path: Path, body: str, named: str
) -> None:
    scorer = tmp_path / "scores.py"
    scorer.write_text(f"def score(prompt, answer):\n    {body}\n")
    with raises_naming(OptionInvalid, "`scorer`", "prompt 1", named):
        evaluate(cutting.replaced(scorer=f"{scorer}:score"))
    assert not list(Path(cutting.out).parent.glob("report*"))


@pytest.mark.parametrize("name", ["{}/broken.py:score", ".scores:score", "scores", "json:score"])
def test_a_scorer_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no\\nluck')\n")
    with raises_naming(OptionInvalid, "`scorer=", name.format(tmp_path)):
        load_scorer(name.format(tmp_path))


def test_a_scorer_of_a_module_keeps_its_globals(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(
        "import math\n\ndef root(prompt, answer):\n    return math.sqrt(len(answer))\n"
    )
    assert load_scorer(f"{tmp_path}/scores.py:root")("", "abcd") == 2.0
    assert load_scorer("operator:ne")("a", "b") == 1.0
