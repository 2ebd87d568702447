"""What a bad step did to the weights and what happens next, as lines of a report."""

from __future__ import annotations

from collections.abc import Sequence

from nan_detector._records import NaNEvent
from nan_detector._summary_title import is_rewrite

_REPRODUCED = {"yes": "yes", "no": "no", "not_tried": "not tried"}
#: What a policy did to the step, and what it leaves to happen.
_STEP = {
    "stop": "the step was not taken",
    "raise": "the step was not taken",
    "skip": "the step was skipped",
    "warn": "the step was taken",
    "rollback": "the run was rolled back",
}
_NEXT = {
    "stop": "training stops here",
    "raise": "NonFiniteError is raised",
    "skip": "training goes on",
    "warn": "training goes on",
    "rollback": "training goes on",
}
_GAP = " " * 8
_MOST_BUFFERS = 4
_CLEAR = "the optimizer's state is damaged: clear it (optimizer.state.clear()), or load it from a checkpoint"


def state_lines(event: NaNEvent) -> list[str]:
    """Weights, step and what follows in one line; buffers that are bad, and what to do, in lines of their own."""
    # An event of `detect_nan`, which knows of no steps and no weights.
    of_a_block = event.action == "raise" and not event.weights
    reproduced = _reproduced(event)
    if of_a_block and event.phase in ("data", "forward", "loss", "backward"):
        return [f"NonFiniteError is raised, and what follows (an optimizer step, say) is not run.{_GAP}{reproduced}"]
    if of_a_block or not (event.weights or event.action):
        return [reproduced]
    damaged = event.weights.startswith("damaged")
    said = _damage(event) if damaged else _sound(event)
    more = _buffers(event.bad_buffers)
    if damaged and event.action != "warn":
        more.insert(0, _mend(event))
    elif not damaged and _has_bad_moments(event):
        more.insert(0, _CLEAR)
    return [f"{said}.{_GAP}{reproduced}", *(f"{line}." for line in more)]


def _was_bad_before(event: NaNEvent) -> bool:
    return event.phase == "state" and bool(event.tensor_name)


def _since(event: NaNEvent) -> str:
    return event.weights.rpartition(" ")[2]


def _mend(event: NaNEvent) -> str:
    if _was_bad_before(event):
        return f"mend {event.tensor_name}, or load a checkpoint in which it is finite, before training goes on"
    return f"load a checkpoint from before step {_since(event)} before training goes on"


def _damage(event: NaNEvent) -> str:
    """Of weights that are bad already, refusing a step is beside the point."""
    since = event.weights
    if _was_bad_before(event) and not is_rewrite(event):
        dated = since if _since(event) not in ("0", str(event.step)) else "damaged"  # 0 where since when is not known
        since = f"{dated}: {event.tensor_name} was not finite before step {event.step} began"
    next_ = _NEXT.get(event.action, "")
    if event.action == "warn":
        next_ = f"{_STEP['warn']}, and {next_}" if event.phase not in ("optimizer", "state") else next_
    return f"weights are {since}" + (f"; {next_}" if next_ else "")


def _sound(event: NaNEvent) -> str:
    known = {"clean": "are clean", "restored": "were restored"}
    bad = _not_clean(event)
    weights = f"weights {known.get(event.weights, f'are {event.weights}')}" if event.weights else ""
    if weights and bad:  # a buffer goes into a checkpoint with the weights: what is clean is said of the rest alone
        weights = f"the parameters {weights.removeprefix('weights ')}, {bad}"
    step = _STEP.get(event.action, event.action).rstrip(".")
    done = ", and ".join(p for p in (step, _NEXT.get(event.action, "")) if p)
    return ": ".join(p for p in (weights, done) if p)


def _not_clean(event: NaNEvent) -> str:
    """What is not as sound as the parameters, with its verb; "" where all is."""
    if event.weights == "restored":  # and with them whatever else was kept
        return ""
    bad = ["buffers" if len(event.bad_buffers) > 1 else "a buffer"] if event.bad_buffers else []
    if _has_bad_moments(event):
        bad.append("the optimizer's state")
    elif event.phase == "state" and event.tensor_name and not bad:
        bad.append(event.tensor_name)
    many = len(bad) > 1 or len(event.bad_buffers) > 1
    return f"{' and '.join(bad)} {'are' if many else 'is'} not" if bad else ""


def _has_bad_moments(event: NaNEvent) -> bool:
    name = event.tensor_name or ""
    return event.phase == "optimizer" and event.weights != "restored" and name.startswith("optimizer.state[")


def _buffers(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = len(names) - _MOST_BUFFERS
    shown = ", ".join(names[:_MOST_BUFFERS]) + (f" and {more} more" if more > 0 else "")
    one = len(names) == 1
    return [
        f"{'buffer' if one else 'buffers'} {shown} {'is' if one else 'are'} not finite: restore "
        f"{'it' if one else 'them'} before an evaluation or a checkpoint"
    ]


def _reproduced(event: NaNEvent) -> str:
    said = f"reproduced: {_REPRODUCED.get(event.reproduced, event.reproduced)}"
    again = next((t.detail for t in event.trials if t.name == "again" and t.finite is False), "")
    if event.reproduced != "yes" or not again.startswith("twice"):
        return said
    return f"{said}, {again.replace('twice the same, ', 'twice, ')}"
