"""The "layers" level: extremes of every module's output, kept on the device and read with the gate's one read."""

from __future__ import annotations

import math
from typing import Any

import torch

from nan_detector._before import ABS_MAX_OF
from nan_detector._naming import Names
from nan_detector._quiet import quiet
from nan_detector._recorder import ABSENT
from nan_detector._state import is_replaying, pickled_hook
from nan_detector._tape import tensors_in

Tensor = torch.Tensor

_LOOKED_AT = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Layers:
    """Hooks on every module of the watched models, except those of `skip_types`.

    Args:
        models: Watched modules.
        names: Their names.
        skip_types: Classes of modules that are not looked at.
        inputs: Also look at what the models themselves are given.
        backward: Also look at the gradients that arrive at outputs.
    """

    def __init__(
        self, models: list[torch.nn.Module], names: Names, skip_types: tuple[type, ...], inputs: bool, backward: bool
    ) -> None:
        self.columns: list[str] = []
        #: Largest finite value of each layer's output, without what is not an output. Made anew when one changes.
        self.limits: dict[str, float] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._recorded: tuple[str, ...] = ()
        self._slots: dict[str, int] = {}
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._handles: list[Any] = []
        self._backward = backward
        self._grads: list[Any] = []
        for module in dict.fromkeys(m for model in models for m in model.modules()):
            if isinstance(module, skip_types):
                continue
            path = names.of_module(module)[0] or "root"
            self._handles.append(module.register_forward_hook(LayerHook(self, path)))
            if inputs and module in models:
                self._handles.append(
                    module.register_forward_pre_hook(LayerHook(self, f"{path} input", before=True), with_kwargs=True)
                )

    def remove(self) -> None:
        """Take every hook off."""
        for handle in [*self._handles, *self._grads]:
            handle.remove()
        self._handles.clear()
        self._grads.clear()

    def look(self, path: str, value: Any) -> None:
        """Note the extremes of the tensors in `value`."""
        with quiet():
            for t in tensors_in(value, 3):
                if t.dtype in _LOOKED_AT and t.layout is torch.strided and t.numel():
                    self._note(path, t)
        if self._backward and not path.endswith(" gradient"):
            for t in tensors_in(value, 3):
                if t.requires_grad and torch.is_grad_enabled():
                    self._grads.append(t.register_hook(LayerHook(self, f"{path} gradient").gradient))

    def _note(self, path: str, t: Tensor) -> None:
        low, high = torch.aminmax(t)
        slot = self._slots.get(path)
        if slot is None:
            slot = self._slots[path] = len(self.columns)
            self.columns.append(path)
        if self._dtypes.get(path) is not t.dtype:
            self._dtypes[path] = t.dtype
            if not path.endswith((" input", " gradient")):
                self.limits = {**self.limits, path: torch.finfo(t.dtype).max}
        known = self._seen.get(slot)
        if known is not None:
            low, high = torch.minimum(known[0], low.to(known[0])), torch.maximum(known[1], high.to(known[1]))
        self._seen[slot] = (low, high)

    def collect(self) -> tuple[list[str], Tensor | None]:
        """Layers seen since the last call, and a vector with the least and greatest value of each."""
        seen, self._seen = self._seen, {}
        self._grads.clear()
        if not seen:
            return [], None
        with quiet():
            device = next(iter(seen.values()))[0].device
            flat = [
                v.reshape(1).to(device=device, dtype=torch.float64 if v.dtype == torch.float64 else torch.float32)
                for pair in seen.values()
                for v in pair
            ]
            return [self.columns[slot] for slot in seen], torch.cat(flat)

    def recorded(self, columns: list[str], values: Tensor | None) -> tuple[tuple[str, ...], Tensor] | None:
        """Names and largest magnitudes for the flight recorder: of all layers, however many took part in this step.

        Args:
            columns: Layers seen, from `collect`.
            values: Their least and greatest values, from `collect`.
        """
        if values is None:
            return None
        if len(self._recorded) != len(self.columns):
            self._recorded = tuple(f"{ABS_MAX_OF}{name}" for name in self.columns)
        with quiet():
            largest = values.view(-1, 2).abs().amax(1)
            if len(columns) == len(self.columns) and columns == self.columns:
                return self._recorded, largest
            # A row of its own for each selection of layers would make a ring of its own for each.
            every = torch.full((len(self.columns),), ABSENT, dtype=largest.dtype, device=largest.device)
            at = torch.tensor([self._slots[name] for name in columns], device=largest.device)
            return self._recorded, every.index_copy_(0, at, largest)


class LayerHook:
    """A hook that dies in copies, as a root's does."""

    __slots__ = ("before", "layers", "path")

    def __init__(self, layers: Layers | None, path: str, before: bool = False) -> None:
        self.layers = layers
        self.path = path
        self.before = before

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        layers = self.layers
        if layers is None or torch.compiler.is_compiling() or is_replaying():
            return
        layers.look(self.path, (args, output) if self.before else output)

    def gradient(self, grad: Tensor) -> None:
        """A gradient arrived at the output."""
        if self.layers is not None and not is_replaying() and grad.dtype in _LOOKED_AT and grad.numel():
            with quiet():
                self.layers._note(self.path, grad)

    def __deepcopy__(self, memo: Any) -> LayerHook:
        return LayerHook(None, self.path, self.before)

    def __reduce__(self) -> Any:
        return pickled_hook()


def absolute_maxima(columns: list[str], extremes: list[float]) -> dict[str, float]:
    """Largest magnitude per layer from the least and greatest values."""
    out = {}
    for i, name in enumerate(columns):
        low, high = extremes[2 * i], extremes[2 * i + 1]
        out[name] = math.nan if math.isnan(low) or math.isnan(high) else max(abs(low), abs(high))
    return out


def suspicious_layers(columns: list[str], extremes: list[float]) -> list[str]:
    """Layers whose output held NaN or +inf. -inf alone is how a mask looks."""
    bad = []
    for i, name in enumerate(columns):
        low, high = extremes[2 * i], extremes[2 * i + 1]
        if math.isnan(low) or math.isnan(high) or high == math.inf:
            bad.append(name)
    return bad
