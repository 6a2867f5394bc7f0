"""Both checkpoint layouts round-trip, and a wrong key, shape or target is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moa_data.errors import DrafterError, TargetError
from moa_data.moa.formats.checkpoint import (
    LAYOUTS,
    check_drafter_matches,
    load_drafter,
    load_drafters,
    save_drafter,
    write_layout,
)
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.models import build_model


def same_weights(one: Any, other: Any) -> bool:
    weights, others = one.state_dict(), other.state_dict()
    return weights.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in weights.items())


def test_official_layout_as_pickle_and_its_faults(tmp_path: Path) -> None:
    model = build_model()
    drafter = build_drafter(model)
    write_layout(drafter, LAYOUTS["moa"], tmp_path, target={"config": model.config})
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert same_weights(load_drafter(tmp_path), drafter)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("moa_data")
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "nothing"}))
    with pytest.raises(DrafterError, match=r"config\.json"):
        load_drafter(tmp_path)
    for content in ([torch.zeros(1)], {"a": 1}, {"a": Path("code")}, None):
        torch.save(content, tmp_path / "pytorch_model.bin")
        if content is None:
            (tmp_path / "pytorch_model.bin").write_bytes(b"torn")
        with pytest.raises(DrafterError, match=r"pytorch_model\.bin"):
            load_drafter(tmp_path)


def test_drafters_are_named_by_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    target = Target(build_model())
    for folder in ("one/drafter", "two", "other/two"):
        save_drafter(build_drafter(target.model), tmp_path / folder)
    folders = ["~/one", str(tmp_path / "two"), str(tmp_path / "other" / "two")]
    assert list(load_drafters(folders, target, torch.float32)) == ["one", "two", "two'"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"n_heads": "4"}, "n_heads"), ({"norm_eps": "small"}, "norm_eps"), ({"n_heads": None}, "n_heads"),
        *((text, None) for text in (b'{"kind": []}', b'{"hidden": 1}', b"[]", b"null", b"{", b"\xff")),
    ],
)  # fmt: skip
def test_descriptions_that_cannot_be_used_are_refused(tmp_path: Path, content: Any, named: str | None) -> None:
    save_drafter(build_drafter(build_model()), tmp_path)
    file = tmp_path / "drafter.json"
    if isinstance(content, dict):
        values = json.loads(file.read_text()) | content
        content = json.dumps({name: value for name, value in values.items() if value is not None}).encode()
    file.write_bytes(content)
    with pytest.raises(DrafterError, match=named):
        load_drafter(tmp_path)


def test_strict_keys_and_shapes(tmp_path: Path) -> None:
    drafter = build_drafter(build_model())
    save_drafter(drafter, tmp_path)
    weights = load_file(tmp_path / "drafter.safetensors")
    for change in ({"kv_to_hidden.bias": None}, {"extra": torch.zeros(1)}, {"kv_to_hidden.bias": torch.zeros(2)}):
        changed = {name: value for name, value in (weights | change).items() if value is not None}
        save_file(changed, tmp_path / "drafter.safetensors")
        with pytest.raises(DrafterError, match=next(iter(change))):
            load_drafter(tmp_path)
    (tmp_path / "drafter.safetensors").write_bytes(b"torn")
    with pytest.raises(DrafterError):
        load_drafter(tmp_path)
    (tmp_path / "drafter.safetensors").unlink()
    with pytest.raises(DrafterError, match="safetensors"):
        load_drafter(tmp_path)


def test_another_target_is_refused(tmp_path: Path) -> None:
    model = build_model()
    target = Target(model)
    target.identity = {"weights_sha256": "cd" * 32}
    check_drafter_matches(build_drafter(model, target={"weights_sha256": "cd" * 32}), target)
    with pytest.raises(TargetError, match="efefefefefef"):
        check_drafter_matches(build_drafter(model, target={"weights_sha256": "ef" * 32}), target)
    with pytest.raises(TargetError, match="kv_width"):
        check_drafter_matches(build_drafter(model), Target(build_model(num_key_value_heads=4)))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "does not exist"),
        (("run.yaml",), "stopped before .* again[.]"),
        (("run.yaml", "checkpoints/last.ckpt"), "again with --resume"),
        (("store.json", "plan.parquet"), "is a store"),
        (("notes",), "holds no drafter"),
    ],
)
def test_what_is_no_drafter_is_named(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    folder = tmp_path / "folder"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    with pytest.raises(DrafterError, match=said):
        load_drafter(folder)
