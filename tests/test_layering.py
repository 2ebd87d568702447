"""Imports point down only, and what must work without torch cannot load it.

A new module is entered in `TABLE`; CONTRIBUTING.md says what belongs to which layer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

PACKAGE = "nan_detector"
SOURCE = Path(__file__).parent.parent / "src" / PACKAGE


class Torch(Enum):
    """Whether a module may load torch, itself or through another module of ours."""

    NEVER = "never"
    INSIDE = "inside functions"
    YES = "yes"


@dataclass(frozen=True)
class Rule:
    layer: int
    torch: Torch
    patterns: tuple[str, ...]


# Names are below `nan_detector`; "_render.*" stands for every module in a folder, "_render" for its __init__.
# The first rule that fits counts.
TABLE = (
    # Layer 0: records, errors, options. Plain data.
    Rule(0, Torch.NEVER, ("_answers", "_config", "_errors", "_on_import", "_record", "_records", "_trace", "_version")),
    # Layer 1: what works on records and source text alone.
    Rule(
        1,
        Torch.NEVER,
        (
            "_before",
            "_causes",
            "_diagnosis",
            "_diagnosis.*",
            "_digest",
            "_early",
            "_early_layers",
            "_early_rates",
            "_early_scale",
            "_early_spikes",
            "_eventlog",
            "_ledger",
            "_loss_text",
            "_notebook",
            "_reading",
            "_rewriting",
            "_run_folder",
            "_schema",
            "_source",
            "_source_text",
            "_syntax",
            "_summary",
            "_summary_loss",
            "_summary_source",
            "_summary_state",
            "_summary_title",
            "_summary_trials",
            "_thinning",
            "_trend",
            "_trial_plan",
            "_trial_samples",
            "_verdict",
        ),
    ),
    # Layer 1: the finite checks, the only place that reads a tensor to the host.
    Rule(1, Torch.YES, ("_finite", "_norms", "_quiet", "_values")),
    # Layer 2: the machinery.
    Rule(
        2,
        Torch.YES,
        (
            "_aftermath",
            "_again",
            "_aliases",
            "_arguments",
            "_bad_results",
            "_bad_weights",
            "_underflow",
            "_births",
            "_book",
            "_brought_in",
            "_at_the_loss",
            "_module_calls",
            "_call_site",
            "_calls",
            "_capsule",
            "_capsule.*",
            "_change",
            "_contained",
            "_damage",
            "_elements",
            "_engine",
            "_evaluation",
            "_events",
            "_explain",
            "_last_writer",
            "_finding",
            "_forewarn",
            "_further",
            "_hazard_edges",
            "_hazard_facts",
            "_hazard_observer",
            "_hazard_scale",
            "_hazards",
            "_state_check",
            "_stored",
            "_gate",
            "_good_state",
            "_gradient_calls",
            "_graph_nodes",
            "_glance",
            "_erased",
            "_looks",
            "_zeroing",
            "_scaled_clip",
            "_held",
            "_hit",
            "_ready",
            "_hyper",
            "_input_names",
            "_isolate",
            "_journal",
            "_judge",
            "_keeper",
            "_kept_inputs",
            "_layers",
            "_lineage",
            "_loss_nodes",
            "_loss_terms",
            "_live",
            "_moment",
            "_naming",
            "_op_values",
            "_opinfo",
            "_optimizer_events",
            "_optimizers",
            "_origin",
            "_patched",
            "_patched_apply",
            "_patched_compile",
            "_patches",
            "_warned_at",
            "_peaks",
            "_put_back",
            "_python_state",
            "_recorder",
            "_ring",
            "_history",
            "_remade",
            "_remedies",
            "_remedies.*",
            "_repair",
            "_replay",
            "_replayed",
            "_respond",
            "_recording",
            "_entry_of_call",
            "_recorded_backward",
            "_recorded_whole",
            "_rng",
            "_roots",
            "_rounds",
            "_run",
            "_run_record",
            "_run_step",
            "_samples",
            "_recurrence",
            "_scaling",
            "_schedulers",
            "_scrub",
            "_scrub_plan",
            "_scrub_slots",
            "_search",
            "_session",
            "_shared_step",
            "_skip",
            "_snapshot",
            "_state",
            "_stepped",
            "_entries",
            "_tape",
            "_tracer",
            "_subclassed",
            "_under_way",
            "_trial_changes",
            "_trial_facts",
            "_trial_fix",
            "_trial_lab",
            "_trials",
            "_retake",
            "_step_calls",
            "_step_changes",
            "_step_trials",
            "_watchers",
            "_written_weights",
        ),
    ),
    # Layer 2: records to text, pages and pictures.
    Rule(2, Torch.NEVER, ("_render", "_render.*")),
    # Layer 3: the detector and its kin, which wire the layers below.
    Rule(3, Torch.YES, ("_auto", "_compiled_calls", "_detect", "_detector", "_guard", "_loose")),
    # Layer 4: ways in from outside: the command line, the demo, a script that nobody changes.
    Rule(4, Torch.INSIDE, ("_bench", "_cli", "_cli.*", "_demo", "_script", "_watch_script")),
    # The demo's trainings are written as a user would write them, torch at the top and all.
    Rule(4, Torch.YES, ("_demo.*",)),
    # The benchmark trains, too.
    Rule(4, Torch.YES, ("_bench.*",)),
    # The names that users see, all of them lazy, and the door of `python -m`.
    Rule(5, Torch.INSIDE, ("", "__main__")),
)

#: Imports that point up, each with the reason why it stays.
UPWARD = {
    ("_records", "_summary"): "print(event) shows the report; the import is inside __str__",
    ("_records", "_render.notebook"): "a notebook shows the report; the import is inside _repr_html_",
}


@dataclass(frozen=True)
class Import:
    module: str
    target: str  # "torch" or a name below the package; "" is the package itself
    line: int
    inside: bool  # in a function, or for type checkers only

    def __str__(self) -> str:
        where = f"{PACKAGE}/{self.module.replace('.', '/') or '__init__'}, line {self.line}"
        return f"{where}: imports {self.target or PACKAGE}"


def rule_of(module: str) -> Rule | None:
    return next((r for r in TABLE if any(fnmatchcase(module, p) for p in r.patterns)), None)


def module_files(source: Path = SOURCE) -> dict[str, Path]:
    """Every module, by its name below the package ("" is the package itself)."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, code: str, modules: set[str], is_package: bool = False) -> list[Import]:
    """The imports of torch and of our own modules, wherever in `code` they stand."""
    return list(_imports(module, ast.parse(code), modules, is_package, inside=False))


def _imports(module: str, node: ast.AST, modules: set[str], is_package: bool, inside: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        hidden = inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for part in child.body:
                yield from _imports(module, ast.Module([part], []), modules, is_package, inside=True)
            for part in child.orelse:
                yield from _imports(module, ast.Module([part], []), modules, is_package, inside)
            continue
        for name in _names(module, child, is_package):
            if (target := _target(name, modules)) is not None:
                yield Import(module, target, getattr(child, "lineno", 0), inside)
        yield from _imports(module, child, modules, is_package, hidden)


def _names(module: str, node: ast.AST, is_package: bool) -> Iterator[str]:
    """Full dotted names that `node` imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            here = [PACKAGE, *([p for p in module.split(".") if p])]
            up = here[: len(here) - node.level + is_package]
            base = ".".join([*up, base] if base else up)
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
        yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def _target(name: str, modules: set[str]) -> str | None:
    if name.partition(".")[0] == "torch":
        return "torch"
    if name.partition(".")[0] != PACKAGE:
        return None
    below = name.partition(".")[2]
    while below and below not in modules and rule_of(below) is None:
        below = below.rpartition(".")[
            0
        ]  # `from nan_detector._records import NaNEvent` names a module and a class in it
    return below


def faults(imports: list[Import]) -> list[str]:
    """What is wrong with `imports`, in sentences."""
    found = []
    for item in imports:
        rule = rule_of(item.module)
        assert rule is not None, "every module is in the table: another test says so"
        if item.target == "torch":
            loads_torch = True
        else:
            target = rule_of(item.target)
            if target is None:
                found.append(f"{item}, which is not in the table of tests/test_layering.py.")
                continue
            if target.layer > rule.layer and (item.module, item.target) not in UPWARD:
                found.append(
                    f"{item}, which is in layer {target.layer}, above its own layer {rule.layer}. "
                    "Move what is shared down, or hand it in from above."
                )
            loads_torch = target.torch is Torch.YES
        if loads_torch and (rule.torch is Torch.NEVER or (rule.torch is Torch.INSIDE and not item.inside)):
            found.append(f"{item}, and it may load torch: {rule.torch.value}.")
    return list(dict.fromkeys(found))  # one import of several names is one fault


MODULES = module_files()


def all_imports(module: str) -> list[Import]:
    path = MODULES[module]
    return imports_of(module, path.read_text(encoding="utf-8"), set(MODULES), path.name == "__init__.py")


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_layer(module: str):
    assert rule_of(module) is not None, (
        f"{MODULES[module].name} is new: enter {module!r} in TABLE of tests/test_layering.py, in the layer that "
        "CONTRIBUTING.md gives for what it does."
    )


@pytest.mark.parametrize("module", [m for m in MODULES if rule_of(m)])
def test_imports_point_down_and_torch_stays_where_it_may_be(module: str):
    wrong = faults(all_imports(module))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("pattern", [p for rule in TABLE for p in rule.patterns])
def test_every_name_in_the_table_is_there(pattern: str):
    assert any(fnmatchcase(module, pattern) for module in MODULES), (
        f"{pattern!r} stands in TABLE, and no module has that name: take it out."
    )


def test_every_upward_import_is_still_needed():
    found = {(i.module, i.target) for m in MODULES for i in all_imports(m)}
    assert set(UPWARD) <= found


def test_no_module_has_two_layers():
    for module in MODULES:
        fitting = [r.layer for r in TABLE if any(fnmatchcase(module, p) for p in r.patterns)]
        assert len(fitting) <= 1, f"{module} is in the table twice, in layers {fitting}."


@pytest.mark.parametrize(
    ("module", "code", "complaint"),
    [
        ("_records", "import torch", "may load torch: never"),
        ("_records", "def f():\n    from torch import nn", "may load torch: never"),
        ("_records", "import torch.nn as nn", "may load torch: never"),
        ("_records", "def f():\n    importlib.import_module('torch.nn')", "may load torch: never"),
        ("_eventlog", "from nan_detector._gate import screen", "in layer 2, above its own layer 1"),
        ("_eventlog", "def f():\n    from nan_detector import _gate", "in layer 2, above its own layer 1"),
        ("_eventlog", "from . import _gate", "in layer 2, above its own layer 1"),
        ("_eventlog", "from ._gate import screen", "in layer 2, above its own layer 1"),
        (
            "_eventlog",
            "if TYPE_CHECKING:\n    from nan_detector._gate import Gate",
            "in layer 2, above its own layer 1",
        ),
        ("_eventlog", "from nan_detector._finite import check", "may load torch: never"),
        ("_render.terminal", "def f():\n    from nan_detector._gate import g", "may load torch: never"),
        ("_render.terminal", "from .._detector import NaNDetector", "in layer 3, above its own layer 2"),
        ("_cli.app", "from nan_detector._detector import NaNDetector", "may load torch: inside functions"),
        ("_cli.app", "class A:\n    import torch", "may load torch: inside functions"),
        ("_cli.app", "try:\n    import torch\nexcept ImportError:\n    pass", "may load torch: inside functions"),
        ("_cli.app", "from nan_detector import NaNDetector", "in layer 5, above its own layer 4"),
        ("_gate", "import nan_detector", "in layer 5, above its own layer 2"),
    ],
)
def test_a_wrong_import_is_seen(module: str, code: str, complaint: str):
    assert any(complaint in fault for fault in faults(imports_of(module, code, set(MODULES)))), code


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("_eventlog", "import json\nfrom nan_detector._records import NaNEvent"),
        ("_eventlog", "import torchvision_like_name"),
        ("_gate", "import torch\nfrom nan_detector._finite import check\nfrom nan_detector import _records"),
        ("_cli.app", "def f():\n    import torch\n    from nan_detector._detector import NaNDetector"),
        ("_cli.app", "if TYPE_CHECKING:\n    import torch"),
        ("_cli.show", "from nan_detector._render.terminal import render\nfrom .app import console"),
    ],
)
def test_a_right_import_is_let_pass(module: str, code: str):
    assert faults(imports_of(module, code, set(MODULES))) == []
