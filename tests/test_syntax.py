"""A function that is parsed by itself gives the nodes that the whole file gives, and is not the whole file."""

from __future__ import annotations

import ast
import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from nan_detector import _replay, _source_text, _syntax

SOURCE = '''\
import functools
from torch import nn
from math import sqrt


def decorated(f):
    return f


@functools.lru_cache(
    maxsize=decorated(4),
)
@decorated
def above(x, *, scale=decorated(2.0)):
    """Text

at the margin."""
    total = (
        x.first()
        .second(x - scale)
    )
    total += f"""{x
        / scale} and {x * 2}"""
    return [row @ total for row in x if row > 0]


class Model:
    size = decorated(3)

    def forward(self, x):
        def inner(y):
            return -y[0] + self.size

        try:
            loss: float = inner(x) / x.sum(
                0,
            )
        finally:
            pass
        return (lambda z: z ** loss)(x)

    async def later(self, x):
        async with x.open() as y:
            return await y.read(x + 1)


def ends_in_nothing(x):
    try:
        if x: return x + 1
        else: """never
    compiled"""
    finally: 1
    """neither
    this"""


value = above(1) + 2
'''


@pytest.fixture
def program(tmp_path: Path) -> types.CodeType:
    path = tmp_path / "program.py"
    path.write_text(SOURCE, encoding="utf-8")
    return compile(SOURCE, str(path), "exec")


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def named(program: types.CodeType, name: str) -> types.CodeType:
    [code] = [c for c in codes(program) if c.co_name == name]
    return code


def ranges(code: types.CodeType) -> set[_syntax.Range]:
    positions = getattr(code, "co_positions", lambda: ())()
    return {
        (line, end_line, column, end_column)
        for line, end_line, column, end_column in positions
        if None not in (line, end_line, column, end_column)
    }


def assert_same_answers(program: types.CodeType) -> int:
    whole, asked = _syntax.tree_of(program.co_filename), 0
    for code in codes(program):
        tree = _syntax.tree_around(code)
        for where in ranges(code):
            there, here = whole.at(where), tree.at(where)
            assert (there is None) == (here is None), (code, where)
            if there is None or here is None:
                continue
            asked += 1
            assert ast.dump(there, include_attributes=True) == ast.dump(here, include_attributes=True)
            assert _syntax.same_place(there, here)
            outer, inner = whole.assignment_around(there), tree.assignment_around(here)
            assert [ast.dump(n) for n in outer or ()] == [ast.dump(n) for n in inner or ()]
    return asked


needs_columns = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 knows no columns: nothing is cut out"
)


@needs_columns
@pytest.mark.parametrize("file", [_replay.__file__, _source_text.__file__, __file__])
def test_each_instruction_of_a_file_has_the_node_that_the_whole_file_gives_it(file: str) -> None:
    assert assert_same_answers(compile(Path(file).read_text(encoding="utf-8"), file, "exec")) > 100


@needs_columns
def test_so_it_is_for_every_way_to_write_a_function(program: types.CodeType) -> None:
    assert assert_same_answers(program) > 20


@needs_columns
@pytest.mark.parametrize("name", ["decorated", "above", "forward", "inner", "later", "ends_in_nothing"])
def test_a_function_is_parsed_without_the_rest_of_its_file(
    program: types.CodeType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    real = _syntax.parse
    monkeypatch.setattr(_syntax, "parse", lambda text: parsed.append(text) or real(text))
    code = named(program, name)
    tree = _syntax.tree_around(code)
    assert any(tree.at(where) is not None for where in ranges(code)) or name == "decorated"
    [text] = parsed
    assert "value = above(1)" not in text
    assert text.startswith("\n" * (code.co_firstlineno - 2))


@pytest.mark.parametrize("name", ["<module>", "<lambda>"])
def test_what_cannot_be_cut_out_is_found_in_the_whole_file(program: types.CodeType, name: str) -> None:
    assert _syntax.tree_around(named(program, name)) is _syntax.tree_of(program.co_filename)


def test_the_imports_are_those_of_the_whole_file(program: types.CodeType) -> None:
    assert _syntax.tree_of(program.co_filename).imported == {"functools", "nn"}


@needs_columns
def test_a_tree_is_kept_until_its_file_is_read_anew(program: types.CodeType) -> None:
    code, name = named(program, "above"), program.co_filename
    tree = _syntax.tree_around(code)
    assert _syntax.tree_around(code) is tree
    for text in ("value = 3\n" * 2, SOURCE.replace("    total = (", "    total = ((")):  # too short; no function there
        Path(name).write_text(text, encoding="utf-8")
        linecache.checkcache(name)
        assert _syntax.tree_around(code) is not tree
        assert _syntax.tree_around(code) is _syntax.tree_of(name)


def test_what_is_no_python_has_an_empty_tree(tmp_path: Path) -> None:
    path = tmp_path / "cell.py"
    path.write_text("%matplotlib inline\nx = f(y)\n", encoding="utf-8")
    assert _syntax.tree_of(str(path)).beginning_on(2) == []
    assert _syntax.tree_of(str(tmp_path / "nowhere.py")).beginning_on(1) == []


def test_trees_are_kept_for_a_bounded_number_of_functions(tmp_path: Path) -> None:
    for i in range(100):
        path = tmp_path / f"cell_{i}.py"
        path.write_text(f"x = f({i})\n", encoding="utf-8")
        assert len(_syntax.tree_of(str(path)).beginning_on(1)) == 1
    assert len(_syntax._trees) <= 64
