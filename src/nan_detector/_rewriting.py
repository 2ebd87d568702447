"""The user's own expression with something else in the place of an operand: how a fix would be written there."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nan_detector._source_text import _call_argument, _node_at, clean

if TYPE_CHECKING:
    from nan_detector._source import Mark

#: Longest rewritten expression; what would be longer is given up.
MAX_REWRITTEN = 160
#: "1e-06", as Python prints 1e-6.
_EXPONENT = re.compile(r"(?<=\d)e(-?)\+?0+(\d)\b")


def rewritten(
    mark: Mark,
    *,
    operands: Mapping[int, str] | None = None,
    keywords: Mapping[str, str] | None = None,
    whole: str = "",
    count: int | None = None,
    reflected: bool = False,
    name: frozenset[str] | None = None,
) -> str | None:
    """The operation at the instruction, changed.

    Args:
        mark: The instruction.
        operands: Position of an operand (as PyTorch received it; of an operator, 0 is the left one) to what is written
            in its place, with "{}" for its present text.
        keywords: Keyword arguments that are added or changed.
        whole: What is written instead of all of it, with "{0}", "{1}" for the present operands.
        count: How many positional arguments PyTorch received.
        reflected: The operator came as its reflected method.
        name: What the function, or the operator ("div", "matmul"), must be called; None for anything.

    Returns:
        The expression; None where it is not certain, or longer than `MAX_REWRITTEN`.
    """
    node = _node_at(mark)
    if node is None or (name is not None and _called(node) not in name):
        return None
    wanted = set(operands or ()) | {i for i in range(3) if f"{{{i}}}" in whole}
    present = {i: _operand_node(node, i, count, mark, reflected) for i in wanted}
    if any(found is None for found in present.values()):
        return None
    try:
        texts = {i: _in_brackets(found) for i, found in present.items() if found is not None}
        if whole:
            text = whole
            for i, old in texts.items():
                place, bare = f"{{{i}}}", old[1:-1] if is_bracketed(old) else old
                for begin, end in (("(", ","), ("(", ")"), (", ", ","), (", ", ")")):  # an argument needs no brackets
                    text = text.replace(f"{begin}{place}{end}", f"{begin}{bare}{end}")
                text = text.replace(place, old)
        else:
            new = {f"_{i}_": t.replace("{}", texts[i]) for i, t in (operands or {}).items()}
            places = {id(present[i]): f"_{i}_" for i in operands or {}}
            text = _with_operands(node, places, keywords or {}) or ""
            for place, written in new.items():
                if is_bracketed(written):  # a first argument needs no brackets of its own
                    for end in (",", ")"):
                        text = text.replace(f"({place}{end}", f"({written[1:-1]}{end}")
                text = text.replace(place, written)
    except RecursionError:
        return None
    text = _EXPONENT.sub(r"e\1\2", clean(" ".join(text.split("\n"))))
    return text if 0 < len(text) <= MAX_REWRITTEN else None


def _operand_node(node: ast.AST, position: int, count: int | None, mark: Mark, reflected: bool) -> ast.expr | None:
    if isinstance(node, ast.Call):
        return _call_argument(node, position, None, count, mark)
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        left = node.left if isinstance(node, ast.BinOp) else node.target
        right = node.right if isinstance(node, ast.BinOp) else node.value
        return (left, right)[position] if position < 2 else None
    return None


def _in_brackets(node: ast.expr) -> str:
    """The text of an operand, as it may stand in front of a dot or within any operator."""
    text = ast.unparse(node)
    plain = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))
    return text if plain else f"({text})"


_SYMBOL_NAMES: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.MatMult: "matmul",
    ast.Div: "div",
    ast.Mod: "remainder",
    ast.Pow: "pow",
}


def _called(node: ast.AST) -> str:
    """The name of the function that a call calls, or of an operator."""
    if isinstance(node, ast.Call):
        func = node.func
        return (func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else "").strip(
            "_"
        )
    return _SYMBOL_NAMES.get(type(node.op), "") if isinstance(node, (ast.BinOp, ast.AugAssign)) else ""


def is_bracketed(text: str) -> bool:
    """True where the first bracket is closed by the last."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return i == len(text) - 1 and text[0] == "("
    return False


def _with_operands(node: ast.AST, places: Mapping[int, str], keywords: Mapping[str, str]) -> str | None:
    """The text of `node` with names in the place of the operands of these identities."""

    def changed(old: ast.expr) -> ast.expr:
        return ast.Name(places[id(old)]) if id(old) in places else old

    if isinstance(node, ast.Call):
        func = node.func
        if isinstance(func, ast.Attribute):
            func = ast.Attribute(changed(func.value), func.attr, func.ctx)
        kept = [ast.keyword(k.arg, changed(k.value)) for k in node.keywords if k.arg not in keywords]
        kept += [ast.keyword(k, ast.Name(v)) for k, v in keywords.items()]
        return ast.unparse(ast.Call(func, [changed(a) for a in node.args], kept))
    if keywords:
        return None
    if isinstance(node, ast.BinOp):
        return ast.unparse(ast.BinOp(changed(node.left), node.op, changed(node.right)))
    if isinstance(node, ast.AugAssign):
        return ast.unparse(ast.BinOp(changed(node.target), node.op, changed(node.value)))
    return None
