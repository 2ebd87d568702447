"""What a test, or a detector, may not leave behind in the process: read before and after, and compared."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.modules.module
import torch.nn.utils.clip_grad
import torch.optim.optimizer
import torch.utils.data.dataloader

THREAD_PREFIX = "nan-detector"

#: Module, then the path of an attribute that may be patched while a detector is attached and never after.
#: Modules that are not imported yet are passed over: nothing in them can have been patched.
PATCHABLE = (
    ("torch", "Tensor.backward"),
    ("torch", "Tensor.__torch_function__"),
    ("torch._tensor", "_convert"),
    ("torch.autograd", "backward"),
    ("torch.autograd", "grad"),
    ("torch.autograd", "Function.apply"),
    ("torch.nn", "Module.__call__"),
    ("torch.nn", "Module._call_impl"),
    ("torch.nn", "Module.zero_grad"),
    ("torch.nn", "RNNBase.check_input"),
    ("torch.amp.autocast_mode", "autocast.__enter__"),
    ("torch.nn.utils", "clip_grad_norm_"),
    ("torch.nn.utils", "clip_grad_value_"),
    ("torch.nn.utils.clip_grad", "clip_grad_norm_"),
    ("torch.nn.utils.clip_grad", "clip_grad_value_"),
    ("torch.optim", "Optimizer.zero_grad"),
    ("torch.optim", "LBFGS.step"),
    ("torch.amp", "GradScaler.scale"),
    ("torch.amp", "GradScaler.step"),
    ("torch.amp", "GradScaler.update"),
    ("torch.amp", "GradScaler.unscale_"),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__"),
    ("torch.autograd.profiler", "record_function.__enter__"),
    ("torch.autograd.profiler", "record_function.__exit__"),
    ("torch.nn", "Module.compile"),
    ("torch._dynamo.eval_frame", "OptimizedModule.__call__"),
    ("torch._dynamo.eval_frame", "_callback_from_stance"),
    ("torch._dynamo.eval_frame", "_maybe_set_eval_frame"),
    ("torch._dynamo.eval_frame", "_stance"),
    ("torch._dynamo.eval_frame", "set_eval_frame"),
    ("sys", "excepthook"),
    ("sys", "unraisablehook"),
    ("threading", "excepthook"),
    ("warnings", "_showwarnmsg"),
)

#: Registries of process-wide hooks, by module; every dictionary there with this prefix counts.
REGISTRIES = (
    ("torch.nn.modules.module", "_global_"),
    ("torch.optim.optimizer", "_global_optimizer_"),
)

#: Settings that PyTorch or Python keeps for the process or the thread.
SETTINGS: Mapping[str, Callable[[], object]] = {
    "torch function modes on the stack": torch._C._len_torch_function_stack,
    "torch dispatch modes on the stack": torch._C._len_torch_dispatch_stack,
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly mode": torch.is_anomaly_enabled,
    "backward on several threads": torch._C._is_multithreading_enabled,
    "default dtype": torch.get_default_dtype,
    "autocast on the CPU": lambda: torch.is_autocast_enabled("cpu"),
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "deterministic algorithms only warn": torch.is_deterministic_algorithms_warn_only_enabled,
    "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "trace function": sys.gettrace,
    "profile function": sys.getprofile,
    "handlers of the logger": lambda: list(logging.getLogger("nan_detector").handlers),
    "level of the logger": lambda: logging.getLogger("nan_detector").level,
}


def footprint() -> dict[str, object]:
    """Everything that is compared, by a name for a person."""
    found: dict[str, object] = {name: read() for name, read in SETTINGS.items()}
    for module_name, path in PATCHABLE:
        if (module := sys.modules.get(module_name)) is not None:
            found[f"{module_name}.{path}"] = _identity(module, path)
    for module_name, prefix in REGISTRIES:
        for name, value in vars(sys.modules[module_name]).items():
            if name.startswith(prefix) and isinstance(value, dict):
                found[f"{module_name}.{name}"] = {key: id(hook) for key, hook in value.items()}
    found["threads"] = _own_threads()
    return found


def left_behind(before: Mapping[str, object], patience_s: float = 2.0) -> list[str]:
    """One sentence for each thing that is not as it was; a thread that is ending gets `patience_s` seconds to."""
    deadline = time.monotonic() + patience_s
    while _own_threads() - before["threads"] and time.monotonic() < deadline:
        time.sleep(0.01)
    after = footprint()
    return [
        f"{name}: was {before[name]!r}, is {after[name]!r}"
        for name in before
        if name in after and after[name] != before[name]
    ]


def _identity(module: Any, path: str) -> tuple[object, ...]:
    """The function itself and its code: a patch may replace either."""
    *owners, name = path.split(".")
    owner = module
    for part in owners:
        owner = getattr(owner, part)
    # Not getattr: it would make a new bound method of a classmethod at each access.
    value = vars(owner).get(name, "(not there)")
    function = getattr(value, "__func__", value)
    return (type(value), id(function), function, getattr(function, "__code__", None))


def _own_threads() -> set[str]:
    return {f"{t.name} ({t.ident})" for t in threading.enumerate() if t.name.startswith(THREAD_PREFIX)}
