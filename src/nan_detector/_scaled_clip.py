"""Clipping that comes before unscaling, found in what was recorded between the backward pass and the unscaling.

A GradScaler's gradients are some 65536 times too large until `unscale_`. A threshold that is meant for the real ones
then cuts nearly everything, and nothing in loss or gradients looks wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nan_detector._before import number
from nan_detector._calls import public_name
from nan_detector._entries import Entry, Made, tokens_in
from nan_detector._records import Location
from nan_detector._run import Run
from nan_detector._source import location_of
from nan_detector._tape import Tape

#: Views of a gradient that are still that gradient.
_ALIASES = ("data", "detach", "view", "reshape", "flatten")
_FACTORS = ("mul", "div", "multiply", "divide", "foreach_mul", "foreach_div")
_BOUNDS = ("clamp", "clip", "clamp_min", "clamp_max", "foreach_clamp_min", "foreach_clamp_max", "foreach_minimum")
_SIZES = ("norm", "linalg_vector_norm", "linalg_norm", "vector_norm", "foreach_norm", "dot", "sum", "max", "amax")
#: A line that says so knows of the scale: its threshold is meant for scaled gradients.
_KNOWS = re.compile(r"get_scale|loss_scale|grad_scale|\bscaler?\b|_scale\b|\bscale_")


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip of gradients.

    Attributes:
        location: Where it stands.
        threshold: The number it clips to, where that is known.
        factor: The number that it multiplies with, where that is one.
    """

    location: Location
    threshold: float | None = None
    factor: float | None = None

    def is_meant(self, scale: float) -> bool:
        """True where the clip may know that the gradients are multiplied by `scale`."""
        if scale == 1.0 or not math.isfinite(scale) or _KNOWS.search(self.location.source_line):
            return True
        if self.factor is not None and math.isclose(self.factor * scale, 1.0, rel_tol=1e-3):
            return True  # no clip: the scale divided out by hand
        return self.threshold is not None and self.threshold >= scale > 1.0

    def message(self, step: int, scale: float) -> str:
        """What is wrong, and the way out."""
        to = f" to {number(self.threshold)}" if self.threshold is not None else ""
        meant = f", as if it were {number(self.threshold / scale)}" if self.threshold is not None else ""
        return (
            f"step {step}: {self.location.file}:{self.location.line} clips gradients{to} that still carry the loss "
            f"scale of {number(scale)}{meant}: call scaler.unscale_(optimizer) before it"
        )


def clip_since_backward(tape: Tape) -> Clip | None:
    """The first clip of gradients after the last backward pass on the tape, by the library or by hand."""
    since: list[Entry] = []
    for entry in reversed(tape.entries):
        if entry.kind == "backward":
            break
        since.append(entry)
    gradients: set[Entry] = set()  # that gave a gradient, or an alias of one
    derived: set[Entry] = set()  # that gave something worked out from gradients
    measured = False
    for entry in reversed(since):
        name = public_name(entry.func)
        sources = [t.entry if isinstance(t, Made) else None for t in tokens_in((entry.args, entry.kwargs))]
        if getattr(entry.func, "__name__", "") == "__get__" and name == "grad":
            gradients.add(entry)
            continue
        if name in _ALIASES and sources and sources[0] in gradients and not entry.writes:
            gradients.add(entry)
            continue
        if not any(s in gradients or s in derived for s in sources):
            continue
        change = _change(entry, gradients)
        if change is not None and entry.mark is not None:
            factors = [f for f in tokens_in(change.args[1:]) if isinstance(f, Made)]
            bounded = public_name(change.func) in _BOUNDS
            if bounded or any(f.entry in derived for f in factors) or (measured and not factors):
                return _clip(entry, change, bounded, derived)
        if not entry.writes:
            derived.add(entry)
            measured = measured or name in _SIZES
    return None


def _change(entry: Entry, gradients: set[Entry]) -> Entry | None:
    """The call that scales or bounds gradients in place: `entry`, or the one whose result it stores in `.grad`."""
    if not entry.writes or not entry.args:
        return None
    if getattr(entry.func, "__name__", "") == "__set__":
        value = entry.args[-1]
        inner = value.entry if isinstance(value, Made) else None
        return inner if inner is not None and _scales(inner, gradients) else None
    return entry if _scales(entry, gradients) else None


def _scales(entry: Entry, gradients: set[Entry]) -> bool:
    if not entry.args or public_name(entry.func) not in (*_FACTORS, *_BOUNDS):
        return False
    targets = list(tokens_in(entry.args[:1]))
    return bool(targets) and all(isinstance(t, Made) and t.entry in gradients for t in targets)


def _clip(entry: Entry, change: Entry, bounded: bool, derived: set[Entry]) -> Clip | None:
    location = location_of(entry.mark) if entry.mark is not None else None
    if location is None:
        return None
    own = _number((*change.args[1:], *change.kwargs.values()))
    if bounded:
        return Clip(location, abs(own) if own is not None else None)
    return Clip(location, _numerator(change, derived), own)


def _numerator(change: Entry, derived: set[Entry]) -> float | None:
    """The number that is divided by the norm, on the way back from the factor."""
    todo = [t.entry for t in tokens_in(change.args[1:]) if isinstance(t, Made)]
    for _ in range(16):
        if not todo:
            return None
        entry = todo.pop()
        if public_name(entry.func) in ("div", "divide"):
            return _number(entry.args)
        todo.extend(t.entry for t in tokens_in(entry.args) if isinstance(t, Made) and t.entry in derived)
    return None


def _number(values: tuple[Any, ...]) -> float | None:
    return next(_numbers(values), None)


def _numbers(values: tuple[Any, ...]) -> Iterator[float]:
    for v in values:
        if isinstance(v, (int, float)) and not isinstance(v, bool):
            yield float(v)


class ScaledClips:
    """Tells of each line that clips gradients which still carry the loss scale, once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._told: set[tuple[str, int]] = set()

    def look(self, tape: Tape, scaler: Any) -> None:
        """Gradients are about to be divided by the loss scale: was there a clip before it?"""
        clip = clip_since_backward(tape)
        if clip is None or (clip.location.file, clip.location.line) in self._told:
            return
        scale = float(scaler.get_scale())
        if not clip.is_meant(scale):
            self._told.add((clip.location.file, clip.location.line))
            message = clip.message(self.run.step, scale)
            self.run.warn("clip_before_unscale", message, value=scale, location=clip.location)
