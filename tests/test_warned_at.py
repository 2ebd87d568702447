"""What PyTorch warns of within a recorded call is told at the user's line, as if nobody recorded it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nan_detector import NaNDetector, detect_nan

Told = tuple[str, int]


class Spread(nn.Module):
    """Warns in its forward, of a line that is not the loop's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + torch.std(torch.ones(1)).isnan()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    y = model(torch.ones(2, 3))
    torch.std(torch.ones(1))
    torch.ones(1).var(0)
    F.mse_loss(y, torch.zeros(2))  # warns for its caller
    F.softmax(y)  # and this for the caller of its caller
    y.mean().backward()
    optimizer.step()


@contextlib.contextmanager
def watched(how: str, model: nn.Module) -> Iterator[None]:
    if how == "bare":
        yield
    elif how == "detect_nan":
        with detect_nan():
            yield
    elif how == "twice":
        with NaNDetector(model, verbose=False), NaNDetector(model, verbose=False):
            yield
    else:
        with NaNDetector(model, watch=how, verbose=False):
            yield


def told(how: str, prepare: Callable[[], object], model: nn.Module | None = None) -> list[Told]:
    """File and line of each warning of two steps."""
    model = model or nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    globals().pop("__warningregistry__", None)  # as in a program that has just begun
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        prepare()
        with watched(how, model):
            for _ in range(2):
                step(model, optimizer)
    return [(w.filename, w.lineno) for w in shown]


FILTERS: dict[str, Callable[[], object]] = {
    "always": lambda: warnings.simplefilter("always"),
    "default": lambda: warnings.simplefilter("default"),
    "once": lambda: warnings.simplefilter("once"),
    "module": lambda: warnings.simplefilter("module"),
    "ignore": lambda: warnings.simplefilter("ignore"),
    "ignored here": lambda: (
        warnings.simplefilter("always"),
        warnings.filterwarnings("ignore", module=__name__.replace(".", r"\.")),
    ),
    "one text ignored": lambda: (warnings.simplefilter("always"), warnings.filterwarnings("ignore", "std")),
}


@pytest.mark.parametrize("how", ["step", "layers", "ops", "detect_nan", "twice"])
@pytest.mark.parametrize("name", list(FILTERS))
def test_each_warning_is_told_where_and_as_often_as_without_us(name: str, how: str) -> None:
    bare = told("bare", FILTERS[name])
    assert told(how, FILTERS[name]) == bare
    assert {file for file, _ in bare} <= {__file__}
    expected = {"always": 8, "default": 4, "once": 4, "module": 4, "one text ignored": 6}
    assert len(bare) == expected.get(name, 0)


@pytest.mark.parametrize("how", ["step", "ops", "detect_nan"])
def test_a_warning_in_a_forward_is_that_of_its_line(how: str) -> None:
    assert told(how, FILTERS["always"], Spread()) == told("bare", FILTERS["always"], Spread())


def test_a_warning_that_is_made_an_error_here_is_raised_here() -> None:
    model = nn.Linear(3, 1)
    with warnings.catch_warnings(), NaNDetector(model, verbose=False):
        warnings.simplefilter("always")
        warnings.filterwarnings("error", module=__name__.replace(".", r"\."))
        with pytest.raises(UserWarning, match="degrees of freedom"):
            torch.std(torch.ones(1) + model.bias.detach())


def test_what_others_warn_of_is_left_alone() -> None:
    model = nn.Linear(3, 1)
    with warnings.catch_warnings(record=True) as shown, NaNDetector(model, verbose=False):
        warnings.simplefilter("always")
        warnings.warn("mine", stacklevel=1)
    [mine] = shown
    assert str(mine.message) == "mine" and mine.filename == __file__


def test_whoever_puts_something_around_it_keeps_it() -> None:
    before = warnings._showwarnmsg
    model = nn.Linear(3, 1)
    with NaNDetector(model, verbose=False):
        inner = warnings._showwarnmsg
        assert inner is not before
        warnings._showwarnmsg = around = lambda shown: inner(shown)
    assert warnings._showwarnmsg is around
    assert told("bare", FILTERS["always"]) == told("step", FILTERS["always"])
    warnings._showwarnmsg = inner
    with NaNDetector(model, verbose=False):
        pass
    assert warnings._showwarnmsg is before
