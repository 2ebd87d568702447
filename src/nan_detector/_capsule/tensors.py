"""Tensors to a safetensors file and back, with the strides, expansion and complex numbers that the format lacks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nan_detector._capsule.layout import MAX_EXPANDED
from nan_detector._errors import CapsuleError
from nan_detector._quiet import quiet
from nan_detector._values import has_values

Tensor = torch.Tensor

#: What the format of the file can hold, in all its releases.
_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_COMPLEX = (torch.complex64, torch.complex128)


class Writer:
    """Collects tensors for one file.

    Args:
        max_bytes: Bytes that may be collected.
    """

    def __init__(self, max_bytes: int) -> None:
        self.left = max_bytes
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[int, tuple[Tensor, dict[str, Any]]] = {}

    def add(self, t: Tensor, *, always: bool = False) -> dict[str, Any] | None:
        """Take a copy of `t` (any shape, dtype and device) on the host.

        Args:
            t: The tensor.
            always: It does not count: without random states nothing can be run again.

        Returns:
            What `taken` needs to make it again, as JSON; None where the file cannot hold it, or it is too large.
        """
        known = self._known.get(id(t))
        if known is not None:
            return known[1]
        if not _plain(t):
            return None
        with quiet():
            base, spec = _base_of(t)
            size = base.numel() * base.element_size()
            if size > self.left and not always:
                return None
            self.left -= 0 if always else size
            spec["key"] = f"t{len(self.tensors)}"
            self.tensors[spec["key"]] = base.to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._known[id(t)] = (t, spec)
        return spec


def _plain(t: Tensor) -> bool:
    return (
        t.layout is torch.strided
        and type(t) in (Tensor, torch.nn.Parameter)
        and has_values(t)
        and (t.dtype in _DTYPES or t.dtype in _COMPLEX)
    )


def _base_of(t: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The numbers of `t` each once, contiguous, and how `t` is made of them."""
    spec: dict[str, Any] = {}
    t = t.detach().resolve_conj().resolve_neg()
    if t.device.type != "cpu":
        spec["device"] = str(t.device)
    if any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True)):
        spec["expand"] = list(t.shape)
        t = t[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())]
    if not t.is_contiguous() and _dense(t.shape, t.stride()):
        spec["stride"] = list(t.stride())
    if t.is_complex():
        spec["complex"] = True
        return torch.view_as_real(t.contiguous()), spec
    return t, spec


def _dense(shape: Any, stride: Any) -> bool:
    """True where elements lie without gaps and none of them twice, in whatever order of the dimensions."""
    expected = 1
    for step, size in sorted((st, si) for si, st in zip(shape, stride, strict=True) if si > 1):
        if step != expected:
            return False
        expected *= size
    return True


class Reader:
    """The tensors of one file that may come from anywhere.

    Args:
        path: The file. Tensors of a device that this machine does not have are put on the CPU.

    Raises:
        CapsuleError: It is no safetensors file, or was cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, Tensor] = {}
        if path.exists() and not path.is_file():  # a pipe or a device: reading it might never end
            raise CapsuleError(f"{path} is no file: the capsule is damaged.")
        try:
            with safe_open(str(path), framework="pt") as file:
                self._tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no mapping
        except FileNotFoundError:
            raise CapsuleError(f"{path} is not there: the capsule is not whole.") from None
        except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise CapsuleError(f"{path} is no whole safetensors file ({reason}).") from None

    def take(self, spec: object) -> Tensor:
        """The tensor that `Writer.add` described by `spec`.

        Raises:
            CapsuleError: The description does not fit the file.
        """
        if not isinstance(spec, Mapping) or not isinstance(spec.get("key"), str):
            raise CapsuleError(f"{self.path.name}: a tensor is described by {_short(spec)}, which is no description.")
        t = self._tensors.get(spec["key"])
        if t is None:
            raise CapsuleError(f"{self.path.name} has no tensor {_short(spec['key'])}.")
        try:
            return self._made(t, spec)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0][:120]
            raise CapsuleError(f"{self.path.name}: tensor {_short(spec['key'])} cannot be made ({reason}).") from None

    def _made(self, t: Tensor, spec: Mapping[str, Any]) -> Tensor:
        if spec.get("complex"):
            t = torch.view_as_complex(t)
        if "stride" in spec:
            stride = _sizes(spec["stride"])
            if len(stride) != t.dim() or not _dense(t.shape, stride):
                raise ValueError("its strides do not fit its shape")
            t = torch.empty_strided(t.shape, stride, dtype=t.dtype).copy_(t)
        if "device" in spec:
            t = t.to(device_or_cpu(spec["device"]))
        if "expand" in spec:
            shape = _sizes(spec["expand"])
            if math.prod(shape) > MAX_EXPANDED:
                raise ValueError("it claims to be larger than any step's")
            t = t.expand(shape)
        return t


def device_or_cpu(name: object) -> torch.device:
    """The device of that name, or the CPU where this machine does not have it."""
    try:
        device = torch.device(str(name))
        torch.zeros(1, device=device).item()  # a device without memory makes tensors too
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):  # a backend's module that is not there
        return torch.device("cpu")
    return device


def _sizes(value: object) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(n) is int and 0 <= n < 2**62 for n in value):
        return tuple(value)
    raise ValueError(f"{_short(value)} is no list of sizes")


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
