"""What every command shares: errors as one line with an exit code, progress on stderr, text that streams."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import click
from rich.console import Console
from tqdm import tqdm

# Imported only when something went wrong: an error's class decides between one line and a traceback.
out = Console(soft_wrap=True, highlight=False)
"""Standard output; errors and progress go to standard error."""

_STAGE_ERRORS = (
    ("storage.errors", "StoreError"),
    ("pipeline.errors", "PipelineError"),
    ("moa.errors", "DrafterError"),
    ("trainer.errors", "TrainingError"),
    ("evaluation.errors", "EvaluationError"),
    ("interop.errors", "InteropError"),
    ("demo.errors", "DemoError"),
    ("configuration", "ConfigurationError"),
)
_GO_ON = {
    "extract": "Committed parts are kept; run the same command again to go on.",
    "add": "Parts that have the new fields keep them; run the same command again to go on.",
    "export": "Complete files are kept; run the same command again to go on.",
    "import": "Committed parts are kept; run the same command again to go on.",
    "train": "Run the same command again, with --resume if it had saved a checkpoint.",
    "repair": "What was repaired is kept; run the same command again to go on.",
    "demo": "Run the same command again; finished phases are kept.",
    **dict.fromkeys(("eval", "compare", "disconnect"), "No report was written; run the same command again."),
    **dict.fromkeys(
        ("plan", "inspect", "verify", "audit", "generate", "export-drafter"),
        "Nothing was written; run the same command again.",
    ),
}


class StageFailure(click.ClickException):
    """Ends a command with one line on stderr: the input can't be used."""

    exit_code = 2


class Findings(StageFailure):
    """The command did its work and found something wrong."""

    exit_code = 1


class Stopped(StageFailure):
    """The user stopped the command."""

    exit_code = 130


class StageGroup(click.Group):
    """A click group whose commands end in one line on stderr instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command and turns what it raises into an exit code; ``--debug`` lets everything through."""
        debug = bool(ctx.params.get("debug"))
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "moa-data"
            raise StageFailure(f"{error.format_message()} (`{command} --help` lists the options)") from error
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt as interrupt:
            if debug:
                raise
            hint = _GO_ON.get(ctx.invoked_subcommand or "", "Run the same command again.")
            raise Stopped(f"interrupted. {hint}") from interrupt
        except Exception as error:
            line = None if debug else user_message(error)
            if line is None:
                raise
            kind = Stopped if type(error).__name__.endswith("Interrupted") else StageFailure
            raise kind(line) from error


def user_message(error: BaseException) -> str | None:
    """The line for an error that the user can mend, or None for one that is a fault of the code."""
    text = " ".join(str(error).split())
    for module, name in _STAGE_ERRORS:
        if isinstance(error, getattr(import_module(f".{module}", __package__), name)):
            return text
    if isinstance(error, NotADirectoryError | FileExistsError | PermissionError | IsADirectoryError) and error.filename:
        return f"{error.filename}: {error.strerror}. Check the path, or choose another."
    if isinstance(error, OSError):
        return text
    if type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: can't allocate memory" in text:
        return f"out of memory: {text.split('. ')[0]}. Lower --batch-tokens (extract) or --micro-batch-size (train)."
    return None


class ProgressLine:
    """A progress callback that draws one line on stderr; a new phase, that is another total, gets a new line."""

    def __init__(self, unit: str, scaled: bool = False) -> None:
        self.unit, self.scaled = unit, scaled
        self.bar: tqdm[Any] | None = None

    def __call__(self, done: int, total: int, message: str) -> None:
        """Shows ``done`` of ``total`` units and a message."""
        if self.bar is None or self.bar.total != total or done < self.bar.n:
            self.close()
            interval = 0.2 if sys.stderr.isatty() else 10.0
            self.bar = tqdm(
                total=total, unit=self.unit, unit_scale=self.scaled, file=sys.stderr, mininterval=interval,
                dynamic_ncols=True,
            )  # fmt: skip
        self.bar.set_description_str(message, refresh=False)
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        """Leaves the last state on its line."""
        if self.bar is not None:
            self.bar.refresh()
            self.bar.close()
            self.bar = None

    def __enter__(self) -> "ProgressLine":
        """Nothing is drawn before the first call."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends the line, also when the command fails."""
        self.close()


class TokenStream:
    """Turns tokens that arrive in groups into text that can be printed at once.

    Text that ends inside a multi-byte character is held back until the next token completes it.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.tokens: list[int] = []
        self.shown = ""
        self.first_s: float | None = None

    def feed(self, tokens: list[int], drafted: list[bool]) -> Iterator[tuple[str, bool]]:
        """Yields (new text, whether its token was drafted) for each token that completes some text."""
        if self.first_s is None:
            self.first_s = time.perf_counter()
        for token, is_drafted in zip(tokens, drafted, strict=True):
            self.tokens.append(token)
            text = self.decode(self.tokens)
            if text.endswith("\ufffd") or not text.startswith(self.shown):
                continue
            if text != self.shown:
                yield text[len(self.shown) :], is_drafted
                self.shown = text

    def rest(self) -> str:
        """Text that was still held back when the last token had come."""
        text = self.decode(self.tokens) if self.tokens else ""
        return text[len(self.shown) :] if text.startswith(self.shown) else ""


def quiet_libraries() -> None:
    """Keeps the libraries' own progress bars and advice off the terminal; the user's settings win."""
    quiet = {
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    }
    # On a terminal the bars of a download or of loading many gigabytes are welcome; in a log file they are noise.
    if not sys.stderr.isatty():
        quiet["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
