"""Several processes tokenise like one process, and end with it.

Later runs read the saved tokens.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from moa_data.commands import signals
from moa_data.errors import DatasetError, StorageUnavailable, WorkerError
from moa_data.moa.targets.chat import Rejection, RejectReason
from moa_data.moa.targets.chat_tokens import TokenizedChat
from moa_data.pipeline import sequences
from moa_data.pipeline import sequences as chats
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract, repair
from moa_data.pipeline.plan import ExtractPlan, build_plan
from moa_data.pipeline.sequences import Sequences, keep_texts, read_texts, tokenise_rows
from moa_data.storage.plan import map_texts, plan_bytes, texts_sha256
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import TEXTS_NAME
from moa_data.tests.kit.apart import Apart
from moa_data.tests.kit.chats import chat, random_chats, write_jsonl
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.serving import wait_for
from moa_data.tests.kit.stores import flip, read_tree
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")

N_CHATS = 10
N_ROWS = N_CHATS + 3
"""Number of rows of ``mixed``."""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks small, so that a few rows fill several of them."""
    monkeypatch.setattr(sequences, "MIN_ROWS", 4)
    monkeypatch.setattr(sequences, "ROWS_PER_PROCESS", 16)


def hostile_rows() -> list[Any]:
    """Return chats mixed with every kind of row that gives none or is hard to send."""
    rows: list[Any] = random_chats(45)
    deep = "[" * 900 + "]" * 900  # JSON can parse this, but little else can handle such depth.
    rows[3:3] = ["{broken", {"messages": []}, f'{{"messages": {deep}}}', rows[0], [1, 2]]
    rows[30:30] = [json.dumps(chat("\ud800", "half a character")), rows[1]]
    rows[31:31] = [chat("<|eot_id|>", "an answer"), chat("q", "long " * 200)]
    return rows


def plan_with(n_processes: int, config: ExtractConfig, **changes: Any) -> ExtractPlan:
    settings = {"max_rejected_fraction": 0.5, "tokenize_processes": n_processes}
    return build_plan(config.replaced(**(settings | changes)))


def assert_same(one: ExtractPlan, other: ExtractPlan) -> None:
    assert other.manifest.to_json() == one.manifest.to_json()
    assert plan_bytes(other.table) == plan_bytes(one.table)
    assert other.sequences.to_arrow().equals(one.sequences.to_arrow(), check_metadata=True)
    assert other.describe().splitlines()[:5] == one.describe().splitlines()[:5]


@pytest.mark.usefixtures("small_blocks")
def test_two_processes_make_the_plan_that_one_makes(config: ExtractConfig) -> None:
    write_jsonl(Path(config.dataset), hostile_rows())
    one, two = (plan_with(n, config) for n in (1, 2))
    assert_same(one, two)
    assert len(one.sequences.rejections) == 4
    assert one.sequences.n_duplicates == 2
    assert one.sequences.n_truncated == 1


@pytest.mark.usefixtures("small_blocks")
def test_reading_ahead_changes_nothing(config: ExtractConfig, model: Path) -> None:
    """A row after the last one that is used may ask for the time; that changes nothing either."""
    write_jsonl(
        Path(config.dataset),
        [*random_chats(30), chat("what day", "is it"), *random_chats(20, seed=1)],
    )
    asks = "{% if 'what day' in messages[0]['content'] %}{{ strftime_now('%d') }}{% endif %}"
    (model / "chat_template.jinja").write_text(asks + LLAMA3_TEMPLATE)
    config = config.replaced(model=str(model))
    for most, asked in ((25, False), (None, True)):
        one, two = (plan_with(n, config, max_sequences=most) for n in (1, 2))
        assert_same(one, two)
        assert ("template_time" in two.manifest.extraction) == asked


@pytest.mark.usefixtures("small_blocks")
def test_a_row_that_cannot_be_read_comes_after_those_before_it() -> None:
    def rows() -> Iterator[str]:
        yield from "abcdefghijkl"
        raise DatasetError("the disk is gone")

    gone = [Rejection(RejectReason.NO_MESSAGES, row) for row in "abcdefghijkl"]
    results = tokenise_rows(
        rows(), lambda row: (Rejection(RejectReason.NO_MESSAGES, row), False), 2
    )
    assert [next(results)[0] for _ in gone] == gone
    with raises_naming(DatasetError, "the disk is gone"):
        next(results)


def die(_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("small_blocks")
def test_a_process_that_is_killed_is_one_line() -> None:
    with raises_naming(WorkerError, "tokenize_processes"):
        list(tokenise_rows(iter(range(16)), die, 2))


def tokenise_until_signal(folder: str, name: str) -> None:
    """Tokenise in two processes, and write to files of that name which process does it."""
    # The processes of a terminal get Ctrl-C together. These have no part in the terminal of pytest.
    os.setsid()
    # A process inherits signals that its parent ignores.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sequences.MIN_ROWS = 4000
    signals.CLEANUP_S = 60  # A machine may stand still for seconds.
    signals.watch_signals()
    signals.begin_command()
    files = Path(folder)

    def wait(row: int) -> Any:
        (files / f"{name}-{row}").touch()
        time.sleep(0.3)

    (files / f"{name}.pid").write_text(str(os.getpid()))
    try:
        list(tokenise_rows(iter(range(4000)), wait, 2))
    except KeyboardInterrupt as number:
        (files / f"{name}.end").write_text(str(number))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """Test Ctrl-C, which goes to all of them, SIGTERM to the first one, and kill -9."""
    cases = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    started = [
        Apart(
            tokenise_until_signal, str(tmp_path), number.name, log=tmp_path / f"{number.name}.log"
        )
        for number in cases
    ]
    # The first process that runs apart imports the package. At a load of 7 that takes a minute.
    wait_for(lambda: all((tmp_path / f"{number.name}-1").exists() for number in cases), 200)
    pids = [int((tmp_path / f"{number.name}.pid").read_text()) for number in cases]
    workers = [children(pid) for pid in pids]
    assert all(len(forks) == 2 for forks in workers)
    for number, pid in zip(cases, pids, strict=True):
        (os.killpg if number == signal.SIGINT else os.kill)(pid, number)
    for number, process in zip(cases, started, strict=True):
        failure = process.wait(60)
        end = tmp_path / f"{number.name}.end"
        if number == signal.SIGKILL:
            assert failure.startswith(f"status {-number}: ")
            assert not end.exists()
        else:
            assert not failure
            assert end.read_text() == number.name
        assert "Traceback" not in (tmp_path / f"{number.name}.log").read_text()
    wait_for(lambda: not any(is_running(pid) for forks in workers for pid in forks))


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the rows that are tokenised from now on."""
    real, rows = chats.tokenize_row, []

    def count(tokenizer: Any, content: Any, *settings: Any) -> Any:
        rows.append(content)
        return real(tokenizer, content, *settings)

    monkeypatch.setattr(chats, "tokenize_row", count)
    return rows


@pytest.fixture
def mixed(config: ExtractConfig, chats_file: Path) -> ExtractConfig:
    """An extraction of chats mixed with rows that give no sequence."""
    rows: list[Any] = random_chats(N_CHATS)
    write_jsonl(chats_file, [*rows, rows[0], "{broken", {"messages": []}])
    return config.replaced(max_rejected_fraction=0.2)


def keep(config: ExtractConfig) -> Path:
    """Save the tokenised texts of an extraction without running the target."""
    plan = build_plan(config)
    Path(config.out).mkdir(exist_ok=True)
    keep_texts(Path(config.out), plan.sequences, plan.texts_origin)
    return Path(config.out) / TEXTS_NAME


def test_every_start_after_the_first_reads_the_tokens(
    mixed: ExtractConfig, tokenised: list[Any]
) -> None:
    plain = build_plan(mixed, with_weights=True)
    extract(mixed)
    assert len(tokenised) == 2 * N_ROWS
    store = Path(mixed.out)
    (store / "commits/part-00001.json").unlink()
    again = build_plan(mixed, with_weights=True)
    assert again.manifest.to_json() == plain.manifest.to_json()
    assert again.table.equals(plain.table)
    assert again.sequences.to_arrow().equals(plain.sequences.to_arrow(), check_metadata=True)
    resumed = extract(mixed)
    assert resumed.n_parts_done == 1
    for name in ("rejections", "examples", "n_rows", "n_duplicates"):
        assert getattr(again.sequences, name) == getattr(plain.sequences, name)
    for shard in (store / "parts" / "kv").glob("c.0.*"):
        shard.unlink()
    repair(store, mixed.model)
    assert verify_store(store).ok
    assert len(tokenised) == 2 * N_ROWS
    with pytest.raises(DatasetError):
        build_plan(mixed.replaced(max_rejected_fraction=0.0))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def keep_others(path: Path) -> None:
    table = map_texts(path)
    path.unlink()
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table.slice(1))


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def test_damaged_tokens_are_made_again(mixed: ExtractConfig, tokenised: list[Any]) -> None:
    kept = keep(mixed)
    content = kept.read_bytes()
    damages: list[Callable[[Path], None]] = [truncate, flip, keep_others, link, Path.unlink]
    for damage in damages:
        damage(kept)
        tokenised.clear()
        build_plan(mixed)
        assert len(tokenised) == N_ROWS
        kept.unlink(missing_ok=True)
        kept.write_bytes(content)
    tokenised.clear()
    assert keep(mixed).read_bytes() == content
    assert not tokenised


def test_texts_are_a_cache(mixed: ExtractConfig) -> None:
    """A damaged file of texts is not damage to the store: the next run writes it again."""
    extract(mixed)
    whole = read_tree(mixed.out)
    path = Path(mixed.out) / TEXTS_NAME
    for damage in (truncate, flip, Path.unlink):
        damage(path)
        assert verify_store(mixed.out).ok
        assert extract(mixed).n_parts_done == 0
        assert read_tree(mixed.out) == whole


def test_tokens_of_other_inputs_are_not_read(
    mixed: ExtractConfig, model: Path, tokenised: list[Any]
) -> None:
    mixed = mixed.replaced(model=str(model))
    keep(mixed)
    build_plan(mixed)
    tokenised.clear()
    for changes in ({"max_length": 64}, {"max_sequences": N_CHATS}, {"template_kwargs": "a=1"}):
        build_plan(mixed.replaced(**changes))
    assert len(tokenised) == N_ROWS + N_CHATS + N_ROWS
    for path, old, new in (
        (model / "chat_template.jinja", "<|", " <|"),
        (model / "config.json", ": 256", ": 255"),
        (Path(mixed.dataset), "{broken", "{still broken"),
    ):
        text = path.read_text()
        path.write_text(text.replace(old, new))
        tokenised.clear()
        build_plan(mixed)
        assert len(tokenised) == N_ROWS
        path.write_text(text)


def test_a_full_disk_is_one_line(mixed: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pa, "OSFile", full)
    with raises_naming(StorageUnavailable, Path(mixed.out) / "texts.arrow"):
        keep(mixed)
    assert not list(Path(mixed.out).iterdir())


def test_kept_tokens_take_no_memory_of_the_process(tmp_path: Path) -> None:
    made, draw = Sequences(), np.random.default_rng(0)
    for row in range(500):
        tokens = draw.integers(0, 1000, 2000).astype(np.int32)
        made.add(row, TokenizedChat(tokens, (tokens > 500).astype(np.uint8), truncated=False))
    before_bytes = pa.total_allocated_bytes()
    kept = keep_texts(tmp_path, made, {"of": "this test"})
    read = read_texts(tmp_path, {"of": "this test"})
    assert pa.total_allocated_bytes() - before_bytes < 500 * 2000  # less than a byte per token
    assert read is not None
    assert len({texts_sha256(texts.to_arrow()) for texts in (made, kept, read)}) == 1
    key = next(iter(made.ids))
    for other in (kept, read):
        tokens, _ = other.text(key)
        assert not tokens.flags.writeable
        np.testing.assert_array_equal(tokens, made.text(key)[0])
