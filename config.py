"""Base class of all settings. The settings of each command are a frozen pydantic model.

Settings can be divided into groups. A group is a model inside the model of a command, and contains
no further groups. A setting may choose between several kinds of something. For example, there are
several kinds of drafters. Each kind has a group of its own, and the setting ``kind`` of this group
names the kind. The type of the command's field ``drafter`` is the union of these groups.

The text below a field is the help text of the setting. A setting with the type ``Common`` is shown
on the short page of ``--help``::

    class Optimizer(Config):
        kind: Literal["adamw", "muon"] = "adamw"
        '''AdamW, or Muon for the matrices.'''
        learning_rate: Common[Positive] = 3e-5
        '''Learning rate at the end of the schedule.'''

    class TrainConfig(Config):
        optimizer: Optimizer = Optimizer()

Each setting has a name and a key. In the example, ``learning_rate`` is a name, and
``optimizer.learning_rate`` is its key. The name is unique within a command. The setting with the
key ``optimizer.kind`` has the name ``optimizer``. Python, YAML files and ``--set`` accept both
names and keys. The flag is made from the name: ``--learning-rate``.

Values can come from several sources. Each source overrides the sources before it: defaults, a named
preset, a YAML file (``--config``), ``--set``, flags.
"""

import difflib
import json
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from .errors import DrafterError, OptionInvalid

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
SamplingSeed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Dtype = Literal["float32", "bfloat16", "float16"]

_Value = TypeVar("_Value")
_COMMON = "common"
# The type of a setting that most users need. The short help page shows settings of this type.
Common = Annotated[_Value, _COMMON]


def _as_words(items: Iterable[Any] | None) -> tuple[Any, ...]:
    """Convert the mappings in a list to NAME=VALUE texts, and keep all other items unchanged.

    In a YAML file, ``- enable_thinking: false`` is a mapping.
    """
    texts: list[Any] = []
    for item in items or ():
        if not isinstance(item, Mapping):
            texts.append(item)
            continue
        for name, value in item.items():
            texts.append(f"{name}={json.dumps(value)}")
    return tuple(texts)


TemplateKwargs = Annotated[tuple[str, ...], BeforeValidator(_as_words)]
"""Arguments of a chat template: NAME=VALUE texts, or the text of one JSON object.

The value of a flag is split at commas, so the JSON object may arrive as several texts.
"""
Values = Mapping[str, Any]
"""Values of settings, in one of two forms.

- Flat: maps the key of a setting, such as ``optimizer.learning_rate``, or its name to its value.
- Nested, as :meth:`Config.grouped` returns them: maps the name of a group, such as ``optimizer``, to
  a mapping with the names and values of the settings in this group.
"""
Layers = Sequence[tuple[str, Values]]
"""Sources of settings, as pairs: the name of a source for messages, and the values that it sets.

Each source overrides the sources before it.
"""
Presets = Mapping[str, Values]
Earlier = Callable[[Values], tuple[str, dict[str, Any]]]
"""Function that finds the settings of an earlier run.

The function takes the values that are given for this run. It returns the name of the earlier run
for messages, and the values of the earlier run. Both the given and the returned values are nested
by group.
"""


class Setting(NamedTuple):
    """One setting of a stage."""

    key: str
    name: str
    field: FieldInfo
    # If the setting is in a group that has several kinds, this is the kind of the group, for
    # example the kind of a drafter. Otherwise, the value is None.
    kind: str | None
    is_common: bool  # Whether the short help page shows the setting.


class Config(BaseModel):
    """Base class of settings. The values of settings are validated when an object is created."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, coerce_numbers_to_str=True,
        allow_inf_nan=False, defer_build=True,
    )  # fmt: skip

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**type(self).grouped(values))
        except ValidationError as error:
            raise OptionInvalid(_message(type(self), error, [("", values)])) from error

    # This attribute tells pydantic not to call ``Config.__init__`` for the groups inside the
    # settings. With a call for each group, an error in a group would not name the group.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # pydantic reads it

    def problems(self) -> list[str]:
        """Return one line for each conflict between settings.

        The method is called only if each setting has a valid value by itself.
        """
        return []

    def refusal_of(self, part: Callable[[], object]) -> list[str]:
        """Check these settings by calling ``part``, which builds something from them.

        For example, ``part`` builds the shape of a draft tree. If ``part`` raises a DrafterError,
        return a list that contains the error's message. Otherwise, return an empty list.
        """
        try:
            part()
        except DrafterError as error:
            return [str(error).rstrip(".")]
        return []

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if messages := self.problems():
            raise ValueError("; ".join(messages))
        return self

    @model_validator(mode="before")
    @classmethod
    def _read_values(cls, values: Any) -> Any:
        """Convert values of flags and files to values in Python.

        If the setting is a number, True and False are converted to texts, so that pydantic refuses
        them instead of accepting True as 1.
        """
        if not isinstance(values, dict):
            return values
        converted: dict[Any, Any] = {}
        for name, value in values.items():
            field = cls.model_fields.get(name)
            converted[name] = value if field is None else _read_value(value, field)
        return converted

    @classmethod
    def settings(cls) -> Iterator[Setting]:
        """Yield every setting, in the order of the groups.

        If several kinds of a group have a setting with the same name, a setting is yielded for each
        kind.
        """
        for name, field in cls.model_fields.items():
            groups = _groups(field)
            is_common = _COMMON in field.metadata
            if not groups:
                yield Setting(name, name, field, None, is_common)
            if len(groups) > 1:
                kinds = tuple(map(_default_kind, groups))
                choice = FieldInfo(
                    annotation=Literal[kinds],  # type: ignore[arg-type]  # mypy takes no literal made while running
                    default=kinds[0],
                    description=field.description,
                )
                yield Setting(f"{name}.kind", name, choice, None, is_common)
            for group in groups:
                kind = _default_kind(group) if len(groups) > 1 else None
                for setting in group.settings():
                    if not (kind and setting.name == "kind"):
                        setting_name = name if setting.name == "kind" else setting.name
                        key = f"{name}.{setting.key}"
                        yield setting._replace(key=key, name=setting_name, kind=kind)

    @classmethod
    def grouped(cls, values: Values) -> dict[str, Any]:
        """Convert values of settings to the nested form (see ``Values``).

        The result maps the name of each given field to its value. The value of a group is a dict
        that maps names of the group's settings to their values.
        """
        keys = {setting.name: setting.key for setting in cls.settings()}
        grouped = {name: value for name, value in values.items() if name in cls.model_fields}
        for name, value in values.items():
            if name in cls.model_fields:
                continue
            key = keys.get(name, name)
            group, _, name_in_group = key.partition(".")
            group_values = grouped.get(group)
            if (
                isinstance(group_values, Mapping)
                and group_values.get(name_in_group, value) != value
            ):
                raise OptionInvalid(
                    f"{name_in_group} is given twice with different values, {value!r} and "
                    f"{group_values[name_in_group]!r}. Leave out one of them."
                )
            grouped = _merge(grouped, _nested(key, value))
        return grouped

    @classmethod
    def of(cls, **named: Any) -> Self:
        """Create the settings. An argument sets the setting that has the argument's name.

        This method also accepts the name of a setting that is inside a group. In a call of the
        class itself, type checkers would refuse such a name.
        """
        return cls(**named)

    def named(self) -> dict[str, Any]:
        """Return a dict that maps names of settings to values. :meth:`of` accepts such values."""
        named: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if not isinstance(value, Config):
                named[name] = value
                continue
            for inner_name, inner_value in value.named().items():
                named[name if inner_name == "kind" else inner_name] = inner_value
        return named

    def replaced(self, **named: Any) -> Self:
        """Return a copy in which the settings in ``named`` have the given values."""
        return self.of(**self.named() | named)

    def to_yaml(self) -> str:
        """Return the settings as YAML that :func:`read_config_file` can read."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class TargetSettings(Config):
    """Which target is loaded for decoding, and how."""

    model: Common[str]
    """The target, which is the large language model that writes the final text: a folder, a GGUF
    file, or a Hugging Face Hub id (OWNER/NAME)."""
    revision: str | None = None
    """Branch, tag or commit of the target, if it is a model on the Hugging Face Hub. A commit
    always gives the same weights. Default: main."""
    template_kwargs: TemplateKwargs = ()
    """Arguments for the chat template, as NAME=VALUE; for example enable_thinking=false for Qwen3.
    Default: the arguments that are recorded in the store that the drafters were trained from."""
    dtype: Common[Dtype] = "float32"
    """Data type of the weights and computations of target and drafters. Only float32 guarantees
    exactly the same tokens as decoding without drafts. bfloat16 and float16 need half the
    memory."""
    device: Common[str] = "auto"
    """Device that runs the target: auto, cpu, cuda, or one GPU such as cuda:1. auto takes a GPU if
    the machine has one, otherwise the CPU."""


class SamplingSettings(Config):
    """Settings of sampling."""

    temperature: Common[NonNegative] = 0.0
    """Sampling temperature. 0 always takes the most likely token (greedy decoding). Above 0, tokens
    are sampled from the target's distribution, which drafters do not change."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the smallest set of most likely tokens whose probabilities add up to at
    least this value. 1 allows all tokens."""
    top_k: Natural = 0
    """Sample only from this number of most likely tokens. 0 allows all tokens."""
    repetition_penalty: Positive = 1.0
    """A value above 1 makes tokens less likely if they have already occurred in the prompt or the
    answer: positive logits are divided by the value, negative logits are multiplied by it. 1 turns
    this off."""
    seed: SamplingSeed = 0
    """Seed of the random numbers for sampling. With several prompts, prompt i uses seed + i,
    counted from 0."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for ``SamplingConfig``: all settings except the seed."""
        return self.model_dump(exclude={"seed"})


def _groups(field: FieldInfo) -> list[type[Config]]:
    """Return the classes of the groups that a field can hold.

    If the field is a single setting instead of a group, the list is empty.
    """
    members = typing.get_args(field.annotation) or [field.annotation]
    return [member for member in members if isinstance(member, type) and issubclass(member, Config)]


def _read_value(value: Any, field: FieldInfo) -> Any:
    groups = _groups(field)
    kinds = plain_types(field.annotation)
    if groups and "kind" in groups[0].model_fields:
        if isinstance(value, str):
            return {"kind": value}
        return {"kind": _default_kind(groups[0])} | value if isinstance(value, dict) else value
    if tuple in kinds and value is not None:
        return _read_items(value)
    if value == "none" and type(None) in kinds and str not in kinds:
        return None
    return str(value).lower() if isinstance(value, bool) and {int, float} & {*kinds} else value


def _read_items(value: Any) -> tuple[Any, ...]:
    """Convert the value of a list setting to a tuple. Empty items are left out.

    The value may be a list, or one text with commas between the items, as in a flag.
    """
    if isinstance(value, str):
        items: Iterable[Any] = value.split(",")
    elif isinstance(value, list | tuple):
        items = value
    else:
        items = [value]
    stripped_items: list[Any] = []
    for item in items:
        stripped = item.strip() if isinstance(item, str) else item
        if stripped != "":
            stripped_items.append(stripped)
    return tuple(stripped_items)


def _default_kind(group: type[Config]) -> str:
    return str(group.model_fields["kind"].default)


def plain_types(annotation: Any) -> list[Any]:
    """Return the types and the literal words that a type annotation allows for a value.

    For a list setting, the result contains only ``tuple``, not the types of the items.
    """
    if (origin := typing.get_origin(annotation)) is tuple:
        return [tuple]
    if origin is Annotated:
        return plain_types(typing.get_args(annotation)[0])
    if not origin:
        return [annotation]
    types: list[Any] = []
    for argument in typing.get_args(annotation):
        types += plain_types(argument)
    return types


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Nest a value by its key: the result for the key ``a.b`` is ``{"a": {"b": value}}``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _merge(weak: Values, strong: Values) -> dict[str, Any]:
    merged = dict(weak)
    for key, value in strong.items():
        before = merged.get(key)
        before = dict(before) if isinstance(before, Config) else before
        if isinstance(value, Mapping) and isinstance(before, str):
            before = {"kind": before}
        elif isinstance(value, str) and isinstance(before, Mapping):
            value = {"kind": value}
        merged[key] = (
            _merge(before, value)
            if isinstance(before, Mapping) and isinstance(value, Mapping)
            else value
        )
    return merged


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings. Dashes in keys are replaced by underscores."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionInvalid(
            f"`config_path={path}` cannot be read ({error.strerror or error}). Give the path of a "
            "YAML file."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionInvalid(
            f"`config_path={path}` is not a valid YAML file ({' '.join(str(error).split())}). "
            "Correct the file."
        ) from error
    if not isinstance(loaded, dict | None):
        raise OptionInvalid(
            f"`config_path={path}` contains a {type(loaded).__name__}, expected settings. Write "
            "them as lines of the form 'name: value'."
        )
    return dict(_with_underscores(loaded or {}))


def _with_underscores(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {str(key).replace("-", "_"): _with_underscores(value) for key, value in values.items()}


def read_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Read texts such as ``optimizer.kind=muon`` into a dict. The value ``none`` becomes None."""
    keys: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise OptionInvalid(
                f"`assignments` has {text!r}, expected NAME=VALUE, for example "
                "`assignments=optimizer.learning_rate=1e-4`."
            )
        keys[key.strip().replace("-", "_")] = (
            None if value.strip().lower() in ("none", "null") else value.strip()
        )
    return keys


def resolve(
    config_class: type[Config],
    flags: Values,  # Maps the name or key of each given setting to its value.
    config_path: Path | None = None,
    assignments: Iterable[str] = (),
    # Maps the name of each preset to its nested values. If a source contains the key ``preset``,
    # the value of this key is the name of the preset to use.
    presets: Presets | None = None,
    earlier: Earlier | None = None,
) -> Any:
    """Merge the settings from all sources.

    The sources are defaults, earlier settings, preset, file, assignments and flags. Each source
    overrides the sources before it.

    Raises:
        OptionInvalid: a setting cannot be used. The message names each such setting and its source.
    """
    sources = [
        (f"`config_path={config_path}`", read_config_file(config_path) if config_path else {}),
        ("`assignments`", read_assignments(assignments)),
        ("", flags),
    ]
    layers = [(source, config_class.grouped(values)) for source, values in sources]
    if presets:
        # If several sources have the key ``preset``, the last of these sources counts. The value of
        # the key may be None, which means that no preset is used.
        preset: Any = None
        for _, layer in layers:
            preset = layer.pop("preset", preset)
        if preset is not None:
            if preset not in presets:
                raise OptionInvalid(
                    f"the preset {preset!r} does not exist "
                    f"({_hint(str(preset), presets, 'presets')})."
                )
            layers.insert(0, (f"preset {preset}", dict(presets[preset])))
    merged: dict[str, Any] = {}
    for _, layer in layers:
        merged = _merge(merged, layer)
    if earlier:
        layers.insert(0, earlier(merged))
        merged = _merge(layers[0][1], merged)
    try:
        return config_class.model_validate(merged)
    except ValidationError as error:
        raise OptionInvalid(_message(config_class, error, layers)) from error


def _message(config_class: type[Config], error: ValidationError, layers: Layers) -> str:
    names = {setting.key: setting.name for setting in config_class.settings()}
    problems: dict[str, list[str]] = {}
    missing = []
    for item in error.errors(include_url=False):
        key, kind = _key_of(config_class, item["loc"])
        name = names.get(key, key)
        if item["type"] == "missing":
            missing.append(f"`{name}`")
            continue
        source = _source_of(layers, key)
        called = name if source else f"`{name}`"
        is_unknown = item["type"] == "extra_forbidden"
        text = _unknown(config_class, name, called, kind) if is_unknown else _problem(called, item)
        problems.setdefault(source and f"{source}: ", []).append(text)
    lines = [where + "; ".join(texts) for where, texts in problems.items()]
    if missing:
        # Suggest a file only if there are several sources, as in a command. Settings that are
        # created in Python have a single source.
        where = ". Give them, or a file with them as `config_path=FILE`" if layers[1:] else ""
        lines.append(f"required settings are missing ({', '.join(missing)}){where}")
    return f"{'; '.join(lines)}."


def _source_of(layers: Layers, key: str) -> str:
    """Return the name of the last source that contains a value for a key.

    If the sources do not contain a value, return an empty text.
    """
    group, _, name = key.partition(".")
    for source, layer in layers[::-1]:
        values = layer.get(group, {})
        if group in layer and (not name or (isinstance(values, Mapping) and name in values)):
            return source
    return ""


def _key_of(config_class: type[Config], loc: tuple[int | str, ...]) -> tuple[str, str | None]:
    """Return the key and the kind of the setting that a pydantic error is about.

    If a group has several kinds, for example kinds of drafters, pydantic's location of the error
    contains the kind, between the name of the group and the name of the setting. If the setting is
    not in such a group, the returned kind is None.
    """
    if not loc:
        return "", None
    name, *rest = map(str, loc)
    field = config_class.model_fields.get(name)
    groups = _groups(field) if field else []
    kind = rest.pop(0) if len(groups) > 1 and rest else None
    if groups and rest:
        name = f"{name}.{rest[0]}"
    return name, kind


# Maps error types of pydantic to texts about the expected value. A key is either an error type or
# the first word of an error type. The names in braces are replaced by values from the error.
_WANTED = {
    "greater_than_equal": "at least {ge}", "greater_than": "above {gt}",
    "less_than_equal": "at most {le}", "less_than": "below {lt}",
    "literal_error": "one of {expected}", "union_tag_invalid": "one of {expected_tags}",
    "too_short": "at least {min_length}", "int": "a whole number", "float": "a number",
    "bool": "true or false", "string": "text", "tuple": "a list", "model": "a group of settings",
    "finite": "a finite number",
}  # fmt: skip


def _problem(name: str, item: ErrorDetails) -> str:
    """Describe the error of one setting: the given value, and what was expected."""
    context = item.get("ctx", {})
    if item["type"] == "value_error":
        return str(context["error"])
    given_value = context["tag"] if item["type"] == "union_tag_invalid" else item["input"]
    wanted = _WANTED.get(item["type"]) or _WANTED.get(item["type"].partition("_")[0]) or item["msg"]
    words: dict[str, str] = {}
    for placeholder, value in context.items():
        if isinstance(value, float):
            words[placeholder] = f"{value:g}"
        else:
            words[placeholder] = str(value).replace("'", "").replace(" or ", ", ")
    return f"{name} is {given_value!r:.80}, expected {wanted.format(**words)}"


def _unknown(config_class: type[Config], name: str, called: str, kind: str | None) -> str:
    settings = list(config_class.settings())
    owners = [setting.kind for setting in settings if setting.name == name and setting.kind]
    if owners:
        return f"{called} is a setting of {' or '.join(owners)}, not of {kind}; leave it out"
    names = sorted({setting.name for setting in settings})
    last = name.rpartition(".")[2]
    hint = _hint(last if last in names else name, names, "settings")
    return f"the setting {name!r} does not exist ({hint})"


def _hint(name: str, known: Collection[str], kind: str) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else f"the {kind} are {', '.join(known)}"
