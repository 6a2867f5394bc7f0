"""Changed files of a store's bundle, a drafter and a model folder only raise the package's errors.

The changes are generated, with correct checksums, like those of a deliberate attacker. Examples are
the same in every run.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save
from transformers import AutoConfig

from moa_data.moa.formats.checkpoint import LAYOUTS, load_drafter, write_layout
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.chat_tokens import prompt_tokens
from moa_data.moa.targets.live import Target, load_target_tokenizer
from moa_data.pipeline.audit import audit
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.tests.kit.hostile import (
    QUICK_AND_LONG,
    changed,
    commit_target,
    only_own_errors,
    replaced,
    try_examples,
)
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.data import StoreDataModule
from moa_data.trainer.fit import build_module

BUNDLE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@pytest.fixture(scope="module")
def folders(room: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with model/, store/, drafter/ and foreign/.

    foreign/ has the same drafter in its authors' layout.
    """
    folder = tmp_path_factory.mktemp("hostile_bundle")
    for name in ("model", "store", "drafter"):
        shutil.copytree(room / name, folder / name)
    drafter = load_drafter(room / "drafter")
    target_config = AutoConfig.from_pretrained(room / "model")
    write_layout(drafter, LAYOUTS["moa"], folder / "foreign", target={"config": target_config})
    config_file = folder / "foreign" / "config.json"
    values = json.loads(config_file.read_text())
    values.pop("moa_data")
    config_file.write_text(json.dumps(values))
    return folder


@st.composite
def changed_tensors(draw: Callable[..., Any], content: bytes, file: Path) -> bytes:
    """Draw a weights file with changed tensors, an incorrect header, or other changed bytes."""
    if draw(st.booleans()):
        size = int.from_bytes(content[:8], "little")
        header: bytes = draw(changed(content[8 : 8 + size]))
        length: int = draw(st.sampled_from([len(header), len(header), 0, size, 2**40, 2**64 - 1]))
        return length.to_bytes(8, "little") + header + content[8 + size :]
    weights = load_file(file)
    name = draw(st.sampled_from(sorted(weights)))
    value = weights.pop(name)
    others = [
        None, value[:1], value[None], value.flatten(), value.to(torch.int64),
        value.to(torch.float16), value * torch.nan, torch.zeros(0), torch.zeros(()),
    ]  # fmt: skip
    other = draw(st.sampled_from(range(len(others))))
    if others[other] is not None:
        weights[name] = others[other].contiguous()
    if draw(st.integers(0, 5)) == 0:
        weights[draw(st.sampled_from(["layers.x.y", "layers.", "layers.99.mlp", "x"]))] = (
            torch.zeros(2)
        )
    return bytes(save(weights))


def use_bundle(folders: Path) -> None:
    store = folders / "store"
    config = TrainConfig.of(
        store=str(store), out="unused", accelerator="cpu", batch_size=2, max_steps=1
    )

    def training() -> None:
        with ActivationStore(store) as reader:
            build_module(StoreDataModule(reader, config))

    def sample() -> None:
        with ActivationStore(store) as reader:
            load_target_tokenizer(reader.target_path).decode(reader.read(0, "tokens").tolist())

    def live() -> None:
        audit(store, str(folders / "model"), samples=1, device="cpu")

    only_own_errors(
        lambda: verify_store(store, values=False),
        lambda: FrozenTarget.load(store / "target", 1),
        training,
        sample,
        live,
    )


def check_bundle(folders: Path, data: Any) -> None:
    folder = folders / "store" / "target"
    path = folder / data.draw(
        st.sampled_from([*(name for name in BUNDLE if (folder / name).exists()), "weights"])
    )
    if path.name == "weights":
        path = folder / "frozen.safetensors"
        content = data.draw(changed_tensors(path.read_bytes(), path))
    else:
        content = data.draw(changed(path.read_bytes()))
    with replaced(path, content), replaced(folders / "store/commits/target.json", b""):
        commit_target(folders / "store")
        use_bundle(folders)


def check_drafter(folders: Path, data: Any) -> None:
    names = (
        "drafter/drafter.json",
        "drafter/drafter.safetensors",
        "foreign/config.json",
        "foreign/model.safetensors",
    )
    path = folders / data.draw(st.sampled_from(names))
    good = path.read_bytes()
    with replaced(
        path,
        data.draw(changed_tensors(good, path) if path.suffix == ".safetensors" else changed(good)),
    ):
        only_own_errors(lambda: load_drafter(path.parent))


def check_model(folders: Path, data: Any) -> None:
    """Check that the live target loads and encodes a prompt, or that its files are refused."""
    folder = folders / "model"
    path = folder / data.draw(
        st.sampled_from([name for name in BUNDLE if (folder / name).exists()])
    )

    def encode() -> None:
        target = Target.load(str(folder), torch.float32, "cpu")
        prompt_tokens(target.template, [{"role": "user", "content": "Hi"}])

    with replaced(path, data.draw(changed(path.read_bytes()))):
        only_own_errors(encode)


@QUICK_AND_LONG
@pytest.mark.parametrize("check", [check_bundle, check_drafter, check_model])
def test_changed_files_give_own_errors(
    folders: Path, check: Callable[[Path, Any], None], how: settings
) -> None:
    try_examples(how, lambda data: check(folders, data))
