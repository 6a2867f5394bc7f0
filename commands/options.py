"""Frozen dataclasses as the single source of options, configuration files and help texts.

Each stage has one frozen dataclass. A string literal under a field becomes the ``--help`` text of its option::

    @dataclass(frozen=True)
    class TrainConfig:
        batch_size: int = 32
        "Sequences per optimizer step."

Values are merged from weak to strong: field defaults, a named preset, a YAML file (``--config``), flags.
"""

import ast
import dataclasses
import difflib
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml

from ..errors import OptionInvalid

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])
Presets = Mapping[str, Mapping[str, Any]]


def field_help(config_class: type) -> dict[str, str]:
    """Reads the string literal under each field of a dataclass.

    Args:
        config_class: A dataclass; fields that it inherits are read from their own class.

    Returns:
        Field name to its text, on one line. Fields without a text are absent.
    """
    texts: dict[str, str] = {}
    for owner in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, follower in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            if (
                isinstance(follower, ast.Expr)
                and isinstance(follower.value, ast.Constant)
                and isinstance(follower.value.value, str)
            ):
                texts[statement.target.id] = " ".join(follower.value.value.split())
    return texts


def check_keys(keys: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuses keys that are not known, and names the nearest one.

    Args:
        keys: The keys that were given.
        known: The keys that exist.
        where: What holds the keys, for the message: ``run.yaml`` or ``preset small``.

    Raises:
        OptionInvalid: If a key is unknown; all unknown keys are named at once.
    """
    names = sorted(known)
    complaints = []
    for key in keys:
        if key in names:
            continue
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}"
        complaints.append(f"unknown key {key!r} ({hint})")
    if complaints:
        raise OptionInvalid(f"{where}: {'; '.join(complaints)}")


def convert(name: str, value: Any, hint: Any) -> Any:
    """Converts a value from YAML or from the command line to the type of its field.

    Args:
        name: The field, for the message.
        value: A YAML value or a string.
        hint: The field's type: int, float, str, bool, Path, a Literal, ``tuple[X, ...]`` or a union of these.

    Returns:
        The value in the wanted type.

    Raises:
        OptionInvalid: If the value doesn't fit the type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(name, value, arguments)
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise OptionInvalid(f"{name} is {value!r}, expected one of {', '.join(map(str, arguments))}")
    if origin is tuple:
        items = [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            items = [items]
        return tuple(convert(name, item, arguments[0]) for item in items)
    converted = _convert_scalar(value, hint)
    if converted is None:
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}.get(hint, "text")
        raise OptionInvalid(f"{name} is {value!r}, expected {wanted}")
    return converted


def _convert_union(name: str, value: Any, members: tuple[Any, ...]) -> Any:
    """Tries the members in their order; None only stands for itself."""
    if value is None and type(None) in members:
        return None
    kinds = [member for member in members if member is not type(None)]
    for kind in kinds[:-1]:
        try:
            return convert(name, value, kind)
        except OptionInvalid:
            continue
    return convert(name, value, kinds[-1])


def _convert_scalar(value: Any, kind: Any) -> Any:
    """The value as ``kind``, or None if it doesn't fit. YAML reads 3e-5 as text, hence numbers may come as text."""
    if kind is bool:
        words = {"true": True, "yes": True, "false": False, "no": False}
        return value if isinstance(value, bool) else words.get(str(value).lower())
    if value is None or isinstance(value, bool | dict | list):
        return None
    if kind in (int, float):
        try:
            return kind(value) if not (kind is int and isinstance(value, float) and value != int(value)) else None
        except (ValueError, OverflowError):
            return None
    if kind in (str, Path):
        return kind(value)
    raise TypeError(f"configuration fields can't have the type {kind!r}")


def read_config_file(path: Path, known: Iterable[str]) -> dict[str, Any]:
    """Reads a YAML file with one mapping of keys to values; dashes in keys count as underscores.

    Args:
        path: The file.
        known: The keys that it may hold.

    Returns:
        Keys to values as YAML gives them.

    Raises:
        OptionInvalid: If the file can't be read, isn't a mapping, or holds an unknown key.
    """
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionInvalid(f"--config {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionInvalid(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise OptionInvalid(f"--config {path} holds a {type(loaded).__name__}, expected 'key: value' lines")
    values = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    check_keys(values, known, f"--config {path}")
    return values


def resolve(
    config_class: type[C],
    flags: Mapping[str, Any],
    config_path: Path | None = None,
    presets: Presets | None = None,
) -> C:
    """Merges defaults, preset, file and flags (weak to strong) into one configuration.

    Args:
        config_class: The frozen dataclass of the stage.
        flags: Field name to value; None means that the flag wasn't given.
        config_path: A YAML file, or None.
        presets: Named sets of values. The key ``preset`` of the flags or of the file picks one.

    Returns:
        An instance of ``config_class``.

    Raises:
        OptionInvalid: If a key is unknown, a value doesn't fit, or a required value is missing.
    """
    hints = typing.get_type_hints(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    known = set(fields) | ({"preset"} if presets else set())
    given = {key: value for key, value in flags.items() if value is not None}
    check_keys(given, known, "flags")
    from_file = read_config_file(config_path, known) if config_path else {}

    merged: dict[str, Any] = {}
    if presets:
        preset = given.get("preset", from_file.get("preset", getattr(fields.get("preset"), "default", None)))
        if isinstance(preset, str):
            check_keys([preset], presets, "preset")
            check_keys(presets[preset], known, f"preset {preset}")
            merged.update(presets[preset], preset=preset)
    merged.update(from_file)
    merged.update(given)
    values = {key: convert(key, value, hints[key]) for key, value in merged.items() if key in fields}
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        flags_text = ", ".join(option_name(name) for name in missing)
        raise OptionInvalid(f"missing: {flags_text}. Give it on the command line or in --config FILE.")
    try:
        return config_class(**values)
    except ValueError as error:
        raise OptionInvalid(str(error)) from error


def dump_yaml(config: Any) -> str:
    """Writes a resolved configuration as YAML that ``--config`` reads back to an equal one."""
    plain = {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config) if field.init}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def option_name(field_name: str) -> str:
    """The flag of a field: ``max_length`` becomes ``--max-length``."""
    return "--" + field_name.replace("_", "-")


def config_options(
    config_class: type[C], arguments: tuple[str, ...] = (), presets: Presets | None = None
) -> Callable[[F], F]:
    """Decorates a click command so that it gets one resolved configuration.

    Every field becomes an option, except the ones in ``arguments``, which become positional. The command is called
    with ``config`` (an instance of ``config_class``) besides its other parameters.

    Args:
        config_class: The frozen dataclass of the stage.
        arguments: Fields that are given by position; one that is a tuple takes several.
        presets: Named sets of values, offered as ``--preset``.

    Returns:
        The decorator.
    """
    fields = dataclasses.fields(config_class)  # type: ignore[arg-type]
    names = [field.name for field in fields]

    def decorate(command: F) -> F:
        def wrapped(*args: Any, config_path: Path | None, **kwargs: Any) -> Any:
            chosen = [*names, "preset"] if presets else names
            flags = {name: kwargs.pop(name, None) for name in chosen}
            flags = {name: None if value == () else value for name, value in flags.items()}  # no argument was given
            try:
                config = resolve(config_class, flags, config_path, presets)
            except OptionInvalid as error:
                raise click.UsageError(str(error)) from error
            return command(*args, config=config, **kwargs)

        wrapped.__doc__, wrapped.__name__ = command.__doc__, command.__name__
        decorated: Any = wrapped
        decorated.__click_params__ = list(getattr(command, "__click_params__", []))
        decorated = click.option(
            "--config", "config_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
            help="YAML file of 'key: value' lines; flags win over it.",
        )(decorated)  # fmt: skip
        if presets and "preset" not in names:
            decorated = click.option("--preset", help=f"Named values: {', '.join(presets)}. The file and flags win.")(
                decorated
            )
        texts, hints = field_help(config_class), typing.get_type_hints(config_class)
        for field in reversed(fields):
            if field.name not in arguments:
                decorated = _option(field, hints[field.name], texts.get(field.name, ""))(decorated)
        for name in reversed(arguments):
            many = typing.get_origin(hints[name]) is tuple
            metavar = name.upper() + ("..." if many else "")
            decorated = click.argument(name, required=False, nargs=-1 if many else 1, metavar=metavar)(decorated)
        return decorated

    return decorate


def _option(field: "dataclasses.Field[Any]", hint: Any, text: str) -> Callable[[Any], Any]:
    """One click option; its click default is None, so that a flag that wasn't given stays weaker than the file."""
    members = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kind = members[0] if is_union and len(members) == 1 else hint
    default = field.default if field.default is not dataclasses.MISSING else None
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    if shown not in (None, "") and not isinstance(shown, bool):
        text = f"{text} [default: {shown}]"
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        text = f"{text} [required]"
    name = option_name(field.name)
    if kind is bool:
        return click.option(f"{name}/--no-{name[2:]}", field.name, default=None, help=text)
    if typing.get_origin(kind) is typing.Literal:
        return click.option(name, field.name, type=click.Choice([str(c) for c in typing.get_args(kind)]), help=text)
    metavar = {int: "N", float: "X", Path: "PATH"}.get(kind, "LIST" if typing.get_origin(kind) is tuple else "TEXT")
    return click.option(name, field.name, type=str, metavar=metavar, help=text.strip())
