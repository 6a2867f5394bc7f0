"""Generate the options of a command from the settings of its stage.

A stage is the function that does the work of a command. Each setting of a stage can be given as a
flag or in a YAML file. ``--help`` shows the common settings, and ``--help-all`` shows all settings.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..config import Config, Earlier, Presets, Setting, plain_types, resolve
from ..errors import OptionInvalid
from .console import as_options


class StageCommand(click.Command):
    """A click command whose options are made from the settings of its stage.

    A stage is the function that does the work of a command. See :func:`stage_command`.
    """

    def __init__(
        self, name: str, config_class: type[Config], arguments: Sequence[str], **attributes: Any
    ) -> None:
        super().__init__(name, **attributes)
        self.config_class = config_class
        self._arguments = arguments
        self._names = {setting.name for setting in config_class.settings()}
        text = f"Show all {len(self._names)} settings with their types and defaults."
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help=text,
            )
        )

    def get_help(self, ctx: click.Context) -> str:
        """Return the help page. Replace names of settings, such as `max_length`, by options."""
        return as_options(super().get_help(ctx))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options to the help page. ``--help-all`` shows all options by group."""
        if not ctx.meta.get(_ALL):
            super().format_options(ctx, formatter)
            return
        sections: dict[str, list[tuple[str, str]]] = {}
        for setting in self.config_class.settings():
            group = setting.key.rpartition(".")[0] or "settings"
            heading = f"{group} ({setting.kind})" if setting.kind else group
            name = " ".join(filter(None, _flag(setting)))
            if setting.name in self._arguments:
                name = setting.name.upper()
            sections.setdefault(heading, []).append((name, _help(setting)))
        sections["other"] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and parameter.name not in self._names:
                sections["other"].append(record)
        for heading, rows in sections.items():
            with formatter.section(heading.capitalize()):
                formatter.write_dl(rows)


_ALL = "moa_data.all_options"


def stage_command(
    config_class: type[Config],
    arguments: Sequence[str] = (),
    presets: Presets | None = None,
    earlier: Earlier | None = None,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], StageCommand]:
    """Return a decorator that converts a function to a command with options for all settings.

    The function is called with the settings as ``config``, and with its own click parameters.

    Args:
        config_class: class of the settings.
        arguments: names of settings that are given by position.
        presets: named sets of values, offered as ``--preset``.
        earlier: function that finds the settings of an earlier run. These settings override only
            defaults: any other source, such as a flag or a file, overrides them.
        name: name of the command. If the argument is None, the command has the function's name.
    """
    # Several kinds of a group, for example several kinds of drafters, may have a setting with the
    # same name. These settings share one flag. The flag has the help text of the first kind's
    # setting.
    settings: dict[str, Setting] = {}
    for setting in config_class.settings():
        settings.setdefault(setting.name, setting)

    def decorate(command: Callable[..., Any]) -> StageCommand:
        def run(
            *args: Any, config_path: Path | None, assignments: tuple[str, ...], **kwargs: Any
        ) -> Any:
            given_values: dict[str, Any] = {}
            keys = [*settings, "preset"] if presets else [*settings]
            for key in keys:
                value = kwargs.pop(key)
                if value is not None:
                    given_values[key] = value
            try:
                config = resolve(
                    config_class, given_values, config_path, assignments, presets, earlier
                )
            except OptionInvalid as error:
                raise click.UsageError(as_options(str(error))) from error
            return command(*args, config=config, **kwargs)

        # The decorator next to the function runs first and adds its parameter first. Reverse
        # click's list of these parameters to get the order in which the decorators are written.
        own_parameters = getattr(command, "__click_params__", [])[::-1]
        parameters: list[click.Parameter] = [
            *(parameter for parameter in own_parameters if not parameter.is_flag),
            *_setting_parameters(arguments, settings),
            *_sources(presets),
            *(parameter for parameter in own_parameters if parameter.is_flag),
        ]
        return StageCommand(
            name or command.__name__,
            config_class,
            arguments,
            callback=run,
            help=command.__doc__,
            params=parameters,
        )

    return decorate


def _setting_parameters(
    arguments: Sequence[str], settings: Mapping[str, Setting]
) -> list[click.Parameter]:
    """Make click's parameters for the settings: first arguments, then options.

    If at least one setting has the type ``Common``, the short help page shows only settings of this
    type. Otherwise, it shows all settings.
    """
    parameters: list[click.Parameter] = []
    for name in arguments:
        parameters.append(click.Argument([name], required=False, metavar=name.upper()))
    flags = [setting for name, setting in settings.items() if name not in arguments]
    is_short = any(setting.is_common for setting in flags)
    for setting in flags:
        flag, kind = _flag(setting)
        # Do not pass the setting's default to click. Otherwise, a flag that the user omits would
        # override the YAML file with this default.
        option = click.Option(
            [flag, setting.name],
            metavar=kind,
            default=None,
            help=_help(setting),
            hidden=is_short and not setting.is_common,
        )
        parameters.append(option)
    return parameters


def _sources(presets: Presets | None) -> list[click.Parameter]:
    names = ", ".join(presets or ())
    preset = click.Option(
        ["--preset"],
        help=f"Named set of settings: {names}. Settings that are given in any other way override it.",
    )
    return [
        *([preset] if presets else []),
        click.Option(
            ["--config", "config_path"], type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
            help="YAML file with settings as lines `name: value`. --set and flags override it.",
        ),
        click.Option(
            ["--set", "assignments"], multiple=True, metavar="NAME=VALUE",
            help="Set a setting by its name; `none` means no value. The option can be repeated.",
        ),
    ]  # fmt: skip


def _show_all(ctx: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def help_text(setting: Setting) -> str:
    """Return the help text of a setting as one line."""
    return " ".join((setting.field.description or "").split())


def default_text(setting: Setting) -> str:
    """Return the default of a setting as a user would type it.

    If the setting has no default, the result is an empty text.
    """
    default = setting.field.get_default(call_default_factory=True)
    if setting.field.is_required() or default in (None, "", ()):
        return ""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def type_text(setting: Setting) -> str:
    """Return the text that stands for the type of a setting in the help.

    The result is ``N`` for a whole number, ``X`` for any other number, ``TEXT``, ``LIST``,
    ``true|false``, or the allowed words with ``|`` between them.
    """
    kind, *words = [
        kind for kind in plain_types(setting.field.annotation) if kind is not type(None)
    ]
    if not isinstance(kind, type):
        return "|".join(map(str, (kind, *words)))
    return {int: "N", float: "X", bool: "true|false", tuple: "LIST"}.get(kind, "TEXT")


def _flag(setting: Setting) -> tuple[str, str | None]:
    name = setting.name.replace("_", "-")
    kind = type_text(setting)
    return (f"--{name}/--no-{name}", None) if kind == "true|false" else (f"--{name}", kind)


def _help(setting: Setting) -> str:
    if setting.field.is_required():
        return f"{help_text(setting)} [required]"
    default = default_text(setting)
    return f"{help_text(setting)} [default: {default}]" if default else help_text(setting)
