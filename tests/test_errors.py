"""The exception tree: what users can catch, and that nothing is lost when an error crosses a process."""

from __future__ import annotations

import copy
import pickle

import pytest

from nan_detector._errors import CapsuleError, NonFiniteError, NotAttachedError, OptionError, ReplayRefused
from nan_detector._records import Location, NaNEvent

EVENT = NaNEvent(
    event_id="a1",
    status="final",
    step=87,
    phase="forward",
    severity="error",
    op="sqrt",
    location=Location("models/norm.py", 41, "forward", "return x / torch.sqrt(var)"),
)


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (NonFiniteError, FloatingPointError),
        (NonFiniteError, ArithmeticError),
        (OptionError, ValueError),
        (CapsuleError, ValueError),
        (NotAttachedError, RuntimeError),
        (ReplayRefused, RuntimeError),
    ],
)
def test_each_error_is_caught_by_its_builtin_base(error: type[Exception], base: type[Exception]):
    with pytest.raises(base):
        raise error("it happened")


def test_the_error_carries_its_event():
    error = NonFiniteError("NaN at step 87", EVENT)
    assert error.event is EVENT
    assert str(error) == "NaN at step 87"
    assert NonFiniteError("no event known").event is None


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_event_survives_pickling(protocol: int):
    error = pickle.loads(pickle.dumps(NonFiniteError("NaN at step 87", EVENT), protocol))
    assert type(error) is NonFiniteError
    assert (str(error), error.event) == ("NaN at step 87", EVENT)


def test_the_event_survives_copying():
    error = copy.deepcopy(NonFiniteError("NaN at step 87", EVENT))
    assert (str(error), error.event) == ("NaN at step 87", EVENT)


def test_a_subclass_stays_itself_when_pickled():
    error = pickle.loads(pickle.dumps(Special("worse", EVENT)))
    assert type(error) is Special
    assert error.event == EVENT


class Special(NonFiniteError):
    """At module level, where pickle can find it."""
