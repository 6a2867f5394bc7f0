"""Chats are tokenised once: later starts read the tokens beside the plan, unless those are not theirs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from moa_data.errors import DatasetError, StorageUnavailable
from moa_data.moa.targets.chat_tokens import TokenizedChat
from moa_data.pipeline import sequences as chats
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.extract import extract, repair
from moa_data.pipeline.plan import build_plan
from moa_data.pipeline.sequences import Sequences, keep_texts, read_texts
from moa_data.storage.plan import map_texts, texts_sha256
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import TEXTS_NAME, commit_path
from moa_data.storage.write.repair import plan_repair
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.stores import flip


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rows that are tokenised from here on."""
    real, rows = chats.tokenize_row, []

    def count(tokenizer: Any, content: Any, *settings: Any) -> Any:
        rows.append(content)
        return real(tokenizer, content, *settings)

    monkeypatch.setattr(chats, "tokenize_row", count)
    return rows


@pytest.fixture
def config(config: ExtractConfig, chats_file: Path) -> ExtractConfig:
    """An extraction of chats among which some rows give no sequence."""
    rows: list[Any] = random_chats(24)
    write_jsonl(chats_file, [*rows, rows[0], "{broken", {"messages": []}])
    return config.replaced(max_rejected_fraction=0.2)


def keep(config: ExtractConfig) -> Path:
    """Keep the texts of an extraction without running the target."""
    plan = build_plan(config)
    Path(config.out).mkdir(exist_ok=True)
    keep_texts(Path(config.out), plan.sequences, plan.texts_origin)
    return Path(config.out) / TEXTS_NAME


def test_every_start_after_the_first_reads_the_tokens(config: ExtractConfig, tokenised: list[Any]) -> None:
    plain = build_plan(config, with_weights=True)
    extract(config)
    assert len(tokenised) == 2 * 27
    store = Path(config.out)
    commit_path(store, 1).unlink()
    again = build_plan(config, with_weights=True)
    assert again.manifest.to_json() == plain.manifest.to_json()
    assert again.table.equals(plain.table)
    assert again.sequences.to_arrow().equals(plain.sequences.to_arrow(), check_metadata=True)
    resumed = extract(config)
    assert resumed.n_parts_done == 1
    for name in ("rejections", "examples", "n_rows", "n_duplicates"):
        assert getattr(again.sequences, name) == getattr(plain.sequences, name)
    for shard in (store / "parts" / "kv").glob("c.0.*"):
        shard.unlink()
    repair(plan_repair(store), config.model)
    assert verify_store(store).ok
    assert len(tokenised) == 2 * 27
    with pytest.raises(DatasetError):
        build_plan(config.replaced(max_rejected_fraction=0.0))


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


def test_damaged_tokens_are_made_again(config: ExtractConfig, tokenised: list[Any]) -> None:
    kept = keep(config)
    content = kept.read_bytes()
    damages: list[Callable[[Path], None]] = [truncate, flip, keep_others, link, Path.unlink]
    for damage in damages:
        damage(kept)
        tokenised.clear()
        build_plan(config)
        assert len(tokenised) == 27
        kept.unlink(missing_ok=True)
        kept.write_bytes(content)
    tokenised.clear()
    assert keep(config).read_bytes() == content
    assert not tokenised


def test_tokens_of_other_inputs_are_not_read(config: ExtractConfig, model: Path, tokenised: list[Any]) -> None:
    config = config.replaced(model=str(model))
    keep(config)
    build_plan(config)
    tokenised.clear()
    for changes in ({"max_length": 64}, {"max_sequences": 24}, {"template_kwargs": "a=1"}):
        build_plan(config.replaced(**changes))
    assert len(tokenised) == 27 + 24 + 27
    for path, old, new in (
        (model / "chat_template.jinja", "<|", " <|"),
        (model / "config.json", ": 256", ": 255"),
        (Path(config.dataset), "{broken", "{still broken"),
    ):
        text = path.read_text()
        path.write_text(text.replace(old, new))
        tokenised.clear()
        build_plan(config)
        assert len(tokenised) == 27
        path.write_text(text)


def test_a_full_disk_is_one_line(config: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pa, "OSFile", full)
    with pytest.raises(StorageUnavailable, match=r"texts\.arrow"):
        keep(config)
    assert not list(Path(config.out).iterdir())


def test_kept_tokens_take_no_memory_of_the_process(tmp_path: Path) -> None:
    made, draw = Sequences(), np.random.default_rng(0)
    for row in range(500):
        tokens = draw.integers(0, 1000, 2000).astype(np.int32)
        made.add(row, TokenizedChat(tokens, (tokens > 500).astype(np.uint8), truncated=False))
    before_bytes = pa.total_allocated_bytes()
    kept = keep_texts(tmp_path, made, {"of": "this test"})
    read = read_texts(tmp_path, {"of": "this test"})
    assert pa.total_allocated_bytes() - before_bytes < 500 * 2000  # less than a byte for each token
    assert read is not None
    assert len({texts_sha256(texts.to_arrow()) for texts in (made, kept, read)}) == 1
    key = next(iter(made.ids))
    for other in (kept, read):
        tokens, _ = other.text(key)
        assert not tokens.flags.writeable
        np.testing.assert_array_equal(tokens, made.text(key)[0])
