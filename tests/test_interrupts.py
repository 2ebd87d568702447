"""An interrupt may come at any call of ours: the loop that goes on is watched as before, and its weights protected."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nan_detector
from nan_detector import NaNDetector
from nan_detector._session import session

PACKAGE = os.path.dirname(nan_detector.__file__)
#: Where it comes within `torch.no_grad` itself, or our likeness of it, Python's own cannot put gradients back either.
SPARED = ("_quiet.py",)


class Interrupt:
    """Ctrl-C at the `number`-th point where the interpreter would let it through while code of ours runs."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if self.left and event in ("call", "c_return") and name.startswith(PACKAGE) and not name.endswith(SPARED):
            self.left -= 1
            if not self.left:
                self.where = f"{event} {getattr(arg, '__name__', '')} {os.path.basename(name)}:{frame.f_lineno}"
                raise KeyboardInterrupt


class Loop:
    """A training loop that swallows interrupts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.recorded: list[str] = []

    def step(self, bad: bool = False, interrupt: Interrupt | None = None) -> None:
        sys.setprofile(interrupt)
        try:
            self.optimizer.zero_grad()
            y: Tensor = self.model(torch.randn(3, 4))
            loss = torch.log(y - 9).mean() if bad else y.square().mean()
            (loss * 2.0).backward()
            self.recorded = [e.kind for e in session().tape.entries]
            self.optimizer.step()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)


@pytest.mark.parametrize("watch", ["step", "layers"])
def test_an_interrupt_at_any_call_of_ours_leaves_the_watch_awake(watch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # One in a generator that is dropped is told and swallowed by the interpreter.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    loop, number = Loop(), 0
    with NaNDetector(loop.model, watch=watch, verbose=False) as det:
        for _ in range(4):
            loop.step()
        ordinary = loop.recorded
        while True:
            number += 1
            interrupt = Interrupt(number)
            loop.step(interrupt=interrupt)
            loop.step()
            now = session()
            assert loop.recorded[-len(ordinary) :] == ordinary, interrupt.where
            assert (now.mode is not None, now.paused, now.busy, now.evaluating) == (True, 0, 0, 0), interrupt.where
            assert not now.roots and not now.stepping and now.step_record is None, interrupt.where
            assert torch._C._len_torch_function_stack() == 1 and torch.is_grad_enabled(), interrupt.where
            assert det.event is None, interrupt.where
            if not interrupt.where:
                break
        loop.step(bad=True)
        assert det.event is not None and (det.event.op, det.event.weights) == ("log", "clean")
    assert number > 150
