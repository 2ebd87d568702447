"""The "layers" level: extremes of every module's output, kept on the device and read with the gate's one read."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from nan_detector._before import ABS_MAX_OF
from nan_detector._entries import tensors_in
from nan_detector._history import ABSENT
from nan_detector._naming import Names
from nan_detector._quiet import quiet
from nan_detector._state import BUG, local, logger, pickled_hook, strict
from nan_detector._values import has_values

Tensor = torch.Tensor

_compiling = torch.compiler.is_compiling
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_NoTorchFunction = torch._C.DisableTorchFunction
_is_grad_enabled = torch.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled
_aminmax = torch.aminmax
_LOOKED_AT = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


#: Selections of layers whose index is kept.
MOST_INDICES = 64


class Layers:
    """Hooks on every module of the watched models, except those of `skip_types`.

    Each output has a place of its own for its least and its greatest value, into which they are measured: what is made
    in a step beside that is a view.

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
        self._lock = threading.Lock()
        self._dtypes: dict[str, torch.dtype] = {}
        self._recorded: tuple[str, ...] = ()
        self._slots: dict[str, int] = {}
        self._extremes: Tensor | None = None  # (layers, 2), least and greatest value of each
        self._indices: dict[tuple[int, ...], Tensor] = {}
        self.places: list[tuple[Tensor, Tensor]] = []
        self.broken = False  # a bug of ours: nothing more is looked at
        self.seen: dict[int, None] = {}  # slots, in the order in which they were measured in this step
        self._handles: list[Any] = []
        self._backward = backward
        with quiet():
            parameters = (p for model in models for p in model.parameters() if not is_lazy(p))
            self._only_shapes = any(p.numel() and not has_values(p) for p in parameters)
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

    @property
    def nbytes(self) -> int:
        """Device memory of the extremes, in bytes."""
        return 0 if self._extremes is None else self._extremes.untyped_storage().nbytes()

    def remove(self) -> None:
        """Take every hook off."""
        for handle in [*self._handles, *self._grads]:
            handle.remove()
        self._handles.clear()
        self._grads.clear()

    def look(self, path: str, value: Any) -> None:
        """Note the extremes of the tensors in `value`."""
        if self.broken:
            return
        try:
            with quiet():
                for t in tensors_in(value, 3):
                    if t.dtype in _LOOKED_AT and t.layout is torch.strided and self._has_values(t) and t.numel():
                        self._note(path, t)
            if self._backward and not path.endswith(" gradient"):
                for t in tensors_in(value, 3):
                    if t.requires_grad and torch.is_grad_enabled():
                        self._grads.append(t.register_hook(LayerHook(self, f"{path} gradient").gradient))
        except Exception:
            self.broken = True
            if strict():
                raise
            logger.exception(BUG)

    def _has_values(self, t: Tensor) -> bool:
        # A model whose own weights are only shapes is measured in shapes.
        return self._only_shapes or has_values(t)

    def at_once(self, path: str, t: Tensor) -> int | None:
        """The slot of `path`, where all that `look` does for tensors like `t` is to measure them into it."""
        slot = self._slots.get(path)
        if slot is None or self._backward or self._dtypes[path] is not t.dtype or t.layout is not torch.strided:
            return None
        low = self.places[slot][0]
        return slot if low.dtype is t.dtype and low.device == t.device else None

    def _note(self, path: str, t: Tensor) -> None:
        slot = self._slots.get(path)
        if slot is None or self._dtypes[path] is not t.dtype:
            slot = self._place(path, t)
        low, high = self.places[slot]
        seen = self.seen
        t = t.detach()  # without the tangent of forward-mode differentiation, which `out` refuses
        if slot not in seen:
            seen[slot] = None
            if t.dtype is low.dtype and t.device == low.device:
                _aminmax(t, out=(low, high))
            else:
                least, greatest = _aminmax(t)
                low.copy_(least)
                high.copy_(greatest)
            return
        # A module that is called more than once in a step.
        least, greatest = _aminmax(t)
        torch.minimum(low, least.to(low), out=low)
        torch.maximum(high, greatest.to(high), out=high)

    def _place(self, path: str, t: Tensor) -> int:
        """The slot of an output that is new, or has another dtype than before."""
        with self._lock:  # the model may be called by several threads, for the first time in each
            self._dtypes[path] = t.dtype
            if not path.endswith((" input", " gradient")):
                self.limits = {**self.limits, path: torch.finfo(t.dtype).max}
            slot = self._slots.get(path, len(self.columns))
            # float32 would turn a double's 1e300 into an infinity that never was; halves lose nothing in it.
            wide = any(d is torch.float64 for d in list(self._dtypes.values()))
            self._make_room(max(slot + 1, len(self.columns)), t.device, torch.float64 if wide else torch.float32)
            if slot == len(self.columns):
                self.columns.append(path)
            self._slots[path] = slot  # last: whoever finds it finds its place
            return slot

    def _make_room(self, layers: int, device: torch.device, dtype: torch.dtype) -> None:
        old = self._extremes
        if old is not None and len(old) >= layers and old.dtype is dtype:
            return
        # Room made inside the user's inference_mode could never be written outside it.
        with torch.inference_mode(False), torch.no_grad():
            room = torch.zeros(max(8, 2 * layers), 2, dtype=dtype, device=device if old is None else old.device)
            if old is not None:
                room[: len(old)].copy_(old)
            self.places = [(row[0], row[1]) for row in room]
            self._extremes = room

    @property
    def complete(self) -> Tensor | None:
        """Least and greatest value of every layer, shape (layers, 2), where all were seen since the last `forget`."""
        if self._extremes is None or len(self.seen) != len(self.columns):
            return None
        return self._extremes[: len(self.columns)]

    def forget(self) -> None:
        """What was seen has been read."""
        self.seen.clear()
        self._grads.clear()

    def collect(self) -> tuple[list[str], Tensor | None]:
        """Layers seen since the last call, and a vector with the least and greatest value of each."""
        seen = list(self.seen)
        if self._extremes is None or not seen:
            self.forget()
            return [], None
        with quiet():
            values = self._extremes.index_select(0, self._on_device(tuple(seen))).reshape(-1)
        self.forget()
        return [self.columns[slot] for slot in seen], values

    @property
    def recorded_names(self) -> tuple[str, ...]:
        """Names of the flight recorder's columns for all layers; the same object as long as there are no new ones."""
        if len(self._recorded) != len(self.columns):
            self._recorded = tuple(f"{ABS_MAX_OF}{name}" for name in self.columns)
        return self._recorded

    def recorded(self, columns: list[str], values: Tensor | None) -> tuple[tuple[str, ...], Tensor] | None:
        """Names and largest magnitudes for the flight recorder: of all layers, however many took part in this step.

        Args:
            columns: Layers seen, from `collect`.
            values: Their least and greatest values, from `collect`.
        """
        if values is None:
            return None
        with quiet():
            largest = values.view(-1, 2).abs().amax(1)
            if len(columns) == len(self.columns) and columns == self.columns:
                return self.recorded_names, largest
            # A row of its own for each selection of layers would make a ring of its own for each.
            every = torch.full((len(self.columns),), ABSENT, dtype=largest.dtype, device=largest.device)
            at = self._on_device(tuple([self._slots[name] for name in columns]))
            return self.recorded_names, every.index_copy_(0, at, largest)

    def _on_device(self, slots: tuple[int, ...]) -> Tensor:
        """`slots` as an index beside the extremes: made once, as a copy from the host may wait for the device."""
        found = self._indices.get(slots)
        if found is None:
            if len(self._indices) >= MOST_INDICES:
                self._indices.clear()
            device = None if self._extremes is None else self._extremes.device
            found = self._indices[slots] = torch.tensor(slots, dtype=torch.int64, device=device)
        return found


class LayerHook:
    """A hook that dies in copies, as a root's does."""

    __slots__ = ("before", "dtype", "layers", "path", "slot")

    def __init__(self, layers: Layers | None, path: str, before: bool = False) -> None:
        self.layers = layers
        self.path = path
        self.before = before
        self.dtype: torch.dtype | None = None  # of outputs that go the short way
        self.slot = 0

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        layers = self.layers
        if layers is None or _compiling() or local.replaying:
            return
        if self.before:
            output = args[0] if len(args) == 1 and not output else (args, output)  # kwargs stand in its place
        if type(output) is not Tensor or _dispatch_modes():
            layers.look(self.path, output)
            return
        if _function_modes():
            with _NoTorchFunction():
                self._look(layers, output)
        else:
            self._look(layers, output)

    def _look(self, layers: Layers, output: Tensor) -> None:
        seen, slot = layers.seen, self.slot
        # A second output in the same step is folded into the first one's.
        if output.dtype is self.dtype and slot not in seen:
            graph = _is_grad_enabled()
            try:
                if graph:
                    _set_grad_enabled(False)
                _aminmax(output, out=layers.places[slot])
                seen[slot] = None
                return
            except RuntimeError:  # empty, sparse or on another device, this time
                pass
            finally:
                if graph:
                    _set_grad_enabled(True)
        layers.look(self.path, output)
        found = layers.at_once(self.path, output)
        if found is not None:
            self.slot, self.dtype = found, output.dtype

    def gradient(self, grad: Tensor) -> None:
        """A gradient arrived at the output."""
        if self.layers is not None and not local.replaying and grad.dtype in _LOOKED_AT and grad.numel():
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
