"""What the user wrote at one instruction: the call or operator, and its arguments, as text.

The instruction's column range (Python 3.11) names one node of the file's syntax tree exactly. Without it (3.10, or
`-X no_debug_ranges`) a node is accepted only if the line holds a single one that the instruction can stand for.
Where that is not certain the answer is None: a wrong expression is worse than none.
"""

from __future__ import annotations

import ast
import dis
import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nan_detector._syntax import Range, tree_around, tree_of

if TYPE_CHECKING:
    from nan_detector._source import Mark

#: Longest expression in a record; more is cut with an ellipsis.
MAX_EXPRESSION = 60

#: Modules by names that a notebook's other cell imports.
_USUAL_MODULES = frozenset(("torch", "F", "nn", "np"))

#: Instructions that use an expression's value and carry its range: `for row in f(x)` iterates, it does not call f.
_ITERATES = frozenset(("GET_ITER", "FOR_ITER", "GET_YIELD_FROM_ITER", "GET_LEN"))
_UNPACKS = frozenset(("LIST_EXTEND", "SET_UPDATE", "UNPACK_SEQUENCE", "UNPACK_EX"))
_NO_CALLS = _ITERATES | _UNPACKS
#: Room that an instruction keeps behind it for the interpreter (Python 3.11), two bytes each.
_CACHE = dis.opmap.get("CACHE", 0) if sys.version_info >= (3, 11) else -1


def call_expression(mark: Mark) -> str | None:
    """What the user wrote at the instruction.

    Returns:
        Of a call the function, as "torch.sqrt" or "F.normalize", and of a method of something longer than a dotted
        name its own name ("sqrt" for ``x.sum(-1).sqrt()``); of an operator, subscript or attribute the whole
        expression ("x / n"), at most 60 characters. None where not certain.
    """
    node = _node_at(mark)
    if not isinstance(node, ast.Call):
        return None if node is None else _text(node)
    func = node.func
    if isinstance(func, ast.Attribute) and not _is_dotted(func):
        return clean(func.attr)
    return None if isinstance(func, ast.Lambda) else _text(func)


def argument_text(
    mark: Mark, position: int | None, keyword: str | None, *, count: int | None = None, reflected: bool = False
) -> str | None:
    """The text of one argument of the operation at the instruction, such as "y" or "batch['labels']".

    Args:
        mark: The instruction.
        position: Index among the positional arguments that PyTorch received. Of a method call, 0 is the receiver.
            Of an operator 0 is the left operand and 1 the right; of a subscript or attribute 0 is the value.
        keyword: Its name where it was passed by keyword, tried first.
        count: How many positional arguments PyTorch received. ``a.f(x)`` is a method of the tensor ``a``, or a
            function of the module ``a``: the count tells, and where it fits neither the answer is None. Without it,
            a name that the file imports (or ``torch``, ``F``) is a module, any other a tensor. Where ``torch.Tensor``
            has no ``f``, or ``a`` is ``self``, arguments count as written: ``criterion(output, target)`` hands them
            on in this order.
        reflected: The operator came as its reflected method (``__rsub__``), whose arguments are right, left.

    Returns:
        The text, at most 60 characters; None where not certain.
    """
    node = _node_at(mark)
    if isinstance(node, ast.Call):
        chosen = _call_argument(node, position, keyword, count, mark)
    else:
        chosen = _operand(node, position, reflected)
    return None if chosen is None else _text(chosen)


def clean(text: str) -> str:
    """`text` on one line, without characters that could steer a terminal or reorder what is read."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _call_argument(
    node: ast.Call, position: int | None, keyword: str | None, count: int | None, mark: Mark
) -> ast.expr | None:
    if keyword is not None:
        for passed in node.keywords:
            if passed.arg == keyword:
                return passed.value
    if position is None or position < 0:
        return None
    args = node.args
    if any(isinstance(arg, ast.Starred) for arg in args):
        return None
    method = _is_method_call(node, count, mark)
    if method is None:
        return None
    if method:
        assert isinstance(node.func, ast.Attribute)
        args = [node.func.value, *args]
    return args[position] if position < len(args) else None


def _is_method_call(node: ast.Call, count: int | None, mark: Mark) -> bool | None:
    func = node.func
    if not isinstance(func, ast.Attribute) or (isinstance(func.value, ast.Name) and func.value.id in ("self", "cls")):
        return False
    if not hasattr(getattr(sys.modules.get("torch"), "Tensor", None), func.attr):
        return False
    if count is not None:
        return {len(node.args): False, len(node.args) + 1: True}.get(count)
    root = func.value
    while isinstance(root, ast.Attribute):
        root = root.value
    return not (isinstance(root, ast.Name) and root.id in tree_of(mark.code.co_filename).imported | _USUAL_MODULES)


def _operand(node: ast.AST | None, position: int | None, reflected: bool) -> ast.expr | None:
    operands: tuple[ast.expr, ...] = ()
    if isinstance(node, ast.BinOp):
        operands = (node.left, node.right)
    elif isinstance(node, ast.Compare) and len(node.comparators) == 1:
        operands = (node.left, node.comparators[0])
    elif isinstance(node, ast.AugAssign):
        operands = (node.target, node.value)
    elif isinstance(node, ast.UnaryOp):
        operands = (node.operand,)
    elif isinstance(node, ast.Subscript):
        operands = (node.value, node.slice)
    elif isinstance(node, ast.Attribute):
        operands = (node.value,)
    # A number on the left has no operator for tensors: the tensor's reflected one ran.
    if len(operands) == 2 and (reflected or isinstance(operands[0], ast.Constant)):
        operands = (operands[1], operands[0])
    if position is None or not 0 <= position < len(operands):
        return None
    chosen = operands[position]
    return None if isinstance(chosen, ast.Constant) else chosen


def _text(node: ast.AST) -> str | None:
    try:
        text = clean(" ".join(ast.unparse(node).split("\n")))
    except RecursionError:
        return None
    return text if len(text) <= MAX_EXPRESSION else text[: MAX_EXPRESSION - 1] + "…"


def _is_dotted(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _node_at(mark: Mark) -> ast.AST | None:
    name = _opname(mark)
    if not name or name in _NO_CALLS:
        return None
    tree = tree_around(mark.code)
    where = _range_of(mark)
    if where is not None:
        return tree.at(where)
    opcode = _opcode(mark)
    if opcode is None:
        return None
    fitting = [node for node in tree.beginning_on(mark.lineno) if _can_be(node, opcode)]
    return fitting[0] if len(fitting) == 1 else None


def _range_of(mark: Mark) -> Range | None:
    positions = getattr(mark.code, "co_positions", None)  # Python 3.11
    if positions is None:
        return None
    found: Iterator[tuple[int | None, int | None, int | None, int | None]] = positions()
    for line, end_line, column, end_column in itertools.islice(found, mark.lasti // 2, mark.lasti // 2 + 1):
        if line is not None and end_line is not None and column is not None and end_column is not None:
            return (line, end_line, column, end_column)
    return None


def _opname(mark: Mark) -> str:
    """Name of the instruction; "" where there is none. Taking the function apart would cost a step's time."""
    code, at = mark.code.co_code, mark.lasti
    # While a function written in Python runs, its caller's `f_lasti` is at the caches that follow the call.
    while at > 0 and code[at] == _CACHE:
        at -= 2
    return dis.opname[code[at]] if 0 <= at < len(code) else ""


def _opcode(mark: Mark) -> dis.Instruction | None:
    return max(
        (i for i in dis.get_instructions(mark.code) if i.offset <= mark.lasti), key=lambda i: i.offset, default=None
    )


#: ast operator -> the symbol of Python 3.11's BINARY_OP, and the end of the name of 3.10's instructions.
_OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "ADD"),
    ast.Sub: ("-", "SUBTRACT"),
    ast.Mult: ("*", "MULTIPLY"),
    ast.MatMult: ("@", "MATRIX_MULTIPLY"),
    ast.Div: ("/", "TRUE_DIVIDE"),
    ast.FloorDiv: ("//", "FLOOR_DIVIDE"),
    ast.Mod: ("%", "MODULO"),
    ast.Pow: ("**", "POWER"),
}


def _can_be(node: ast.AST, opcode: dis.Instruction) -> bool:
    name, symbol = opcode.opname, opcode.argrepr
    if isinstance(node, ast.Call):
        return name.startswith("CALL")
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        written, old_name = _OPERATORS.get(type(node.op), ("", ""))
        prefix = "BINARY_" if isinstance(node, ast.BinOp) else "INPLACE_"
        written += "" if isinstance(node, ast.BinOp) else "="
        return symbol == written if name == "BINARY_OP" else bool(old_name) and name == prefix + old_name
    if isinstance(node, ast.UnaryOp):
        return name.startswith("UNARY_")
    if isinstance(node, ast.Compare):
        return name == "COMPARE_OP"
    if isinstance(node, ast.Subscript):
        return name in ("BINARY_SUBSCR", "BINARY_SLICE", "STORE_SUBSCR", "STORE_SLICE")
    return isinstance(node, ast.Attribute) and name in ("LOAD_ATTR", "STORE_ATTR")
