"""What `import nan_detector` must not do: load torch, or anything else that takes long."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"

#: Heavy packages that records, errors and the log have no business with.
HEAVY = ("torch", "numpy", "rich", "typer", "click", "matplotlib", "jinja2", "safetensors", "sklearn", "jsonschema")


def loaded_by(code: str) -> list[str]:
    """The modules that `code` loads in a fresh interpreter."""
    script = f"""
import sys
before = set(sys.modules)
{code}
loaded = sorted(set(sys.modules) - before)
import json
print(json.dumps(loaded))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout.splitlines()[-1])


def heavy(modules: list[str]) -> list[str]:
    return [m for m in modules if m.partition(".")[0] in HEAVY]


def test_the_package_loads_nothing_but_itself():
    modules = loaded_by("import nan_detector")
    assert [m for m in modules if m.startswith("nan_detector")] == ["nan_detector", "nan_detector._version"]
    assert heavy(modules) == []
    assert len(modules) < 40, modules  # importlib and json, not a framework


@pytest.mark.parametrize(
    "name",
    [
        "Cause",
        "GradEvent",
        "Location",
        "NaNEvent",
        "NonFiniteError",
        "NotAttachedError",
        "OptionError",
        "RunRecord",
        "Site",
        "StepRow",
        "TensorStats",
        "Trial",
        "WarningRecord",
        "__version__",
    ],
)
def test_records_and_errors_need_no_torch(name: str):
    assert heavy(loaded_by(f"import nan_detector\nassert nan_detector.{name}")) == []


def test_from_imports_are_lazy_too():
    assert heavy(loaded_by("from nan_detector import NaNEvent, NonFiniteError")) == []


def test_looking_around_loads_nothing():
    modules = loaded_by("import nan_detector\ndir(nan_detector)\nhasattr(nan_detector, 'nonsense')\nrepr(nan_detector)")
    assert [m for m in modules if m.startswith("nan_detector")] == ["nan_detector", "nan_detector._version"]


@pytest.mark.parametrize(
    "module", ["_records", "_errors", "_config", "_trace", "_eventlog", "_schema", "_reading", "_digest"]
)
def test_what_a_laptop_needs_loads_no_torch(module: str):
    assert heavy(loaded_by(f"import nan_detector.{module}")) == []


def test_a_log_is_read_and_shown_without_torch(tmp_path: Path):
    """As on a laptop: torch cannot be imported at all."""
    code = f"""
sys.modules["torch"] = None  # an import of it now raises
from nan_detector import NaNEvent
from nan_detector._eventlog import EventLog, events, read_log
event = NaNEvent(event_id="a", status="final", step=87, phase="forward", severity="error", op="sqrt")
with EventLog({str(tmp_path)!r}) as log:
    log.write(event, sync=True)
assert events(read_log({str(tmp_path)!r})) == [event]
assert "87" in str(event)
del sys.modules["torch"]
"""
    assert heavy(loaded_by(code)) == []


# -- how long it takes ------------------------------------------------------------------------------------------------


def cpu_ms(*arguments: str, runs: int = 5) -> float:
    """Milliseconds of processor time that a Python process takes, a median: a busy machine changes it little."""
    resource = pytest.importorskip("resource")  # not on Windows
    took = []
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": str(SRC)},
            capture_output=True,
            timeout=60,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime))
    return statistics.median(took)


@pytest.mark.alone
def test_the_package_loads_in_less_than_60_ms():
    assert cpu_ms("-c", "import nan_detector") - cpu_ms("-c", "pass") < 60


@pytest.mark.alone
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["bench", "--help"]])
def test_the_command_answers_in_less_than_400_ms(arguments: list[str]):
    assert cpu_ms("-m", "nan_detector", *arguments, runs=3) < 400


def test_help_loads_neither_torch_nor_what_draws():
    modules = heavy(loaded_by("from nan_detector._cli.app import main\nassert main(['--help']) == 0"))
    assert {m.partition(".")[0] for m in modules} <= {"typer", "click"}
