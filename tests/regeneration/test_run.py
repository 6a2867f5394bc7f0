"""A target answers chats: its own greedy words, the same bytes after any kill, a dataset that extract takes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moa_data.errors import DatasetError, OptionInvalid, OutputOccupied
from moa_data.moa.decoding.loop import plain_generate
from moa_data.moa.targets.chat_tokens import prompt_tokens
from moa_data.moa.targets.live import Target
from moa_data.regeneration import run as run_module
from moa_data.regeneration.chats import LossReason
from moa_data.regeneration.config import RegenerateConfig
from moa_data.regeneration.run import regenerate
from moa_data.tests.kit.chats import chat, write_jsonl
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.stores import read_tree

# Each run is killed at a later change of the disk; the next process ends what it began, in the bytes of a whole run.
KILLS = """
import sys
from pathlib import Path
import torch
from moa_data.regeneration import local
from moa_data.regeneration.config import RegenerateConfig
from moa_data.regeneration.run import regenerate
from moa_data.tests.kit.kills import kill_at_every_change

torch.set_num_threads(1)
folder, model, drafter, dataset, every = sys.argv[1:]
config = RegenerateConfig.of(
    model=model, drafter=drafter, dataset=dataset, out="-", device="cpu", batch_size=2, max_rows=5, max_new_tokens=8,
    max_rejected_fraction=1,
)
target = local.Target.load(model, device="cpu")
target.identity
local.Target.load = lambda *args: target

def answer(name):
    regenerate(config.replaced(out=str(Path(folder) / f"{name}.jsonl")))

def begin(n, arm):
    answer(f"killed-{n - int(every)}" if n > 1 else "whole")
    arm()
    answer(f"killed-{n}")

kill_at_every_change(begin, int(every))
"""


def read(config: RegenerateConfig) -> dict[int, list[str]]:
    """Row -> the texts of its chat."""
    rows = [json.loads(line) for line in Path(config.out).read_text(encoding="utf-8").splitlines()]
    return {row["row"]: [message["content"] for message in row["messages"]] for row in rows}


def outputs(config: RegenerateConfig) -> list[bytes]:
    out = Path(config.out)
    return [out.read_bytes(), out.with_suffix(".regeneration.json").read_bytes()]


def elsewhere(config: RegenerateConfig, name: str, **changes: Any) -> RegenerateConfig:
    return config.replaced(out=str(Path(config.out).with_name(f"{name}.jsonl")), **changes)


def plain(target: Target, *texts: str) -> str:
    """What plain greedy decoding answers to a chat of alternating texts."""
    prompt = prompt_tokens(target.tokenizer, chat(*texts)["messages"])
    tokens = plain_generate(target, prompt, max_new_tokens=36).tokens
    return str(target.tokenizer.decode(tokens, skip_special_tokens=True))


def test_answers_are_those_of_plain_decoding_turn_by_turn(config: RegenerateConfig, target: Target) -> None:
    lines: list[str] = []
    report = regenerate(config, tell=lines.append)
    found = read(config)
    n_ended = 0
    for row, texts in found.items():
        for at in range(1, len(texts), 2):
            assert texts[at] == plain(target, *texts[:at])
            n_ended += 1
        assert texts[0] == (f"what is {row}?" if row < 4 else f"tell me of {row - 4}")
    tally = report.tally
    assert (tally.n_answers, tally.n_chats, tally.n_rows) == (n_ended, len(found), 11)
    assert n_ended >= 5, "the target ends some of its answers"
    assert {row for row in range(11) if row not in found} >= {8, 9, 10}
    assert tally.rejected[LossReason.TOO_LONG] == 1
    assert tally.rejected[LossReason.UNUSABLE_PROMPT] == 1
    assert tally.n_rejected == 11 - len(found)
    assert lines[0].startswith("11 rows, 10 chats that ask for 14 answers of at most 36 tokens; 3 chats at a time by")
    assert "for the rest" in lines[1]
    assert not list(Path(config.out).parent.glob("*.journal"))
    assert not list(Path(config.out).parent.glob(".*.lock"))
    assert report.describe().count("\n") == 3 + len(tally.rejected) + len(tally.cut)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_drafts_change_no_distribution_and_greedily_no_word(
    config: RegenerateConfig, drafter_folder: Path, temperature: float
) -> None:
    drafted = elsewhere(config, "drafted", drafter=str(drafter_folder), temperature=temperature)
    report = regenerate(drafted)
    record = json.loads(report.record.read_text())["settings"]
    assert record["tree"] == ("5" if temperature else "10@0.2")
    assert (record["temperature"], record["seed"], record["batch_size"]) == (temperature, 0, 3)
    assert set(record["target"]) == {"weights_sha256", "config_sha256"}
    if not temperature:
        regenerate(config)
        assert read(drafted) == read(config)
    again = elsewhere(drafted, "again")
    regenerate(again)
    assert read(again) == read(drafted)
    if temperature:
        regenerate(elsewhere(drafted, "other", seed=1))
        assert read(elsewhere(drafted, "other")) != read(drafted)


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_any_kill_ends_in_the_bytes_of_a_run_that_was_not_interrupted(
    config: RegenerateConfig, drafter_folder: Path, tmp_path: Path, every: int
) -> None:
    folder = tmp_path / "kills"
    folder.mkdir()
    command = [
        sys.executable,
        "-c",
        KILLS,
        str(folder),
        str(config.model),
        str(drafter_folder),
        config.dataset,
        str(every),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole = outputs(elsewhere(config.replaced(out=str(folder / "x")), "whole"))
    killed = sorted(folder.glob("killed-*.jsonl"))
    assert len(killed) >= 3
    for path in killed:
        assert outputs(config.replaced(out=str(path))) == whole, path
    assert not list(folder.glob("*.journal"))


def test_what_is_complete_is_not_asked_again(config: RegenerateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = regenerate(config)
    before = outputs(config)
    monkeypatch.setattr(run_module, "Journal", None)
    second = regenerate(config)
    assert outputs(config) == before
    assert (second.was_complete, first.was_complete) == (True, False)
    assert vars(second.tally) == vars(first.tally)
    with pytest.raises(OutputOccupied, match=r"made with seed 0 \(now 4\)"):
        regenerate(config.replaced(seed=4))
    with Path(config.out).open("a") as stream:
        stream.write("{}\n")
    with pytest.raises(OutputOccupied, match="changed after it was made"):
        regenerate(config)


def test_foreign_files_are_left_alone(config: RegenerateConfig, tmp_path: Path) -> None:
    Path(config.out).write_text("mine\n")
    with pytest.raises(OutputOccupied, match="no regeneration wrote it"):
        regenerate(config)
    Path(config.out).with_suffix(".regeneration.json").write_text("{}")
    with pytest.raises(OutputOccupied, match="no record of a regeneration"):
        regenerate(config)
    with pytest.raises(OptionInvalid, match="lies in the dataset"):
        regenerate(config.replaced(dataset=str(tmp_path)))


def test_too_many_rejected_rows_fail_and_keep_what_was_answered(config: RegenerateConfig) -> None:
    with pytest.raises(
        DatasetError, match=r"of the first \d+ rows \(11 in all\) gave no chat.*has not ended"
    ) as caught:
        regenerate(config.replaced(max_new_tokens=1, max_rejected_fraction=0.2))
    assert "row 0" in str(caught.value)
    journal = Path(config.out).with_suffix(".journal")
    assert len(journal.read_text().splitlines()) == 1 + 3, "certain after the first batch"
    with pytest.raises(DatasetError, match="max_new_tokens 1 "):
        regenerate(config)
    report = regenerate(config.replaced(max_new_tokens=1, max_rejected_fraction=1))
    assert report.tally.n_rows == 11


def test_a_dataset_without_questions_is_refused(config: RegenerateConfig, tmp_path: Path) -> None:
    dataset = write_jsonl(tmp_path / "nothing.jsonl", [{"text": "a"}])
    with pytest.raises(DatasetError, match="no chat that asks something among 1 rows"):
        regenerate(config.replaced(dataset=str(dataset)))


def test_extract_takes_the_answers(config: RegenerateConfig, target_folder: Path, tmp_path: Path) -> None:
    folder, store = tmp_path / "answered", tmp_path / "store"
    arguments = ["regenerate", "--model", str(target_folder), "--dataset", config.dataset, "--out", str(folder)]
    shown = ["--max-new-tokens", "36", "--device", "cpu", "--max-rejected-fraction", "1", "--max-length", "160"]
    dry = run(*arguments, *shown, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "14 answers" in dry.stdout
    assert not folder.exists()
    done = run(*arguments, *shown)
    assert done.exit_code == 0, done.output
    assert "regenerate" in done.stderr
    n_chats = len((folder / "chats.jsonl").read_text().splitlines())
    assert f"answered     {n_chats} of 11 rows" in done.stdout
    command = done.stdout.split("next         moa-data ")[1].split("\n")[0].replace("STORE", str(store)).split()
    extracted = run(*command, "--device", "cpu", "--max-rejected-fraction", "0")
    assert extracted.exit_code == 0, extracted.output
    assert f": {n_chats} sequences" in extracted.stdout, "none rejected, and the record is no chat"
    assert read_tree(store)
    refused(run(*arguments, *shown[:-4]), "made with", "max_length 160 (now 2048)")


def test_settings_that_do_not_fit_are_refused() -> None:
    common = ["regenerate", "--dataset", "d.jsonl", "--out", "o"]
    refused(run(*common), "give --model MODEL or --server URL")
    refused(run(*common, "--server", "http://h", "--drafter", "d"), "drafter is of a target that is loaded here")
    refused(run(*common, "--server", "h:8000"), "expected a URL")
    refused(run(*common, "--model", "m", "--tree", "5"), "without a drafter")
    refused(run(*common, "--model", "m", "--drafter", "d", "--tree", "5@0.2", "--temperature", "1"), "stop by their")
