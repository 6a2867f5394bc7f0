"""Masks cover exactly what the assistant writes, from a single rendering of each chat."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from moa_data.demo.target import CHAT_TEMPLATE
from moa_data.errors import TemplateError
from moa_data.moa.targets.chat import RejectReason
from moa_data.moa.targets.chat_tokens import TokenizedChat, prompt_tokens, tokenize_chat
from moa_data.moa.targets.template import ChatTemplate, template_source
from moa_data.tests.kit.chats import marked_texts, rejected
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import build_tokenizer
from moa_data.tests.kit.templates import (
    ALTERNATING_TEMPLATE,
    CHATML_TEMPLATE,
    HARMONY_TEMPLATE,
    HERMES_TEMPLATE,
    LLAMA3_TEMPLATE,
    MISTRAL_TEMPLATE,
    QWEN3_TEMPLATE,
)

Messages = list[dict[str, str]]

TEMPLATES = {
    "llama3": (LLAMA3_TEMPLATE, "<|begin_of_text|>", "<|eot_id|>"),
    "chatml": (CHATML_TEMPLATE, None, "<|im_end|>"),
    "mistral": (MISTRAL_TEMPLATE, "<|begin_of_text|>", "</s>"),
    "generation": (CHAT_TEMPLATE, "<|begin_of_text|>", "<|eot_id|>"),
}
CONTENTS = [
    "a short answer",
    "日本語のテキスト と émojis 👩‍👩‍👧 mixed",
    "def f(x):\n    if x:\n\n        return  x\n\treturn None",
    "spaces   in    between\n\n\nand lines",
    "assistant",
    "user\n",
    "ends with a newline\n",
]


CALL = {"id": "abcdefghi", "type": "function",
        "function": {"name": "now", "arguments": {"zone": "utc"}}}  # fmt: skip
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "The time?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "12:00", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "It is noon."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "You are welcome."},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "Tells the time.",
            "parameters": {
                "type": "object",
                "properties": {"zone": {"type": "string", "description": "A time zone."}},
                "required": ["zone"],
            },
        },
    }
]


def turns(*contents: str) -> Messages:
    return [
        {"role": "user" if i % 2 == 0 else "assistant", "content": text}
        for i, text in enumerate(contents)
    ]


def make(name: str) -> tuple[Any, str]:
    template, bos, eos = TEMPLATES[name]
    return build_tokenizer(template, bos, eos), eos


def tokenized(tokenizer: Any, messages: Messages, max_length: int = 4096) -> TokenizedChat:
    chat = tokenize_chat(ChatTemplate(tokenizer), messages, max_length)
    assert isinstance(chat, TokenizedChat), chat
    return chat


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", CONTENTS)
def test_mask_covers_exactly_the_responses_of_three_turns(name: str, content: str) -> None:
    tokenizer, eot = make(name)
    answers = ["first", content, "last " + content]
    chat = tokenized(
        tokenizer, turns("one?", answers[0], "two " + content, answers[1], "three", answers[2])
    )
    found = marked_texts(tokenizer, chat)
    trims = name in ("llama3", "generation")
    assert [text.removesuffix(eot).lstrip(" ") for text in found] == [
        a.strip() if trims else a for a in answers
    ]
    assert all(text.endswith(eot) for text in found)


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_the_mask_of_generation_tags_are_those_of_transformers(name: str) -> None:
    tokenizer, _ = make(name)
    messages = turns("hello", "hi there", "how?", "well, thanks")
    chat, has_tags = tokenized(tokenizer, messages), name == "generation"
    assert chat.tokens.dtype == np.int32
    assert chat.response_mask.dtype == np.uint8
    expected = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=has_tags
    )
    assert chat.tokens.tolist() == expected["input_ids"]
    assert not has_tags or chat.response_mask.tolist() == expected["assistant_masks"]
    # White space at the border may be tokenized differently, so the texts are compared.
    assert tokenizer.decode(chat.tokens).startswith(
        tokenizer.decode(prompt_tokens(ChatTemplate(tokenizer), messages[:3])).rstrip()
    )


LOOP = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
)
REST = "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        # White space after the end of turn is not part of the response. An end of turn outside the
        # tags is.
        LOOP + "{%- generation -%}{{ m['content'] + '<|im_end|>\n' }}{%- endgeneration -%}" + REST,
        LOOP + "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}" + REST,
        # Headers are not part of the response, also without a generation prompt.
        CHATML_TEMPLATE.split("{% if add_generation_prompt")[0],
        # The generation prompt is not a prefix of the rendering, so the text is searched for.
        CHATML_TEMPLATE.replace(
            "assistant\\n' }}{% endif", "assistant\\n<think>' }}{% endif"
        ).replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif"),
    ],
    ids=["inside", "outside", "no prompt", "no prefix"],
)
def test_end_of_turn_and_headers(template: str) -> None:
    tokenizer = build_tokenizer(template, None, "<|im_end|>")
    for content in ("assistant", "a b", "\nlines\n"):
        found = marked_texts(tokenizer, tokenized(tokenizer, turns("q", content, "q2", "ok")))
        assert found == [content + "<|im_end|>", "ok<|im_end|>"]


def test_answers_of_harmony_have_their_channels_and_ends() -> None:
    """gpt-oss writes such responses after a generation prompt that stops before the channel."""
    tokenizer = build_tokenizer(HARMONY_TEMPLATE, None, "<|return|>")
    names = ("start", "end", "message", "channel", "call", "return")
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
    found = marked_texts(
        tokenizer, tokenized(tokenizer, turns("q", "one", "q2", "two", "q3", "three"))
    )
    head = "<|channel|>final<|message|>"
    assert found == [f"{head}one<|end|>", f"{head}two<|end|>", f"{head}three<|return|>"]
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "utc"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "the time?"},
        {"role": "assistant", "content": "I ask", "tool_calls": [call]},
        {"role": "tool", "content": "noon"}, {"role": "assistant", "content": "noon"},
    ]  # fmt: skip
    chat = tokenize_chat(
        ChatTemplate(tokenizer), messages, 4096, tools=[{"type": "function", **call}]
    )
    asked = (
        "<|channel|>analysis<|message|>I ask<|end|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json"
    )
    called = '<|message|>{"zone": "utc"}<|call|>'
    assert marked_texts(tokenizer, chat) == [asked + called, f"{head}noon<|return|>"]


def test_a_token_that_ends_the_text_is_not_part_of_the_last_answer() -> None:
    """Phi-3 writes <|endoftext|> after the end of the last turn."""
    template = LOOP + "{{ m['content'] + '<|im_end|>\n' }}" + REST
    template += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '</s>' }}{% endif %}"
    tokenizer = build_tokenizer(template, None, "</s>")
    chat = tokenized(tokenizer, turns("q", "one", "q2", "two"))
    assert marked_texts(tokenizer, chat) == ["one<|im_end|>", "two<|im_end|>"]
    assert tokenizer.decode(chat.tokens).endswith("two<|im_end|>\n</s>")


def test_an_end_of_turn_may_be_two_tokens() -> None:
    """Command R7B writes <|END_RESPONSE|><|END_OF_TURN_TOKEN|> after each answer."""
    both = "<|eot_id|><|im_end|>"
    template = LOOP + "{{ m['content'] + '" + both + "' }}" + REST
    template += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    tokenizer = build_tokenizer(template, None, "<|im_end|>")
    chat = tokenized(tokenizer, turns("q", "one", "q2", "two"))
    assert marked_texts(tokenizer, chat) == ["one" + both, "two" + both]


@pytest.mark.parametrize("start", ["", "{{ bos_token }}You help.\n", "<|system|>You help<|end|>\n"])
@pytest.mark.parametrize("end", ["<|im_end|>\n", "<|eot_id|><|im_end|>"])
def test_a_token_that_starts_turns_does_not_end_them(end: str, start: str) -> None:
    """Some templates write the generation prompt after every chat."""
    template = start + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    template += "{{ '" + end + "' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
    tokenizer = build_tokenizer(template, None, "<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|eot_id|>"]})
    chat = tokenized(tokenizer, turns("q", "one", "q2", "two"))
    assert marked_texts(tokenizer, chat) == ["one" + end.rstrip(), "two" + end.rstrip()]


def test_an_answer_may_begin_in_the_generation_prompt() -> None:
    """The generation prompts of Qwen3's thinking models end with <think>."""
    prompt = "'<|im_start|>assistant\\n' }}"
    assert prompt in QWEN3_TEMPLATE
    tokenizer = build_tokenizer(
        QWEN3_TEMPLATE.replace(prompt, "'<|im_start|>assistant\\n<think>\\n' }}"),
        None,
        "<|im_end|>",
    )
    answer = "<think>\na thought\n</think>\n\nten"
    messages = turns("two times five?", answer)
    chat = tokenized(tokenizer, messages)
    assert marked_texts(tokenizer, chat) == [answer + "<|im_end|>"]
    cut = tokenize_chat(ChatTemplate(tokenizer), messages, 4096, is_cut=True)
    assert isinstance(cut, TokenizedChat)
    assert marked_texts(tokenizer, cut) == [answer]
    assert tokenizer.decode(cut.tokens).count("<think>") == 1


def test_results_of_tools_inside_a_response_are_refused() -> None:
    """Gemma 4's templates write a call, its result, and then the content of the call's message."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        "{% for c in m.tool_calls or [] %}"
        "{{ 'call:' + c.function.name + (c.function.arguments | tojson) }}"
        "{{ messages[2].content if messages | length > 2 }}{% endfor %}"
        "{{ m.content + '<|im_end|>' }}"
        "{% elif m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = build_tokenizer(template, None, "<|im_end|>")
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "utc"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "the time?"},
        {"role": "assistant", "content": "I ask", "tool_calls": [call]},
        {"role": "tool", "content": "noon"},
    ]  # fmt: skip
    rejected(
        tokenize_chat(ChatTemplate(tokenizer), messages, 99),
        RejectReason.TEMPLATE_REWRITES_RESPONSE,
    )


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (CHATML_TEMPLATE.replace("m['content']", "m['content'].upper()"), turns("q", "one"),
         RejectReason.NOT_SHOWN),
        (CHATML_TEMPLATE.replace("m['content']", "m['content'].replace('one', 'two')"),
         turns("q", "one"), RejectReason.TEMPLATE_REWRITES_RESPONSE),
        (MISTRAL_TEMPLATE, turns("q", "a")[::-1], RejectReason.TEMPLATE_FAILED),
    ],
)  # fmt: skip
def test_what_a_template_does_not_show_is_rejected(
    template: str, messages: Messages, reason: RejectReason
) -> None:
    tokenizer = build_tokenizer(template, None, "<|im_end|>")
    rejected(tokenize_chat(ChatTemplate(tokenizer), messages, 100), reason)


def test_truncation_cuts_tokens_and_mask_together() -> None:
    tokenizer, _ = make("llama3")
    messages = turns("question", "a long answer " * 20)
    whole = tokenized(tokenizer, messages)
    cut = tokenized(tokenizer, messages, 40)
    assert cut.truncated
    assert not whole.truncated
    assert cut.tokens.tolist() == whole.tokens[:40].tolist()
    assert cut.response_mask.tolist() == whole.response_mask[:40].tolist()
    rejected(tokenize_chat(ChatTemplate(tokenizer), messages, 4), RejectReason.TRUNCATED_AWAY)


@pytest.mark.parametrize("prefix", ["", "{{ bos_token }}"])
def test_a_bos_is_there_if_the_template_writes_one_as_in_transformers(prefix: str) -> None:
    template = prefix + LLAMA3_TEMPLATE.removeprefix("{{ bos_token }}")
    tokenizer = build_tokenizer(template)
    messages = turns("q", "one", "q", "two")
    chat = tokenized(tokenizer, messages)
    assert chat.tokens.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    assert (chat.tokens == tokenizer.bos_token_id).sum() == bool(prefix)
    assert marked_texts(tokenizer, chat) == ["one<|eot_id|>", "two<|eot_id|>"]
    prompt = prompt_tokens(ChatTemplate(tokenizer), turns("q"))
    assert prompt == tokenizer.apply_chat_template(
        turns("q"), add_generation_prompt=True, return_dict=False
    )


def test_an_end_of_turn_between_turns_is_trained_where_a_last_response_has_none() -> None:
    between = CHATML_TEMPLATE.replace(
        "+ '<|im_end|>\n' }}", "+ ('' if loop.last else '<|im_end|>\n') }}"
    )
    template = ChatTemplate(build_tokenizer(between, None, "<|im_end|>"))
    assert not template.text_after_last
    chat = tokenize_chat(template, turns("q", "one", "q", "two"), 100)
    assert marked_texts(template.tokenizer, chat) == ["one<|im_end|>", "two"]
    chat = tokenize_chat(template, turns("q", "one\n", "q", "two \n"), 100)
    assert marked_texts(template.tokenizer, chat) == ["one\n<|im_end|>", "two \n"]
    never = CHATML_TEMPLATE.replace("+ '<|im_end|>\n' }}", "}}")
    template = ChatTemplate(build_tokenizer(never, None, "<|im_end|>"))
    assert template.end_of_turn == ""  # the header of the next turn is not an end of turn


@pytest.mark.parametrize(
    "start", ["", "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"]
)
def test_an_end_of_turn_that_other_turns_have_too_is_trained(start: str) -> None:
    """Qwen 1.5 writes a system turn of its own, and no end after the last message."""
    other = CHATML_TEMPLATE.replace(
        "+ '<|im_end|>\n' }}",
        "+ ('' if loop.last and m['role'] == 'assistant' else '<|im_end|>\n') }}",
    )
    assert other != CHATML_TEMPLATE
    template = ChatTemplate(build_tokenizer(start + other, None, "<|im_end|>"))
    assert template.end_of_turn == "<|im_end|>"
    chat = tokenize_chat(template, turns("q", "one", "q", "two"), 100)
    assert marked_texts(template.tokenizer, chat) == ["one<|im_end|>", "two"]


@pytest.mark.parametrize("also", ["", "<|im_end|>"])
@pytest.mark.parametrize("start", ["", "You help.\n", "<|begin_of_text|>You help.<|im_end|>\n"])
def test_tokens_that_only_start_turns_are_not_trained_as_their_end(start: str, also: str) -> None:
    """Baichuan and GLM-4 write one token before each turn. A template may also write two."""
    text = start + "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|answer|>' }}"
    text += also + "{{ m.content }}{% endfor %}"
    text += "{% if add_generation_prompt %}<|answer|>" + also + "{% endif %}"
    tokenizer = build_tokenizer(text, "<|begin_of_text|>", "<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|answer|>"]})
    chat = tokenized(tokenizer, turns("q", "one", "q", "two"))
    assert marked_texts(tokenizer, chat) == ["one", "two"]


@pytest.mark.parametrize(
    ("end", "last"),
    [
        ("'<|im_end|>\n'", "<|im_end|>"),
        # Apriel closes a turn only if another turn follows.
        ("('' if loop.last else '\n<|im_end|>\n\n')", ""),
    ],
)
def test_a_header_without_a_generation_prompt_is_not_trained(end: str, last: str) -> None:
    """Some templates write no generation prompt after a response, but the header of the next one."""
    text = CHATML_TEMPLATE.replace("'<|im_end|>\n'", end).replace(
        "if add_generation_prompt", "if add_generation_prompt and messages[-1].role != 'assistant'"
    )
    template = ChatTemplate(build_tokenizer(text, None, "<|im_end|>"))
    messages = turns("q", "one", "q", "two")
    messages.insert(2, {"role": "assistant", "content": "more"})
    chat = tokenize_chat(template, messages, 100)
    between = template.end_of_turn
    expected = ["one" + between, "more" + between, "two" + last]
    assert between.strip() == "<|im_end|>"
    assert marked_texts(template.tokenizer, chat) == expected
    chat = tokenize_chat(template, messages[:3], 100)
    assert marked_texts(template.tokenizer, chat) == ["one" + between, "more" + last]


def test_a_first_response_whose_end_of_turn_is_unlike_the_last_one_is_rejected() -> None:
    template = ChatTemplate(build_tokenizer(HARMONY_TEMPLATE, None, "<|return|>"))
    messages = [{"role": "assistant", "content": "Hello."}, *turns("q", "one")]
    rejected(tokenize_chat(template, messages, 200), RejectReason.TEMPLATE_REWRITES_RESPONSE)


def test_a_template_for_tools_is_used_for_chats_with_tools_alone() -> None:
    with_tools = (
        "{% if tools %}{{ 'Call one of ' + (tools | tojson) }}{% endif %}" + CHATML_TEMPLATE
    )
    tokenizer = build_tokenizer(None, None, "<|im_end|>")
    tokenizer.chat_template = {"default": CHATML_TEMPLATE, "tool_use": with_tools}
    tools = [
        {
            "type": "function",
            "function": {"name": "now", "description": "The time.", "parameters": {}},
        }
    ]
    messages = turns("q", "one")
    for asked in (None, tools):
        chat = tokenize_chat(ChatTemplate(tokenizer), messages, 400, asked)
        assert isinstance(chat, TokenizedChat), chat
        assert chat.tokens.tolist() == tokenizer.apply_chat_template(
            messages, tools=asked, return_dict=False
        )
        assert ("Call one of" in tokenizer.decode(chat.tokens)) == bool(asked)
        prompt = prompt_tokens(ChatTemplate(tokenizer), messages[:1], asked)
        assert prompt == tokenizer.apply_chat_template(
            messages[:1], tools=asked, add_generation_prompt=True, return_dict=False
        )
    # Both templates decide what a store's tokens are, so both are part of the source.
    other = build_tokenizer(CHATML_TEMPLATE, None, "<|im_end|>")
    assert template_source(tokenizer) != template_source(other)


def test_ends_of_turns_are_trained_where_a_template_refuses_chats_without_tools() -> None:
    """Hermes 2 Pro publishes such a template for chats with tools."""
    tokenizer = build_tokenizer(None, None, "<|im_end|>")
    tokenizer.chat_template = {
        "default": CHATML_TEMPLATE,
        "tool_use": "{% for tool in tools %}{% endfor %}" + HERMES_TEMPLATE,
    }
    template = ChatTemplate(tokenizer)
    chat = tokenize_chat(template, CALLING, 4096, TOOLS)
    called = '<tool_call>\n{"name": "now", "arguments": {"zone": "utc"}}\n</tool_call>'
    assert marked_texts(tokenizer, chat) == [
        f"{called}<|im_end|>", "It is noon.<|im_end|>", "You are welcome.<|im_end|>",
    ]  # fmt: skip
    # The tool of the test chats never reaches a prompt.
    with raises_naming(TemplateError, "self_prompted"):
        template.for_tools(TOOLS).open_user_turn()


def test_calls_are_trained_without_a_generation_prompt() -> None:
    """Mistral's templates refuse a chat in which an answer without calls replaces a call."""
    tokenizer = build_tokenizer(ALTERNATING_TEMPLATE, eos="</s>")
    template = ChatTemplate(tokenizer)
    assert not template.has_generation_prompt
    called = '[CALL]now[ARGS]{"zone": "utc"}</s>'
    answered = [called, "It is noon.</s>"]
    # The template writes the tools before the last question.
    chat = tokenize_chat(template, CALLING, 4096, TOOLS)
    assert marked_texts(tokenizer, chat) == [*answered, "You are welcome.</s>"]
    chat = tokenize_chat(template, [*CALLING, *CALLING[:2]], 4096, TOOLS)
    assert marked_texts(tokenizer, chat) == [*answered, "You are welcome.</s>", called]
    again = [*CALLING[:3], *CALLING[1:4]]
    assert marked_texts(tokenizer, tokenize_chat(template, again, 4096)) == [called, *answered]


def test_a_template_may_refuse_the_beginning_of_a_chat() -> None:
    """Qwen3.5's template refuses a chat without a question."""
    refusing = (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('No question.') }}{% endif %}" + CHATML_TEMPLATE
    )
    template = ChatTemplate(build_tokenizer(refusing, None, "<|im_end|>"))
    messages = [{"role": "system", "content": "Help."}, *turns("q", "one")]
    messages.insert(1, {"role": "assistant", "content": "Hello."})
    chat = tokenize_chat(template, messages, 100)
    assert marked_texts(template.tokenizer, chat) == ["Hello.<|im_end|>", "one<|im_end|>"]


def test_threads_that_share_a_template_render_what_one_thread_does() -> None:
    timed = "{{ strftime_now('%d %b %Y') }}" + CHATML_TEMPLATE
    template = ChatTemplate(build_tokenizer(timed, None, "<|im_end|>"))
    short = turns("hi")
    long = turns(*(f"message {number}" for number in range(101)))
    expected = {len(chat): prompt_tokens(template, chat) for chat in (short, long)}

    def encode(number: int) -> bool:
        chat = long if number % 4 == 0 else short
        return (
            prompt_tokens(copy.deepcopy(template) if number % 5 == 0 else template, chat)
            == expected[len(chat)]
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(encode, range(200)))


def test_no_chat_template_is_refused() -> None:
    with raises_naming(TemplateError, "chat_template.jinja"):
        ChatTemplate(build_tokenizer(None))
    with raises_naming(TemplateError, "alternate"):
        prompt_tokens(ChatTemplate(make("mistral")[0]), turns("q", "a")[::-1])


THINKING = "<think>\nfirst I"
CUT: dict[str, tuple[str, str, str, str]] = {
    # Name -> template, end of turn, the target's answer, and the text before it.
    "llama3": (LLAMA3_TEMPLATE, "<|eot_id|>", "It is 4, \n", "assistant<|end_header_id|>\n\n"),
    "chatml": (CHATML_TEMPLATE, "<|im_end|>", "It is 4,", "<|im_start|>assistant\n"),
    "mistral": (MISTRAL_TEMPLATE, "</s>", "It is 4,", "[/INST]"),
    "qwen3": (QWEN3_TEMPLATE, "<|im_end|>", THINKING, "<|im_start|>assistant\n"),
}


@pytest.mark.parametrize("name", CUT)
def test_nothing_follows_an_answer_that_was_cut(name: str) -> None:
    text, end, answer, before = CUT[name]
    tokenizer = build_tokenizer(text, "<|begin_of_text|>", end)
    messages = turns("one?", "1", "two?", answer)
    chat = tokenize_chat(ChatTemplate(tokenizer), messages, 400, is_cut=True)
    assert isinstance(chat, TokenizedChat), chat
    first, last = marked_texts(tokenizer, chat)
    assert first.endswith("1" + end)
    assert last.strip() == answer.strip()
    assert tokenizer.decode(chat.tokens).removesuffix(last).rstrip(" ").endswith(before.rstrip(" "))
    assert chat.response_mask[-1] == 1


def test_a_chat_that_ends_with_a_question_or_a_call_has_no_cut_answer() -> None:
    tokenizer, _ = make("chatml")
    template = ChatTemplate(tokenizer)
    messages = turns("one?", "1", "two?")
    whole, cut = (tokenize_chat(template, messages, 400, is_cut=is_cut) for is_cut in (False, True))
    assert isinstance(whole, TokenizedChat)
    assert isinstance(cut, TokenizedChat)
    assert cut.tokens.tolist() == whole.tokens.tolist()


@pytest.mark.parametrize("thought", ["", "<think></think>"])
def test_a_cut_answer_does_not_follow_text_that_no_prompt_contains(thought: str) -> None:
    """Command R7B writes a prompt after every chat, and a tag before each complete answer."""
    text = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ ('<answer>' if m.role == 'assistant' else '') + m.content + '<|im_end|>' }}"
        "{% endfor %}{{ '<|im_start|>assistant\n" + thought + "' }}"
    )
    template = ChatTemplate(build_tokenizer(text, None, "<|im_end|>"))
    assert not template.has_generation_prompt
    messages = turns("q", "one", "q", "two")
    assert isinstance(tokenize_chat(template, messages, 200), TokenizedChat)
    found = tokenize_chat(template, messages, 200, is_cut=True, is_generated=False)
    rejected(found, RejectReason.TEMPLATE_REWRITES_RESPONSE, "cut off")
    # The target itself writes an answer directly after the prompt.
    generated = tokenize_chat(template, messages[:2], 200, is_cut=True, is_generated=True)
    assert isinstance(generated, TokenizedChat)
    assert marked_texts(template.tokenizer, generated) == ["one"]
    assert template.tokenizer.decode(generated.tokens).endswith(f"assistant\n{thought}one")


@pytest.mark.parametrize("end", ["\n\n", " END\n"])
def test_the_next_turn_is_not_part_of_an_end_without_control_tokens(end: str) -> None:
    template = "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '" + end + "' }}"
    tokenizer = build_tokenizer(template + "{% endfor %}{{ '### assistant:\n' }}", None, "</s>")
    assert ChatTemplate(tokenizer).end_of_turn == ""
    chat = tokenized(tokenizer, turns("q", "one", "q2", "two"))
    assert marked_texts(tokenizer, chat) == ["one", "two"]


@pytest.mark.parametrize("stripping", ["strip", "lstrip", "rstrip"])
@pytest.mark.parametrize("answer", ["\n\nHello!", "Hello!\n", " Hello! \n"])
def test_a_cut_answer_loses_white_space_that_the_template_strips(
    stripping: str, answer: str
) -> None:
    text = CHATML_TEMPLATE.replace("m['content']", f"m['content'].{stripping}()")
    tokenizer = build_tokenizer(text, None, "<|im_end|>")
    messages = turns("Hi", answer)
    cut = tokenize_chat(ChatTemplate(tokenizer), messages, 99, is_cut=True, is_generated=False)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert isinstance(cut, TokenizedChat)
    assert tokenizer.decode(cut.tokens) + "<|im_end|>\n" == whole


@pytest.mark.parametrize(
    ("text", "end", "opening"),
    [
        (LLAMA3_TEMPLATE, "<|eot_id|>",
         "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"),
        ("{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}" + CHATML_TEMPLATE, "<|im_end|>",
         "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"),
    ],
)  # fmt: skip
def test_a_user_turn_is_opened_up_to_its_text(text: str, end: str, opening: str) -> None:
    tokenizer = build_tokenizer(text, "<|begin_of_text|>", end)
    tokens, end_token = ChatTemplate(tokenizer).open_user_turn()
    assert tokenizer.decode(tokens) == opening
    assert end_token == tokenizer.convert_tokens_to_ids(end)


USER_AND_ASSISTANT = "{{ bos_token + 'USER: ' + messages[0].content + ' ASSISTANT:' }}"


@pytest.mark.parametrize(
    "text", [USER_AND_ASSISTANT, "{{ messages[0].content + eos_token }}", "{{ 1 // 0 }}"]
)
def test_a_user_turn_without_a_beginning_or_an_end_is_refused(text: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(build_tokenizer(text, "<|begin_of_text|>", "</s>")).open_user_turn()
