"""Where each floating dtype ends, and where it rounds to 0 or to infinity. IEEE 754 round-half-to-even throughout."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The range of a binary floating dtype.

    Attributes:
        max: The largest finite number.
        overflow_at: The least magnitude that rounds to infinity (65520 in float16); inf where no float64 does.
        smallest_normal: Below it digits are lost.
        smallest: The least positive number.
    """

    max: float
    overflow_at: float
    smallest_normal: float
    smallest: float


def _ieee(digits: int, max_exponent: int, min_exponent: int) -> Limits:
    """`digits` of the significand, the hidden one included; exponents of the largest and least normal number."""
    largest = math.ldexp(2.0 - math.ldexp(1.0, 1 - digits), max_exponent)
    try:
        overflow_at = math.ldexp(2.0 - math.ldexp(1.0, -digits), max_exponent)
    except OverflowError:
        overflow_at = math.inf
    if overflow_at == largest:
        overflow_at = math.inf
    return Limits(largest, overflow_at, math.ldexp(1.0, min_exponent), math.ldexp(1.0, min_exponent - digits + 1))


_LIMITS = {
    "float16": _ieee(11, 15, -14),
    "bfloat16": _ieee(8, 127, -126),
    "float32": _ieee(24, 127, -126),
    "float64": _ieee(53, 1023, -1022),
    "float8_e5m2": _ieee(3, 15, -14),
    # Without infinities: what rounds beyond 448 becomes NaN.
    "float8_e4m3fn": Limits(448.0, 464.0, 2.0**-6, 2.0**-9),
}
_ALIASES = {
    **{"half": "float16", "float": "float32", "double": "float64"},
    **{"complex32": "float16", "complex64": "float32", "complex128": "float64"},
}


def plain(dtype: str) -> str:
    """'torch.float16' -> 'float16'; complex dtypes give the dtype of their components."""
    name = dtype.rpartition(".")[2]
    return _ALIASES.get(name, name)


def limits(dtype: str) -> Limits | None:
    """The range of `dtype`; None for integers and dtypes that are not known here."""
    return _LIMITS.get(plain(dtype))


def is_half(dtype: str) -> bool:
    """True for float16 (bfloat16 has float32's range and is not meant)."""
    return plain(dtype) == "float16"


def rounds_to_zero(value: float, dtype: str) -> bool:
    """True when a positive `value` becomes exactly 0 in `dtype`: at half of the least positive number or below."""
    found = limits(dtype)
    return found is not None and value <= found.smallest / 2


def exp_limit(dtype: str) -> float:
    """The argument from which on exp() is infinite in `dtype`: the logarithm of where rounding gives infinity."""
    found = limits(dtype)
    if found is None:
        return math.inf
    return math.log(found.overflow_at if math.isfinite(found.overflow_at) else found.max)


def safe_eps(dtype: str) -> str:
    """An epsilon for the code of a fix that `dtype` can hold."""
    return "1e-6" if is_half(dtype) else "1e-12"
