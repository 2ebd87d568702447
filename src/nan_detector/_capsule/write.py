"""Capsules of a running training: written as a whole or not at all, and never a reason for it to stop."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from nan_detector._capsule import layout
from nan_detector._capsule.evidence import Evidence
from nan_detector._capsule.repro import repro_of
from nan_detector._capsule.state import environment, paths_of, written_state
from nan_detector._capsule.tape import TapeWriter, needed_entries
from nan_detector._capsule.tensors import Writer
from nan_detector._hit import relevant_entries
from nan_detector._quiet import quiet
from nan_detector._record import encode
from nan_detector._records import NaNEvent
from nan_detector._run import Run
from nan_detector._run_folder import new_folder
from nan_detector._state import logger, strict
from nan_detector._tape import Tape

#: Rows of the flight recorder that are kept, as many as an event is explained from.
ROWS = 200


class Capsules:
    """The capsules of one watched run.

    Args:
        run: The run.
        log_dir: Folder of the log, in which theirs is made with the first; None makes a new one in
            ``nan-detector-runs``.
        max_bytes: Bytes of tensors in one of them.
    """

    def __init__(self, run: Run, log_dir: str | None, max_bytes: int) -> None:
        self.run = run
        where = new_folder() if log_dir is None else os.path.abspath(log_dir)  # the program may change its folder
        self.folder = Path(where) / layout.FOLDER
        self.max_bytes = max_bytes
        self.evidence = Evidence()
        self._lacking = ""  # why the last capsule could not be written
        self._told: set[str] = set()  # a run with many events has one cause for all that it cannot write
        self._indices: dict[int, int] = {}  # of an entry's number on the tape: its place in the capsule

    def begin(self, event: NaNEvent, tape: Tape) -> NaNEvent:
        """Write the step down, before it is replayed: should the process die of that, the evidence is there.

        Returns:
            `event` with its capsule, or with a note why it has none.
        """
        self._lacking = ""
        path = self._contained(self._begin, event, tape)
        notes = () if path is not None else (f"no capsule: {self._lacking}",)
        return replace(event, capsule=path, notes=(*event.notes, *notes))

    def finish(self, event: NaNEvent) -> None:
        """Add what the replay found to the event's capsule: the final event, and the guilty operation alone."""
        if event.capsule is not None:
            self._contained(self._finish, event)
        self.evidence.start()

    def update(self, event: NaNEvent) -> None:
        """The event's last word."""
        if event.capsule is not None:
            self._contained(_write_json, Path(event.capsule) / layout.EVENT, event.to_dict())

    def drop(self, path: str | None) -> None:
        """Remove a capsule from which nothing could be learned."""
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)

    # -- the work ------------------------------------------------------------------------------------------------------

    def _begin(self, event: NaNEvent, tape: Tape) -> str | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._is_full():
            return None
        name = f"step-{max(event.step, 0):06d}-{event.event_id[:8]}"
        final, draft = self.folder / name, self.folder / f".{name}.{os.getpid()}"
        try:
            draft.mkdir(mode=0o700)
            self._fill(draft, event, tape)
            os.replace(draft, final)
            _sync_folder(self.folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return str(final)

    def _is_full(self) -> bool:
        there = sum(1 for p in self.folder.iterdir() if p.name.startswith("step-"))
        if there < layout.MAX_CAPSULES:
            return False
        self._lacking = f"{self.folder} holds {there} already"
        self._warn(
            f"{self.folder} holds {there} capsules, and no more are written there: remove old ones, or give another "
            "log_dir to the next run."
        )
        return True

    def _warn(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning("%s", message)

    def _fill(self, draft: Path, event: NaNEvent, tape: Tape) -> None:
        _write_json(draft / layout.EVENT, event.to_dict())
        run = self.run
        with quiet():
            writer = Writer(self.max_bytes)
            paths = paths_of(run.models)
            entries = needed_entries(relevant_entries(tape))
            self._indices = {e.number: i for i, e in enumerate(entries)}
            tape_writer = TapeWriter(entries, run.names, paths, writer)
            step = tape_writer.write()
            state_writer = Writer(writer.left)
            state = written_state(run.names, tape, state_writer)
            steps, columns = run.recorder.columns(ROWS)
        data = {
            "format": layout.FORMAT,
            "written": time.time(),
            "environment": environment(),
            "missing": tape_writer.missing,
            "step": step,
            "state": state,
            "history": {name: encode(values) for name, values in columns.items()},
            "history_steps": steps,
        }
        _write_json(draft / layout.STEP, data)
        _save(draft / layout.STEP_TENSORS, writer)
        if state["kept"]:
            _save(draft / layout.STATE_TENSORS, state_writer)

    def _finish(self, event: NaNEvent) -> None:
        folder = Path(event.capsule or "")
        gradients = Writer(self.max_bytes)
        with quiet():
            arrived = [
                [self._indices[number], position, spec]
                for (number, position), g in self.evidence.outputs.items()
                if number in self._indices and (spec := gradients.add(g)) is not None
            ]
            repro = repro_of(event, self.evidence.guilty)
        if arrived:
            _save(folder / layout.GRADIENT_TENSORS, gradients)
            _write_json(folder / layout.GRADIENTS, arrived)
        if repro is not None:
            _save_tensors(folder / layout.REPRO_TENSORS, repro.tensors)
            _write_text(folder / layout.REPRO, repro.text)
        _write_json(folder / layout.EVENT, event.to_dict())

    def _contained(self, work: Any, *args: Any) -> Any:
        try:
            return work(*args)
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self._lacking = f"{self.folder} cannot be written ({reason})"
            self._warn(
                f"A capsule cannot be written to {self.folder} ({reason}). Training goes on without it; make room "
                "there, or give another log_dir to the next run."
            )
        except Exception as error:
            if strict():
                raise
            self._lacking = f"it could not be written ({type(error).__name__}: {error})"
            if self._lacking not in self._told:
                self._told.add(self._lacking)
                logger.exception("a capsule could not be written; training goes on without it")
        return None


# -- files -------------------------------------------------------------------------------------------------------------


def _write_json(path: Path, data: Any) -> None:
    _write_text(path, json.dumps(data, allow_nan=False, separators=(",", ":")) + "\n")


def _write_text(path: Path, text: str) -> None:
    """Write a file as a whole: under another name first, which then takes the place of what was there."""
    draft = path.with_name(f".{path.name}.new")
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def _save(path: Path, writer: Writer) -> None:
    _save_tensors(path, writer.tensors)


def _save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    try:
        save_file({k: t.contiguous() for k, t in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """So that the capsule's name outlives the machine; not every file system can be asked."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)
