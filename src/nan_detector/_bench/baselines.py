"""What ours is compared with: two plain detectors as a user would write them, and the floor that none goes below."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class NonFinite(Exception):
    """One of the plain detectors found something."""


@contextmanager
def plain_hooks(model: nn.Module) -> Iterator[None]:
    """A hook on every module that asks for NaN and Inf in its output, and one on every gradient that takes its norm."""

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and (output.isnan().any() or output.isinf().any()):
                raise NonFinite(name)

        return hook

    def norm(name: str) -> Any:
        def hook(grad: Tensor) -> None:
            if not grad.norm().item() < float("inf"):
                raise NonFinite(name)

        return hook

    handles: list[Any] = [m.register_forward_hook(look(name)) for name, m in model.named_modules()]
    handles += [p.register_hook(norm(name)) for name, p in model.named_parameters()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def one_read(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Every gradient is read once before each step, in the cheapest way there is, and the result is used for nothing.

    Whoever looks at all gradients pays this, and what it costs is up to the machine: mostly its memory's bandwidth.
    """

    def read(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        grads = [p.grad for group in stepped.param_groups for p in group["params"] if p.grad is not None]
        if grads:
            torch.stack(torch._foreach_norm(grads)).tolist()

    handle = optimizer.register_step_pre_hook(read)
    try:
        yield
    finally:
        handle.remove()


class EveryOutput(TorchDispatchMode):
    """Looks at the result of every operation, but for memory that nothing has been written to yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" in func.name():
            return out
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.is_floating_point() and not t.isfinite().all():
                raise NonFinite(str(func))
        return out
