"""What the user passes to a chat template shapes the texts, is recorded, and is used wherever prompts are rendered."""

from pathlib import Path

import pytest

from moa_data.errors import OptionInvalid, StoreMismatch
from moa_data.moa.targets.chat_tokens import TokenizedChat, check_template, prompt_tokens, tokenize_chat
from moa_data.moa.targets.template import choose_template_arguments, control_tokens, parse_template_arguments
from moa_data.pipeline.audit import audit
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract
from moa_data.pipeline.sources import recorded_config
from moa_data.storage.read.store import read_manifest
from moa_data.tests.kit.chats import marked_texts
from moa_data.tests.kit.models import build_tokenizer
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE, QWEN3_TEMPLATE

# The end of Qwen3's template.
NO_THINKING = r"""{%- if add_generation_prompt %}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "second answer"},
]


def test_qwen3_writes_its_empty_thoughts_as_prompt_or_as_answer() -> None:
    tokenizer = build_tokenizer(QWEN3_TEMPLATE + NO_THINKING, bos=None, eos="<|im_end|>")
    check_template(tokenizer, "qwen3")
    answers = ["first answer<|im_end|>", "<think>\n\n</think>\n\nsecond answer<|im_end|>"]
    assert marked_texts(tokenizer, tokenize_chat(tokenizer, CHAT, 400)) == answers
    assert tokenizer.decode(prompt_tokens(tokenizer, CHAT[:1])).endswith("<|im_start|>assistant\n")

    check_template(tokenizer, "qwen3", {"enable_thinking": False})
    found = tokenize_chat(tokenizer, CHAT, 400)
    assert marked_texts(tokenizer, found) == ["first answer<|im_end|>", "second answer<|im_end|>"]
    prompt = prompt_tokens(tokenizer, CHAT[:3])
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    # What generation begins with is what stood before the answer in training.
    assert isinstance(found, TokenizedChat)
    text, begun = tokenizer.decode(found.tokens), tokenizer.decode(prompt)
    assert text.startswith(begun)
    assert text.removeprefix(begun) == "second answer<|im_end|>\n"


def test_what_is_known_of_a_template_is_known_for_its_arguments() -> None:
    template = "{{ marker }}" + LLAMA3_TEMPLATE
    tokenizer = build_tokenizer(template)
    tokenizer.add_tokens(["<|odd|>"])
    check_template(tokenizer, "here")
    assert not control_tokens(tokenizer).everywhere.search("<|odd|>")
    check_template(tokenizer, "here", {"marker": "<|odd|>"})
    assert control_tokens(tokenizer).everywhere.search("<|odd|>")


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
