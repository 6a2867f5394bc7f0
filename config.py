"""The base of all settings: frozen pydantic models, one per stage, with groups of settings inside.

A group is a model in a model; a choice between kinds of things (the drafter of a run) is a union of groups, told apart
by their ``kind``. The text under a field is its help text, and ``Common`` puts it on the short page of ``--help``::

    class Optimizer(Config):
        kind: Literal["adamw", "muon"] = "adamw"
        '''AdamW, or Muon for the matrices.'''
        learning_rate: Common[Positive] = 3e-5
        '''Learning rate at the end of the schedule.'''

    class TrainConfig(Config):
        optimizer: Optimizer = Optimizer()

``learning_rate`` is the name of a setting, which is unique in a stage, and ``optimizer.learning_rate`` its key; the
name of ``optimizer.kind`` is ``optimizer``. Python, YAML files and ``--set`` take either; the flag is
``--learning-rate``. Values are merged from weak to strong: defaults, a named preset, a YAML file (``--config``),
``--set``, flags.
"""

import difflib
import functools
import json
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
Dtype = Literal["float32", "bfloat16", "float16"]

_Value = TypeVar("_Value")
_COMMON = "common"
Common = Annotated[_Value, _COMMON]  # the type of a setting that most people look at first


def _as_words(items: Iterable[Any]) -> tuple[Any, ...]:
    """Turn mappings, as YAML has them, into NAME=VALUE texts as on the command line."""
    found: list[Any] = []
    for item in items:
        is_mapping = isinstance(item, Mapping)
        found += (
            [f"{name}={json.dumps(value)}" for name, value in item.items()]
            if is_mapping
            else [item]
        )
    return tuple(found)


TemplateKwargs = Annotated[tuple[str, ...], BeforeValidator(_as_words)]
"""Arguments of a chat template as NAME=VALUE, or as one JSON object that was cut at its commas."""
Presets = Mapping[str, Mapping[str, Any]]
Earlier = Callable[[Mapping[str, Any]], tuple[str, dict[str, Any]]]
"""Nested values that were given -> the name of a source for messages, and its nested values."""
Spell = Callable[[str], str]
"""Name of a setting -> how the user calls it: by its flag on the command line, by its name in Python."""


class Setting(NamedTuple):
    """One setting of a stage."""

    key: str
    name: str
    field: FieldInfo
    # of the group that has the setting; None where it is not a choice between kinds
    kind: str | None
    is_common: bool  # whether the short page of help shows it


class Config(BaseModel):
    """The base of settings, which are checked when they are made."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, coerce_numbers_to_str=True, allow_inf_nan=False,
        defer_build=True,
    )  # fmt: skip

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**type(self).grouped(values))
        except ValidationError as error:
            raise OptionInvalid(_message(type(self), error, [("", values)], str)) from error

    # Pydantic calls an __init__ that is not its own for groups too, whose errors would then have
    # lost their places.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # pydantic reads it

    def problems(self) -> list[str]:
        """List settings that do not fit together, one line each; called once each of them fits its field."""
        return []

    def refusal_of(self, part: Callable[[], object]) -> list[str]:
        """List why a part of it cannot be made, as :meth:`problems` does."""
        try:
            part()
        except DrafterError as error:
            return [str(error).rstrip(".")]
        return []

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if found := self.problems():
            raise ValueError("; ".join(found))
        return self

    @model_validator(mode="before")
    @classmethod
    def _read_values(cls, values: Any) -> Any:
        """Read what flags and files may write in another way than Python; true and false are not numbers there."""
        if not isinstance(values, dict):
            return values
        return {
            name: _read_value(value, cls.model_fields[name]) if name in cls.model_fields else value
            for name, value in values.items()
        }

    @classmethod
    def settings(cls) -> Iterator[Setting]:
        """Yield every setting, in the order of the groups; one that several kinds have comes once for each."""
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
                for own in group.settings():
                    if not (kind and own.name == "kind"):
                        own_name = name if own.name == "kind" else own.name
                        yield Setting(f"{name}.{own.key}", own_name, own.field, kind, own.is_common)

    @classmethod
    def grouped(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values with those that were given by their names in their groups."""
        found = {name: value for name, value in values.items() if name in cls.model_fields}
        if len(found) < len(values):
            keys = {setting.name: setting.key for setting in cls.settings()}
            by_name = {
                keys.get(name, name): value for name, value in values.items() if name not in found
            }
            for key, value in by_name.items():
                group, _, own = key.partition(".")
                given = found.get(group)
                if isinstance(given, Mapping) and given.get(own, value) != value:
                    raise OptionInvalid(
                        f"{own} is given twice, as {value!r} and as {given[own]!r}. Leave out one."
                    )
            found = _merge(found, nested(by_name))
        return found

    @classmethod
    def of(cls, **named: Any) -> Self:
        """Make it from settings by their names, which type checkers do not know."""
        return cls(**named)

    def named(self) -> dict[str, Any]:
        """Return the settings by their names, as :meth:`of` takes them."""
        found: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            inner = value.named() if isinstance(value, Config) else {name: value}
            found |= {name if key == "kind" else key: each for key, each in inner.items()}
        return found

    def replaced(self, **named: Any) -> Self:
        """Return a copy with some settings changed, by their names."""
        return self.of(**self.named() | named)

    def to_yaml(self) -> str:
        """Write it as YAML that ``--config`` reads back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    @classmethod
    def merged(cls, layers: Iterable[tuple[str, Mapping[str, Any]]], spell: Spell = str) -> Self:
        """Make it from several sources, from weak to strong: the name of each for messages, and its nested values.

        Raises OptionInvalid, naming each setting that cannot be used, and its source.
        """
        layers = list(layers)
        values: dict[str, Any] = {}
        for _, layer in layers:
            values = _merge(values, layer)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise OptionInvalid(_message(cls, error, layers, spell)) from error


class TargetSettings(Config):
    """Which target is loaded to decode with, and how."""

    model: Common[str]
    """The target: a folder, a GGUF file, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model; default: main."""
    template_kwargs: TemplateKwargs = ()
    """Arguments of the chat template, as NAME=VALUE, such as enable_thinking=false; default: those of the store that
    the drafters were trained from."""
    dtype: Common[Dtype] = "float32"
    """Dtype of target and drafters; only float32 promises the tokens of plain decoding."""
    device: Common[str] = "auto"
    """auto, cpu, cuda, cuda:1, ..."""


class SamplingSettings(Config):
    """Settings of sampling."""

    temperature: Common[NonNegative] = 0.0
    """0 decodes greedily; above it tokens are sampled, and drafting keeps the target's distribution."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens up to this cumulative probability."""
    top_k: Natural = 0
    """Sample from this many most likely tokens; 0 for all."""
    repetition_penalty: Positive = 1.0
    """Divide the logits of tokens that occurred by this."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Random seed; prompt i uses seed + i."""

    def arguments(self) -> dict[str, Any]:
        """Return what ``moa.decoding.sampling.SamplingConfig`` takes: all but the seed."""
        return self.model_dump(exclude={"seed"})


def _groups(field: FieldInfo) -> list[type[Config]]:
    """Return the groups that a field can be; none for a field that is a setting itself."""
    annotation = field.annotation
    members = [annotation] if isinstance(annotation, type) else list(typing.get_args(annotation))
    return [member for member in members if isinstance(member, type) and issubclass(member, Config)]


def _read_value(value: Any, field: FieldInfo) -> Any:
    groups = _groups(field)
    kinds = plain_types(field.annotation)
    if groups and "kind" in groups[0].model_fields:
        if isinstance(value, str):
            return {"kind": value}
        return {"kind": _default_kind(groups[0])} | value if isinstance(value, dict) else value
    if tuple in kinds and value is not None:
        items = (
            value.split(",")
            if isinstance(value, str)
            else value
            if isinstance(value, list | tuple)
            else [value]
        )
        items = [item.strip() if isinstance(item, str) else item for item in items]
        return tuple(item for item in items if item != "")
    if value == "none" and type(None) in kinds and str not in kinds:
        return None
    return str(value).lower() if isinstance(value, bool) and {int, float} & {*kinds} else value


def _default_kind(group: type[Config]) -> str:
    return str(group.model_fields["kind"].default)


def plain_types(annotation: Any) -> list[Any]:
    """Return the types that a value may have, of a list ``tuple`` whatever it holds, or the words that it may be."""
    if (origin := typing.get_origin(annotation)) is tuple:
        return [tuple]
    if origin is Annotated:
        return plain_types(typing.get_args(annotation)[0])
    return (
        [kind for one in typing.get_args(annotation) for kind in plain_types(one)]
        if origin
        else [annotation]
    )


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted keys into groups: ``{"a.b": 1}`` into ``{"a": {"b": 1}}``."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        found = _merge(found, value)
    return found


def _merge(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> dict[str, Any]:
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
    """Read a YAML file of settings; dashes in keys count as underscores."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionInvalid(f"--config {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionInvalid(
            f"--config {path} is not YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(loaded, dict | None):
        raise OptionInvalid(
            f"--config {path} holds a {type(loaded).__name__}, expected 'key: value' lines"
        )
    return dict(_with_underscores(loaded or {}))


def _with_underscores(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {str(key).replace("-", "_"): _with_underscores(value) for key, value in values.items()}


def read_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Read ``group.key=value`` texts; ``none`` means no value."""
    keys: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise OptionInvalid(
                f"--set {text!r}: expected KEY=VALUE, such as optimizer.learning_rate=1e-4"
            )
        keys[key.strip().replace("-", "_")] = (
            None if value.strip().lower() in ("none", "null") else value.strip()
        )
    return nested(keys)


def resolve(
    config_class: type[Config],
    flags: Mapping[str, Any],  # name or key to value, those that were given
    config_path: Path | None = None,
    assignments: Iterable[str] = (),
    # nested values by name; the key ``preset`` of any source picks one
    presets: Presets | None = None,
    earlier: Earlier | None = None,
    spell: Spell | None = None,
) -> Any:
    """Merge defaults, earlier settings, preset, file, assignments and flags, from weak to strong.

    Raises:
        OptionInvalid: naming each setting that cannot be used, and its source.
    """
    layers = [
        (f"--config {config_path}", read_config_file(config_path) if config_path else {}),
        ("--set", read_assignments(assignments)),
        ("", nested(flags)),
    ]
    layers = [(source, config_class.grouped(layer)) for source, layer in layers]
    if presets:
        chosen = [layer.pop("preset") for _, layer in layers if "preset" in layer]
        if chosen and chosen[-1] is not None:
            if chosen[-1] not in presets:
                raise OptionInvalid(
                    f"unknown preset {chosen[-1]!r} ({_hint(str(chosen[-1]), presets, 'presets')})."
                )
            layers.insert(0, (f"preset {chosen[-1]}", dict(presets[chosen[-1]])))
    if earlier:
        layers.insert(0, earlier(functools.reduce(_merge, (layer for _, layer in layers), {})))
    return config_class.merged(layers, spell or option_name)


def option_name(name: str) -> str:
    """The flag of a setting: ``max_length`` becomes ``--max-length``."""
    return "--" + name.replace("_", "-")


def _message(
    config_class: type[Config],
    error: ValidationError,
    layers: list[tuple[str, Mapping[str, Any]]],
    spell: Spell,
) -> str:
    names = {setting.key: setting.name for setting in config_class.settings()}
    problems: dict[str, list[str]] = {}
    missing = []
    for item in error.errors(include_url=False):
        key, kind = _key_of(config_class, item["loc"])
        name = names.get(key, key)
        if item["type"] == "missing":
            missing.append(spell(name))
            continue
        source = next((source for source, layer in reversed(layers) if _holds(layer, key)), "")
        called = name if source or name not in names.values() else spell(name)
        is_unknown = item["type"] == "extra_forbidden"
        text = _unknown(config_class, name, called, kind) if is_unknown else _problem(called, item)
        problems.setdefault(source and f"{source}: ", []).append(text)
    found = [where + "; ".join(texts) for where, texts in problems.items()]
    if missing:
        where = "" if spell is str else ". Give it on the command line or in --config FILE"
        found.append(f"missing: {', '.join(missing)}{where}")

    def spelled(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        return spell(name) if name in names.values() else flag[0]

    return re.sub("--([a-z][a-z-]+)", spelled, f"{'; '.join(found)}.")


def _key_of(config_class: type[Config], loc: tuple[int | str, ...]) -> tuple[str, str | None]:
    """Return the key of a place in pydantic's errors, and the kind that those put between a choice and its setting."""
    parts = []
    kind = None
    rest = list(map(str, loc))
    group: type[Config] | None = config_class
    while rest and group is not None:
        parts.append(rest.pop(0))
        field = group.model_fields.get(parts[-1])
        groups = _groups(field) if field else []
        if len(groups) > 1 and rest:
            kind = rest.pop(0)
            groups = [one for one in groups if _default_kind(one) == kind]
        group = groups[0] if groups else None
    return ".".join(parts), kind


def _holds(values: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


# What was expected, by pydantic's error type or the beginning of it.
_WANTED = {
    "greater_than_equal": "at least {ge}", "greater_than": "above {gt}", "less_than_equal": "at most {le}",
    "less_than": "below {lt}", "literal_error": "one of {expected}", "union_tag_invalid": "one of {expected_tags}",
    "too_short": "at least {min_length}", "int": "a whole number", "float": "a number", "bool": "true or false",
    "string": "text", "tuple": "a list", "model": "a group of settings", "finite": "a finite number",
}  # fmt: skip


def _problem(name: str, item: ErrorDetails) -> str:
    """Say what is wrong with one setting: its value, and what was expected."""
    context = item.get("ctx", {})
    if item["type"] == "value_error":
        return str(context["error"])
    given = context["tag"] if item["type"] == "union_tag_invalid" else item["input"]
    wanted = _WANTED.get(item["type"]) or _WANTED.get(item["type"].partition("_")[0]) or item["msg"]
    words = {
        name: f"{value:g}"
        if isinstance(value, float)
        else str(value).replace("'", "").replace(" or ", ", ")
        for name, value in context.items()
    }
    return f"{name} is {given!r:.80}, expected {wanted.format(**words)}"


def _unknown(config_class: type[Config], name: str, called: str, kind: str | None) -> str:
    settings = list(config_class.settings())
    owners = [setting.kind for setting in settings if setting.name == name and setting.kind]
    if owners:
        return f"{called} is a setting of {' or '.join(owners)}, {kind} has none; leave it out"
    names = sorted({setting.name for setting in settings})
    last = name.rpartition(".")[2]
    return f"unknown setting {name!r} ({_hint(last if last in names else name, names, 'settings')})"


def _hint(name: str, known: Collection[str], kind: str) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else f"known {kind}: {', '.join(known)}"
