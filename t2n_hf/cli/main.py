"""The `t2n-hf` command: finds the sub-command that was asked for, and turns errors into exit codes.

Exit codes: 0 done, 1 failed (one message on stderr), 2 wrong usage, 130 interrupted.
"""

import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from t2n_hf.cli.imports import import_command
from t2n_hf.errors import T2NError

__all__ = ["COMMANDS", "app", "main"]

FAILED: Final = 1
INTERRUPTED: Final = 130


@dataclass(frozen=True)
class CommandEntry:
    """One line of `t2n-hf --help`; the function behind it is imported when it is called."""

    target: str
    summary: str

    def load(self) -> Any:  # noqa: ANN401 - a click command, whichever click typer brings
        """Import the function and make a command of it."""
        module, _, function = self.target.partition(":")
        alone = typer.Typer(add_completion=False)
        alone.command(help=self.summary)(getattr(import_command(module), function))
        return get_command(alone)


# Import strings, so that a command does not pay for what only another one imports.
COMMANDS: Final = {
    "export": CommandEntry("t2n_hf.cli.export:export", "Export a model to an NNEF archive for tract."),
    "generate": CommandEntry("t2n_hf.cli.generate:generate", "Continue a prompt with a checkpoint or an export."),
    "calibrate": CommandEntry(
        "t2n_hf.cli.calibrate:calibrate", "Measure which channels of a model's weights matter, for quantize."
    ),
    "quantize": CommandEntry("t2n_hf.cli.quantize:quantize", "Quantize a checkpoint, in little memory."),
    "inspect": CommandEntry("t2n_hf.cli.inspect:inspect", "Show what a checkpoint, an export or an archive holds."),
    "push": CommandEntry("t2n_hf.cli.share:push", "Push an export folder to the Hub."),
    "pull": CommandEntry("t2n_hf.cli.share:pull", "Pull an export from the Hub and verify it."),
    "plugins": CommandEntry("t2n_hf.cli.about:plugins", "List the installed weight formats."),
    "env": CommandEntry("t2n_hf.cli.about:env", "Show versions and resources, for a bug report."),
}


class LazyGroup(TyperGroup):
    """A group whose members are the lines of COMMANDS until one of them is called."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401
        """Names in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401
        """Return the line for the help text, without importing the command."""
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else TyperCommand(cmd_name, help=entry.summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        """Import the command that `args` names."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and name in COMMANDS:
            command = COMMANDS[name].load()
        return name, command, rest


app = typer.Typer(
    name="t2n-hf",
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The bridge from Hugging Face to tract: load, run in bounded memory, export, check, push.",
)


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"t2n-hf {version('t2n-hf')}")
        raise typer.Exit


@app.callback()
def _root(
    tell_version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line `arguments` (default: those of the process) and leave with its exit code."""
    if arguments is None:
        # Modules live as long as the process: else each collection walks all their objects, a tenth of an export.
        gc.freeze()
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="t2n-hf")
    except T2NError as error:
        code = _fail(str(error))
    except BrokenPipeError:
        # The reader of our output has seen enough (`t2n-hf inspect ... | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = FAILED
    except OSError as error:
        code = _fail(f"{error.strerror}: {error.filename}" if error.filename else str(error))
    except KeyboardInterrupt:
        _say("interrupted")
        code = INTERRUPTED
    sys.exit(code)


def _fail(message: str) -> int:
    _say(message)
    return FAILED


def _say(message: str) -> None:
    print(f"t2n-hf: {message}", file=sys.stderr)
