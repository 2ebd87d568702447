"""Syntax trees of the user's files, read no further than a question needs: answers come while a bad step waits.

A file is parsed whole only where its function's own lines do not do: a script of a thousand lines takes as long as
eight steps of a small model. A tree is walked only along one line.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import sys
import types
import warnings
from collections import deque
from typing import NamedTuple

#: First and last line, first and last column.
Range = tuple[int, int, int, int]

#: What an instruction can stand for.
_OPERATIONS = (ast.Call, ast.BinOp, ast.AugAssign, ast.UnaryOp, ast.Compare, ast.Subscript, ast.Attribute)
_MOST_TRIES = 5
#: Trees kept; the oldest goes first.
_MOST_KEPT = 64
#: Python 3.11 places what stands in an f-string by guess.
_UNPLACED = (ast.JoinedStr, ast.FormattedValue)


class Tree:
    """The syntax tree of a file, or of one function with the line numbers that it has there.

    Args:
        module: The tree.
    """

    def __init__(self, module: ast.Module) -> None:
        self._module = module
        self._lines: dict[int, list[ast.AST]] = {}
        self._ranges: dict[int, dict[Range, ast.AST]] = {}  # by the line on which a range begins

    def at(self, where: Range) -> ast.AST | None:
        """The operation with exactly that range."""
        known = self._ranges.get(where[0])
        if known is None:
            known = self._ranges[where[0]] = {}
            for node in self._on(where[0]):
                if isinstance(node, _OPERATIONS):
                    known[range_of(node)] = node
                    moved = _moved(node)
                    if moved is not None:
                        known[moved] = node
        return known.get(where)

    def beginning_on(self, line: int) -> list[ast.AST]:
        """The operations that begin on a line."""
        out: list[ast.AST] = []
        for node in self._on(line):
            if isinstance(node, _OPERATIONS):
                moved = _moved(node)
                if node.lineno == line or (moved is not None and moved[0] == line):
                    out.append(node)
        return out

    @functools.cached_property
    def imported(self) -> set[str]:
        """Names of modules and classes that imports bind, anywhere in the tree."""
        out: set[str] = set()
        for node in ast.walk(self._module):
            if isinstance(node, ast.Import):
                out.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    member = getattr(sys.modules.get(node.module or ""), alias.name, None)
                    if isinstance(member, (types.ModuleType, type)):
                        out.add(alias.asname or alias.name)
        return out

    def assignment_around(self, node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
        """Target and value of the assignment within which `node` stands; None where there is no single target."""
        for s in self._on(getattr(node, "lineno", 0)):
            targets = s.targets if isinstance(s, ast.Assign) else [getattr(s, "target", None)]
            value = s.value if isinstance(s, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else None
            target = targets[0]
            if value is None or len(targets) != 1 or not isinstance(target, ast.expr):
                continue
            if (isinstance(s, ast.AugAssign) and node is s) or any(node is part for part in ast.walk(value)):
                return target, value
        return None

    def _on(self, line: int) -> list[ast.AST]:
        """The nodes on a line, outer ones first, and those around them."""
        known = self._lines.get(line)
        if known is None:
            known = self._lines[line] = []
            todo: deque[ast.AST] = deque([self._module])
            while todo:
                node = todo.popleft()
                known.append(node)
                if isinstance(node, _UNPLACED):
                    todo.extend(ast.iter_child_nodes(node))
                else:
                    todo.extend(child for child in ast.iter_child_nodes(node) if _may_hold(child, line))
        return known


def _may_hold(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    if first is None or last is None:  # arguments and the like have no place of their own
        return True
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.decorator_list:
        first = node.decorator_list[0].lineno  # above the definition, which begins at its "def"
    return bool(first <= line <= last)


def range_of(node: ast.AST) -> Range:
    """Where a statement or an expression stands."""
    return (
        getattr(node, "lineno", 0),
        getattr(node, "end_lineno", None) or 0,
        getattr(node, "col_offset", 0),
        getattr(node, "end_col_offset", None) or 0,
    )


def same_place(a: ast.AST, b: ast.AST) -> bool:
    """True of one node, and of its counterpart in another tree of the same file."""
    return a is b or (type(a) is type(b) and range_of(a) == range_of(b) and isinstance(a, (ast.expr, ast.stmt)))


def _moved(node: ast.AST) -> Range | None:
    """The compiler moves the start of a method call to the method's name where that is on a later line."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    attr = node.func
    if attr.end_lineno == attr.lineno:
        return None
    start = (attr.end_col_offset or 0) - len(attr.attr)
    return (attr.end_lineno or 0, node.end_lineno or 0, start, node.end_col_offset or 0)


class _Kept(NamedTuple):
    """A tree, and what it was made of: while it is held, nothing else has its identity."""

    code: types.CodeType | None
    lines: list[str]
    tree: Tree


#: By file and identity of the code; 0 for the whole file.
_trees: dict[tuple[str, int], _Kept] = {}


def tree_of(filename: str) -> Tree:
    """The tree of a whole file; an empty one where it cannot be read or parsed."""
    lines = linecache.getlines(filename)
    known = _trees.get((filename, 0))
    if known is not None and known.lines is lines:
        return known.tree
    return _keep((filename, 0), None, lines, _parsed("".join(lines)) or Tree(ast.Module([], [])))


def tree_around(code: types.CodeType) -> Tree:
    """A tree that holds what `code` was compiled from: of that function alone where it can be cut out, else of all."""
    name = code.co_filename
    lines = linecache.getlines(name)
    known = _trees.get((name, id(code)))
    if known is not None and known.lines is lines:
        return known.tree
    return _keep((name, id(code)), code, lines, _cut_out(code, lines) or tree_of(name))


def _keep(key: tuple[str, int], code: types.CodeType | None, lines: list[str], tree: Tree) -> Tree:
    while len(_trees) >= _MOST_KEPT:
        with contextlib.suppress(KeyError, StopIteration, RuntimeError):  # another thread was faster
            del _trees[next(iter(_trees))]
    _trees[key] = _Kept(code, lines, tree)
    return tree


def _cut_out(code: types.CodeType, lines: list[str]) -> Tree | None:
    if code.co_name.startswith("<"):  # a module, or an expression
        return None
    first, last = code.co_firstlineno, _last_line(code)
    if not 1 <= first <= last <= len(lines):
        return None
    block = "".join(lines[first - 1 : last])
    if not block[:1].isspace():
        return _parsed("\n" * (first - 1) + block)
    # Something must stand around an indented block; it goes onto the line before, so that the block keeps its place.
    return _parsed("\n" * (first - 2) + "if 1:\n" + block) if first > 1 else None


def _last_line(code: types.CodeType) -> int:
    """The last line that a function's instructions come from; 0 where that is not known exactly."""
    positions = getattr(code, "co_positions", None)  # Python 3.11
    if positions is None:
        return 0
    last, exact = 0, False
    for _, line, column, _ in positions():
        last = max(last, line or 0)
        exact = exact or column is not None  # -X no_debug_ranges: the first line of each statement is all there is
    if not exact:
        return 0
    return max([last, *(_last_line(c) for c in code.co_consts if isinstance(c, types.CodeType))])


def _parsed(text: str) -> Tree | None:
    try:
        with warnings.catch_warnings():  # the compiler gave the user its warnings about this text already
            warnings.simplefilter("ignore")
            return Tree(parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what ast.parse raises; a notebook's magics
        return None


def parse(text: str) -> ast.Module:
    """`ast.parse`, which in CPython 3.11 fails now and then while another thread parses: both count one depth.

    A lock would be no help against the program's own threads, and a finalizer that runs within could wait for it.
    """
    for _ in range(_MOST_TRIES - 1):
        with contextlib.suppress(SystemError):
            return ast.parse(text)
    return ast.parse(text)
