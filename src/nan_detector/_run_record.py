"""The first line of a log: what is watched, with what."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping

import torch

from nan_detector._config import Config
from nan_detector._records import RunRecord
from nan_detector._version import __version__


def run_record(config: Config, models: Mapping[str, torch.nn.Module]) -> RunRecord:
    """The record of a run that begins now.

    Args:
        config: Its options.
        models: The watched models by key.
    """
    return RunRecord(
        started=time.time(),
        package_version=__version__,
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        platform=platform.platform(),
        options={
            "watch": config.watch.value,
            "on_nan": getattr(config.on_nan, "value", "callable"),
            "stop_on_first": config.stop_on_first,
            "grad_norm_warn": config.grad_norm_warn,
            "replay": config.replay.value,
            "history": config.history,
        },
        models=tuple(type(m).__name__ for m in models.values()),
    )
