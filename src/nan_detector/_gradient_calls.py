"""Which recorded calls work on gradients, not on a loss: scaling and clipping by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nan_detector._entries import Entry, Made, tokens_in


class GradientCalls:
    """Learns, call by call, what gave gradients.

    Args:
        entries: The calls of the step.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self._gradients: set[Entry] = set()  # calls that gave gradients, or what was made of gradients alone
        self._asked_for: set[Entry] = set()  # those of them whose gradients came from autograd.grad

    def gave(self, entry: Entry, results: list[torch.Tensor]) -> None:
        """`results` are what `entry`, a call of a function named `grad`, has given."""
        if not any(t.requires_grad for t in results):
            self._gradients.add(entry)  # `p.grad`, or autograd.grad without create_graph
            if getattr(entry.func, "__name__", "") == "grad":
                self._asked_for.add(entry)

    def edits(self, entry: Entry) -> bool:
        """True for a call that is given gradients and no other tensor."""
        tokens = list(tokens_in((entry.args, entry.kwargs)))
        found = bool(tokens) and all(isinstance(t, Made) and t.entry in self._gradients for t in tokens)
        if not found:
            return False
        self._gradients.add(entry)
        if all(isinstance(t, Made) and t.entry in self._asked_for for t in tokens):
            # What the loop asked autograd for, and a backward is still to come: the weight of a loss, not an edit.
            self._asked_for.add(entry)
            return not any(e.kind == "backward" and e.number > entry.number for e in self.entries)
        return True
