"""PyTorch's default random generators: their states, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor

_cuda_in_use: Callable[[], bool] = torch.cuda.is_initialized
_get_rng_state: Callable[[], Tensor] = torch.default_generator.get_state


def rng_state() -> tuple[Tensor, ...]:
    """States of torch's default generators: the CPU's, then those of the CUDA devices in use."""
    if _cuda_in_use():
        return (_get_rng_state(), *torch.cuda.get_rng_state_all())
    return (_get_rng_state(),)


def restore_rng(states: tuple[Tensor, ...]) -> None:
    """Set torch's default generators to `states` as `rng_state` gave them."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(list(states[1:]))
