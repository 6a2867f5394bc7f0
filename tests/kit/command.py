"""Runs the command line inside the test's process, and checks its error messages."""

from pathlib import Path
from typing import Any

from click.testing import CliRunner

from moa_data.cli import main
from moa_data.demo.config import DemoConfig
from moa_data.demo.target import build_target, train_tokenizer
from moa_data.moa.drafters.mixture import MoADrafter, MoASizes
from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.live import Target

from .chats import write_jsonl
from .drafters import PAPER

DEMO: dict[str, Any] = {
    "n_chats": 80, "n_store_chats": 30, "n_held_out": 6, "vocab_size": 300, "hidden_size": 16,
    "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "target_steps": 4, "target_batch_tokens": 512,
    "drafter_steps": 4, "drafter_batch_size": 4, "n_eval_prompts": 2, "max_new_tokens": 6,
    "draft_length": 2,
}  # fmt: skip
"""Settings of the smallest possible demo."""
DEMO_OPTIONS = " ".join(f"--set {name}={value}" for name, value in DEMO.items())
TRAIN = (
    "--max-steps",
    "2",
    "--batch-size",
    "2",
    "--accelerator",
    "cpu",
    "--validation-fraction",
    "0",
)


def run(*arguments: str | Path, **options: Any) -> Any:
    """Run the command line in this process."""
    # Every question is answered with yes, so that a prompt cannot hide what the command does.
    options = {"input": "y\n" * 100} | options
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **options)


def error_line(exit_code: int, stderr: str, expected: int = 2) -> str:
    """Check that a command ended with a single error line as its last output, and return it."""
    assert exit_code == expected, stderr
    assert "Traceback" not in stderr
    lines = [line for line in stderr.replace("\r", "\n").splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, stderr
    assert stderr.rstrip().endswith(lines[0]), stderr
    return lines[0]


def refused(result: Any, *texts: str, exit_code: int = 2) -> None:
    """Check that a command failed with one error line that contains these texts."""
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    line = error_line(result.exit_code, result.stderr, exit_code)
    for text in texts:
        assert text in line, line


def build_room(folder: Path, chats: list[dict[str, Any]]) -> Path:
    """Fill a folder with model/, drafter/, chats.jsonl and a store/ of several parts."""
    write_jsonl(folder / "chats.jsonl", chats)
    config = DemoConfig.of(
        out="unused", vocab_size=280, hidden_size=16, n_layers=2, n_heads=2, n_kv_heads=1, seed=1
    )
    texts = [message["content"] for chat in chats for message in chat["messages"]]
    tokenizer = train_tokenizer(texts, config.vocab_size)
    build_target(config, tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    target = Target.load(str(folder / "model"), device="cpu")
    save_drafter(
        MoADrafter(MoASizes.from_target(target.facts, target.identity, **PAPER)),
        folder / "drafter",
    )
    arguments = (
        "--model",
        folder / "model",
        "--dataset",
        folder / "chats.jsonl",
        "--out",
        folder / "store",
    )
    done = run("extract", *arguments, "--part-tokens", "256", "--device", "cpu")
    assert done.exit_code == 0, done.output
    return folder
