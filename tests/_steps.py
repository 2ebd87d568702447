"""A training loop of a few lines, and pictures of all that a replay must leave alone."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from nan_detector import NaNDetector, NaNEvent

Tensor = torch.Tensor


def birth_line(owner: Any, mark: str = "birth") -> tuple[str, int]:
    """File and line that end in ``# <-- birth`` in the source of `owner`."""
    lines, first = inspect.getsourcelines(owner)
    found = [first + i for i, line in enumerate(lines) if line.rstrip().endswith(f"# <-- {mark}")]
    assert len(found) == 1, f"{owner} has {len(found)} lines marked {mark!r}"
    return inspect.getsourcefile(owner) or "", found[0]


def assert_born(event: NaNEvent | None, owner: Any, *, mark: str = "birth", **fields: Any) -> None:
    """`event` names the marked line of `owner` and has these fields."""
    assert event is not None
    file, line = birth_line(owner, mark)
    assert event.reproduced == fields.pop("reproduced", "yes"), (event.notes, event.op, event.location)
    assert event.location is not None, event.notes
    assert (event.location.file, event.location.line) == (file, line), (event.op, event.location)
    for name, value in fields.items():
        assert getattr(event, name) == value, (name, getattr(event, name), value)


def assert_nothing_shown(event: NaNEvent | None, reproduced: str = "no") -> None:
    """`event` is there and says that it has no finding: a guess is not shown as one."""
    assert event is not None
    assert event.reproduced == reproduced
    assert (event.op, event.location, event.cause) == (None, None, None)
    assert event.notes


def batches(width: int = 4, bad: int = 4, last: int = 5, rows: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Batches of positive numbers; number `bad` holds one that is not, for a square root or a logarithm to meet."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for i in range(last):
        x = torch.rand(rows, width, generator=generator) + 0.5
        if i == bad:
            x[1, 2] = -9.0
        out.append((x, torch.rand(rows, 1, generator=generator)))
    return out


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The squared error of `model`."""
    out = model(x)
    return ((out - y) ** 2).mean()


def train(
    model: nn.Module,
    data: Iterable[tuple[Tensor, Tensor]] | None = None,
    *,
    step: Callable[[nn.Module, Tensor, Tensor], Tensor] = loss_of,
    around: Callable[[], Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> tuple[NaNDetector, Any, Any]:
    """The plain loop until the event.

    Returns:
        The detector, and what `around` gave before and after the optimizer's step with the event.
    """
    opt = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    before = after = None
    with NaNDetector(model, verbose=False, **options) as det:
        for i, (x, y) in enumerate(batches() if data is None else data):
            det.set_batch(i)
            opt.zero_grad()
            loss = step(model, x, y)
            loss.backward()
            before = around() if around is not None else None
            opt.step()
            after = around() if around is not None else None
            if det.event is not None:
                break
    return det, before, after


def picture(*values: Any) -> Any:
    """Everything that can be seen of modules, tensors and containers, as plain data; and the random streams."""
    seen: dict[int, Any] = {}
    rng = (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
    return [_picture(v, seen) for v in values], rng


def _picture(value: Any, seen: dict[int, Any]) -> Any:
    if id(value) in seen:
        return "seen"
    if isinstance(value, Tensor):
        seen[id(value)] = value
        grad = value.grad if value.is_leaf else None
        raw = value.detach().clone().contiguous().view(-1).view(torch.uint8).tolist() if value.numel() else []
        extras = sorted(k for k in vars(value)) if hasattr(value, "__dict__") else []
        return (
            "tensor", id(value), type(value), value._version, value.requires_grad, tuple(value.shape), raw, extras,
            None if grad is None else _picture(grad, seen),
        )  # fmt: skip
    if isinstance(value, (int, float, str, bytes, bool, type(None), type)):
        return value
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        seen[id(value)] = value
        return ("dict", id(value), [(k, _picture(v, seen)) for k, v in value.items()])
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        seen[id(value)] = value
        return (type(value).__name__, id(value), [_picture(v, seen) for v in value])
    if isinstance(value, nn.Module):
        seen[id(value)] = value
        return ("module", id(value), [(k, _picture(v, seen)) for k, v in sorted(vars(value).items())])
    if callable(value) and not hasattr(value, "__dict__"):
        return id(value)
    seen[id(value)] = value
    own = vars(value) if hasattr(value, "__dict__") and type(value).__module__.startswith("test") else {}
    return ("object", id(value), [(k, _picture(v, seen)) for k, v in own.items()])


def twin(model: nn.Module) -> nn.Module:
    """A copy with the same weights."""
    return copy.deepcopy(model)
