"""Measure what watching costs, here and now.

A quick look, in under a minute: full training steps bare, with the detector, and with what one would use otherwise, in
turns. `--full` is the whole benchmark, in less than eight minutes. Loads nothing and sends nothing.

For example:

  nan-detector bench --out my-bench
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from nan_detector._cli import Action, CommandError


def command(
    full: Annotated[bool, typer.Option("--full", help="All workloads, with one thread and two.")] = False,
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", metavar="NAME", help="Only this one, such as W1; can be given several times."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for the report as JSON, Markdown and a picture.")
    ] = None,
) -> Action:
    """Read the options of ``nan-detector bench``."""

    def act() -> int:
        if os.environ.get("NAN_DETECTOR") == "off":
            raise CommandError("NAN_DETECTOR=off turns the detector off, and its cost would be none: unset it.")
        from rich.console import Console

        from nan_detector._bench import measure, output
        from nan_detector._bench.results import Report
        from nan_detector._bench.workloads import named

        plan = measure.FULL if full else measure.QUICK
        if workload:
            try:
                names = tuple(named(name).name for name in workload)
            except ValueError as error:
                raise CommandError(f"--{error}") from None
            plan = replace(plan, workloads=names)
        if out is not None:
            _make(out)
        progress, parts = Console(stderr=True), 0

        def done(report: Report) -> None:
            nonlocal parts
            parts += 1
            if out is not None:
                output.write_text(report, out)

        try:
            with progress.status("measuring") as status:
                report = measure.run(plan, lambda text: status.update(f"measuring {text}"), done)
        except KeyboardInterrupt:
            kept = f" What was measured until then is in {out}." if out is not None and parts else ""
            raise CommandError(f"interrupted.{kept}", status=130) from None
        console = Console()
        output.show(report, console)
        for path in output.write(report, out) if out is not None else ():
            console.print(f"  {path}", soft_wrap=True, markup=False, highlight=False)
        return 0

    return act


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"--out={str(out)!r} cannot be made a folder ({error.strerror}): name another one."
        ) from None
