"""Every option is checked once, and every refusal names the option, the value and the way out."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nan_detector._config import Policy, Protect, Replay, Watch, build_config, policy_named
from nan_detector._errors import OptionError

DEFAULTS: dict[str, Any] = {
    "watch": "step",
    "on_nan": None,
    "stop_on_first": True,
    "check_inputs": True,
    "check_backward": False,
    "grad_norm_warn": 100.0,
    "skip_types": (),
    "max_events": 100,
    "verbose": True,
    "replay": "auto",
    "protect": "gate",
    "max_skips": None,
    "snapshot_every": 100,
    "snapshot_on_host": False,
    "log_dir": None,
    "capsule": False,
    "capsule_bytes": 2**30,
    "history": 1000,
    "history_bytes": 2 * 2**20,
    "max_hold_bytes": 64 * 2**20,
    "replay_budget_s": 60.0,
    "on_event": None,
    "on_warning": None,
    "hazards_every": None,
    "also_watch": None,
}


def config(**changed: Any):
    return build_config(**{**DEFAULTS, **changed})


def refusal(**changed: Any) -> str:
    with pytest.raises(OptionError) as caught:
        config(**changed)
    return str(caught.value)


def test_the_defaults_are_accepted_as_they_are():
    built = config()
    assert built.watch is Watch.STEP
    assert built.replay is Replay.AUTO
    for name in ("check_inputs", "check_backward", "grad_norm_warn", "max_events", "history", "max_hold_bytes"):
        assert getattr(built, name) == DEFAULTS[name]


@pytest.mark.parametrize(("stop_on_first", "policy"), [(True, Policy.STOP), (False, Policy.SKIP)])
def test_without_on_nan_stop_on_first_decides(stop_on_first: bool, policy: Policy):
    assert config(stop_on_first=stop_on_first).on_nan is policy


@pytest.mark.parametrize("stop_on_first", [True, False])
@pytest.mark.parametrize("name", ["stop", "raise", "warn", "skip", "rollback"])
def test_a_named_policy_wins_over_stop_on_first(name: str, stop_on_first: bool):
    assert config(on_nan=name, stop_on_first=stop_on_first).on_nan is Policy(name)


def test_a_callable_policy_is_kept_and_its_answer_checked_later():
    def decide(event: object) -> str:
        return "skip"

    assert config(on_nan=decide).on_nan is decide
    assert policy_named("skip", "on_nan's answer") is Policy.SKIP
    with pytest.raises(
        OptionError, match=r"^on_nan's answer='ignore' is not one of 'stop', 'raise', 'warn', 'skip', 'rollback'\.$"
    ):
        policy_named("ignore", "on_nan's answer")


@pytest.mark.parametrize("name", ["step", "layers", "ops"])
def test_each_level_is_known(name: str):
    assert config(watch=name).watch.value == name


@pytest.mark.parametrize("log_dir", ["runs/today", Path("runs/today")])
def test_a_folder_may_be_a_string_or_a_path(log_dir: object):
    assert config(log_dir=log_dir).log_dir == str(Path("runs/today"))


def test_a_list_of_module_classes_becomes_a_tuple():
    assert config(skip_types=[torch.nn.Dropout, torch.nn.ReLU]).skip_types == (torch.nn.Dropout, torch.nn.ReLU)


def test_further_modules_have_keys():
    first, second = torch.nn.Linear(1, 1), torch.nn.ReLU()
    assert config(also_watch=first).also_watch == {"also_watch": first}
    assert config(also_watch=[first, second]).also_watch == {"also_watch[0]": first, "also_watch[1]": second}
    assert config(also_watch={"ema": first}).also_watch == {"ema": first}
    assert config().also_watch == {}


@pytest.mark.parametrize("name", ["grad_norm_warn", "replay_budget_s"])
def test_infinity_turns_a_threshold_off(name: str):
    assert getattr(config(**{name: math.inf}), name) == math.inf


def test_zero_bytes_may_be_held():
    assert config(max_hold_bytes=0).max_hold_bytes == 0


@pytest.mark.parametrize("value", [None, 1, 50, 0.01, 0.99])
def test_skips_are_limited_by_number_or_by_share(value: float | int | None):
    assert config(max_skips=value, on_nan="skip").max_skips == value


def test_an_option_without_effect_is_refused_and_the_rest_taken():
    def decide(event: object) -> str:
        return "skip"

    for on_nan in ("skip", "rollback", decide):
        assert config(on_nan=on_nan, max_skips=3).max_skips == 3
    assert config(stop_on_first=False, max_skips=3).on_nan is Policy.SKIP
    for on_nan in ("rollback", decide):
        assert config(on_nan=on_nan, snapshot_on_host=True).snapshot_on_host


def test_rollback_needs_a_number_of_steps():
    assert config(on_nan="rollback").snapshot_every == 100
    assert config(on_nan="rollback", snapshot_every=7).snapshot_every == 7
    assert config(on_nan="skip", snapshot_every=None).snapshot_every is None


@pytest.mark.parametrize("value", ["gate", "full"])
def test_protection_is_known(value: str):
    assert config(protect=value).protect is Protect(value)


def test_the_record_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().verbose = False


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"watch": "layer"}, "watch='layer' is not one of 'step', 'layers', 'ops'."),
        ({"watch": None}, "watch=None is not one of 'step', 'layers', 'ops'."),
        ({"watch": ["step"]}, "watch=['step'] is not one of 'step', 'layers', 'ops'."),
        ({"on_nan": "ignore"}, "on_nan='ignore' is not one of 'stop', 'raise', 'warn', 'skip', 'rollback'."),
        ({"on_nan": 3}, "on_nan=3 is not one of 'stop', 'raise', 'warn', 'skip', 'rollback'."),
        (
            {"on_nan": "rollback", "snapshot_every": None},
            "snapshot_every=None keeps no state that on_nan='rollback' could go back to; give a number.",
        ),
        ({"snapshot_every": 0}, "snapshot_every=0 must be a whole number of at least 1, or None to keep no state."),
        ({"snapshot_every": 0.5}, "snapshot_every=0.5 must be a whole number of at least 1, or None to keep no state."),
        ({"snapshot_on_host": 1}, "snapshot_on_host=1 must be True or False."),
        *(
            (
                {"max_skips": value},
                f"max_skips={value!r} must be a whole number of at least 1 (steps in a row), a share between 0.0 and "
                "1.0 (of the last 100 steps), or None for no limit.",
            )
            for value in (0, -1, True, 1.0, 0.0, math.nan, "3")
        ),
        *(
            (
                {"max_skips": 3, "on_nan": on_nan},
                f"max_skips=3 has no effect with on_nan={policy!r}, which does not go on without a bad step. "
                "Use on_nan='skip' or 'rollback', or leave max_skips at None.",
            )
            for on_nan, policy in ((None, "stop"), ("stop", "stop"), ("raise", "raise"), ("warn", "warn"))
        ),
        (
            {"snapshot_on_host": True, "on_nan": "skip"},
            "snapshot_on_host=True has no effect with on_nan='skip': copies are made for 'rollback' and for a callable "
            "only. Use one of these, or leave snapshot_on_host at False.",
        ),
        ({"protect": "none"}, "protect='none' is not one of 'gate', 'full'."),
        (
            {"capsule": "yes"},
            "capsule='yes' must be True or False.",
        ),
        (
            {"capsule_bytes": 0},
            "capsule_bytes=0 must be a whole number of at least 1.",
        ),
        ({"replay": True}, "replay=True is not one of 'auto', 'off'."),
        ({"stop_on_first": 1}, "stop_on_first=1 must be True or False."),
        ({"check_inputs": "yes"}, "check_inputs='yes' must be True or False."),
        ({"check_backward": None}, "check_backward=None must be True or False."),
        ({"verbose": 0}, "verbose=0 must be True or False."),
        ({"grad_norm_warn": 0}, "grad_norm_warn=0 must be a number above 0 (float('inf') turns it off)."),
        ({"grad_norm_warn": None}, "grad_norm_warn=None must be a number above 0 (float('inf') turns it off)."),
        ({"grad_norm_warn": True}, "grad_norm_warn=True must be a number above 0 (float('inf') turns it off)."),
        ({"grad_norm_warn": math.nan}, "grad_norm_warn=nan must be a number above 0 (float('inf') turns it off)."),
        ({"replay_budget_s": -1.0}, "replay_budget_s=-1.0 must be a number above 0 (float('inf') turns it off)."),
        ({"max_events": 0}, "max_events=0 must be a whole number of at least 1."),
        ({"max_events": 2.0}, "max_events=2.0 must be a whole number of at least 1."),
        ({"history": True}, "history=True must be a whole number of at least 1."),
        ({"history_bytes": 0}, "history_bytes=0 must be a whole number of at least 1."),
        ({"max_hold_bytes": -1}, "max_hold_bytes=-1 must be a whole number of at least 0."),
        (
            {"skip_types": ("Dropout",)},
            "skip_types=('Dropout',) must be a tuple of module classes, such as (torch.nn.Dropout,).",
        ),
        (
            {"skip_types": int},
            "skip_types=<class 'int'> must be a tuple of module classes, such as (torch.nn.Dropout,).",
        ),
        (
            {"log_dir": 7},
            "log_dir=7 must be a folder's path (str or pathlib.Path), or None to write nothing.",
        ),
        ({"on_event": "print"}, "on_event='print' must be a callable that takes the record, or None."),
        ({"on_warning": 1}, "on_warning=1 must be a callable that takes the record, or None."),
        ({"hazards_every": 0}, "hazards_every=0 must be a whole number of at least 1 (steps), or None for never."),
        (
            {"hazards_every": True},
            "hazards_every=True must be a whole number of at least 1 (steps), or None for never.",
        ),
        (
            {"also_watch": "ema"},
            "also_watch='ema' must be a torch.nn.Module, or a list or dict of them, or None.",
        ),
        (
            {"also_watch": [None]},
            "also_watch=[None] must be a torch.nn.Module, or a list or dict of them, or None.",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_refusal_says_what_to_do(changed: dict[str, Any], message: str):
    assert refusal(**changed) == message


@given(st.sampled_from(sorted(DEFAULTS)), st.none() | st.booleans() | st.integers() | st.floats() | st.text())
def test_any_value_is_either_taken_or_refused_by_name(name: str, value: object):
    """Never another exception, and the message always begins with what the user typed."""
    try:
        config(**{name: value})
    except OptionError as error:
        assert str(error).startswith(f"{name}=")
