"""The numbers inside a tensor, whatever it is wrapped in. To be called under `quiet`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

PLAIN = frozenset((Tensor, torch.nn.Parameter))
HALF = frozenset((torch.float16, torch.bfloat16))
#: Formats without arithmetic of their own; float32 holds each of their values exactly.
FP8 = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))
_KNOWN = HALF | FP8 | {torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128}
_SPARSE_ROWS = frozenset((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))


def local_part(t: Tensor) -> Tensor:
    """The shard of a distributed tensor that lies here: an operation on the whole would be a collective."""
    if type(t) in PLAIN:
        return t
    shard = getattr(t, "_local_tensor", None)
    return shard if isinstance(shard, Tensor) else t


def has_values(t: Tensor) -> bool:
    """False for what holds no numbers of its own, or not as an array."""
    if t.is_quantized or t.is_nested:
        return False
    # Reading a ZeroTensor inside a dispatch mode crashed the process.
    if t._is_zerotensor() or torch._is_functional_tensor(t) or torch._C._functorch.is_functorch_wrapped_tensor(t):
        return False
    if type(t) not in PLAIN and isinstance(t, FakeTensor):
        return False
    return _has_memory(t)


def _has_memory(t: Tensor) -> bool:
    """False for a tensor of shapes alone, and for one whose memory was given back: reading that is a crash."""
    if t.layout is torch.sparse_coo:
        t = t._values()
    elif t.layout in _SPARSE_ROWS:
        t = t.values()
    try:
        # Not the tensor's own address, which is that of nothing plus an offset in a view of nothing.
        return t.numel() == 0 or t.untyped_storage().data_ptr() != 0
    except (RuntimeError, NotImplementedError):  # memory that is not for us to see, and is there
        return True


def readable(t: Tensor) -> bool:
    """Whether `t` can hold a non-finite value, and its values can be read."""
    return t.dtype in _KNOWN and t.numel() > 0 and has_values(t)


def real_values(t: Tensor) -> Tensor | None:
    """The stored values of a `readable` tensor, real and with arithmetic; None of any other."""
    if not readable(t):
        return None
    if t.layout is torch.sparse_coo:
        t = t._values()
    elif t.layout in _SPARSE_ROWS:
        t = t.values()
    return as_real(computable(t))


def computable(t: Tensor) -> Tensor:
    """`t` as dense, and fp8 as float32."""
    if t.layout is not torch.strided:
        t = t.to_dense()
    return t.to(torch.float32) if t.dtype in FP8 else t


def as_real(t: Tensor) -> Tensor:
    """A dense complex tensor as pairs of real components (one dimension more); a real one as it is."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def size_of(t: Tensor) -> tuple[int, ...]:
    """The shape; () of a nested tensor, which has none in numbers."""
    return () if t.is_nested else tuple(t.shape)
