"""Our HTTP API answers as vLLM's own server does, for the same requests to the same target."""

import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.models import write_target
from moa_data.tests.kit.serving import MODEL, LiveServer, wait_for

PYTHON = Path(os.environ.get("MOA_DATA_VLLM", "none"))
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON.is_file(), reason="MOA_DATA_VLLM names no Python with vLLM"),
]
CLOSE = 1e-3  # largest difference of log-probabilities


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM has kernels for a few head sizes only.
    return write_target(tmp_path_factory.mktemp("target"), head_dim=32)


@pytest.fixture(scope="module")
def theirs(model: Path) -> Iterator[str]:
    """Start vLLM's server and yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    options = (
        f"--model {model} --served-model-name {MODEL} --port {port} --dtype float32 --enforce-eager"
    )
    guided = ["--structured-outputs-config", '{"backend": "guidance"}']
    words = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *options.split(), *guided]
    with (model / "log").open("w") as log:
        server = subprocess.Popen(
            words, env=environment, stdout=log, stderr=log, start_new_session=True
        )

    def is_up() -> bool:
        assert server.poll() is None, (model / "log").read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_for(is_up, 280)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


@pytest.fixture(scope="module")
def ours(model: Path) -> Iterator[str]:
    target = Target.load(str(model), device="cpu")
    with LiveServer(target, {"moa": build_drafter(target.model)}, tree="3") as server:
        yield server.address


def chat(
    said: str = "Hello there", role: str = "user", **settings: Any
) -> tuple[str, dict[str, Any]]:
    messages = [{"role": role, "content": said}]
    return "/v1/chat/completions", {
        "messages": messages,
        "max_tokens": 12,
        "temperature": 0,
    } | settings


def completion(prompt: Any = "the cat sat", **settings: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": prompt, "max_tokens": 12, "temperature": 0} | settings


TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
]
ENDS = {"1": 100}  # logit bias towards the EOS token
# Greedy sampling settings: vLLM refuses n > 1 at temperature 0.
GREEDY: dict[str, Any] = {"temperature": 1.0, "top_k": 1}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["cat", "small bird"]},
        "sings": {"type": "boolean"},
        "word": {"type": "string", "maxLength": 8, "pattern": "^[a-z]*$"},
    },
    "required": ["name", "sings", "word"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": chat(),
    "developer": chat(role="developer"),
    "no tools called": chat(tools=TOOLS, tool_choice="none"),
    "tool_choice without tools": chat(tool_choice="none"),
    "several": chat(n=3, seed=5, **GREEDY),
    "logprobs": chat(logprobs=True, top_logprobs=4),
    "logprobs of the tokens alone": chat(logprobs=True),
    "logprobs of sampling": chat(logprobs=True, top_logprobs=2, presence_penalty=1.0, **GREEDY),
    "ignore_eos": chat(ignore_eos=True, max_tokens=60),
    "top_k of all": chat(top_k=-1),
    "min_tokens": chat(min_tokens=20, max_tokens=40),
    "min_tokens and a likely end": chat(min_tokens=9, max_tokens=40, logit_bias=ENDS),
    "min_tokens and ignore_eos": chat(
        min_tokens=9, max_tokens=20, ignore_eos=True, logit_bias=ENDS
    ),
    "min_tokens and logprobs": chat(
        min_tokens=4, max_tokens=20, logprobs=True, top_logprobs=3, logit_bias=ENDS
    ),
    "min_tokens and a stop": chat(min_tokens=12, max_tokens=40, stop=["a", " t"]),
    "min_tokens and a choice": chat(min_tokens=9, structured_outputs={"choice": ["yes", "no"]}),
    "min_p": chat(temperature=1.0, min_p=1.0),
    "repetition_penalty": chat(repetition_penalty=1.6, max_tokens=30),
    "presence_penalty": chat(presence_penalty=1.9, max_tokens=30),
    "frequency_penalty": chat(frequency_penalty=1.1, max_tokens=30),
    "frequency_penalty below 0": chat(frequency_penalty=-0.7, max_tokens=30),
    "all penalties": chat(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, max_tokens=30
    ),
    "logit_bias": chat(logit_bias={"40": 100}),
    "logit_bias and penalties": chat(
        logit_bias={"40": 2.5, "300": -50}, repetition_penalty=1.4, max_tokens=30
    ),
    "stop": chat(stop=["a"], max_tokens=40),
    "completion": completion(),
    "token ids": completion([11, 40, 300]),
    "prompts": completion(["the cat sat", "two small birds", "a"]),
    "prompts of token ids": completion([[11, 40], [300, 301, 302]]),
    "prompts with several answers": completion(["the cat sat", "two small birds"], n=2, **GREEDY),
    "completion's logprobs": completion(logprobs=3),
    "prompts' logprobs": completion(["the cat sat", "two"], logprobs=0),
    "json_object": chat(response_format={"type": "json_object"}, max_tokens=40),
    "json_schema": chat(response_format=JSON_SCHEMA, max_tokens=60),
    "json_schema, sampled": chat(response_format=JSON_SCHEMA, max_tokens=60, **GREEDY),
    "json_schema of a completion": completion(response_format=JSON_SCHEMA, max_tokens=60),
    "json_schema and logprobs": chat(
        response_format=JSON_SCHEMA, logprobs=True, top_logprobs=1, max_tokens=20
    ),
    "regex": chat(structured_outputs={"regex": "(the|a) [a-z]{3,12}( and [a-z]+)?"}, max_tokens=40),
    "choice": chat(structured_outputs={"choice": ["yes", "no", 'perhaps "so"']}),
    "tokenize": ("/tokenize", {"prompt": "the cat sat", "return_token_strs": True}),
    "tokenize without special tokens": (
        "/tokenize",
        {"prompt": "the cat", "add_special_tokens": False},
    ),
    "tokenize a chat": ("/tokenize", {"messages": [{"role": "user", "content": "Hello there"}]}),
    "tokenize a closed chat": (
        "/tokenize",
        {"messages": [{"role": "user", "content": "Hello"}], "add_generation_prompt": False},
    ),
    "detokenize": ("/detokenize", {"tokens": [0, 11, 40, 300, 1]}),
}


def post(address: str, request: tuple[str, dict[str, Any]]) -> Any:
    path, body = request
    answer = httpx.post(address + path, json={"model": MODEL} | body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def choices_of(answer: Any) -> list[tuple[Any, ...]]:
    return [
        (
            choice["index"],
            shown(choice["text"] if "text" in choice else choice["message"]["content"]),
            choice["finish_reason"],
        )
        for choice in in_order(answer)
    ]


def shown(text: str) -> str:
    return text.rstrip("\ufffd")  # our server does not send an incomplete last character


def scored(choice: Any) -> list[tuple[str, float, dict[str, float]]]:
    """Return each token, its log-probability and those of the most likely tokens."""
    logprobs = choice["logprobs"]
    if logprobs is None:
        return []
    if "content" not in logprobs:
        return list(
            zip(
                logprobs["tokens"],
                logprobs["token_logprobs"],
                logprobs["top_logprobs"],
                strict=True,
            )
        )
    entries = logprobs["content"]
    return [
        (e["token"], e["logprob"], {t["token"]: t["logprob"] for t in e["top_logprobs"]})
        for e in entries
    ]


def is_whole(token: str) -> bool:
    """Return whether a token is text by itself.

    vLLM shows a token that is a part of a character as an empty string, or together with the tokens
    that complete the character.
    """
    return token != "" and token.isascii()


def check_logprobs(found: Any, expected: Any) -> None:
    own, others = (scored(choice) for choice in (found, expected))
    assert len(own) == len(others)
    for (token, value, top), (their_token, their_value, their_top) in zip(own, others, strict=True):
        assert value == pytest.approx(their_value, abs=CLOSE)
        assert token == their_token or not is_whole(token)
        common = {token for token in top.keys() & their_top if is_whole(token)}
        # vLLM lists the chosen token first. If it is not among the most likely tokens, vLLM drops
        # the last of those.
        assert len(common) >= sum(map(is_whole, top)) - 1
        for token in common:
            assert top[token] == pytest.approx(their_top[token], abs=CLOSE)


def test_json_follows_the_schema(model: Path, theirs: str, ours: str) -> None:
    # Without this bias the target writes white space between keys without end.
    tokenizer = Target.load(str(model), device="cpu").tokenizer
    spaces = {str(token): -100 for token in range(400) if tokenizer.decode([token]).isspace()}
    request = chat(response_format=JSON_SCHEMA, logit_bias=spaces, max_tokens=100)
    texts = [
        post(address, request)["choices"][0]["message"]["content"] for address in (ours, theirs)
    ]
    assert texts[0] == texts[1]
    value = json.loads(texts[0])
    assert value.keys() == {"name", "sings", "word"}
    assert value["name"] in ("cat", "small bird")
    assert isinstance(value["sings"], bool)


def in_order(answer: Any) -> list[Any]:
    return sorted(answer["choices"], key=lambda choice: choice["index"])


@pytest.mark.parametrize("name", REQUESTS)
def test_the_answer_is_vllm_s(theirs: str, ours: str, name: str) -> None:
    check_answer(theirs, ours, REQUESTS[name])


def check_answer(theirs: str, ours: str, request: tuple[str, dict[str, Any]]) -> None:
    found, expected = post(ours, request), post(theirs, request)
    if "choices" not in expected:
        assert found == expected | (
            {"max_model_len": found["max_model_len"]} if "count" in found else {}
        )
        return
    assert choices_of(found) == choices_of(expected), request
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][key] == expected["usage"][key]
    for own, their in zip(in_order(found), in_order(expected), strict=True):
        check_logprobs(own, their)


def random_request(seed: int) -> tuple[str, dict[str, Any]]:
    """Make a request with several random settings."""
    draw = random.Random(seed)
    most = draw.choice([1, 2, 8, 20, 40])
    settings: dict[str, Any] = {"max_tokens": most} | draw.choice(
        [{}, GREEDY, GREEDY | {"n": 2, "min_p": 0.5}]
    )
    choices: dict[str, list[Any]] = {
        "repetition_penalty": [0.7, 1.2, 1.8], "presence_penalty": [-1.5, 0.8, 2],
        "frequency_penalty": [-1.5, 0.8, 2],
        "logit_bias": [{"1": 6}, {"40": 2.5, "300": -100}], "min_tokens": [most // 2, most],
        "top_p": [0.3],
        "stop": ["a", ["e", "th"], [" "], ["ca", "t", "s"]],
        # Never both: with ignore_eos, vLLM goes on after a structured output, but our server never
        # ends it.
        draw.choice(["ignore_eos", "structured_outputs"]): [True],
    }  # fmt: skip
    for name, values in choices.items():
        if draw.random() < 0.35:
            settings[name] = draw.choice(values)
    if "structured_outputs" in settings:
        settings["structured_outputs"] = draw.choice(
            [{"regex": "(the|a) [a-z]{3,12}"}, {"choice": ["yes", "maybe so"]}]
        )
    said = draw.choice(
        ["Hello there", "the cat sat", "a", "two small birds sing in some tall green trees"]
    )
    if draw.random() < 0.5:
        return chat(said, **settings, logprobs=draw.random() < 0.3)
    return completion(said, **settings)


@pytest.mark.parametrize("seed", range(60))
def test_answers_to_random_requests_are_vllm_s(theirs: str, ours: str, seed: int) -> None:
    check_answer(theirs, ours, random_request(seed))


def streamed(address: str, request: tuple[str, dict[str, Any]]) -> tuple[dict[int, str], list[int]]:
    """Stream a response; return the text of each choice, and the usage."""
    path, body = request
    body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}} | body
    lines = httpx.post(address + path, json=body, timeout=120).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + piece
    usage = chunks[-1]["usage"]
    return {index: shown(text) for index, text in texts.items()}, [
        usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")
    ]


@pytest.mark.parametrize("name", ["chat", "several", "prompts with several answers", "regex"])
def test_streams_are_vllm_s(theirs: str, ours: str, name: str) -> None:
    assert streamed(ours, REQUESTS[name]) == streamed(theirs, REQUESTS[name])
