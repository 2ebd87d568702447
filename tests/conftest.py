"""What holds for every test: bugs of our own are raised, and nothing is left behind in the process."""

from __future__ import annotations

import os
from collections.abc import Iterator

# In a user's run our own bug is logged and the training goes on; here it must be seen.
os.environ["NAN_DETECTOR_STRICT"] = "1"
os.environ.pop("NAN_DETECTOR", None)

import pytest
import torch
from hypothesis import HealthCheck, settings

from _footprint import footprint, left_behind

torch.set_num_threads(1)

# A time limit per example fails on a busy machine for no reason of ours.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(torch.compiler, "set_stance"):
        # PyTorch before 2.6 warns of what it calls itself, in checkpointing and in SequentialLR.
        config.addinivalue_line("filterwarnings", r"ignore:`torch\.cpu\.amp\.autocast:FutureWarning")
        config.addinivalue_line("filterwarnings", r"ignore:The epoch parameter in `scheduler:UserWarning")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After each test: every hook, patch, mode, thread and setting is what it was before."""
    before = footprint()
    yield
    if leftovers := left_behind(before):
        pytest.fail("This test left something behind.\n  " + "\n  ".join(leftovers), pytrace=False)
