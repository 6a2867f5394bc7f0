"""A GGUF file is converted once, completely or not at all, into a folder with its values.

Files that cannot be read are refused.
"""

import hashlib
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from moa_data import files
from moa_data.commands.console import user_message
from moa_data.errors import NotEnoughMemory, StorageUnavailable, TargetError, TemplateError
from moa_data.moa.targets import gguf
from moa_data.moa.targets.bundle import cache_folder
from moa_data.moa.targets.live import Target, resolve_model_folder
from moa_data.moa.targets.template import template_text
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.gguf_files import write_gguf
from moa_data.tests.kit.models import build_tokenizer, write_target
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty folder of converted files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder("gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file in float32."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {"lock"}


@pytest.mark.parametrize(
    ("types", "dtype"),
    [
        (
            {
                "token_embd.weight": "Q8_0",
                "blk.0.attn_q.weight": "Q4_0",
                "blk.1.attn_k.weight": "Q8_0",
            },
            torch.bfloat16,
        ),
        ({"output.weight": "BF16"}, torch.bfloat16),
        ({"output.weight": "F16", "blk.0.attn_k.weight": "F16"}, torch.float16),
        ("F32", torch.float32),
    ],
)
def test_the_values_are_those_that_gguf_dequantises(
    tmp_path: Path, types: dict[str, str] | str, dtype: torch.dtype
) -> None:
    values = write_gguf(tmp_path / "tiny.gguf", types)
    target = Target.load(str(tmp_path / "tiny.gguf"), torch.float32, "cpu")
    weights = target.model.state_dict()
    assert weights.keys() == values.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, torch.tensor(values[name]).to(dtype).float()), name
    assert target.folder is not None
    with safe_open(target.folder / "model.safetensors", "pt") as stored:
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {dtype}  # noqa: SIM118


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "tied.gguf", tie_word_embeddings=True)
    model: Any = Target.load(str(tmp_path / "tied.gguf"), device="cpu").model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, torch.tensor(values["model.embed_tokens.weight"]))


def test_the_tokenizer_and_its_template_are_those_of_the_file(whole: Path) -> None:
    target, expected = Target.load(str(whole), device="cpu"), build_tokenizer(LLAMA3_TEMPLATE)
    text = "the cat <|eot_id|> sat on 123 mats\n\n  "
    assert target.tokenizer(text)["input_ids"] == expected(text)["input_ids"]
    assert target.tokenizer.chat_template == LLAMA3_TEMPLATE
    assert target.eos_token_ids == {expected.eos_token_id}


def test_the_file_identifies_the_target_whatever_its_name(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.load(str(whole), device="cpu")
    assert target.identity == {"weights_sha256": hashlib.sha256(whole.read_bytes()).hexdigest()}
    (tmp_path / "folder").mkdir()
    other = shutil.copy(whole, tmp_path / "folder" / "other.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)  # an error, if anything were converted again
    for path in (other, tmp_path / "folder", target.folder):
        assert resolve_model_folder(str(path)) == target.folder
        assert Target.load(str(path), device="cpu").identity == target.identity


def test_safetensors_come_before_gguf_files(tmp_path: Path, whole: Path) -> None:
    folder = write_target(tmp_path / "model")
    shutil.copy(whole, folder)
    assert resolve_model_folder(str(folder)) == folder


def test_other_files_beside_it_are_not_read(tmp_path: Path, whole: Path) -> None:
    shutil.copy(whole, tmp_path / "tiny.gguf")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": "no", "auto_map": {"AutoTokenizer": ["a.B", "a.B"]}}'
    )
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert Target.load(str(tmp_path), device="cpu").tokenizer.chat_template == LLAMA3_TEMPLATE


def write_others(folder: Path, whole: Path, kind: str) -> Path:
    """Write a file or folder that cannot be a target; return the path to load."""
    path = folder / "tiny.gguf"
    content = whole.read_bytes()
    if kind == "several":
        shutil.copy(whole, folder / "a.gguf")
        shutil.copy(whole, folder / "b.gguf")
        return folder
    if kind == "not GGUF":
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    elif kind == "empty":
        path.touch()
    elif kind.startswith("cut"):
        path.write_bytes(content[: int(len(content) * float(kind.split()[1]))])
    elif kind == "damaged":
        path.write_bytes(content[:8] + b"\xff" * 16 + content[24:])
    elif kind == "a part":
        write_gguf(path, facts={"split.count": 3, "split.no": 0}, num_hidden_layers=2)
        content = path.read_bytes().replace(
            b"llama.block_count\x04\0\0\0\2", b"llama.block_count\x04\0\0\0\3"
        )
        path.write_bytes(content)
    elif kind == "architecture":
        write_gguf(path, architecture="wonder")
    elif kind == "tokenizer":
        write_gguf(path, tokenizer_kind="wordpiece")
    elif kind == "rotation":
        write_gguf(path, facts={"llama.rope.scaling.type": "yarn"})
    else:
        write_gguf(path, extra={"rope_freqs.weight": np.ones(4, np.float32)})
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "several", "not GGUF", "empty", "cut 0.1", "cut 0.5", "cut 0.99", "damaged", "a part",
        "architecture", "tokenizer", "rotation", "tensor",
    ],
)  # fmt: skip
def test_what_cannot_be_read_whole_is_refused_in_a_line(
    tmp_path: Path, whole: Path, cache: Path, kind: str
) -> None:
    path = write_others(tmp_path, whole, kind)
    with pytest.raises(TargetError) as refused:
        resolve_model_folder(str(path))
    message = str(refused.value)
    assert message.startswith(str(path)) or str(path) in message
    assert "\n" not in message
    names = {
        "several": "a.gguf, b.gguf",
        "a part": "--merge",
        "architecture": "wonder",
        "tokenizer": "wordpiece",
    }
    assert names.get(kind, "") in message
    assert not cache.exists() or not left_in(cache)


def test_missing_packages_are_named_with_their_extra(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("gguf", "accelerate"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ModuleNotFoundError) as missing:
                resolve_model_folder(str(whole))
        assert "pip install 'moa-data[gguf]'" in (user_message(missing.value, "extract") or "")


def test_too_little_memory_or_disk_is_refused_before_anything_is_written(
    whole: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "free_memory", lambda: 1000)
        with pytest.raises(NotEnoughMemory):
            resolve_model_folder(str(whole))
    usage = shutil.disk_usage(whole)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with raises_naming(StorageUnavailable, "XDG_CACHE_HOME", "1.0 kB"):
            resolve_model_folder(str(whole))
    assert not left_in(cache)


def test_without_a_template_only_chats_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "base.gguf", template=None)
    target = Target.load(str(tmp_path / "base.gguf"), device="cpu")
    with pytest.raises(TemplateError):
        template_text(target.tokenizer)


def test_a_revision_is_refused(whole: Path) -> None:
    with pytest.raises(TargetError):
        resolve_model_folder(str(whole), revision="main")


class Stopped(BaseException):
    """Stands for the end of the process."""


def test_a_stop_at_any_call_leaves_nothing_that_hinders(
    whole: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: Any) -> None:
        raise Stopped

    for module, name in ((gguf, "fsync_directory"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, stop)
            with pytest.raises(Stopped):
                gguf.model_folder(whole)
        assert not left_in(cache)
    # A killed process cannot clean up.
    shutil.copytree(whole.parent, cache / f"killed{files.PARTIAL_SUFFIX}")
    folder = gguf.model_folder(whole)
    assert left_in(cache) == {folder.name}


def test_of_two_at_once_one_converts(
    whole: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted = []
    convert = gguf._convert

    def counted(file: Path, folder: Path) -> None:
        converted.append(file)
        convert(file, folder)

    monkeypatch.setattr(gguf, "_convert", counted)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(gguf.model_folder, [whole, whole])
    assert first == second
    assert converted == [whole]
    assert left_in(cache) == {first.name}
