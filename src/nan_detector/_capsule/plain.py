"""Arguments of recorded calls as JSON and back: plain data, and tensors by reference.

What is neither is named and left out: a capsule holds no code and no pickle.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nan_detector._capsule.layout import MAX_DEPTH
from nan_detector._entries import Packed
from nan_detector._errors import CapsuleError

#: Key of an object that stands for a value which JSON has no form for.
KIND = "$"

_LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format, torch.strided)
_FORMATS = {str(f): f for f in _LAYOUTS}


def encoded(value: Any, reference: Callable[[Any], Any], missing: list[str], depth: int = 0) -> Any:
    """`value` as JSON.

    Args:
        value: An argument as the tape holds it.
        reference: Gives the JSON of what is not plain (tensors, tokens, generators), or None where it has none.
        missing: The type of each value that could not be kept is added here.
        depth: How deep the value lies.
    """

    def inner(v: Any) -> Any:
        return encoded(v, reference, missing, depth + 1)

    if value is None or type(value) in (bool, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {KIND: "float", "v": repr(float(value))}
    if depth < MAX_DEPTH:
        simple = _simple(value)
        if simple is not None:
            return simple
        if type(value) is list:
            return [inner(v) for v in value]
        if type(value) is slice:
            return {KIND: "slice", "v": [inner(value.start), inner(value.stop), inner(value.step)]}
        if isinstance(value, tuple):
            return {KIND: "tuple", "v": [inner(v) for v in value]}
        if isinstance(value, Packed) and isinstance(value.original, Mapping):
            return {KIND: "dict", "v": [[inner(k), inner(v)] for k, v in value.items]}
        if isinstance(value, Mapping):
            return {KIND: "dict", "v": [[inner(k), inner(v)] for k, v in value.items()]}
        found = reference(value)
        if found is not None:
            return found
    kind = type(value.original if isinstance(value, Packed) else value).__name__
    missing.append(kind)
    return {KIND: "missing", "v": kind}


def _simple(value: Any) -> Any:
    if isinstance(value, torch.Size):
        return {KIND: "size", "v": list(value)}
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {KIND: "device", "v": str(value)}
    if isinstance(value, complex):
        return {KIND: "complex", "v": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes):
        return {KIND: "bytes", "v": base64.b64encode(value).decode("ascii")}
    if value is Ellipsis:
        return {KIND: "ellipsis"}
    if str(value) in _FORMATS and value is _FORMATS[str(value)]:
        return {KIND: "format", "v": str(value)}
    return None


def decoded(value: Any, reference: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """The value that `encoded` gave as JSON.

    Args:
        value: From a capsule, which may come from anywhere.
        reference: Gives the value of a kind of object that is not plain; raises `CapsuleError` for any other.
        depth: How deep the value lies.

    Raises:
        CapsuleError: It is not what `encoded` gives.
    """
    if depth > 2 * MAX_DEPTH:
        raise CapsuleError("step.json: the arguments of a call are nested too deeply.")

    def inner(v: Any) -> Any:
        return decoded(v, reference, depth + 1)

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [inner(v) for v in value]
    if not isinstance(value, dict) or not isinstance(value.get(KIND), str):
        raise CapsuleError(f"step.json: {_short(value)} is no argument of a call.")
    kind: str = value[KIND]
    v: Any = value.get("v")
    try:
        if kind == "tuple":
            return tuple(inner(x) for x in v)
        if kind == "dict":
            return {inner(k): inner(x) for k, x in v}
        if kind == "slice":
            start, stop, step = v
            return slice(inner(start), inner(stop), inner(step))
        if kind in _SIMPLE:
            return _SIMPLE[kind](v)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, binascii.Error):
        raise CapsuleError(f"step.json: {_short(value)} is no argument of a call.") from None
    return reference(kind, v)


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(name)
    return found


def _device(name: Any) -> torch.device:
    from nan_detector._capsule.tensors import device_or_cpu

    return device_or_cpu(name)


def _size(v: Any) -> torch.Size:
    if not all(type(n) is int and 0 <= n < 2**62 for n in v):
        raise ValueError(v)
    return torch.Size(v)


_SIMPLE: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "size": _size,
    "dtype": _dtype,
    "device": _device,
    "complex": lambda v: complex(float(v[0]), float(v[1])),
    "bytes": lambda v: base64.b64decode(v, validate=True),
    "ellipsis": lambda v: ...,
    "format": lambda v: _FORMATS[v],
}


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
