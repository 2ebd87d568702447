"""What is compared: bare, ours at each level, and what a user would choose otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from nan_detector._bench.baselines import EveryOutput, one_read, plain_hooks
from nan_detector._bench.results import BARE, BARE_AGAIN, READ
from nan_detector._bench.timing import Contestant, Step
from nan_detector._bench.workloads import Task
from nan_detector._detector import NaNDetector

STEP, LAYERS, OPS = ('nan-detector, watch="step"', 'nan-detector, watch="layers"', 'nan-detector, watch="ops"')
ANOMALY = "torch.autograd.set_detect_anomaly"
DEBUG_MODE = "torch DebugMode"
HOOKS = "hooks: isnan/isinf per layer, norm per gradient"
DISPATCH = "dispatch mode: isfinite per operation"
UNDERFLOW = "transformers DebugUnderflowOverflow"
TORCHLENS = "torchlens, a logged forward per step"
SHERLORCH = "sherlorch.trace"

_WARM = 4
#: Where a block has many steps: what is done once after attaching (the plan of what is looked at in turn, made at the
#: 16th gate) would otherwise count in each block, as if a run attached itself every hundred steps.
_MANY_STEPS, _WARM_LONG = 32, 20


@dataclass(frozen=True)
class Variant:
    """One way of watching, or none.

    Attributes:
        name: Its name.
        watch: Switches it on around steps of a task, and gives the step to take.
        slow: It takes several times as long: it sits out most rounds.
        needs: The package that it needs beside torch; None for nothing.
        level: Of ours: the watch level.
    """

    name: str
    watch: Callable[[Task], Any]
    slow: bool = False
    needs: str | None = None
    level: str | None = None

    @property
    def missing(self) -> str | None:
        """Why it cannot be measured here; None where it can."""
        if self.needs is not None and find_spec(self.needs) is None:
            return "not in this torch" if self.needs.startswith("torch.") else f"{self.needs} is not installed"
        return None

    def contestant(self, task: Task, steps: int) -> Contestant:
        """It, for the clock, with the weights that all variants of a workload share."""
        # Ours looks closely at a model's first calls; of the others the second step is like all.
        warm = 2 if self.level is None else _WARM if steps < _MANY_STEPS else _WARM_LONG
        settle: Callable[[], object] = torch.cuda.synchronize if task.x.is_cuda else _settled
        if self.slow:
            return Contestant(self.name, lambda: self.watch(task), max(1, steps // 4), warm, every=3, settle=settle)
        return Contestant(self.name, lambda: self.watch(task), steps, warm, settle=settle)


def _settled() -> None:
    """Where an operation has ended when it returns, there is nothing to wait for."""


@contextmanager
def _bare(task: Task) -> Iterator[Step]:
    yield task.step


def ours(level: str) -> Callable[[Task], Any]:
    """The detector at a watch level, as a user has it but for the printing."""

    @contextmanager
    def watch(task: Task) -> Iterator[Step]:
        with NaNDetector(task.model, watch=level, verbose=False) as det:
            yield task.step
        if det.event is not None:
            raise RuntimeError(f"a step that is measured was not finite, and is worth nothing: {det.event.symptom}")

    return watch


@contextmanager
def _anomaly(task: Task) -> Iterator[Step]:
    with torch.autograd.set_detect_anomaly(True):
        yield task.step


@contextmanager
def _debug_mode(task: Task) -> Iterator[Step]:
    mode = import_module("torch.utils._debug_mode").DebugMode

    def step() -> float:
        with mode():  # it keeps every call, so that a run under one mode would not end
            return task.step()

    yield step


@contextmanager
def _one_read(task: Task) -> Iterator[Step]:
    with one_read(task.optimizer):
        yield task.step


@contextmanager
def _plain_hooks(task: Task) -> Iterator[Step]:
    with plain_hooks(task.model):
        yield task.step


@contextmanager
def _every_output(task: Task) -> Iterator[Step]:
    with EveryOutput():  # type: ignore[no-untyped-call]  # its base's constructor is untyped
        yield task.step


@contextmanager
def _underflow(task: Task) -> Iterator[Step]:
    before = {m: dict(m._forward_hooks) for m in task.model.modules()}
    import_module("transformers.debug_utils").DebugUnderflowOverflow(task.model)
    try:
        yield task.step
    finally:
        for module, hooks in before.items():  # it gives no handles back
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)


@contextmanager
def _torchlens(task: Task) -> Iterator[Step]:
    library = import_module("torchlens")
    log = getattr(library, "log_forward_pass", None) or library.trace

    def step() -> float:
        log(task.model, task.x)
        return task.step()

    yield step


@contextmanager
def _sherlorch(task: Task) -> Iterator[Step]:
    trace = import_module("sherlorch").trace

    def step() -> float:
        with trace():  # it keeps a graph of all calls
            return task.step()

    yield step


VARIANTS: tuple[Variant, ...] = (
    Variant(BARE, _bare),
    Variant(READ, _one_read),
    Variant(STEP, ours("step"), level="step"),
    Variant(LAYERS, ours("layers"), level="layers"),
    Variant(BARE_AGAIN, _bare),
    Variant(OPS, ours("ops"), slow=True, level="ops"),
    Variant(ANOMALY, _anomaly, slow=True),
    Variant(DEBUG_MODE, _debug_mode, slow=True, needs="torch.utils._debug_mode"),
    Variant(HOOKS, _plain_hooks, slow=True),
    Variant(DISPATCH, _every_output, slow=True),
    Variant(UNDERFLOW, _underflow, slow=True, needs="transformers"),
    Variant(TORCHLENS, _torchlens, slow=True, needs="torchlens"),
    Variant(SHERLORCH, _sherlorch, slow=True, needs="sherlorch"),
)


def variant(name: str) -> Variant:
    """The variant of that name."""
    return next(v for v in VARIANTS if v.name == name)
