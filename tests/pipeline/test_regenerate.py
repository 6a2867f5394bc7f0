"""A target answers the questions of chats.

The answers are its own greedy ones, the bytes are the same after any kill, and `extract` takes the
dataset.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch

from moa_data.errors import DatasetError, OptionInvalid, OutputOccupied, ServingError, TemplateError
from moa_data.moa.decoding.loop import plain_generate
from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.chat import RejectReason
from moa_data.moa.targets.chat_tokens import TokenizedChat, prompt_tokens
from moa_data.moa.targets.live import Target
from moa_data.pipeline.config import RegenerateConfig
from moa_data.pipeline.dataset import Columns
from moa_data.pipeline.regenerate import ChatFile, LossReason, Row, open_chat_file, regenerate
from moa_data.pipeline.sequences import REGENERATED_COLUMNS, tokenize_row
from moa_data.tests.kit.chats import chat, write_jsonl
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.kills import kill_at_every_change, run_apart
from moa_data.tests.kit.models import write_target_of_letters
from moa_data.tests.kit.serving import MODEL, LiveServer, plain_text
from moa_data.tests.kit.stores import read_tree

MAX_POSITIONS = 160
QUESTION_TOKENS = 6
URL = "http://scripted"
HUNG_UP = httpx.RemoteProtocolError("hung up")


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("letters")
    return write_target_of_letters(folder, MAX_POSITIONS, num_hidden_layers=2)


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    return Target.load(str(target_folder), torch.float32, "cpu")


@pytest.fixture(scope="session")
def drafter_folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(build_drafter(target.model, std=0.1, target=target.identity), folder)
    return folder


@pytest.fixture
def rows() -> list[Any]:
    """Chats of one and two turns, and rows that cannot be answered."""
    return [
        *(chat(f"what is {n}?", "old", f"and {n + 1}?", "old") for n in range(4)),
        *(chat(f"tell me of {n}") for n in range(4)),
        {"no": "chat"},
        chat("x" * MAX_POSITIONS, "old"),
        chat("<eot> in the text", "old"),
    ]


@pytest.fixture
def config(target_folder: Path, rows: list[Any], tmp_path: Path) -> RegenerateConfig:
    dataset = write_jsonl(tmp_path / "questions.jsonl", rows)
    return RegenerateConfig.of(
        model=str(target_folder), dataset=str(dataset), out=str(tmp_path / "answered.jsonl"),
        max_new_tokens=36,
        max_length=MAX_POSITIONS, batch_size=3, device="cpu", max_rejected_fraction=1,
    )  # fmt: skip


@pytest.fixture
def own_questions(config: RegenerateConfig) -> RegenerateConfig:
    """Four greedily answered chats about questions that the target asks itself."""
    return config.replaced(
        dataset=None,
        self_prompted=4,
        question_tokens=QUESTION_TOKENS,
        max_new_tokens=6,
        batch_size=4,
    )


def kill(every: str, *runs: str) -> None:
    """Kill each of the runs at a later change of the disk again and again.

    The next process must finish what the killed one began, with the output of an uninterrupted run.
    """
    configs = [RegenerateConfig.model_validate_json(settings) for settings in runs]
    loaded = Target.load(str(configs[0].model), device="cpu")
    _ = loaded.identity
    setattr(Target, "load", lambda *_: loaded)  # noqa: B010
    # What is loaded for the first run is then there in all forks.
    for config in configs:
        regenerate(elsewhere(config, "whole"))

    def answer(config: RegenerateConfig, name: str) -> None:
        regenerate(elsewhere(config, name))

    def begin(config: RegenerateConfig, n: int, arm: Callable[[], None]) -> None:
        if n > 1:
            answer(config, f"killed-{n - int(every)}")
        arm()
        answer(config, f"killed-{n}")

    for config in configs:
        kill_at_every_change(partial(begin, config), int(every))


def read(config: RegenerateConfig) -> dict[int, list[str]]:
    """Map each row to the texts of its chat."""
    rows = [json.loads(line) for line in Path(config.out).read_text(encoding="utf-8").splitlines()]
    return {row["row"]: [message["content"] for message in row["messages"]] for row in rows}


def record(config: RegenerateConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        Path(config.out).with_suffix(".regeneration.json").read_text()
    )
    return found


def outputs(config: RegenerateConfig) -> list[bytes]:
    out = Path(config.out)
    return [out.read_bytes(), out.with_suffix(".regeneration.json").read_bytes()]


def elsewhere(config: RegenerateConfig, name: str, **changes: Any) -> RegenerateConfig:
    return config.replaced(out=str(Path(config.out).with_name(f"{name}.jsonl")), **changes)


def user(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


TWICE = {"messages": [*chat("a", "1")["messages"], *chat("b", "2")["messages"][1:], *user("c")]}
ALPACA = {"instruction": "Add.", "input": "1, 2", "output": "3"}


@pytest.mark.parametrize(
    ("content", "turns", "reason"),
    [
        (chat("a", "1", "b", "2"), [user("a"), user("b")], ""),
        (chat("a", "1", "b"), [user("a"), user("b")], ""),
        (TWICE, [user("a"), user("c")], ""),  # Two answers in a row count as one.
        (
            chat("a", "1", system="Be brief."),
            [[{"role": "system", "content": "Be brief."}, *user("a")]],
            "",
        ),
        (ALPACA, [user("Add.\n\n1, 2")], ""),
        ({"text": "a"}, [], RejectReason.NO_MESSAGES),
        (
            {"messages": [{"role": "assistant", "content": "1"}, *user("a")]},
            [],
            LossReason.NO_QUESTION,
        ),
        (chat("a", "1", tools=[{"name": "add"}]), [], LossReason.TOOLS),
        ({"messages": [*user("a"), {"role": "tool", "content": "3"}]}, [], LossReason.TOOLS),
        (chat("\ud800", "1"), [], RejectReason.NO_UNICODE),
    ],
)
def test_a_row_gives_its_questions_or_the_reason_why_it_asks_none(
    content: Any, turns: list[Any], reason: str
) -> None:
    found = Row.read(7, content, Columns.parse(["alpaca"] if content is ALPACA else []))
    assert (found.row, found.turns, found.reason) == (7, turns, reason)
    assert found.begin_turn() == bool(turns)


@pytest.mark.parametrize(
    ("text", "reason"), [("B", ""), (" \n", LossReason.EMPTY), ("caf\ufffd", LossReason.NO_TEXT)]
)
def test_later_turns_see_the_new_answers_and_one_that_is_none_ends_the_chat(
    text: str, reason: str
) -> None:
    row = Row.read(7, chat("a", "1", "b", "2"), Columns.parse([]))
    assert row.begin_turn()
    row.take("A", 3)
    assert row.begin_turn()
    assert [message["content"] for message in row.prompt] == ["a", "A", "b"]
    row.take(text, 4)
    assert not row.begin_turn()
    assert row.reason == reason
    assert [message["content"] for message in row.messages] == [
        "a",
        "A",
        *(["b", "B"] if not reason else []),
    ]
    assert (row.n_answers, row.n_tokens) == ((1, 3) if reason else (2, 7))


def test_every_cut_of_the_file_is_resumed_after_the_last_batch(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    with open_chat_file(path, {"seed": 0}, 4) as chat_file:
        chat_file.append([Row(0, user("caf\u00e9"), 1, 2), Row(1, reason="late")])
        kept, counted = path.read_bytes(), chat_file.record.read_bytes()
        chat_file.append([Row(2, user("b"), 1, 2)])
        with raises_naming(OutputOccupied, path):
            open_chat_file(path, {"seed": 0}, 4).__enter__()
    whole = path.read_bytes()
    for n_bytes in range(len(kept), len(whole) + 1):  # The record is that of the first batch.
        path.write_bytes(whole[:n_bytes])
        chat_file.record.write_bytes(counted)
        with open_chat_file(path, {"seed": 0}, 4) as again:
            assert (again.counts.n_rows, again.counts.n_answers) == (2, 1)
        assert (path.read_bytes(), chat_file.record.read_bytes()) == (kept, counted)
    with raises_naming(OutputOccupied, path, "seed", 0, 1), open_chat_file(path, {"seed": 1}, 4):
        pass
    path.write_bytes(kept[:-1])
    with (
        raises_naming(OutputOccupied, path, chat_file.record),
        open_chat_file(path, {"seed": 0}, 4),
    ):
        pass


def test_answers_are_those_of_plain_decoding_turn_by_turn(
    config: RegenerateConfig, target: Target
) -> None:
    chat_file = regenerate(config)
    found, counts = read(config), chat_file.counts
    n_ended = 0
    for row, texts in found.items():
        for at in range(1, len(texts), 2):
            prompt = prompt_tokens(target.template, chat(*texts[:at])["messages"])
            assert texts[at] == plain_text(target, prompt, 36)
            n_ended += 1
        assert texts[0] == (f"what is {row}?" if row < 4 else f"tell me of {row - 4}")
    assert (counts.n_answers, counts.n_chats, counts.n_rows) == (n_ended, len(found), 11)
    assert n_ended >= 5, "the target ends some of its answers"
    assert {row for row in range(11) if row not in found} >= {8, 9, 10}
    assert counts.rejected[LossReason.TOO_LONG] == 1
    assert counts.rejected[LossReason.UNUSABLE_PROMPT] == 1
    assert counts.rejected.total() == 11 - len(found)
    assert chat_file.describe(config).count("\n") == 3 + len(counts.rejected) + len(counts.cut)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_drafts_change_no_distribution_and_greedily_no_word(
    config: RegenerateConfig, drafter_folder: Path, temperature: float
) -> None:
    config = config.replaced(max_rows=3, max_new_tokens=8 if temperature else 12)
    drafted = elsewhere(config, "drafted", drafter=str(drafter_folder), temperature=temperature)
    regenerate(drafted)
    settings = record(drafted)["settings"]
    assert settings["tree"] == ("5" if temperature else "10@0.2")
    assert set(settings["target"]) == {"weights_sha256", "config_sha256"}
    again = elsewhere(drafted, "again") if temperature else config
    regenerate(again)
    assert read(again) == read(drafted)
    if temperature:
        regenerate(elsewhere(drafted, "other", seed=1))
        assert read(elsewhere(drafted, "other")) != read(drafted)


@pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_any_kill_ends_in_the_bytes_of_a_run_that_was_not_interrupted(
    config: RegenerateConfig, drafter_folder: Path, tmp_path: Path, every: int
) -> None:
    short = config.replaced(batch_size=2, max_new_tokens=8)
    drafted = short.replaced(
        out=str(tmp_path / "drafted/x.jsonl"), drafter=str(drafter_folder), max_rows=5
    )
    self_prompted = short.replaced(
        out=str(tmp_path / "self-prompted/x.jsonl"),
        dataset=None,
        self_prompted=5,
        question_tokens=12,
    )
    runs = [drafted, self_prompted]
    for one in runs:
        Path(one.out).parent.mkdir()
    run_apart(kill, every, *(one.model_dump_json() for one in runs))
    for one in runs:
        whole = outputs(elsewhere(one, "whole"))
        killed = sorted(Path(one.out).parent.glob("killed-*.jsonl"))
        assert len(killed) >= 3
        for path in killed:
            assert outputs(one.replaced(out=str(path))) == whole, path


def test_what_is_complete_is_not_asked_again_and_foreign_files_are_left_alone(
    config: RegenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = regenerate(config)
    before = outputs(config)
    monkeypatch.setattr(ChatFile, "append", None)
    assert vars(regenerate(config).counts) == vars(first.counts)
    assert outputs(config) == before
    with Path(config.out).open("a") as stream:
        stream.write("{}\n")
    with raises_naming(OutputOccupied, config.out, first.record):
        regenerate(config)
    first.record.unlink()
    with raises_naming(OutputOccupied, config.out):
        regenerate(config)
    first.record.write_text("{}")
    with raises_naming(OutputOccupied, first.record):
        regenerate(config)
    assert Path(config.out).read_bytes() == before[0] + b"{}\n"
    with pytest.raises(OptionInvalid):
        regenerate(config.replaced(dataset=str(tmp_path)))


def test_the_target_asks_itself(
    own_questions: RegenerateConfig, target: Target, tmp_path: Path
) -> None:
    counts = regenerate(own_questions).counts
    chats = read(own_questions)
    questions = [texts[0] for texts in chats.values()]
    assert (counts.n_rows, len(questions)) == (4, counts.n_chats)
    assert len({" ".join(question.split()) for question in questions}) == len(questions)
    assert all(question and question == question.strip() for question in questions)
    assert not any("<" in question for question in questions), "no special tokens"
    assert counts.dropped[LossReason.UNFINISHED_QUESTION] > 0
    assert counts.dropped[LossReason.REPEATED_QUESTION] > 0
    for texts in chats.values():
        prompt = prompt_tokens(target.template, chat(texts[0])["messages"])
        assert texts[1] == plain_text(target, prompt, 6)
    settings = record(own_questions)["settings"]
    assert settings["question_tokens"] == QUESTION_TOKENS
    assert "dataset" not in settings
    for name, changes in {"again": {}, "other": {"seed": 1}}.items():
        regenerate(elsewhere(own_questions, name, **changes))
        again = read(elsewhere(own_questions, name))
        assert (again == chats) == (name == "again")
    dry = run(*arguments_of(own_questions), "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "4 questions written by the target, with answers of at most" in dry.stdout
    assert "tokens/s" in dry.stdout


def arguments_of(config: RegenerateConfig) -> list[str]:
    return [
        "regenerate", "--model", str(config.model), "--self-prompted", str(config.self_prompted),
        "--out", config.out, "--question-tokens", str(QUESTION_TOKENS),
        "--batch-size", str(config.batch_size), "--max-new-tokens", "6",
        "--max-length", str(MAX_POSITIONS), "--device", "cpu",
    ]  # fmt: skip


def test_a_target_that_repeats_itself_is_given_up(own_questions: RegenerateConfig) -> None:
    greedy = own_questions.replaced(question_temperature=1e-6, self_prompted=32, batch_size=32)
    refused(run(*arguments_of(greedy), "--question-temperature", "1e-6"), "unusable questions")
    assert record(greedy)["rows"]["n_rows"] == 0


def test_a_template_without_a_user_turn_of_its_own_is_refused(
    own_questions: RegenerateConfig, target_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(target_folder, tmp_path / "model"))
    for template in ("", "{{ messages[0].content }} answer: "):
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(TemplateError):
            regenerate(own_questions.replaced(model=str(folder)))
    assert not Path(own_questions.out).exists()


def test_answers_at_the_limit_are_kept_and_end_without_an_end_of_turn(
    config: RegenerateConfig, target: Target, tmp_path: Path
) -> None:
    config = config.replaced(max_new_tokens=3)
    counts = regenerate(config).counts
    rows = [json.loads(line) for line in Path(config.out).read_text().splitlines()]
    is_cut = [row["finish_reason"] == "length" for row in rows]
    assert counts.n_at_limit == sum(is_cut) > 2
    assert len(rows) == counts.n_chats
    for row in rows:
        sequence = tokenize_row(target.template, row, MAX_POSITIONS)
        assert isinstance(sequence, TokenizedChat)
        prompt = prompt_tokens(target.template, row["messages"][:-1])
        answer = plain_generate(target, prompt, max_new_tokens=3).tokens
        assert sequence.tokens.tolist() == [*prompt, *answer]
        assert sequence.response_mask.tolist() == [0] * len(prompt) + [1] * len(answer)
        assert (answer[-1] in target.eos_token_ids) == (row["finish_reason"] == "stop")
    dropping = elsewhere(config, "dropped", keep_cut=False, max_rejected_fraction=0.5)
    dropped = regenerate(dropping).counts
    assert dropped.n_at_limit == 0
    assert dropped.rejected[LossReason.NO_END] + dropped.cut[LossReason.NO_END] == sum(is_cut)
    assert all("length" not in line for line in Path(dropping.out).read_text().splitlines())


def test_a_chat_ends_with_an_answer_that_was_cut() -> None:
    row = Row.read(7, chat("a", "1", "b", "2"), Columns.parse([]))
    assert row.begin_turn()
    row.take("caf\ufffd", 4, is_cut=True)
    assert not row.begin_turn()
    assert [message["content"] for message in row.messages] == ["a", "caf"]
    assert (row.is_cut, row.reason) == (True, LossReason.NO_END)
    assert json.loads(row.json_line()).keys() == REGENERATED_COLUMNS


def test_questions_of_spec_bench_are_answered_turn_by_turn(
    config: RegenerateConfig, tmp_path: Path
) -> None:
    turns: list[list[str]] = [[f"what is {n}?", f"and {n + 1}?"] for n in range(4)] + [
        [f"tell me of {n}"] for n in range(4)
    ]
    rows = [
        {"question_id": n, "category": "qa", "turns": texts}
        for n, texts in enumerate([*turns, [""]])
    ]
    dataset = write_jsonl(tmp_path / "questions-of-spec-bench.jsonl", rows)
    spec_bench = elsewhere(config, "spec", dataset=str(dataset))
    counts = regenerate(spec_bench).counts
    regenerate(config)  # The same questions in the form of chats.
    assert read(spec_bench) == read(config)
    assert counts.n_answers > counts.n_chats
    assert counts.rejected[RejectReason.MALFORMED_TURNS] == 1


def test_too_many_rejected_rows_fail_and_keep_what_was_answered(config: RegenerateConfig) -> None:
    with raises_naming(DatasetError, "row 9", "max_rejected_fraction", 0.2):
        regenerate(config.replaced(max_new_tokens=1, max_rejected_fraction=0.2))
    assert record(config)["rows"]["n_rows"] == 11, "certain after the last batch"
    with raises_naming(OutputOccupied, config.out, "max_new_tokens", 1):
        regenerate(config)
    chat_file = regenerate(config.replaced(max_new_tokens=1, max_rejected_fraction=1))
    assert chat_file.counts.n_rows == 11
    write_jsonl(Path(str(config.dataset)), [{"text": "a"}])
    with raises_naming(DatasetError, config.dataset, 1):
        regenerate(config)


def test_settings_may_change_until_there_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    for seed in (0, 1):
        with open_chat_file(path, {"seed": seed}, 4) as chat_file:
            assert chat_file.counts.n_rows == 0
    assert json.loads(chat_file.record.read_text())["settings"] == {"seed": 1}
    with open_chat_file(path, {"seed": 1}, 4) as chat_file:
        chat_file.append([Row(0, reason="late")])
    with pytest.raises(OutputOccupied), open_chat_file(path, {"seed": 0}, 4):
        pass


def test_extract_takes_the_answers(
    config: RegenerateConfig, target_folder: Path, tmp_path: Path
) -> None:
    folder, store = tmp_path / "answered", tmp_path / "store"
    arguments = [
        "regenerate",
        "--model",
        str(target_folder),
        "--dataset",
        str(config.dataset),
        "--out",
        str(folder),
    ]
    shown = [
        "--max-new-tokens",
        "36",
        "--device",
        "cpu",
        "--max-rejected-fraction",
        "1",
        "--max-length",
        "160",
    ]
    dry = run(*arguments, *shown, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "11 rows, 10 chats that ask for 14 answers of at most 36 tokens" in dry.stdout
    assert "tokens/s" in dry.stdout
    assert not folder.exists()
    done = run(*arguments, *shown)
    assert done.exit_code == 0, done.output
    assert "regenerate" in done.stderr
    n_chats = len((folder / "chats.jsonl").read_text().splitlines())
    assert f"answered     {n_chats} of 11 rows" in done.stdout
    command = (
        done.stdout.split("next         moa-data ")[1]
        .split("\n")[0]
        .replace("STORE", str(store))
        .split()
    )
    extracted = run(*command, "--device", "cpu", "--max-rejected-fraction", "0")
    assert extracted.exit_code == 0, extracted.output
    assert f": {n_chats} sequences" in extracted.stdout, "none rejected, and the record is no chat"
    assert read_tree(store)
    refused(run(*arguments, *shown[:-4]), "started with", "max_length was 160 and is now 2048")


@pytest.mark.parametrize(
    "options",
    ["", "--server http://h --drafter d", "--model m --self-prompted 4",
     "--server http://h --self-prompted 4",
     "--server h:8000", "--model m --tree 5", "--model m --drafter d --tree 5@0.2 --temperature 1"],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(options: str) -> None:
    refused(run("regenerate", "--dataset", "d.jsonl", "--out", "o", *options.split()))


def asking(config: RegenerateConfig, server: str, **changes: Any) -> RegenerateConfig:
    return elsewhere(
        config, "served", **{"model": None, "server": server, "patience_s": 0.5} | changes
    )


@pytest.fixture(scope="module")
def live(target: Target) -> Iterator[LiveServer]:
    with LiveServer(target) as server:
        yield server


def test_our_server_gives_the_answers_of_the_target(
    config: RegenerateConfig, live: LiveServer
) -> None:
    local, served = regenerate(config).counts, asking(config, live.address)
    counts = regenerate(served).counts
    assert read(served) == read(config)
    assert len(read(served)) > 3
    assert counts.n_chats == local.n_chats
    assert counts.rejected[LossReason.REFUSED] == 2, (
        "a special token in the text, and too long a text"
    )
    settings = record(served)["settings"]
    assert settings["server_model"] == MODEL
    assert "batch_size" not in settings
    with raises_naming(ServingError, "`model`", MODEL):
        regenerate(asking(config, live.address, model="other"))


class Scripted:
    """A server whose answers come from a function.

    The function takes the body of a request and returns (status, JSON) or an error to raise.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.script: Any = lambda body: (200, said("yes"))

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "scripted"}]})
        body = json.loads(request.content)
        self.bodies.append(body | {"authorization": request.headers.get("authorization")})
        found = self.script(body)
        if isinstance(found, Exception):
            raise found
        return httpx.Response(found[0], json=found[1])


def said(text: str, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    choice = {
        "message": {"role": "assistant", "content": text, **message},
        "finish_reason": finish_reason,
    }
    return {"choices": [choice], "usage": usage}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    state = Scripted()
    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(state.answer))
    monkeypatch.setattr(httpx, "AsyncClient", client)
    return state


def test_settings_of_sampling_are_sent(config: RegenerateConfig, scripted: Scripted) -> None:
    regenerate(
        asking(config, f"{URL}/v1/", temperature=0.8, top_k=9, seed=5, repetition_penalty=1.1)
    )
    seeds = {body["messages"][0]["content"]: body["seed"] for body in scripted.bodies}
    assert (seeds["what is 0?"], seeds["tell me of 1"]) == (5, 10)
    wanted = {"temperature": 0.8, "top_p": 1.0, "top_k": 9, "repetition_penalty": 1.1}
    assert all(body.items() >= wanted.items() for body in scripted.bodies)


def test_what_passes_is_asked_again(
    config: RegenerateConfig, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: dict[str, Any] = {
        "what is 0?": (503, {}),
        "what is 1?": (429, {}),
        "what is 2?": HUNG_UP,
    }
    scripted.script = lambda body: first.pop(body["messages"][0]["content"], (200, said("yes")))
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    arguments = ("enable_thinking=false",)
    served = asking(config, URL, patience_s=20, template_kwargs=arguments, max_new_tokens=9)
    regenerate(served)
    assert list(read(served)) == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]
    assert {body["authorization"] for body in scripted.bodies} == {"Bearer secret"}
    wanted = {"max_tokens": 9, "temperature": 0, "model": "scripted"}
    wanted |= {"chat_template_kwargs": {"enable_thinking": False}}
    assert all(body.items() >= wanted.items() and "seed" not in body for body in scripted.bodies)
    assert "secret" not in Path(served.out).with_suffix(".regeneration.json").read_text()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((400, {"error": {"message": "a bad word"}}), LossReason.REFUSED),
        ((400, {"message": "This model's maximum context length is 9"}), LossReason.REFUSED),
        ((408, {"error": {"message": "late"}}), LossReason.REFUSED),
        (httpx.ReadTimeout("slow"), LossReason.LATE),
        ((200, said("on and on", "content_filter")), LossReason.REFUSED),
        ((200, said("", "tool_calls")), LossReason.TOOLS),
        ((200, said(" ")), LossReason.EMPTY),
    ],
)
def test_one_answer_that_fails_rejects_its_row(
    config: RegenerateConfig, scripted: Scripted, answer: Any, reason: LossReason
) -> None:
    scripted.script = lambda body: (
        answer if body["messages"][-1]["content"] == "tell me of 1" else (200, said("yes"))
    )
    counts = regenerate(asking(config, URL)).counts
    assert counts.rejected[reason] == 1
    assert counts.examples[reason].startswith("row 5")


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ((401, {"error": {"message": "no key"}}), "no key"),
        (
            (500, {"error": {"message": "down"}}),
            "for 0.5 s (--patience-s). The answers so far are kept",
        ),
        ((200, {"hello": 1}), "did not answer with a chat completion"),
        ((200, said("yes", reasoning_content="hm")), "returns the reasoning separately"),
        (HUNG_UP, "cannot be reached"),
    ],
)
def test_a_server_that_cannot_answer_stops_the_run_in_one_line(
    config: RegenerateConfig, scripted: Scripted, answer: Any, line: str
) -> None:
    scripted.script = lambda body: answer
    options = [
        "--server",
        URL,
        "--dataset",
        str(config.dataset),
        "--out",
        config.out,
        "--set",
        "serving.patience_s=0.5",
    ]
    refused(run("regenerate", *options), line)
    scripted.script = lambda body: (200, said("yes"))
    done = run("regenerate", *options, "--max-rejected-fraction", "1")
    assert done.exit_code == 0, done.output


def test_a_server_cuts_answers_too(config: RegenerateConfig, scripted: Scripted) -> None:
    scripted.script = lambda body: (200, said("on and on", "length"))
    served = asking(config, URL)
    counts = regenerate(served).counts
    assert counts.n_at_limit == counts.n_chats == 10
    regenerate(elsewhere(served, "dropped", keep_cut=False))
    assert not read(elsewhere(served, "dropped"))


def test_a_run_that_was_stopped_goes_on(config: RegenerateConfig, scripted: Scripted) -> None:
    scripted.script = lambda body: (
        (404, {})
        if body["messages"][0]["content"] == "tell me of 2"
        else (200, said(body["messages"][-1]["content"]))
    )
    served = asking(config, URL, batch_size=1)
    with raises_naming(ServingError, URL, 404, "`server`"):
        regenerate(served)
    n_before = len(scripted.bodies)
    scripted.script = lambda body: (200, said(body["messages"][-1]["content"]))
    regenerate(served.replaced(batch_size=4))
    asked = [body["messages"][0]["content"] for body in scripted.bodies[n_before:]]
    assert "what is 0?" not in asked
    whole = elsewhere(served, "whole")
    regenerate(whole)
    assert outputs(served) == outputs(whole)
