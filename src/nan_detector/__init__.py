"""Watches PyTorch training cheaply, and says where and why a NaN or Inf was born.

Three ways in: `detect_nan` around code that can be run again, `NaNDetector` always on in any loop, and the
``nan-detector`` command for a script that nobody changes.

Names are loaded when they are first used: ``import nan_detector`` costs next to nothing, and reading a log works
without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from nan_detector._version import __version__

if TYPE_CHECKING:
    from nan_detector._answers import Cost, Hazard, StateProblem
    from nan_detector._detect import detect_nan
    from nan_detector._detector import NaNDetector
    from nan_detector._errors import NonFiniteError, NotAttachedError, OptionError
    from nan_detector._guard import train_with_nan_guard, watch_for_nans
    from nan_detector._records import (
        Cause,
        GradEvent,
        Location,
        LossTerm,
        NaNEvent,
        RunRecord,
        Site,
        StepRow,
        TensorStats,
        Trial,
        WarningRecord,
    )
    from nan_detector._state import is_replaying

__all__ = [
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
]

# A second copy of the imports above, which a test compares: type checkers read those, Python these.
_HOME = {
    "Cause": "_records",
    "Cost": "_answers",
    "GradEvent": "_records",
    "Hazard": "_answers",
    "Location": "_records",
    "LossTerm": "_records",
    "NaNDetector": "_detector",
    "NaNEvent": "_records",
    "NonFiniteError": "_errors",
    "NotAttachedError": "_errors",
    "OptionError": "_errors",
    "RunRecord": "_records",
    "Site": "_records",
    "StateProblem": "_answers",
    "StepRow": "_records",
    "TensorStats": "_records",
    "Trial": "_records",
    "WarningRecord": "_records",
    "detect_nan": "_detect",
    "is_replaying": "_state",
    "train_with_nan_guard": "_guard",
    "watch_for_nans": "_guard",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
