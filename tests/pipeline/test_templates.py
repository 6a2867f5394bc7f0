"""Chat templates end, give the same text on every day and with the recorded arguments, or are refused."""

import datetime as datetime_module
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from moa_data.errors import OptionInvalid, StoreMismatch, TemplateError
from moa_data.moa.targets import template as template_module
from moa_data.moa.targets.chat import Rejection, RejectReason
from moa_data.moa.targets.chat_tokens import TokenizedChat, prompt_tokens, tokenize_chat
from moa_data.moa.targets.template import (
    MAX_CHAT_CHARS,
    ChatTemplate,
    choose_template_arguments,
    parse_template_arguments,
)
from moa_data.pipeline.audit import audit
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.plan import build_plan, recorded_config
from moa_data.storage.read.store import read_manifest
from moa_data.tests.kit.chats import chat, marked_texts, rejected
from moa_data.tests.kit.models import build_tokenizer
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE, LLAMA31_TEMPLATE, LLAMA32_DATE, QWEN3_TEMPLATE

CHAT = chat("hi", "ho")["messages"]
TIMED = "{{ 'Now ' + strftime_now('%A %d %B %Y, %H:%M:%S') }}" + LLAMA3_TEMPLATE
DATED = "{% if not date_string is defined %}{% set date_string = strftime_now('%d') %}{% endif %}{{ date_string }}"


def on_day(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    """Let the clock of the library show another day."""

    class Clock(datetime_module.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Clock":
            return cls.fromisoformat(day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


@pytest.fixture
def templated(config: ExtractConfig, model: Path) -> Any:
    """An extraction in one part with another template."""

    def with_template(template: str, **changes: Any) -> ExtractConfig:
        (model / "chat_template.jinja").write_text(template + LLAMA3_TEMPLATE)
        return config.replaced(model=str(model), part_tokens=1 << 16, **changes)

    return with_template


@pytest.mark.parametrize("template", [TIMED, LLAMA32_DATE + LLAMA31_TEMPLATE, "{% set strf = strftime_now %}"
                                      "{{ strf('%Y') }}" + LLAMA3_TEMPLATE])  # fmt: skip
def test_tokens_and_prompts_are_those_of_one_day(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    found = []
    for day in ("2025-01-31", "2026-12-24T18:00:00"):
        on_day(monkeypatch, day)
        tokenizer = build_tokenizer(template)
        chat = tokenize_chat(ChatTemplate(tokenizer), CHAT, 400)
        assert isinstance(chat, TokenizedChat)
        found.append((chat.tokens.tolist(), prompt_tokens(ChatTemplate(tokenizer), CHAT[:1])))
        assert "2024" in tokenizer.decode(chat.tokens)
        # The library's own callers see the day that it is.
        assert day[:4] in tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert found[0] == found[1]


def test_a_store_is_resumed_and_audited_on_another_day_with_its_arguments(
    templated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = templated("{{ greeting }}{{ strftime_now('%A') }}", template_kwargs="greeting=hello")
    on_day(monkeypatch, "2025-01-31")
    assert extract(config).n_parts_done == 1
    extraction = read_manifest(Path(config.out)).extraction
    assert (extraction["template_time"], extraction["template_kwargs"]) == (
        "2024-07-26T00:00:00", {"greeting": "hello"},
    )  # fmt: skip
    on_day(monkeypatch, "2025-02-01")
    assert extract(config).n_parts_done == 0
    assert recorded_config(Path(config.out)).data.template_kwargs == ("greeting=hello",)
    report = audit(config.out, config.model, 4, 0, "cpu")
    assert report.ok
    assert not report.notes
    assert "tokenised again" in report.worst()["tokens"].detail
    with pytest.raises(StoreMismatch, match=r"template_kwargs\.greeting"):
        extract(config.replaced(template_kwargs="greeting=goodbye"))


@pytest.mark.parametrize("template", ["", DATED])
def test_a_store_whose_template_does_not_ask_records_no_time(templated: Any, template: str) -> None:
    assert "template_time" not in build_plan(templated(template)).manifest.extraction


# The end of Qwen3's template.
NO_THINKING = r"""{%- if add_generation_prompt %}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""


def test_qwen3_writes_its_empty_thoughts_as_prompt_or_as_answer() -> None:
    turns = chat("one", "first answer", "two", "second answer")["messages"]
    tokenizer = build_tokenizer(QWEN3_TEMPLATE + NO_THINKING, bos=None, eos="<|im_end|>")
    plain, quick = (ChatTemplate(tokenizer, arguments) for arguments in ({}, {"enable_thinking": False}))
    answers = ["first answer<|im_end|>", "<think>\n\n</think>\n\nsecond answer<|im_end|>"]
    assert marked_texts(tokenizer, tokenize_chat(plain, turns, 400)) == answers
    assert tokenizer.decode(prompt_tokens(plain, turns[:1])).endswith("<|im_start|>assistant\n")
    found = tokenize_chat(quick, turns, 400)
    assert marked_texts(tokenizer, found) == ["first answer<|im_end|>", "second answer<|im_end|>"]
    # What generation begins with is what stood before the answer in training.
    assert isinstance(found, TokenizedChat)
    text, begun = tokenizer.decode(found.tokens), tokenizer.decode(prompt_tokens(quick, turns[:3]))
    assert begun.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert text == begun + "second answer<|im_end|>\n"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ("enable_thinking=false", {"enable_thinking": False}),
        ("a=1,b=text,c=[],d=a=b", {"a": 1, "b": "text", "c": [], "d": "a=b"}),
        ('{"a": [1, 2], "b": {"c": null}}', {"a": [1, 2], "b": {"c": None}}),
        ("", {}),
    ],
)
def test_arguments_are_read(texts: str, expected: dict[str, object]) -> None:
    given = {"model": "m", "dataset": "d", "out": "o"}
    config = ExtractConfig.of(**given, template_kwargs=texts)
    nested = ExtractConfig.model_validate(given | {"data": {"template_kwargs": expected}})
    for each in (config, ExtractConfig.of(**config.named()), nested):
        assert parse_template_arguments(each.data.template_kwargs) == expected


@pytest.mark.parametrize("text", ["thinking", "{broken", "tools=3", "a b=3"])
def test_what_is_no_argument_is_refused(text: str) -> None:
    with pytest.raises(OptionInvalid, match=r"has|no JSON"):
        parse_template_arguments([text])


def test_drafters_bring_the_arguments_that_they_were_trained_with() -> None:
    trained = {"weights_sha256": "a", "template_kwargs": '{"enable_thinking": false}'}
    assert choose_template_arguments((), {}) == {}
    assert choose_template_arguments((), {"a": trained, "foreign": {}}) == {"enable_thinking": False}
    assert choose_template_arguments(("x=1",), {"a": trained}) == {"x": 1}
    with pytest.raises(OptionInvalid, match=r'a \{"enable_thinking": false\}; b \{\}.*--set template_kwargs'):
        choose_template_arguments((), {"a": trained, "b": {"weights_sha256": "a"}})


def test_a_chat_beyond_any_context_is_rejected() -> None:
    messages = chat("a" * MAX_CHAT_CHARS, "b")["messages"]
    rejected(tokenize_chat(ChatTemplate(build_tokenizer(LLAMA3_TEMPLATE)), messages, 100), RejectReason.TOO_LONG)


AGAIN = "{% macro again() %}{{ again() }}{% endmacro %}"
IF_LONG = "{% if messages[0]['content'] | length > 5 %}"


@pytest.mark.parametrize(
    ("macro", "endless"),
    [
        ("", "{% for i in range(10 ** 9) %}x{% endfor %}"),
        ("", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        ("", "{% for i in range(900000) %}xxxxxxxx{% endfor %}"),
        (AGAIN, "{{ again() }}"),
    ],
)
def test_a_template_that_does_not_end_is_refused_or_its_rows_are(macro: str, endless: str) -> None:
    with pytest.raises(TemplateError, match="the chat template does not end: "):
        ChatTemplate(build_tokenizer(macro + endless + LLAMA3_TEMPLATE))
    guarded = ChatTemplate(build_tokenizer(macro + IF_LONG + endless + "{% endif %}" + LLAMA3_TEMPLATE))
    rejection = tokenize_chat(guarded, chat("long question", "b")["messages"], 100)
    rejected(rejection, RejectReason.TEMPLATE_FAILED)
    assert isinstance(rejection, Rejection)
    assert rejection.detail
    assert not isinstance(tokenize_chat(guarded, chat("short", "b")["messages"], 100), Rejection)


@pytest.mark.parametrize("fault", ["{% if messages | length != 1 %}{{ 1 // (messages | length - 2) }}{% endif %}",
                                   "{{ messages[0].content.index('z') }}", "{{ messages[0]['content'].no.way }}",
                                   "{% if messages | length != 1 %}{{ [][7].upper() }}{% endif %}"])  # fmt: skip
def test_whatever_a_template_raises_is_a_rejection(fault: str) -> None:
    template = ChatTemplate(build_tokenizer(fault + LLAMA3_TEMPLATE))
    rejected(tokenize_chat(template, CHAT, 100), RejectReason.TEMPLATE_FAILED)


@pytest.mark.parametrize(
    "template",
    ["{{ '%2000000000d' % 1 }}", "{{ '%2000000000d' | format(1) }}", "{{ '%*d' % (2000000000, 1) }}",
     "{{ '{:>2000000000}'.format(1) }}", "{{ '%.2000000000f' % 1.5 }}", "{{ 'a'.center(2000000000) }}",
     "{{ 'a' * 20000 * 100000 }}", "{{ 'a' * 10 ** 9 }}"],
)  # fmt: skip
def test_a_template_that_pads_to_gigabytes_is_refused_before_it_is_compiled(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    real = template_module._compile_jinja_template  # type: ignore[attr-defined]

    def compile_nothing(text: str) -> Any:
        compiled.append(text)  # what computes with the constants of such a template would take gigabytes
        return real("")

    monkeypatch.setattr(template_module, "_compile_jinja_template", compile_nothing)
    with pytest.raises(TemplateError, match=r"2,000,000,000|by a power"):
        ChatTemplate(build_tokenizer(template + LLAMA3_TEMPLATE))
    assert compiled == [""]


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "model: the chat template does not end: .*Correct the template"),
        ("{{ lipsum() }}", "the chat template uses lipsum, so that equal chats"),
        ("{{ [1, 2] | random }}", "the chat template uses random, so that equal chats"),
        ("{% for m in messages %}", "is no Jinja template"),
    ],
)
def test_a_plan_over_a_template_that_cannot_be_used_is_refused(templated: Any, program: str, line: str) -> None:
    with pytest.raises(TemplateError, match=line):
        build_plan(templated(program))
