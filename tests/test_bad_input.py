"""Bad and hostile input on the command line fails with exit code 2 and one line.

Nothing is left behind or changed, and no foreign code runs.
"""

import ast
import builtins
import errno
import gzip
import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from moa_data.moa.drafters.mixture import MoADrafter, MoASizes
from moa_data.moa.drafters.registry import DRAFTERS
from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.chat import RejectReason
from moa_data.moa.targets.live import Target
from moa_data.storage.commit import write_manifest_commit
from moa_data.storage.schema import StoreManifest
from moa_data.tests.kit.chats import chat, write_jsonl
from moa_data.tests.kit.command import TRAIN, refused, run
from moa_data.tests.kit.disks import tmpfs
from moa_data.tests.kit.hostile import bounded_memory, change_json, commit_target, endless
from moa_data.tests.kit.stores import flip
from moa_data.tests.kit.tree import visible_files
from moa_data.tests.kit.variants import quick

ROOT = Path(__file__).resolve().parent.parent
# The commands run in a folder with model/, drafter/, chats.jsonl and store/.
EXTRACT = "extract --model model --dataset chats.jsonl --out out --part-tokens 256 --device cpu"
PLAN = "plan --model model --dataset chats.jsonl --out out --device cpu"
TRAINING = f"train store --out out {shlex.join(TRAIN)}"
AUDIT = "audit store --model model --device cpu"
DECODE = "--model model --device cpu --drafter drafter"
GENERATE = f"generate {DECODE} --prompt Hi"
EVAL = f"eval {DECODE} --prompts prompts.jsonl --out report.json"
BARE = "generate --model absent --drafter absent --prompt Hi"
STORE = {
    "inspect": "inspect store --sequence 0", "verify": "verify store", "audit": AUDIT,
    "train": TRAINING, "recode": "recode store --codec int8 --out ../recoded",
    "export": "export store --format eagle --out ../exported",
    "add": "add store --model model --activations hidden:layer:0",
}  # fmt: skip


def nothing(room: Path) -> None:
    """Change nothing."""


def halve(name: str) -> Callable[[Path], None]:
    return lambda room: os.truncate(room / name, (room / name).stat().st_size // 2)


def changed(name: str, **values: Any) -> Callable[[Path], None]:
    """Change values in a JSON file, and update the commit of the store's bundle."""

    def change(room: Path) -> None:
        change_json(room / name, **values)
        commit_target(room / "store")

    return change


def put_nan(room: Path) -> None:
    file = room / "model/model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mlp.down_proj.weight"][3, 4] = float("nan")
    save_file(weights, file, {"format": "pt"})


def raise_version(room: Path) -> None:
    change_json(room / "store/store.json", schema_version=99)
    # The commit no longer matches the file. A release with version 99 would write its own.
    (room / "store/commits/store.json").unlink()


def drop_parts(room: Path) -> None:
    for commit in (room / "store/commits").glob("part-*.json"):
        commit.unlink()


def put_stranger(room: Path) -> None:
    facts = Target.load(str(room / "model"), torch.float32, "cpu").facts
    save_drafter(
        MoADrafter(MoASizes.from_target(facts, {"weights_sha256": "0" * 64})), room / "strange"
    )


def ask_much(room: Path) -> None:
    write_jsonl(room / "prompts.jsonl", [chat("word " * 512)])


def ask_for_control(room: Path) -> None:
    token = AutoTokenizer.from_pretrained(room / "model").all_special_tokens[0]
    write_jsonl(
        room / "prompts.jsonl",
        [{"turns": turns} for turns in (["Hi?", "Why?"], ["Hi?", f"Why?{token}"])],
    )


def split(room: Path) -> None:
    (room / "data").mkdir()
    for name in ("train", "test"):
        shutil.copy(room / "chats.jsonl", room / f"data/{name}-00000-of-00001.jsonl")


def pickle_weights(room: Path) -> None:
    model = room / "model"
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").rename(model / "other.safetensors")


def weights_at(path: str) -> Callable[[Path], None]:
    def change(room: Path) -> None:
        pickle_weights(room)
        index = {"metadata": {}, "weight_map": {"model.norm.weight": path}}
        (room / "model/model.safetensors.index.json").write_text(json.dumps(index))

    return change


def link_parts(room: Path) -> None:
    halve("store/parts/hidden/last/c.0.0")(room)
    (room / "store/parts").rename(room / "elsewhere")
    (room / "store/parts").symlink_to(room / "elsewhere")


def link_output(room: Path) -> None:
    assert run("export", "store", "--format", "eagle", "--out", "exported").exit_code == 0
    (room / "out").mkdir()
    (room / "out/store.lock").touch()
    (room / "out/target").symlink_to(room / "exported")


def shrink_vocabulary(room: Path) -> None:
    """Make tokens exceed the vocabulary of the store's target, with correct checksums."""
    store = room / "store"
    document = json.loads((store / "store.json").read_text())
    document["target"]["vocab_size"] = 60
    (store / "store.json").write_text(StoreManifest.from_json(json.dumps(document)).to_json())
    write_manifest_commit(store)
    weights = load_file(store / "target/frozen.safetensors")
    weights |= {
        name: weights[name][:60].contiguous() for name in ("embed_tokens.weight", "lm_head.weight")
    }
    save_file(weights, store / "target/frozen.safetensors")
    changed("store/target/config.json", vocab_size=60)(room)


def put_code(folder: str, native: bool = False) -> Callable[[Path], None]:
    """Put Python code into a model folder, with config entries that refer to it.

    Also creates damaged/, a store to repair.
    """

    def change(room: Path) -> None:
        (room / folder / "custom_generate").mkdir()
        for name in ("evil.py", "custom_generate/generate.py"):
            (room / folder / name).write_text(CODE)
        model_type = {} if native else {"model_type": "evil"}
        changed(f"{folder}/tokenizer_config.json", auto_map=AUTO_MAP)(room)
        changed(f"{folder}/config.json", auto_map=AUTO_MAP, **model_type)(room)
        shutil.copytree(room / "store", room / "damaged")
        (room / "damaged/commits/part-00000.json").write_text("{")

    return change


def put_code_elsewhere(room: Path) -> None:
    (room / "evil/chats").mkdir(parents=True)
    folder = room / "evil"
    for name in ("evil.py", "chats/chats.py"):
        (folder / name).write_text(CODE)
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": AUTO_MAP}))
    save_file({"layer_self_attention.a": torch.zeros(2)}, folder / "model.safetensors")


def put_bomb(room: Path) -> None:
    (room / "bomb").mkdir()
    # 2 GiB of zeros become about 2 MB.
    (room / "bomb/data_0.ckpt.gz").write_bytes(gzip.compress(bytes(16 << 20)) * 128)


CODE = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass Evil: pass\n"
AUTO_MAP: dict[str, Any] = dict.fromkeys(
    ("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "evil.Evil"
)
AUTO_MAP |= {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
# All commands that take --model, and all commands that load a store's target/.
WITH_MODEL = (
    EXTRACT, PLAN, STORE["add"], AUDIT, GENERATE, EVAL.replace("prompts.jsonl", "chats.jsonl"),
    "import . --format eagle --model model --out out", "repair damaged --model model",
    "export-drafter drafter --format moa --model model --out out",
)  # fmt: skip
WITH_STORE = (
    TRAINING, STORE["inspect"], AUDIT, "recode store --codec transform:2.0 --out out",
    "export-drafter drafter --format moa --model store --out out",
)  # fmt: skip
CONFIG = "model/config.json"
BUNDLE = "store/target/config.json"
SPLITS = "numbers of files: test (1), train (1). Choose one with --split"
LOADS = {"from_pretrained", "from_config", "load_dataset"}
IS_ZERO = "is '0', expected at least 1"
# Name -> the change to the folder, and for each command the texts that its error must contain.
INPUTS: dict[str, tuple[Callable[[Path], object], dict[str, tuple[str, ...]]]] = {
    "weights cut short": (
        halve("model/model.safetensors"),
        dict.fromkeys(
            (EXTRACT, GENERATE), ("model.safetensors is damaged or cut short", "Restore")
        ),
    ),
    "no tokenizer": (
        lambda room: (room / "model/tokenizer.json").unlink(),
        {EXTRACT: ("has no tokenizer. Put the model's tokenizer.json",)},
    ),
    "no config": (
        lambda room: (room / CONFIG).unlink(), dict.fromkeys((PLAN, EXTRACT), ("config.json",))
    ),
    "NaN in weights": (put_nan, dict.fromkeys(
        (EXTRACT, GENERATE), ("values of model.layers.0.mlp.down_proj.weight [", "NaN or infinity")
    )),
    "bundle cut short": (
        halve("store/target/frozen.safetensors"),
        dict.fromkeys(
            (TRAINING, AUDIT, "compare store store"),
            ("frozen.safetensors is damaged or cut short",),
        ),
    ),
    "a flipped bit": (
        lambda room: flip(room / "store/target/frozen.safetensors", -1),
        {
            TRAINING: ("frozen.safetensors has changed since",),
            "repair store --drop --model m": ("not both",),
        },
    ),
    "another version": (
        raise_version,
        dict.fromkeys(
            (STORE[name] for name in ("inspect", "verify", "audit", "train")),
            ("schema version 99, but this release reads only version 2",),
        ),
    ),
    "no part": (drop_parts, {
        AUDIT: ("no finished part",),
        STORE["inspect"]: ("--sequence is 0, expected", "below 0"),
        TRAINING: ("0 training sequences in its finished parts",),
    }),
    "tokens beyond the vocabulary": (
        shrink_vocabulary,
        {
            f"{TRAINING} --out ../run":
                ("the vocabulary has only 60 tokens", "sequence ", "of the dataset"),
        }
        | dict.fromkeys(
            (STORE[name] for name in ("inspect", "recode", "export", "audit", "add")),
            ("the vocabulary has only 60 tokens",),
        ),
    ),
    "another target's drafter": (
        put_stranger,
        {
            "generate --model model --drafter strange --prompt Hi":
                ("had weights with the hash 0",),
        },
    ),
    "a link in the store": (link_parts, dict.fromkeys(
        (
            EXTRACT.replace("--out out", "--out store"), "repair store --drop",
            "repair store --model model",
        ),
        ("store/parts is a symbolic link",),
    )),
    "a link in the output": (link_output, dict.fromkeys(
        (
            EXTRACT, f"{STORE['recode']} --out out",
            "import exported --format eagle --model model --out out",
        ),
        ("out/target is a symbolic link",),
    )),
    "a shard cut short": (halve("store/parts/kv/c.0.0.0.0.0"), {TRAINING: ("rewrites only the damaged part",)}),
    "long prompts": (ask_much, {
        EVAL: ("give shorter prompts",),
        f"generate {DECODE} --prompt '{'word ' * 512}'": ("expected fewer than 512",),
    }),
    "control tokens": (ask_for_control, dict.fromkeys(
        (EVAL, f"{EVAL} --disconnect 4"),
        (f"prompt 2: {RejectReason.SPECIAL_TOKEN_IN_CONTENT} (message 1 contains '",),
    ) | {
        f"generate {DECODE} --prompt 'Hi <|eot_id|>'":
            ("message 0 contains '<|eot_id|>'", "Correct the text"),
    }),
    "several splits": (split, {
        EXTRACT.replace("chats.jsonl", "data"):
            (SPLITS, "does not have the split 'train_sft'"),
        f"{PLAN.replace('chats.jsonl', 'data')} --split nope": (SPLITS, "does not have the split 'nope'"),
    }),
    **{f"code in {folder}": (
        put_code(folder),
        dict.fromkeys(commands, ("config.json: auto_map names Python code", "auto_map out")),
    ) for folder, commands in {"model": WITH_MODEL, "store/target": WITH_STORE}.items()},
    "code beside drafters and chats": (put_code_elsewhere, {
        f"{GENERATE} --drafter evil": ("in an unknown format",),
        f"{PLAN} --dataset evil/chats": ("has no file with one of the suffixes .jsonl",),
    }),
    "a gzip bomb": (put_bomb, {
        "import bomb --format specforge --layers 0,1 --model model --out out":
            ("data_0.ckpt.gz", "unpack to more than"),
    }),
    "fewer weights than the config calls for": (
        changed(CONFIG, hidden_size=1 << 14, intermediate_size=1 << 16, num_hidden_layers=1000),
        {GENERATE: ("config.json describes at least",)},
    ),
    "pickled weights": (pickle_weights, {GENERATE: ("no file named model.safetensors",)}),
    "weights elsewhere": (
        weights_at("../model.safetensors"), {GENERATE: ("names '../model",)},
    ),
    "weights in a pickle": (
        weights_at("pytorch_model.bin"), {GENERATE: ("names 'pytorch_model.bin'",)},
    ),
    "an adapter": (
        lambda room: (room / "model/adapter_config.json").write_text("{}"),
        {GENERATE: ("adapter_config.json: the folder contains an adapter",)},
    ),
    # These settings would override the attention implementation that the command asks for. Kernels
    # of the Hub would be downloaded and run.
    **{f"kernels of the Hub for {key}": (
        changed(CONFIG, **{key: "kernels-community/flash-attn"}),
        {PLAN: (f"config.json: {key} overrides the attention", f"Take {key} out")},
    ) for key in ("_attn_implementation", "_experts_implementation", "experts_implementation")},
    **{f"bundle with {changes}": (
        changed(BUNDLE, **changes), {TRAINING: (text,)},
    ) for changes, text in (
        ({"num_attention_heads": 0}, "num_attention_heads is '0', expected a whole number"),
        ({"num_key_value_heads": 3}, "query heads (2) is not a multiple of the number of KV heads (3)"),
        ({"head_dim": 6}, "not belong to the target of its store, because it has head_dim 6 instead of 8"),
        ({"vocab_size": 1000}, "not belong to the target of its store, because it has vocab_size 1000"),
        ({"hidden_size": "16"}, "hidden_size is '16', expected a whole number"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is '1000000000', expected a whole number",
        ),
        ({"rms_norm_eps": "big"}, "config.json"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
            "rope_theta is 0, expected a number above 0",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 0}}, "config.json"),
        ({"rope_parameters": 7}, "config.json"),
        ({"dtype": "load"}, "config.json"),
    )},
    "options": (nothing, {
        "train absent --out out": ("absent",),
        "inspect absent": ("absent",),
        "verify absent": ("absent",),
        "inspect hf://me/store": ("hf://me/store cannot be opened as a store",),
        "train hf://me/store --out out": ("hf://me/store cannot be opened as a store",),
        f"{AUDIT} --device quantum": ("'quantum'", "--device cpu"),
        f"{EXTRACT} --device quantum": ("'quantum'", "--device cpu"),
        "extract --max-length abc --model m": ("--max-length is 'abc'", "--help"),
        "extrakt": ("No such command 'extrakt'",),
        "trainn": ("'train'",),
        "options train": ("No such command 'options'",),
        f"{EXTRACT} --dry-run": ("No such option", "--dry-run"),
        f"{TRAINING} --max-steps 0": (f"--max-steps {IS_ZERO}",),
        f"{TRAINING} --learning-rate nan": ("--learning-rate is 'nan', expected a finite number",),
        f"{TRAINING} --set optimizer.gradient_clip=-1":
            ("--set: gradient_clip is '-1', expected at least 0",),
        f"{TRAINING} --devices banana":
            ("devices is 'banana', expected auto or a positive number",),
        f"{TRAINING} --set drafter.layer_attention_heads=0": (f"layer_attention_heads {IS_ZERO}",),
        f"{TRAINING} --set data.prefetch_batches": ("expected NAME=VALUE",),
        f"{TRAINING} --set prefetch_batch=0":
            ("'prefetch_batch' does not exist (did you mean 'prefetch_batches'?)",),
        f"{TRAINING} --set drafter.medusa_heads=2":
            ("medusa_heads is a setting of medusa, not of moa",),
        f"{TRAINING} --drafter condor":
            (f"drafter is 'condor', expected one of {', '.join(DRAFTERS)}",),
        f"{TRAINING} --learning-rat 1": ("No such option",),
        f"{BARE} --temperature -0.5": ("temperature is '-0.5', expected at least 0",),
        f"{BARE} --top-p 0": ("--top-p is '0', expected above 0",),
        f"{BARE} --tree big":
            ("'big' is not a shape of drafts. Expected the length of a chain such as 5",),
        f"{BARE} --tree 6x8x4": ("a draft tree of depth 6 needs at least one node per level",),
        f"{BARE} --tree -1": ("'-1' is not a shape of drafts",),
        f"{BARE} --seed 99999999999999999999": ("--seed is '99999999999999999999', expected",),
        f"{BARE} --prompt ' '": ("the prompt is empty",),
    }),
}  # fmt: skip
# Inputs that are refused by the same lines of code as another input.
SLOW_INPUTS = {
    "weights in a pickle",
    "kernels of the Hub for _experts_implementation",
    "kernels of the Hub for experts_implementation",
    "bundle with {'vocab_size': 1000}",
    "bundle with {'hidden_size': '16'}",
    "bundle with {'num_hidden_layers': 1000000000}",
}


def everything(folder: Path) -> dict[str, bytes | None]:
    """Return the contents below a folder, except the lock, which records its last holder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != "store.lock"
    }


@pytest.fixture
def work(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the room, which becomes the working folder."""
    monkeypatch.chdir(folder := Path(shutil.copytree(room, tmp_path / "room")))
    return folder


@pytest.mark.parametrize("name", quick(INPUTS, INPUTS.keys() - SLOW_INPUTS))
def test_it_is_refused_in_one_line_and_nothing_is_left(work: Path, name: str) -> None:
    change, commands = INPUTS[name]
    change(work)
    before = everything(work)
    with bounded_memory():
        for command, texts in commands.items():
            refused(run(*shlex.split(command)), *texts)
    assert everything(work) == before


def test_code_beside_a_model_that_transformers_has_is_left_alone(work: Path) -> None:
    put_code("model", native=True)(work)
    for command in (EXTRACT, AUDIT.replace("store", "out"), f"{GENERATE} --max-new-tokens 4"):
        done = run(*shlex.split(command))
        assert done.exit_code == 0, done.output
    assert not list(work.rglob("ran"))
    assert not [
        file for file in (work / "out/target").iterdir() if b"auto_map" in file.read_bytes()
    ]


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
@pytest.mark.parametrize("kind", ["fifo", "sparse"])
def test_files_of_a_model_folder_that_never_end(work: Path, name: str, kind: str) -> None:
    with bounded_memory(), endless(work / "model" / name, kind):
        refused(run(*shlex.split(GENERATE)))


@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a file"])
def test_what_is_given_instead_of_a_folder_is_named(work: Path, kind: str) -> None:
    os.mkfifo(work / "a FIFO")
    (work / "a device").symlink_to("/dev/null")
    (work / "a file").write_text("")
    refused(run("inspect", kind), f"it is {kind}")
    refused(
        run(*shlex.split(EXTRACT), "--model", kind), f"{kind} is {kind}, expected a model folder"
    )
    refused(run(*shlex.split(EXTRACT), "--out", kind), f"is {kind}, not a folder")
    refused(run(*shlex.split(TRAINING), "--out", kind), f"is {kind}, expected a folder")
    if kind != "a file":
        refused(
            run(*shlex.split(EXTRACT), "--dataset", kind),
            f"{kind} is {kind}, expected a file of chats",
        )


def test_repair_says_what_it_needs_and_what_is_whole(work: Path) -> None:
    flip(work / "store/target/frozen.safetensors")
    refused(run("verify", "store"), "damaged", exit_code=1)
    refused(run("repair", "store"), "is damaged", "--model MODEL", "--drop", exit_code=1)
    assert run("repair", "store", "--model", "model").exit_code == 0
    assert run("repair", "store").stdout.startswith("complete, no damage")


def test_ctrl_c_while_planning_leaves_nothing(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moa_data.pipeline.extract.build_plan", interrupted)
    refused(run(*shlex.split(EXTRACT)), "run the same command again", exit_code=130)
    assert not (work / "out").exists()


def test_outputs_that_hold_something_else(work: Path) -> None:
    (work / "out").mkdir()
    (work / "out/notes.txt").write_text("mine")
    before = everything(work)
    for out in ("out", "out/notes.txt", "out/notes.txt/below"):
        for command in (EXTRACT, TRAINING, "demo --out out"):
            refused(run(*shlex.split(command), "--out", out), out, "hoose another")
    assert everything(work) == before


@pytest.mark.parametrize(
    ("given", "standard_input"),
    [("-", "Un café".encode("latin-1")), ("Un caf\udce9", b""), ("-", b"\xff\xfeH\0i\0")],
)
def test_prompts_that_are_no_text(given: str, standard_input: bytes) -> None:
    result = run(
        "generate", "--model", "m", "--drafter", "d", "--prompt", given, input=standard_input
    )
    refused(result, "the prompt is not UTF-8 text", "Convert it")


def test_what_cannot_be_read_is_no_damage(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halve("store/target/frozen.safetensors")(work)
    before = everything(work)
    for module in (os, builtins):
        real = module.open

        def refuse(path: Any, *rest: Any, real: Any = real, **options: Any) -> Any:
            if str(path).endswith("last/c.1.0"):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return real(path, *rest, **options)

        monkeypatch.setattr(module, "open", refuse)
    line = "parts/hidden/last/c.1.0 could not be checked (Input/output error)"
    refused(
        run("verify", "store"),
        line,
        "it is unknown whether store is damaged",
        "run the same command again",
    )
    for options in ((), ("--drop",), ("--model", "model")):
        refused(run("repair", "store", *options), line, "Nothing was deleted")
    monkeypatch.undo()
    assert everything(work) == before


@pytest.mark.parametrize(
    "name", ["model/model.safetensors", "model/config.json", "drafter/drafter.safetensors"]
)
def test_files_without_the_right_to_read_are_called_that(
    work: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = os.open

    def refuse(path: Any, *rest: Any, **options: Any) -> int:
        if str(path).endswith(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    refused(run(*shlex.split(GENERATE)), name, "Permission denied", "rights")


def test_a_read_only_output_is_refused_in_one_line(work: Path, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "ro") as disk:
        for command in (EXTRACT, STORE["recode"], TRAINING):
            line = f"{disk / 'out'} cannot be written (Read-only file system)"
            refused(run(*shlex.split(command), "--out", disk / "out"), line)


def test_other_inputs_for_a_store_are_named_in_a_line_that_can_be_read(work: Path) -> None:
    write_jsonl(
        work / "others.jsonl", [chat(f"question {number}", "answer") for number in range(4)]
    )
    done = run(
        *shlex.split(
            EXTRACT.replace("chats.jsonl", "others.jsonl").replace("--out out", "--out store")
        ),
        "--codec",
        "int8",
    )
    refused(
        done,
        "or with other settings (identities.dataset",
        "more, which `moa-data --debug ...` lists",
    )
    assert len(done.stderr.strip().splitlines()[-1]) < 600


def test_training_asks_for_room_first(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(work)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    refused(run(*shlex.split(TRAINING)), "out takes about")
    assert not (work / "out").exists()


def test_a_report_that_cannot_be_written_is_printed(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("moa_data.evaluation.run.write_report", full)
    (work / "chats.jsonl").rename(work / "prompts.jsonl")
    done = run(*shlex.split(EVAL), "--n-prompts", "1", "--max-new-tokens", "4")
    refused(done, "report.json cannot be written (No space left on device)")
    assert "| plain |" in done.stdout


def test_every_call_that_loads_refuses_foreign_code() -> None:
    calls: dict[str, ast.Call] = {}
    for path in visible_files(ROOT):
        if path.suffix != ".py" or "tests" in path.relative_to(ROOT).parts:
            continue
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if any(name in text for name in LOADS) else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in LOADS:
                calls[f"{path}:{node.lineno} {ast.unparse(node.func)}"] = node
    assert len(calls) > 5
    for name, call in calls.items():
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("trust_remote_code") == "False" or "nn.Embedding" in name, name
        assert given.get("use_safetensors") == "True" or not name.endswith(
            "ForCausalLM.from_pretrained"
        ), name
