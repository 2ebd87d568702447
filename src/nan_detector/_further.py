"""Modules that are not trained but kept: copies with averaged weights, target networks (`also_watch=`)."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace

import torch

from nan_detector._answers import StateProblem
from nan_detector._naming import is_wrapper, join, plain_path
from nan_detector._quiet import quiet
from nan_detector._records import NaNEvent
from nan_detector._run import Run
from nan_detector._scrub import Scrub
from nan_detector._scrub_slots import StateSlots
from nan_detector._state_check import problems_of_modules

Tensor = torch.Tensor


class Further:
    """Looks at further modules in turn, a slice at each gate, and at all of them at the end.

    Args:
        run: The watched run.
        modules: The modules by key.
    """

    def __init__(self, run: Run, modules: dict[str, torch.nn.Module]) -> None:
        self.run = run
        self.modules = modules
        self._scrub = Scrub(StateSlots(modules))
        self._finite_at: dict[tuple[str, ...], int] = {}  # step at which each slice was last seen finite
        self._told: set[str] = set()
        with quiet():  # a mask of -inf, or what was bad before the run, is no news
            self._told.update(p.tensor_name for p in problems_of_modules(modules, {}))

    def next_slice(self) -> Tensor:
        """Numbers on the device, to be read with the gate's and given to `judge`; may be empty."""
        return self._scrub.next_slice()

    def judge(self, sums: list[float]) -> None:
        """What the gate read of the last slice."""
        if all(map(math.isfinite, sums)):
            if sums:
                self._finite_at[self._scrub.names_of_last_slice()] = self.run.step
            return
        since = self._finite_at.get(self._scrub.names_of_last_slice())
        self._tell(self._scrub.bad_in_last_slice(), since)

    def finish(self) -> None:
        """The watch ends: look at all that the slices have not come to."""
        with quiet():
            bad = [p.tensor_name for p in problems_of_modules(self.modules, {})]
        self._tell(bad, None, at_the_end=True)

    def _tell(self, names: Iterable[str], since: int | None, at_the_end: bool = False) -> None:
        fresh = [n for n in names if n not in self._told]
        if not fresh:
            return
        self._told.update(fresh)
        step = self.run.step
        known = [e for e in self.run.book.events if e.phase == "state" and e.tensor_name in fresh]
        if known:  # "ops" has seen it happen, and told
            return
        name = fresh[0]
        problem = self._problem(name)
        when = "when the watch ended" if at_the_end else f"by the check of step {step}"
        seen = "when the watch began" if since is None else f"at step {since}"
        last = "" if at_the_end else f"; it was finite {seen}"
        more = f" and {len(fresh) - 1} more" if len(fresh) > 1 else ""
        event = NaNEvent(
            event_id=uuid.uuid4().hex,
            status="provisional",
            step=step,
            phase="state",
            severity="silent",
            layer_name=name.rpartition(".")[0] or None,
            module_type=self._module_type(name),
            tensor_name=name,
            output=problem.value if problem is not None else None,
            symptom=f"{name}{more} of a module in also_watch {'is' if not more else 'are'} not finite",
            notes=(f"found {when}{last}; watch='ops' names the operation that makes it",),
            rank=0,
            time=time.time(),
        )
        self.run.book.provisional(event)
        self.run.book.final(replace(event, status="final"))

    def _problem(self, name: str) -> StateProblem | None:
        with quiet():
            return next((p for p in problems_of_modules(self.modules, {}) if p.tensor_name == name), None)

    def _module_type(self, name: str) -> str | None:
        owner = name.rpartition(".")[0]
        for key, model in self.modules.items():
            for path, module in model.named_modules():
                if join(key, plain_path(path, is_wrapper(model))) == owner:
                    return type(module).__name__
        return None
