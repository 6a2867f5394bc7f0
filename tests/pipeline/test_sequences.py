"""Several processes give what one gives, and end with it, however it ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import DatasetError, WorkerError
from moa_data.moa.targets.chat import Rejection, RejectReason
from moa_data.pipeline import sequences
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.plan import ExtractPlan, build_plan
from moa_data.pipeline.sequences import tokenise_rows
from moa_data.storage.plan import plan_bytes
from moa_data.tests.kit.chats import chat, random_chats, write_jsonl
from moa_data.tests.kit.serving import wait_for
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few rows be enough for several blocks."""
    monkeypatch.setattr(sequences, "MIN_ROWS", 8)
    monkeypatch.setattr(sequences, "ROWS_PER_PROCESS", 32)


def hostile_rows() -> list[Any]:
    """Chats among which each kind of row stands that gives none, or is hard to send."""
    rows: list[Any] = random_chats(90)
    deep = "[" * 900 + "]" * 900  # read as JSON, too deep for much else
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
    """Also where a row behind the last one that is wanted asks for the time."""
    write_jsonl(Path(config.dataset), [*random_chats(60), chat("what day", "is it"), *random_chats(40, seed=1)])
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
    results = tokenise_rows(rows(), lambda row: (Rejection(RejectReason.NO_MESSAGES, row), False), 2, lambda: None)
    assert [next(results)[0] for _ in gone] == gone
    with pytest.raises(DatasetError, match="the disk is gone"):
        next(results)


def die(_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("small_blocks")
def test_a_process_that_is_killed_is_one_line() -> None:
    with pytest.raises(WorkerError, match="tokenize_processes"):
        list(tokenise_rows(iter(range(16)), die, 2, lambda: None))


STARTS = """
import os, sys, time
from moa_data.commands.signals import begin_command, watch_signals
from moa_data.pipeline import sequences
sequences.MIN_ROWS = 1
watch_signals()
begin_command()
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
    """On Ctrl-C, which goes to all of them, SIGTERM to the first, and kill -9."""
    cases = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    files = [tmp_path / number.name for number in cases]
    options: dict[str, Any] = {"start_new_session": True, "text": True, "stdout": -1, "stderr": -1}
    started = [subprocess.Popen([sys.executable, "-c", STARTS, str(file)], **options) for file in files]
    wait_for(lambda: all(file.with_name(f"{file.name}-1").exists() for file in files))
    workers = [children(process.pid) for process in started]
    assert all(len(pids) == 2 for pids in workers)
    for number, process in zip(cases, started, strict=True):
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    for number, process in zip(cases, started, strict=True):
        stdout, stderr = process.communicate(timeout=60)
        assert stdout == ("" if number == signal.SIGKILL else f"ended by {number.name}\n"), stderr
        assert "Traceback" not in stderr, stderr
    wait_for(lambda: not any(is_running(pid) for pids in workers for pid in pids))
