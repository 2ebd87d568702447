"""The entry point: reads the command line, does what it says, and turns errors into exit statuses.

Only typer is imported before it is known what is wanted: ``nan-detector --help`` loads neither torch nor rich.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command

from nan_detector._cli import Action, CommandError
from nan_detector._version import __version__

PROGRAM = "nan-detector"
#: Names of the subcommands, in the order of the help.
COMMANDS = ("demo", "run", "show", "report", "replay", "bench")

_HELP = """Watches PyTorch training cheaply, and says where and why a NaN or Inf was born.

For example:

  nan-detector run train.py --epochs 3"""

# typer exports only this class of the command line's errors; their common base is what has to be caught.
_COMMAND_LINE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``nan-detector`` command.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        The exit status: 0, 2 for a command line that cannot be followed, or what the subcommand gave.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(arguments)
    except CommandError as error:
        return _fail(str(error), error.status)


def _main(arguments: list[str]) -> int:
    try:
        # Not `build()()`: typer would put its own excepthook around the user's script.
        read = get_command(build()).main(args=arguments or ["--help"], prog_name=PROGRAM, standalone_mode=False)
    except _COMMAND_LINE_ERROR as error:
        # Some of these errors do not know which subcommand they are about.
        command = " ".join([PROGRAM, *(a for a in arguments[:1] if a in COMMANDS)])
        return _fail(error.format_message(), 2, command)
    if not callable(read):  # help or the version was asked for, and has been shown
        return 0 if arguments else 2
    action: Action = read
    return action()


def build() -> typer.Typer:
    """The command line, as typer reads it."""
    app = typer.Typer(
        help=_HELP,
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in COMMANDS:
        module = import_module(f"nan_detector._cli.{name}_command")
        settings = {"allow_interspersed_args": getattr(module, "INTERSPERSED", True)}
        summary = str(module.__doc__).partition("\n\n")[0]
        app.command(name, help=module.__doc__, short_help=" ".join(summary.split()), context_settings=settings)(
            module.command
        )
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _fail(message: str, status: int, command: str = "") -> int:
    """Say what is wrong in one line on standard error; `command` is the one whose help has the way out."""
    line = " ".join(message.split())
    line += "" if line.endswith((".", "!", "?")) else "."
    hint = f" See: {command} --help" if command else ""
    sys.stderr.write(f"{PROGRAM}: {line}{hint}\n")
    return status
