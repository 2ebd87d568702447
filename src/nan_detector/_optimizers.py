"""The optimizers of one run: which of them step a watched model, and what is known of each."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from nan_detector._run import Run
from nan_detector._session import steps_running
from nan_detector._stepped import Stepped


class Optimizers:
    """What an engine knows of optimizers.

    Attributes:
        stepped: By identity, in the order in which they were met; never those of other models alone.
        known: Those that have stepped a watched model, or were kept from it by a GradScaler.
        expected: One will step our parameters sooner or later; None where that is not known.

    Args:
        run: The watched run.
        name_anew: Called when an optimizer steps a parameter that the watched models did not have before.
    """

    def __init__(self, run: Run, name_anew: Callable[[], None]) -> None:
        self.run = run
        self.stepped: dict[int, Stepped] = {}
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()
        self.expected: bool | None = None
        self._name_anew = name_anew

    def owns(self, optimizer: Any) -> bool:
        """True when `optimizer` steps a parameter of a watched model."""
        return self.of(optimizer).owned

    def of(self, optimizer: Any) -> Stepped:
        """What `optimizer` steps."""
        found = self.stepped.get(id(optimizer))
        if found is None or not found.fits(optimizer):
            if any(id(p) not in self.run.ours for group in optimizer.param_groups for p in group["params"]):
                self._name_anew()  # a head that was replaced, a layer that was added
            found = Stepped(optimizer, self.run.ours)
            if not any(map(is_lazy, found.parameters)):  # else it is asked again once they are there
                self.stepped[id(optimizer)] = found
        return found

    def alive(self) -> list[Any]:
        """Those that have stepped a watched model and are still there, in the order of their first step."""
        known = (s.optimizer() for s in self.stepped.values() if s.counted)
        return [o for o in known if o is not None]

    @property
    def any_stepped(self) -> bool:
        """True once an optimizer has stepped a watched model."""
        return any(s.counted for s in self.stepped.values())

    def will_step(self) -> bool:
        """Whether there is an optimizer for our parameters: a second backward without a step may be accumulation."""
        if self.expected is None:
            # Asked once, and only of a loop whose optimizer has neither stepped nor dropped its gradients so far.
            made = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
            self.expected = any(self.owns(o) for o in made if getattr(o, "param_groups", None))
        return self.expected


def is_within_step(optimizer: Any) -> bool:
    """True in a hook of an optimizer's step that runs within another step of the same optimizer (None: of any).

    The marks of a session do not tell: a step that raised leaves its own behind until the next forward.
    """
    return sum(optimizer is None or running is optimizer for running in steps_running()) > 1
