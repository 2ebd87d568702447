"""Trainings that are run twice, watched and not, and everything about them that must be the same bit for bit."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nan_detector import NaNDetector

# PyTorch wraps the step of a class of optimizers when the first of them is made, and once more when something is first
# compiled: that is none of our doing.
torch.optim.LBFGS([torch.zeros(1)])
torch.compile(lambda x: x, backend="eager")(torch.zeros(1))
torch._dynamo.reset()

LEVELS = ("step", "layers", "ops")
SEED = 20


@dataclass
class Run:
    """One training: `step` trains once and gives the loss."""

    models: list[torch.nn.Module]
    optimizers: list[Any]
    step: Callable[[int], Any]
    generators: list[torch.Generator] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)  # what code of the user's saw: calls, counts, values
    around: Callable[[], Any] = contextlib.nullcontext  # entered around the loop, inside the watch
    outside: Callable[[], Any] = contextlib.nullcontext  # entered around the watch


def seed_all(seed: int = SEED) -> None:
    """Every stream of random numbers that a training uses."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def train(make: Callable[[], Run], watch: str | None, steps: int = 6, **options: Any) -> dict[str, Any]:
    """Train, watched at a level or (None) not at all, and give the picture of everything."""
    seed_all()
    run = make()
    options = {"verbose": False, "grad_norm_warn": float("inf"), **options}
    losses, names = [], []
    with contextlib.ExitStack() as stack:
        stack.enter_context(run.outside())
        det = stack.enter_context(NaNDetector(run.models, watch=watch, **options)) if watch else None
        stack.enter_context(run.around())
        for i in range(steps):
            losses.append(run.step(i))
            names.append([sorted(m.state_dict()) for m in run.models])
        # While it is watched: no attribute, key or parameter of ours may show.
        inside = [_attributes(m) for m in run.models]
    if det is not None:
        assert det.event is None, str(det.event)
        assert not det.warnings
        assert det.overhead_ms >= 0.0
    return {"losses": losses, "keys": names, "attributes": inside, **picture(run)}


def picture(run: Run) -> dict[str, Any]:
    """Everything of the training and of the process that a step may change."""
    return {
        "weights": [[(n, p.detach().clone(), p.grad) for n, p in m.named_parameters()] for m in run.models],
        "buffers": [list(m.named_buffers()) for m in run.models],
        "state_dict": [dict(m.state_dict()) for m in run.models],
        "after": [_attributes(m) for m in run.models],
        "optimizers": [o.state_dict() for o in run.optimizers],
        "torch rng": torch.get_rng_state(),
        "python rng": random.getstate(),
        "numpy rng": np.random.get_state(),
        "generators": [g.get_state() for g in run.generators],
        "seen": list(run.seen),
        "requires_grad": [[p.requires_grad for p in m.parameters()] for m in run.models],
    }


def _attributes(model: torch.nn.Module) -> list[tuple[str, str, list[tuple[str, Any]]]]:
    return [
        (
            path,
            type(m).__name__,
            [
                (n, v if isinstance(v, (int, float, str, list, torch.Tensor)) else type(v).__name__)
                for n, v in vars(m).items()
            ],
        )
        for path, m in model.named_modules()
    ]


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Paths at which two pictures are not the same bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
            yield f"{path}: {a.dtype} {tuple(a.shape)} is {b.dtype} {tuple(b.shape)}"
        elif _bits(a) != _bits(b):
            yield f"{path}: values differ"
    elif isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.tobytes() != b.tobytes():
            yield f"{path}: values differ"
    elif type(a) is not type(b):
        yield f"{path}: {type(a).__name__} is {type(b).__name__}"
    elif isinstance(a, dict):
        if list(a) != list(b):
            yield f"{path}: keys {list(a)} are {list(b)}"
        else:
            for k in a:
                yield from differences(a[k], b[k], f"{path}[{k!r}]")
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            yield f"{path}: {len(a)} items are {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differences(x, y, f"{path}[{i}]")
    elif isinstance(a, float):
        if a.hex() != b.hex():
            yield f"{path}: {a} is {b}"
    elif not isinstance(a, (int, str, bytes, type(None), torch.dtype, torch.device)):
        if type(a).__name__ != type(b).__name__:  # a weak reference, say: nothing to compare
            yield f"{path}: {a!r} is {b!r}"
    elif a != b:
        yield f"{path}: {a!r} is {b!r}"


def _bits(t: torch.Tensor) -> bytes:
    t = t.detach()
    t = t.to_dense() if t.layout is not torch.strided else t
    return t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def assert_same(bare: dict[str, Any], watched: dict[str, Any]) -> None:
    """No difference at all, or the first few by name."""
    found = list(differences(bare, watched))
    assert not found, "\n".join(found[:12])


def marked_line(owner: Any, marker: str) -> int:
    """Number of the line of `owner`'s source that ends with the comment ``# <-- marker``."""
    lines, first = inspect.getsourcelines(owner)
    found = [first + i for i, line in enumerate(lines) if f"# <-- {marker}" in line]
    assert len(found) == 1, f"{marker!r} is on {len(found)} lines"
    return found[0]


def blobs(n: int = 32, width: int = 8, classes: int = 4, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """A fixed batch of points and their classes, which draws from no shared random stream."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=g), torch.randint(0, classes, (n,), generator=g)
