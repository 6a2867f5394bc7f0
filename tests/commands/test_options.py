"""Defaults < preset < file < flags; every value keeps its type; an unknown key names the nearest one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from moa_data.commands.options import config_options, dump_yaml, field_help, resolve
from moa_data.errors import OptionInvalid


@dataclass(frozen=True)
class Config:
    """An example stage."""

    store: Path
    """The store to read."""
    batch_size: int = 32
    """Sequences per
    optimizer step."""
    learning_rate: float = 3e-5
    """Peak learning rate."""
    activations: tuple[str, ...] = ("kv", "hidden:last")
    """What to store."""
    layers: tuple[int, ...] = ()
    """Layers."""
    max_steps: int | None = None
    """Stop after this many steps."""
    devices: int | str = "auto"
    """How many."""
    mode: Literal["chain", "plain"] = "chain"
    """Method."""
    resume: bool = False
    """Go on."""
    undocumented: int = 0


PRESETS: dict[str, dict[str, Any]] = {"small": {"batch_size": 4, "learning_rate": 1e-3}, "wrong": {"batchsize": 1}}


def config_file(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_help_texts_are_the_literals_under_the_fields() -> None:
    texts = field_help(Config)
    assert texts["batch_size"] == "Sequences per optimizer step."
    assert "undocumented" not in texts


def test_order_of_defaults_preset_file_and_flags(tmp_path: Path) -> None:
    path = config_file(tmp_path, "preset: small\nlearning-rate: 2e-4\nmax_steps: 7\n")
    config = resolve(Config, {"store": "s", "max_steps": "9"}, path, PRESETS)
    assert (config.batch_size, config.learning_rate, config.max_steps) == (4, 2e-4, 9)
    flag_wins = resolve(Config, {"store": "s", "preset": "small", "batch_size": "8"}, None, PRESETS)
    assert (flag_wins.batch_size, flag_wins.learning_rate) == (8, 1e-3)


def test_values_take_the_type_of_their_field(tmp_path: Path) -> None:
    path = config_file(
        tmp_path, "store: a/b\nactivations: kv, hidden:layer:3\nlayers: [1, 2]\ndevices: 2\nresume: true\nmax_steps:\n"
    )
    config = resolve(Config, {}, path)
    assert config.store == Path("a/b")
    assert config.activations == ("kv", "hidden:layer:3")
    assert config.layers == (1, 2)
    assert (config.devices, config.resume, config.max_steps) == (2, True, None)
    assert resolve(Config, {"store": "s", "devices": "auto"}).devices == "auto"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_sise: 3", "unknown key 'batch_sise' .did you mean 'batch_size'"),
        ("batch_size: many", "batch_size is 'many', expected a whole number"),
        ("batch_size: 1.5", "batch_size is 1.5, expected a whole number"),
        ("batch_size: true", "batch_size is True, expected a whole number"),
        ("learning_rate: [1]", "learning_rate is .1., expected a number"),
        ("resume: 3", "resume is 3, expected true or false"),
        ("mode: tree", "mode is 'tree', expected one of chain, plain"),
        ("- a", "holds a list, expected 'key: value'"),
        ("a: b: c", "is not YAML"),
        ("preset: smal", "unknown key 'smal' .did you mean 'small'"),
        ("preset: wrong", "preset wrong: unknown key 'batchsize' .did you mean 'batch_size'"),
        ("batch_size: 3", "missing: --store"),
    ],
)
def test_bad_values_say_what_was_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OptionInvalid, match=message):
        resolve(Config, {}, config_file(tmp_path, text), PRESETS)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionInvalid, match=r"absent\.yaml: No such file"):
        resolve(Config, {}, tmp_path / "absent.yaml")


def test_dump_reads_back_to_an_equal_configuration(tmp_path: Path) -> None:
    config = Config(store=Path("s"), activations=("kv",), layers=(3, 5), learning_rate=1e-7, max_steps=3)
    assert resolve(Config, {}, config_file(tmp_path, dump_yaml(config))) == config


def test_click_options_come_from_the_dataclass(tmp_path: Path) -> None:
    seen: list[Config] = []

    @click.command()
    @config_options(Config, arguments=("store",), presets=PRESETS)
    @click.option("--dry-run", is_flag=True)
    def command(config: Config, dry_run: bool) -> None:
        """Runs."""
        assert dry_run
        seen.append(config)

    path = config_file(tmp_path, "batch_size: 5\nmax_steps: 1\n")
    arguments = ["s", "--dry-run", "--config", str(path), "--max-steps", "2", "--activations", "kv", "--resume"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert seen == [Config(Path("s"), batch_size=5, max_steps=2, activations=("kv",), resume=True)]

    page = CliRunner().invoke(command, ["--help"], terminal_width=200).output
    for text in ("STORE", "Sequences per optimizer step. [default: 32]", "[default: kv,hidden:last]", "--no-resume"):
        assert text in page

    wrong = CliRunner().invoke(command, ["s", "--dry-run", "--batch-size", "x"])
    assert wrong.exit_code == 2
    assert "batch_size is 'x', expected a whole number" in wrong.output


def test_an_argument_may_take_several(tmp_path: Path) -> None:
    @click.command()
    @config_options(Config, arguments=("activations",))
    def command(config: Config) -> None:
        click.echo(",".join(config.activations))

    assert CliRunner().invoke(command, ["a", "b", "--store", "s"]).output == "a,b\n"
    assert CliRunner().invoke(command, ["--store", "s"]).output == "kv,hidden:last\n"
    path = tmp_path / "run.yaml"
    path.write_text("activations: [c]\nstore: s\n", encoding="utf-8")
    assert CliRunner().invoke(command, ["--config", str(path)]).output == "c\n"
    assert "ACTIVATIONS..." in CliRunner().invoke(command, ["--help"]).output
