"""The guilty operation alone: a program of a few lines that prints the same non-finite result without the model.

Each form of it is tried before it is written: what does not give the same counts of bad values is not used.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._capsule.evidence import KeptCall
from nan_detector._capsule.functions import functions
from nan_detector._capsule.layout import REPRO_TENSORS
from nan_detector._opinfo import info_of
from nan_detector._records import NaNEvent, TensorStats
from nan_detector._source_text import clean
from nan_detector._summary_title import title, where

Tensor = torch.Tensor

_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
#: Longest line of the head.
_WIDTH = 116


@dataclass(frozen=True)
class Repro:
    """A program and its tensors."""

    text: str
    tensors: dict[str, Tensor]


class _NoText(Exception):
    """Internal: an argument has no form in source code."""


@dataclass
class _Source:
    """Arguments as source text; tensors get names."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def call(self, func: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        parts = [self.text(a) for a in args] + [f"{k}={self.text(v)}" for k, v in kwargs.items()]
        return f"{func}({', '.join(parts)})"

    def text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return f't["{self.name(value)}"]'
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f'float("{value!r}")'
        if isinstance(value, complex):
            return f'complex("{value!r}")'
        if isinstance(value, torch.dtype) or value in _FORMATS:
            return str(value)
        if isinstance(value, torch.device):
            return '"cpu"'
        if type(value) in (list, tuple, torch.Size):
            return f"[{', '.join(self.text(v) for v in value)}]"
        raise _NoText

    def name(self, t: Tensor, kind: str = "input") -> str:
        for name, known in self.tensors.items():
            if known is t:
                return name
        name = f"{kind}_{sum(n.startswith(kind) for n in self.tensors)}"
        self.tensors[name] = t
        return name


def repro_of(event: NaNEvent, call: KeptCall | None) -> Repro | None:
    """The program that shows what `call` gave.

    Args:
        event: The birth that it is about, for the head of the program.
        call: The guilty operation; None gives None.

    Returns:
        None where the operation does not give the same counts of bad values again by itself.
    """
    if call is None or call.output is None or not call.output.bad_count:
        return None
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        for lines, tensors in _forms(call, call.output):
            return Repro(_program(event, call, lines), tensors)
    return None


def _forms(call: KeptCall, output: TensorStats) -> Iterator[tuple[list[str], dict[str, Tensor]]]:
    if call.forward is not None:
        yield from _as_derivative(call.forward, call.gradients, output)
    for name, func in _public(call.func):
        with contextlib.suppress(_NoText):
            source = _Source()
            text = source.call(name, call.args, call.kwargs)
            chosen = _chosen(_as_it_ran(func, call), output)
            if chosen is not None:
                yield [f"result = {text}{chosen}"], source.tensors


def _as_derivative(
    forward: KeptCall, gradients: tuple[Tensor | None, ...], output: TensorStats
) -> Iterator[tuple[list[str], dict[str, Tensor]]]:
    """The forward operation and its derivative, by the gradients that had arrived at it."""
    for name, func in _public(forward.func):
        with contextlib.suppress(_NoText):
            source = _Source()
            text = source.call(name, forward.args, forward.kwargs)
            inputs = [n for n, t in source.tensors.items() if t.is_floating_point() or t.is_complex()]
            given = [(i, source.name(g, "gradient")) for i, g in enumerate(gradients) if g is not None]
            several = len(gradients) > 1
            outs = ", ".join(f"out[{i}]" if several else "out" for i, _ in given)
            arrived = ", ".join(f't["{n}"]' for _, n in given)
            leaves = ", ".join(f't["{n}"]' for n in inputs)
            run = _derivative(func, forward, [source.tensors[n] for n in inputs], gradients)
            chosen = _chosen(run, output)
            if chosen is not None and given:
                yield (
                    [
                        f"inputs = [{leaves}]",
                        "for leaf in inputs:",
                        "    leaf.requires_grad_()",
                        f"out = {text}",
                        f"result = torch.autograd.grad([{outs}], inputs, [{arrived}], allow_unused=True){chosen}",
                    ],
                    source.tensors,
                )


def _as_it_ran(func: Any, call: KeptCall) -> Callable[[], Any]:
    return lambda: func(*_copies(call.args), **_copies(call.kwargs))


def _derivative(
    func: Any, forward: KeptCall, inputs: list[Tensor], gradients: tuple[Tensor | None, ...]
) -> Callable[[], Any]:
    def run() -> Any:
        leaves = {id(t): t.detach().clone().requires_grad_() for t in inputs}

        def leaf(value: Any) -> Any:
            if isinstance(value, Tensor):
                return leaves.get(id(value), value)
            return [leaf(v) for v in value] if type(value) in (list, tuple) else value

        with torch.enable_grad():
            out = func(*[leaf(a) for a in forward.args], **{k: leaf(v) for k, v in forward.kwargs.items()})
            outs = list(out) if isinstance(out, (tuple, list)) else [out]
            pairs = [(outs[i], g) for i, g in enumerate(gradients) if g is not None]
            return torch.autograd.grad(
                [o for o, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True
            )

    return run


def _public(func: Any) -> list[tuple[str, Any]]:
    """Names under which an operation can be called, the best known first."""
    op = info_of(func).op
    known = functions()
    names = [f"{space}.{op}" for space in ("torch", "torch.nn.functional", "torch.linalg", "torch.special")]
    return [(n, known[n]) for n in names if n in known] + [(f"torch.ops.{func}", func)]


def _chosen(run: Callable[[], Any], output: TensorStats) -> str | None:
    """What picks the bad result out of what `run` gives ("" or an index); None where its counts are others."""
    try:
        out = run()
    except Exception:  # this form takes other arguments, or random ones
        return None
    if isinstance(out, Tensor):
        return "" if _same_counts(out, output) else None
    if isinstance(out, (tuple, list)):
        for i, t in enumerate(out):
            if isinstance(t, Tensor) and _same_counts(t, output):
                return f"[{i}]"
    return None


def _same_counts(t: Tensor, output: TensorStats) -> bool:
    if not (t.is_floating_point() or t.is_complex()):
        return False
    found = _finite.stats(t)
    counts = (found.nan_count, found.posinf_count, found.neginf_count)
    return counts == (output.nan_count, output.posinf_count, output.neginf_count)


def _copies(value: Any) -> Any:
    """`value` with copies of its tensors: an operation may write into them."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)([_copies(v) for v in value])
    return {k: _copies(v) for k, v in value.items()} if isinstance(value, dict) else value


def _program(event: NaNEvent, call: KeptCall, lines: list[str]) -> str:
    stats = call.output
    assert stats is not None  # asked by `repro_of`
    total = math.prod(stats.shape)
    head = [title(event), where(event)]
    if event.cause is not None:
        head.append(event.cause.title)
    head.append(f"Expected: {_counts(stats.nan_count, stats.posinf_count, stats.neginf_count)}")
    if call.elements:
        head.append(f"The inputs of the guilty elements alone: all {total} of the operation were too large.")
    head += ["The operation with the inputs it had, without the model. Needs torch and safetensors."]
    return "\n".join(
        [
            *(f"# {clean(h)[:_WIDTH]}" for h in head),
            "import os",
            "",
            "import torch",
            "from safetensors.torch import load_file",
            "",
            f't = load_file(os.path.join(os.path.dirname(os.path.abspath(__file__)), "{REPRO_TENSORS}"))',
            *lines,
            "values = torch.view_as_real(result) if result.is_complex() else result",
            "values = values.detach().double()",
            "nan, pos, neg = (int(f(values).sum()) for f in (torch.isnan, torch.isposinf, torch.isneginf))",
            'print(f"NaN {nan}, +inf {pos}, -inf {neg} of {values.numel()} values")',
            "",
        ]
    )


def _counts(nan: int, pos: int, neg: int) -> str:
    return f"NaN {nan}, +inf {pos}, -inf {neg}"
