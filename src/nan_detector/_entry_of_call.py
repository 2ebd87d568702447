"""A call of the user's as an entry for the tape, made before the call runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nan_detector._calls import CallKind
from nan_detector._entries import Entry, Outside, autocast_state
from nan_detector._quiet import hidden
from nan_detector._rng import rng_state
from nan_detector._source import Mark
from nan_detector._written_weights import parameter_behind, written_arguments

if TYPE_CHECKING:
    from nan_detector._session import Session

_any_autocast = torch._C._is_any_autocast_enabled
_is_grad_enabled = torch.is_grad_enabled

#: Names of a tensor's attributes whose reading uses no weight.
ATTRIBUTES = ("data", "grad")

#: Where a call stands: the user's line, and the module in whose method it is.
Place = tuple[Mark | None, object | None]


def entry_of(
    session: Session,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    place: Place,
    kind: CallKind,
) -> Entry:
    """The entry of `func(*args, **kwargs)`, which is about to run; what it writes is kept first."""
    grad_enabled = _is_grad_enabled()
    with hidden():
        tape = session.tape
        if kind is CallKind.IN_PLACE:
            _save_target(session, args, kwargs)
        begun = tape.begun
        entry = Entry(func, tape.encode(args), tape.encode(kwargs) if kwargs else kwargs, place[0], grad_enabled)
        if _any_autocast():
            entry.autocast = autocast_state()
        if begun is False and tape.begun and getattr(getattr(func, "__self__", None), "__name__", "") in ATTRIBUTES:
            tape.begun = False  # reading an attribute uses no weight
        if kind is CallKind.IN_PLACE or kind is CallKind.STATE or "out" in kwargs:
            entry.writes = True
        if place[1] is not None:
            entry.owner = place[1]
        if kind is CallKind.BACKWARD:
            entry.kind = "backward"
        elif kind is CallKind.RANDOM:
            entry.rng = rng_state()
            gens = [v for v in kwargs.values() if isinstance(v, torch.Generator)]
            entry.generators = tuple((g, g.get_state()) for g in gens)
        return entry


def _save_target(session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a write in place: keep a copy of what stood there, when it came from outside the step."""
    for t in written_arguments(args, kwargs):
        base = t._base if t._is_view() and t._base is not None else t
        for candidate in (t, base, parameter_behind(session.tape, t)):
            if candidate is not None and session.tape.made_by(candidate) is None:
                outside = session.tape.token(candidate)
                if isinstance(outside, Outside):
                    session.tape.keep_earlier(outside)
