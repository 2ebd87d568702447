"""Run a kept step again: the same replay, diagnosis and report, in a new process, on another machine if need be.

CAPSULE is the folder that an event names (capsule=True, or nan-detector run --capsule). The factory makes the model
that was trained; its weights are replaced by those of the step. The recorded calls of the loop give the loss. Where
they are not PyTorch's alone, the gradients that arrived at the model's output take its place, or --loss: a function
of what the model returned and a dict of the step's tensors by name. Nothing in a capsule is run or unpickled.

The exit status is 0 when it is the same event (operation, place and cause), 1 when it is not, and 2 when the step
cannot be run.

For example:

  nan-detector replay runs/1/capsules/step-000094-1f0c22aa --model my_package.train:make_model --ops
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nan_detector._cli import Action, CommandError

if TYPE_CHECKING:
    from nan_detector._capsule.again import Again


def command(
    capsule: Annotated[Path, typer.Argument(metavar="CAPSULE", help="The folder of the capsule.")],
    model: Annotated[
        str,
        typer.Option("--model", metavar="MODULE:FACTORY", help="Makes the model; takes no arguments."),
    ],
    loss: Annotated[
        str | None, typer.Option("--loss", metavar="MODULE:FUNCTION", help="Gives the loss of (output, batch).")
    ] = None,
    ops: Annotated[bool, typer.Option("--ops", help="Also list the operations around the birth.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
) -> Action:
    """Read the options of ``nan-detector replay``."""

    def act() -> int:
        from nan_detector._capsule.layout import why_no_capsule

        if why := why_no_capsule(capsule):  # said at once: torch takes its time to load
            raise CommandError(f"CAPSULE={str(capsule)!r} {why}")
        from nan_detector._capsule.again import again
        from nan_detector._capsule.read import open_capsule
        from nan_detector._errors import CapsuleError

        try:
            opened = open_capsule(capsule)
            factory = named("--model", model)
            loss_of = None if loss is None else named("--loss", loss)
            result = again(opened, lambda: _made(model, factory), loss_of, operations=ops)
        except CapsuleError as error:
            raise CommandError(f"CAPSULE={str(capsule)!r}: {error}") from None
        with contextlib.suppress(BrokenPipeError):
            _show(result, as_json, ops)
        return 0 if result.same else 1

    return act


def named(option: str, value: str) -> Callable[..., Any]:
    """The function that ``package.module:name`` names, looked for in the working directory too.

    Raises:
        CommandError: There is none.
    """
    module, _, name = value.partition(":")
    if not module or not name:
        raise CommandError(f"{option}={value!r} must be a module and a function, such as my_package.train:make_model.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise CommandError(f"{option}={value!r}: {error}; run this where python -c 'import {module}' works.") from None
    except (Exception, SystemExit) as error:  # its status would be taken for the replay's
        raise CommandError(f"{option}={value!r}: importing {module} raised {type(error).__name__}: {error}") from None
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise CommandError(f"{option}={value!r}: {module} has no function {name}.")
    result: Callable[..., Any] = found
    return result


def _made(value: str, factory: Callable[..., Any]) -> Any:
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise CommandError(
            f"--model={value!r} raised {type(error).__name__}: {error}; name a function that needs no arguments."
        ) from None


def _show(result: Again, as_json: bool, ops: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(_as_dict(result), indent=2, allow_nan=False) + "\n")
        sys.stdout.flush()
        return
    from nan_detector._render.operations import print_operations
    from nan_detector._render.terminal import print_report

    if ops and result.operations:
        print_operations(result.operations, sys.stdout)
    print_report(result.event, file=sys.stdout)
    for line in verdict(result):
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def verdict(result: Again) -> list[str]:
    """Whether it is the same event, and what the user should know, line by line."""
    from nan_detector._source_text import clean

    said = ["the same event as in the capsule: operation, place and cause"]
    if not result.same:
        said = ["not the event in the capsule:", *(f"  {d}" for d in result.differences)]
    return ["", *(clean(s) for s in [*said, *(f"note: {n}" for n in result.notes)])]


def _as_dict(result: Again) -> dict[str, Any]:
    return {
        "same": result.same,
        "differences": list(result.differences),
        "notes": list(result.notes),
        "event": result.event.to_dict(),
        "operations": [op.to_dict() for op in result.operations],
    }
