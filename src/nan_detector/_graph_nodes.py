"""Which operation each node of the autograd graph is the derivative of, by the node's sequence number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nan_detector._lineage import OpRecord

#: Nodes that one operation can have: one for each nested transform, and for each view of what it wrote.
MAX_LEVELS = 16

_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class GraphNodes:
    """Learns, operation by operation, which nodes were made for it."""

    def __init__(self) -> None:
        self.by_sequence: dict[int, OpRecord] = {}
        self.wrote: OpRecord | None = None  # the last operation, if it wrote in place
        self._numbered = _sequence_number()

    def forward_of(self, node: Any) -> OpRecord | None:
        """The operation whose derivative `node` is; None where it was made before the trace."""
        return self.by_sequence.get(node._sequence_nr())

    def number(self, record: OpRecord, tracked: bool) -> None:
        """Nodes of the graph that were made since the last operation: which operation they are the derivative of.

        The node that an operation gets is numbered just before it is dispatched. A write into a view makes another
        one (CopySlices) after it, under a transform of torch.func each level has a node of its own, and a custom
        Function has one around the operations of its forward.

        Args:
            record: The operation that is about to run.
            tracked: It gets a node.
        """
        first, self._numbered = self._numbered, _sequence_number()
        last = self._numbered
        if tracked:
            last -= 1
            self.by_sequence.setdefault(last, record)
        owner = self.wrote or record
        if first >= last - MAX_LEVELS:
            for number in range(first, last):
                self.by_sequence.setdefault(number, owner)
