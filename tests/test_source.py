"""Marks name the user's instruction, and their text is what the user wrote there."""

from __future__ import annotations

import ast
import dataclasses
import json
import linecache
import os
import subprocess
import sys
import textwrap
import threading
import timeit
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from nan_detector import _source as source
from nan_detector import _syntax
from nan_detector._records import Location
from nan_detector._source import (
    Mark,
    argument_text,
    call_expression,
    frame_self,
    here,
    here_until,
    location_of,
    source_context,
)

SRC = str(Path(source.__file__).parent.parent)


class Calls(TorchFunctionMode):
    """Marks every call of the user that reaches PyTorch, from inside PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, Mark | None]] = []
        self.owners: list[object] = []

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func.__name__, len(args), here(2)))  # 2: not this handler, which is a test's and so a user's
        self.owners.append(frame_self(2))
        return func(*args, **(kwargs or {}))

    def mark(self, name: str) -> Mark:
        """The mark of the only call of `name`."""
        [mark] = [mark for called, _, mark in self.seen if called == name]
        assert mark is not None
        return mark


def run_file(tmp_path: Path, text: str, name: str = "program.py", **names: Any) -> tuple[Calls, dict[str, Any], Path]:
    path = tmp_path / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    space = {"torch": torch, "F": F, "__name__": "program", **names}
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    with Calls() as calls:
        exec(code, space)
    return calls, space, path


# ------------------------------------------------------------------------------------------------ where


def test_a_mark_in_this_file_names_this_line():
    mark, line = here(), sys._getframe().f_lineno
    assert mark is not None
    location = location_of(mark)
    assert (location.file, location.line) == (__file__, line)
    assert location.function == "test_a_mark_in_this_file_names_this_line"
    assert location.source_line == "mark, line = here(), sys._getframe().f_lineno"


def test_frames_of_pytorch_are_passed_over():
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    with Calls() as calls:
        layer(torch.ones(1, 2))
        line = sys._getframe().f_lineno - 1
    assert {location_of(mark).line for name, _, mark in calls.seen if mark and name in ("linear", "layer_norm")} == {
        line
    }
    assert {mark.code for _, _, mark in calls.seen if mark} == {sys._getframe().f_code}


def test_depth_chooses_the_first_frame_that_counts():
    def inner() -> tuple[Mark | None, Mark | None]:
        return here(1), here(2)

    own, caller = inner()
    assert own is not None and own.code is inner.__code__
    assert caller is not None and caller.code is sys._getframe().f_code


def test_a_mark_stays_with_its_instruction_when_the_frame_goes_on():
    def two() -> tuple[Mark | None, Mark | None]:
        first = here()
        second = here()
        return first, second

    first, second = two()
    assert first is not None and second is not None
    assert second.lineno == first.lineno + 1


def test_here_until_stops_at_the_runner():
    def runner(call: Callable[[], Mark | None]) -> Mark | None:
        return call()

    barrier = runner.__code__
    plumbing = compile("def call(): return here_until(barrier)", torch.__file__, "exec")
    space: dict[str, Any] = {"here_until": here_until, "barrier": barrier}
    exec(plumbing, space)
    assert runner(space["call"]) is None
    outside = space["call"]()
    assert outside is not None and outside.code is sys._getframe().f_code

    def user() -> Mark | None:
        return here_until(barrier)

    inside = runner(user)
    assert inside is not None and inside.code is user.__code__


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("<stdin>", True),
        ("<console>", True),
        ("<ipython-input-1-0123456789ab>", True),
        ("<python-input-3>", True),
        ("<doctest README.md[0]>", True),
        ("<timeit-src>", True),
        ("<string>", True),
        ("<eval_with_key>.12", False),
        ("<__array_function__ internals>", False),
        ("<attrs generated init program.Thing>", False),
        ("<frozen importlib._bootstrap>", False),
        (torch.__file__, False),
        (os.path.join(os.path.dirname(torch.__file__), "no", "such", "file.py"), False),
        (os.path.dirname(torch.__file__) + "vision/ops/boxes.py", True),
        (os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "timm", "models", "vit.py"), True),
        (os.path.join(SRC, "nan_detector", "_tape.py"), False),
        (os.path.join(SRC, "nan_detector", "_render", "html.py"), False),
        (os.path.join(SRC, "nan_detector", "_demo", "digits.py"), True),
        (os.path.join(SRC, "nan_detector_users", "train.py"), True),
        (threading.__file__, False),
        (os.path.join(os.path.dirname(os.__file__), "concurrent", "futures", "thread.py"), False),
        (os.path.join(os.path.dirname(os.__file__), "site-packages", "timm", "vit.py"), True),
        (os.path.join(os.sep, "cache", "torchinductor_someone", "ab", "cabc.py"), False),
        (os.path.join(os.sep, "tmp", "ipykernel_77", "1234.py"), True),
        (__file__, True),
        ("train.py", True),
    ],
)
def test_whose_code_a_file_is(filename: str, expected: bool):
    space: dict[str, Any] = {"here": here}
    exec(compile("def call(): return here()", filename, "exec"), space)
    mark = space["call"]()
    assert mark is not None
    assert (mark.code is space["call"].__code__) is expected


def test_a_link_to_the_folder_of_pytorch_is_pytorch(tmp_path: Path):
    link = tmp_path / "linked"
    link.symlink_to(os.path.dirname(torch.__file__), target_is_directory=True)
    space: dict[str, Any] = {"here": here}
    exec(compile("def call(): return here()", str(link / "functional.py"), "exec"), space)
    assert space["call"]().code is sys._getframe().f_code


def test_a_thread_that_no_user_started_has_no_mark():
    found: list[Mark | None] = []
    work = eval(compile("lambda: found.append(here())", torch.__file__, "eval"), {"found": found, "here": here})
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None]


def test_a_file_without_end_of_names_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(source, "_MAX_KNOWN", 10)
    space: dict[str, Any] = {"here": here}
    for i in range(50):
        exec(compile("here()", f"<generated {i}>", "exec"), space)
    assert len(source._USER) <= 10


def test_where_only_a_string_was_run_it_is_the_users():
    program = textwrap.dedent(
        """
        from nan_detector._source import here, location_of, call_expression
        import sys
        def f():
            return here()
        l = location_of(f())
        print(l.file, l.line, l.function, repr(l.source_line), call_expression(f()), "torch" in sys.modules)
        """
    )
    out = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SRC},
        check=True,
    )
    assert out.stdout.split() == ["<string>", "5", "f", "''", "None", "False"]


def test_code_that_was_executed_from_a_string_has_its_own_lines(monkeypatch: pytest.MonkeyPatch):
    text = "def f(here):\n    x = 1\n    return here()\n"
    space: dict[str, Any] = {}
    exec(text, space)
    mark = space["f"](here)
    assert mark is not None
    location = source.location_of(mark)
    assert (location.file, location.line, location.function, location.source_line) == ("<string>", 3, "f", "")
    monkeypatch.setitem(linecache.cache, "<string>", (len(text), None, text.splitlines(True), "<string>"))
    assert source.location_of(mark).source_line == "return here()"


def test_a_template_does_not_stand_for_its_user():
    @dataclasses.dataclass
    class Record:
        mark: Mark | None

        def __post_init__(self) -> None:
            self.mark = here(2)  # its own frame passed over: the generated __init__ is next

    record = Record(None)
    assert record.mark is not None and record.mark.code is sys._getframe().f_code


# ------------------------------------------------------------------------------------------------ whose forward


class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.sqrt(self.scale(v)) for v in x]
        return torch.stack(parts)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, 2.0)


def test_the_module_whose_method_is_running():
    block = Block()
    with Calls() as calls:
        block(torch.ones(2))
        torch.exp(torch.ones(1))
    owners = {name: owner for (name, _, _), owner in zip(calls.seen, calls.owners, strict=True)}
    # `sqrt` is inside a comprehension that knows self, `mul` in another method, `exp` in no module at all.
    assert (owners["sqrt"], owners["mul"], owners["stack"]) == (block, block, block)
    assert owners["exp"] is None


def test_a_comprehension_without_self_belongs_to_the_method_around_it():
    class Plain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([torch.sqrt(v) for v in x])

    module = Plain()
    with Calls() as calls:
        module(torch.ones(2))
    owners = {name: owner for (name, _, _), owner in zip(calls.seen, calls.owners, strict=True)}
    assert owners["sqrt"] is module


def test_self_of_an_ordinary_object_is_no_module():
    class Trainer:
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sqrt(x)

    with Calls() as calls:
        Trainer().step(torch.ones(1))
    assert [owner for (name, _, _), owner in zip(calls.seen, calls.owners, strict=True) if name == "sqrt"] == [None]


def test_a_barrier_ends_the_search_for_a_module():
    class Runner(torch.nn.Module):
        def forward(self) -> object | None:
            return frame_self(1, barrier)

    barrier = Runner.forward.__code__
    assert Runner()() is None


# ------------------------------------------------------------------------------------------------ what it says


def test_nested_calls_on_one_line_each_give_their_own(tmp_path: Path):
    calls, _, path = run_file(tmp_path, "x = torch.ones(3)\ny = torch.log(torch.sqrt(x))\n")
    assert call_expression(calls.mark("sqrt")) == "torch.sqrt"
    assert call_expression(calls.mark("log")) == "torch.log"
    assert argument_text(calls.mark("sqrt"), 0, None) == "x"
    assert argument_text(calls.mark("log"), 0, None) == "torch.sqrt(x)"
    assert location_of(calls.mark("log")) == Location(str(path), 2, "<module>", "y = torch.log(torch.sqrt(x))")


#: Code after `x, y, n, b = ...`; the PyTorch function to look at; what was written; its arguments 0 and 1.
WRITTEN = [
    ("torch.sqrt(x)", "sqrt", "torch.sqrt", ("x", None)),
    ("torch.sqrt(input=x)", "sqrt", "torch.sqrt", (None, None)),
    ("x.sqrt()", "sqrt", "x.sqrt", ("x", None)),
    ("x.sum(-1).sqrt()", "sqrt", "sqrt", ("x.sum(-1)", None)),
    ("x.sum(-1).sqrt()", "sum", "x.sum", ("x", "-1")),
    ("(\n  x\n  .sum(-1)\n  .sqrt()\n)", "sqrt", "sqrt", ("x.sum(-1)", None)),
    ("(\n  x\n  .sum(-1)\n  .sqrt()\n)", "sum", "x.sum", ("x", "-1")),
    ("b['labels'].log()", "log", "log", ("b['labels']", None)),
    ('torch.dot(\n  x,  # one, with a (\n  b["labels"],\n)', "dot", "torch.dot", ("x", "b['labels']")),
    ("F.normalize(x,\n    dim=0)", "normalize", "F.normalize", ("x", None)),
    ("torch.split(x, 2)", "split", "torch.split", ("x", "2")),
    ("first, second = torch.split(x, 2)", "split", "torch.split", ("x", "2")),
    ("x / n", "div", "x / n", ("x", "n")),
    ("x - y", "sub", "x - y", ("x", "y")),
    ("1 + x * y", "mul", "x * y", ("x", "y")),
    ("(x +\n  y)", "add", "x + y", ("x", "y")),
    ("x @ y", "matmul", "x @ y", ("x", "y")),
    ("x ** 0.5", "pow", "x ** 0.5", ("x", None)),
    ("2 / x", "__rdiv__", "2 / x", ("x", None)),
    ("-x", "neg", "-x", ("x", None)),
    ("x > y", "gt", "x > y", ("x", "y")),
    ("x /= n", "div_", "x /= n", ("x", "n")),
    ("b['labels'] *= y", "mul_", "b['labels'] *= y", ("b['labels']", "y")),
    ("x[0]", "__getitem__", "x[0]", ("x", None)),
    ("x[y > 0]", "__getitem__", "x[y > 0]", ("x", "y > 0")),
    ("x[0] = 5.0", "__setitem__", "x[0]", ("x", None)),
    ("x.T", "__get__", "x.T", ("x", None)),
    ("[v.exp() for v in x[:1]]", "exp", "v.exp", ("v", None)),
    ("list(torch.exp(v) for v in x[:1])", "exp", "torch.exp", ("v", None)),
    ("(lambda v: torch.exp(v))(x)", "exp", "torch.exp", ("v", None)),
    ("for row in torch.unbind(x): row.exp_(); break", "unbind", "torch.unbind", ("x", None)),
    ("if (x > 0).all(): pass", "all", "all", ("x > 0", None)),
    ("sum([x, y])", "add", "sum", ("[x, y]", None)),
    ("layers['a'](x)", "linear", "layers['a']", ("x", None)),
    ("criterion(x, b['labels'])", "mse_loss", "criterion", ("x", "b['labels']")),
    ("holder.criterion(x, y)", "mse_loss", "holder.criterion", ("x", "y")),
    ("f'{1}', 'é', torch.sqrt(x)", "sqrt", "torch.sqrt", ("x", None)),
    ("torch.exp(*[x])", "exp", "torch.exp", (None, None)),
    ("torch.where(" + "x > 0.000000000001 + 0.0000000000000001 + 0.0, x, y)", "where", "torch.where", None),
]


@pytest.mark.parametrize(("code", "name", "call", "arguments"), WRITTEN, ids=[w[0] for w in WRITTEN])
def test_what_was_written(tmp_path: Path, code: str, name: str, call: str, arguments: tuple[str | None, str | None]):
    layer = torch.nn.Linear(3, 3)
    before = """\
        import torch, torch.nn.functional as F
        x, y, n = torch.ones(3) + 1, torch.ones(3), 2.0
        b = {"labels": torch.ones(3)}
        x.requires_grad_(False)
        """
    holder = types.SimpleNamespace(criterion=torch.nn.MSELoss())
    path = tmp_path / "program.py"
    text = textwrap.dedent(before) + "calls.seen.clear()\n" + code + "\n"
    path.write_text(text, encoding="utf-8")
    names = {"layers": {"a": layer}, "criterion": torch.nn.MSELoss(), "holder": holder}
    with Calls() as calls, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        exec(compile(text, str(path), "exec"), {"calls": calls, **names})
    found = [(mark, count) for called, count, mark in calls.seen if called == name]
    mark, count = found[0]
    assert mark is not None
    assert call_expression(mark) == call
    if arguments is not None:
        assert tuple(argument_text(mark, i, None) for i in (0, 1)) == arguments
        if name != "linear":  # whose module adds arguments of its own
            assert argument_text(mark, 0, None, count=count) == arguments[0]


def test_a_keyword_argument_is_found_by_name(tmp_path: Path):
    calls, _, _ = run_file(tmp_path, "x = torch.ones(3)\ntorch.clamp(x, max=x.max() * 2, min=0)\n")
    assert argument_text(calls.mark("clamp"), None, "max") == "x.max() * 2"
    assert argument_text(calls.mark("clamp"), None, "other") is None
    assert argument_text(calls.mark("clamp"), None, None) is None
    assert argument_text(calls.mark("clamp"), -1, None) is None
    assert argument_text(calls.mark("clamp"), 7, None) is None


def test_the_count_tells_a_method_from_a_function(tmp_path: Path):
    # Nothing in the file says that `lib` is a module, and `sqrt` is a method of tensors too.
    calls, _, _ = run_file(tmp_path, "x = torch.ones(3)\nlib.sqrt(x)\n", lib=torch)
    mark = calls.mark("sqrt")
    assert argument_text(mark, 0, None) == "lib"
    assert argument_text(mark, 0, None, count=1) == "x"
    assert argument_text(mark, 0, None, count=2) == "lib"
    assert argument_text(mark, 0, None, count=5) is None


def test_names_that_imports_bind_are_modules(tmp_path: Path):
    text = """\
        import torch.nn.functional
        from torch import special as sp
        x = torch.ones(3)
        sp.exp2(x)
        torch.nn.functional.softmax(x, 0)
        """
    calls, _, _ = run_file(tmp_path, text)
    assert argument_text(calls.mark("special_exp2"), 0, None) == "x"
    assert argument_text(calls.mark("softmax"), 0, None) == "x"


def test_self_is_not_the_receiver_of_a_tensor_method(tmp_path: Path):
    text = """\
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.prelu = torch.nn.PReLU()
            def forward(self, x):
                return self.prelu(x)
        net = Net()
        net(torch.ones(2))
        """
    calls, _, _ = run_file(tmp_path, text)
    mark = calls.mark("prelu")
    assert location_of(mark).function.endswith("forward")
    assert argument_text(mark, 0, None, count=2) == "x"


def test_a_reflected_operator_has_its_operands_reversed(tmp_path: Path):
    calls, _, _ = run_file(tmp_path, "x, n = torch.ones(3), 2.0\nn - x\n")
    [mark] = [mark for name, _, mark in calls.seen if name in ("__rsub__", "rsub")]
    assert argument_text(mark, 0, None, reflected=True) == "x"
    assert argument_text(mark, 1, None, reflected=True) == "n"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="columns are known since Python 3.11")
def test_iterating_a_call_is_not_the_call(tmp_path: Path):
    calls, _, _ = run_file(tmp_path, "def rows(): return torch.ones(1, 2)\nfor row in rows(): pass\n")
    assert call_expression(calls.mark("unbind")) is None


def test_long_text_is_cut(tmp_path: Path):
    argument = " + ".join(["x"] * 40)
    calls, _, _ = run_file(tmp_path, f"x = torch.ones(3)\ntorch.sqrt({argument})\n")
    text = argument_text(calls.mark("sqrt"), 0, None)
    assert text is not None and len(text) == 60 and text.endswith("…") and text.startswith("x + x")


def test_decorated_functions_and_methods_have_their_qualified_names(tmp_path: Path):
    text = """\
        import functools
        def twice(f):
            @functools.wraps(f)
            def wrapper(*args):
                return f(*args)
            return wrapper
        class A:
            @twice
            @torch.no_grad()
            def go(self, x):
                return torch.sqrt(x)
        A().go(torch.ones(1))
        """
    calls, _, path = run_file(tmp_path, text)
    location = location_of(calls.mark("sqrt"))
    assert (location.file, location.line, location.source_line) == (str(path), 11, "return torch.sqrt(x)")
    assert location.function == ("A.go" if sys.version_info >= (3, 11) else "go")


def test_cells_of_a_notebook_are_read_from_linecache():
    name = "<ipython-input-7-0123456789ab>"
    text = "x = torch.ones(2)\ny = x / torch.sqrt(x)\n"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    try:
        with Calls() as calls:
            exec(compile(text, name, "exec"), {"torch": torch})
        assert location_of(calls.mark("sqrt")) == Location(name, 2, "<module>", "y = x / torch.sqrt(x)", "In[7]")
        assert call_expression(calls.mark("sqrt")) == "torch.sqrt"
        assert argument_text(calls.mark("div"), 1, None) == "torch.sqrt(x)"
        assert source_context(location_of(calls.mark("div"))) == [
            (1, "x = torch.ones(2)"),
            (2, "y = x / torch.sqrt(x)"),
        ]
    finally:
        del linecache.cache[name]


def test_what_cannot_be_read_says_nothing(tmp_path: Path):
    gone = compile("torch.sqrt(torch.ones(1))", str(tmp_path / "never_written.py"), "exec")
    with Calls() as calls:
        exec(gone, {"torch": torch})
    mark = calls.mark("sqrt")
    assert location_of(mark).source_line == ""
    assert call_expression(mark) is None
    assert argument_text(mark, 0, None) is None
    assert source_context(location_of(mark)) == []


def test_a_file_that_changed_into_nonsense_says_nothing(tmp_path: Path):
    calls, _, path = run_file(tmp_path, "torch.sqrt(torch.ones(1))\n")
    path.write_text("torch.sqrt(torch.ones(1)\n\x00(", encoding="utf-8")
    linecache.checkcache(str(path))
    assert call_expression(calls.mark("sqrt")) is None
    assert argument_text(calls.mark("sqrt"), 0, None) is None


def test_reading_a_file_again_repeats_none_of_its_warnings(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls, _, _ = run_file(tmp_path, "s = '\\d'\ntorch.sqrt(torch.ones(1))\n")
    assert call_expression(calls.mark("sqrt")) == "torch.sqrt"  # pytest makes any warning an error


def test_control_characters_are_not_passed_on(tmp_path: Path):
    text = "x = torch.ones(1)\ntorch.sqrt(x)  # \x1b[31mred\u202e\tend" + "." * 300 + "\n"
    calls, _, _ = run_file(tmp_path, text)
    line = location_of(calls.mark("sqrt")).source_line
    assert line.startswith("torch.sqrt(x)  # \N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER} end")
    assert line.isprintable() and len(line) == 200


def test_a_relative_path_is_that_of_the_folder_at_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("relative.py").write_text("torch.sqrt(torch.ones(1))\n", encoding="utf-8")
    with Calls() as calls:
        exec(compile(Path("relative.py").read_text(encoding="utf-8"), "relative.py", "exec"), {"torch": torch})
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert location_of(calls.mark("sqrt")).file == str(tmp_path / "work" / "relative.py")


# ------------------------------------------------------------------------------------------------ neighbours


def test_context_is_cut_from_its_indentation(tmp_path: Path):
    path = tmp_path / "m.py"
    path.write_text("class A:\n\n    def f(self):\n\treturn (\n\n\t\t\b1)\n", encoding="utf-8")
    location = Location(str(path), 4, "A.f", "return (")
    assert source_context(location) == [(3, "def f(self):"), (4, "return (")]
    assert source_context(location, before=0, after=9) == [
        (4, "return ("),
        (5, ""),
        (6, "    \N{REPLACEMENT CHARACTER}1)"),
    ]
    assert source_context(location, before=99)[0] == (1, "class A:")


@pytest.mark.parametrize("line", [0, -1, 3, 10**9])
def test_context_of_a_line_that_is_not_there(tmp_path: Path, line: int):
    path = tmp_path / "m.py"
    path.write_text("a = 1\nb = 2\n", encoding="utf-8")
    assert source_context(Location(str(path), line, "f", "")) == []


def test_context_of_a_file_that_says_something_else_now(tmp_path: Path):
    path = tmp_path / "m.py"
    path.write_text("a = 1\nb = 2\n", encoding="utf-8")
    assert source_context(Location(str(path), 2, "f", "b = 2")) != []
    assert source_context(Location(str(path), 2, "f", "c = 3")) == []


# ------------------------------------------------------------------------------------------------ without columns

WITHOUT_COLUMNS = """\
import json, sys
from nan_detector._source import argument_text, call_expression, here

class Array:
    def __init__(self): self.marks = []
    def _seen(self, *others):
        SEEN.append(here(2))
        return self
    sqrt = exp = __sub__ = __rsub__ = __truediv__ = __neg__ = __getitem__ = __iadd__ = __gt__ = _seen

SEEN = []
x = y = Array()
def log(value): return value._seen_from_here()
Array._seen_from_here = lambda self: SEEN.append(here(3)) or self

x.sqrt()
x - y
x - y / x
x.sqrt() - y
x.sqrt().exp()
x[0]
x > y
x += y
-x
log(
    x - y,
)
out = [(m.lineno, call_expression(m), argument_text(m, 0, None), argument_text(m, 1, None)) for m in SEEN]
print(json.dumps([out, "torch" in sys.modules]))
"""


def test_without_columns_only_what_is_certain_is_said(tmp_path: Path):
    """Python 3.10, or any with `-X no_debug_ranges`: the line alone is known."""
    path = tmp_path / "program.py"
    path.write_text(WITHOUT_COLUMNS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-X", "no_debug_ranges", str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SRC, "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
    )
    found, torch_loaded = json.loads(done.stdout)
    assert not torch_loaded
    first = WITHOUT_COLUMNS.splitlines().index("x.sqrt()") + 1
    assert found == [
        [first, "x.sqrt", None, None],  # without torch nobody knows that `sqrt` is a method of x
        [first + 1, "x - y", "x", "y"],
        [first + 2, "y / x", "y", "x"],
        [first + 2, "x - y / x", "x", "y / x"],
        [first + 3, "x.sqrt", None, None],
        [first + 3, "x.sqrt() - y", "x.sqrt()", "y"],
        [first + 4, None, None, None],  # two calls on the line
        [first + 4, None, None, None],
        [first + 5, "x[0]", "x", None],
        [first + 6, "x > y", "x", "y"],
        [first + 7, "x += y", "x", "y"],
        [first + 8, "-x", "x", None],
        [first + 10, "x - y", "x", "y"],
        [first + 9, "log", "x - y", None],
    ]


# ------------------------------------------------------------------------------------------------ cost


@pytest.mark.campaign
def test_marking_below_five_frames_of_pytorch_is_below_a_microsecond():
    space: dict[str, Any] = {"here": here}
    exec(compile("def f0(): return here()", torch.__file__, "exec"), space)
    exec(compile("def f0_bare(): return len(())", torch.__file__, "exec"), space)
    for i in range(1, 5):
        exec(compile(f"def f{i}(): return f{i - 1}()", torch.__file__, "exec"), space)
        exec(compile(f"def f{i}_bare(): return f{i - 1}_bare()", torch.__file__, "exec"), space)
    n = 20_000
    took = [min(timeit.repeat(space[name], number=n, repeat=7)) / n * 1e6 for name in ("f4", "f4_bare")]
    assert took[0] - took[1] < 1.0


def test_another_threads_parsing_costs_no_answer(monkeypatch: pytest.MonkeyPatch):
    """CPython 3.11 raises SystemError in one of two threads that turn source into a tree at the same time."""
    real, calls = ast.parse, []

    def parse(text: str) -> ast.Module:
        calls.append(text)
        if len(calls) == 1:
            raise SystemError("AST constructor recursion depth mismatch (before=102, after=99)")
        return real(text)

    monkeypatch.setattr(ast, "parse", parse)
    assert isinstance(_syntax.parse("x = f(y)"), ast.Module)
    assert len(calls) == 2
