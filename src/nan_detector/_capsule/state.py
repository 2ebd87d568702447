"""Weights, buffers, modes and settings of a step: written from the watched models, put into those of a factory."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._capsule.plain import decoded
from nan_detector._capsule.tensors import Reader, Writer
from nan_detector._errors import CapsuleError
from nan_detector._naming import Names, is_wrapper, join, plain_path
from nan_detector._tape import Tape
from nan_detector._version import __version__

Tensor = torch.Tensor

#: Mismatches that a message names.
_SHOWN = 3


def paths_of(models: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """Path of each module by identity, without the wrappers around a model; "" is the model itself."""
    found: dict[int, str] = {}
    for key, model in models.items():
        for path, module in model.named_modules():
            found.setdefault(id(module), join(key, plain_path(path, is_wrapper(model))))
    return found


def modules_by_path(models: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """The other way round."""
    found: dict[str, torch.nn.Module] = {}
    for key, model in models.items():
        for path, module in model.named_modules():
            found.setdefault(join(key, plain_path(path, is_wrapper(model))), module)
    return found


def written_state(names: Names, tape: Tape, writer: Writer) -> dict[str, Any]:
    """Parameters and buffers, as they were when the step used them, as JSON; their numbers go to `writer`.

    Where one does not fit, none is kept: half of a state is of no use. Then there are statistics of each.
    """
    tensors = [(name, _as_used(p, tape), p.requires_grad) for name, p in names.parameters()]
    buffers = [(name, b, False) for name, b in names.buffers()]
    out: dict[str, Any] = {"parameters": {}, "buffers": {}, "kept": True}
    for kind, found in (("parameters", tensors), ("buffers", buffers)):
        for name, t, trained in found:
            out[kind][name] = {"tensor": writer.add(t), "requires_grad": trained}
    if any(e["tensor"] is None for kind in ("parameters", "buffers") for e in out[kind].values()):
        writer.tensors.clear()
        out["kept"] = False
        for kind, found in (("parameters", tensors), ("buffers", buffers)):
            out[kind] = {name: {"stats": _finite.stats(t).to_dict(), "requires_grad": r} for name, t, r in found}
    out["models"] = sorted(names.models)
    out["evaluating"] = sorted({path for m, path in _modules(names.models) if not m.training})
    return out


def _as_used(p: Tensor, tape: Tape) -> Tensor:
    token = tape.outside.get(id(p))
    if token is not None and token.snapshot is not None and token.stands_for(p):
        return token.snapshot
    return p.detach()


def _modules(models: Mapping[str, torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str]]:
    paths = paths_of(models)
    for model in models.values():
        for module in model.modules():
            yield module, paths[id(module)]


def put_state(state: Mapping[str, Any], models: Mapping[str, torch.nn.Module], reader: Reader | None) -> list[str]:
    """Give `models` the parameters, buffers and modes that the step had.

    Args:
        state: What `written_state` gave.
        models: The models of the user's factory; changed in place.
        reader: The numbers; None where they were not kept.

    Returns:
        What the user should know.

    Raises:
        CapsuleError: The models are not those of the capsule; the message names what differs.
    """
    names = Names(dict(models))
    parameters, buffers = dict(names.parameters()), dict(names.buffers())
    _fits("parameters", _table(state, "parameters"), parameters)
    _fits("buffers", _table(state, "buffers"), buffers)
    notes: list[str] = []
    if reader is None:
        notes.append("the capsule has no weights (they were larger than capsule_bytes): those of --model are used")
    for kind, found in (("parameters", parameters), ("buffers", buffers)):
        for name, entry in _table(state, kind).items():
            t = found[name]
            if reader is not None:
                value = reader.take(entry.get("tensor"))
                if value.shape != t.shape:
                    raise CapsuleError(
                        f"{kind[:-1]} {name!r} has shape {list(value.shape)} in the capsule and {list(t.shape)} in the "
                        "model of --model: name the factory that makes the model which was trained."
                    )
                t.data = value
            if kind == "parameters" and t.is_leaf and t.is_floating_point():
                t.requires_grad_(bool(entry.get("requires_grad", True)))
    evaluating = state.get("evaluating")
    for module, path in _modules(models):
        module.training = not (isinstance(evaluating, list) and path in evaluating)
    return notes


def _table(state: Mapping[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    found = state.get(kind)
    if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
        raise CapsuleError(f"step.json has no table of {kind}: the capsule is damaged.")
    return found


def _fits(kind: str, ours: Mapping[str, Any], theirs: Mapping[str, Tensor]) -> None:
    lacking, more = [n for n in ours if n not in theirs], [n for n in theirs if n not in ours]
    if not lacking and not more:
        return
    lacks = f"the model of --model lacks {kind} {_listed(lacking)}"
    said = lacks if lacking else f"the capsule has no {kind} {_listed(more)}"
    raise CapsuleError(f"{said}: name the factory that makes the model which was trained.")


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


# -- settings --------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Versions, machine and the settings of PyTorch that decide what a step computes."""
    return {
        "nan_detector": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "anomaly": torch.is_anomaly_enabled(),
        "cudnn": {n: getattr(torch.backends.cudnn, n) for n in ("enabled", "benchmark", "deterministic")},
    }


@contextlib.contextmanager
def settings_of(kept: Mapping[str, Any]) -> Iterator[None]:
    """The default dtype, number of threads and other settings of the capsule, and afterwards the caller's again."""
    before = environment()
    try:
        _set(kept)
        yield
    finally:
        _set(before)


def _set(kept: Mapping[str, Any]) -> None:
    try:
        dtype = decoded({"$": "dtype", "v": kept.get("default_dtype")}, lambda kind, v: None)
        torch.set_default_dtype(dtype)
        threads = kept.get("threads")
        if isinstance(threads, int) and 1 <= threads <= 1024 and threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(bool(kept.get("deterministic")))
        if kept.get("matmul_precision") in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(kept["matmul_precision"])
    except TypeError as error:
        raise CapsuleError(f"step.json: the environment cannot be restored ({error}).") from None
