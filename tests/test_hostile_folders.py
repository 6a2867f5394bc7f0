"""Hostile model folders, stores and drafters on the command line: none of their code runs, one line names the file."""

import ast
import gzip
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moa_data.storage.commit import files_json, write_manifest_commit
from moa_data.storage.schema import StoreManifest, target_commit_path
from moa_data.storage.shard import FileRecord
from moa_data.tests.kit.command import TRAIN, copied, refused, run
from moa_data.tests.kit.hostile import bounded_memory, endless

ROOT = Path(__file__).resolve().parent.parent
CODE = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass Evil: pass\n"
AUTO_MAP: dict[str, Any] = {
    "AutoConfig": "evil.Evil",
    "AutoModel": "evil.Evil",
    "AutoModelForCausalLM": "evil.Evil",
    "AutoTokenizer": ["evil.Evil", "evil.Evil"],
}
Arguments = tuple[str | Path, ...]


def change_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def commit_target(store: Path) -> None:
    """Make commits/target.json agree with the files, as who can write to the folder does."""
    files: dict[str, Any] = {}
    for path in sorted((store / "target").rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            files[path.relative_to(store / "target").as_posix()] = FileRecord(len(content), zlib.crc32(content))
    target_commit_path(store).write_bytes(files_json(files))


def change_manifest(store: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = store / "store.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(StoreManifest.from_json(json.dumps(document)).to_json())
    write_manifest_commit(store)


def put_code(folder: Path, native: bool) -> None:
    """Give a model folder Python code, and names that lead to it."""
    (folder / "evil.py").write_text(CODE)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(CODE)
    change_json(folder / "config.json", auto_map=AUTO_MAP, **({} if native else {"model_type": "evil"}))
    change_json(folder / "tokenizer_config.json", auto_map=AUTO_MAP)


def generate(model: Path, drafter: str | Path = "d") -> Any:
    return run("generate", "--model", model, "--drafter", drafter, "--prompt", "Hi", "--device", "cpu")


def with_model(room: Path, model: Path, out: Path) -> Iterator[tuple[str, Arguments]]:
    """Every command that takes --model."""
    extract = ("--model", model, "--dataset", room / "chats.jsonl", "--out", out / "new", "--device", "cpu")
    decode = ("--model", model, "--prompts", room / "chats.jsonl", "--device", "cpu")
    store = copied(room, "store", out)
    yield "extract", extract
    yield "plan", extract
    yield "add", (store, "--model", model, "--activations", "hidden:layer:0")
    yield "audit", (store, "--model", model)
    yield "generate", ("--model", model, "--drafter", room / "drafter", "--prompt", "Hi", "--device", "cpu")
    yield "eval", (*decode, "--drafter", room / "drafter")
    yield "import", (out, "--format", "eagle", "--model", model, "--out", out / "imported")
    yield "export-drafter", (room / "drafter", "--format", "moa", "--model", model, "--out", out / "exported")
    (store / "commits" / "part-00000.json").write_text("{")
    yield "repair", (store, "--model", model)


def with_store(store: Path, model: Path, drafter: Path, out: Path) -> Iterator[tuple[str, Arguments]]:
    """Every command that loads a store's target/."""
    yield "train", (store, "--out", out / "run", *TRAIN)
    yield "inspect", (store, "--sample", "0")
    yield "recode", (store, "--codec", "transform:2.0", "--out", out / "recoded")
    yield "audit", (store, "--model", model)
    yield "export-drafter", (drafter, "--format", "moa", "--model", store, "--out", out / "exported")


@pytest.mark.parametrize("native", [False, True], ids=["own model type", "native model type"])
def test_no_command_runs_code_of_a_model_folder(room: Path, tmp_path: Path, native: bool) -> None:
    model = copied(room, "model", tmp_path)
    put_code(model, native)
    for command, arguments in with_model(room, model, tmp_path):
        refused(run(command, *arguments), "config.json: auto_map names Python code", "auto_map out")
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("native", [False, True], ids=["own model type", "native model type"])
def test_no_command_runs_code_of_a_store(room: Path, tmp_path: Path, native: bool) -> None:
    store = copied(room, "store", tmp_path)
    put_code(store / "target", native)
    commit_target(store)
    for command, arguments in with_store(store, room / "model", room / "drafter", tmp_path):
        refused(run(command, *arguments), "config.json: auto_map names Python code")
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("key", ["_attn_implementation", "_experts_implementation", "experts_implementation"])
def test_a_kernel_of_the_hub_is_refused(room: Path, tmp_path: Path, key: str) -> None:
    """The attention of the file would win over the one that is asked for; one of the Hub is downloaded and run."""
    model = Path(shutil.copytree(room / "model", tmp_path / "model"))
    change_json(model / "config.json", **{key: "kernels-community/flash-attn"})
    command = ("plan", "--model", model, "--dataset", room / "chats.jsonl", "--out", tmp_path / "s", "--device", "cpu")
    refused(run(*command), f"config.json: {key} overrides the attention", f"Take {key} out")


def test_code_beside_drafters_and_chats_is_no_input(room: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "evil.py").write_text(CODE)
    (drafter / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": AUTO_MAP}))
    save_file({"layer_self_attention.a": torch.zeros(2)}, drafter / "model.safetensors")
    refused(generate(room / "model", drafter), "none of the formats")
    chats = tmp_path / "chats"
    chats.mkdir()
    (chats / "chats.py").write_text(CODE)
    plan = ("--model", room / "model", "--dataset", chats, "--out", tmp_path / "out")
    refused(run("plan", *plan), "holds no .jsonl")
    assert not list(tmp_path.rglob("ran"))


def calls_that_load() -> Iterator[tuple[Path, ast.Call]]:
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        if "tests" in parts or any(part.startswith(".") for part in parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if node.func.attr in ("from_pretrained", "from_config", "load_dataset") and owner != "nn.Embedding":
                    yield path, node


def test_every_call_that_loads_refuses_foreign_code() -> None:
    calls = list(calls_that_load())
    assert len(calls) > 5
    for path, call in calls:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("trust_remote_code") == "False", f"{path}:{call.lineno}"
        if ast.unparse(call.func).endswith("ForCausalLM.from_pretrained"):
            assert given.get("use_safetensors") == "True", f"{path}:{call.lineno}"


def test_pickled_weights_and_adapters_are_no_weights(room: Path, tmp_path: Path) -> None:
    model = copied(room, "model", tmp_path)
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "elsewhere"}))
    refused(generate(model), "adapter_config.json: an adapter would change the weights")
    (model / "adapter_config.json").unlink()
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").rename(model / "other.safetensors")
    refused(generate(model), "no file named model.safetensors")
    for place in ("pytorch_model.bin", "../model.safetensors"):
        index = {"metadata": {}, "weight_map": {"model.norm.weight": place}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        refused(generate(model), f"the weights are said to lie in '{place}'")


BUNDLE_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 0}, "num_attention_heads is '0', expected a whole number"),
    ({"num_key_value_heads": 3}, "3 KV heads do not divide 2 heads"),
    ({"head_dim": 6}, "is of another target than its store: it has head_dim 6 and not 8"),
    ({"vocab_size": 1000}, "is of another target than its store: it has vocab_size 1000"),
    ({"hidden_size": "16"}, "hidden_size is '16', expected a whole number"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is '1000000000', expected a whole number"),
    ({"rms_norm_eps": "big"}, "config.json"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta is 0, expected a number above 0"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 0}}, "config.json"),
    ({"rope_parameters": 7}, "config.json"),
    ({"dtype": "load"}, "config.json"),
]


@pytest.mark.parametrize(("changes", "message"), BUNDLE_CHANGES)
def test_a_bundle_of_other_sizes_is_one_line(room: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    store = copied(room, "store", tmp_path)
    change_json(store / "target" / "config.json", **changes)
    commit_target(store)
    refused(run("train", store, "--out", tmp_path / "run", *TRAIN), message)


def test_token_ids_beyond_the_vocabulary_are_named(room: Path, tmp_path: Path) -> None:
    """A store whose tokens belong to a larger vocabulary than its target's, with checksums that hold."""
    store = copied(room, "store", tmp_path)
    small = 60
    change_manifest(store, lambda document: document["target"].update(vocab_size=small))
    change_json(store / "target" / "config.json", vocab_size=small)
    file = store / "target" / "frozen.safetensors"
    weights = load_file(file)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:small].contiguous()
    save_file(weights, file)
    commit_target(store)
    message = "lie outside the vocabulary of 60"
    refused(run("train", store, "--out", tmp_path / "run", *TRAIN), message, "sequence ", "source row ")
    refused(run("inspect", store, "--sample", "0"), message)
    refused(run("recode", store, "--codec", "int8", "--out", tmp_path / "recoded"), message)
    refused(run("export", store, "--format", "eagle", "--out", tmp_path / "export"), message)
    refused(run("audit", store, "--model", room / "model"), message)
    refused(run("add", store, "--model", room / "model", "--activations", "hidden:layer:0"), message)


def test_a_gzip_bomb_is_refused(room: Path, tmp_path: Path) -> None:
    folder = tmp_path / "specforge"
    folder.mkdir()
    (folder / "data_0.ckpt.gz").write_bytes(gzip.compress(bytes(16 << 20)) * 512)  # 8 GB in 8 MB
    arguments = ("--format", "specforge", "--layers", "0,1", "--model", room / "model", "--out", tmp_path / "out")
    with bounded_memory():
        refused(run("import", folder, *arguments), "data_0.ckpt.gz", "it unpacks to more than")


def test_weights_that_are_fewer_than_the_config_calls_for(room: Path, tmp_path: Path) -> None:
    model = copied(room, "model", tmp_path)
    change_json(model / "config.json", hidden_size=1 << 14, intermediate_size=1 << 16, num_hidden_layers=1000)
    with bounded_memory():
        refused(generate(model), "config.json calls for more than")


@pytest.mark.skipif(os.name != "posix", reason="FIFOs")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "sparse"])
def test_files_of_a_model_folder_that_never_end(room: Path, tmp_path: Path, name: str, kind: str) -> None:
    model = copied(room, "model", tmp_path)
    with bounded_memory(), endless(model / name, kind):
        refused(generate(model))
