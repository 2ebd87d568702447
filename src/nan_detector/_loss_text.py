"""What the user calls a summand of a loss: its text where it is added, or where it was made."""

from __future__ import annotations

import ast
from typing import NamedTuple

from nan_detector._source import Mark
from nan_detector._source_text import _node_at, _text, argument_text
from nan_detector._syntax import same_place, tree_around


class Use(NamedTuple):
    """One operand of a call, and where it stands there.

    Attributes:
        mark: The instruction.
        name: Plain name of the function that ran ("add", "stack").
        position: Index among the arguments that PyTorch received; of a list of summands, within the list. `TENSOR`
            where it is the only tensor: of `2 * x` and `x * 2` PyTorch receives the same.
        given: How many positional arguments PyTorch received.
        reflected: The operator came as its reflected method.
        ordinal: Which operand it is of all that this instruction has added: `sum(...)` is one instruction.
    """

    mark: Mark
    name: str
    position: int
    given: int
    reflected: bool = False
    ordinal: int = 0


#: Position of the only tensor of an operation.
TENSOR = -1


def operand_text(use: Use, made: str | None = None) -> str | None:
    """The operand as it is written, such as "recon" or "losses['kl']"; None where that is not certain.

    Args:
        use: Where it stands.
        made: What it was called where it was made.
    """
    node = _node_at(use.mark)
    if isinstance(node, ast.AugAssign) and use.position in (0, TENSOR):
        return None  # the running total: its name is that of the sum
    if isinstance(node, ast.BinOp) and use.position == TENSOR:
        return _tensor_side(node.left, node.right, made)
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.UnaryOp)):
        if use.position == TENSOR:
            use = use._replace(position=0)
        return argument_text(use.mark, use.position, None, reflected=use.reflected)
    if not isinstance(node, ast.Call):
        return None
    called = _last_name(node.func)
    if called == "sum" and use.name == "add":
        return _of_sum(node, use.ordinal)
    if called != use.name and called != f"{use.name}_":
        return None
    if use.name in LISTS:
        return _element(node.args[0], use.position) if node.args else None
    return argument_text(use.mark, max(use.position, 0), None, count=use.given)


def _tensor_side(left: ast.expr, right: ast.expr, made: str | None) -> str | None:
    """Of a tensor and a number, in either order, the tensor: "kl" of `beta * kl`, where that can be told."""
    texts = _text(left), _text(right)
    if _is_number(left) != _is_number(right):
        return texts[_is_number(left)]
    if (texts[0] == made) != (texts[1] == made):
        return made
    # Results are computed, settings are read: a name, an attribute.
    computed = [isinstance(side, (ast.Call, ast.BinOp)) for side in (left, right)]
    if computed[0] != computed[1]:
        return texts[computed[1]]
    settings = [isinstance(side, ast.Attribute) for side in (left, right)]
    return texts[settings[0]] if settings[0] != settings[1] else None


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    return isinstance(node, ast.Constant)


def stands_within(inner: Mark, outer: Mark) -> bool:
    """True when the operation at `inner` is written in an operand of the one at `outer`."""
    if inner.code.co_filename != outer.code.co_filename:
        return False
    node, around = _node_at(inner), _node_at(outer)
    if node is None or around is None:
        return inner.code is outer.code and inner.lineno == outer.lineno
    return any(same_place(node, part) for part in ast.walk(around))


#: Functions that take their summands as one list.
LISTS = ("stack", "cat", "concat", "hstack")


def _of_sum(node: ast.Call, ordinal: int) -> str | None:
    """Operand `ordinal` of Python's own `sum(items)` or `sum(items, start)`."""
    start = node.args[1] if len(node.args) == 2 else next((k.value for k in node.keywords if k.arg == "start"), None)
    if start is not None and not isinstance(start, ast.Constant):
        if ordinal == 0:
            return _text(start)
        ordinal -= 1
    return _element(node.args[0], ordinal) if node.args else None


def _element(items: ast.expr, position: int) -> str | None:
    if not isinstance(items, (ast.List, ast.Tuple)) or any(isinstance(e, ast.Starred) for e in items.elts):
        return None
    return _text(items.elts[position]) if position < len(items.elts) else None


def _last_name(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def target_of(mark: Mark) -> str | None:
    """What the statement around the instruction assigns to, such as "loss"; None where it assigns to no single name."""
    node = _node_at(mark)
    found = None if node is None else tree_around(mark.code).assignment_around(node)
    return None if found is None else _text(found[0])


def made_text(mark: Mark, unless: str | None = None) -> str | None:
    """The text of what an instruction makes: the name that its value is given at once, else the expression itself.

    Args:
        mark: The instruction.
        unless: A name that is that of the sum.
    """
    node = _node_at(mark)
    if node is None:
        return None
    found = tree_around(mark.code).assignment_around(node)
    name = _text(found[0]) if found is not None and found[1] is node else None
    return _text(node) if name is None or name == unless else name
