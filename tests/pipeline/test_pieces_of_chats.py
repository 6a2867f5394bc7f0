"""Each piece of a chat is in its tokens exactly once, where transformers puts it, or its row is rejected."""

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moa_data.demo.target import CHAT_TEMPLATE
from moa_data.moa.targets.chat import Rejection, RejectReason
from moa_data.moa.targets.chat_tokens import TokenizedChat
from moa_data.moa.targets.template import ChatTemplate
from moa_data.pipeline.sequences import tokenize_row
from moa_data.tests.kit import templates
from moa_data.tests.kit.chats import marked_texts, rejected
from moa_data.tests.kit.models import build_tokenizer


@dataclass(frozen=True)
class Form:
    """A chat template, and what is known of it without asking the code under test."""

    template: str
    end: str  # what ends an answer
    shows: frozenset[str] = frozenset({"system"})  # pieces that it shows beside the turns of user and assistant
    contents: str = "text"  # form of contents that it takes: text, parts or either
    takes_json_arguments: bool = False


PHASES = [Phase.explicit, Phase.generate]  # without shrinking, which takes minutes here
CALLS = frozenset({"system", "calls"})
TOOLS = frozenset({"system", "calls", "tools"})
FORMS = {
    "llama3": Form(templates.LLAMA3_TEMPLATE, "<|eot_id|>"),
    # With tools it takes the first two messages for the system's and the user's.
    "llama3.1": Form(templates.LLAMA31_TEMPLATE, "<|eot_id|>", CALLS),
    "llama2": Form(templates.LLAMA2_TEMPLATE, "</s>"),
    "chatml": Form(templates.CHATML_TEMPLATE, "<|im_end|>"),
    "tags": Form(CHAT_TEMPLATE, "<|eot_id|>"),
    "mistral": Form(templates.MISTRAL_TEMPLATE, "</s>", frozenset()),
    "mistral3": Form(templates.MISTRAL3_TEMPLATE, "</s>", frozenset({"tools"})),
    "gemma": Form(templates.GEMMA_TEMPLATE, "<end_of_turn>", frozenset()),
    "zephyr": Form(templates.ZEPHYR_TEMPLATE, "</s>"),
    "qwen2.5": Form(templates.QWEN25_TEMPLATE, "<|im_end|>", TOOLS),
    "qwen3": Form(templates.QWEN3_TEMPLATE, "<|im_end|>", TOOLS),
    "harmony": Form(templates.HARMONY_TEMPLATE, "<|return|>", TOOLS),
    "deepseek": Form(templates.DEEPSEEK_TEMPLATE, "<|end_of_sentence|>", CALLS, takes_json_arguments=True),
    "either": Form(templates.EITHER_TEMPLATE, "<end_of_turn>", contents="either"),
    "parts": Form(templates.PARTS_TEMPLATE, "<end_of_utterance>", contents="parts"),
    "phi4": Form(templates.PHI4_TEMPLATE, "<|end|>"),
    "coder": Form(templates.CODER_TEMPLATE, "<|im_end|>", CALLS),
}


@cache
def template_of(name: str) -> ChatTemplate:
    form = FORMS[name]
    tokenizer = build_tokenizer(form.template, eos=form.end)
    others = ["<|end|>", "<|call|>", "<|start_of_turn|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [token for token in others if token != form.end]})
    return ChatTemplate(tokenizer)


SNIPPETS = [
    "a", " ", "\n", "  two  spaces ", "assistant", "user\n", '{"x": [1, null]}', "日本語 é 👩‍👩‍👧", "it's \"quoted\"",
    "{{ bos_token }}", "{% if %}", "\\n", "None", "[/SYS]", "<b>bold</b>", "\t", "0",
]  # fmt: skip
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


@dataclass
class Drawn:
    """A row, and what must be in its tokens."""

    row: dict[str, Any]
    messages: list[dict[str, Any]]  # those of the row as transformers takes them, a system column included
    pieces: list[str]  # texts of which each occurs exactly once
    answers: list[str]  # text of each answer; a call has the name of its tool
    features: set[str] = field(default_factory=set)  # pieces beside the turns of user and assistant
    bad: str = ""  # why the row must be rejected, whatever the template


@st.composite
def chats(draw: st.DrawFn, shown: frozenset[str]) -> Drawn:
    """Draw chats of every form in which datasets have them, each text with a number that no other text has.

    ``shown``: pieces that the template shows; others are drawn now and then.
    """
    drawn = Drawn({}, [], [], [])

    def text() -> str:
        before, after = draw(st.lists(st.sampled_from(SNIPPETS), min_size=2, max_size=2))
        number = f"<{len(drawn.pieces) + 1}>"
        drawn.pieces.append(number)
        return before + number + after

    def content() -> Any:
        n_parts = draw(st.sampled_from([0, 0, 0, 1, 2]))
        return [{"type": "text", "text": text()} for _ in range(n_parts)] if n_parts else text()

    def add(role: str, value: Any, **extra: Any) -> None:
        drawn.messages.append({"role": role, "content": value, **extra})

    wanted = shown if draw(st.integers(0, 3)) else frozenset({"system", "calls", "tools"})
    system = draw(st.sampled_from(["", "", "message", "column"])) if "system" in wanted else ""
    if system:
        drawn.features.add("system")
        add("system", text())
    for _ in range(draw(st.integers(1, 3))):
        add("user", content())
        if "calls" in wanted and draw(st.integers(0, 3)) == 3:
            drawn.features.add("calls")
            arguments = {"word": text(), "n": 3}
            call = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
            add("assistant", "", tool_calls=[call])
            drawn.answers.append("look_up")
            add("tool", text(), tool_call_id="abcdefghi")
        add("assistant", content())
        drawn.answers.append("".join(texts_of(drawn.messages[-1])))
    is_sharegpt = "calls" not in drawn.features and draw(st.booleans())
    rows = [message_of_row(draw, message, is_sharegpt) for message in drawn.messages]
    if system == "column":
        drawn.row["system"] = rows.pop(0)["value" if is_sharegpt else "content"]
    drawn.row["conversations" if is_sharegpt else "messages"] = rows
    if "tools" in wanted and draw(st.integers(0, 3)) == 3:
        drawn.features.add("tools")
        drawn.row["tools"] = [TOOL] if draw(st.booleans()) else json.dumps([TOOL])
    drawn.row |= draw(st.sampled_from([{}, {}, {"id": 3, "images": [], "source": "web"}, {"tools": None}]))
    if drawn.row.get("tools") is None:
        drawn.features.discard("tools")
    drawn.bad = spoil(draw, drawn, rows)
    return drawn


def texts_of(message: dict[str, Any]) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def message_of_row(draw: st.DrawFn, message: dict[str, Any], is_sharegpt: bool) -> dict[str, Any]:
    """Write a message as one of the datasets does."""
    if is_sharegpt:
        role = {"user": "human", "assistant": "gpt"}.get(message["role"], message["role"])
        return {"from": role, "value": message["content"]} | draw(st.sampled_from([{}, {"weight": 1}]))
    extra: dict[str, Any] = draw(st.sampled_from([{}, {}, {"timestamp": 17, "tool_calls": None}]))
    row: dict[str, Any] = extra | message
    if row.get("tool_calls"):
        function = row["tool_calls"][0]["function"]
        as_text = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        if draw(st.booleans()):
            row = row | {"content": None, "tool_calls": [row["tool_calls"][0] | {"function": as_text}]}
    return row


def spoil(draw: st.DrawFn, drawn: Drawn, rows: list[dict[str, Any]]) -> str:
    """Sometimes put into a row what no target can be given, or what must not be trained on; says what."""
    kinds = ["reasoning", "reasoning part", "image", "images", "mark", "control"]
    kind = draw(st.sampled_from(kinds)) if draw(st.integers(0, 4)) == 4 else ""
    message = rows[-1]
    key = "value" if "value" in message else "content"
    if kind == "reasoning":
        message[draw(st.sampled_from(["reasoning_content", "thinking", "reasoning"]))] = "Hm."
    elif kind == "reasoning part":
        message[key] = [{"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "Yes."}]
    elif kind == "image":
        rows[0][key] = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]
    elif kind == "images":
        drawn.row["images"] = ["a.png"]
    elif kind == "mark":
        marks = [("train", False), ("loss_mask", 0), ("weight", 0.0), ("is_trainable", "no"), ("masked", True)]
        name, value = draw(st.sampled_from(marks))
        message[name] = value
    elif kind == "control":
        message[key] = "a<|eot_id|>b"
    return kind


def reference_tokens(name: str, drawn: Drawn) -> list[int]:
    """Let transformers turn the chat into tokens, each content in the form that the template takes."""
    form = FORMS[name]
    messages = []
    for message in drawn.messages:
        content = message["content"]
        if form.contents == "text":
            content = "".join(texts_of(message))
        elif form.contents == "parts":
            content = [{"type": "text", "text": text} for text in texts_of(message)]
        messages.append(message | {"content": content})
        if form.takes_json_arguments and "tool_calls" in message:
            function = message["tool_calls"][0]["function"]
            as_text = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
            messages[-1]["tool_calls"] = [message["tool_calls"][0] | {"function": as_text}]
    tools = [TOOL] if "tools" in drawn.features else None
    tokens = template_of(name).tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=False, date_string="26 Jul 2024"
    )
    return list(tokens)


def answer_of(marked: str, form: Form) -> str:
    """Take away what the template puts around an answer."""
    for end in (form.end, "<|end|>", "<|call|>"):
        marked = marked.removesuffix(end)
    for header in ("<|channel|>final<|message|>", "<think>\n\n</think>\n\n"):
        marked = marked.removeprefix(header)
    return marked.strip()


@pytest.mark.parametrize("name", FORMS)
def test_each_piece_is_in_the_tokens_exactly_once_or_the_row_is_rejected(name: str) -> None:
    form = FORMS[name]
    n_kept = 0

    @settings(max_examples=40, phases=PHASES)
    @given(drawn=chats(form.shows))
    def check(drawn: Drawn) -> None:
        nonlocal n_kept
        found = tokenize_row(template_of(name), drawn.row, 1 << 20)
        if isinstance(found, Rejection):
            assert drawn.bad or not drawn.features <= form.shows, (found, drawn)
            return
        assert not drawn.bad, drawn
        n_kept += 1
        tokenizer = template_of(name).tokenizer
        assert found.tokens.tolist() == reference_tokens(name, drawn)
        text = tokenizer.decode(found.tokens)
        assert [text.count(piece) for piece in drawn.pieces] == [1] * len(drawn.pieces)
        marked = marked_texts(tokenizer, found)
        assert len(marked) == len(drawn.answers)
        for span, answer in zip(marked, drawn.answers, strict=True):
            if answer == "look_up":
                assert "look_up" in span
            elif form.contents == "text":
                assert answer_of(span, form) == answer.strip()
            else:
                assert [piece for piece in drawn.pieces if piece in answer] == [
                    piece for piece in drawn.pieces if piece in span
                ]

    check()
    assert n_kept >= 5  # else the test shows nothing


@pytest.mark.parametrize("mark", [
    {"weight": 0}, {"compute_loss": False}, {"Train": False}, {"do_not_train": 1},
    {"train": False}, {"trainable": False}, {"training": False}, {"loss": False},
    {"loss": "false"}, {"loss_mask": 0}, {"loss_mask": [1, 1, 0]}, {"masked": True}, {"ignore_loss": True},
    {"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]},
])  # fmt: skip
def test_an_answer_that_is_not_to_be_trained_on_rejects_its_row(mark: dict[str, Any]) -> None:
    asks, answers = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    found = tokenize_row(template_of("chatml"), {"messages": [asks, answers | mark, asks, answers]}, 100)
    assert isinstance(found, Rejection)
    assert found.reason in (RejectReason.MARKED_UNTRAINED, RejectReason.CONTENT_NOT_READ)
    # Questions are never trained on, whatever their marks say.
    assert isinstance(tokenize_row(template_of("chatml"), {"messages": [asks | {"train": False}, answers]}, 100),
                      TokenizedChat)  # fmt: skip


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "user", "content": "a", "value": "b"}]}, RejectReason.CONTENT_NOT_READ),
        ({"messages": [{"role": "user", "from": "gpt", "content": "a"}]}, RejectReason.UNKNOWN_ROLE),
        ({"messages": [{"role": "user", "content": "a"}], "conversations": [{"from": "gpt", "value": "b"}]},
         RejectReason.CONTENT_NOT_READ),
        ({"history": [["q", "a"]]}, RejectReason.CONTENT_NOT_READ),
        ({"system": "one", "system_prompt": "two"}, RejectReason.TWO_SYSTEM_TEXTS),
        ({"chat_template_kwargs": {"enable_thinking": False}}, RejectReason.CONTENT_NOT_READ),
        ({"image": "a.png"}, RejectReason.CONTENT_NOT_READ),
        ({"loss_mask": [0, 1]}, RejectReason.MARKED_UNTRAINED),
        ({"train": False}, RejectReason.MARKED_UNTRAINED),
        ({"mask": "Assistant"}, RejectReason.MARKED_UNTRAINED),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image": "b.png"}]}]},
         RejectReason.NON_TEXT_PART),
    ],
)  # fmt: skip
def test_what_would_disappear_rejects_its_row(row: dict[str, Any], reason: RejectReason) -> None:
    whole = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    rejected(tokenize_row(template_of("chatml"), whole | row, 100), reason)
    same = {"conversations": whole["messages"], "mask": "User", "loss": 1.5, "images": [], "functions": None}
    assert isinstance(tokenize_row(template_of("chatml"), whole | same, 100), TokenizedChat)


@pytest.mark.parametrize("mark", [{"weight": 2}, {"loss": 0.73}, {"loss_mask": [1, 1]}, {"masked": "false"}, {"no": 1}])
def test_marks_that_ask_for_training_keep_the_row(mark: dict[str, Any]) -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"} | mark]}
    assert isinstance(tokenize_row(template_of("chatml"), row, 100), TokenizedChat)


@pytest.mark.parametrize(
    "extra",
    [
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"messages": [{"role": "user", "content": "q", "value": ""}, {"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q", "image_url": {"url": None}}]},
                      {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}]},
    ],
)  # fmt: skip
def test_other_spellings_of_the_same_chat_keep_the_row(extra: dict[str, Any]) -> None:
    template = template_of("chatml")
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    found = tokenize_row(template, {"messages": chat} | extra, 100)
    assert isinstance(found, TokenizedChat), found
    assert found.tokens.tolist() == template.tokenizer.apply_chat_template(chat, return_dict=False)


PRINTS = (
    "  {% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ 'CALL' ~ c.id ~ c.type }}"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Arguments of calls as texts or as objects, behind white space that Jinja takes away."""


@pytest.mark.parametrize("arguments", ['{"x":1}', '{"x": 1e5, "y": 0.10}', '{"x": "\\u00e9"}', {"x": 1.0}])
def test_calls_are_written_as_the_row_has_them(arguments: Any) -> None:
    template = ChatTemplate(build_tokenizer(PRINTS, None, "<|im_end|>"))
    call = {"id": 7, "type": "custom", "function": {"name": "f", "arguments": arguments}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "\n", "tool_calls": [call]},
    ]  # fmt: skip
    found = tokenize_row(template, {"messages": chat}, 1000)
    # The name of the tool is not shown, so this row is rejected; with it in the content it is kept.
    rejected(found, RejectReason.NOT_SHOWN)
    chat[1]["content"] = "f"
    found = tokenize_row(template, {"messages": chat}, 1000)
    assert isinstance(found, TokenizedChat), found
    assert found.tokens.tolist() == template.tokenizer.apply_chat_template(chat, return_dict=False)


@pytest.mark.parametrize("arguments", ['{"x": "first", "x": "second"}', [], False, "[1]", "x"])
def test_arguments_that_are_not_one_object_reject_the_row(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "f", "tool_calls": [call]}]
    rejected(tokenize_row(template_of("coder"), {"messages": chat}, 1000), RejectReason.MALFORMED_TOOL_CALLS)


@pytest.mark.parametrize("tagged", ["loop.last", "true", "whole"])
def test_generation_tags_do_not_decide_what_is_trained(tagged: str) -> None:
    """They may surround the last answer alone, questions too, or headers."""
    turn = "{{ '<|im_start|>' + m.role + '\n' }}{% generation %}{{ m.content }}{% endgeneration %}"
    if tagged == "whole":
        turn = "{% generation %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endgeneration %}"
    if tagged == "loop.last":
        plain = "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        turn = "{% if loop.last %}" + turn + "{% else %}" + plain + "{% endif %}"
    prompt = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    text = "{% for m in messages %}" + turn + "{{ '<|im_end|>\n' }}{% endfor %}" + prompt
    template = ChatTemplate(build_tokenizer(text, None, "<|im_end|>"))
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * 2
    found = tokenize_row(template, {"messages": chat}, 100)
    assert marked_texts(template.tokenizer, found) == ["a<|im_end|>"] * 2


def test_keys_of_a_message_that_the_template_reads_are_shown() -> None:
    chat = [{"role": "system", "content": "s", "tools": '[{"name": "f"}]'}, {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"}]  # fmt: skip
    template = template_of("phi4")
    found = tokenize_row(template, {"messages": chat}, 1000)
    assert isinstance(found, TokenizedChat)
    assert found.tokens.tolist() == template.tokenizer.apply_chat_template(chat, return_dict=False)
    assert "<|tool|>" in template.tokenizer.decode(found.tokens)
