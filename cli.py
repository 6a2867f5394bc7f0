"""The command line: a click group that imports the module of a command on demand."""

import difflib
import importlib

import click

from . import __version__
from .commands.console import RUNNING, StageGroup, quiet_libraries

GROUPS = {
    "First steps": {
        "demo": "train", "extract": "extract", "inspect": "store", "train": "train",
        "generate": "decode", "eval": "decode",
    },
    "Serve": {"serve": "serve", "chat": "chat"},
    "Prepare chats": {"regenerate": "extract"},
    "Maintain stores": {
        "plan": "extract", "add": "extract", "verify": "store", "audit": "extract",
        "repair": "extract", "recode": "extract", "compare": "extract",
    },
    "Evaluate and export": {
        "export": "exchange", "import": "exchange", "export-drafter": "exchange",
        "conform": "decode", "push": "exchange", "pull": "exchange",
    },
}  # fmt: skip
"""Maps each heading of the help page to a dict. This dict maps the name of each command under the
heading to the name of the command's file in commands/."""
COMMANDS = {name: module for group in GROUPS.values() for name, module in group.items()}

# Maximum number of characters of a command's description on the help page. The description is the
# first sentence of the command's help. Every description is shorter, so no description is cut.
_WHOLE_SENTENCE = 200
_EPILOG = """\b
A whole job:
  moa-data plan     --model M --dataset D --out STORE     time, memory and disk
  moa-data extract  --model M --dataset D --out STORE     run the target once
  moa-data inspect  STORE                                 show its contents
  moa-data train    STORE --out RUN                       train without the target
  moa-data eval     --model M --drafter RUN --prompts P   acceptance length, speed
  moa-data generate --model M --drafter RUN --prompt "Why is the sky blue?"
  moa-data serve    --model M --drafter RUN               OpenAI's API, with drafts
  moa-data chat     --server HOST:PORT --drafter RUN      drafts also without network

\b
Exit codes:
  0    success
  1    the command ran and found a problem (verify, repair, audit, conform)
  2    the input or the options can't be used; one line on stderr says why
  3    verify or repair found no damage, but parts of the store are missing
  70   a bug in moa-data; please report the lines on stderr
  130  interrupted by Ctrl-C (143 by SIGTERM, 129 by SIGHUP); stderr says how to continue
"""


class LazyGroup(StageGroup):
    """A group that imports a command's module on demand, and lists commands under headings."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under headings, in the order in which users need them."""
        for heading, names in GROUPS.items():
            rows: list[tuple[str, str]] = []
            for name in names:
                command = self.get_command(ctx, name)
                if command:
                    rows.append((name, command.get_short_help_str(_WHOLE_SENTENCE)))
            with formatter.section(heading):
                formatter.write_dl(rows)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the help page."""
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command. For an unknown command, the error names the closest match."""
        near = difflib.get_close_matches(args[0], COMMANDS, 1)
        if args[0] not in COMMANDS and near:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near[0]!r}?", ctx)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command with this name. If it does not exist, return None."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f".commands.{COMMANDS[cmd_name]}", __package__)
        members = (member for member in vars(module).values() if isinstance(member, click.Command))
        command = ctx.meta[RUNNING] = next(member for member in members if member.name == cmd_name)
        return command


@click.group(
    cls=LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, package_name="moa-data")
@click.option(
    "--debug",
    is_flag=True,
    help="Show the full Python traceback of an error, instead of a message of one line.",
)
def main(debug: bool) -> None:
    """Turn a language model's activations into a dataset, and train drafters from it.

    Run the language model (the target) once over a chat dataset with `extract`, train any number of
    drafters from its activations with `train`, and use them for speculative decoding with
    `generate`, `eval` and `serve`. `moa-data demo` shows all of this on a small machine.
    """
    quiet_libraries()
