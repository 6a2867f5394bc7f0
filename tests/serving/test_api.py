"""The settings of a request, and the content of the answer."""

import itertools
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
import torch

from moa_data.moa.decoding.loop import plain_generate
from moa_data.moa.targets.chat_tokens import prompt_tokens
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import build_drafter, teach
from moa_data.tests.kit.models import build_text_model, build_tokenizer
from moa_data.tests.kit.serving import MODEL, LiveServer, never_ending, plain_text, text_target
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE

HELLO = [{"role": "user", "content": "Hello there"}]
PROMPTS = ["the cat sat", "two small birds", "Hello"]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 3}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def target() -> Target:
    return text_target()


@pytest.fixture(scope="module")
def server(target: Target) -> Iterator[LiveServer]:
    prompts = [target.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    prompts.append(prompt_tokens(target.template, HELLO))
    drafter = teach(build_drafter(target.model), target, prompts, 20)
    with LiveServer(target, {"moa": drafter}, tree="4", max_new_tokens=200) as live:
        yield live


def post(server: LiveServer, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{server.address}{path}", json={"model": MODEL} | body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(server: LiveServer, prompt: Any = PROMPTS[0], **settings: Any) -> Any:
    return post(
        server,
        "/v1/completions",
        **({"prompt": prompt, "temperature": 0, "max_tokens": 12} | settings),
    )


def chat(server: LiveServer, **settings: Any) -> Any:
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 12} | settings
    return post(server, "/v1/chat/completions", **body)


def events(server: LiveServer, path: str, **body: Any) -> list[Any]:
    """Return the objects of a stream."""
    body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}} | body
    lines = httpx.post(f"{server.address}{path}", json=body, timeout=60).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [httpx.Response(200, text=line.removeprefix("data: ")).json() for line in lines[:-2]]


def texts(answer: Any) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [
        choice["text"] if "text" in choice else choice["message"]["content"]
        for choice in answer["choices"]
    ]


def test_several_answers_are_those_of_seeds_that_follow(server: LiveServer) -> None:
    sampled = SAMPLED | {"max_tokens": 5}
    answer = chat(server, n=3, **sampled)
    alone = [texts(chat(server, **(sampled | {"seed": seed})))[0] for seed in (3, 4, 5)]
    assert texts(answer) == alone
    assert len(set(alone)) == 3
    assert texts(chat(server, n=3, **sampled)) == alone, "again"
    assert texts(chat(server, n=3, drafter="none", **sampled)) == alone
    n_prompt = len(prompt_tokens(server.engine.target.template, HELLO))
    assert answer["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": 15,
        "total_tokens": n_prompt + 15,
    }
    assert len(set(texts(chat(server, n=3, temperature=1.0, max_tokens=6)))) == 3, "without a seed"
    server.wait_until_free()


def test_prompts_of_one_request_are_completed_as_alone(server: LiveServer, target: Target) -> None:
    tokens = [target.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    expected = [plain_text(target, prompt, 12) for prompt in tokens]
    for prompts in (PROMPTS, tokens):
        answer = complete(server, prompts)
        assert [text.rstrip("\ufffd") for text in texts(answer)] == expected
        assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))
        assert answer["usage"]["completion_tokens"] == 36
    sampled = SAMPLED | {"max_tokens": 4}
    several = texts(complete(server, PROMPTS, n=2, **sampled))
    assert several == [
        text for prompt in PROMPTS for text in texts(complete(server, prompt, n=2, **sampled))
    ]


def pairs(choice: Any) -> list[tuple[str, float]]:
    """Return the tokens of a choice with their log-probabilities."""
    logprobs = choice["logprobs"] or {"content": []}
    if "content" in logprobs:
        return [(entry["token"], entry["logprob"]) for entry in logprobs["content"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_several_answers_stream(server: LiveServer, path: str) -> None:
    is_chat = "chat" in path
    body = {"n": 3, "max_tokens": 8, "logprobs": True if is_chat else 1} | SAMPLED
    body |= {"messages": HELLO} if is_chat else {"prompt": PROMPTS[0]}
    whole, chunks = post(server, path, **body), events(server, path, **body)
    assert chunks.pop()["usage"] == whole["usage"]
    found, ends = [""] * 3, [0] * 3
    scores: list[list[tuple[str, float]]] = [[], [], []]
    for chunk in chunks:
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        index, delta = (
            choice["index"],
            choice.get("text") or choice.get("delta", {}).get("content") or "",
        )
        assert ends[index] == 0, "nothing after the end"
        found[index] += delta
        ends[index] += choice["finish_reason"] == "length"
        scores[index] += pairs(choice)
    assert found == texts(whole)
    assert ends == [1] * 3
    for choice, own in zip(whole["choices"], scores, strict=True):
        assert [token for token, _ in own] == [token for token, _ in pairs(choice)]
        assert [value for _, value in own] == pytest.approx(
            [value for _, value in pairs(choice)], abs=1e-4
        )
        assert len(own) == 8


def test_a_request_of_more_than_the_engine_takes_leaves_nothing(target: Target) -> None:
    with LiveServer(target, max_sequences=1, max_waiting=3) as server:
        body = {"model": MODEL, "prompt": PROMPTS[0], "n": 5}
        assert (
            httpx.post(f"{server.address}/v1/completions", json=body, timeout=60).status_code == 503
        )
        server.wait_until_free()
        assert len(texts(complete(server, n=4))) == 4


@pytest.mark.parametrize(
    "settings", [{}, SAMPLED, {"presence_penalty": 1.5, "frequency_penalty": 0.5}], ids=str
)
def test_logprobs_are_the_target_s_with_and_without_drafts(
    server: LiveServer, target: Target, settings: dict[str, Any]
) -> None:
    before = server.engine.snapshot().n_accepted
    found = complete(server, logprobs=3, **settings)["choices"][0]
    plain = complete(server, logprobs=3, drafter="none", **settings)["choices"][0]
    assert server.engine.snapshot().n_accepted > before
    assert found["text"] == plain["text"]
    assert found["logprobs"]["token_logprobs"] == pytest.approx(
        plain["logprobs"]["token_logprobs"], abs=1e-4
    )
    prompt = target.tokenizer(PROMPTS[0])["input_ids"]
    if not settings:
        written = plain_generate(target, prompt, max_new_tokens=12).tokens
        logits = target.model(torch.tensor([[*prompt, *written]])).logits[0, len(prompt) - 1 : -1]
        log_p = logits.log_softmax(-1)
        own = log_p.gather(1, torch.tensor(written)[:, None])[:, 0]
        assert found["logprobs"]["token_logprobs"] == pytest.approx(own.tolist(), abs=1e-4)
        assert found["logprobs"]["tokens"] == [
            target.tokenizer.decode([token]) for token in written
        ]
        for scored, row in zip(found["logprobs"]["top_logprobs"], log_p, strict=True):
            assert max(scored.values()) == pytest.approx(float(row.max()), abs=1e-4)
            assert len(scored) <= 4
    lengths = [len(token) for token in found["logprobs"]["tokens"]]
    assert found["logprobs"]["text_offset"] == [0, *itertools.accumulate(lengths)][:-1]


def test_logprobs_of_a_chat(server: LiveServer) -> None:
    answer = chat(server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert len(answer) == 12
    for entry in answer:
        first, second = entry["top_logprobs"]
        assert (first["token"], first["logprob"]) == (entry["token"], entry["logprob"]), (
            "it is greedy"
        )
        assert first["logprob"] >= second["logprob"]
        is_whole = "\ufffd" not in entry["token"]
        assert entry["bytes"] == (list(entry["token"].encode()) if is_whole else None)
    assert all(
        entry["top_logprobs"] == []
        for entry in chat(server, logprobs=True)["choices"][0]["logprobs"]["content"]
    )
    assert chat(server)["choices"][0]["logprobs"] is None


def test_a_developer_is_whom_the_template_names_or_the_system(
    server: LiveServer, target: Target
) -> None:
    def tokens(role: str) -> Any:
        return post(server, "/tokenize", messages=[{"role": role, "content": "Be brief"}, *HELLO])[
            "tokens"
        ]

    assert tokens("developer") == tokens("system") != tokens("user")
    knows = LLAMA3_TEMPLATE + "{# 'developer' #}"
    other = never_ending(build_text_model(), build_tokenizer(knows))
    with LiveServer(other) as server_of_other:
        messages = [{"role": "developer", "content": "Be brief"}, *HELLO]
        found = post(server_of_other, "/tokenize", messages=messages)["tokens"]
        assert "developer" in target.tokenizer.decode(found)


def test_tools_that_nobody_calls(server: LiveServer) -> None:
    """The template does not render tools, so they do not change the answer."""
    expected = texts(chat(server))
    assert texts(chat(server, tools=TOOLS, tool_choice="none")) == expected
    assert (
        texts(chat(server, tool_choice="none"))
        == texts(chat(server, tools=[], tool_choice="auto"))
        == expected
    )
    shows = LLAMA3_TEMPLATE.replace(
        "{% for m", "{% if tools %}{{ tools | tojson }}{% endif %}{% for m"
    )
    with LiveServer(never_ending(build_text_model(), build_tokenizer(shows))) as other:
        found = post(other, "/tokenize", messages=HELLO, tools=TOOLS)["tokens"]
        assert "weather" in other.engine.target.tokenizer.decode(found)
        assert chat(other, tools=TOOLS, tool_choice="none")["usage"]["prompt_tokens"] == len(found)


def test_ignore_eos(target: Target) -> None:
    ending = text_target()
    prompt = target.tokenizer(PROMPTS[0])["input_ids"]
    written = plain_generate(target, prompt, max_new_tokens=12).tokens
    ending.eos_token_ids = frozenset({written[5]})
    with LiveServer(ending, {"moa": build_drafter(ending.model)}, tree="3") as server:
        ended, whole = complete(server), complete(server, ignore_eos=True)
    assert ended["usage"]["completion_tokens"] == written.index(written[5]) + 1
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert (whole["usage"]["completion_tokens"], whole["choices"][0]["finish_reason"]) == (
        12,
        "length",
    )


def test_no_end_comes_before_min_tokens() -> None:
    """Neither a token nor a stop string ends the answer earlier, with drafts or without."""
    ending = text_target()
    prompt = ending.tokenizer(PROMPTS[0])["input_ids"]
    end = plain_generate(ending, prompt, max_new_tokens=12).tokens[2]
    ending.eos_token_ids = frozenset({end})
    shape: Any = {"max_tokens": 40, "logit_bias": {str(end): 100}, "logprobs": 1}
    with LiveServer(
        ending, {"moa": teach(build_drafter(ending.model), ending, [prompt], 8)}, tree="4"
    ) as server:
        for settings, least in (({}, (0, 7)), (SAMPLED, (1, 7)), ({"presence_penalty": 1}, (7,))):
            for n_least in least:
                asked = {"min_tokens": n_least} | shape | settings
                found, plain = (
                    complete(server, drafter=drafter, **asked) for drafter in ("moa", "none")
                )
                assert found["choices"][0]["text"] == plain["choices"][0]["text"]
                assert found["usage"]["completion_tokens"] == n_least + 1
                assert found["choices"][0]["finish_reason"] == "stop"
        stop = texts(complete(server, ignore_eos=True))[0][0]
        cut = complete(server, min_tokens=5, ignore_eos=True, max_tokens=40, stop=stop)
        assert cut["usage"]["completion_tokens"] > 5


def test_settings_of_sampling_reach_the_engine(server: LiveServer, target: Target) -> None:
    greedy = texts(complete(server))
    assert texts(complete(server, temperature=1.0, min_p=1.0)) == greedy
    token = target.tokenizer("x", add_special_tokens=False)["input_ids"][0]
    assert texts(complete(server, logit_bias={str(token): 100})) == ["x" * 12]
    assert texts(complete(server, logit_bias={str(token): 100}, **SAMPLED)) == ["x" * 12]
    unlike = texts(complete(server, max_tokens=10))
    for settings in (
        {"presence_penalty": 2},
        {"frequency_penalty": -1.5},
        {"repetition_penalty": 1.7},
    ):
        assert texts(complete(server, max_tokens=10, **settings)) != unlike
        with_drafts, without = (
            texts(complete(server, max_tokens=10, drafter=drafter, **(SAMPLED | settings)))
            for drafter in ("moa", "none")
        )
        assert with_drafts == without


def test_tokens_of_texts_and_texts_of_tokens(server: LiveServer, target: Target) -> None:
    tokens = target.tokenizer(PROMPTS[0])["input_ids"]
    found = post(server, "/tokenize", prompt=PROMPTS[0], return_token_strs=True)
    assert found == {
        "count": len(tokens), "max_model_len": server.engine.max_positions, "tokens": tokens,
        "token_strs": target.tokenizer.convert_ids_to_tokens(tokens),
    }  # fmt: skip
    assert (
        post(server, "/tokenize", prompt=PROMPTS[0], add_special_tokens=False)["tokens"]
        == tokens[1:]
    )
    assert post(server, "/tokenize", messages=HELLO)["tokens"] == prompt_tokens(
        target.template, HELLO
    )
    closed = post(server, "/tokenize", messages=HELLO, add_generation_prompt=False)["tokens"]
    assert closed == prompt_tokens(target.template, HELLO)[: len(closed)]
    assert post(server, "/detokenize", tokens=tokens) == {"prompt": target.tokenizer.decode(tokens)}


BAD = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, "messages"),
    ("/tokenize", {"prompt": "a", "tokens": [1]}, "tokens"),
    ("/detokenize", {"prompt": "a"}, "tokens"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
    ("/detokenize", {"tokens": [400]}, None),
    ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
    ("/v1/completions", {"prompt": ["a"] * 65, "n": 2}, "prompt"),
    ("/v1/completions", {"prompt": "a", "tools": TOOLS}, "tools"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=str)
def test_bad_requests_are_refused(
    server: LiveServer, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = httpx.post(f"{server.address}{path}", json={"model": MODEL} | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
