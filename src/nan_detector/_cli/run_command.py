"""Run a script that nobody changed, with the watch on.

SCRIPT gets the arguments that follow it, and runs as if Python had started it. When a NaN or Inf is born, the report
on standard error says where and why, and the step that would have poisoned the weights is not taken. The exit status
is the script's own, and 3 when an event stopped it.

For example:

  nan-detector run train.py --epochs 3

  nan-detector run --watch layers --log runs/1 -m my_package.train
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from nan_detector._cli import Action, CommandError, one_of
from nan_detector._config import Policy, Watch, policy_named
from nan_detector._errors import OptionError

#: Options end at SCRIPT.
INTERSPERSED = False


def command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script to run; with -m, a module's name.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments.")] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")] = False,
    watch: Annotated[
        str,
        typer.Option("--watch", metavar="LEVEL", help="step; layers: each module's output too; ops: each operation."),
    ] = Watch.STEP.value,
    on_nan: Annotated[
        str,
        typer.Option("--on-nan", metavar="POLICY", help="What then happens: stop, raise, warn, skip, or rollback."),
    ] = Policy.STOP.value,
    capsule: Annotated[
        bool, typer.Option("--capsule", help="Also keep what replays the bad step elsewhere: tensors are written.")
    ] = False,
    log: Annotated[
        str | None,
        typer.Option(
            "--log", metavar="DIR", help="Folder of the event log; without it, a new one in nan-detector-runs."
        ),
    ] = None,
) -> Action:
    """Read the options of ``nan-detector run``."""
    one_of("--watch", watch, [w.value for w in Watch])
    try:
        policy_named(on_nan, "--on-nan")
    except OptionError as error:
        raise CommandError(str(error)) from None
    if not module and not os.path.exists(script):
        raise CommandError(f"SCRIPT={script!r} is not there: give the path of a Python script, or -m and a module.")

    def act() -> int:
        from nan_detector._watch_script import Watching, run_script

        options = Watching(watch=watch, on_nan=on_nan, log_dir=log, capsule=capsule)
        return run_script(script, list(args or ()), module=module, options=options)

    return act
