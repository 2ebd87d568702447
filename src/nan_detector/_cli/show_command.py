"""Show what a log holds: what ran, each event's report, and the warnings summed up.

LOG is the folder that --log or log_dir named, with a file for each rank, or one such file. Torch is not needed: a log
from a cluster opens on a laptop. Lines that cannot be read are named and left out. The exit status is 0 when the log
was read, with events in it or without, and 2 when it cannot be.

For example:

  nan-detector show runs/1

  nan-detector show --json runs/1/events-rank0.jsonl
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from nan_detector._cli import Action
from nan_detector._cli.logs import read


def command(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="Folder of an event log, or one of its files.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Show every event's whole report, however many.")] = False,
) -> Action:
    """Read the options of ``nan-detector show``."""

    def act() -> int:
        digest = read(log)
        try:
            if as_json:
                from nan_detector._render.log_json import digest_dict

                sys.stdout.write(json.dumps(digest_dict(digest), indent=2, allow_nan=False) + "\n")
                sys.stdout.flush()
            else:
                from nan_detector._render.terminal import print_overview

                print_overview(digest, every_event=every)
        except BrokenPipeError:
            # `nan-detector show LOG | head` has seen enough. Python would complain when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

    return act
