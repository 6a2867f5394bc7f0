"""Answers of a given form equal plain decoding under the same mask, with any drafter.

Some forms are refused.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2 as httpx
import pytest
import torch

from moa_data.errors import RequestInvalid
from moa_data.moa.decoding.sampling import GREEDY, SamplingConfig, choose
from moa_data.moa.targets.live import Target
from moa_data.serving.config import EngineOptions
from moa_data.serving.engine.engine import Engine
from moa_data.serving.engine.sequence import Commit, Request, Work
from moa_data.serving.grammar import Grammars
from moa_data.tests.kit.drafters import build_drafter, teach
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import build_text_model, build_tokenizer
from moa_data.tests.kit.serving import MODEL, LiveServer
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE

llguidance = pytest.importorskip("llguidance")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "is": {"enum": ["cat", "a bird", "me"]},
        "on": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "w": {"type": "string", "maxLength": 8, "pattern": "^[a-z]*$"},
    },
    "required": ["is", "on", "n", "w"],
    "additionalProperties": False,
}
FORMS: dict[str, tuple[str, Any]] = {
    "schema": ("json", SCHEMA),
    "any object": ("json", {"type": "object"}),
    "regex": ("regex", "(the|a) [a-z]{3,12}( and [a-z]+)?"),
}
PROMPT = "the cat sat"
N_NEW = 16
SAMPLED = SamplingConfig(temperature=1.0, top_p=0.95, frequency_penalty=0.3)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(build_text_model(), build_tokenizer(LLAMA3_TEMPLATE))


@pytest.fixture(scope="module")
def taught(target: Target) -> Any:
    return teach(build_drafter(target.model), target, [target.tokenizer(PROMPT)["input_ids"]], 25)


def masked_decoding(
    target: Target, kind: str, form: Any, sampling: SamplingConfig, seed: int
) -> list[int]:
    """Decode with a mask that is computed from scratch for each token."""
    prompt, answer = target.tokenizer(PROMPT)["input_ids"], list[int]()
    grammars = Grammars(target)
    while len(answer) < N_NEW and not {*answer[-1:]} & target.eos_token_ids:
        (grammar,) = grammars.make(kind, form, 1)
        allowed = torch.from_numpy(grammar(answer))
        text = [*prompt, *answer]
        logits = target.model(torch.tensor([text])).logits[0, -1].masked_fill(~allowed, -torch.inf)
        answer.append(choose(logits, text, sampling, seed, len(text), len(prompt)))
    return answer


def by_engine(
    target: Target, drafters: dict[str, Any], tree: str, requests: Sequence[Request]
) -> tuple[list[list[int]], int]:
    engine = Engine(target, drafters, EngineOptions(tree=tree))
    answers: list[list[int]] = [[] for _ in requests]

    def take(own: list[int], commit: Commit) -> None:
        assert commit.error is None
        own += commit.tokens

    for request, own in zip(requests, answers, strict=True):
        id_ = engine.add(request, partial(take, own))
        engine.set_work(id_, Work.SPECULATE if request.drafter else Work.PLAIN)
    while engine.step():
        pass
    return answers, engine.snapshot().n_accepted


def slow(name: str, sampling: Any) -> Any:
    return pytest.param(name, sampling, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        slow("schema", GREEDY), ("schema", SAMPLED),
        slow("any object", GREEDY), slow("any object", SAMPLED),
        slow("regex", GREEDY), slow("regex", SAMPLED),
    ],
    ids=[f"{name}-{way}" for name in FORMS for way in ("greedy", "sampled")],
)  # fmt: skip
def test_drafts_change_nothing_under_a_mask(
    target: Target, taught: Any, name: str, sampling: Any
) -> None:
    """Test chains, trees and plain steps.

    Sequences with a form share their calls with one without.
    """
    kind, form = FORMS[name]
    prompt = tuple(target.tokenizer(PROMPT)["input_ids"])
    expected = [masked_decoding(target, kind, form, sampling, seed) for seed in range(2)]
    free = by_engine(target, {}, "4", [Request(prompt, len(prompt), N_NEW, sampling, 7)])[0]
    for tree, drafter in (("4", None), ("4", "moa"), ("3x2x6", "moa")):
        requests = [
            Request(prompt, len(prompt), N_NEW, sampling, seed, drafter, allowed=grammar)
            for seed, grammar in enumerate(Grammars(target).make(kind, form, 2))
        ]
        requests.append(Request(prompt, len(prompt), N_NEW, sampling, 7, drafter))
        answers, n_accepted = by_engine(target, {"moa": taught}, tree, requests)
        assert answers[:2] == expected
        assert answers[2:] == free
        assert (n_accepted > 0) is (drafter is not None)


def test_a_grammar_goes_back_and_forth(target: Target) -> None:
    """Beyond the end of the form, only the end of the answer is allowed."""
    (grammar,) = Grammars(target).make("regex", "(a|b)+c", 1)
    a, b, c, x = (
        target.tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in "abcx"
    )
    end = next(iter(target.eos_token_ids))

    def allows(*answer: int) -> tuple[bool, ...]:
        found = grammar(answer)
        assert found.shape == (400,)
        return tuple(bool(found[token]) for token in (a, c, x, end))

    assert allows() == (True, False, False, False)
    assert allows(a) == (True, True, False, False)
    for answer in ((a, b, c), (a, b, c, end), (a, b, c, end, end)):
        assert allows(*answer) == (False, False, False, True)
    assert allows(a, b) == allows(b) == allows(b, b) == (True, True, False, False)
    assert allows() == (True, False, False, False)


@pytest.fixture(scope="module")
def server(target: Target, taught: Any) -> Iterator[LiveServer]:
    with LiveServer(target, {"moa": taught}, tree="4", max_new_tokens=200) as live:
        yield live


def ask(server: LiveServer, **settings: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello there"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 120, "temperature": 0} | settings
    return httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60)


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def check(value: Any) -> None:
    """Check a value against the schema."""
    assert value.keys() == set(SCHEMA["required"])
    assert value["is"] in SCHEMA["properties"]["is"]["enum"]
    assert isinstance(value["on"], bool)
    assert type(value["n"]) is int
    assert 0 <= value["n"] <= 99
    assert re.fullmatch("[a-z]{0,8}", value["w"])


def test_answers_follow_the_schema(server: LiveServer, target: Target) -> None:
    # Otherwise this target would write white space between keys for ever.
    spaces = {
        str(token): -100 for token in range(400) if target.tokenizer.decode([token]).isspace()
    }
    for settings in ({}, {"temperature": 1.0, "n": 2, "seed": 1}, {"drafter": "none"}):
        answer = ask(
            server, response_format=json_schema(SCHEMA), logit_bias=spaces, **settings
        ).json()
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            check(json.loads(choice["message"]["content"]))
    schema = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 12}
    named = {"response_format": json_schema(SCHEMA), "max_tokens": 12}
    greedy, again = (
        ask(server, **asked).json()["choices"][0]["message"]["content"] for asked in (named, schema)
    )
    assert greedy == again
    forms = {"regex": FORMS["regex"][1], "choice": ["yes", "no", 'perhaps. "so"\n?']}
    for name, form in forms.items():
        found = ask(server, structured_outputs={name: form}, max_tokens=25).json()
        text = found["choices"][0]["message"]["content"]
        assert text in form if name == "choice" else re.fullmatch(str(form), text)
    asked = {"response_format": {"type": "json_object"}, "max_tokens": 12}
    text = ask(server, **asked).json()["choices"][0]["message"]["content"]
    assert text.lstrip().startswith("{")


def test_logprobs_under_a_mask_are_of_the_tokens_that_may_come(server: LiveServer) -> None:
    answer = ask(
        server, structured_outputs={"choice": ["yes"]}, logprobs=True, top_logprobs=2
    ).json()
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert entry["logprob"] <= 0.0
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"response_format": json_schema({"type": "nothing"})}, None),
    ({"response_format": json_schema({"not": {"type": "string"}})}, None),
    ({"structured_outputs": {"regex": "(a"}}, None),
]


@pytest.mark.parametrize(("settings", "param"), BAD, ids=lambda value: str(value)[:60])
def test_forms_that_cannot_be_followed_are_refused(
    server: LiveServer, settings: Any, param: str | None
) -> None:
    answer = ask(server, **settings)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert "\n" not in answer.json()["error"]["message"]


@pytest.mark.slow
def test_a_form_that_becomes_too_large_ends_its_own_text(server: LiveServer) -> None:
    large = {f"k{index}": {"type": "string", "maxLength": index % 50 + 1} for index in range(2500)}
    form = {"structured_outputs": {"json": {"type": "object", "properties": large}}}
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(ask, server)
        refused = threads.submit(ask, server, **form).result()
    assert refused.status_code == 500
    assert "Current row has" in refused.json()["error"]["message"]
    assert other.result().json()["choices"] == ask(server).json()["choices"]
    server.wait_until_free()


def test_without_its_library_the_error_says_what_to_install(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with raises_naming(RequestInvalid, "pip install 'moa-data[structured]'"):
        Grammars(target)
