"""Names, within a replay, for the tensors that come from outside the step: the batch and the labels."""

from __future__ import annotations

from collections.abc import Sequence

from nan_detector._entries import Entry, Made, tokens_in
from nan_detector._lineage import key_of
from nan_detector._naming import Names, is_made, is_move
from nan_detector._trace import BirthKind


def named_inputs(entries: Sequence[Entry], names: Names) -> dict[int, tuple[BirthKind, str]]:
    """What goes into root calls is input, the rest are labels.

    Returns:
        Kind and name by the key of the memory. The tokens in `entries` that had no name are given theirs.
    """
    found: dict[int, tuple[BirthKind, str]] = {}
    feeding = _feeding_roots(entries)
    # `x.to(device)` says less of a tensor than the call that uses it: it has the last word, not the first.
    moves = [e for e in entries if is_move(e)]
    for entry in [*(e for e in entries if not is_move(e)), *moves]:
        for kind, path, token in names.arguments(entry):
            if token.gone:
                continue
            if entry in feeding and not token.opaque:
                kind = BirthKind.INPUT
            key = key_of(token.value)
            if entry in feeding and entry.kind != "root" and key in found:
                continue  # the name that the model itself has for it is better
            if token.name is None:
                token.name = path
            if kind is not BirthKind.INPUT and (token.opaque or is_made(path)):
                # Made in this step, by code that is not seen: no label, and where it went bad is not known.
                found.setdefault(key, (BirthKind.OPAQUE, path))
                continue
            if names.of_memory(key) is None and (key not in found or kind is BirthKind.INPUT):
                found[key] = (kind, path)
    return found


def _feeding_roots(entries: Sequence[Entry]) -> set[Entry]:
    """Calls of the watched models, and the calls from whose results their arguments were made."""
    feeding: set[Entry] = set()
    todo = [e for e in entries if e.kind == "root"]
    while todo:
        entry = todo.pop()
        if entry not in feeding:
            feeding.add(entry)
            todo.extend(
                t.entry for t in tokens_in((entry.args, entry.kwargs)) if isinstance(t, Made) and t.entry.kind == "call"
            )
    return feeding
