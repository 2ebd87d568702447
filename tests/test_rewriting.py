"""The user's own expression with something else in the place of an operand."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from nan_detector._rewriting import rewritten
from nan_detector._source import Mark

GUARD = "{}.clamp_min(1e-12)"


class Here:
    """Takes a mark wherever one of its operations is used."""

    mark: Mark

    def _take(self, *args: Any, **kwargs: Any) -> Here:
        frame = sys._getframe(1)
        self.mark = Mark(frame.f_code, frame.f_lasti)
        return self

    log = sqrt = pow = f = __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __itruediv__ = _take
    __getitem__ = _take


here = Here()
x = n = a = b = here


def call() -> object:
    return here.f(x, 1e-6)


def method() -> object:
    return (a, here)[1].log()


def division() -> object:
    return x / (n, b)[0]


def reflected() -> object:
    return 1.0 / here


def in_place() -> object:
    y = here
    y /= b
    return y


def subscript() -> object:
    return here[0]


def longest() -> object:
    return here.f(x, "a name that goes on and on, far beyond what anybody would wish to read", "and then another one "
                  "as long as the first, or longer", "and a third")  # fmt: skip


pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="an instruction has its columns from Python 3.11 on")


@pytest.mark.parametrize(
    ("function", "changes", "text"),
    [
        (call, {"operands": {0: GUARD}, "count": 2}, "here.f(x.clamp_min(1e-12), 1e-6)"),
        (call, {"operands": {0: "({} + 1)"}, "count": 2}, "here.f(x + 1, 1e-6)"),
        (call, {"keywords": {"eps": "1e-3"}, "name": frozenset("f")}, "here.f(x, 1e-6, eps=1e-3)"),
        (call, {"keywords": {"eps": "1e-3"}, "name": frozenset("g")}, None),
        (call, {"whole": "log_softmax({0}, 1)", "count": 2}, "log_softmax(x, 1)"),
        (method, {"operands": {0: GUARD}, "count": 1}, "(a, here)[1].clamp_min(1e-12).log()"),
        (division, {"operands": {1: GUARD}}, "x / (n, b)[0].clamp_min(1e-12)"),
        (division, {"whole": "where({1} == 0, 0.0, {0} / {1})"}, "where((n, b)[0] == 0, 0.0, x / (n, b)[0])"),
        (reflected, {"operands": {1: GUARD}, "reflected": True}, "1.0 / here.clamp_min(1e-12)"),
        (in_place, {"operands": {1: GUARD}}, "y / b.clamp_min(1e-12)"),
        (division, {"operands": {2: GUARD}}, None),
        (subscript, {"operands": {0: GUARD}}, None),
        (longest, {"operands": {0: GUARD}, "count": 2}, None),
    ],
)
def test_an_operation_with_another_operand(function: Any, changes: dict[str, Any], text: str | None) -> None:
    function()
    assert rewritten(here.mark, **changes) == text
