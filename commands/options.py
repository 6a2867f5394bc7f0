"""Options of a command from the settings of its stage: some as flags under headings, all by ``--config`` and ``--set``.

A command shows what people change; docs/options.md lists every setting.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ..config import Config, Earlier, Presets, Setting, option_name, resolve
from ..errors import OptionInvalid

if TYPE_CHECKING:
    from ..storage.paths import StorePath

_SOURCES, _OTHER = "Configuration", "Other"


class StageCommand(click.Command):
    """A command whose help lists its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by heading, those without one last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(parameter, "heading", _OTHER), []).append(record)
        for heading in sorted(sections, key=lambda heading: (heading == _OTHER, heading == _SOURCES)):
            with formatter.section(heading):
                formatter.write_dl(sections[heading])


class StoreArgument(click.ParamType):  # type: ignore[type-arg]  # generic only in later releases of click
    """The type of an argument that names a store: a folder, or a URL."""

    name = "store"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> "StorePath":
        """Return the store's place."""
        from ..storage.disk.files import open_path

        return open_path(value)


class HeadedOption(click.Option):
    """An option that knows its heading."""

    def __init__(self, *names: Any, heading: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.heading = heading


def config_options(
    config_class: type[Config],
    arguments: Sequence[str] = (),
    shown: Mapping[str, str] | None = None,
    presets: Presets | None = None,
    earlier: Earlier | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a click command so that it is called with ``config``, besides its other parameters.

    Args:
        arguments: names of settings that are given by position; one that is a list takes several.
        shown: heading to names of the settings that get a flag, separated by spaces; by default all get one.
        presets: named sets of values, offered as ``--preset``.
        earlier: finds the settings of an earlier run, which all else wins over.
    """
    settings = {setting.name: setting for setting in reversed(list(config_class.settings()))}
    if shown is None:
        shown = {"Settings": " ".join(name for name in reversed(settings) if name not in arguments)}
    flags = {name: heading for heading, names in shown.items() for name in names.split()}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, config_path: Path | None, assignments: tuple[str, ...], **kwargs: Any) -> Any:
            given = {settings[name].key: kwargs.pop(name) for name in (*arguments, *flags)}
            given |= {"preset": kwargs.pop("preset")} if presets else {}
            # () is what an argument is that takes several and got none.
            given = {key: value for key, value in given.items() if value not in (None, ())}
            try:
                config = resolve(config_class, given, config_path, assignments, presets, earlier)
            except OptionInvalid as error:
                raise click.UsageError(str(error)) from error
            return command(*args, config=config, **kwargs)

        wrapped.__doc__, wrapped.__name__ = command.__doc__, command.__name__
        wrapped.config_class = config_class  # type: ignore[attr-defined]  # docs/generate.py reads it
        parameters: list[click.Parameter] = [_argument(settings[name]) for name in arguments]
        parameters += [_option(settings[name], heading) for name, heading in flags.items()]
        parameters += _sources(presets, len(flags) + len(arguments) < len(settings))
        own = getattr(command, "__click_params__", [])
        wrapped.__click_params__ = own + parameters[::-1]  # type: ignore[attr-defined]  # click reverses them
        return wrapped

    return decorate


def _sources(presets: Presets | None, has_more: bool) -> list[click.Parameter]:
    names = ", ".join(presets or ())
    preset = HeadedOption(["--preset"], heading=_SOURCES, help=f"Named values, which all else wins over: {names}.")
    more = " Settings without a flag are in docs/options.md." if has_more else ""
    return [
        *([preset] if presets else []),
        HeadedOption(
            ["--config", "config_path"], heading=_SOURCES, type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE", help="YAML file of settings in groups, as in docs/options.md; --set and flags win over it.",
        ),
        HeadedOption(
            ["--set", "assignments"], heading=_SOURCES, multiple=True, metavar="KEY=VALUE",
            help=f"Any setting by its key; may be repeated.{more}",
        ),
    ]  # fmt: skip


def help_text(setting: Setting) -> str:
    """Return the help of a setting, on one line."""
    return " ".join((setting.field.description or "").split())


def default_text(setting: Setting) -> str:
    """Return the default of a setting as it would be typed; nothing for none."""
    default = setting.field.get_default(call_default_factory=True)
    if setting.field.is_required() or default in (None, "", ()):
        return ""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def _plain_type(annotation: Any) -> Any:
    """Return the type without None and bounds."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain_type(typing.get_args(annotation)[0])
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    is_optional = len(members) < len(typing.get_args(annotation))
    return _plain_type(members[0]) if is_optional and members else annotation


def type_text(setting: Setting) -> str:
    """Return what a setting takes: ``N``, ``X``, ``TEXT``, ``LIST``, ``true|false``, or the words that it may be."""
    kind = _plain_type(setting.field.annotation)
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    return {int: "N", float: "X", bool: "true|false"}.get(kind, "LIST" if typing.get_origin(kind) is tuple else "TEXT")


def _argument(setting: Setting) -> click.Argument:
    many = typing.get_origin(_plain_type(setting.field.annotation)) is tuple
    metavar = setting.name.upper() + ("..." if many else "")
    return click.Argument([setting.name], required=False, nargs=-1 if many else 1, metavar=metavar)


def _option(setting: Setting, heading: str) -> click.Option:
    """Build an option without a default of click's, so that a flag that was not given stays weaker than the file."""
    text, default, kind = help_text(setting), default_text(setting), type_text(setting)
    if setting.field.is_required():
        text = f"{text} [required]"
    elif default and kind != "true|false":
        text = f"{text} [default: {default}]"
    name = option_name(setting.name)
    if kind == "true|false":
        return HeadedOption([f"{name}/--no-{name[2:]}", setting.name], heading=heading, default=None, help=text)
    return HeadedOption([name, setting.name], heading=heading, metavar=kind, help=text)
