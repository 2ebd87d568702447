"""Other ends for a step from a capsule: a loss that the user gives, or the gradients that arrived at the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nan_detector._capsule.rebuilt import NOBODY, Rebuilt
from nan_detector._entries import Entry, Made, Outside
from nan_detector._errors import CapsuleError

Tensor = torch.Tensor

Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def with_loss(rebuilt: Rebuilt, loss: Loss) -> None:
    """Replace what followed each call of the model under gradients by ``loss(output, batch)`` and its backward."""
    tape = rebuilt.tape
    roots = [e for e in tape.entries if e.kind == "root" and e.grad_enabled]
    if not roots:
        raise CapsuleError("--loss has nothing to be applied to: no call of the model is in the capsule.")
    last = roots[0].number
    entries = [e for e in tape.entries if e.number < last]
    for i, root in enumerate(roots):
        end = roots[i + 1].number if i + 1 < len(roots) else len(tape.entries)
        after = [e for e in tape.entries if root.number < e.number < end]
        entries += [root, *_loss_and_backward(root, loss, rebuilt, i == len(roots) - 1 or _has_backward(after))]
    for number, entry in enumerate(entries):
        entry.number = number
    tape.entries[:] = entries


def _has_backward(entries: list[Entry]) -> bool:
    return any(e.kind == "backward" for e in entries)


def _loss_and_backward(root: Entry, loss: Loss, rebuilt: Rebuilt, wanted: bool) -> list[Entry]:
    if not wanted:
        return []
    given: list[Any] = []
    module = root.func

    def call_model(*args: Any, **kwargs: Any) -> Any:
        out = module(*args, **kwargs)
        given[:] = [out]
        return out

    def call_loss(output: Any, batch: dict[str, Tensor]) -> Any:
        return loss(given[0] if given else output, batch)

    root.func = call_model
    tokens = {t.name: t for t in rebuilt.tape.outside.values() if t.name}
    root.made = root.made or [NOBODY]
    made = Entry(call_loss, (Made(root, 0), tokens), {}, None, True, root.autocast)
    made.made = [NOBODY]
    backward = Entry(torch.Tensor.backward, (Made(made, 0),), {}, None, True, kind="backward")
    return [made, backward]


def with_gradients(rebuilt: Rebuilt, gradients: Mapping[tuple[int, int], Tensor]) -> bool:
    """Replace what followed the model by the gradients that arrived at its outputs. False where there are none."""
    tape = rebuilt.tape
    entries: list[Entry] = []
    for entry in tape.entries:
        if entry.kind != "root":
            continue
        entries.append(entry)
        own = {position: g for (number, position), g in gradients.items() if number == entry.number}
        if own:
            outputs = tuple(Made(entry, position) for position in own)
            tokens = tuple(Outside(g) for g in own.values())
            tape.outside.update({t.ident: t for t in tokens})
            entries.append(Entry(torch.autograd.backward, (outputs, tokens), {}, None, True, kind="backward"))
    if not any(e.kind == "backward" for e in entries):
        return False
    wanted = {id(e) for e in tape.needed([e for e in entries if e.kind == "backward"])}
    kept = [e for e in tape.entries if id(e) in wanted and e.kind != "backward"]
    for e in entries:
        if e.kind == "backward":
            root = e.args[0][0].entry
            kept.insert(kept.index(root) + 1, e)
    for number, entry in enumerate(kept):
        entry.number = number
    tape.entries[:] = kept
    return True
