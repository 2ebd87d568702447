"""The public names: one list, and everything that must agree with it."""

from __future__ import annotations

import ast
import inspect
import types
from importlib import import_module
from pathlib import Path

import pytest

import nan_detector

SOURCE = Path(nan_detector.__file__).parent

PROMISED = {
    "Cause",
    "Cost",
    "GradEvent",
    "Hazard",
    "Location",
    "LossTerm",
    "NaNDetector",
    "NaNEvent",
    "NonFiniteError",
    "NotAttachedError",
    "OptionError",
    "RunRecord",
    "Site",
    "StateProblem",
    "StepRow",
    "TensorStats",
    "Trial",
    "WarningRecord",
    "__version__",
    "detect_nan",
    "is_replaying",
    "train_with_nan_guard",
    "watch_for_nans",
}


def imported_for_type_checkers() -> dict[str, str]:
    """name -> module, from the `if TYPE_CHECKING` block of the package."""
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    blocks = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    assert len(blocks) == 1
    return {
        alias.asname or alias.name: node.module or ""
        for node in blocks[0].body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_the_list_is_what_was_promised_and_sorted():
    assert set(nan_detector.__all__) == PROMISED
    assert nan_detector.__all__ == sorted(nan_detector.__all__)


def test_dir_shows_the_list():
    assert dir(nan_detector) == nan_detector.__all__


def test_type_checkers_and_python_look_in_the_same_place():
    lazy = {name: f"nan_detector.{home}" for name, home in nan_detector._HOME.items()}
    assert imported_for_type_checkers() == lazy
    assert set(lazy) | {"__version__"} == PROMISED


@pytest.mark.parametrize("name", sorted(PROMISED - {"__version__"}))
def test_each_name_is_there_and_documented(name: str):
    value = getattr(nan_detector, name)
    home = import_module(f"nan_detector.{nan_detector._HOME[name]}")
    assert value is getattr(home, name)
    assert value is getattr(nan_detector, name), "the second access must give the same object as the first"
    assert not isinstance(value, types.ModuleType)
    assert value.__module__.startswith("nan_detector.")
    assert inspect.getdoc(value)


def test_no_public_name_is_also_a_module():
    """Importing a module puts it on the package under its name: it would cover the function of that name."""
    modules = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not modules & PROMISED


def test_public_modules_are_named_so():
    public = {p.stem for p in SOURCE.iterdir() if not p.name.startswith(("_", "."))}
    assert public <= {"integrations", "py"}  # py.typed is a marker, not a module


def test_an_unknown_name_is_refused_by_name():
    with pytest.raises(AttributeError, match=r"^module 'nan_detector' has no attribute 'NanDetector'$"):
        nan_detector.NanDetector  # noqa: B018  # the access is the test


def test_the_version_is_that_of_the_changelog():
    changelog = (Path(__file__).parent.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{nan_detector.__version__}]" in changelog
