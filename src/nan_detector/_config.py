"""The detector's options: one frozen record, checked once, where the user can still see the mistake."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from nan_detector._errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

    from nan_detector._records import NaNEvent, WarningRecord


class Watch(str, Enum):
    """How closely a run is watched."""

    STEP = "step"  # one gate before each optimizer step
    LAYERS = "layers"  # also every module's output, on the device
    OPS = "ops"  # every operation of every step


class Policy(str, Enum):
    """What happens to a step that would poison the weights."""

    STOP = "stop"
    RAISE = "raise"
    WARN = "warn"
    SKIP = "skip"
    ROLLBACK = "rollback"


class Protect(str, Enum):
    """How far the weights are protected."""

    GATE = "gate"  # a bad step is refused before it is taken
    FULL = "full"  # also what the optimizer's own arithmetic does to them is undone


class Replay(str, Enum):
    """Whether a bad step is run again to find the birthplace."""

    AUTO = "auto"
    OFF = "off"


PolicyOption = str | Callable[["NaNEvent"], str] | None


@dataclass(frozen=True)
class Config:
    """Checked options of one detector. Field names are those of ``NaNDetector``'s signature."""

    watch: Watch
    on_nan: Policy | Callable[[NaNEvent], str]
    stop_on_first: bool
    check_inputs: bool
    check_backward: bool
    grad_norm_warn: float
    skip_types: tuple[type, ...]
    max_events: int
    verbose: bool
    replay: Replay
    protect: Protect
    max_skips: int | float | None
    snapshot_every: int | None
    snapshot_on_host: bool
    log_dir: str | None
    capsule: bool
    capsule_bytes: int
    history: int
    history_bytes: int
    max_hold_bytes: int
    replay_budget_s: float
    on_event: Callable[[NaNEvent], object] | None
    on_warning: Callable[[WarningRecord], object] | None
    hazards_every: int | None
    also_watch: Any  # further modules by key


def build_config(
    *,
    watch: str,
    on_nan: PolicyOption,
    stop_on_first: bool,
    check_inputs: bool,
    check_backward: bool,
    grad_norm_warn: float,
    skip_types: tuple[type, ...],
    max_events: int,
    verbose: bool,
    replay: str,
    protect: str,
    max_skips: int | float | None,
    snapshot_every: int | None,
    snapshot_on_host: bool,
    log_dir: str | Path | None,
    capsule: bool,
    capsule_bytes: int,
    history: int,
    history_bytes: int,
    max_hold_bytes: int,
    replay_budget_s: float,
    on_event: Callable[[NaNEvent], object] | None,
    on_warning: Callable[[WarningRecord], object] | None,
    hazards_every: int | None,
    also_watch: Any,
) -> Config:
    """Check every option and fold them into a `Config`.

    Raises:
        OptionError: An option cannot be used; the message names it, its value and the way out.
    """
    return Config(
        watch=Watch(_one_of("watch", watch, [w.value for w in Watch])),
        on_nan=_policy(on_nan, stop_on_first),
        stop_on_first=_boolean("stop_on_first", stop_on_first),
        check_inputs=_boolean("check_inputs", check_inputs),
        check_backward=_boolean("check_backward", check_backward),
        grad_norm_warn=_positive("grad_norm_warn", grad_norm_warn, allow_inf=True),
        skip_types=_types("skip_types", skip_types),
        max_events=_count("max_events", max_events),
        verbose=_boolean("verbose", verbose),
        replay=Replay(_one_of("replay", replay, [r.value for r in Replay])),
        protect=Protect(_one_of("protect", protect, [p.value for p in Protect])),
        max_skips=_max_skips(max_skips, _policy(on_nan, stop_on_first)),
        snapshot_every=_snapshot_every(snapshot_every, on_nan),
        snapshot_on_host=_snapshot_on_host(snapshot_on_host, on_nan),
        log_dir=None if log_dir is None else _path("log_dir", log_dir),
        capsule=_boolean("capsule", capsule),
        capsule_bytes=_count("capsule_bytes", capsule_bytes),
        history=_count("history", history),
        history_bytes=_count("history_bytes", history_bytes),
        max_hold_bytes=_count("max_hold_bytes", max_hold_bytes, least=0),
        replay_budget_s=_positive("replay_budget_s", replay_budget_s, allow_inf=True),
        on_event=_callback("on_event", on_event),
        on_warning=_callback("on_warning", on_warning),
        hazards_every=None if hazards_every is None else _every("hazards_every", hazards_every),
        also_watch=_further("also_watch", also_watch),
    )


def policy_named(name: object, source: str) -> Policy:
    """The policy a user named, as a value of ``on_nan`` or as the answer of an ``on_nan`` callable.

    Raises:
        OptionError: The name is unknown.
    """
    return Policy(_one_of(source, name, [p.value for p in Policy]))


def _policy(on_nan: PolicyOption, stop_on_first: bool) -> Policy | Callable[[NaNEvent], str]:
    if on_nan is None:
        return Policy.STOP if stop_on_first else Policy.SKIP
    if callable(on_nan):
        return on_nan
    return policy_named(on_nan, "on_nan")


def _max_skips(value: object, policy: object) -> int | float | None:
    if value is None:
        return None
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    share = isinstance(value, float) and 0.0 < value < 1.0
    if isinstance(value, (int, float)) and (number or share):
        if isinstance(policy, Policy) and policy not in (Policy.SKIP, Policy.ROLLBACK):
            raise OptionError(
                f"max_skips={value!r} has no effect with on_nan={policy.value!r}, which does not go on without a bad "
                "step. Use on_nan='skip' or 'rollback', or leave max_skips at None."
            )
        return value
    raise OptionError(
        f"max_skips={value!r} must be a whole number of at least 1 (steps in a row), a share between 0.0 and 1.0 (of "
        "the last 100 steps), or None for no limit."
    )


def _snapshot_on_host(value: object, on_nan: PolicyOption) -> bool:
    on_host = _boolean("snapshot_on_host", value)
    if on_host and not (callable(on_nan) or on_nan == Policy.ROLLBACK.value):
        raise OptionError(
            f"snapshot_on_host=True has no effect with on_nan={on_nan!r}: copies are made for 'rollback' and for a "
            "callable only. Use one of these, or leave snapshot_on_host at False."
        )
    return on_host


def _snapshot_every(value: object, on_nan: PolicyOption) -> int | None:
    if value is None and on_nan == Policy.ROLLBACK.value:
        raise OptionError("snapshot_every=None keeps no state that on_nan='rollback' could go back to; give a number.")
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise OptionError(f"snapshot_every={value!r} must be a whole number of at least 1, or None to keep no state.")


def _listed(names: Any) -> str:
    return ", ".join(repr(n) for n in names)


def _one_of(name: str, value: object, allowed: Any) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    raise OptionError(f"{name}={value!r} is not one of {_listed(allowed)}.")


def _boolean(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise OptionError(f"{name}={value!r} must be True or False.")


def _count(name: str, value: object, least: int = 1) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise OptionError(f"{name}={value!r} must be a whole number of at least {least}.")


def _every(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise OptionError(f"{name}={value!r} must be a whole number of at least 1 (steps), or None for never.")


def _further(name: str, value: Any) -> dict[str, Any]:
    """Further modules by key; what a module is cannot be asked without torch, so what it can do is."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        found = {str(k): m for k, m in value.items()}
    elif isinstance(value, (list, tuple)):
        found = {f"{name}[{i}]": m for i, m in enumerate(value)}
    else:
        found = {name: value}
    for m in found.values():
        if isinstance(m, type) or not (hasattr(m, "named_modules") and hasattr(m, "named_buffers")):
            raise OptionError(f"{name}={_short(value)} must be a torch.nn.Module, or a list or dict of them, or None.")
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _positive(name: str, value: object, *, allow_inf: bool) -> float:
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if number > 0 and (math.isfinite(number) or allow_inf):
        return number
    raise OptionError(
        f"{name}={value!r} must be a number above 0" + (" (float('inf') turns it off)." if allow_inf else ".")
    )


def _types(name: str, value: object) -> tuple[type, ...]:
    if isinstance(value, (tuple, list)) and all(isinstance(t, type) for t in value):
        return tuple(value)
    raise OptionError(f"{name}={value!r} must be a tuple of module classes, such as (torch.nn.Dropout,).")


def _path(name: str, value: object) -> str:
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if isinstance(path, str):
        return path
    raise OptionError(f"{name}={value!r} must be a folder's path (str or pathlib.Path), or None to write nothing.")


def _callback(name: str, value: Any) -> Any:
    if value is None or callable(value):
        return value
    raise OptionError(f"{name}={value!r} must be a callable that takes the record, or None.")
