"""How a loss was added up, as a tree, and the walk down to its summands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Union

from torch import Tensor

from nan_detector._loss_text import Use, made_text, operand_text, stands_within
from nan_detector._source import Mark


@dataclass(frozen=True, eq=False)
class Leaf:
    """A value that no sum made. Of a tensor its mean is kept: its elements may be overwritten before they are read."""

    value: Tensor | float
    mark: Mark | None = None  # of the call that made it
    beginning: bool = False


@dataclass(frozen=True, eq=False)
class Sum:
    """Also a list that was stacked, whose reduction is the sum."""

    parts: tuple[Part, ...]
    mark: Mark | None
    stacked: bool = False
    length: int = 0  # summands that this instruction has added so far


@dataclass(frozen=True, eq=False)
class Scaled:
    node: Node
    factor: float
    use: Use | None
    whole: Leaf | None = None  # the product, where it has one element
    by_tensor: bool = False  # the factor is a tensor: a term of its own in the sum that it stands in


@dataclass(frozen=True, eq=False)
class Reduced:
    node: Node
    mean: bool
    count: int  # elements
    whole: Leaf


Node = Union[Leaf, Sum, Scaled, Reduced]  # noqa: UP007  # names of classes that are not there yet


class Part(NamedTuple):
    node: Node
    weight: float
    use: Use | None


def without_common_factors(node: Node) -> tuple[Node, Reduced | None]:
    """The sum within what all of it is multiplied by, and the reduction around it."""
    reduction = None
    while True:
        if isinstance(node, Scaled):
            node = node.node
        elif isinstance(node, Reduced):
            reduction, node = node, node.node
        elif isinstance(node, Sum) and len(node.parts) == 1:
            node = node.parts[0].node
        else:
            return node, reduction


@dataclass(frozen=True)
class Found:
    """A summand: the loss holds `weight` times the `elements`-fold mean of the leaf."""

    leaf: Leaf
    weight: float
    elements: float
    use: Use | None


def summands(root: Node, reduction: Reduced | None) -> Iterator[Found]:
    """The leaves of a sum, from left to right."""
    mean = reduction is None or reduction.mean
    todo = [(Part(root, 1.0, None), 1.0 if reduction is None or reduction.mean else float(reduction.count))]
    while todo:
        (node, weight, use), elements = todo.pop()
        if isinstance(node, Scaled):
            if _is_term(node, use):
                yield _product(node, weight, elements, use)
            else:
                todo.append((Part(node.node, weight * node.factor, node.use), elements))
        elif isinstance(node, Reduced):
            items = node.node if isinstance(node.node, Sum) and node.node.stacked else None
            if items is None or node.count != len(items.parts):
                todo.append((Part(node.whole, weight, use), elements))
            else:
                share = weight / node.count if node.mean else weight
                todo += [(p._replace(weight=p.weight * share), elements) for p in reversed(items.parts)]
        elif isinstance(node, Sum):
            n = len(node.parts) if node.stacked else 1
            share = weight / n if mean and node is not root else weight
            parts = [(p._replace(weight=p.weight * share), elements if mean else elements / n) for p in node.parts]
            todo += reversed(parts)
        else:
            yield Found(node, weight, elements, use)


def _is_term(node: Scaled, use: Use | None) -> bool:
    """True for a product that the user sees as one term: made elsewhere than in the sum, or of what has no name."""
    if node.by_tensor:
        return True
    if use is None or _holds_sum(node):
        return False
    if node.use is None or not stands_within(node.use.mark, use.mark):
        return True
    made = node.node.mark if isinstance(node.node, Leaf) else None
    return operand_text(node.use, None if made is None else made_text(made)) is None


def _holds_sum(node: Node) -> bool:
    while isinstance(node, Scaled) and not node.by_tensor:
        node = node.node
    if isinstance(node, Reduced):
        node = node.node
        return isinstance(node, Sum) and node.stacked
    return isinstance(node, Sum)


def _product(node: Scaled, weight: float, elements: float, use: Use | None) -> Found:
    mark = None if node.use is None else node.use.mark
    if node.whole is not None:
        return Found(node.whole, weight, elements, use)
    inner: Node = node
    while isinstance(inner, Scaled) and inner.whole is None:
        elements, inner = elements * inner.factor, inner.node
    whole = inner.whole if isinstance(inner, (Scaled, Reduced)) else inner
    assert isinstance(whole, Leaf), "a sum is no term"
    return Found(Leaf(whole.value, mark), weight, elements, use)
