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

`moa-data COMMAND --help` shows the settings that most people change. `moa-data COMMAND --help-all`
shows all of them, as this page does. Each setting has a name. For example, `learning_rate` is the
flag `--learning-rate`, a line `learning_rate: 1e-4` of a YAML file (`--config FILE`),
`--set learning_rate=1e-4` (repeatable; `none` means no value), and a keyword in Python. Lists are
separated by commas. Later sources override earlier ones, in this order: defaults, `--preset`, file,
`--set`, flags.

```yaml
drafter: eagle
eagle_layers: 2
learning_rate: 1e-4
```

is `--drafter eagle --eagle-layers 2 --learning-rate 1e-4`, and in Python:

```python
TrainConfig(store="store", out="runs/eagle", drafter="eagle", eagle_layers=2, learning_rate=1e-4)
```

Files and Python take groups as well: `optimizer: {learning_rate: 1e-4}`. The `run.yaml` in a run's
folder is such a file. In the tables, the group is the part before the dot.
[`train`](options-train.md) and [the commands that decode](options-decode.md) have pages of their
own. Commands without a section here show all of their options with `--help`.
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

[Options](options.md) explains how to set them.
"""
TRAIN_HEAD = """# Options of train

<!-- Made by `python docs/generate.py` from the settings in the code; change those. -->

[Options](options.md) explains how to set them. Those of block drafters have
[a page of their own](options-blocks.md).
"""
BLOCKS_HEAD = """# Options of dspark and dflash

<!-- Made by `python docs/generate.py` from the settings in the code; change those. -->

Settings of `moa-data train --drafter dspark` and `dflash`, in addition to
[those of the run](options-train.md#the-run).
"""


SUPPORTED = """# What works with what

<!-- Made by `python docs/generate.py` from the lists in the code; change those. -->

## Targets

A target is a causal language model that transformers can load. Of a multimodal model it is the text
model, if transformers has that as a model of its own (it has none for Qwen's VL models). When a
target is loaded, our logits are compared with the model's on a few tokens. Before decoding, calls
over cached tokens are compared with one call over all tokens. Families of Llama's kind skip this
second check.

Stores can hold the hidden states of every family whose logits are its last hidden states times a
matrix, with a known scale or bound. Other families are refused with a message of one line. Examples
are Phi 1 and 2, GPT-J and BERT, whose LM head has a bias, and OPT-350m, which projects states to a
narrower LM head.

Families that are not in the table are decoded if they pass the check of cached calls. Their stores
hold hidden states only. Many families whose layers carry a state (Mamba, LFM 2) fail the check, and
`generate` refuses them with a message of one line. Stores of their hidden states still work, and so
does training from these stores.

`--model` takes a folder in Hugging Face layout, a Hub id, or
[a GGUF file](real-model.md#gguf-files) of an architecture whose GGUF files transformers reads.

The tests run every cell of this table. A drafter with a letter trains from the family's stores:

- **C**: `generate` and `eval` verify its chains, one prompt at a time. **T**: they verify trees and
  batches as well. Trees need attention layers, because layers with a recurrent state cannot branch.
- **S**: `serve` drafts with it. `serve` does not run targets with recurrent layers. For targets
  with latents it does not draft with drafters that read keys and values. At its start it compares a
  call of the engine with a call of the model, and refuses a target whose attention the engine does
  not compute.
- **E**: all formats of `export-drafter` for this drafter ([below](#drafters)) can hold it. **e**:
  only some of them can: `moa`, and for Gemma, which scales its embeddings after the lookup, the
  formats with embeddings of their own (`speculators-eagle3`, `dspark`, `eagle`, `llama`). The
  formats `eagle`, `eagle3`, `moa` and `moa-vllm` need heads that fill the width, `eagle` and `moa`
  need a rotation that is not scaled, and `moa` and `moa-vllm` need the sizes of `--preset paper`.
  Which families an engine can draft for depends on the engine.
- **no**: target layer inference works for families of Llama's kind only. Block drafters of context
  `kv` need keys that have one shape in all layers and are rotated as in Llama.

Keys and values *by groups* means that some layers cache other shapes than others, or latents, or
nothing. Stores hold them
[by groups of layers](format.md#keys-and-values-by-groups-of-layers), with codec `lossless` or
`int8`. `--source vllm` does not extract them, and calls of these targets are not captured as CUDA
graphs.

{families}

## Drafters

The formats are those of `export-drafter`. Wherever `--drafter` takes a run, it also takes a folder
in one of these formats ([what each file holds](interop.md#drafters-in-other-engines)).

| `--drafter` | drafts over a network (`chat`) | formats, and what loads them |
|---|---|---|
{drafters}

## Stores

`export` and `import` exchange hidden states with {formats}
([which fields](interop.md#export-and-import)).
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
            f"| `{kind}` | {'yes' if kind in REMOTE_KINDS else 'no'} "
            f"| {formats or 'its own alone'} |"
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
