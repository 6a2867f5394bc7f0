"""Functions for all commands: errors, exit codes, progress, and the provenance of results.

An error is printed as one line. The provenance of a result is the command line, the time, the
versions of packages, and the machine.
"""

import contextlib
import errno
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeVar

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from tqdm import tqdm

from .. import __version__
from ..errors import Interrupted, MoaDataError
from ..files import machine_trouble
from ..machine import is_first_process
from ..text import SILENT, Progress, printable
from .signals import end_command, interruption_code

FOUND, UNUSABLE, INCOMPLETE, FAULT = 1, 2, 3, 70
"""Exit codes. FOUND: a check found a problem. UNUSABLE: the input cannot be used. INCOMPLETE: parts
of the store are missing. FAULT: a bug."""
LOG_LINE_EVERY_S = 10.0
# A key of the ``meta`` dict of click's contexts. Its value is the command that runs. When the group
# handles an error of the command, the command's own context is already closed, so the group finds
# the command under this key.
RUNNING = "moa_data.running"
Report = TypeVar("Report")

# When memory runs out, libraries raise errors of many classes. The message of each of these errors
# contains one of these texts.
_NO_MEMORY = ("can't allocate memory", "annot allocate memory", "bad_alloc", "out of memory")
# Maps a command to the flag that limits the size of the command's tensors.
_FEWER_TENSORS = {
    "extract": "--batch-tokens", "train": "--micro-batch-size", "eval": "--batch-size",
    "regenerate": "--batch-size", "serve": "--kv-tokens",
}  # fmt: skip
# Maps a command to advice after an interruption. The advice of all other commands is to run the
# command again, because they keep finished work and continue with the rest.
_CONTINUE = {
    "train": "Run the same command again, with --resume if the run has saved a checkpoint.",
    "chat": "If --session FILE was given, --resume FILE continues the answer.",
    **dict.fromkeys(
        ("plan", "inspect", "verify", "audit", "generate", "eval", "export-drafter"),
        "Nothing was written; run the same command again.",
    ),
}
# Maps a command to the extra of the package (docs/install.md) that the command needs. All other
# commands need `extract`.
_EXTRAS = {
    **dict.fromkeys(("train", "export-drafter"), "train"),
    **dict.fromkeys(("serve", "chat"), "serve"),
    **dict.fromkeys(("demo", "eval"), "all"),
}


class StageFailure(click.ClickException):
    """Ends a command with an exit code and one line on standard error.

    If the line is empty, nothing is printed.
    """

    def __init__(self, line: str, exit_code: int = UNUSABLE) -> None:
        super().__init__(line)
        self.exit_code = exit_code  # type: ignore[misc]  # Click reads this attribute.

    def format_message(self) -> str:
        """Return the line with escaped control characters, because it may quote untrusted text."""
        return printable(self.message)

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line. If standard error cannot be written, ignore the error."""
        if self.message:
            with contextlib.suppress(OSError):
                super().show(file)


class StandardOutput(Console):
    """Standard output. Control characters are escaped. Rich's markup and emoji are turned off."""

    def __init__(self) -> None:
        # Set a width that is enough for any table. By default, rich would cut tables to the
        # terminal's width, or to 80 columns in a pipe.
        super().__init__(soft_wrap=True, width=10_000, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a string to a rich Text. Escape control characters. Rich would drop some of them."""
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render rich objects such as tables. Escape control characters."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print as rich does. If standard output cannot be written, end the command."""
        with _output_failures():
            super().print(*args, **kwargs)

    def write(self, text: str) -> None:
        """Write and flush a text as it is. Callers must escape untrusted parts of the text."""
        with _output_failures():
            self.file.write(text)
            self.file.flush()

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError. :func:`failure_of` then chooses the exit code.

        Rich calls this method if standard output is a pipe without a reader. By default, rich would
        exit with code 1. In this package, code 1 (FOUND) means that a check found a problem.
        """
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@contextlib.contextmanager
def _output_failures() -> Iterator[None]:
    """If standard output cannot be written, raise a :class:`StageFailure` instead of the OSError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise failure_of(error) from error
        line = (
            f"the command can't write to standard output: {error.strerror}. Its results are saved."
        )
        raise StageFailure(line) from error


# Output of all commands. Errors and progress are written to standard error instead.
out = StandardOutput()


class StageGroup(click.Group):
    """A click group whose commands end with one line on stderr and a well-defined exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command and exit. The arguments are those of ``click.Command.main``."""
        try:
            result = super().main(*args, **(extra | {"standalone_mode": False}))
            # Flush standard output here, so that an error of the flush is reported. If Python's own
            # flush at exit failed, the user would see only the exit code 120.
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
        """Parse the options before the command's name. ``--help`` and ``--version`` exit here."""
        with _output_failures():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command and turn any error into a :class:`StageFailure`."""
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, StageFailure):
            raise
        except BaseException as error:
            # Catch every exception. For example, a library may raise SystemExit, which could end
            # the command as if it had succeeded.
            end_command()
            failure = failure_of(error, ctx.invoked_subcommand or "")
            if ctx.params.get("debug") or failure.exit_code == FAULT:
                tell("".join(traceback.format_exception(error)))
            raise failure from error


def failure_of(error: BaseException, command: str = "") -> StageFailure:
    """Convert an error to the :class:`StageFailure` with which the command ends."""
    if (code := interruption_code(error)) is not None:
        hint = _CONTINUE.get(
            command, "Finished work is kept; run the same command again to continue."
        )
        line = _one_line(error) if isinstance(error, Interrupted) else f"interrupted. {hint}"
        # The command may run in several processes. The signal stopped all of them, but only the
        # first process prints a line.
        return StageFailure(line if is_first_process() else "", code)
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "moa-data"
        return StageFailure(f"{error.format_message()} (`{path} --help` lists the options)")
    if isinstance(error, click.ClickException):
        return StageFailure(error.format_message())
    # Standard output is a pipe whose reader has exited. For example, `head` exits after ten lines.
    # Exit with the code of a process that was killed by SIGPIPE.
    if isinstance(error, BrokenPipeError):
        return StageFailure("", 128 + signal.SIGPIPE)
    if (message := user_message(error, command)) is not None:
        return StageFailure(
            message, error.exit_code if isinstance(error, MoaDataError) else UNUSABLE
        )
    return StageFailure(
        f"{type(error).__name__}: {_one_line(error)}. This is a bug in moa-data {__version__}, not "
        "a problem of your input. Please report it with the lines above and the command. "
        "Everything that was saved before is kept.",
        FAULT,
    )


def user_message(error: BaseException, command: str = "") -> str | None:
    """If the user can act on an error, return a line of text about it. For a bug, return None."""
    text = _one_line(error)
    if isinstance(error, MoaDataError):
        return text
    if (
        isinstance(error, ModuleNotFoundError)
        and (error.name or "moa_data").split(".")[0] != "moa_data"
    ):
        extra = "gguf" if error.name in ("gguf", "accelerate") else _EXTRAS.get(command, "extract")
        return (
            f"this command needs {error.name}, which is not installed. Install it with "
            f"pip install 'moa-data[{extra}]'."
        )
    if isinstance(error, MemoryError) or any(sign in text for sign in _NO_MEMORY):
        # If torch runs out of memory, the tensors are too large. So name the flag that limits the
        # size of tensors. Python's MemoryError is about other data. No flag limits the size of such
        # data.
        flag = None if isinstance(error, MemoryError) else _FEWER_TENSORS.get(command)
        advice = f"Free some memory, or lower {flag}" if flag else "Free some memory"
        return f"memory ran out ({text.split('. ')[0] or type(error).__name__}). {advice}."
    if (trouble := machine_trouble(error)) is not None:
        return str(trouble)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return (
            f"{error.filename} cannot be read or written ({error.strerror}). Check the path and the "
            "free space, or choose another path."
        )
    return text if isinstance(error, OSError) else None


def _one_line(error: BaseException) -> str:
    return as_options(" ".join(str(error).split()))


def as_options(text: str) -> str:
    """Replace the names of settings in a text by the options of the running command.

    The library is also used from Python, so its messages and help texts contain the Python names of
    settings, in backticks. On the command line, users need options instead::

        `max_length`        ->  --max-length
        `max_length=512`    ->  --max-length 512
        `resume=true`       ->  --resume
        `resume=false`      ->  --no-resume
        `store`             ->  STORE, if the command takes the store by position

    Everything else in backticks stays as it is, such as files, commands, and settings that are not
    options of the command.
    """
    context = click.get_current_context(silent=True)
    if context is None:
        return text
    for parameter in context.meta.get(RUNNING, context.command).params:
        name = f"`{parameter.name}"
        # For a setting that is given by position, write its name from the usage line, such as
        # STORE. An option is not in the usage line, so write its flag.
        spelling = [*parameter.get_usage_pieces(context), *parameter.opts][0]
        for opposite in parameter.secondary_opts:
            text = text.replace(f"{name}=false`", opposite)
        text = re.sub(f"{name}(=true)?`", spelling, text)
        text = re.sub(f"{name}=([^`]*)`", rf"{spelling} \1", text)
    return text


def tell(text: str) -> None:
    """Print a line on standard error. If standard error cannot be written, ignore the error."""
    with contextlib.suppress(OSError):
        click.echo(printable(text), err=True)


_LOG_FORMAT = (
    "{desc}: {n_fmt} of {total_fmt}{unit} ({percentage:.0f}%), {elapsed}, {remaining} left"
)


class ProgressLine(contextlib.AbstractContextManager[Progress]):
    """Shows progress on standard error: a bar on a terminal, otherwise a line every ten seconds.

    Each phase of the work has a bar of its own. If the count of a phase decreases or its total
    changes, the phase has started again, and gets a new bar. If standard error cannot be written,
    work continues without a display.
    """

    def __init__(self) -> None:
        self._phase = SILENT
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return Progress(self._show)

    def _show(self, phase: Progress, n_done: int, total: int, note: str) -> None:
        text = printable(", ".join(filter(None, (phase.phase, note))))
        with contextlib.suppress(OSError):
            bar = self._bar
            if bar is None or bar.total != total or bar.n > n_done or phase != self._phase:
                self.close()
                self._phase = phase
                bar = self._bar = self._start(n_done, total, text)
            bar.set_description_str(text, refresh=False)
            bar.update(n_done - bar.n)

    def _start(self, n_done: int, total: int, text: str) -> Any:
        unit = self._phase.unit
        is_scaled = unit == "B"  # Show counts of bytes with the prefixes k, M and G.
        if sys.stderr.isatty():
            options: dict[str, Any] = {"file": sys.stderr, "mininterval": 0.2, "unit": unit}
        # In a log file, a redrawn bar would be one endless line. Write separate lines instead.
        else:
            options = {
                "file": _Log(),
                "mininterval": LOG_LINE_EVERY_S,
                "maxinterval": LOG_LINE_EVERY_S,
                "bar_format": _LOG_FORMAT,
                "unit": unit if is_scaled else f" {unit}s",
            }
        return tqdm(
            total=total, initial=n_done, desc=text, unit_scale=is_scaled, dynamic_ncols=True,
            **options,
        )  # fmt: skip

    def close(self) -> None:
        """End the bar. The last state of the bar stays visible."""
        bar = self._bar
        self._bar = None
        if bar is not None:
            with contextlib.suppress(OSError):
                bar.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def run_stage(run: Callable[..., Report], *arguments: Any, **options: Any) -> Report:
    """Run a stage (the function that does the work of a command), and return its report.

    A progress line is shown while the stage runs. The report is printed.
    """
    with ProgressLine() as progress:
        report = run(*arguments, progress=progress, **options)
    show(report)
    return report


def show(report: Any) -> None:
    """Print a report of the library, which is a text or has a method that describes it."""
    out.print(as_options(report if isinstance(report, str) else report.describe()))


class _Log:
    """A stream that writes each state of a progress bar to standard error as a separate line."""

    last = ""

    def write(self, text: str) -> None:
        line = text.strip()
        # Skip a line that repeats the previous line. When a bar is closed, tqdm draws it once more.
        if line and line != self.last:
            sys.stderr.write(line + "\n")
            self.last = line

    def flush(self) -> None:
        sys.stderr.flush()


def quiet_libraries() -> None:
    """Set environment variables that silence libraries and let waiting threads sleep.

    Variables that the user has set are not changed.
    """
    quiet = {
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        # Silence gRPC. It would print a line for every attempt to connect while the network is
        # down.
        "GRPC_VERBOSITY": "NONE",
        # Let waiting OpenMP threads sleep. By default, waiting threads keep their cores busy. If
        # there are more threads than free cores, a forward of the target then takes ten times as
        # long.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    # Hide the Hub's progress bars in a log file. On a terminal, they are useful for large files.
    if not sys.stderr.isatty():
        quiet["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    for name, value in quiet.items():
        os.environ.setdefault(name, value)


_PACKAGES = (
    "moa-data", "torch", "transformers", "tokenizers", "datasets", "lightning", "zarr",
    "numcodecs", "pyarrow", "numpy",
)  # fmt: skip


def collect_provenance() -> dict[str, Any]:
    """Return a description of this run: command, time, versions and machine.

    The description differs from run to run, so do not write it to files that must be reproducible.
    """
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
    """Return the commit of the git checkout at ``folder``, and whether tracked files are modified.

    Both are None if ``folder`` is not the root of a checkout.
    """
    # Do not let git search parent folders. This package may be installed in a folder inside the
    # checkout of another project. Git would then return the commit of that project.
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
    # The first line of git's output is "# branch.oid COMMIT". More lines that start with # follow,
    # then one line per modified file.
    header, *changes = done.stdout.splitlines()
    return header.split()[-1], not all(line.startswith("#") for line in changes)
