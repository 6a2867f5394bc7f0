"""The chat template of a target: renders chats reproducibly and protects against forged turns.

A chat template is a program that comes with the model. transformers runs the template in a sandbox.
The same chat must always give the same text. So the time that a template can read is fixed, and
templates with random functions are refused. The running time of a template is not limited, because
the user has chosen the model folder.

Several threads may use the same ChatTemplate.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, partial
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.exceptions import TemplateError as JinjaError
from transformers.utils.chat_template_utils import _compile_jinja_template

from ...errors import OptionInvalid, PromptUnusable, TemplateError
from ...text import first_line
from .chat import (
    Message,
    Rejection,
    RejectReason,
    content_text,
    content_texts,
    with_functions,
)

Tools = Sequence[Mapping[str, Any]] | None

# The time that `strftime_now` returns to templates. Some templates write today's date into the
# prompt. With a fixed date, the same chat always gives the same tokens.
TEMPLATE_TIME = datetime(2024, 7, 26)
# Maximum number of characters of a chat, several times the size of the longest context window.
MAX_CHAT_CHARS = 1 << 24
# The key under which stores and drafters record the template's arguments, as JSON.
RECORDED = "template_kwargs"
# Errors that a template can raise while it renders a chat.
RENDER_ERRORS = (
    JinjaError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError,
    RecursionError,
)  # fmt: skip

PLACEHOLDER = "\ue0f0moa-response\ue0f1"
ANSWER: Message = {"role": "assistant", "content": PLACEHOLDER}
# A tool for test chats. Some templates for chats with tools refuse a chat without tools.
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "a",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
_PAIRED_TAG = re.compile(r"</?([^<>/|\s]+)>")
_ROLES = ("system", "developer", "user", "assistant", "tool")
# This comment is put before the text of each template that moa-data compiles, to give the template
# another key in transformers' cache of compiled templates. In its compiled templates, moa-data
# replaces the function that gives the time. The key in the cache is the text. With the same text,
# other code in this process, which needs the real time, would get a template with the fixed time.
# Jinja drops the line break after the comment, so the template still begins at the start of a line.
_OURS = "{# The time is fixed. #}\n"
_PARTS_AS_JSON = re.compile(r'"text"\s*:\s*"' + PLACEHOLDER)
_TAKEN = {
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "tokenize", "continue_final_message", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip


class ControlTokens(NamedTuple):
    """Patterns that match control tokens, such as the token that ends a turn."""

    # Matches the control tokens that must not occur in the text of any message.
    everywhere: re.Pattern[str]
    # Matches the tokens of ``everywhere``, and also the tokens that templates write before and
    # after tools, tool calls and results of tools. A text that a template writes between such
    # tokens must not contain any of them.
    framed: re.Pattern[str]


def template_text(tokenizer: Any, uses_tools: bool = False) -> str:
    """Return the source of the chat template that a tokenizer has for chats with or without tools.

    If there are several templates, the choice is the same as in transformers.

    Raises:
        TemplateError: the tokenizer has no template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise TemplateError(
            "the tokenizer has no chat template, so chats cannot be turned into tokens. Use an "
            "instruction-tuned model, or put the model's chat_template.jinja into its folder."
        )
    try:
        return str(tokenizer.get_chat_template(tools=[] if uses_tools else None))
    except ValueError as error:
        raise TemplateError(
            f"the tokenizer has several chat templates, but none of them is the default ({error}). "
            "Put the template that you want to use into chat_template.jinja."
        ) from error


def template_source(tokenizer: Any) -> str:
    """Return the sources of all templates that render chats, as one text that can be hashed."""
    sources = [template_text(tokenizer), template_text(tokenizer, uses_tools=True)]
    return "\0".join(dict.fromkeys(sources))


_as_json = partial(json.dumps, ensure_ascii=False)


class ChatTemplate:
    """A tokenizer's chat template with its extra arguments, such as Qwen3's ``enable_thinking``.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        arguments: values that are passed to the template in addition to the chat.
        where: name of the target in error messages.
        uses_tools: whether to use the template for chats with tools. Some tokenizers have a second
            template for such chats.

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
        # Roles of messages whose content the template shows if the content is a text.
        self._text_roles: set[str] = set()
        # Roles of messages whose content the template shows if the content is a list of parts.
        self._parts_roles: set[str] = set()
        # Arguments of tool calls may be objects, or texts with JSON. `_shows_objects` is true if
        # the template shows objects. `_shows_json` is true if it shows texts with JSON correctly.
        self._shows_objects = False
        self._shows_json = False
        # Whether the template accepts a message that calls a tool and has no content.
        self._takes_no_content = True
        try:
            self.text = template_text(tokenizer, uses_tools)
            self._check_program()
        except TemplateError as error:
            raise TemplateError(f"{where}: {error}") from error
        self._find_forms()
        user = _message("user")
        plain = self._try_render([user])
        prompt = self._try_render([user], add_generation_prompt=True)
        # Whether the template writes a generation prompt after a user message.
        self.has_generation_prompt = bool(prompt) and plain != prompt
        # The text after the last response: an end-of-turn token, and in some templates a further
        # token that ends the whole text, such as Phi-3's <|endoftext|>.
        after_last = self._text_after([user, ANSWER])
        self.text_after_last = after_last.rstrip()
        # The white space that the template writes after the last response. Empty if the template
        # also writes other text there.
        self.space_after_last = "" if self.text_after_last else after_last
        self.end_of_turn = self._find_end_of_turn(plain)
        self.header = self._find_header(plain, prompt)
        has_tool_template = template_text(tokenizer, uses_tools=True) != self.text
        self._with_tools = (
            ChatTemplate(tokenizer, arguments, where, uses_tools=True)
            if has_tool_template
            else self
        )

    def for_tools(self, tools: Tools) -> "ChatTemplate":
        """Return the template for a chat with the given tools.

        Some tokenizers have a second template, named ``tool_use``, for chats with tools.
        """
        return self if tools is None else self._with_tools

    @property
    def asked_the_time(self) -> bool:
        """Whether the template has read the fixed time in any rendering so far."""
        return self._asked_the_time or self._with_tools._asked_the_time

    def _text_after(self, messages: list[Message]) -> str:
        """Render a chat in which a content is PLACEHOLDER, and return the text after this content.

        The result is empty if the template refuses the chat.
        """
        return self._try_render(messages).partition(PLACEHOLDER)[2]

    def _find_end_of_turn(self, header: str) -> str:
        """Return the text that ends a response, or an empty text if it cannot be found.

        The result depends on what the template writes after the last response of a chat:

        - A control token. The result is this token. If more control tokens follow, each of them may
          end the whole chat, or begin the next turn. So a further token is added to the result only
          if all of these conditions hold: the template also writes the token after earlier
          responses, no chat begins with the token, and no text follows the token.
        - Other text. If the template also writes this text after earlier responses, the text is the
          result. Otherwise the result is empty.
        - Nothing. If a control token follows earlier responses, this token is the result. If the
          token may be the start of the next turn, the result is empty.

        Args:
            header: rendering of a chat with one user message.
        """
        user = _message("user")
        last = self.text_after_last
        between = self._text_after([user, ANSWER, user])
        if not last:
            end = self._control_token_end(between, 0)
            token = between[:end].strip()
            # ``token`` is the control token after an earlier response. It ends the response, or it
            # starts the next turn. If a chat with one user message does not contain the token, it
            # ends responses. Otherwise it must end the user's turn, too, and must not be among the
            # first tokens of the chat. A token that starts turns would be one of these first
            # tokens.
            question = {"role": "user", "content": PLACEHOLDER}
            ends_question = self._text_after([question, _message("assistant")]).startswith(token)
            starts_turns = token in self._leading_tokens(header)
            is_end = token not in header or (ends_question and not starts_turns)
            return between[:end] if is_end else ""
        is_shared = not between or between.startswith(last)
        end = self._control_token_end(last, 0) or (len(last) if is_shared else 0)
        further = self._control_token_end(last, end)
        opening = self._leading_tokens(header)
        while further and between.startswith(last[:further]):
            following = self._control_token_end(last, further)
            has_text_after = not following and further < len(last)
            if has_text_after or last[end:further].strip() in opening:
                break
            end = further
            further = following
        return last[:end]

    def _leading_tokens(self, text: str) -> str:
        """Return the control tokens at the beginning of a text."""
        end = 0
        while following := self._control_token_end(text, end):
            end = following
        return text[:end]

    def _find_header(self, plain: str, prompt: str) -> str:
        """Return the text before a response that is the same in prompts and in whole chats.

        The text begins after the end of the user's turn. White space around it is removed.

        Args:
            plain: rendering of a chat with one user message.
            prompt: rendering of the same chat with a generation prompt.
        """
        chat = self._try_render([_message("user"), ANSWER])
        if not (prompt.startswith(plain) and chat.startswith(plain)):
            return ""
        before_response = chat.removeprefix(plain).partition(PLACEHOLDER)[0]
        generation_prompt = prompt.removeprefix(plain)
        header = _common_start(generation_prompt, before_response)
        return header.strip().removeprefix(self.end_of_turn.strip()).strip()

    def _control_token_end(self, text: str, start: int) -> int:
        """Return the index after the control token that begins at ``start``.

        White space before the token is skipped. If there is not a control token at ``start``, the
        result is 0.
        """
        rest = text[start:].lstrip()
        token = self.control_tokens.everywhere.match(text, len(text) - len(rest))
        return token.end() if token else 0

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        add_generation_prompt: bool = False,
        is_shaped: bool = False,
    ) -> str:
        """Render a chat as text.

        Args:
            messages: the messages of the chat.
            tools: JSON schemas of the tools.
            add_generation_prompt: whether to add the header of the next response at the end.
            is_shaped: whether the messages already have a form that the template can show. If
                false, :meth:`shape` converts the messages.

        Raises:
            One of RENDER_ERRORS: the template refuses the chat or fails.
        """
        text = _OURS + self.text
        # Replace the function that gives the time. Do this before each rendering, because
        # transformers may have evicted the template from its cache. transformers compiles an
        # evicted template again, with the original function.
        _compile_jinja_template(text).globals["strftime_now"] = self._fixed_time
        rendered: str = self.tokenizer.apply_chat_template(
            list(messages) if is_shaped else self.shape(messages),
            tools=None if tools is None else list(tools),
            chat_template=text,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.arguments,
        )
        return rendered

    def _fixed_time(self, form: str) -> str:
        """Return the fixed time. Replaces transformers' `strftime_now` in moa-data's templates."""
        self._asked_the_time = True
        return TEMPLATE_TIME.strftime(form)

    def shape(self, messages: Sequence[Message]) -> list[Message]:
        """Convert contents, and arguments of tool calls, to forms that the template can show."""
        return [self._shaped(message) for message in messages]

    def _shaped(self, message: Message) -> Message:
        """Convert a message's content and tool-call arguments to forms that the template can show.

        Inference engines convert messages in the same way.
        """
        role = message["role"]
        if "content" in message or not self._takes_no_content:
            text = content_text(message)
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
        """Return the tokens before the text of a first user message, and the token after this text.

        Raises:
            TemplateError: the tokens cannot be found.
        """
        question = {"role": "user", "content": PLACEHOLDER}
        text = ""
        with suppress(*RENDER_ERRORS):
            text = self.render([question], add_generation_prompt=True)
        before, _, after = text.partition(PLACEHOLDER)
        end = self.control_tokens.everywhere.match(after.lstrip())
        # Cut off a space before the user's text. In a whole prompt, the space is not a token of its
        # own: the tokenizer puts it into the token of the text's first word.
        tokens = self.tokenizer(before.rstrip(" "), add_special_tokens=False)["input_ids"]
        if not tokens or end is None:
            raise TemplateError(
                "the target cannot write questions, because its chat template writes nothing "
                "before the text of a user, or no special token after it. Give `dataset` and not "
                "`self_prompted`."
            )
        return list(tokens), int(self.tokenizer.convert_tokens_to_ids(end.group()))

    def _try_render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        is_shaped: bool = False,
    ) -> str:
        """Render a test chat, with a tool if the template refuses it without tools.

        The result is empty if the template refuses the chat in both cases.
        """
        for tools in (None, [_TOOL]):
            with suppress(*RENDER_ERRORS):
                return self.render(messages, tools, add_generation_prompt, is_shaped)
        return ""

    def _check_program(self) -> None:
        """Refuse a template that does not compile, uses random values, or may not terminate."""
        try:
            # The syntax tree shows which filters and variables the template uses.
            tree = _compile_jinja_template("").environment.parse(self.text)
            _compile_jinja_template(_OURS + self.text)
        except (JinjaError, RecursionError) as error:
            raise TemplateError(
                f"the chat template is not a valid Jinja template ({first_line(error)}). Restore "
                "the template."
            ) from error
        filters = {node.name for node in tree.find_all(nodes.Filter)}
        variables = {node.name for node in tree.find_all(nodes.Name)}
        by_chance = (filters & {"random"}) | (variables & {"lipsum"})
        if by_chance:
            raise TemplateError(
                f"the chat template uses {', '.join(sorted(by_chance))}, so equal chats would give "
                "different tokens each time. Correct the template."
            )
        try:
            self.render([_message("user")], add_generation_prompt=True)
        except (OverflowError, RecursionError) as error:
            raise TemplateError(
                f"the chat template does not end ({first_line(error)}). Correct the template."
            ) from error
        except RENDER_ERRORS:
            # Accept a template that refuses this test chat. Each real chat is checked when it is
            # rendered.
            pass

    def _find_forms(self) -> None:
        """Detect which forms of contents, and of arguments of tool calls, the template can show."""
        for role in _ROLES:
            if self._shows_content(role, PLACEHOLDER):
                self._text_roles.add(role)
            if self._shows_content(role, _parts(PLACEHOLDER)):
                self._parts_roles.add(role)
        user = self._shaped(_message("user"))
        arguments = {"key": PLACEHOLDER}
        as_object = self._try_render([user, _call(arguments)], is_shaped=True)
        as_text = self._try_render([user, _call(_as_json(arguments))], is_shaped=True)
        self._shows_objects = PLACEHOLDER in as_object
        # The arguments of a tool call may be a text with JSON. Inference engines turn such a text
        # into an object. So if the template writes an object in another way than a text, it must
        # get the object, as from an engine.
        differs = self._shows_objects and as_object != as_text
        self._shows_json = _as_json(arguments) in as_text and not differs
        call = _call(arguments)
        del call["content"]
        self._takes_no_content = bool(self._try_render([user, call]))

    def _shows_content(self, role: str, content: Any) -> bool:
        """Whether the template shows the text of this content.

        If the template writes the content's parts as JSON, the text does not count as shown.
        """
        beginnings: dict[str, list[Message]] = {
            "assistant": [_message("user")],
            "tool": [_message("user"), _call({})],
        }
        before = beginnings.get(role, [])
        probe: Message = {"role": role, "content": content}
        after = [_message("user")] if role in ("system", "developer") else []
        as_texts = [*before, probe, *after]
        as_parts = [*map(_in_parts, before), probe, *map(_in_parts, after)]
        is_shown = False
        # Render the second chat even if the first one already shows the content, because rendering
        # also detects whether the template reads the time.
        for chat in (as_texts, as_parts):
            text = self._try_render(chat, is_shaped=True)
            is_shown = is_shown or (PLACEHOLDER in text and not _PARTS_AS_JSON.search(text))
        return is_shown

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The control tokens: all special tokens, and each added token that the template writes."""
        # Answers and prompts often contain paired tags such as ``<think>`` and ``</think>``, which
        # do not start a turn. So refuse such tags only in texts that the template puts between
        # tags, such as the arguments of tool calls.
        tokenizer = self.tokenizer
        added = {
            str(token.content): bool(token.special)
            for token in tokenizer.added_tokens_decoder.values()
        }
        special: set[str] = set(tokenizer.all_special_tokens)
        for token, is_special in added.items():
            if is_special:
                special.add(token)
        # A template may assemble a control token from pieces, such as '<|' + role + '|>'. Then the
        # source of the template does not contain the token. So search for tokens in renderings,
        # too.
        written = self.text
        turns = [_message(role) for role in ("system", "user", "assistant", "user")]
        for chat in (turns, turns[1:], turns[1:2]):
            written += self._try_render(chat, add_generation_prompt=True)
        others = {token for token in added if token in written} - special
        paired: set[str] = set()
        for token in others:
            if tag := _PAIRED_TAG.fullmatch(token):
                pair = {f"<{tag[1]}>", f"</{tag[1]}>"}
                if pair <= added.keys():
                    paired |= pair
        return ControlTokens(_any_of(special | others - paired), _any_of(special | others))

    def check_texts(self, messages: Sequence[Message], tools: Tools = None) -> None:
        """Reject a chat with control tokens, unpaired surrogates, or too many characters."""
        control = self.control_tokens
        n_chars = 0
        # Each tuple has three entries: a name for error messages, a value, and a pattern that must
        # not match in any text of the value. For example, a text inside a tool call must not
        # contain the token that ends the tool call.
        parts: list[tuple[str, Any, re.Pattern[str]]] = []
        for index, message in enumerate(messages):
            for key, value in message.items():
                is_framed = key != "content" or message["role"] == "tool"
                pattern = control.framed if is_framed else control.everywhere
                if key == "content" and not isinstance(value, str):
                    # The template writes the parts of a content one after another, so a control
                    # token may begin in one part and end in the next. So also search the
                    # concatenated parts.
                    value = [*value, "".join(content_texts(message))]
                parts.append((f"message {index}", value, pattern))
        for index, tool in enumerate(tools or ()):
            parts.append((f"tool {index}", tool, control.framed))
        for where, value, pattern in parts:
            for text in texts(value):
                n_chars += len(text)
                if n_chars > MAX_CHAT_CHARS:
                    raise Rejection(
                        RejectReason.TOO_LONG, f"it has more than {MAX_CHAT_CHARS:,} characters"
                    )
                if control_token := pattern.search(text):
                    raise Rejection(
                        RejectReason.SPECIAL_TOKEN_IN_CONTENT,
                        f"{where} contains {control_token.group()!r}",
                    )
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    raise Rejection(
                        RejectReason.NO_UNICODE,
                        f"{where} has {text[error.start]!a} as character {error.start:,}",
                    ) from error

    def check_prompt(self, messages: Sequence[Message], tools: Tools = None) -> None:
        """Raise PromptUnusable if a text of the messages or tools cannot be part of a prompt."""
        try:
            self.check_texts(messages, tools)
        except Rejection as rejection:
            raise PromptUnusable(
                f"{rejection.reason} ({rejection.detail}). Correct the text."
            ) from rejection


def _common_start(text: str, other: str) -> str:
    """Return the longest text with which both texts begin."""
    n_equal = 0
    for character, expected in zip(text, other, strict=False):
        if character != expected:
            break
        n_equal += 1
    return text[:n_equal]


def _message(role: str) -> Message:
    return {"role": role, "content": "a"}


def _call(arguments: Any) -> Message:
    """Make a message that calls a tool and has an empty content."""
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
    """Yield every text in messages or tools, at every depth. Keys of objects are yielded, too."""
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
    """Parse the arguments of a chat template, as the user gives them.

    ``texts`` are ``name=value`` texts. In these, a value that is valid JSON is decoded, and any
    other value stays a text. The user may also give one JSON object. The command line splits it at
    its commas, so ``texts`` are then the pieces of this object.

    Raises:
        OptionInvalid: a text is malformed, or names an argument that moa-data sets itself.
    """
    json_text = ",".join(texts).strip()
    if json_text.startswith("{"):
        try:
            arguments: dict[str, Any] = json.loads(json_text)
        except ValueError as error:
            raise OptionInvalid(
                f"`template_kwargs` is {json_text!r}, which is not a JSON object ({error})"
            ) from error
    else:
        arguments = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals:
                raise OptionInvalid(
                    f"`template_kwargs` has {text!r}, expected NAME=VALUE such as "
                    "enable_thinking=false"
                )
            arguments[name.strip()] = value
            with suppress(ValueError, RecursionError):
                arguments[name.strip()] = json.loads(value)
    for name in arguments:
        if name in _TAKEN or not name.isidentifier():
            raise OptionInvalid(
                f"`template_kwargs` has {name!r}, which is not the name of a variable, or is the "
                "name of a variable that moa-data sets itself. Give another variable of the chat "
                "template"
            )
    return arguments


def choose_template_arguments(
    given: Sequence[str], drafters: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Choose the arguments of the chat template.

    Args:
        given: ``name=value`` texts. If there are any, only these arguments are used.
        drafters: name of each drafter -> the facts about its target that the drafter has recorded.
            If ``given`` is empty, the result is the arguments with which the drafters' training
            chats were rendered.

    Raises:
        OptionInvalid: the drafters were trained with different arguments, or a text is malformed.
    """
    if given:
        return parse_template_arguments(given)
    recorded = {name: target.get(RECORDED, "{}") for name, target in drafters.items() if target}
    if len(set(recorded.values())) > 1:
        raise OptionInvalid(
            "the drafters were trained on chats that were rendered with different arguments of the "
            "chat template: "
            + "; ".join(f"{name} {text}" for name, text in recorded.items())
            + ". Choose the arguments for decoding with `template_kwargs=NAME=VALUE`."
        )
    return parse_template_arguments([next(iter(recorded.values()), "{}")])
