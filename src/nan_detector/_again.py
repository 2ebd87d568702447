"""A kept step that can be run again and again, with or without a change, and what came of each run."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._call_site import CallSite
from nan_detector._change import Change
from nan_detector._entries import Entry, Made, Outside, tensors_in, tokens_in
from nan_detector._errors import ReplayRefused
from nan_detector._naming import Names
from nan_detector._quiet import quiet
from nan_detector._replay import Step
from nan_detector._replayed import Replayed
from nan_detector._run_step import Call, WholeStep
from nan_detector._state import logger, strict

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run.

    Attributes:
        finite: Whether losses and gradients were finite; None where that could not be told.
        loss: The loss of the last backward, without a loss scale; None where it is not known.
        bad: What was not finite, for a person.
        error: Why nothing can be said.
        drew: Random numbers were drawn.
        seconds: How long it took.
        print: A checksum over the bits of losses and gradients, NaNs taken as one value; () where none was asked for.
    """

    finite: bool | None
    loss: float | None = None
    bad: str = ""
    error: str = ""
    drew: bool = False
    seconds: float = 0.0
    print: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Again:
    """All that is needed to run a step again.

    Attributes:
        entries: The calls of the step.
        outside: The tensors from outside that they use.
        models: The watched models.
        names: Their names.
        call: The call of the step function, where it is replayed whole.
        unscaled: Every loss scale is 1.
        raised: What kind of exception the step raised.
        changed: What was written in place after the step used it, and is not there any more as it was.
        opaque: What functions computed that a replay cannot call.
        overwritten: The buffer that the birth was written into, whose value from before the step is gone.
        site: The call that the birth came of.
    """

    entries: Sequence[Entry]
    outside: Sequence[Outside]
    models: dict[str, torch.nn.Module]
    names: Names
    call: Call | None = None
    unscaled: bool = False
    raised: type[BaseException] | None = None
    changed: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    overwritten: str = ""
    site: CallSite | None = None

    def step(self, deadline: float, change: Change | None = None) -> Step:
        """A replay, ready to run.

        Args:
            deadline: The `time.perf_counter()` at which it gives up.
            change: What it does differently; None for a traced replay of what happened.
        """
        entries, outside = list(self.entries), list(self.outside)
        if self.call is None:
            return Step(entries, outside, self.models, self.names, deadline, self.unscaled, change)
        return WholeStep(self.call, entries, outside, self.models, self.names, deadline, self.unscaled, change)

    def run(self, change: Change, deadline: float, *, checksum: bool = False) -> Outcome:
        """Run the step with `change`, and look at its losses and gradients. Never raises on the training's account."""
        begun = time.perf_counter()
        try:
            step = self.step(deadline, change)
            with muted():
                replayed = step.run()
            with quiet():
                return self._outcome(step, replayed, begun, checksum)
        except ReplayRefused as refusal:
            error = str(refusal)
        except (torch.OutOfMemoryError, MemoryError):
            error = "out of memory"
        except Exception as failure:
            if strict():
                raise
            logger.exception("a trial failed")
            error = f"{type(failure).__name__}: {first_line(failure)}"
        return Outcome(None, error=error, seconds=time.perf_counter() - begun)

    def _outcome(self, step: Step, replayed: Replayed, begun: float, checksum: bool) -> Outcome:
        raised = replayed.raised
        if raised is not None and type(raised) is not self.raised:
            error = f"the step raised {type(raised).__name__}: {first_line(raised)}"
            return Outcome(None, error=error, seconds=time.perf_counter() - begun)
        bad = "" if raised is None else f"the step raised {type(raised).__name__} again"
        bad = bad or next((n for n, t in _judged(replayed) if not _finite.is_finite(t)), "")
        values = [t for _, t in _judged(replayed)]
        losses = _losses(step) if self.call is None else [] if _scales(self) else replayed.losses
        return Outcome(
            finite=not bad,
            loss=_finite.scalar(losses[-1]) if losses else None,
            bad=bad,
            drew=replayed.drew,
            seconds=time.perf_counter() - begun,
            print=tuple(_checksum(t) for t in values) if checksum else (),
        )


class _Muted:
    """Standard output for everybody but one thread: what a step prints, it prints once."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream = stream
        self._thread = thread

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else int(self._stream.write(text) or 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Nothing that this thread prints in here is shown: it was printed when the step was taken."""
    stream = sys.stdout
    muted: Any = _Muted(stream, threading.get_ident())
    sys.stdout = muted
    try:
        yield
    finally:
        if sys.stdout is muted:
            sys.stdout = stream


def _scales(again: Again) -> bool:
    return any(e.kind == "scale" for e in again.entries)


def _judged(replayed: Replayed) -> Iterable[tuple[str, Tensor]]:
    """What a gate would judge, with its names."""
    for t in replayed.losses:
        yield "the loss", t
    for name, t in replayed.gradients.items():
        yield f"the gradient of {name}", t
    if not replayed.losses:
        for t in replayed.outputs:
            yield "the model's output", t


def _losses(step: Step) -> list[Tensor]:
    """What the backward passes started from, before a loss scale."""
    found: list[Tensor] = []
    for entry in step.entries:
        if entry.kind != "backward":
            continue
        for token in tokens_in((entry.args[:1], entry.kwargs)):
            if not isinstance(token, Made):
                continue
            scaled = token.entry.kind == "scale"
            values = (
                list(tensors_in(step.arguments.decode(token.entry.args[0])))
                if scaled and token.entry in step.results
                else step.results.get(token.entry, [])
            )
            if token.position < len(values) and values[token.position].numel() == 1:
                found.append(values[token.position])
    return found


def _checksum(t: Tensor) -> int:
    """Over the bits of `t`; a NaN counts as a NaN, whatever its bits."""
    if t.layout is not torch.strided or t.dtype not in _BITS or not t.numel():
        return hash(_finite.stats(t))
    bits = t.detach().contiguous().view(_BITS[t.dtype]).reshape(-1)
    if not _finite.is_finite(t):
        bits = bits.masked_fill(t.isnan().reshape(-1), -1)
    # In strides as well, so that values which change places are seen; nothing of the tensor's size is made.
    return hash(tuple(int(bits[::stride].sum(dtype=torch.int64)) for stride in (1, 3, 7)))


_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def first_line(error: BaseException) -> str:
    """The first line of its message, not too long for a sentence."""
    return next(iter(str(error).splitlines()), "")[:160]
