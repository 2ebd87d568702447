"""The first lines of a report: what was born, when and where; and what makes two events one story."""

from __future__ import annotations

import math
from collections.abc import Hashable

from nan_detector._records import NaNEvent
from nan_detector._source_text import clean
from nan_detector._summary_source import place

_PHASES = {
    "data": "in the data",
    "forward": "in the forward pass",
    "loss": "in the loss",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer",
    "state": "in the state (bad before the step)",
}
_REWRITE = "in the program's own write into the model"
#: Causes of a tensor whose last writer is known, and not what it wrote.
_FOUND_THERE = ("parameter_non_finite", "buffer_non_finite")
_SEVERITIES = {"silent": ", absorbed in silence", "handled": ", and handled"}


def headline(event: NaNEvent) -> str:
    """One line for a log: what, when, where and, where known, why."""
    place = where(event)
    cause = f" ({clean(event.cause.title)})" if event.cause is not None else ""
    return f"{title(event)}{': ' + place if place else ''}{cause}"


def title(event: NaNEvent) -> str:
    """What was born or found, at which step, in which phase."""
    step = f" at step {event.step}" + (f", micro-step {event.micro_step}" if event.micro_step else "")
    if _is_of_a_block(event):
        count = event.step
        step = f" after {count} backward pass{'es' * (count > 1)}" if count else ""
    rank = f", on rank {event.rank}" if event.rank else ""
    if event.phase == "state" and event.severity == "silent":
        return f"{_kind(event)} {_verb(event)}{step}{rank}, in state that no step uses"
    phase = _REWRITE if is_rewrite(event) else _PHASES.get(event.phase, clean(event.phase))
    comma = "," if step or rank else ""
    return f"{_kind(event)} {_verb(event)}{step}{rank}{comma} {phase}{_SEVERITIES.get(event.severity, '')}"


def is_rewrite(event: NaNEvent) -> bool:
    """True where the program itself wrote bad values into its weights, between two steps, and the line is known."""
    return event.phase == "state" and event.severity == "error" and event.location is not None


def _is_of_a_block(event: NaNEvent) -> bool:
    """True for an event of `detect_nan`, which knows of no steps and no weights."""
    return event.action == "raise" and not event.weights


def where(event: NaNEvent) -> str:
    """Tensor, module, call and line where known: `encoder.norm2 (CustomNorm)  ·  torch.sqrt  ·  models/norm.py:41`."""
    module = event.layer_name or ""
    if module and event.module_type:
        module += f" ({event.module_type})"
    operation = _operation(event)
    parts = [module, operation, event.tensor_name or ""]
    # Where a tensor was bad before any operation ran, its name is the answer; elsewhere the operation is.
    if event.tensor_name and event.phase in ("data", "state"):
        parts = [event.tensor_name, module if event.module_type else "", event.call or ""]
    elif event.phase == "optimizer":
        parts = [event.tensor_name or "", module, operation if operation != event.op or not event.output else ""]
    if event.location is not None:
        parts.append(place(event.location))
    elif event.first_use is not None:
        parts.append(f"first used at {place(event.first_use)}")
    return clean("  ·  ".join(p for p in parts if p))


def story(event: NaNEvent) -> Hashable:
    """What two events have in common of which one report is enough."""
    code = event.cause.code if event.cause is not None else None
    return event.phase, event.op, event.layer_name, event.location, event.first_use, event.tensor_name, code


def _kind(event: NaNEvent) -> str:
    # The inputs only speak where the result is silent: a NaN made of an intended -inf is a NaN.
    for stats in ((event.output,) if event.output is not None else (), event.inputs):
        nan = any(s.nan_count for s in stats)
        inf = any(s.posinf_count or s.neginf_count for s in stats)
        if nan or inf:
            return " and ".join(["NaN"] * nan + ["Inf"] * inf)
    if event.loss is not None and not math.isfinite(event.loss):
        return "NaN" if math.isnan(event.loss) else "Inf"
    return "NaN or Inf"


def _verb(event: NaNEvent) -> str:
    code = event.cause.code if event.cause is not None else None
    worked_out = is_rewrite(event) and code not in _FOUND_THERE
    if (event.phase in ("data", "state") and not worked_out) or event.op == "optimizer_state":
        return "found"
    located = event.op or event.call or event.layer_name or event.tensor_name or event.location
    return "born" if located and event.status == "final" else "seen"


def _operation(event: NaNEvent) -> str:
    name = event.call or event.op or ""
    if not name or event.phase != "backward":
        return name
    if event.derivative is not None:
        return f"derivative of {name}" if event.derivative else name
    # A log of before `derivative` was recorded. In a hand-written backward the operation itself is guilty.
    inside_backward = event.location is not None and event.location.function.rsplit(".", 1)[-1] == "backward"
    # Clipping works on gradients that are there already.
    clips = event.cause is not None and event.cause.code in ("clip_norm_overflow", "clip_spreads_nan")
    return name if inside_backward or clips else f"derivative of {name}"
