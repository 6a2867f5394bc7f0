"""Shared by all commands: errors as one line with an exit code, progress on standard error, provenance of outputs."""

import contextlib
import errno
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from tqdm import tqdm

from .. import __version__
from ..errors import Interrupted, MoaDataError
from ..files import machine_trouble
from ..machine import is_first_process
from ..text import printable
from .signals import end_command, interruption_code

FOUND, UNUSABLE, INCOMPLETE, FAULT = 1, 2, 3, 70
"""Exit codes: something wrong was found, the input can't be used, parts are still to be written, the code is wrong."""
LOG_LINE_EVERY_S = 10.0
Report = TypeVar("Report")

# What libraries say where memory is short, whatever the class of the error.
_NO_MEMORY = ("can't allocate memory", "annot allocate memory", "bad_alloc", "out of memory")
# Command -> the flag that bounds the size of its tensors.
_FEWER_TENSORS = {
    "extract": "--batch-tokens", "train": "--micro-batch-size", "eval": "--batch-size", "regenerate": "--batch-size",
    "serve": "--kv-tokens",
}  # fmt: skip
# Command -> what to do after an interruption; all others keep what is finished.
_CONTINUE = {
    "train": "Run the same command again, with --resume if it had saved a checkpoint.",
    "chat": "With --session FILE, --resume FILE goes on with the answer.",
    **dict.fromkeys(
        ("plan", "inspect", "verify", "audit", "generate", "eval", "export-drafter"),
        "Nothing was written; run the same command again.",
    ),
}
# The extra of docs/install.md that a command needs; `extract` for all others.
_EXTRAS = {
    **dict.fromkeys(("train", "export-drafter"), "train"),
    **dict.fromkeys(("serve", "chat"), "serve"),
    **dict.fromkeys(("demo", "eval"), "all"),
}


class StageFailure(click.ClickException):
    """Ends a command with one line on standard error, or silently where the line is empty."""

    def __init__(self, line: str, exit_code: int = UNUSABLE) -> None:
        super().__init__(line)
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance

    def format_message(self) -> str:
        """Return the line, which may quote names and rows of others."""
        return printable(self.message)

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line, unless standard error can't be written: the exit code still says what happened."""
        if self.message:
            with contextlib.suppress(OSError):
                super().show(file)


class StandardOutput(Console):
    """Standard output: control characters are escaped, and neither markup nor names of emoji are read."""

    def __init__(self) -> None:
        # Wide enough for any table: one that were fitted to the terminal, or to 80 columns in a
        # pipe, would be cut.
        super().__init__(soft_wrap=True, width=10_000, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape before rich drops some of the control characters."""
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escape also what came as a renderable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print as ``Console.print`` does."""
        with _output_failures():
            super().print(*args, **kwargs)

    def write(self, text: str) -> None:
        """Write text at once as it is, control sequences included; the caller has escaped what came from elsewhere."""
        with _output_failures():
            self.file.write(text)
            self.file.flush()

    def on_broken_pipe(self) -> None:
        """Leave the exit code to :func:`failure_of`; rich would end with 1, which means something else here."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@contextlib.contextmanager
def _output_failures() -> Iterator[None]:
    """Turn an error of standard output into the end of the command."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise failure_of(error) from error
        line = f"standard output can't be written: {error.strerror}. What the command did is kept."
        raise StageFailure(line) from error


out = StandardOutput()  # standard output; errors and progress go to standard error


class StageGroup(click.Group):
    """A click group whose commands end in one line on stderr and an exit code that has one meaning."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command and exit; takes what ``click.Command.main`` takes, but always exits."""
        try:
            result = super().main(*args, **(extra | {"standalone_mode": False}))
            # Python's own flush at the end could only change the exit code to 120
            with _output_failures():
                sys.stdout.flush()
            code = result if isinstance(result, int) else 0
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except (click.ClickException, click.Abort, KeyboardInterrupt) as error:
            failure = error if isinstance(error, StageFailure) else failure_of(error)
            failure.show()
            code = failure.exit_code
        end_command()
        sys.exit(code)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the options before the command; of these ``--help`` and ``--version`` print."""
        with _output_failures():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command and turn whatever it raises into a :class:`StageFailure`."""
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, StageFailure):
            raise
        # Also SystemExit, with which a library could end a command as if all had been done.
        except BaseException as error:
            end_command()
            failure = failure_of(error, ctx.invoked_subcommand or "")
            if ctx.params.get("debug") or failure.exit_code == FAULT:
                tell("".join(traceback.format_exception(error)))
            raise failure from error


def failure_of(error: BaseException, command: str = "") -> StageFailure:
    """Return what a command ends with for an error that it raised."""
    if (code := interruption_code(error)) is not None:
        hint = _CONTINUE.get(
            command, "What is finished is kept; run the same command again to go on."
        )
        line = _one_line(error) if isinstance(error, Interrupted) else f"interrupted. {hint}"
        # of several processes all were stopped
        return StageFailure(line if is_first_process() else "", code)
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "moa-data"
        return StageFailure(f"{error.format_message()} (`{path} --help` lists the options)")
    if isinstance(error, click.ClickException):
        return StageFailure(error.format_message())
    # the reader has gone, as `head` does: end as SIGPIPE ends a program
    if isinstance(error, BrokenPipeError):
        return StageFailure("", 128 + signal.SIGPIPE)
    if (message := user_message(error, command)) is not None:
        return StageFailure(
            message, error.exit_code if isinstance(error, MoaDataError) else UNUSABLE
        )
    return StageFailure(
        f"{type(error).__name__}: {_one_line(error)}. This is a fault of moa-data {__version__}, not of your input: "
        "please report it with the lines above and the command. What was committed or saved before is kept.",
        FAULT,
    )


def user_message(error: BaseException, command: str = "") -> str | None:
    """Return the line for an error that the user can act on, or None for one that is a fault of the code."""
    text = _one_line(error)
    if isinstance(error, MoaDataError):
        return text
    if (
        isinstance(error, ModuleNotFoundError)
        and (error.name or "moa_data").split(".")[0] != "moa_data"
    ):
        extra = "gguf" if error.name in ("gguf", "accelerate") else _EXTRAS.get(command, "extract")
        return f"{error.name} is not installed, and this command needs it: pip install 'moa-data[{extra}]'."
    if isinstance(error, MemoryError) or any(sign in text for sign in _NO_MEMORY):
        # Python's own error comes from data; torch's from tensors, whose sizes a flag changes.
        flag = None if isinstance(error, MemoryError) else _FEWER_TENSORS.get(command)
        advice = f"Free some, or lower {flag}" if flag else "Free some"
        return f"out of memory ({text.split('. ')[0] or type(error).__name__}). {advice}."
    if (trouble := machine_trouble(error)) is not None:
        return str(trouble)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}. Check the path and the room there, or choose another."
    return text if isinstance(error, OSError) else None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def tell(text: str) -> None:
    """Print a line for people on standard error; work goes on where it can't be written."""
    with contextlib.suppress(OSError):
        click.echo(printable(text), err=True)


PHASE_UNITS = {
    "read": ("row", False),
    "tokenise": ("chat", False),
    "hash": ("B", True),
    "load": ("B", True),
    "verify": ("B", True),
    "measure": ("sequence", False),
    "learn": ("step", False),
    **dict.fromkeys(("extract", "add", "recode"), ("token", False)),
}
"""Phases that follow each other in one command: first word of the message -> unit, and whether counts are shortened."""
_LOG_FORMAT = (
    "{desc}: {n_fmt} of {total_fmt}{unit} ({percentage:.0f}%), {elapsed}, {remaining} left"
)


class ProgressLine(contextlib.AbstractContextManager["ProgressLine"]):
    """Shows on standard error how far a task is: a bar on a terminal, elsewhere a line every ten seconds.

    A new phase ends the bar before it: another total, a smaller count, or a message that begins with another word of
    ``PHASE_UNITS``. Work goes on without either where standard error can't be written any more. ``scaled`` counts are
    shortened to k, M and G.
    """

    def __init__(self, unit: str, scaled: bool = False) -> None:
        self._own = (unit, scaled)
        self._phase = ""
        self._bar: Any = None

    def __call__(self, done: int, total: int, message: str) -> None:
        """Show ``done`` of ``total`` units and a message."""
        with contextlib.suppress(OSError):
            word = message.split(" ", 1)[0].rstrip(":,")
            bar = self._bar
            phase = word if word in PHASE_UNITS else ""
            if bar is None or bar.total != total or bar.n > done or phase != self._phase:
                self.close()
                self._phase = phase
                bar = self._bar = self._start(done, total, printable(message))
            bar.set_description_str(printable(message), refresh=False)
            bar.update(done - bar.n)

    def _start(self, done: int, total: int, message: str) -> Any:
        unit, scaled = PHASE_UNITS.get(self._phase, self._own)
        options: dict[str, Any] = {
            "file": sys.stderr,
            "mininterval": 0.2,
            "dynamic_ncols": True,
            "unit": unit or "it",
        }
        # where a bar that is drawn over and over would leave one endless line
        if not sys.stderr.isatty():
            options |= {
                "file": _Log(),
                "mininterval": LOG_LINE_EVERY_S,
                "maxinterval": LOG_LINE_EVERY_S,
            }
            options |= {
                "bar_format": _LOG_FORMAT,
                "unit": unit if scaled or not unit else f" {unit}s",
            }
        return tqdm(total=total, initial=done, desc=message, unit_scale=scaled, **options)

    def close(self) -> None:
        """Leave the last state on its line."""
        bar = self._bar
        self._bar = None
        if bar is not None:
            with contextlib.suppress(OSError):
                bar.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def run_stage(unit: str, run: Callable[..., Report], *arguments: Any, **options: Any) -> Report:
    """Run a stage under a line of progress and print what its report says; returns the report."""
    with ProgressLine(unit) as progress:
        report = run(*arguments, progress=progress, **options)
    out.print(report if isinstance(report, str) else cast(Any, report).describe())
    return report


class _Log:
    """Standard error as a log: each state of a bar is a line of its own."""

    last = ""

    def write(self, text: str) -> None:
        line = text.strip()
        if line and line != self.last:  # a bar is drawn once more when it ends
            sys.stderr.write(line + "\n")
            self.last = line

    def flush(self) -> None:
        sys.stderr.flush()


def quiet_libraries() -> None:
    """Keep libraries' bars and advice off the terminal, and waiting threads off the cores; the user's settings win."""
    quiet = {
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "GRPC_VERBOSITY": "NONE",  # of a network that is gone it has a line for every attempt
        # Else threads of OpenMP that wait for each other keep their cores busy, and with more
        # threads than free cores a
        # target call takes ten times as long.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    # On a terminal the bars of a download or of loading many gigabytes are welcome; in a log file
    # they are noise.
    if not sys.stderr.isatty():
        quiet["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    for name, value in quiet.items():
        os.environ.setdefault(name, value)


_PACKAGES = (
    "moa-data", "torch", "transformers", "tokenizers", "datasets", "lightning", "zarr", "numcodecs", "pyarrow", "numpy",
)  # fmt: skip


def collect_provenance() -> dict[str, Any]:
    """Describe this run for JSON; it differs from run to run, so keep it out of files that must be reproducible."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    sha, dirty = _git_state(Path(__file__).resolve().parents[1])
    return {
        "argv": sys.argv,
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_sha": sha,
        "git_dirty": dirty,
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "n_cpus": os.cpu_count(),
    }


def _git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the checkout whose root is ``folder``, and whether tracked files differ from it."""
    # An installed package may lie inside somebody else's checkout, whose commit would say nothing
    # about this code.
    if not (folder / ".git").exists():
        return None, None
    command = [
        "git",
        "-C",
        str(folder),
        "status",
        "--porcelain=v2",
        "--branch",
        "--untracked-files=no",
    ]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None, None
    # "# branch.oid COMMIT", then further headers and changed files
    header, *changes = done.stdout.splitlines()
    return header.split()[-1], not all(line.startswith("#") for line in changes)
