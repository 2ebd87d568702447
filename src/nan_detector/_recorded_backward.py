"""A backward of the user's on the tape: what it starts from, before and after a loss scale."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nan_detector._entries import Entry, tensors_in
from nan_detector._quiet import hidden
from nan_detector._tape import Tensor

if TYPE_CHECKING:
    from nan_detector._session import Session


def begin_backward(session: Session, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """On the tape before it runs: an optimizer that steps inside (in a hook) is judged with it."""
    with hidden():
        roots = [t for t in _roots_of_backward(args, kwargs) if t.numel() == 1]
        entry.losses = tuple([t.detach() for t in roots])
        _before_scaling(session, entry, roots)
    session.tape.add(entry, None)


def _before_scaling(session: Session, entry: Entry, roots: list[Tensor]) -> None:
    """Of a backward from what a GradScaler scaled: the losses themselves, which alone are the training's."""
    makers = [session.tape.made_by(t) for t in roots]
    if "scale" not in [m.kind for m in makers if m is not None]:
        return
    before = []
    for t, maker in zip(roots, makers, strict=True):
        if maker is not None and maker.kind == "scale":
            position = next(i for i, ref in enumerate(maker.made) if ref() is t)
            before.append(maker.unscaled[position])
            session.gradient_scale = maker.args[1].tensor
        else:
            before.append(t.detach())
    entry.unscaled = tuple(before)


def _roots_of_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    if args and isinstance(args[0], Tensor):
        return (args[0],)
    if args:
        return tensors_in(args[0])
    return tensors_in(kwargs.get("self", kwargs.get("tensors")))
