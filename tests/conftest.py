"""What all tests share: property tests draw the same examples in every run, and a model with chats and a store."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import settings

from moa_data.cli import main
from moa_data.demo.config import DemoConfig
from moa_data.demo.target import build_target, train_tokenizer

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

CHATS = [
    [{"role": "user", "content": f"What is {n} plus {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."}]
    for n in range(12)
]


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, chats.jsonl and store/ of several parts; tests change copies of them."""
    folder = tmp_path_factory.mktemp("room")
    rows = [json.dumps({"messages": messages}) for messages in CHATS]
    (folder / "chats.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    config = DemoConfig(out="unused", vocab_size=280, hidden_size=16, n_layers=2, n_heads=2, n_kv_heads=1, seed=1)
    tokenizer = train_tokenizer([message["content"] for chat in CHATS for message in chat], config.vocab_size)
    build_target(config, tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    arguments = ("--model", folder / "model", "--dataset", folder / "chats.jsonl", "--out", folder / "store")
    options = ("--part-tokens", "256", "--device", "cpu")
    done = CliRunner().invoke(main, ["extract", *map(str, arguments), *options])
    assert done.exit_code == 0, done.output
    return folder
