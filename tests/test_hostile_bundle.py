"""Generated changes to what a store's bundle, a drafter and a model folder hold: the package's own errors only.

Their checksums hold, as those of somebody who means it. Examples are the same in every run.
"""

import json
import os
import resource
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from moa_data.demo.config import DemoConfig
from moa_data.demo.target import build_target, train_tokenizer
from moa_data.errors import OptionInvalid
from moa_data.moa.drafters.mixture import MoADrafter
from moa_data.moa.drafters.mixture_sizes import MoASizes
from moa_data.moa.errors import DrafterError
from moa_data.moa.formats.checkpoint import load_drafter, save_drafter
from moa_data.moa.formats.table import LAYOUTS, write_layout
from moa_data.moa.target.bundle import FrozenTarget
from moa_data.moa.target.live import Target, load_target_tokenizer
from moa_data.pipeline.audit import audit
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.errors import PipelineError
from moa_data.pipeline.extract import extract
from moa_data.pipeline.prompts import prompt_tokens
from moa_data.storage.care.verify import verify_store
from moa_data.storage.errors import StoreError
from moa_data.storage.names import target_commit_path
from moa_data.storage.parts.commit import target_commit_json
from moa_data.storage.parts.shard import FileRecord
from moa_data.storage.read.store import ActivationStore
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.data import StoreDataModule
from moa_data.trainer.errors import TrainingError
from moa_data.trainer.run import build_module

HEADROOM_BYTES = 3 << 29
OWN_ERRORS = (StoreError, DrafterError, TrainingError, PipelineError, OptionInvalid)
FIXTURE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
QUICK = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=FIXTURE)
LONG = settings(max_examples=1000, deadline=None, derandomize=True, suppress_health_check=FIXTURE)
CHATS = [
    [{"role": "user", "content": f"What is {n} plus {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."}]
    for n in range(12)
]
HOSTILE = [
    None, True, -1, 0, 1, 2, 3, 7, 2**31, 2**40, 2**64, 10**30, 0.5, -1.5, 1e308, "", "x", "load", "../..", "a\0b",
    "\ud800", "n" * 5000, [], {}, [0], [-1], [2**40], [[1]], [None], {"a": 1}, ["x"], "{{ 1 / 0 }}", "{% for %}",
]  # fmt: skip
BUNDLE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Let the process grow by so much and no more: what allocates absurd sizes gets a MemoryError."""
    n_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes + HEADROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    good = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(good)


def commit_of(folder: Path) -> bytes:
    """What commits/target.json says of a folder as it is."""
    contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*"))}
    return target_commit_json({name: FileRecord(len(data), zlib.crc32(data)) for name, data in contents.items()})


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, store/, own/ (a drafter) and foreign/ (the same in the authors' layout)."""
    folder = tmp_path_factory.mktemp("hostile_bundle")
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    config = DemoConfig(out="unused", vocab_size=280, hidden_size=16, n_layers=2, n_heads=2, n_kv_heads=1, seed=1)
    tokenizer = train_tokenizer([message["content"] for chat in CHATS for message in chat], config.vocab_size)
    build_target(config, tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    extract(
        ExtractConfig(
            model=str(folder / "model"), dataset=str(folder / "chats.jsonl"), out=str(folder / "store"),
            part_tokens=256, device="cpu", target_layers=1,
        )
    )  # fmt: skip
    target = Target.load(str(folder / "model"), torch.float32, "cpu")
    drafter = MoADrafter(MoASizes.from_target(target.config, target.identity))
    save_drafter(drafter, folder / "own")
    write_layout(drafter, LAYOUTS["moa"], folder / "foreign", target_config=target.config)
    config_file = folder / "foreign" / "config.json"
    values = json.loads(config_file.read_text())
    values.pop("moa_data")
    config_file.write_text(json.dumps(values))
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value in a JSON document, but not to all of a vocabulary."""
    if path:
        yield path
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, item in items[:12]:
        yield from places(item, (*path, key))


@st.composite
def changed(draw: Callable[..., Any], content: bytes) -> bytes:
    """A file with values of its JSON replaced or taken away, or with bytes overwritten, inserted or cut off."""
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    if document is not None and draw(st.integers(0, 4)):
        for _ in range(draw(st.integers(1, 2))):
            ways = list(places(document))
            *way, last = ways[draw(st.integers(0, 2**16)) % len(ways)]
            owner = document
            for key in way:
                owner = owner[key]
            if isinstance(owner, dict) and draw(st.integers(0, 5)) == 0:
                del owner[last]
            else:
                owner[last] = json.loads(json.dumps(draw(st.sampled_from(HOSTILE))))
            if not document:
                break
        return json.dumps(document).encode()
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        piece = draw(
            st.binary(max_size=8) | st.sampled_from([b"[" * 100_000, b"\xff" * 8, b"1" * 5000, b"{{ 1 / 0 }}"])
        )
        kind = draw(st.sampled_from(["overwrite", "insert", "cut"]))
        if kind == "cut":
            del data[at:]
        else:
            data[at : at + len(piece) * (kind == "overwrite")] = piece
    return bytes(data)


@st.composite
def changed_tensors(draw: Callable[..., Any], content: bytes, file: Path) -> bytes:
    """A file of weights with other tensors, with a header that lies, or with other bytes."""
    if draw(st.booleans()):
        size = int.from_bytes(content[:8], "little")
        header = draw(changed(content[8 : 8 + size]))
        length = draw(st.sampled_from([len(header), len(header), 0, size, 2**40, 2**64 - 1]))
        return length.to_bytes(8, "little") + header + content[8 + size :]
    weights = load_file(file)
    name = draw(st.sampled_from(sorted(weights)))
    value = weights.pop(name)
    others = [
        None, value[:1], value[None], value.flatten(), value.to(torch.int64), value.to(torch.float16),
        value * torch.nan, torch.zeros(0), torch.zeros(()),
    ]  # fmt: skip
    other = draw(st.sampled_from(range(len(others))))
    if others[other] is not None:
        weights[name] = others[other].contiguous()
    if draw(st.integers(0, 5)) == 0:
        weights[draw(st.sampled_from(["layers.x.y", "layers.", "layers.99.mlp", "x"]))] = torch.zeros(2)
    return bytes(save(weights))


def only_own_errors(*doors: Callable[[], object]) -> None:
    with bounded_memory():
        for door in doors:
            with suppress(*OWN_ERRORS):
                door()


def use_bundle(room: Path) -> None:
    store = room / "store"
    config = TrainConfig(store=str(store), out="unused", accelerator="cpu", batch_size=2, max_steps=1)

    def training() -> None:
        with ActivationStore(store) as reader:
            build_module(reader, config, StoreDataModule(reader, config))

    def sample() -> None:
        with ActivationStore(store) as reader:
            load_target_tokenizer(reader.target_path).decode(reader.read(0, "tokens").tolist())

    def live() -> None:
        audit(store, str(room / "model"), samples=1, device="cpu")

    only_own_errors(
        lambda: verify_store(store, values=False),
        lambda: FrozenTarget.load(store / "target", 1),
        training,
        sample,
        live,
    )


def check_bundle(room: Path, data: Any) -> None:
    folder = room / "store" / "target"
    path = folder / data.draw(st.sampled_from([*(name for name in BUNDLE if (folder / name).exists()), "weights"]))
    if path.name == "weights":
        path = folder / "frozen.safetensors"
        content = data.draw(changed_tensors(path.read_bytes(), path))
    else:
        content = data.draw(changed(path.read_bytes()))
    with replaced(path, content), replaced(target_commit_path(room / "store"), commit_of(folder)):
        use_bundle(room)


@QUICK
@given(data=st.data())
def test_bundle(room: Path, data: Any) -> None:
    check_bundle(room, data)


@pytest.mark.slow
@LONG
@given(data=st.data())
def test_many_bundles(room: Path, data: Any) -> None:
    check_bundle(room, data)


def check_drafter(room: Path, data: Any) -> None:
    names = ("own/drafter.json", "own/drafter.safetensors", "foreign/config.json", "foreign/model.safetensors")
    path = room / data.draw(st.sampled_from(names))
    good = path.read_bytes()
    with replaced(path, data.draw(changed_tensors(good, path) if path.suffix == ".safetensors" else changed(good))):
        only_own_errors(lambda: load_drafter(path.parent))


@QUICK
@given(data=st.data())
def test_drafter(room: Path, data: Any) -> None:
    check_drafter(room, data)


@pytest.mark.slow
@LONG
@given(data=st.data())
def test_many_drafters(room: Path, data: Any) -> None:
    check_drafter(room, data)


def check_model(room: Path, data: Any) -> None:
    """The live target: its files load or are refused, and a prompt is encoded or its template is."""
    folder = room / "model"
    path = folder / data.draw(st.sampled_from([name for name in BUNDLE if (folder / name).exists()]))

    def encode() -> None:
        target = Target.load(str(folder), torch.float32, "cpu")
        prompt_tokens(target.tokenizer, [{"role": "user", "content": "Hi"}])

    with replaced(path, data.draw(changed(path.read_bytes()))):
        only_own_errors(encode)


@QUICK
@given(data=st.data())
def test_model(room: Path, data: Any) -> None:
    check_model(room, data)


@pytest.mark.slow
@LONG
@given(data=st.data())
def test_many_models(room: Path, data: Any) -> None:
    check_model(room, data)
