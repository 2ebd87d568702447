"""Which summands a loss was added up from, with their values: what a replay sees of the sums it makes.

While a step runs again, each call that adds, subtracts, scales or averages small tensors becomes a node, wherever it is
written: between the model and the backward, in a model that returns its loss, in a step function. From the loss the
nodes are followed down to the first value that no such call made. A reduction of many elements is looked into only
where nothing was added after it: `(recon + kl).mean()` has two terms, and a KL that is itself a sum over its elements
is one term of the loss that it is added to.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._calls import is_in_place, public_name
from nan_detector._loss_nodes import Found, Leaf, Node, Part, Reduced, Scaled, Sum, summands, without_common_factors
from nan_detector._loss_text import LISTS, TENSOR, Use, made_text, operand_text, target_of
from nan_detector._quiet import quiet
from nan_detector._records import LossTerm
from nan_detector._source import Mark, here_until, location_of

Tensor = torch.Tensor

#: Elements of a summand at most: losses per sample, token or pixel, not the activations of a large model.
MAX_ELEMENTS = 2**20
#: Terms of an event at most; those that are not finite come before the others.
MAX_TERMS = 32

_SIGNS = {"add": 1.0, "sub": -1.0, "subtract": -1.0}
_FACTORS = ("mul", "multiply", "div", "divide", "true_divide", "neg", "negative")
#: Calls that hand on every element as it is, or in another dtype.
_PASSES = frozenset(
    "squeeze unsqueeze view reshape flatten ravel to float double half bfloat16 clone contiguous".split()
)
_LINEAR = frozenset((*_SIGNS, *_FACTORS, *_PASSES, *LISTS, "sum", "mean"))
#: Where a running total begins; a total of 0 is no term.
_BEGINNINGS = ("zeros", "zeros_like", "new_zeros", "tensor", "full", "scalar_tensor")


class Sums:
    """The sums of one replay.

    Args:
        barrier: Code object of the runner that re-makes recorded calls.
    """

    def __init__(self, barrier: Any) -> None:
        self._barrier = barrier
        self._nodes: dict[int, tuple[weakref.ref[Tensor], Node]] = {}
        self._makers: dict[int, tuple[weakref.ref[Tensor], Mark | None, str]] = {}

    def follow(
        self, func: Callable[..., Any], args: Any, kwargs: Any, mark: Mark | None, run: Callable[[], Any]
    ) -> Any:
        """Make a call of the library (`run`), and note what it adds up.

        Args:
            func: As `__torch_function__` received it.
            args: Its arguments.
            kwargs: Its keyword arguments.
            mark: The recorded call that is being made again, if any.
            run: Makes the call.
        """
        name = public_name(func)
        linear = name in _LINEAR
        earlier = None
        if linear and args and is_in_place(getattr(func, "__name__", "")) and _is_small(args[0]):
            earlier = self._node(args[0])
        out = run()
        if _is_small(out):
            at = here_until(self._barrier, 2) or mark
            node = self._linear(func, name, args, kwargs, out, at, earlier) if linear else None
            if node is not None:
                self._nodes[id(out)] = (weakref.ref(out), node)
            else:
                self._nodes.pop(id(out), None)  # written in place by something else
                self._makers[id(out)] = (weakref.ref(out), at, name)
        return out

    def terms_of(self, loss: Tensor) -> tuple[LossTerm, ...]:
        """The summands of `loss` in the order in which they are written; () where it is not known to be a sum.

        Args:
            loss: The tensor that a backward of the replay began at, with one element.
        """
        known = self._nodes.get(id(loss))
        if known is None or known[0]() is not loss:
            return ()
        node, reduction = without_common_factors(known[1])
        if reduction is None and isinstance(node, Sum) and node.stacked:
            return ()
        found = [f for f in summands(node, reduction) if not _is_beginning(f)]
        return _as_terms(found) if len(found) > 1 else ()

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _linear(
        self, func: Any, name: str, args: Any, kwargs: Any, out: Tensor, at: Mark | None, earlier: Node | None
    ) -> Node | None:
        """The node of a call; None where it is none of the sums that are followed."""
        if not args:
            return None
        if name in LISTS:
            return self._stacked(name, args, kwargs, at)
        first = args[0]
        if not _is_small(first):
            return None
        if name in _PASSES or name in ("sum", "mean"):
            return self._handed_on(name, first, args, kwargs, out, at)
        node = earlier if earlier is not None else self._node(first)
        reflected = getattr(func, "__name__", "").startswith("__r")
        use = None if at is None else Use(at, name, 0, len(args), reflected)
        if name in _SIGNS:
            return self._sum(name, node, args, kwargs, at, use)
        if name in _FACTORS:
            return self._scaled(name, node, args, kwargs, use, out)
        return None

    def _handed_on(self, name: str, first: Tensor, args: Any, kwargs: Any, out: Tensor, at: Mark | None) -> Node | None:
        known = self._nodes.get(id(first))
        if known is None or known[0]() is not first:
            return None
        node = known[1]
        if name in _PASSES:
            return node if first.numel() == out.numel() else None
        if len(args) > 1 or not set(kwargs) <= {"dtype"}:
            return None  # along a dimension
        if first.numel() == 1 and not (isinstance(node, Sum) and node.stacked):
            return node
        return Reduced(node, name == "mean", first.numel(), self._leaf(out, at))

    def _sum(self, name: str, node: Node, args: Any, kwargs: Any, at: Mark | None, use: Use | None) -> Node | None:
        other = args[1] if len(args) > 1 else kwargs.get("other")
        alpha = kwargs.get("alpha", 1)
        if not isinstance(alpha, (int, float)):
            return None
        weights = (1.0, _SIGNS[name] * alpha)
        if use is not None and use.reflected and name == "sub":  # `1 - x` comes as x.__rsub__(1)
            weights = (-1.0, 1.0)
        right: Node
        if isinstance(other, (int, float)):
            if math.isfinite(other):  # a constant is no term
                return Sum((Part(node, weights[0], _only_tensor(use)),), at, length=1)
            right = Leaf(float(other), at)
        elif _is_small(other):
            right = self._node(other)
        else:
            return None
        before = node.length if isinstance(node, Sum) and at is not None and node.mark == at else 1
        second = None if use is None else use._replace(position=1, ordinal=before)
        return Sum((Part(node, weights[0], use), Part(right, weights[1], second)), at, length=before + 1)

    def _scaled(self, name: str, node: Node, args: Any, kwargs: Any, use: Use | None, out: Tensor) -> Node | None:
        mark = None if use is None else use.mark
        whole = self._leaf(out, mark) if out.numel() == 1 else None
        if name in ("neg", "negative"):
            return Scaled(node, -1.0, use, whole)
        by = args[1] if len(args) > 1 else kwargs.get("other")
        divides = name not in ("mul", "multiply")
        if kwargs.get("rounding_mode") is not None or (divides and use is not None and use.reflected):
            return None
        if isinstance(by, (int, float)):
            factor = by if not divides else 1 / by if by else math.inf
            return Scaled(node, float(factor), _only_tensor(use), whole) if math.isfinite(factor) else None
        if not _is_small(by):
            return None
        if isinstance(node, Sum) and node.stacked and by.dim() == 1 and by.numel() == len(node.parts):
            return _weighted(node, by, divides)
        if by.numel() == 1 and not by.requires_grad:
            return Scaled(node, 1.0, use, whole or self._leaf(out, mark), by_tensor=True)
        if not divides and args[0].numel() == 1 and not args[0].requires_grad:
            second = None if use is None else use._replace(position=1)
            return Scaled(self._node(by), 1.0, second, whole or self._leaf(out, mark), by_tensor=True)
        return None

    def _stacked(self, name: str, args: Any, kwargs: Any, at: Mark | None) -> Node | None:
        items = args[0]
        if not isinstance(items, (list, tuple)) or not all(_is_small(t) for t in items):
            return None
        if name != "stack" and any(t.numel() != 1 for t in items):
            return None
        nodes = [self._node(t) for t in items]
        uses = [None if at is None else Use(at, name, i, len(args)) for i in range(len(items))]
        parts = tuple(Part(n, 1.0, u) for n, u in zip(nodes, uses, strict=True))
        return Sum(parts, at, stacked=True) if parts else None

    def _node(self, t: Tensor) -> Node:
        known = self._nodes.get(id(t))
        if known is not None and known[0]() is t:
            return known[1]
        maker = self._makers.get(id(t))
        if maker is None or maker[0]() is not t:
            return self._leaf(t, None)
        return self._leaf(t, maker[1], maker[2] in _BEGINNINGS and not t.requires_grad)

    @staticmethod
    def _leaf(t: Tensor, mark: Mark | None, beginning: bool = False) -> Leaf:
        with quiet():
            if t.numel() == 1 and t.dtype is torch.float32:  # it is its own mean
                return Leaf(t.clone(), mark, beginning)
            # No device but MPS lacks float64, in which no mean of narrower numbers overflows.
            wide = torch.float32 if t.device.type == "mps" else torch.float64
            return Leaf(t.detach().mean(dtype=wide), mark, beginning)


def _is_small(t: Any) -> bool:
    return isinstance(t, Tensor) and t.dtype in _DTYPES and 0 < t.numel() <= MAX_ELEMENTS and _finite.checkable(t)


_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _only_tensor(use: Use | None) -> Use | None:
    return None if use is None else use._replace(position=TENSOR)


def _weighted(node: Sum, by: Tensor, divides: bool) -> Node | None:
    """A stacked list times a vector of weights."""
    with quiet():
        factors = [_finite.scalar(f) for f in by.detach().unbind()]
    if divides:
        factors = [1 / f if f else math.inf for f in factors]
    if not all(map(math.isfinite, factors)):
        return None
    parts = (p._replace(weight=p.weight * f) for p, f in zip(node.parts, factors, strict=True))
    return Sum(tuple(parts), node.mark, stacked=True)


def _as_terms(found: Sequence[Found]) -> tuple[LossTerm, ...]:
    terms = []
    for f, text in zip(found, _texts(found), strict=True):
        with quiet():
            value = f.elements * (f.leaf.value if isinstance(f.leaf.value, float) else _finite.scalar(f.leaf.value))
        mark = f.leaf.mark or (f.use.mark if f.use is not None else None)
        where = None if mark is None else location_of(mark)
        terms.append(LossTerm(text, value, math.isfinite(value), f.weight, where))
    if len(terms) > MAX_TERMS:
        kept = sorted(range(len(terms)), key=lambda i: (terms[i].finite, i))[:MAX_TERMS]
        terms = [terms[i] for i in sorted(kept)]
    return tuple(terms)


def _texts(found: Sequence[Found]) -> list[str]:
    """What the user calls each summand; several of one name are numbered."""
    sums = [None if f.use is None else target_of(f.use.mark) for f in found]
    made = [None if f.leaf.mark is None else made_text(f.leaf.mark, t) for f, t in zip(found, sums, strict=True)]
    written = [None if f.use is None else operand_text(f.use, m) for f, m in zip(found, made, strict=True)]
    written = [None if w == t else w for w, t in zip(written, sums, strict=True)]
    # In a loop over losses each is written alike where it is added; perhaps not where it was made.
    often = Counter(written)
    texts = [
        w if w is not None and (often[w] == 1 or m is None) else m or f"term {i + 1}"
        for i, (w, m) in enumerate(zip(written, made, strict=True))
    ]
    counts, seen = Counter(texts), Counter[str]()
    for i, text in enumerate(texts):
        if counts[text] > 1:
            seen[text] += 1
            texts[i] = f"{text} #{seen[text]}"
    return texts


def _is_beginning(f: Found) -> bool:
    return f.leaf.beginning and not isinstance(f.leaf.value, float) and _finite.scalar(f.leaf.value) == 0.0
