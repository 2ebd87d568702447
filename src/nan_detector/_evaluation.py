"""What happens without a gradient: outputs of evaluations, and losses that the loop looked at and dropped by itself.

Neither can harm the weights, so neither is an event; both are told as warnings. Nothing here reads a tensor: extremes
of outputs stay on the device until the next gate reads them along, and what the loop saw it read itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nan_detector._entries import tensors_in
from nan_detector._naming import Names
from nan_detector._quiet import quiet
from nan_detector._values import has_values

Tensor = torch.Tensor

_LOOKED_AT = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(slots=True)
class Seen:
    """Outputs of one watched module since they were last judged: how many calls, from which step on, and extremes."""

    layer_name: str
    module_type: str
    step: int
    calls: int
    low: Tensor
    high: Tensor


class Evaluation:
    """Extremes of what the watched models gave without gradients."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self._seen: dict[tuple[int, torch.device], Seen] = {}

    @property
    def waiting(self) -> bool:
        """True when something was seen that no gate has read."""
        return bool(self._seen)

    def note(self, module: torch.nn.Module, output: Any, step: int) -> None:
        """`module` has given `output`."""
        with quiet():
            for t in tensors_in(output, 3):
                if t.dtype in _LOOKED_AT and t.layout is torch.strided and t.numel() and has_values(t):
                    self._fold(module, t, step)

    def _fold(self, module: torch.nn.Module, t: Tensor, step: int) -> None:
        low, high = torch.aminmax(t)
        if low.dtype is not torch.float64:
            low, high = low.float(), high.float()
        key = (id(module), t.device)
        seen = self._seen.get(key)
        if seen is None:
            path, kind = self.names.of_module(module)
            self._seen[key] = Seen(path or "root", kind, step, 1, low, high)
        else:
            seen.calls += 1
            seen.low, seen.high = torch.minimum(seen.low, low), torch.maximum(seen.high, high)

    def collect(self) -> tuple[list[Seen], Tensor | None]:
        """What was seen since the last call, and a vector with the least and greatest value of each."""
        if not self._seen:
            return [], None
        seen = list(self._seen.values())
        self._seen.clear()
        device = seen[0].low.device
        return seen, torch.stack([v.to(device=device, dtype=torch.float32) for s in seen for v in (s.low, s.high)])


def bad_outputs(seen: Sequence[Seen], extremes: Sequence[float]) -> list[Seen]:
    """Those that held NaN or +inf; -inf alone is how a mask looks."""
    out = []
    for i, s in enumerate(seen):
        low, high = extremes[2 * i], extremes[2 * i + 1]
        if math.isnan(low) or math.isnan(high) or high == math.inf:
            out.append(s)
    return out
