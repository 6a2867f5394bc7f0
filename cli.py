"""The command line: a group that loads the module of a command when it is asked for."""

import difflib
import importlib

import click

from . import __version__
from .commands.console import StageGroup, quiet_libraries

GROUPS = {
    "First steps": {
        "demo": "train", "extract": "extract", "inspect": "store", "train": "train", "generate": "decode",
        "eval": "decode",
    },
    "Serve": {"serve": "serve", "chat": "chat"},
    "Prepare chats": {"regenerate": "extract"},
    "Maintain stores": {
        "plan": "extract", "add": "extract", "verify": "store", "audit": "extract", "repair": "extract",
        "recode": "extract", "compare": "extract",
    },
    "Evaluate and export": {
        "export": "exchange", "import": "exchange", "export-drafter": "exchange", "conform": "decode",
        "push": "exchange", "pull": "exchange",
    },
}  # fmt: skip
"""Heading of the help page -> command -> its module in commands/."""
COMMANDS = {name: module for group in GROUPS.values() for name, module in group.items()}

_WHOLE_SENTENCE = 200  # characters: longer than the first sentence of any command
_EPILOG = """\b
A whole job:
  moa-data plan     --model M --dataset D --out STORE     what it will cost
  moa-data extract  --model M --dataset D --out STORE     run the target once
  moa-data inspect  STORE                                 look at what is there
  moa-data train    STORE --out RUN                       train without the target
  moa-data eval     --model M --drafter RUN --prompts P   acceptance length, speed
  moa-data generate --model M --drafter RUN --prompt "Why is the sky blue?"
  moa-data serve    --model M --drafter RUN               OpenAI's API, with drafts
  moa-data chat     --server HOST:PORT --drafter RUN      drafts here, verified there

\b
Exit codes:
  0    done
  1    done, and verify, repair or audit found something wrong
  2    the input or the options can't be used; one line on stderr says why
  3    done, and verify or repair found nothing wrong, but parts are still to be written
  70   a fault of moa-data itself; the lines on stderr are what to report
  130  interrupted with Ctrl-C, 143 by SIGTERM, 129 by SIGHUP; the line says how to continue
"""


class LazyGroup(StageGroup):
    """A group that imports the module of a command when it is needed, and lists its commands under headings."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by heading, those that are needed first at the top."""
        for heading, names in GROUPS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(heading):
                formatter.write_dl(
                    [
                        (name, one.get_short_help_str(_WHOLE_SENTENCE))
                        for name, one in commands
                        if one
                    ]
                )

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the help page."""
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; an unknown one is an error that names the nearest."""
        near = difflib.get_close_matches(args[0], COMMANDS, 1)
        if args[0] not in COMMANDS and near:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near[0]!r}?", ctx)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f".commands.{COMMANDS[cmd_name]}", __package__)
        members = (member for member in vars(module).values() if isinstance(member, click.Command))
        return next(member for member in members if member.name == cmd_name)


@click.group(
    cls=LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, package_name="moa-data")
@click.option("--debug", is_flag=True, help="Show the traceback of an error instead of one line.")
def main(debug: bool) -> None:
    """Turn a language model's activations into a dataset, and train drafters for speculative decoding from it.

    Run the target once over a chat dataset (extract), then train as many drafters as you like from the store (train),
    and decode with them (generate, eval). `moa-data demo` shows all of it on a small machine.
    """
    quiet_libraries()
