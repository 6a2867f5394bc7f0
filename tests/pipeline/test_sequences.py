"""Several processes tokenise like one process, and end with it.

Later runs read the saved tokens.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

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
from moa_data.storage.schema import TEXTS_NAME, commit_path
from moa_data.tests.kit.chats import chat, random_chats, write_jsonl
from moa_data.tests.kit.serving import wait_for
from moa_data.tests.kit.stores import flip, read_tree
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks small, so that a few rows fill several of them."""
    monkeypatch.setattr(sequences, "MIN_ROWS", 8)
    monkeypatch.setattr(sequences, "ROWS_PER_PROCESS", 32)


def hostile_rows() -> list[Any]:
    """Return chats mixed with every kind of row that gives none or is hard to send."""
    rows: list[Any] = random_chats(90)
    deep = "[" * 900 + "]" * 900  # JSON can parse this, but little else can handle such depth.
    rows[3:3] = ["{broken", {"messages": []}, f'{{"messages": {deep}}}', rows[0], [1, 2]]
    rows[60:60] = [json.dumps(chat("\ud800", "half a character")), rows[1]]
    rows[61:61] = [chat("<|eot_id|>", "an answer"), chat("q", "long " * 200)]
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
        [*random_chats(60), chat("what day", "is it"), *random_chats(40, seed=1)],
    )
    asks = "{% if 'what day' in messages[0]['content'] %}{{ strftime_now('%d') }}{% endif %}"
    (model / "chat_template.jinja").write_text(asks + LLAMA3_TEMPLATE)
    config = config.replaced(model=str(model))
    for most, asked in ((50, False), (None, True)):
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
        rows(), lambda row: (Rejection(RejectReason.NO_MESSAGES, row), False), 2, lambda: None
    )
    assert [next(results)[0] for _ in gone] == gone
    with pytest.raises(DatasetError, match="the disk is gone"):
        next(results)


def die(_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("small_blocks")
def test_a_process_that_is_killed_is_one_line() -> None:
    with pytest.raises(WorkerError, match="--tokenize-processes"):
        list(tokenise_rows(iter(range(16)), die, 2, lambda: None))


STARTS = """
import os, sys, time
from moa_data.commands import signals
from moa_data.pipeline import sequences
sequences.MIN_ROWS = 1
signals.CLEANUP_S = 60  # A machine may stand still for seconds.
signals.watch_signals()
signals.begin_command()
def wait(row):
    with open(f"{sys.argv[1]}-{row}", "w"):
        time.sleep(0.3)
try:
    list(sequences.tokenise_rows(iter(range(4000)), wait, 2, lambda: None))
except KeyboardInterrupt as signal:
    print("ended by", signal)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.usefixtures("heeded_signals")
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """Test Ctrl-C, which goes to all of them, SIGTERM to the first one, and kill -9."""
    cases = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    files = [tmp_path / number.name for number in cases]
    options: dict[str, Any] = {"start_new_session": True, "text": True, "stdout": -1, "stderr": -1}
    started = [
        subprocess.Popen([sys.executable, "-c", STARTS, str(file)], **options) for file in files
    ]
    # Three processes import the package at the same time. At a load of 7 that takes a minute.
    wait_for(lambda: all(file.with_name(f"{file.name}-1").exists() for file in files), 200)
    workers = [children(process.pid) for process in started]
    assert all(len(pids) == 2 for pids in workers)
    for number, process in zip(cases, started, strict=True):
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    for number, process in zip(cases, started, strict=True):
        stdout, stderr = process.communicate(timeout=60)
        assert stdout == ("" if number == signal.SIGKILL else f"ended by {number.name}\n"), stderr
        assert "Traceback" not in stderr, stderr
    wait_for(lambda: not any(is_running(pid) for pids in workers for pid in pids))


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
    rows: list[Any] = random_chats(24)
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
    assert len(tokenised) == 2 * 27
    store = Path(mixed.out)
    commit_path(store, 1).unlink()
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
    assert len(tokenised) == 2 * 27
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
        assert len(tokenised) == 27
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
    for changes in ({"max_length": 64}, {"max_sequences": 24}, {"template_kwargs": "a=1"}):
        build_plan(mixed.replaced(**changes))
    assert len(tokenised) == 27 + 24 + 27
    for path, old, new in (
        (model / "chat_template.jinja", "<|", " <|"),
        (model / "config.json", ": 256", ": 255"),
        (Path(mixed.dataset), "{broken", "{still broken"),
    ):
        text = path.read_text()
        path.write_text(text.replace(old, new))
        tokenised.clear()
        build_plan(mixed)
        assert len(tokenised) == 27
        path.write_text(text)


def test_a_full_disk_is_one_line(mixed: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pa, "OSFile", full)
    with pytest.raises(StorageUnavailable, match=r"texts\.arrow"):
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
