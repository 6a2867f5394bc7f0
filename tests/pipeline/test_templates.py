"""Chat templates end, give the same text on every day and with the recorded arguments, or are refused."""

import datetime as datetime_module
import json
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
from moa_data.pipeline.plan import ExtractPlan, build_plan, recorded_config
from moa_data.storage.read.store import read_manifest
from moa_data.tests.kit.chats import marked_texts, rejected
from moa_data.tests.kit.models import build_tokenizer
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE, LLAMA31_TEMPLATE, LLAMA32_DATE, QWEN3_TEMPLATE

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
        chat = tokenize_chat(ChatTemplate(tokenizer), CHAT, 400)
        assert isinstance(chat, TokenizedChat)
        found.append((chat.tokens.tolist(), prompt_tokens(ChatTemplate(tokenizer), CHAT[:1])))
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


DATED = "{% if not date_string is defined %}{% set date_string = strftime_now('%d') %}{% endif %}{{ date_string }}"


@pytest.mark.parametrize("template", [LLAMA3_TEMPLATE, DATED + LLAMA3_TEMPLATE])
def test_a_store_whose_template_does_not_ask_records_no_time(
    model: Path, chats_file: Path, tmp_path: Path, template: str
) -> None:
    (model / "chat_template.jinja").write_text(template)
    plan = build_plan(extraction(model, chats_file, tmp_path / "store"))
    assert "template_time" not in plan.manifest.extraction


# The end of Qwen3's template.
NO_THINKING = r"""{%- if add_generation_prompt %}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
CHAT_OF_TWO = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "second answer"},
]


def test_qwen3_writes_its_empty_thoughts_as_prompt_or_as_answer() -> None:
    tokenizer = build_tokenizer(QWEN3_TEMPLATE + NO_THINKING, bos=None, eos="<|im_end|>")
    plain, quick = (ChatTemplate(tokenizer, arguments) for arguments in ({}, {"enable_thinking": False}))
    answers = ["first answer<|im_end|>", "<think>\n\n</think>\n\nsecond answer<|im_end|>"]
    assert marked_texts(tokenizer, tokenize_chat(plain, CHAT_OF_TWO, 400)) == answers
    assert tokenizer.decode(prompt_tokens(plain, CHAT_OF_TWO[:1])).endswith("<|im_start|>assistant\n")
    found = tokenize_chat(quick, CHAT_OF_TWO, 400)
    assert marked_texts(tokenizer, found) == ["first answer<|im_end|>", "second answer<|im_end|>"]
    prompt = prompt_tokens(quick, CHAT_OF_TWO[:3])
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    # What generation begins with is what stood before the answer in training.
    assert isinstance(found, TokenizedChat)
    text, begun = tokenizer.decode(found.tokens), tokenizer.decode(prompt)
    assert text.startswith(begun)
    assert text.removeprefix(begun) == "second answer<|im_end|>\n"


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
    config = ExtractConfig.of(model="m", dataset="d", out="o", template_kwargs=texts)
    assert parse_template_arguments(config.data.template_kwargs) == expected
    assert parse_template_arguments(ExtractConfig.of(**config.named()).data.template_kwargs) == expected
    nested = {"model": "m", "dataset": "d", "out": "o", "data": {"template_kwargs": expected}}
    mapping = ExtractConfig.model_validate(nested)
    assert parse_template_arguments(mapping.data.template_kwargs) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thinking", "has 'thinking', expected NAME=VALUE"),
        ("{broken", "which is no JSON object"),
        ("tools=3", "has tools, which the template gets from elsewhere"),
        ("a b=3", "has 'a b', expected the name of a variable"),
    ],
)
def test_what_is_no_argument_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionInvalid, match=message):
        parse_template_arguments([text])


def test_drafters_bring_the_arguments_that_they_were_trained_with() -> None:
    trained = {"weights_sha256": "a", "template_kwargs": '{"enable_thinking": false}'}
    assert choose_template_arguments((), {}) == {}
    assert choose_template_arguments((), {"a": trained, "foreign": {}}) == {"enable_thinking": False}
    assert choose_template_arguments(("x=1",), {"a": trained}) == {"x": 1}
    with pytest.raises(OptionInvalid, match=r'a \{"enable_thinking": false\}; b \{\}.*--set template_kwargs'):
        choose_template_arguments((), {"a": trained, "b": {"weights_sha256": "a"}})


def test_the_store_records_them_and_an_audit_uses_them(config: ExtractConfig, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ greeting }}" + LLAMA3_TEMPLATE)
    config = config.replaced(model=str(model), template_kwargs="greeting=hello")
    extract(config)
    manifest = read_manifest(Path(config.out))
    assert manifest.extraction["template_kwargs"] == {"greeting": "hello"}
    assert recorded_config(Path(config.out)).data.template_kwargs == ("greeting=hello",)
    report = audit(config.out, config.model, samples=2, device="cpu")
    assert report.ok
    assert not report.notes
    with pytest.raises(StoreMismatch, match=r"template_kwargs\.greeting"):
        extract(config.replaced(template_kwargs="greeting=goodbye"))


def plan_of(target: Path, dataset: Path, tmp_path: Path, **options: Any) -> ExtractPlan:
    return build_plan(
        ExtractConfig.of(model=str(target), dataset=str(dataset), out=str(tmp_path / "out"), device="cpu", **options)
    )


def test_a_chat_beyond_any_context_is_rejected() -> None:
    messages = [{"role": "user", "content": "a" * MAX_CHAT_CHARS}, {"role": "assistant", "content": "b"}]
    rejected(tokenize_chat(ChatTemplate(build_tokenizer(LLAMA3_TEMPLATE)), messages, 100), RejectReason.TOO_LONG)


ENDLESS = [
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(900000) %}xxxxxxxx{% endfor %}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_that_does_not_end_is_refused_or_its_rows_are(template: str) -> None:
    messages = [{"role": "user", "content": "long question"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(TemplateError, match="the chat template does not end: "):
        ChatTemplate(build_tokenizer(template + LLAMA3_TEMPLATE))
    some = "{% if messages[0]['content'] | length > 5 %}" + template + "{% endif %}"
    if "macro" in template:
        some = template.replace("{{ again() }}{% endmacro %}{{ again() }}", "{{ again() }}{% endmacro %}")
        some += "{% if messages[0]['content'] | length > 5 %}{{ again() }}{% endif %}"
    guarded = ChatTemplate(build_tokenizer(some + LLAMA3_TEMPLATE))
    rejection = tokenize_chat(guarded, messages, 100)
    rejected(rejection, RejectReason.TEMPLATE_FAILED)
    assert isinstance(rejection, Rejection)
    assert rejection.detail
    short = [messages[0] | {"content": "short"}, messages[1]]
    assert not isinstance(tokenize_chat(guarded, short, 100), Rejection)


@pytest.mark.parametrize("fault", ["{{ 1 // (messages | length - 1) }}", "{{ messages[0].content.index('z') }}",
                                   "{{ [][7].upper() }}", "{{ messages[0]['content'].no.way }}"])  # fmt: skip
def test_whatever_a_template_raises_is_a_rejection(fault: str) -> None:
    guarded = "{% if messages | length != 1 %}" + fault + "{% endif %}" if "messages[0]" not in fault else fault
    tokenizer = build_tokenizer(guarded.replace("- 1)", "- 2)") + LLAMA3_TEMPLATE)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rejected(tokenize_chat(ChatTemplate(tokenizer), messages, 100), RejectReason.TEMPLATE_FAILED)


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


def test_a_plan_over_an_endless_template_is_refused(model: Path, chats_file: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").write_text(ENDLESS[0] + LLAMA3_TEMPLATE)
    with pytest.raises(TemplateError, match=r"model: the chat template does not end: .*Correct the template"):
        plan_of(model, chats_file, tmp_path)
    for program, name in (("{{ lipsum() }}", "lipsum"), ("{{ [1, 2] | random }}", "random")):
        (model / "chat_template.jinja").write_text(program + LLAMA3_TEMPLATE)
        with pytest.raises(TemplateError, match=f"the chat template uses {name}, so that equal chats"):
            plan_of(model, chats_file, tmp_path)
    (model / "chat_template.jinja").write_text("{% for m in messages %}")
    with pytest.raises(TemplateError, match="is no Jinja template"):
        plan_of(model, chats_file, tmp_path)
