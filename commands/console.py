"""Shared by all commands: errors as one line with an exit code, progress on stderr, text that streams."""

import contextlib
import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from typing import IO, Any

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from tqdm import tqdm

from .. import __version__
from ..errors import Interrupted, MoaDataError
from ..machine import is_first_process
from ..text import format_bytes, format_hours, printable
from .signals import end_command, interruption_code


class StandardOutput(Console):
    """Standard output; whatever keeps it from being written ends the command with what happened.

    It shows text as it is: control characters escaped, neither markup nor names of emoji read.
    """

    def __init__(self) -> None:
        # Wide enough for any table: one that were fitted to the terminal, or to 80 columns in a pipe, would be cut.
        super().__init__(soft_wrap=True, width=10_000, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escapes before rich drops some of the control characters."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escapes also what came as a renderable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print as ``Console.print`` does."""
        try:
            super().print(*args, **kwargs)
        except OSError as error:
            raise _output_failure(error) from error

    def write(self, text: str) -> None:
        """Write text at once as it is, control sequences included; whatever came from elsewhere is escaped before."""
        try:
            self.file.write(text)
            self.file.flush()
        except OSError as error:
            raise _output_failure(error) from error

    def on_broken_pipe(self) -> None:
        """Leave the exit code to :class:`ReaderGone`; rich would end with 1, which means something else here."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


out = StandardOutput()
"""Standard output; errors and progress go to standard error."""

# What libraries say where memory or threads are short, whatever the class of the error.
_NO_MEMORY = ("can't allocate memory", "annot allocate memory", "failed to map segment", "bad_alloc", "out of memory")
_NO_THREADS = ("can't start new thread", "ThreadPoolBuildError", "Resource temporarily unavailable")
_FEWER_TENSORS = {
    "extract": "--batch-tokens", "train": "--micro-batch-size", "eval": "--batch-size", "regenerate": "--batch-size",
    "serve": "--kv-tokens",
}  # fmt: skip
"""Command -> the flag that bounds the size of its tensors."""
_WRONG_PATH = (
    errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EISDIR, errno.EROFS, errno.ENOSPC, errno.EDQUOT,
)  # fmt: skip
_GO_ON = {
    "extract": "Committed parts are kept; run the same command again to go on.",
    "recode": "Committed parts are kept; run the same command again to go on.",
    "add": "Parts that have the new fields keep them; run the same command again to go on.",
    "regenerate": "Answers so far are kept; run the same command again to go on.",
    "push": "Commits so far are kept; run the same command again to go on.",
    "pull": "What was downloaded is kept; run the same command again to go on.",
    "export": "Complete files are kept; run the same command again to go on.",
    "import": "Committed parts are kept; run the same command again to go on.",
    "train": "Run the same command again, with --resume if it had saved a checkpoint.",
    "repair": "What was repaired is kept; run the same command again to go on.",
    "demo": "Run the same command again; finished phases are kept.",
    "chat": "With --session FILE, --resume FILE goes on with the answer.",
    "eval": "No report was written; run the same command again.",
    **dict.fromkeys(
        ("plan", "inspect", "verify", "audit", "generate", "export-drafter"),
        "Nothing was written; run the same command again.",
    ),
}

_EXTRAS = {
    **dict.fromkeys(("train", "export-drafter"), "train"),
    **dict.fromkeys(("serve", "chat"), "serve"),
    **dict.fromkeys(("demo", "eval"), "all"),
}
"""The extra of docs/install.md that a command needs; `extract` for all others."""


LOG_LINE_EVERY_S = 10.0
"""Seconds between two lines of progress in a log."""


class StageFailure(click.ClickException):
    """Ends a command with one line on stderr: the input can't be used."""

    exit_code = 2

    def __init__(self, line: str, exit_code: int | None = None) -> None:
        super().__init__(line)
        if exit_code is not None:
            self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance

    def format_message(self) -> str:
        """The line, which may quote names and rows of others."""
        return printable(self.message)

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line, unless standard error can't be written: the exit code still says what happened."""
        with contextlib.suppress(OSError):
            super().show(file)


class Findings(StageFailure):
    """The command did its work and found something wrong."""

    exit_code = 1


class Incomplete(StageFailure):
    """The command did its work and found nothing wrong, but planned parts are missing."""

    exit_code = 3


class Stopped(StageFailure):
    """A signal stopped the command; the exit code is 128 + its number."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line once: of several processes all were stopped."""
        if is_first_process():
            super().show(file)


class ReaderGone(StageFailure):
    """Whoever read standard output closed it, as ``head`` does: ends like a program that SIGPIPE stops, silently."""

    exit_code = 128 + signal.SIGPIPE

    def show(self, file: IO[Any] | None = None) -> None:
        """Print nothing."""


class Fault(StageFailure):
    """The program is wrong, not its input; the traceback is printed before the line."""

    exit_code = 70

    def show(self, file: IO[Any] | None = None) -> None:
        """Print traceback and line."""
        tell("".join(traceback.format_exception(self.__cause__)))
        super().show(file)


class StageGroup(click.Group):
    """A click group whose commands end in one line on stderr and an exit code that has one meaning."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command and exit; takes what ``click.Command.main`` takes, but always exits."""
        try:
            result = super().main(*args, **(extra | {"standalone_mode": False}))
            _flush_output()
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
        try:
            return super().make_context(*args, **kwargs)
        except OSError as error:
            raise _output_failure(error) from error

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
            if ctx.params.get("debug") and not isinstance(failure, Fault):
                traceback.print_exception(error)
            raise failure from error


def failure_of(error: BaseException, command: str = "") -> StageFailure:
    """Return what a command ends with for an error that it raised."""
    if (code := interruption_code(error)) is not None:
        hint = _GO_ON.get(command, "Run the same command again.")
        return Stopped(_one_line(error) if isinstance(error, Interrupted) else f"interrupted. {hint}", code)
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "moa-data"
        return StageFailure(f"{error.format_message()} (`{path} --help` lists the options)")
    if isinstance(error, click.ClickException):
        return StageFailure(error.format_message())
    if isinstance(error, BrokenPipeError):
        return ReaderGone("")
    if (line := user_message(error, command)) is not None:
        return StageFailure(line, error.exit_code if isinstance(error, MoaDataError) else 2)
    fault = Fault(
        f"{type(error).__name__}: {_one_line(error)}. This is a fault of moa-data {__version__}, not of your input: "
        "please report it with the lines above and the command. What was committed or saved before is kept."
    )
    fault.__cause__ = error
    return fault


def user_message(error: BaseException, command: str = "") -> str | None:
    """The line for an error that the user can mend, or None for one that is a fault of the code."""
    text = _one_line(error)
    if isinstance(error, MoaDataError):
        return text
    if isinstance(error, ModuleNotFoundError) and (error.name or "moa_data").split(".")[0] != "moa_data":
        extra = _EXTRAS.get(command, "extract")
        return f"{error.name} is not installed, and this command needs it: pip install 'moa-data[{extra}]'."
    if isinstance(error, MemoryError) or any(sign in text for sign in _NO_MEMORY):
        # Python's own error comes from data; torch's from tensors, whose sizes a flag changes.
        flag = None if isinstance(error, MemoryError) else _FEWER_TENSORS.get(command)
        return (
            f"out of memory ({text.split('. ')[0] or type(error).__name__}). Free some, or raise the limit (ulimit -v)"
            f"{f', or lower {flag}' if flag else ''}."
        )
    if any(sign in text for sign in _NO_THREADS):
        return (
            f"no further thread can be started ({text.split('. ')[0]}). Raise the limit of processes (ulimit -u, or "
            "the container's) or of memory (ulimit -v), or set OMP_NUM_THREADS=1."
        )
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{text}. Raise the limit of open files (ulimit -n)."
    if isinstance(error, OSError) and error.filename and error.errno in _WRONG_PATH:
        return f"{error.filename}: {error.strerror}. Check the path and the room there, or choose another."
    return text if isinstance(error, OSError) else None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def tell(text: str) -> None:
    """Print a line for people on standard error; work goes on where it can't be written."""
    with contextlib.suppress(OSError):
        click.echo(printable(text), err=True)


def _output_failure(error: OSError) -> StageFailure:
    if isinstance(error, BrokenPipeError):
        return ReaderGone("")
    return StageFailure(f"standard output can't be written: {error.strerror}. What the command did is kept.")


def _flush_output() -> None:
    """Write out what is buffered; Python's own flush at the end could only change the exit code to 120."""
    try:
        sys.stdout.flush()
    except OSError as error:
        raise _output_failure(error) from error


PHASE_UNITS = {
    "tokenise": ("chat", False),
    "hash": ("B", True),
    "load": ("B", True),
    "measure": ("sequence", False),
    "learn": ("step", False),
    **dict.fromkeys(("extract", "add", "recode"), ("token", False)),
}
"""Phases that follow each other in one command: first word of the message -> unit, and whether counts are shortened."""


class ProgressLine:
    """Shows on standard error how far a task is: a bar on a terminal, elsewhere a line every ten seconds.

    A new phase ends the bar before it: another total, a smaller count, or a message that begins with another word of
    ``PHASE_UNITS``. Work goes on without either where standard error can't be written any more.
    """

    def __init__(self, unit: str, scaled: bool = False, transient: bool = False) -> None:
        """Take what is counted.

        Args:
            unit: of the counts.
            scaled: shorten counts to k, M and G.
            transient: a finished phase leaves nothing: its bar is wiped, and a short one is no line of a log.
        """
        self.own, self.transient = (unit, scaled), transient
        self.unit, self.scaled = self.own
        self.phase_name = ""
        self.phase: _Bar | _LogLines | None = None

    def __call__(self, done: int, total: int, message: str) -> None:
        """Shows ``done`` of ``total`` units and a message."""
        with contextlib.suppress(OSError):
            first_word = message.split(" ", 1)[0].rstrip(":,")
            name = first_word if first_word in PHASE_UNITS else ""
            is_same = self.phase is not None and self.phase.total == total and self.phase.done <= done
            if self.phase is None or not is_same or name != self.phase_name:
                self.close()
                self.phase_name = name
                self.unit, self.scaled = PHASE_UNITS.get(name, self.own)
                kind = _Bar if sys.stderr.isatty() else _LogLines
                self.phase = kind(self, done, total)
            self.phase.show(done, printable(message))

    def close(self) -> None:
        """Leaves the last state on its line."""
        phase, self.phase = self.phase, None
        if phase is not None:
            with contextlib.suppress(OSError):
                phase.close()

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Bar:
    """One phase on a terminal."""

    def __init__(self, line: ProgressLine, done: int, total: int) -> None:
        self.total = total
        self.bar = tqdm(
            total=total, initial=done, unit=line.unit or "it", unit_scale=line.scaled, file=sys.stderr,
            mininterval=0.2, dynamic_ncols=True, leave=not line.transient,
        )  # fmt: skip

    @property
    def done(self) -> int:
        return int(self.bar.n)

    def show(self, done: int, message: str) -> None:
        self.bar.set_description_str(message, refresh=False)
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        self.bar.refresh()
        self.bar.close()


class _LogLines:
    """One phase in a log, where a bar that is drawn over and over would leave one endless line."""

    def __init__(self, line: ProgressLine, done: int, total: int) -> None:
        self.line, self.done, self.total = line, done, total
        self.first, self.started_s = done, time.monotonic()
        self.begins = line.phase_name != ""  # such a phase may say nothing more for minutes
        self.told_s = self.shown_s = self.started_s
        self.message, self.is_shown = "", False

    def show(self, done: int, message: str) -> None:
        self.is_shown &= (done, message) == (self.done, self.message)
        self.done, self.message, self.told_s = done, message, time.monotonic()
        if self.begins and done < self.total:
            click.echo(f"{message} ...", err=True)
        self.begins = False
        if self.told_s >= self.shown_s + LOG_LINE_EVERY_S:
            self._write()

    def close(self) -> None:
        if not self.is_shown and not self.line.transient:
            self._write()

    def _write(self) -> None:
        # Up to the last state that was told: the phase may have been closed much later, by the next one.
        elapsed_s, shown = self.told_s - self.started_s, format_bytes if self.line.scaled else "{:,}".format
        left = ""
        if self.first < self.done < self.total:
            left_s = elapsed_s * (self.total - self.done) / (self.done - self.first)
            left = f", {format_hours(left_s)} left"
        counts = f"{shown(self.done)} of {shown(self.total)} {'' if self.line.scaled else self.line.unit}".rstrip()
        counts += "s" * (self.line.unit != "" and not self.line.scaled and self.total != 1)
        share = self.done / max(self.total, 1)
        click.echo(f"{self.message}: {counts} ({share:.0%}), {format_hours(elapsed_s)}{left}", err=True)
        self.shown_s, self.is_shown = self.told_s, True


def quiet_libraries() -> None:
    """Keeps the libraries' own progress bars and advice off the terminal; the user's settings win."""
    quiet = {
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "GRPC_VERBOSITY": "NONE",  # of a network that is gone it has a line for every attempt
    }
    # On a terminal the bars of a download or of loading many gigabytes are welcome; in a log file they are noise.
    if not sys.stderr.isatty():
        quiet["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
