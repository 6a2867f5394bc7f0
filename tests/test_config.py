"""Settings come from defaults < preset < file < --set < flags.

All unusable values are reported at once, with their sources.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from pydantic import Field

from moa_data.cli import COMMANDS, main
from moa_data.commands.options import StageCommand
from moa_data.config import Common, Config, Count, Positive, resolve
from moa_data.errors import OptionInvalid
from moa_data.moa.drafters.registry import DRAFTERS
from moa_data.tests.kit.errors import raises_naming
from moa_data.trainer.config import PRESETS, EagleSettings, TrainConfig


class Bird(Config):
    """A kind."""

    kind: Literal["bird"] = "bird"
    wings: Count = 2
    """How many."""


class Fish(Config):
    """Another kind."""

    kind: Literal["fish"] = "fish"
    fins: Count = 4
    """How many."""


class Steps(Config):
    """A group."""

    kind: Literal["short", "long"] = "short"
    """Which steps."""
    size: Positive = 3e-5
    """Size
    of a step."""
    n_steps: Common[Count | None] = None
    """How many."""


class Stage(Config):
    """An example stage."""

    store: Path
    """The store to read."""
    names: Common[tuple[str, ...]] = ("kv", "hidden:last")
    """What to
    store."""
    layers: tuple[int, ...] = ()
    """Layers."""
    resume: bool = False
    """Go on."""
    limit: int | None = 5
    """The end."""
    animal: Bird | Fish = Field(default_factory=Bird, discriminator="kind")
    """Which animal."""
    steps: Steps = Field(default_factory=Steps)

    def problems(self) -> list[str]:
        return [f"{name} is twice there" for name in self.names if self.names.count(name) > 1]


SETS: dict[str, dict[str, Any]] = {
    "small": {"steps": {"n_steps": 4, "size": 1e-3}},
    "wrong": {"stebs": 1},
}


def config_file(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_each_source_wins_over_those_before(tmp_path: Path) -> None:
    path = config_file(
        tmp_path, "preset: small\nstore: a\nsteps:\n  n-steps: 7\n  kind: long\nlimit: 6\n"
    )
    assert resolve(Stage, {}, path, (), SETS).named() == {
        "store": Path("a"), "names": ("kv", "hidden:last"), "layers": (), "resume": False,
        "limit": 6, "animal": "bird", "wings": 2, "steps": "long", "size": 1e-3, "n_steps": 7,
    }  # fmt: skip
    config = resolve(
        Stage, {"steps.size": "2"}, path, ["steps.n_steps=8", "limit=none", "steps.size=9"], SETS
    )
    assert (config.steps, config.limit) == (Steps(kind="long", size=2, n_steps=8), None)
    assert resolve(Stage, {"store": "none", "limit": "none"}) == Stage(
        store=Path("none"), limit=None
    )


def test_values_take_the_type_of_their_field(tmp_path: Path) -> None:
    text = (
        "store: a/b\nnames: kv, hidden:layer:3\nlayers: [1, 2]\n"
        "resume: true\nsteps: {size: 3e-5, n_steps: }\n"
    )
    config = resolve(Stage, {}, config_file(tmp_path, text))
    assert config == Stage(
        store=Path("a/b"), names=("kv", "hidden:layer:3"), layers=(1, 2), resume=True
    )
    assert resolve(Stage, {"store": "s"}, None, ["layers=3"]).layers == (3,)


def test_a_kind_has_its_own_settings(tmp_path: Path) -> None:
    assert resolve(Stage, {"store": "s", "animal.kind": "fish"}).animal == Fish()
    assert (
        resolve(
            Stage, {"store": "s"}, config_file(tmp_path, "animal: fish"), ["animal.fins=6"]
        ).animal.fins
        == 6
    )
    assert resolve(Stage, {"store": "s"}, None, ["animal.wings=6"]).animal == Bird(wings=6)
    assert (
        resolve(
            Stage, {"store": "s", "animal.kind": "fish"}, config_file(tmp_path, "animal: bird")
        ).animal
        == Fish()
    )
    config = resolve(
        Stage,
        {"store": "s"},
        config_file(tmp_path, "fins: 3\nanimal: fish\nsize: 2\n"),
        ["n-steps=5"],
    )
    assert config == Stage.of(store="s", animal=Fish(fins=3), size=2, n_steps=5)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("layer: 3", ("`config_path=", "run.yaml", "'layer'", "'layers'")),
        ("sice: 3", ("'sice'", "'size'")),
        ("steps: {limit: 3}", ("'steps.limit'", "'limit'")),
        ("zzz: 3", ("'zzz'", "animal, fins, layers")),
        ("fins: 3", ("fins", "fish", "bird")),
        ("animal: cat", ("animal", "'cat'", "bird, fish")),
        ("limit: many", ("limit", "'many'")),
        ("limit: true", ("limit", "'true'")),
        ("store: false", ("store", False)),
        ("steps: {size: 0, n_steps: 0}", ("size", "n_steps", 0)),
        ("steps: {size: .inf}", ("size", "inf")),
        ("steps: [3]", ("steps", [3])),
        ("layers: [1, x]", ("layers", "'x'")),
        # These are the words of this test's own settings.
        ("names: [a, a]\nstore: s", ("a is twice there; a is twice there",)),
        ("- a", ("run.yaml", "'name: value'")),
        ("a: b: c", ("run.yaml", "line 1")),
        ("preset: smal", ("'smal'", "'small'")),
        ("preset: xyz", ("'xyz'", "small, wrong")),
        ("preset: wrong", ("preset wrong", "'stebs'", "'steps'")),
        ("limit: 3", ("`store`", "`config_path=FILE`")),
    ],
)  # fmt: skip
def test_bad_values_say_what_was_wrong(
    tmp_path: Path, text: str, facts: tuple[object, ...]
) -> None:
    with raises_naming(OptionInvalid, *facts):
        resolve(Stage, {}, config_file(tmp_path, text), (), SETS)


def test_all_problems_are_named_at_once() -> None:
    with raises_naming(
        OptionInvalid, "`limit`", "'x'", "n_steps", "'0'", "'a'", "`store`"
    ) as error:
        resolve(Stage, {"limit": "x"}, None, ["a=1", "steps.n_steps=0"])
    assert "\n" not in str(error.value)
    with raises_naming(OptionInvalid, "`assignments`", "'resume'", "NAME=VALUE"):
        resolve(Stage, {}, None, ["resume"])
    with raises_naming(OptionInvalid, "absent.yaml"):
        resolve(Stage, {}, Path("absent.yaml"))
    wrong: dict[str, Any] = {"steps": {"n_steps": 0}}
    with raises_naming(OptionInvalid, "n_steps", 0, "store") as error:
        Stage(**wrong)
    assert "--" not in str(error.value), "Python callers have no options"


def test_yaml_and_names_read_back_to_an_equal_configuration(tmp_path: Path) -> None:
    config = Stage.of(
        store="s", names=["kv"], animal="fish", fins=3, steps="long", size=1e-7, limit=None
    )
    assert resolve(Stage, {}, config_file(tmp_path, config.to_yaml())) == config
    assert Stage.of(**config.named()) == config
    assert config.replaced(fins=5).animal == Fish(fins=5)
    with raises_naming(OptionInvalid, "'fin'", "'fins'"):
        Stage.of(store="s", fin=3)


def test_python_takes_names_and_groups() -> None:
    assert TrainConfig(
        store="s", out="o", max_steps=3, batch_size=4, drafter="eagle", eagle_layers=2
    ) == TrainConfig(
        store="s",
        out="o",
        schedule={"max_steps": 3},
        data={"batch_size": 4},
        drafter=EagleSettings(eagle_layers=2),
    )
    both = TrainConfig(store="s", out="o", feature_noise=0.5, drafter=EagleSettings(eagle_layers=2))
    assert both.drafter == EagleSettings(eagle_layers=2, feature_noise=0.5)
    with pytest.raises(OptionInvalid) as error:
        TrainConfig(store="s", out="o", max_steps=3, epochs=1, batch_size=0)
    with raises_naming(OptionInvalid, "max_steps", 3, 4):
        TrainConfig(store="s", out="o", max_steps=3, schedule={"max_steps": 4})
    assert "batch_size" in str(error.value)
    assert "--" not in str(error.value)


def test_names_are_unique_and_explained() -> None:
    commands = [main.get_command(click.Context(main), name) for name in COMMANDS]
    for config_class in [
        command.config_class for command in commands if isinstance(command, StageCommand)
    ]:
        keys: dict[str, str] = {}
        for setting in config_class.settings():
            assert keys.setdefault(setting.name, setting.key) == setting.key
            assert setting.field.description, setting.key


@pytest.mark.parametrize("kind", DRAFTERS)
def test_defaults_of_drafters_are_those_of_their_sizes(kind: str) -> None:
    """Check the defaults of values that ``drafter.json`` may omit.

    Each is the value that a run trains by default, or takes from the target.
    """
    settings = TrainConfig.of(store="s", out="o", drafter=kind).named()
    # A file without a scale means an EAGLE drafter that has none. A run always sets a scale.
    if kind == "eagle":
        assert settings.pop("eagle_embedding_scale") == 0
    for item in dataclasses.fields(DRAFTERS[kind].config_class):
        if item.name in settings and item.default is not dataclasses.MISSING:
            assert settings[item.name] in (item.default, None), item.name


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_settings(name: str) -> None:
    assert resolve(TrainConfig, {"store": "s", "out": "o", "preset": name}, None, (), PRESETS)
