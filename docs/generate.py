"""Writes the pages of docs/ that are made from the code: ``python docs/generate.py``."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import click
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moa_data.cli import COMMANDS, main
from moa_data.commands.options import StageCommand, default_text, help_text, type_text
from moa_data.config import Config, Setting
from moa_data.moa.drafters.registry import DRAFTERS, REMOTE_KINDS
from moa_data.moa.formats.checkpoint import LAYOUTS
from moa_data.moa.targets.families import FAMILIES
from moa_data.pipeline.exchange.config import Format
from moa_data.tests.kit.families import DRAFTERS as FAMILY_DRAFTERS
from moa_data.tests.kit.families import GROUPED, works
from moa_data.trainer.config import TrainConfig

OPTIONS_HEAD = """# Options

<!-- Made by `python docs/generate.py` from the settings in the code; change those. -->

`moa-data COMMAND --help` shows the settings that most people change, `moa-data COMMAND --help-all` shows all of them,
as this page does. Every setting has one name, and can be given in four ways. For `learning_rate` these are:

- the flag `--learning-rate 1e-4`;
- `--set learning_rate=1e-4`, which can be repeated (`none` means no value);
- the line `learning_rate: 1e-4` in a YAML file, which `--config FILE` reads;
- the keyword `learning_rate=1e-4` in Python.

The items of a list are separated by commas. If a setting is given more than once, flags override `--set`, `--set`
overrides the file, the file overrides `--preset`, and the preset overrides the defaults. This YAML file:

```yaml
drafter: eagle
eagle_layers: 2
learning_rate: 1e-4
```

means the same as `--drafter eagle --eagle-layers 2 --learning-rate 1e-4`, and in Python as:

```python
TrainConfig(store="store", out="runs/eagle", drafter="eagle", eagle_layers=2, learning_rate=1e-4)
```

Settings belong to groups. In the tables, the group is the part of the name before the dot. YAML files and Python also
accept a group as a whole: `optimizer: {learning_rate: 1e-4}`. The file `run.yaml` in the folder of a run has this
form.

[`train`](options-train.md) and [the commands that decode](options-decode.md) have pages of their own. All other
commands that are not on this page show all of their options with `--help`.
"""


def stages() -> Iterator[tuple[str, type[Config]]]:
    """Yield the names and the settings of the commands that have settings."""
    found: dict[type[Config], list[str]] = {}
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        if isinstance(command, StageCommand):
            found.setdefault(command.config_class, []).append(name)
    for config_class, names in found.items():
        yield ", ".join(names), config_class


def table(settings: Iterable[Setting]) -> Iterator[str]:
    """Yield the lines of a table of settings, one row per setting."""
    yield "| setting | takes | default | meaning |"
    yield "|---|---|---|---|"
    for setting in settings:
        kind = f" ({setting.kind})" if setting.kind else ""
        takes = type_text(setting).replace("|", "\\|")
        default = "required" if setting.field.is_required() else default_text(setting)
        # Escape brackets, which would begin a link.
        text = help_text(setting).replace("|", "\\|").replace("[", "\\[")
        yield f"| `{setting.key}`{kind} | {takes} | {default and f'`{default}`'} | {text} |"


DECODING = ("generate", "eval", "serve", "chat", "export-drafter")


def options_page() -> str:
    """Return the page that explains settings and lists those of commands that make stores."""
    return OPTIONS_HEAD + "".join(
        section(names, one)
        for names, one in stages()
        if names not in DECODING and one is not TrainConfig
    )


def decode_page() -> str:
    """Return the settings of the commands that decode."""
    return DECODE_HEAD + "".join(
        section(names, one) for names, one in stages() if names in DECODING
    )


def section(names: str, config_class: type[Config]) -> str:
    """Return the section of a command with its settings."""
    return f"\n## {names}\n\n" + "\n".join(table(config_class.settings())) + "\n"


def train_page() -> str:
    """Return the settings of ``train``.

    They are the settings of a run, and those of each kind of drafter except block drafters.
    """
    blocks = {"dspark", "dflash"}
    settings = list(TrainConfig.settings())
    parts = [TRAIN_HEAD, "## The run\n", *table(one for one in settings if not one.kind)]
    for kind in DRAFTERS:
        if kind not in blocks:
            parts += [f"\n## {kind}\n", *table(one for one in settings if one.kind == kind)]
    return "\n".join(parts) + "\n"


def blocks_page() -> str:
    """Return the settings of the block drafters."""
    parts = [BLOCKS_HEAD]
    for kind in ("dspark", "dflash"):
        parts += [
            f"## {kind}\n",
            *table(one for one in TrainConfig.settings() if one.kind == kind),
            "",
        ]
    return "\n".join(parts)


DECODE_HEAD = """# Options of the commands that decode

<!-- Made by `python docs/generate.py` from the settings in the code; change those. -->

[Options](options.md) explains how to give them.
"""
TRAIN_HEAD = """# Options of train

<!-- Made by `python docs/generate.py` from the settings in the code; change those. -->

[Options](options.md) explains how to give them. The settings of `dspark` and `dflash` have
[a page of their own](options-blocks.md).
"""
BLOCKS_HEAD = """# Options of dspark and dflash

<!-- Made by `python docs/generate.py` from the settings in the code; change those. -->

These are the settings of `moa-data train` for `--drafter dspark` and `--drafter dflash`. [The settings of the
run](options-train.md#the-run) apply to them as well.
"""


SUPPORTED = """# What works with what

<!-- Made by `python docs/generate.py` from the lists in the code; change those. -->

## Targets

Targets are causal language models that transformers can load. Of models that also see or hear, the text model is
used, if transformers has it as a model of its own. For Qwen's VL models it has none.

Every target is checked. When it is loaded, our logits for a few tokens are compared with the model's own. Before
decoding, calls over cached tokens are compared with one call over all tokens; for families of Llama's kind this
second check is not needed.

Hidden states can be stored if the logits are the last hidden states times a matrix, with a scale or bound that this
package knows. Other families are refused with a message. Examples are Phi 1 and 2, GPT-J and BERT, whose LM head has
a bias, and OPT-350m, which projects its states to a narrower LM head.

For families that are not in the table, stores contain hidden states only. They can be decoded if the check before
decoding passes. If it fails, as with many families whose layers carry a recurrent state (Mamba, LFM 2), `generate`
refuses with a message, but stores of hidden states, and training from them, still work.

`--model` takes a folder in Hugging Face layout, a Hub id, or [a GGUF file](real-model.md#gguf-files) of an
architecture whose GGUF files transformers reads.

The tests run every cell of this table. If a cell has a letter, the drafter can be trained from stores of this family.
The letters say what works besides training:

- **C**: `generate` and `eval` verify its chains, one prompt at a time. **T**: they verify trees and batches as well.
  Trees need attention layers, because layers with a recurrent state cannot branch.
- **S**: `serve` drafts with it. `serve` does not run targets with recurrent layers. For targets with latent attention
  it does not use drafters that read keys and values. When it starts, it compares a call of the engine with a call of
  the model, and refuses the target if they differ.
- **E**: the drafter can be exported in all of its formats ([below](#drafters)). **e**: only in some of them. The
  drafter `moa` can then be exported in the format `moa` only. Gemma scales its embeddings after the lookup, so
  drafters for it can be exported only in the formats that contain embeddings (`speculators-eagle3`, `dspark`,
  `eagle`, `llama`). Some formats have further conditions. In `eagle`, `eagle3`, `moa` and `moa-vllm`, the number of
  heads times the head dim must be the width. `eagle` and `moa` do not support scaled RoPE. `moa` and `moa-vllm` need
  a drafter with the sizes of `--preset paper`. Which targets an engine can draft for depends on the engine.
- **no**: the drafter cannot be trained for this family. Target layer inference works only for families of Llama's
  kind. Block drafters with context `kv` need keys that have the same shape in all layers and are rotated as in Llama.

*By groups* in the column of keys and values means that the layers do not all cache keys and values of one shape: some
cache another shape, or latents, or nothing. Stores contain them [by groups of
layers](format.md#keys-and-values-by-groups-of-layers), with the codec `lossless` or `int8`. They cannot be extracted
with `--source vllm`, and calls of these targets are not captured as CUDA graphs.

{families}

## Drafters

The formats are those of `export-drafter`. Every option `--drafter` accepts a run, or a folder in one of these formats
([contents of the files](interop.md#drafters-in-other-engines)).

| `--drafter` | drafts over a network (`chat`) | formats, and what loads them |
|---|---|---|
{drafters}

## Stores

`export` and `import` exchange hidden states with {formats} ([the fields that are
exchanged](interop.md#export-and-import)).
"""


def family_row(name: str) -> str:
    """Return the row of a family, from the lists that the tests use."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    cells = [
        "by groups" if name in GROUPED else "yes",
        *(works(name, drafter) or "no" for drafter in FAMILY_DRAFTERS),
    ]
    return f"| `{name}` | {model} | {' | '.join(cells)} |"


def supported_page() -> str:
    """Return the page of supported targets, drafters and formats."""
    heads = ["family", "model", "keys and values", *FAMILY_DRAFTERS]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *map(family_row, FAMILIES)]
    drafters = []
    for kind in DRAFTERS:
        formats = "; ".join(
            f"`{one.name}`: {one.reader}" for one in LAYOUTS.values() if one.kind == kind
        )
        drafters.append(
            f"| `{kind}` | {'yes' if kind in REMOTE_KINDS else 'no'} | {formats or 'only its own'} |"
        )
    names = ", ".join(f"`{name}`" for name in get_args(Format))
    return SUPPORTED.format(families="\n".join(rows), drafters="\n".join(drafters), formats=names)


PAGES = {
    "options.md": options_page,
    "options-decode.md": decode_page,
    "options-train.md": train_page,
    "options-blocks.md": blocks_page,
    "supported.md": supported_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        Path(__file__).with_name(name).write_text(page(), encoding="utf-8")
        sys.stdout.write(f"wrote {name}\n")
