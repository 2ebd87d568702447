"""Watch a small training go NaN by itself, and be explained.

Three trainings on real images, in about half a minute: a birth that is named down to its line, a gradient explosion
that is seen before anything overflows, and what watching costs. Needs scikit-learn and matplotlib: pip install
"nan-detector[demo]".

For example:

  nan-detector demo --out my-demo --seed 3
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from nan_detector._cli import Action, CommandError, whole_number

_NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}


def command(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for the event log and the pictures; made if missing.")
    ] = Path("nan-detector-demo"),
    seed: Annotated[
        str, typer.Option("--seed", metavar="N", help="Seed of the weights and of the data's order.")
    ] = "0",
) -> Action:
    """Read the options of ``nan-detector demo``."""
    number = whole_number("--seed", seed)

    def act() -> int:
        _check()
        _make(out)
        from nan_detector._demo.story import tell

        try:
            tell(out, seed=number)
        except KeyboardInterrupt:
            raise CommandError("interrupted.", status=130) from None
        return 0

    return act


def _check() -> None:
    if missing := [name for module, name in _NEEDED.items() if find_spec(module) is None]:
        raise CommandError(f'the demo needs {" and ".join(missing)}: pip install "nan-detector[demo]"')
    if os.environ.get("NAN_DETECTOR") == "off":
        raise CommandError("NAN_DETECTOR=off turns the detector off, and the demo would show nothing: unset it.")


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"--out={str(out)!r} cannot be made a folder ({error.strerror}): name another one."
        ) from None
    if not os.access(out, os.W_OK):
        raise CommandError(f"--out={str(out)!r} cannot be written to: name another folder.")
