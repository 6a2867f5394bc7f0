"""Each piece of a chat is in its tokens exactly once, or the row is rejected.

The pieces stand where transformers puts them.
"""

import json
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moa_data.demo.target import CHAT_TEMPLATE
from moa_data.moa.targets.chat import Rejection, RejectReason, parse_prompt
from moa_data.moa.targets.chat_tokens import TokenizedChat
from moa_data.moa.targets.template import ChatTemplate
from moa_data.pipeline.dataset import Columns
from moa_data.pipeline.sequences import Sequences, tokenize_row
from moa_data.tests.kit import templates
from moa_data.tests.kit.chats import marked_texts, rejected
from moa_data.tests.kit.models import build_tokenizer
from moa_data.tests.kit.variants import quick


@dataclass(frozen=True)
class Form:
    """A chat template, and facts about it that do not come from the code under test."""

    template: str
    end: str  # text that ends an answer
    # The pieces that it renders besides the turns of user and assistant.
    shows: frozenset[str] = frozenset({"system"})
    contents: str = "text"  # form of contents that it takes: text, parts or either
    takes_json_arguments: bool = False
    takes_no_content: bool = True  # whether a message that calls a tool may have null content


PHASES = [Phase.explicit, Phase.generate]  # Shrinking is left out, since it takes minutes here.
CALLS = frozenset({"system", "calls"})
TOOLS = frozenset({"system", "calls", "tools"})
ALL = TOOLS | {"several calls"}
FORMS = {
    "llama3": Form(templates.LLAMA3_TEMPLATE, "<|eot_id|>"),
    # With tools, this template takes the first two messages for the system's and the user's.
    "llama3.1": Form(templates.LLAMA31_TEMPLATE, "<|eot_id|>", CALLS),
    "llama2": Form(templates.LLAMA2_TEMPLATE, "</s>"),
    "chatml": Form(templates.CHATML_TEMPLATE, "<|im_end|>"),
    "tags": Form(CHAT_TEMPLATE, "<|eot_id|>"),
    "mistral": Form(templates.MISTRAL_TEMPLATE, "</s>", frozenset()),
    "mistral3": Form(templates.MISTRAL3_TEMPLATE, "</s>", frozenset({"tools"})),
    "alternating": Form(templates.ALTERNATING_TEMPLATE, "</s>", ALL - {"system"}),
    "gemma": Form(templates.GEMMA_TEMPLATE, "<end_of_turn>", frozenset()),
    "gemma4": Form(templates.GEMMA4_TEMPLATE, "<turn|>", ALL - {"tools"}),
    "zephyr": Form(templates.ZEPHYR_TEMPLATE, "</s>"),
    "qwen2.5": Form(templates.QWEN25_TEMPLATE, "<|im_end|>", ALL),
    "qwen3": Form(templates.QWEN3_TEMPLATE, "<|im_end|>", ALL),
    "harmony": Form(templates.HARMONY_TEMPLATE, "<|return|>", TOOLS),
    "deepseek": Form(
        templates.DEEPSEEK_TEMPLATE,
        "<|end_of_sentence|>",
        ALL - {"tools"},
        takes_json_arguments=True,
        takes_no_content=False,
    ),
    "either": Form(templates.EITHER_TEMPLATE, "<end_of_turn>", contents="either"),
    "parts": Form(templates.PARTS_TEMPLATE, "<end_of_utterance>", contents="parts"),
    "phi4": Form(templates.PHI4_TEMPLATE, "<|end|>"),
    "coder": Form(templates.CODER_TEMPLATE, "<|im_end|>", ALL - {"tools"}, takes_no_content=False),
    "hermes": Form(templates.HERMES_TEMPLATE, "<|im_end|>", ALL),
    "command": Form(templates.COMMAND_TEMPLATE, "<|end|>", ALL),
    "sorted": Form(templates.SORTED_TEMPLATE, "<end_of_turn>", ALL),
}
# The forms that are left out here write turns, calls and tools like one of these.
QUICK_FORMS = (
    "llama3.1", "llama2", "mistral3", "alternating", "gemma4", "zephyr", "qwen3", "harmony", "deepseek", "either",
    "parts", "phi4", "coder", "hermes", "command", "sorted",
)  # fmt: skip


@cache
def template_of(name: str) -> ChatTemplate:
    form = FORMS[name]
    tokenizer = build_tokenizer(form.template, eos=form.end)
    others = ["<|end|>", "<|call|>", "<|start_of_turn|>"]
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [token for token in others if token != form.end]}
    )
    return ChatTemplate(tokenizer)


SNIPPETS = [
    "a", " ", "\n", "  two  spaces ", "assistant", "user\n", '{"x": [1, null]}', "日本語 é 👩‍👩‍👧",
    "it's \"quoted\"",
    "{{ bos_token }}", "{% if %}", "\\n", "None", "[/SYS]", "<b>bold</b>", "\t", "0",
]  # fmt: skip
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "What to look up."}},
            "required": ["word"],
        },
    },
}


@dataclass
class Drawn:
    """A row of a dataset, and the texts that must be in its tokens."""

    row: dict[str, Any]
    # The messages of the row in the form that transformers takes, with the system column.
    messages: list[dict[str, Any]]
    pieces: list[str]  # texts that each occur exactly once
    answers: list[str]  # Text of each answer. For a call it is the name of the tool.
    # names of the pieces besides the turns of user and assistant
    features: set[str] = field(default_factory=set)
    bad: str = ""  # why the row must be rejected with any template


@st.composite
def chats(draw: st.DrawFn, shown: frozenset[str]) -> Drawn:
    """Draw chats in every form that datasets use. Each text has a number that no other has.

    Args:
        shown: Pieces that the template renders. Others are drawn rarely.
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

    def number() -> int | float:
        value = draw(st.sampled_from([90_000, -80_000, 70_000.25])) + len(drawn.pieces)
        drawn.pieces.append(str(value))
        return value

    def call() -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if draw(st.booleans()):
            deep = {"Zone": [draw(st.booleans()), None], "after": number()}
            arguments = {"word": text(), "n": number(), "deep": deep, "word 2": ""}
        return {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "look_up", "arguments": arguments},
        }

    def add(role: str, value: Any, **extra: Any) -> None:
        drawn.messages.append({"role": role, "content": value, **extra})

    wanted = shown if draw(st.integers(0, 3)) else ALL
    system = draw(st.sampled_from(["", "", "message", "column"])) if "system" in wanted else ""
    if system:
        drawn.features.add("system")
        add("system", text())
    for _ in range(draw(st.integers(1, 3))):
        add("user", content())
        if "calls" in wanted and draw(st.integers(0, 3)) == 3:
            drawn.features.add("calls")
            calls = [
                call() for _ in range(draw(st.integers(1, 2 if "several calls" in wanted else 1)))
            ]
            if len(calls) > 1:
                drawn.features.add("several calls")
            add("assistant", draw(st.sampled_from(["", None])), tool_calls=calls)
            drawn.answers.append("look_up")
            add("tool", text(), tool_call_id="abcdefghi")
        add("assistant", content())
        drawn.answers.append("\n".join(texts_of(drawn.messages[-1])))
    is_sharegpt = "calls" not in drawn.features and draw(st.booleans())
    rows = [message_of_row(draw, message, is_sharegpt) for message in drawn.messages]
    if system == "column":
        drawn.row["system"] = rows.pop(0)["value" if is_sharegpt else "content"]
    drawn.row["conversations" if is_sharegpt else "messages"] = rows
    if "tools" in wanted and draw(st.integers(0, 3)) == 3:
        drawn.features.add("tools")
        drawn.row["tools"] = [TOOL] if draw(st.booleans()) else json.dumps([TOOL])
    others = [{}, {}, {"id": 3, "images": [], "source": "web"}, {"tools": None}, {"tools": []}]
    drawn.row |= draw(st.sampled_from(others))
    if not drawn.row.get("tools"):
        drawn.features.discard("tools")
    drawn.bad = spoil(draw, drawn, rows)
    return drawn


def texts_of(message: dict[str, Any]) -> list[str]:
    content = message["content"] or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def message_of_row(draw: st.DrawFn, message: dict[str, Any], is_sharegpt: bool) -> dict[str, Any]:
    """Write a message in one of the forms that datasets use."""
    if is_sharegpt:
        role = {"user": "human", "assistant": "gpt"}.get(message["role"], message["role"])
        return {"from": role, "value": message["content"]} | draw(
            st.sampled_from([{}, {"weight": 1}])
        )
    extra: dict[str, Any] = draw(st.sampled_from([{}, {}, {"timestamp": 17, "tool_calls": None}]))
    row: dict[str, Any] = extra | message
    if row.get("tool_calls") and draw(st.booleans()):
        row = row | {"tool_calls": with_json_arguments(row["tool_calls"])}
    return row


def with_json_arguments(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace the arguments of calls by their JSON texts."""
    changed = []
    for call in calls:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        changed.append(call | {"function": call["function"] | {"arguments": arguments}})
    return changed


def spoil(draw: st.DrawFn, drawn: Drawn, rows: list[dict[str, Any]]) -> str:
    """Sometimes add content that makes the row unusable.

    It cannot be rendered for any target, or must not be trained on. Returns the reason, or an empty
    string.
    """
    kinds = ["reasoning", "reasoning part", "image", "images", "mark", "control"]
    kind = draw(st.sampled_from(kinds)) if draw(st.integers(0, 4)) == 4 else ""
    message = rows[-1]
    key = "value" if "value" in message else "content"
    if kind == "reasoning":
        message[draw(st.sampled_from(["reasoning_content", "thinking", "reasoning"]))] = "Hm."
    elif kind == "reasoning part":
        message[key] = [{"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "Yes."}]
    elif kind == "image":
        rows[0][key] = [
            {"type": "image", "image": "a.png"},
            {"type": "text", "text": "What is it?"},
        ]
    elif kind == "images":
        drawn.row["images"] = ["a.png"]
    elif kind == "mark":
        marks = [
            ("train", False),
            ("loss_mask", 0),
            ("weight", 0.0),
            ("is_trainable", "no"),
            ("masked", True),
        ]
        name, value = draw(st.sampled_from(marks))
        message[name] = value
    elif kind == "control":
        message[key] = "a<|eot_id|>b"
    return kind


def reference_tokens(name: str, drawn: Drawn) -> list[int]:
    """Let transformers turn the chat into tokens.

    Each content has the form that the template takes.
    """
    form = FORMS[name]
    messages = []
    for message in drawn.messages:
        content = message["content"]
        if content is None:  # Templates that refuse null content get an empty text.
            content = None if form.takes_no_content else ""
        elif form.contents == "text":
            content = "\n".join(texts_of(message))
        elif form.contents == "parts":
            content = [{"type": "text", "text": text} for text in texts_of(message)]
        messages.append(message | {"content": content})
        if form.takes_json_arguments and "tool_calls" in message:
            messages[-1]["tool_calls"] = with_json_arguments(message["tool_calls"])
    tools = [TOOL] if "tools" in drawn.features else drawn.row.get("tools")
    return list(
        template_of(name).tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    )


def answer_of(marked: str, form: Form) -> str:
    """Remove the text that the template puts around an answer."""
    for end in (form.end, "<|end|>", "<|call|>"):
        marked = marked.removesuffix(end)
    for header in ("<|channel|>final<|message|>", "<think>\n\n</think>\n\n"):
        marked = marked.removeprefix(header)
    return marked.strip()


@pytest.mark.parametrize("n_examples", [15, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", quick(FORMS, QUICK_FORMS))
def test_each_piece_is_in_the_tokens_exactly_once_or_the_row_is_rejected(
    name: str, n_examples: int
) -> None:
    form = FORMS[name]
    n_kept = 0

    @settings(max_examples=n_examples, phases=PHASES)
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
    assert n_kept >= 5  # With fewer rows the test would prove nothing.


@pytest.mark.parametrize("mark", [
    {"weight": 0}, {"compute_loss": False}, {"Train": False}, {"do_not_train": 1},
    {"train": False}, {"trainable": False}, {"training": False}, {"loss": False},
    {"loss": "false"}, {"loss_mask": 0}, {"loss_mask": [1, 1, 0]}, {"masked": True},
    {"train_on_last": True}, {"train_last_only": True}, {"mask_history": True},
    {"ignore_loss": True},
    {"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]},
    {"isTrainable": False}, {"computeLoss": False}, {"lossWeight": 0}, {"skipTraining": True},
    {"isMasked": True},
    {"loss_masked": True}, {"mask_out": True}, {"untrained": True},
    {"loss-mask": 0}, {"trained": False}, {"should_mask": True}, {"mask_labels": True},
    {"requires_grad": False}, {"weight": "0.00"}, {"weight": -1},
    {"weight": Decimal("0.00")}, {"loss_mask": [[0, 0], [1, 0]]}, {"loss_mask": {"1": 0}},
    {"loss_mask": "[0]"}, {"loss mask": 0}, {"metadata.train": False}, {"dont_train": 1},
    {"non_trainable": 1}, {"is_ignored": 1}, {"loss_masked_out": 1}, {"masked_from_training": 1},
    {"lossmask": 0}, {"train": "n"}, {"masked": "y"}, {"masked": "1.00"},
])  # fmt: skip
def test_an_answer_that_is_not_to_be_trained_on_rejects_its_row(mark: dict[str, Any]) -> None:
    asks, answers = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    found = tokenize_row(
        template_of("chatml"), {"messages": [asks, answers | mark, asks, answers]}, 100
    )
    assert isinstance(found, Rejection)
    assert found.reason in (RejectReason.MARKED_UNTRAINED, RejectReason.CONTENT_NOT_READ)
    # Questions are never trained on, whatever their marks say.
    assert isinstance(tokenize_row(template_of("chatml"),
                                   {"messages": [asks | {"train": False}, answers]}, 100),
                      TokenizedChat)  # fmt: skip


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "user", "content": "a", "value": "b"}]},
         RejectReason.CONTENT_NOT_READ),
        ({"messages": [{"role": "user", "from": "gpt", "content": "a"}]},
         RejectReason.UNKNOWN_ROLE),
        ({"messages": [{"role": "user", "content": "a"}],
          "conversations": [{"from": "gpt", "value": "b"}]},
         RejectReason.CONTENT_NOT_READ),
        ({"history": [["q", "a"]]}, RejectReason.CONTENT_NOT_READ),
        ({"system": "one", "system_prompt": "two"}, RejectReason.TWO_SYSTEM_TEXTS),
        ({"chat_template_kwargs": {"enable_thinking": True}}, RejectReason.CONTENT_NOT_READ),
        ({"chat_template_kwargs": {"enabled": True}}, RejectReason.CONTENT_NOT_READ),
        ({"chat_template_kwargs": '{"max_tokens": 3}'}, RejectReason.CONTENT_NOT_READ),
        # Some templates write other text for an answer without thinking.
        ({"chat_template_kwargs": {"enable_thinking": False}}, RejectReason.CONTENT_NOT_READ),
        ({"chat_template_kwargs": {"enable_thinking": False, "custom_instructions": "Rhyme."}},
         RejectReason.CONTENT_NOT_READ),
        ({"image": "a.png"}, RejectReason.CONTENT_NOT_READ),
        ({"loss_mask": [0, 1]}, RejectReason.MARKED_UNTRAINED),
        ({"train": False}, RejectReason.MARKED_UNTRAINED),
        ({"mask": "Assistant"}, RejectReason.MARKED_UNTRAINED),
        ({"turn_weights": [0, 1]}, RejectReason.MARKED_UNTRAINED),
        ({"message_loss_masks": [0]}, RejectReason.MARKED_UNTRAINED),
        ({"System": "Be brief."}, RejectReason.CONTENT_NOT_READ),
        ({"Tools": [{"name": "look_up"}]}, RejectReason.CONTENT_NOT_READ),
        ({"available_tools": [{"name": "look_up"}]}, RejectReason.CONTENT_NOT_READ),
        ({"messages": [{"role": "assistant", "content": "a", "toolCalls": [{"name": "f"}]}]},
         RejectReason.CONTENT_NOT_READ),
        ({"messages": [{"role": "user",
                        "content": [{"type": "text", "text": "a", "image": "b.png"}]}]},
         RejectReason.NON_TEXT_PART),
    ],
)  # fmt: skip
def test_what_would_disappear_rejects_its_row(row: dict[str, Any], reason: RejectReason) -> None:
    whole = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    rejected(tokenize_row(template_of("chatml"), whole | row, 100), reason)
    same = {
        "conversations": whole["messages"],
        "mask": "User",
        "loss": 1.5,
        "images": [],
        "functions": None,
        "chat_template_kwargs": {
            "custom_instructions": "",
            "python_tools": [],
            "xml_tools": [],
            "options": {"language": None},
        },
    }
    for row in (whole | same, whole | {"chat_template_kwargs": "{}"}):
        assert isinstance(tokenize_row(template_of("chatml"), row, 100), TokenizedChat)


@pytest.mark.parametrize(
    "mark", [{"weight": 2}, {"loss": 0.73}, {"loss_mask": [1, 1]}, {"masked": "false"}, {"no": 1}]
)
def test_marks_that_ask_for_training_keep_the_row(mark: dict[str, Any]) -> None:
    row = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"} | mark]
    }
    assert isinstance(tokenize_row(template_of("chatml"), row, 100), TokenizedChat)


@pytest.mark.parametrize(
    "extra",
    [
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"messages": [{"role": "user", "content": "q", "value": ""},
                      {"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user",
                       "content": [{"type": "text", "text": "q", "image_url": {"url": None}}]},
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
    "  {% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ 'CALL' ~ c.id ~ c.type ~ c.function.name }}"
    "{{ c.function.arguments if c.function.arguments is string "
    "else c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Renders arguments of calls that are texts or objects. Jinja strips the leading white space."""


@pytest.mark.parametrize(
    "arguments", ['{"x":1}', '{"x": 1e5, "y": 0.10}', '{"x": "\\u00e9"}', {"x": 1.0}]
)
def test_calls_are_written_as_the_row_has_them(arguments: Any) -> None:
    template = ChatTemplate(build_tokenizer(PRINTS, None, "<|im_end|>"))
    call = {"id": 7, "type": "custom", "function": {"name": "f", "arguments": arguments}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "\n", "tool_calls": [call]},
    ]  # fmt: skip
    found = tokenize_row(template, {"messages": chat}, 1000)
    assert isinstance(found, TokenizedChat), found
    assert found.tokens.tolist() == template.tokenizer.apply_chat_template(chat, return_dict=False)


def test_json_arguments_are_written_as_the_objects_that_engines_make_of_them() -> None:
    """Gemma 4 has a form of its own for objects, but writes a text as it is."""
    pairs = "{% for name, value in a.items() %}{{ name ~ ':' ~ value }}{% endfor %}"
    call = f"c.function.name ~ '{{' }}}}{{% if a is mapping %}}{pairs}{{% else %}}{{{{ a }}}}"
    call += "{% endif %}{{ '}'"
    written = []
    for arguments in ('{"word": "cat"}', {"word": "cat"}):
        found, template = with_call(arguments, call)
        written.append(marked_texts(template.tokenizer, found)[0])
    assert written == ["look_up{word:cat}<|im_end|>"] * 2


@pytest.mark.parametrize("arguments", ['{"x": "first", "x": "second"}', [], False, "[1]", "x"])
def test_arguments_that_are_not_one_object_reject_the_row(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "f", "tool_calls": [call]},
    ]
    rejected(
        tokenize_row(template_of("coder"), {"messages": chat}, 1000),
        RejectReason.MALFORMED_TOOL_CALLS,
    )


@pytest.mark.parametrize("tagged", ["loop.last", "true", "whole"])
def test_generation_tags_do_not_decide_what_is_trained(tagged: str) -> None:
    """Such tags may surround only the last answer, or questions and headers too."""
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
    chat = [{"role": "system", "content": "s", "tools": '[{"name": "f"}]'},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"}]  # fmt: skip
    template = template_of("phi4")
    found = tokenize_row(template, {"messages": chat}, 1000)
    assert isinstance(found, TokenizedChat)
    assert found.tokens.tolist() == template.tokenizer.apply_chat_template(chat, return_dict=False)
    assert "<|tool|>" in template.tokenizer.decode(found.tokens)


CALLING = (
    "{% if tools %}{{ 'TOOLS ' ~ TOOL_TEXT }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{% set a = c.function.arguments %}{{ CALL_TEXT }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WHOLE_CALL = "'CALL ' ~ c.function.name ~ ' ' ~ a | tojson"
WHOLE_TOOLS = "(tools | tojson)"


def with_call(
    arguments: Any, call: str, shown_tools: str = WHOLE_TOOLS, **row: Any
) -> tuple[Any, ChatTemplate]:
    """Tokenise a chat with a call.

    The template renders calls and tools by the given expressions. Returns the result and the
    template.
    """
    text = CALLING.replace("CALL_TEXT", call).replace("TOOL_TEXT", shown_tools)
    template = ChatTemplate(build_tokenizer(text, None, "<|im_end|>"))
    called = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
    chat = [{"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "true 3 None word"}]  # fmt: skip
    return tokenize_row(template, {"messages": chat} | row, 1000), template


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ({}, WHOLE_CALL + " ~ 'CALL ' ~ c.function.name ~ '{}'"),
        ({"n": 3}, WHOLE_CALL + " ~ (a | tojson)"),
        ({"n": 3}, "'CALL ' ~ a | tojson"),
        ({"n": 3, "word": "x"}, "'CALL ' ~ c.function.name ~ a.word ~ (a | list)"),
        ({"n": 3}, "c.function.name ~ (a | list) ~ (a.values() | first | float)"),
        ({"n": 3}, "c.function.name ~ ' n ' ~ (a.n * 2)"),
        ({"n": 3}, "c.function.name ~ ' n ' ~ -a.n"),
        ({"n": 2.25}, "c.function.name ~ (a | list) ~ (a.values() | first | round(2))"),
        ({"n": 2.0}, "c.function.name ~ ' n ' ~ (a.n | int)"),
        ({"n": 3}, "c.function.name ~ (a.values() | list)"),
        ({"n": {"deep": [3]}}, "c.function.name ~ ' n ' ~ (a.n.values() | list)"),
        ({"n": True}, "c.function.name ~ ' n ' ~ (a.n | int)"),
        ({"n": True}, "c.function.name ~ ' n'"),
        ({"n": None}, "c.function.name ~ ' n ' ~ (a.n or '')"),
        ({"n": None}, "c.function.name ~ ' n ' ~ ('null' if a.n is none else 'something')"),
    ],
)
def test_a_call_that_the_template_changes_rejects_its_row(arguments: Any, call: str) -> None:
    found, _ = with_call(arguments, call)
    assert isinstance(found, Rejection)
    assert found.reason in (RejectReason.NOT_SHOWN, RejectReason.TEMPLATE_REWRITES_RESPONSE)


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ({"n": 3, "m": -3, "x": 3.5, "yes": True, "no": None, "z": [1e22, 10**25]}, WHOLE_CALL),
        # The template renders the arguments like Python's repr.
        ({"n": 3}, "c.function.name ~ (a | string)"),
        ({"n": 3}, "c.function.name ~ '(' ~ (a.items() | first | join('=')) ~ ').'"),
        ({"b": 3, "B2": 1, "a": 2, "b c": 4}, "c.function.name ~ (a | tojson(sort_keys=true))"),
        (
            {"n": 3},
            "c.function.name ~ (a | items | first | join) "
            "~ ('' if (a.values() | first) > 2 else ' is small')",
        ),
        ({"b": True, "a": 0, "": 1}, "c.function.name ~ (a | dictsort)"),
        ({"n": 'a "quoted"\n“text”'}, WHOLE_CALL),
    ],
)
def test_a_call_that_the_template_writes_as_it_is_keeps_its_row(arguments: Any, call: str) -> None:
    found, template = with_call(arguments, call)
    assert isinstance(found, TokenizedChat), found
    assert "look_up" in marked_texts(template.tokenizer, found)[0]


NAMES = "tools | map(attribute='function.name') | join"
DESCRIBED = NAMES + " ~ (tools | map(attribute='function.description') | join)"
SCHEMA = "tools[0].function.parameters.properties"


@pytest.mark.parametrize(
    ("tools", "is_kept"),
    [
        (WHOLE_TOOLS, True),
        (WHOLE_TOOLS + " ~ " + WHOLE_TOOLS, True),
        (DESCRIBED + f" ~ ({SCHEMA} | dictsort)", True),
        (NAMES, False),
        (DESCRIBED, False),
        (NAMES + f" ~ ({SCHEMA} | tojson)", False),
        (DESCRIBED + f" ~ ({SCHEMA} | list)", False),
        (DESCRIBED + f" ~ ({SCHEMA}.values() | list)", False),
    ],
)
def test_a_tool_without_its_description_or_parameters_rejects_its_row(
    tools: str, is_kept: bool
) -> None:
    found, _ = with_call({}, WHOLE_CALL, tools, tools=[TOOL])
    if is_kept:
        assert isinstance(found, TokenizedChat), found
    else:
        rejected(found, RejectReason.NOT_SHOWN, "tool look_up")


def test_a_tool_that_a_result_names_again_keeps_its_row() -> None:
    call = {"type": "function", "function": {"name": "look_up", "arguments": {}}}
    chat = [{"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}]  # fmt: skip
    template = template_of("harmony")
    found = tokenize_row(template, {"messages": chat}, 1000)
    assert isinstance(found, TokenizedChat), found
    assert template.tokenizer.decode(found.tokens).count("functions.look_up") == 2


ASKS = {"role": "user", "content": "q"}
ANSWERS = {"role": "assistant", "content": "a"}
PART = {"type": "text", "text": "a"}
DEEP: dict[str, Any] = {}
for _ in range(900):
    DEEP = {"metadata": DEEP}


@pytest.mark.parametrize(
    "mark",
    [
        {"metadata": {"train": False}},
        {"meta": {"flags": [{"Loss_Weight": 0.0}]}},
        {"extra": {"masked": True}},
        {"content": [PART | {"train": False}]},
        {"content": [PART, PART | {"weight": 0}]},
        {
            "content": "a",
            "tool_calls": [{"weight": 0, "function": {"name": "look_up", "arguments": {}}}],
        },
        {
            "content": "a",
            "tool_calls": [{"function": {"name": "look_up", "arguments": {}, "train": False}}],
        },
        {"function_call": {"name": "look_up", "arguments": "{}", "masked": True}},
        {"weight": float("nan")},
        {"metadata": [[{"train": False}]]},
        {"metadata": {"train": False, "created": datetime(2026, 1, 2, tzinfo=UTC)}},
    ],
)
def test_a_mark_within_an_answer_rejects_its_row(mark: dict[str, Any]) -> None:
    found = tokenize_row(template_of("coder"), {"messages": [ASKS, ANSWERS | mark]}, 100)
    assert isinstance(found, Rejection)
    assert found.reason in (RejectReason.MARKED_UNTRAINED, RejectReason.NON_TEXT_PART)


@pytest.mark.parametrize(
    "column",
    [
        {"loss_weight": 0}, {"weight": 0.0}, {"sample_weight": "0"}, {"is_trainable": False},
        {"do_not_train": True},
        {"metadata": {"train": False}}, {"info": {"quality": [{"loss_weight": 0.0}]}},
        {"exclude": "yes"}, {"loss_weight": Decimal(0)}, {"loss_mask": [[0, 1]]},
        {"label": False}, {"label": "False"}, {"kto_tag": False}, {"kto_tag": "false"},
    ],
)  # fmt: skip
def test_a_mark_of_a_row_rejects_it(column: dict[str, Any]) -> None:
    found = tokenize_row(template_of("chatml"), {"messages": [ASKS, ANSWERS]} | column, 100)
    rejected(found, RejectReason.MARKED_UNTRAINED, "the row has")
    columns = Columns.parse(["prompt-completion"])
    row = {"prompt": "q", "completion": "a"} | column
    found = tokenize_row(template_of("chatml"), row, 100, columns)
    rejected(found, RejectReason.MARKED_UNTRAINED, "the row has")


@pytest.mark.parametrize("name", [
    "reasoning", "thinking", "reasoning_content", "Chain_of_Thought", "cot", "model_reasoning",
    "thinking_trace", "reasoningContent", "thought", "rationale", "scratchpad", "attachments",
    "media",
    "reasoning-content", "reasoning_summary", "inner_monologue", "img", "imageUrl", "image-path",
    "image_0", "screenshot", "attachment", "function_calls", "tool_call", "tool_results",
    "think_content",
])  # fmt: skip
def test_reasoning_beside_the_messages_rejects_the_row(name: str) -> None:
    for value in ("Hm.", ["Hm."], {"text": "Hm."}):
        for columns in ({name: value}, {"extra": {name: value}}):
            row: dict[str, Any] = {"messages": [ASKS, ANSWERS]} | columns
            rejected(
                tokenize_row(template_of("chatml"), row, 100), RejectReason.CONTENT_NOT_READ, name
            )
    row = {"messages": [ASKS, ANSWERS | {"additional_kwargs": {name: "Hm."}}]}
    rejected(tokenize_row(template_of("chatml"), row, 100), RejectReason.CONTENT_NOT_READ, name)
    # The column that holds the chat is not a column beside it.
    used = tokenize_row(
        template_of("chatml"),
        {"q": "1", name: "2"},
        100,
        Columns.parse(["user=q", f"assistant={name}"]),
    )
    assert isinstance(used, TokenizedChat), used


@pytest.mark.parametrize("name", [
    "tool_responses", "function_response", "observation", "image_base64", "image_bytes",
    "image_uri", "image_list", "image_url_list", "pictures", "frames", "system_instruction",
    "sys_prompt", "systemprompt", "tool_definitions", "function_list", "apis",
])  # fmt: skip
def test_names_of_other_content_count_outside_of_metadata(name: str) -> None:
    text = {name: "Hm."}
    call: dict[str, Any] = {"function": {"name": "look_up", "arguments": {}}}
    answers: list[dict[str, Any]] = [
        ANSWERS | text,
        ANSWERS | {"tool_calls": [call | text]},
        ANSWERS | {"tool_calls": [{"function": call["function"] | text}]},
        ANSWERS | {"function_call": call["function"] | text},
    ]
    rows: list[dict[str, Any]] = [{"messages": [ASKS, answer]} for answer in answers]
    rows.append({"messages": [ASKS, ANSWERS], name: "Hm."})
    for row in rows:
        found = tokenize_row(template_of("chatml"), row, 100)
        rejected(found, RejectReason.CONTENT_NOT_READ, name)
    row = {"messages": [ASKS, ANSWERS | {"extra": text}], "metadata": {"source": text}}
    assert isinstance(tokenize_row(template_of("chatml"), row, 100), TokenizedChat)


@pytest.mark.parametrize(
    "column",
    [
        {"reasoning": "off"}, {"thinking": True}, {"thinking": None}, {"cot": ""}, {"thoughts": []},
        {"n_thoughts": 3},
        {"reasoning_effort": "high"}, {"images": {"bytes": None, "path": None}},
        {"metadata": {"split": "train"}},
        {"metadata": {"train_loss": 0.0, "weighting": 0, "ignore_eos": True}}, {"loss": 0.0},
        {"weight": 0.5}, {"label": 0}, {"label": True}, {"kto_tag": "true"}, {"chosen": "a"},
        {"image_count": "3"}, {"label": "no"}, DEEP,
    ],
)  # fmt: skip
def test_columns_that_say_nothing_of_the_chat_keep_the_row(column: dict[str, Any]) -> None:
    found = tokenize_row(template_of("chatml"), {"messages": [ASKS, ANSWERS]} | column, 100)
    assert isinstance(found, TokenizedChat), found
    nested = tokenize_row(
        template_of("chatml"), {"messages": [ASKS, ANSWERS | {"usage": {"ignore_eos": True}}]}, 100
    )
    assert isinstance(nested, TokenizedChat), nested


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("thinking", {"type": "enabled", "budget_tokens": 1024, "display": "summarized"}),
        ("reasoning", {"effort": "high"}),
        ("reasoning", {"enabled": True, "max_tokens": 2000}),
    ],
)
def test_a_setting_of_a_request_is_named(column: str, value: dict[str, Any]) -> None:
    row = {"messages": [ASKS, ANSWERS], column: value}
    found = tokenize_row(template_of("chatml"), row, 100)
    assert isinstance(found, TokenizedChat), found
    assert found.beside == (f"column {column}",)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("thinking", {"type": "thinking", "thinking": "Hm."}),
        ("thinking", {"type": "The user wants a cat."}),
        ("image", {"type": "file"}),
    ],
)
def test_thoughts_and_images_reject_the_row(column: str, value: dict[str, Any]) -> None:
    found = tokenize_row(template_of("chatml"), {"messages": [ASKS, ANSWERS], column: value}, 100)
    rejected(found, RejectReason.CONTENT_NOT_READ, column)


def test_a_column_is_read_once() -> None:
    columns = Columns.parse(["user=system+q", "assistant=a"])
    template = template_of("chatml")
    found = tokenize_row(template, {"system": "Be brief.", "q": "1", "a": "2"}, 100, columns)
    assert isinstance(found, TokenizedChat)
    assert template.tokenizer.decode(found.tokens).count("Be brief.") == 1


@pytest.mark.parametrize("name", ["llama3.1", "qwen2.5", "chatml"])
@pytest.mark.parametrize("tools", [None, []])
def test_no_tools_are_given_to_the_template_as_the_row_has_them(name: str, tools: Any) -> None:
    template = template_of(name)
    expected = template.tokenizer.apply_chat_template(
        [ASKS, ANSWERS], tools=tools, return_dict=False
    )
    for column in ("tools", "functions"):
        found = tokenize_row(template, {"messages": [ASKS, ANSWERS], column: tools}, 400)
        assert isinstance(found, TokenizedChat), found
        assert found.tokens.tolist() == expected


def test_two_columns_of_tools_reject_a_row_if_they_differ() -> None:
    row = {"messages": [ASKS, ANSWERS], "tools": [TOOL], "functions": [TOOL | {"strict": True}]}
    found = tokenize_row(template_of("qwen2.5"), row, 1000)
    rejected(found, RejectReason.CONTENT_NOT_READ, "tools and functions differ")
    for functions in ([TOOL], [], None, json.dumps([TOOL])):
        assert isinstance(
            tokenize_row(template_of("qwen2.5"), row | {"functions": functions}, 1000),
            TokenizedChat,
        )


def test_null_as_json_is_nothing() -> None:
    nothing = {"tool_calls": "null", "function_call": "null"}
    row = {"messages": [ASKS, ANSWERS | nothing], "conversations": "null", "tools": "null"}
    found = tokenize_row(template_of("qwen2.5"), row, 1000)
    plain = tokenize_row(template_of("qwen2.5"), {"messages": [ASKS, ANSWERS]}, 1000)
    assert isinstance(found, TokenizedChat), found
    assert isinstance(plain, TokenizedChat)
    assert found.tokens.tolist() == plain.tokens.tolist()
    assert found.beside == ()


ASKS_OF_CONTENT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is not defined %}{{ 'nothing' }}"
    "{% elif m.content == '' %}{{ 'empty' }}{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}"
    "{{ c.function.name ~ c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "content", [{"content": None}, {}, {"content": ""}, {"content": " \n"}, {"content": "a"}]
)
def test_a_call_has_the_content_that_transformers_gives_it(content: dict[str, Any]) -> None:
    template = ChatTemplate(build_tokenizer(ASKS_OF_CONTENT, None, "<|im_end|>"))
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "x"}}}
    chat = [ASKS, {"role": "assistant", "tool_calls": [call]} | content]
    found = tokenize_row(template, {"messages": chat}, 1000)
    assert isinstance(found, TokenizedChat), found
    assert found.tokens.tolist() == template.tokenizer.apply_chat_template(chat, return_dict=False)


@pytest.mark.parametrize(
    "answer", ["\u2028a\u2029b\x85c\x0bd", "a\u00a0", "\ufeffa", "  a  ", "a\r\nb", "\u200b"]
)
def test_white_space_of_all_kinds_is_kept(answer: str) -> None:
    template = template_of("chatml")
    found = tokenize_row(
        template, {"messages": [ASKS, {"role": "assistant", "content": answer}]}, 1000
    )
    assert marked_texts(template.tokenizer, found) == [answer + "<|im_end|>"]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "function", "name": "look_up", "content": "r"}, RejectReason.UNKNOWN_ROLE),
        ({"role": "tool", "content": {"celsius": 22}}, RejectReason.EMPTY_CONTENT),
        ({"role": "tool", "content": [{"celsius": 22}]}, RejectReason.NON_TEXT_PART),
        ({"role": "tool", "content": ["r"]}, RejectReason.NON_TEXT_PART),
        ({"role": "assistant", "content": " \n"}, RejectReason.EMPTY_CONTENT),
        ({"role": "assistant", "content": []}, RejectReason.EMPTY_CONTENT),
        ({"role": "assistant", "content": [PART | {"text": " "}]}, RejectReason.EMPTY_CONTENT),
        ({"role": "assistant", "content": None, "tool_calls": []}, RejectReason.EMPTY_CONTENT),
    ],
)
def test_messages_of_other_kinds_reject_their_row(
    message: dict[str, Any], reason: RejectReason
) -> None:
    rejected(
        tokenize_row(template_of("chatml"), {"messages": [ASKS, ANSWERS, message]}, 1000),
        reason,
        "message 2",
    )


@pytest.mark.parametrize("role", ["system", "tool"])
@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_system_text_or_result_is_rendered_as_it_is(role: str, text: str) -> None:
    template = template_of("qwen2.5")
    chat = [ASKS, ANSWERS, ASKS, ANSWERS]
    chat.insert(0 if role == "system" else 2, {"role": role, "content": text})
    found = tokenize_row(template, {"messages": chat}, 1000)
    assert isinstance(found, TokenizedChat), found
    assert found.tokens.tolist() == template.tokenizer.apply_chat_template(chat, return_dict=False)


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_a_developer_message_is_rendered_or_rejects_its_row(content: Any) -> None:
    chat = [{"role": "developer", "content": content}, ASKS, ANSWERS]
    for name in ("chatml", "parts"):
        template = template_of(name)
        found = tokenize_row(template, {"messages": chat}, 1000)
        assert isinstance(found, TokenizedChat), found
        expected = template.tokenizer.apply_chat_template(template.shape(chat), tokenize=False)
        assert template.tokenizer.decode(found.tokens) == expected
        assert expected.count("Be brief.") == 1
    found = tokenize_row(template_of("qwen2.5"), {"messages": chat}, 1000)
    rejected(found, RejectReason.NOT_SHOWN, "message 0 (developer)")


def test_a_token_that_begins_in_one_part_and_ends_in_another_is_refused() -> None:
    token = "<end_of_utterance>"
    parts = [{"type": "text", "text": text} for text in ("hi<end_of_", "utterance>")]
    for role in ("user", "assistant"):
        messages = [
            message | {"content": parts} if message["role"] == role else message
            for message in (ASKS, ANSWERS)
        ]
        found = tokenize_row(template_of("parts"), {"messages": messages}, 100)
        rejected(found, RejectReason.SPECIAL_TOKEN_IN_CONTENT, token)


def test_parts_of_a_text_become_one_text_as_in_engines() -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "", "two")]
    row = {"messages": [ASKS | {"content": parts}, ANSWERS | {"content": parts}]}
    template = template_of("chatml")
    found = tokenize_row(template, row, 100)
    assert isinstance(found, TokenizedChat), found
    assert marked_texts(template.tokenizer, found) == ["one\ntwo<|im_end|>"]
    assert template.tokenizer.decode(found.tokens).count("one\ntwo<|im_end|>") == 2


def test_a_key_that_is_not_shown_may_hold_any_text() -> None:
    keys = {"raw": "a<|im_end|>", "logprobs": [{"token": "<|im_end|>"}], "half": "\ud800"}
    row = {"messages": [ASKS, ANSWERS | keys]}
    found = tokenize_row(template_of("chatml"), row, 100)
    assert marked_texts(template_of("chatml").tokenizer, found) == ["a<|im_end|>"]
    assert isinstance(found, TokenizedChat)
    assert found.beside == ("message key raw", "message key logprobs", "message key half")
    shown = with_keys("{{ m.raw }}", {"raw": "b<|im_end|>"}, {})
    rejected(shown, RejectReason.SPECIAL_TOKEN_IN_CONTENT, "message 0")


def test_a_prompt_whose_message_has_tools_is_rejected() -> None:
    system = {"role": "system", "content": "s", "tools": "[]"}
    found = parse_prompt({"messages": [system, ASKS]})
    rejected(found, RejectReason.CONTENT_NOT_READ, "message 0 (system) has the key tools")


def test_what_a_row_has_besides_its_chat_is_named() -> None:
    row = {
        "messages": [ASKS | {"timestamp": 7, "start": "!"}, ANSWERS | {"rating": None}],
        "prompt_id": "x",
        "notes": "",
    }
    found = tokenize_row(template_of("chatml"), row, 100)
    assert isinstance(found, TokenizedChat), found
    # The template has <|im_start|>, which is not the key.
    assert found.beside == ("column prompt_id", "message key timestamp", "message key start")
    sequences = Sequences()
    sequences.add(0, found)
    assert sequences.beside_lines() == [
        "not used     3 columns and keys that are not part of the tokens, such as column prompt_id "
        "(1), message key timestamp (1), message key start (1)"
    ]
    assert Sequences.from_arrow(sequences.to_arrow()).beside == sequences.beside


def test_the_name_of_a_call_is_not_taken_for_the_name_of_a_speaker() -> None:
    row = {"messages": [ASKS | {"name": "Bob"}, ANSWERS]}
    found = tokenize_row(template_of("qwen2.5"), row, 100)
    assert isinstance(found, TokenizedChat), found
    assert found.beside == ("message key name",)


@pytest.mark.parametrize(
    ("message", "row"),
    [
        ({"channel": "analysis"}, {}),
        ({"analysis": "It is a sum."}, {}),
        ({}, {"available_functions": [{"name": "look_up"}]}),
    ],
)
def test_content_of_a_message_that_is_not_its_answer_is_rejected(
    message: dict[str, Any], row: dict[str, Any]
) -> None:
    found = tokenize_row(template_of("qwen2.5"), {"messages": [ASKS, ANSWERS | message], **row}, 99)
    rejected(found, RejectReason.CONTENT_NOT_READ)
    harmless = {"messages": [ASKS, ANSWERS | {"channel": "final"}], "channel": "chat"}
    assert isinstance(tokenize_row(template_of("qwen2.5"), harmless, 99), TokenizedChat)


@pytest.mark.parametrize(
    ("outer", "inner", "name"),
    [
        ({}, {"params": {"x": 1}}, "params"),
        ({"result": "r"}, {}, "result"),
        ({"id": "1", "index": 0}, {}, None),
    ],
)
def test_what_a_call_has_besides_its_arguments_is_named(
    outer: dict[str, Any], inner: dict[str, Any], name: str | None
) -> None:
    call = {"type": "function", "function": {"name": "look_up", "arguments": {}} | inner} | outer
    row = {"messages": [ASKS, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    found = tokenize_row(template_of("qwen2.5"), row, 1000)
    assert isinstance(found, TokenizedChat), found
    assert found.beside == ((f"tool call key {name}",) if name else ())
    old_call = {"name": "look_up", "arguments": "{}"} | outer | inner
    row = {"messages": [ASKS, {"role": "assistant", "content": "", "function_call": old_call}]}
    found = tokenize_row(template_of("qwen2.5"), row, 1000)
    assert isinstance(found, TokenizedChat), found
    assert found.beside == ((f"tool call key {name}",) if name else ())


def test_columns_that_others_replace_are_named() -> None:
    row = {"chat": [ASKS, ANSWERS], "sys": "B", "system": "A", "messages": None}
    columns = Columns.parse(["messages=chat", "system=sys"])
    found = tokenize_row(template_of("chatml"), row, 100, columns)
    assert isinstance(found, TokenizedChat), found
    assert found.beside == ("column system",)


def test_messages_that_are_read_are_not_named() -> None:
    row = {"messages": [ASKS, ANSWERS]}
    found = tokenize_row(template_of("chatml"), row, 100, Columns.parse([]))
    assert isinstance(found, TokenizedChat), found
    assert found.beside == ()


@pytest.mark.parametrize("words", ["", "{# a message may have 'tools' #}"])
def test_tools_inside_a_message_that_the_template_does_not_read_are_rejected(words: str) -> None:
    tools = [{"name": "look_up", "parameters": {}}]
    row = {"messages": [{"role": "system", "content": "S", "tools": tools}, ASKS, ANSWERS]}
    plain = template_of("chatml")
    template = ChatTemplate(build_tokenizer(words + plain.text, None, "<|im_end|>"))
    found = tokenize_row(template, row, 100)
    rejected(found, RejectReason.CONTENT_NOT_READ, "message key tools")
    reading = "{% for m in messages %}{{ m['tools'] }}{% endfor %}" + plain.text
    shown = tokenize_row(ChatTemplate(build_tokenizer(reading, None, "<|im_end|>")), row, 200)
    assert isinstance(shown, TokenizedChat), shown


def test_a_cut_answer_after_one_that_a_prompt_writes_otherwise_is_rejected() -> None:
    """Qwen3 writes an empty thought before the last answers, but not in a prompt."""
    answers = [ANSWERS | {"content": "A first answer."}, ANSWERS | {"content": "A second one."}]
    row = {"messages": [ASKS, *answers], "finish_reason": "length"}
    found = tokenize_row(template_of("qwen3"), row, 1000)
    rejected(found, RejectReason.TEMPLATE_REWRITES_RESPONSE, "the last response was cut off")
    assert isinstance(tokenize_row(template_of("chatml"), row, 1000), TokenizedChat)


PLANS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.tool_calls %}{{ m.tool_plan or '' }}{% for c in m.tool_calls %}"
    "{{ c.function.name ~ (c.function.arguments | tojson) ~ (c.output or '') }}{% endfor %}"
    "{{ m.outcome or '' }}{% else %}{{ m.topic or '' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Shows keys such as `tool_plan` (as Command R7B does) and results of tools beside tool calls."""


def with_plan(question: dict[str, Any], answer: dict[str, Any], **of_call: Any) -> Any:
    """Tokenise a chat whose first answer calls a tool."""
    call = {"type": "function", "function": {"name": "look_up", "arguments": {}}} | of_call
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    template = ChatTemplate(build_tokenizer(PLANS, None, "<|im_end|>"))
    chat = [ASKS | question, calls | answer, ASKS, ANSWERS]
    return template, chat, tokenize_row(template, {"messages": chat}, 1000)


def test_keys_that_hold_text_of_the_model_may_be_part_of_an_answer() -> None:
    template, chat, found = with_plan({"topic": "maths", "id": "7"}, {"tool_plan": "I look."})
    assert isinstance(found, TokenizedChat), found
    assert found.tokens.tolist() == template.tokenizer.apply_chat_template(chat, return_dict=False)
    first, last = marked_texts(template.tokenizer, found)
    assert (first, last) == ("I look.look_up{}<|im_end|>", "a<|im_end|>")
    assert found.beside == ("message key id",)


@pytest.mark.parametrize(
    ("answer", "of_call", "name"),
    [
        ({"outcome": "noon"}, {}, "message key outcome"),
        ({"outcome": [{"text": "noon"}]}, {}, "message key outcome"),
        ({}, {"output": "noon"}, "tool call key output"),
    ],
)
def test_a_key_whose_text_the_template_writes_into_an_answer_rejects_its_row(
    answer: dict[str, Any], of_call: dict[str, Any], name: str
) -> None:
    _, _, found = with_plan({}, answer, **of_call)
    rejected(found, RejectReason.CONTENT_NOT_READ, name)


def test_a_key_that_the_template_shows_in_other_messages_only_is_named() -> None:
    template = ChatTemplate(build_tokenizer(PLANS, None, "<|im_end|>"))
    row = {"messages": [ASKS | {"outcome": "noon"}, ANSWERS]}
    found = tokenize_row(template, row, 100)
    assert isinstance(found, TokenizedChat), found
    assert found.beside == ("message key outcome",)
    _, _, found = with_plan({"outcome": "noon", "topic": "maths"}, {})
    assert isinstance(found, TokenizedChat), found
    assert found.beside == ("message key outcome",)
    row = {"messages": [ASKS, ANSWERS | {"tool_plan": "I look."}]}
    found = tokenize_row(template, row, 100)
    rejected(found, RejectReason.CONTENT_NOT_READ, "message key tool_plan")


def with_keys(text: str, question: dict[str, str], answer: dict[str, str]) -> Any:
    """Tokenise a chat with a template that writes ``text`` before each content."""
    template = templates.CHATML_TEMPLATE.replace("m['content']", f"''}}}}{text}{{{{ m['content']")
    row = {"messages": [ASKS | question, ANSWERS | answer]}
    return tokenize_row(ChatTemplate(build_tokenizer(template, None, "<|im_end|>")), row, 100)


def test_keys_that_stand_in_for_each_other_do_not_hide_each_other() -> None:
    keys = {"x": "noon", "y": "noon"}
    found = with_keys("{{ m.x or m.y }}", {}, keys)
    rejected(found, RejectReason.CONTENT_NOT_READ, "message key y")
    found = with_keys("{{ m.x or m.y }}", keys, {})
    assert isinstance(found, TokenizedChat), found
    assert found.beside == ("message key x",)


def test_a_key_that_the_template_needs_is_named_where_it_rejects_the_row() -> None:
    found = with_keys("{{ m.x.strip() }}", {"x": "noon"}, {"x": "noon"})
    rejected(found, RejectReason.CONTENT_NOT_READ, "message key x")


@pytest.mark.parametrize(
    "reason", ["length", "LENGTH", "max_tokens", ["length"], ["length", "max_tokens"]]
)
def test_a_cut_answer_stands_where_transformers_puts_it_or_is_rejected(reason: Any) -> None:
    row = {"messages": [ASKS, ANSWERS], "finish_reason": reason}
    tokenizer = template_of("chatml").tokenizer
    found = tokenize_row(template_of("chatml"), row, 100)
    assert isinstance(found, TokenizedChat), found
    assert tokenizer.decode(found.tokens) == tokenizer.apply_chat_template(
        row["messages"], tokenize=False, continue_final_message=True
    )
    of_message = {"messages": [ASKS, ANSWERS | {"finish_reason": reason}]}
    assert marked_texts(tokenizer, tokenize_row(template_of("chatml"), of_message, 100)) == ["a"]
    for name in ("qwen3", "harmony"):
        found = tokenize_row(template_of(name), row, 100)
        rejected(found, RejectReason.TEMPLATE_REWRITES_RESPONSE, "other text before it")
        # The target has written the answers of `regenerate` after the generation prompt.
        regenerated = tokenize_row(template_of(name), row | {"row": 3}, 100)
        assert marked_texts(template_of(name).tokenizer, regenerated) == ["a"]


def test_an_answer_that_is_cut_before_the_last_message_rejects_its_row() -> None:
    cut = ANSWERS | {"finish_reason": "length"}
    for chat in ([ASKS, cut, ASKS, ANSWERS], [ASKS, ANSWERS, ASKS, cut, ASKS]):
        found = tokenize_row(template_of("chatml"), {"messages": chat}, 100)
        rejected(found, RejectReason.MARKED_UNTRAINED, "finish_reason 'length'")
    two_answers = {"messages": [ASKS, ANSWERS, ASKS, ANSWERS]}
    responses = [{"finish_reason": "length"}, {"finish_reason": "stop"}]
    column: dict[str, Any]
    for column in (
        {"finish_reason": ["length", "stop"]},
        {"finish_reason": '["length", "length"]'},
        {"finish_reason": [None, "length", None, "stop"]},
        {"finish_reasons": ["length", "none"]},
        {"finish_reasons": ["length", None]},
        {"finish_reason": ["stop", "stop", "length"]},
        {"responses": responses},
        {"responses": responses, "finish_reason": "stop"},
    ):
        found = tokenize_row(template_of("chatml"), two_answers | column, 100)
        rejected(found, RejectReason.MARKED_UNTRAINED, "was cut off: it has finish_reason")
    for column in (
        {"finish_reason": ["stop", "length"]},
        {"finish_reason": [None, "length"]},
        {"responses": responses[::-1]},
        {"metadata": [("finish_reason", "length"), ("model", "x")]},
        {"responses": [{"finish_reason": "stop"}, {}], "metadata": {"finish_reason": "length"}},
    ):
        found = tokenize_row(template_of("chatml"), two_answers | column, 100)
        assert marked_texts(template_of("chatml").tokenizer, found) == ["a<|im_end|>", "a"]


def test_a_rejection_does_not_keep_the_texts_of_its_row() -> None:
    hidden = {"role": "assistant", "content": "<think>Hm.</think>a"}
    refused = [hidden, {"role": "assistant", "content": "a\ud800"}, {"role": "assistant"}]
    for answer in refused:
        for found in (
            tokenize_row(template_of("qwen3"), {"messages": [ASKS, answer, ASKS, ANSWERS]}, 1000),
            parse_prompt({"messages": [{"role": "user"}]}),
        ):
            assert isinstance(found, Rejection)
            errors = (found.__traceback__, found.__cause__, found.__context__)
            assert errors == (None, None, None)
            assert str(found) == str((found.reason, found.detail))


@pytest.mark.parametrize("reason", ["length", ["stop", "length"]])
def test_a_cut_answer_before_a_last_question_rejects_its_row(reason: Any) -> None:
    row = {"messages": [ASKS, ANSWERS, ASKS, ANSWERS, ASKS], "finish_reason": reason}
    found = tokenize_row(template_of("chatml"), row, 100)
    rejected(found, RejectReason.MARKED_UNTRAINED, "was cut off: it has finish_reason")


def test_a_call_has_no_thought_that_only_a_prompt_has() -> None:
    """Gemma 4 writes an empty thought into the generation prompt, and not into a chat."""
    call = {"type": "function", "function": {"name": "look_up", "arguments": {}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "noon"}
    template = template_of("gemma4")
    called = "<|tool_call>call:look_up{}<tool_call|>"
    found = tokenize_row(template, {"messages": [ASKS, calls, result, ANSWERS]}, 1000)
    assert marked_texts(template.tokenizer, found) == [called + "<|tool_response>", "a<turn|>"]
    found = tokenize_row(template, {"messages": [ASKS, ANSWERS, ASKS, calls]}, 1000)
    assert marked_texts(template.tokenizer, found) == ["a<turn|>", called + "<|tool_response>"]
    for text in ("a", ""):  # A result that the answer repeats, and an empty one, stay unmarked.
        chat = [ASKS, calls, result | {"content": text}, ANSWERS]
        found = tokenize_row(template, {"messages": chat}, 1000)
        assert marked_texts(template.tokenizer, found) == [called + "<|tool_response>", "a<turn|>"]


def test_a_call_that_was_cut_is_named() -> None:
    call = {"type": "function", "function": {"name": "look_up", "arguments": {}}}
    row = {"messages": [ASKS, ANSWERS | {"tool_calls": [call]}]}
    for reason, beside in (("length", ("column finish_reason",)), ("tool_calls", ())):
        found = tokenize_row(template_of("qwen2.5"), row | {"finish_reason": reason}, 1000)
        assert isinstance(found, TokenizedChat), found
        assert found.beside == beside


@pytest.mark.parametrize(
    ("column", "is_cut"),
    [
        ({"finish_reasons": ["length"]}, True),
        ({"finish_reason": "FinishReason.MAX_TOKENS"}, True),
        ({"finish_reason": "FinishReason.STOP"}, False),
        ({"finish_reason": "max_length"}, True),
        ({"finish_reason": "max_new_tokens"}, True),
        ({"finish_reason": "abort"}, True),
        ({"finish_reason": "content_filter"}, True),
        ({"stop_type": "limit"}, True),
        ({"stop_type": "word"}, False),
        ({"incomplete_details": {"reason": "max_output_tokens"}}, True),
        ({"incomplete_details": None}, False),
        ({"truncated": True}, True),
        ({"is_truncated": True}, True),
        ({"isTruncated": "True"}, True),
        ({"truncated": 1}, True),
        ({"truncated": False, "is_truncated": "false"}, False),
        ({"native_finish_reason": "MAX_TOKENS"}, True),
        ({"stopped_limit": True}, True),
        ({"stopped_limit": False}, False),
        ({"stop_reason": "model_context_window_exceeded"}, True),
        ({"finish_reason": "SAFETY"}, True),
        ({"finish_reason": "ERROR_LIMIT"}, True),
        ({"finish_reason": {"type": "stop", "matched": "limit"}}, False),
        ({"finish_reason": {"type": "length", "length": 200}}, True),
        # These are the reasons of several generations. The row has only one of them.
        ({"finish_reasons": ["stop", "length"]}, False),
        ({"finish_reasons": ["length", "stop"]}, False),
        ({"finish_reasons": ["length", "length"]}, True),
        ({"finish_reason": [None, "length"]}, True),
        ({"finish_reason": {"type": None, "kind": "length"}}, True),
        ({"finish_reason": "FINISH_REASON_MAX_TOKENS"}, True),
        ({"finish_reason": "<FinishReason.MAX_TOKENS: 2>"}, True),
        ({"finish_reason": "content filter"}, True),
        ({"stopReason": "maxTokens"}, True),
    ],
)
def test_finish_reasons_of_other_libraries_are_read(column: dict[str, Any], is_cut: bool) -> None:
    found = tokenize_row(template_of("chatml"), {"messages": [ASKS, ANSWERS]} | column, 100)
    answer = "a" if is_cut else "a<|im_end|>"
    assert marked_texts(template_of("chatml").tokenizer, found) == [answer]
    assert isinstance(found, TokenizedChat)
    assert found.beside == ()


@pytest.mark.parametrize(
    ("extra", "is_cut"),
    [
        ({"metadata": {"finish_reason": "length"}}, True),
        ({"metadata": {"response": {"stopReason": "max-tokens"}}}, True),
        ({"judge": {"finish_reason": "length"}}, False),
        ({"prompt": {"stop_reason": "limit"}}, False),
        ({"finish_reason": "stop", "metadata": {"finish_reason": "length"}}, False),
        ({"raw": {"choices": [{"finish_reason": "length"}]}}, True),
        ({"raw": {"choices": [{"finish_reason": "stop"}]}}, False),
        ({"raw": {"choices": [{"finish_reason": "length"}, {"finish_reason": "stop"}]}}, False),
        ({"generation_info": {"finish_reason": "length"}}, True),
        ({"rejected": {"content": "b", "finish_reason": "length"}}, False),
        ({"metadata": {"truncated": True}}, False),
        ({"generations": [[{"generation_info": {"finish_reason": "length"}}]]}, True),
        ({"metadata": [("finish_reason", "length")]}, True),
        ({"response": {"stopped_limit": True}}, True),
        ({"stopped_limit": False, "metadata": {"finish_reason": "length"}}, True),
        ({"finish_reason": "None", "metadata": {"finish_reason": "length"}}, True),
        ({"finish_reason": math.nan, "metadata": {"finish_reason": "length"}}, True),
        ({"finish_reason": [None], "metadata": '{"finish_reason": "length"}'}, True),
        ({"metadata": {"finish_reason": "stop"}, "raw": {"finish_reason": "length"}}, True),
        ({"response": '{"finish_reason": "length"}'}, False),
        ({"truncated": "length", "note": "finish_reason: length"}, False),
        ({"truncated": 12}, False),
    ],
)
def test_a_finish_reason_may_be_inside_other_keys(extra: dict[str, Any], is_cut: bool) -> None:
    answer = "a" if is_cut else "a<|im_end|>"
    of_message = {"messages": [ASKS, ANSWERS | extra]}
    for row in ({"messages": [ASKS, ANSWERS]} | extra, of_message):
        found = tokenize_row(template_of("chatml"), row, 100)
        assert marked_texts(template_of("chatml").tokenizer, found) == [answer]
    if is_cut:
        earlier = {"messages": [ASKS, ANSWERS | extra, ASKS, ANSWERS]}
        found = tokenize_row(template_of("chatml"), earlier, 100)
        rejected(found, RejectReason.MARKED_UNTRAINED, "an earlier answer was cut off")


def test_a_column_of_the_chat_is_not_a_finish_reason() -> None:
    columns = Columns.parse(["user=q", "assistant=stop_reason"])
    row = {"q": "Why?", "stop_reason": "length"}
    found = tokenize_row(template_of("chatml"), row, 100, columns)
    assert marked_texts(template_of("chatml").tokenizer, found) == ["length<|im_end|>"]


@pytest.mark.parametrize("key", ["stop_reason", "finishReason", "stopReason", "done_reason"])
def test_a_finish_reason_may_have_other_names(key: str) -> None:
    cut = {"messages": [ASKS, ANSWERS], key: "max_tokens"}
    of_message = {"messages": [ASKS, ANSWERS | {key: "MAX_TOKENS"}]}
    for row, answer in ((cut, "a"), (of_message, "a"), (cut | {key: "stop"}, "a<|im_end|>")):
        found = tokenize_row(template_of("chatml"), row, 100)
        assert marked_texts(template_of("chatml").tokenizer, found) == [answer]
    unknown = tokenize_row(template_of("chatml"), cut | {key: "refusal"}, 100)
    assert isinstance(unknown, TokenizedChat)
    assert unknown.beside == (f"column {key}",)


@pytest.mark.parametrize(
    ("reason", "beside"),
    [("stop", ()), ("END_TURN", ()), (None, ()), ("refusal", ("column finish_reason",))],
)
def test_an_unknown_finish_reason_is_named(reason: Any, beside: tuple[str, ...]) -> None:
    row = {"messages": [ASKS, ANSWERS], "finish_reason": reason}
    found = tokenize_row(template_of("chatml"), row, 100)
    assert marked_texts(template_of("chatml").tokenizer, found) == ["a<|im_end|>"]
    assert isinstance(found, TokenizedChat)
    assert found.beside == beside


@pytest.mark.parametrize("column", ["chosen", "completion", "response"])
def test_a_last_answer_in_another_column_rejects_its_row(column: str) -> None:
    """In LLaMA-Factory's preference format, the messages end before the preferred answer."""
    answers: list[Any] = [ANSWERS, [ASKS, ANSWERS], {"from": "gpt", "value": "a"}, "a", ["a"]]
    for value in answers:
        row = {"conversations": [ASKS, ANSWERS, ASKS], column: value}
        found = tokenize_row(template_of("chatml"), row, 100)
        rejected(found, RejectReason.CONTENT_NOT_READ, f"the column {column}")
    for value in ({"status": 200}, 200, True, " ", [{"role": None}]):
        row = {"conversations": [ASKS, ANSWERS, ASKS], column: value}
        assert isinstance(tokenize_row(template_of("chatml"), row, 100), TokenizedChat)
    ended = tokenize_row(template_of("chatml"), {"messages": [ASKS, ANSWERS], column: ["a"]}, 100)
    assert isinstance(ended, TokenizedChat), ended
