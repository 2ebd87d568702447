"""What the first hit of a process would wait for, done when the watch begins: about 1 ms, once."""

from __future__ import annotations

import functools

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nan_detector._opinfo import info_of

#: Operations of nearly every training step. Any other is looked up when a replay meets it.
_USUAL = """
    _local_scalar_dense _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data _to_copy
    _unsafe_view add.Tensor add_.Tensor addmm bmm cat clone convolution convolution_backward detach div.Scalar
    div.Tensor embedding embedding_dense_backward exp expand gelu gelu_backward log mean mean.dim mm mul.Scalar
    mul.Tensor native_batch_norm native_batch_norm_backward native_dropout native_layer_norm
    native_layer_norm_backward neg nll_loss_backward nll_loss_forward ones_like permute pow.Tensor_Scalar relu
    select.int sigmoid silu slice.Tensor sqrt sub.Tensor sum sum.dim_IntList t tanh threshold_backward transpose.int
    unsqueeze view
""".split()


@functools.cache
def make_ready() -> None:
    """Look up the usual operations, and import what PyTorch imports when modes are first taken off."""
    for name in _USUAL:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if func is not None:  # another release of PyTorch may lack it
            info_of(func)
    if not torch._C._len_torch_dispatch_stack():
        with _disable_current_modes():
            pass
