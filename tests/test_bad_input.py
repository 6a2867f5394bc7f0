"""Bad input through the command line: one line that says what and what to do, exit code 2, nothing left behind."""

import builtins
import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from moa_data.moa.drafters.mixture import MoADrafter, MoASizes
from moa_data.moa.drafters.registry import DRAFTERS
from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.chat import RejectReason
from moa_data.moa.targets.live import Target
from moa_data.tests.kit.chats import chat, write_jsonl
from moa_data.tests.kit.command import TRAIN, copied, refused, run
from moa_data.tests.kit.disks import tmpfs


def extract(room: Path, out: Path, *options: str, model: Path | None = None) -> Any:
    arguments: list[str | Path] = ["--model", model or room / "model", "--dataset", room / "chats.jsonl", "--out", out]
    return run("extract", *arguments, "--part-tokens", "256", "--device", "cpu", *options)


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_weights_that_are_cut_short_are_named_and_leave_no_store(room: Path, tmp_path: Path) -> None:
    model = copied(room, "model", tmp_path)
    halve(model / "model.safetensors")
    refused(extract(room, tmp_path / "out", model=model), "model.safetensors is damaged or cut short", "Restore")
    assert not (tmp_path / "out").exists()
    refused(run("generate", "--model", model, "--drafter", tmp_path, "--prompt", "Hi"), "damaged or cut short")


def test_model_without_tokenizer(room: Path, tmp_path: Path) -> None:
    model = copied(room, "model", tmp_path)
    (model / "tokenizer.json").unlink()
    refused(extract(room, tmp_path / "out", model=model), "has no tokenizer; put the model's tokenizer.json")


def test_nan_weights_are_named_by_sequence_and_layer(room: Path, tmp_path: Path) -> None:
    model = copied(room, "model", tmp_path)
    network = LlamaForCausalLM.from_pretrained(model)
    with torch.no_grad():
        network.model.layers[0].mlp.down_proj.weight[3, 4] = float("nan")
    network.save_pretrained(model)
    refused(extract(room, tmp_path / "out", model=model), "row ", "layer 1", "NaN or infinity")


@pytest.mark.parametrize("command", ["train", "audit"])
def test_bundle_that_is_cut_short(room: Path, tmp_path: Path, command: str) -> None:
    store = copied(room, "store", tmp_path)
    halve(store / "target" / "frozen.safetensors")
    options: list[str | Path] = (
        ["--out", tmp_path / "run", *TRAIN] if command == "train" else ["--model", room / "model"]
    )
    refused(run(command, store, *options), "frozen.safetensors is damaged or cut short")
    assert not (tmp_path / "run").exists()


def test_bundle_with_a_flipped_bit(room: Path, tmp_path: Path) -> None:
    store = copied(room, "store", tmp_path)
    weights = store / "target" / "frozen.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    refused(run("train", store, "--out", tmp_path / "run", *TRAIN), "frozen.safetensors is not the file that")
    assert not (tmp_path / "run").exists()
    refused(run("repair", store), "is damaged. Repair it with --model MODEL", exit_code=1)
    refused(run("repair", store, "--drop", "--model", "m"), "not both")
    repaired = run("repair", store, "--model", room / "model")
    assert repaired.exit_code == 0, repaired.output
    assert weights.read_bytes() == (room / "store" / "target" / "frozen.safetensors").read_bytes()
    assert "is whole" in run("repair", store).stdout


def test_store_of_another_schema_version(room: Path, tmp_path: Path) -> None:
    store = copied(room, "store", tmp_path)
    manifest = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps(manifest | {"schema_version": 99}))
    (store / "commits" / "store.json").unlink()  # its own release would have sealed it
    for command in (["inspect"], ["verify"], ["audit", "--model", room / "model"], ["train", "--out", tmp_path / "r"]):
        refused(run(*command, store), "schema version 99; this release reads version 2")


def test_truncated_shard_and_missing_commit_are_made_again(room: Path, tmp_path: Path) -> None:
    store = copied(room, "store", tmp_path)
    files = list((store / "parts" / "kv").glob("c.0.*"))
    shard = max(files, key=lambda file: file.stat().st_size)
    whole = shard.read_bytes()
    halve(shard)
    refused(run("train", store, "--out", tmp_path / "run", *TRAIN), "Run extract again")
    refused(run("verify", store), "damaged", exit_code=1)
    (store / "commits" / "part-00001.json").unlink()
    assert extract(room, store).exit_code == 0
    assert shard.read_bytes() == whole
    assert run("verify", store).exit_code == 0


def test_store_without_a_committed_part(room: Path, tmp_path: Path) -> None:
    store = copied(room, "store", tmp_path)
    for commit in (store / "commits").glob("part-*.json"):
        commit.unlink()
    refused(run("audit", store, "--model", room / "model"), "no committed part")
    refused(run("inspect", store, "--sample", "0"), "--sample is 0, the store has 0 sequences")
    refused(run("train", store, "--out", tmp_path / "run", *TRAIN), "0 committed training sequences")


def test_unknown_device(room: Path, tmp_path: Path) -> None:
    refused(run("audit", room / "store", "--model", room / "model", "--device", "quantum"), "'quantum'", "--device cpu")
    refused(extract(room, tmp_path / "out", "--device", "quantum"), "'quantum'", "--device cpu")


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--max-steps", "0", "--max-steps is '0', expected at least 1"),
        ("--micro-batch-size", "0", "--micro-batch-size is '0', expected at least 1"),
        ("--learning-rate", "nan", "--learning-rate is 'nan', expected a finite number"),
        ("--set", "optimizer.gradient_clip=-1", "--set: gradient_clip is '-1', expected at least 0"),
        ("--precision", "int1", "precision is 'int1', expected one of auto, bf16-mixed"),
        ("--devices", "banana", "devices is 'banana', expected auto or a number"),
        ("--accelerator", "abacus", "accelerator is 'abacus', expected one of auto, cpu"),
        ("--set", "drafter.layer_attention_heads=0", "layer_attention_heads is '0', expected at least 1"),
        ("--set", "data.prefetch_batches", "expected KEY=VALUE"),
        ("--set", "prefetch_batch=0", "unknown setting 'prefetch_batch' (did you mean 'prefetch_batches'?)"),
        ("--set", "drafter.medusa_heads=2", "medusa_heads is a setting of medusa, moa has none; leave it out"),
        ("--drafter", "condor", f"drafter is 'condor', expected one of {', '.join(DRAFTERS)}"),
        ("--learning-rat", "1", "No such option"),
    ],
)
def test_training_options_are_checked_first(room: Path, tmp_path: Path, option: str, value: str, text: str) -> None:
    refused(run("train", room / "store", "--out", tmp_path / "run", *TRAIN, option, value), text)
    assert not (tmp_path / "run").exists()


def test_outputs_that_hold_something_else(room: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for out in (tmp_path, tmp_path / "notes.txt", tmp_path / "notes.txt" / "below"):
        refused(extract(room, out), str(out), "hoose another")
        refused(run("train", room / "store", "--out", out, *TRAIN), str(out), "hoose another")
        refused(run("demo", "--out", out), str(out), "hoose another")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("given", "standard_input"), [("-", "Un café".encode("latin-1")), ("Un caf\udce9", b""), ("-", b"\xff\xfeH\0i\0")]
)
def test_prompts_that_are_no_text(given: str, standard_input: bytes) -> None:
    result = run("generate", "--model", "m", "--drafter", "d", "--prompt", given, input=standard_input)
    refused(result, "the prompt is no UTF-8 text", "convert it")
    refused(run("generate", "--model", "m", "--drafter", "d", "--prompt", " "), "the prompt is empty")


def test_control_tokens_in_prompts(room: Path, tmp_path: Path) -> None:
    token = AutoTokenizer.from_pretrained(room / "model").all_special_tokens[0]
    model = ("--model", room / "model", "--device", "cpu", "--drafter", room / "drafter")
    refused(run("generate", *model, "--prompt", f"Hi {token}"), f"message 0 contains '{token}'", "Correct the text")
    questions = [["Hi?", "Why?"], ["Hi?", f"Why?{token}"]]
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"turns": turns} for turns in questions])
    for options in ((), ("--disconnect", "4")):
        result = run("eval", *model, *options, "--prompts", prompts, "--out", tmp_path / "report.json")
        refused(result, f"prompt 2: {RejectReason.SPECIAL_TOKEN_IN_CONTENT}: message 1 contains '{token}'")
        assert not (tmp_path / "report.json").exists()


def test_a_folder_of_several_splits_names_them(room: Path, tmp_path: Path) -> None:
    for name in ("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"):
        shutil.copy(room / "chats.jsonl", tmp_path / name)
    arguments: list[str | Path] = [
        "--model", room / "model", "--dataset", tmp_path, "--out", tmp_path / "out", "--device", "cpu",
    ]  # fmt: skip
    names = "splits test (1 file), train (1 file)"
    refused(
        run("extract", *arguments), names, "'train_sft' (the default). Choose one with --split, for example --split"
    )
    refused(run("plan", *arguments, "--split", "nope"), names, "none that is called 'nope'")
    planned = run("plan", *arguments, "--split", "train")
    assert planned.exit_code == 0, planned.output
    assert f"{tmp_path}, split train (1 of 2 files): 12 rows read" in planned.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--temperature", "-0.5", "temperature is '-0.5', expected at least 0"),
        ("--top-p", "0", "--top-p is '0', expected above 0"),
        ("--top-k", "-3", "--top-k is '-3', expected at least 0"),
        ("--tree", "big", "'big' is no shape of drafts; expected a chain's length such as 5"),
        ("--tree", "6x8x4", "4 nodes cannot make a draft tree 6 levels deep"),
        ("--seed", "99999999999999999999", "--seed is '99999999999999999999', expected"),
        ("--tree", "-1", "'-1' is no shape of drafts"),
    ],
)
def test_decoding_options_are_checked_before_the_target_is_loaded(option: str, value: str, text: str) -> None:
    refused(run("generate", "--model", "absent", "--drafter", "absent", "--prompt", "Hi", option, value), text)


def test_prompts_and_drafters_that_do_not_fit_the_target(room: Path, tmp_path: Path) -> None:
    target = Target.load(str(room / "model"), torch.float32, "cpu")
    strange = MoADrafter(MoASizes.from_target(target.config, {"weights_sha256": "0" * 64}))
    save_drafter(strange, tmp_path / "strange")
    generate = ("generate", "--model", room / "model", "--device", "cpu", "--max-new-tokens", "4", "--prompt")
    refused(run(*generate, "Hi", "--drafter", tmp_path / "strange"), "trained for a target with weights 0000")
    long = "word " * target.max_positions
    refused(run(*generate, long, "--drafter", room / "drafter"), f"the target has {target.max_positions} positions")
    chats = write_jsonl(tmp_path / "long.jsonl", [chat(long)])
    arguments = ("eval", "--model", room / "model", "--prompts", chats, "--out", tmp_path / "report.json")
    refused(run(*arguments, "--drafter", room / "drafter"), "give shorter prompts")
    assert not (tmp_path / "report.json").exists()


def test_usage_errors_are_one_line() -> None:
    result = run("extract", "--max-length", "abc", "--model", "m")
    refused(result, "--max-length is 'abc'", "--help")
    assert len(result.stderr.strip().splitlines()) == 1
    refused(run("extrakt"), "No such command 'extrakt'")


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.usefixtures("heeded_signals")
def test_ctrl_c_while_planning(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def struck(*args: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("moa_data.pipeline.extract.build_plan", struck)
    result = extract(room, tmp_path / "out")
    refused(result, "nothing was written. Run the same command again", exit_code=130)
    assert not (tmp_path / "out").exists()


def everything(folder: Path) -> dict[str, bytes | None]:
    """Content of all files below a folder but the lock, which says who held it last."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != "store.lock"
    }


def test_writers_do_not_leave_a_store_through_a_link(room: Path, tmp_path: Path) -> None:
    store = copied(room, "store", tmp_path)
    halve(store / "parts/hidden/last/c.0.0")
    shutil.move(store / "parts", tmp_path / "elsewhere")
    (store / "parts").symlink_to(tmp_path / "elsewhere")
    before = everything(tmp_path)
    model = ("--model", room / "model")
    refused(
        extract(room, store), "store/parts is a symbolic link to", "nothing inside a store is written through a link"
    )
    refused(run("repair", store, "--drop"), "store/parts is a symbolic link")
    refused(run("repair", store, *model), "store/parts is a symbolic link")
    assert everything(tmp_path) == before

    whole, out = room / "store", tmp_path / "out"
    assert run("export", whole, "--format", "eagle", "--out", tmp_path / "exported").exit_code == 0
    out.mkdir()
    (out / "store.lock").touch()
    (out / "target").symlink_to(tmp_path / "elsewhere")
    before = everything(tmp_path)
    refused(extract(room, out), "out/target is a symbolic link")
    refused(run("recode", whole, "--codec", "int8", "--out", out), "out/target is a symbolic link")
    refused(run("import", tmp_path / "exported", "--format", "eagle", *model, "--out", out), "out/target is a symbolic")
    assert everything(tmp_path) == before


def test_what_cannot_be_read_is_no_damage(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = copied(room, "store", tmp_path)
    halve(store / "target" / "frozen.safetensors")
    shard = str(store / "parts/hidden/last/c.1.0")
    before = everything(store)
    for module in (os, builtins):
        real = module.open

        def refuse(path: Any, *rest: Any, real: Any = real, **options: Any) -> Any:
            if str(path) == shard:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return real(path, *rest, **options)

        monkeypatch.setattr(module, "open", refuse)
    line = "parts/hidden/last/c.1.0 could not be checked (Input/output error)"
    verified = run("verify", store)
    refused(verified, line, "which says nothing about damage", "run the same command again")
    assert "frozen.safetensors" in verified.stdout
    for options in ((), ("--drop",), ("--model", room / "model")):
        refused(run("repair", store, *options), line, "so nothing was deleted")
    assert everything(store) == before


WRITERS = {
    "extract": ("--model", "model", "--dataset", "chats.jsonl", "--device", "cpu"),
    "recode": ("store", "--codec", "int8"),
    "train": ("store", *TRAIN),
}


def test_a_read_only_output_is_refused_in_one_line(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(room)
    with tmpfs(tmp_path / "disk", "ro") as disk:
        for command, options in WRITERS.items():
            line = f"{disk / 'out'} cannot be written (Read-only file system)"
            refused(run(command, *options, "--out", disk / "out"), line)


def test_training_asks_for_room_first(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    refused(run("train", room / "store", "--out", tmp_path / "run", *TRAIN), f"{tmp_path / 'run'} needs about")
    assert not (tmp_path / "run").exists()


def test_a_report_that_cannot_be_written_is_printed(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("moa_data.evaluation.run.write_report", full)
    options = ("--drafter", room / "drafter", "--prompts", room / "chats.jsonl", "--n-prompts", "1", "--device", "cpu")
    out = tmp_path / "report.json"
    done = run("eval", "--model", room / "model", *options, "--max-new-tokens", "4", "--out", out)
    refused(done, f"{out} cannot be written (No space left on device)")
    assert "| plain |" in done.stdout
