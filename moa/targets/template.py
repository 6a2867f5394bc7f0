"""The chat template of a target: rendered so that it ends, gives the same text every day, and no text forges a turn.

A template is a program that comes with the model. It runs in the sandbox of transformers. Besides, the time that it can
ask for is fixed, functions that give random values are refused, and loops over `range`, its output and the numbers in
it are bounded. Nested loops over the characters of a text are not: a malicious folder can keep the process busy.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.exceptions import TemplateError as JinjaError
from transformers.utils.chat_template_utils import _compile_jinja_template

from ...errors import OptionInvalid, PromptUnusable, TemplateError
from ...text import first_line
from .chat import Message, RejectReason

Tools = Sequence[Mapping[str, Any]] | None

# Some templates write today's date into the prompt, and equal inputs must give equal tokens: each gets this one.
_DATE = {"date_string": "26 Jul 2024"}
TEMPLATE_TIME = datetime(2024, 7, 26)  # what `strftime_now` gives
MAX_CHAT_CHARS = 1 << 24  # several times what the longest context holds
RECORDED = "template_kwargs"  # key under which a store, and a drafter as JSON, record the arguments of the template
# What a template can raise while it renders a chat.
RENDER_ERRORS = (
    JinjaError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, RecursionError,
)  # fmt: skip

OPEN, CLOSE = "\ue0f0moa-open\ue0f1", "\ue0f0moa-close\ue0f1"
PLACEHOLDER = "\ue0f0moa-response\ue0f1"
_TAG = re.compile(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}")
_PAIRED_TAG = re.compile(r"</?([^<>/|\s]+)>")
_MAX_RANGE_ITEMS = 1 << 20
_WIDTH = re.compile(r"[%:{.][^A-Za-z%\s]{0,4}?(\d{6,99})")  # in a format, such as %2000000000d and {:>2000000000}
_SPARE_CHARS = 1 << 20
_CHARS_PER_CHAR = 16
_CHARS_PER_TEXT = 4096
_TAKEN = {
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip


class ControlTokens(NamedTuple):
    """Patterns of tokens that mean something else than their text."""

    everywhere: re.Pattern[str]  # those that no text may hold
    framed: re.Pattern[str]  # those, and the ones that frame tools, calls and results, for texts in such a frame


def template_text(tokenizer: Any) -> str:
    """Find the source of a tokenizer's chat template; raises TemplateError where there is none."""
    if not getattr(tokenizer, "chat_template", None):
        raise TemplateError(
            "the tokenizer has no chat template, so chats cannot be turned into tokens. "
            "Use an instruction-tuned model, or put its chat_template.jinja into the model folder."
        )
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise TemplateError(f"the tokenizer has several chat templates and none is the default: {error}") from error


def _check_constants(tree: nodes.Template) -> None:
    """Refuse numbers and widths of formats that stand for more text than any chat has."""
    asked = [0]
    for product in tree.find_all(nodes.Mul):  # which compiling computes, and a text is multiplied by repeating it
        if product.find(nodes.Pow):
            raise TemplateError("the chat template multiplies by a power. Correct the template.")
        asked.append(math.prod(abs(one.value) for one in product.find_all(nodes.Const) if isinstance(one.value, int)))
    for node in tree.find_all(nodes.Const):
        widths = [int(width) for width in _WIDTH.findall(node.value)] if isinstance(node.value, str) else []
        asked += [node.value] if isinstance(node.value, int) else widths
    if max(asked) > MAX_CHAT_CHARS:
        raise TemplateError(f"the chat template asks for {max(asked):,} characters. Correct the template.")


class ChatTemplate:
    """A tokenizer's chat template with its arguments beside the chat, such as Qwen3's ``enable_thinking``.

    ``where``: the target, for messages.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None, where: str = "the target") -> None:
        self.tokenizer, self.arguments = tokenizer, dict(arguments or {})
        self.asked_the_time = False  # whether a rendering has used TEMPLATE_TIME so far
        try:
            self.text = template_text(tokenizer)
            if not getattr(tokenizer, "is_fast", False):
                raise TemplateError("the tokenizer gives no offsets. Save it as a fast tokenizer (tokenizer.json).")
            self._check_program()
        except TemplateError as error:
            raise TemplateError(f"{where}: {error}") from error
        user, bos = {"role": "user", "content": "a"}, tokenizer.bos_token_id
        plain, prompt = self._try_render([user]), self._try_render([user], add_generation_prompt=True)
        answered = self._try_render([user, {"role": "assistant", "content": PLACEHOLDER}]) or ""
        # The template's ``text`` with markers in place of its generation tags; None where it has none.
        self.marked = _mark_generation_tags(self.text) if _TAG.search(self.text) else None
        self.has_generation_prompt = None not in (plain, prompt) and plain != prompt  # after a user message
        self.end_of_turn = answered.partition(PLACEHOLDER)[2].rstrip()  # what it writes after a last response
        # Whether the tokenizer itself puts a BOS before plain text.
        self.adds_bos = bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        add_generation_prompt: bool = False,
        template: str | None = None,
    ) -> str:
        """Render a chat; raises one of RENDER_ERRORS where the template, by default ``text``, refuses it or fails."""
        text = template or self.text
        lengths = [len(value) for value in texts([*messages, *(tools or ())])]
        limit = _SPARE_CHARS + _CHARS_PER_CHAR * sum(lengths) + _CHARS_PER_TEXT * len(lengths)
        with self._bounded(_compile_jinja_template(text), limit):
            rendered: str = self.tokenizer.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                chat_template=text,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **(_DATE | self.arguments),
            )
        return rendered

    def _try_render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str | None:
        try:
            return self.render(messages, add_generation_prompt=add_generation_prompt)
        except RENDER_ERRORS:
            return None

    def _check_program(self) -> None:
        """Refuse a template that does not compile, uses random values, or does not end for the shortest chat."""
        try:
            # Parsed before it is compiled, which computes with its constants.
            tree = _compile_jinja_template("").environment.parse(self.text)
            _check_constants(tree)
            _compile_jinja_template(self.text)
        except (JinjaError, RecursionError) as error:
            raise TemplateError(f"the chat template is no Jinja template ({first_line(error)}). Restore it.") from error
        by_chance = {node.name for node in tree.find_all(nodes.Filter) if node.name == "random"}
        by_chance |= {node.name for node in tree.find_all(nodes.Name) if node.name == "lipsum"}
        if by_chance:
            raise TemplateError(
                f"the chat template uses {', '.join(sorted(by_chance))}, so that equal chats give other tokens each "
                "time. Correct the template."
            )
        try:
            self.render([{"role": "user", "content": "a"}], add_generation_prompt=True)
        except (OverflowError, RecursionError) as error:
            raise TemplateError(
                f"the chat template does not end: {first_line(error)}. Correct the template."
            ) from error
        except RENDER_ERRORS:
            pass  # the template wants other chats; each is looked at by itself

    @contextmanager
    def _bounded(self, compiled: Any, limit: int) -> Iterator[None]:
        """Lend a compiled template, which transformers shares among its callers, our clock and bounds."""
        n_items = 0

        def strftime_now(form: str) -> str:
            self.asked_the_time = True
            return TEMPLATE_TIME.strftime(form)

        def bounded_range(*bounds: int) -> range:
            nonlocal n_items
            numbers = range(*bounds)
            n_items += len(numbers)
            if n_items > _MAX_RANGE_ITEMS:
                raise OverflowError(f"it counts further than {_MAX_RANGE_ITEMS:,} in its loops")
            return numbers

        def concat(pieces: Iterable[str]) -> str:
            found, n_chars = [], 0
            for piece in pieces:
                found.append(piece)
                n_chars += len(piece)
                if n_chars > limit:
                    raise OverflowError(f"it writes more than {limit:,} characters")
            return "".join(found)

        replaced = {name: compiled.globals.get(name) for name in ("strftime_now", "range")}
        compiled.globals.update(strftime_now=strftime_now, range=bounded_range)
        compiled.environment.concat = concat
        try:
            yield
        finally:
            compiled.globals.update(replaced)
            del compiled.environment.concat

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The tokens that delimit turns: all special tokens, and other added tokens that the template writes."""
        # Of the latter, paired tags (``<think>`` and ``</think>``, ``<tool_call>``) open no turn, and answers and
        # prompts often hold them, so that they are refused only in text that the template puts between such tags.
        tokenizer = self.tokenizer
        added = {str(token.content): bool(token.special) for token in tokenizer.added_tokens_decoder.values()}
        special = {*tokenizer.all_special_tokens, *(token for token, is_special in added.items() if is_special)}
        turns: list[Message] = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
        probes = (self._try_render(chat, add_generation_prompt=True) for chat in (turns, turns[1:], turns[1:2]))
        # A template may put a token together: '<|' + role + '|>'.
        written = self.text + "".join(filter(None, probes))
        others = {token for token in added if token in written} - special
        tags = {match[1] for token in others if (match := _PAIRED_TAG.fullmatch(token))}
        pairs = [{f"<{tag}>", f"</{tag}>"} for tag in tags]
        paired = {token for pair in pairs if pair <= added.keys() for token in pair}
        return ControlTokens(_any_of(special | others - paired), _any_of(special | others))

    def find_unusable_text(self, messages: Sequence[Message], tools: Tools = None) -> tuple[RejectReason, str] | None:
        """Find control tokens, halves of surrogate pairs and too many characters: why, and what was found where."""
        control, n_chars = self.control_tokens, 0
        # (where, values, pattern that their texts may not match): text within a frame of the template may not close it.
        parts: list[tuple[str, Any, re.Pattern[str]]] = []
        for index, message in enumerate(messages):
            for key, value in message.items():
                is_framed = key != "content" or message["role"] == "tool"
                parts.append((f"message {index}", value, control.framed if is_framed else control.everywhere))
        parts += [(f"tool {index}", tool, control.framed) for index, tool in enumerate(tools or ())]
        for where, text, pattern in ((where, text, each) for where, value, each in parts for text in texts(value)):
            n_chars += len(text)
            if n_chars > MAX_CHAT_CHARS:
                return RejectReason.TOO_LONG, f"more than {MAX_CHAT_CHARS:,}"
            if found := pattern.search(text):
                return RejectReason.SPECIAL_TOKEN_IN_CONTENT, f"{where} contains {found.group()!r}"
            try:
                text.encode()
            except UnicodeEncodeError as error:
                return RejectReason.NO_UNICODE, f"{where}, character {error.start:,}: {text[error.start]!a}"
        return None

    def check_prompt(self, messages: Sequence[Message], tools: Tools = None) -> None:
        """Refuse texts that cannot be part of a prompt."""
        if unusable := self.find_unusable_text(messages, tools):
            raise PromptUnusable("{}: {}. Correct the text.".format(*unusable))


def _mark_generation_tags(template: str) -> str:
    """Replace each tag by a pair of `if` tags around a marker, which keep white-space control at both ends."""

    def replace(match: re.Match[str]) -> str:
        left, name, right = match.groups()
        if name == "generation":
            return f"{{%{left} if true %}}{{{{ '{OPEN}' }}}}{{% if true {right}%}}"
        return f"{{%{left} endif %}}{{{{ '{CLOSE}' }}}}{{% endif {right}%}}"

    return _TAG.sub(replace, template)


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
    return re.compile("|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True))) or "(?!)")


def parse_template_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Read ``name=value`` texts, or a JSON object that was cut at its commas; a value that is JSON is parsed."""
    whole = ",".join(texts).strip()
    if whole.startswith("{"):
        try:
            found = json.loads(whole)
        except ValueError as error:
            raise OptionInvalid(f"template_kwargs is {whole!r}, which is no JSON object ({error})") from error
    else:
        found = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or not name.strip():
                raise OptionInvalid(f"template_kwargs has {text!r}, expected NAME=VALUE such as enable_thinking=false")
            try:
                found[name.strip()] = json.loads(value)
            except ValueError:
                found[name.strip()] = value
    for name in found:
        if name in _TAKEN:
            raise OptionInvalid(f"template_kwargs has {name}, which the template gets from elsewhere; leave it out")
        if not name.isidentifier():
            raise OptionInvalid(f"template_kwargs has {name!r}, expected the name of a variable of the template")
    return dict(found)


def choose_template_arguments(given: Sequence[str], drafters: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
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
