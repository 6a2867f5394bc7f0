"""Writes docs/options.md from the settings of the stages: ``python docs/generate.py``."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from moa_data.cli import COMMANDS, main
from moa_data.commands.options import default_text, help_text, type_text
from moa_data.config import Config, option_name

FILE = Path(__file__).with_name("options.md")
HEAD = """# Options

<!-- Made by `python docs/generate.py` from the settings in the code; change those. -->

A command shows the options that people change; every setting can be set. From weak to strong: defaults, `--preset`, a
YAML file (`--config FILE`), `--set KEY=VALUE` (repeatable; `none` is no value, lists are separated by commas), flags.
In a file the groups are mappings, and `run.yaml` beside a run is such a file:

```yaml
drafter: {kind: eagle, eagle_layers: 2}
optimizer:
  learning_rate: 1.0e-4
```

is `--drafter eagle --set drafter.eagle_layers=2 --learning-rate 1e-4`, and in Python:

```python
TrainConfig(
    store="store", out="runs/eagle",
    drafter=EagleSettings(eagle_layers=2), optimizer=OptimizerSettings(learning_rate=1e-4),
)
TrainConfig.of(store="store", out="runs/eagle", drafter="eagle", eagle_layers=2, learning_rate=1e-4)  # by names
```

Commands without a section here show all of their options in `moa-data COMMAND --help`.
"""


def stages() -> Iterator[tuple[str, type[Config], set[str]]]:
    """The commands with settings: their names, the settings, and the names of the settings that have a flag."""
    found: dict[type[Config], tuple[list[str], set[str]]] = {}
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        config_class = getattr(getattr(command, "callback", None), "config_class", None)
        if command is not None and config_class is not None:
            flags = {str(parameter.name) for parameter in command.params if isinstance(parameter, click.Option)}
            found.setdefault(config_class, ([], flags))[0].append(name)
    for config_class, (names, flags) in found.items():
        yield ", ".join(names), config_class, flags


def table(config_class: type[Config], flags: set[str]) -> Iterator[str]:
    """The settings of a stage, a row each, with a heading for each kind of a choice."""
    yield "| key | flag | takes | default | meaning |"
    yield "|---|---|---|---|---|"
    for setting in config_class.settings():
        kind = f" ({setting.kind})" if setting.kind else ""
        flag = f"`{option_name(setting.name)}`" if setting.name in flags else ""
        takes = type_text(setting).replace("|", "\\|")
        default = "required" if setting.field.is_required() else default_text(setting)
        text = help_text(setting).replace("|", "\\|")
        yield f"| `{setting.key}`{kind} | {flag} | {takes} | {default and f'`{default}`'} | {text} |"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for names, config_class, flags in stages():
        parts.append(f"## {names}\n\n" + "\n".join(table(config_class, flags)) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {FILE}\n")
