"""What an optimizer trains without a module that is called: plain tensors, a model within a compiled function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class Parameters(torch.nn.Module):
    """Stands for the model of a script that has none: parameters by number.

    Args:
        optimizer: Whose they are.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            # Past the check: leaves that are no `Parameter` are trained as well, and must stay the same objects.
            self._parameters[f"parameter_{i}"] = p


def at_next_backward(then: Callable[[], None]) -> Callable[[], None]:
    """Call `then` once, when the next ``Tensor.backward`` is called; gives a function that calls it off.

    For what cannot be done within an optimizer's hooks, as it adds to them.
    """
    original: Any = torch.Tensor.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        undo()
        then()
        run: Any = torch.Tensor.backward  # a patched one, by now
        return run(*args, **kwargs)

    def undo() -> None:
        if torch.Tensor.backward is backward:
            setattr(torch.Tensor, "backward", original)  # noqa: B010  # an assignment would have to be of its type

    setattr(torch.Tensor, "backward", backward)  # noqa: B010
    return undo
