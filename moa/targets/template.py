"""The chat template of a target, rendered by transformers, with the same text every day and no forged turns.

A template is a program that comes with the model. It runs in the sandbox of transformers. The time that it can ask for
is fixed, and functions that return random values are refused. Its running time is not bounded, because the model folder
belongs to whoever runs this.

Several threads may use one template.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property, partial
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.exceptions import TemplateError as JinjaError
from transformers.utils.chat_template_utils import _compile_jinja_template

from ...errors import OptionInvalid, PromptUnusable, TemplateError
from ...text import first_line
from .chat import Message, RejectReason, content_texts, with_functions

Tools = Sequence[Mapping[str, Any]] | None

# Some templates write today's date into the prompt, and equal inputs must give equal tokens:
# `strftime_now` gives this.
TEMPLATE_TIME = datetime(2024, 7, 26)
MAX_CHAT_CHARS = 1 << 24  # several times what the longest context holds
# key under which a store, and a drafter as JSON, record the arguments of the template
RECORDED = "template_kwargs"
# What a template can raise while it renders a chat.
RENDER_ERRORS = (
    JinjaError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, RecursionError,
)  # fmt: skip

PLACEHOLDER = "\ue0f0moa-response\ue0f1"
_PAIRED_TAG = re.compile(r"</?([^<>/|\s]+)>")
_ROLES = ("system", "user", "assistant", "tool")
# transformers keeps compiled templates by their text. This comment makes ours different from those
# of its other users,
# who see the real time. Jinja drops the line break with it, so the template still begins a line.
_OURS = "{# The time is fixed. #}\n"
_PARTS_AS_JSON = re.compile(r'"text"\s*:\s*"' + PLACEHOLDER)
_TAKEN = {
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip


class ControlTokens(NamedTuple):
    """Patterns of tokens that mean something else than their text."""

    everywhere: re.Pattern[str]  # those that no text may hold
    # those, and the ones that frame tools, calls and results, for texts in such a frame
    framed: re.Pattern[str]


def template_text(tokenizer: Any, uses_tools: bool = False) -> str:
    """Find the source of a tokenizer's chat template for chats with or without tools, as transformers chooses it.

    Raises:
        TemplateError: there is none.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise TemplateError(
            "the tokenizer has no chat template, so chats cannot be turned into tokens. "
            "Use an instruction-tuned model, or put its chat_template.jinja into the model folder."
        )
    try:
        return str(tokenizer.get_chat_template(tools=[] if uses_tools else None))
    except ValueError as error:
        raise TemplateError(
            f"the tokenizer has several chat templates and none is the default: {error}"
        ) from error


def template_source(tokenizer: Any) -> str:
    """Return the text of all templates that chats are rendered with, for hashing."""
    sources = [template_text(tokenizer), template_text(tokenizer, uses_tools=True)]
    return "\0".join(dict.fromkeys(sources))


_as_json = partial(json.dumps, ensure_ascii=False)

# The formats in which the rendering in progress has asked for the time.
_time_requests: ContextVar[list[str]] = ContextVar("_time_requests")


def _fixed_time(form: str) -> str:
    """Stand in for transformers' `strftime_now` in our templates."""
    _time_requests.get().append(form)
    return TEMPLATE_TIME.strftime(form)


class ChatTemplate:
    """A tokenizer's chat template with its arguments beside the chat, such as Qwen3's ``enable_thinking``.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        arguments: values for the template beside the chat.
        where: the target, for messages.
        uses_tools: whether this is the template for chats with tools; see :meth:`for_tools`.

    Raises:
        TemplateError: the template cannot be used.
    """

    def __init__(
        self,
        tokenizer: Any,
        arguments: Mapping[str, Any] | None = None,
        where: str = "the target",
        uses_tools: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        self._asked_the_time = False
        self._text_roles: set[str] = set()  # roles whose contents are shown as texts
        self._parts_roles: set[str] = set()  # roles whose contents are shown in parts
        # Whether the template shows arguments of calls that are objects, and those that are the
        # JSON of one.
        self._shows_objects = False
        self._shows_json = False
        self._takes_no_content = True  # whether a message that calls a tool may lack the content
        try:
            self.text = template_text(tokenizer, uses_tools)
            if not getattr(tokenizer, "is_fast", False):
                raise TemplateError(
                    "the tokenizer gives no offsets. Save it as a fast tokenizer (tokenizer.json)."
                )
            self._check_program()
        except TemplateError as error:
            raise TemplateError(f"{where}: {error}") from error
        self._find_forms()
        user = _message("user")
        plain = self._try_render([user])
        prompt = self._try_render([user], add_generation_prompt=True)
        # after a user message
        self.has_generation_prompt = None not in (plain, prompt) and plain != prompt
        self.end_of_turn = self._text_after_answer(plain or "")
        has_tool_template = template_text(tokenizer, uses_tools=True) != self.text
        self._with_tools = (
            ChatTemplate(tokenizer, arguments, where, uses_tools=True)
            if has_tool_template
            else self
        )

    def for_tools(self, tools: Tools) -> "ChatTemplate":
        """Return the template for a chat with these tools: some tokenizers have one named ``tool_use`` for them."""
        return self if tools is None else self._with_tools

    @property
    def asked_the_time(self) -> bool:
        """Whether a rendering has used TEMPLATE_TIME so far."""
        return self._asked_the_time or self._with_tools._asked_the_time

    def _text_after_answer(self, header: str) -> str:
        """Find what ends a response: what the template writes after a last one, or between two turns.

        ``header``: the rendering of a chat of one user message.
        """
        user = _message("user")
        answer = {"role": "assistant", "content": PLACEHOLDER}
        last = (self._try_render([user, answer]) or "").partition(PLACEHOLDER)[2].rstrip()
        self.ends_last_turn = bool(last)
        if last:
            return last
        between = (self._try_render([user, answer, user]) or "").partition(PLACEHOLDER)[2]
        first_token = self.control_tokens.everywhere.match(
            between, len(between) - len(between.lstrip())
        )
        # A token that stands before a first message as well opens turns, and does not end them.
        if first_token is None or first_token.group() in header:
            return ""
        return between[: first_token.end()]

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        add_generation_prompt: bool = False,
        is_shaped: bool = False,
    ) -> str:
        """Render a chat.

        ``is_shaped``: whether the messages have the form that the template takes; see :meth:`_shaped`.

        Raises:
            One of RENDER_ERRORS, if the template refuses the chat or fails.
        """
        text = _OURS + self.text
        # The template may have left the cache of transformers and be compiled again, so this is set
        # every time.
        _compile_jinja_template(text).globals["strftime_now"] = _fixed_time
        requests: list[str] = []
        token = _time_requests.set(requests)
        try:
            rendered: str = self.tokenizer.apply_chat_template(
                list(messages) if is_shaped else self.shape(messages),
                tools=None if tools is None else list(tools),
                chat_template=text,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.arguments,
            )
        finally:
            _time_requests.reset(token)
            self._asked_the_time = self._asked_the_time or bool(requests)
        return rendered

    def shape(self, messages: Sequence[Message]) -> list[Message]:
        """Give messages the form that the template shows; see :meth:`_shaped`."""
        return [self._shaped(message) for message in messages]

    def _shaped(self, message: Message) -> Message:
        """Give the contents and the arguments of calls the form that the template shows, as inference engines do."""
        role = message["role"]
        if "content" in message or not self._takes_no_content:
            text = "".join(content_texts(message))
            is_text = isinstance(message.get("content", text), str)
            if is_text and role in self._parts_roles and role not in self._text_roles:
                message = message | {"content": _parts(text)}
            elif is_text or role not in self._parts_roles:
                message = message | {"content": text}
        return with_functions(
            message, lambda call: call | {"arguments": self._shaped_arguments(call["arguments"])}
        )

    def _shaped_arguments(self, arguments: Any) -> Any:
        if isinstance(arguments, str):
            return arguments if self._shows_json else json.loads(arguments)
        return _as_json(arguments) if self._shows_json and not self._shows_objects else arguments

    def open_user_turn(self) -> tuple[list[int], int]:
        """Find the tokens before the text of a first user message, and the token that ends that message.

        Raises:
            TemplateError: the template does not tell the two.
        """
        text = (
            self._try_render([{"role": "user", "content": PLACEHOLDER}], add_generation_prompt=True)
            or ""
        )
        before, _, after = text.partition(PLACEHOLDER)
        end = self.control_tokens.everywhere.match(after.lstrip())
        # A space before a word belongs to the word's token.
        tokens = self.tokenizer(before.rstrip(" "), add_special_tokens=False)["input_ids"]
        if not tokens or end is None:
            raise TemplateError(
                "the chat template does not show where a user's message begins, or ends it with text and not with a "
                "special token, so the target cannot write questions. Give --dataset in place of --self-prompted."
            )
        return list(tokens), int(self.tokenizer.convert_tokens_to_ids(end.group()))

    def _try_render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        is_shaped: bool = False,
    ) -> str | None:
        try:
            return self.render(
                messages, add_generation_prompt=add_generation_prompt, is_shaped=is_shaped
            )
        except RENDER_ERRORS:
            return None

    def _check_program(self) -> None:
        """Refuse a template that does not compile, returns random values, or does not end for the shortest chat."""
        try:
            # It is parsed before it is compiled, because compiling computes with its constants.
            tree = _compile_jinja_template("").environment.parse(self.text)
            _compile_jinja_template(_OURS + self.text)
        except (JinjaError, RecursionError) as error:
            raise TemplateError(
                f"the chat template is not a Jinja template ({first_line(error)}). Restore it."
            ) from error
        by_chance = {node.name for node in tree.find_all(nodes.Filter) if node.name == "random"}
        by_chance |= {node.name for node in tree.find_all(nodes.Name) if node.name == "lipsum"}
        if by_chance:
            raise TemplateError(
                f"the chat template uses {', '.join(sorted(by_chance))}, so that equal chats give other tokens each "
                "time. Correct the template."
            )
        try:
            self.render([_message("user")], add_generation_prompt=True)
        except (OverflowError, RecursionError) as error:
            raise TemplateError(
                f"the chat template does not end: {first_line(error)}. Correct the template."
            ) from error
        except RENDER_ERRORS:
            pass  # The template wants other chats; each is looked at by itself.

    def _find_forms(self) -> None:
        """Find out in which forms the template shows contents and the arguments of calls."""
        for role in _ROLES:
            if self._shows_content(role, PLACEHOLDER):
                self._text_roles.add(role)
            if self._shows_content(role, _parts(PLACEHOLDER)):
                self._parts_roles.add(role)
        user = self._shaped(_message("user"))
        arguments = {"key": PLACEHOLDER}
        self._shows_objects = PLACEHOLDER in (
            self._try_render([user, _call(arguments)], is_shaped=True) or ""
        )
        as_text = self._try_render([user, _call(_as_json(arguments))], is_shaped=True) or ""
        self._shows_json = _as_json(arguments) in as_text
        call = _call(arguments)
        del call["content"]
        self._takes_no_content = self._try_render([user, call]) is not None

    def _shows_content(self, role: str, content: Any) -> bool:
        """Whether the template shows a content of this form for a role: its text, and not the JSON of its parts."""
        before: dict[str, list[Message]] = {
            "assistant": [_message("user")],
            "tool": [_message("user"), _call({})],
        }
        after = [_message("user")] if role == "system" else []
        chat = [*before.get(role, []), {"role": role, "content": content}, *after]
        in_parts = [
            message if message["content"] is content else _in_parts(message) for message in chat
        ]
        renderings = [self._try_render(form, is_shaped=True) or "" for form in (chat, in_parts)]
        return any(PLACEHOLDER in text and not _PARTS_AS_JSON.search(text) for text in renderings)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The tokens that delimit turns: all special tokens, and other added tokens that the template writes."""
        # Of the latter, paired tags (``<think>`` and ``</think>``, ``<tool_call>``) open no turn,
        # and answers and
        # prompts often hold them, so that they are refused only in text that the template puts
        # between such tags.
        tokenizer = self.tokenizer
        added = {
            str(token.content): bool(token.special)
            for token in tokenizer.added_tokens_decoder.values()
        }
        special = {
            *tokenizer.all_special_tokens,
            *(token for token, is_special in added.items() if is_special),
        }
        turns: list[Message] = [
            {"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")
        ]
        probes = (
            self._try_render(chat, add_generation_prompt=True)
            for chat in (turns, turns[1:], turns[1:2])
        )
        # A template may put a token together: '<|' + role + '|>'.
        written = self.text + "".join(filter(None, probes))
        others = {token for token in added if token in written} - special
        tags = {match[1] for token in others if (match := _PAIRED_TAG.fullmatch(token))}
        pairs = [{f"<{tag}>", f"</{tag}>"} for tag in tags]
        paired = {token for pair in pairs if pair <= added.keys() for token in pair}
        return ControlTokens(_any_of(special | others - paired), _any_of(special | others))

    def find_unusable_text(
        self, messages: Sequence[Message], tools: Tools = None
    ) -> tuple[RejectReason, str] | None:
        """Find control tokens, halves of surrogate pairs and too many characters: why, and what was found where."""
        control = self.control_tokens
        n_chars = 0
        # (where, values, pattern that their texts may not match): text within a frame of the
        # template may not close it.
        parts: list[tuple[str, Any, re.Pattern[str]]] = []
        for index, message in enumerate(messages):
            for key, value in message.items():
                is_framed = key != "content" or message["role"] == "tool"
                parts.append(
                    (f"message {index}", value, control.framed if is_framed else control.everywhere)
                )
        parts += [(f"tool {index}", tool, control.framed) for index, tool in enumerate(tools or ())]
        for where, value, pattern in parts:
            for text in texts(value):
                n_chars += len(text)
                if n_chars > MAX_CHAT_CHARS:
                    return RejectReason.TOO_LONG, f"more than {MAX_CHAT_CHARS:,}"
                if found := pattern.search(text):
                    return (
                        RejectReason.SPECIAL_TOKEN_IN_CONTENT,
                        f"{where} contains {found.group()!r}",
                    )
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    return (
                        RejectReason.NO_UNICODE,
                        f"{where}, character {error.start:,}: {text[error.start]!a}",
                    )
        return None

    def check_prompt(self, messages: Sequence[Message], tools: Tools = None) -> None:
        """Refuse texts that cannot be part of a prompt."""
        if unusable := self.find_unusable_text(messages, tools):
            raise PromptUnusable("{}: {}. Correct the text.".format(*unusable))


def _message(role: str) -> Message:
    return {"role": role, "content": "a"}


def _call(arguments: Any) -> Message:
    """Make a message that calls a tool and says nothing."""
    call = {
        "id": "000000001",
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    }
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _in_parts(message: Message) -> Message:
    return message | {"content": _parts(message["content"])}


def texts(value: Any) -> Iterator[str]:
    """Yield every text in messages or tools, the keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(key)
            yield from texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts(item)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile(
        "|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True))) or "(?!)"
    )


def parse_template_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Read ``name=value`` texts, or a JSON object that was cut at its commas; a value that is JSON is parsed."""
    whole = ",".join(texts).strip()
    if whole.startswith("{"):
        try:
            found = json.loads(whole)
        except ValueError as error:
            raise OptionInvalid(
                f"template_kwargs is {whole!r}, which is not a JSON object ({error})"
            ) from error
    else:
        found = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or not name.strip():
                raise OptionInvalid(
                    f"template_kwargs has {text!r}, expected NAME=VALUE such as enable_thinking=false"
                )
            try:
                found[name.strip()] = json.loads(value)
            except ValueError:
                found[name.strip()] = value
    for name in found:
        if name in _TAKEN:
            raise OptionInvalid(
                f"template_kwargs has {name}, which the template gets from elsewhere; leave it out"
            )
        if not name.isidentifier():
            raise OptionInvalid(
                f"template_kwargs has {name!r}, expected the name of a variable of the template"
            )
    return dict(found)


def choose_template_arguments(
    given: Sequence[str], drafters: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Choose the given arguments, else those of the chats that all drafters, by name, record for their targets."""
    if given:
        return parse_template_arguments(given)
    recorded = {name: target.get(RECORDED, "{}") for name, target in drafters.items() if target}
    if len(set(recorded.values())) > 1:
        raise OptionInvalid(
            "the drafters were trained on chats rendered with different arguments: "
            + "; ".join(f"{name} {text}" for name, text in recorded.items())
            + ". Say with which to decode: --set template_kwargs=NAME=VALUE."
        )
    return parse_template_arguments([next(iter(recorded.values()), "{}")])
